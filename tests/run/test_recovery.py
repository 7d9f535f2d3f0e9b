"""A worker that dies, hangs or raises: the run goes back to its snapshot and ends as if nothing had happened."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import gymnasium as gym
import psutil
import pytest
from runs import HELPERS, lived
from toys import same, wait_for

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.envs.make import _workers
from a2c.processes.errors import WorkerError
from a2c.run import trainer
from a2c.run.checkpoint import load_checkpoint
from a2c.run.run_dir import RunLock
from a2c.run.trainer import Trainer

FLAGS = ["--num-envs", "8", "--threads", "2", "--log-every", "1e-6", "--no-progress", "--env-timeout", "2"]
PONG = ["--preset", "pong-fast", "--backend", "async", *FLAGS, "--num-envs", "16"]  # two groups
PONG += ["--total-env-steps", str(16 * 20 * 6)]
CARTPOLE = ["--env", "CartPole-v1", "--backend", "async", *FLAGS, "--total-env-steps", str(8 * 20 * 12)]
# What gymnasium says about an exception in a worker before it raises it here.
REPORTED = pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")


def play(run_dir, flags, disturb=None):
    """A run whose `disturb(trainer)` is called behind its fifth rollout; its last checkpoint."""
    run = Trainer(parse_config([*flags, "--run-dir", str(run_dir)]))
    training_step, calls = run.training_step, []

    def step_and_disturb():
        rollout = training_step()
        calls.append(1)
        if len(calls) == 5 and disturb:
            disturb(run)
        return rollout

    run.training_step = step_and_disturb
    assert run.run() == 0
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


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES.keys())
def test_a_disturbed_run_equals_an_undisturbed_one_bit_for_bit(disturb, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "SNAPSHOT_EVERY", 3)
    state = play(tmp_path / "run", PONG, disturb)
    assert "started again at 960 env_steps, the same games go on (try 1 of 3)" in capsys.readouterr().out
    for part in ("network", "optimizer", "collector", "scores", "updates", "saved_best"):
        assert same(undisturbed[1][part], state[part]), part
    for name in ("metrics.csv", "episodes.csv"):
        assert lived(tmp_path / "run", name) == lived(undisturbed[0], name)


@REPORTED
def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(tmp_path, capsys):
    flags = troubled(tmp_path, "raise")
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run"), "--max-worker-restarts", "2"]) == 1
    out, err = capsys.readouterr()
    assert out.count("started again at 0 env_steps") == 2
    *trace, last = err.strip().splitlines()
    assert last == "error: an environment failed: ValueError: the pole broke (3 times without progress)"
    assert trace[0].startswith("Traceback") and any('raise ValueError("the pole broke")' in line for line in trace)


@REPORTED
@pytest.mark.parametrize("trouble", ["raise once", "hang once", "die once"])
def test_trouble_that_passes_is_overcome(trouble, tmp_path, capsys):
    flags = [*troubled(tmp_path, trouble), "--env-timeout", "3"]  # a busy machine is not to be taken for trouble
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.count("started again at") == 1
    said = {"raise once": "ValueError: the pole broke", "hang once": "no answer within 3 seconds", "die once": ""}
    assert said[trouble] in out
    assert "every environment starts a new game" in out  # CartPole inside an attribute: no snapshot sees it
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 8 * 20 * 10


def test_progress_between_failures_starts_the_count_again(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SNAPSHOT_EVERY", 1)
    run = Trainer(parse_config([*CARTPOLE, "--max-worker-restarts", "1", "--run-dir", str(tmp_path / "run")]))
    training_step, killed = run.training_step, set()

    def advance_and_kill():
        steps = run.learner.env_steps
        if steps % 1280 == 0 and steps not in killed:
            killed.add(steps)
            os.kill(worker(run, 0, 1), signal.SIGKILL)
        return training_step()

    run.training_step = advance_and_kill
    assert run.run() == 0 and len(killed) == 2


def test_workers_that_cannot_start_end_the_run(tmp_path, monkeypatch):
    run = Trainer(parse_config([*CARTPOLE, "--max-worker-restarts", "2", "--run-dir", str(tmp_path / "run")]))
    training_step, starts = run.training_step, []

    def refuse(state):
        starts.append(1)
        raise WorkerError("the process of an environment died")

    def advance_and_kill():
        monkeypatch.setattr(run.algorithm, "start", refuse)
        os.kill(worker(run, 0, 1), signal.SIGKILL)
        return training_step()

    run.training_step = advance_and_kill
    with pytest.raises(WorkerError, match="3 times without progress"):
        run.run()
    assert len(starts) == 2


def troubled(tmp_path, order):
    """Flags of a run of `TroubledEnv`, and the order that its environments will find."""
    file = tmp_path / "order"
    file.write_text(order)
    name = f"Troubled{abs(hash(str(tmp_path)))}-v0"
    gym.register(name, entry_point="troubled:TroubledEnv", kwargs={"file": str(file)})
    return ["--env", name, "--backend", "async", *FLAGS, "--total-env-steps", str(8 * 20 * 10)]


def test_config_rules_of_healing():
    assert Config().max_worker_restarts == 3 and Config().env_timeout == 60.0
    with pytest.raises(ValueError, match="env_timeout must be above 0"):
        Config(env_timeout=0.0)


def test_an_observation_that_is_no_number_ends_the_run_with_one_line(tmp_path, capsys):
    flags = troubled(tmp_path, "nan once")
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run"), "--backend", "sync"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "NaN or infinite" in err and err.count("\n") == 1
    assert all(p.isfinite().all() for p in load_checkpoint(tmp_path / "run" / "latest.pt")["network"].values())


def test_the_best_policy_is_not_overwritten_by_a_worse_one_after_a_heal(tmp_path):
    run = Trainer(
        parse_config(["--env", "CartPole-v1", *FLAGS, "--backend", "sync", "--run-dir", str(tmp_path / "run")])
    )
    run.claim()
    run.start()
    run._open_outputs()
    run.scores.add([300.0] * 100)
    assert run._save(run._remember())
    run._heal(WorkerError("an environment died"))
    run.scores.add([50.0] * 100)
    run._save(run._remember())
    run.close()
    assert load_checkpoint(tmp_path / "run" / "best.pt")["scores"]["last"] == [300.0] * 100
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["saved_best"] == 300.0


def test_windows_do_not_run_on_into_new_games(tmp_path):
    flags = ["--preset", "book", "--backend", "native", "--num-envs", "2", "--network", "small", "--frame-size", "42"]
    run = Trainer(parse_config([*flags, "--no-progress", "--run-dir", str(tmp_path / "run")]))
    run.claim()
    run.start()
    run._open_outputs()
    for _ in range(2):
        run.training_step()
    run._remember()
    assert [len(window) for window in run.learner.windows.open] == [2, 2]
    run._heal(WorkerError("an environment died"))
    assert [len(window) for window in run.learner.windows.open] == [0, 0]
    run.close()


def refuse():
    if multiprocessing.parent_process() is not None:
        os._exit(1)  # as if the system had run out of memory
    return gym.make("CartPole-v1")


def test_a_failed_start_leaves_no_worker():
    good = partial(gym.make, "CartPole-v1")
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerError):
        _workers(Config(env_timeout=5.0), [good, good, refuse, good])
    assert set(multiprocessing.active_children()) == before


def hanging_run(tmp_path, backend):
    """A run in a process of its own whose environments hang for ever, once they do."""
    flags = troubled(tmp_path, "hang")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium as gym; "
    code += "gym.register(sys.argv[2], entry_point='troubled:TroubledEnv', kwargs={'file': sys.argv[3]}); "
    code += "from a2c.cli.commands import train; sys.exit(train(sys.argv[4:]))"
    arguments = [HELPERS, flags[flags.index("--env") + 1], str(tmp_path / "order"), *flags]
    arguments += ["--backend", backend, "--env-timeout", "600", "--run-dir", str(tmp_path / "run")]
    run = subprocess.Popen([sys.executable, "-c", code, *arguments])
    wait_for((tmp_path / "hanging").exists, 60)
    return run


def test_a_hanging_worker_ends_with_its_trainer(tmp_path):
    run = hanging_run(tmp_path, "async")
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 8
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_second_interrupt_ends_the_process_at_once(tmp_path):
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
def test_two_interrupts_leave_a_notebook_alive_and_no_worker(how, tmp_path):
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
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "a worker lives on"
    out, err = run.communicate("go on\n", timeout=60)
    assert time.monotonic() - began < 30 and run.returncode == 0, err
    if how == "ga3c":  # its trainer waits for no player, so the first interrupt may have ended the run in order
        assert out.splitlines()[-1] in ("alive 42", "interrupted again"), (out, err)
    else:
        assert out.endswith("interrupted\nalive 42\n"), (out, err)
    lock = RunLock(tmp_path / "run")
    lock.take()  # and the directory is free
    lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["disk", "worker"])
def test_a_second_interrupt_ends_a_waiting_command_and_shows_the_cursor_again(waits_for, tmp_path):
    import pty

    code = "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium as gym\n"
    code += "gym.register(sys.argv[2], entry_point='troubled:TroubledEnv', kwargs={'file': sys.argv[3]})\n"
    if waits_for == "disk":
        code += "from a2c.run import outputs as record\n"
        code += "def refuse(*args, **kwargs): raise OSError(28, 'No space left on device')\n"
        code += "record.save_checkpoint = refuse\n"
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


def test_a_run_that_is_killed_before_its_first_row_can_be_resumed(tmp_path, capsys):
    run = Trainer(parse_config([*CARTPOLE, "--run-dir", str(tmp_path / "run")]))
    run.claim()
    run.start()
    run._open_outputs()
    run.close()  # as much as a kill would have left
    assert cli.train(["--resume", str(tmp_path / "run"), "--stop-after", "320"]) == 0
    assert "resumed at 0 env_steps; its games go on" in capsys.readouterr().out
