"""Applies remedies to models whose attention is known or shown: checks, order, undo, and what is active."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import arguments
from qkeel.errors import AlreadyAppliedError, InvalidTypeError, RefusedError
from qkeel.handle import Handle, with_hook
from qkeel.patching.forward import first_adapter, unwrapped
from qkeel.patching.optimizers import listed
from qkeel.patching.torch_state import compile_again
from qkeel.remedies.active import active_remedies, drop, record
from qkeel.remedies.base import (
    NoRemedy,
    Remedy,
    Target,
    active_at,
    active_on,
    compose_all,
    module_name,
    where,
)
from qkeel.remedies.head_weights import check_weights
from qkeel.remedies.idle_steps import (
    changes_of,
    notice_idle_steps,
    notice_replaced_modules,
)
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.output_head import ZLoss
from qkeel.remedies.processes import (
    WHAT,
    agreed,
    check_added,
    check_peers,
    check_wrapper,
    refused_when_flattened,
)
from qkeel.remedies.step_remedy import StepRemedy
from qkeel.remedies.untrained_parameters import notice_untrained
from qkeel.remedies.weights_in_use import check_weights_in_use
from qkeel.sites.find import bound, found_sites
from qkeel.sites.search_passes import spread
from qkeel.sites.site import AttentionSite, Sites
from qkeel.sites.site_search import run_once

GIVE_BATCH = "For apply: qkeel.apply(model, {!r}, optimizer, batch=batch), with a batch that the model accepts"


def apply_now(
    model: nn.Module,
    remedies: Sequence[Remedy],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    batch: object = None,
    sites: object = None,
    train_length: int | None = None,
    partial: bool = False,
) -> Handle:
    """Applies remedies immediately; see `apply`."""

    def prepared() -> tuple[Target, Sites | None]:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(
                f"expected a torch.nn.Module to apply remedies to, got {type(model).__name__}; call qkeel.apply for each "
                "of several models"
            )
        target = Target(
            model=unwrapped(model),
            optimizer=next(iter(listed(optimizer)), None),
            sites=[],
            batch=((), {}) if batch is None else arguments(batch),
            train_length=train_length,
        )
        check_wrapper(target.model, remedies)
        if sites is None:
            return target, None
        if not isinstance(sites, Sequence):
            raise InvalidTypeError(
                f"expected sites as qkeel.find_sites returned them, got {type(sites).__name__}"
            )
        return target, bound(sites, target.model)

    # What must be the same on all processes.
    description = (
        f"{list(remedies)}, an optimizer: {optimizer is not None}, a batch: {batch is not None}, sites: "
        f"{sites is not None}, train_length={train_length}, partial={partial}"
    )
    # Whatever one process refuses, all refuse, before any of them changes its model.
    target, known = dist.agree(WHAT, prepared, lambda _: description)

    def applied() -> Handle:
        optimizers = listed(optimizer)
        return compose_all(
            _apply_all(remedies, target, known, optimizers, partial=partial)
        )

    handle = dist.agree(WHAT, applied, lambda _: "applied", Handle.remove)
    handle = refused_when_flattened(handle, target.model, remedies, target.optimizer)
    handle.about = "+".join(parsed.name for parsed in remedies)
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
    sites = Sites() if known is None else known
    if known is None and remedies:
        sites = _sites(remedies[0], bare)
    check_peers(bare.model, sites)
    for remedy in remedies:
        target_of_all = dataclasses.replace(
            bare,
            sites=remedy.chosen(sites),
            all_sites=sites,
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
        target = _with_optimizer(remedy, target_of_all, optimizers)
        # Compared afterwards: a wrapper reduces no gradients of parameters that it has not seen.
        before = dict(bare.model.named_parameters())
        unchanged = changes_of(bare.model)
        inner = remedy.apply(target)
        try:
            inner = check_added(remedy.name, target, before, inner)
            if remedy.on_steps or known is not None or isinstance(remedy, NoRemedy):
                pass
            # Remedies that follow or are active already need the sites.
            elif remedy is not remedies[-1] or active_remedies(bare.model):
                sites = _sites(remedy, bare)
            elif any(bare.batch) and not (remedy.changes_spec or spread(bare.model)):
                run_once(bare.model, *bare.batch)
            _check_others(remedy, sites)
        # After an interrupt too: the model must not stay half changed.
        except BaseException:
            inner.remove()
            raise
        if not remedy.on_steps:
            replaced = notice_replaced_modules(bare.model, unchanged, remedy.name)
            inner = with_hook(inner, replaced.remove)
        yield _recorded(remedy, target, inner, before)


def _with_optimizer(
    remedy: Remedy, target: Target, optimizers: Sequence[Optimizer]
) -> Target:
    """Returns the target with the optimizer that the remedy needs, of several.

    One that holds gains or biases takes new parameters, because Muon accepts matrices only. A remedy for steps needs the
    first that holds query or key weights, and all of them, since others may hold other weights and biases."""
    if len(optimizers) < 2:
        return target
    weights = {id(target.parameter(s.parameter)) for s in target.logit_slices()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if remedy.on_steps and any(id(p) in weights for p in held):
            return dataclasses.replace(
                target, optimizer=optimizer, optimizers=optimizers
            )
        if not remedy.on_steps and any(p.ndim < 2 for p in held):
            return dataclasses.replace(target, optimizer=optimizer)
    return target


def _check(
    remedy: Remedy, target: Target, sites: Sites, *, partial: bool, given: bool
) -> None:
    """Raises RefusedError if a remedy cannot be applied to the sites, which were found on a batch or `given`."""
    if sites.missed and remedy.on_attention and not partial:
        missed = "; ".join(map(str, sites.missed))
        raise RefusedError(
            f"{remedy.name}: {sites.share} of this model are understood, and the remedy would leave out the others. "
            f"{missed}. With partial=True the remedy is applied to the attention that is understood"
        )
    refusal = _refusal(remedy, target.sites)
    if refusal is not None and any(
        x.on_steps for site in target.sites for x in active_at(site).values()
    ):
        # An optimizer that the script deleted may still exist, and its remedies with it.
        gc.collect()
        refusal = _refusal(remedy, target.sites)
    if refusal is not None:
        raise refusal
    if not remedy.on_steps and not isinstance(remedy, (NoRemedy, ZLoss)):
        _check_adapters(target, remedy)
    if not isinstance(remedy, NoRemedy):
        check_weights(target, remedy.name, per_head=remedy.on_steps)
    if isinstance(remedy, StepRemedy):
        check_weights_in_use(target, remedy)
    if given and remedy.on_attention and not remedy.on_steps:
        raise RefusedError(
            f"{remedy.name} changes what a pass computes, so give a batch in place of the sites"
        )


def _refusal(
    remedy: Remedy, sites: Sequence[AttentionSite]
) -> AlreadyAppliedError | RefusedError | None:
    """The error of the first site that does not take a remedy, or has it."""
    for site in sites:
        if remedy.name in active_at(site):
            return AlreadyAppliedError(
                f"{remedy.name} is already applied to {where(site)}; remove() its handle first"
            )
        reason = remedy.supports(site)
        if reason is not None:
            return RefusedError(f"{remedy.name} at {where(site)}: {reason}")
    return None


def _check_adapters(target: Target, remedy: Remedy) -> None:
    """Raises RefusedError if a remedy would change the base below adapters, with which it is neither saved nor disabled.

    A module of peft's modules_to_save is a copy that is saved with the adapter, and that disabling it takes out."""
    adapter = first_adapter(target.model)
    are_saved = remedy.changes_spec and all(
        ".modules_to_save." in f"{module_name(site)}." for site in target.sites
    )
    if adapter is None or are_saved:
        return
    raise RefusedError(
        f"{remedy.name} changes the forward pass of the base model, and this model has adapters on it ({adapter}): a "
        "reference that is computed with the adapters disabled would drift, and a saved adapter would not contain the "
        "change. Merge them first, model = model.merge_and_unload(), or use a remedy that acts on the adapters alone: "
        'qkeel.apply(model, "lalr:tau=0.1", optimizer)'
    )


def _recorded(
    remedy: Remedy, target: Target, inner: Handle, before: Mapping[str, nn.Parameter]
) -> Handle:
    """Records the active remedy on each site's module. The returned handle removes the record and the change.

    A remedy for steps ends with its optimizer, so its record does too. `before` has the parameters that are not the
    remedy's own."""
    # A module may have several sites.
    modules = list({id(site.module): site.module for site in target.sites}.values())
    record(modules, remedy)
    is_in_model = not (remedy.on_steps or isinstance(remedy, NoRemedy))
    if is_in_model:
        # Code that was compiled earlier does not detect new hooks.
        compile_again()
    ends = idle = None
    if target.optimizer is None and is_in_model:
        idle = notice_untrained(target.model, before, remedy.name)
    if remedy.on_steps and target.optimizer is not None:
        idle = notice_idle_steps(target, remedy)
        references = [weakref.ref(module) for module in modules]
        ends = weakref.finalize(
            innermost(target.optimizer), _drop_all, references, remedy
        )
        ends.atexit = False

    def undo() -> None:
        if idle is not None:
            idle.remove()
        # detach() gives None once the finalizer has run, because the optimizer no longer exists.
        has_ended = ends is not None and ends.detach() is None
        if not has_ended and any(
            active_on(module).get(remedy.name) is not remedy for module in modules
        ):
            # The remedy has been folded into the weights, and there is nothing left to undo.
            return
        inner.remove()
        if is_in_model:
            compile_again()
        for module in modules:
            drop(module, lambda active: active is remedy)

    return Handle(undo, state=inner.state, load=inner.load)


def _drop_all(modules: Sequence[weakref.ref[nn.Module]], remedy: Remedy) -> None:
    """Drops the records of a remedy whose optimizer no longer exists."""
    for reference in modules:
        module = reference()
        if module is not None:
            drop(module, lambda active: active is remedy)


def _sites(remedy: Remedy, bare: Target) -> Sites:
    """Returns the sites of a model."""
    args, kwargs = bare.batch
    try:
        return found_sites(bare.model, args, kwargs)
    except RefusedError as error:
        if args or kwargs:
            raise
        raise RefusedError(f"{error} {GIVE_BATCH.format(remedy.name)}") from error


def _check_others(remedy: Remedy, sites: Iterable[AttentionSite]) -> None:
    """Raises RefusedError if an earlier remedy is no longer valid after this one, so that their order never matters."""
    for site in sites:
        for earlier in active_at(site).values():
            refusal = earlier.holds(site)
            if refusal is not None:
                raise RefusedError(
                    f"{remedy.name} at {where(site)}, where {earlier.name} is active: {refusal}"
                )
