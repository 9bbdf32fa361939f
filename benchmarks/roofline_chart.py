"""The picture of a roofline: python -m benchmarks.roofline_chart RESULTS.json PICTURE.svg"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 560, 48, 300, 30, 46
COLOURS = ("#c2410c", "#0f766e", "#1d4ed8", "#7c3aed", "#a16207", "#be185d", "#4d7c0f")
STYLE = (
    "text{font:11px sans-serif;fill:#444}.roof{fill:none;stroke:#555;stroke-width:1.4}"
    ".grid{stroke:#8883;stroke-width:1}.small{font-size:10px}"
)


class Axes:
    """Logarithmic axes: flops per byte against GFLOP/s, wide enough for every point and roof."""

    def __init__(self, found: dict[str, Any]) -> None:
        across = [at["flops"] / at["bytes"] for at in found["operators"]]
        up = [speed(at) for at in found["operators"]] + [found["flops_per_second"] / 1e9]
        self.x = math.floor(math.log10(min(across))), math.ceil(math.log10(max(across)))
        self.y = math.floor(math.log10(min(up))), math.ceil(math.log10(max(up)))

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / max(1, high - low)

    def up(self, value: float) -> float:
        low, high = self.y
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / max(1, high - low)


def speed(at: dict[str, Any]) -> float:
    """GFLOP/s of the operations counted, at the median time."""
    return at["flops"] / at["cpu_ms"][1] / 1e6


def chart(found: dict[str, Any]) -> str:
    """The whole picture as SVG."""
    axes = Axes(found)
    parts = [*_grid(axes), *_roofs(axes, found), *_points(axes, found)]
    title = f"Roofline: {found['about']['machine']}, torch {found['about']['torch']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _grid(axes: Axes) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(axes.x[0], axes.x[1] + 1):
        x = axes.across(10.0**power)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}</text>'
    for power in range(axes.y[0], axes.y[1] + 1):
        y = axes.up(10.0**power)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    below = "floating-point operations per byte, of each the least there can be"
    yield f'<text x="{LEFT}" y="{HEIGHT - 10}">{below}</text>'
    yield f'<text x="{LEFT}" y="18">GFLOP/s of the operations counted</text>'


def _roofs(axes: Axes, found: dict[str, Any]) -> Iterator[str]:
    peak, low, rates = found["flops_per_second"] / 1e9, axes.x[0], found["bytes_per_second"]
    roofs = [(f"copy in {level}", rate, "") for level, rate in rates["copy"].items()]
    roofs.append(("in place in memory (dashed)", rates["in place"]["memory"], ' stroke-dasharray="5 4"'))
    roofs.sort(key=lambda roof: -roof[1])
    for _, rate, dashes in roofs:
        bandwidth, floor = rate / 1e9, 10.0 ** axes.y[0]
        start, bend = max(10.0**low, floor / bandwidth), min(peak / bandwidth, 10.0 ** axes.x[1])
        line = f"M{axes.across(start):.1f} {axes.up(start * bandwidth):.1f}"
        line += f"L{axes.across(bend):.1f} {axes.up(bend * bandwidth):.1f}"
        yield f'<path class="roof"{dashes} d="{line}H{WIDTH - RIGHT}"/>'
    key, last = WIDTH - RIGHT + 9, HEIGHT - BOTTOM - 15 * (len(roofs) + 1)
    yield f'<text x="{key}" y="{last}">roofs, from the left:</text>'
    for i, (name, rate, _) in enumerate(roofs, start=1):
        yield f'<text x="{key}" y="{last + 15 * i}">{escape(name)}, {rate / 1e9:.0f} GB/s</text>'
    yield f'<text x="{key}" y="{last + 15 * len(roofs) + 15}">and above: sgemm, {peak:.0f} GFLOP/s</text>'


def _points(axes: Axes, found: dict[str, Any]) -> Iterator[str]:
    kinds = list(dict.fromkeys(at["kind"] for at in found["operators"]))
    for i, at in enumerate(found["operators"]):
        colour = COLOURS[kinds.index(at["kind"]) % len(COLOURS)]
        x, y, line = axes.across(at["flops"] / at["bytes"]), axes.up(speed(at)), TOP + 6 + 19 * i
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{colour}" fill-opacity="0.85"/>'
        yield f'<text class="small" x="{x:.1f}" y="{y + 3.5:.1f}" text-anchor="middle" style="fill:#fff">{i + 1}</text>'
        key = WIDTH - RIGHT + 16
        yield f'<circle cx="{key}" cy="{line}" r="7" fill="{colour}" fill-opacity="0.85"/>'
        yield f'<text class="small" x="{key}" y="{line + 3.5}" text-anchor="middle" style="fill:#fff">{i + 1}</text>'
        yield f'<text x="{key + 13}" y="{line + 4}">{escape(at["name"])}: {at["share"]:.0%} of its roof</text>'


def main() -> None:
    """Read results, write the picture."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(chart(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
