"""The package as a whole: who may import whom, what loads when, how long a file may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import a2c

PACKAGE = Path(a2c.__file__).parent
ORDER = (
    *("presets", "rules", "config", "resolve", "files", "flags", "processes", "directory", "returns", "losses"),
    *("normalizers", "networks", "recurrent", "compute", "atari", "watchdog", "episodes", "snapshot", "envs", "trial"),
    *("rollout", "collector", "batch", "unpack_batch", "optimizer", "update", "learner"),
    *("checkpoint", "logger", "curve", "display", "record", "evaluation", "recording", "signals", "outcome"),
    *("synchronous", "workers", "a3c", "predictor", "ga3c", "trainer", "comparison", "cli", "__main__"),
)
FILES = sorted(path for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports_of_ours(path):
    """Names of the package's modules that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("a2c.")}
            assert all(name.name != "a2c" for name in node.names), "import the module that defines the name"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module != "a2c", "import the module that defines the name"
            if (node.module or "").startswith("a2c."):
                found.add(node.module.split(".")[1])
    return found


def test_every_module_has_its_place_in_the_order():
    assert {path.stem for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_module_imports_only_modules_before_it(path):
    late = imports_of_ours(path) - set(ORDER[: ORDER.index(path.stem)])
    assert not late


@pytest.mark.parametrize("driver", ["synchronous", "a3c", "ga3c"])
def test_drivers_never_import_each_other(algorithm):
    assert not imports_of_ours(PACKAGE / f"{algorithm}.py") & {"a2c", "a3c", "ga3c", "trainer"}


@pytest.mark.parametrize("name", ["returns", "losses"])
def test_pure_mathematics_imports_nothing_of_ours(name):
    assert imports_of_ours(PACKAGE / f"{name}.py") == set()


def test_the_reader_of_imports_sees_them():
    assert imports_of_ours(PACKAGE / "cli.py") >= {"config", "trainer", "evaluation"}  # two of them inside functions


@pytest.mark.parametrize("name", ["a2c", "a2c.config.config", "a2c.envs.atari", "a2c.envs.make", "a2c.cli.commands"])
def test_importing_it_does_not_import_torch(name):
    code = f"import sys, {name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


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
    "after its use, twice": "import a2c, a2c.batch; a2c.unpack_batch; import a2c.unpack_batch; import a2c.unpack_batch",
    "before a reload": "import a2c.unpack_batch, importlib as i; i.import_module('a2c.unpack_batch'); i.reload(a2c)",
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_importing_unpack_batch_as_a_module_leaves_the_function(statement):
    code = f"{statement}\nimport pickle, a2c, a2c.batch\nfrom a2c import unpack_batch\n"
    code += "assert a2c.unpack_batch is unpack_batch is a2c.batch.unpack_batch\n"
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


@pytest.mark.parametrize("path", [*FILES, PACKAGE / "__init__.py"], ids=lambda path: path.stem)
def test_a_file_fits_in_the_reader_s_head(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_module_and_public_function_says_what_it_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
