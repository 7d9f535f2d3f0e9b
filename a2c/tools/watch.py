"""Watch: the page of a run that goes on, served to a browser on this machine and refreshed in place."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from a2c.run.run_dir import LOCK
from a2c.tools.report import make_page
from a2c.tools.report_data import check_run, read_report

HOST = "127.0.0.1"  # never another address
EVERY = 3.0  # seconds between two refreshes
PATIENCE = 30.0  # seconds until a connection without a request is closed
PORTS = range(1024, 65_536)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def watch(run_dir: Path, port: int = 0, show: bool = True) -> None:
    """Serve the page of a run, which may not have written anything yet, until KeyboardInterrupt; print its address.

    `port`: 0 for one that is free; `show`: open the page in a browser, where there is a desktop. Raises ValueError
    for a directory that is none of a run, for damaged files, for a port that cannot be used, and without the extra
    `report`.
    """
    with make_server(run_dir, port) as server:
        url = f"http://{HOST}:{server.server_port}/"
        print(f"{run_dir} is shown at {url}; Ctrl-C ends", flush=True)
        if show and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)):
            webbrowser.open(url)  # elsewhere it might start a browser in this terminal
        server.serve_forever()


def make_server(run_dir: Path, port: int = 0, every: float = EVERY) -> Server:
    """A server of the page and its data, which listens; raises as `watch` does."""
    if port and port not in PORTS:
        raise ValueError(f"port must be 0 or at least {PORTS[0]} and at most {PORTS[-1]}, got {port}")
    if not run_dir.is_dir() or not (run_dir / LOCK).is_file() or any(path.is_dir() for path in run_dir.iterdir()):
        check_run(run_dir)  # a run that starts has a lock, and no directories before its first files
    make_page(run_dir, read_report(run_dir))  # ValueError without the extra, or for a damaged file
    try:
        return Server((HOST, port), partial(Handler, run_dir, every))
    except OSError as error:
        raise ValueError(f"port must be free, got {port}: {error.strerror}") from error


class Server(ThreadingHTTPServer):
    """Answers each request in a thread; one that a browser breaks off is no error."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where the connection was lost, a traceback otherwise."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers `/` with the page and `/data.json` with what it shows, and nothing else."""

    timeout = PATIENCE

    def __init__(self, run_dir: Path, every: float, *args: Any) -> None:
        self.run_dir, self.every = run_dir, every
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer one request: 403 for one that was sent to another host name, 404 for another path.

        A page from elsewhere may make its own host name point to this machine (DNS rebinding) and would then be
        allowed to read the answer; the Host header still holds that name.
        """
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._answer(403, "text/plain", b"this page is shown to this machine only\n")
        if self.path not in ("/", "/data.json"):
            return self._answer(404, "text/plain", b"there is / and /data.json\n")
        try:
            data = self._read()
        except (OSError, ValueError) as error:
            return self._answer(503, "text/plain", f"{' '.join(str(error).split())}\n".encode("utf-8", "replace"))
        if self.path == "/":
            return self._answer(200, "text/html", make_page(self.run_dir, data, self.every))
        return self._answer(200, "application/json", json.dumps(data, allow_nan=False).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def _read(self) -> dict[str, Any]:
        if not self.run_dir.is_dir():
            raise ValueError(f"{self.run_dir} has been removed")
        return read_report(self.run_dir)

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
