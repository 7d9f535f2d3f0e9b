"""Sliding n-step windows over the rollouts of a2c (`--sliding-batch`)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from a2c.config.config import Config
from a2c.rollout import Rollout
from a2c.transitions import Experience, Transitions


def make_windows(config: Config, net: nn.Module) -> SlidingWindows | None:
    """The windows of `--sliding-batch`, None without it; ValueError for a recurrent `net`, whose state they lack."""
    if not config.sliding_batch:
        return None
    if getattr(net, "rnn_state_size", 0):
        raise ValueError(f"network must not be recurrent when sliding_batch is set, got {config.network}")
    return SlidingWindows(config.num_envs, config.rollout_steps, config.sliding_batch, config.gamma, config.reward_clip)


class SlidingWindows:
    """Sliding n-step windows, `batch_size` transitions at a time.

    Feed it rollouts; each decision becomes one `Experience` as soon as its window of
    `reward_steps` decisions is complete or its episode ends. Windows run on across updates, so
    up to n - 1 of their rewards come from a slightly newer policy.
    """

    def __init__(self, num_envs: int, reward_steps: int, batch_size: int, gamma: float, reward_clip: float) -> None:
        self.reward_steps, self.batch_size, self.gamma, self.reward_clip = reward_steps, batch_size, gamma, reward_clip
        self.open: list[deque[tuple[Tensor, int, float]]]
        self.new_episodes(num_envs)
        self.complete: list[Experience] = []

    def push(self, rollout: Rollout) -> list[Transitions]:
        """Add a rollout; returns the minibatches that are full now."""
        obs = torch.cat([rollout.obs, rollout.next_obs[None]]).cpu()  # [T + 1, N, ...], a copy
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
                else:
                    while len(window) >= self.reward_steps:  # more than one, where a resumed run has shorter windows
                        self._emit(window, obs[t + 1, n])
        full = len(self.complete) // self.batch_size * self.batch_size
        ready, self.complete = self.complete[:full], self.complete[full:]
        return [Transitions(ready[i : i + self.batch_size]) for i in range(0, full, self.batch_size)]

    def new_episodes(self, num_envs: int) -> None:
        """Drop the open windows: new episodes begin in `num_envs` environments."""
        self.open = [deque() for _ in range(num_envs)]

    def state_dict(self) -> dict[str, Any]:
        """The open windows and the transitions that wait for a full minibatch."""
        return {"open": [list(window) for window in self.open], "complete": [tuple(e) for e in self.complete]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.open = [deque(window) for window in state["open"]]
        self.complete = [Experience(*fields) for fields in state["complete"]]

    def _emit(self, window: deque[tuple[Tensor, int, float]], last_state: Tensor | None) -> None:
        reward = 0.0
        for _, _, r in reversed(window):
            reward = r + self.gamma * reward
        length = len(window)
        state, action, _ = window.popleft()
        self.complete.append(Experience(state, action, reward, last_state, length))
