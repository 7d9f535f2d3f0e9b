"""Every setting explains itself, every rule names what it refuses, and a config survives the disk."""

import ast
import dataclasses
import inspect
import itertools
import math
import os
from pathlib import Path

import pytest

from a2c.config import config as module
from a2c.config.config import Config
from a2c.config.presets import PRESETS
from a2c.config.validation import ABOVE_ZERO, FLOAT_RULES, INT_RULES, nearest
from a2c.processes.start import available_cores

FIELDS = [field.name for field in dataclasses.fields(Config)]
CHOICES = ("preset", "algorithm", "backend", "network", "optimizer", "precision")
# Switches and choices say their meaning in words; everything else names a unit or kind in parentheses.
WITHOUT_UNIT = (*CHOICES, "normalize_obs", "crop", "rmsprop_eps_inside", "terminal_on_life_loss", "lr_decay", "cuda")


def help_texts():
    """Field name: the string that stands right under the field."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = text.value.value
    return texts


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_help_text_with_its_unit(name):
    text = help_texts()[name]
    assert text.endswith(".") and len(text) > 15 and "\n" not in text
    if name not in WITHOUT_UNIT:
        assert "(" in text and ")" in text


def test_every_number_has_a_rule():
    # A number without one would accept nonsense until it fails deep inside a run.
    numbers = {field.name for field in dataclasses.fields(Config) if str(field.type).split(" ")[0] in ("int", "float")}
    assert numbers == set(INT_RULES) | set(FLOAT_RULES)


BAD = [
    *((name, low - 1) for name, (low, _) in INT_RULES.items()),
    *((name, high + 1) for name, (_, high) in INT_RULES.items()),
    *((name, bad) for name in INT_RULES for bad in (1.5, "3", True, None)),
    *((name, low - 0.5) for name, (low, _) in FLOAT_RULES.items() if math.isfinite(low)),
    *((name, high + 0.5) for name, (_, high) in FLOAT_RULES.items() if math.isfinite(high)),
    *((name, bad) for name in FLOAT_RULES for bad in (math.nan, -math.inf, "0.5", True)),
    *((name, math.inf) for name in FLOAT_RULES),
    *((name, 0.0) for name in ABOVE_ZERO),
    *((name, bad) for name in CHOICES for bad in ("nonsense", "", None)),
    *(("env", bad) for bad in ("", None, 3)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_field_rule_and_value(name, value):
    with pytest.raises(ValueError) as refusal:
        Config(**{name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name} must be ") and "\n" not in message
    assert f"got {value!r}" in message or f"got {value}" in message


@pytest.mark.parametrize("name", [*INT_RULES, *FLOAT_RULES])
def test_a_value_on_the_edge_is_accepted(name):
    low, high = (INT_RULES | FLOAT_RULES)[name]
    rest = {"sliding_batch": {"gae_lambda": 1.0, "num_minibatches": 1}}.get(name, {})
    for value in (low, high):
        open_end = math.isinf(value) or (value == 0 and name in ABOVE_ZERO)
        if not open_end:
            kept = getattr(Config(**{name: value, **rest}), name)
            assert kept == (min(value, Config.num_envs) if name == "num_minibatches" else value)


@pytest.mark.parametrize("wrong", [{"gae_lambda": 0.95}, {"num_minibatches": 2}])
def test_sliding_windows_refuse_what_they_cannot_do(wrong):
    good = {"sliding_batch": 32, "gae_lambda": 1.0, "num_minibatches": 1}
    assert Config(**good).sliding_batch == 32
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be 1 when sliding_batch is set, got {wrong[name]}"):
        Config(**good | wrong)


def test_batches_are_at_most_the_environments():
    assert Config(num_envs=3).num_minibatches == 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_and_says_its_name(name):
    config = Config.from_preset(name)
    assert config.preset == name
    changed = {field for field in FIELDS if getattr(config, field) != getattr(Config(), field)} - {"preset"}
    assert changed <= set(PRESETS[name])
    assert {field: getattr(config, field) for field in PRESETS[name]} == PRESETS[name]


def test_an_unknown_preset_suggests_names():
    with pytest.raises(ValueError, match=r"preset must be one of .*, got 'pong-fats'; did you mean pong-fast"):
        Config.from_preset("pong-fats")


def test_json_round_trip():
    config = Config(env="ALE/Pong-v5", run_dir="runs/x", sticky_actions=0.1, reward_clip=2.5, cuda=True, seed=7)
    again = Config.from_json(config.to_json())
    assert again == config and again.run_dir == Path("runs/x")
    assert Config.from_json(Config().to_json()) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gama": 0.9}', "config field must be one of .* got 'gama'; did you mean gamma"),
        ('{"gamma": 2}', "gamma must be at least 0.0 and at most 1.0, got 2"),
        ("[1]", "config must be a JSON object, got list"),
        ('{"gamma": ', "Expecting value"),
    ],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Config.from_json(text)


def test_pong_stops_at_18_unless_told_otherwise():
    assert Config().target_score == Config(env="ALE/Pong-v5").target_score == 18.0
    assert Config(env="BreakoutNoFrameskip-v4").target_score is None
    assert Config(target_score=0.0).target_score == 0.0


def test_nearest_gives_close_names_or_all():
    assert nearest("Pnog", ("Pong", "Breakout")) == "did you mean Pong?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


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
def test_the_cores_of_a_container_are_those_of_its_groups(case, tmp_path, monkeypatch):
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


def test_python_may_be_told_to_use_fewer_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)  # PYTHON_CPU_COUNT, from Python 3.13 on
    assert available_cores(tmp_path) == 3
