"""Only threads that Python knows do work: operators that ran on OpenMP's threads would leave these spinning."""

import dataclasses
import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent import futures
from contextlib import closing

import numpy as np
import pytest
import torch

from a2c.compute.compute import Compute, cuda_device, resolve_precision
from a2c.compute.ranks import Place, Ranks
from a2c.config.config import Config
from a2c.networks import make_network
from a2c.run.trainer import Trainer

COUNT = """
import sys, threading, psutil

pythons = {threading.get_native_id()}

def remember(*_):
    pythons.add(threading.get_native_id())  # for good: the system may list a thread for a moment after it was joined
    sys.setprofile(None)

threading.setprofile(remember)
import a2c.tools.record_video, a2c.run.trainer  # libraries start threads of their own when they are imported

def idle_threads_worked():
    return sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id not in pythons)

before = idle_threads_worked()
"""
PARTS = {
    "train": """
from a2c import Config, Trainer
Trainer(Config(env="CartPole-v1", backend="sync", num_envs=4, threads=2, rollout_steps=20, total_env_steps=4000,
    run_dir={run!r}, progress=False)).run()
""",
    "train images": """
from a2c import Config, Trainer
Trainer(Config(env="PongNoFrameskip-v4", backend="sync", num_envs=32, threads=2, frame_size=42, network="small",
    rollout_steps=5, total_env_steps=960, max_episode_frames=240, run_dir={run!r}, progress=False)).run()
""",
    "evaluate": """
from a2c.tools.evaluate import evaluate
evaluate({run!r}, episodes=2)
""",
    "record": """
from a2c.tools.record_video import record_video
record_video({run!r}, {run!r} + "/episode.gif")
""",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of images, and what `spent` says of it."""
    run_dir = tmp_path_factory.mktemp("threads") / "run"
    return run_dir, spent(["train images"], run_dir)["train images"]


def spent(parts, run_dir):
    """CPU seconds of the threads that Python does not know after each of `parts`, which follow one another in a fresh
    process without settings of OpenMP."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    script = COUNT
    for part in parts:
        script += PARTS[part].format(run=str(run_dir)) + "\nprint(idle_threads_worked() - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers = [line for line in done.stdout.splitlines() if re.fullmatch(r"[0-9.e-]+", line)]
    return dict(zip(parts, map(float, numbers), strict=True))


@pytest.mark.skipif(torch.get_num_threads() == 1, reason="one core: nothing could spin")
def test_train_command_keeps_no_other_threads_busy(trained, tmp_path):
    assert trained[1] < 0.1
    assert spent(["train"], tmp_path / "run")["train"] < 0.1


@pytest.mark.slow
@pytest.mark.skipif(torch.get_num_threads() == 1, reason="one core: nothing could spin")
def test_evaluate_and_record_keep_no_other_threads_busy(trained):
    seconds = spent(["evaluate", "record"], trained[0])
    assert all(value < 0.05 for value in seconds.values()), seconds


def test_compute_sets_no_determinism_that_has_not_changed(monkeypatch):
    # The call imports a lot, and fails where Ctrl-C has interrupted an import of these modules.
    calls = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    Compute(Config(threads=1)).close()
    assert calls == []


def test_compute_restores_the_caller_s_number_of_threads_after_a_run():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first, second = Compute(Config(threads=2)), Compute(Config(threads=2, deterministic=True))
        assert torch.get_num_threads() == 1
        first.close()  # in any order
        assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
        second.close()
        second.close()
        assert torch.get_num_threads() == 3 and not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before)


def test_compute_of_a_dropped_trainer_restores_the_caller_s_threads(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        trainer = Trainer(Config(env="CartPole-v1", backend="sync", num_envs=4, run_dir=tmp_path / "run"))
        assert torch.get_num_threads() == 1
        del trainer
        gc.collect()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_trainer_leaves_the_caller_s_generators_alone(tmp_path):
    config = Config(env="CartPole-v1", backend="sync", num_envs=4, threads=2, rollout_steps=5, total_env_steps=40)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = (torch.rand(3), np.random.rand(3), random.random())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    weights = []
    for number in (1, 2):
        trainer = Trainer(dataclasses.replace(config, run_dir=tmp_path / str(number), progress=False))
        weights.append([p.clone() for p in trainer.learner.net.parameters()])
        assert trainer.run().exit_code == 0
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1]) and random.random() == expected[2]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)  # what the weights are drawn from
    net = make_network(config, (4,), 2, stacked=False)
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], net.parameters(), strict=True))


def test_cuda_device_has_a_number_and_refuses_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(cuda_device()), str(cuda_device(0, 2)), str(cuda_device(1, 2))] == ["cuda:0", "cuda:0", "cuda:1"]
    for local_rank in range(3):  # the first of them reports it
        with pytest.raises(ValueError, match="there must be a GPU for each rank of a host, got 2 for 3"):
            cuda_device(local_rank, 3)


def test_every_compute_thread_and_the_caller_s_use_the_device_of_the_run(monkeypatch):
    used = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update({threading.get_ident(): str(device)}))
    with closing(Compute(Config(cuda=True, precision="float32", threads=2))) as compute:
        assert str(compute.device) == "cuda:0" and compute.shards(1000) == 1
        both = threading.Barrier(2)
        threads = set(compute.map(lambda _: (both.wait(10), threading.get_ident())[1], range(2)))
    assert used == dict.fromkeys({threading.get_ident(), *threads}, "cuda:0") and len(used) == 3


def test_map_raises_an_error_once_all_calls_are_done():
    done = []

    def work(item):
        if item == 0:
            raise ValueError("of item 0")
        time.sleep(0.2)
        done.append(item)

    with closing(Compute(Config(threads=2))) as compute:
        with pytest.raises(ValueError, match="of item 0"):
            compute.map(work, range(2))
        assert done == [1]


def test_a_thread_that_hangs_is_waited_for_once(monkeypatch):
    waits, hang = [], threading.Event()
    monkeypatch.setattr("a2c.compute.compute.PATIENCE", 0.1)
    monkeypatch.setattr("a2c.compute.compute.wait", lambda *args: waits.append(args[1]) or futures.wait(*args))
    compute = Compute(Config(threads=1))
    compute.calls = [compute.pool.submit(hang.wait)]
    assert [compute.wait_idle(), compute.wait_idle()] == [False, False] and waits == [0.1, 0.0]
    compute.close()
    hang.set()
    futures.wait(compute.calls)
    assert compute.wait_idle()


@pytest.mark.parametrize(
    ("threads", "size", "shards"),
    [(1, 170, 1), (2, 170, 2), (2, 19, 1), (2, 20, 2), (16, 160, 3), (16, 170, 3), (16, 3200, 13), (4, 0, 1)],
)
def test_more_threads_than_pay_for_their_shards_do_not_learn(threads, size, shards):
    with closing(Compute(Config(threads=threads))) as compute:
        assert compute.shards(size) == shards


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("native", [True, False])
def test_auto_precision_is_bfloat16_where_the_hardware_multiplies_it(device, native, monkeypatch):
    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert resolve_precision("auto", torch.device(device)) is (torch.bfloat16 if native else torch.float32)
    for precision in ("float32", "bfloat16"):
        assert resolve_precision(precision, torch.device(device)) is getattr(torch, precision)


def test_only_a_single_rank_on_a_gpu_replays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    found = []
    for gpu, ranks in ((True, 1), (False, 1), (True, 2)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        with closing(Compute(Config(cuda=True, precision="float32"), Ranks(Place(0, ranks, 0, ranks)))) as compute:
            found.append(compute.cuda_graphs)
    with closing(Compute(Config(precision="float32"))) as compute:
        assert found == [True, False, False] and not compute.cuda_graphs
