"""Measures the effect of a retrofit on a trained model's predictions and attention weights.

Shapes: b batch, h heads, r compared query rows, s keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import Arguments, copied, tensors
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite
from qkeel.nn.attention import SpecModule
from qkeel.remedies.base import Args, Kwargs, where
from qkeel.spec import AttentionCall

# The cost of a retrofit: predictions before and after it on the same batches, and a report of how far apart they are.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The distance between a changed model and the old model on the given batches."""

    kl: float  #: mean over tokens of KL(old ‖ new) of the predicted distributions, in nats
    #: change in the next-token loss, new minus old, in nats per token; None for models without such a loss
    loss: float | None

    def __str__(self) -> str:
        return f"KL {self.kl:.4g}" + ("" if self.loss is None else f", loss {self.loss:+.4g}")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGap:
    """The KL divergence of one site's attention weights."""

    name: str  #: the site's name
    attention_kl_naive: tuple[float, ...]  #: KL per head in nats, with initial gains
    attention_kl: tuple[float, ...]  #: KL per head in nats, with fitted gains

    def __str__(self) -> str:
        before, after = (sum(v) / len(v) for v in (self.attention_kl_naive, self.attention_kl))
        return f"{self.name}: attention KL {before:.4g} -> {after:.4g} (head {max(self.attention_kl):.4g})"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitReport:
    """The gap to the old model after each stage of a retrofit; None for a stage that was skipped or did not help."""

    old_loss: float | None  #: next-token loss in nats; None for models without such a loss
    naive: Gap  #: with initial gains
    fitted: Gap  #: with fitted gains
    balanced: Gap | None  #: with queries balanced against keys
    distilled: Gap | None  #: after distillation
    layers: tuple[LayerGap, ...]  #: one per site

    @property
    def gap(self) -> Gap:
        """The gap of the final model."""
        return self.distilled or self.balanced or self.fitted

    def __str__(self) -> str:
        loss = "" if self.old_loss is None else f"loss before {self.old_loss:.4g}\n"
        steps = [f"naive insertion: {self.naive}", f"gains fitted:    {self.fitted}"]
        if self.balanced is not None:
            steps.append(f"q, k balanced:   {self.balanced}")
        if self.distilled is not None:
            steps.append(f"distilled:       {self.distilled}")
        return loss + "\n".join([*steps, *map(str, self.layers)])


def predictions(model: nn.Module, batch: Arguments) -> Tensor:
    """Returns the model's first floating-point output with at least two dimensions, usually logits [b t vocabulary]."""
    returned = model(*copied(batch[0]), **copied(batch[1]))
    plain = tuple(returned.values()) if isinstance(returned, dict) else returned
    found = next((x for x in tensors(plain) if x.is_floating_point() and x.ndim > 1), None)
    if found is None:
        raise RefusedError(
            f"expected a {type(model).__name__} that returns logits [batch tokens vocabulary], to compare them before "
            "and after; its output contains no such tensor"
        )
    return found


def divergence(old: Tensor, new: Tensor, batch: Arguments) -> Tensor:
    """Returns the mean over tokens of KL(old ‖ new), excluding tokens that an attention_mask marks as padding."""
    p, q = (torch.log_softmax(z.to(wide(z.dtype)), -1) for z in (old, new))
    kl = (p.exp() * (p - q)).sum(-1)
    mask = _padding(kl.shape, batch)
    return kl.mean() if mask is None else (kl * mask).sum() / mask.sum().clamp_min(1)


def _padding(shape: torch.Size, batch: Arguments) -> Tensor | None:
    """Returns the batch's attention_mask if it marks tokens [b t] of this shape."""
    mask = batch[1].get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.shape == shape else None


def _compared(old: Tensor, batch: Arguments) -> float:
    """Returns the number of tokens over which `divergence` averages."""
    mask = _padding(old.shape[:-1], batch)
    return float(math.prod(old.shape[:-1]) if mask is None else mask.sum())


_IGNORED = -100  # a target that cross_entropy leaves out
_NOT_TOKENS = ("attention_mask", "position_ids", "token_type_ids")  # arguments of the same shape as the tokens


def next_token_loss(logits: Tensor, batch: Arguments) -> tuple[float, int] | None:
    """Returns the next-token cross-entropy on the batch's own tokens with the number of tokens that it averages, or
    None if the batch has no tokens. Padding, and tokens whose label is -100, are left out."""
    named = batch[1].get("input_ids")
    others = {name: x for name, x in batch[1].items() if name not in _NOT_TOKENS}
    found = (x for x in tensors((batch[0], others)) if not x.is_floating_point() and x.ndim == 2)
    tokens = named if isinstance(named, Tensor) else next(found, None)
    if tokens is None or logits.shape[:2] != tokens.shape or tokens.shape[1] < 2 or logits.ndim != 3:
        return None
    targets = tokens[:, 1:].long()
    mask, labels = _padding(tokens.shape, batch), batch[1].get("labels")
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, _IGNORED)
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        targets = targets.masked_fill(labels[:, 1:] == _IGNORED, _IGNORED)
    predicted = logits[:, :-1].flatten(0, 1)
    loss = float(nn.functional.cross_entropy(predicted.to(wide(predicted.dtype)), targets.flatten()))
    return loss, int((targets != _IGNORED).sum())


class Reference:
    """The old model's predictions on the batches, with which a changed model is compared."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Arguments]) -> None:
        self.model, self.batches = model, batches
        self.old = [predictions(model, batch) for batch in batches]
        self.compared = [_compared(z, batch) for z, batch in zip(self.old, batches)]
        self.losses = [next_token_loss(z, batch) for z, batch in zip(self.old, batches)]

    @property
    def loss(self) -> float | None:
        """The old model's next-token loss."""
        return _mean(self.losses)

    def divergence(self) -> Tensor:
        """Returns KL(old ‖ new) for the model's current state, averaged over the tokens of all batches, with
        gradients."""
        pairs = zip(self.old, self.batches)
        each = torch.stack([divergence(old, predictions(self.model, b), b) for old, b in pairs])
        return _weighted(each, torch.tensor(self.compared, dtype=each.dtype, device=each.device))

    @torch.no_grad()
    def gap(self, some: int | None = None) -> Gap:
        """Returns the gap of the model's current state, on the first `some` batches or on all, per token."""
        kls: list[tuple[float, float]] = []
        losses: list[tuple[float, float] | None] = []
        for old, n, was, batch in list(zip(self.old, self.compared, self.losses, self.batches))[:some]:
            new = predictions(self.model, batch)
            kls.append((float(divergence(old, new, batch)), n))
            loss = next_token_loss(new, batch)
            losses.append(None if loss is None or was is None else (loss[0] - was[0], loss[1]))
        kl = _mean(kls)
        return Gap(kl=0.0 if kl is None else kl, loss=_mean(losses))


def _mean(values: Sequence[tuple[float, float] | None]) -> float | None:
    """Returns the mean of the batches' means, each weighted by its count; None if one is missing or nothing was
    counted."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    counted = [v for v in known if v[1]]  # a mean of nothing may be NaN
    if len({n for _, n in counted}) == 1:
        return sum(mean for mean, _ in counted) / len(counted)
    return sum(mean * n for mean, n in counted) / sum(n for _, n in counted) if counted else None


def _weighted(means: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean over batches of means [n …], each weighted by its count [n …]."""
    if bool((counts == counts[:1]).all()):
        return means.mean(0)
    return (means * counts).sum(0) / counts.sum(0).clamp_min(1)


# The logits of one attention call, recomputed from its recorded inputs, with gradients to its gains.

ROWS = 256  # query rows compared per sequence, evenly spaced


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryRows:
    """Logits [b h r s] of some query rows and their visible keys.

    `counted` [b h r] is True for rows in which two or more keys are visible."""

    logits: Tensor
    visible: Tensor
    counted: Tensor

    def log_weights(self) -> Tensor:
        """Returns ln softmax over the visible keys, with 0 for hidden keys and for rows that are not counted."""
        z = self.logits.masked_fill(~self.visible, -torch.inf)
        return torch.where(self.visible, torch.log_softmax(z.masked_fill(~self.counted[..., None], 0.0), -1), 0.0)


@final
class Replay:
    """The logits of one attention call in the old model, and the logits that its module now computes from the same
    inputs."""

    def __init__(self, site: AttentionSite, inputs: Sequence[Arguments]) -> None:
        self._site, self._inputs = site, inputs
        with torch.no_grad():
            self.old = self.rows()

    def rows(self) -> list[QueryRows]:
        """Returns the current logits, one entry per batch, with gradients."""
        return [rows_of(self._site, one) for one in self._inputs]

    def divergence(self) -> Tensor:
        """Returns KL(old weights ‖ current weights) per head [h], averaged over the counted rows of all batches, in
        nats."""
        each = torch.stack([layer_divergence(a, b) for a, b in zip(self.old, self.rows())])
        return _weighted(each, torch.stack([one.counted.sum((0, 2)) for one in self.old]))


def captured(model: nn.Module, sites: Sequence[AttentionSite], batches: Sequence[Arguments]) -> list[Replay]:
    """Returns a replay of each site, using the arguments of the first call of its module in a pass on each batch."""
    kept: list[dict[int, Arguments]] = []

    def note(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        kept[-1].setdefault(id(module), (copied(args), copied(dict(kwargs))))

    hooks = [site.module.register_forward_pre_hook(note, with_kwargs=True) for site in sites]
    try:
        for args, kwargs in batches:
            kept.append({})
            with torch.no_grad():
                model(*copied(args), **copied(kwargs))
    finally:
        for hook in hooks:
            hook.remove()
    return [Replay(site, [inputs[id(site.module)] for inputs in kept]) for site in sites]


def rows_of(site: AttentionSite, inputs: Arguments) -> QueryRows:
    """Runs the site's module on these arguments and returns the logits of its first attention call."""
    args, kwargs = copied(inputs[0]), copied(inputs[1])
    calls: list[Seen] = []
    if isinstance(site.module, SpecModule):
        site.module.observers.append(calls.append)
        try:
            site.module(*args, **kwargs)
        finally:
            site.module.observers.remove(calls.append)
    else:

        def saw(captured: CapturedCall) -> None:
            calls.append(captured.call)

        layouts = {} if site.layout is None else {"": site.layout}
        with CaptureMode(site.module, saw, probing=True, layouts=layouts):
            site.module(*args, **kwargs)
    call = calls[0] if calls else None
    if isinstance(call, AttentionCall):
        return _called(call)
    if isinstance(call, ScoresCall) and not call.headless:
        return _written(call)
    raise RefusedError(
        f"{where(site)}: its logits cannot be read head by head on these batches; use the model's "
        "fused attention (attn_implementation='sdpa') and batches of equal lengths"
    )


def _called(call: AttentionCall) -> QueryRows:
    rows = _spread(call.q)
    mask = call.mask if call.mask is None or call.mask.shape[-2] == 1 else call.mask[..., rows, :]
    some = dataclasses.replace(call, q=call.q[:, :, rows], pos_q=call.pos_q[:, rows], mask=mask, plain=False)
    q, k = some.encoded()
    whole = slice(0, q.shape[2]), slice(0, k.shape[2])
    z = some.spec.cap.apply(some.scores(q, k, *whole))
    seen = some.visible(*whole)
    return _rows(z, torch.ones_like(z, dtype=torch.bool) if seen is None else seen.expand_as(z))


def _written(call: ScoresCall) -> QueryRows:
    rows = _spread(call.capped)
    z = call.capped[:, :, rows].to(wide(call.capped.dtype))
    seen = torch.isfinite(z)
    if call.hidden is not None:
        hidden = call.hidden if call.hidden.shape[2] == 1 else call.hidden[:, :, rows]
        seen = seen & ~hidden
    return _rows(z, seen.expand_as(z))


def _rows(z: Tensor, visible: Tensor) -> QueryRows:
    return QueryRows(logits=z, visible=visible, counted=visible.sum(-1) > 1)


def _spread(x: Tensor) -> Tensor:
    """Returns the indices of the rows that are compared, among the queries of x [b h t …]."""
    t = x.shape[2]
    return torch.linspace(0, t - 1, min(t, ROWS), device=x.device).round().long()


def layer_divergence(old: QueryRows, new: QueryRows) -> Tensor:
    """Returns KL(old weights ‖ new weights) per head [h], averaged over the counted rows, in nats."""
    p, q = old.log_weights(), new.log_weights()
    kl = (p.exp() * (p - q)).masked_fill(~old.visible, 0.0).sum(-1)
    count = old.counted.sum((0, 2)).clamp_min(1)
    return kl.masked_fill(~old.counted, 0.0).sum((0, 2)) / count
