"""The attention weights of the calls that a pass makes, computed from queries and keys block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import arguments, undisturbed
from qkeel.errors import NoAttentionError
from qkeel.patching.forward import unwrapped
from qkeel.sites.find import found_sites
from qkeel.sites.site import Sites
from qkeel.sites.tap import Tap
from qkeel.spec import AttentionCall

# Numbers of one block of rows, all heads, that are in memory at once.
BLOCK = 1 << 24
# Where some rows speak for all: blocks at least, and numbers of a block at most, as a training step looks so, whose
# activations are in memory.
_SPREAD, _BESIDE = 8, 1 << 20

Weights = Float[Tensor, "b h r s"]


def captured_calls(
    model: nn.Module,
    batch: object,
    sites: Sites | None = None,
    *,
    is_seeded: bool = True,
) -> dict[str, list[Seen]]:
    """Returns the first attention call of each site in a pass on the batch, by name; the model is left as it was.

    A site whose heads are computed one by one has a call for each head. `sites` are those of the model, if known;
    if not `is_seeded`, the pass has the random numbers that come next, or else the same in every pass.
    """
    args, kwargs = arguments(batch, "batch")
    inner = unwrapped(model)
    if sites is None:
        sites = found_sites(inner, args, kwargs)
    with Tap(inner) as tap, undisturbed(inner):
        tap.sites = sites
        calls = tap.calls(args, kwargs, is_seeded=is_seeded)
    if not calls:
        raise NoAttentionError(
            f"no attention was seen in a forward pass of this {type(inner).__name__}"
        )
    by_site: dict[str, list[Seen]] = {}
    for name, call in calls.items():
        module = name.partition("#")[0]
        joined = (
            _is_one_head(call)
            and module in by_site
            and _is_one_head(by_site[module][0])
        )
        by_site.setdefault(module if joined else name, []).append(call)
    return by_site


def _is_one_head(call: Seen) -> bool:
    return isinstance(call, ScoresCall) and call.headless


def weights_shape(calls: Sequence[Seen]) -> tuple[int, int, int, int]:
    """The sizes b, h, t and s of a site's weights."""
    b, h, t, s = calls[0].scores_shape
    return b, h * len(calls), t, s


def blocks_of_weights(
    calls: Sequence[Seen],
    most: int | None = None,
    rows: tuple[int, ...] | None = None,
) -> Iterator[tuple[slice, Weights]]:
    """Yields the weights [b h r s] of a site, all heads, by blocks of rows, so that few are in memory at once.

    most: about how many weights are computed; of a longer sequence, the blocks are evenly spaced, the last among them.
    rows: the rows that are wanted; by default all.
    """
    b, h, t, s = weights_shape(calls)
    of_row = max(1, b * h * s)
    size = BLOCK if most is None else min(_BESIDE, most // _SPREAD)
    wanted = tuple(range(t)) if rows is None else rows
    blocks = list(_runs_of_rows(wanted, max(1, size // of_row)))
    if most is not None:
        step = min(t * of_row // most, len(blocks) // _SPREAD)
        blocks = blocks[:: -max(1, step)][::-1]
    # Under autocast the logits would be rounded to half precision.
    with torch.no_grad(), torch.autocast(calls[0].query_device.type, enabled=False):
        for block in blocks:
            parts = [
                _rows_of_weights(call, block).expand(b, h // len(calls), -1, s)
                for call in calls
            ]
            yield block, torch.cat(parts, 1)


def _runs_of_rows(rows: tuple[int, ...], largest: int) -> Iterator[slice]:
    """Slices of consecutive rows, in order, none longer than `largest`."""
    start = 0
    for stop in range(1, len(rows) + 1):
        ends = stop == len(rows) or rows[stop] != rows[stop - 1] + 1
        if ends or stop - start == largest:
            yield slice(rows[start], rows[stop - 1] + 1)
            start = stop


def _rows_of_weights(call: Seen, rows: slice) -> Weights:
    """The weights of some rows of a call, under the mask as it was written: logits may overtake a number that is meant to
    hide a pair.

    The softmax of attention that is written by hand may also see a sink."""
    if isinstance(call, AttentionCall) and call.written_mask is not None:
        call = dataclasses.replace(call, mask=call.written_mask)
    keys = slice(0, call.scores_shape[3])
    q, k = call.encoded()
    logits = call.scores(q[:, :, rows], k, rows, keys)
    if call.spec.cap.kind != "none":
        logits = call.capped_scores(logits, rows, keys)
    normalizer = call.spec.normalizer
    if call.params is not None:
        return normalizer.weights(logits, call.visible(rows, keys), call.params)
    if call.sink is None:
        return normalizer.weights(logits, logits != -torch.inf, {})
    sink = call.sink[:, :, rows, None].to(logits.dtype)
    total = torch.logaddexp(logits.logsumexp(-1, keepdim=True), sink)
    return (logits - total).exp()
