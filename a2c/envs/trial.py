"""Saved games are first restored in a process that may die of them. It must not import torch.

An emulator takes its state as bytes, unchecked: damaged ones can corrupt the memory of its process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gymnasium.envs.registration import EnvSpec

from a2c.config.config import Config
from a2c.envs.make import START_TIMEOUT
from a2c.envs.single import checked_spec, is_atari, make_snapshot_env
from a2c.processes.start import OURS, settle_in, without_main, worker_context

DECISIONS = 8  # that each restored game is played for
READY = -1  # first message of the process; those after it are the numbers of games that were tried


def can_go_on(config: Config, games: Any) -> bool:
    """Whether all emulators take the states in `games`, what `MonitoredVectorEnv.state_dict` gave, back exactly.

    Games of other environments are not tried: their states are plain numbers. ValueError, in one line, where a
    state is damaged or its process dies or hangs.
    """
    spec = checked_spec(config)
    if not is_atari(spec):
        return True
    snapshots = [snapshot for group in games if group is not None for snapshot in group["snapshots"]]
    return not snapshots or _try_all(config, spec, snapshots)


def _try_all(config: Config, spec: EnvSpec, snapshots: Sequence[Any]) -> bool:
    context: Any = multiprocessing.get_context(worker_context(["a2c.envs.make"]))
    here, there = context.Pipe(duplex=False)
    arguments = (config, spec, snapshots, there)
    process = context.Process(target=_restore_and_play, args=arguments, name=OURS, daemon=True)
    tried, exact = READY, True
    with without_main():
        process.start()
    there.close()
    try:
        with suppress(EOFError, OSError):
            while here.poll(max(config.env_timeout, START_TIMEOUT if tried == READY else 0)):
                news = here.recv()
                if isinstance(news, str):
                    raise ValueError(f"game {tried + 1}: {news}")
                tried, exact = news[0], exact and news[1]
        process.join(config.env_timeout)  # a heap that is damaged may show at the end
        if process.exitcode != 0:
            how = "hung" if process.exitcode is None else f"died ({process.exitcode})"
            raise ValueError(f"game {max(tried, 0)} or one near it: a process that restored it {how}")
        return exact
    finally:
        process.kill()
        process.join()
        here.close()


def _restore_and_play(config: Config, spec: EnvSpec, snapshots: Sequence[Any], pipe: Connection) -> None:
    """What the process runs: one environment takes each state in turn."""
    settle_in()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of a corrupted heap
    _leave_no_core()
    env: Any = make_snapshot_env(config, spec, 0)
    env.reset(seed=0)
    pipe.send((READY, True))
    for number, snapshot in enumerate(snapshots):
        env.snapshot = snapshot
        if env.refusal:
            pipe.send(env.refusal)
            return
        exact = env.exact
        for t in range(DECISIONS):
            _, _, terminated, truncated, _ = env.step(t % 2)
            if terminated or truncated:
                env.reset()
        env.snapshot = snapshot
        pipe.send((number, exact and env.exact))
    env.close()


def _leave_no_core() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
