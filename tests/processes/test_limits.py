"""How many cores a process may use, also in a container."""

import os

import pytest

from a2c.processes.limits import available_cores

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
