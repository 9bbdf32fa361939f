"""The multimodal study: text, images, or both in one sequence, under the same probe."""

from __future__ import annotations

from qkeel.errors import check_known
from qkeel.lab.config import DataConfig, OptimConfig, RunConfig, with_values
from qkeel.lab.plan import AXIS_OPTIONS, Grid, Option, PlannedRun, Study, product
from qkeel.registry import lookup, parse

# Chameleon, arXiv 2405.09818, section 2.3: what held its two sizes.
CHAMELEON_7B = "qk_norm:kind=layer+dropout:rate=0.1+z_loss:coefficient=1e-05"
CHAMELEON_34B = "qk_norm:kind=layer+swin_norm+z_loss:coefficient=1e-05"
DEFAULT = Grid(
    remedies=("none", "qk_norm", "swin_norm", CHAMELEON_7B, CHAMELEON_34B),
    lrs=(0.01, 0.1),
    seeds=(0, 1, 2),
    mixes=("text", "mix"),
)
# Where the variance of what enters decides: every cell is run, every cell is published.
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
BASE = RunConfig(
    data=DataConfig(task="multimodal", context=96, batch=8),
    optim=OptimConfig(lr=0.01),
    steps=200,
    eval_sequences=64,
    probe_sequences=8,
)
# Half as long: what the variance of the input does shows early, and there are 162 runs.
REGIME_BASE = with_values(BASE, steps=100, log_every=20)
# Where each named mix starts from: fields of ImagesConfig.
MIXES: dict[str, dict[str, object]] = {
    "text": {"image_share": 0.0},
    "mix": {"image_share": 0.5},
    "images": {"image_share": 1.0},
    "patches": {"image_share": 0.5, "image_input": "patches"},
}
_OPTIONS = {"share": "image_share", "variance": "image_variance", "first": "image_first", "norm": "norm_order"}


def runs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns mixes × remedies × rates × seeds, each mix a part.

    Source: Chameleon, arXiv 2405.09818, section 2.3, for the question; the mixes are our own.
    """
    return [run for mix in grid.mixes or DEFAULT.mixes for run in product(mixed(base, mix), grid, mix)]


STUDY = Study(
    help="By default text alone and text mixed with handwritten digits; none, qk_norm, swin_norm and what held "
    "Chameleon 7B and 34B; rates 0.01 and 0.1. Finished runs are kept, killed ones resume, and the directory takes "
    "more later.",
    grid=DEFAULT,
    runs=runs,
    base=BASE,
    options=(
        *AXIS_OPTIONS,
        Option(
            "mixes",
            list[str],
            "Mixes: text, mix, images, patches, with options as in patches:share=0.25,variance=4,norm=none.",
        ),
    ),
    instead={
        "grid": Study(
            help="The search for a regime: patches of variance 1, 4, 16 in 1/4, 1/2, 3/4 of sequences, with and "
            "without norms.",
            grid=REGIMES,
            runs=runs,
            base=REGIME_BASE,
        )
    },
)


def mixed(base: RunConfig, mix: str) -> RunConfig:
    """The configuration under a mix like 'patches:share=0.25,variance=4,norm=none'.

    Raises: UnknownNameError for another name or option.
    """
    term = parse(mix)[0]
    fields = dict(lookup("data mix", MIXES, term.name))
    for option, value in term.options.items():
        check_known(f"option of mix {term.name}", option, _OPTIONS)
        fields[_OPTIONS[option]] = value
    order = fields.pop("norm_order", base.model.norm_order)
    return with_values(base, model={"norm_order": order}, data={"task": "multimodal"}, images=fields)
