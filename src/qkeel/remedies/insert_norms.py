"""Remedies that norm queries and keys: after the projections if these produce complete heads, or else in the attention
call."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, cast, final

import torch
from torch import nn

from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.errors import RefusedError, check_known
from qkeel.functional.norms import widest
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.patching.module_forward import put_in_place
from qkeel.patching.module_tables import names_in_use
from qkeel.remedies.added_parameters import add_submodules
from qkeel.remedies.base import Target, module_name, where
from qkeel.remedies.foreign_attention import change_calls
from qkeel.remedies.head_norms import (
    SIDES,
    HeadNorm,
    HeadSource,
    NormedProjection,
    heads_of,
)
from qkeel.remedies.processes import agreed
from qkeel.remedies.site_scale import base_spec, constant_factor
from qkeel.remedies.spec_remedy import (
    ChangeSpec,
    refuse_heads,
    refuse_norm,
    refuse_scale,
    refuse_unseen,
)
from qkeel.sites.site import AttentionSite, HeadSlice
from qkeel.sites.site_search import run_once
from qkeel.spec import AttentionSpec, Fixed, L2Norm, LayerNorm, RMSNorm
from qkeel.spec.logits import Scale
from qkeel.spec.norm import GainKind, GainNorm, NormedPart, On, Over
from qkeel.spec.slot import ParameterSizes

# The module that produces each side.
SourcesBySide = dict[NormedPart, HeadSource]
# The relative length by which eps, under the root, may shorten a vector of usual size.
_SHORTER = 0.05
KINDS: dict[str, type[GainNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "l2": L2Norm}


@final
class _Projection:
    """A module that makes heads for the attention calls of one module, and the features of each side's heads.

    The calls may use different heads of it, as in differential attention or with local heads."""

    def __init__(self, site: AttentionSite, source: HeadSource) -> None:
        # The first call, and what it uses.
        self.site, self.source = site, source
        self.rows: dict[NormedPart, set[tuple[int, ...]]] = {}

    def add(
        self, remedy: str, site: AttentionSite, side: NormedPart, source: HeadSource
    ) -> None:
        """Adds the heads that a call uses."""
        if module_name(self.site) != module_name(site):
            raise RefusedError(
                f"{remedy} at {where(site)}: its projections also produce heads of {where(self.site)}"
            )
        rows = self.rows.setdefault(side, set())
        new = {tuple(row) for row in source.index.tolist()} - rows
        taken = {feature for row in rows for feature in row}
        if rows and any(
            len(row) != len(next(iter(rows))) or taken & {*row} for row in new
        ):
            raise RefusedError(
                f"{remedy} at {where(site)}: two attention calls of the module use different parts of the same heads "
                f"of {source.name}, and one norm cannot serve both; use qk_clip or lalr"
            )
        rows |= new


class ChangeNorm(ChangeSpec):
    """Base class for remedies that norm the `sides` of attention, which are some of q, k and v.

    In modules from other libraries the norm is placed directly after the projection, which is before the rotation,
    where a gain per dimension belongs, and before a cache, which then holds normed keys. If no module outputs complete
    heads (nn.MultiheadAttention multiplies by its own weight, and latent attention concatenates keys from two parts),
    the attention call is replaced, which is possible for norms that commute with the rotation.

    Heads are the heads of a token, even if a logit sums over tokens (tied rows, attention over channels).
    """

    sides: ClassVar[tuple[NormedPart, ...]] = ("q", "k")

    __slots__ = ()

    @abc.abstractmethod
    def norm(self) -> GainNorm:
        """Returns the norm for the spec's norm slot."""

    def unit_scale(self, train_length: int | None) -> Scale:
        """Returns the scale that replaces 1/√d for unit vectors."""
        return Fixed(1.0)

    @property
    def works_in_call(self) -> bool:
        """True if the norm may follow the rotation and the repetition of key heads."""
        norm = self.norm()
        is_alike = norm.over == "head" and norm.gain in ("none", "scalar")
        return norm.commutes_with_rotation and is_alike

    def supports(self, site: AttentionSite) -> Refusal | None:
        norm = self.norm()
        refusal = refuse_norm(site, norm)
        # Where stored weights are divided by a norm of theirs, logits need not scale with them.
        if refusal is None and site.unscaled and not site.reparametrised:
            return Refusal(
                site.unscaled, "use softcap, which bounds the input of the softmax"
            )
        if refusal is None and norm.kind == "l2":
            return refuse_scale(base_spec(site).scale)
        return refusal

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        norm, scale = self.norm(), spec.scale
        if norm.kind == "l2":
            scale = scale.with_base(self.unit_scale(train_length))
        return spec.replace(norm=norm, scale=scale)

    def change_others(
        self, target: Target, sites: list[AttentionSite]
    ) -> Iterator[Handle]:
        if sites and self.norm().kind not in KINDS:
            # The check after it is placed compares the length of vectors, which other norms may give any.
            raise RefusedError(
                f"{self.name}: {self.norm()} can be put into qkeel's own attention only; use kind=rms, layer or l2"
            )
        # All processes refuse together, or none does.
        plans = agreed(functools.partial(self._plans, target, sites))
        if plans:
            yield from self._norm_projections(target, sites, plans)
        called = [site for site in sites if site.name not in plans]
        yield from change_calls((self, target.train_length), target, called)

    def _plans(
        self, target: Target, sites: list[AttentionSite]
    ) -> dict[str, SourcesBySide]:
        """Returns the modules that produce the heads of each site, without the sites whose call is to be replaced."""
        plans = {}
        for site in sites:
            try:
                self._refuse_shared(target, site)
                plans[site.name] = self._sources(target, site)
            except RefusedError as error:
                unseen = refuse_unseen(site)
                # Between projection and product torch's module does nothing, so there any norm may stand in the call.
                is_torch = isinstance(site.module, nn.MultiheadAttention)
                if unseen is not None or not (self.works_in_call or is_torch):
                    raise RefusedError(
                        f"{self.name} at {where(site)}: {unseen or error}"
                    ) from None
        return plans

    def _refuse_shared(self, target: Target, site: AttentionSite) -> None:
        """Refuses a norm after a projection that also makes what must not be normed, or what is normed separately."""
        slices: dict[NormedPart, Sequence[HeadSlice]] = {
            "q": [term.query[-1] for term in site.terms],
            "k": [term.key[-1] for term in site.terms],
            "v": [
                s for other in target.all_sites or [site] for s in other.value_weights
            ],
        }
        for side in self.sides:
            for other_side, slices_of_other in slices.items():
                for s in slices[side] if other_side != side else ():
                    if any(target.overlap(s, t) for t in slices_of_other):
                        raise refuse_heads(
                            f"{s.parameter} makes the {SIDES[side]} and the {SIDES[other_side]} at once"
                        )

    def _sources(self, target: Target, site: AttentionSite) -> SourcesBySide:
        """Returns the module that produces each side."""
        plan: SourcesBySide = {}
        for side in self.sides:
            ways = [
                (term.query if side == "q" else term.key)[-1] for term in site.terms
            ]
            if side == "v":
                if not site.value_weights:
                    raise RefusedError(
                        "it is not known which weights produce the values; use qk_norm"
                    )
                ways = list(site.value_weights)
            plan[side] = heads_of(target.model, site, side, ways)
        return plan

    def _norm_projections(
        self,
        target: Target,
        sites: list[AttentionSite],
        plans: dict[str, SourcesBySide],
    ) -> Iterator[Handle]:
        """Inserts norms after the projections of the sites, then checks in one pass that all of them ran."""
        sites = [site for site in sites if site.name in plans]
        projections: dict[int, _Projection] = {}
        for site in sites:
            for side, source in plans[site.name].items():
                projection = projections.setdefault(
                    id(source.module), _Projection(site, source)
                )
                projection.add(self.name, site, side, source)
        placed = []
        for projection in projections.values():
            site = projection.site
            norms = self._norms(target, projection)
            yield add_submodules(
                target,
                site,
                {name: norm for name, norm, _ in norms},
                target.parameter(site.query[0].parameter),
            )
            normed = NormedProjection(
                projection.source, [(norm, index) for _, norm, index in norms]
            )
            yield put_in_place(normed)
            placed.append(normed)
        self._check(target, sites, placed)

    def _norms(
        self, target: Target, projection: _Projection
    ) -> list[tuple[str, HeadNorm, torch.Tensor]]:
        """Builds the norm of each side of a projection, with its name and the features of its heads.

        A change of scale is built into the norms of q, or of k if q is not normed."""
        site = projection.site
        base = base_spec(site).scale
        spec = self.changed(AttentionSpec(scale=base), target.train_length)
        taken = names_in_use(site.module)
        norms = []
        for side, rows in projection.rows.items():
            index = torch.tensor(sorted(rows))
            factor, learned = 1.0, None
            # On one side only, since the factors of q and k multiply.
            if side == self.sides[0] and spec.scale != base:
                learned = spec.scale if spec.scale.kind == "learned" else None
                new = 1.0 if learned else constant_factor(spec.scale, site.head_dim)
                factor = new / constant_factor(base, site.head_dim)
            n_heads, width = index.shape
            norm = HeadNorm(
                spec.norm,
                side,
                ParameterSizes(n_heads=n_heads, n_kv_heads=n_heads, head_dim=width),
                next(projection.source.module.parameters()),
                factor=factor,
                learned=learned,
            )
            name = f"{side}_norm"
            # timm has an Identity in the place of a norm that is switched off.
            norms.append((f"added_{name}" if name in taken else name, norm, index))
        return norms

    def _check(
        self,
        target: Target,
        sites: list[AttentionSite],
        placed: list[NormedProjection],
    ) -> None:
        """Checks in one pass that every norm runs, and that the vectors in the scores have the length it gives them.

        Raises:
            RefusedError: a norm did not run, or the call of its site was not observed, or an operation between the norm
                and the scores changes the length.
        """
        over = self.norm().over
        # What is wrong with the vectors of each observed site.
        faults: dict[str, str] = {}

        def note(captured: CapturedCall) -> None:
            q, k = captured.call.q, captured.call.k
            if q is None or k is None:
                return
            fault = faults.get(captured.name, "")
            for side, x in (("q", q), ("k", k)):
                if side in self.sides:
                    fault = fault or _fault_of(side, x, over)
            faults[captured.name] = fault

        for projection in placed:
            projection.seen = []
        try:
            known = KnownSites.of(sites)
            observer = CaptureMode(target.model, note, known=known)
            run_once(target.model, *target.batch, observer)
        finally:
            sizes = [{*(projection.seen or [0])} for projection in placed]
            for projection in placed:
                projection.seen = None
        if sizes != [{projection.size} for projection in placed]:
            raise RefusedError(
                f"{self.name}: a norm on the output of a projection does not affect the attention scores, because "
                "something other than the module that holds the weights uses them"
            )
        for site in sites:
            if fault := faults.get(site.name, "its attention was not seen"):
                raise RefusedError(
                    f"{self.name} at {where(site)}: after the norm of the projection, {fault}. An operation in between "
                    "(a sum of several outputs, an activation, a gate, pooling) changes their length, or the scores are "
                    "made from another output than the one that is normed, so the norm does not bound the logits; use "
                    "softcap, or qk_clip or lalr, which need no norm"
                )


def _fault_of(side: NormedPart, x: torch.Tensor, over: Over) -> str:
    """Says that the vectors of q or k [b h t d] differ in length, within a head or (over="layer") over all heads of a
    token; "" if they do not."""
    squares = x.detach().to(widest(x.device)).square().mean(-1)
    if over != "head":
        squares = squares.mean(1, keepdim=True)
    most = squares.amax((0, 2), keepdim=True)
    # Vectors that are zero, as of padding, have no length to keep; eps shortens small ones.
    is_short = (squares > 0) & (squares < (1 - _SHORTER) ** 2 * most)
    if not is_short.any():
        return ""
    least = float(squares[squares > 0].min())
    return f"vectors of {side} reach the scores with a mean square of {least:.3g} to {float(most.max()):.3g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions(ChangeNorm):
    """Options of a norm with a gain. kind=l2 produces unit vectors, which need a scale other than 1/√d."""

    #: the kind of norm: RMS norm, layer norm or L2 norm
    kind: Literal["rms", "layer", "l2"] = "rms"
    over: Over = "head"  #: what is normed together: the d dimensions of a head, or all heads of a token ("layer")
    gain: GainKind = "dim"  #: the gain and its shape; see `qkeel.spec.RMSNorm`

    def __post_init__(self) -> None:
        check_known(f"kind of {self.name}", self.kind, KINDS)
        # Validates the options.
        self.norm()

    def norm(self) -> GainNorm:
        on = cast("On", "".join(self.sides))
        return KINDS[self.kind](on=on, over=self.over, gain=self.gain)
