"""What is measured: scores of finished episodes, wall time by stage."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

EPISODE_COLUMNS = ("env_steps", "seconds", "score", "length")
WINDOW = 100  # episodes in the moving mean by which algorithms are compared


def mean(scores: Collection[float]) -> float:
    """The mean, rounded once; NaN without scores, and where their sum is infinite or NaN."""
    try:
        return math.fsum(scores) / len(scores) if scores else math.nan
    except (OverflowError, ValueError):  # 1e308 + 1e308, inf - inf
        return math.nan


class ScoreWindow:
    """Counts finished episodes; keeps the last 100 scores and their best mean."""

    def __init__(self) -> None:
        self.episodes = 0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.best_mean = -math.inf  # highest mean over a full window
        self.reached = -math.inf  # highest mean that met a target
        self._unseen = -math.inf  # highest mean over a full window since the last call of `meets`

    def add(self, scores: Iterable[float], lengths: Iterable[int] = ()) -> None:
        """Count finished episodes in order."""
        self.lengths.extend(lengths)
        for score in scores:
            self.episodes += 1
            self.last.append(score)
            if self.full:
                now = self.mean
                self.best_mean, self._unseen = max(self.best_mean, now), max(self._unseen, now)

    @property
    def mean(self) -> float:
        """Mean score of the last 100 episodes (of fewer at first, NaN without any)."""
        return mean(self.last)

    @property
    def last_score(self) -> float:
        """Score of the last episode (NaN without any)."""
        return self.last[-1] if self.last else math.nan

    @property
    def full(self) -> bool:
        """True once 100 episodes are finished."""
        return len(self.last) == WINDOW

    def meets(self, target: float) -> bool:
        """True once a mean of 100 episodes was at `target` or above; later episodes do not undo it.

        What came before a state that was loaded does not count: a resumed run may have set another target.
        """
        if self._unseen >= target:
            self.reached = max(self.reached, self._unseen)
        self._forget_means()
        return self.reached >= target

    def _forget_means(self) -> None:
        """Leave `meets` the present mean alone."""
        self._unseen = self.mean if self.full else -math.inf

    def metrics(self) -> dict[str, float]:
        """The metrics of finished episodes."""
        return {
            "episodes": self.episodes,
            "reward": self.last_score,
            "reward_100": self.mean,
            "best_reward_100": self.best_mean,
            "length_100": sum(self.lengths) / len(self.lengths) if self.lengths else math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "episodes": self.episodes,
            "last": list(self.last),
            "lengths": list(self.lengths),
            "best_mean": self.best_mean,
            "reached": self.reached,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.episodes, self.best_mean = int(state["episodes"]), float(state["best_mean"])
        self.reached = float(state["reached"])
        self.last = deque(map(float, state["last"]), maxlen=WINDOW)
        self.lengths = deque(map(int, state.get("lengths", ())), maxlen=WINDOW)  # none in checkpoints of 0.4.0
        self._forget_means()


class StageTimer:
    """Measures wall time: of the whole run, and of its stages since the last row of metrics. Counts decisions."""

    def __init__(self) -> None:
        self.start()

    def start(self, seconds: float = 0.0, env_steps: int = 0) -> None:
        """Measure from now on; `seconds` and `env_steps`: of the earlier sessions of a resumed run."""
        self._started = time.perf_counter() - seconds
        self.begin_row(env_steps)

    @property
    def seconds(self) -> float:
        """Wall time of training in seconds, earlier sessions included."""
        return time.perf_counter() - self._started

    @property
    def row_seconds(self) -> float:
        """Wall time since the last row in seconds."""
        return time.perf_counter() - self._row_began

    def begin_row(self, env_steps: int) -> None:
        """Start the measurements of the next row, which begins at `env_steps`."""
        self._row_began, self.env_steps, self.row_steps = time.perf_counter(), env_steps, env_steps
        self.spent = {"env": 0.0, "act": 0.0, "learn": 0.0}

    def add(self, seconds: dict[str, float], env_steps: int = 0) -> None:
        """Add wall time by stage, as training steps return it, and decisions."""
        self.env_steps += env_steps
        for stage, spent in seconds.items():
            self.spent[stage] += spent

    def metrics(self) -> dict[str, float]:
        """The metrics of wall time: speed and shares are since the last row."""
        elapsed = self.row_seconds
        shares = {f"share_{stage}": spent / elapsed for stage, spent in self.spent.items()}
        return {"seconds": self.seconds, "speed": (self.env_steps - self.row_steps) / elapsed, **shares}
