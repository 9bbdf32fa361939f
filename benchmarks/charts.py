"""The pictures of the docs, as SVG: operators under their roofs, and each remedy of a study next to `none`.

    python -m benchmarks.charts RESULTS.json PICTURE.svg
    python -m benchmarks.charts STUDY docs/images/remedies

RESULTS.json is of `python -m benchmarks.roofline`; the study is of `qkeel study lr --lrs 0.1 --seeds 0 1 --remedies …`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Curve = list[tuple[int, float]]
Curves = dict[str, list[dict[str, Curve]]]  # per remedy, per seed, per field
FIELDS = {"max_logit": "largest logit, nats", "train_loss": "training loss, nats"}
COLOURS = ("#c2410c", "#0f766e", "#1d4ed8", "#7c3aed", "#a16207", "#be185d", "#4d7c0f")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A drawing area, and the range of whole numbers that each axis shows in it."""

    left: int
    right: int
    top: int
    bottom: int
    x: tuple[int, int]
    y: tuple[int, int]

    def across(self, value: float) -> float:
        low, high = self.x
        return self.left + (self.right - self.left) * (value - low) / max(1, high - low)

    def up(self, value: float) -> float:
        low, high = self.y
        return self.top + (self.bottom - self.top) * (high - value) / max(1, high - low)


def span(values: Iterable[float]) -> tuple[int, int]:
    """The whole numbers around these; 0 and 1 around none."""
    found = list(values)
    return (math.floor(min(found)), math.ceil(max(found))) if found else (0, 1)


def picture(width: int, height: int, title: str, style: str, body: str) -> str:
    """The whole picture as SVG."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def roofline(found: dict[str, Any]) -> str:
    """Operators under the measured peaks: flops per byte against GFLOP/s, both axes logarithmic."""
    up = [_speed(at) for at in found["operators"]] + [found["flops_per_second"] / 1e9]
    axes = Axes(
        left=48,
        right=560,
        top=30,
        bottom=514,
        x=span(math.log10(at["flops"] / at["bytes"]) for at in found["operators"]),
        y=span(map(math.log10, up)),
    )
    style = "text{font:11px sans-serif;fill:#444}.roof{fill:none;stroke:#555;stroke-width:1.4}"
    style += ".grid{stroke:#8883;stroke-width:1}.small{font-size:10px}"
    title = f"Roofline: {found['about']['machine']}, torch {found['about']['torch']}"
    return picture(860, 560, title, style, "".join([*_grid(axes), *_roofs(axes, found), *_points(axes, found)]))


def _speed(at: dict[str, Any]) -> float:
    """GFLOP/s of the operations counted, at the median time."""
    return at["flops"] / at["cpu_ms"][1] / 1e6


def _grid(axes: Axes) -> Iterator[str]:
    for power in range(axes.x[0], axes.x[1] + 1):
        x = axes.across(power)
        yield f'<path class="grid" d="M{x:.1f} {axes.top}V{axes.bottom}"/>'
        yield f'<text x="{x:.1f}" y="{axes.bottom + 16}" text-anchor="middle">{10.0**power:g}</text>'
    for power in range(axes.y[0], axes.y[1] + 1):
        y = axes.up(power)
        yield f'<path class="grid" d="M{axes.left} {y:.1f}H{axes.right}"/>'
        yield f'<text x="{axes.left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    below = "floating-point operations per byte, of each the least there can be"
    yield f'<text x="{axes.left}" y="{axes.bottom + 36}">{below}</text>'
    yield f'<text x="{axes.left}" y="18">GFLOP/s of the operations counted</text>'


def _roofs(axes: Axes, found: dict[str, Any]) -> Iterator[str]:
    peak, rates = math.log10(found["flops_per_second"] / 1e9), found["bytes_per_second"]
    roofs = [(f"copy in {level}", rate, "") for level, rate in rates["copy"].items()]
    roofs.append(("in place in memory (dashed)", rates["in place"]["memory"], ' stroke-dasharray="5 4"'))
    roofs.sort(key=lambda roof: -roof[1])
    for _, rate, dashes in roofs:
        bandwidth = math.log10(rate / 1e9)
        start, bend = max(axes.x[0], axes.y[0] - bandwidth), min(peak - bandwidth, axes.x[1])
        line = f"M{axes.across(start):.1f} {axes.up(start + bandwidth):.1f}"
        line += f"L{axes.across(bend):.1f} {axes.up(bend + bandwidth):.1f}"
        yield f'<path class="roof"{dashes} d="{line}H{axes.right}"/>'
    words = ["roofs, from the left:", *(f"{escape(name)}, {rate / 1e9:.0f} GB/s" for name, rate, _ in roofs)]
    words.append(f"and above: sgemm, {10**peak:.0f} GFLOP/s")
    for i, text in enumerate(words, start=1):
        yield f'<text x="{axes.right + 9}" y="{axes.bottom + 15 * (i - len(words))}">{text}</text>'


def _points(axes: Axes, found: dict[str, Any]) -> Iterator[str]:
    kinds = list(dict.fromkeys(at["kind"] for at in found["operators"]))
    for i, at in enumerate(found["operators"]):
        colour, line = COLOURS[kinds.index(at["kind"]) % len(COLOURS)], axes.top + 6 + 19 * i
        x, y = axes.across(math.log10(at["flops"] / at["bytes"])), axes.up(math.log10(_speed(at)))
        for cx, cy in ((x, y), (axes.right + 16, line)):
            yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="7" fill="{colour}" fill-opacity="0.85"/>'
            middle = f'x="{cx:.1f}" y="{cy + 3.5:.1f}" text-anchor="middle"'
            yield f'<text class="small" {middle} style="fill:#fff">{i + 1}</text>'
        yield f'<text x="{axes.right + 29}" y="{line + 4}">{escape(at["name"])}: {at["share"]:.0%} of its roof</text>'


def read_curves(study: Path) -> Curves:
    """The records of every finished run."""
    found: Curves = {}
    for done in sorted(study.glob("runs/*/DONE")):
        config = json.loads((done.parent / "config.json").read_text())
        rows = [json.loads(line) for line in (done.parent / "metrics.jsonl").read_text().splitlines()]
        run = {f: [(r["step"], r[f]) for r in rows if r.get(f) is not None and math.isfinite(r[f])] for f in FIELDS}
        found.setdefault(config["remedy"], []).append(run)
    return found


def remedy_chart(remedy: str, curves: Curves) -> str:
    """Largest logit and loss over the steps of a remedy's runs, `none` in grey."""
    panels = [f'<g transform="translate({360 * i} 0)">{_panel(f, remedy, curves)}</g>' for i, f in enumerate(FIELDS)]
    style = "text{font:11px sans-serif;fill:#555}path{fill:none;stroke-width:1.6}.grid{stroke:#8884;stroke-width:1}"
    return picture(720, 200, f"{remedy} and none at a learning rate of 0.1", style, "".join(panels))


def _panel(field: str, remedy: str, curves: Curves) -> str:
    """Curves of one field: a logarithmic axis for logits, where those under 0.01 are drawn there; a plain one else."""
    logarithmic = field == "max_logit"
    scaled: list[tuple[str, Sequence[tuple[int, float]]]] = [
        (name, [(t, math.log10(max(y, 0.01)) if logarithmic else y) for t, y in run[field]])
        for name in ("none", remedy)
        for run in curves.get(name, [])
    ]
    last = max((t for _, curve in scaled for t, _ in curve), default=1)
    heights = span(y for _, curve in scaled for _, y in curve)
    axes = Axes(left=52, right=348, top=28, bottom=170, x=(0, last), y=heights)
    parts = [f'<text x="52" y="16">{FIELDS[field]}: <tspan fill="#c2410c">{remedy}</tspan>, none in grey</text>']
    for tick in range(heights[0], heights[1] + 1):
        label = f"{10.0**tick:g}" if logarithmic else str(tick)
        parts.append(f'<path class="grid" d="M52 {axes.up(tick):.1f}H348"/>')
        parts.append(f'<text x="46" y="{axes.up(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in (0, last // 2, last):
        parts.append(f'<text x="{axes.across(tick):.1f}" y="190" text-anchor="middle">{tick}</text>')
    for name, curve in scaled:
        line = "L".join(f"{axes.across(t):.1f} {axes.up(v):.1f}" for t, v in curve)
        parts.append(f'<path stroke="{"#9ca3af" if name == "none" else "#c2410c"}" d="M{line}"/>')
    return "".join(parts)


def main() -> None:
    """Reads results or a study, writes the picture or a folder of them."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    if source.is_file():
        pictures = {out: roofline(json.loads(source.read_text()))}
    else:
        curves = read_curves(source)
        named = {remedy: remedy.replace(":", "-").replace("=", "-") for remedy in curves if remedy != "none"}
        pictures = {out / f"{name}.svg": remedy_chart(remedy, curves) for remedy, name in named.items()}
    for path, text in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
