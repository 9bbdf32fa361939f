"""A study from the command line: plan, progress, table, report, exit code."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from qkeel.cli.exits import COLLAPSED, FAILED, OK, command_line
from qkeel.errors import unknown
from qkeel.lab.config import RunConfig
from qkeel.lab.plan import AXES, FULL_GRID, Grid, LongContexts, Plan
from qkeel.lab.studies.lr import DEFAULT

_SWITCH = Parameter(negative=(), show_default=False)
_SEVERAL = Parameter(consume_multiple=True, negative_iterable=(), show_default=False, group="Grid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowFlags:
    """How a study is run; nothing here changes a number."""

    jobs: Annotated[int | None, Parameter(show_default=False)] = None
    """Processes at once, each with a run or a stack of runs [default: the number of cores, at most 4]."""
    stack: Annotated[str, Parameter(show_default=False)] = "auto"
    """Train runs that differ in rate and seed only as one model: auto, for small models, off, or how many."""
    shard: Annotated[str | None, Parameter(show_default=False)] = None
    """Do only the i-th of n parts, as i/n: one for each machine or array task, all in one directory."""
    dry_run: Annotated[bool, _SWITCH] = False
    """Only say what would be run, and for about how long."""
    fail_on_collapse: Annotated[bool, _SWITCH] = False
    """Exit with code 3 if attention collapsed in a run or its loss is NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisFlags:
    """What a study is a product of."""

    remedies: Annotated[list[str] | None, _SEVERAL] = None
    """Remedies as spec strings."""
    lrs: Annotated[list[float] | None, _SEVERAL] = None
    """Peak learning rates."""
    seeds: Annotated[list[int] | None, _SEVERAL] = None
    """Seeds of weights and batches [default: 0 1 2]."""
    full_grid: Annotated[bool, Parameter(negative=(), show_default=False, group="Grid")] = False
    """Seven rates over three decades, 0.0003 to 0.3."""

    def grid(self, recipe: Mapping[str, Any], default: Grid = DEFAULT) -> Grid:
        """The grid of these flags over those of a recipe's [study] table over the default."""
        names = [name for name in AXES if name in AXES[:3] or getattr(default, name)]
        for key in recipe:
            if key not in names:
                raise unknown("key in [study]", key, names)
        given = {name: getattr(self, name, None) or recipe.get(name) for name in names}
        values = {name: given[name] or getattr(default, name) for name in names}
        if self.full_grid:
            values["lrs"] = FULL_GRID
        return Grid(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartFlags:
    """Of which models and optimizers a study has a part each."""

    blocks: Annotated[list[Literal["mla", "mha"]] | None, _SEVERAL] = None
    """Attention: latent and multi-head [default: mla mha]."""
    optimizers: Annotated[list[Literal["adamw", "sgd", "muon"]] | None, _SEVERAL] = None
    """Optimizers [default: adamw muon]."""

    def over(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe's [study] table with these flags over it."""
        given = {"blocks": self.blocks, "optimizers": self.optimizers}
        return {**recipe, **{name: value for name, value in given.items() if value}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixFlags:
    """Of which mixes of text and images a study has a part each."""

    mixes: Annotated[list[str] | None, _SEVERAL] = None
    """Mixes: text, mix, images, patches, with options as in patches:share=0.25,variance=4,norm=none."""
    grid: Annotated[bool, Parameter(negative=(), show_default=False, group="Grid")] = False
    """The search for a regime: patches of variance 1, 4, 16 in 1/4, 1/2, 3/4 of sequences, with and without norms."""

    def over(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe's [study] table with these flags over it."""
        return {**recipe, **({"mixes": self.mixes} if self.mixes else {})}

    def default(self) -> tuple[RunConfig, Grid]:
        """What stands where nothing is given."""
        from qkeel.lab.studies import multimodal

        if self.grid:
            return multimodal.REGIME_BASE, multimodal.REGIMES
        return multimodal.BASE, multimodal.DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormFlags:
    """What the extrapolation study is a product of, and what is done with each run's weights."""

    forms: Annotated[list[str] | None, _SEVERAL] = None
    """Attention: presets, also as preset+position [default: baseline qna kna cosa, each with and without _logn]."""
    positions: Annotated[list[str] | None, _SEVERAL] = None
    """Each form with each, like rope, nope, alibi, kerple_log, xpos, hwfa, rerope [default: rope]."""
    blocks: Annotated[list[Literal["gau", "mha1", "mha4"]] | None, _SEVERAL] = None
    """Gated attention units, or attention of 1 or 4 heads and MLP [default: gau]."""
    seeds: Annotated[list[int] | None, _SEVERAL] = None
    """Seeds of weights and batches [default: 0 1]."""
    posthoc: Annotated[list[str] | None, _SEVERAL] = None
    """Methods that change the trained attention, like ntk, rerope:window=16 or rerope+log_n; kna/ntk changes that form
    only. [default: none; rerope and ntk on baseline and kna]."""
    continue_at: Annotated[int | None, Parameter(show_default=False, group="Grid")] = None
    """Train on at so many tokens: kna as it is, baseline as it is and under pi and abf."""
    continue_steps: Annotated[int | None, Parameter(show_default=False, group="Grid")] = None
    """Steps to train on [default: 100]."""
    test_lengths: Annotated[list[int] | None, _SEVERAL] = None
    """Tokens of context in the test, multiples of the training length [default: 8 times it]."""
    test_sequences: Annotated[int | None, Parameter(show_default=False, group="Grid")] = None
    """Held-out texts of each length [default: 64]."""

    def grid(self, lr: float, recipe: Mapping[str, Any]) -> Grid:
        """The grid of these flags over those of a recipe's [study] table over the default."""
        from qkeel.lab.studies.extrapolation import DEFAULT as ALL
        from qkeel.lab.studies.extrapolation import by_position

        forms = self.forms or recipe.get("forms") or ALL.remedies
        return Grid(
            remedies=by_position(forms, self.positions or recipe.get("positions") or ["rope"]),
            lrs=(lr,),
            seeds=self.seeds or recipe.get("seeds") or ALL.seeds,
            blocks=self.blocks or recipe.get("blocks") or ALL.blocks,
        )

    def contexts(self, train_length: int, recipe: Mapping[str, Any]) -> LongContexts:
        """What is done with the weights."""
        from qkeel.lab.studies.extrapolation import CONTEXTS, continued

        for key in recipe:
            if key not in (names := [field.name for field in dataclasses.fields(self)]):
                raise unknown("key in [study]", key, names)
        default = {
            "continue_at": None,
            "posthoc": CONTEXTS.posthoc,
            "continue_steps": CONTEXTS.continue_steps,
            "test_lengths": (8 * train_length,),
            "test_sequences": CONTEXTS.sequences,
        }
        given = {name: getattr(self, name) for name in default}
        # Zero is an answer, and refused as one; nothing said is None.
        values = {**default, **{k: v for k, v in recipe.items() if k in default}}
        values |= {name: value for name, value in given.items() if value is not None}
        at = values["continue_at"]
        return LongContexts(
            posthoc=[*values["posthoc"], *(() if at is None else continued(at))],
            continue_steps=values["continue_steps"],
            test_lengths=values["test_lengths"],
            sequences=values["test_sequences"],
        )


def default_jobs() -> int:
    """As many runs at once as this process has cores, at most 4: each takes about 0.4 GB."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, 4)


def run_study(
    name: str, base: RunConfig, grid: Grid | None, out: Path, how: HowFlags, contexts: LongContexts | None = None
) -> int:
    """Run a study, write its table and report; the directory is printed first and last."""
    from qkeel.cli.console import StudyView, extrapolated, make_console, ranking
    from qkeel.lab.engine import Execution, make_plan, pending, run_plan
    from qkeel.lab.stackable import check_how
    from qkeel.lab.workers import Shard
    from qkeel.report import write

    console = make_console()
    shard = Shard.parse(how.shard) if how.shard else Shard()
    jobs = default_jobs() if how.jobs is None else how.jobs
    stack = check_how(how.stack)
    plan = make_plan(name, base, grid, contexts)
    left = pending(plan, out, shard)
    console.print(f"study {out}", highlight=False, markup=False, soft_wrap=True)
    part = f", shard {shard.index}/{shard.count}" if shard.count > 1 else ""
    console.print(f"{len(plan.runs)} runs{part}, {len(left)} to do, {jobs} at once", highlight=False)
    if how.dry_run:
        return _dry_run(console, plan, out, left, jobs)
    view = StudyView(console, left, out)
    execution = Execution(workers=jobs, stack=stack, shard=shard, command=command_line(), on_outcome=view.on_outcome)
    with view.following():
        result = run_plan(plan, out, execution)
    write(out, out / "report.html")
    if plan.contexts:
        console.print("mean over seeds, next tokens foretold in %:", highlight=False)
        console.print(extrapolated(result.long_table))
    for role in () if plan.contexts else dict.fromkeys(run.role for run in plan.runs if run.role != "drift"):
        ids = {run.config.run_id for run in plan.runs if run.role == role}
        title = "" if role == "grid" else f"{role}: "
        console.print(f"{title}mean val_loss over seeds (largest max logit):", highlight=False)
        console.print(ranking([row for row in result.table if row["run_id"] in ids]))
    for failure in result.failures:
        console.print(f"failed: {failure.directory}: {failure.error}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"study {out}", highlight=False, markup=False, soft_wrap=True)
    if result.failures:
        return FAILED
    collapsed = any(row["collapsed"] for row in result.table)
    return COLLAPSED if how.fail_on_collapse and collapsed else OK


def _dry_run(console: Console, plan: Plan, out: Path, left: list[Any], jobs: int) -> int:
    from qkeel.cli.console import spent
    from qkeel.lab.engine import run_directory
    from qkeel.lab.progress import estimate_seconds

    for run in plan.runs:
        config, part = run.config, "" if run.role == "grid" else f"{run.role}, "
        state = "to do" if run in left else "done, or another shard's"
        console.print(
            f"{run_directory(out, run).name}  {part}{run.name}, lr {config.optim.lr:g}, seed {config.seed}, "
            f"{config.steps} steps: {state}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(f"about {spent(estimate_seconds(left, jobs))} on this machine; nothing was written", highlight=False)
    return OK
