"""Where the arithmetic runs: device, precision and one compute thread per core.

Network passes of this size gain little from a second thread inside one operator. They gain
all of it when two threads each work on their own share: half of the environments while
acting, half of the batch while learning. So every thread runs its operators alone, the caller's
too: after an operator on several threads, OpenMP's would spin for milliseconds on cores that
environments need, and a step of the optimiser is bound by memory, which a second thread does not widen.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from a2c.config import Config, available_cores

_open: list[Compute] = []
_callers: tuple[int, bool] = (1, False)  # threads and determinism before the first of `_open`


class Compute:
    """Device, precision and thread pool of a run.

    Where the GPU is asked for and there is none, or the algorithm is a3c, `device` is the CPU.
    Until `close`, torch's operators run on one thread in the caller's thread and in new ones. `deterministic` also
    sets the environment variable CUBLAS_WORKSPACE_CONFIG, which stays.
    """

    def __init__(self, config: Config) -> None:
        global _callers
        if not _open:
            _callers = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        _open.append(self)
        use_one_thread()
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA's matrix products ask for
            torch.use_deterministic_algorithms(True)
        cuda = config.cuda and config.algorithm != "a3c" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.precision = resolve_precision(config.precision, self.device)
        cores = config.threads or available_cores()
        # On a GPU two groups are enough: one acts while the other's environments step.
        self.threads = min(cores, 2) if cuda else cores
        self.env_groups = max(1, min(self.threads, config.num_envs // 8))
        self.threads_per_group = max(1, cores // self.env_groups)
        self.pool = ThreadPoolExecutor(self.threads, "a2c-compute", initializer=use_one_thread)

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        """Call `function` on each item in the compute threads; results in order, errors once all are done."""
        calls = [self.pool.submit(function, *arguments) for arguments in zip(*items, strict=True)]
        wait(calls)
        return [call.result() for call in calls]

    def working_copy(self, net: nn.Module, apart: bool = False) -> nn.Module:
        """The network that acts and learns: `net` itself, or its twin with parameters in bfloat16.

        The float32 parameters of `net` stay the ones that the optimiser moves and checkpoints
        hold; `refresh` carries them over. Normaliser buffers are shared and stay float32.
        `apart`: a copy in any case, because others move the parameters of `net`.
        """
        net.to(self.device)
        if self.precision == torch.float32 and not apart:
            return net
        twin = copy.deepcopy(net)
        twin.normalizer = getattr(net, "normalizer", None)
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(self.precision)
        return twin

    def shards(self, size: int) -> int:
        """Parts that `size` samples are worth learning in, one per thread; one on a GPU."""
        return 1 if self.device.type == "cuda" else max(1, min(self.threads, size // 16))

    def close(self) -> None:
        """End the threads; the last one closed gives the caller back what was set for the run."""
        self.pool.shutdown()
        if self in _open:
            _open.remove(self)
            if not _open:
                torch.set_num_threads(_callers[0])
                torch.use_deterministic_algorithms(_callers[1])


def use_one_thread() -> None:
    """Keep this thread's operators to itself."""
    torch.get_num_threads()  # the first call adopts the process's count: before the next line, not after
    torch.set_num_threads(1)


@torch.no_grad()
def refresh(twin: nn.Module, net: nn.Module) -> None:
    """Give the working copy the parameters that `net` has now, and its statistics where it has its own."""
    if twin is not net:
        torch._foreach_copy_(list(twin.parameters()), list(net.parameters()))
        for mine, theirs in zip(twin.buffers(), net.buffers(), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the processor multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16") else torch.float32
