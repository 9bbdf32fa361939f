"""QK-clip: after each optimizer step, shrinks the weights of heads whose logits exceeded a threshold."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel.capture.calls import maxima
from qkeel.errors import InvalidValueError, RefusedError, caution
from qkeel.functional.bounds import qk_clip_gamma
from qkeel.functional.statistics import LogitStats
from qkeel.handle import Handle, check_taken, compose
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.kernels.statistics import plain_max_stats, stats_of_rows
from qkeel.nn.attention import SpecModule
from qkeel.patching.modes import FaultGuard
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import HeadsBySite, Target, active_at, where
from qkeel.remedies.head_rows import HeadRows, HeadView, head_views, stacked
from qkeel.remedies.head_weights import (
    LOW_PRECISION,
    UNDOES_MATCHED_STEPS,
    HeadWeights,
    StepRemedy,
    copies_in_state,
    found_inf,
    innermost,
    sites_of,
    slice_name,
    stepped,
)
from qkeel.remedies.logit_factors import factors_by_site, logit_factors
from qkeel.remedies.optimizer_steps import Measure, scalable, scale_steps
from qkeel.remedies.optimizer_trials import check_steps
from qkeel.remedies.saved_state import SavedState
from qkeel.remedies.shared_maxima import SharedMaxima
from qkeel.sites.tap import Tap

Entries = dict[
    int, tuple[Tensor, list[tuple[int, HeadSlice]]]
]  # each tensor, and the slices of it that are scaled
_OFF = "qk_clip failed while reading logits and has stopped clipping: {}. Training continues without it"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKClip(StepRemedy):
    """Multiplies both W_Q^h and W_K^h by √γ_h after the optimizer step, where γ_h = min(1, τ/S_h).

    S_h is the head's largest signed, scaled logit over the batches since the last step. The same batch would therefore
    give exactly τ if the step had not changed the weights. Biases are scaled too.

    γ_h is divided between the weights as follows:

    - If query heads share a key head and groups="query", W_Q^h is multiplied by the full γ_h and the key weights stay
      unchanged, which is exact for each head. With groups="group", the whole group is clipped by its largest logit, as
      in Megatron-LM.
    - If the logit is a sum of products, each product is multiplied by γ_h. If one of the products has a table of
      positions as its key, W_Q^h is multiplied by the full γ_h and the other key stays unchanged.
    - In MLA, both up-projections are multiplied by √γ and the rotated query by γ. The shared rotated key stays
      unchanged.
    - In a GAU, the gains and offsets of q and of k are multiplied by √γ.
    - A weight that other layers use too, or that also makes values, is left alone, and its partner takes all of γ. If
      other layers use both sides, qk_clip is refused, unless these layers are the same layer that runs several times:
      its heads are then clipped by their largest logit in all runs.
    - With low-rank adapters, the rows of the base weight and of B are scaled. A frozen base weight is refused unless
      frozen="scale".

    Heads whose logits stay under τ keep their weights bit for bit. Negative, zero, missing, infinite and NaN maxima
    never cause clipping. The maxima are taken over all passes since the last step whose output a gradient has reached,
    in either mode and on all processes of the run; references, rollouts and evaluation do not count. If a GradScaler
    skips a step, nothing is clipped and the maxima are carried over to the next step. Float32 copies of low-precision
    weights that the optimizer updates or keeps in its state are scaled too. If `heads` is given, heads that it does not
    name are never clipped.

    A clip makes the weights smaller but not the later steps, so the same steps then change the direction of the weights
    more. steps="matched" multiplies all later steps of a weight, and of its bias, by c, the product of the factors by
    which it was clipped so far; a bias that another optimizer updates takes full steps. Without weight decay, the
    weight is then c times one that takes full steps and is never clipped, so the clip acts like a factor on the logits
    alone. This is exact for optimizers whose step does not depend on the size of the gradient, such as Muon; Adam's
    averages adapt to the larger gradients of smaller weights in about 1/(1 - β₂) steps. Decoupled weight decay is
    scaled too, so that decay and steps balance at the same size of the weights as without the clip. c never grows. The
    optimizer's step must be proportional to its rate.
    """

    threshold: float = 100.0  #: τ, in nats, above 0
    groups: Literal["query", "group"] = "query"
    frozen: Literal["refuse", "scale"] = "refuse"
    steps: Literal["full", "matched"] = "full"
    heads: HeadsBySite | None = None

    name = "qk_clip"
    line = "after each step, shrinks query and key weights of heads whose largest logit passed the threshold"
    source = "Kimi K2, arXiv 2507.20534, section 2.1; steps=matched is qkeel's own"
    rule = (
        "after each step, per head h: γ_h = min(1, {threshold:g} / S_h); W_Q^h ← √γ_h · W_Q^h, W_K^h ← √γ_h · W_K^h; "
        "S_h the head's largest logit since the last step (shared keys: groups={groups}; later steps: {steps})"
    )
    if_normed = (
        "a norm between the weights of q or of k and the logit undoes their scaling, so clipping both would not lower "
        "the logit by the intended factor",
        "use one of the two; with a norm, watch its gains",
    )
    if_computed = "scaling the stored weight would not scale the logit"

    def chosen(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        return sites_of(self.heads, sites, self.name)

    def holds(self, site: AttentionSite) -> Refusal | None:
        refusal = StepRemedy.holds(self, site)
        if refusal is None and self.steps == "matched" and "lalr" in active_at(site):
            return UNDOES_MATCHED_STEPS
        by_group = self.groups == "group"
        if (
            refusal is not None
            or not site.terms
            or logit_factors(site, by_group=by_group) is not None
        ):
            return refusal
        return Refusal(
            "its logit is a sum of products whose weights several heads share, so no factors on the weights scale the "
            "complete logit of a single head",
            "use lalr or qk_lr",
        )

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        plan = _ClippedRows(self, target, optimizer)
        check_steps(optimizer, self.name, plan.stepped, is_scaled=False)
        steps = (
            _MatchedSteps(self, target, plan, optimizer)
            if self.steps == "matched"
            else None
        )
        clip = _Clip(self, target, plan, optimizer, steps)

        hooks = [
            optimizer.register_step_post_hook(in_real_steps(clip.after_step)),
            *([] if steps is None else [steps.begin()]),
        ]

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            clip.remove()

        return Handle(undo, state=clip.state, load=clip.load)


class _ClippedRows:
    """The rows of the tensors that each site's γ scales. They are found only once.

    The factors form one row: γ for the query heads of all sites, then the square roots of these, then a 1."""

    def __init__(self, remedy: QKClip, target: Target, optimizer: Optimizer) -> None:
        weights = HeadWeights.of(target)
        self.stepped = weights.of_optimizer(optimizer, remedy.name)
        self.last = 2 * sum(
            site.n_heads for site in target.sites
        )  # the index of the 1 at the end
        self._places: list[list[Tensor]] = []  # the indices of each entry in that row
        entries: dict[int, list[int]] = {}  # the entries of each slice
        found: Entries = {}
        self.factors = factors_by_site(target, by_group=remedy.groups == "group")
        self.shares = list(self._find_shares(target.sites))
        for s, places in self.shares:
            if id(s) not in entries:
                _check_frozen(remedy, target, s)
                entries[id(s)] = self._enter(
                    target, s, self.stepped[weights.place(s)], found
                )
            for i in entries[id(s)]:
                self._places[i].append(places)
        self.views = [
            view
            for tensor, shares in found.values()
            for view in head_views(tensor, shares)
        ]
        self._counts = [tables[0].shape[0] for tables in self._places]
        one = torch.tensor([[self.last]])
        self._all = stacked([*(torch.cat(tables, 1) for tables in self._places), one])

    def _find_shares(
        self, sites: Sequence[AttentionSite]
    ) -> Iterator[tuple[HeadSlice, Tensor]]:
        """Yields each weight that a site's γ scales, and the indices [n places] of its factors in the row."""
        first = 0
        for site, factors in zip(sites, self.factors):
            for share in factors:
                yield (
                    share.weight,
                    share.heads + first + (self.last // 2 if share.root else 0),
                )
            first += site.n_heads

    def _enter(
        self,
        target: Target,
        s: HeadSlice,
        copy: Tensor | None,
        entries_by_tensor: Entries,
    ) -> list[int]:
        """Adds a slice's weight and bias, and the copy that the optimizer updates in place of the weight.

        Returns the indices of the new entries."""
        numbers = []
        for rows in filter(None, (s, s.bias_of())):
            p = target.parameter(rows.parameter)
            for tensor in (
                [p] if copy is None or copy is p or rows is not s else [p, copy]
            ):
                entries_by_tensor.setdefault(id(tensor), (tensor, []))[1].append(
                    (len(self._places), rows)
                )
            numbers.append(len(self._places))
            self._places.append([])
        return numbers

    def table(self, view: HeadView) -> Tensor:
        """Returns the indices [n places] of a view's factors in the row of all factors."""
        return self._all[view.places(self._counts)].flatten(1)


def _check_frozen(remedy: QKClip, target: Target, s: HeadSlice) -> None:
    if remedy.frozen == "refuse" and not target.parameter(s.parameter).requires_grad:
        raise RefusedError(
            f"qk_clip would scale {s.parameter}, which is frozen, and an adapter saved without it would no longer fit: "
            "set frozen=scale and save the complete model, or use lalr"
        )


class _Clip:
    """One application of qk_clip: the tap that collects the maxima, and the clipping after each step."""

    def __init__(
        self,
        remedy: QKClip,
        target: Target,
        plan: _ClippedRows,
        optimizer: Optimizer,
        steps: _MatchedSteps | None,
    ) -> None:
        self.remedy, self.sites, self.plan, self.steps = (
            remedy,
            target.sites,
            plan,
            steps,
        )
        self.shared = SharedMaxima(
            target, self.maxima
        )  # it may refuse, so it precedes the tap
        self.tap = Tap(
            target.model,
            when_training=True,
            by_step=True,
            parts=True,
            measure=maxima,
            measure_rows=stats_of_rows,
            measure_plain=plain_max_stats,
            threshold=remedy.threshold,
            guard=FaultGuard(_OFF),
        )
        self.tap.sites.extend(target.sites)
        self.tap.own_alone = all(
            isinstance(site.module, SpecModule) for site in target.sites
        )  # others aren't clipped
        self.kept: Tensor | None = (
            None  # maxima from a step that a GradScaler skipped, -inf from other steps
        )
        self._copies: dict[int, tuple[str, ...]] = {}
        self._warned = self._warned_of_frozen = False
        self._spared = _spared(remedy.heads, target.sites)
        own = [
            [target.parameter(factor.weight.parameter) for factor in factors]
            for factors in plan.factors
        ]
        self._weights = own if remedy.frozen == "refuse" else []  # of each site
        # Statistics of the passes since the last step, once they have been read.
        self._seen: dict[str, LogitStats] | None = None
        self._gone = weakref.finalize(optimizer, _stop, weakref.ref(self.tap))
        self._gone.atexit = False

    def remove(self) -> None:
        """Stops reading logits."""
        self._gone.detach()
        self.tap.remove()

    def maxima(self) -> dict[str, Tensor]:
        """Returns the largest logits over the passes since the last step, keyed by site."""
        return {name: stats.max_logit for name, stats in self._passes().items()}

    def _passes(self) -> dict[str, LogitStats]:
        if self._seen is None:
            self.tap.settle()  # the step has come, so a pass that no gradient has reached is not trained by it
            self.tap.take("eval")
            self._seen = self.tap.take("train")
        return self._seen

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Clips the heads by the maxima since the last step that was not skipped."""
        infinite, statistics = found_inf(optimizer), self._passes()
        if not statistics and not self._warned and self.tap.active:
            self._warned = True
            caution(
                "qk_clip saw no attention call that was trained between two steps of the optimizer, so nothing was "
                "clipped. Call the model itself (not its forward) before each step, and compute the loss from what it "
                "returns"
            )
        # After a step the caches are cold and a torch operation takes 50 µs, so the usual case uses none.
        usual = infinite is None and not self.shared.several and self.kept is None
        if not usual or any(
            [self._over(stats.max_logit) for stats in statistics.values()]
        ):
            self._clip(optimizer, infinite)
        self._seen = None

    def _over(self, top: Tensor) -> bool:
        """True if a head exceeds the threshold, or if the host would have to wait for its maximum."""
        under = float(
            self.remedy.threshold
        ).__lt__  # no loop in Python; NaN is not over
        return not _readable(top) or any(map(under, top.tolist()))

    def _without_frozen(self, row: Tensor) -> Tensor:
        """Leaves out the maxima [heads] of sites with a weight that has been frozen since, and warns of the first."""
        frozen = [
            not all(p.requires_grad for p in weights) for weights in self._weights
        ]
        if not any(frozen):
            return row
        if not self._warned_of_frozen:
            self._warned_of_frozen = True
            caution(
                f"qk_clip does not clip {where(self.sites[frozen.index(True)])} while a query or key weight is frozen. "
                "With frozen=scale, it also scales frozen weights"
            )
        heads = [
            torch.full((site.n_heads,), off) for site, off in zip(self.sites, frozen)
        ]
        return row.masked_fill(torch.cat(heads).to(row.device), -torch.inf)

    @torch.no_grad()
    def _clip(self, optimizer: Optimizer, infinite: Tensor | None) -> None:
        if not self._passes() and self.kept is None and not self.shared.several:
            return
        row = self.shared.over_all()
        if self._spared is not None:
            self._spared = self._spared.to(row.device)
            row = row.masked_fill(self._spared, -torch.inf)
        row = self._without_frozen(row)
        if self.kept is not None:
            row = torch.maximum(row.to(self.kept), self.kept)
        self.kept = None
        if infinite is not None:
            # A fused optimizer runs its hooks even if a GradScaler skips the step. This is decided on the device.
            skipped = torch.as_tensor(infinite).to(row.device) != 0
            row, self.kept = (
                row.masked_fill(skipped, -torch.inf),
                row.masked_fill(~skipped, -torch.inf),
            )
        readable = _readable(row)
        if readable and not bool((row > self.remedy.threshold).any()):
            return
        # An infinite maximum means that training broke down; clipping by it, with γ = 0, would kill the head for good.
        gamma = qk_clip_gamma(
            row.masked_fill(row.isinf(), -torch.inf), self.remedy.threshold
        )
        values = F.pad(torch.cat([gamma, gamma.sqrt()]), (0, 1), value=1.0)
        views = [
            (view, tensor)
            for view in self.plan.views
            for tensor in self._tensors(view, optimizer)
        ]
        # Reading factors is cheap on a CPU. Elsewhere, waiting for them would cost more than multiplying by 1.
        HeadRows(views, [self.plan.table(view) for view, _ in views]).scale(
            values, on_host=readable
        )
        if self.steps is not None:
            self.steps.shrink(values)

    def _tensors(self, view: HeadView, optimizer: Optimizer) -> list[Tensor]:
        """Returns the view's weight and the copies of it that the optimizer keeps."""
        weight = view.weight
        if weight.dtype not in LOW_PRECISION:
            return [weight]
        if id(weight) not in self._copies and optimizer.state.get(weight):
            self._copies[id(weight)] = copies_in_state(optimizer, weight)
        return [
            weight,
            *(
                optimizer.state[weight][name]
                for name in self._copies.get(id(weight), ())
            ),
        ]

    def state(self) -> dict[str, Tensor]:
        """Returns the maxima that a skipped step carries over to the next one, and the factors on later steps.

        With several processes these are the maxima of all sites, most of them -inf, because whoever reads a checkpoint
        written by many processes must know the names in advance."""
        state = {} if self.steps is None else self.steps.state()
        if self.kept is None and not self.shared.several:
            return state
        tops = (self.shared.row({}) if self.kept is None else self.kept).split(
            [site.n_heads for site in self.sites]
        )
        return {
            **{site.name: top.clone() for site, top in zip(self.sites, tops)},
            **state,
        }

    def load(self, values: dict[str, Tensor]) -> None:
        """Continues from the maxima and the factors of a checkpoint."""
        factors = [] if self.steps is None else [*self.steps.state()]
        kind = "full" if self.steps is None else "matched"
        check_taken(
            values,
            [*factors, *(site.name for site in self.sites)],
            f"qk_clip with steps={kind}",
        )
        if self.steps is not None:
            self.steps.load(values)
        row = self.shared.row(values)
        self.kept = None if bool((row == -torch.inf).all()) else row


@final
class _MatchedSteps:
    """Multiplies the steps of weights and biases by the factors by which they were clipped so far.

    `row` holds the product for each head of each weight and then of each bias, 1 at the start.
    """

    def __init__(
        self, remedy: QKClip, target: Target, plan: _ClippedRows, optimizer: Optimizer
    ) -> None:
        weights = HeadWeights.of(target)
        tables: list[list[Tensor]] = [[] for _ in weights.slices]
        biases: dict[str, tuple[HeadSlice, list[Tensor]]] = {}
        for s, places in plan.shares:
            tables[weights.place(s)].append(places)
            bias = s.bias_of()
            if (
                bias is not None
                and stepped(optimizer, target.parameter(bias.parameter)) is not None
            ):
                biases.setdefault(slice_name(bias), (bias, []))[1].append(places)
        tables += [table for _, table in biases.values()]
        scaled = weights.followed_by(target, [bias for bias, _ in biases.values()])
        # A weight that is never scaled, such as a shared key, has the factor 1.
        own = [
            torch.cat(t, 1) if t else torch.full((n, 1), plan.last)
            for t, n in zip(tables, scaled.counts)
        ]
        self._places = stacked(own)
        self._names, self._counts = (
            [slice_name(s) for s in scaled.slices],
            scaled.counts,
        )
        self._optimizer, self._scaled, self._remedy = optimizer, scaled, remedy.name
        self._tensors = scalable(optimizer, scaled, remedy.name)
        self.row = Measure(scaled, self._tensors, None).at_start()
        self._saved = SavedState(optimizer, remedy.name, self._by_name(), lambda: None)

    def begin(self) -> Handle:
        """Scales all steps until the handle is removed."""
        steps = scale_steps(
            self._optimizer,
            self._scaled,
            lambda ones: ones * self.row.to(ones),
            remedy=self._remedy,
            tensors=self._tensors,
        )
        return compose([steps, Handle(self._saved.remove)])

    def _by_name(self) -> dict[str, Tensor]:
        """Returns views of the products of each weight and bias, by its `slice_name`."""
        return {
            f"steps.{name}": x
            for name, x in zip(self._names, self.row.split(self._counts))
        }

    def shrink(self, factors: Tensor) -> None:
        """Includes the factors of a clip, in the order of `_ClippedRows`; of several on one head, the smallest."""
        self._places = self._places.to(factors.device)
        self.row.mul_(factors[self._places].amin(1).to(self.row))

    def state(self) -> dict[str, Tensor]:
        """Returns the products of each weight and bias, by its `slice_name`."""
        return {name: x.clone() for name, x in self._by_name().items()}

    def load(self, values: dict[str, Tensor]) -> None:
        """Continues from saved products. Without them, weights that were clipped would take full steps."""
        products = [values.get(f"steps.{name}") for name in self._names]
        for name, product, count in zip(self._names, products, self._counts):
            if product is None or product.shape != (count,):
                got = "none" if product is None else str(tuple(product.shape))
                raise InvalidValueError(
                    f"expected the factors of {count} heads for the steps of {name}, got {got}; load the state of the "
                    "same model and remedy"
                )
        self.row.copy_(
            torch.cat(
                [product.to(self.row) for product in products if product is not None]
            )
        )
        self._saved.note_loaded()


def _stop(tap: weakref.ref[Tap]) -> None:
    """Stops a tap whose optimizer no longer exists, so that nothing uses what it reads."""
    running = tap()
    if running is not None:
        running.remove()


def _spared(heads: HeadsBySite | None, sites: Sequence[AttentionSite]) -> Tensor | None:
    """Returns a mask [heads of all sites] that is True for heads that are never clipped, or None if all may be."""
    if heads is None:
        return None
    named = dict(heads)
    clipped = [named[site.name] or range(site.n_heads) for site in sites]
    return torch.cat(
        [
            ~torch.isin(torch.arange(s.n_heads), torch.tensor([*own]))
            for s, own in zip(sites, clipped)
        ]
    )


def _readable(tensor: Tensor) -> bool:
    """True if the host can read a tensor without waiting for its device."""
    return tensor.is_cpu  # a device's name takes longer
