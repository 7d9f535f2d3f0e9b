"""The results of a run, read from its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from a2c.metrics.files import read_table
from a2c.metrics.meters import EPISODE_COLUMNS, WINDOW, mean

EVALUATION_COLUMNS = ("env_steps", "episodes", "mean", "standard_deviation", "min", "max")  # of evaluations.csv
RESAMPLES = 10_000  # of the bootstrap intervals
RESAMPLES_OF_CURVES = 2_000  # of those with many points


def read_episodes(run_dir: Path) -> dict[str, np.ndarray]:
    """Columns of episodes.csv as float arrays, one entry per finished episode."""
    return read_table(run_dir / "episodes.csv", EPISODE_COLUMNS)


def read_finite_episodes(run_dir: Path) -> dict[str, np.ndarray]:
    """`read_episodes` without rows that hold NaN or infinite values."""
    return finite_rows(read_episodes(run_dir))


def read_evaluations(run_dir: Path) -> dict[str, np.ndarray]:
    """env_steps and mean score of the policies in evaluations.csv, without rows that hold NaN or infinite values.

    Empty arrays where there is no file.
    """
    try:
        return finite_rows(read_table(run_dir / "evaluations.csv", ("env_steps", "mean")))
    except FileNotFoundError:
        return {"env_steps": np.empty(0), "mean": np.empty(0)}


def finite_rows(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows whose values are all finite."""
    good = np.all([np.isfinite(values) for values in table.values()], axis=0)
    return {name: values[good] for name, values in table.items()}


def moving_mean(scores: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` scores at each episode (of fewer at the start), the same bits as `ScoreWindow.mean`."""
    if not (np.round(scores) == scores).all() or np.abs(scores).sum() > 2**53:  # differences of sums are not exact
        values = scores.tolist()
        return np.array([mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])
    sums = np.cumsum(np.insert(scores, 0, 0.0))
    ends = np.arange(1, len(scores) + 1)
    begins = np.maximum(ends - window, 0)
    means: np.ndarray = (sums[ends] - sums[begins]) / (ends - begins)
    return means


def first_passage(episodes: dict[str, np.ndarray], target: float, window: int = WINDOW) -> tuple[int, float] | None:
    """env_steps and seconds at the first episode where the mean of the last `window` reaches `target`, or None."""
    reached = np.flatnonzero(moving_mean(episodes["score"], window)[window - 1 :] >= target) + window - 1
    if not len(reached):
        return None
    return int(episodes["env_steps"][reached[0]]), float(episodes["seconds"][reached[0]])


def best_mean(episodes: dict[str, np.ndarray]) -> float:
    """The highest mean of `WINDOW` episodes, minus infinity where fewer are finished."""
    return float(moving_mean(episodes["score"])[WINDOW - 1 :].max(initial=-np.inf))


def median(values: np.ndarray) -> float:
    """The middle value, of an even number the mean of the two in the middle; infinite if one of these is."""
    return float(np.median(values))


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean `[...]` of `values [K, ...]` without the lowest and the highest quarter of the K (Agarwal et al., 2021).

    A quarter is rounded down, so that of fewer than four values none is left out.
    """
    cut = len(values) // 4
    means: np.ndarray = np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)
    return means


def interval_of_curves(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """95 % intervals `[points]` of a `statistic` over the K curves in `values [K, points]` (percentile bootstrap).

    `statistic` takes the first axis away. Every point has the same resamples of the curves. As `interval_of_median`,
    too narrow for few curves.
    """
    drawn = np.random.default_rng(0).integers(len(values), size=(len(values), RESAMPLES_OF_CURVES))
    found = [np.quantile(statistic(point[drawn]), (0.025, 0.975), method="inverted_cdf") for point in values.T]
    low, high = np.array(found).T
    return low, high


def interval_of_mean(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of `values [K]`. NaN for fewer than five values."""
    return interval_of_moments(float(values.mean()), float(values.std()), len(values))


def interval_of_moments(mean: float, std: float, count: float) -> tuple[float, float]:
    """95 % interval of a mean by Student's t. NaN for fewer than five values, or where their number is NaN.

    `std`: the root of the mean squared distance from `mean` of the `count` values. The quantile is Fisher and
    Cornish's expansion (1960) at 0.975, right to 0.01.
    """
    freedom = count - 1 if count >= 5 else math.nan
    t = 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.555 / freedom**3
    return mean - t * std / math.sqrt(freedom), mean + t * std / math.sqrt(freedom)


def interval_of_median(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the median of `values [K]` (percentile bootstrap, Efron & Tibshirani, 1993, section 13.3).

    It is too narrow for few values: all of K = 5 span the true median with a probability of 94 %.
    """
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975), method="inverted_cdf")  # one of them each, also infinite ones
    return float(low), float(high)
