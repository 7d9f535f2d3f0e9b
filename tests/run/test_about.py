"""about.json: the commit, the machine, and what has changed since a comparison was begun."""

import json
import subprocess
from contextlib import closing

import pytest
from runs import tiny

from a2c.cli.flags import parse_config
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.run import about
from a2c.run.about import comparison_facts, machine_facts, run_facts, write_about
from a2c.run.trainer import Trainer


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose file about.py stands for the package."""

    def git(*args):
        settings = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(["git", *settings, *args], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "-q")
    (tmp_path / "about.py").write_text("first")
    monkeypatch.setattr(about, "__file__", str(tmp_path / "about.py"))
    return git


def test_commit_is_that_of_the_package_with_a_plus_where_a_file_differs(checkout, tmp_path):
    checkout("add", "about.py")
    checkout("commit", "-qm", "x")
    (tmp_path / "new").touch()
    commit = checkout("rev-parse", "--short", "HEAD").stdout.strip()
    assert machine_facts()["commit"] == commit
    (tmp_path / "about.py").write_text("second")
    assert machine_facts()["commit"] == commit + "+"


def test_commit_is_none_where_the_repository_around_the_package_is_another_project(checkout, tmp_path):
    (tmp_path / "other").touch()
    checkout("add", "other")
    checkout("commit", "-qm", "x")
    assert machine_facts()["commit"] is None


def test_a_comparison_names_command_commit_processor_with_instructions_and_versions(monkeypatch):
    facts = machine_facts() | {"processor": "X", "instructions": "AVX512 with bfloat16"}
    monkeypatch.setattr(about, "machine_facts", lambda gpu: dict(facts))
    found = comparison_facts("a2c compare out", 2)
    assert found["processor"] == "X (AVX512-BF16)" and found["command"] == "a2c compare out" and found["jobs"] == 2
    assert {"commit", "a2c", "cores", "torch", "gymnasium", "ale-py", "numpy"} <= set(found)


def test_a_fact_that_has_changed_becomes_a_list_of_its_values_and_others_stay(tmp_path):
    path = tmp_path / "about.json"
    path.write_text('{"commit": []}')
    for commit in ("a", "a", "b+", "b+", "a"):
        write_about(path, {"commit": commit, "cores": 2})
    assert json.loads(path.read_text()) == {"commit": ["a", "b+", "a"], "cores": 2}


@pytest.mark.parametrize("text", ["", "[1]", "3", "[" * 100_000])
def test_a_damaged_file_is_refused_rather_than_overwritten(text, tmp_path):
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(ValueError, match=r"about\.json must be a JSON object"):
        write_about(tmp_path / "about.json", {"commit": "a"})
    assert (tmp_path / "about.json").read_text() == text


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/bin/a2c", "train", "--run-dir", "a b"], "a2c train --run-dir 'a b'"),
        (["train.py", "--lr", "1e-3"], "train.py --lr 1e-3"),
        (["-c", "train"], "python -c ... train"),
        (["/x/a2c/__main__.py", "train"], "python -m a2c train"),
        (["/x/my run.py", "train"], "'my run.py' train"),
        ([], "''"),
    ],
)
def test_a_run_names_its_command_and_what_its_settings_stand_for(argv, command, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    with closing(Compute(Config(threads=3, precision="float32"))) as compute:
        facts = run_facts(compute)
    assert (facts["command"], facts["device"], facts["precision"], facts["threads"]) == (command, "cpu", "float32", 3)
    assert (facts["ranks"], facts["cuda_graphs"]) == (1, False)
    assert {"commit", "processor", "torch"} <= set(facts)


def test_a_resumed_run_keeps_what_was_true_before_and_replaces_a_damaged_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["a2c", "first"])
    assert Trainer(tiny(tmp_path / "run", stop_after=80)).run().exit_code == 0
    monkeypatch.setattr("sys.argv", ["a2c", "second"])
    resumed = parse_config(["--resume", str(tmp_path / "run"), "--no-progress", "--stop-after", "160"])
    assert Trainer(resumed).run().exit_code == 0
    path = tmp_path / "run" / "about.json"
    assert json.loads(path.read_text())["command"] == ["a2c first", "a2c second"]
    path.write_text("[1")
    assert Trainer(parse_config(["--resume", str(tmp_path / "run"), "--no-progress"])).run().exit_code == 0
    assert json.loads(path.read_text())["command"] == "a2c second"


def test_a_new_run_does_not_count_what_a_killed_start_has_written(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "about.json").write_text('{"command": "a2c first"}')
    monkeypatch.setattr("sys.argv", ["a2c", "second"])
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run().exit_code == 0
    assert json.loads((tmp_path / "run" / "about.json").read_text())["command"] == "a2c second"


@pytest.mark.parametrize("trouble", ["directory", "facts"])
def test_no_run_ends_because_of_its_about_json(trouble, tmp_path, monkeypatch, capsys):
    def fail(gpu):
        raise RuntimeError("no facts")

    if trouble == "facts":
        monkeypatch.setattr(about, "machine_facts", fail)
    else:
        (tmp_path / "run" / "about.json").mkdir(parents=True)
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run().exit_code == 0
    assert "about.json could not be written" in capsys.readouterr().out
