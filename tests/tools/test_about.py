"""about.json: the commit, the machine, and what has changed since a comparison was begun."""

import json
import subprocess

import pytest

from a2c.tools import about
from a2c.tools.about import comparison_facts, machine_facts, write_about


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
    monkeypatch.setattr(about, "machine_facts", lambda: dict(facts))
    found = comparison_facts("a2c compare out", 2)
    assert found["processor"] == "X (AVX512-BF16)" and found["command"] == "a2c compare out" and found["jobs"] == 2
    assert {"commit", "a2c", "cores", "torch", "gymnasium", "ale-py", "numpy"} <= set(found)


def test_a_fact_that_has_changed_becomes_a_list_of_its_values_and_others_stay(tmp_path):
    path = tmp_path / "about.json"
    for commit in ("a", "a", "b+", "b+", "a"):
        write_about(path, {"commit": commit, "cores": 2})
    assert json.loads(path.read_text()) == {"commit": ["a", "b+", "a"], "cores": 2}


@pytest.mark.parametrize("text", ["", "[1]", "3", "[" * 100_000])
def test_a_damaged_file_is_refused_rather_than_overwritten(text, tmp_path):
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(ValueError, match=r"about\.json must be a JSON object"):
        write_about(tmp_path / "about.json", {"commit": "a"})
    assert (tmp_path / "about.json").read_text() == text
