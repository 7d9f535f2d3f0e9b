"""A device that any machine has: tensors with real numbers that refuse to meet those of the CPU, as a GPU's do.

A `DeviceTensor` says that it is on the device `meta` and keeps its numbers in a tensor on the CPU. `FakeDevice` runs
every operator of its thread, raises where a tensor was left on the CPU, and notes each time that a GPU would have been
waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.resolve import allows_cuda_graphs

DEVICE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}  # what may have tensors of two devices
WAITS = {
    aten._local_scalar_dense.default: "a number is read",
    aten.nonzero.default: "a mask is searched",
    aten.masked_select.default: "a mask is searched",
    aten.equal.default: "a comparison is read",
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the device, with its numbers in `value`."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> DeviceTensor:
        size, stride, offset = value.shape, value.stride(), value.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=value.dtype, device=DEVICE
        )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} runs in a thread without FakeDevice")


class FakeDevice(TorchDispatchMode):
    """While it is entered, `torch.device("meta")` is a device like a GPU.

    `waits`: why the host would have waited for it, in order; `fetched`: copies to the host that an event waits for.
    Raises where memory of the host is written to while the device may still read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.fetched = 0
        self.read: list[torch.UntypedStorage] = []  # what the device reads, since the last wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta and not isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise RuntimeError(f"{func}: torch.tensor(..., device=...) makes a tensor on the host, and waits")
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        to = kwargs.get("device")
        made = to is not None and torch.device(to).type == DEVICE.type
        if not ours and not made:
            self._check_write(func, args)
            return func(*args, **kwargs)
        if func in COPIES:
            self._note_copy(func, args, kwargs)
        else:
            self._check(func, args, [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)])
        if made:
            kwargs["device"] = "cpu"
        out = func(*tree_map(_value, args), **tree_map(_value, kwargs))
        if func is aten._local_scalar_dense.default or (func is aten._to_copy.default and to is not None and not made):
            return out.clone() if isinstance(out, torch.Tensor) else out  # on the host
        if func is aten.copy_.default:
            return args[0]
        if func is aten._to_copy.default:
            return DeviceTensor(out)
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_on_device, out)) if ours else _on_device(out)

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        to_copy = func is aten._to_copy.default
        source = args[0] if to_copy else args[1]
        target = torch.device(kwargs.get("device") or source.device) if to_copy else args[0].device
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        fetches = isinstance(source, DeviceTensor) and target.type == "cpu"
        if source.device.type == target.type:
            return
        if waits:
            self.waits.append(f"a copy {'from' if fetches else 'to'} the device")
        self.fetched += fetches and not waits
        if fetches or waits:  # nobody uses what was fetched before its event
            self.read.clear()
        else:
            self.read.append(source.untyped_storage())

    def _check_write(self, func: Any, args: Any) -> None:
        if func is aten.copy_.default and args[0].device.type == "cpu":
            written = args[0].untyped_storage().data_ptr()
            if written in (storage.data_ptr() for storage in self.read):
                raise RuntimeError("memory is written to while the device may still read it")

    def _check(self, func: Any, args: Any, others: list[torch.Tensor]) -> None:
        if func in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices):
                self.waits.append("a mask is searched")
            if any(not isinstance(index, DeviceTensor) for index in indices):
                self.waits.append("an index crosses")
        elif func in WAITS:
            self.waits.append(WAITS[func])
            self.read.clear()
        scalars = torch.Tag.pointwise in func.tags  # such an operator of a GPU takes a number from the CPU
        for tensor in others if func not in INDEXING else ():
            if tensor.dim() or not scalars:
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device, got one on the CPU")


class DeviceCompute(Compute):
    """A run's `Compute` with this device; its threads' work is done in the caller's, in order."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.device, self.cuda_graphs = DEVICE, allows_cuda_graphs(config)

    def map(self, function: Callable[..., Any], *items: Any) -> list[Any]:
        return [function(*arguments) for arguments in zip(*items, strict=True)]

    def shards(self, size: int) -> int:
        return 1


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's generators and fused optimisers take the device."""
    generator = torch.Generator
    stand_in = type("Generator", (), {"__new__": lambda cls, device="cpu": generator("cpu")})
    monkeypatch.setattr(torch, "Generator", stand_in)
    for name in ("torch.optim.adam", "torch.optim.optimizer"):  # the versions of torch have it in one of them
        module, kinds = import_module(name), ["cpu", DEVICE.type]
        monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda kinds=kinds: kinds, raising=False)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of either device."""
    return tensor.detach().value if isinstance(tensor, DeviceTensor) else tensor.detach()


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, DeviceTensor) else leaf


def _on_device(leaf: Any) -> Any:
    return DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
