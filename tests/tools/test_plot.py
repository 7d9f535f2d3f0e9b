"""`a2c plot`: which runs are found and grouped, what is drawn of them, what is refused in one line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_train import write

from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.tools import plot as plotting
from a2c.tools.plot import plot, run_dirs

CARTPOLE = json.loads(Config.from_preset("cartpole").to_json())


def make_run(run_dir, score=100, seed=0, episodes=120, **changes):
    """A run with `episodes` of the same score, 10 decisions and half a second apart."""
    run_dir.mkdir(parents=True)
    write(run_dir, score, episodes)
    (run_dir / "config.json").write_text(json.dumps(CARTPOLE | {"seed": seed, "run_dir": str(run_dir)} | changes))
    return run_dir


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw, and return the axes and the texts of the legend."""
    figures = []
    monkeypatch.setattr(plotting, "picture", lambda figure, kind: figures.append(figure) or kind.encode())

    def draw(*paths, **options):
        out = options.pop("out", tmp_path / "out.png")
        plot(paths, out, **options)
        (axes,) = figures[-1].axes
        assert out.read_text() == out.suffix[1:]
        return axes, [text.get_text() for text in figures[-1].legends[0].get_texts()]

    return draw


def lines(axes):
    """The curves: lines but for the target's."""
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def bands(axes):
    return [band.get_paths()[0].vertices[:, 1] for band in axes.collections]


def test_runs_that_differ_in_the_seed_alone_share_a_line_and_a_band(drawn, tmp_path):
    for seed, score in enumerate((100, 200, 400, 500)):
        make_run(tmp_path / "cmp" / "gamma=0.9" / f"seed-{seed}", score, seed, gamma=0.9)
    make_run(tmp_path / "cmp" / "gamma=0.99" / "seed-0", 50, gamma=0.99)
    axes, legend = drawn(tmp_path / "cmp")
    assert legend == ["gamma=0.9: median of 4 runs, band: lowest to highest", "gamma=0.99, seed 0", "target 475"]
    assert [set(np.round(line.get_ydata(), 6)) for line in lines(axes)] == [{300}, {50}]
    assert [(round(y.min(), 6), round(y.max(), 6)) for y in bands(axes)] == [(100, 500)]
    assert axes.get_title() == "CartPole-v1" and axes.get_xlabel() == "decisions"


def test_iqm_is_the_mean_of_the_middle_half(drawn, tmp_path):
    for seed, score in enumerate((0, 200, 300, 1000)):
        make_run(tmp_path / f"seed-{seed}", score, seed)
    axes, legend = drawn(tmp_path, iqm=True)
    assert set(np.round(lines(axes)[0].get_ydata(), 6)) == {250}
    assert legend[0] == "cartpole: interquartile mean of 4 runs, band: lowest to highest"


@pytest.mark.parametrize("iqm", [False, True])
def test_the_band_may_be_the_interval_of_the_line(drawn, tmp_path, iqm):
    scores = np.random.default_rng(0).normal(300, 50, 12)
    for seed, score in enumerate(scores):
        make_run(tmp_path / f"seed-{seed}", score, seed)
    axes, legend = drawn(tmp_path, iqm=iqm, interval=True)
    (middle,), (band,) = set(np.round(lines(axes)[0].get_ydata(), 6)), bands(axes)
    assert scores.min() < band.min() < middle < band.max() < scores.max()
    assert 20 < band.max() - band.min() < 90  # a standard error of the mean is 14
    assert legend[0].endswith("of 12 runs, band: 95 % interval")


def test_runs_are_interpolated_on_a_common_grid_and_one_that_has_ended_keeps_its_last_value(drawn, tmp_path):
    for seed, (score, episodes) in enumerate(((100, 30), (200, 60), (600, 120))):
        make_run(tmp_path / f"seed-{seed}", score, seed, episodes)
    axes, _ = drawn(tmp_path)
    (line,) = lines(axes)
    x = line.get_xdata()
    assert (x[0], x[-1]) == (10, 600) and np.allclose(np.diff(x), np.diff(x)[0])
    assert set(line.get_ydata()) == {200} and bands(axes)[0].min() == 100


@pytest.mark.parametrize(
    ("x", "env", "title", "end"),
    [
        ("decisions", "PongNoFrameskip-v4", "decisions", 1200),
        ("frames", "PongNoFrameskip-v4", "emulator frames", 4800),
        ("frames", "CartPole-v1", "emulator frames", 1200),
        ("frames", "os:Nonsense-v0", "emulator frames", 1200),
        ("seconds", "CartPole-v1", "wall time (seconds)", 60),
    ],
)
def test_the_horizontal_axis_has_the_unit_that_is_asked_for(drawn, tmp_path, x, env, title, end):
    axes, _ = drawn(make_run(tmp_path / "run", env=env), x=x)
    assert axes.get_xlabel() == title and max(lines(axes)[0].get_xdata()) == end


def test_wall_time_is_in_minutes(drawn, tmp_path):
    axes, _ = drawn(make_run(tmp_path / "run", episodes=600), x="seconds")
    assert axes.get_xlabel() == "wall time (minutes)" and max(lines(axes)[0].get_xdata()) == 5


def test_a_column_of_metrics_is_drawn_without_its_empty_cells(drawn, tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.csv").write_text("env_steps,seconds,entropy\n10,1,\n20,2,0.7\n30,3,inf\n40,4,0.5\n50,5,0.4\n60,6")
    axes, legend = drawn(run, metric="entropy")
    (line,) = lines(axes)
    assert line.get_xdata().tolist() == [20, 40, 50] and line.get_ydata().tolist() == [0.7, 0.5, 0.4]
    assert legend == ["cartpole, seed 0"]  # a target is one of the score
    (line,) = lines(drawn(run, metric="seconds")[0])
    assert line.get_ydata().tolist() == [1, 2, 3, 4, 5]  # the last row is torn


def test_groups_are_named_by_what_tells_them_apart(drawn, tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", env="$x_{$", preset="other", gamma=0.5)]
    axes, legend = drawn(*runs)
    assert legend[:2] == ["CartPole-v1, cartpole, seed 0", r"\$x_{\$, other, seed 0"]
    axes.figure.draw_without_rendering()  # text that is no formula
    many = dict.fromkeys(("gamma", "epochs", "threads", "num_envs", "value_coef"), 7)
    _, legend = drawn(runs[0], make_run(tmp_path / "c", **many))
    assert legend[:2] == [f"{tmp_path / name}, seed 0" for name in "ac"]


def test_a_run_counts_once_and_settings_that_may_change_do_not_separate(drawn, tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1, log_every=1.0, resume="b", progress=False)
    assert plot((a, a, b), tmp_path / "twice.png")[:2] == (2, 1)


def test_a_copy_of_a_run_is_no_other_seed_and_said_so(tmp_path, capsys):
    make_run(tmp_path / "runs/a")
    copy = make_run(tmp_path / "runs/b")
    make_run(tmp_path / "runs/c", seed=1)
    assert cli.main(["plot", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png"), "--interval"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:] == [f"counted though they repeat the settings and seed of another run: {copy}"]


def test_a_directory_that_begins_with_an_underscore_is_in_the_legend(drawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("_old/a", "_old/b"):
        (make_run(tmp_path / name) / "config.json").unlink()
    _, legend = drawn(Path("_old/a"), Path("_old/b"))
    assert legend == ["./_old/a, seed unknown", "./_old/b, seed unknown"]


def test_seeds_are_in_the_order_of_their_numbers(tmp_path):
    for seed in (10, 9):
        make_run(tmp_path / f"seed-{seed}", seed=seed)
    assert [path.name for path in run_dirs(tmp_path)] == ["seed-9", "seed-10"]


def test_runs_of_a_comparison_without_an_episode_are_left_out(tmp_path, capsys):
    make_run(tmp_path / "cmp" / "x" / "seed-0")
    empty = make_run(tmp_path / "cmp" / "x" / "seed-1", seed=1, episodes=0)
    assert cli.main(["plot", str(tmp_path / "cmp"), "--out", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [f"{tmp_path / 'a.png'}: reward_100 of 1 run", f"left out, no value yet: {empty}"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_file_is_a_picture_of_its_suffix(kind, tmp_path, capsys):
    out = tmp_path / f"curve.{kind}"
    assert cli.main(["plot", str(make_run(tmp_path / "run")), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["runs must be one directory or more, got none"]),
        (["no/such"], ["run_dir must be a directory that exists, got 'no/such'"]),
        (["nothing"], ["run_dir must hold episodes.csv, or directories of runs", "nothing"]),
        (["empty"], ["empty must have a finished episode, got none yet"]),
        (["run", "empty"], ["empty must have a finished episode, got none yet"]),
        (["cmp"], ["must have a finished episode, got none yet"]),
        (["run", "--metric", "entropi"], ["metric must be one of", "did you mean entropy"]),
        (["run", "--metric", "entropy"], ["metrics.csv must have the columns", "none called entropy"]),
        (["run", "--out", "curve.jpg"], ["out must end in .png or .svg, got 'curve.jpg'"]),
        (["run", "--out", "no/curve.png"], ["out must lie in a directory that exists, got 'no/curve.png'"]),
        (["run", "--x", "hours"], ["--x", "hours", "decisions"]),
        (["damaged"], ["config.json must be a JSON object, got a damaged file"]),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(args, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    make_run(tmp_path / "empty", episodes=0)
    make_run(tmp_path / "cmp" / "x" / "seed-0", episodes=0)
    (make_run(tmp_path / "damaged") / "config.json").write_text("{")
    (tmp_path / "nothing").mkdir()
    assert cli.main(["plot", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and not captured.out
    assert all(part in captured.err for part in parts), captured.err
    assert not (tmp_path / "plot.png").exists()


def test_plot_does_not_import_torch(tmp_path):
    code = "import sys; from a2c.cli.commands import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    args = ["plot", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "a.png")]
    assert subprocess.run([sys.executable, "-c", code, *args], capture_output=True, timeout=60).returncode == 0


def test_a_picture_that_cannot_be_made_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    def picture(*_):
        raise RuntimeError("latex could not be found")

    monkeypatch.setattr("a2c.tools.plot.picture", picture)
    assert cli.main(["plot", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.png'} could not be drawn: latex could not be found\n"
