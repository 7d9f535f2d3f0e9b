"""How worker processes start, and what they leave alone."""

import multiprocessing.util
import os
import subprocess
import sys
import threading

import pytest

from a2c.processes.start import LONGEST_TEMPORARY, without_main, worker_context


def test_worker_context_is_spawn_on_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert worker_context([]) == "spawn"


def test_without_main_lets_one_thread_in_at_a_time(monkeypatch):
    main, entered = sys.modules["__main__"], threading.Event()
    monkeypatch.setattr(main, "__file__", "script.py", raising=False)  # pytest may run without a script

    def enter():
        with without_main():
            entered.set()

    thread = threading.Thread(target=enter)
    with without_main():
        thread.start()
        assert not entered.wait(0.2) and not hasattr(main, "__file__")
    assert entered.wait(10)
    thread.join()
    assert main.__file__ == "script.py"


USERS = """
import multiprocessing, os, signal, time
from multiprocessing import forkserver
from a2c.config.config import Config
from a2c.envs.make import make_envs

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with SIGINT ignored
make_envs(Config(env="CartPole-v1", num_envs=1)).close()
context = multiprocessing.get_context("forkserver")
for number in (signal.SIGTERM, signal.SIGINT):
    for pause in (0, 0.5):
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        time.sleep(pause)
        os.kill(process.pid, number)
        process.join(10)
        print(process.exitcode)
        process.kill()
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
with context.Pool(1) as pool:
    print(pool.map(abs, [-1]))
"""


def test_worker_context_leaves_signals_to_other_processes_of_the_fork_server():
    done = subprocess.run([sys.executable, "-c", USERS], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["-15", "-15", "1", "1", "[1]"], done.stderr


CLEAN_UP = """
import multiprocessing, signal, sys, time
import a2c.processes.start

def work(ready):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("cleaned up")))
    ready.set()
    time.sleep(60)

context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=work, args=(ready,), daemon=True).start()
ready.wait()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_worker_processes_of_other_programs_end_by_their_own_signal_handler():
    done = subprocess.run([sys.executable, "-c", CLEAN_UP], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("cleaned up\n", "")


ONE_WORKER = """
from a2c.config.config import Config
from a2c.envs.make import make_envs

make_envs(Config(env="CartPole-v1", num_envs=1)).close()
"""


def test_worker_processes_take_no_modules_from_the_working_directory(tmp_path):
    for name in ("random", "secrets", "selectors"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()")
    (tmp_path / "a2c").mkdir()
    (tmp_path / "a2c" / "__init__.py").write_text("open('executed', 'w').close()")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "main.py").write_text(ONE_WORKER)
    command = [sys.executable, "script/main.py"]  # not with -P, which Python would pass on to the fork server
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and not (tmp_path / "executed").exists()


ENVIRONS = """
import json, os, threading
from concurrent.futures import ThreadPoolExecutor
import gymnasium
from gymnasium.envs.registration import EnvSpec
from a2c.config.config import Config
from a2c.envs.make import make_envs
from a2c.processes.start import worker_context


class Tells(gymnasium.Wrapper):
    def __init__(self, **_):
        super().__init__(gymnasium.make("CartPole-v1"))
        with open("environ.json", "w") as file:
            json.dump(ours(), file)


def ours():
    return {name: text for name, text in os.environ.items() if name.startswith(("PYTHON", "A2C"))}


before = ours()
with ThreadPoolExecutor(2) as pool:
    barrier = threading.Barrier(2)
    assert list(pool.map(lambda _: (barrier.wait(), worker_context([]))[1], range(2))) == ["forkserver"] * 2
make_envs(Config(env="Tells-v0", num_envs=1), spec=EnvSpec("Tells-v0", entry_point=Tells)).close()
assert ours() == before
assert json.load(open("environ.json")) == before, "in a worker"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS starts its workers without a fork server")
@pytest.mark.parametrize("set_before", [{}, {"PYTHONPATH": "/somewhere", "PYTHONSAFEPATH": ""}])
def test_environment_variables_are_as_they_were_here_and_in_a_worker(set_before, tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | set_before
    command = [sys.executable, "-c", ENVIRONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS starts its workers without a socket")
def test_temporary_files_below_too_long_a_path_are_refused(monkeypatch):
    for length in (LONGEST_TEMPORARY, LONGEST_TEMPORARY + 1):
        monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda length=length: "/" + "x" * (length - 1))
        if length == LONGEST_TEMPORARY:
            assert worker_context([]) == "forkserver"
        else:
            with pytest.raises(ValueError, match=r"\(TMPDIR\) must have a path short enough for sockets, got '"):
                worker_context([])
