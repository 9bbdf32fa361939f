"""`qkeel study` and `qkeel demo`: many runs, one table, one report. Each study says which options its command has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qkeel.cli.flags import Flag, Settings, configure, starting, view
from qkeel.errors import check_known
from qkeel.lab.plan import Option, Study
from qkeel.lab.studies import STUDIES, find_study

_FLAT = Parameter(name="*")
_SWITCH = Parameter(negative=(), show_default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowFlags:
    """The options of a study's execution; nothing here changes a number."""

    jobs: Annotated[int | None, Parameter(show_default=False)] = None
    """Processes at once, each with a run or a stack of runs [default: the number of cores, at most 4; of a cluster all
    it has]."""
    executor: Annotated[str, Parameter(show_default=False)] = "local"
    """Where the runs are done: local, ray, dask or slurm, with options as slurm:partition=gpu,time=60."""
    stack: Annotated[str, Parameter(show_default=False)] = "auto"
    """Train runs that differ in seed, steps and rates only as one model: auto, for small models, off, or how many."""
    shard: Annotated[str | None, Parameter(show_default=False)] = None
    """Do only the i-th of n parts, as i/n: one for each machine or array task, all in one directory."""
    dry_run: Annotated[bool, _SWITCH] = False
    """Only say what would be run, and for about how long."""
    baseline: Annotated[str, Parameter(show_default=False)] = "none"
    """The remedy that the report compares the others with, like qk_norm [default: none]."""
    fail_on_collapse: Annotated[bool, _SWITCH] = False
    """Exit with code 3 if attention collapsed in a run or its loss is NaN."""


def __getattr__(name: str) -> Callable[..., int]:
    """Makes the command of a study when it is asked for by the study's name."""
    if name not in STUDIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return study_command(name)


def study_command(name: str) -> Callable[..., int]:
    """Returns the function behind the command of a study: its parameters are the flags."""
    study = find_study(name)
    options = [*study.options, *(Option(switch, bool, other.help) for switch, other in study.instead.items())]
    without = {("", "remedy"), ("", "seed"), *study.decides}
    flags: Any = view(without=without, more=map(_flag, options), several=study.axes)

    def command(
        *,
        out: Path = Path(study.out or f"runs/{name}"),
        recipe: Path | None = None,
        how: Annotated[HowFlags, _FLAT] = HowFlags(),
        flags: object = flags(),
    ) -> int:
        names = (*(option.name for option in options), *study.axes)
        given = {name: value for name in names if (value := vars(flags)[name]) is not None}
        asked = next((other for switch, other in study.instead.items() if given.get(switch)), study)
        config, table = configure(flags, recipe, asked.base or starting(flags))
        _check_table(table, study)
        from qkeel.cli.studies.run_study import run_study  # loads torch, which --help does not wait for

        return run_study(name, *study.request(config, asked.grid, {**table, **given}), out=out, how=how)

    command.__annotations__ |= {"flags": Annotated[flags, _FLAT]}
    command.__doc__ = f"""{STUDIES[name][1]}

    {study.help}

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the options of the study; flags go over it.
    """
    return command


def _flag(option: Option) -> Flag:
    """Name, type and help of the flag of a study's option."""
    shown = Parameter(
        help=option.about,
        show_default=False,
        group="Grid",
        consume_multiple=option.kind not in (int, float, str, bool),
        negative_iterable=(),
        negative=() if option.kind is bool else None,
    )
    return option.name, option.kind, shown


def _check_table(table: Settings, study: Study) -> None:
    """Raises UnknownNameError for a key of a recipe's [study] table that the study does not know."""
    known = [*(option.name for option in study.options if option.kind is not bool), *study.axes]
    for key in table:
        check_known("key in [study]", key, known)
