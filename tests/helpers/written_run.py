"""The files of a run as text, without a training."""

import json

from runs import row_of

from a2c.config.config import Config
from a2c.metrics.logger import METRICS


def make_run(run_dir, episodes=200, rows=50, **changes):
    """A run with one episode per 10 decisions whose score rises from 0, and rows of metrics."""
    run_dir.mkdir(parents=True)
    settings = json.loads(Config.from_preset("pong-fast").to_json()) | {"seed": 7, "target_score": 100.0} | changes
    (run_dir / "config.json").write_text(json.dumps(settings))
    (run_dir / "about.json").write_text(json.dumps({"command": "a2c train", "threads": [1, 2], "gpu": None}))
    lines = [f"{10 * i},{i / 2},{i - 1},10\n" for i in range(1, episodes + 1)]
    (run_dir / "episodes.csv").write_text("env_steps,seconds,score,length\n" + "".join(lines))
    lines = [",".join(str(v) for v in row_of(40 * i, entropy=1 / i).values()) + "\n" for i in range(1, rows + 1)]
    (run_dir / "metrics.csv").write_text(",".join(METRICS) + "\n" + "".join(lines))
    return run_dir
