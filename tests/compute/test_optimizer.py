"""The optimisers: RMSprop with epsilon on either side of the root, and moments that come back in place."""

import copy

import pytest
import torch
from torch import nn

from a2c.compute.optimizer import InsideRMSprop, load_optimizer, make_optimizer
from a2c.config.config import Config


def net(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """Take steps along random gradients; the parameters after each."""
    draw, after = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
        after.append([p.detach().clone() for p in model.parameters()])
    return after


@pytest.mark.parametrize("inside", [False, True])
def test_make_optimizer_rmsprop_by_hand(inside):
    config = Config(
        optimizer="rmsprop", learning_rate=0.1, rmsprop_decay=0.9, rmsprop_eps=0.04, rmsprop_eps_inside=inside
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model, config)
    at, square = 0.0, 0.0
    for gradient in (2.0, -1.0, 0.5):
        model.weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        at -= 0.1 * gradient / ((square + 0.04) ** 0.5 if inside else square**0.5 + 0.04)
        assert model.weight.item() == pytest.approx(at, rel=1e-5)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_make_optimizer_makes_the_moments_of_plain_torch(kind):
    config = Config(optimizer=kind, learning_rate=0.1)
    ours, plain = net(), net()
    reference = (
        torch.optim.Adam(plain.parameters(), lr=0.1, eps=config.adam_eps)
        if kind == "adam"
        else torch.optim.RMSprop(plain.parameters(), lr=0.1, alpha=config.rmsprop_decay, eps=config.rmsprop_eps)
    )
    mine, theirs = steps(ours, make_optimizer(ours, config), 4), steps(plain, reference, 4)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "rmsprop"}, {"optimizer": "rmsprop", "rmsprop_eps_inside": True}]
)
def test_load_optimizer_continues_in_place_where_it_was_saved(settings):
    config = Config(learning_rate=0.1, **settings)
    straight = net()
    expected = steps(straight, make_optimizer(straight, config), 6)
    first = net()
    optimizer = make_optimizer(first, config)
    steps(first, optimizer, 3)
    second = copy.deepcopy(first)
    fresh = make_optimizer(second, config)
    places = [value.data_ptr() for moments in fresh.state.values() for value in moments.values()]
    load_optimizer(fresh, optimizer.state_dict())
    assert places == [value.data_ptr() for moments in fresh.state.values() for value in moments.values()]
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        [torch.randn(p.shape, generator=draw) for p in second.parameters()]
    for after in expected[3:]:
        for parameter in second.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        fresh.step()
        assert all(torch.equal(a, p) for a, p in zip(after, second.parameters(), strict=True))


def test_load_optimizer_refuses_moments_of_another_network_or_optimizer():
    config = Config()
    state = make_optimizer(nn.Linear(3, 1), config).state_dict()
    with pytest.raises(ValueError, match="do not fit the network"):
        load_optimizer(make_optimizer(net(), config), state)
    with pytest.raises(ValueError, match="do not fit the network"):
        load_optimizer(make_optimizer(net(), Config(optimizer="rmsprop")), make_optimizer(net(), config).state_dict())
    with pytest.raises(ValueError, match="do not fit the network"):
        load_optimizer(make_optimizer(net(), config), {"state": {}, "param_groups": []})


def test_make_optimizer_adds_epsilon_on_the_chosen_side():
    assert isinstance(make_optimizer(net(), Config(optimizer="rmsprop", rmsprop_eps_inside=True)), InsideRMSprop)
    assert type(make_optimizer(net(), Config(optimizer="rmsprop"))) is torch.optim.RMSprop
