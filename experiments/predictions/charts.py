"""The pictures of the pages, as SVG."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import final
from xml.sax.saxutils import escape

from benchmarks.charts import COLOURS, picture

STYLE = (
    "text{font:13px sans-serif;fill:#334155}.title{font-weight:600}path{fill:none;stroke-width:2}"
    ".grid{stroke:#e2e8f0;stroke-width:1}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 530, 40, 350
Point = tuple[float, float]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis with a logarithmic or linear scale: its name and the numbers that stand at it, the ends among them."""

    name: str
    ticks: Sequence[float]
    log: bool = True

    def share(self, value: float) -> float:
        """Where a value stands, 0 to 1; what lies outside stands at the end."""
        low, high, own = (math.log(v) if self.log else v for v in (self.ticks[0], self.ticks[-1], value))
        return min(1.0, max(0.0, (own - low) / (high - low)))


def chart(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]], line: bool = True) -> str:
    """Returns a chart of one curve per series, or with `line` false of its points and the diagonal.

    Args:
        title: over it. x, y: the axes. series: points by name, drawn in the order of the names. line: whether the
            points of a series are joined.
    """
    parts = [f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>', *_frame(x, y)]
    if not line:
        parts.append(f'<path class="grid" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}"/>')
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        again = i >= len(COLOURS)  # a colour's second series is dashed, its points are hollow
        dot = f'fill="{"#fff" if again else colour}" stroke="{colour}"'
        places = [(_across(x, a), _up(y, b)) for a, b in points]
        if line:
            dashes = ' stroke-dasharray="5 4"' if again else ""
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            parts.append(f'<path d="M{path}" stroke="{colour}"{dashes}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" {dot}/>' for a, b in places]
        parts.append(f'<circle cx="{RIGHT + 22}" cy="{TOP + 22 * i + 6}" r="5" {dot}/>')
        parts.append(f'<text x="{RIGHT + 34}" y="{TOP + 22 * i + 10}">{escape(name)}</text>')
    return picture(WIDTH, HEIGHT, title, STYLE, "".join(parts))


def _across(axis: Axis, value: float) -> float:
    return LEFT + (RIGHT - LEFT) * axis.share(value)


def _up(axis: Axis, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * axis.share(value)


def _frame(x: Axis, y: Axis) -> list[str]:
    """Ticks, lines at them, and the names of the axes."""
    parts = []
    for value in x.ticks:
        at = _across(x, value)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in y.ticks:
        at = _up(y, value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}" text-anchor="middle">{escape(x.name)}</text>')
    parts.append(f'<text transform="rotate(-90 16 {TOP})" x="16" y="{TOP}" text-anchor="end">{escape(y.name)}</text>')
    return parts
