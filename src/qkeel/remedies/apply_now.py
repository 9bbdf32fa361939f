"""Applies remedies to models whose attention is known or shown: checks, order, undo, and what is active."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import arguments
from qkeel.errors import AlreadyAppliedError, RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import APPLIED, AttentionSite, Sites
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import compile_again
from qkeel.patching.optimizers import listed
from qkeel.remedies.base import NoRemedy, Remedy, Target, active_at, compose_all, where
from qkeel.remedies.head_weights import StepRemedy, check_weights, innermost, stepped
from qkeel.remedies.idle_steps import notice_idle_steps
from qkeel.remedies.processes import (
    WHAT,
    agreed,
    check_added,
    check_peers,
    check_wrapper,
    refused_under_zero,
)
from qkeel.remedies.table import RemedySpec, parse
from qkeel.remedies.weights_in_use import check_weights_in_use
from qkeel.sites.find import Models, found_sites, named_models, of_each, sites_of_each
from qkeel.sites.trace import ModelTrace, run_once

GIVE_BATCH = "For apply: qkeel.apply(model, {!r}, optimizer, batch=batch), with a batch that the model accepts"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of `apply` other than the remedies, the model and the optimizer."""

    options: Mapping[str, float | int | bool | str] = dataclasses.field(
        default_factory=dict
    )
    train_length: int | None = None
    partial: bool = False


def apply_now(
    model: Models,
    remedy: RemedySpec,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    more: Asked,
    *,
    batch: object = None,
    sites: object = None,
) -> Handle:
    """Applies remedies immediately; see `apply`."""
    train_length, partial = more.train_length, more.partial

    def asked() -> tuple[tuple[Remedy, ...], list[tuple[Target, Sites | None]]]:
        remedies = parse(remedy, **more.options)
        optimizers = listed(optimizer)
        models = (
            {"": model}
            if isinstance(model, nn.Module)
            else named_models(model, "apply remedies to")
        )
        shown, known = (
            of_each(batch, [*models], "batches"),
            sites_of_each(sites, models),
        )
        bare: list[tuple[Target, Sites | None]] = []
        for name, single in models.items():
            shown_arguments = (
                ((), {}) if shown[name] is None else arguments(shown[name])
            )
            target = Target(
                model=unwrapped(single),
                optimizer=optimizers[0] if optimizers else None,
                sites=[],
                batch=shown_arguments,
                train_length=train_length,
            )
            bare.append((target, known[name]))
        for target, _ in bare:
            check_wrapper(target.model, remedies)
        return remedies, bare

    def said(request: tuple[tuple[Remedy, ...], Sequence[object]]) -> str:
        arguments = {"optimizer": optimizer, "batch": batch, "sites": sites}
        parts = [
            name if x is not None else f"no {name}" for name, x in arguments.items()
        ]
        several = [] if isinstance(model, nn.Module) else [f"{len(request[1])} models"]
        return ", ".join(
            [
                f"{list(request[0])}",
                *several,
                *parts,
                f"train_length={train_length}, partial={partial}",
            ]
        )

    found, bare = dist.agree(WHAT, asked, said)
    optimizers = listed(optimizer)

    def applied() -> Handle:
        handles = (
            compose_all(_apply_all(found, target, known, optimizers, partial=partial))
            for target, known in bare
        )
        return next(handles) if isinstance(model, nn.Module) else compose_all(handles)

    handle = dist.agree(WHAT, applied, lambda _: "applied", Handle.remove)
    for target, _ in bare:
        handle = refused_under_zero(
            handle, target.model, found, optimizers[0] if optimizers else None
        )
    handle.about = "+".join(parsed.name for parsed in found)
    return handle


def _apply_all(
    remedies: Sequence[Remedy],
    bare: Target,
    known: Sites | None,
    optimizers: Sequence[Optimizer],
    *,
    partial: bool,
) -> Iterator[Handle]:
    """Applies one remedy after another.

    Sites are found once, and again for the next remedies after a remedy that changes them. A remedy that has not itself
    run the model is followed by one pass, which checks that the model still runs."""
    sites, trace = (
        (known, None)
        if known is not None
        else _sites(remedies[0], bare)
        if remedies
        else (Sites(), None)
    )
    check_peers(bare.model, sites)
    for remedy in remedies:
        target_of_all = dataclasses.replace(
            bare,
            sites=remedy.chosen(sites),
            trace=None if remedy.on_steps else trace,
            all_sites=sites,
            values={} if trace is None else trace.value_slices(),
        )
        agreed(
            functools.partial(
                _check,
                remedy,
                target_of_all,
                sites,
                partial=partial,
                given=known is not None,
            )
        )
        for target in _by_optimizer(remedy, target_of_all, optimizers):
            before = dict(bare.model.named_parameters())
            inner = remedy.apply(target)
            try:
                inner = check_added(remedy.name, target, before, inner)
                if remedy.on_steps or known is not None or isinstance(remedy, NoRemedy):
                    pass
                # Remedies that follow or are active already need the sites.
                elif remedy is not remedies[-1] or active_remedies(bare.model):
                    sites, trace = _sites(remedy, bare)
                elif trace is not None and not remedy.changes_spec:
                    run_once(bare.model, *bare.batch)
                _check_others(remedy, sites)
            except BaseException:
                inner.remove()
                raise
            yield _marked(remedy, target, inner)


def _by_optimizer(
    remedy: Remedy, target: Target, optimizers: Sequence[Optimizer]
) -> list[Target]:
    """Returns the target with the optimizer that the remedy needs.

    Of several optimizers, one that holds gains or biases takes new parameters, because Muon accepts matrices only. A
    remedy for steps gets a target for each optimizer that holds query and key weights, with the sites of these."""
    if len(optimizers) < 2:
        return [target]
    if not remedy.on_steps:
        for optimizer in optimizers:
            if any(
                p.ndim < 2 for group in optimizer.param_groups for p in group["params"]
            ):
                return [dataclasses.replace(target, optimizer=optimizer)]
        return [target]
    sites_of: dict[int, list[AttentionSite]] = {}
    for site in target.sites:
        weights = [
            target.parameter(s.parameter)
            for term in site.terms
            for s in (*term.query, *term.key)
        ]
        holds = (
            any(stepped(innermost(optimizer), p) is not None for p in weights)
            for optimizer in optimizers
        )
        sites_of.setdefault(
            next((i for i, held in enumerate(holds) if held), 0), []
        ).append(site)
    parts = [
        dataclasses.replace(target, optimizer=optimizers[i], sites=sites)
        for i, sites in sorted(sites_of.items())
    ]
    return parts or [target]


def _check(
    remedy: Remedy, target: Target, sites: Sites, *, partial: bool, given: bool
) -> None:
    """Raises RefusedError if a remedy cannot be applied to the sites, which were found on a batch or `given`."""
    if not partial:
        _check_whole(remedy, sites)
    _check_supported(remedy, target)
    if given and remedy.on_attention and not remedy.on_steps:
        raise RefusedError(
            f"{remedy.name} changes what a pass computes, so give a batch in place of the sites"
        )


def _check_whole(remedy: Remedy, sites: Sites) -> None:
    """Raises RefusedError if a remedy for all attention would leave out attention that is not understood."""
    if sites.missed and remedy.on_attention:
        missed = "; ".join(map(str, sites.missed))
        raise RefusedError(
            f"{remedy.name}: {sites.share} of this model are understood, and the remedy would leave out the others. "
            f"{missed}. With partial=True the remedy is applied to the attention that is understood"
        )


def _check_supported(remedy: Remedy, target: Target) -> None:
    """Raises unless the remedy can be applied at every site."""
    for site in target.sites:
        if any(active.on_steps for active in active_at(site).values()) and (
            remedy.name in active_at(site) or remedy.supports(site) is not None
        ):
            gc.collect()  # an optimizer that the script deleted may still exist, and its remedies with it
        if remedy.name in active_at(site):
            raise AlreadyAppliedError(
                f"{remedy.name} is already applied to {where(site)}; remove() its handle first"
            )
        refusal = remedy.supports(site)
        if refusal is not None:
            raise RefusedError(f"{remedy.name} at {where(site)}: {refusal}")
    if not isinstance(remedy, NoRemedy):
        check_weights(target, remedy.name, per_head=remedy.on_steps)
    if isinstance(remedy, StepRemedy):
        check_weights_in_use(target, remedy)


def _marked(remedy: Remedy, target: Target, inner: Handle) -> Handle:
    """Records the active remedy on each site's module. The returned handle removes the record and the change.

    A remedy for steps ends with its optimizer, so its record does too."""
    modules = {
        id(site.module): site.module for site in target.sites
    }.values()  # a module may have several sites
    for module in modules:
        marks = module.__dict__.get(APPLIED)
        module.__dict__[APPLIED] = record = (
            marks if isinstance(marks, _Marks) else _Marks(marks or {})
        )
        record[remedy.name] = remedy
    compiled = not (remedy.on_steps or isinstance(remedy, NoRemedy))
    if compiled:
        compile_again()  # code compiled earlier does not detect new hooks

    ends = warning = None
    if remedy.on_steps and target.optimizer is not None:
        warning = notice_idle_steps(target, remedy)
        ends = weakref.finalize(
            innermost(target.optimizer),
            _unmark,
            [weakref.ref(module) for module in modules],
            remedy,
        )
        ends.atexit = False

    def undo() -> None:
        if warning is not None:
            warning.remove()
        if ends is not None and ends.detach() is None:  # its optimizer no longer exists
            inner.remove()
            return
        marks = [(module, module.__dict__.get(APPLIED, {})) for module in modules]
        if any(
            record.get(remedy.name) is not remedy for _, record in marks
        ):  # already folded into the weights
            return
        inner.remove()
        if compiled:
            compile_again()
        for module, _ in marks:
            _drop(module, remedy)

    return Handle(undo, state=inner.state, load=inner.load)


def _drop(module: nn.Module, remedy: Remedy) -> None:
    """Drops the record of a remedy on a module, if it is there."""
    record = module.__dict__.get(APPLIED, {})
    if record.get(remedy.name) is remedy:
        del record[remedy.name]
        if not record:
            del module.__dict__[APPLIED]


def _unmark(modules: Sequence[weakref.ref[nn.Module]], remedy: Remedy) -> None:
    """Drops the records of a remedy whose optimizer no longer exists."""
    for module in [
        site_module for ref in modules if (site_module := ref()) is not None
    ]:
        _drop(module, remedy)


def _sites(remedy: Remedy, bare: Target) -> tuple[Sites, ModelTrace | None]:
    """Returns the sites of a model, and the trace of the pass that revealed them, if there was one."""
    args, kwargs = bare.batch
    try:
        return found_sites(bare.model, args, kwargs)
    except RefusedError as error:
        if args or kwargs:
            raise
        raise RefusedError(f"{error} {GIVE_BATCH.format(remedy.name)}") from error


class _Marks(dict[str, Remedy]):
    """The active remedies of a module. Copies keep only the remedies that changed the module itself."""

    def __deepcopy__(self, memo: object) -> _Marks:
        return _Marks(
            {name: remedy for name, remedy in self.items() if not remedy.on_steps}
        )

    def __reduce__(self) -> tuple[type, tuple[dict[str, Remedy]] | tuple[()]]:
        kept = {name: remedy for name, remedy in self.items() if not remedy.on_steps}
        return (
            (_Marks, (kept,)) if kept else (dict, ())
        )  # a model with step remedies only loads without qkeel


def active_remedies(model: nn.Module) -> set[str]:
    """Returns the names of the remedies that are active on this model."""
    return {
        name for module in model.modules() for name in module.__dict__.get(APPLIED, {})
    }


def forget(model: nn.Module, folded: Callable[[Remedy], bool]) -> None:
    """Drops the records of remedies that are now folded into the weights. Their handles then undo nothing."""
    for module in model.modules():
        marks = module.__dict__.get(APPLIED, {})
        for name in [name for name, remedy in marks.items() if folded(remedy)]:
            del marks[name]
            if not marks:
                del module.__dict__[APPLIED]


def _check_others(remedy: Remedy, sites: Iterable[AttentionSite]) -> None:
    """Raises RefusedError if an earlier remedy is no longer valid after this one, so that their order never matters."""
    for site in sites:
        for earlier in active_at(site).values():
            refusal = earlier.holds(site)
            if refusal is not None:
                raise RefusedError(
                    f"{remedy.name} at {where(site)}, where {earlier.name} is active: {refusal}"
                )
