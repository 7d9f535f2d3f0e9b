"""From experience to (states, actions, returns): both forms and their types."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from experience import GAMMA, Toy, blank, random_rollout, window
from torch import Tensor
from toys import spaces

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.learner import Learner
from a2c.rollout import Rollout
from a2c.transitions import Experience, unpack_batch


@pytest.mark.parametrize("seed", range(10))
def test_unpack_batch_of_a_list_equals_that_of_a_rollout(seed):
    steps, envs = 5, 4
    rollout, net = random_rollout(steps, envs, seed), Toy()
    transitions = [window(rollout, t, n, steps - t) for t in range(steps) for n in range(envs)]
    assert all(transitions)
    # A window of usual length may leave its length to the argument.
    transitions = [e._replace(reward_steps=None) if e.reward_steps == steps else e for e in transitions]
    as_list = unpack_batch(transitions, net, gamma=GAMMA, reward_steps=steps)
    as_rollout = unpack_batch(rollout, net, gamma=GAMMA, gae_lambda=1.0)
    assert torch.equal(as_list[0], as_rollout[0])
    assert torch.equal(as_list[1], as_rollout[1])
    torch.testing.assert_close(as_list[2], as_rollout[2], rtol=1e-5, atol=1e-4)


def test_unpack_batch_bootstraps_from_values_final_and_next_observations():
    # One environment, V(s) = s[0], lambda = 0: so every step shows its own bootstrap.
    rollout = blank(3, 1)
    rollout.values = torch.tensor([[10.0], [20.0], [30.0]])
    rollout.next_obs[0, 0] = 40
    rollout.truncated[1, 0] = True
    rollout.final_index, rollout.final_obs = torch.tensor([[1, 0]]), torch.tensor([[99, 0, 0, 0]], dtype=torch.uint8)
    rollout.final_rnn_state = torch.zeros(1, 0)
    net = Toy((1.0, 0.0, 0.0, 0.0))
    returns = unpack_batch(rollout, net, gamma=0.5, gae_lambda=0.0)[2]
    assert returns.tolist() == [10.0, 49.5, 20.0]  # half of V(obs[1]) = 20, of V(final) = 99, of V(next_obs) = 40


@pytest.mark.parametrize("form", ["rollout", "list"])
def test_unpack_batch_returns_shapes_dtypes_and_no_graph(form):
    rollout = random_rollout(3, 4, seed=1)
    batch = rollout if form == "rollout" else [window(rollout, t, n, 3 - t) for t in range(3) for n in range(4)]
    states, actions, returns = unpack_batch(batch, Toy(), reward_steps=3)
    assert (states.shape, states.dtype) == ((12, 4), torch.uint8)
    assert (actions.shape, actions.dtype) == ((12,), torch.int64)
    assert (returns.shape, returns.dtype) == ((12,), torch.float32)
    assert not any(x.requires_grad or x.grad_fn for x in (states, actions, returns))


def test_unpack_batch_of_the_classic_notebook_s_transitions():
    # Any objects with the four attributes will do; V(last) is discounted by gamma^reward_steps.
    state, last = np.array([1, 2, 3, 4], np.float32), np.array([8, 4, 0, 0], np.float32)
    batch = [
        SimpleNamespace(state=state, action=np.int64(2), reward=np.float64(1.5), last_state=last),
        SimpleNamespace(state=state, action=0, reward=-1, last_state=None),
    ]
    states, actions, returns = unpack_batch(batch, Toy(), gamma=0.5, reward_steps=3)
    assert torch.equal(states, torch.from_numpy(np.stack([state, state])))
    assert actions.tolist() == [2, 0]
    assert returns.tolist() == [1.5 + 0.125 * (0.5 * 8 - 0.25 * 4), -1.0]


def test_unpack_batch_needs_no_bootstrap_without_any_last_state():
    batch = [Experience(np.zeros(4, np.uint8), 1, reward, None) for reward in (1.0, 2.0)]
    assert unpack_batch(batch, None)[2].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_unpack_batch_of_split_parts_equals_the_whole(parts):
    rollout, net = random_rollout(4, 5, seed=2), Toy()
    pieces = rollout.split(parts)
    assert 1 < len(pieces) <= parts
    whole = unpack_batch(rollout, net, gae_lambda=0.8)
    split = [unpack_batch(piece, net, gae_lambda=0.8) for piece in pieces]
    for k, expected in enumerate(whole):
        joined = torch.cat([part[k].unflatten(0, (4, -1)) for part in split], dim=1)
        torch.testing.assert_close(joined.flatten(0, 1), expected)


def test_unpack_batch_clips_each_reward_once_before_discounting():
    rollout = blank(3, 1)
    rollout.rewards = torch.tensor([[4.0], [-5.0], [0.5]])
    returns = unpack_batch(rollout, Toy(), gamma=0.5, reward_clip=1.0)[2]
    assert returns.tolist() == [1 - 0.5 + 0.125, -1 + 0.25, 0.5]
    assert rollout.rewards.flatten().tolist() == [4.0, -5.0, 0.5]  # the raw points stay as they are


def test_unpack_batch_refuses_bad_input_by_name():
    transition = Experience(np.zeros(4, np.uint8), 0, 1.0, None)
    with pytest.raises(ValueError, match="batch must hold at least 1 transition, got 0"):
        unpack_batch([], Toy())
    with pytest.raises(ValueError, match="batch must hold at least 1 transition, got 0"):
        unpack_batch(blank(4, 0), Toy())
    with pytest.raises(ValueError, match=r"reward_clip must be 0 for a list of transitions, .*, got 1\.0"):
        unpack_batch([transition], Toy(), reward_clip=1.0)
    with pytest.raises(ValueError, match=r"gae_lambda must be 1 for a list of transitions, got 0\.95"):
        unpack_batch([transition], Toy(), gae_lambda=0.95)
    with pytest.raises(ValueError, match="reward_steps must be at least 1, got 0"):
        unpack_batch([transition], Toy(), reward_steps=0)


class Shaped(Toy):
    """Values of any shape: `reshape` makes them of the right ones."""

    def __init__(self, reshape) -> None:
        super().__init__()
        self.reshape = reshape

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        logits, values = super().forward(obs)
        return logits, self.reshape(values)


def both_forms() -> list:
    rollout = random_rollout(3, 4, seed=1)
    return [rollout, [window(rollout, t, n, 3 - t) for t in range(3) for n in range(4)]]


@pytest.mark.parametrize("form", [0, 1])
def test_unpack_batch_accepts_values_of_both_shapes(form):
    batch = both_forms()[form]
    got = unpack_batch(batch, Shaped(lambda values: values[:, 0]), reward_steps=3)
    assert torch.equal(got[2], unpack_batch(batch, Toy(), reward_steps=3)[2])


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(
    "reshape",
    [lambda v: v[:1], lambda v: v[0, 0], lambda v: v[:1, 0], lambda v: v.expand(-1, 2), lambda v: v.T, lambda v: v[1:]],
)
def test_unpack_batch_refuses_values_of_another_shape(form, reshape):
    with pytest.raises(ValueError, match=r"net must give values of shape \[\d+, 1\] or \[\d+\], got \["):
        unpack_batch(both_forms()[form], Shaped(reshape), reward_steps=3)


@pytest.mark.parametrize("action", [1.7, 1.0, "1", None, np.float32(1), torch.tensor(1.7), np.array([0, 1])])
def test_unpack_batch_refuses_an_action_that_is_not_an_integer(action):
    with pytest.raises(ValueError, match="action must be an integer, got "):
        unpack_batch([Experience(np.ones(4, np.uint8), action, 1.0, None)], Toy())


@pytest.mark.parametrize("action", [1, np.int8(1), np.array(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8)])
def test_unpack_batch_accepts_an_action_of_any_integer_type(action):
    assert unpack_batch([Experience(np.ones(4, np.uint8), action, 1.0, None)], Toy())[1].tolist() == [1]


@pytest.mark.parametrize("steps", [0, -1, 2.5, float("nan"), "4"])
def test_unpack_batch_refuses_reward_steps_that_are_not_a_count(steps):
    state = np.ones(4, np.uint8)
    rule = "at least 1" if isinstance(steps, int) else "an integer"
    for batch in (both_forms()[0], [Experience(state, 0, 1.0, state)]):
        with pytest.raises(ValueError, match=f"reward_steps must be {rule}, got {steps}"):
            unpack_batch(batch, Toy(), reward_steps=steps)
    with pytest.raises(ValueError, match=f"reward_steps must be {rule}, got {steps}"):
        unpack_batch([Experience(state, 0, 1.0, state, steps)], Toy())


def test_unpack_batch_accepts_reward_steps_of_numpy():
    state = np.ones(4, np.uint8)
    batch = [Experience(state, 0, 1.0, state, np.int64(2)), Experience(state, 0, 1.0, state)]
    returns = unpack_batch(batch, Toy(), gamma=0.5, reward_steps=np.int32(3))[2]
    assert returns.tolist() == [1 + 0.25 * 1.375, 1 + 0.125 * 1.375]  # V = 1.375


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("gamma", value) for value in (-0.1, 1.1, float("nan"))),
        *(("reward_clip", value) for value in (-1.0, float("nan"))),
        *(("gae_lambda", value) for value in (-0.1, 1.1, float("nan"))),
    ],
)
def test_unpack_batch_refuses_coefficients_out_of_range(form, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        unpack_batch(both_forms()[form], Toy(), **{"reward_steps": 3, name: value})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unpack_batch_refuses_rewards_that_are_nan_or_infinite(bad):
    rollout, transitions = both_forms()
    rollout.rewards[1, 2] = bad
    for batch in (rollout, [*transitions, transitions[0]._replace(reward=bad)]):
        with pytest.raises(ValueError, match=f"rewards must be finite, got {bad}"):
            unpack_batch(batch, Toy(), reward_steps=3)


def test_unpack_batch_accepts_states_of_any_dtype_and_device():
    # numpy knows neither bfloat16 nor what lies on another device.
    state = torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16)
    states, _, returns = unpack_batch([Experience(state, 0, 1.0, 2 * state, 1)] * 3, Toy(), gamma=0.5)
    assert states.dtype == torch.bfloat16 and torch.equal(states, state.expand(3, 4))
    assert returns.tolist() == [1 + 0.5 * 2 * 4.375] * 3  # V = 8.75
    mixed = [Experience(state.float(), 0, 1.0, None), Experience(state.float().numpy(), 0, 1.0, None)]
    assert torch.equal(unpack_batch(mixed, Toy())[0], state.float().expand(2, 4))
    elsewhere = Experience(torch.zeros(4, device="meta"), 0, 1.0, torch.zeros(4, device="meta"))
    states, actions, returns = unpack_batch([elsewhere] * 3, Toy().to("meta"), "meta")
    assert [x.device.type for x in (states, actions, returns)] == ["meta"] * 3 and states.shape == (3, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_unpack_batch_accepts_states_on_a_gpu():
    state = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
    for device in ("cpu", "cuda"):
        got = unpack_batch([Experience(state, 0, 1.0, 2 * state, 1)] * 3, Toy().to(device), device, gamma=0.5)
        assert torch.equal(got[0].cpu(), state.cpu().expand(3, 4)) and got[2].tolist() == [1 + 0.5 * 2 * 4.375] * 3


def test_unpack_batch_refuses_states_of_different_shapes():
    batch = [Experience(np.zeros(size, np.uint8), 0, 1.0, None) for size in (4, 5)]
    with pytest.raises(ValueError, match=r"states must all have the same shape, got \[4\] and \[5\]"):
        unpack_batch(batch, Toy())


def test_unpack_batch_returns_copies():
    # A collector plays into the same buffers again.
    rollout = random_rollout(3, 4, seed=1)
    got = unpack_batch(rollout, Toy())
    before = [x.clone() for x in got]
    for tensor in (rollout.obs, rollout.actions, rollout.rewards, rollout.values):
        tensor.zero_()
    assert all(map(torch.equal, got, before))


def test_batch_of_a_rollout_makes_no_copy():
    rollout = random_rollout(3, 4, seed=1)
    batch = rollout.batch(Toy(), gamma=0.9, gae_lambda=1.0, reward_clip=0.0, off_policy=True)
    assert batch.actions.data_ptr() == rollout.actions.data_ptr()
    assert batch.behaviour_log_probs.data_ptr() == rollout.log_probs.data_ptr()


def drop(rollout: Rollout, *keep: int) -> None:
    """Leave the entries `keep` of the index of final observations."""
    for name in ("final_index", "final_obs", "final_rnn_state"):
        setattr(rollout, name, getattr(rollout, name)[list(keep)])


def shift(rollout: Rollout, by: list[int]) -> None:
    rollout.final_index = rollout.final_index + torch.tensor([[0, 0], by])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rollout: drop(rollout),
        lambda rollout: drop(rollout, 0),
        lambda rollout: drop(rollout, 0, 1, 1),  # one twice
        lambda rollout: drop(rollout, 0, 0),
        lambda rollout: shift(rollout, [-1, 4]),  # the same place in memory, by another name
        lambda rollout: shift(rollout, [0, -4]),
        lambda rollout: rollout.terminated.logical_or_(rollout.truncated),
        lambda rollout: setattr(rollout, "final_obs", rollout.final_obs[:1]),  # would broadcast
        lambda rollout: setattr(rollout, "final_rnn_state", rollout.final_rnn_state[:1]),
    ],
)
def test_unpack_batch_refuses_a_truncated_step_without_its_final_observation(spoil):
    # It would be bootstrapped from the episode that follows.
    rollout = blank(3, 4)
    rollout.truncated[1, 2] = rollout.truncated[2, 1] = True
    rollout.final_index = rollout.truncated.nonzero()
    rollout.final_obs, rollout.final_rnn_state = torch.ones(2, 4, dtype=torch.uint8), torch.zeros(2, 0)
    drop(rollout, 1, 0)  # their order does not matter
    unpack_batch(rollout, Toy())
    spoil(rollout)
    with pytest.raises(ValueError, match=r"final_(index|obs|rnn_state) must (name|have)"):
        unpack_batch(rollout, Toy())
    config = Config(env="CartPole-v1", backend="sync", threads=1, num_envs=4)
    with closing(Compute(config)) as compute, pytest.raises(ValueError, match="final_"):
        Learner(config, spaces((4,), 3), compute).learn(rollout)
