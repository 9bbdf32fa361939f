"""The table of remedies, and `apply`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.capture.example import arguments
from qkeel.capture.trace import ModelTrace, run_once
from qkeel.errors import AlreadyAppliedError, InvalidTypeError, RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite, Sites
from qkeel.options import build
from qkeel.patching.compiler_state import compile_again
from qkeel.patching.forward_passes import unwrapped
from qkeel.registry import Term, lookup
from qkeel.registry import parse as parse_terms
from qkeel.remedies.base import Remedy, Target, compose_all, where
from qkeel.remedies.final_softcap import FinalSoftcap
from qkeel.remedies.lalr import LALR
from qkeel.remedies.none import NoRemedy
from qkeel.remedies.one_slot import (
    AttentionTemperature,
    LogNRemedy,
    SigmoidRemedy,
    SinkRemedy,
    SoftcapRemedy,
    SoftpickRemedy,
)
from qkeel.remedies.output_gate import OutputGate
from qkeel.remedies.processes.shared_models import WHAT, check_added, check_mates, check_wrapper, on_all_processes
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.qk_norm import Cosine, KeyNorm, QKNorm, QueryNorm
from qkeel.remedies.qk_weights import QKLearningRate, QKWeightDecay, SpectralCap
from qkeel.remedies.qkv_norm import QKVNorm
from qkeel.remedies.residual_branches import Dropout, PeriNorm, SwinNorm
from qkeel.remedies.sigma_reparam import SigmaReparam
from qkeel.remedies.steps.head_weights import check_weights
from qkeel.remedies.z_loss import ZLoss
from qkeel.sites.find import found_sites
from qkeel.sites.named_models import Models, named_models, of_each, sites_of_each

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

_MARK = "_qkeel_applied"  # on a site's module: the remedies in force there, by name

Named = str | Remedy | Sequence[str | Remedy]


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """One line on what a remedy does, and its source."""

    line: str  #: what the remedy does
    source: str  #: author, year, number, or what it was derived from


def remedies() -> dict[str, str]:
    """Names of all remedies, each with one line and its source.

    >>> remedies()["key_norm"]
    'normalises keys alone [Su 2023, kexue.fm 9859 (KNA)]'
    """
    return {name: f"{cls.line} [{cls.source}]" for name, cls in REMEDIES.items()}


def parse(named: Named, **options: float | int | bool | str) -> tuple[Remedy, ...]:
    """Remedy objects from a spec string ("lalr:tau=0.1+qk_clip"), an object, or a list of both.

    Keyword options go to the one remedy named.

    Raises:
        InvalidTypeError: not a remedy, or options for several at once. UnknownNameError: no such remedy or option.

    >>> parse("quack", tau=0.3)
    (LALR(tau=0.3, norm='frobenius', decay='scaled', heads=None),)
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
    """Describes the remedies of a spec string, with their sources.

    >>> note("softpick").source
    'Zuhri et al. 2025, arXiv 2504.20966, equation 5'
    """
    found = parse(text)
    return Note("; ".join(r.line for r in found), "; ".join(dict.fromkeys(r.source for r in found)))


def apply(
    named: Named,
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    example: object = None,
    sites: object = None,
    train_length: int | None = None,
    partial: bool = False,
    **options: float | int | bool | str,
) -> Handle:
    """Apply remedies to a model (and its optimizer); `handle.remove()` restores both bit for bit.

    Where several processes train one model, all of them apply the same remedies at the same place of the program, or
    each raises an error and none is changed; they remove them after the same step.

    >>> from qkeel.nn import Attention
    >>> attention = Attention(16, 4)
    >>> with apply("softcap:cap=30", attention):
    ...     attention.spec.cap.formula()
    '30·tanh(z/30)'

    Args:
        named: "lalr", "lalr:tau=0.1+qk_clip", a Remedy, or a list.
        model: one that has attention anywhere; a part of a model may be given too. Or several as one, such as all
            stages of a pipeline that this process has: a list, or a dict by name.
        optimizer: the one that steps the model's weights; remedies on steps need it, new parameters join it.
        example: a batch that shows where the attention of a model is that does not consist of qkeel's own modules: a
            tensor, a tuple of the forward's arguments or a dict of its keyword arguments; one pass is run on it. Of
            several models one for each, as a list or a dict by name.
        sites: what `find_sites` found in this model, in place of an example: before fully_shard or tensor parallel
            split its weights, which can no longer be followed then. They are known again by their names. Of several
            models for each, as examples are.
        train_length: tokens per training sequence, for formulas that need it (L2 norm with learned scale).
        partial: apply also where the model has attention that was seen but not understood, which stays as it is.
        options: those of a single remedy that is named by a string.

    Raises:
        UnknownNameError: no such remedy or option. RefusedError: the remedy makes no sense here; the message
        says where and why. AlreadyAppliedError: it is on this model already. The model is then as it was.
    """

    def asked() -> tuple[tuple[Remedy, ...], list[tuple[Target, Sites | None]]]:
        found = parse(named, **options)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InvalidTypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        models = {"": model} if isinstance(model, nn.Module) else named_models(model, "apply remedies to")
        shown, known = of_each(example, [*models], "examples"), sites_of_each(sites, models)
        bare: list[tuple[Target, Sites | None]] = []
        for name, one in models.items():
            given = ((), {}) if shown[name] is None else arguments(shown[name])
            target = Target(
                model=unwrapped(one), optimizer=optimizer, sites=[], example=given, train_length=train_length
            )
            bare.append((target, known[name]))
        for target, _ in bare:
            check_wrapper(target.model)
        return found, bare

    def said(request: tuple[tuple[Remedy, ...], Sequence[object]]) -> str:
        given = {"optimizer": optimizer, "example": example, "sites": sites}
        parts = [name if x is not None else f"no {name}" for name, x in given.items()]
        several = [] if isinstance(model, nn.Module) else [f"{len(request[1])} models"]
        return ", ".join([f"{list(request[0])}", *several, *parts, f"train_length={train_length}, partial={partial}"])

    found, bare = dist.done_by_all(WHAT, asked, said, lambda _: None, patience=dist.PATIENCE)

    def applied() -> Handle:
        handles = (compose_all(_apply_all(found, target, known, partial=partial)) for target, known in bare)
        return next(handles) if isinstance(model, nn.Module) else compose_all(handles)

    handle = dist.done_by_all(WHAT, applied, lambda _: "applied", Handle.remove)
    whole = on_all_processes(handle, "+".join(remedy.name for remedy in found), optimizer)
    whole.about = "+".join(remedy.name for remedy in found)
    return whole


def _apply_all(found: Sequence[Remedy], bare: Target, known: Sites | None, *, partial: bool) -> Iterator[Handle]:
    """Apply one remedy after the other. Sites are found once, and again after a remedy that changes them, for others; a
    remedy that has not run the model itself is followed by one pass, to see that the model still runs."""
    sites, trace = (known, None) if known is not None else _sites(found[0], bare) if found else (Sites(), None)
    check_mates(bare.model, sites)
    for remedy in found:
        if not partial:
            _check_whole(remedy, sites)
        target = dataclasses.replace(bare, sites=remedy.chosen(sites), trace=trace)
        _check_supported(remedy, target)
        if known is not None and remedy.on_attention and not remedy.on_steps:
            raise RefusedError(f"{remedy.name} changes what a pass computes: give an example in place of the sites")
        before = dict(bare.model.named_parameters())
        inner = remedy.apply(target)
        try:
            inner = check_added(remedy.name, target, before, inner)
            if remedy.on_steps or known is not None or isinstance(remedy, NoRemedy):
                pass
            elif remedy is not found[-1] or in_force(bare.model):  # others are there to be looked at, or to come
                sites, trace = _sites(remedy, bare)
            elif trace is not None and not remedy.changes_spec:
                run_once(bare.model, *bare.example)
            _check_others(remedy, sites)
        except BaseException:
            inner.remove()
            raise
        yield _marked(remedy, target.sites, inner)


def _check_whole(remedy: Remedy, sites: Sites) -> None:
    """Raise where a remedy for all attention would leave out some that is not understood."""
    if sites.missed and remedy.on_attention:
        others = "; ".join(map(str, sites.missed))
        raise RefusedError(
            f"{remedy.name}: {sites.share} of this model are understood, and it would leave out the others. {others}. "
            "With partial=True it is applied to those that are understood"
        )


def _check_supported(remedy: Remedy, target: Target) -> None:
    """Raise unless a remedy can be applied at every site."""
    for site in target.sites:
        if remedy.name in _applied(site):
            raise AlreadyAppliedError(f"{remedy.name} is on {where(site)} already; remove() its handle first")
        refusal = remedy.supports(site)
        if refusal is not None:
            raise RefusedError(f"{remedy.name} at {where(site)}: {refusal}")
    if not isinstance(remedy, NoRemedy):
        check_weights(target, remedy.name, per_head=remedy.on_steps)


def _marked(remedy: Remedy, sites: Iterable[AttentionSite], inner: Handle) -> Handle:
    """Note on each site's module that a remedy is in force there, until the handle returned undoes both."""
    modules = {id(site.module): site.module for site in sites}.values()  # one may make several calls
    for module in modules:
        module.__dict__.setdefault(_MARK, _Marks())[remedy.name] = remedy
    compiled = not (remedy.on_steps or isinstance(remedy, NoRemedy))
    if compiled:
        compile_again()  # code that was compiled before does not notice hooks

    def undo() -> None:
        marks = [(module, module.__dict__.get(_MARK, {})) for module in modules]
        if any(own.get(remedy.name) is not remedy for _, own in marks):  # folded into the weights
            return
        inner.remove()
        if compiled:
            compile_again()
        for module, own in marks:
            del own[remedy.name]
            if not own:
                del module.__dict__[_MARK]

    return Handle(undo, state=inner.state, load=inner.load)


def _sites(remedy: Remedy, bare: Target) -> tuple[Sites, ModelTrace | None]:
    """The sites of a model, and the pass that showed them where one did."""
    args, kwargs = bare.example
    try:
        return found_sites(bare.model, args, kwargs)
    except RefusedError as error:
        if args or kwargs:
            raise
        raise RefusedError(
            f"{error} For apply: qkeel.apply({remedy.name!r}, model, optimizer, example=batch), with a batch as the "
            "model takes it"
        ) from error


class _Marks(dict[str, Remedy]):
    """The remedies in force at a module. A copy of the module has those that changed the module itself."""

    def __deepcopy__(self, memo: object) -> _Marks:
        return _Marks({name: remedy for name, remedy in self.items() if not remedy.on_steps})

    def __reduce__(self) -> tuple[type[_Marks], tuple[dict[str, Remedy]]]:
        return _Marks, ({name: remedy for name, remedy in self.items() if not remedy.on_steps},)


def in_force(model: nn.Module) -> set[str]:
    """Names of the remedies applied to this model."""
    return {name for module in model.modules() for name in module.__dict__.get(_MARK, {})}


def forget(model: nn.Module, folded: Callable[[Remedy], bool]) -> None:
    """These remedies are part of the weights now: in force nowhere, and their handles find nothing to undo."""
    for module in model.modules():
        marks = module.__dict__.get(_MARK, {})
        for name in [name for name, remedy in marks.items() if folded(remedy)]:
            del marks[name]
            if not marks:
                del module.__dict__[_MARK]


def _check_others(remedy: Remedy, sites: Iterable[AttentionSite]) -> None:
    """Raise if a remedy applied earlier means nothing at a site as this one left it: order decides nothing."""
    for site in sites:
        for other in _applied(site).values():
            refusal = other.holds(site)
            if refusal is not None:
                raise RefusedError(f"{remedy.name} at {where(site)}, where {other.name} is in force: {refusal}")


def _applied(site: AttentionSite) -> dict[str, Remedy]:
    return site.module.__dict__.get(_MARK, {})


def _make(term: Term, options: dict[str, float | int | bool | str]) -> Remedy:
    name = ALIASES.get(term.name, term.name)
    cls = lookup("remedy", {**REMEDIES, **{a: REMEDIES[n] for a, n in ALIASES.items()}}, name)
    return build(f"remedy {name!r}", cls, {**term.options, **options})


def _no_options(options: dict[str, float | int | bool | str], named: object) -> None:
    if options:
        raise InvalidTypeError(f"options {sorted(options)} need a remedy named by a string, got {named!r}")
