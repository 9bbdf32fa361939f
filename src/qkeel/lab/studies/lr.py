"""The learning-rate study: which remedies widen the range of rates that train well, and at what cost."""

from __future__ import annotations

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import Grid, Plan, parts

DEFAULT = Grid(remedies=("none", "qk_norm", "lalr:tau=0.1"), lrs=(0.01, 0.03, 0.1, 0.3), seeds=(0, 1, 2))


def plan(base: RunConfig, grid: Grid | None) -> Plan:
    """Remedies × rates × seeds.

    Source: Wortsman et al. 2023, arXiv 2309.14322, who sweep the peak rate over three decades.
    """
    grid = grid or DEFAULT
    return Plan(name="lr", grid=grid, runs=parts(base, grid))
