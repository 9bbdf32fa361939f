"""QK-clip: after each optimizer step, shrinks the weights of heads whose logits exceeded a threshold.

`logit_factors` says which weights, and `head_rows` multiplies them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from qkeel.capture.calls import joint_statistics, maxima
from qkeel.errors import RefusedError, caution
from qkeel.functional.bounds import qk_clip_gamma
from qkeel.handle import Handle, compose, with_hook
from qkeel.kernels.contract import Refusal
from qkeel.kernels.statistics import plain_max_stats, stats_of_rows
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import DormantHook
from qkeel.patching.guards import FaultGuard
from qkeel.patching.optimizers import in_real_steps
from qkeel.remedies.base import HeadsBySite, Target, active_at, where
from qkeel.remedies.head_rows import HeadRows
from qkeel.remedies.head_weights import (
    LOW_PRECISION,
    HeadWeights,
    copies_in_state,
    found_inf,
    slice_name,
)
from qkeel.remedies.logit_factors import factors_by_site, logit_factors
from qkeel.remedies.optimizer_steps import scale_steps, with_one
from qkeel.remedies.saved_state import SavedState
from qkeel.remedies.shared_maxima import SharedMaxima
from qkeel.remedies.step_remedy import UNDOES_MATCHED_STEPS, StepRemedy, sites_of
from qkeel.sites.site import AttentionSite, HeadSlice
from qkeel.sites.tap import Tap

# Times what a head's largest logit would be after successive clips: training does not grow it so much between them, so
# something is in it that they do not scale.
REGROWN = 1e3
OPEN_STEP = (
    "the state of the optimizer was read between two passes of one step. qk_clip clips by the logits of all passes of a step, "
    "and those so far, up to {:,.4g}, are in no checkpoint, so a training that goes on from this one may clip less in "
    "its first step. Save after optimizer.step()"
)
_OFF = "qk_clip failed while reading logits and has stopped clipping: {}. Training continues without it"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKClip(StepRemedy):
    """Multiplies both W_Q^h and W_K^h by √γ_h after the optimizer step, where γ_h = min(1, τ/S_h).

    S_h is the head's largest signed, scaled logit over the batches since the last step. The same batch would therefore
    give exactly τ if the step had not changed the weights. Biases are scaled too. Of several optimizers, all is scaled
    after the step of the first that holds query or key weights, whichever optimizer moves it.

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
      frozen="scale", which also moves a reference that is computed with the adapters disabled.

    Heads whose logits stay under τ keep their weights bit for bit. Negative, zero, missing, infinite and NaN maxima
    never cause clipping. The maxima are taken over all passes since the last step whose output a gradient has reached,
    in either mode and on all processes of the run; references, rollouts and evaluation do not count. If a GradScaler
    skips a step, nothing is clipped and the maxima are carried over to the next step. Queries of padding count as all
    others do, because a call of attention does not say which rows its model leaves out of the loss. Float32 copies of
    low-precision weights that the optimizer keeps in its state are scaled too. If `heads` is given, heads
    that it does not name are never clipped.

    A clip makes the weights smaller but not the later steps, so the same steps then change the direction of the weights
    more. steps="matched" multiplies all later steps of a weight, and of its bias, by c, the product of the factors by
    which it was clipped so far; a bias of an optimizer that was not given takes full steps. Without weight decay, the
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

    @property
    def limit(self) -> float | None:
        return self.threshold if self.heads is None else None

    @property
    def saves_state(self) -> bool:
        return self.steps == "matched"

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
        clipped, trained = _clipped_by(self, target)
        weights = HeadWeights(target, self.name, [s for s, _ in clipped])
        weights.check_steps(self.name)
        clip = _Clip(self, target, weights, clipped, trained)
        matched = Handle(lambda: None)
        if clip.products is not None:
            matched = _matched_steps(self, weights, clip.products)
        # The hook that clips is registered last: `scale_steps` comes before it in any case.
        optimizer = weights.all_optimizers[0]
        hook = optimizer.register_step_post_hook(in_real_steps(clip.after_step))
        saving = optimizer.register_state_dict_pre_hook(clip.before_saving)
        hooks = [clip, hook, saving]
        if len(weights.optimizers) > 1:
            late = DormantHook(clip.before_pass)
            hooks.append(target.model.register_forward_pre_hook(late, with_kwargs=True))
        return with_hook(matched, compose(Handle(x.remove) for x in hooks).remove)


def _clipped_by(
    remedy: QKClip, target: Target
) -> tuple[list[tuple[HeadSlice, Tensor]], list[list[Tensor]]]:
    """Returns the slices of weights and biases that are clipped, with the indices [n r] of the factors of each of their
    heads; and the weights of each site that must not be frozen."""
    factors = factors_by_site(target, by_group=remedy.groups == "group")
    n_heads = sum(site.n_heads for site in target.sites)
    clipped: list[tuple[HeadSlice, Tensor]] = []
    trained: list[list[Tensor]] = []
    first = 0
    for site, factors_of_site in zip(target.sites, factors):
        weights: list[Tensor] = [
            target.parameter(x.weight.parameter) for x in factors_of_site
        ]
        trained.append(weights if remedy.frozen == "refuse" else [])
        for factor in factors_of_site:
            s = factor.weight
            is_frozen = not target.parameter(s.parameter).requires_grad
            if is_frozen and remedy.frozen == "refuse":
                raise RefusedError(
                    f"qk_clip would scale {s.parameter}, which is frozen, and an adapter saved without it "
                    "would no longer fit: use lalr, which acts on the adapters alone, or set frozen=scale and save "
                    "the complete model. That scales the base too, so a reference that is computed with the "
                    "adapters disabled moves"
                )
            indices = factor.heads + first + (n_heads if factor.root else 0)
            clipped += [(part, indices) for part in (s, s.bias_of()) if part]
        first += site.n_heads
    return clipped, trained


@final
class _Clip:
    """One application of qk_clip: the tap that collects the maxima, and the clipping after each step.

    The factors form one row: γ for the query heads of all sites, then the square roots of these, then a 1."""

    def __init__(
        self,
        remedy: QKClip,
        target: Target,
        weights: HeadWeights,
        clipped: Sequence[tuple[HeadSlice, Tensor]],
        trained: Sequence[Sequence[Tensor]],
    ) -> None:
        self.remedy, self.sites = remedy, target.sites
        # The weights of each site that may be frozen later, and are then not scaled.
        self._trained = trained
        n_heads = sum(site.n_heads for site in target.sites)
        columns = [[torch.full((n, 1), 2 * n_heads)] for n in weights.counts]
        for s, indices in clipped:
            columns[weights.entry(s)].append(indices)
        tables = [torch.cat(column, 1) for column in columns]
        most = max(table.shape[1] for table in tables)
        #: The indices [heads r] of the factors of the heads of all weights; the last is that of the 1.
        self._factors = torch.cat(
            [F.pad(x, (0, most - x.shape[1]), value=2 * n_heads) for x in tables]
        )
        shares = zip(weights.parameters, weights.slices, weights.indices())
        self._rows = HeadRows(
            [share for share, column in zip(shares, columns) if len(column) > 1],
            sum(weights.counts),
        )
        self.shared = SharedMaxima(target)
        #: With `steps=matched`, the factors by which each head of each weight was clipped so far.
        self.products = weights.row(1.0) if remedy.steps == "matched" else None
        #: The passes of the first step may have come before the clip, as an autopilot applies one between the steps of
        #: two optimizers.
        self._is_first_step = True
        #: An optimizer that stepped inside a backward pass, after which nothing is clipped yet.
        self._late: weakref.ref[Optimizer] | None = None
        #: Which heads the option `heads` leaves out, if it is given.
        self._unnamed: Tensor | None = None
        if remedy.heads is not None:
            named = dict(remedy.heads)
            self._unnamed = torch.cat(
                [
                    ~torch.isin(
                        torch.arange(site.n_heads),
                        torch.tensor(named.get(site.name) or range(site.n_heads)),
                    )
                    for site in target.sites
                ]
            )
        # All that may refuse precedes the tap.
        self.tap = Tap(
            target.model,
            when_training=True,
            by_step=True,
            measure=maxima,
            measure_rows=stats_of_rows,
            measure_plain=plain_max_stats,
            threshold=remedy.threshold,
            guard=FaultGuard(_OFF),
        )
        self.tap.sites.extend(target.sites)
        # Attention of other libraries is read only where it is clipped.
        self.tap.own_alone = all(
            isinstance(site.module, SpecModule) for site in target.sites
        )
        # Maxima from a step that a GradScaler skipped; -inf from other steps.
        self.kept: Tensor | None = None
        # A handle must not keep an optimizer alive.
        self._optimizers = weakref.WeakSet[Optimizer](weights.optimizers)
        self._copies: dict[int, tuple[str, ...]] = {}
        # The tree gives the same list while no module is put in, wrapped or moved.
        self._modules = self.tap.tree.named()
        self._has_warned = self._has_warned_of_frozen = False
        self._has_warned_of_open_step = False
        #: Of each head that every step clips: the product of the factors so far, and its largest logit before them.
        self._run_of_clips: tuple[Tensor, Tensor] | None = None
        self._n_clips, self._has_warned_of_constant = 0, False
        # Nothing uses what the tap reads once the optimizer is gone. A tap refers to its model, which may refer to the
        # optimizer, so a strong reference here would keep all of them for good.
        # Of several optimizers, the first is the one that holds weights.
        first_optimizer = weights.all_optimizers[0]
        self._gone = weakref.finalize(first_optimizer, _stop, weakref.ref(self.tap))
        self._gone.atexit = False

    def remove(self) -> None:
        """Stops reading logits."""
        self._gone.detach()
        self.tap.remove()

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Clips the heads by the maxima since the last step that was not skipped.

        Several optimizers may step inside a backward pass, each as soon as its weights have gradients. What is left of the
        pass reads the weights of the others, so all are clipped before the next pass of the model."""
        if len(self._optimizers) > 1 and torch._C._current_graph_task_id() >= 0:
            self._late = weakref.ref(optimizer)
            return
        # The step has come, so a pass that no gradient has reached is not trained by it.
        self.tap.settle()
        # What was not trained is dropped.
        self.tap.take("eval")
        measured = self.tap.take("train")
        is_first_step, self._is_first_step = self._is_first_step, False
        is_silent = not measured and not is_first_step and self.tap.active
        if is_silent and not self._has_warned:
            self._has_warned = True
            caution(
                "qk_clip saw no attention call that was trained between two steps of the optimizer, so nothing was "
                "clipped. Call the model itself (not its forward) before each step, and compute the loss from what it "
                "returns"
            )
        # After a step the caches are cold and a torch operation takes 50 µs, so the usual case uses none.
        infinite = found_inf(optimizer)
        is_usual = infinite is None and not self.shared.several and self.kept is None
        # All heads of alike sites lie in one tensor.
        largest = [stats.max_logit for stats in joint_statistics(measured).values()]
        if not is_usual or any(map(self._is_over, largest)):
            names = self._names_at_apply(measured)
            maxima = {name: measured[x].max_logit for x, name in names.items()}
            self._clip(self.shared.over_all(maxima), infinite)
        else:
            self._run_of_clips = None

    def before_pass(self, *_: object) -> None:
        """Clips what a step inside a backward pass has left to clip."""
        optimizer, self._late = self._late and self._late(), None
        if optimizer is not None:
            self.after_step(optimizer)

    @torch.no_grad()
    def before_saving(self, *_: object) -> None:
        """Says once that a checkpoint lacks logits over the threshold, by which the next step will clip."""
        if self._has_warned_of_open_step:
            return
        measured = joint_statistics(self.tap.so_far()).values()
        rows = [stats.max_logit for stats in measured]
        # Of a step that a GradScaler skipped.
        rows += [] if self.kept is None else [self.kept]
        largest = max(
            [float(row.nan_to_num(-torch.inf).max()) for row in rows], default=0
        )
        if largest > self.remedy.threshold:
            self._has_warned_of_open_step = True
            caution(OPEN_STEP.format(largest))

    def _names_at_apply(self, measured: Iterable[str]) -> dict[str, str]:
        """Returns, by the names of the sites that were measured, those that they had when the clip was applied."""
        modules = self.tap.tree.named()
        if modules is self._modules:
            return {name: name for name in measured}
        earlier = {id(module): name for name, module in self._modules}
        current, names = dict(modules), {}
        for name in measured:
            module, mark, number = name.partition("#")
            # What is new, or has the name of a layer that was moved, is none of the clip's.
            names[name] = f"{earlier.get(id(current[module]), '?')}{mark}{number}"
        return names

    def _is_over(self, largest: Tensor) -> bool:
        """True if a head exceeds the threshold, or if the host would have to wait for its maximum."""
        # NaN is not over.
        under = float(self.remedy.threshold).__lt__
        return not _readable(largest) or any(map(under, largest.tolist()))

    def _clip(self, row: Tensor, infinite: Tensor | None) -> None:
        """Multiplies the rows of heads by the factors of their largest logits."""
        row = self._without_spared(row)
        if self.kept is not None:
            row = torch.maximum(row.to(self.kept), self.kept)
        self.kept = None
        if infinite is not None:
            # A fused optimizer runs its hooks even if a GradScaler skips the step. This is decided on the device.
            skipped = infinite.to(row.device) != 0
            self.kept = row.masked_fill(~skipped, -torch.inf)
            row = row.masked_fill(skipped, -torch.inf)
        if _readable(row) and not bool((row > self.remedy.threshold).any()):
            return
        gamma = qk_clip_gamma(row, self.remedy.threshold)
        if not self._has_warned_of_constant:
            self._tell_of_constant(row, gamma)
        factors = with_one(torch.cat([gamma, gamma.sqrt()]))
        self._factors = self._factors.to(factors.device)
        # Of several factors of one head, the smallest.
        row = factors[self._factors].amin(1)
        # Reading factors is cheap on a CPU. Elsewhere, waiting for them would cost more than multiplying by 1.
        self._rows.scale(with_one(row), on_host=_readable(row), copies=self._copies_of)
        if self.products is not None:
            self.products.mul_(row.to(self.products))

    def _tell_of_constant(self, row: Tensor, gamma: Tensor) -> None:
        """Says once which head stays over the threshold although every step clips it: what its weights do not make, such
        as a constant that is joined to q and k, does not shrink with them. Every eighth clip looks."""
        asked, before = self._run_of_clips or (torch.ones_like(row), row)
        is_clipped = gamma < 1
        self._n_clips += 1
        # Every operator on cold memory is a part of the clip's time, and for a device the host would wait.
        if self._n_clips % (8 if _readable(row) else 64) == 0:
            # Before its first clip, a head's largest logit may be anything, also negative.
            stays = is_clipped & (asked < 1) & (row > REGROWN * before * asked)
            heads = stays.nonzero()[:, 0].tolist()
            if heads:
                self._warn_of_constant(heads[0], row, asked)
        self._run_of_clips = (
            torch.where(is_clipped, asked * gamma, 1.0),
            torch.where(asked == 1, row, before),
        )

    def _warn_of_constant(self, number: int, row: Tensor, asked: Tensor) -> None:
        """Warns of a head that its clips do not bring under the threshold."""
        self._has_warned_of_constant = True
        largest, factor = float(row[number]), float(asked[number])
        heads = [(site, i) for site in self.sites for i in range(site.n_heads)]
        site, head = heads[number]
        caution(
            f"qk_clip does not bring {where(site)}, head {head}, under {self.remedy.threshold:g}: its largest logit is "
            f"still {largest:,.4g} after clips by {factor:.1g} in a row. Either the optimizer's steps are as large as its "
            "weights, and make them anew after each clip: take steps=matched, or a lower rate. Or something is in its "
            "logits that the clipped weights do not make, such as a constant that is joined to q and k: each clip shrinks "
            "what they do make, so remove() the handle, and limit its steps with lalr"
        )

    def _without_spared(self, row: Tensor) -> Tensor:
        """Leaves out the maxima of heads that are not clipped.

        These are heads that the option leaves out, and all of a site with a weight that has been frozen since."""
        if self._unnamed is not None:
            if self._unnamed.device != row.device:
                # Once, since the host would wait for its way to the device.
                self._unnamed = self._unnamed.to(row.device)
            row = row.masked_fill(self._unnamed, -torch.inf)
        first = 0
        for site, weights in zip(self.sites, self._trained):
            if not all([p.requires_grad for p in weights]):
                row[first : first + site.n_heads] = -torch.inf
                if not self._has_warned_of_frozen:
                    self._has_warned_of_frozen = True
                    caution(
                        f"qk_clip does not clip {where(site)} while a query or key weight is frozen. With frozen=scale, "
                        "it also scales frozen weights"
                    )
            first += site.n_heads
        return row

    def _copies_of(self, weight: Tensor) -> Iterator[Tensor]:
        """Yields the float32 copies of a weight that an optimizer keeps in its state."""
        for optimizer in self._optimizers if weight.dtype in LOW_PRECISION else ():
            if id(weight) not in self._copies and optimizer.state.get(weight):
                self._copies[id(weight)] = copies_in_state(optimizer, weight)
            held = optimizer.state.get(weight, {})
            for name in self._copies.get(id(weight), ()):
                yield from [held[name]] if name in held else []


def _matched_steps(
    remedy: QKClip,
    weights: HeadWeights,
    products: Tensor,
) -> Handle:
    """Multiplies the steps of weights and biases by the products [heads of all weights] of the factors by which they
    were clipped so far."""
    steps = scale_steps(
        weights,
        lambda: products.to(weights.parameters[0].device),
        remedy=remedy.name,
    )
    # What no optimizer updates takes no steps.
    values = {
        f"steps.{slice_name(s)}": x
        for s, tensor, x in zip(
            weights.slices, weights.tensors, products.split(weights.counts)
        )
        if tensor is not None
    }
    saved = SavedState(weights.all_optimizers, remedy.name, values)
    return with_hook(saved, steps.remove)


def _stop(tap: weakref.ref[Tap]) -> None:
    """Stops a tap whose optimizer no longer exists, so that nothing uses what it reads."""
    running = tap()
    if running is not None:
        running.remove()


def _readable(tensor: Tensor) -> bool:
    """True if the host can read a tensor without waiting for its device."""
    # Asking for the name of the device takes longer.
    return tensor.is_cpu
