"""The display: lines, the live panel, the summary."""

import io
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from runs import row_of
from toys import wait_for

from a2c.config.config import Config
from a2c.metrics.console import STOPPING, Display, QuietConsole
from a2c.metrics.meters import StageTimer
from a2c.metrics.panel import Panel
from a2c.metrics.text import format_duration, format_score
from a2c.processes.signals import StopRequest

BEFORE_UPDATES = (
    *("env_steps", "seconds", "updates", "episodes", "reward", "reward_100", "best_reward_100", "length_100"),
    *("speed", "share_env", "share_act", "share_learn"),
)


def display_of(frames_per_step=4, stop=None, run_dir=Path("runs/x"), **changes):
    panel = Panel(Config(**changes), frames_per_step, run_dir)
    return Display(panel, StageTimer(), StopRequest() if stop is None else stop)


def test_display_line_holds_steps_scores_speed_and_shares():
    row = row_of(1500, episodes=7, reward_100=-20.25, best_reward_100=-math.inf, speed=500.0)
    row |= {"share_env": 0.5, "share_act": 0.2, "share_learn": 0.3}
    line = display_of(total_env_steps=10_000, progress=False).line(row)
    for part in (
        "1,500/10,000 steps",
        "7 episodes",
        "mean -20.2",
        "best -",
        "500 steps/s",
        "2,000 frames/s",
        "left 0:00:17",
    ):
        assert part in line
    assert "env 50% act 20% learn 30%" in line and "\n" not in line
    cartpole = display_of(1, env="CartPole-v1", progress=False).line(row)
    assert "500 frames/s" in cartpole


def test_a_letter_that_the_output_lacks_does_not_end_a_run():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.raises(UnicodeEncodeError):
        Console(file=out).print("ü")
    QuietConsole(file=out).print("ü")


def test_format_duration_and_format_score_by_hand():
    assert [format_duration(s) for s in (0, 59.9, 3661, math.nan, math.inf)] == [
        "0:00:00",
        "0:00:59",
        "1:01:01",
        "-",
        "-",
    ]
    assert [format_score(s) for s in (18.04, math.nan, -math.inf, 1e301)] == ["18.0", "-", "-", "1e+301"]


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_a_row_before_the_first_update(terminal, capsys):
    # With sliding windows the first rows have no loss yet.
    display = display_of()
    display.console = Console(force_terminal=terminal, width=200)
    display.start()
    display.show({name: value for name, value in row_of(5).items() if name in BEFORE_UPDATES})
    display.close()
    assert "episodes" in capsys.readouterr().out


def shown_on_a_terminal(monkeypatch, kind, act, **settings):
    """What `act(display)` writes to a terminal of 80 columns, and whether the display has a live panel."""
    screen, end = os.openpty()
    with os.fdopen(end, "w") as stdout, monkeypatch.context() as patch:
        patch.setenv("TERM", kind)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdout", stdout)
        display = display_of(**settings)
        display.start()
        act(display)
        stdout.write("\nend\n")
        stdout.flush()
        written = b""
        while b"\r\nend\r\n" not in written:
            written += os.read(screen, 65536)
        shown = written.decode().replace("\r\n", "\n")
        display.close()
    os.close(screen)
    return shown, display.live is not None


@pytest.mark.parametrize(("kind", "live"), [("dumb", False), ("unknown", False), ("xterm", True)])
def test_display_prints_a_line_per_row_on_a_dumb_terminal(kind, live, monkeypatch):
    shown, is_live = shown_on_a_terminal(monkeypatch, kind, lambda display: display.show(row_of(1500)))
    assert is_live == live
    assert ("1,500/1,000,000 steps | 3 episodes" in shown) != live and ("\x1b[" in shown) == live


def test_display_says_at_once_that_a_run_is_stopping(monkeypatch):
    def act(display):
        drawn, refresh = [], display.live.refresh
        display.live.refresh = lambda: refresh() or drawn.append(1)
        display.show(row_of(1500))
        for happen in (lambda: None, lambda: stop.handle(signal.SIGINT, None)):
            happen()
            known = len(drawn)
            wait_for(lambda known=known: len(drawn) >= known + 2, 20)  # the first may have been begun before

    stop = StopRequest()
    shown, _ = shown_on_a_terminal(monkeypatch, "xterm", act, stop=stop)
    before, after = shown.split(STOPPING, 1)
    assert "score" in before and after


def test_display_moves_a_bar_while_environments_start_on_a_terminal_only(monkeypatch):
    def act(display):
        with display.starting():
            time.sleep(0.3)

    for kind, progress, moves in (("xterm", True, True), ("xterm", False, False), ("dumb", True, False)):
        shown, _ = shown_on_a_terminal(monkeypatch, kind, lambda one: one.close() or act(one), progress=progress)
        assert ("starting" in shown) == moves


class Notebook:
    """What `IPython.display` does with one output of a cell."""

    def __init__(self):
        self.shown, self.printed = [], []

    def display(self, what, display_id=False, **kwargs):
        (self.shown if display_id else self.printed).append(what)
        return self

    def update(self, what, raw=False):
        self.shown.append(what)


def shown_in_a_notebook(monkeypatch, act, **settings):
    """What `act(display)` shows in the output that is drawn again and again, as text, and what it prints below."""
    notebook = Notebook()
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, notebook)
    display = display_of(**settings)
    display.console = Console(force_jupyter=True)
    display.start()
    act(display)
    display.close()
    display.close()  # as a run does
    console = Console(width=100, file=io.StringIO())
    for what in notebook.shown:
        console.print(what)
    return console.file.getvalue(), notebook


def test_display_in_a_notebook_draws_one_output_again_and_empties_it(monkeypatch):
    def act(display):
        with display.starting():  # a bar would be an output of its own
            display.show(row_of(1500, reward_100=12.5))
        wait_for(lambda: len(sys.modules["IPython.display"].shown) >= 3)

    before = set(threading.enumerate())
    text, notebook = shown_in_a_notebook(monkeypatch, act)
    assert "mean 12.5" in text and len(notebook.shown) >= 4 and not notebook.printed
    assert notebook.shown[-1] == {"text/plain": ""}
    assert set(threading.enumerate()) <= before


def test_display_in_a_notebook_says_that_a_run_is_stopping(monkeypatch):
    stop = StopRequest()

    def act(display):
        shown = sys.modules["IPython.display"].shown
        stop.handle(signal.SIGINT, None)
        drawn = len(shown)
        wait_for(lambda: len(shown) >= drawn + 2)  # the first may have been begun before

    assert STOPPING in shown_in_a_notebook(monkeypatch, act, stop=stop)[0]


def test_display_in_a_notebook_survives_what_cannot_be_drawn_and_shows_nothing_without_progress(monkeypatch):
    def act(display):
        shown, asked, render = sys.modules["IPython.display"].shown, [], display.panel.render
        display.panel.rows.append({"reward_100": 1.0})  # a row without its other columns
        display.panel.render = lambda *args: asked.append(1) or render(*args)
        wait_for(lambda: len(asked) >= 2, 30)
        drawn = len(shown)
        display.panel.rows.pop()
        wait_for(lambda: len(shown) > drawn)

    _, notebook = shown_in_a_notebook(monkeypatch, act)
    assert notebook.shown[-1] == {"text/plain": ""}
    text, notebook = shown_in_a_notebook(monkeypatch, lambda display: display.show(row_of(1500)), progress=False)
    assert not text and not notebook.printed


def test_display_in_a_notebook_that_shows_nothing_prints_lines(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise LookupError("no kernel")

    monkeypatch.setattr(Notebook, "display", refuse)
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, Notebook())
    display = display_of()
    display.console = Console(force_jupyter=True)
    display.start()
    assert display.live is None
    display.console = Console(width=200)
    display.show(row_of(1500))
    display.close()
    assert "1,500/" in capsys.readouterr().out


def test_display_summary_does_not_break_the_run_directory_and_says_how_to_continue(monkeypatch):
    run_dir = Path("/a/rather/long/path/with [brackets] and :smile: and so on" + "/and/on" * 12)
    for finished in (False, True):
        shown, _ = shown_on_a_terminal(
            monkeypatch,
            "dumb",
            lambda d, end=finished: d.summary(row_of(1500), "stopped by SIGINT", end),
            run_dir=run_dir,
        )
        assert f"\nrun directory {run_dir}\n" in shown and "mean score of the last 3 episodes" in shown
        assert (f"\nto continue: a2c train --resume '{run_dir}'\n" in shown) != finished
