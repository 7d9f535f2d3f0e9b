"""Report: one HTML file about a run that needs no network, with everything that a reader wants to know of it."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from a2c import __version__
from a2c.config.validation import check_out
from a2c.metrics.files import open_regular, write_atomically
from a2c.tools.report_data import check_run, read_report

PAGE = Path(__file__).parent / "page"  # template, style and script
VIDEO_LIMIT = 1_800_000  # bytes of a video; in a page it takes 4 for 3
CHARTS = (  # id in the page, title, how to read it; one without a value is not shown
    (
        "evaluations",
        "Evaluations",
        "The frozen policy after so many decisions: mean, lowest and highest of its episodes.",
    ),
    ("losses", "Losses", "Of the last minibatch before each row, so noisy."),
    ("entropy", "Entropy", "Falls slowly from log A, the uniform policy over A actions."),
    (
        "explained_variance",
        "Explained variance",
        "1 is a perfect value head, 0 one that has learned nothing. Values below -1 are cut off.",
    ),
    (
        "approx_kl",
        "KL divergence",
        "How far the policy moves from the one that acted: 0.01 to 0.2 is usual.",
    ),
    (
        "ratios",
        "Importance ratios",
        "Mean above 0.8 is usual; with several epochs, about half of the ratios are clipped.",
    ),
    ("shares", "Where the time goes", "Shares of wall time; the rest is logging and waiting."),
)
VIDEOS = {  # name of a file in the run directory: its type, and where in it stands which mark
    **{f"{name}.webp": ("image/webp", 8, b"WEBP") for name in ("film", "episode")},
    **{f"{name}.gif": ("image/gif", 0, b"GIF8") for name in ("film", "episode")},
    **{f"{name}.mp4": ("video/mp4", 4, b"ftyp") for name in ("film", "episode")},
}


class Video(NamedTuple):
    """A video in a run directory; `source` is a data URI, empty if the video is too large."""

    name: str
    kind: str
    size: str  # in MB
    source: str


def write_report(run_dir: Path, out: Path) -> int:
    """Write the report of a run to the HTML file `out`, and return its size in bytes.

    Raises ValueError for a directory that holds no run, for an `out` that cannot be, for damaged files, and without
    the extra `report`; OSError if a file cannot be read or written.
    """
    check_out(out, [".html"])
    check_run(run_dir)
    page = make_page(run_dir, read_report(run_dir))
    write_atomically(out, page)
    return len(page)


def make_page(run_dir: Path, data: dict[str, Any], every: float = 0) -> bytes:
    """The page that shows `data` of `read_report`; `every`: fetch newer data each so many seconds (0 = never).

    Whatever stands in a run's files is text: it is escaped, and no script runs but those of this package. ValueError
    without the extra `report`.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError(f'report needs {error.name}, which is not installed: pip install "a2c[report]"') from error
    nonce = secrets.token_urlsafe(16)
    template = Environment(loader=FileSystemLoader(PAGE), autoescape=True).get_template("report.html")
    values = {
        **{"data": data, "run_dir": str(run_dir), "every": every, "nonce": nonce, "version": __version__},
        **{
            "charts": CHARTS,
            "content_security_policy": content_security_policy(nonce, live=every > 0),
            "plotly": Markup(get_plotlyjs()),
        },
        **{"style": Markup((PAGE / "report.css").read_text()), "script": Markup((PAGE / "report.js").read_text())},
    }
    return template.render(values, video=find_video(run_dir)).encode("utf-8", "replace")


def content_security_policy(nonce: str, live: bool) -> str:
    """The Content-Security-Policy of a page: its own scripts and styles, data in it, and nothing from elsewhere."""
    rules = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
    return rules + "media-src data:; base-uri 'none'; form-action 'none'" + "; connect-src 'self'" * live


def find_video(run_dir: Path) -> Video | None:
    """The first of `VIDEOS` that is in the run directory, embedded where it has at most `VIDEO_LIMIT` bytes.

    Links, and files that are no video, do not count: a run directory from somebody else must not put other files of
    this machine into a page.
    """
    for name, (kind, place, mark) in VIDEOS.items():
        path = run_dir / name
        if path.is_symlink() or not path.is_file():
            continue
        with open(path, "rb", opener=open_regular) as file:
            content = file.read(VIDEO_LIMIT)
            more = file.read(1)
        if content[place : place + len(mark)] == mark:
            text = "" if more else f"data:{kind};base64,{base64.b64encode(content).decode()}"
            return Video(name, kind, f"{path.stat().st_size / 1e6:.1f}", text)
    return None
