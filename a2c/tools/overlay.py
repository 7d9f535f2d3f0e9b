"""What a policy thinks, drawn beside the picture that it sees: its value estimate and its action probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from a2c.tools.video_writers import enlarge

PANEL, PLOT, ROW, MARGIN, LETTERS = 250, 96, 15, 10, 12  # pixels, where the picture is `HEIGHT` high
HEIGHT = 420
HISTORY = 150  # decisions in the plot of the value, about 10 seconds of a game
BACK, FRAME, TEXT, SCALE, LINE, BAR, CHOSEN = (
    "#16181d",
    "#3a3f4b",
    "#e6e6e6",
    "#8f96a3",
    "#ffb454",
    "#4f81bd",
    "#7fd962",
)


class Thought(NamedTuple):
    """What the policy made of one observation."""

    value: float  # V(obs)
    probabilities: np.ndarray  # [A]
    action: int  # the one that was taken


class Overlay:
    """Draws the panel of one episode. `names`: one per action; `width`: pixels that a picture is enlarged to."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        self.names, self.width = names, width
        self.values: deque[float] = deque(maxlen=HISTORY)
        self.low, self.high = np.inf, -np.inf  # of all values so far

    def draw(self, picture: np.ndarray, score: float, thought: Thought | None) -> np.ndarray:
        """The enlarged picture with the panel at its right, `[H, W, 3]`; no `thought`: the episode is over."""
        picture = enlarge(picture, self.width)
        unit = float(np.clip(picture.shape[0] / HEIGHT, 1, 3))
        panel = self._panel(unit, picture.shape[0])
        if thought:
            self.values.append(thought.value)
            self.low, self.high = min(self.low, thought.value), max(self.high, thought.value)
        pen = _Pen(panel, unit)
        pen.text(MARGIN, MARGIN, f"score {score:g}")
        self._draw_values(pen, MARGIN + 2 * ROW, thought)
        self._draw_actions(pen, MARGIN + 4 * ROW + PLOT, thought)
        rows = panel.height - picture.shape[0]
        few_colours = np.asarray(panel) & 0xF0  # a smaller file: the edges of letters have many
        return np.hstack([np.pad(picture, ((0, rows), (0, 0), (0, 0))), few_colours])

    def _panel(self, unit: float, height: int) -> Image.Image:
        needed = 2 * MARGIN + (5 + len(self.names)) * ROW + PLOT
        return Image.new("RGB", (round(PANEL * unit), max(height, round(needed * unit))), BACK)

    def _draw_values(self, pen: _Pen, top: float, thought: Thought | None) -> None:
        pen.text(MARGIN, top, f"value {thought.value:.2f}" if thought else "value")
        pen.text(MARGIN + 110, top, f"{self.low:.2f} to {self.high:.2f}", SCALE)
        top, width = top + 1.2 * ROW, PANEL - 2 * MARGIN
        pen.box(MARGIN, top, width, PLOT, outline=FRAME)
        span = max(self.high - self.low, 1e-6)
        points = [
            (MARGIN + width * i / (HISTORY - 1), top + 4 + (PLOT - 8) * (self.high - value) / span)
            for i, value in enumerate(self.values)
        ]
        pen.line(points)

    def _draw_actions(self, pen: _Pen, top: float, thought: Thought | None) -> None:
        left, most = MARGIN + 96, PANEL - 2 * MARGIN - 96 - 40
        for i, name in enumerate(self.names):
            y = top + i * ROW
            probability = float(thought.probabilities[i]) if thought else 0.0
            chosen = thought is not None and i == thought.action
            pen.text(MARGIN, y, name, CHOSEN if chosen else TEXT)
            pen.box(left, y + 3, most, ROW - 5, outline=FRAME)
            pen.box(left, y + 3, most * probability, ROW - 5, fill=CHOSEN if chosen else BAR)
            if thought:
                pen.text(left + most + 5, y, f"{100 * probability:.0f} %", CHOSEN if chosen else TEXT)


class _Pen:
    """Draws in units of the panel, which are `unit` pixels long."""

    def __init__(self, image: Image.Image, unit: float) -> None:
        self.pen, self.unit = ImageDraw.Draw(image), unit
        self.font = ImageFont.load_default(LETTERS * unit)

    def text(self, x: float, y: float, text: str, colour: str = TEXT) -> None:
        self.pen.text((x * self.unit, y * self.unit), text, colour, self.font)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str | None = None, outline: str | None = None
    ) -> None:
        if round(width * self.unit) > 0:
            corners = (x, y, x + width, y + height)
            self.pen.rectangle([round(corner * self.unit) for corner in corners], fill, outline)

    def line(self, points: Sequence[tuple[float, float]]) -> None:
        pixels = [(x * self.unit, y * self.unit) for x, y in points]
        if len(pixels) > 1:
            self.pen.line(pixels, LINE, round(2 * self.unit))
