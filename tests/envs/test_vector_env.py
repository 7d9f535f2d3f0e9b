"""The contract of the vector environment on every backend: what a step returns, how episodes end, what is refused."""

import contextlib
import faulthandler
import itertools
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from toys import CountingEnv, TinyNet, counting_envs, vector

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.make import make_envs, make_groups, run_seeds, sampling_seed
from a2c.envs.single import find_spec, make_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.processes.errors import WorkerError

BACKENDS = ("async", "native", "sync")
PONG, BREAKOUT, FREEWAY = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4", "FreewayNoFrameskip-v4"


@contextlib.contextmanager
def playing(env=PONG, **changes):
    envs = make_envs(Config(env=env, **{"num_envs": 2, "noop_max": 0, **changes}))
    try:
        yield envs
    finally:
        envs.close()


def random_actions(steps, rows, n_actions, seed=0):
    return np.random.default_rng(seed).integers(n_actions, size=(steps, rows))


def play(envs, actions):
    """Step through `actions [T, N]`; a list of everything that was returned, obs copied."""
    obs, _ = envs.reset()
    trace = [(np.array(obs),)]
    for row in actions:
        obs, rewards, terminated, truncated, info = envs.step(row)
        trace.append((np.array(obs), rewards, terminated, truncated, info))
    return trace


def play_by_hand(config, actions):
    """One unvectorised row: the wrapped environment, reset by this loop as soon as it ends."""
    env = make_env(config, find_spec(config.env), config.seed)
    obs, _ = env.reset(seed=config.seed)
    trace = [(np.array(obs),)]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        final = np.array(obs) if terminated or truncated else None
        if final is not None:
            obs, _ = env.reset()
        trace.append((np.array(obs), reward, terminated, truncated, final))
    return trace


@pytest.fixture(scope="module", params=BACKENDS)
def breakout(request):
    """290 random steps: row 0 is truncated after 165 (of 662 frames), row 1 is terminated after 137 and 140 more."""
    with playing(BREAKOUT, backend=request.param, max_episode_frames=662) as envs:
        yield play(envs, random_actions(290, 2, 4, seed=1))


def test_step_returns_the_shapes_and_dtypes_of_the_contract(breakout):
    assert breakout[0][0].shape == (2, 4, 84, 84) and breakout[0][0].dtype == np.uint8
    for obs, rewards, terminated, truncated, info in breakout[1:]:
        assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
        assert rewards.shape == (2,) and rewards.dtype == np.float32
        assert terminated.shape == truncated.shape == (2,) and terminated.dtype == truncated.dtype == bool
        assert set(info) == {"final_obs", "episodes"}


def test_step_returns_the_first_observation_of_the_next_episode_after_an_end_and_only_then(breakout):
    ended = 0
    for obs, _, terminated, truncated, _ in breakout[1:]:
        for row in range(2):
            begins = not obs[row, :3].any() and obs[row, 3].any()  # a stack of one frame
            assert begins == bool(terminated[row] | truncated[row])
            ended += begins
    assert ended >= 3


def test_final_obs_holds_exactly_the_rows_that_ended(breakout):
    for obs, _, terminated, truncated, info in breakout[1:]:
        assert set(info["final_obs"]) == set(np.flatnonzero(terminated | truncated))
        for row, final in info["final_obs"].items():
            assert final.shape == (4, 84, 84) and final.dtype == np.uint8
            assert final[:3].any() and not np.array_equal(final, obs[row])


def test_final_obs_of_a_truncated_episode_shows_what_the_last_step_did(breakout):
    # Because of the FIRE frame, the limit of frames falls inside a step, in which the paddle still moves.
    cuts = 0
    for (before, *_), (_, _, _, truncated, info) in itertools.pairwise(breakout):
        for row, final in info["final_obs"].items():
            assert np.array_equal(final[:3], before[row, 1:])
            cuts += truncated[row]
            assert not (truncated[row] and np.array_equal(final[3], before[row, 3]))
    assert cuts >= 1


def test_episode_length_is_the_number_of_steps_between_two_ends(breakout):
    # A transition between two episodes would show as a step that belongs to neither.
    began = [0, 0]
    for t, (_, _, terminated, truncated, info) in enumerate(breakout[1:], start=1):
        ended = {episode.env: episode for episode in info["episodes"]}
        assert set(ended) == set(np.flatnonzero(terminated | truncated))
        for row, episode in ended.items():
            assert episode.length == t - began[row]
            began[row] = t
    assert began == [165, 277]


def test_episode_scores_and_running_scores_sum_to_all_raw_rewards():
    # SpaceInvaders pays 5 to 30 points, so a clipped reward would show.
    actions = random_actions(150, 2, 6)
    for backend in ("native", "sync"):
        with playing("SpaceInvadersNoFrameskip-v4", backend=backend, max_episode_frames=300) as envs:
            trace = play(envs, actions)[1:]
            rewards = np.stack([step[1] for step in trace])
            finished = sum(episode.score for step in trace for episode in step[4]["episodes"])
            assert finished > 0 and finished + envs.scores.sum() == rewards.sum()
            assert rewards.max() >= 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("env", "frames", "size"), [(PONG, 108_000, 84), (FREEWAY, 400, 42), (BREAKOUT, 108_000, 84)])
def test_step_equals_the_unvectorised_environment_in_every_pixel_reward_and_flag(backend, env, frames, size):
    # noop_max=0, because the backends draw their no-ops differently. Freeway is truncated, Breakout terminated.
    settings = {"backend": backend, "max_episode_frames": frames, "frame_size": size}
    with playing(env, **settings) as envs:
        actions = random_actions(250, 2, envs.single_action_space.n, seed=2)
        trace = play(envs, actions)
    config = Config(env=env, noop_max=0, **settings)
    ends = 0
    for row in range(2):
        expected = play_by_hand(config, actions[:, row])
        assert np.array_equal(trace[0][0][row], expected[0][0])
        for t in range(1, len(trace)):
            obs, rewards, terminated, truncated, info = trace[t]
            want_obs, want_reward, want_terminated, want_truncated, want_final = expected[t]
            assert np.array_equal(obs[row], want_obs), f"row {row}, decision {t}"
            assert (rewards[row], terminated[row], truncated[row]) == (want_reward, want_terminated, want_truncated)
            if want_final is not None:
                ends += 1
                # ale-py does not read the last screen before it truncates, so it pools other frames into the last one.
                exact = slice(3) if backend == "native" and want_truncated else slice(4)
                assert np.array_equal(info["final_obs"][row][exact], want_final[exact])
    assert ends >= 2 or env == PONG


@pytest.mark.parametrize("env_id", ["MsPacmanNoFrameskip-v4", "ALE/Freeway-v5"])
def test_make_env_equals_gymnasiums_wrappers_in_a_game_without_fire(env_id):
    """Pixels, rewards and ends over several episodes, no-ops included, without sticky actions."""
    config = Config(env=env_id, max_episode_frames=4 * 300, sticky_actions=0.0)
    ours = make_env(config, find_spec(env_id), 5)
    stock = gym.make(env_id, frameskip=1, obs_type="grayscale", repeat_action_probability=0.0)
    stock = FrameStackObservation(AtariPreprocessing(stock, noop_max=30), 4, padding_type="zero")
    actions = np.random.default_rng(1).integers(ours.action_space.n, size=1500)
    obs, expected = ours.reset(seed=5)[0], stock.reset(seed=5)[0]
    ends, length = 0, 0
    for action in actions:
        assert np.array_equal(obs, expected)
        obs, reward, terminated, truncated, _ = ours.step(action)
        expected, expected_reward, over, *_ = stock.step(action)
        length += 1
        assert (reward, terminated, truncated) == (expected_reward, over, length >= 300)
        if terminated or truncated:
            assert np.array_equal(obs, expected)
            obs, expected = ours.reset()[0], stock.reset()[0]
            ends, length = ends + 1, 0
    assert ends >= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_seed_determines_the_episodes_and_rows_differ(backend):
    actions = random_actions(60, 1, 6).repeat(2, axis=1)  # the same actions in every row
    changes = {"backend": backend, "noop_max": 30, "max_episode_frames": 120}

    def observations(seed, times=1):
        with playing(**changes, seed=seed) as envs:
            return [np.stack([step[0] for step in play(envs, actions)]) for _ in range(times)]

    first, again = observations(5, times=2)  # reset() alone repeats the same episodes
    assert np.array_equal(first, again)
    assert np.array_equal(first, observations(5)[0])
    assert not np.array_equal(first, observations(6)[0])
    assert not np.array_equal(first[:, 0], first[:, 1])


def test_step_native_does_not_depend_on_the_number_of_threads():
    actions = random_actions(60, 8, 6)
    traces = []
    for count in (1, 3, 8):
        with playing(backend="native", num_envs=8, threads=count, noop_max=30) as envs:
            traces.append(play(envs, actions))
    for one, *others in zip(*traces, strict=True):
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_refuses_bad_actions_and_does_not_hang(backend):
    bad = [[0], [0, 0, 0], [[0, 0]], [0.0, 1.0], [True, False], [0, 6], [-1, 0], np.array([0, 2**40]), [0, None]]
    try:
        with playing(backend=backend) as envs:
            envs.reset()
            faulthandler.dump_traceback_later(60, exit=True)  # ale-py's threads cannot be interrupted otherwise
            for actions in bad:
                with pytest.raises(ValueError, match=r"^actions must be .*, got "):
                    envs.step(np.array(actions))
            assert envs.lengths.tolist() == [0, 0]
            for dtype in (np.int32, np.uint8, np.uint64):
                envs.step(np.array([0, 5], dtype))
            assert envs.lengths.tolist() == [3, 3]
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("backend", ["native", "sync"])
def test_terminal_on_life_loss_sets_terminated_without_ending_the_episode(backend):
    actions = random_actions(250, 2, 4, seed=2)
    with playing(BREAKOUT, backend=backend) as envs:
        whole = play(envs, actions)[1:]
    with playing(BREAKOUT, backend=backend, terminal_on_life_loss=True) as envs:
        lives = play(envs, actions)[1:]
    lost = 0
    for (obs, rewards, over, _, same), (same_obs, same_rewards, terminated, _, info) in zip(whole, lives, strict=True):
        assert np.array_equal(obs, same_obs) and np.array_equal(rewards, same_rewards)
        assert info["episodes"] == same["episodes"]
        assert set(info["final_obs"]) == set(np.flatnonzero(terminated))
        for row in np.flatnonzero(terminated & ~over):
            assert np.array_equal(info["final_obs"][row], obs[row])
            lost += 1
    finished = [episode for step in whole for episode in step[4]["episodes"]]
    assert {episode.env for episode in finished} == {0, 1}
    assert lost >= 4 * len(finished)  # Breakout has five lives, the last of which ends the episode


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_terminal_on_life_loss_sets_terminated_in_a_step_that_is_truncated_too(backend):
    actions = random_actions(120, 1, 4, seed=2)
    with playing(BREAKOUT, backend="sync", terminal_on_life_loss=True, num_envs=1) as envs:
        lost = next(t for t, step in enumerate(play(envs, actions)[1:], start=1) if step[2][0])
    for cut, terminates in ((lost, True), (lost + 1, False)):
        settings = {"backend": backend, "terminal_on_life_loss": True, "num_envs": 1, "max_episode_frames": 4 * cut}
        with playing(BREAKOUT, **settings) as envs:
            obs, _, terminated, truncated, info = play(envs, actions[:cut])[-1]
            assert (terminated[0], truncated[0]) == (terminates, True)
            assert not np.array_equal(info["final_obs"][0], obs[0])
            assert envs.lives.tolist() == [5]  # of the next episode


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_final_obs_is_not_overwritten_by_the_reset_of_an_environment_with_one_array(backend):
    gym.register(f"Reusing{backend}-v0", entry_point="toys:ReusingEnv")
    config = Config(env=f"Reusing{backend}-v0", backend=backend, num_envs=2, threads=1, precision="float32")
    compute = Compute(config)
    with contextlib.closing(make_envs(config)) as envs, contextlib.closing(compute):
        rollout = Collector([envs], TinyNet(), 4, compute).collect().rollout
    assert rollout.final_index.tolist() == [[2, 0], [2, 1]]
    assert rollout.final_obs.tolist() == [[7, 0, 3], [7, 0, 3]]  # index, episode, step
    assert rollout.next_obs.tolist() == [[7, 1, 1], [7, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sticky_actions_are_those_of_the_id_unless_they_are_set(backend):
    # With nothing else random, two episodes with the same actions differ only where actions are repeated.
    actions = random_actions(40, 1, 6).repeat(2, axis=1)
    cases = ((PONG, None, False), (PONG, 0.5, True), ("ALE/Pong-v5", None, True), ("ALE/Pong-v5", 0.0, False))
    for env, sticky, parts in cases:
        with playing(env, backend=backend, sticky_actions=sticky) as envs:
            obs = play(envs, actions)[-1][0]
        assert np.array_equal(obs[0], obs[1]) != parts, (env, sticky)


def test_step_is_four_frames_and_v5_has_sticky_actions_of_a_quarter():
    with playing("ALE/Pong-v5", backend="sync", num_envs=1) as envs:
        envs.reset()
        game = envs.env.envs[0].unwrapped
        ale = game.ale
        assert game.sticky == 0.25 and ale.getFloat("repeat_action_probability") == 0.0
        before = ale.getEpisodeFrameNumber()
        envs.step(np.array([0]))
        assert ale.getEpisodeFrameNumber() == before + 4


def test_episode_scores_are_sums_of_raw_rewards():
    envs = counting_envs(2, 3)
    trace = play(envs, np.full((6, 2), 4))[1:]
    episodes = [episode for step in trace for episode in step[4]["episodes"]]
    assert [(episode.env, episode.score, episode.length) for episode in episodes] == [
        (0, 18.0, 2),
        (1, 42.0, 3),
        (0, 18.0, 2),
        (0, 18.0, 2),
        (1, 42.0, 3),
    ]


def test_make_groups_gives_the_groups_the_seeds_of_the_whole():
    config = Config(env="CartPole-v1", backend="sync", num_envs=7, seed=3)
    groups = make_groups(config, run_seeds(config).envs, 3)
    assert [envs.num_envs for envs in groups] == [3, 2, 2]
    assert [seed for envs in groups for seed in envs.seeds] == run_seeds(config).envs


def test_run_seeds_of_neighbouring_and_resumed_runs_share_no_environment_seed():
    seeds = [run_seeds(Config(seed=seed), env_steps).envs for seed in (0, 1) for env_steps in (0, 1000)]
    assert len({seed for row in seeds for seed in row}) == 4 * 50


def test_run_seeds_sample_differently_in_every_part_and_after_a_resumption():
    seeds = [run_seeds(Config(seed=3), env_steps) for env_steps in (0, 1000)]
    assert [run.sampling for run in seeds] == [3, 1003]
    assert len({sampling_seed(run.sampling, part) for run in seeds for part in range(20)}) == 40


def test_a_worker_error_keeps_its_cause(monkeypatch):
    def hang(**kwargs):
        raise WorkerError("an environment did not respond") from EOFError()

    with playing("CartPole-v1", backend="sync") as envs:
        monkeypatch.setattr(envs.env, "reset", hang)
        with pytest.raises(WorkerError) as error:
            envs.reset()
    assert isinstance(error.value.__cause__, EOFError) and envs.broken


def test_close_waits_for_an_environment_that_closes_for_longer_than_another(tmp_path):
    gym.register("Closing-v0", entry_point="toys:ClosingEnv")
    files = [tmp_path / "soon", tmp_path / "late"]
    fns = [partial(gym.make, "Closing-v0", seconds=s, path=str(p)) for s, p in zip((0, 4), files, strict=True)]
    vector = AsyncVectorEnv(fns, context="fork", autoreset_mode=AutoresetMode.SAME_STEP)
    with contextlib.closing(MonitoredVectorEnv(vector, timeout=60)) as envs:
        envs.reset()
    assert all(path.exists() for path in files)


def test_abandon_ends_a_wait_for_a_worker_and_close_still_works():
    with playing("CartPole-v1", backend="async") as envs:
        envs.reset()
        workers = list(envs.env.processes)
        envs.abandon()
        with pytest.raises(WorkerError, match="died"):
            envs.step(np.array([0, 1]))
        envs.close()
        assert envs.broken and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("backend", ["native", "sync"])
def test_kill_does_nothing_without_worker_processes(backend):
    with playing(backend=backend) as envs:
        envs.reset()
        envs.kill()
        envs.step(np.array([0, 1]))


def test_scores_are_sums_of_rewards_in_float64():
    class Tenth(CountingEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, 0.1, *rest

    envs = vector(Tenth(0, 3))
    envs.reset()
    for _ in range(3):
        info = envs.step(np.zeros(1, int))[4]
    assert info["episodes"][0].score == 0.1 + 0.1 + 0.1


def test_a_reward_that_is_an_array_fails_with_the_reason(monkeypatch):
    envs = counting_envs(3, 3)
    obs, _ = envs.reset()
    flags = np.zeros(2, bool)
    monkeypatch.setattr(envs.env, "step", lambda actions: (obs, np.ones((2, 3)), flags, flags, {}))
    with pytest.raises(WorkerError, match=r"ValueError: its reward must be one number, got an array of shape \[3\]"):
        envs.step(np.zeros(2, int))
    assert envs.broken


def test_load_state_dict_restores_the_lives():
    config = Config(env="BreakoutNoFrameskip-v4", backend="sync", num_envs=1, frame_size=42, terminal_on_life_loss=True)
    with contextlib.closing(make_envs(config)) as first, contextlib.closing(make_envs(config)) as second:
        for envs in (first, second):
            envs.reset()
        second.lives[:] = 0
        assert second.load_state_dict(first.state_dict())
        assert second.lives.tolist() == [5] and second.lives is not first.lives
