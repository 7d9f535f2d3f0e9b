"""Restoring saved Atari episodes in a process of its own first, which may crash.

An emulator restores its state from bytes that it does not check: damaged ones can corrupt the memory of its process.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gymnasium.envs.registration import EnvSpec

from a2c.config.config import Config
from a2c.envs.single import checked_spec, is_atari, make_snapshot_env
from a2c.processes.start import START_TIMEOUT, WORKER_NAME, end_processes, prepare_worker, without_main, worker_context

STEPS = 8  # taken in each restored environment
READY = -1  # in the first message of the process; later ones have the row of the environment that was tried


def restores_exactly(config: Config, states: Any) -> bool:
    """Whether every emulator is restored exactly from `states`, a list of `MonitoredVectorEnv.state_dict()`.

    Environments other than Atari games are not tried: their states are plain values. Raises ValueError, in one line,
    where a state is damaged, or where the process that restores it dies or hangs.
    """
    spec = checked_spec(config)
    if not is_atari(spec):
        return True
    snapshots = [snapshot for group in states if group is not None for snapshot in group["snapshots"]]
    return not snapshots or _try_all(config, spec, snapshots)


def _try_all(config: Config, spec: EnvSpec, snapshots: Sequence[Any]) -> bool:
    context: Any = multiprocessing.get_context(worker_context(["a2c.envs.make"]))
    here, there = context.Pipe(duplex=False)
    arguments = (config, spec, snapshots, there)
    process = context.Process(target=_restore_and_step, args=arguments, name=WORKER_NAME, daemon=True)
    tried, exact = READY, True
    with without_main():
        process.start()
    there.close()
    try:
        with suppress(EOFError, OSError):
            while here.poll(max(config.env_timeout, START_TIMEOUT if tried == READY else 0)):
                message = here.recv()
                if isinstance(message, str):
                    raise ValueError(f"environment {tried + 1}: {message}")
                tried, exact = message[0], exact and message[1]
        process.join(config.env_timeout)  # a damaged heap may show only when the process ends
        if process.exitcode != 0:
            how = "hung" if process.exitcode is None else f"died ({process.exitcode})"
            raise ValueError(f"environment {max(tried, 0)} or one near it: the process that restored it {how}")
        return exact
    finally:
        end_processes([process])
        here.close()


def _restore_and_step(config: Config, spec: EnvSpec, snapshots: Sequence[Any], pipe: Connection) -> None:
    """What the process runs: one environment is restored from each snapshot in turn."""
    prepare_worker()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a corrupted heap makes the C library print
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no core file
    env: Any = make_snapshot_env(config, spec, 0)
    env.reset(seed=0)
    pipe.send((READY, True))
    for number, snapshot in enumerate(snapshots):
        env.snapshot = snapshot
        if env.refusal:
            pipe.send(env.refusal)
            return
        exact = env.exact
        for t in range(STEPS):
            _, _, terminated, truncated, _ = env.step(t % 2)
            if terminated or truncated:
                env.reset()
        env.snapshot = snapshot
        pipe.send((number, exact and env.exact))
    env.close()
