"""Base class for remedies that change the attention spec of any model, together with the reasons a site cannot be
changed."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall
from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import forwards_of
from qkeel.patching.modes import names_in_use, parameters_of, shard_alike, submodules_of
from qkeel.remedies.added_parameters import join
from qkeel.remedies.base import Remedy, Target, compose_all, inside, module_name, where
from qkeel.remedies.changed_call import ChangedCalls, PlacedChange, changed
from qkeel.sites.find import is_normed
from qkeel.sites.trace import is_product, run_once
from qkeel.spec import AttentionSpec, InverseSqrt
from qkeel.spec.logits import Scale
from qkeel.spec.norm import Norm
from qkeel.spec.slot import ParameterSizes

# Refusals. Each function returns the reason why a site's attention cannot be changed, with what to do instead, or None.

_OTHER_REMEDIES = (
    "use kind=rms or l2 with over=head and gain=none or scalar where attention is one of torch's fused functions "
    "(attn_implementation='sdpa'), or qk_clip or lalr, which need no norm"
)
SlotName = Literal["cap", "normalizer", "scale"]


def refuse_unseen(site: AttentionSite) -> Refusal | None:
    """Refuses attention whose call cannot be replaced."""
    if site.description is not None:
        return Refusal(
            "its attention runs inside torch.jit.script, torch.func.vmap or a custom function, and can't be changed "
            "there",
            "use a remedy that changes steps or weights (qk_clip, lalr), or build the model with qkeel.nn",
        )
    return None


def refuse_heads(reason: str) -> RefusedError:
    """Refuses q or k if no module outputs them as complete heads, as in MLA from other libraries, where the rotated
    keys are computed separately."""
    return RefusedError(str(Refusal(reason, _OTHER_REMEDIES)))


def refuse_norm(site: AttentionSite, norm: Norm) -> Refusal | None:
    """Refuses q and k that are already normed, and norms that would follow a rotation but do not commute with it."""
    if is_normed(site):
        return Refusal(
            "q and k are already normed", "remove that norm first, or keep it"
        )
    if (
        not norm.commutes_with_rotation
        and site.spec.position.order == "rotate_then_norm"
    ):
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None


def refuse_scale(remedy: str, scale: Scale) -> Refusal | None:
    """Refuses unit vectors if the scale is not 1/√d, up to a position-dependent factor."""
    if scale.base == InverseSqrt():
        return None
    alternative = "qk_norm" if remedy == "cosine" else "kind=rms"
    return Refusal(
        f"unit vectors need their own scale in place of 1/√d, and this site has the scale {scale.base.formula()}",
        f"use {alternative}, which keeps the scale, or build the model with the spec you want",
    )


def refuse_taken(site: AttentionSite, slot: SlotName) -> Refusal | None:
    """Refuses a slot that is in use: a cap, a position-dependent factor, or weights other than those of a softmax."""
    spec = site.spec
    if slot == "cap" and spec.cap.kind != "none":
        return Refusal(
            f"logits are already capped ({spec.cap.formula()})", "remove that cap first"
        )
    if slot == "scale" and spec.scale.follows_position:
        return Refusal(
            f"logits are already scaled by position ({spec.scale.formula()})",
            "remove that first",
        )
    if slot == "normalizer" and spec.normalizer.kind != "softmax":
        return Refusal(
            f"its attention weights are already {spec.normalizer.formula()} instead of a softmax",
            "first remove the remedy that produces them, or keep them",
        )
    return None


# Parameters and submodules that a remedy adds to a site's module and removes on undo.


def change_parameters(
    target: Target,
    site: AttentionSite,
    old: AttentionSpec,
    new: AttentionSpec,
    geometry: ParameterSizes,
) -> Handle:
    """Adds parameters that only the new spec needs to the site's module and the optimizer.

    Parameters that only the old spec needs are dropped. The handle restores the previous parameters.
    """
    sizes = (geometry.n_heads, geometry.n_kv_heads, geometry.head_dim)
    had, needed = old.init_params(*sizes), new.init_params(*sizes)
    values = {n: value for n, value in needed.items() if n not in had}
    module = site.module
    near = (
        target.parameter(site.query[0].parameter)
        if site.terms
        else next(target.model.parameters())
    )
    _check_free(site, values)
    added = {n: nn.Parameter(value.to(near)) for n, value in values.items()}
    held = parameters_of(module)
    order = list(held)
    dropped = {n: held.pop(n) for n in had if n not in needed}
    held.update(added)
    joined = join(
        target.optimizer,
        {inside(module_name(site), n): p for n, p in added.items()},
        near,
    )
    _forget_gradients(dropped)

    def undo() -> None:
        kept = {n: p for n, p in held.items() if n not in added} | dropped
        held.clear()
        held.update({n: kept[n] for n in (*order, *kept) if n in kept})
        _forget_gradients(added)
        joined.remove()

    return Handle(undo)


def _forget_gradients(parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Drops the gradients of parameters that left the model: zero_grad no longer reaches them, so an optimizer would
    apply them in every step."""
    for parameter in parameters.values():
        if parameter is not None:
            parameter.grad = None


def add_submodules(
    target: Target,
    site: AttentionSite,
    added: Mapping[str, nn.Module],
    near: Tensor,
    *,
    matrices: bool = False,
) -> Handle:
    """Adds submodules to a site's module, and their parameters to the optimizer (see `join`).

    If the module's weights are under fully_shard, it is applied to the submodules too.

    Args:
        target: the model and its optimizer.
        site: the attention to whose module the submodules are added.
        added: the submodules, keyed by name.
        near: an existing parameter that determines the optimizer group of the new ones (see `join`).
        matrices: True if the new parameters are matrices (see `join`).
    """
    module, name = site.module, module_name(site)
    held = submodules_of(module)
    _check_free(site, added)
    for new in added.values():
        shard_alike(target.model, new, near)
    parameters = {
        inside(name, f"{child}.{n}"): p
        for child, new in added.items()
        for n, p in new.named_parameters()
    }
    joined = join(target.optimizer, parameters, near, matrices=matrices)
    for child, new in added.items():
        held[child] = new.train(module.training)

    def undo() -> None:
        for child in added:
            del held[child]
        _forget_gradients(parameters)
        joined.remove()

    return Handle(undo)


def _check_free(site: AttentionSite, names: Iterable[str]) -> None:
    for name in names:
        if name in names_in_use(site.module):
            raise RefusedError(
                f"{module_name(site) or 'the model itself'} already has an attribute {name}"
            )


# Remedies that change a site's spec. qkeel's own modules have a spec; in other modules the attention call is replaced.

_CHANGES = "_qkeel_changes"  # on one of qkeel's own modules: its original spec, and the active changes
_NESTED = (
    "_qkeel_use_nested_tensor"  # on a torch encoder: its original use_nested_tensor
)


class ChangeSpec(Remedy):
    """Gives each site a new spec, whose parameters are added to the site's module and to the optimizer.

    qkeel's own modules have a spec. In any other module the attention call is replaced while the module's forward runs.
    """

    changes_spec = True

    __slots__ = ()

    @abc.abstractmethod
    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """Returns the spec changed by this remedy."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, SpecModule):
            return None
        return refuse_unseen(site)

    def apply(self, target: Target) -> Handle:
        own_sites = [
            site for site in target.sites if isinstance(site.module, SpecModule)
        ]
        foreign_sites = [
            site for site in target.sites if not isinstance(site.module, SpecModule)
        ]
        return compose_all(self._handles(target, own_sites, foreign_sites))

    def _handles(
        self,
        target: Target,
        own_sites: list[AttentionSite],
        foreign_sites: list[AttentionSite],
    ) -> Iterator[Handle]:
        for site in own_sites:
            yield self.change_own(site, target)
        yield from self.change_others(target, foreign_sites)

    def change_others(
        self, target: Target, sites: list[AttentionSite]
    ) -> Iterator[Handle]:
        """Changes sites of modules from other libraries."""
        yield from exchange_calls((self, target.train_length), target, sites)

    def change_own(self, site: AttentionSite, target: Target) -> Handle:
        """Replaces the spec of one of qkeel's own modules."""
        module = site.module
        assert isinstance(module, SpecModule)
        base, changes = module.__dict__.get(_CHANGES, (module.spec, []))
        mine: PlacedChange = (self, target.train_length)
        new = changed(module.spec, [mine])
        geometry = ParameterSizes(
            n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim
        )
        undo_parameters = change_parameters(target, site, module.spec, new, geometry)
        # On the module itself, so that a copy of the model keeps what it has.
        module.__dict__[_CHANGES] = (base, [*changes, mine])
        module.spec = new

        def undo() -> None:
            # Replay from the original spec, because another remedy may have changed a slot since, even the same slot.
            _, active = module.__dict__[_CHANGES]
            remaining = [change for change in active if change is not mine]
            module.spec = changed(base, remaining)
            module.__dict__[_CHANGES] = (base, remaining)
            if not remaining:
                del module.__dict__[_CHANGES]
            undo_parameters.remove()

        return Handle(undo)


def settle(module: nn.Module) -> None:
    """Makes the current spec of one of qkeel's own modules its original spec, so that no change can be undone."""
    module.__dict__.pop(_CHANGES, None)


def known_length(
    length: int | None, train_length: int | None, use: str, otherwise: str = ""
) -> int:
    """Returns the L of a formula: the remedy's option, or else the training length. `use` describes what needs L."""
    tokens = length or train_length
    if tokens is None:
        raise InvalidValueError(
            f"{use}: give L, as length=512 in the remedy or as qkeel.apply(..., train_length=512){otherwise}"
        )
    return tokens


def base_spec(site: AttentionSite) -> AttentionSpec:
    """Returns the spec of a site, with a fixed scale that equals 1/√d replaced by InverseSqrt."""
    if site.spec.scale.kind != "fixed":
        return site.spec
    usual = math.isclose(
        number(site.spec.scale, site.head_dim),
        max(1, site.head_dim) ** -0.5,
        rel_tol=1e-6,
    )
    return site.spec.replace(scale=InverseSqrt()) if usual else site.spec


def number(scale: Scale, head_dim: int) -> float:
    """Returns a constant scale as a number, and refuses learned and position-dependent scales."""
    if scale.kind == "learned" or scale.follows_position:
        raise RefusedError(
            f"expected a scale that is one number, got {scale.formula()}; give the model a fixed scale"
        )
    return float(scale.factor(torch.zeros(1, 1), head_dim, {}))


def exchange_calls(
    change: PlacedChange, target: Target, sites: list[AttentionSite]
) -> Iterator[Handle]:
    """Replaces the attention calls of modules, and checks in one pass on the example that all of them were replaced."""
    _check_masks(target, sites)
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


def _calls_under_change(module: nn.Module) -> ChangedCalls | None:
    """Returns the replacement of a module's forward that is already there."""
    for forward in forwards_of(module):
        if isinstance(forward, ChangedCalls):
            return forward
    return None


def _check_masks(target: Target, sites: list[AttentionSite]) -> None:
    """Raises RefusedError unless hidden pairs can be told from low logits by their scores alone, which is all that
    reaches the softmax of hand-written attention."""
    unchanged = [site for site in sites if _calls_under_change(site.module) is None]
    trace = target.seen() if unchanged else None
    for site in unchanged:
        assert trace is not None
        call = None
        if site.name in trace.calls:
            call = trace.calls[site.name][0].captured.call
        if isinstance(call, ScoresCall) and call.sink is not None:
            raise RefusedError(
                f"{where(site)}: a sink, or another column that is no key, is joined to the scores before the softmax, "
                "where it can't be told from a key; use the model's fused attention, or qk_clip or lalr"
            )
        if trace.hidden_by_small.get(site.name, 0):
            raise RefusedError(
                f"{where(site)}: its mask hides keys by a number above {HIDES:.0f} (such as -100), which the softmax "
                "of hand-written attention can't tell from a low logit, so hidden pairs could become visible; write "
                "the mask with -inf, use the model's fused attention, or use qk_clip or lalr"
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
        scale = number(site.spec.scale, site.head_dim)
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
    scale = number(first.spec.scale, first.head_dim)
    return ChangedCalls(module, geometry, base, scale, layout)


def _add_change(
    calls: ChangedCalls, mine: PlacedChange, target: Target, site: AttentionSite
) -> Handle:
    """Adds a change to a module's calls, with the parameters it needs."""
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


Modules = Mapping[ChangedCalls, list[AttentionSite]]


def _check_pass(target: Target, changed_modules: Modules) -> None:
    """Runs the example and checks that every attention call of every module was replaced, and nothing else."""
    for calls in changed_modules:
        calls.seen = []
    try:
        run_once(target.model, *target.batch)
        for calls, sites in changed_modules.items():
            _check_calls(calls, sites, calls.seen or [])
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


def refuse_added_scores(
    remedy: str, target: Target, sites: list[AttentionSite]
) -> None:
    """Raises RefusedError if a factor on q·k would also scale a term that is added to it.

    Written-out attention passes only the sum to the softmax, and this sum may include a bias or a cap."""
    calls = target.seen().calls if sites else {}
    for site in sites:
        call = calls[site.name][0].captured.call if site.name in calls else None
        is_sum = isinstance(call, ScoresCall) and not is_product(call)
        # The model's own cap is applied before the new scale; a cap that qkeel added is applied after it.
        is_own = _calls_under_change(site.module) is None
        if is_own and (is_sum or site.spec.cap.kind != "none"):
            raise RefusedError(
                f"{remedy} at {where(site)}: a bias or a cap is in the scores before the softmax, where it can't be "
                "separated from q·k; use the model's fused attention (attn_implementation='sdpa')"
            )


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
