"""A claim of the literature and the rule of its verdict, and the texts that claims are taken from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

OF_ALL_RATES = (
    "lr_sensitivity",
    "largest_stable_lr",
)  # columns that are made of a seed's runs at all rates


@dataclasses.dataclass(frozen=True, slots=True)
class Margin:
    """The smallest effect that matters, in the unit of the number, and why that one."""

    size: float
    unit: str
    reason: str


_NATS = Margin(
    0.01,
    "nats",
    "a run that is computed by another path, which rounds otherwise, ends up to 0.013 nats away at LR 0.03: nobody "
    "could rely on a smaller difference",
)
_SHARE = Margin(
    0.01,
    "share",
    "one point of a hundred, the last digit that the sources' tables can be read to",
)
_RATIO = Margin(
    math.log(1.1),
    "×",
    "a tenth: logits, norms and their changes differ by more from one head to the next, and no "
    "threshold of a remedy is set more finely",
)
_RATES = Margin(
    math.log(1.5),
    "× rate",
    "one step of the grid of rates, which is all that it can resolve",
)
_STEPS = Margin(1.0, "steps", "one step of 150")
_FIT = Margin(0.02, "R²", "a fiftieth of what a fit could explain")
MARGINS: Mapping[str, Margin] = {
    **dict.fromkeys(("val_loss", "lr_sensitivity", "loss_rise", "end_entropy"), _NATS),
    **dict.fromkeys(
        ("val_accuracy", "accuracy_train", "accuracy_nonrepeat", "accuracy_repeat"),
        _SHARE,
    ),
    **dict.fromkeys(
        ("kept_nonrepeat", "cos_outside", "accuracy_train_posthoc"), _SHARE
    ),
    **dict.fromkeys(("exponential", "exponential_in_rates", "power_law"), _FIT),
    "skipped_steps": _STEPS,
}


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
    """A claim in the words of its source, and the rule of its verdict.

    Per seed left - right is taken, or ln(left / right) where `ratio`. The effect is larger than the margin if the
    interval of its centre lies above it (or, against the claim, under minus the margin), inside if it lies inside
    ±margin, else undecided. A claim of a difference is reproduced by a larger effect in its direction and contradicted
    by an interval that lies under the margin, inside or against it; one that two are `equal` is reproduced by an effect
    inside and contradicted by a larger one in either direction.
    """

    text: str
    source: str
    study: str
    left: Cell | float
    right: Cell | float
    ratio: bool = False
    equal: bool = False

    @property
    def margin(self) -> Margin:
        """The smallest effect that matters."""
        side = self.left if isinstance(self.left, Cell) else self.right
        assert isinstance(side, Cell), "a claim reads a run"
        if self.ratio:
            return _RATES if side.column == "largest_stable_lr" else _RATIO
        return MARGINS[side.column]

    @property
    def ours(self) -> bool:
        """Whether nobody else claimed it."""
        return self.source.startswith(OURS)


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


OURS = "our own question"
HENRY = "Henry et al., Query-Key Normalization for Transformers, 2020"
DEHGHANI = "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023"
WORTSMAN = "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023"
ZHAI = "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023"
SU = "Su, on key normalisation and length, kexue.fm 9859, 2023"
CHAMELEON = (
    "Chameleon Team, Chameleon: Mixed-Modal Early-Fusion Foundation Models, 2024"
)
DRIFT = "Taylor, QK Norm and the Curious Case of Logit Drift, 2024"
NOTES = "notes on the theory of QK norm in transformers, 2024"
RAMAPURAM = "Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, 2024"
RYBAKOV = "Rybakov et al., Methods of improving LLM training stability, 2024"
ANSON = "Anson & Aitchison, Controlling changes to attention logits, 2025"
INTRODUCTION = "an introduction to QK-norm, 2025"
KIMI = "Kimi Team, Kimi K2: Open Agentic Intelligence, 2025"
