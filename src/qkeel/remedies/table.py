"""The table of remedies, and the remedies that a spec string stands for; `options.parse` takes the string apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qkeel.errors import InvalidTypeError
from qkeel.options import Term, build, lookup
from qkeel.options import parse as parse_terms
from qkeel.remedies.base import NoRemedy, Remedy
from qkeel.remedies.lalr import LALR
from qkeel.remedies.one_slot import (
    AttentionTemperature,
    LogNRemedy,
    SigmoidRemedy,
    SinkRemedy,
    SoftcapRemedy,
    SoftpickRemedy,
)
from qkeel.remedies.output_gate import OutputGate
from qkeel.remedies.output_head import FinalSoftcap, ZLoss
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.qk_norm import Cosine, KeyNorm, QKNorm, QueryNorm
from qkeel.remedies.qk_weights import (
    FrozenQK,
    QKLearningRate,
    QKWeightDecay,
    SpectralCap,
)
from qkeel.remedies.qkv_norm import QKVNorm
from qkeel.remedies.residual_branches import Dropout, PeriNorm, SwinNorm
from qkeel.remedies.sigma_reparam import SigmaReparam

REMEDIES: dict[str, type[Remedy]] = {
    "none": NoRemedy,
    "qk_norm": QKNorm,
    "qkv_norm": QKVNorm,
    "key_norm": KeyNorm,
    "query_norm": QueryNorm,
    "cosine": Cosine,
    "softcap": SoftcapRemedy,
    "log_n": LogNRemedy,
    "attention_temperature": AttentionTemperature,
    "sigmoid": SigmoidRemedy,
    "softpick": SoftpickRemedy,
    "sink": SinkRemedy,
    "output_gate": OutputGate,
    "qk_clip": QKClip,
    "lalr": LALR,
    "qk_lr": QKLearningRate,
    "frozen_qk": FrozenQK,
    "qk_weight_decay": QKWeightDecay,
    "sigma_reparam": SigmaReparam,
    "spectral_cap": SpectralCap,
    "z_loss": ZLoss,
    "final_softcap": FinalSoftcap,
    "swin_norm": SwinNorm,
    "peri_norm": PeriNorm,
    "dropout": Dropout,
}
ALIASES: dict[str, str] = {"quack": "lalr"}


RemedySpec = str | Remedy | Sequence[str | Remedy]


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A one-line description of a remedy, and its source."""

    line: str  #: what the remedy does
    source: str  #: author, year and number, or its derivation


def remedies() -> dict[str, str]:
    """Returns the names of all remedies, each with a one-line description and its source.

    Example:
        >>> remedies()["key_norm"]
        'normalises keys alone [Su 2023, kexue.fm 9859 (KNA)]'
    """
    return {name: f"{cls.line} [{cls.source}]" for name, cls in REMEDIES.items()}


def parse(
    remedy: RemedySpec, **options: float | int | bool | str
) -> tuple[Remedy, ...]:
    """Returns Remedy objects from a spec string ("lalr:tau=0.1+qk_clip"), a Remedy, or a list of both.

    Keyword options are allowed only if a string names a single remedy, to which they apply.

    Raises:
        InvalidTypeError: `remedy` is not a remedy, or there are options for several remedies at once.
        UnknownNameError: a remedy or an option is unknown.

    Example:
        >>> parse("quack", tau=0.3)
        (LALR(tau=0.3, heads=None),)
    """
    if isinstance(remedy, Remedy):
        _no_options(options, remedy)
        return (remedy,)
    if isinstance(remedy, str):
        terms = parse_terms(remedy)
        if options and len(terms) > 1:
            raise InvalidTypeError(
                f"{remedy!r} names {len(terms)} remedies; write the options into the string"
            )
        return tuple(_make(term, options) for term in terms)
    if not isinstance(remedy, Sequence):
        raise InvalidTypeError(
            f"expected a remedy's name, a Remedy or a list of them, got {type(remedy).__name__}; write "
            'qkeel.apply(model, "qk_norm", optimizer)'
        )
    _no_options(options, remedy)
    return tuple(parsed for entry in remedy for parsed in parse(entry))


def canonical(text: str) -> str:
    """Returns the canonical spelling of a remedy string, with aliases resolved and options sorted.

    Example:
        >>> canonical("quack:tau=0.10")
        'lalr:tau=0.1'
    """
    parse(text)
    terms = [Term(ALIASES.get(t.name, t.name), t.options) for t in parse_terms(text)]
    return "+".join(map(str, terms))


def note(text: str) -> Note:
    """Returns a description of the remedies in a spec string, with their sources.

    Example:
        >>> note("softpick").source
        'Zuhri et al. 2025, arXiv 2504.20966, equation 5'
    """
    remedies = parse(text)
    return Note(
        "; ".join(r.line for r in remedies),
        "; ".join(dict.fromkeys(r.source for r in remedies)),
    )


def _make(term: Term, options: dict[str, float | int | bool | str]) -> Remedy:
    name = ALIASES.get(term.name, term.name)
    cls = lookup(
        "remedy", {**REMEDIES, **{a: REMEDIES[n] for a, n in ALIASES.items()}}, name
    )
    return build(f"remedy {name!r}", cls, {**term.options, **options})


def _no_options(options: dict[str, float | int | bool | str], named: object) -> None:
    if options:
        raise InvalidTypeError(
            f"options {sorted(options)} need a remedy named by a string, got {named!r}"
        )
