"""Any command line, config file or checkpoint is accepted or refused in one line."""

import json
import math
from contextlib import suppress
from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs import tiny

from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.processes.errors import WorkerError
from a2c.run.checkpoint import CheckpointError, load_checkpoint
from a2c.run.trainer import Trainer
from a2c.tools.load import load_policy

NAMES = [field.name for field in fields(Config)]
FLAGS = ["--" + name.replace("_", "-") for name in NAMES]
# Errors quote what they refuse; what an error must not hold is not in it by chance.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "Traceback" not in text)
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    TEXT,
    st.sampled_from(["", "-1", "0", "1e999", "nan", "None", "True", "default"]),
)
ARGUMENTS = st.lists(st.one_of(st.sampled_from(FLAGS), VALUES), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT, lambda x: st.lists(x, max_size=3), max_leaves=4
)


def one_line(error):
    text = " ".join(str(error).split())
    assert text and "Traceback" not in text and len(text) < 2000


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS)
@example(["--env-timeout", "nan"])
@example(["--resume", "a\0b"])
@example(["--run-dir"])
def test_parse_config_of_any_command_line(arguments):
    try:
        assert isinstance(parse_config(arguments), Config)
    except ValueError as error:
        one_line(error)
    except SystemExit as stop:
        assert not stop.code and {"-h", "--help"} & set(arguments)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | TEXT, JSON, max_size=5))
def test_config_from_any_json_object(values):
    try:
        config = Config.from_json(json.dumps(values))
    except ValueError as error:
        one_line(error)
    else:
        assert all(
            not isinstance(getattr(config, name), float) or math.isfinite(getattr(config, name)) for name in NAMES
        )


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_config_from_any_text(text):
    try:
        Config.from_json(text)
    except ValueError as error:
        one_line(error)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, '{"seed": ' + "9" * 5000 + "}"], ids=["deep", "long", "big"]
)
def test_config_from_json_that_is_too_deep_or_too_large(text):
    with pytest.raises(ValueError) as refusal:
        Config.from_json(text)
    one_line(refusal.value)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert Trainer(tiny(run_dir, total_env_steps=160, keep_policy_every=160)).run().exit_code == 0
    return run_dir


POLICY_FILE = "policies/000000160.pt"


@pytest.mark.parametrize("name", ["latest.pt", POLICY_FILE])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_checkpoint_with_damaged_bytes_is_refused_or_loads(name, data, run_dir, tmp_path):
    content = bytearray((run_dir / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "latest.pt"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        one_line(error)


def keys(state, path=()):
    """Paths to everything inside nested dictionaries."""
    for key, value in state.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_checkpoint_with_wrong_content_is_refused_in_one_line(data, run_dir, tmp_path_factory):
    state = torch.load(run_dir / "latest.pt", weights_only=True)
    *above, last = data.draw(st.sampled_from(sorted(keys(state), key=str)))
    inside = state
    for key in above:
        inside = inside[key]
    inside[last] = data.draw(st.sampled_from([None, -1, "text", [], {}, torch.ones(2), float("nan")]))
    copy = tmp_path_factory.mktemp("damaged")
    (copy / "config.json").write_text((run_dir / "config.json").read_text())
    torch.save(state, copy / "latest.pt")
    config = parse_config(["--resume", str(copy)])
    try:
        trainer = Trainer(config)
        try:
            trainer.run()
        finally:
            trainer.close()
    except (ValueError, WorkerError) as error:
        one_line(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_policy_file_with_wrong_content_is_refused_in_one_line(data, run_dir, tmp_path_factory):
    state = torch.load(run_dir / POLICY_FILE, weights_only=True)
    *above, last = data.draw(st.sampled_from(sorted(keys(state), key=str)))
    inside = state["network"] if above else state
    inside[last] = data.draw(st.sampled_from([None, -1, "text", [], {}, torch.ones(2), float("nan")]))
    copy = tmp_path_factory.mktemp("damaged")
    torch.save(state, copy / "latest.pt")
    with suppress(CheckpointError):
        load_checkpoint(copy / "latest.pt")
    try:
        load_policy(copy)
    except ValueError as error:
        one_line(error)
