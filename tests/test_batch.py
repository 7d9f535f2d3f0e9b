"""From experience to (states, actions, returns): both forms, their types, and the sliding windows."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import spaces

from a2c.algorithms.windows import SlidingWindows
from a2c.batch import Experience, unpack_batch
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.learner import Learner
from a2c.rollout import Rollout

GAMMA = 0.9
FLAGS = ("terminated", "truncated")


class Toy(nn.Module):
    """V(s) is a learned weighted sum of four bytes."""

    def __init__(self, weights: tuple[float, ...] = (0.5, -0.25, 0.125, 1.0)) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        values = (obs.float() * self.weights).sum(1, keepdim=True)
        return values.expand(-1, 3), values


def blank(steps: int, envs: int, features: int = 4) -> Rollout:
    """A rollout of zeros in which no episode ends."""
    return Rollout.empty(steps, torch.zeros(envs, features, dtype=torch.uint8))


def random_rollout(steps: int, envs: int, seed: int, rate: float = 0.25) -> Rollout:
    """What a collector would hand over; the first three bytes of an observation name it."""
    draw = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (steps + 1, envs, 4), generator=draw, dtype=torch.uint8)
    frames[..., 0], frames[..., 1], frames[..., 2] = torch.arange(steps + 1)[:, None], torch.arange(envs), 0
    rollout = blank(steps, envs)
    rollout.obs, rollout.next_obs = frames[:-1], frames[-1]
    rollout.actions = torch.randint(0, 3, (steps, envs), generator=draw)
    rollout.rewards = torch.randn(steps, envs, generator=draw) * 2
    rollout.terminated, rollout.truncated = (torch.rand(steps, envs, generator=draw) < rate for _ in FLAGS)
    rollout.final_index = (rollout.truncated & ~rollout.terminated).nonzero()
    rollout.final_obs = torch.randint(0, 256, (len(rollout.final_index), 4), generator=draw, dtype=torch.uint8)
    rollout.final_rnn_state = torch.zeros(len(rollout.final_index), 0)
    rollout.values = Toy()(rollout.obs.flatten(0, 1))[1].detach().reshape(steps, envs)
    return rollout


def window(rollout: Rollout, t: int, n: int, steps: int) -> Experience | None:
    """The transition of at most `steps` decisions that begins at (t, n); None where the rollout ends too early."""
    finals = dict(zip(map(tuple, rollout.final_index.tolist()), rollout.final_obs, strict=True))
    reward, action = 0.0, int(rollout.actions[t, n])
    for i in range(steps):
        k = t + i
        if k == len(rollout.actions):
            return None
        reward += GAMMA**i * float(rollout.rewards[k, n])
        if rollout.terminated[k, n]:
            return Experience(rollout.obs[t, n].numpy(), action, reward, None, i + 1)
        if rollout.truncated[k, n]:
            return Experience(rollout.obs[t, n].numpy(), action, reward, finals[k, n].numpy(), i + 1)
    last = rollout.next_obs[n] if t + steps == len(rollout.actions) else rollout.obs[t + steps, n]
    return Experience(rollout.obs[t, n].numpy(), action, reward, last.numpy(), steps)


def time_slice(rollout: Rollout, low: int, high: int) -> Rollout:
    """The decisions `low <= t < high`, in memory that the next rollout may overwrite."""
    names = ("obs", "actions", "rewards", *FLAGS, "starts", "values", "log_probs")
    next_obs = rollout.next_obs if high == len(rollout.actions) else rollout.obs[high]
    mine = (rollout.final_index[:, 0] >= low) & (rollout.final_index[:, 0] < high)
    return Rollout(
        *(getattr(rollout, name)[low:high].clone() for name in names),
        rnn_state=rollout.rnn_state,
        policy_version=rollout.policy_version,
        next_obs=next_obs.clone(),
        next_rnn_state=rollout.next_rnn_state,
        final_index=rollout.final_index[mine] - torch.tensor([low, 0]),
        final_obs=rollout.final_obs[mine],
        final_rnn_state=rollout.final_rnn_state[mine],
    )


@pytest.mark.parametrize("seed", range(10))
def test_list_form_equals_rollout_form(seed):
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


def test_a_rollout_bootstraps_from_values_final_and_next_observations():
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
def test_shapes_dtypes_and_no_graph(form):
    rollout = random_rollout(3, 4, seed=1)
    batch = rollout if form == "rollout" else [window(rollout, t, n, 3 - t) for t in range(3) for n in range(4)]
    states, actions, returns = unpack_batch(batch, Toy(), reward_steps=3)
    assert (states.shape, states.dtype) == ((12, 4), torch.uint8)
    assert (actions.shape, actions.dtype) == ((12,), torch.int64)
    assert (returns.shape, returns.dtype) == ((12,), torch.float32)
    assert not any(x.requires_grad or x.grad_fn for x in (states, actions, returns))


def test_book_style_transitions():
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


def test_a_list_without_any_last_state_needs_no_bootstrap():
    batch = [Experience(np.zeros(4, np.uint8), 1, reward, None) for reward in (1.0, 2.0)]
    assert unpack_batch(batch, None)[2].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_split_by_environment_then_joined_equals_whole(parts):
    rollout, net = random_rollout(4, 5, seed=2), Toy()
    pieces = rollout.split(parts)
    assert 1 < len(pieces) <= parts
    whole = unpack_batch(rollout, net, gae_lambda=0.8)
    split = [unpack_batch(piece, net, gae_lambda=0.8) for piece in pieces]
    for k, expected in enumerate(whole):
        joined = torch.cat([part[k].unflatten(0, (4, -1)) for part in split], dim=1)
        torch.testing.assert_close(joined.flatten(0, 1), expected)


def test_reward_clip_acts_once_on_each_reward_before_discounting():
    rollout = blank(3, 1)
    rollout.rewards = torch.tensor([[4.0], [-5.0], [0.5]])
    returns = unpack_batch(rollout, Toy(), gamma=0.5, reward_clip=1.0)[2]
    assert returns.tolist() == [1 - 0.5 + 0.125, -1 + 0.25, 0.5]
    assert rollout.rewards.flatten().tolist() == [4.0, -5.0, 0.5]  # the raw points stay as they are
    ((window,),) = (batch.items for batch in SlidingWindows(1, 3, 1, gamma=0.5, reward_clip=1.0).push(rollout))
    assert window.reward == 1 - 0.5 + 0.125


def test_sliding_windows_by_hand():
    # Windows of 3 over ten decisions of one environment, obs[t] = t and reward 2^t discounted by 1/2, so
    # that each full window sums to 3 * 2^t. Terminated at 4, cut off at 6 with 99 as its last observation.
    rollout = blank(10, 1, features=1)
    rollout.obs[:, 0, 0], rollout.next_obs[0, 0] = torch.arange(10), 10
    rollout.actions[:, 0] = torch.arange(10)
    rollout.rewards[:, 0] = 2.0 ** torch.arange(10)
    rollout.terminated[4], rollout.truncated[6] = True, True
    rollout.final_index, rollout.final_obs = torch.tensor([[6, 0]]), torch.tensor([[99]], dtype=torch.uint8)
    rollout.final_rnn_state = torch.zeros(1, 0)
    windows = SlidingWindows(1, reward_steps=3, batch_size=2, gamma=0.5, reward_clip=0.0)
    first, second = windows.push(time_slice(rollout, 0, 9)), windows.push(time_slice(rollout, 9, 10))

    def read(e: Experience) -> tuple:
        return int(e.state), e.action, e.reward, None if e.last_state is None else int(e.last_state), e.reward_steps

    assert [[read(e) for e in batch.items] for batch in first] == [
        [(0, 0, 3.0, 3, 3), (1, 1, 6.0, 4, 3)],
        [(2, 2, 12.0, None, 3), (3, 3, 16.0, None, 2)],
        [(4, 4, 16.0, None, 1), (5, 5, 64.0, 99, 2)],
    ]
    # 7 and 8 wait for decision 9; then 7 is whole and fills the batch that 6 began.
    assert [[read(e) for e in batch.items] for batch in second] == [[(6, 6, 64.0, 99, 1), (7, 7, 384.0, 10, 3)]]


@pytest.mark.parametrize("seed", range(5))
def test_sliding_windows_lose_and_double_no_transition(seed):
    steps, envs, batch_size = 24, 3, 7
    rollout = random_rollout(steps, envs, seed, rate=0.08)
    windows, batches = SlidingWindows(envs, 4, batch_size, GAMMA, reward_clip=0.0), []
    for low in range(0, steps, 6):
        piece = time_slice(rollout, low, low + 6)
        batches += windows.push(piece)
        piece.obs.zero_(), piece.next_obs.zero_()  # the collector plays into the same memory again
    assert all(len(batch) == batch_size for batch in batches)
    assert len(windows.complete) < batch_size
    emitted = [e for batch in batches for e in batch.items] + windows.complete
    names = [tuple(e.state[:2].tolist()) for e in emitted]
    expected = {(t, n): window(rollout, t, n, 4) for t in range(steps) for n in range(envs)}
    assert sorted(names) == sorted(key for key, e in expected.items() if e is not None)
    assert sum(map(len, windows.open)) == sum(e is None for e in expected.values())
    for name, got in zip(names, emitted, strict=True):
        want = expected[name]
        assert (got.action, got.reward_steps) == (want.action, want.reward_steps)
        assert got.reward == pytest.approx(want.reward, abs=1e-5)
        np.testing.assert_array_equal(got.state, want.state)
        assert (got.last_state is None) == (want.last_state is None)
        if want.last_state is not None:
            np.testing.assert_array_equal(got.last_state, want.last_state)


def test_bad_input_is_refused_by_name():
    transition = Experience(np.zeros(4, np.uint8), 0, 1.0, None)
    with pytest.raises(ValueError, match="batch must hold at least 1 transition, got 0"):
        unpack_batch([], Toy())
    with pytest.raises(ValueError, match="batch must hold at least 1 transition, got 0"):
        unpack_batch(blank(4, 0), Toy())
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
def test_values_may_come_without_their_column(form):
    batch = both_forms()[form]
    got = unpack_batch(batch, Shaped(lambda values: values[:, 0]), reward_steps=3)
    assert torch.equal(got[2], unpack_batch(batch, Toy(), reward_steps=3)[2])


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(
    "reshape",
    [lambda v: v[:1], lambda v: v[0, 0], lambda v: v[:1, 0], lambda v: v.expand(-1, 2), lambda v: v.T, lambda v: v[1:]],
)
def test_values_of_another_shape_are_refused(form, reshape):
    with pytest.raises(ValueError, match=r"net must give values of shape \[\d+, 1\] or \[\d+\], got \["):
        unpack_batch(both_forms()[form], Shaped(reshape), reward_steps=3)


@pytest.mark.parametrize("action", [1.7, 1.0, "1", None, np.float32(1), torch.tensor(1.7), np.array([0, 1])])
def test_an_action_that_is_no_integer_is_refused(action):
    with pytest.raises(ValueError, match="action must be an integer, got "):
        unpack_batch([Experience(np.ones(4, np.uint8), action, 1.0, None)], Toy())


@pytest.mark.parametrize("action", [1, np.int8(1), np.array(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8)])
def test_an_action_may_be_any_integer(action):
    assert unpack_batch([Experience(np.ones(4, np.uint8), action, 1.0, None)], Toy())[1].tolist() == [1]


@pytest.mark.parametrize("steps", [0, -1, 2.5, float("nan"), "4"])
def test_windows_without_a_whole_length_are_refused(steps):
    state = np.ones(4, np.uint8)
    rule = "at least 1" if isinstance(steps, int) else "an integer"
    for batch in (both_forms()[0], [Experience(state, 0, 1.0, state)]):
        with pytest.raises(ValueError, match=f"reward_steps must be {rule}, got {steps}"):
            unpack_batch(batch, Toy(), reward_steps=steps)
    with pytest.raises(ValueError, match=f"reward_steps must be {rule}, got {steps}"):
        unpack_batch([Experience(state, 0, 1.0, state, steps)], Toy())


def test_the_length_of_a_window_may_be_numpys():
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
def test_coefficients_out_of_range_are_refused(form, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        unpack_batch(both_forms()[form], Toy(), **{"reward_steps": 3, name: value})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad):
    rollout, transitions = both_forms()
    rollout.rewards[1, 2] = bad
    for batch in (rollout, [*transitions, transitions[0]._replace(reward=bad)]):
        with pytest.raises(ValueError, match=f"rewards must be finite, got {bad}"):
            unpack_batch(batch, Toy(), reward_steps=3)


def test_states_may_be_tensors_of_any_dtype_and_device():
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
def test_states_on_a_gpu():
    state = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
    for device in ("cpu", "cuda"):
        got = unpack_batch([Experience(state, 0, 1.0, 2 * state, 1)] * 3, Toy().to(device), device, gamma=0.5)
        assert torch.equal(got[0].cpu(), state.cpu().expand(3, 4)) and got[2].tolist() == [1 + 0.5 * 2 * 4.375] * 3


def test_states_of_different_shapes_are_refused():
    batch = [Experience(np.zeros(size, np.uint8), 0, 1.0, None) for size in (4, 5)]
    with pytest.raises(ValueError, match=r"states must all have the same shape, got \[4\] and \[5\]"):
        unpack_batch(batch, Toy())


def test_what_is_unpacked_outlives_the_rollout():
    # A collector plays into the same buffers again.
    rollout = random_rollout(3, 4, seed=1)
    got = unpack_batch(rollout, Toy())
    before = [x.clone() for x in got]
    for tensor in (rollout.obs, rollout.actions, rollout.rewards, rollout.values):
        tensor.zero_()
    assert all(map(torch.equal, got, before))


def test_training_unpacks_without_a_copy():
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
def test_a_cut_off_step_without_its_final_observation_is_refused(spoil):
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
