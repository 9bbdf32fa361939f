"""The length study: which forms of attention, trained on short texts, hold on long ones, as they are and post hoc."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Literal

from qkeel.errors import check_known
from qkeel.lab.config import DataConfig, ModelConfig, OptimConfig, RunConfig, with_values
from qkeel.lab.plan import Given, Grid, LongContexts, Option, PlannedRun, Request, Study, product
from qkeel.registry import lookup, parse
from qkeel.spec import PRESETS

FORMS = ("baseline", "baseline_logn", "qna", "qna_logn", "kna", "kna_logn", "cosa", "cosa_logn")
BLOCKS = ("gau", "mha1", "mha4")
DEFAULT = Grid(remedies=FORMS, lrs=(0.01,), seeds=(0, 1), blocks=("gau",))
CONTEXTS = LongContexts(posthoc=("none", "baseline/rerope", "baseline/ntk", "kna/rerope", "kna/ntk"))
# Small enough for half a minute a run on one core, large enough to show what the published table shows.
BASE = RunConfig(
    model=ModelConfig(n_layers=3),
    data=DataConfig(context=64, batch=16),
    optim=OptimConfig(lr=0.01, weight_decay=0.01),
    steps=300,
)


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns blocks × forms × seeds, each block a part; two GAU layers count as one of attention and MLP.

    Source: Su 2023, kexue.fm 9859; one head as wide as the model in GAU and mha1, four in mha4.
    """
    found = []
    for block in grid.blocks or DEFAULT.blocks:
        for form in grid.remedies:
            model = {**_sizes(base.model, block), **_trained(form, base)}
            alone = dataclasses.replace(grid, remedies=(base.remedy,))
            made = product(with_values(base, model=model), alone, block)
            found += [dataclasses.replace(run, form=form) for run in made]
    return found


def _sizes(model: ModelConfig, block: str) -> dict[str, object]:
    check_known("block of the extrapolation study", block, BLOCKS)
    if block == "gau":
        layers = 2 * model.n_layers
        return {"block": "gau", "n_heads": 1, "n_kv_heads": None, "head_dim": model.d_model, "n_layers": layers}
    return {"block": "mha", "n_heads": int(block[-1]), "n_kv_heads": None, "head_dim": None}


def _trained(form: str, base: RunConfig) -> dict[str, str]:
    """Attention and position of a form, with the training length that its constants follow from, where it has any."""
    terms = parse(form)
    attention, _, position = form.partition("+") if len(terms) > 1 else (form, "", "")
    term = next(iter(terms))
    takes = inspect.signature(lookup("attention form", PRESETS, term.name).build).parameters
    if "train_length" in takes:
        options = {"train_length": base.data.context, **term.options}
        attention = str(dataclasses.replace(term, options=options))
    return {"attention": attention, "position": position or base.model.position}


def by_position(forms: Sequence[str], positions: Sequence[str]) -> list[str]:
    """Each form at each position, as layer_specs names them: rope is the forms' own, any other stands behind a plus.

    >>> by_position(["kna"], ["rope", "alibi"])
    ['kna', 'kna+alibi']
    """
    return [form if position == "rope" else f"{form}+{position}" for form in forms for position in positions]


def continued(length: int) -> list[str]:
    """The forms compared where models are trained on at a length: KNA as it is against a baseline with a remedy.

    Source: kexue.fm 9859; ABF: Xiong et al. 2023, arXiv 2309.16039.
    """
    return [f"kna/none@{length}", f"baseline/none@{length}", f"baseline/pi@{length}", f"baseline/abf@{length}"]


OPTIONS = (
    Option(
        "forms",
        list[str],
        "Attention: presets, also as preset+position [default: baseline qna kna cosa, each with and without _logn].",
    ),
    Option(
        "positions",
        list[str],
        "Each form with each, like rope, nope, alibi, kerple_log, xpos, hwfa, rerope [default: rope].",
    ),
    Option(
        "blocks",
        list[Literal["gau", "mha1", "mha4"]],
        "Gated attention units, or attention of 1 or 4 heads and MLP [default: gau].",
    ),
    Option("seeds", list[int], "Seeds of weights and batches [default: 0 1]."),
    Option(
        "posthoc",
        list[str],
        "Methods that change the trained attention, like ntk, rerope:window=16 or rerope+log_n; kna/ntk changes that "
        "form only. [default: none; rerope and ntk on baseline and kna].",
    ),
    Option("continue_at", int, "Train on at so many tokens: kna as it is, baseline as it is and under pi and abf."),
    Option("continue_steps", int, "Steps to train on [default: 100]."),
    Option(
        "test_lengths",
        list[int],
        "Tokens of context in the test, multiples of the training length [default: 8 times it].",
    ),
    Option("test_sequences", int, "Held-out texts of each length [default: 64]."),
    Option("train_length", int, "Tokens of context in training [default: 64]."),
)


def request(base: RunConfig, default: Grid, given: Given) -> Request:
    """Returns configuration, grid and contexts of the options that are given."""
    length = given.get("train_length", base.data.context)
    base = with_values(base, data={"context": length})
    grid = Grid(
        remedies=by_position(given.get("forms") or default.remedies, given.get("positions") or ["rope"]),
        lrs=(base.optim.lr,),
        seeds=given.get("seeds") or default.seeds,
        blocks=given.get("blocks") or default.blocks,
        **{axis: given.get(axis) or values for axis, values in default.settings().items()},
    )
    more = continued(given["continue_at"]) if "continue_at" in given else []
    contexts = LongContexts(
        posthoc=[*given.get("posthoc", CONTEXTS.posthoc), *more],
        continue_steps=given.get("continue_steps", CONTEXTS.continue_steps),
        test_lengths=given.get("test_lengths", (8 * length,)),
        sequences=given.get("test_sequences", CONTEXTS.sequences),
    )
    return base, grid, contexts


STUDY = Study(
    help="A model of 3 layers (6 of GAU) of width 64 learns for 300 steps of 16 texts at rate 0.01 unless flags say "
    "otherwise. Finished runs are kept, killed ones resume; the directory takes more forms, seeds, methods and lengths "
    "later.",
    grid=DEFAULT,
    runs=runs,
    base=BASE,
    contexts=CONTEXTS,
    options=OPTIONS,
    request=request,
    decides=(
        *(("model", name) for name in ("block", "attention", "n_heads", "n_kv_heads", "head_dim")),
        ("data", "context"),
    ),
)
