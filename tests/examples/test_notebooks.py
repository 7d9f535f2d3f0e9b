"""The notebooks: they run from top to bottom, hold nothing of the machine they were written on, and can be stopped."""

import importlib.util
import json
import re
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SHORT = {"BUDGET": 2048, "EPISODES": 1}  # in place of what the cell tagged "parameters" says
SHORT_EPISODES = """
import functools as _functools, a2c as _a2c  # names that the notebook does not use: it has to import its own
_a2c.Config.from_preset = _functools.partial(_a2c.Config.from_preset, max_episode_frames=1200)
"""
MISSING = sorted(name for name in ("ipykernel", "nbclient", "nbformat") if importlib.util.find_spec(name) is None)
needs_kernel = pytest.mark.skipif(bool(MISSING), reason=f'needs {", ".join(MISSING)}: pip install -e ".[notebook]"')


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def outputs_of(path):
    return [output for cell in cells_of(path) for output in cell.get("outputs", ())]


def printed(cell):
    """What a cell has printed."""
    texts = [output["text"] for output in cell.get("outputs", ()) if output["output_type"] == "stream"]
    return "".join("".join(text) for text in texts)


def test_there_are_notebooks_and_the_readme_names_each():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 2 and all(f"]({path.name})" in text for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_names_no_place_of_a_machine_and_holds_no_error(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.~/:<])/(?:home|root|tmp|var|usr|opt|work|mnt|Users|content)/", text)
    assert not [output for output in outputs_of(path) if output["output_type"] == "error"]
    assert not [output for output in outputs_of(path) if output.get("name") == "stderr"]
    assert len(text) < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_little_metadata_and_leads_only_to_files_that_exist(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        for link in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])) if cell["cell_type"] == "markdown" else ():
            assert "://" in link or (EXAMPLES / link).exists(), link


def test_the_notebook_that_trains_has_no_outputs():
    assert not outputs_of(EXAMPLES / "train_pong.ipynb")


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_prints_what_it_says(path, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    names = [re.findall(r"^(\w+) = ", cell.source, flags=re.M) for cell in notebook.cells if is_parameters(cell)]
    for cell in filter(is_parameters, notebook.cells):
        cell.source += "".join(f"\n{name} = {value}" for name, value in SHORT.items()) + SHORT_EPISODES
    assert all(set(SHORT) <= set(found) for found in names)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    for before, after in zip(cells_of(path), notebook.cells, strict=True):
        if before.get("outputs"):
            assert printed(before) == printed(after)


def is_parameters(cell):
    return "parameters" in cell.metadata.get("tags", [])


@needs_kernel
@pytest.mark.slow
def test_an_interrupt_stops_a_run_and_leaves_the_kernel_and_a_checkpoint(tmp_path):
    from jupyter_client.manager import start_new_kernel

    kernel, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        train = "import a2c; a2c.Trainer(a2c.Config.from_preset('cartpole', run_dir='run', target_score=None)).run()"
        stopped = outputs_until_idle(client, train, lambda: kernel.interrupt_kernel())
        (result,) = [one["data"]["text/plain"] for kind, one in stopped if kind == "execute_result"]
        assert "reason: stopped by SIGINT" in result
        assert {kind for kind, _ in stopped} >= {"display_data", "update_display_data"}
        assert any("to continue: a2c train --resume run" in shown(one) for _, one in stopped)
        assert (tmp_path / "run" / "latest.pt").is_file()
        scores = outputs_until_idle(client, "print(a2c.evaluate('run', episodes=1).shape)")
        assert [one["text"] for kind, one in scores if kind == "stream"] == ["(1,)\n"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def shown(content):
    return content.get("data", {}).get("text/plain", "")


def outputs_until_idle(client, code, act=None):
    """Kind and content of all that `code` shows; `act` is called once, when the panel has been drawn for a second."""
    request, outputs, first = client.execute(code), [], None
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        assert kind != "error", content["traceback"]
        if kind == "status" and content["execution_state"] == "idle":
            return outputs
        outputs.append((kind, content))
        if kind == "update_display_data" and act is not None:
            first = first or time.monotonic()
            if time.monotonic() - first > 1.0:
                act()
                act = None
