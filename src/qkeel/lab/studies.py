"""The studies: each with what it varies, its default grid and the options of its command.

This module does not import torch, so that `qkeel --help` can list the studies at once.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Literal

from qkeel.errors import check_known
from qkeel.lab.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    with_values,
)
from qkeel.lab.demo import DEMO
from qkeel.lab.plan import (
    AXIS_OPTIONS,
    OPTIMIZERS,
    Grid,
    LongContexts,
    PlannedRun,
    Request,
    Study,
    StudyOption,
    StudyOptions,
    parts,
    product,
)
from qkeel.options import lookup, parse

# Learning-rate study: which remedies widen the range of usable learning rates, and at what cost.

# "frozen_qk" never trains q and k. It is the control that shows how much training them gains.
LR_GRID = Grid(
    remedies=("none", "frozen_qk", "qk_norm", "lalr:tau=0.1"),
    lrs=(0.01, 0.03, 0.1, 0.3),
    seeds=(0, 1, 2),
)
# Source: Wortsman et al. 2023, arXiv 2309.14322, who sweep the peak rate over three decades.
LR = Study(
    name="lr",
    line="Remedies × learning rates × seeds: which remedies widen the range of learning rates that train well.",
    help="The default remedies are none, frozen_qk, qk_norm and lalr:tau=0.1, at learning rates of 0.01, 0.03, 0.1 and "
    "0.3. Finished runs are kept, interrupted runs resume, and more remedies, rates and seeds can be added to the "
    "directory later.",
    grid=LR_GRID,
    runs=parts,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
)


# Latent-attention study: which remedies limit logits that are products of three matrices, and under which optimizer.

MLA_GRID = Grid(
    remedies=(
        "none",
        "frozen_qk",
        "qk_norm",
        "qk_clip:threshold=30",
        "lalr:tau=0.1",
        "qk_lr:factor=0.1",
    ),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2),
    blocks=("mla", "mha"),
    optimizers=("adamw", "muon"),
)
# Source: Anson & Aitchison 2025, arXiv 2511.21377, section 4: remedies on MHA and MLA under Muon.
MLA = Study(
    name="mla",
    line="Latent and multi-head attention × AdamW and Muon × remedies × learning rates × seeds.",
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
    remedies=("none", "frozen_qk", ORIGIN, "qk_norm", "lalr:tau=0.1"),
    lrs=(0.003, 0.01, 0.03, 0.1),
    seeds=(0, 1, 2),
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
    name="translation",
    line="An encoder–decoder on a few text pairs: remedies on self- and cross-attention × learning rates × seeds.",
    help="The default remedies are none, frozen_qk, the norm of the first QK-norm paper, qk_norm and lalr:tau=0.1, "
    "at learning rates of 0.003, 0.01, 0.03 and 0.1, on 1000 pairs of 48 bytes. If sacrebleu is installed, the BLEU of "
    "greedy decoding is reported beside the loss. Finished runs are kept, interrupted "
    "runs resume, and more runs can be added later.",
    grid=TRANSLATION_GRID,
    runs=parts,
    base=TRANSLATION_BASE,
    options=(*AXIS_OPTIONS, OPTIMIZERS),
    decides=(("optim", "lr"), ("data", "task")),
)


# Length study: which forms of attention, trained on short texts, work on long texts, as trained or changed post hoc.

FORMS = (
    "baseline",
    "baseline_logn",
    "qna",
    "qna_logn",
    "kna",
    "kna_logn",
    "cosa",
    "cosa_logn",
)
BLOCKS = ("gau", "mha1", "mha4")
EXTRAPOLATION_GRID = Grid(remedies=FORMS, lrs=(0.01,), seeds=(0, 1), blocks=("gau",))
CONTEXTS = LongContexts(
    posthoc=("none", "baseline/rerope", "baseline/ntk", "kna/rerope", "kna/ntk")
)
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
    runs = []
    for block in grid.blocks or EXTRAPOLATION_GRID.blocks:
        for form in grid.remedies:
            model = {**_sizes(base.model, block), **_trained(form, base)}
            alone = dataclasses.replace(grid, remedies=(base.remedy,))
            runs_of_form = product(with_values(base, model=model), alone, block)
            runs += [dataclasses.replace(run, form=form) for run in runs_of_form]
    return runs


def _sizes(model: ModelConfig, block: str) -> dict[str, object]:
    check_known("block of the extrapolation study", block, BLOCKS)
    if block == "gau":
        layers = 2 * model.n_layers
        return {
            "block": "gau",
            "n_heads": 1,
            "n_kv_heads": None,
            "head_dim": model.d_model,
            "n_layers": layers,
        }
    return {
        "block": "mha",
        "n_heads": int(block[-1]),
        "n_kv_heads": None,
        "head_dim": None,
    }


def _trained(form: str, base: RunConfig) -> dict[str, str]:
    """Returns the attention and position of a form, with the training length if the form's constants depend on it."""
    # Imports torch.
    from qkeel.spec import PRESETS

    terms = parse(form)
    attention, _, position = form.partition("+") if len(terms) > 1 else (form, "", "")
    term = next(iter(terms))
    takes = inspect.signature(
        lookup("attention form", PRESETS, term.name).build
    ).parameters
    if "train_length" in takes:
        options = {"train_length": base.data.context, **term.options}
        attention = str(dataclasses.replace(term, options=options))
    return {"attention": attention, "position": position or base.model.position}


OPTIONS = (
    StudyOption(
        "forms",
        list[str],
        "Forms of attention: presets, or preset+position as in kna+alibi [default: baseline qna kna cosa, each with "
        "and without _logn].",
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
        "test_lengths",
        list[int],
        "Context lengths in tokens to test at, multiples of the training length [default: 8 times the training "
        "length].",
    ),
    StudyOption(
        "test_sequences", int, "Number of held-out texts per length [default: 64]."
    ),
    StudyOption(
        "train_length", int, "Context length in training, in tokens [default: 64]."
    ),
)


def request(base: RunConfig, default: Grid, given: StudyOptions) -> Request:
    """Returns the configuration, grid and contexts for the given options."""
    length = given.get("train_length", base.data.context)
    base = with_values(base, data={"context": length})
    grid = Grid(
        remedies=given.get("forms") or default.remedies,
        lrs=(base.optim.lr,),
        seeds=given.get("seeds") or default.seeds,
        blocks=given.get("blocks") or default.blocks,
    )
    contexts = LongContexts(
        posthoc=given.get("posthoc", CONTEXTS.posthoc),
        test_lengths=given.get("test_lengths", (8 * length,)),
        sequences=given.get("test_sequences", CONTEXTS.sequences),
    )
    return base, grid, contexts


EXTRAPOLATION = Study(
    name="extrapolation",
    line="Train short, test long: forms of attention × blocks × seeds, tested as trained and with post-hoc changes.",
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
        *(
            ("model", name)
            for name in ("block", "attention", "n_heads", "n_kv_heads", "head_dim")
        ),
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
MULTIMODAL_BASE = RunConfig(
    data=DataConfig(task="multimodal", context=96, batch=8),
    optim=OptimConfig(lr=0.01),
    steps=200,
    eval_sequences=64,
    probe_sequences=8,
)
# The fields of ImagesConfig that each mix sets.
MIXES: dict[str, dict[str, object]] = {
    "text": {"image_share": 0.0},
    "mix": {"image_share": 0.5},
    "images": {"image_share": 1.0},
    "patches": {"image_share": 0.5, "image_input": "patches"},
}
_OPTIONS = {
    "share": "image_share",
    "variance": "image_variance",
    "norm": "norm_order",
}


def multimodal_runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns the runs mixes × remedies × rates × seeds, with one role per mix.

    Source: the question is from Chameleon, arXiv 2405.09818, section 2.3; the mixes are our own.
    """
    return [
        run
        for mix in grid.mixes or MULTIMODAL_GRID.mixes
        for run in product(mixed(base, mix), grid, mix)
    ]


MULTIMODAL = Study(
    name="multimodal",
    line="Text and images in one sequence: mixes × remedies × learning rates × seeds, all measured on one fixed batch.",
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
)


def mixed(base: RunConfig, mix: str) -> RunConfig:
    """Returns the configuration for a mix like 'patches:share=0.25,variance=4,norm=none'.

    >>> mixed(RunConfig(), "mix:share=0.25").images.image_share
    0.25

    Raises:
        UnknownNameError: the mix or an option is unknown.
    """
    term = parse(mix)[0]
    fields = dict(lookup("data mix", MIXES, term.name))
    for option, value in term.options.items():
        check_known(f"option of mix {term.name}", option, _OPTIONS)
        fields[_OPTIONS[option]] = value
    order = fields.pop("norm_order", base.model.norm_order)
    return with_values(
        base, model={"norm_order": order}, data={"task": "multimodal"}, images=fields
    )


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (LR, MLA, DEMO, EXTRAPOLATION, TRANSLATION, MULTIMODAL)
}


def find_study(name: str) -> Study:
    """Returns the study of this name.

    >>> find_study("lr").grid.lrs
    (0.01, 0.03, 0.1, 0.3)

    Raises:
        UnknownNameError: there is no such study.
    """
    return lookup("study", STUDIES, name)
