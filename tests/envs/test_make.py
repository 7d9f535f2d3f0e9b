"""Which environments start, which are refused, how their worker processes behave and end."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.classic_control import Continuous_MountainCarEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from toys import CountingEnv, wait_for

from a2c.algorithms.a2c import A2C
from a2c.cli.flags import parse_config
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.resolve import resolve
from a2c.envs.make import make_envs, make_groups
from a2c.envs.single import find_spec, make_env, probe_spaces, register_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.learner import Learner
from a2c.processes.errors import WorkerError

SCRIPT = """
import torch, psutil, sys
with open(sys.argv[1], "a") as log:
    log.write("main\\n")
import numpy as np
from a2c.config.config import Config
from a2c.envs.make import make_envs
envs = make_envs(Config(num_envs=3))
envs.reset()
envs.step(np.zeros(3, int))
workers = [process.pid for process in envs.env.processes]
for child in psutil.Process().children(recursive=True):
    with open(f"/proc/{child.pid}/maps") as maps:
        print(child.pid, child.pid in workers, "libtorch" in maps.read())
envs.close()
"""


def test_a_config_may_hold_a_short_name():
    assert find_spec("Breakout").id == "BreakoutNoFrameskip-v4"
    envs = make_envs(Config(env="cart-pole", backend="sync", num_envs=2))
    assert envs.reset()[0].shape == (2, 4)
    envs.close()


def test_make_envs_names_the_nearest_ids_for_an_unknown_one_and_starts_no_process():
    before = psutil.Process().children(recursive=True)
    for bad, near in (
        ("PongNoFrameskp-v4", "PongNoFrameskip-v4"),
        ("CartPol-v1", "CartPole-v1"),
        ("braekout", "breakout"),
        ("ALE/Png-v5", "ALE/Pong-v5"),
    ):
        with pytest.raises(ValueError, match=f"^env must be a registered Gymnasium id, got '{bad}'.*{near}"):
            make_envs(Config(env=bad, num_envs=2))
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_make_envs_refuses_continuous_actions(backend):
    with pytest.raises(ValueError, match="env must have a discrete action space, got Box"):
        make_envs(Config(env="MountainCarContinuous-v0", backend=backend, num_envs=2))


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_make_envs_refuses_observations_without_a_fixed_size(backend):
    class Growing(gym.Env):
        action_space = gym.spaces.Discrete(2)
        observation_space = gym.spaces.Sequence(gym.spaces.Discrete(3))

    with pytest.raises(ValueError, match=r"^env must have observations of a fixed size, got Sequence\(.* of custom/G"):
        make_envs(Config(env=register_env(Growing), backend=backend, num_envs=2))


def test_make_envs_refuses_another_number_of_seeds_than_of_environments():
    with pytest.raises(ValueError, match=r"seeds must have one entry per environment \(4\), got 2"):
        make_envs(Config(env="CartPole-v1", num_envs=4), [1, 2])


def test_make_envs_closes_an_environment_that_it_refuses(monkeypatch):
    closed = []
    monkeypatch.setattr(Continuous_MountainCarEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="discrete"):
        make_envs(Config(env="MountainCarContinuous-v0", backend="sync", num_envs=2))
    assert len(closed) == 1


def test_make_envs_refuses_backend_native_for_other_than_atari_games():
    with pytest.raises(ValueError, match="backend must be async or sync for CartPole-v1"):
        make_envs(Config(env="CartPole-v1", backend="native", num_envs=2))


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_make_envs_reports_episodes_of_cartpole_with_score_equal_to_length(backend):
    with contextlib.closing(make_envs(Config(env="CartPole-v1", backend=backend, num_envs=2))) as envs:
        obs, _ = envs.reset()
        assert obs.shape == (2, 4) and obs.dtype == np.float32
        infos = [envs.step(np.array([t % 2, 0]))[4] for t in range(80)]
    episodes = [episode for info in infos for episode in info["episodes"]]
    assert len(episodes) >= 3 and all(episode.score == episode.length > 0 for episode in episodes)


def test_monitored_vector_env_refuses_another_autoreset_mode():
    with pytest.raises(ValueError, match=r"autoreset_mode must be SAME_STEP, got .*NEXT_STEP"):
        MonitoredVectorEnv(SyncVectorEnv([lambda: CountingEnv(0, 3)]))


def register_variant(monkeypatch, **kwargs):
    kwargs = {"game": "pong", "repeat_action_probability": 0.0, **kwargs}
    spec = gym.envs.registration.EnvSpec("Variant-v0", entry_point="ale_py.env:AtariEnv", kwargs=kwargs)
    monkeypatch.setitem(gym.registry, "Variant-v0", spec)


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_make_envs_keeps_the_full_action_space_of_an_id(backend, monkeypatch):
    register_variant(monkeypatch, full_action_space=True)
    config = Config(env="Variant-v0", backend=backend, num_envs=2, threads=1)
    assert probe_spaces(config).n_actions == 18
    envs = make_envs(config)
    envs.reset()
    envs.step(np.array([17, 0]))
    envs.close()


@pytest.mark.parametrize("name", ["mode", "difficulty"])
def test_make_envs_refuses_backend_native_for_an_id_that_sets_what_it_cannot_set(name, monkeypatch):
    register_variant(monkeypatch, **{name: 1})
    with pytest.raises(ValueError, match=f"backend must be async or sync for Variant-v0, which sets {name}, got nat"):
        make_envs(Config(env="Variant-v0", backend="native", num_envs=1))
    assert probe_spaces(Config(env="Variant-v0")).n_actions == 6


@pytest.mark.parametrize("backend", ["sync", "native"])
def test_make_envs_refuses_the_continuous_actions_of_an_atari_id(backend, monkeypatch):
    register_variant(monkeypatch, continuous=True)
    with pytest.raises(ValueError, match="env must have a discrete action space, got the continuous one of Variant-v0"):
        probe_spaces(Config(env="Variant-v0", backend=backend))


def test_workers_end_when_nobody_holds_their_environments_any_more():
    envs = make_envs(Config(env="CartPole-v1", backend="async", num_envs=2))
    envs.reset()
    processes = [psutil.Process(process.pid) for process in envs.env.processes]
    watching = envs.watchdog._thread
    assert all(process.is_running() for process in processes) and watching.is_alive()
    del envs
    gc.collect()
    psutil.wait_procs(processes, timeout=10)
    assert not any(process.is_running() for process in processes)
    wait_for(lambda: not watching.is_alive(), 10)


def test_state_dict_of_environments_without_snapshots_is_none_and_leaves_them_usable():
    for kind in (AsyncVectorEnv, SyncVectorEnv):
        made = kind([partial(gym.make, "CartPole-v1")], autoreset_mode=AutoresetMode.SAME_STEP)
        envs = MonitoredVectorEnv(made)
        envs.reset()
        assert envs.state_dict() is None
        envs.step(np.zeros(1, int))
        envs.close()


def test_make_envs_native_does_not_share_metadata_between_instances():
    # The class of ale-py writes the mode of the last instance into one dictionary.
    with contextlib.closing(make_envs(Config(backend="native", num_envs=1))) as ours:
        other = AtariVectorEnv("pong", 1, autoreset_mode=AutoresetMode.NEXT_STEP)
        assert ours.env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        assert other.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        other.close()


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_make_env_can_be_sent_to_processes_of_every_start_method(method):
    config = Config(num_envs=2)
    factories = [partial(make_env, config, find_spec(config.env), seed) for seed in range(2)]
    vector = AsyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP, context=method)
    with contextlib.closing(MonitoredVectorEnv(vector)) as envs:
        assert envs.reset()[0].shape == (2, 4, 84, 84)
        assert envs.step(np.array([2, 3]))[1].shape == (2,)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")
def test_make_envs_workers_import_neither_torch_nor_the_script_that_started_them(tmp_path):
    # The script has torch and no main guard: a worker that imported it would load the one and trip over the other.
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT, encoding="utf-8")
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(log)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and not done.stderr
    children = [line.split() for line in done.stdout.splitlines()]
    assert sum(is_worker == "True" for _, is_worker, _ in children) == 3
    assert all(has_torch == "False" for _, _, has_torch in children)
    assert log.read_text(encoding="utf-8") == "main\n"


def test_make_envs_leaves_the_main_module_as_it_was():
    before = {name: vars(sys.modules["__main__"]).get(name) for name in ("__file__", "__spec__", "__name__")}
    make_envs(Config(env="CartPole-v1", num_envs=1)).close()
    assert {name: vars(sys.modules["__main__"]).get(name) for name in before} == before


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_a_constructor_that_finds_no_server_is_not_reported_as_a_process_that_died(backend):
    def refused():
        raise ConnectionRefusedError("no server at port 9")

    gym.register(f"Refused{backend}-v0", entry_point=refused)
    with pytest.raises(WorkerError, match=r"^an environment failed: ConnectionRefusedError: no server at port 9$") as e:
        make_envs(Config(env=f"Refused{backend}-v0", backend=backend, num_envs=2))
    assert "in refused" in e.value.trace


def test_close_ends_the_workers():
    envs = make_envs(Config(env="CartPole-v1", num_envs=3))
    workers = list(envs.env.processes)
    assert len(workers) == 3 and all(worker.is_alive() for worker in workers)
    envs.close()
    assert not any(worker.is_alive() for worker in workers)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_make_envs_workers_ignore_a_signal_to_the_whole_group(method, monkeypatch):
    if method == "spawn":
        monkeypatch.setattr("a2c.envs.make.worker_context", lambda preload: "spawn")
    with contextlib.closing(make_envs(Config(env="CartPole-v1", num_envs=2))) as envs:
        envs.reset()
        workers = list(envs.env.processes)
        server = [forkserver._forkserver._forkserver_pid] if method == "forkserver" else []
        for pid in [*server, *(worker.pid for worker in workers)]:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        for _ in range(20):
            envs.step(np.array([0, 1]))
        assert all(worker.is_alive() for worker in workers)
        envs.close(terminate=True)  # although they ignore the signal that gymnasium would send
        assert not any(psutil.pid_exists(worker.pid) for worker in workers)


def test_make_envs_lets_a_program_end_that_does_not_close_them():
    code = "from a2c.envs.make import make_envs; from a2c.config.config import Config; "
    code += "envs = make_envs(Config(env='CartPole-v1', num_envs=2)); envs.reset(); print('made')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "made\n"


def bystander_or_failure():
    """Starts a child of another program in the parent, where gymnasium makes an environment first; fails in workers."""
    if multiprocessing.parent_process() is not None:
        raise ValueError("not here")
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="bystander", daemon=True).start()
    return CountingEnv(0, 3)


def test_make_envs_leaves_other_children_alone_when_a_start_fails():
    gym.register("Bystander-v0", entry_point=bystander_or_failure)
    with pytest.raises(WorkerError, match="died"):
        make_envs(Config(env="Bystander-v0", num_envs=1))
    children = multiprocessing.active_children()
    assert [child.name for child in children] == ["bystander"]
    for child in children:
        child.kill()
        child.join()


def test_a2c_close_ends_the_workers_although_a_compute_thread_hangs(monkeypatch):
    config = parse_config(["--preset", "cartpole", "--backend", "async", "--num-envs", "2", "--threads", "1"])
    spaces = probe_spaces(config)
    config = resolve(config, spaces.obs_shape)
    before = set(threading.enumerate())
    hang = threading.Event()
    with contextlib.closing(Compute(config)) as compute:
        learner = Learner(config, spaces, compute)
        algorithm = A2C(config, spaces, learner, compute)
        algorithm.start(None)
        workers = list(algorithm.groups[0].env.processes)
        monkeypatch.setattr("a2c.compute.compute.PATIENCE", 0.1)
        compute.calls = [compute.pool.submit(hang.wait)]
        algorithm.close()
        assert not any(psutil.pid_exists(worker.pid) for worker in workers)
        assert not any(t.name == "a2c-watchdog" for t in set(threading.enumerate()) - before)
        hang.set()


def test_make_groups_closes_all_groups_before_one_that_fails(monkeypatch):
    closed = []

    def make(config, seeds):
        if 4 in seeds:
            raise WorkerError("environment 4 failed", "its trace")
        return SimpleNamespace(close=lambda: closed.append(seeds))

    monkeypatch.setattr("a2c.envs.make.make_envs", make)
    with pytest.raises(WorkerError, match="environment 4 failed"):
        make_groups(Config(env="CartPole-v1", backend="sync"), range(8), 4)
    assert closed == [[0, 1], [2, 3]]


LIMITED = """
import resource, sys
import numpy as np
from a2c.config.config import Config
from a2c.envs.make import make_envs, make_groups
make_envs(Config(env="CartPole-v1", num_envs=1)).close()  # the fork server runs
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
try:
    groups = make_groups(Config(env="CartPole-v1"), range(60), 2)
except ValueError as error:
    sys.exit(str(error))
for envs in groups:
    envs.reset()
    envs.step(np.zeros(30, int))
    envs.close()
"""


def test_make_groups_raises_a_low_limit_of_open_files_or_refuses():
    for most, said in (
        (4096, ""),
        (200, r"num_envs must fit the limit of open files, got 60: 3\d\d open files are needed, 200 "),
    ):
        done = subprocess.run(
            ["bash", "-c", f"ulimit -Sn 64; exec {sys.executable} -c '{LIMITED}' {most}"],
            capture_output=True,
            text=True,
        )
        assert re.match(said, done.stderr) and done.returncode == bool(said), done.stderr
        assert done.stderr.count("\n") == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_train_raises_a_low_limit_of_open_files_for_workers_or_refuses(algorithm, tmp_path):
    flags = f"--preset cartpole --algorithm {algorithm} --num-envs 40 --num-minibatches 20 --workers 20"
    flags += " --total-env-steps 100 --no-progress --run-dir"
    runs = {}
    for most in (4096, 150):
        command = f"ulimit -Sn 64; ulimit -Hn {most}; exec {sys.executable} -m a2c train {flags} {tmp_path / str(most)}"
        pipe = subprocess.PIPE
        runs[most] = subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=pipe, text=True)
    for most, said in (
        (4096, ""),
        (150, "workers and num_envs must fit the limit of open files, got 20 and 40: .* 150 are"),
    ):
        err = runs[most].communicate(timeout=100)[1]
        assert re.search(said, err) and runs[most].returncode == (2 if said else 0), err
