"""Export: the policy of a run as one small file, to keep, to publish, or to use without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from a2c.config.extras import has_extra
from a2c.config.validation import check_ending, check_parent
from a2c.envs.single import EnvFn
from a2c.metrics.files import write_atomically
from a2c.networks import NetworkFn
from a2c.run.policies import save_policy
from a2c.tools.load import Custom, load_policy
from a2c.tools.onnx_model import onnx_model


class Exported(NamedTuple):
    """Which policy a file holds."""

    checkpoint: Path
    env_steps: int  # decisions that it has learned from


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str | None = None,
    half: bool = False,
    network: NetworkFn | None = None,
    env_fn: EnvFn | None = None,
) -> Exported:
    """Write the policy of a run's checkpoint to the new file `out`, and say which it was.

    `out` ends in `.pt`, a policy file (`a2c.run.policies`), or in `.onnx`, a model for other runtimes
    (`a2c.tools.onnx_model`). `half`, for `.pt`: with parameters as float16. `network` and `env_fn`: what the `Trainer`
    was given. Raises ValueError for another ending, a file that exists, a missing directory or package, or a parameter
    that is too large for float16, OSError if the file cannot be written, and what `load_policy` and `onnx_model` raise.
    """
    out = Path(out)
    _check(out, half)
    policy = load_policy(run_dir, checkpoint, custom=Custom(network, env_fn))
    model = onnx_model(policy.config, policy.net, policy.state) if out.suffix == ".onnx" else b""
    try:
        if model:
            write_atomically(out, model)
        else:
            save_policy(out, policy.state, half)
    except OSError as error:
        raise OSError(f"{out} could not be written: {error}") from error
    return Exported(policy.checkpoint, policy.env_steps)


def _check(out: Path, half: bool) -> None:
    check_ending(out, [".pt", ".onnx"])
    if out.suffix == ".onnx" and half:
        raise ValueError("half must be off where out ends in .onnx, got True")
    if os.path.lexists(out):
        raise ValueError(f"out must be a new file, got {str(out)!r}, which exists")
    check_parent(out)
    if out.suffix == ".onnx" and not has_extra("onnx"):
        raise ValueError(f'out must end in .pt without the packages of pip install "a2c[onnx]", got {str(out)!r}')
