"""From experience to what the loss takes: states, actions and bootstrapped returns."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.policy import step
from a2c.returns import lambda_returns
from a2c.rollout import Rollout


class Experience(NamedTuple):
    """An n-step transition as notebooks have it.

    `reward` is the discounted sum of the window's rewards; `last_state` is the observation
    after the window, None when the episode ended inside it. `reward_steps` is set only for
    a window shorter than usual that still has a `last_state` (a truncated episode).
    """

    state: Any
    action: int
    reward: float
    last_state: Any | None
    reward_steps: int | None = None


@torch.no_grad()
def unpack_batch(
    batch: Sequence[Any] | Rollout,
    net: nn.Module,
    device: str | torch.device = "cpu",
    *,
    gamma: float = 0.99,
    reward_steps: int = 4,
    gae_lambda: float = 1.0,
    reward_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn experience into `(states, actions, returns)`: tensors of their own, none of which carries a graph.

    For transitions: `returns[b] = reward[b] + gamma^reward_steps * V(last_state[b])`, without
    the second term where `last_state` is None. For a `Rollout`: its lambda-returns (see
    `lambda_returns`), environment after environment within each step. Both forms give the
    same numbers on the same experience with `gae_lambda = 1`.

    Args:
        batch: transitions with `state, action, reward, last_state` (`Experience` or any object
            with these attributes; arrays or tensors on any device), or a `Rollout`.
        net: network with outputs `(logits, values [B, 1] or [B])`; it values what comes after the windows.
            Inside them a rollout has the values of the policy that acted.
        device: where the results live.
        gamma: discount per decision.
        reward_steps: decisions that the `reward` of a transition sums over (a rollout's
            window is its own length).
        gae_lambda: trace decay; transitions have none, so 1 is required there.
        reward_clip: bound on each reward of a rollout, 0 for none (a transition's reward is
            a sum already: clip it where it is summed).

    Returns:
        states `[B, ...]` in their own dtype, int64 actions `[B]`, float32 returns `[B]`.

    Raises:
        ValueError: an empty batch, `gamma` or `gae_lambda` outside 0 to 1, `reward_steps` that is no integer
            or below 1, a negative `reward_clip`, lambda below 1 for transitions, rewards that are NaN or infinite,
            actions that are no integers, states of different shapes, values of another shape, or a rollout whose
            `final_index` does not name its truncated steps.
    """
    if isinstance(batch, Rollout):
        batch.check()
        rewards = batch.rewards
    else:
        rewards = torch.tensor([float(e.reward) for e in batch])
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()][0].item()}")
    states, actions, returns = unpack_views(
        batch, net, device, gamma=gamma, reward_steps=reward_steps, gae_lambda=gae_lambda, reward_clip=reward_clip
    )
    return (states.clone(), actions.clone(), returns) if isinstance(batch, Rollout) else (states, actions, returns)


@torch.no_grad()
def unpack_views(
    batch: Sequence[Any] | Rollout,
    net: nn.Module,
    device: str | torch.device,
    *,
    gamma: float,
    reward_steps: int,
    gae_lambda: float,
    reward_clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`unpack_batch` without what training has no need of: states and actions may be views of a rollout, which
    the next one overwrites, and neither rewards nor `final_index` are checked."""
    if len(batch) == 0:
        raise ValueError("batch must hold at least 1 transition, got 0")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must be at least 0 and at most 1, got {gamma}")
    if not reward_clip >= 0.0:
        raise ValueError(f"reward_clip must be at least 0, got {reward_clip}")
    reward_steps = _count(reward_steps)
    if isinstance(batch, Rollout):
        return _unpack_rollout(batch, net, device, gamma, gae_lambda, reward_clip)
    if gae_lambda != 1.0:
        raise ValueError(f"gae_lambda must be 1 for a list of transitions, got {gae_lambda}")
    own = [getattr(e, "reward_steps", None) for e in batch]
    lengths = [reward_steps if steps is None else _count(steps) for steps in own]
    states = _stack([e.state for e in batch]).to(device)
    actions = torch.tensor([_integer("action", e.action) for e in batch], dtype=torch.int64, device=device)
    returns = torch.tensor([float(e.reward) for e in batch], dtype=torch.float32, device=device)
    alive = [i for i, e in enumerate(batch) if e.last_state is not None]
    if alive:
        last_states = _stack([batch[i].last_state for i in alive]).to(device)
        discounts = torch.tensor([gamma ** lengths[i] for i in alive], dtype=torch.float32, device=device)
        returns[alive] += discounts * _flat(net(last_states)[1], len(alive))
    return states, actions, returns


def _unpack_rollout(
    rollout: Rollout, net: nn.Module, device: str | torch.device, gamma: float, gae_lambda: float, reward_clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    envs = rollout.actions.shape[1]
    behind = torch.cat([rollout.next_obs, rollout.final_obs]).to(device)  # [N + K, ...]
    rnn_state = torch.cat([rollout.next_rnn_state, rollout.final_rnn_state]).to(device)
    nowhere = torch.zeros(len(behind), dtype=torch.bool, device=device)  # no episode starts there
    bootstrap = _flat(step(net, behind, rnn_state, nowhere)[1], len(behind))  # [N + K]
    next_values = torch.cat([rollout.values[1:].to(device), bootstrap[None, :envs]])  # [T, N]
    t, n = rollout.final_index.to(device).unbind(1)
    next_values[t, n] = bootstrap[envs:]
    rewards = rollout.rewards.to(device)
    if reward_clip:
        rewards = rewards.clamp(-reward_clip, reward_clip)
    returns = lambda_returns(
        rewards,
        next_values,
        rollout.terminated.to(device),
        rollout.truncated.to(device),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    return rollout.obs.flatten(0, 1).to(device), rollout.actions.flatten().to(device), returns.flatten()


def _flat(values: Tensor, batch: int) -> Tensor:
    """The value head's output for `batch` observations as float32 `[B]`."""
    if values.shape not in ((batch, 1), (batch,)):
        raise ValueError(f"net must give values of shape [{batch}, 1] or [{batch}], got {list(values.shape)}")
    return values.float().reshape(batch)


def _count(reward_steps: Any) -> int:
    steps = _integer("reward_steps", reward_steps)
    if steps < 1:
        raise ValueError(f"reward_steps must be at least 1, got {steps}")
    return steps


def _integer(name: str, value: Any) -> int:
    """An integer of Python, numpy or torch as an int; ValueError for what would have to be rounded."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value}") from None


def _stack(observations: list[Any]) -> Tensor:
    """Arrays or tensors as one tensor `[B, ...]`, on the device of the first tensor."""
    items = [o if isinstance(o, Tensor) else np.asarray(o) for o in observations]
    shapes = sorted({tuple(item.shape) for item in items})
    if len(shapes) > 1:
        raise ValueError(f"states must all have the same shape, got {list(shapes[0])} and {list(shapes[1])}")
    devices = [item.device for item in items if isinstance(item, Tensor)]
    if not devices:
        return torch.from_numpy(np.stack(items))
    return torch.stack([torch.as_tensor(item, device=devices[0]) for item in items])


class SlidingWindows:
    """The classic notebook's batches: sliding n-step windows, `batch_size` transitions at a time.

    Feed it rollouts; each decision becomes one `Experience` as soon as its window of
    `reward_steps` decisions is complete or its episode ends. Windows run on across updates, as
    they do in the notebook, so up to n - 1 of their rewards come from a slightly newer policy.
    """

    def __init__(self, num_envs: int, reward_steps: int, batch_size: int, gamma: float, reward_clip: float) -> None:
        self.reward_steps, self.batch_size, self.gamma, self.reward_clip = reward_steps, batch_size, gamma, reward_clip
        self.open: list[deque[tuple[Tensor, int, float]]]
        self.new_games(num_envs)
        self.complete: list[Experience] = []

    def push(self, rollout: Rollout) -> list[list[Experience]]:
        """Take a rollout in and give back the batches that are now full."""
        obs = torch.cat([rollout.obs, rollout.next_obs[None]]).cpu()  # [T + 1, N, ...], own memory
        finals = {tuple(i): o.cpu() for i, o in zip(rollout.final_index.tolist(), rollout.final_obs, strict=True)}
        rewards = rollout.rewards.clamp(-self.reward_clip, self.reward_clip) if self.reward_clip else rollout.rewards
        actions, clipped = rollout.actions.tolist(), rewards.tolist()
        terminated, truncated = rollout.terminated.tolist(), rollout.truncated.tolist()
        for t in range(len(actions)):
            for n, window in enumerate(self.open):
                window.append((obs[t, n], actions[t][n], clipped[t][n]))
                if terminated[t][n] or truncated[t][n]:
                    while window:
                        self._emit(window, finals.get((t, n)))
                elif len(window) == self.reward_steps:
                    self._emit(window, obs[t + 1, n])
        full = len(self.complete) // self.batch_size * self.batch_size
        ready, self.complete = self.complete[:full], self.complete[full:]
        return [ready[i : i + self.batch_size] for i in range(0, full, self.batch_size)]

    def new_games(self, num_envs: int) -> None:
        """Forget the open windows: the games of `num_envs` environments begin anew."""
        self.open = [deque() for _ in range(num_envs)]

    def state_dict(self) -> dict[str, Any]:
        """The open windows and the transitions that wait for a full batch."""
        return {"open": [list(window) for window in self.open], "complete": [tuple(e) for e in self.complete]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.open = [deque(window) for window in state["open"]]
        self.complete = [Experience(*fields) for fields in state["complete"]]

    def _emit(self, window: deque[tuple[Tensor, int, float]], last_state: Tensor | None) -> None:
        reward = 0.0
        for _, _, r in reversed(window):
            reward = r + self.gamma * reward
        length = len(window)
        state, action, _ = window.popleft()
        self.complete.append(Experience(state, action, reward, last_state, length))
