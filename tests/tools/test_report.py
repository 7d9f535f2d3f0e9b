"""`a2c report`: one file that needs no network, says what the run did, and runs no script of a run directory."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import chromium
import pytest
from written_run import make_run

from a2c.cli import commands as cli
from a2c.tools import report as reporting
from a2c.tools.model_card import model_card
from a2c.tools.report import find_video, write_report
from a2c.tools.report_data import POINTS, check_run, read_report

pytest.importorskip("plotly", reason="the extra `report` is not installed")
needs_chromium = pytest.mark.skipif(chromium.PROGRAM is None, reason="Chromium is not installed")
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>{{ 7 * 7 }}"
GIF = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"


def text_of(run_dir, tmp_path):
    write_report(run_dir, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def data_in(text):
    """The data that the page holds for its script."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_a_report_says_what_the_run_did(tmp_path):
    run_dir = make_run(tmp_path / "run")
    evaluation = {"mean": 17.5, "interval": [17, 18.25], "episodes": 30, "env_steps": 2000, "actions": "sampled"}
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    (run_dir / "evaluations.csv").write_text("env_steps,episodes,mean\n500,30,3.5\n1500,30,18.125\n")
    data = read_report(run_dir)
    assert dict(data["summary"][:11]) == {
        "Game": "PongNoFrameskip-v4",
        "Algorithm": "a2c",
        "Preset": "pong-fast",
        "Seed": "7",
        "Decisions": "2,000 of 1,000,000",
        "Wall time": "0:01:40",
        "Episodes": "200",
        "Best mean of 100 episodes": "149.5",
        "Target": "100 reached at 1,510 decisions, 0:01:15",
        "Mean of the last 100 episodes": "149.5",
        "Last episode": "199",
    }
    assert [text for _, text in data["summary"][11:]] == [
        "mean 18.12 of 30 episodes, policy after 1,500 decisions",
        "mean 17.50 (95 % interval 17.00 to 18.25) of 30 episodes, sampled actions, policy after 2,000 decisions",
    ]
    card = dict(data["card"])
    assert set(card) == {"Intended use", "Training data", "Settings", "Results", "Limits"}
    assert "2,000 decisions" in card["Training data"] and "4 emulator frames" in card["Training data"]
    assert "seed 7" in card["Results"] and "mean 17.50" in card["Results"] and "Number of seeds: 1." in card["Limits"]
    assert ("threads", "[1, 2]") in data["about"] and ("gamma", "0.99") in data["config"]


def test_every_row_of_the_evaluations_is_drawn_at_the_decisions_and_the_time_of_its_policy(tmp_path):
    run_dir = make_run(tmp_path / "run")  # 20 decisions per second
    (run_dir / "evaluations.csv").write_text("env_steps,episodes,mean,min,max\n500,30,3.5,1,9\n1500,30,18.125,17,21\n")
    assert read_report(run_dir)["evaluations"] == {
        **{"env_steps": [500, 1500], "minutes": [0.416667, 1.25], "mean": [3.5, 18.125]},
        **{"min": [1, 17], "max": [9, 21]},
    }


def test_a_table_without_decisions_does_not_end_the_report(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "evaluations.csv").write_text("env_steps,episodes,mean,min,max\n500,30,3.5,1,9\n")
    (run_dir / "metrics.csv").write_text("steps,seconds\n500,25\n")
    assert read_report(run_dir)["evaluations"]["minutes"] == [0.416667]


def test_an_evaluation_that_is_being_played_does_not_end_the_report(tmp_path):
    (make_run(tmp_path / "run") / "evaluation.json").touch()
    assert ("Evaluation", "evaluation.json is not complete") in read_report(tmp_path / "run")["summary"]


def test_a_page_shows_every_text_and_series_of_its_data(tmp_path):
    text = text_of(make_run(tmp_path / "run"), tmp_path)
    data = data_in(text)
    for rows in (data["summary"], data["card"], data["config"], data["about"]):
        assert rows and all(f">{shown}<" in text for row in rows for shown in row)
    assert data["episodes"]["mean"][-1] == 149.5 and data["metrics"]["entropy"][:2] == [1, 0.5]


def test_a_card_of_another_environment_claims_no_emulator():
    summary = {"Game": "CartPole-v1", "Decisions": "500 of 1,000", "Seed": "0", "Target": "none"}
    assert dict(model_card({}, summary))["Training data"] == "No data set: 500 decisions of its own in CartPole-v1."


def test_a_long_run_is_thinned_out_and_its_page_stays_small(tmp_path):
    run_dir = make_run(tmp_path / "run", episodes=40_000, rows=8_000)
    (run_dir / "episode.gif").write_bytes(GIF + bytes(5_000_000))
    text = text_of(run_dir, tmp_path)
    data = data_in(text)
    assert {len(values) for table in ("episodes", "metrics") for values in data[table].values()} == {POINTS}
    assert data["episodes"]["env_steps"][-1] == 400_000 and data["episodes"]["score"][0] == 0
    assert len(text.encode()) < 8_000_000  # of these, plotly takes 4.8 million
    assert "episode.gif is 5.0 MB, too large for this page" in text


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("episode.gif", GIF, '<img alt="The policy plays an episode" src="data:image/gif;base64,R0lG'),
        ("film.webp", b"RIFF\x10\x00\x00\x00WEBPVP8 ", 'src="data:image/webp;base64,UklG'),
        ("episode.mp4", b"\x00\x00\x00\x18ftypmp42", '<video controls loop muted playsinline src="data:video/mp4'),
        ("episode.gif", b"no video at all", None),
        ("other.gif", GIF, None),
    ],
)
def test_a_video_in_the_directory_is_embedded(name, content, shown, tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / name).write_bytes(content)
    text = text_of(run_dir, tmp_path)
    assert ("An episode</h2>" in text) == (shown is not None) and (shown or "") in text


def test_a_link_is_no_video(tmp_path):
    (tmp_path / "secret.gif").write_bytes(GIF)
    (make_run(tmp_path / "run") / "episode.gif").symlink_to(tmp_path / "secret.gif")
    assert find_video(tmp_path / "run") is None


class Elements(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def hostile_run(run_dir):
    """A run directory in which every text that the page shows is an attack."""
    make_run(run_dir, env=EVIL, algorithm=EVIL, preset=EVIL, seed=EVIL, network=EVIL, noop_max=EVIL, **{EVIL: [EVIL]})
    (run_dir / "about.json").write_text(json.dumps({EVIL: EVIL, "command": {EVIL: EVIL}}))
    evaluation = {"mean": 1, "episodes": 3, "actions": EVIL, "interval": [EVIL]}
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    return run_dir


def test_text_of_a_run_directory_adds_no_element_to_the_page(tmp_path):
    plain = Elements(text_of(make_run(tmp_path / "plain"), tmp_path))
    text = text_of(hostile_run(tmp_path / "evil"), tmp_path)
    evil = Elements(text)
    kinds = {"script", "img", "iframe", "object", "link"}
    assert [tag for tag, _ in evil.tags if tag in kinds] == [tag for tag, _ in plain.tags if tag in kinds]
    assert not [attrs for _, attrs in evil.tags if any(name.startswith("on") for name in attrs)]
    assert dict(data_in(text)["summary"])["Game"] == EVIL  # as text, no template
    scripts = [attrs for tag, attrs in evil.tags if tag == "script" and attrs.get("type") != "application/json"]
    (nonce,) = {attrs["nonce"] for attrs in scripts}
    (policy,) = [attrs["content"] for _, attrs in evil.tags if "http-equiv" in attrs]
    assert f"default-src 'none'; script-src 'nonce-{nonce}';" in policy
    assert nonce not in text_of(tmp_path / "evil", tmp_path)


def test_a_report_loads_nothing_from_elsewhere(tmp_path):
    for _, attrs in Elements(text_of(make_run(tmp_path / "run"), tmp_path)).tags:
        assert all(attrs.get(name, "data:").startswith("data:") for name in ("src", "href"))


@needs_chromium
def test_a_page_draws_its_curves_without_a_network_and_runs_no_script_of_the_run(tmp_path):
    with chromium.opened_browser() as page:
        for name, make in (("plain", make_run), ("evil", hostile_run)):
            write_report(make(tmp_path / name), tmp_path / f"{name}.html")
            page.open(f"file://{tmp_path}/{name}.html", width=390, height=844, dark=name == "evil")
            page.until("document.querySelectorAll('.js-plotly-plot').length == 7")
            assert page.eval("document.querySelectorAll('#score .scatterlayer .trace').length") == 2
            assert page.eval("document.querySelector('#score .js-line').getBBox().width") > 200
            assert page.eval("document.documentElement.scrollWidth") == 390
            background = page.eval("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(13, 17, 23)" if name == "evil" else "rgb(255, 255, 255)")
            assert page.eval("window.hacked") is None
            titles = page.eval("[...document.querySelectorAll('#score .modebar-btn')].map(one => one.dataset.title)")
            assert titles and not [title for title in titles if "Share" in title]
        assert page.problems == [] and [url for url in page.requests if not url.startswith("file:")] == []


def test_an_unfinished_run_of_another_version_has_a_report(tmp_path):
    run_dir = make_run(tmp_path / "run", episodes=0, unknown_setting=3, total_env_steps=10**400, target_score="high")
    (run_dir / "metrics.csv").write_text("env_steps,seconds,entropy\n10,1,nan\n20,2,1.5\n30")
    data = data_in(text_of(run_dir, tmp_path))
    assert data["metrics"] == {"env_steps": [10, 20], "minutes": [0.0166667, 0.0333333], "entropy": [None, 1.5]}
    assert data["target"] is None and dict(data["summary"])["Last episode"] == "-"
    (run_dir / "metrics.csv").unlink()
    assert data_in(text_of(run_dir, tmp_path))["metrics"] == {}


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["no/such"], "run_dir must be a directory that exists, got 'no/such'"),
        (["."], "run_dir must hold config.json or episodes.csv or metrics.csv of one run, got '.'"),
        (["run", "--out", "report.pdf"], "out must end in .html, got 'report.pdf'"),
        (["run", "--out", "no/report.html"], "out must lie in a directory that exists"),
        (["damaged"], "config.json must be a JSON object, got a damaged file"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(args, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    (make_run(tmp_path / "damaged") / "config.json").write_text("[" * 100_000)
    assert cli.main(["report", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and part in captured.err
    assert not list(tmp_path.glob("*.html"))


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert cli.main(["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err.endswith(': pip install "a2c[report]"\n')


def test_report_does_not_import_torch(tmp_path):
    code = "import sys; from a2c.cli.commands import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    args = ["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "r.html")]
    assert subprocess.run([sys.executable, "-c", code, *args], capture_output=True, timeout=60).returncode == 0


def test_check_run_accepts_a_run_that_has_only_started(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_run(tmp_path)


def test_the_page_is_part_of_the_package():
    assert {path.name for path in reporting.PAGE.iterdir()} == {"report.html", "report.css", "report.js"}
