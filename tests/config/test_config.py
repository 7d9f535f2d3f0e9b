"""Every setting has a help text and a range, bad values are refused by name, and a config survives JSON."""

import ast
import compileall
import dataclasses
import inspect
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import numpy as np
import pytest

import a2c
from a2c.config import config as module
from a2c.config.config import Config
from a2c.config.presets import PRESETS
from a2c.config.resolve import resolve
from a2c.config.validation import Range, check, nearest
from a2c.envs.atari import FRAME_SKIP

FIELDS = [field.name for field in dataclasses.fields(Config)]
HINTS = get_type_hints(Config, include_extras=True)
RANGES = {name: note for name, hint in HINTS.items() for note in get_args(hint) if isinstance(note, Range)}
INTEGERS = [name for name in RANGES if get_args(HINTS[name])[0] is int]
FLOATS = [name for name in RANGES if name not in INTEGERS]
SWITCHES = [name for name, hint in HINTS.items() if hint is bool]
CHOICES = ("preset", "algorithm", "backend", "network", "optimizer", "precision")
# The help of switches and choices is in words; that of all other settings names a unit or a kind in parentheses.
WITHOUT_UNIT = (*CHOICES, "normalize_obs", "crop", "rmsprop_eps_inside", "terminal_on_life_loss", "cuda", "cuda_graphs")


def help_texts():
    """Field name: the string right below the field."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = text.value.value
    return texts


@pytest.mark.parametrize("name", FIELDS)
def test_config_has_a_help_text_with_a_unit_for_every_field(name):
    text = help_texts()[name]
    assert text.endswith(".") and len(text) > 15 and "\n" not in text
    if name not in WITHOUT_UNIT:
        assert "(" in text and ")" in text


def test_config_has_a_range_for_every_number():
    # A number without one would accept nonsense until it fails deep inside a run.
    numbers = {field.name for field in dataclasses.fields(Config) if {"int", "float"} & set(words(field.type))}
    assert numbers == set(RANGES)


def words(annotation):
    return re.findall(r"\w+", annotation)


@dataclass(frozen=True)
class Forgotten:
    good: Annotated[int, Range(0, 1)] = 0
    count: int = 1


@dataclass(frozen=True)
class ForgottenOption:
    weight: float | None = None


@pytest.mark.parametrize(("settings", "name"), [(Forgotten(), "count"), (ForgottenOption(), "weight")])
def test_check_raises_for_a_number_without_a_range(settings, name):
    with pytest.raises(TypeError, match=rf"^{name} of {type(settings).__name__} must have a Range"):
        check(settings)


def test_max_episode_frames_is_at_least_one_step():
    assert RANGES["max_episode_frames"].low == FRAME_SKIP


OPEN = [name for name, allowed in RANGES.items() if allowed.above]
BAD = [
    *((name, RANGES[name].low - 1) for name in INTEGERS),
    *((name, RANGES[name].high + 1) for name in INTEGERS),
    *((name, bad) for name in INTEGERS for bad in (1.5, "3", True, None)),
    *((name, RANGES[name].low - 0.5) for name in FLOATS),
    *((name, RANGES[name].high + 0.5) for name in FLOATS),
    *((name, bad) for name in FLOATS for bad in (math.nan, math.inf, -math.inf, "0.5", True)),
    pytest.param("gamma", 10**400, id="gamma-huge"),  # no float holds it
    *((name, RANGES[name].low) for name in OPEN),
    *((name, bad) for name in CHOICES for bad in ("nonsense", "", None)),
    *((name, bad) for name in SWITCHES for bad in (1, "no", None)),
    *(("env", bad) for bad in ("", None, 3)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_config_refuses_a_bad_value_and_names_field_rule_and_value(name, value):
    with pytest.raises(ValueError) as refusal:
        Config(**{name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name} must be ") and "\n" not in message
    assert f"got {value!r}" in message or f"got {value}" in message


@pytest.mark.parametrize("name", RANGES)
def test_config_accepts_the_ends_of_a_range(name):
    rest = {"sliding_batch": {"gae_lambda": 1.0, "num_minibatches": 1, "epochs": 1}}.get(name, {})
    for value in (RANGES[name].low, RANGES[name].high):
        if name not in OPEN or value != RANGES[name].low:
            kept = getattr(Config(**{name: value, **rest}), name)
            most = Config.num_envs * Config.rollout_steps if name == "num_minibatches" else value
            assert kept == min(value, most)


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("name", OPEN)
def test_config_refuses_zero_and_less_where_a_range_is_above_it(name, value):
    with pytest.raises(ValueError) as refusal:
        Config(**{name: value})
    assert str(refusal.value) == f"{name} must be above 0.0 and at most {RANGES[name].high}, got {value}"


@pytest.mark.parametrize(
    "wrong",
    [{"gae_lambda": 0.95}, {"num_minibatches": 2}, {"epochs": 2}, {"algorithm": "ga3c"}, {"exploration_noise": 1.5}],
)
def test_config_refuses_settings_that_sliding_batch_does_not_support(wrong):
    good = {"sliding_batch": 32, "gae_lambda": 1.0, "num_minibatches": 1, "epochs": 1}
    assert Config(**good).sliding_batch == 32
    (name,) = wrong
    needed = {"algorithm": "a2c", "exploration_noise": 0}.get(name, 1)
    with pytest.raises(ValueError, match=f"^{name} must be {needed} when sliding_batch is set, got {wrong[name]}"):
        Config(**good | wrong)


def test_config_refuses_paths_that_would_fail_later():
    with pytest.raises(ValueError, match=r"^run_dir must be a path, got ''$"):
        Config(run_dir="")  # Path("") is the working directory
    with pytest.raises(ValueError, match=r"^resume must be a path in UTF-8, got 'caf\\udce9'$"):
        Config(resume=os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run_dir": "runs/x", "resume": "runs/y"}, "run_dir must be left out when resume is set, got runs/x"),
        ({"algorithm": "a3c", "deterministic": True}, "deterministic must be off for algorithm a3c, .*, got True"),
        ({"algorithm": "ga3c", "deterministic": True}, "deterministic must be off for algorithm ga3c, .*, got True"),
        ({"backend": "native", "crop": True}, "crop must be off for backend native, .*, got True"),
    ],
)
def test_config_refuses_settings_that_exclude_each_other(settings, message):
    for name, value in settings.items():
        Config(**{name: value})
    with pytest.raises(ValueError, match=f"^{message}$"):
        Config(**settings)


@pytest.mark.parametrize(("changes", "most"), [({}, 12), ({"shuffle": False}, 3), ({"network": "lstm"}, 3)], ids=str)
def test_config_limits_num_minibatches_to_the_decisions_or_windows_of_a_rollout(changes, most):
    assert Config(num_envs=3, rollout_steps=4, num_minibatches=11, **changes).num_minibatches == min(11, most)
    assert Config(num_envs=3, rollout_steps=4, num_minibatches=13, **changes).num_minibatches == most


def test_only_the_preset_for_all_atari_games_has_exploration_noise():
    assert {name: Config.from_preset(name).exploration_noise for name in PRESETS} == {
        **dict.fromkeys(PRESETS, 0.0),
        "atari": 1.5,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_from_preset_changes_exactly_what_the_preset_says(name):
    config = Config.from_preset(name)
    assert config.preset == name
    changed = {field for field in FIELDS if getattr(config, field) != getattr(Config(), field)} - {"preset"}
    assert changed == set(PRESETS[name])
    assert {field: getattr(config, field) for field in PRESETS[name]} == PRESETS[name]


@pytest.mark.parametrize("settings", [{"preset": "atari"}, {"preset": "atari", "total_env_steps": 2_000_000}])
def test_config_refuses_a_preset_that_it_does_not_hold(settings):
    with pytest.raises(ValueError, match=r"preset must be resolved by Config.from_preset\('atari'\), got none"):
        Config(**settings)


@pytest.mark.parametrize(("setting", "hint"), [("gama", "; did you mean gamma"), ("preset", "")])
def test_from_preset_refuses_what_is_not_a_setting(setting, hint):
    with pytest.raises(ValueError, match=f"setting must be one of .*, got '{setting}'{hint}"):
        Config.from_preset("cartpole", **{setting: 0.1})


def test_from_preset_suggests_names_for_an_unknown_one():
    with pytest.raises(ValueError, match=r"preset must be one of .*, got 'pong-fats'; did you mean pong-fast"):
        Config.from_preset("pong-fats")


def test_config_survives_json():
    assert Config(run_dir="~nobody-has-this-name/x").run_dir == Path("~nobody-has-this-name/x")
    assert (Config(run_dir="~/x").run_dir, Config(resume=Path("~")).resume) == (Path.home() / "x", Path.home())
    config = Config(env="ALE/Pong-v5", run_dir="runs/x", sticky_actions=0.1, reward_clip=2.5, cuda=True, seed=7)
    again = Config.from_json(config.to_json())
    assert again == config and again.run_dir == Path("runs/x")
    assert Config.from_json(Config().to_json()) == Config()


def test_config_keeps_numbers_of_numpy_as_those_of_python():
    config = Config(seed=np.arange(8)[7], gamma=np.float32(0.5), target_score=np.int16(-3), num_envs=np.uint8(4))
    assert config == Config(seed=7, gamma=0.5, target_score=-3, num_envs=4)
    assert [type(value) for value in (config.seed, config.gamma, config.target_score)] == [int, float, int]
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=r"seed must be an integer, got 1\.5$"):
        Config(seed=np.float32(1.5))
    with pytest.raises(ValueError, match=r"num_envs must be at least 1 and at most 10000, got 0$"):
        Config(num_envs=np.int64(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gama": 0.9}', "config field must be one of .* got 'gama'; did you mean gamma"),
        ('{"gamma": 2}', "gamma must be at least 0.0 and at most 1.0, got 2"),
        ("[1]", "config must be a JSON object, got list"),
        ('{"gamma": ', "Expecting value"),
    ],
)
def test_from_json_refuses_bad_text(text, message):
    with pytest.raises(ValueError, match=message):
        Config.from_json(text)


PONG_SHAPE = (4, 84, 84)


def test_resolve_sets_a_target_score_for_pong_only():
    for env in ("PongNoFrameskip-v4", "ALE/Pong-v5", "Pong-v4", "pong"):
        assert Config(env=env).target_score is None
        assert resolve(Config(env=env), PONG_SHAPE).target_score == 18.0
    for env in ("BreakoutNoFrameskip-v4", "custom/ping_pong-v0", "PingPong-v0", "Pong-Hard-v0"):
        assert resolve(Config(env=env), PONG_SHAPE).target_score is None
    assert resolve(Config(target_score=0.0), PONG_SHAPE).target_score == 0.0


def test_resolve_gives_a3c_one_thread_and_no_gpu():
    for algorithm in ("a2c", "ga3c"):
        config = resolve(Config(algorithm=algorithm, cuda=True, threads=3), PONG_SHAPE)
        assert config.cuda and config.threads == 3
    config = resolve(Config(algorithm="a3c", cuda=True, threads=3), PONG_SHAPE)
    assert not config.cuda and config.threads == 1


@pytest.mark.parametrize(
    ("network", "shape", "precision"),
    [
        ("mlp", (4,), "float32"),
        ("lstm", PONG_SHAPE, "float32"),
        ("custom", PONG_SHAPE, "float32"),
        ("atari", PONG_SHAPE, "auto"),
    ],
)
def test_resolve_makes_auto_precision_float32_for_mlp_lstm_and_custom(network, shape, precision):
    assert resolve(Config(network=network), shape).precision == precision
    assert resolve(Config(network=network, precision="bfloat16"), shape).precision == "bfloat16"


def test_resolve_leaves_nothing_open_and_changes_nothing_twice():
    for shape in (PONG_SHAPE, (4,)):
        config = resolve(Config(), shape)
        assert (config.network, config.lstm_units) == (("atari", 256) if len(shape) == 3 else ("mlp", 16))
        assert config.log_eps == 0.0 and resolve(config, shape) == config


def test_nearest_returns_close_names_or_all():
    assert nearest("Pnog", ("Pong", "Breakout")) == "did you mean Pong?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    assert nearest("zzz", [f"a{i:02}" for i in range(23)]).endswith(", a18, a19 and 3 more")


def test_config_is_imported_without_its_source(tmp_path):
    shutil.copytree(Path(a2c.__file__).parent, tmp_path / "a2c", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(tmp_path / "a2c" / "config", legacy=True, quiet=1)
    for path in (tmp_path / "a2c" / "config").glob("*.py"):
        path.unlink()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from a2c.config import config; print(config.__file__)"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip().endswith("config.pyc")


def test_session_end_is_the_earlier_of_budget_and_stop_after():
    ends = [Config(total_env_steps=100, stop_after=stop_after).session_end for stop_after in (0, 60, 200)]
    assert ends == [100, 60, 100]
