"""All studies, each with what it varies, its baseline and its default grid."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qkeel.errors import check_known
from qkeel.lab.config import DataConfig, ModelConfig, OptimConfig, RunConfig, at, with_values
from qkeel.lab.plan import (
    AXIS_OPTIONS,
    ONE_OF_EACH,
    OPTIMIZERS,
    GivenOptions,
    Grid,
    LongContexts,
    PlannedRun,
    Primary,
    Request,
    Study,
    StudyOption,
    pairs,
    parts,
    product,
)
from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.options import lookup, parse
from qkeel.spec import PRESETS, AttentionSpec, Fixed, L2Norm, RMSNorm, Softcap

# Learning-rate study: which remedies widen the range of usable learning rates, and at what cost.

# "frozen_qk" never trains q and k. It is the control that shows how much training them gains.
LR_GRID = Grid(remedies=("none", "frozen_qk", "qk_norm", "lalr:tau=0.1"), lrs=(0.01, 0.03, 0.1, 0.3), seeds=(0, 1, 2))
# Source: Wortsman et al. 2023, arXiv 2309.14322, who sweep the peak rate over three decades.
LR = Study(
    help="The default remedies are none, frozen_qk, qk_norm and lalr:tau=0.1, at learning rates of 0.01, 0.03, 0.1 and "
    "0.3. Finished runs are kept, interrupted runs resume, and more remedies, rates and seeds can be added to the "
    "directory later.",
    grid=LR_GRID,
    runs=parts,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
)


# Two-minute demo: six remedies at constant rates, one primary comparison, and a longer pair of runs.

DEMO_GRID = Grid(
    remedies=("none", "qk_norm", "lalr:tau=0.1", "qk_clip:threshold=30", "softcap:cap=50", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2, 3, 4, 5, 6, 7),
)
PRIMARY = Primary(
    remedy="qk_norm",
    lr=0.1,
    expected=0.1,
    spread=0.06,
    source="as on seeds 1000 to 1015, which the demo does not use: 0.057 with AVX2, 0.059 without",
)
ELSEWHERE = 2  # seeds at the other rates, so that all runs of a remedy fit into one stack
DEMO_DRIFT = Grid(remedies=("none", "qk_norm"), lrs=(0.03,), seeds=(0,))


def demo_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid's runs, with all seeds at the rate of the primary comparison and two seeds at all other rates.

    They are followed by runs without a remedy and with qk_norm at a moderate rate, for 16/3 as many steps.
    """
    constant = with_values(base, optim={"schedule": "constant"})
    longer = with_values(constant, steps=base.steps * 16 // 3)
    kept = {lr: grid.seeds if lr == PRIMARY.lr else grid.seeds[:ELSEWHERE] for lr in grid.lrs}
    parts = [dataclasses.replace(grid, lrs=(lr,), seeds=seeds) for lr, seeds in kept.items()]
    return [*(run for part in parts for run in product(constant, part)), *product(longer, DEMO_DRIFT, "drift")]


DEMO = Study(
    help="The demo trains with six remedies at three constant learning rates, and has one primary comparison and one "
    "longer pair of runs.",
    grid=DEMO_GRID,
    runs=demo_runs,
    options=(),
    out="demo",
    primary=PRIMARY,
)


# Drift study: how the largest logit grows with rate, steps, schedule and sizes.

GRID = Grid(remedies=("none",), lrs=(0.003, 0.01, 0.03, 0.1, 0.3), seeds=range(8))
HELD_OUT = Grid(remedies=("none",), lrs=(0.01, 0.03, 0.1), seeds=range(104, 108))
ModelSize = tuple[int, int, int]  # width, blocks, head size
SIZES = tuple((width, depth, 16) for width in (32, 64, 128) for depth in (1, 2, 4))
# Head sizes and settings are varied one at a time, around MIDDLE.
MIDDLE = (64, 2, 16)
HEADS = ((64, 2, 8), (64, 2, 32))
SETTINGS = ({"schedule": "constant"}, {"schedule": "wsd"}, {"steps": 75}, {"steps": 300})
# The law is tested on these sizes, and with this setting at the size that lies between the fitted sizes.
HELD_OUT_SIZES = ((96, 3, 16), (64, 8, 16), (256, 2, 16), (256, 8, 16))
HELD_OUT_SETTING = {"schedule": "constant", "steps": 225}


def variant(base: RunConfig, size: ModelSize, **settings: object) -> RunConfig:
    """Returns the configuration with this width, number of blocks and head size, and with further settings if given."""
    width, depth, head = size
    sizes = {"d_model": width, "n_layers": depth, "n_heads": width // head, "head_dim": head}
    return at(base, {**sizes, **settings})


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at every size on which the law is fitted, and two of its rates for each setting."""
    few = dataclasses.replace(grid, lrs=grid.lrs[1::2] or grid.lrs)
    found = [run for size in SIZES for run in product(variant(base, size), grid, _role(size))]
    found += [run for size in HEADS for run in product(variant(base, size), few, _role(size))]
    for settings in SETTINGS:
        found += product(variant(base, MIDDLE, **settings), few, _role(MIDDLE, settings))
    return found


def held_out_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the grid at sizes that are not fitted, and its higher rates under a setting that is not fitted."""
    found = [run for size in HELD_OUT_SIZES for run in product(variant(base, size), grid, _role(size))]
    high = dataclasses.replace(grid, lrs=grid.lrs[1:] or grid.lrs)
    size = HELD_OUT_SIZES[0]
    return found + product(variant(base, size, **HELD_OUT_SETTING), high, _role(size, HELD_OUT_SETTING))


def _role(size: ModelSize, settings: Mapping[str, object] | None = None) -> str:
    width, depth, head = size
    words = [f"width {width}", f"{depth} blocks", f"heads of {head}"]
    return ", ".join([*words, *(f"{name} {value}" for name, value in (settings or {}).items())])


_DECIDES = (
    *(("model", name) for name in ("d_model", "n_layers", "n_heads", "head_dim")),
    *(("optim", name) for name in ("lr", "schedule")),
    *(("data", "batch"), ("", "steps")),
)
DRIFT = Study(
    help="The study trains models of width 32, 64 and 128 with 1, 2 and 4 blocks, and separately varies the head size, "
    "schedule and steps. The law of logit growth is fitted to these runs. With --held-out, the study trains the sizes "
    "on which the law is tested, up to width 256 and 8 blocks.",
    grid=GRID,
    runs=runs,
    base=RunConfig(),
    decides=_DECIDES,
    instead={
        "held_out": Study(
            help="The sizes on which the law is tested, up to width 256 and 8 blocks.",
            grid=HELD_OUT,
            runs=held_out_runs,
            base=RunConfig(),
            decides=_DECIDES,
        )
    },
)


# Latent-attention study: which remedies limit logits that are products of three matrices, and under which optimizer.

MLA_GRID = Grid(
    remedies=("none", "frozen_qk", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2),
    blocks=("mla", "mha"),
    optimizers=("adamw", "muon"),
)
# Source: Anson & Aitchison 2025, arXiv 2511.21377, section 4: remedies on MHA and MLA under Muon.
MLA = Study(
    help="The default remedies are none, frozen_qk, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and "
    "qk_lr:factor=0.1, at learning rates of 0.01, 0.1 and 0.3. Finished runs are kept, interrupted runs resume, and "
    "more runs can be added to the directory later.",
    grid=MLA_GRID,
    runs=parts,
    options=(
        *AXIS_OPTIONS,
        StudyOption(
            "blocks",
            list[Literal["mla", "mha"]],
            "Kinds of attention: mla (latent) and mha (multi-head) [default: mla mha].",
        ),
        OPTIMIZERS,
    ),
    decides=(("optim", "lr"), ("optim", "name"), ("model", "block")),
)


# Translation study: remedies on an encoder–decoder with few training pairs, the setting for which QK-norm was proposed.

# Henry et al. 2020, arXiv 2010.04245: unit queries and keys, and one learned scale for all heads of a layer.
ORIGIN = "qk_norm:kind=l2,gain=scalar"
TRANSLATION_GRID = Grid(
    remedies=("none", "frozen_qk", ORIGIN, "qk_norm", "lalr:tau=0.1"), lrs=(0.003, 0.01, 0.03, 0.1), seeds=(0, 1, 2)
)
TRANSLATION_BASE = RunConfig(
    model=ModelConfig(d_model=64, n_layers=2),
    data=DataConfig(source="topics", task="translation", context=48, batch=16),
    optim=OptimConfig(lr=0.01),
    steps=600,
    log_every=50,
    checkpoint_every=200,
    eval_sequences=128,
)
TRANSLATION = Study(
    help="The default remedies are none, frozen_qk, the norm of the first QK-norm paper, qk_norm and lalr:tau=0.1, "
    "at learning rates of 0.003, 0.01, 0.03 and 0.1, on 1000 pairs of 48 bytes. Finished runs are kept, interrupted "
    "runs resume, and more runs can be added later.",
    grid=TRANSLATION_GRID,
    runs=parts,
    base=TRANSLATION_BASE,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
    decides=(("optim", "lr"), ("data", "task")),
)


# Transfer study: whether the ranking of remedies, each at its best rate, is the same at a different size.

TRANSFER_LRS = tuple(0.003 * 2**k for k in range(7))
TRANSFER_GRID = Grid(
    remedies=ONE_OF_EACH,
    lrs=TRANSFER_LRS,
    seeds=range(16),
    tuning_seeds=(1000, 1001),
    d_model=(16, 32, 64, 128),
    parametrisation=("standard", "mup"),
)
TRANSFER = Study(
    help="By default, the study compares ten remedies, each at the best of seven learning rates from 0.003 to 0.192 in "
    "factors of 2, for four widths in the standard parametrisation and in µP, with 16 seeds.",
    grid=TRANSFER_GRID,
    runs=product,
)


# Chaos study: how far two runs that differ by one float32 step in one weight diverge.

CHAOS_GRID = Grid(
    remedies=("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "softcap:cap=50"),
    lrs=(0.01, 0.03, 0.1, 0.3),
    seeds=(0, 1, 2),
)
CHAOS_BASE = RunConfig(log_every=2)  # at high rates two runs diverge within ten steps

CHAOS = Study(
    help="The default remedies are none, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and softcap:cap=50, at learning "
    "rates of 0.01, 0.03, 0.1 and 0.3. The file chaos.json contains the effect of rounding alone for each remedy and "
    "rate. Reports on other studies with the same configuration read this file from the neighbouring directory "
    "runs/chaos, and mark differences that do not exceed this effect.",
    grid=CHAOS_GRID,
    runs=pairs,
    base=CHAOS_BASE,
    decides=(("optim", "lr"), ("", "nudge")),
)


# Edge-of-chaos study: the rate above which two runs that start one float32 step apart diverge exponentially.

EDGE_LRS = tuple(0.003 * 2**k for k in range(9))
EDGE_GRID = Grid(remedies=ONE_OF_EACH, lrs=EDGE_LRS, seeds=range(8), d_model=(16, 32, 64, 128))
EDGE = Study(
    help="By default, the study trains with ten remedies at nine learning rates from 0.003 to 0.768 in factors of 2, "
    "for four widths with 8 seeds, which makes 5,760 runs. The file chaos.json and the page give the exponent of each "
    "pair.",
    grid=EDGE_GRID,
    runs=pairs,
    base=RunConfig(log_every=2),
    decides=(("optim", "lr"), ("", "nudge")),
)


# Length study: which forms of attention, trained on short texts, work on long texts, as trained or changed post hoc.

FORMS = ("baseline", "baseline_logn", "qna", "qna_logn", "kna", "kna_logn", "cosa", "cosa_logn")
BLOCKS = ("gau", "mha1", "mha4")
EXTRAPOLATION_GRID = Grid(remedies=FORMS, lrs=(0.01,), seeds=(0, 1), blocks=("gau",))
CONTEXTS = LongContexts(posthoc=("none", "baseline/rerope", "baseline/ntk", "kna/rerope", "kna/ntk"))
# Small enough for half a minute per run on one core, large enough to reproduce the published ordering.
EXTRAPOLATION_BASE = RunConfig(
    model=ModelConfig(n_layers=3),
    data=DataConfig(context=64, batch=16),
    optim=OptimConfig(lr=0.01, weight_decay=0.01),
    steps=300,
)


def extrapolation_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the runs blocks × forms × seeds, with one role per block; two GAU layers replace an attention layer with
    its MLP.

    Source: Su 2023, kexue.fm 9859. GAU and mha1 have one head as wide as the model, mha4 has four heads.
    """
    found = []
    for block in grid.blocks or EXTRAPOLATION_GRID.blocks:
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
    """Returns the attention and position of a form, with the training length if the form's constants depend on it."""
    terms = parse(form)
    attention, _, position = form.partition("+") if len(terms) > 1 else (form, "", "")
    term = next(iter(terms))
    takes = inspect.signature(lookup("attention form", PRESETS, term.name).build).parameters
    if "train_length" in takes:
        options = {"train_length": base.data.context, **term.options}
        attention = str(dataclasses.replace(term, options=options))
    return {"attention": attention, "position": position or base.model.position}


def by_position(forms: Sequence[str], positions: Sequence[str]) -> list[str]:
    """Combines each form with each position encoding in the notation of layer_specs; rope needs no suffix.

    >>> by_position(["kna"], ["rope", "alibi"])
    ['kna', 'kna+alibi']
    """
    return [form if position == "rope" else f"{form}+{position}" for form in forms for position in positions]


def continued(length: int) -> list[str]:
    """Returns the methods to compare by continued training at a length: KNA unchanged, and several for the baseline.

    Source: kexue.fm 9859; ABF: Xiong et al. 2023, arXiv 2309.16039.
    """
    return [f"kna/none@{length}", f"baseline/none@{length}", f"baseline/pi@{length}", f"baseline/abf@{length}"]


OPTIONS = (
    StudyOption(
        "forms",
        list[str],
        "Forms of attention: presets, or preset+position [default: baseline qna kna cosa, each with and without "
        "_logn].",
    ),
    StudyOption(
        "positions",
        list[str],
        "Position encodings to combine with each form: rope, nope, alibi, kerple_log, xpos, hwfa, rerope "
        "[default: rope].",
    ),
    StudyOption(
        "blocks",
        list[Literal["gau", "mha1", "mha4"]],
        "gau for gated attention units, mha1 or mha4 for attention with 1 or 4 heads and an MLP [default: gau].",
    ),
    StudyOption("seeds", list[int], "Seeds for weights and batches [default: 0 1]."),
    StudyOption(
        "posthoc",
        list[str],
        "Methods that change the trained attention, like ntk, rerope:window=16 or rerope+log_n; kna/ntk changes only "
        "the form kna [default: none, and rerope and ntk for baseline and kna].",
    ),
    StudyOption(
        "continue_at",
        int,
        "Continue training at this length in tokens: kna unchanged, and baseline unchanged, with pi and with abf.",
    ),
    StudyOption("continue_steps", int, "Number of steps of continued training [default: 100]."),
    StudyOption(
        "test_lengths",
        list[int],
        "Context lengths in tokens to test at, multiples of the training length [default: 8 times the training "
        "length].",
    ),
    StudyOption("test_sequences", int, "Number of held-out texts per length [default: 64]."),
    StudyOption("train_length", int, "Context length in training, in tokens [default: 64]."),
)


def request(base: RunConfig, default: Grid, given: GivenOptions) -> Request:
    """Returns the configuration, grid and contexts for the given options."""
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


EXTRAPOLATION = Study(
    help="By default, a model with 3 layers (6 for GAU) of width 64 is trained for 300 steps of 16 texts at a learning "
    "rate of 0.01. Finished runs are kept, interrupted runs resume, and more forms, seeds, methods and lengths can be "
    "added later.",
    grid=EXTRAPOLATION_GRID,
    runs=extrapolation_runs,
    base=EXTRAPOLATION_BASE,
    contexts=CONTEXTS,
    options=OPTIONS,
    request=request,
    decides=(
        *(("model", name) for name in ("block", "attention", "n_heads", "n_kv_heads", "head_dim")),
        ("data", "context"),
    ),
)


# Multimodal study: text, images, or both in one sequence, measured on the same probe.

# Chameleon, arXiv 2405.09818, section 2.3: the remedies that stabilised the model in its two sizes.
CHAMELEON_7B = "qk_norm:kind=layer+dropout:rate=0.1+z_loss:coefficient=1e-05"
CHAMELEON_34B = "qk_norm:kind=layer+swin_norm+z_loss:coefficient=1e-05"
MULTIMODAL_GRID = Grid(
    remedies=("none", "qk_norm", "swin_norm", CHAMELEON_7B, CHAMELEON_34B),
    lrs=(0.01, 0.1),
    seeds=(0, 1, 2),
    mixes=("text", "mix"),
)
# The search for a regime in which the variance of image embeddings matters; all of its cells are published.
REGIMES = Grid(
    remedies=("none",),
    lrs=(0.01, 0.03, 0.1),
    seeds=(0, 1, 2),
    mixes=tuple(
        f"patches:norm={norm},share={share},variance={variance}"
        for norm in ("pre", "none")
        for share in (0.25, 0.5, 0.75)
        for variance in (1, 4, 16)
    ),
)
MULTIMODAL_BASE = RunConfig(
    data=DataConfig(task="multimodal", context=96, batch=8),
    optim=OptimConfig(lr=0.01),
    steps=200,
    eval_sequences=64,
    probe_sequences=8,
)
# Half as long, because the effect of the input variance shows early and there are 162 runs.
REGIME_BASE = with_values(MULTIMODAL_BASE, steps=100, log_every=20)
# The fields of ImagesConfig that each mix sets.
MIXES: dict[str, dict[str, object]] = {
    "text": {"image_share": 0.0},
    "mix": {"image_share": 0.5},
    "images": {"image_share": 1.0},
    "patches": {"image_share": 0.5, "image_input": "patches"},
}
_OPTIONS = {"share": "image_share", "variance": "image_variance", "first": "image_first", "norm": "norm_order"}


def multimodal_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the runs mixes × remedies × rates × seeds, with one role per mix.

    Source: the question is from Chameleon, arXiv 2405.09818, section 2.3; the mixes are our own.
    """
    return [run for mix in grid.mixes or MULTIMODAL_GRID.mixes for run in product(mixed(base, mix), grid, mix)]


MULTIMODAL = Study(
    help="By default, the study trains on text alone and on text mixed with handwritten digits, with none, qk_norm, "
    "swin_norm and the remedies of Chameleon 7B and 34B, at learning rates of 0.01 and 0.1. Finished runs are kept, "
    "interrupted runs resume, and more runs can be added later.",
    grid=MULTIMODAL_GRID,
    runs=multimodal_runs,
    base=MULTIMODAL_BASE,
    options=(
        *AXIS_OPTIONS,
        StudyOption(
            "mixes",
            list[str],
            "Data mixes: text, mix, images or patches, with options as in patches:share=0.25,variance=4,norm=none.",
        ),
    ),
    instead={
        "grid": Study(
            help="Train on a grid of data mixes: patches of variance 1, 4 and 16 in 1/4, 1/2 and 3/4 of the sequences, "
            "with and without norms.",
            grid=REGIMES,
            runs=multimodal_runs,
            base=REGIME_BASE,
        )
    },
)


def mixed(base: RunConfig, mix: str) -> RunConfig:
    """Returns the configuration for a mix like 'patches:share=0.25,variance=4,norm=none'.

    Raises:
        UnknownNameError: the mix or an option is unknown.
    """
    term = parse(mix)[0]
    fields = dict(lookup("data mix", MIXES, term.name))
    for option, value in term.options.items():
        check_known(f"option of mix {term.name}", option, _OPTIONS)
        fields[_OPTIONS[option]] = value
    order = fields.pop("norm_order", base.model.norm_order)
    return with_values(base, model={"norm_order": order}, data={"task": "multimodal"}, images=fields)


# Precision study: errors of attention in low precision, measured and predicted by `metrics`.
#
# Nothing is trained. Random q and k with logits of growing size pass through the same attention in float64 and in each
# format. There are two kinds of logits:
#
#     spread: independent logits with a growing standard deviation. Rows saturate, so two keys compete only in few rows.
#     shifted: logits with standard deviation 1 around a growing mean. Softmax is invariant to the mean, but rounding
#         is not. A large norm along a shared direction has this effect on attention that spreads over many keys.
#
# There are two kernels: "fused" reads q, k and v in the format and computes in float32, as flash kernels do; "eager"
# also stores the product and the scaled logits in the format.

TOLERANCE = 0.25  # nats; a larger error changes the weight of a key by more than 28 %
REMEDIES: dict[str, AttentionSpec] = {
    "none": AttentionSpec(),
    "qk_norm": AttentionSpec(norm=RMSNorm()),
    "cosine": AttentionSpec(norm=L2Norm(), scale=Fixed(10.0)),
    "softcap:cap=50": AttentionSpec(cap=Softcap(50.0)),
}
FORMATS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
PRECISION_SIZES = tuple(2 ** (i / 2) for i in range(6, 31))
DATA = ("spread", "shifted")
COLUMNS = (
    *("data", "remedy", "format", "kernel", "size", "max_logit"),
    *("logit_error", "predicted_error", "output_error", "flipped", "overflow"),
)


PrecisionRow = Mapping[str, float | str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The number of heads and tokens, and the head dimension d."""

    heads: int = 2
    tokens: int = 64
    head_dim: int = 64


def rows(
    shape: HeadShape = HeadShape(),
    sizes: Sequence[float] = PRECISION_SIZES,
    remedies: Sequence[str] = tuple(REMEDIES),
    seed: int = 0,
) -> Iterator[dict[str, float | str]]:
    """Yields one row with COLUMNS per kind and size of logits (nats, before a remedy), remedy, format and kernel."""
    for data in DATA:
        for size in sizes:
            q, k, v = tensors(data, size, shape, seed)
            for remedy in remedies:
                exact = _Exact(lookup("remedy of the precision study", REMEDIES, remedy), q, k, v)
                for name in FORMATS:
                    for kernel in ("fused",) if name == "fp8" else ("fused", "eager"):
                        about = {"data": data, "remedy": remedy, "format": name, "kernel": kernel, "size": size}
                        yield {**about, **exact.against(name, kernel)}


def tensors(data: str, size: float, shape: HeadShape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v [1 h n d] in float64; `size` is the deviation (spread) or mean (shifted) of their logits."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, shape.heads, shape.tokens, shape.head_dim, generator=rng, dtype=torch.float64) for _ in range(3)
    )
    if data == "spread":
        return q * math.sqrt(size), k * math.sqrt(size), v
    along = torch.nn.functional.normalize(torch.randn(shape.head_dim, generator=rng, dtype=torch.float64), dim=0)
    q, k = (x - (x @ along)[..., None] * along for x in (q, k))
    both = math.sqrt(size * math.sqrt(shape.head_dim)) * along
    return q + both, k + both, v


class _Exact:
    """The float64 reference; `product` is scale·|q||k| for the key `top` with the largest logit of each row."""

    def __init__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.given = spec, (q, k, v)
        q2, k2 = _encoded(spec, q, k)
        factor = _factor(spec, q)
        self.z = factor * q2 @ k2.mT
        self.top = self.z.argmax(-1, keepdim=True)
        self.out = spec.cap.apply(self.z).softmax(-1) @ v
        lengths = k2.norm(dim=-1)[:, :, None].expand_as(self.z).gather(-1, self.top)[..., 0]
        self.product = factor * q2.norm(dim=-1) * lengths

    def against(self, name: str, kernel: str) -> dict[str, float]:
        """Returns the errors of a format and kernel relative to the reference."""
        z, out = forward(self.spec, *self.given, FORMATS[name], eager=kernel == "eager")
        finite = z.isfinite().all() and out.isfinite().all()
        best = self.z.gather(-1, self.top)
        return {
            "max_logit": float(self.z.max()),
            "logit_error": _rms(z.gather(-1, self.top) - best) if finite else math.nan,
            "predicted_error": self.predicted(name, kernel),
            "output_error": float((out - self.out).norm() / self.out.norm()) if finite else math.nan,
            "flipped": float((z.argmax(-1, keepdim=True) != self.top).double().mean()) if finite else math.nan,
            "overflow": float(not finite),
        }

    def predicted(self, name: str, kernel: str) -> float:
        """Returns the predicted root mean square error of the rows' largest logits."""
        d = self.given[0].shape[-1]
        error = fused_logit_error(1.0, 1.0, d, name, 1.0) * _rms(self.product)
        if kernel == "fused":
            return error
        stored = [stored_logit_error(float(x), name) for x in self.z.gather(-1, self.top).flatten()]
        return math.hypot(error, math.sqrt(sum(x * x for x in stored) / len(stored)))


def forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, *, eager: bool
) -> tuple[Tensor, Tensor]:
    """Computes attention in a format; returns the logits before the cap and the output, both converted to float64."""
    q, k, v = (rounded(x, dtype) for x in (q, k, v))
    q, k = (rounded(x, dtype) for x in _encoded(spec, q, k))
    factor = _factor(spec, q)
    if not eager:
        z = factor * (q.float() @ k.float().mT)
        out = spec.cap.apply(z).softmax(-1) @ v.float()
        return z.double(), (out if dtype == torch.float8_e4m3fn else out.to(dtype)).double()
    z = (q @ k.mT) * factor
    weights = spec.cap.apply(z).softmax(-1, dtype=torch.float32).to(dtype)
    return z.double(), (weights @ v).double()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x to a format. fp8 uses one scale per tensor, which maps the largest entry to 448, and returns float32."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    unit = x.abs().max().float() / torch.finfo(dtype).max
    return (x.float() / unit).to(dtype).float() * unit


def _encoded(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(q.shape[2])[None]
    return spec.encode(q, k, place, place, {})


def _factor(spec: AttentionSpec, q: Tensor) -> float:
    return float(spec.scale.factor(torch.zeros(1, 1), q.shape[-1], {}))


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def thresholds(table: Sequence[PrecisionRow], tolerance: float = TOLERANCE) -> list[dict[str, float | str]]:
    """Returns, per kind of logits, remedy, format and kernel, the largest logit at which errors exceed the tolerance.

    Separate values are given for `predicted_error`, for `logit_error` and for the relative `output_error`, together
    with the smallest logit at which something overflows. A value is NaN if that never happens.
    """
    found: dict[tuple[str, ...], list[PrecisionRow]] = {}
    for row in table:
        found.setdefault(tuple(str(row[name]) for name in COLUMNS[:4]), []).append(row)
    lines = []
    for key, course in found.items():
        line: dict[str, float | str] = dict(zip(COLUMNS[:4], key))
        for name in ("predicted_error", "logit_error", "output_error"):
            line[name.removesuffix("_error")] = _crossing(course, name, tolerance)
        line["overflow"] = min((float(r["max_logit"]) for r in course if r["overflow"]), default=math.nan)
        lines.append(line)
    return lines


def _crossing(course: Sequence[PrecisionRow], name: str, tolerance: float) -> float:
    """Returns the largest logit, interpolated on logarithmic axes, at which an error first exceeds the tolerance."""
    x = np.log([float(row["max_logit"]) for row in course])
    y = np.log(np.maximum([float(row[name]) for row in course], 1e-300))
    over = np.flatnonzero(y > math.log(tolerance))
    if not len(over):
        return math.nan
    i = int(over[0])
    if i == 0 or not y[i] > y[i - 1]:
        return float(np.exp(x[i]))
    share = (math.log(tolerance) - y[i - 1]) / (y[i] - y[i - 1])
    return float(np.exp(x[i - 1] + share * (x[i] - x[i - 1])))
