"""Remedies that norm queries and keys: after the projections that make the heads, or else in the attention call."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal, cast

from torch import nn

from qkeel.capture.trace import ModelTrace, Operand, seen
from qkeel.errors import RefusedError, check_known
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.patching.instance_forward import put_in_place
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.attention.change_spec import ChangeSpec, base_spec, exchange_calls, number
from qkeel.remedies.attention.projection_norms import HeadNorm, Heads, NormedProjection, heads_of
from qkeel.remedies.attention.refusals import refuse_heads, refuse_norm, refuse_scale, refuse_unseen
from qkeel.remedies.attention.site_parameters import add_submodules
from qkeel.remedies.base import Target, module_name, where
from qkeel.sites.find import is_normed
from qkeel.spec import AttentionSpec, Fixed, L2Norm, LayerNorm, RMSNorm
from qkeel.spec.norm import Gain, GainNorm, On, Over, Part
from qkeel.spec.scale import Scale
from qkeel.spec.slot import Geometry

Plan = dict[Part, list[Heads]]  # the modules that make each side
Operands = Callable[[], dict[str, list[tuple[Operand, Operand]]]]
KINDS: dict[str, type[GainNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "l2": L2Norm}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Norm:
    """A norm of the heads that one module makes, and its name in the site's module."""

    name: str
    heads: Heads
    module: HeadNorm


class ChangeNorm(ChangeSpec):
    """Gives q, k, v or some of them a norm; `sides` are those.

    In other people's modules the norm comes after the projection: before the rotation, where a gain per dimension
    belongs, and before a cache, which then holds normed keys. Where no module makes the heads (nn.MultiheadAttention
    multiplies by its own weight; in latent attention keys are concatenated from two parts) the call is exchanged, for
    norms that may as well come after the rotation.

    Heads are those of a token, also where a logit sums over tokens too (tied rows, attention over channels). A table of
    relative positions that queries are multiplied with stays as it is, like a bias.
    """

    sides: ClassVar[tuple[Part, ...]] = ("q", "k")

    __slots__ = ()

    @abc.abstractmethod
    def norm(self) -> GainNorm:
        """The norm that goes into the slot."""

    def unit_scale(self, train_length: int | None) -> Scale:
        """The scale of unit vectors in place of 1/√d."""
        return Fixed(1.0)

    @property
    def works_in_call(self) -> bool:
        """True if the norm gives the same after the rotation, and for key heads that were repeated."""
        norm = self.norm()
        return norm.commutes_with_rotation and norm.over == "head" and norm.gain in ("none", "scalar")

    def supports(self, site: AttentionSite) -> Refusal | None:
        norm = self.norm()
        refusal = refuse_norm(site, norm)
        return refusal or (refuse_scale(self.name, base_spec(site).scale) if norm.kind == "l2" else None)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        norm = self.norm()
        scale = spec.scale.with_base(self.unit_scale(train_length)) if norm.kind == "l2" else spec.scale
        return spec.replace(norm=norm, scale=scale)

    def change_others(self, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
        values = target.seen().value_slices() if sites and "v" in self.sides else {}
        operands = functools.cache(lambda: target.seen().operands())
        plans = {site.name: self._plan(target, site, values.get(site.name, ""), operands) for site in sites}
        projected = {name: plan for name, plan in plans.items() if not isinstance(plan, Refusal)}
        yield from _norm_projections(self, target, [s for s in sites if s.name in projected], projected)
        called = [s for s in sites if s.name not in projected]
        for site in called:
            unseen = refuse_unseen(site)
            if unseen is not None or not (self.works_in_call or isinstance(site.module, nn.MultiheadAttention)):
                raise RefusedError(f"{self.name} at {where(site)}: {unseen or plans[site.name]}")
        yield from exchange_calls((self, target.train_length), target, called)

    def _plan(
        self, target: Target, site: AttentionSite, values: tuple[HeadSlice, ...] | str, operands: Operands
    ) -> Plan | Refusal:
        """The modules that make the heads to be normed."""
        plan = self._modules(target, site, values, frozenset())
        if not isinstance(plan, Refusal) and all(len(found) == 1 for found in plan.values()):
            return plan
        pairs = operands().get(site.name, [])
        tables = frozenset(name for pair in pairs for operand in pair for name in operand.tables)
        plan = self._modules(target, site, values, tables)
        if isinstance(plan, Refusal):
            return plan
        widths = {operand.width for pair in pairs for operand in pair if not operand.tables}
        for part, found in plan.items():
            if len(found) > 1 and {heads.index.shape[1] for heads in found} != widths:
                made, side = ", ".join(sorted(heads.name for heads in found)), "queries" if part == "q" else "keys"
                return refuse_heads(f"the {side} are no one module's output: they are made by {made}")
        return plan

    def _modules(
        self, target: Target, site: AttentionSite, values: tuple[HeadSlice, ...] | str, tables: frozenset[str]
    ) -> Plan | Refusal:
        """The modules that make each side, those of tables left out."""
        plan: Plan = {}
        for part in self.sides:
            ways = [(term.query if part == "q" else term.key)[-1] for term in site.terms]
            if part == "v":
                if isinstance(values, str):
                    return Refusal(f"it is not known which weights make the values ({values})", "use qk_norm")
                ways = list(values)
            found = heads_of(target.model, site, part, [s for s in ways if s.parameter not in tables])
            if isinstance(found, Refusal):
                return found
            plan[part] = found
        return plan


def _norm_projections(
    remedy: ChangeNorm, target: Target, sites: list[AttentionSite], plans: dict[str, Plan]
) -> Iterator[Handle]:
    """Norms after the projections of several sites, then one pass which shows that all of them ran."""
    placed: list[NormedProjection] = []
    done: dict[int, str] = {}
    several = {name for name, plan in plans.items() if any(len(found) > 1 for found in plan.values())}
    called = target.seen().called if sites else frozenset()
    for site in sites:
        plan, name = plans[site.name], module_name(site)
        for part, found in plan.items():
            theirs = [done[id(heads.module)] for heads in found if done.get(id(heads.module), name) != name]
            if len(theirs) == len(found):  # of a sum some may be an earlier site's, whose scores are added here
                raise RefusedError(f"{remedy.name} at {name}: its projections make heads of {theirs[0]} too")
            plan[part] = [heads for heads in found if id(heads.module) not in done]
        if not any(plan.values()):  # a second call of the same module
            continue
        norms = _norms(remedy, target, site, plan)
        done.update((id(norm.heads.module), name) for norm in norms)
        for norm in norms:  # an Identity is a place for a norm that was left out, as timm has it
            norm.module.replaces = type(submodules_of(site.module).get(norm.name)) is nn.Identity
        held = {norm.name: norm.module for norm in norms}
        yield add_submodules(target, site, held, target.parameter(site.query[0].parameter), over_identities=True)
        for module in {id(norm.heads.module): norm.heads.module for norm in norms}.values():
            own = [norm for norm in norms if norm.heads.module is module]
            new = NormedProjection(
                [norm.heads for norm in own],
                [norm.module for norm in own],
                inside=None if id(module) in called or "weight" not in parameters_of(module) else site.module,
            )
            yield put_in_place(new)
            placed.append(new)
    if placed:
        after = _check_ran(remedy, target, sites, placed)
        _check_lengths(remedy, after, several)


def _norms(remedy: ChangeNorm, target: Target, site: AttentionSite, plan: Plan) -> list[_Norm]:
    """The norm modules of a site; a change of the scale goes into those of q, or of k where q has none."""
    base = base_spec(site)
    spec = remedy.changed(AttentionSpec(scale=base.scale), target.train_length)
    first = next(iter(plan))
    norms: list[_Norm] = []
    for part, found in plan.items():
        factor, learned = 1.0, None
        if part == first and spec.scale != base.scale:
            old = number(base.scale, site.head_dim)
            learned = spec.scale if spec.scale.kind == "learned" else None
            factor = (1.0 if learned is not None else number(spec.scale, site.head_dim)) / old
        for i, heads in enumerate(found):
            width = heads.index.shape[1]
            geometry = Geometry(n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=width)
            like = next(heads.module.parameters())
            module = HeadNorm(spec.norm, part, geometry, like, factor=factor, learned=learned)
            norms.append(_Norm(name=f"{part}_norm{f'_{i + 1}' if i else ''}", heads=heads, module=module))
    return norms


def _check_ran(
    remedy: ChangeNorm, target: Target, sites: list[AttentionSite], placed: list[NormedProjection]
) -> ModelTrace:
    """Raise unless in one pass, which is returned, every norm runs and comes before the scores."""
    for new in placed:
        new.seen = []
    try:
        trace = seen(target.model, *target.short(), below=any(site.below for site in sites))
    finally:
        sizes = [new.seen for new in placed]
        for new in placed:
            new.seen = None
    after = {site.name: site for site in trace.sites}
    names = [site.name for site in sites if site.name not in after or not is_normed(after[site.name])]
    if names or any(own is None or set(own) != {new.size} for new, own in zip(placed, sizes)):
        raise RefusedError(
            f"{remedy.name}: a norm on the output of the projections of {names or [site.name for site in sites]} does "
            "not reach their scores: their weights are used by something else than the module that holds them"
        )
    return trace


def _check_lengths(remedy: ChangeNorm, after: ModelTrace, names: set[str]) -> None:
    """Raise where several modules make the heads of a side and those that are multiplied are not of one length each:
    their outputs are added up, and the sum of what is normed is not."""
    operands = after.operands() if names else {}
    for name in names:
        for q, k in operands.get(name, []):
            for part, operand in (("q", q), ("k", k)):
                if part in remedy.sides and not operand.normed(remedy.norm().over):
                    raise RefusedError(
                        f"{remedy.name} at {name}: the outputs of several modules are added up to {part}, so norms of "
                        "each do not norm the sum; use qk_clip or lalr, which need no norm"
                    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions(ChangeNorm):
    """The options of a norm with a gain; kind=l2 makes unit vectors, which need a scale other than 1/√d."""

    kind: Literal["rms", "layer", "l2"] = "rms"  #: what the norm divides by
    over: Over = "head"  #: the d numbers of one head, or all heads of a token ("layer")
    gain: Gain = "dim"  #: the gain and its shape, see `qkeel.spec.RMSNorm`

    def __post_init__(self) -> None:
        check_known(f"kind of {self.name}", self.kind, KINDS)
        self.norm()  # checks the words

    def norm(self) -> GainNorm:
        return KINDS[self.kind](on=cast("On", "".join(self.sides)), over=self.over, gain=self.gain)
