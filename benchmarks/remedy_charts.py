"""One chart per remedy for docs/remedies.md: largest logit and loss over the steps of a study's runs, `none` in grey.

qkeel study lr --out STUDY --lrs 0.1 --seeds 0 1 --remedies none qk_norm softcap …
python -m benchmarks.remedy_charts STUDY docs/images/remedies
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

Curve = list[tuple[int, float]]
Curves = dict[str, list[dict[str, Curve]]]  # per remedy, per seed, per field
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 200, 52, 12, 28, 30
FIELDS = {"max_logit": "largest logit, nats", "train_loss": "training loss, nats"}


def main() -> None:
    """Read a study and write its charts."""
    study, out = Path(sys.argv[1]), Path(sys.argv[2])
    curves = read(study)
    out.mkdir(parents=True, exist_ok=True)
    for remedy in curves:
        if remedy != "none":
            (out / f"{remedy.replace(':', '-').replace('=', '-')}.svg").write_text(chart(remedy, curves))


def read(study: Path) -> Curves:
    """The records of every finished run."""
    found: Curves = {}
    for done in sorted(study.glob("runs/*/DONE")):
        config = json.loads((done.parent / "config.json").read_text())
        rows = [json.loads(line) for line in (done.parent / "metrics.jsonl").read_text().splitlines()]
        run = {f: [(r["step"], r[f]) for r in rows if r.get(f) is not None and math.isfinite(r[f])] for f in FIELDS}
        found.setdefault(config["remedy"], []).append(run)
    return found


def chart(remedy: str, curves: Curves) -> str:
    """Two panels side by side, as SVG."""
    panels = "".join(
        f'<g transform="translate({i * WIDTH} 0)">{panel(field, title, remedy, curves)}</g>'
        for i, (field, title) in enumerate(FIELDS.items())
    )
    style = "text{font:11px sans-serif;fill:#555}path{fill:none;stroke-width:1.6}.grid{stroke:#8884;stroke-width:1}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" role="img">'
        f"<title>{remedy} and none at a learning rate of 0.1</title><style>{style}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{panels}</svg>\n'
    )


def panel(field: str, title: str, remedy: str, curves: Curves) -> str:
    """Curves of one field: a logarithmic axis for logits, a plain one for the loss."""
    logarithmic = field == "max_logit"
    runs = [(name, run[field]) for name in ("none", remedy) for run in curves.get(name, [])]
    scaled = [(name, [(t, height(y, logarithmic)) for t, y in curve]) for name, curve in runs]
    ys = [y for _, curve in scaled for _, y in curve]
    low, high = (math.floor(min(ys)), math.ceil(max(ys))) if ys else (0, 1)
    last = max((t for _, curve in scaled for t, _ in curve), default=1)

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / last

    def y(v: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - v) / max(1, high - low)

    parts = [f'<text x="{LEFT}" y="16">{title}: <tspan fill="#c2410c">{remedy}</tspan>, none in grey</text>']
    for tick in range(low, high + 1):
        label = f"{10.0**tick:g}" if logarithmic else str(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in (0, last // 2, last):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{tick}</text>')
    for name, curve in scaled:
        line = "L".join(f"{x(t):.1f} {y(v):.1f}" for t, v in curve)
        parts.append(f'<path stroke="{"#9ca3af" if name == "none" else "#c2410c"}" d="M{line}"/>')
    return "".join(parts)


def height(value: float, logarithmic: bool) -> float:
    """Returns the height of a value; logits under 0.01 are drawn there, since a logarithm has no zero."""
    return math.log10(max(value, 0.01)) if logarithmic else value


if __name__ == "__main__":
    main()
