"""An environment that is rendered at every step, and a network whose outputs can be shown beside the pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from a2c.processes.errors import raising_worker_error
from a2c.tools.overlay import Thought

NO_PICTURE = np.empty((0, 0, 3), np.uint8)


@contextmanager
def without_window() -> Iterator[None]:
    """In this context SDL, with which classic control draws, opens no display and no audio, unless it is told to."""
    ours = [name for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER") if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "dummy"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class ObservedNet(nn.Module):
    """A network whose last outputs can be read."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.rnn_state_size: int = getattr(net, "rnn_state_size", 0)
        self.logits = self.values = torch.empty(0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`net(obs)`."""
        self.logits, self.values = self.net(obs)
        return self.logits, self.values

    def step(self, obs: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`net.step(obs, rnn_state)`."""
        self.logits, self.values, rnn_state = self.net.step(obs, rnn_state)  # type: ignore[operator]
        return self.logits, self.values, rnn_state

    def thought(self, action: int) -> Thought:
        """The last outputs for a single observation, of which `action` was made."""
        probabilities = self.logits.float().softmax(1)[0].cpu().numpy()
        return Thought(float(self.values.float()[0, 0]), probabilities, action)


class RenderedEpisode(gym.Wrapper):
    """Follows the first episode of an environment, which a vector environment resets at its end.

    `picture [H, W, 3]` (RGB) shows the last observation where the episode is rendered, else nothing.
    """

    def __init__(self, env: gym.Env, render: bool) -> None:
        super().__init__(env)
        self.rendered = render
        self.picture = NO_PICTURE
        self.score, self.length, self.ended = 0.0, 0, False

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; render it if it is the first."""
        result = self.env.reset(**kwargs)
        if not self.ended:
            self.picture = self._render()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One decision, rendered."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.picture = self._render()
        self.score, self.length = self.score + float(reward), self.length + 1
        self.ended = bool(terminated or truncated)
        return obs, reward, terminated, truncated, info

    def check(self, seed: int) -> None:
        """ValueError if the environment cannot be rendered here, WorkerError if it fails."""
        name, modes = self.env.spec and self.env.spec.id, self.env.metadata.get("render_modes")
        with raising_worker_error():
            self.env.reset(seed=seed)
        try:
            with raising_worker_error(gym.error.Error, NotImplementedError):
                picture = self.env.render()
        except (gym.error.Error, NotImplementedError) as error:
            raise ValueError(f"env must be one that can be rendered here, got {name}: {error}") from error
        if not isinstance(picture, np.ndarray):
            if "rgb_array" in (modes or ()):
                raise ValueError(f"env must return an array from render(), got {type(picture).__name__} of {name}")
            raise ValueError(f"env must have the render mode rgb_array, got {name} with {modes}")

    def action_names(self) -> list[str]:
        """What the environment calls its actions, else their numbers."""
        space = self.env.action_space
        assert isinstance(space, gym.spaces.Discrete)  # as `make_env` checks
        names: list[str] = getattr(self.env.unwrapped, "get_action_meanings", lambda: [])()
        return list(names) if len(names) == space.n else [str(space.start + i) for i in range(space.n)]

    def _render(self) -> np.ndarray:
        return np.array(self.env.render()) if self.rendered else NO_PICTURE
