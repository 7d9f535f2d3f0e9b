"""The picture of a comparison: a colour per setting, the median, a band, the target."""

from dataclasses import replace

import numpy as np
import pytest
from fake_train import write
from matplotlib.figure import Figure

from a2c.config.config import Config
from a2c.tools import compare_plot
from a2c.tools.compare_plot import draw
from a2c.tools.runs import Run
from a2c.tools.summary import row_of, summarise


@pytest.fixture
def axes_of(monkeypatch, tmp_path):
    """Draw a comparison of `settings`, with a run for each of their scores (and lengths); both axes and the legend."""
    figures = []
    monkeypatch.setattr(compare_plot, "picture", lambda figure: figures.append(figure) or b"picture")

    def drawn(settings, **changes):
        config, runs = replace(Config.from_preset("cartpole"), **changes), []
        for name, scores in settings.items():
            for seed, score in enumerate(scores):
                runs.append(Run(name, {}, replace(config, seed=seed), ()))
                if score is not None:
                    (tmp_path / runs[-1].name).mkdir(parents=True)
                    write(tmp_path / runs[-1].name, *(score if isinstance(score, tuple) else (score,)))
        rows = [row_of(tmp_path, run, int(not (tmp_path / run.name).exists())) for run in runs]
        draw(tmp_path, runs, summarise(runs, rows))
        assert (tmp_path / "compare.png").read_bytes() == b"picture"
        (figure,) = figures
        assert isinstance(figure, Figure)
        return *figure.axes, [text.get_text() for text in figure.legends[0].get_texts()]

    return drawn


def lines(axes):
    """Its lines but for the target's and those that only the legend shows."""
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def test_a_setting_has_one_colour_with_a_line_for_the_median_and_a_band(axes_of):
    left, right, legend = axes_of({"a": [100, 300, 500], "b": [200, 480, 490]})
    for axes in (left, right):
        assert [set(np.round(line.get_ydata(), 6)) for line in lines(axes)] == [{300}, {480}]
        assert len({line.get_color() for line in lines(axes)}) == 2
        bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
        assert [(round(y.min(), 6), round(y.max(), 6)) for y in bands] == [(100, 500), (200, 490)]
        assert [475, 475] in [list(line.get_ydata()) for line in axes.lines]
    assert legend == ["a: 1 of 3 reach 475, median above 1,000,000", "b: 2 of 3 reach 475, median 1,000 decisions"]
    assert max(lines(left)[0].get_xdata()) == 1200 / 1e6 and max(lines(right)[0].get_xdata()) == 60


def test_a_single_seed_is_one_line_and_a_run_without_episodes_none(axes_of):
    left, _, legend = axes_of({"a": [100], "b": [None]}, target_score=None)
    assert len(lines(left)) == 1 and not left.collections
    assert legend == ["a: 1 run, best mean 100.0", "b: 1 run, best mean -"]
    assert not [line for line in left.lines if len(line.get_xdata()) == 2]  # no target


def test_twelve_settings_have_twelve_colours(axes_of):
    left, _, legend = axes_of({f"s{i}": [i] for i in range(12)})
    assert len({tuple(line.get_color()) for line in lines(left)}) == len(legend) == 12


def test_the_median_ends_where_half_of_the_runs_have_ended_and_one_that_has_ended_keeps_its_mean(axes_of):
    left, _, _ = axes_of({"a": [(300, 30), (200, 60), (100, 120)]})
    (median,) = lines(left)
    assert max(median.get_xdata()) == 600 / 1e6 and set(median.get_ydata()) == {200}
