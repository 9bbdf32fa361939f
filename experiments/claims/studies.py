"""The literal table of the studies that are run for claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qkeel.lab import find_study

SEEDS = 16  # of a study whose runs are cheap; the dear ones name a smaller number
# SHA-256 of the texts that runs read, by source: as lab.data.corpus cuts them in CPython 3.11.7.
CORPORA = {
    "stdlib": "1233677bc7b342c4ce0cad4736fe6d15c55cc2615e07e3a0c54b1a9f59e6a4ad",
    "topics": "81c51e0c138d9ce9a1e7e86f42d2c972ac9646dfdceb7325957b4c557f9e72fe",
}

L2 = "qk_norm:gain=scalar,kind=l2"
LALR, FIXED, CLIP, CAP = (
    "lalr:tau=0.1",
    "qk_lr:factor=0.1",
    "qk_clip:threshold=30",
    "softcap:cap=50",
)
MICRO = (
    "none",
    "qk_norm",
    L2,
    "qkv_norm",
    CAP,
    CLIP,
    LALR,
    FIXED,
    "sigma_reparam",
    "sigmoid",
    "qk_norm+sigmoid",
)
# Chameleon, section 2.3: norm and what is added to it.
LAYER = "qk_norm:kind=layer"
DROPOUT, SWIN, Z_LOSS = "+dropout:rate=0.1", "+swin_norm", "+z_loss:coefficient=1e-05"
CHAMELEON_7B, CHAMELEON_34B = LAYER + DROPOUT + Z_LOSS, LAYER + SWIN + Z_LOSS
MIXED = (
    LAYER,
    LAYER + DROPOUT,
    LAYER + SWIN,
    LAYER + Z_LOSS,
    CHAMELEON_7B,
    CHAMELEON_34B,
)
LOUD, EVEN = "variance=16", "variance=1"  # of image embeddings; that of text is 1
BARE, NORMED = "patches:norm=none,", "patches:norm=pre,"
RATES = (
    0.01,
    0.015,
    0.022,
    0.033,
    0.05,
    0.075,
    0.11,
    0.17,
    0.25,
    0.37,
    0.55,
    0.85,
    1.3,
    1.9,
    2.8,
    4.2,
)
# Wortsman et al. 2023, arXiv 2309.14322, section 2.1.
DECADES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FORMS = find_study("extrapolation").grid.remedies
CONTINUED = ("kna/none@512", "baseline/none@512", "baseline/pi@512", "baseline/abf@512")
# Su 2023 has ReRoPE with a window of a quarter of the training length.
METHODS = {"ntk": "ntk", "yarn": "yarn", "rerope": "rerope:window=16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """A study of qkeel.lab and how it is run: what is not given is the study's own."""

    study: str
    grid: Mapping[str, Any]
    """Its axes but for seeds."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of its runs, those of a section as "data.task"."""
    posthoc: Sequence[str] = ()
    """Post-hoc methods of a study of lengths."""
    seeds: int = SEEDS


STUDIES: dict[str, Runs] = {
    "micro": Runs("lr", {"remedies": MICRO, "lrs": (0.01, 0.03, 0.1, 0.3)}),
    "decades": Runs("lr", {"remedies": ("none", "qk_norm"), "lrs": DECADES}),
    "rates": Runs("lr", {"remedies": ("none", "qk_norm", "qkv_norm"), "lrs": RATES}),
    "heads": Runs(
        "lr", {"remedies": ("none",), "lrs": (0.03, 0.1), "head_dim": (16, 64)}
    ),
    "latent": Runs(
        "mla",
        {
            "remedies": ("none", "qk_norm", CLIP, LALR, FIXED),
            "lrs": (0.1, 0.3),
            "blocks": ("mla",),
            "optimizers": ("adamw", "muon"),
        },
        seeds=8,
    ),
    "lengths": Runs(
        "extrapolation",
        {"remedies": (*FORMS, "kna+nope", "cosa:gain=true")},
        posthoc=(
            "none",
            *(f"{form}/{method}" for form in FORMS for method in METHODS.values()),
            *CONTINUED,
        ),
        seeds=8,
    ),
    "mixed": Runs("multimodal", {"remedies": MIXED, "lrs": (0.1,), "mixes": ("mix",)}),
    "modalities": Runs(
        "multimodal",
        {"remedies": ("none",), "lrs": (0.01, 0.1), "mixes": ("text", "mix")},
    ),
    "variance": Runs(
        "multimodal",
        {
            "remedies": ("none", "sigmoid"),
            "lrs": (0.01,),
            "mixes": (BARE + EVEN, BARE + LOUD, NORMED + EVEN, NORMED + LOUD),
        },
        {"steps": 100, "log_every": 20},
    ),
    "vision": Runs(
        "lr",
        {"remedies": ("none", LAYER), "lrs": (0.01, 0.1)},
        {"data.task": "vision", "eval_every": 10},
    ),
    "bf16": Runs(
        "lr", {"remedies": ("none", "qk_norm"), "lrs": (0.1,)}, {"dtype": "bf16"}
    ),
    "translation": Runs(
        "translation",
        {"remedies": ("none", L2, "qk_norm"), "lrs": (0.01, 0.1)},
        seeds=8,
    ),
    "fp16": Runs(
        "lr", {"remedies": ("none", "qk_norm"), "lrs": (0.3,)}, {"dtype": "fp16"}
    ),
}
