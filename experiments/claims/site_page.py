"""The page docs/what-we-found.md: a chart of the verdicts, and a section for each study."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.claims.judge import (
    HERE,
    LOOKS,
    VERDICTS,
    Judged,
    Results,
    counted,
    fewer_seeds,
    judge,
    verdicts,
)
from experiments.claims.studies import SEEDS, STUDIES
from experiments.claims.table import CLAIMS, SECTIONS

SITE = HERE.parents[1] / "docs" / "what-we-found.md"


def site_page(results: Results) -> str:
    """The text of docs/what-we-found.md."""
    judged = judge(results)
    place = {id(one.claim): one for one in judged}
    spent = sum(
        results[study].get("cpu_seconds", 0) for study in STUDIES if study in results
    )
    return (
        (HERE / "found.md")
        .read_text(encoding="utf-8")
        .format(
            counted=counted([place[id(claim)] for claim in CLAIMS]),
            chart=_chart(place),
            looks=LOOKS,
            seeds=SEEDS,
            fewer=fewer_seeds(),
            studies=len(STUDIES),
            minutes=round(spent / 60),
        )
    )


def _chart(place: Mapping[int, Judged]) -> str:
    """A bar for each section, its parts as wide as their verdicts are many; the numbers stand in the parts."""
    rows = []
    for heading, claims in SECTIONS.items():
        parts = "".join(
            _part(name, n) for name, n in verdicts(claims, place).items() if n
        )
        rows.append(
            f'<tr><th scope="row">{heading}</th><td><div class="verdicts">{parts}</div></td></tr>'
        )
    legend = " ".join(
        f'<span class="verdict-key {name}">{name}</span>' for name in VERDICTS
    )
    return "\n".join(
        (
            '<table class="verdict-chart">',
            f"<caption>Verdicts by section: {legend}</caption>",
            *rows,
            "</table>",
        )
    )


def _part(name: str, n: int) -> str:
    return f'<span class="{name}" style="flex-grow: {n}" title="{n} {name}">{n}</span>'
