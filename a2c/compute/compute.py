"""Where the arithmetic runs: device, precision and one compute thread per core.

Each thread works on its own share, of the environments while acting, of the minibatch while learning, and runs
its operators alone. Threads of OpenMP inside an operator are faster on many idle cores, but several times slower
where another program needs one of the cores (docs/performance.md).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from a2c.compute.ranks import Ranks
from a2c.config.config import Config
from a2c.config.resolve import allows_cuda_graphs
from a2c.processes.limits import available_cores

_open = 0  # instances of `Compute` that are in use
_callers: tuple[int, bool] = (1, False)  # threads and determinism before the first of them

SMALLEST_SPLIT = 20  # samples of the smallest minibatch that two threads share
TICK = 1.0  # seconds that one wait takes at most
PATIENCE = 1.0  # seconds that an interrupted run waits for its threads


class Compute:
    """Device, precision and thread pool of a run.

    Where the GPU is asked for and there is none, `device` is the CPU. A GPU becomes the current device of the caller's
    thread, also after `close`. Until `close`, operators called in that thread and in new ones are single-threaded.
    `deterministic` also sets the environment variable CUBLAS_WORKSPACE_CONFIG, which stays; torch reads it at the
    first matrix product of the process on a GPU, so a program that has used the GPU before must set it itself.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        global _open, _callers
        if not _open:
            _callers = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        _open += 1
        self._restore = weakref.finalize(self, _restore_callers_settings)  # also where nobody calls `close`
        self._restore.atexit = False
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA's matrix products ask for
            torch.use_deterministic_algorithms(True)
        cuda = config.cuda and torch.cuda.is_available()
        self.ranks = ranks = ranks or Ranks()
        self.device = cuda_device(ranks.local_rank, ranks.local_size) if cuda else torch.device("cpu")
        prepare_thread(self.device)
        self.cuda_graphs = cuda and ranks.size == 1 and allows_cuda_graphs(config)  # A2C captures CUDA graphs
        self.precision = resolve_precision(config.precision, self.device)
        cores = config.threads or max(1, available_cores() // ranks.local_size)
        # On a GPU two groups are enough: one acts while the other's environments step.
        self.threads = min(cores, 2) if cuda else cores
        self.env_groups = max(1, min(self.threads, len(ranks.rows(config.num_envs)) // 8))
        self.threads_per_group = max(1, cores // self.env_groups)
        self.pool = ThreadPoolExecutor(self.threads, "a2c-compute", initializer=prepare_thread, initargs=(self.device,))
        self.calls: list[Future[Any]] = []  # of the last `map`
        self.hangs = False  # one of them, when `wait_idle` last looked

    @property
    def precision_name(self) -> str:
        """The precision as `--precision` names it."""
        return str(self.precision).removeprefix("torch.")

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        """Call `function` on each item in the compute threads; results in order, errors once all are done."""
        work = list(zip(*items, strict=True))
        # Made before a thread begins: Ctrl-C may come between the start of a call and the end of `submit`.
        calls = self.calls = [Future() for _ in work]
        for call, arguments in zip(calls, work, strict=True):
            self.pool.submit(_answer, call, function, arguments)
        while wait(calls, TICK).not_done:  # Python handles a signal that came just before a wait only after it
            pass
        return [call.result() for call in calls]

    def wait_idle(self) -> bool:
        """Wait for the threads, also after an interrupted `map`; False if one hangs, which is waited for only once."""
        self.hangs = bool(wait(self.calls, 0.0 if self.hangs else PATIENCE).not_done)
        return not self.hangs

    def shards(self, size: int) -> int:
        """Number of shards to split `size` samples into: at most one per thread; one on a GPU.

        More cost more than they save: probably they wait for the GIL, and one adds up all gradients. For 160 to 170
        samples three were best on 16 cores, or within 6 % (docs/performance.md). For other sizes the root is a guess.
        """
        return 1 if self.device.type == "cuda" else min(self.threads, 1 + math.isqrt(size // SMALLEST_SPLIT))

    def close(self) -> None:
        """End the threads, except one that hangs; the last `Compute` to close restores the caller's settings."""
        self.pool.shutdown(wait=self.wait_idle(), cancel_futures=True)
        self._restore()


def _answer(call: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call `function` and pass on what it returns or raises."""
    try:
        call.set_result(function(*arguments))
    except BaseException as error:
        call.set_exception(error)


def _restore_callers_settings() -> None:
    global _open
    _open -= 1
    if not _open:
        torch.set_num_threads(_callers[0])  # of this thread and of new ones: torch has no more to offer
        if torch.are_deterministic_algorithms_enabled() != _callers[1]:  # imports a lot, which Ctrl-C may have cut off
            torch.use_deterministic_algorithms(_callers[1])


def cuda_device(local_rank: int = 0, local_size: int = 1) -> torch.device:
    """The GPU of rank `local_rank` of this host, with an explicit index: `cuda` alone is the current GPU of
    whichever thread asks. ValueError, for each of the host's `local_size` ranks, if there are fewer GPUs.
    """
    count = torch.cuda.device_count()
    if local_size > count:
        raise ValueError(f"there must be a GPU for each rank of a host, got {count} for {local_size}")
    return torch.device("cuda", local_rank)


def prepare_thread(device: torch.device) -> None:
    """Run the operators of this thread on one thread, and those of a GPU on `device`."""
    torch.get_num_threads()  # the first call adopts the process's count: before the next line, not after
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `name` stands for; `auto`: bfloat16 where `device` supports it natively, else float32."""
    if name != "auto":
        precision: torch.dtype = getattr(torch, name)
        return precision
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    # torch.cpu.get_capabilities, which is public, came with torch 2.11.
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
