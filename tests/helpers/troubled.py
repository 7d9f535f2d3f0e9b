"""Environments and workers that fail on demand. Worker processes import this module: nothing heavy may be imported."""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class TroubledEnv(gym.Env):
    """CartPole whose 150th step raises, hangs or returns NaN where `file` holds the word for it."""

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
        """What to do; with "once" in it, the file is removed, so that only one environment fails."""
        try:
            what = Path(self.file).read_text()
            if "once" in what:
                Path(self.file).unlink()
        except FileNotFoundError:
            return ""
        return what


class Flicker(gym.Env):
    """Noise that depends on the seed and the step only; each episode of 7 steps has a brightness of its own."""

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
    """A worker that stops inside a message."""
    os.write(pipe.fileno(), (1_000_000).to_bytes(4, "big") + b"x" * 1000)
    time.sleep(1e6)


def hang(pipe):
    """A worker that never sends anything."""
    time.sleep(1e6)


def death(pipe):
    """A worker that is killed."""
    pipe.send("first")
    os.kill(os.getpid(), signal.SIGKILL)


def mistake(pipe):
    """A worker that raises."""
    raise KeyError("nothing there")


def two_words(first, second, pipe):
    """A worker that sends two messages and is done."""
    pipe.send(first)
    pipe.send(second)


def finishing(file, seconds, pipe):
    """A worker that is done, and then takes `seconds` to finish."""

    def finish():
        time.sleep(seconds)
        Path(file).touch()

    return finish


def chatter_or_hang(chatter, pipe):
    """A worker that sends messages without end, or hangs after the first."""
    pipe.send("first")
    while chatter:
        pipe.send("more")
    time.sleep(1e6)


def patience(pipe):
    """A worker that sends a message, waits for the reply, and takes its time for the next message."""
    pipe.send("one")
    pipe.recv()
    time.sleep(1.0)
    pipe.send("another")
    time.sleep(60)


def check_shared(count, tensors, pipe):
    """Sends whether it has been given `count` tensors in shared memory."""
    pipe.send(len(tensors) == count and all(tensor.is_shared() for tensor in tensors))
