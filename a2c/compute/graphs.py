"""Functions of tensors that are replayed over static buffers.

A network of this size keeps a GPU busy for less time than Python needs to call its operators one by one. A CUDA graph
records them once and starts all of them with one call. It reads its arguments from the same memory each time, writes
its results to the same memory, and runs no Python: nothing in it may depend on a value on the host. `EagerReplay`
calls the function instead, over the same kind of buffers, so whatever depends on them can be tested without a GPU.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

# What Adam says when it warms up; a capture needs the setting that it warns of.
warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

TensorFunction = Callable[..., Sequence[Tensor]]
WARM_UP = 3  # calls before a capture: libraries choose their kernels and allocate their memory in the first ones


class Replay(Protocol):
    """A function that is replayed."""

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The results for `inputs`, of the shapes of the first ones: tensors that the next call overwrites."""


def make_replay(
    function: TensorFunction,
    inputs: Sequence[Tensor],
    device: torch.device,
    changes: Sequence[Tensor] = (),
    generator: torch.Generator | None = None,
) -> Replay:
    """A CUDA graph of `function(*inputs)` on a GPU, elsewhere an `EagerReplay`.

    `changes`: what the function changes in place, and `generator`: what it draws from; the calls that prepare a
    replay leave both as they were. No other thread may use the GPU meanwhile.
    """
    kind = GraphReplay if device.type == "cuda" else EagerReplay
    with unchanged(changes, generator):
        return kind(function, [tensor.clone() for tensor in inputs], generator)


class EagerReplay:
    """Calls the function, over static buffers."""

    def __init__(
        self, function: TensorFunction, inputs: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> None:
        """`inputs`: the buffers. The function is called, and draws from `generator`."""
        self.function, self.inputs = function, inputs
        self.outputs = [tensor.clone() for tensor in function(*inputs)]

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        _copy(self.inputs, inputs)
        _copy(self.outputs, self.function(*self.inputs))
        return self.outputs


class GraphReplay:
    """Replays a CUDA graph of the function."""

    def __init__(
        self, function: TensorFunction, inputs: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> None:
        """`inputs`: the buffers. The function is called, and draws from `generator`."""
        self.function, self.inputs = function, inputs  # kept: a graph reads memory that the function refers to
        # Graphs of one stream share cuBLAS's workspace, which the first of them that is deleted may free.
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        _warm_up(function, inputs, self.stream)
        self.graph: Any = torch.cuda.CUDAGraph()
        if generator is not None:  # each replay then draws new numbers
            self.graph.register_generator_state(generator)
        gc.collect()  # a dead graph that Python deleted during the capture would end it
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.outputs = list(function(*inputs))

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.outputs


def _warm_up(function: TensorFunction, inputs: Sequence[Tensor], side: Any) -> None:
    """Call `function` on the stream `side`, which will capture it: what it allocates must not belong to another one."""
    caller = torch.cuda.current_stream()
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function(*inputs)
    caller.wait_stream(side)


@contextmanager
def unchanged(tensors: Sequence[Tensor], generator: torch.Generator | None = None) -> Iterator[None]:
    """Give `tensors` and `generator` back the state that they had at the beginning."""
    before = [tensor.detach().clone() for tensor in tensors]
    drawn = None if generator is None else generator.get_state()
    yield
    with torch.no_grad():
        _copy(tensors, before)
    if generator is not None and drawn is not None:
        generator.set_state(drawn)


def _copy(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for mine, theirs in zip(to, tensors, strict=True):
        mine.copy_(theirs, non_blocking=True)
