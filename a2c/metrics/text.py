"""Numbers and durations as text."""

from __future__ import annotations

import math


def format_number(value: float) -> str:
    """A number as text from which `float` reads the same number; whole numbers without a point."""
    whole = float(value).is_integer() and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


def format_score(value: float) -> str:
    """A mean score with one decimal, a very large one with three digits; a dash if it is NaN or infinite."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.1f}" if abs(value) < 1e15 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """h:mm:ss; a dash if `seconds` is NaN or infinite."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(max(seconds, 0))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
