"""`a2c watch`: the page of a run that goes on, for this machine alone."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection

import chromium
import pytest
from runs import tiny
from written_run import make_run

from a2c.cli import commands as cli
from a2c.run.trainer import Trainer
from a2c.tools import watch as watching
from a2c.tools.watch import make_server

pytest.importorskip("plotly", reason="the extra `report` is not installed")


@contextmanager
def served(run_dir, every=0.2):
    """The port of a server in a thread."""
    with make_server(run_dir, every=every) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port, path="/data.json", host=None, method="GET"):
    """Status, headers and content of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.headers), content


def data_of(port):
    status, _, content = ask(port)
    assert status == 200, content
    return json.loads(content)


def test_the_page_and_its_data_are_served_and_nothing_else(tmp_path):
    with served(make_run(tmp_path / "run")) as port:
        status, headers, page = ask(port, "/")
        assert status == 200 and page.startswith("<!doctype html>") and 'data-every="0.2"' in page
        assert headers["Content-Type"] == "text/html; charset=utf-8" and headers["X-Frame-Options"] == "DENY"
        assert data_of(port)["title"] == "PongNoFrameskip-v4" and "connect-src" in page
        for path in ("/config.json", "/run/config.json", "/../config.json", "/latest.pt", "/data.json?x"):
            assert ask(port, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            assert ask(port, method=method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:80"]
)
@pytest.mark.parametrize("path", ["/", "/data.json", "/other"])
def test_a_request_to_another_host_name_is_refused(host, path, tmp_path):
    with served(make_run(tmp_path / "run")) as port:
        status, _, content = ask(port, path, host.format(port=port))
        assert status == 403 and content == "this page is shown to this machine only\n"
        assert ask(port, host=f"localhost:{port}")[0] == 200


def test_the_server_listens_on_the_loopback_alone(tmp_path):
    with make_server(make_run(tmp_path / "run")) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_data_follow_a_run_from_before_its_first_file_to_its_end(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "lock").touch()
    with served(run_dir) as port:
        assert ask(port, "/")[0] == 200
        data = data_of(port)
        assert data["title"] == "run" and data["episodes"]["mean"] == [] and data["metrics"] == {}
        assert Trainer(tiny(run_dir, log_every=1e-6)).run().exit_code == 0
        data = data_of(port)
        assert dict(data["summary"])["Decisions"] == "480 of 480" and data["metrics"]["env_steps"][-1] == 480
        assert dict(data["config"])["env"] == data["title"] == "CartPole-v1"


def test_a_file_that_cannot_be_read_is_one_line_until_it_can_be(tmp_path):
    run_dir = make_run(tmp_path / "run")
    good = (run_dir / "config.json").read_text()
    with served(run_dir) as port:
        (run_dir / "config.json").write_text("{")
        for path in ("/", "/data.json"):
            status, _, content = ask(port, path)
            assert status == 503 and "must be a JSON object" in content and content.count("\n") == 1
        (run_dir / "config.json").write_text(good)
        assert data_of(port)["title"] == "PongNoFrameskip-v4"
        run_dir.rename(tmp_path / "moved")
        assert ask(port)[0] == 503 and "has been removed" in ask(port)[2]


@pytest.mark.skipif(chromium.PROGRAM is None, reason="Chromium is not installed")
def test_the_page_is_refreshed_in_place_and_keeps_its_zoom(tmp_path):
    run_dir = make_run(tmp_path / "run", episodes=0, rows=0)
    score, range_shown = "document.getElementById('score')", "document.getElementById('score').layout.xaxis.range"
    with chromium.opened_browser() as page, served(run_dir) as port:
        page.open(f"http://127.0.0.1:{port}/")
        page.eval("window.mark = 1")
        assert page.eval(f"{score}.textContent") == "no values yet"
        append(run_dir, 1, 100)
        page.until(f"{score}.data && {score}.data[0].x.length == 100 && {score}.querySelector('.nsewdrag')")
        page.drag("#score .nsewdrag", 0.2, 0.6)
        page.until(f"{score}.layout.xaxis.autorange === false || {score}._fullLayout.xaxis.autorange === false")
        zoomed = page.eval(range_shown)
        assert 0 < zoomed[0] < zoomed[1] < 1000
        append(run_dir, 101, 150)
        page.until(f"{score}.data[0].x.length == 150")
        assert page.eval(range_shown) == zoomed
        tiles = page.eval("document.getElementById('summary').textContent")
        assert "1,500 of 1,000,000" in tiles and page.eval("window.mark") == 1
        assert page.problems == [] and {url.split("/")[2] for url in page.requests} == {f"127.0.0.1:{port}"}
        assert [url.rpartition("/")[2] for url in page.requests].count("") == 1  # the page itself


def append(run_dir, first, last):
    """Append episodes to the table of a run."""
    with open(run_dir / "episodes.csv", "a") as file:
        file.writelines(f"{10 * i},{i / 2},{i - 1},10\n" for i in range(first, last + 1))


def test_the_page_says_when_it_is_no_longer_served(tmp_path):
    if chromium.PROGRAM is None:
        pytest.skip("Chromium is not installed")
    with chromium.opened_browser() as page:
        with served(make_run(tmp_path / "run")) as port:
            page.open(f"http://127.0.0.1:{port}/")
            page.until("document.getElementById('state').textContent.startsWith('Follows the run')")
        page.until("document.getElementById('state').textContent.includes('a2c watch does not answer')")
        assert page.eval("document.querySelectorAll('#score .scatterlayer .trace').length") == 2


def test_ctrl_c_ends_the_command_cleanly(tmp_path):
    args = [sys.executable, "-m", "a2c", "watch", str(make_run(tmp_path / "run")), "--no-open"]
    server = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    assert line.startswith(f"{tmp_path / 'run'} is shown at http://127.0.0.1:") and line.endswith("/; Ctrl-C ends\n")
    port = int(line.split(":")[2].split("/")[0])
    assert ask(port, "/")[0] == 200
    server.send_signal(signal.SIGINT)
    out, err = server.communicate(timeout=20)
    assert (server.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(("variables", "opened"), [({"DISPLAY": ":0"}, True), ({}, False)])
def test_a_browser_is_opened_where_there_is_a_desktop(variables, opened, tmp_path, monkeypatch, capsys):
    urls = []
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(watching.webbrowser, "open", urls.append)
    monkeypatch.setattr(watching.Server, "serve_forever", lambda self: None)
    assert cli.main(["watch", str(make_run(tmp_path / "run"))]) == 0
    assert cli.main(["watch", str(tmp_path / "run"), "--no-open"]) == 0
    first, _ = capsys.readouterr().out.splitlines()
    assert [f" at {url};" in first for url in urls] == [True] * opened


def test_what_cannot_be_watched_is_refused_in_one_line(tmp_path, capsys):
    run_dir = make_run(tmp_path / "cmp" / "x" / "seed-0")
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for args, part in {
            (str(tmp_path / "no"),): "run_dir must be a directory that exists",
            (str(tmp_path / "cmp"),): "run_dir must hold config.json or episodes.csv or metrics.csv of one run",
            (str(tmp_path / "empty"),): "run_dir must hold config.json or episodes.csv or metrics.csv of one run",
            (str(run_dir), "--port", str(port)): f"port must be free, got {port}",
            (str(run_dir), "--port", "80"): "port must be 0 or at least 1024 and at most 65535, got 80",
            (str(run_dir), "--port", "65536"): "at most 65535, got 65536",
        }.items():
            assert cli.main(["watch", *args, "--no-open"]) == 2
            captured = capsys.readouterr()
            assert part in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_watch_without_the_extra_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert cli.main(["watch", str(make_run(tmp_path / "run"))]) == 2
    assert capsys.readouterr().err.endswith(': pip install "a2c[report]"\n')
