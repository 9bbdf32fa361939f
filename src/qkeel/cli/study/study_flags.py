"""Flags that several studies share: how they are run, and what they are a product of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Annotated, Any

from cyclopts import Parameter

from qkeel.cli.flags import Settings, view
from qkeel.errors import unknown
from qkeel.lab.plan.plan import FULL_GRID, Grid
from qkeel.lab.studies.lr import DEFAULT

FLAT = Parameter(name="*")
SWITCH = Parameter(negative=(), show_default=False)
SEVERAL = Parameter(consume_multiple=True, negative_iterable=(), show_default=False, group="Grid")
ONE = Parameter(show_default=False, group="Grid")
# What the axes of every study say, so that it is no flag of the single runs.
AXES = {("", "remedy"), ("", "seed"), ("optim", "lr")}
_REQUIRED = ("remedies", "lrs", "seeds")

BaseFlags: Any = view("BaseFlags", without=AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowFlags:
    """The options of a study's execution; nothing here changes a number."""

    jobs: Annotated[int | None, Parameter(show_default=False)] = None
    """Processes at once, each with a run or a stack of runs [default: the number of cores, at most 4]."""
    stack: Annotated[str, Parameter(show_default=False)] = "auto"
    """Train runs that differ in rate and seed only as one model: auto, for small models, off, or how many."""
    shard: Annotated[str | None, Parameter(show_default=False)] = None
    """Do only the i-th of n parts, as i/n: one for each machine or array task, all in one directory."""
    dry_run: Annotated[bool, SWITCH] = False
    """Only say what would be run, and for about how long."""
    fail_on_collapse: Annotated[bool, SWITCH] = False
    """Exit with code 3 if attention collapsed in a run or its loss is NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisFlags:
    """The axes that a study is a product of."""

    remedies: Annotated[list[str] | None, SEVERAL] = None
    """Remedies as spec strings."""
    lrs: Annotated[list[float] | None, SEVERAL] = None
    """Peak learning rates."""
    seeds: Annotated[list[int] | None, SEVERAL] = None
    """Seeds of weights and batches [default: 0 1 2]."""
    full_grid: Annotated[bool, Parameter(negative=(), show_default=False, group="Grid")] = False
    """Seven rates over three decades, 0.0003 to 0.3."""

    def grid(self, recipe: Settings, default: Grid = DEFAULT) -> Grid:
        """Returns the grid: these flags over a recipe's [study] table over the default."""
        axes = dataclasses.asdict(default)
        known = {name: values for name, values in axes.items() if name in _REQUIRED or values}
        refuse_unknown(recipe, known)
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in known and value}
        values = {**known, **{name: value for name, value in recipe.items() if value}, **given}
        return Grid(**{**values, "lrs": FULL_GRID} if self.full_grid else values)


def refuse_unknown(recipe: Settings, known: Collection[str]) -> None:
    """Raises UnknownNameError for a key of a recipe's [study] table that the study does not know."""
    for key in recipe:
        if key not in known:
            raise unknown("key in [study]", key, known)
