"""One training run from start to end, with any of the algorithms: `Trainer(config).run()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from a2c.algorithms.a2c import A2C
from a2c.algorithms.a3c import A3C
from a2c.algorithms.base import Algorithm
from a2c.algorithms.ga3c import GA3C
from a2c.compute.compute import Compute
from a2c.compute.torch_ranks import join_ranks
from a2c.config.config import Config
from a2c.config.resolve import resolve, why_no_gpu
from a2c.envs.single import EnvFn, Spaces, find_spec, probe_spaces, register_env
from a2c.envs.vector_env import Episode
from a2c.learner import Learner
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.networks import NetworkFn
from a2c.processes.errors import WorkerError
from a2c.processes.signals import StopRequest, stop_on_signals
from a2c.run.checkpoint import LATEST, load_run
from a2c.run.introduction import introduction
from a2c.run.outputs import RunOutputs
from a2c.run.recovery import Recovery
from a2c.run.result import Progress, TrainingResult
from a2c.run.run_dir import RunLock, claim, run_directory, saved_config, times_restarted
from a2c.run.silent import SilentOutputs
from a2c.run.state import RunState
from a2c.run.stop import finish_reason, stop_reason

ALGORITHMS: dict[str, Callable[[Config, Spaces, Learner, Compute], Algorithm]] = {"a2c": A2C, "a3c": A3C, "ga3c": GA3C}


class Trainer:
    """One training run, new or resumed: `run()` trains until it ends, `for progress in trainer` step by step.

    A config that cannot be run is refused before a worker starts: ValueError, or CheckpointError, which is one.
    """

    def __init__(self, config: Config, *, network: NetworkFn | None = None, env_fn: EnvFn | None = None) -> None:
        """`network(input_shape, n_actions)` makes a network as described in `a2c.networks`, instead of a built-in one.

        `env_fn()` makes an environment, instead of the id `config.env`; see `register_env`.
        """
        if config.eval_every and (network or env_fn):
            rule = "eval_every must be 0 with a network or env_fn, which the process that evaluates cannot know"
            raise ValueError(f"{rule}, got {config.eval_every}")
        self.register_env: Callable[[], str] = partial(register_env, env_fn) if env_fn else lambda: config.env
        config = replace(config, env=self.register_env(), network="custom" if network else config.network)
        self.ranks = ranks = join_ranks(config)
        with ExitStack() as refused:
            refused.callback(ranks.close)
            again = max(ranks.all_gather(times_restarted())) > 0
            config, self.run_dir = ranks.on_rank_0(lambda: run_directory(config, again))
            self.lock = RunLock(self.run_dir)
            self.spaces = spaces = ranks.on_every_rank(lambda: probe_spaces(config))[ranks.rank]
            self.wants_gpu = config.cuda
            self.config = config = resolve(replace(config, env=find_spec(config.env).id), spaces.obs_shape)
            self.compute = Compute(config, ranks)
            refused.callback(self.lock.release)
            refused.callback(self.compute.close)
            ranks.check_same(f"{self.compute.device.type} and {self.compute.precision_name}")
            checkpoint = ranks.on_rank_0(lambda: self._load(network)) if config.resume else None
            self.resumed = Config.from_json(checkpoint["config"]) if checkpoint else None  # its config until now
            self.learner = Learner(config, spaces, self.compute, network=network)
            self.algorithm = ALGORITHMS[config.algorithm](config, spaces, self.learner, self.compute)
            self.scores, self.timer = ScoreWindow(), StageTimer()
            self.stop, self.agreed = StopRequest(), StopRequest()  # what asks this process; what all ranks follow
            outputs = SilentOutputs if ranks.rank else RunOutputs
            self.outputs = outputs(self.lock, config, spaces, self.scores, self.timer, self.stop)
            self.state = RunState(config, spaces, self.learner, self.algorithm, self.scores, self.timer)
            self.recovery = Recovery(config, self.algorithm, self.state, self.outputs, self._agree_to_stop)
            if checkpoint:
                self.state.load(self.run_dir / LATEST, checkpoint)
            refused.pop_all()
        self.episodes_continue = False
        self.episodes: list[Episode] = []  # that ended in the last step
        self.error: Exception | None = None  # that has ended the run
        self.seconds = self.state.seconds_before  # of training, once the run has ended

    def _load(self, network: NetworkFn | None) -> dict[str, Any]:
        """The checkpoint to continue from."""
        if self.run_dir.is_dir():
            self.lock.take()  # before it is read, so that nobody can write a newer one meanwhile
        return load_run(self.run_dir / LATEST, self.config, self.spaces, network)

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, network: NetworkFn | None = None, env_fn: EnvFn | None = None, **settings: Any
    ) -> Trainer:
        """Continue the run in `run_dir` with its own settings, changed by `settings`; ValueError if it cannot go on."""
        config = replace(saved_config(run_dir), resume=Path(run_dir), **settings)
        return cls(config, network=network, env_fn=env_fn)

    def introduction(self) -> list[str]:
        """Lines that say what will be trained, on what, and where to watch it."""
        return introduction(self.config, self.spaces, self.learner.net, self.compute, self.run_dir)

    def run(self) -> TrainingResult:
        """Train until the target, the budget, `stop_after` or a signal. Call it once.

        Raises ValueError (the directory is in use, saved episodes are damaged), WorkerError (an environment fails again
        and again), FloatingPointError (an output, loss, gradient or parameter is NaN or infinite), OSError (the last
        checkpoint failed), RankError (a rank is lost), RuntimeError (called again), KeyboardInterrupt (another SIGINT).
        """
        with stop_on_signals(self.stop):
            for _ in self:
                pass
        return self.result()

    def __iter__(self) -> Iterator[Progress]:
        """Train as `run` does, yielding a `Progress` after each step.

        Leaving the loop ends the run with a checkpoint, as a signal does. Between two steps signals are the caller's.
        Where a run goes back to its last state in memory, `env_steps` falls, and episodes after it come a second time.
        """
        self.state.check_new()
        try:
            begun = training = self._guarded(self._begin)
            while training:
                training = self._guarded(self._step)
                try:
                    if not self.stop.by_caller and (training or self.episodes):  # workers may end some at the very end
                        yield Progress(self.learner.env_steps, self.learner.updates, self.scores.mean, self.episodes)
                except GeneratorExit:
                    self.stop.leave()
            if begun:
                self._guarded(self._finish)
        except Exception as error:
            self.error = error  # Python prints what is raised after a `break`, and goes on
            raise
        finally:
            with stop_on_signals(self.stop):
                self.close()

    def result(self) -> TrainingResult:
        """How the run has ended; raises the error that has ended it, for example of a last checkpoint."""
        if self.error:
            raise self.error
        scores, env_steps = self.scores, self.state.env_steps
        return TrainingResult(
            self.run_dir,
            self.stop_reason(),
            bool(finish_reason(self.config, env_steps, scores)),
            env_steps,
            self.seconds,
            scores.episodes,
            scores.mean,
            scores.best_mean,
            128 + self.agreed.number if self.agreed.number else 0,
        )

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """`step()`, while signals ask the run to stop; a SIGINT after that ends the workers at once."""
        with stop_on_signals(self.stop):
            try:
                return step()
            except KeyboardInterrupt:
                self.algorithm.close(failed=True)
                raise

    def _begin(self) -> bool:
        """Start workers and outputs; False if nothing is left to do, or a signal ended starting workers."""
        self.claim()
        if self.resumed and not self._agree_to_stop() and (reason := self.stop_reason()):
            self.outputs.message(f"nothing to do at {self.state.env_steps:,} env_steps: {reason}")
            return False
        try:
            with self.outputs.starting():
                self.start()
        except WorkerError:
            if not self._agree_to_stop():
                raise
            return False
        self.outputs.open(self.resumed, self.learner.env_steps, self.episodes_continue)
        self.outputs.write_about(self.compute)
        if self.wants_gpu and self.compute.device.type != "cuda":
            self.outputs.message(f"--cuda: {why_no_gpu(self.config)}, so this run uses the CPU")
        return True

    def _step(self) -> bool:
        """Collect and learn; False if there is a reason to stop: the last row and checkpoint are written then."""
        self.episodes = []
        self._agree_to_stop()
        try:
            if self.stop_reason():
                stats = self.algorithm.drain()
                self.outputs.log(stats, self.learner.metrics, last=True)
                self.state.save_last(self.outputs)  # no row comes after the last checkpoint
                self.episodes = stats.episodes
                return False
            self.state.save_when_due(self.outputs)  # checkpoint; state in memory
            stats = self.algorithm.training_step()  # collect a rollout [T, N], learn from it
            self.outputs.log(stats, self.learner.metrics)  # rows, when due
            self.episodes = stats.episodes
        except WorkerError as error:
            self.register_env()
            self.recovery.restart(error)  # back to the last state, new workers
        return True

    def _agree_to_stop(self) -> bool:
        """Whether any rank has been asked to stop. A signal that comes later counts at the next call."""
        self.agreed.join(self.ranks.all_gather(self.stop))
        return bool(self.agreed)

    def _finish(self) -> bool:
        """End workers and outputs."""
        self.seconds = self.timer.seconds
        self.compute.close()
        self.algorithm.close()
        self.outputs.finish(self.stop_reason(), self.learner.metrics)
        self.ranks.all_gather(None)  # torchrun ends the others once one has ended with a signal's exit code
        return True

    def stop_reason(self) -> str:
        """Why the run ends; an empty string while it continues."""
        return stop_reason(self.config, self.learner.env_steps, self.scores, self.agreed)

    def claim(self) -> None:
        """Make the run directory and keep other processes out; ValueError if that is impossible."""
        self.ranks.on_rank_0(lambda: claim(self.lock, self.config))

    def start(self) -> None:
        """Start environments and workers, without writing anything. RuntimeError when called again."""
        self.register_env()  # again: since then, another of the same name may have been registered
        self.episodes_continue = self.state.start()

    def close(self) -> None:
        """End threads, environments, outputs and lock, each whatever happens to the others."""
        with ExitStack() as closing_all:
            closing_all.callback(self.lock.release)
            for part in (self.ranks, self.outputs, self.algorithm, self.compute, self.state):
                closing_all.callback(part.close)  # called in reverse order: the threads that use environments end first
