"""The policies that a run has kept, played while it trains, or after it until one reaches the run's target."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from a2c.config.config import Config
from a2c.metrics.files import CsvTable
from a2c.metrics.results import EVALUATION_COLUMNS, read_episodes, read_evaluations
from a2c.processes.errors import WorkerError
from a2c.processes.exits import exit_on_sigterm
from a2c.processes.start import stop_with_input
from a2c.run.checkpoint import LATEST, CheckpointError, load_checkpoint
from a2c.run.policies import kept_policies
from a2c.tools.evaluate import evaluate

EPISODES = 30  # that each policy plays
POLL = 1.0  # seconds between two looks for a new policy
CODE = "import sys; from a2c.tools.frozen import main; sys.exit(main(*sys.argv[1:]))"


def command(run_dir: Path, target: float, threads: int) -> list[str]:
    """The command line of a process that calls `evaluate_kept`, to be started with the `module_environ`."""
    return [sys.executable, "-P", "-c", CODE, str(run_dir), str(target), str(threads)]


def main(run_dir: str, target: str, threads: str) -> int:
    """Entry point of that process, which ends when its standard input is closed."""
    with exit_on_sigterm():
        stop_with_input()
        evaluate_kept(Path(run_dir), float(target), int(threads))
    return 0


def evaluate_kept(run_dir: Path, target: float, threads: int = 0) -> None:
    """Evaluate the run's kept policies and then its last one, until a mean score is `target` or above.

    Begins with the first that took part in a training episode at the target (see `first_candidate`), and always plays
    the last. A row of evaluations.csv is written after each, so that a call continues where another was stopped.
    Raises what `evaluate` raises, and OSError if the disk refuses.
    """
    means = evaluated(run_dir)
    policies = {steps: str(path.relative_to(run_dir)) for steps, path in kept_policies(run_dir).items()}
    state = load_checkpoint(run_dir / LATEST)
    final = state["env_steps"]
    policies.setdefault(final, LATEST)
    first = first_candidate(read_episodes(run_dir), target, Config.from_json(state["config"]))
    wanted = [steps for steps in sorted(policies) if steps >= first or steps == final]
    # A run that was continued may want policies from before what was its last one.
    begin = next((steps for steps in wanted if steps not in means), final + 1)
    table = CsvTable(run_dir / "evaluations.csv", EVALUATION_COLUMNS, keep_until=begin - 1)
    if max((mean for steps, mean in means.items() if steps < begin), default=-np.inf) >= target:
        return
    for steps in [steps for steps in wanted if steps >= begin]:
        scores = evaluate(run_dir, EPISODES, checkpoint=policies[steps], threads=threads)
        table.add([_row(steps, scores)])
        table.write()
        print(f"policy of {steps:,} env_steps: mean {scores.mean():.2f} of {len(scores)} episodes", flush=True)
        if scores.mean() >= target:
            return


def follow_main(run_dir: str, every: str, episodes: str, after: str) -> None:
    """Entry point of the process that `a2c.run.evaluator` starts, which ends when its standard input is closed."""
    with exit_on_sigterm():
        stop_with_input()
        evaluations = Evaluations(Path(run_dir), int(every), int(episodes), int(after))
        while True:
            if not evaluations.evaluate_newest():
                time.sleep(POLL)


class Evaluations:
    """Evaluates the policies that a run keeps while it trains, and writes a row of evaluations.csv for each.

    `every`: env_steps between two of them; `after`: the run starts or continues at these env_steps, and rows after
    them are dropped, or OSError if the disk refuses that. Later, rows wait for a disk that refuses them.
    """

    def __init__(self, run_dir: Path, every: int, episodes: int, after: int) -> None:
        self.run_dir, self.every, self.episodes = run_dir, every, episodes
        self.table = CsvTable(run_dir / "evaluations.csv", EVALUATION_COLUMNS, keep_until=after)
        self.last = max(evaluated(run_dir), default=0)  # env_steps of the last policy that was tried

    def evaluate_newest(self) -> bool:
        """Evaluate the newest policy that is due; older ones are left out. False if there is none.

        One that cannot be played is left out, too: the run may have removed it to go back. ValueError if this
        process does not know its environment.
        """
        steps, path = max(kept_policies(self.run_dir).items(), default=(0, None))
        if path is None or steps // self.every <= self.last // self.every:
            self._write([])
            return False
        self.last = steps
        with suppress(CheckpointError, WorkerError, FloatingPointError):
            self._write([_row(steps, evaluate(path, self.episodes, threads=1))])
        return True

    def _write(self, rows: list[tuple[float, ...]]) -> None:
        with suppress(OSError):
            self.table.add(rows)
            self.table.write()


def _row(env_steps: int, scores: np.ndarray) -> tuple[float, ...]:
    return env_steps, len(scores), scores.mean(), scores.std(), scores.min(), scores.max()


def first_candidate(episodes: dict[str, np.ndarray], target: float, config: Config) -> float:
    """The least env_steps of a policy that acted in a training episode with a score of `target`; else infinite.

    An episode's env_steps are those at the end of its last rollout, and the policy that began it was saved at the
    start of its first one. Earlier policies are taken to be too weak: playing them all would take too long.
    """
    lengths = config.num_envs * (episodes["length"] + 2 * config.rollout_steps)
    begins = (episodes["env_steps"] - lengths)[episodes["score"] >= target]
    return float(begins[np.isfinite(begins)].min(initial=np.inf))


def evaluated(run_dir: Path) -> dict[int, float]:
    """Mean score of each policy of a run that was evaluated, by its env_steps."""
    table = read_evaluations(run_dir)
    return {int(steps): float(mean) for steps, mean in zip(*table.values(), strict=True)}


def first_frozen(run_dir: Path, target: float) -> int | None:
    """env_steps of the first policy that was evaluated at `target` or above, or None."""
    return min((steps for steps, mean in evaluated(run_dir).items() if mean >= target), default=None)
