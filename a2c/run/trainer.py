"""The life of a run, whichever driver plays and learns: start, advance, log, save, heal, end.

The drivers (`Synchronous`, `A3C`, `GA3C`) know nothing of each other; what they optimise is the same `Learner`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from a2c.algorithms.a2c import A2C
from a2c.algorithms.a3c import A3C
from a2c.algorithms.base import Algorithm, TrainingStats
from a2c.algorithms.ga3c import GA3C
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.resolve import resolve, why_no_gpu
from a2c.envs.single import Spaces, probe_spaces
from a2c.envs.trial import restores_exactly
from a2c.learner import Learner, check_finite
from a2c.metrics.console import Display
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.processes.errors import WorkerError
from a2c.processes.signals import StopRequest, stop_on_signals
from a2c.run.checkpoint import LATEST, load_run, loading
from a2c.run.outputs import BEST, RunOutputs, metrics_row
from a2c.run.run_dir import RunLock, run_directory
from a2c.run.stop import outcome

MakeAlgorithm = Callable[[Config, Spaces, Learner, Compute], Algorithm]
ALGORITHMS: dict[str, MakeAlgorithm] = {"a2c": A2C, "a3c": A3C, "ga3c": GA3C}
SNAPSHOT_EVERY = 25  # rollouts (of 20 decisions) between the states in memory to which a run can go back
DISK_PATIENCE = 600.0  # seconds that a run waits at its end for a disk that refuses its last checkpoint


class Trainer:
    """One training run; `run()` plays it to its end and returns the process's exit code.

    Refusals come before a worker starts: ValueError or its CheckpointError.
    """

    def __init__(self, config: Config) -> None:
        self.run_dir = run_directory(config)
        self.lock = RunLock(self.run_dir)
        self.outputs: RunOutputs  # there is one from the driver's start on
        self.spaces = probe_spaces(config)
        self.wants_gpu = config.cuda
        config = self.config = resolve(config, self.spaces.obs_shape)
        self.compute = Compute(config)
        with ExitStack() as refused:
            refused.callback(self.close)
            self.resumed = self._read_checkpoint() if config.resume else None
            self.learner = Learner(config, self.spaces, self.compute)
            self.algorithm = ALGORITHMS[config.algorithm](config, self.spaces, self.learner, self.compute)
            self.scores = ScoreWindow()
            self.saved_best = -math.inf  # mean score of the policy in best.pt
            self.seconds_before = 0.0  # wall time of earlier sessions
            if self.resumed:
                with loading(self.run_dir / LATEST):
                    self._load(self.resumed)
            refused.pop_all()
        self.started = False
        self.row: dict[str, float] = {}  # the newest row of metrics
        self.timer = StageTimer()
        self.snapshot_distance = SNAPSHOT_EVERY * config.num_envs * max(config.rollout_steps, 20)  # env_steps
        self.restarts, self.failed_at = 0, -1  # in a row without progress; env_steps of the last failure
        self.stop = StopRequest()

    def run(self) -> int:
        """Train until the target, the budget or a signal, once. 0, or 128 + the signal's number.

        Raises ValueError (the directory is taken), WorkerError (an environment fails again and again),
        FloatingPointError (a gradient is NaN or infinite), OSError (the last checkpoint cannot be written)
        or KeyboardInterrupt (a second SIGINT).
        """
        with stop_on_signals(self.stop):
            try:
                self.claim()
                if self.resumed and not self.stop and (why := self._outcome()):
                    said = f"finished already at {self.learner.env_steps:,} env_steps: {why}; nothing is changed"
                    Display(replace(self.config, progress=False)).message(said)
                    return 0
                self.start()
                self._open_outputs()
                while True:
                    try:
                        if self._outcome():
                            self._finish()
                            break
                        self._count(self.training_step())
                        if not self._outcome():  # else `_finish` saves: no row may come after the last checkpoint
                            self._log_and_save()
                    except WorkerError as error:
                        self._heal(error)
            except WorkerError:
                if not self.stop or hasattr(self, "outputs"):
                    raise
                return 128 + self.stop.number  # it ended workers that had just been started
            except KeyboardInterrupt:  # a second SIGINT
                self.algorithm.close(failed=True)
                raise
            finally:
                self.close()
            self.outputs.report(self.row or metrics_row(self.learner, self.scores, self.timer), self._outcome())
        return 128 + self.stop.number if self.stop else 0

    def claim(self) -> None:
        """Make the run directory and keep other processes out; ValueError where that cannot be."""
        self.lock.take()

    def training_step(self) -> TrainingStats:
        """Let the driver play and learn for a while."""
        progress = self.algorithm.training_step()
        for stage, seconds in progress.seconds.items():
            self.timer.spent[stage] += seconds
        return progress

    def start(self) -> None:
        """Start the driver."""
        if self.started:
            raise RuntimeError("a Trainer runs once; make another one")
        self.started = True
        games = self.resumed["collector"] if self.resumed else None
        if games and self.config.algorithm == "a2c":
            with loading(self.run_dir / LATEST):
                if not restores_exactly(self.config, games["envs"]):
                    games["envs"] = [None for _ in games["envs"]]
        self.algorithm.start(new_run=not self.resumed)
        with loading(self.run_dir / LATEST):
            self.games_go_on = games is not None and self.algorithm.load_state_dict(games)
        self._remember()

    def close(self) -> None:
        """End threads, environments, record and lock, each whatever becomes of the others."""
        with ExitStack() as closing:  # calls back in reverse: the threads that use environments end first
            closing.callback(self.lock.release)
            for part in (getattr(self, "outputs", None), getattr(self, "algorithm", None), self.compute):
                if part is not None:
                    closing.callback(part.close)

    def _heal(self, error: WorkerError) -> None:
        """Go back to the newest snapshot and start the environments anew: what a resumed run does.

        WorkerError, with the state of the snapshot saved, when that was in vain too often.
        """
        while True:
            self.restarts = 1 if self.learner.env_steps > self.failed_at else self.restarts + 1
            self.failed_at = max(self.failed_at, self.learner.env_steps)
            self.algorithm.close(failed=True)
            state = copy.deepcopy(self.snapshot)
            self._load(state)
            self.outputs.rewind(self.learner.env_steps)
            self.timer.begin_row(self.learner.env_steps)
            self.row = {}
            if self.stop:  # who stops the run may have killed its workers too
                return self._finish(state)
            if self.restarts > self.config.max_worker_restarts:
                with suppress(OSError):
                    self._finish(state)
                raise WorkerError(f"{error} ({self.restarts} times without progress)", error.trace) from error
            try:
                self.algorithm.start(new_run=False)
                same = self.algorithm.load_state_dict(state["collector"])
                break
            except (WorkerError, ValueError) as again:
                error = again if isinstance(again, WorkerError) else WorkerError(str(again))
        games = "the same games go on" if same else "every environment starts a new game"
        tries = f"(try {self.restarts} of {self.config.max_worker_restarts})"
        self.outputs.message(f"{error}: started again at {self.learner.env_steps:,} env_steps, {games} {tries}")

    def _outcome(self) -> str:
        """Why the run is over, or an empty text while it is not."""
        return outcome(self.config, self.learner.env_steps, self.scores, self.stop)

    def _open_outputs(self) -> None:
        env_steps = self.learner.env_steps
        self.outputs = RunOutputs(self.lock, self.config, env_steps if self.resumed else None)
        if self.resumed:
            games = "its games go on" if self.games_go_on else "every environment starts a new game"
            self.outputs.message(f"resumed at {env_steps:,} env_steps; {games}")
            self.outputs.note_changes(Config.from_json(self.resumed["config"]), env_steps)
        if self.wants_gpu and self.compute.device.type != "cuda":
            self.outputs.message(f"--cuda: {why_no_gpu(self.config)}, so this run uses the CPU")
        self.timer = StageTimer(self.seconds_before, env_steps)
        if not self.resumed:
            self._save(self.snapshot)  # so that a run that is killed early can be resumed

    def _count(self, progress: TrainingStats) -> None:
        self.scores.add(game.score for game in progress.episodes)
        self.outputs.episodes(self.learner.env_steps, self.timer.seconds, progress.episodes)

    def _log_and_save(self, last: bool = False, state: dict[str, Any] | None = None) -> bool:
        """Write a row and a checkpoint (of `state`) when they are due, at the end when missing; False if not saved."""
        env_steps = self.learner.env_steps
        due = last or self.timer.row_seconds >= self.config.log_every
        if due and env_steps > self.timer.row_steps:
            self.row = metrics_row(self.learner, self.scores, self.timer)
            self.outputs.metrics(self.row, self.spaces.n_actions)
            self.timer.begin_row(env_steps)
        distance = env_steps - self.outputs.saved_at
        if (distance >= self.config.checkpoint_every or (last and distance)) and self.outputs.can_save:
            return self._save(state or self._remember())
        if not last and env_steps - self.snapshot["env_steps"] >= self.snapshot_distance:
            self._remember()
        return not (last and distance)

    def _finish(self, state: dict[str, Any] | None = None) -> None:
        """The last row and checkpoint (of `state`); waits for a disk that refuses it."""
        self._count(self.algorithm.drain())
        end = time.perf_counter() + DISK_PATIENCE
        while not self._log_and_save(last=True, state=state):
            time.sleep(0.5)
            if time.perf_counter() > end:
                raise OSError(f"the last checkpoint could not be written to {self.run_dir}")

    def _remember(self) -> dict[str, Any]:
        """A copy of everything that the run goes on from."""
        state = {
            "config": self.config.to_json(),
            "input_shape": list(self.spaces.obs_shape),
            "n_actions": self.spaces.n_actions,
            **self.learner.state_dict(),
            "collector": self.algorithm.state_dict(),
            "scores": self.scores.state_dict(),
            "saved_best": self.saved_best,
            "seconds": self.timer.seconds,
        }
        state = copy.deepcopy(state)
        check_finite(state["network"])  # workers of A3C may have moved it since it was last looked at
        self.snapshot = state
        return state

    def _save(self, state: dict[str, Any]) -> bool:
        mean = self.scores.mean
        if self.scores.full and mean > self.saved_best and self.outputs.save(BEST, {**state, "saved_best": mean}):
            self.saved_best = self.snapshot["saved_best"] = mean  # best.pt does not go back when a run does
        return self.outputs.save(LATEST, {**state, "saved_best": self.saved_best})

    def _load(self, state: dict[str, Any]) -> None:
        """Go back to `state`, but for the games."""
        self.learner.load_state_dict(state)
        self.scores.load_state_dict(state["scores"])
        self.saved_best, self.seconds_before = float(state["saved_best"]), float(state["seconds"])

    def _read_checkpoint(self) -> dict[str, Any]:
        if self.run_dir.is_dir():
            self.claim()  # nobody else may write a newer one meanwhile
        return load_run(self.run_dir / LATEST, self.config, self.spaces)
