"""The extras of this package, such as `pip install "a2c[report]"`, and which of them are installed."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "report": ("jinja2", "plotly"),
    "tensorboard": ("tensorboard",),
    "video": ("av",),
    "wandb": ("wandb",),
}


def has_extra(name: str) -> bool:
    """Whether the packages of an extra are installed; a mere directory of that name, without code, does not count."""
    specs = [find_spec(package) for package in PACKAGES[name]]
    return all(spec is not None and spec.origin is not None for spec in specs)
