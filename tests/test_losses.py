"""The loss: values and gradients worked out by hand, and the mistakes that other code bases made."""

import re
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from a2c.losses import A2CLoss, a2c_loss

LN2, LN3 = log(2), log(3)


def golden(**options) -> tuple[Tensor, Tensor, A2CLoss]:
    """Two samples: pi = (1/2, 1/2) and (3/4, 1/4), V = 1 and 2, G = 3 and 1, action 0 twice.

    The advantages are 2 and -1. The terms:

    policy  = -(2 ln(1/2) - ln(3/4)) / 2 = ln(3) / 2
    value   = (2^2 + 1^2) / 2 = 5/2
    entropy = (ln 2 + 3/4 ln(4/3) + 1/4 ln 4) / 2 = (3 ln 2 - 3/4 ln 3) / 2
    """
    logits = torch.tensor([[0.0, 0.0], [LN3, 0.0]], requires_grad=True)
    values = torch.tensor([[1.0], [2.0]], requires_grad=True)
    loss = a2c_loss(logits, values, torch.tensor([0, 0]), torch.tensor([3.0, 1.0]), **options)
    return logits, values, loss


def random_batch(batch: int = 16, actions: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, actions, generator=generator).requires_grad_()
    values = torch.randn(batch, 1, generator=generator).requires_grad_()
    taken = torch.randint(actions, (batch,), generator=generator)
    return logits, values, taken, torch.randn(batch, generator=generator) * 3


def assert_close(tensor: Tensor, numbers: float | list) -> None:
    torch.testing.assert_close(tensor.detach(), torch.tensor(numbers), rtol=1e-5, atol=1e-6)


def test_a2c_loss_by_hand():
    *_, loss = golden(entropy_coef=0.1, value_coef=0.5)
    policy, value, entropy = LN3 / 2, 2.5, (3 * LN2 - 0.75 * LN3) / 2
    assert_close(loss.policy, policy)
    assert_close(loss.value, value)
    assert_close(loss.entropy, entropy)
    assert_close(loss.advantage, 0.5)
    assert_close(loss.ratio, 1.0)
    assert_close(loss.total, policy + 0.5 * value - 0.1 * entropy)


def test_a2c_loss_policy_gradient_by_hand():
    # d/dz of -A ln pi(a) is A * (pi - onehot(a)), divided by B = 2
    logits, _, loss = golden(entropy_coef=0.0, value_coef=0.0)
    loss.total.backward()
    assert_close(logits.grad, [[-0.5, 0.5], [0.125, -0.125]])


def test_a2c_loss_value_gradient_by_hand():
    # d/dV of c * (G - V)^2 is 2c * (V - G), divided by B = 2; nothing of it reaches the logits
    logits, values, loss = golden(entropy_coef=0.0, value_coef=0.25)
    loss.total.backward()
    assert_close(values.grad, [[-0.5], [0.25]])
    assert_close(logits.grad, [[-0.5, 0.5], [0.125, -0.125]])


def test_a2c_loss_entropy_gradient_by_hand():
    # dH/dz = -pi * (ln pi + H): 0 for the uniform policy, (-1, 1) * 3/16 * ln 3 for (3/4, 1/4)
    logits = [golden(entropy_coef=c, value_coef=0.0) for c in (0.4, 0.0)]
    for *_, loss in logits:
        loss.total.backward()
    slope = 0.4 / 2 * 3 / 16 * LN3
    assert_close(logits[0][0].grad - logits[1][0].grad, [[0.0, 0.0], [slope, -slope]])


def test_a2c_loss_entropy_bonus_raises_the_entropy():
    logits, values, actions, _ = random_batch()
    before = a2c_loss(logits, values, actions, values.squeeze(1), entropy_coef=1.0)  # no advantage
    (gradient,) = torch.autograd.grad(before.total, logits)
    after = a2c_loss(logits - gradient, values, actions, values.squeeze(1))
    assert after.entropy > before.entropy


def test_a2c_loss_has_no_gradient_through_the_advantage():
    _, values, loss = golden(value_coef=0.0)
    loss.total.backward()
    assert torch.equal(values.grad, torch.zeros(2, 1))


def test_a2c_loss_has_no_gradient_to_the_returns():
    logits, values, actions, returns = random_batch()
    returns.requires_grad_()
    a2c_loss(logits, values, actions, returns).total.backward()
    assert returns.grad is None


def test_a2c_loss_only_the_total_carries_a_graph():
    loss = a2c_loss(*random_batch())
    assert loss.total.requires_grad
    assert not any(term.requires_grad for term in loss[1:])


def test_a2c_loss_does_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 4)
    inputs, (_, values, actions, returns) = torch.randn(16, 5), random_batch(actions=4)
    results = []
    for copies in (1, 3):
        net.zero_grad()
        many = [torch.cat([x] * copies) for x in (inputs, values, actions, returns)]
        loss = a2c_loss(net(many[0]), *many[1:], behaviour_log_probs=torch.full((16 * copies,), -1.0))
        loss.total.backward()
        results.append([*(term.detach() for term in loss), net.weight.grad.clone()])
    torch.testing.assert_close(results[0], results[1])


def test_a2c_loss_accepts_values_of_both_shapes():
    logits, values, actions, returns = random_batch()
    columns, flat = (a2c_loss(logits, v, actions, returns).total for v in (values, values.squeeze(1)))
    assert torch.equal(columns, flat)


@pytest.mark.parametrize("log_eps", [0.0, 1e-3])
@pytest.mark.parametrize("behaviour", [False, True])
@pytest.mark.parametrize("masked", [1, 4])
def test_a2c_loss_ignores_a_masked_action(masked, behaviour, log_eps):
    # The masked actions are put before the others; `masked` = 4 of 5 leaves the policy no choice.
    logits, values, _, returns = random_batch(actions=5 - masked)
    taken = torch.arange(16) % (5 - masked)
    options = {"entropy_coef": 0.5, "log_eps": log_eps}
    if behaviour:
        options["behaviour_log_probs"] = torch.linspace(-2, 0, 16)
    expected = a2c_loss(logits, values, taken, returns, **options)
    with_mask = torch.cat([torch.full((16, masked), -torch.inf), logits.detach()], dim=1).requires_grad_()
    got = a2c_loss(with_mask, values, taken + masked, returns, **options)
    torch.testing.assert_close(got, expected)
    (want,) = torch.autograd.grad(expected.total, logits)
    (gradient,) = torch.autograd.grad(got.total, with_mask)
    assert torch.equal(gradient[:, :masked], torch.zeros(16, masked))
    torch.testing.assert_close(gradient[:, masked:], want)


def test_a2c_loss_has_the_full_entropy_of_an_action_of_tiny_probability():
    # dH/dz = -pi * (ln pi + H), here 80 * exp(-80): the bound of the masked ones must lie below.
    logits = torch.tensor([[0.0, -80.0]], requires_grad=True)
    loss = a2c_loss(logits, torch.zeros(1), torch.tensor([0]), torch.zeros(1), entropy_coef=1.0, value_coef=0.0)
    (gradient,) = torch.autograd.grad(loss.total, logits)
    torch.testing.assert_close(float(gradient[0, 1]), -80 * exp(-80), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a2c_loss_accepts_actions_of_any_integer_dtype(dtype):
    logits, values, actions, returns = random_batch()
    expected = a2c_loss(logits, values, actions, returns)
    assert all(map(torch.equal, a2c_loss(logits, values, actions.to(dtype), returns), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a2c_loss_refuses_actions_that_are_not_integers(dtype):
    logits, values, actions, returns = random_batch()
    with pytest.raises(ValueError, match=f"actions must be integers, got {dtype}"):
        a2c_loss(logits, values, actions.to(dtype), returns)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("values", lambda b: (1, b + 1)),
        ("values", lambda b: (b, 2)),
        ("values", lambda b: ()),
        ("actions", lambda b: (b, 1)),
        ("returns", lambda b: (b, 1)),  # would broadcast against [B] into [B, B]
        ("returns", lambda b: ()),
        ("returns", lambda b: (b + 1,)),
        ("behaviour_log_probs", lambda b: (b, 1)),
        ("behaviour_log_probs", lambda b: ()),
    ],
)
def test_a2c_loss_refuses_shapes_that_would_broadcast(name, shape, batch):
    inputs = dict(zip(("logits", "values", "actions", "returns"), random_batch(batch), strict=True))
    inputs |= {"behaviour_log_probs": torch.zeros(batch)}
    inputs |= {name: torch.zeros(shape(batch), dtype=inputs[name].dtype)}
    with pytest.raises(ValueError, match=rf"{name} must have shape \[{batch}\], got"):
        a2c_loss(**inputs)


@pytest.mark.parametrize("shape", [(3,), (0, 5), (2, 3, 4)])
def test_a2c_loss_refuses_logits_that_are_no_batch_of_actions(shape):
    actions = torch.zeros(shape[0], dtype=torch.int64)
    message = f"logits must have shape [B, A] with B > 0, got {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        a2c_loss(torch.zeros(shape), torch.zeros(shape[0]), actions, torch.zeros(shape[0]))


def test_a2c_loss_gradient_equals_that_of_the_ppo_surrogate_at_ratio_1():
    logits, values, actions, returns = random_batch()
    log_prob = F.log_softmax(logits, dim=1)[torch.arange(16), actions]
    surrogate = -((log_prob - log_prob.detach()).exp() * (returns - values.detach().squeeze(1))).mean()
    (expected,) = torch.autograd.grad(surrogate, logits)
    for behaviour in (None, log_prob.detach()):
        loss = a2c_loss(logits, values, actions, returns, entropy_coef=0.0, behaviour_log_probs=behaviour)
        torch.testing.assert_close(torch.autograd.grad(loss.total, logits)[0], expected)


def test_a2c_loss_importance_ratio_is_clipped_at_1_and_is_a_constant():
    # Ratios (1/2) / (1/4) = 2, clipped to 1, and (3/4) / 1 = 3/4: the second row of the plain policy
    # gradient shrinks by 3/4, and no derivative of the ratio joins it.
    behaviour = torch.tensor([log(0.25), 0.0])
    logits, values, loss = golden(entropy_coef=0.0, value_coef=0.5, behaviour_log_probs=behaviour)
    loss.total.backward()
    assert_close(loss.ratio, 0.875)
    assert_close(loss.approx_kl, (1 - LN2 - 0.25 - log(0.75)) / 2)  # r - 1 - log r, without the clip
    assert_close(loss.clip_fraction, 0.5)
    assert_close(loss.policy, (2 * LN2 + 0.75 * log(0.75)) / 2)
    assert_close(logits.grad, [[-0.5, 0.5], [0.09375, -0.09375]])
    assert_close(loss.value, 2.5)  # the value term is not weighted
    assert_close(values.grad, [[-1.0], [0.5]])


def test_a2c_loss_has_no_gradient_to_the_behaviour_log_probs():
    logits, values, actions, returns = random_batch()
    behaviour = torch.zeros(16, requires_grad=True)  # ratios below 1, where the clip would let a gradient through
    loss = a2c_loss(logits, values, actions, returns, behaviour_log_probs=behaviour)
    loss.total.backward()
    assert behaviour.grad is None
    assert not loss.ratio.requires_grad and not loss.approx_kl.requires_grad
    on_policy = a2c_loss(logits, values, actions, returns)
    assert on_policy.approx_kl == on_policy.clip_fraction == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a2c_loss_computes_half_precision_outputs_in_float32(dtype):
    logits, values, actions, returns = random_batch()
    low = [x.detach().to(dtype) for x in (logits, values)]
    got = a2c_loss(*low, actions, returns)
    expected = a2c_loss(*(x.float() for x in low), actions, returns)
    assert all(term.dtype == torch.float32 for term in got)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a2c_loss_log_eps_by_hand():
    # d/dz of -A ln(pi(a) + eps) is A * pi(a) / (pi(a) + eps) * (pi - onehot(a)): fades where pi(a) is far below eps
    eps = 0.25
    logits, _, loss = golden(entropy_coef=0.0, value_coef=0.0, log_eps=eps)
    loss.total.backward()
    assert_close(loss.policy, -(2 * log(0.75) - log(1.0)) / 2)
    first, second = 0.5 / 0.75, 0.75 / 1.0
    assert_close(logits.grad, [[-0.5 * first, 0.5 * first], [0.125 * second, -0.125 * second]])


def test_a2c_loss_log_eps_bounds_the_loss_of_an_action_that_became_impossible():
    logits = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss = a2c_loss(logits, torch.zeros(1), torch.tensor([0]), torch.tensor([1.0]), entropy_coef=0.0, log_eps=1e-6)
    loss.total.backward()
    assert_close(loss.policy, -log(1e-6))
    assert logits.grad.isfinite().all() and logits.grad.abs().max() < 1e-6
