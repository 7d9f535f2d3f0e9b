"""The runs of a comparison: their names, and what is refused before one of them starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from a2c.config.config import MAY_CHANGE, Config
from a2c.config.resolve import resolve
from a2c.envs.single import probe_spaces
from a2c.metrics.files import read_small
from a2c.tools.read_run import read_series


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    setting: str  # its directory: epochs=2,rollout_steps=20, or the preset where nothing is varied
    varied: Mapping[str, str]  # the fields that are varied, and their values
    config: Config
    flags: tuple[str, ...]  # of `a2c train`, but for the run directory

    @property
    def name(self) -> str:
        """Its run directory in that of the comparison; its log has the same name and ends in .log."""
        return f"{self.setting}/seed-{self.config.seed}"

    @property
    def display_flags(self) -> list[str]:
        """Flags for what may change when it continues, but for where it ends."""
        switches = (("progress", self.config.progress), ("wandb", self.config.wandb))
        flags = [f"--{name}" if on else f"--no-{name}" for name, on in switches]
        return ["--log-every", str(self.config.log_every), *flags]

    @property
    def budget(self) -> int:
        """Decisions at which it ends, should it reach no target."""
        return self.config.session_end

    @property
    def rollout(self) -> int:
        """Decisions of one rollout, of all environments together."""
        return self.config.num_envs * self.config.rollout_steps

    @property
    def keeps_policies(self) -> bool:
        """Whether the policies that it keeps are evaluated once it has ended."""
        return bool(self.config.keep_policy_every) and self.config.target_score is not None


def resolved(runs: Sequence[Run]) -> list[Run]:
    """The runs with the values that `auto`, None and 0 stand for; ValueError for an environment that cannot be made."""
    shapes: dict[str, tuple[int, ...]] = {}
    for run in runs:
        if run.setting not in shapes:
            shapes[run.setting] = probe_spaces(run.config).obs_shape
    return [dataclasses.replace(run, config=resolve(run.config, shapes[run.setting])) for run in runs]


def check_runs(out: Path, runs: Sequence[Run]) -> None:
    """ValueError if a run that `out` holds already has other settings than in `runs`, or has been trained further, or
    if a file or link is in the way.

    The runs are `resolved`.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a directory, got {str(out)!r}")
    if (out / "config.json").exists():
        raise ValueError(f"out must not be the directory of a run, got {str(out)!r}")
    for run in runs:
        for path in (out / run.setting, out / run.name, out / f"{run.name}.log"):
            if path.is_symlink():
                raise ValueError(f"{path} must not be a symbolic link; remove it or use another out")
        settings = out / run.name / "config.json"
        try:
            saved = Config.from_json(read_small(settings))
        except FileNotFoundError:
            continue
        except (TypeError, ValueError) as error:
            why = f"is damaged or of another version of a2c ({error}); use another out"
            raise ValueError(f"{settings} {why}") from error
        for field in dataclasses.fields(Config):
            was, now = getattr(saved, field.name), getattr(run.config, field.name)
            if field.name not in MAY_CHANGE and was != now:
                where = f"as in the run {out / run.name}"
                raise ValueError(f"{field.name} must be {was} {where}, got {now}: use another out")
        made = _env_steps(out / run.name)
        # A run ends after whole rollouts, a3c and ga3c finish those that had begun.
        if made > run.budget + 2 * run.rollout:
            raise ValueError(f"stop_after must be at least {made}, as {out / run.name} has made, got {run.budget}")


def _env_steps(run_dir: Path) -> int:
    """Decisions in the last row of metrics.csv; 0 without one."""
    with suppress(OSError, ValueError):
        return int(read_series(run_dir, "env_steps").env_steps.max(initial=0))
    return 0
