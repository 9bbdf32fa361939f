"""A claim of the literature and the rule of its verdict, and the texts that claims are taken from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MARGIN = 0.01  # nats, or share of accuracy; a smaller difference counts as none
OF_ALL_RATES = ("lr_sensitivity", "largest_stable_lr")  # columns that are made of a seed's runs at all rates


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A number of one run per seed: the rows of a study's table with these values, and the column that is read."""

    where: Mapping[str, object]
    column: str
    times: float = 1.0
    """Factor on it."""
    study: str = ""
    """The study that has it, where that is not the claim's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A claim in our words, its source, and the rule of its verdict.

    Per seed left - right is taken, or ln(left / right) where `ratio`. Held if the interval of its mean lies above 0;
    where `equal`, if it lies inside ±MARGIN. Contradicted if the interval lies elsewhere, else undecided.
    """

    text: str
    source: str
    study: str
    left: Cell | float
    right: Cell | float
    ratio: bool = False
    equal: bool = False


def loss(remedy: str, lr: float, **more: object) -> Cell:
    return Cell({"remedy": remedy, "lr": lr, **more}, "val_loss")


def logit(remedy: str, lr: float, **more: object) -> Cell:
    return Cell({"remedy": remedy, "lr": lr, **more}, "max_logit")


def change(remedy: str, lr: float) -> Cell:
    return Cell({"remedy": remedy, "lr": lr}, "logit_change")


def sensitivity(remedy: str) -> Cell:
    return Cell({"remedy": remedy}, "lr_sensitivity")


def stable(remedy: str, times: float = 1.0) -> Cell:
    return Cell({"remedy": remedy}, "largest_stable_lr", times)


def mixed(column: str, lr: float, mix: str = "mix", remedy: str = "none") -> Cell:
    return Cell({"remedy": remedy, "lr": lr, "mix": mix}, column)


def at_length(form: str, posthoc: str, column: str, times: float = 1.0) -> Cell:
    return Cell({"form": form, "posthoc": posthoc}, column, times)


OURS = "a question of ours"
HENRY = "Henry et al., Query-Key Normalization for Transformers, 2020"
DEHGHANI = "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023"
WORTSMAN = "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023"
ZHAI = "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023"
SU = "Su, on key normalisation and length, kexue.fm 9859, 2023"
CHAMELEON = "Chameleon Team, Chameleon: Mixed-Modal Early-Fusion Foundation Models, 2024"
DRIFT = "Taylor, QK Norm and the Curious Case of Logit Drift, 2024"
GEMMA = "Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024"
NOTES = "notes on the theory of QK norm in transformers, 2024"
RAMAPURAM = "Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, 2024"
RYBAKOV = "Rybakov et al., Methods of improving LLM training stability, 2024"
ANSON = "Anson & Aitchison, Controlling changes to attention logits, 2025"
INTRODUCTION = "an introduction to QK-norm, 2025"
KIMI = "Kimi Team, Kimi K2: Open Agentic Intelligence, 2025"
