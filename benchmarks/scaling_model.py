"""A model of training on many ranks, from what `scaling.py` has measured on one machine.

::

    seconds per rollout = D * w / cores + U * (s + a)

D decisions and U optimiser steps per rollout; w: core seconds that each decision costs (emulator, acting, learning);
s: seconds of one optimiser step, which every rank takes in full; a: seconds of one all-reduce. Threads of one rank
share s and need no all-reduce.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

BANDWIDTH = 1.25e9  # bytes per second between hosts: 10 Gbit/s
LATENCY = 50e-6  # seconds of one message between hosts
LOCAL_LATENCY = 20e-6  # and within one; all three are assumptions
TERMS = 10  # of the loss, which travel with the gradient


class Model(NamedTuple):
    """What one machine's figures say."""

    per_decision: float  # core seconds: w
    per_step: float  # seconds: s
    steps: int  # optimiser steps per rollout: U
    rollout_steps: int
    num_envs: int  # of the measurement
    numbers: int  # in the gradient
    measured: dict[int, float]  # all-reduce on one host, by ranks (seconds)

    def seconds(self, ranks: int, threads: int, num_envs: int, hosts: int = 1) -> float:
        """Wall time of one rollout and of learning from it."""
        decisions = self.rollout_steps * num_envs
        work = decisions * self.per_decision / (ranks * threads)
        return work + self.steps * (self.per_step + self.all_reduce(ranks, hosts))

    def speed(self, ranks: int, threads: int, num_envs: int, hosts: int = 1) -> float:
        """Decisions per second."""
        return self.rollout_steps * num_envs / self.seconds(ranks, threads, num_envs, hosts)

    def all_reduce(self, ranks: int, hosts: int = 1) -> float:
        """Seconds of one: a ring over all ranks passes on 2 (ranks - 1) parts of 1 / ranks of the gradient each.

        On one host the bytes take what they took between two ranks of the measurement.
        """
        if ranks == 1:
            return 0.0
        parts = 2 * (ranks - 1)
        if hosts == 1:
            return self.measured[2] * parts / ranks + (parts - 2) * LOCAL_LATENCY
        return parts / ranks * self.bytes / BANDWIDTH + parts * LATENCY

    def cores(self, target: float, num_envs: int, threads: int = 1) -> int | None:
        """The fewest cores of one host that reach `target` decisions per second; None where no number does."""
        for ranks in range(1, 1 + num_envs):
            if self.speed(ranks, threads, num_envs) >= target:
                return ranks * threads
        return None

    def hosts(self, target: float, num_envs: int, ranks: int, threads: int = 1) -> int | None:
        """The fewest hosts of `ranks` ranks that reach `target` decisions per second; None where no number does."""
        for hosts in range(1, 1 + num_envs // ranks):
            if self.speed(hosts * ranks, threads, num_envs, hosts) >= target:
                return hosts
        return None

    @property
    def bytes(self) -> int:
        """Bytes that an all-reduce adds up."""
        return 4 * (self.numbers + TERMS)

    def core_hours(self, frames: float, frames_per_decision: int = 4) -> float:
        """Core hours of so many frames, where nothing is lost to waiting."""
        return frames / frames_per_decision * self.per_decision / 3600


def fit(figures: dict[str, Any]) -> Model:
    """The model of a file that `scaling.py` wrote: from its run on one rank of one thread, and its single steps.

    ValueError where the file has no such run, or no layout of two ranks.
    """
    config, reduce = figures["config"], figures["all_reduce"]
    layouts = {(row["ranks"], row["threads"]): row for row in figures["layouts"]}
    if (1, 1) not in layouts or "2" not in reduce["milliseconds"]:
        raise ValueError(f"layouts must include 1x1 and one of two ranks, got {[*layouts]}")
    alone = layouts[1, 1]
    steps, per_step = config["num_minibatches"] * config["epochs"], figures["optimizer_milliseconds"] / 1000
    decisions = config["rollout_steps"] * config["num_envs"]
    per_decision = 1 / statistics.median(alone["speeds"]) - steps * per_step / decisions
    measured = {int(ranks): time / 1000 for ranks, time in reduce["milliseconds"].items()}
    return Model(
        per_decision, per_step, steps, config["rollout_steps"], config["num_envs"], reduce["numbers"], measured
    )
