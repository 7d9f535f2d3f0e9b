"""An environment that fails on order. Workers import this module: nothing heavy may enter it."""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class TroubledEnv(gym.Env):
    """CartPole whose 150th step raises, or sleeps for ever, when the file of this test says so."""

    def __init__(self, file: str) -> None:
        self.cartpole = gym.make("CartPole-v1").unwrapped
        self.observation_space, self.action_space = self.cartpole.observation_space, self.cartpole.action_space
        self.file, self.count, self.dying = file, 0, False

    def close(self):
        if self.dying:  # before the message about the error has left the process
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, *, seed=None, options=None):
        return self.cartpole.reset(seed=seed)

    def step(self, action):
        self.count += 1
        if self.count == 150 and (what := self._order()):
            if "hang" in what:
                Path(self.file).with_name("hanging").touch()
                time.sleep(1e6)
            if "nan" in what:
                return np.full(4, np.nan, np.float32), 1.0, False, False, {}
            self.dying = "die" in what
            raise ValueError("the pole broke")
        return self.cartpole.step(action)

    def _order(self) -> str:
        """What to do; "once" is an order for the first of all environments that takes its file away."""
        try:
            what = Path(self.file).read_text()
            if "once" in what:
                Path(self.file).unlink()
        except FileNotFoundError:
            return ""
        return what


class Flicker(gym.Env):
    """Noise whose frames depend on the seed and the step alone; each game of 7 steps has its brightness."""

    observation_space, action_space = gym.spaces.Box(0, 255, (1, 12, 12), np.uint8), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright, self.count = int(self.np_random.integers(20, 250)), 0
        return self._frame(), {}

    def step(self, action):
        self.count += 1
        return self._frame(), 1.0, self.count == 7, False, {}

    def _frame(self):
        return self.np_random.integers(0, self.bright, (1, 12, 12), dtype=np.uint8)


def half_a_message(pipe):
    """A worker that is stopped inside of a message."""
    os.write(pipe.fileno(), (1_000_000).to_bytes(4, "big") + b"x" * 1000)
    time.sleep(1e6)


def silence(pipe):
    """A worker that never says anything."""
    time.sleep(1e6)


def death(pipe):
    """A worker that is killed."""
    pipe.send("first")
    os.kill(os.getpid(), signal.SIGKILL)


def mistake(pipe):
    """A worker with a bug."""
    raise KeyError("nothing there")


def two_words(first, second, pipe):
    """A worker that does its part."""
    pipe.send(first)
    pipe.send(second)


def chatter_or_silence(chatter, pipe):
    """Two workers: one that always has something to say, one that stops after the first word."""
    pipe.send("first")
    while chatter:
        pipe.send("more")
    time.sleep(1e6)


def patience(pipe):
    """Says a word, waits for leave, and then takes its time."""
    pipe.send("a word")
    pipe.recv_bytes()
    time.sleep(1.4)
    pipe.send("another")
    time.sleep(60)
