"""The table of remedies, and `apply`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from qkeel.errors import AlreadyAppliedError, InvalidTypeError, RefusedError
from qkeel.handle import Handle, compose
from qkeel.registry import Term, build, lookup
from qkeel.registry import parse as parse_terms
from qkeel.remedies.base import Remedy, Target
from qkeel.remedies.lalr import LALR
from qkeel.remedies.none import NoRemedy
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.qk_lr import QKLearningRate
from qkeel.remedies.qk_norm import QKNorm
from qkeel.remedies.qkv_norm import QKVNorm
from qkeel.remedies.sigma_reparam import SigmaReparam
from qkeel.remedies.softcap import SoftcapRemedy
from qkeel.sites.find import find_sites

REMEDIES: dict[str, type[Remedy]] = {
    "none": NoRemedy,
    "qk_norm": QKNorm,
    "qkv_norm": QKVNorm,
    "softcap": SoftcapRemedy,
    "qk_clip": QKClip,
    "lalr": LALR,
    "qk_lr": QKLearningRate,
    "sigma_reparam": SigmaReparam,
}
ALIASES: dict[str, str] = {"quack": "lalr"}

Named = str | Remedy | Sequence[str | Remedy]


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """What a remedy does, in one line, and where it comes from."""

    line: str
    source: str


def remedies() -> dict[str, str]:
    """Names of all remedies, each with one line and its source."""
    return {name: f"{cls.line} [{cls.source}]" for name, cls in REMEDIES.items()}


def parse(named: Named, **options: float | int | bool | str) -> tuple[Remedy, ...]:
    """Remedy objects from a spec string ("lalr:tau=0.1+qk_clip"), an object, or a list of both.

    Keyword options go to the one remedy named.

    >>> parse("quack", tau=0.3)
    (LALR(tau=0.3, norm='frobenius'),)
    """
    if isinstance(named, Remedy):
        _no_options(options, named)
        return (named,)
    if isinstance(named, str):
        terms = parse_terms(named)
        if options and len(terms) > 1:
            raise InvalidTypeError(f"{named!r} names {len(terms)} remedies; write the options into the string")
        return tuple(_make(term, options) for term in terms)
    if not isinstance(named, Sequence):
        raise InvalidTypeError(f"expected a remedy's name, a Remedy or a list of them, got {named!r}")
    _no_options(options, named)
    return tuple(remedy for one in named for remedy in parse(one))


def canonical(text: str) -> str:
    """The one spelling of a remedy string: aliases resolved, options sorted.

    >>> canonical("quack:tau=0.10")
    'lalr:tau=0.1'
    """
    parse(text)
    terms = [Term(ALIASES.get(t.name, t.name), t.options) for t in parse_terms(text)]
    return "+".join(map(str, terms))


def note(text: str) -> Note:
    """What the remedies of a spec string do, and their sources."""
    found = parse(text)
    return Note("; ".join(r.line for r in found), "; ".join(dict.fromkeys(r.source for r in found)))


def apply(
    named: Named,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    train_length: int | None = None,
    **options: float | int | bool | str,
) -> Handle:
    """Apply remedies to a model (and its optimizer); `handle.remove()` restores both bit for bit.

    Args:
        named: "lalr", "lalr:tau=0.1+qk_clip", a Remedy, or a list. Options of a single remedy may be keywords.
        train_length: tokens per training sequence, for formulas that need it (L2 norm with learned scale).

    Raises:
        UnknownNameError: no such remedy or option. RefusedError: the remedy makes no sense here; the message
        says where and why. AlreadyAppliedError: it is on this model already. The model is then as it was.
    """
    found = parse(named, **options)
    marks: set[str] = model.__dict__.setdefault("_qkeel_applied", set())
    handles: list[Handle] = []
    try:
        for remedy in found:
            handles.append(_apply_one(remedy, model, optimizer, train_length, marks))
    except BaseException:
        compose(handles).remove()
        if not marks:
            model.__dict__.pop("_qkeel_applied", None)
        raise
    return compose(handles)


def _apply_one(
    remedy: Remedy, model: nn.Module, optimizer: Optimizer | None, train_length: int | None, marks: set[str]
) -> Handle:
    if remedy.name in marks:
        raise AlreadyAppliedError(f"{remedy.name} is on this model already; remove() its handle first")
    sites = find_sites(model)
    for site in sites:
        refusal = remedy.supports(site)
        if refusal is not None:
            raise RefusedError(f"{remedy.name} at {site.name or 'the model itself'}: {refusal}")
    inner = remedy.apply(Target(model=model, optimizer=optimizer, sites=sites, train_length=train_length))
    marks.add(remedy.name)

    def undo() -> None:
        inner.remove()
        marks.discard(remedy.name)
        if not marks:
            model.__dict__.pop("_qkeel_applied", None)

    return Handle(undo, state=inner.state, load=inner.load)


def _make(term: Term, options: dict[str, float | int | bool | str]) -> Remedy:
    name = ALIASES.get(term.name, term.name)
    cls = lookup("remedy", {**REMEDIES, **{a: REMEDIES[n] for a, n in ALIASES.items()}}, name)
    return build(f"remedy {name!r}", cls, {**term.options, **options})


def _no_options(options: dict[str, float | int | bool | str], named: object) -> None:
    if options:
        raise InvalidTypeError(f"options {sorted(options)} need a remedy named by a string, got {named!r}")
