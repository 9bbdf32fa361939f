"""The logits of one attention call, recomputed from its recorded inputs, with gradients to its gains.

Shapes: b batch, h heads, r compared query rows, s keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import Arguments, copied
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite
from qkeel.nn.attention import SpecModule
from qkeel.remedies.base import Args, Kwargs, where
from qkeel.remedies.retrofit.outputs import weighted
from qkeel.spec import AttentionCall

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
        return torch.where(
            self.visible,
            torch.log_softmax(z.masked_fill(~self.counted[..., None], 0.0), -1),
            0.0,
        )


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
        return [rows_of(self._site, arguments) for arguments in self._inputs]

    def divergence(self) -> Tensor:
        """Returns KL(old weights ‖ current weights) per head [h], averaged over the counted rows of all batches, in
        nats."""
        divergences = torch.stack(
            [layer_divergence(a, b) for a, b in zip(self.old, self.rows())]
        )
        return weighted(
            divergences,
            torch.stack([old_rows.counted.sum((0, 2)) for old_rows in self.old]),
        )


def captured(
    model: nn.Module, sites: Sequence[AttentionSite], batches: Sequence[Arguments]
) -> list[Replay]:
    """Returns a replay of each site, using the arguments of the first call of its module in a pass on each batch."""
    kept: list[dict[int, Arguments]] = []

    def note(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        kept[-1].setdefault(id(module), (copied(args), copied(dict(kwargs))))

    hooks = [
        site.module.register_forward_pre_hook(note, with_kwargs=True) for site in sites
    ]
    try:
        for args, kwargs in batches:
            kept.append({})
            with torch.no_grad():
                model(*copied(args), **copied(kwargs))
    finally:
        for hook in hooks:
            hook.remove()
    return [
        Replay(site, [inputs[id(site.module)] for inputs in kept]) for site in sites
    ]


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
    mask = (
        call.mask
        if call.mask is None or call.mask.shape[-2] == 1
        else call.mask[..., rows, :]
    )
    sampled = dataclasses.replace(
        call, q=call.q[:, :, rows], pos_q=call.pos_q[:, rows], mask=mask, plain=False
    )
    q, k = sampled.encoded()
    all_pairs = slice(0, q.shape[2]), slice(0, k.shape[2])
    z = sampled.spec.cap.apply(sampled.scores(q, k, *all_pairs))
    visible = sampled.visible(*all_pairs)
    return _rows(
        z,
        torch.ones_like(z, dtype=torch.bool)
        if visible is None
        else visible.expand_as(z),
    )


def _written(call: ScoresCall) -> QueryRows:
    rows = _spread(call.capped)
    z = call.capped[:, :, rows].to(wide(call.capped.dtype))
    visible = torch.isfinite(z)
    if call.hidden is not None:
        hidden = call.hidden if call.hidden.shape[2] == 1 else call.hidden[:, :, rows]
        visible = visible & ~hidden
    return _rows(z, visible.expand_as(z))


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
