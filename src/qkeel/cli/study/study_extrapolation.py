"""`qkeel study extrapolation`: trained on short texts, tested on long ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from qkeel.cli.flags import Settings, configure, view
from qkeel.cli.study.run_study import run_study
from qkeel.cli.study.study_flags import FLAT, ONE, SEVERAL, HowFlags, refuse_unknown
from qkeel.lab.plan.plan import Grid, LongContexts
from qkeel.lab.studies.extrapolation import BASE, CONTEXTS, DEFAULT, by_position, continued

_SIZES = {("model", name) for name in ("block", "attention", "n_heads", "n_kv_heads", "head_dim")}
FormlessFlags: Any = view("FormlessFlags", without=_SIZES | {("", "remedy"), ("", "seed"), ("data", "context")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormFlags:
    """The axes of the extrapolation study, and what is done with each run's weights."""

    forms: Annotated[list[str] | None, SEVERAL] = None
    """Attention: presets, also as preset+position [default: baseline qna kna cosa, each with and without _logn]."""
    positions: Annotated[list[str] | None, SEVERAL] = None
    """Each form with each, like rope, nope, alibi, kerple_log, xpos, hwfa, rerope [default: rope]."""
    blocks: Annotated[list[Literal["gau", "mha1", "mha4"]] | None, SEVERAL] = None
    """Gated attention units, or attention of 1 or 4 heads and MLP [default: gau]."""
    seeds: Annotated[list[int] | None, SEVERAL] = None
    """Seeds of weights and batches [default: 0 1]."""
    posthoc: Annotated[list[str] | None, SEVERAL] = None
    """Methods that change the trained attention, like ntk, rerope:window=16 or rerope+log_n; kna/ntk changes that form
    only. [default: none; rerope and ntk on baseline and kna]."""
    continue_at: Annotated[int | None, ONE] = None
    """Train on at so many tokens: kna as it is, baseline as it is and under pi and abf."""
    continue_steps: Annotated[int | None, ONE] = None
    """Steps to train on [default: 100]."""
    test_lengths: Annotated[list[int] | None, SEVERAL] = None
    """Tokens of context in the test, multiples of the training length [default: 8 times it]."""
    test_sequences: Annotated[int | None, ONE] = None
    """Held-out texts of each length [default: 64]."""

    def grid(self, lr: float, recipe: Settings) -> Grid:
        """Returns the grid: these flags over a recipe's [study] table over the default."""
        forms = self.forms or recipe.get("forms") or DEFAULT.remedies
        return Grid(
            remedies=by_position(forms, self.positions or recipe.get("positions") or ["rope"]),
            lrs=(lr,),
            seeds=self.seeds or recipe.get("seeds") or DEFAULT.seeds,
            blocks=self.blocks or recipe.get("blocks") or DEFAULT.blocks,
        )

    def contexts(self, train_length: int, recipe: Settings) -> LongContexts:
        """Returns the lengths of the test and the methods under which the weights are tested."""
        flags = dataclasses.asdict(self)
        refuse_unknown(recipe, flags)
        default = {
            "continue_at": None,
            "posthoc": CONTEXTS.posthoc,
            "continue_steps": CONTEXTS.continue_steps,
            "test_lengths": (8 * train_length,),
            "test_sequences": CONTEXTS.sequences,
        }
        # Zero is given, and refused with its reason; None is not given.
        values = {**default, **recipe, **{name: value for name, value in flags.items() if value is not None}}
        at = values["continue_at"]
        return LongContexts(
            posthoc=[*values["posthoc"], *(() if at is None else continued(at))],
            continue_steps=values["continue_steps"],
            test_lengths=values["test_lengths"],
            sequences=values["test_sequences"],
        )


def study_extrapolation(
    *,
    axes: Annotated[FormFlags, FLAT] = FormFlags(),
    train_length: Annotated[int | None, ONE] = None,
    out: Path = Path("runs/extrapolation"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, FLAT] = HowFlags(),  # noqa: B008
    flags: Annotated[FormlessFlags, FLAT] = FormlessFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Train short, test long: forms of attention × blocks × seeds, each tested as trained and changed post hoc.

    A model of 3 layers (6 of GAU) of width 64 learns for 300 steps of 16 texts at rate 0.01 unless flags say otherwise.
    Finished runs are kept, killed ones go on; the directory takes more forms, seeds, methods and lengths later.

    Args:
        train_length: Tokens of context in training [default: 64].
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    config, study = configure(flags, recipe, BASE)
    if train_length is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, context=train_length))
    contexts = axes.contexts(config.data.context, study)
    return run_study("extrapolation", config, axes.grid(config.optim.lr, study), out, how, contexts)
