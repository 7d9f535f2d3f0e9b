"""How worker processes start, what they leave alone, and how many cores a process may use, also in a container."""

import os
import subprocess
import sys
import threading

import pytest

from a2c.processes.start import available_cores, without_main, worker_context

ME = "/pod/container"
CGROUPS = {  # name: (/proc/self/cgroup, files below /sys/fs/cgroup, cores)
    "no quota": ("0::/\n", {"cpu.max": "max 100000"}, 16),
    "v2, the root": ("0::/\n", {"cpu.max": "300000 100000"}, 3),
    "v2, nested": (f"0::{ME}\n", {"pod/container/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4),
    "v2, the smallest": (f"0::{ME}\n", {"pod/container/cpu.max": "500000 100000", "pod/cpu.max": "200000 100000"}, 2),
    "v2, outside of the namespace": ("0::/../other\n", {"cpu.max": "200000 100000"}, 2),
    "v1": ("4:cpu,cpuacct:/\n0::/\n", {"cpu,cpuacct/cpu.cfs": "600000 100000"}, 6),
    "v1, nested": (f"3:cpuset:/\n4:cpu:{ME}\n", {"cpu/cpu.cfs": "-1 100000", "cpu/pod/cpu.cfs": "50000 100000"}, 1),
    "v1, seen as the root": (f"4:cpu:{ME}\n", {"cpu/cpu.cfs": "250000 50000"}, 5),
    "v1, another controller": ("9:cpuset:/\n", {"cpuset/cpu.cfs": "100000 100000"}, 16),
    "less than half a core": ("0::/\n", {"cpu.max": "10000 100000"}, 1),
    "nonsense": ("0::/\n", {"cpu.max": "x y z"}, 16),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_available_cores_respects_the_quotas_of_control_groups(case, tmp_path, monkeypatch):
    own, files, cores = CGROUPS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 16, raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".cfs"):
            for kind, value in zip(("quota", "period"), text.split(), strict=True):
                path.with_name(f"cpu.cfs_{kind}_us").write_text(value + "\n")
        else:
            path.write_text(text + "\n")
    assert available_cores(tmp_path) == cores


def test_available_cores_respects_python_cpu_count(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)  # PYTHON_CPU_COUNT, from Python 3.13 on
    assert available_cores(tmp_path) == 3


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
