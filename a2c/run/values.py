"""Nested values as a checkpoint may hold them: plain ones and tensors, no NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

ARRAY, SCALAR = "numpy array", "numpy scalar"  # the only key of a dict that holds one of these


def to_tensors(value: Any) -> Any:
    """Nested values as a checkpoint may hold them, tensors as copies: NumPy arrays and scalars become tensors, too."""
    if isinstance(value, torch.Tensor):
        return value.clone()  # layers may share it: a file whose content is larger than itself counts as damaged
    if isinstance(value, np.ndarray | np.generic):
        return {ARRAY if isinstance(value, np.ndarray) else SCALAR: torch.from_numpy(np.array(value))}
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_tensors(item) for item in value)
    return value


def to_arrays(value: Any) -> Any:
    """The inverse of `to_tensors`, as a copy."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return value[ARRAY].clone().numpy()
        if set(value) == {SCALAR}:
            return value[SCALAR].numpy()[()]
        return {key: to_arrays(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_arrays(item) for item in value)
    return value
