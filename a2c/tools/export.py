"""Export: the policy of a run as one small file, to keep or to publish."""

from __future__ import annotations

import os
from pathlib import Path

from a2c.run.policies import save_policy
from a2c.tools.load import load_policy


def export(run_dir: str | Path, out: str | Path, *, checkpoint: str | None = None, half: bool = False) -> int:
    """Write the policy of a run's checkpoint to the new file `out`, and return its env_steps.

    It is a policy file (`a2c.run.policies`) and ends in `.pt`; `half`: with parameters as float16. Raises
    ValueError for another ending, a file that exists, a missing directory, or a parameter that is too large for
    float16, OSError where the file cannot be written, and what `load_policy` raises.
    """
    out = Path(out)
    if out.suffix != ".pt":
        raise ValueError(f"out must end in .pt, got {str(out)!r}")
    if os.path.lexists(out):
        raise ValueError(f"out must be a new file, got {str(out)!r}, which exists")
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {str(out)!r}")
    _, _, state = load_policy(Path(run_dir), checkpoint)
    try:
        save_policy(out, state, half)
    except OSError as error:
        raise OSError(f"{out} could not be written: {error}") from error
    env_steps: int = state["env_steps"]
    return env_steps
