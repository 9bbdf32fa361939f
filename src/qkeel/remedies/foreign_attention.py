"""Puts changes of the attention spec into the attention calls of modules from other libraries, and proves in one pass
that all calls were reached."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import nn

from qkeel.capture.calls import HeadLayout
from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.patching.module_forward import forwards_of
from qkeel.remedies.added_parameters import change_parameters
from qkeel.remedies.base import Target, module_name, where
from qkeel.remedies.changed_call import ChangedCalls, PlacedChange, changed
from qkeel.remedies.site_scale import base_spec, constant_factor
from qkeel.sites.site import AttentionSite
from qkeel.sites.site_search import run_once
from qkeel.spec import AttentionSpec
from qkeel.spec.slot import ParameterSizes

# On a torch encoder: its original use_nested_tensor
_NESTED = "_qkeel_use_nested_tensor"
# The sites of each changed module.
Modules = Mapping[ChangedCalls, list[AttentionSite]]


def change_calls(
    change: PlacedChange, target: Target, sites: list[AttentionSite]
) -> Iterator[Handle]:
    """Replaces the attention calls of modules, and checks in one pass on the example that all of them were replaced."""
    # On the unchanged model: a changed call no longer shows its mask.
    _check_scores(sites)
    sites_of: dict[int, list[AttentionSite]] = {}
    for site in sites:
        sites_of.setdefault(id(site.module), []).append(site)
    changed_modules: dict[ChangedCalls, list[AttentionSite]] = {}
    for sites_of_module in sites_of.values():
        calls = _calls_of(sites_of_module, sites)
        if isinstance(calls.module, nn.MultiheadAttention):
            yield _no_nested_tensors(target.model, calls.module)
        yield _add_change(calls, change, target, sites_of_module[0])
        changed_modules[calls] = sites_of_module
    if changed_modules:
        _check_pass(target, changed_modules)


def _check_scores(sites: list[AttentionSite]) -> None:
    """Raises RefusedError unless hidden pairs can be told from low logits by their scores alone, which is all that
    reaches the softmax of hand-written attention."""
    for site in sites:
        if site.unclear_scores and _calls_under_change(site.module) is None:
            raise RefusedError(
                f"{where(site)}: {site.unclear_scores}, so the softmax of hand-written attention can't tell which scores "
                "count; write masks with -inf, use the model's fused attention, or use qk_clip or lalr"
            )


def _calls_of(
    sites_of_module: list[AttentionSite], sites: list[AttentionSite]
) -> ChangedCalls:
    """Returns the existing replacement of a module's forward, or a new one without changes."""
    first = sites_of_module[0]
    module = first.module
    for site in sites:
        if site.module is not module and any(
            m is site.module for m in module.modules()
        ):
            raise RefusedError(
                f"the attention of {site.name} is part of the attention of {first.name}; change only one of them"
            )
    existing = _calls_under_change(module)
    if existing is not None:
        return existing
    kinds = set()
    for site in sites_of_module:
        scale = constant_factor(site.spec.scale, site.head_dim)
        # Scales in two roundings of 1/√d are one.
        kinds.add((site.n_heads, site.head_dim, round(scale, 9), str(site.layout)))
    if len(kinds) > 1:
        raise RefusedError(
            f"{first.name} computes attention several times, with different heads, scales or layouts of scores, which "
            "no parameter fits and which can't be distinguished"
        )
    # A fused function has scores [b h t s]; internally it may compute a softmax with torch's functions.
    layout = first.layout or HeadLayout(
        groups=("b", "h", "t", "s"), sizes=(first.n_heads,)
    )
    geometry = ParameterSizes(
        n_heads=first.n_heads, n_kv_heads=first.n_kv_heads, head_dim=first.head_dim
    )
    base = AttentionSpec(scale=base_spec(first).scale)
    scale = constant_factor(first.spec.scale, first.head_dim)
    return ChangedCalls(module, geometry, base, scale, layout)


def _no_nested_tensors(model: nn.Module, module: nn.Module) -> Handle:
    """Stops torch's encoder from packing padded batches into nested tensors, which the replacement does not support."""
    encoders = [
        m
        for m in model.modules()
        if isinstance(m, nn.TransformerEncoder) and module in m.modules()
    ]
    for encoder in encoders:
        encoder.__dict__.setdefault(_NESTED, encoder.use_nested_tensor)
        encoder.use_nested_tensor = False

    def undo() -> None:
        for encoder in encoders:
            if not any(map(_calls_under_change, encoder.modules())):
                encoder.use_nested_tensor = encoder.__dict__.pop(
                    _NESTED, encoder.use_nested_tensor
                )

    return Handle(undo)


def _add_change(
    calls: ChangedCalls, mine: PlacedChange, target: Target, site: AttentionSite
) -> Handle:
    """Adds a change to a module's calls, with the parameters it needs."""
    # On top of the changes that are there: two remedies may share a slot's parameter.
    old, new, g = calls.spec, changed(calls.spec, [mine]), calls.geometry
    needed = new.parameter_shapes(g.n_heads, g.n_kv_heads, g.head_dim)
    if site.layout is not None and site.layout.guess and needed:
        raise RefusedError(
            f"{where(site)}: {site.layout.guess}, and each head would need a separate parameter"
        )
    parameters = change_parameters(target, site, old, new, g)
    calls.change([*calls.changes, mine])

    def undo() -> None:
        calls.change([change for change in calls.changes if change is not mine])
        parameters.remove()

    return Handle(undo)


def _check_pass(target: Target, changed_modules: Modules) -> None:
    """Runs the example and checks that every attention call of every module was replaced, and nothing else."""
    for calls in changed_modules:
        calls.seen = []
    try:
        run_once(target.model, *target.batch)
        for calls, sites in changed_modules.items():
            _check_calls(calls, sites, calls.seen or [])
    # The faults of a pass are wrapped; the reason is the remedy's own refusal.
    except InvalidValueError as error:
        raise (
            error.__cause__ if isinstance(error.__cause__, RefusedError) else error
        ) from None
    finally:
        for calls in changed_modules:
            calls.seen = None


def _check_calls(
    calls: ChangedCalls, sites: list[AttentionSite], passes: list[list[float | None]]
) -> None:
    name = module_name(sites[0]) or "the model itself"
    counts = {len(noted) for noted in passes}
    if counts != {len(sites)}:
        raise RefusedError(
            f"{name}: expected {len(sites)} attention calls in its forward, saw {sorted(counts)} calls of "
            "F.scaled_dot_product_attention, nn.MultiheadAttention or a softmax, so it can't be changed from outside; "
            "with transformers use attn_implementation='sdpa' or 'eager'"
        )
    hidden = [h for noted in passes for h in noted if h is not None]
    if hidden and calls.spec.norm.kind != "none":
        raise RefusedError(
            f"{name} multiplies queries and keys itself, before its softmax, and no module outputs complete heads of "
            "them; use the model's fused attention (attn_implementation='sdpa'), or qk_clip or lalr"
        )
    # A mask that is added to logits moves with them: half of it still tells hidden pairs.
    masked = [h for h in hidden if h > -math.inf]
    if masked:
        calls.low = min(calls.low, max(masked) / 2)


def refuse_added_scores(remedy: str, sites: list[AttentionSite]) -> None:
    """Raises RefusedError if a factor on q·k would also scale a term that is added to it.

    Written-out attention passes only the sum to the softmax, and this sum may include a bias or a cap."""
    for site in sites:
        # The model's own cap is applied before the new scale; a cap that qkeel added is applied after it.
        is_own = _calls_under_change(site.module) is None
        if is_own and (site.is_sum or site.spec.cap.kind != "none"):
            raise RefusedError(
                f"{remedy} at {where(site)}: a bias or a cap is in the scores before the softmax, where it can't be "
                "separated from q·k; use the model's fused attention (attn_implementation='sdpa')"
            )


def _calls_under_change(module: nn.Module) -> ChangedCalls | None:
    """Returns the replacement of a module's forward that is already there."""
    for forward in forwards_of(module):
        if isinstance(forward, ChangedCalls):
            return forward
    return None
