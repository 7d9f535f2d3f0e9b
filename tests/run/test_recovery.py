"""Recovery of a run whose workers die, hang or raise, and signals to a run that hangs."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import psutil
import pytest
from runs import HELPERS, after_rollout, opened, untimed_rows
from toys import same, wait_for

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.envs.make import _workers
from a2c.processes.errors import WorkerError
from a2c.run import state as run_state
from a2c.run.checkpoint import load_checkpoint
from a2c.run.recovery import Recovery
from a2c.run.run_dir import RunLock
from a2c.run.trainer import Trainer

FLAGS = ["--num-envs", "8", "--threads", "2", "--log-every", "1e-6", "--no-progress", "--env-timeout", "2"]
FLAGS += ["--rollout-steps", "20"]
PONG = ["--preset", "pong-fast", "--backend", "async", *FLAGS, "--num-envs", "16"]  # two groups
PONG += ["--total-env-steps", str(16 * 20 * 6)]
CARTPOLE = ["--env", "CartPole-v1", "--backend", "async", *FLAGS, "--total-env-steps", str(8 * 20 * 12)]
# What gymnasium says about an exception in a worker before it raises it here.
REPORTED = pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")


def play(run_dir, flags, disturb=None):
    """A run with `disturb(trainer)` called after its fifth rollout; its last checkpoint."""
    run = Trainer(parse_config([*flags, "--run-dir", str(run_dir)]))
    after_rollout(run, lambda rollouts: disturb(run) if rollouts == 5 and disturb else None)
    assert run.run().exit_code == 0
    return load_checkpoint(run_dir / "latest.pt")


def worker(run, group, row):
    return run.algorithm.groups[group].env.processes[row].pid


DISTURBANCES = {
    "kill": lambda run: os.kill(worker(run, 1, 3), signal.SIGKILL),
    "kill all": lambda run: [
        os.kill(p.pid, signal.SIGKILL) for envs in run.algorithm.groups for p in envs.env.processes
    ],
    "stop": lambda run: os.kill(worker(run, 0, 0), signal.SIGSTOP),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_dir, play(run_dir, PONG)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(disturb, marks=[pytest.mark.slow] * (name == "kill"), id=name)  # "kill all" is harder
        for name, disturb in DISTURBANCES.items()
    ],
)
def test_recovery_gives_the_bits_of_a_run_without_failures(disturb, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_state, "SNAPSHOT_EVERY", 3)
    state = play(tmp_path / "run", PONG, disturb)
    assert "restarted at 960 env_steps, the same episodes continue (try 1 of 3)" in capsys.readouterr().out
    for part in ("network", "optimizer", "algorithm", "scores", "updates", "saved_best"):
        assert same(undisturbed[1][part], state[part]), part
    for name in ("metrics.csv", "episodes.csv"):
        assert untimed_rows(tmp_path / "run", name) == untimed_rows(undisturbed[0], name)


@REPORTED
def test_recovery_ends_with_the_traceback_of_an_environment_that_always_raises(tmp_path, capsys):
    flags = troubled(tmp_path, "raise")
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run"), "--max-worker-restarts", "2"]) == 1
    out, err = capsys.readouterr()
    assert out.count("restarted at 0 env_steps") == 2
    *trace, last = err.strip().splitlines()
    assert last == "error: an environment failed: ValueError: the pole broke (3 times without progress)"
    assert trace[0].startswith("Traceback") and any('raise ValueError("the pole broke")' in line for line in trace)


@REPORTED
@pytest.mark.parametrize("trouble", ["raise once", "hang once", "die once"])
def test_recovery_from_an_environment_that_fails_once(trouble, tmp_path, capsys):
    flags = [*troubled(tmp_path, trouble), "--env-timeout", "3"]  # a busy machine must not look like a failure
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.count("restarted at") == 1
    said = {"raise once": "ValueError: the pole broke", "hang once": "did not respond within 3 seconds", "die once": ""}
    assert said[trouble] in out and ("did not respond" in out) == (trouble == "hang once")
    assert "every environment starts a new episode" in out  # CartPole is inside an attribute, which no snapshot holds
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 8 * 20 * 10


def test_recovery_resets_its_count_after_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "SNAPSHOT_EVERY", 1)
    run = Trainer(parse_config([*CARTPOLE, "--max-worker-restarts", "1", "--run-dir", str(tmp_path / "run")]))
    training_step, killed = run.algorithm.training_step, set()

    def kill_and_step():
        steps = run.learner.env_steps
        if steps % 1280 == 0 and steps not in killed:
            killed.add(steps)
            os.kill(worker(run, 0, 1), signal.SIGKILL)
        return training_step()

    run.algorithm.training_step = kill_and_step
    assert run.run().exit_code == 0 and len(killed) == 2


@pytest.mark.parametrize("error", [WorkerError, ValueError])  # ValueError: the limit of open files, for example
def test_recovery_ends_where_workers_cannot_start(error, tmp_path, monkeypatch):
    run = Trainer(parse_config([*CARTPOLE, "--max-worker-restarts", "2", "--run-dir", str(tmp_path / "run")]))
    training_step, starts = run.algorithm.training_step, []

    def refuse(new_run):
        starts.append(1)
        raise error("the process of an environment died")

    def kill_and_step():
        monkeypatch.setattr(run.algorithm, "start", refuse)
        os.kill(worker(run, 0, 1), signal.SIGKILL)
        return training_step()

    run.algorithm.training_step = kill_and_step
    with pytest.raises(WorkerError, match="3 times without progress"):
        run.run()
    assert len(starts) == 2


def troubled(tmp_path, order):
    """Flags of a run of `TroubledEnv`, after writing the order that its environments follow."""
    file = tmp_path / "order"
    file.write_text(order)
    name = f"Troubled{abs(hash(str(tmp_path)))}-v0"
    gym.register(name, entry_point="troubled:TroubledEnv", kwargs={"file": str(file)})
    return ["--env", name, "--backend", "async", *FLAGS, "--total-env-steps", str(8 * 20 * 10)]


def test_config_rules_of_recovery():
    assert Config().max_worker_restarts == 3 and Config().env_timeout == 60.0
    with pytest.raises(ValueError, match="env_timeout must be above 0"):
        Config(env_timeout=0.0)


def test_trainer_ends_with_one_line_at_an_observation_that_is_nan(tmp_path, capsys):
    flags = troubled(tmp_path, "nan once")
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run"), "--backend", "sync"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "NaN or infinite" in err and err.count("\n") == 1
    assert all(p.isfinite().all() for p in load_checkpoint(tmp_path / "run" / "latest.pt")["network"].values())


def test_recovery_does_not_forget_the_best_policy(tmp_path):
    flags = ["--env", "CartPole-v1", *FLAGS, "--backend", "sync", "--run-dir", str(tmp_path / "run")]
    run = opened(parse_config(flags))
    run.scores.add([300.0] * 100)
    run.state.snapshot()
    assert run.state.save(run.outputs)
    run.recovery.restart(WorkerError("an environment died"))
    run.scores.add([50.0] * 100)
    run.state.snapshot()
    assert run.state.save(run.outputs)
    run.close()
    assert load_checkpoint(tmp_path / "run" / "best.pt")["scores"]["last"] == [300.0] * 100
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["saved_best"] == 300.0


def test_recovery_starts_new_windows_for_new_episodes(tmp_path):
    flags = ["--preset", "book", "--backend", "native", "--num-envs", "2", "--network", "small", "--frame-size", "42"]
    run = opened(parse_config([*flags, "--no-progress", "--run-dir", str(tmp_path / "run")]))
    for _ in range(2):
        run.algorithm.training_step()
    run.state.snapshot()
    assert [len(window) for window in run.algorithm.windows.open] == [2, 2]
    run.recovery.restart(WorkerError("an environment died"))
    assert [len(window) for window in run.algorithm.windows.open] == [0, 0]
    run.close()


def refuse():
    if multiprocessing.parent_process() is not None:
        os._exit(1)  # as if the system had run out of memory
    return gym.make("CartPole-v1")


def test_workers_of_a_failed_start_are_ended():
    good = partial(gym.make, "CartPole-v1")
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerError):
        _workers(Config(env_timeout=5.0), [good, good, refuse, good])
    assert set(multiprocessing.active_children()) == before


def hanging_run(tmp_path, backend):
    """A run in a process of its own whose environments hang for ever from some step on."""
    flags = troubled(tmp_path, "hang")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium as gym; "
    code += "gym.register(sys.argv[2], entry_point='troubled:TroubledEnv', kwargs={'file': sys.argv[3]}); "
    code += "from a2c.cli.commands import train; sys.exit(train(sys.argv[4:]))"
    arguments = [HELPERS, flags[flags.index("--env") + 1], str(tmp_path / "order"), *flags]
    arguments += ["--backend", backend, "--env-timeout", "600", "--run-dir", str(tmp_path / "run")]
    run = subprocess.Popen([sys.executable, "-c", code, *arguments])
    wait_for((tmp_path / "hanging").exists, 60)
    return run


def test_trainer_that_is_killed_takes_hanging_workers_with_it(tmp_path):
    run = hanging_run(tmp_path, "async")
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 8
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_trainer_ends_at_once_at_a_second_interrupt(tmp_path):
    run = hanging_run(tmp_path, "sync")
    run.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(1.0)  # it would finish the rollout
    run.send_signal(signal.SIGINT)
    assert run.wait(5.0) == 130


LIBRARY = """
import sys
sys.path.insert(0, sys.argv[1])
import gymnasium as gym
gym.register(sys.argv[2], entry_point='troubled:TroubledEnv', kwargs={'file': sys.argv[3]})
from a2c.cli.flags import parse_config
from a2c.run.trainer import Trainer
try:
    Trainer(parse_config(sys.argv[4:])).run()
except KeyboardInterrupt:
    print('interrupted', flush=True)
try:
    sys.stdin.readline()  # the cell after
    print('alive', 6 * 7, flush=True)
except KeyboardInterrupt:
    print('interrupted again', flush=True)
import os
os._exit(0)  # a thread in the sleeping environment of this process would wait for ever
"""


@pytest.mark.parametrize(
    "how", ["async", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sync", "a3c", "ga3c"))]
)
def test_trainer_in_a_notebook_survives_two_interrupts_without_workers(how, tmp_path):
    flags = troubled(tmp_path, "hang")
    flags = [*flags, *(["--algorithm", how, "--workers", "2"] if "a3c" in how else ["--backend", how])]
    arguments = [HELPERS, flags[flags.index("--env") + 1], str(tmp_path / "order"), *flags]
    arguments += ["--env-timeout", "600", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", LIBRARY, *arguments]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "hanging").exists)
    family = [p for p in psutil.Process(run.pid).children(recursive=True) if p.ppid() != run.pid]  # not the fork server
    assert len(family) >= {"async": 8, "sync": 0, "a3c": 2, "ga3c": 2}[how]
    run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.poll() is None
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "a worker is still alive"
    out, err = run.communicate("go on\n", timeout=60)
    assert time.monotonic() - began < 30 and run.returncode == 0, err
    if how == "ga3c":  # its trainer waits for no actor, so the first interrupt may have ended the run
        assert out.splitlines()[-1] in ("alive 42", "interrupted again"), (out, err)
    else:
        assert out.endswith("interrupted\nalive 42\n"), (out, err)
    lock = RunLock(tmp_path / "run")
    lock.take()  # and the directory is free
    lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["disk", "worker"])
def test_train_command_that_waits_ends_at_a_second_interrupt_and_shows_the_cursor(waits_for, tmp_path):
    import pty

    code = "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium as gym\n"
    code += "gym.register(sys.argv[2], entry_point='troubled:TroubledEnv', kwargs={'file': sys.argv[3]})\n"
    if waits_for == "disk":
        code += "from a2c.run import outputs\n"
        code += "def refuse(*args, **kwargs): raise OSError(28, 'No space left on device')\n"
        code += "outputs.save_checkpoint = refuse\n"
    code += "from a2c.cli.commands import train; sys.exit(train(sys.argv[4:]))"
    flags = [flag for flag in troubled(tmp_path, "hang") if flag != "--no-progress"]
    if waits_for == "disk":
        (tmp_path / "order").unlink()
    arguments = [HELPERS, flags[flags.index("--env") + 1], str(tmp_path / "order"), *flags]
    arguments += ["--backend", "async", "--env-timeout", "600", "--run-dir", str(tmp_path / "run")]
    arguments += ["--total-env-steps", "640"] if waits_for == "disk" else []
    screen, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    run = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = bytearray()

    def read():
        while True:
            try:
                shown.extend(os.read(screen, 65536))
            except OSError:
                return

    threading.Thread(target=read, daemon=True).start()
    wait_for(lambda: b"No space left" in shown if waits_for == "disk" else (tmp_path / "hanging").exists())
    time.sleep(0.3)
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert run.wait(15) == 130
    wait_for(lambda: b"\x1b[?25h" in shown, 5)
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0 and b"Traceback" not in shown
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_trainer_that_is_killed_before_its_first_row_can_be_resumed(tmp_path, capsys):
    run = opened(parse_config([*CARTPOLE, "--run-dir", str(tmp_path / "run")]))
    run.state.save_when_due(run.outputs)
    run.close()  # as much as a kill would have left
    assert cli.train(["--resume", str(tmp_path / "run"), "--stop-after", "320"]) == 0
    assert "resumed at 0 env_steps; its episodes continue" in capsys.readouterr().out


def test_recovery_starts_no_worker_where_the_run_is_asked_to_stop(tmp_path, monkeypatch):
    flags = ["--env", "CartPole-v1", *FLAGS, "--backend", "sync", "--run-dir", str(tmp_path / "run")]
    run = opened(parse_config(flags))
    run.algorithm.training_step()
    monkeypatch.setattr(run.algorithm, "start", None)
    run.stop.number = signal.SIGTERM
    run.recovery.restart(WorkerError("an environment died"))
    assert run.state.env_steps == 0 and not run.algorithm.groups
    run.close()


def test_recovery_that_gives_up_saves_the_state_in_memory(tmp_path):
    flags = ["--env", "CartPole-v1", *FLAGS, "--backend", "sync", "--max-worker-restarts", "1"]
    run = opened(parse_config([*flags, "--run-dir", str(tmp_path / "run")]))
    run.algorithm.training_step()
    snapshot = run.state.snapshot()["env_steps"]
    run.algorithm.training_step()
    run.recovery.restart(WorkerError("first"))
    with pytest.raises(WorkerError, match=r"second \(2 times without progress\)"):
        run.recovery.restart(WorkerError("second"))
    run.close()
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == snapshot


def test_recovery_gives_up_where_a_run_fails_now_earlier_and_now_later():
    state = SimpleNamespace(restore=lambda: None, restart=lambda: True, save_last=lambda outputs: None)
    outputs = SimpleNamespace(rewind=lambda env_steps: None, message=lambda text: None)
    algorithm = SimpleNamespace(close=lambda failed: None)
    recovery = Recovery(Config(max_worker_restarts=3), algorithm, state, outputs, lambda: False)
    for state.env_steps in (300, 200, 300):
        recovery.restart(WorkerError("died"))
    state.env_steps = 200
    with pytest.raises(WorkerError, match="4 times without progress"):
        recovery.restart(WorkerError("died"))
