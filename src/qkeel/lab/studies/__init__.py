"""The table of studies, used by `qkeel.lab.study` and exposed as commands."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from qkeel.options import lookup

if TYPE_CHECKING:
    from qkeel.lab.plan import Study

# Name -> location of the Study, and its line in the list of commands. Modules are imported only when a study is used,
# so that `qkeel --help` does not wait for torch.
STUDIES: dict[str, tuple[str, str]] = {
    "lr": (
        "qkeel.lab.studies.grids:LR",
        "Remedies × learning rates × seeds: which remedies widen the range of learning rates that train well.",
    ),
    "mla": (
        "qkeel.lab.studies.grids:MLA",
        "Latent and multi-head attention × AdamW and Muon × remedies × learning rates × seeds.",
    ),
    "demo": (
        "qkeel.lab.studies.grids:DEMO",
        "See logits explode on real text and which remedies prevent this, in about a minute.",
    ),
    "extrapolation": (
        "qkeel.lab.studies.grids:EXTRAPOLATION",
        "Train short, test long: forms of attention × blocks × seeds, tested as trained and with post-hoc changes.",
    ),
    "translation": (
        "qkeel.lab.studies.grids:TRANSLATION",
        "An encoder–decoder on a few text pairs: remedies on self- and cross-attention × learning rates × seeds.",
    ),
    "multimodal": (
        "qkeel.lab.studies.grids:MULTIMODAL",
        "Text and images in one sequence: mixes × remedies × learning rates × seeds, all measured on one fixed batch.",
    ),
    "chaos": (
        "qkeel.lab.studies.grids:CHAOS",
        "Train each configuration twice, with one weight changed by one float32 ulp, to measure numerical noise.",
    ),
    "drift": (
        "qkeel.lab.studies.grids:DRIFT",
        "Sizes × schedules × remedies × learning rates × seeds: how the largest logit grows while a model trains.",
    ),
    "edge": (
        "qkeel.lab.studies.grids:EDGE",
        "Pairs of runs one float32 step apart × remedies × rates × widths: the rate above which pairs diverge.",
    ),
    "transfer": (
        "qkeel.lab.studies.grids:TRANSFER",
        "Remedies at their tuned rates × sizes × standard and µP: whether a ranking holds at a larger size.",
    ),
}


def find_study(name: str) -> Study:
    """Returns the study of this name.

    Raises:
        UnknownNameError: there is no such study.
    """
    module, _, attribute = lookup("study", STUDIES, name)[0].partition(":")
    study: Study = vars(importlib.import_module(module))[attribute]
    return study
