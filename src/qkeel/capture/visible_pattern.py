"""The type of a layer, determined from the keys that its queries reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, final

import torch
from jaxtyping import Bool
from torch import Tensor

from qkeel.capture.calls import FlexCall, ScoresCall, Seen
from qkeel.spec import AttentionCall

# The keys that the queries reach: all preceding keys (or all keys), a window that slides with the query, some of these
# keys with hidden keys in between, or keys that each represent several tokens.
VisibleType = Literal["full", "window", "sparse", "compressed"]
# What the keys are computed from: the tokens of the queries, a vector per token that is narrower than the keys of all
# heads together, or a source other than that of the queries.
KeyOrigin = Literal["tokens", "latent", "other"]
# See records.LAYER_TYPES.
LayerType = Literal[
    "full", "window", "sparse", "compressed", "latent", "cross", "indexer"
]

# The number of pairs that are examined together.
_PAIRS = 1 << 22


def layer_type(visible: VisibleType, origin: KeyOrigin) -> LayerType:
    """Names a layer by the source of its keys if this differs from the source of its queries, otherwise by its visible
    sets, and, if these are full, by whether its keys come from latents.

    >>> layer_type("sparse", "latent"), layer_type("full", "latent"), layer_type("window", "other")
    ('sparse', 'latent', 'cross')
    """
    if origin == "other":
        return "cross"
    return "latent" if visible == "full" and origin == "latent" else visible


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisiblePattern:
    """The type of the sets of keys that the queries of one call see.

    Attributes:
        visible: the type.
        blocks: whether the sets of visible keys are full within groups of neighbouring tokens and empty between groups. Packed
            sequences have such sets, and so has attention in chunks; `told_apart` distinguishes the two.
        queries: the number of queries.
        window: in a window, the most keys that a query sees; a call with more queries than this shows the window.
    """

    visible: VisibleType
    blocks: bool
    queries: int
    window: int | None = dataclasses.field(default=None, compare=False)


def told_apart(of_sites: Mapping[str, VisiblePattern]) -> dict[str, VisibleType]:
    """The visible types of the sites in one pass. Packed sequences are separated in every layer, so if another site
    with the same number of queries saw all keys, without blocks, the blocks are windows.

    >>> packed = VisiblePattern(visible="full", blocks=True, queries=8)
    >>> told_apart({"a": packed, "b": packed})
    {'a': 'full', 'b': 'full'}
    >>> told_apart({"a": packed, "b": VisiblePattern(visible="full", blocks=False, queries=8)})
    {'a': 'window', 'b': 'full'}
    """
    unbroken = {
        pattern.queries
        for pattern in of_sites.values()
        if pattern.visible == "full" and not pattern.blocks
    }
    types: dict[str, VisibleType] = {}
    for name, pattern in of_sites.items():
        is_window = pattern.blocks and pattern.queries in unbroken
        types[name] = "window" if is_window else pattern.visible
    return types


@torch.no_grad()
def visible_pattern(call: Seen, origin: KeyOrigin = "tokens") -> VisiblePattern:
    """Determines the type of the sets of keys that the queries of a call see from what the call says, or else from its mask.

    Keys that every query sees, such as sinks and memory, and keys that no query sees are left out. A row's set is a
    span if it has no gaps among the remaining keys.

    - *window*: the keys of every row form a span, and at least once the start of the span advances by one key from one
      query to the next.
    - *full*: all rows have spans that do not advance in this way.
    - *sparse*: at least one row's keys do not form a span, or keys were gathered for each query.
    - *compressed*: there are fewer keys than queries, or there are more and some row's keys do not form a span. Keys
      from a source other than that of the queries are never compressed.

    The function waits for the device once and stores no data per pair.
    """
    *_, t, s = call.scores_shape
    visible: VisibleType = "full"
    has_blocks, window = False, None
    if isinstance(call, ScoresCall) and call.gathered and t > 1:
        visible = "sparse"
    elif s < t and origin != "other":
        visible = "compressed"
    elif _may_hide_pairs(call):
        are_spans, do_slide, has_blocks, most = _spans(call, s)
        if not are_spans:
            visible = "sparse" if s == t or origin == "other" else "compressed"
        elif do_slide:
            visible, window = "window", most
    is_full = visible == "full"
    return VisiblePattern(
        visible=visible, blocks=is_full and has_blocks, queries=t, window=window
    )


@torch.no_grad()
def visible_digest(call: Seen) -> Tensor | None:
    """Numbers that differ if calls of one site see different keys [n], or None if all queries see all keys (up to their
    own). They are computed from the mask alone, without waiting for the device: the number of visible pairs and the sum
    of their keys' indices. Of functions that make a mask the blocks are counted."""
    if not _may_hide_pairs(call):
        return None
    mask = call.mask
    numbers: list[Tensor | int] = [call.query_shape[1], call.window or 0]
    if isinstance(call, FlexCall) and call.block_mask is not None:
        blocks = call.block_mask.kv_num_blocks, call.block_mask.full_kv_num_blocks
        numbers += [x.sum() for x in blocks if x is not None]
    elif mask is not None:
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min
        of_keys = mask.sum((0, 1, 2))
        # From 1, since an index of 0 would add nothing for the first key.
        indices = torch.arange(1, len(of_keys) + 1, device=of_keys.device)
        numbers += [of_keys.sum(), (of_keys * indices).sum()]
    return torch.stack([torch.as_tensor(n, device=call.query_device) for n in numbers])


def _may_hide_pairs(call: Seen) -> bool:
    """False if it is certain, without reading tensor values, that all queries see all keys or all keys up to their
    own."""
    mask = call.mask
    if type(call) not in (AttentionCall, ScoresCall) or call.window is not None:
        return True
    return mask is not None and mask.shape[2] > 1 and mask.shape[3] > 1


def _spans(call: Seen, s: int) -> tuple[bool, bool, bool, int]:
    """Whether the set of every row is a span, whether the start of a span advances by one key from one row to the next,
    whether spans start at different keys, and the most keys that a row sees."""
    is_seen, is_always_seen = [], []
    for visible in _blocks(call, s):
        has_keys = visible.any(-1, keepdim=True)
        is_seen.append(visible.any(1))
        is_always_seen.append((visible | ~has_keys).all(1))
    # [n s].
    kept = torch.stack(is_seen).any(0) & ~torch.stack(is_always_seen).all(0)
    # Positions among the kept keys: those that are left out make no gap in a span.
    rank = kept.cumsum(-1, dtype=torch.int32)[:, None]
    rows = []
    for visible in _blocks(call, s):
        row = visible & kept[:, None]
        start, end = rank.where(row, s + 1).amin(-1), rank.where(row, 0).amax(-1)
        rows.append((start, end, row.sum(-1)))
    # [n t].
    start, end, count = (torch.cat(parts, -1) for parts in zip(*rows))
    has_keys = count > 0
    are_spans = ((end - start + 1 == count) | ~has_keys).all()
    # A window slides where rows of several keys begin one key later than the row before. A row of one key does not count:
    # the first token of each packed document sees itself alone, wherever it stands.
    are_wide = torch.minimum(count[..., 1:], count[..., :-1]) > 1
    do_slide = (are_wide & (start[..., 1:] == start[..., :-1] + 1)).any()
    starts_apart = start.masked_fill(~has_keys, -1).amax(-1) > start.amin(-1)
    answers = torch.stack([are_spans, do_slide, starts_apart.any(), count.amax()])
    spans, slide, apart, most = answers.tolist()
    return bool(spans), bool(slide), bool(apart), most


def _blocks(call: Seen, s: int) -> Iterator[Bool[Tensor, "n r s"]]:
    """The visible pairs in blocks of rows, for each sequence and head that has a separate mask."""
    b, h, t, _ = call.scores_shape
    size = max(1, _PAIRS // max(1, b * h * s))
    for start in range(0, t, size):
        rows = slice(start, min(t, start + size))
        visible = call.visible(rows, slice(0, s))
        if visible is None:
            visible = torch.ones(1, 1, 1, s, dtype=torch.bool, device=call.query_device)
        yield visible.expand(*visible.shape[:2], rows.stop - start, s).flatten(0, 1)
