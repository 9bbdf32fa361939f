"""Attention of other people's modules: its calls are exchanged, and one pass shows whether all of them were."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import nn

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.remedies.base import Target
from qkeel.remedies.parameters import change_parameters, module_name
from qkeel.remedies.seam import Change, Seam, changed
from qkeel.remedies.stand_in import standing_in
from qkeel.sites.find import find_sites
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Fixed, InverseSqrt, NoNorm
from qkeel.spec.slot import Geometry

_NESTED = "_qkeel_use_nested_tensor"  # on a torch encoder: what its use_nested_tensor was


def base_spec(site: AttentionSite) -> AttentionSpec:
    """The spec of a site, 1/√d by its name where a call had that number as its scale."""
    if not isinstance(site.spec.scale, Fixed):
        return site.spec
    usual = math.isclose(site.spec.scale.value, max(1, site.head_dim) ** -0.5, rel_tol=1e-6)
    return site.spec.replace(scale=InverseSqrt()) if usual else site.spec


def exchange_calls(change: Change, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
    """Exchange the attention calls of modules, and look at one pass on the example whether all were."""
    seams: dict[Seam, list[AttentionSite]] = {}
    for module in {id(site.module): site.module for site in sites}.values():
        here = [site for site in sites if site.module is module]
        _check_alone(here, sites)
        seam = _seam(here)
        if isinstance(module, nn.MultiheadAttention):
            yield _no_nested_tensors(target.model, module)
        yield _change_seam(seam, change, target, here[0])
        seams[seam] = here
    if seams:
        _check_pass(target, seams)


def _seam(sites: list[AttentionSite]) -> Seam:
    """The seam in a module's forward: the one that is there, or a new one that nobody uses yet."""
    module, one = sites[0].module, sites[0]
    there = next((s for s in standing_in(module) if isinstance(s, Seam)), None)
    if there is not None:
        return there
    seam = Seam(module, Geometry(n_heads=one.n_heads, n_kv_heads=one.n_kv_heads, head_dim=one.head_dim))
    for site in sites:
        assert isinstance(site.spec.scale, Fixed)
        seam.bases[site.spec.scale.value] = AttentionSpec(scale=base_spec(site).scale)
    return seam


def _change_seam(seam: Seam, mine: Change, target: Target, site: AttentionSite) -> Handle:
    """One change more at a seam, with the parameters it needs."""
    base = next(iter(seam.bases.values()))
    old, new = (changed(base, changes) for changes in (seam.changes, [*seam.changes, mine]))
    parameters = change_parameters(target, site, old, new, seam.geometry)
    seam.change([*seam.changes, mine])

    def undo() -> None:
        seam.change([change for change in seam.changes if change is not mine])
        parameters.remove()

    return Handle(undo)


def _check_alone(here: list[AttentionSite], sites: list[AttentionSite]) -> None:
    module, one = here[0].module, here[0]
    for site in sites:
        if site.module is not module and any(m is site.module for m in module.modules()):
            raise RefusedError(f"the attention of {site.name} happens inside that of {one.name}; treat one of them")
    if any((s.n_heads, s.head_dim) != (one.n_heads, one.head_dim) for s in here):
        raise RefusedError(f"{one.name} computes several attentions of unlike heads; no parameter fits all of them")


def _check_pass(target: Target, seams: Mapping[Seam, list[AttentionSite]]) -> None:
    """Run the example once and see that every attention call of every module was exchanged, and nothing else."""
    for seam in seams:
        seam.seen = []
    try:
        find_sites(target.model, *target.example[0], **target.example[1])
    except InvalidValueError as error:
        raise (error.__cause__ if isinstance(error.__cause__, RefusedError) else error) from None
    finally:
        passes = {seam: seam.seen or [] for seam in seams}
        for seam in seams:
            seam.seen = None
    for seam, sites in seams.items():
        _check_calls(seam, sites, passes[seam])


def _check_calls(seam: Seam, sites: list[AttentionSite], passes: list[list[float | None]]) -> None:
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
            "calls; which of them are attention can't be told"
        )
    hidden = [h for calls in passes for h in calls if h is not None]
    if hidden and not all(isinstance(spec.norm, NoNorm) for spec in seam.specs.values()):
        raise RefusedError(
            f"{name} multiplies queries and keys before the softmax that could be changed, and no module makes whole "
            "heads of them; use the model's fused attention (attn_implementation='sdpa'), or qk_clip or lalr"
        )
    if hidden and len({*seam.specs.values()}) > 1:
        raise RefusedError(f"{name} writes out several attentions with unlike scales; they can't be told apart")
    known = [h for h in hidden if h > -math.inf]
    if known:
        seam.low = min(seam.low, max(known) / 2)


def _no_nested_tensors(model: nn.Module, module: nn.Module) -> Handle:
    """torch's encoder packs padded batches for its fast path, which a changed attention does not take."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and module in m.modules()]
    for encoder in encoders:
        encoder.__dict__.setdefault(_NESTED, encoder.use_nested_tensor)
        encoder.use_nested_tensor = False

    def undo() -> None:
        for encoder in encoders:
            if not any(isinstance(s, Seam) for m in encoder.modules() for s in standing_in(m)):
                encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)

    return Handle(undo)
