"""Runs that torchrun starts: several processes that learn, save and stop as one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from toys import has_rows

from a2c.metrics.results import read_episodes, read_evaluations
from a2c.run.checkpoint import load_checkpoint

TRAIN = str(Path(__file__).parents[2] / "train.py")
FLAGS = "--preset cartpole --num-envs 7 --total-env-steps 8960 --log-every 0.2 --target-score 1e9"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without ranks")]


SCRIPT = """
import os
import sys
from pathlib import Path

import gymnasium as gym

from a2c.config.config import Config
from a2c.run.trainer import Trainer


def env_fn():
    if os.environ["RANK"] == "1":
        raise OSError("no data on this host")
    return gym.make("CartPole-v1")


config = Config(env="CartPole-v1", backend="sync", num_envs=4, rollout_steps=8, num_minibatches=1, progress=False)
config = Config(**vars(config) | {"run_dir": Path(sys.argv[1])})
try:
    Trainer(config, env_fn=env_fn)
except OSError as error:
    print(f"refused: {error} {error.__notes__[0]}\\n", end="")  # one write: two ranks may print at once
for run_dir, leaving in zip(sys.argv[1:], [("0", "1"), ("1",)], strict=True):  # all ranks, then one
    trainer = Trainer(Config(**vars(config) | {"run_dir": Path(run_dir)}))
    for progress in trainer:
        if progress.env_steps == 96 and os.environ["RANK"] in leaving:
            break
    print(f"left: {trainer.result().reason} at {trainer.result().env_steps}\\n", end="")
"""


def start(ranks, *flags, launcher=("--standalone",), host=None, script=TRAIN):
    inside = ["ip", "netns", "exec", host] if host else []
    command = [*inside, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *launcher]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.Popen(
        [*command, script, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": host or "lo",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


def finished(process, timeout=300):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()


def run(ranks, *flags, **how):
    process = start(ranks, *flags, **how)
    output = finished(process)
    assert process.returncode == 0, output
    return output


def children(pid, *pattern):
    """Process ids of the children of process `pid`, in order."""
    found = subprocess.run(["pgrep", "-P", str(pid), *pattern], capture_output=True, text=True, check=False).stdout
    return sorted(map(int, found.split()))


def ranks_of(process):
    """Process ids of the ranks, in order."""
    return children(process.pid)


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, finished(process, 5)
        time.sleep(0.02)


def parameters(run_dir):
    return load_checkpoint(run_dir / "latest.pt")["network"]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def run_once(tmp_path_factory, name, *flags):
    """The directory of a run of two ranks, and what it printed; one run for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    run_dir = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    printed = run_dir.with_suffix(".txt")
    with FileLock(run_dir.with_suffix(".lock")):
        if not printed.exists():
            printed.write_text(run(2, *FLAGS.split(), "--run-dir", str(run_dir), *flags))
    return run_dir, printed.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from start to end, and what it printed."""
    return run_once(tmp_path_factory, "whole")


def test_two_ranks_share_the_environments_and_rank_0_writes(whole):
    run_dir, output = whole
    state = load_checkpoint(run_dir / "latest.pt")
    assert state["env_steps"] == 8960 and state["updates"] == 40 * 7  # one minibatch per environment
    assert [len(part["envs"][0]["scores"]) for part in state["algorithm"]["ranks"]] == [4, 3]
    assert output.count("run directory  ") == output.count("all environment steps done") == 1
    assert "1 thread on each of 2 ranks" in output
    steps, scores = (read_episodes(run_dir)[name] for name in ("env_steps", "score"))
    assert len(scores) == state["scores"]["episodes"] > 100
    assert scores.sum() <= 8960 < scores.sum() + 7 * 500 and (steps[1:] >= steps[:-1]).all()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same run, stopped halfway."""
    return run_once(tmp_path_factory, "half", "--stop-after", "4480")[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_of_two_ranks_is_resumed_by_any_number(whole, half, tmp_path, ranks):
    run_dir = tmp_path / "run"
    shutil.copytree(half, run_dir)
    output = run(ranks, "--resume", str(run_dir))
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 8960
    assert same(parameters(run_dir), parameters(whole[0])) == (ranks == 2)
    assert ("its episodes continue" if ranks == 2 else "every environment starts a new episode") in output


def test_a_killed_rank_ends_the_others_with_a_line_that_names_it(tmp_path):
    run_dir = tmp_path / "run"
    process = start(4, *FLAGS.split(), "--total-env-steps", "10000000", "--run-dir", str(run_dir))
    wait_for(lambda: has_rows(run_dir / "metrics.csv"), process)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    began = time.monotonic()
    output = finished(process)
    assert time.monotonic() - began < 20 and process.returncode != 0
    assert output.count("error: lost rank 3, which ended or did not answer; the last checkpoint is kept") == 1


def test_ranks_whose_torchrun_is_killed_stop_with_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    process = start(2, *FLAGS.split(), "--total-env-steps", "10000000", "--run-dir", str(run_dir))
    wait_for(lambda: has_rows(run_dir / "metrics.csv"), process)
    process.kill()
    output = finished(process)  # until both ranks, which share its output, have ended
    assert "stopped by SIGTERM" in output
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] > 0


def test_a_restarted_run_continues_exactly(whole, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*FLAGS.split(), "--run-dir", str(run_dir), "--checkpoint-every", "224")
    process = start(2, *flags, launcher=("--standalone", "--max-restarts=1"))
    wait_for((run_dir / "previous.pt").exists, process)  # the second checkpoint is written
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    output = finished(process)
    assert process.returncode == 0, output
    assert "resumed at" in output and "its episodes continue" in output
    assert same(parameters(run_dir), parameters(whole[0]))


def test_a_failing_worker_of_one_rank_is_replaced_on_all(tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--backend", "async", "--num-envs", "4", "--total-env-steps", "12000", "--run-dir", str(run_dir))
    process = start(2, *FLAGS.split(), *flags)
    wait_for(lambda: has_rows(run_dir / "metrics.csv"), process)
    rank = ranks_of(process)[1]
    workers = subprocess.run(["pgrep", "-g", str(rank)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    output = finished(process)
    assert process.returncode == 0, output
    assert "restarted at" in output and "the same episodes continue" in output


def test_one_rank_has_the_process_that_evaluates_and_a_signal_to_the_other_stops_all_with_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--total-env-steps", "10000000", "--eval-every", "2000", "--eval-episodes", "1")
    process = start(2, *FLAGS.split(), *flags, "--run-dir", str(run_dir))
    # The process that evaluates has the lowest priority, beside two ranks and the other tests.
    table = run_dir / "evaluations.csv"
    wait_for(lambda: table.exists() and len(read_evaluations(run_dir)["mean"]) > 1, process, seconds=300)
    assert [len(children(rank, "-f", "follow_main")) for rank in ranks_of(process)] == [1, 0]
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    output = finished(process)
    assert "stopped by SIGTERM" in output and "has ended" not in output
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] > 0
    steps = read_evaluations(run_dir)["env_steps"]
    assert (steps[1:] > steps[:-1]).all()


def test_leaving_the_loop_ends_all_ranks_with_a_checkpoint_as_does_a_refusal_by_one(tmp_path):
    script, run_dirs = tmp_path / "script.py", [tmp_path / "all", tmp_path / "one"]
    script.write_text(SCRIPT)
    output = run(2, *map(str, run_dirs), script=str(script))
    assert output.count("refused: no data on this host reported by rank 1") == 2
    assert output.count("left: stopped by the caller at 96") == 4
    assert [load_checkpoint(run_dir / "latest.pt")["env_steps"] for run_dir in run_dirs] == [96, 96]


@pytest.mark.parametrize(
    ("flags", "launcher", "message"),
    [
        (["--algorithm", "a3c"], [], "error: algorithm must be a2c with more than one rank, got a3c"),
        (["--num-envs", "1"], [], "error: num_envs must be at least the number of ranks, 2, got 1"),
        ([], ["--max-restarts=1"], "error: run_dir must be given with --max-restarts"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(tmp_path, flags, launcher, message):
    process = start(2, *FLAGS.split(), *flags, launcher=("--standalone", *launcher))
    output = finished(process)
    assert process.returncode != 0 and output.count(message) == 1 + bool(launcher)  # torchrun has started it again


@pytest.fixture
def hosts():
    """Two network namespaces, each with a device of its own name, that are connected to each other alone."""
    names = [f"a2c{os.getpid()}{letter}" for letter in "ab"]

    def ip(*words):
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.strip()

    if shutil.which("ip") is None:
        pytest.skip("no command ip (iproute2), which makes network namespaces")
    code, why = ip("netns", "add", names[0])
    if code:
        pytest.skip(f"network namespaces are not allowed here: {why}")
    known = [Path("/etc/netns") / name for name in names]  # files that `ip netns exec` puts in place of those of /etc
    try:
        for number, path in enumerate(known, start=1):
            path.mkdir(parents=True)
            (path / "nsswitch.conf").write_text("hosts: files\n")  # no name server: a lookup would take minutes
            # By its own name's address a host finds out that it is the one of --rdzv-endpoint.
            (path / "hosts").write_text(f"127.0.0.1 localhost\n10.213.7.{number} {socket.gethostname()}\n")
        for words in (["netns", "add", names[1]], ["link", "add", names[0], "type", "veth", "peer", "name", names[1]]):
            code, why = ip(*words)
            if code:
                pytest.skip(f"two namespaces cannot be connected here: {why}")
        for number, name in enumerate(names, start=1):
            assert ip("link", "set", name, "netns", name)[0] == 0
            assert ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", name)[0] == 0
            assert ip("-n", name, "link", "set", "lo", "up")[0] == ip("-n", name, "link", "set", name, "up")[0] == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)
        for path in known:
            shutil.rmtree(path, ignore_errors=True)


def test_two_hosts_learn_what_two_ranks_of_one_host_learn(hosts, whole, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*FLAGS.split(), "--run-dir", str(run_dir))
    launcher = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.213.7.1:29400", "--rdzv-id=test"]
    processes = [
        start(1, *flags, launcher=[*launcher, f"--local-addr=10.213.7.{number}"], host=host)
        for number, host in enumerate(hosts, start=1)
    ]
    outputs = [finished(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(output.count("run directory  ") for output in outputs) == [0, 1]
    assert same(parameters(run_dir), parameters(whole[0]))
