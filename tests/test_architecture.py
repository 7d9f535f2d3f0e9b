"""The package as a whole: who may import whom, what loads when, how long a file or function may get."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import a2c

PACKAGE = Path(a2c.__file__).parent
SUBPACKAGES = {  # in the order of imports; None: the files of the method, which lie on top
    "config": ("extras", "presets", "validation", "config", "resolve"),
    "processes": ("place", "limits", "errors", "watchdog", "start", "signals", "exits", "pool"),
    "envs": ("packing", "atari", "layers", "snapshot", "single", "vector_env", "make", "trial"),
    "compute": ("ranks", "torch_ranks", "compute", "staging", "graphs", "replica", "optimizer"),
    None: (
        *("normalizers", "networks", "policy", "returns", "rollout", "collector", "transitions", "losses", "update"),
        *("custom_network", "learner", "unpack_batch"),
    ),
    "algorithms": ("base", "windows", "captured", "worker_tasks", "a2c", "a3c", "predictor", "ga3c"),
    "metrics": (
        *("text", "meters", "files", "wandb_process", "wandb_run", "logger"),
        *("panel", "console", "results", "plots"),
    ),
    "run": (
        "run_dir",
        "about",
        "values",
        "checkpoint",
        "policies",
        "introduction",
        "stop",
        "evaluator",
        "outputs",
        "silent",
        "state",
        "recovery",
        "result",
        "trainer",
    ),
    "tools": (
        *("load", "agent", "human_scores", "evaluate", "video_writers", "overlay", "rendering", "record_video"),
        *("tensorboard_video", "onnx_model", "export"),
        *("frozen", "read_run", "runs", "summary", "compare_plot", "jobs", "compare", "sweep"),
        *("plot", "model_card", "report_data", "report", "watch"),
    ),
    "cli": ("options", "short_help", "flags", "grid", "commands"),
}
ORDER = [
    f"{subpackage}.{name}" if subpackage else name for subpackage, names in SUBPACKAGES.items() for name in names
] + ["__main__"]
WITHOUT_TORCH = ("config", "processes", "envs", "metrics", "cli")
FILES = [PACKAGE / f"{name.replace('.', '/')}.py" for name in ORDER]
EVERY_FILE = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of_ours(path):
    """Names of the package's modules that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {name.name.removeprefix("a2c.") for name in node.names if name.name.startswith("a2c.")}
            assert all(name.name != "a2c" for name in node.names), "import the module that defines the name"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            ours = node.module == "a2c" and [name.name for name in node.names] != ["__version__"]
            assert not ours, "import the module that defines the name"
            if (node.module or "").startswith("a2c."):
                found.add(node.module.removeprefix("a2c."))
    return found


def test_the_top_of_the_package_shows_the_method_and_the_subpackages_and_nothing_else():
    subpackages = {subpackage for subpackage in SUBPACKAGES if subpackage}
    ours = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert ours == subpackages | {f"{name}.py" for name in (*SUBPACKAGES[None], "__init__", "__main__")} | {"py.typed"}
    assert {name_of(path) for path in EVERY_FILE if path.stem != "__init__"} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_only_modules_before_it(path):
    late = imports_of_ours(path) - set(ORDER[: ORDER.index(name_of(path))])
    assert not late


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_name_is_imported_from_the_module_that_defines_it(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("a2c."):
            source = tree_of(PACKAGE / f"{node.module.removeprefix('a2c.').replace('.', '/')}.py")
            defined = {getattr(n, "name", None) for n in source.body}
            for n in source.body:
                targets = n.targets if isinstance(n, ast.Assign) else [getattr(n, "target", None)]
                defined |= {name.id for t in targets if t for name in ast.walk(t) if isinstance(name, ast.Name)}
            assert {name.name for name in node.names} <= defined, node.module


@pytest.mark.parametrize("subpackage", [subpackage for subpackage in SUBPACKAGES if subpackage])
def test_the_init_file_of_a_subpackage_has_a_docstring_and_imports_from_its_own_subpackage_only(subpackage):
    face = PACKAGE / subpackage / "__init__.py"
    assert ast.get_docstring(tree_of(face))
    assert all(name.startswith(f"{subpackage}.") for name in imports_of_ours(face))


@pytest.mark.parametrize("algorithm", ["a2c", "a3c", "ga3c"])
def test_algorithms_never_import_each_other(algorithm):
    others = {"algorithms.a2c", "algorithms.a3c", "algorithms.ga3c"}
    assert not imports_of_ours(PACKAGE / "algorithms" / f"{algorithm}.py") & others


@pytest.mark.parametrize("name", ["returns", "losses"])
def test_pure_mathematics_imports_nothing_of_ours(name):
    assert imports_of_ours(PACKAGE / f"{name}.py") == set()


def test_imports_of_ours_finds_imports_in_functions_too():
    found = imports_of_ours(PACKAGE / "cli" / "commands.py")
    assert found >= {"cli.options", "run.trainer", "tools.evaluate"}  # two of them inside functions


def test_these_subpackages_load_without_torch():
    names = [f"a2c.{subpackage}.{name}" for subpackage in WITHOUT_TORCH for name in SUBPACKAGES[subpackage]]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules:\n        sys.exit(f'{name} loads torch')"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_settings_load_without_anything_heavy():
    names = ", ".join(f"a2c.config.{name}" for name in SUBPACKAGES["config"])
    code = f"import sys, {names}; print(sorted({{'gymnasium', 'numpy', 'cv2', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, a2c; print(sorted({'gymnasium', 'numpy', 'cv2', 'ale_py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", a2c.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    thing = getattr(a2c, name)
    assert name in dir(a2c)
    assert name == "PRESETS" or thing.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'a2c' has no attribute 'Nonsense'"):
        _ = a2c.Nonsense


STATEMENTS = {
    "first of all": "import a2c.unpack_batch",
    "after its use, twice": "import a2c, a2c.transitions; a2c.unpack_batch" + 2 * "; import a2c.unpack_batch",
    "before a reload": "import a2c.unpack_batch, importlib as i; i.import_module('a2c.unpack_batch'); i.reload(a2c)",
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_importing_unpack_batch_as_a_module_leaves_the_function(statement):
    code = f"{statement}\nimport pickle, a2c, a2c.transitions\nfrom a2c import unpack_batch\n"
    code += "assert a2c.unpack_batch is unpack_batch is a2c.transitions.unpack_batch\n"
    code += "assert pickle.loads(pickle.dumps(unpack_batch)) is unpack_batch\n"
    code += "print(unpack_batch([a2c.Experience([1, 2], 0, 3.0, None)], None)[2].tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[3.0]\n", "")


def test_type_checkers_know_every_public_name_and_no_other(tmp_path):
    # What others wrote is skipped here, which leaves a few seconds of reading.
    config = tmp_path / "mypy.ini"
    others = ["torch", "numpy", "gymnasium", "ale_py", "cv2", "matplotlib", "PIL", "rich", "tyro", "tensorboardX"]
    config.write_text(
        f"[mypy]\nmypy_path = {PACKAGE.parent}\nfollow_imports = silent\nignore_missing_imports = True\n"
        f"[mypy-{','.join(name + '.*' for name in others)}]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
    )
    names = "\n".join(f"a2c.{name}" for name in a2c.__all__)
    code = f"import a2c\n{names}\na2c.nonsense\nimport a2c.unpack_batch\na2c.unpack_batch([], a2c.AtariA2C())\n"
    out, err, _ = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "-c", code])
    line = 2 + len(a2c.__all__)
    assert err == ""
    assert out.splitlines()[0] == f'<string>:{line}: error: Module has no attribute "nonsense"  [attr-defined]'
    assert len(out.splitlines()) == 2, out  # and the summary


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_a_file_has_at_most_250_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


def functions_of(path):
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]


def lines_of_code(path, node):
    """Lines of a function but blank ones, comments and its docstring."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    body = lines[first.lineno - 1 : node.end_lineno]
    return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_a_function_has_at_most_40_lines_of_code(path):
    long = {node.name: lines_of_code(path, node) for node in functions_of(path)}
    assert not {name: lines for name, lines in long.items() if lines > 40}


PUBLIC_CONTRACT = {
    "unpack_batch",
    "a2c_loss",
    "lambda_returns",
    "evaluate",
    "play",
    "load",
    "record_video",
}  # what people call in notebooks
OTHERS = {"run_worker"}  # gets its arguments through a process, which takes no keywords


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_a_function_has_at_most_6_parameters(path):
    for node in functions_of(path):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
        assert len(names) <= 6 or node.name in PUBLIC_CONTRACT | OTHERS, (node.name, names)


# Attributes that are the interface of torch, numpy, gymnasium, weakref and Python's own modules.
THEIRS = {"__doc__", "grad", "data", "normalizer", "state", "metadata", "closed", "atexit", "__spec__", "snapshot"}


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_no_object_writes_into_another_s_attributes(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in THEIRS:
            owner = ast.unparse(node.value)
            assert owner == "self", f"{owner}.{node.attr} in line {node.lineno}: ask {owner} by a method"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_and_public_function_has_a_docstring(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_the_loop_of_the_trainer_fits_on_one_screen():
    from a2c.run.trainer import Trainer

    path = Path(inspect.getfile(Trainer))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 240
