"""`a2c train --help`: the options that are changed most often, in groups; `--help-all` lists every one."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from a2c.config.config import Config, field_docs
from a2c.config.presets import PRESETS

GROUPS = {
    "What to train": ("preset", "env", "algorithm"),
    "Environments": ("backend", "num_envs"),
    "Learning": ("rollout_steps", "epochs", "gamma", "learning_rate", "total_env_steps"),
    "Run": ("seed", "target_score", "run_dir", "resume"),
    "Machine": ("cuda", "threads"),
}
UNSET = {"target_score": "SCORE", "run_dir": "DIR", "resume": "DIR"}  # shown for None


def print_help(prog: str, defaults: Config) -> None:
    """Print the options in `GROUPS` with their values in `defaults`."""
    console = Console(highlight=False)
    texts = field_docs()
    console.print(f"usage: {prog} [OPTIONS]\n\nTrain an agent. Presets: {', '.join(PRESETS)}.", markup=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group, names in GROUPS.items():
        table.add_row(group)
        for name in names:
            value, flag = getattr(defaults, name), f"  --{name.replace('_', '-')}"
            shown = UNSET[name] if value is None else value
            table.add_row(flag if isinstance(value, bool) else f"{flag} {shown}", texts[name])
    console.print(table, markup=False)
    console.print(f"\nValues are those of preset {defaults.preset}. --help-all lists every option.", markup=False)
