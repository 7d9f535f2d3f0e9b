"""Record a video: episodes of a frozen policy, to look at."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.config.validation import check_count, check_parent
from a2c.envs.atari import FRAME_SKIP
from a2c.envs.make import run_seeds
from a2c.envs.single import EnvFn, checked_spec, is_atari, make_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.metrics.files import write_atomically
from a2c.metrics.text import format_number
from a2c.networks import NetworkFn
from a2c.processes.errors import raising_worker_error
from a2c.tools.load import AfterDecision, Custom, LoadedPolicy, load_policy
from a2c.tools.overlay import Overlay, Thought
from a2c.tools.rendering import ObservedNet, RenderedEpisode, without_window
from a2c.tools.video_writers import WIDTHS, check_writer, write_video

EMULATOR_FPS = 60
LONGEST = 30_000  # decisions; a policy may stand still, and not every game has a limit of its own


class RecordedEpisode(NamedTuple):
    """An episode of a video."""

    seed: int
    score: float  # game points
    length: int  # decisions
    ended: bool  # whether it came to its end
    checkpoint: Path  # of the policy
    env_steps: int  # decisions that the policy had learned from


def record_video(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str | None = None,
    greedy: bool = False,
    seed: int = 10_000,
    episodes: int = 1,
    best_of: int = 1,
    max_length: int = LONGEST,
    overlay: bool = False,
    watch: AfterDecision | None = None,
    network: NetworkFn | None = None,
    env_fn: EnvFn | None = None,
) -> list[RecordedEpisode]:
    """Play episodes with the run's policy and write their pictures, one per decision, to `out`.

    Episode i has the seed `seed + i`. `episodes` of them follow each other in the video; with `best_of`, that many are
    played, and the best is played again for the video. Each ends after `max_length` decisions where it has not ended
    before. `overlay` draws value estimate and action probabilities beside the picture. `watch` is called after each
    decision. `checkpoint`, `greedy`, `network` and `env_fn`: as in `evaluate`. Returns the episodes in the video.

    `out` ends in `.mp4`, `.gif` or `.webp`; it is replaced when the video is complete. Raises ValueError for another
    ending, a missing directory or package, bad arguments, or an environment that is unknown here or cannot be rendered,
    OSError if the video cannot be written, WorkerError for an environment that fails, FloatingPointError if the
    policy's outputs are NaN or infinite, and CheckpointError (a ValueError) for a checkpoint that cannot be used.
    """
    out = Path(out)
    check_writer(out)
    _check_counts(episodes, best_of, max_length)
    policy = load_policy(run_dir, checkpoint, custom=Custom(network, env_fn))
    check_parent(out)
    config = replace(policy.config, backend="sync", num_envs=1, terminal_on_life_loss=False, seed=seed)
    seeds = [replace(config, seed=seed + i).seed for i in range(max(episodes, best_of))]
    with ExitStack() as stack:
        stack.enter_context(without_window())
        compute = Compute(config)
        stack.callback(compute.close)
        policy = policy._replace(config=config, net=make_replica(policy.net, compute))
        recorder = Recorder(policy, compute, greedy, max_length, watch)
        fps = recorder.check()
        if best_of > 1:
            seeds = [recorder.best(seeds)]
        width = WIDTHS[out.suffix] if overlay else 0
        pictures = stack.enter_context(closing(recorder.pictures(seeds, width)))
        _write(out, pictures, fps)
    return recorder.episodes[-len(seeds) :]


def describe(episodes: list[RecordedEpisode], best_of: int = 1) -> str:
    """What a video of `episodes` shows, in one line."""
    scores, first = ", ".join(format_number(one.score) for one in episodes), episodes[0]
    policy = first.checkpoint
    length = f"{sum(one.length for one in episodes):,} decisions"
    if len(episodes) > 1:
        cut = "" if all(one.ended for one in episodes) else ", not all of them to their end"
        return f"{len(episodes)} episodes of {policy}{cut}, scores {scores}, {length}"
    if best_of > 1:
        cut = "" if first.ended else ", not to its end"
        return f"the best of {best_of} episodes of {policy}{cut}, score {scores}, {length}, seed {first.seed}"
    what = "one episode" if first.ended else "the beginning of an episode"
    return f"{what} of {policy}, score {scores}, {length}"


def _check_counts(episodes: int, best_of: int, max_length: int) -> None:
    for name, count in (("episodes", episodes), ("best_of", best_of), ("max_length", max_length)):
        check_count(name, count)
    if episodes > 1 and best_of > 1:
        raise ValueError(f"episodes must be 1 where best_of is set, got {episodes}")


def _write(out: Path, pictures: Iterator[np.ndarray], fps: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / out.name
        where = f" in {folder} (TMPDIR)"
        try:
            write_video(path, pictures, fps)
            where = ""
            write_atomically(out, path.read_bytes())
        except OSError as error:
            raise OSError(f"{out} could not be written{where}: {error}") from error


class Recorder:
    """Plays episodes of a policy, each with a seed of its own, in an environment of its own.

    `episodes` holds those that were played. The same seed gives the same episode, with or without pictures.
    """

    def __init__(
        self, policy: LoadedPolicy, compute: Compute, greedy: bool, max_length: int, watch: AfterDecision | None
    ) -> None:
        self.policy, self.config, self.net = policy, policy.config, ObservedNet(policy.net)
        self.compute, self.greedy, self.max_length = compute, greedy, max_length
        self.watch = watch or (lambda decisions, scores: None)
        self.spec = checked_spec(self.config)
        self.episodes: list[RecordedEpisode] = []

    def check(self) -> float:
        """Pictures per second. ValueError if the environment cannot be rendered, WorkerError if it fails."""
        with self._env(self.config.seed, render=True) as env:
            env.check(self._env_seed(self.config.seed))
            return EMULATOR_FPS / FRAME_SKIP if is_atari(self.spec) else env.metadata.get("render_fps") or 30

    def best(self, seeds: Iterable[int]) -> int:
        """Play an episode with each of `seeds`, without pictures; the seed of the first with the highest score."""
        for seed in seeds:
            with self._env(seed, render=False) as env:
                for _ in self._decisions(env, seed):
                    pass
        return max(self.episodes, key=lambda episode: episode.score).seed

    def pictures(self, seeds: Iterable[int], width: int = 0) -> Generator[np.ndarray]:
        """Pictures `[H, W, 3]` of the episodes of `seeds`: one of each start and one per decision.

        `width`: with the overlay, beside pictures that are enlarged to this many pixels; 0: as they are.
        """
        for seed in seeds:
            with self._env(seed, render=True) as env:
                overlay = Overlay(env.action_names(), width) if width else None
                for picture, score, thought in self._decisions(env, seed):
                    yield overlay.draw(picture, score, thought) if overlay else picture

    def _decisions(self, env: RenderedEpisode, seed: int) -> Iterator[tuple[np.ndarray, float, Thought | None]]:
        """Play one episode: each picture, the score before it, and what the policy made of it; at the end None."""
        vector = SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.SAME_STEP)
        envs = MonitoredVectorEnv(vector, [self._env_seed(seed)])
        collector = Collector([envs], self.net, 1, self.compute, seed, self.greedy)
        before, scores = sum(one.length for one in self.episodes), [one.score for one in self.episodes]
        while not env.ended and env.length < self.max_length:
            picture, score = env.picture, env.score
            actions = collector.collect().rollout.actions
            yield picture, score, self.net.thought(int(actions[0, 0]))
            self.watch(before + env.length, scores)
        yield env.picture, env.score, None
        which = self.policy.checkpoint, self.policy.env_steps
        self.episodes.append(RecordedEpisode(seed, env.score, env.length, env.ended, *which))
        self.watch(before + env.length, [*scores, env.score])

    @contextmanager
    def _env(self, seed: int, render: bool) -> Iterator[RenderedEpisode]:
        with ExitStack() as stack:
            with raising_worker_error(ValueError):
                made = make_env(self.config, self.spec, self._env_seed(seed), render_mode="rgb_array")
            env = RenderedEpisode(made, render)
            stack.callback(env.close)
            stack.callback(self.compute.wait_idle)  # after Ctrl-C its thread may still step it
            yield env

    def _env_seed(self, seed: int) -> int:
        return run_seeds(replace(self.config, seed=seed)).envs[0]
