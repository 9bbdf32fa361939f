"""Remedies that give a site another spec: qkeel's own modules have one, in others the attention calls are exchanged."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from qkeel.capture.calls import HIDES, Layout
from qkeel.capture.trace import biased, run_once
from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.instance_forward import forwards_of
from qkeel.remedies.attention.changed_call import Change, ChangedCalls, changed
from qkeel.remedies.attention.refusals import refuse_unseen
from qkeel.remedies.attention.site_parameters import change_parameters
from qkeel.remedies.base import Remedy, Target, compose_all, module_name, where
from qkeel.spec import AttentionSpec, InverseSqrt
from qkeel.spec.scale import Scale
from qkeel.spec.slot import Geometry

_CHANGES = "_qkeel_changes"  # on an own module: the spec it was built with, and the changes in force
_NESTED = "_qkeel_use_nested_tensor"  # on a torch encoder: what its use_nested_tensor was


class ChangeSpec(Remedy):
    """Gives each site a new spec; parameters it needs live on the site's module and join the optimizer. One of
    qkeel's modules has a spec of its own. In any other the attention call is exchanged while its forward runs."""

    stacks = True
    changes_spec = True

    __slots__ = ()

    @abc.abstractmethod
    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """The spec with this remedy in it."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, SpecModule):
            return None
        return refuse_unseen(site)

    def apply(self, target: Target) -> Handle:
        own = [site for site in target.sites if isinstance(site.module, SpecModule)]
        others = [site for site in target.sites if not isinstance(site.module, SpecModule)]
        return compose_all(self._handles(target, own, others))

    def _handles(self, target: Target, own: list[AttentionSite], others: list[AttentionSite]) -> Iterator[Handle]:
        for site in own:
            yield self.change_own(site, target)
        yield from self.change_others(target, others)

    def change_others(self, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
        """Changes sites that are no modules of qkeel's."""
        yield from exchange_calls((self, target.train_length), target, sites)

    def change_own(self, site: AttentionSite, target: Target) -> Handle:
        """Another spec for one of qkeel's own modules."""
        module = site.module
        assert isinstance(module, SpecModule)
        base, changes = module.__dict__.get(_CHANGES, (module.spec, []))
        mine: Change = (self, target.train_length)
        new = changed(module.spec, [mine])
        geometry = Geometry(n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim)
        undo_parameters = change_parameters(target, site, module.spec, new, geometry)
        module.__dict__[_CHANGES] = (base, [*changes, mine])
        module.spec = new

        def undo() -> None:
            # From the first spec again: another remedy may have changed a slot since, even this one's, and stays.
            _, now = module.__dict__[_CHANGES]
            rest = [change for change in now if change is not mine]
            module.spec = changed(base, rest)
            module.__dict__[_CHANGES] = (base, rest)
            if not rest:
                del module.__dict__[_CHANGES]
            undo_parameters.remove()

        return Handle(undo)


def settle(module: nn.Module) -> None:
    """The spec that an own module has now is its own, whatever changes made it."""
    module.__dict__.pop(_CHANGES, None)


def known_length(length: int | None, train_length: int | None, use: str, otherwise: str = "") -> int:
    """L of a formula: the remedy's own option, or else the training length; `use` says what the formula does with L."""
    found = length or train_length
    if found is None:
        raise InvalidValueError(
            f"{use}: say L, as length=512 in the remedy or as qkeel.apply(..., train_length=512){otherwise}"
        )
    return found


def base_spec(site: AttentionSite) -> AttentionSpec:
    """The spec of a site, 1/√d by its name where a call had that number as its scale."""
    if site.spec.scale.kind != "fixed":
        return site.spec
    usual = math.isclose(number(site.spec.scale, site.head_dim), max(1, site.head_dim) ** -0.5, rel_tol=1e-6)
    return site.spec.replace(scale=InverseSqrt()) if usual else site.spec


def number(scale: Scale, head_dim: int) -> float:
    """A scale that is one number: neither learned nor a factor of the position."""
    if scale.kind == "learned" or scale.follows_position:
        raise RefusedError(f"expected a scale that is one number, got {scale.formula()}; give the model a fixed scale")
    return float(scale.factor(torch.zeros(1, 1), head_dim, {}))


def exchange_calls(change: Change, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
    """Exchange the attention calls of modules, and check in one pass on the example that all of them were."""
    _refuse_low(target, sites)
    changed_modules: dict[ChangedCalls, list[AttentionSite]] = {}
    for module in {id(site.module): site.module for site in sites}.values():
        here = [site for site in sites if site.module is module]
        _check_alone(here, sites)
        calls = _calls_of(here)
        if isinstance(module, nn.MultiheadAttention):
            yield _no_nested_tensors(target.model, module)
        yield _add_change(calls, change, target, here[0])
        changed_modules[calls] = here
    if changed_modules:
        _check_pass(target, changed_modules)


def _refuse_low(target: Target, sites: list[AttentionSite]) -> None:
    """Raise where a logit of q·k itself is so low that a softmax would take it for one that a mask hides."""
    new = [site for site in sites if not any(isinstance(f, ChangedCalls) for f in forwards_of(site.module))]
    least = target.seen().minima if new else {}
    for site in new:
        if (low := least.get(site.name, math.inf)) <= HIDES:
            raise RefusedError(
                f"{where(site)}: a logit that no mask hides is {low:.3g} on this example; where attention is written "
                f"out, numbers up to {HIDES:.0f} are read as hidden; use the model's fused attention, or smaller "
                "logits first"
            )


def _calls_of(sites: list[AttentionSite]) -> ChangedCalls:
    """The changed calls of a module's forward: those that are there, or new ones without a change yet."""
    module, one = sites[0].module, sites[0]
    there = next((s for s in forwards_of(module) if isinstance(s, ChangedCalls)), None)
    if there is not None:
        return there
    calls = ChangedCalls(module, Geometry(n_heads=one.n_heads, n_kv_heads=one.n_kv_heads, head_dim=one.head_dim))
    calls.layouts = _layouts(sites)
    for site in sites:
        calls.bases[number(site.spec.scale, site.head_dim)] = AttentionSpec(scale=base_spec(site).scale)
    return calls


def _layouts(sites: list[AttentionSite]) -> list[Layout]:
    """The layouts of the scores of a module, each once."""
    found: list[Layout] = []
    for site in sites:
        # [b h t s] of a fused function: what it computes inside may be a softmax in torch's functions.
        layout = site.layout or Layout(groups=("b", "h", "t", "s"), sizes=(site.n_heads,))
        if not any((layout.groups, layout.sizes) == (other.groups, other.sizes) for other in found):
            found.append(layout)
    if len({len(layout.groups) for layout in found}) < len(found):
        raise RefusedError(
            f"{sites[0].name} lays out the scores of its attentions as [{'] and ['.join(map(str, found))}], which "
            "can't be distinguished"
        )
    return found


def _add_change(calls: ChangedCalls, mine: Change, target: Target, site: AttentionSite) -> Handle:
    """One more change of a module's calls, with the parameters it needs."""
    base = next(iter(calls.bases.values()))
    old, new = (changed(base, changes) for changes in (calls.changes, [*calls.changes, mine]))
    g = calls.geometry
    if site.layout is not None and site.layout.guess and new.parameter_shapes(g.n_heads, g.n_kv_heads, g.head_dim):
        raise RefusedError(f"{where(site)}: {site.layout.guess}, and each head would have a parameter of its own")
    parameters = change_parameters(target, site, old, new, calls.geometry)
    calls.change([*calls.changes, mine])

    def undo() -> None:
        calls.change([change for change in calls.changes if change is not mine])
        parameters.remove()

    return Handle(undo)


def _check_alone(here: list[AttentionSite], sites: list[AttentionSite]) -> None:
    module, one = here[0].module, here[0]
    for site in sites:
        if site.module is not module and any(m is site.module for m in module.modules()):
            raise RefusedError(f"the attention of {site.name} happens inside that of {one.name}; treat one of them")
    if any((s.n_heads, s.head_dim) != (one.n_heads, one.head_dim) for s in here):
        raise RefusedError(
            f"{one.name} computes several attentions with different heads; no parameter fits all of them"
        )


def _check_pass(target: Target, changed_modules: Mapping[ChangedCalls, list[AttentionSite]]) -> None:
    """Run the example once and see that every attention call of every module was exchanged, and nothing else."""
    for calls in changed_modules:
        calls.seen = []
    try:
        run_once(target.model, *target.example)
    except InvalidValueError as error:
        raise (error.__cause__ if isinstance(error.__cause__, RefusedError) else error) from None
    finally:
        passes = {calls: calls.seen or [] for calls in changed_modules}
        for calls in changed_modules:
            calls.seen = None
    for calls, sites in changed_modules.items():
        _check_calls(calls, sites, passes[calls])


def _check_calls(calls: ChangedCalls, sites: list[AttentionSite], passes: list[list[float | None]]) -> None:
    name = module_name(sites[0]) or "the model itself"
    counts = {len(calls) for calls in passes}
    if counts == {0} or not counts:
        raise RefusedError(
            f"{name}: its attention is not computed by F.scaled_dot_product_attention, nn.MultiheadAttention or a "
            "softmax within its forward, so it can't be changed from outside; with transformers use "
            "attn_implementation='sdpa' or 'eager'"
        )
    if counts != {len(sites)}:
        raise RefusedError(
            f"{name}: expected {len(sites)} attention calls in its forward, saw {sorted(counts)} softmaxes or fused "
            "calls; it is not known which of them are attention"
        )
    hidden = [h for calls in passes for h in calls if h is not None]
    if hidden and not all(spec.norm.kind == "none" for spec in calls.specs.values()):
        raise RefusedError(
            f"{name} multiplies queries and keys before the softmax that could be changed, and no module makes whole "
            "heads of them; use the model's fused attention (attn_implementation='sdpa'), or qk_clip or lalr"
        )
    if hidden and len({*calls.specs.values()}) > 1:
        raise RefusedError(f"{name} writes out several attentions with different scales, which cannot be distinguished")
    known = [h for h in hidden if h > -math.inf]
    if known:
        calls.low = min(calls.low, max(known) / 2)


def refuse_added_scores(remedy: str, target: Target, sites: list[AttentionSite]) -> None:
    """Raise where a factor on q·k would also be one on what is added to it. Where attention is written out only the
    sum reaches the softmax, and there may be a bias in it, or a cap."""
    written = biased(target.model, target.example[0], target.example[1]) if sites else set()
    for site in sites:
        changed_before = any(isinstance(s, ChangedCalls) for s in forwards_of(site.module))
        # A cap of the model's own bends what it is scaled by here; one that qkeel put there comes after the scale.
        if not changed_before and (site.name in written or site.spec.cap.kind != "none"):
            raise RefusedError(
                f"{remedy} at {where(site)}: a bias or a cap is in the scores before the softmax, where it can't be "
                "separated from q·k; use the model's fused attention (attn_implementation='sdpa')"
            )


def _no_nested_tensors(model: nn.Module, module: nn.Module) -> Handle:
    """Stops torch's encoder from packing padded batches, which a changed attention does not take."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and module in m.modules()]
    for encoder in encoders:
        encoder.__dict__.setdefault(_NESTED, encoder.use_nested_tensor)
        encoder.use_nested_tensor = False

    def undo() -> None:
        for encoder in encoders:
            if not any(isinstance(s, ChangedCalls) for m in encoder.modules() for s in forwards_of(m)):
                encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)

    return Handle(undo)
