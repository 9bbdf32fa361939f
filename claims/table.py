"""The two literal tables: studies that are run for claims, and claims with the rule of their verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qkeel.lab.plan import FULL_GRID

SEEDS = 8
# SHA-256 of the text that all runs read: the standard library of CPython 3.11.7, as lab.data.corpus cuts it.
CORPUS = "1233677bc7b342c4ce0cad4736fe6d15c55cc2615e07e3a0c54b1a9f59e6a4ad"

L2 = "qk_norm:gain=scalar,kind=l2"
LALR, FIXED, CLIP, CAP = "lalr:tau=0.1", "qk_lr:factor=0.1", "qk_clip:threshold=30", "softcap:cap=50"
MICRO = ("none", "qk_norm", L2, "qkv_norm", CAP, CLIP, LALR, FIXED, "sigma_reparam", "sigmoid", "qk_norm+sigmoid")
# name -> the study of qkeel.lab, and its grid but for seeds; None: the study's own grid
STUDIES: dict[str, tuple[str, Mapping[str, Any] | None]] = {
    "micro": ("lr", {"remedies": MICRO, "lrs": (0.01, 0.03, 0.1, 0.3)}),
    "decades": ("lr", {"remedies": ("none", "qk_norm"), "lrs": FULL_GRID}),
    "latent": (
        "mla",
        {
            "remedies": ("none", "qk_norm", CLIP, LALR, FIXED),
            "lrs": (0.1, 0.3),
            "blocks": ("mla",),
            "optimizers": ("adamw", "muon"),
        },
    ),
    "lengths": ("extrapolation", None),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A number of one run per seed: the rows of a study's table with these values, and the column that is read."""

    where: Mapping[str, object]
    column: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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


MARGIN = 0.01  # nats; a smaller difference of held-out loss counts as none


def loss(remedy: str, lr: float, **more: object) -> Cell:
    return Cell({"remedy": remedy, "lr": lr, **more}, "val_loss")


def logit(remedy: str, lr: float, **more: object) -> Cell:
    return Cell({"remedy": remedy, "lr": lr, **more}, "max_logit")


def sensitivity(remedy: str) -> Cell:
    return Cell({"remedy": remedy}, "lr_sensitivity")


def kept(form: str, posthoc: str) -> Cell:
    return Cell({"form": form, "posthoc": posthoc}, "kept_nonrepeat")


WORTSMAN = "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023"
HENRY = "Henry et al., Query-Key Normalization for Transformers, 2020"
DEHGHANI = "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023"
KIMI = "Kimi Team, Kimi K2: Open Agentic Intelligence, 2025"
ZHAI = "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023"
RYBAKOV = "Rybakov et al., Methods of improving LLM training stability, 2024"
ANSON = "Anson & Aitchison, Controlling changes to attention logits, 2025"
GEMMA = "Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024"
SU = "Su, on key normalisation and length, kexue.fm 9859, 2023"
MLA = {"block": "mla", "optimizer": "adamw"}

CLAIMS: tuple[Claim, ...] = (
    Claim(
        text="Without a remedy logits pass 100 at a high learning rate (LR 0.1)",
        source=WORTSMAN,
        study="micro",
        left=logit("none", 0.1),
        right=100.0,
        ratio=True,
    ),
    Claim(
        text="… and attention collapses to one key (entropy under 0.1 nats at LR 0.1)",
        source=ZHAI,
        study="micro",
        left=0.1,
        right=Cell({"remedy": "none", "lr": 0.1}, "end_entropy"),
    ),
    Claim(
        text="… and the loss diverges, to that of initialisation or worse (LR 0.1)",
        source=WORTSMAN,
        study="micro",
        left=loss("none", 0.1),
        right=Cell({"remedy": "none", "lr": 0.1}, "init_loss"),
    ),
    Claim(
        text="QK-norm holds the logits under 100 at LR 0.1",
        source=DEHGHANI,
        study="micro",
        left=100.0,
        right=logit("qk_norm", 0.1),
        ratio=True,
    ),
    Claim(
        text="QK-norm trains better at a high learning rate (LR 0.1)",
        source=DEHGHANI,
        study="micro",
        left=loss("none", 0.1),
        right=loss("qk_norm", 0.1),
    ),
    Claim(
        text="QK-norm lowers LR sensitivity over three decades of rates",
        source=WORTSMAN,
        study="decades",
        left=sensitivity("none"),
        right=sensitivity("qk_norm"),
    ),
    Claim(
        text="QK-norm costs nothing at a healthy rate (LR 0.01)",
        source=WORTSMAN,
        study="micro",
        left=loss("none", 0.01),
        right=loss("qk_norm", 0.01),
        equal=True,
    ),
    Claim(
        text="The L2 norm with a learned scale of 2020 is as good as RMS QK-norm (LR 0.1)",
        source=f"a question of ours; the norm: {HENRY}",
        study="micro",
        left=loss("qk_norm", 0.1),
        right=loss(L2, 0.1),
        equal=True,
    ),
    Claim(
        text="Softcapping holds the logits that enter the cap under 100 (LR 0.1)",
        source=GEMMA,
        study="micro",
        left=100.0,
        right=logit(CAP, 0.1),
        ratio=True,
    ),
    Claim(
        text="QK-Clip holds logits at its threshold of 30 (LR 0.1)",
        source=KIMI,
        study="micro",
        left=30.0,
        right=logit(CLIP, 0.1),
        ratio=True,
    ),
    Claim(
        text="σReparam holds the logits under 100 at LR 0.1",
        source=ZHAI,
        study="micro",
        left=100.0,
        right=logit("sigma_reparam", 0.1),
        ratio=True,
    ),
    Claim(
        text="QKV-norm beats QK-norm at high rates (LR 0.1)",
        source=RYBAKOV,
        study="micro",
        left=loss("qk_norm", 0.1),
        right=loss("qkv_norm", 0.1),
    ),
    Claim(
        text="LALR matches QK-norm in multi-head attention (LR 0.1)",
        source=ANSON,
        study="micro",
        left=loss("qk_norm", 0.1),
        right=loss(LALR, 0.1),
        equal=True,
    ),
    Claim(
        text="LALR beats a fixed smaller rate of q and k (LR 0.3)",
        source=ANSON,
        study="micro",
        left=loss(FIXED, 0.3),
        right=loss(LALR, 0.3),
    ),
    Claim(
        text="LALR is free at a low rate (LR 0.01)",
        source="a question of ours",
        study="micro",
        left=loss("none", 0.01),
        right=loss(LALR, 0.01),
        equal=True,
    ),
    Claim(
        text="Lowering only the rate of q and k does not help (LR 0.1)",
        source=KIMI,
        study="micro",
        left=loss("none", 0.1),
        right=loss(FIXED, 0.1),
        equal=True,
    ),
    Claim(
        text="QK-norm lowers the LR sensitivity of sigmoid attention too",
        source="Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, 2024",
        study="micro",
        left=sensitivity("sigmoid"),
        right=sensitivity("qk_norm+sigmoid"),
    ),
    Claim(
        text="On latent attention LALR beats QK-Clip (AdamW, LR 0.1)",
        source=ANSON,
        study="latent",
        left=loss(CLIP, 0.1, **MLA),
        right=loss(LALR, 0.1, **MLA),
    ),
    Claim(
        text="On latent attention LALR beats QK-norm (AdamW, LR 0.3)",
        source=ANSON,
        study="latent",
        left=loss("qk_norm", 0.3, **MLA),
        right=loss(LALR, 0.3, **MLA),
    ),
    Claim(
        text="KeyNorm keeps more of its accuracy at 8 times the training length",
        source=SU,
        study="lengths",
        left=kept("kna", "none"),
        right=kept("baseline", "none"),
    ),
    Claim(
        text="ReRoPE extends a plain model to 8 times the training length without training (95 % kept)",
        source=SU,
        study="lengths",
        left=kept("baseline", "rerope"),
        right=0.95,
    ),
)
