"""Remedies that change what attention computes: another object in a slot of the site's spec."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.core import SpecModule
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.join import join
from qkeel.remedies.seam import Change, Seam, changed
from qkeel.remedies.stand_in import standing_in
from qkeel.sites.find import find_sites, is_normed
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Fixed, InverseSqrt, NoNorm, Softmax
from qkeel.spec.slot import Geometry, Params

PER_DIM = ("dim", "one_plus_dim", "head_dim")  # gains that treat a head's dimensions differently
_CHANGES = "_qkeel_changes"  # on an own module: the spec it was built with, and the changes in force


class ChangeSpec(Remedy):
    """Gives each site a new spec; parameters it needs live on the site's module and join the optimizer.

    An own module has a spec of its own. In any other the attention call is exchanged while its forward runs.
    """

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
        """What is done at sites that are no modules of qkeel's."""
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
            # Anew from the first spec: another remedy may have changed a slot since, this one's even, and stays.
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


def change_parameters(
    target: Target, site: AttentionSite, old: AttentionSpec, new: AttentionSpec, geometry: Geometry
) -> Handle:
    """The parameters that a new spec needs, on the site's module, and no longer those that only the old one did."""
    sizes = (geometry.n_heads, geometry.n_kv_heads, geometry.head_dim)
    had, needed = old.init_params(*sizes), new.init_params(*sizes)
    return add_parameters(
        target,
        site,
        {n: value for n, value in needed.items() if n not in had},
        drop=[n for n in had if n not in needed],
    )


def add_parameters(target: Target, site: AttentionSite, values: Params, drop: Iterable[str] = ()) -> Handle:
    """New parameters on a site's module, by plain names, in the optimizer too; the handle takes them off."""
    module = site.module
    like = target.parameter(site.query[0].parameter) if site.terms else next(target.model.parameters())
    taken = [n for n in values if n in module._parameters or n in module._modules or n in module._buffers]
    if taken:
        raise RefusedError(f"{site.name or 'the model'} has something called {taken[0]} already")
    added = {n: nn.Parameter(value.to(like)) for n, value in values.items()}
    dropped = {n: module._parameters[n] for n in drop}
    before, head = dict(module._parameters), f"{module_name(site)}." if module_name(site) else ""
    joined = join(target.optimizer, {head + n: p for n, p in added.items()}, like)
    _swap(module, dropped, added)

    def undo() -> None:
        _swap(module, added, dropped)
        now = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({n: now[n] for n in (*before, *now) if n in now})
        joined.remove()

    return Handle(undo)


def module_name(site: AttentionSite) -> str:
    """The name of the site's module: that of the site without the number of its call."""
    return site.name.partition("#")[0]


def _swap(module: nn.Module, out: Mapping[str, nn.Parameter | None], into: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in out.items():
        del module._parameters[name]
        if parameter is not None:
            parameter.grad = None  # out of reach of zero_grad, so an optimizer would step by it again and again
    module._parameters.update(into)


# --- attention of other people's modules


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


def refuse_unseen(site: AttentionSite) -> Refusal | None:
    """Why the calls of a module cannot be exchanged, if that is known beforehand."""
    if site.description is not None or site.below:
        return Refusal(
            "its attention runs inside torch.jit.script, torch.func.vmap or a function of its own, where it can't be "
            "changed",
            "use a remedy of steps or weights (qk_clip, lalr), or build the model with qkeel.nn",
        )
    return None


def refuse_norm(site: AttentionSite, *, per_dim: bool) -> Refusal | None:
    """Why q and k of a site cannot be normed, if so. `per_dim`: the norm treats a head's dimensions differently."""
    if is_normed(site):
        return Refusal("q and k are normed already", "remove that norm first, or leave it be")
    if per_dim and site.spec.position.order == "rotate_then_norm":
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None


def refuse_normalizer(site: AttentionSite) -> Refusal | None:
    """Why a site takes no other normaliser, if so."""
    if isinstance(site.spec.normalizer, Softmax):
        return None
    return Refusal(
        f"its weights are {site.spec.normalizer.formula()} already, not a softmax",
        "remove the remedy that made them so first, or leave them be",
    )
