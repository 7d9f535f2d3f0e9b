"""An environment that fails on order. Workers import this module: nothing heavy may enter it."""

import time
from pathlib import Path

import gymnasium as gym


class TroubledEnv(gym.Env):
    """CartPole whose 150th step raises, or sleeps for ever, when the file of this test says so."""

    def __init__(self, file: str) -> None:
        self.cartpole = gym.make("CartPole-v1").unwrapped
        self.observation_space, self.action_space = self.cartpole.observation_space, self.cartpole.action_space
        self.file, self.count = file, 0

    def reset(self, *, seed=None, options=None):
        return self.cartpole.reset(seed=seed)

    def step(self, action):
        self.count += 1
        order = Path(self.file)
        if self.count == 150 and order.exists():
            what = order.read_text()
            if "once" in what:
                order.unlink(missing_ok=True)
            if "hang" in what:
                time.sleep(1e6)
            raise ValueError("the pole broke")
        return self.cartpole.step(action)
