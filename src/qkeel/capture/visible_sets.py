"""The type of a layer, determined from the keys that its queries reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, final

import torch
from jaxtyping import Bool
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.spec import AttentionCall
from qkeel.spec.call import BandCall

# The keys that the queries reach: all preceding keys (or all keys), a window that slides with the query, some of these
# keys with hidden keys in between, or keys that each represent several tokens.
VisibleType = Literal["full", "window", "sparse", "compressed"]
# What the keys are computed from: the tokens of the queries, a vector per token that is narrower than the keys of all
# heads together, or a source other than that of the queries.
KeyOrigin = Literal["tokens", "latent", "other"]
LayerType = Literal["full", "window", "sparse", "compressed", "latent", "cross", "indexer"]  # see records.LAYER_TYPES

_ROWS = 1 << 22  # the number of pairs that are examined together


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
class VisibleSets:
    """The type of the visible sets of one call.

    Attributes:
        visible: the type.
        blocks: whether the sets are full within groups of neighbouring tokens and empty between groups. Packed
            sequences have such sets, and so has attention in chunks; `told_apart` distinguishes the two.
        queries: the number of queries.
    """

    visible: VisibleType
    blocks: bool
    queries: int


def told_apart(found: Mapping[str, VisibleSets]) -> dict[str, VisibleType]:
    """The visible types of the sites in one pass. Packed sequences are separated in every layer, so if another site
    with the same number of queries saw all keys, without blocks, the blocks are windows.

    >>> packed = VisibleSets(visible="full", blocks=True, queries=8)
    >>> told_apart({"a": packed, "b": packed})
    {'a': 'full', 'b': 'full'}
    >>> told_apart({"a": packed, "b": VisibleSets(visible="full", blocks=False, queries=8)})
    {'a': 'window', 'b': 'full'}
    """
    whole = {one.queries for one in found.values() if one.visible == "full" and not one.blocks}
    return {
        name: "window" if one.visible == "full" and one.blocks and one.queries in whole else one.visible
        for name, one in found.items()
    }


@torch.no_grad()
def visible_sets(call: Seen, origin: KeyOrigin = "tokens") -> VisibleSets:
    """Determines the type of the visible sets of a call.

    Keys that every query sees, such as sinks and memory, and keys that no query sees are left out. A row's set is a
    span if it has no gaps among the remaining keys.

    - *window*: the keys of every row form a span, and at least once the start of the span advances by one key from one
      query to the next.
    - *full*: all rows have spans that do not advance in this way, or each token sees exactly its own group of tokens
      (in blocks, which need not be adjacent).
    - *sparse*: at least one row's keys do not form a span, or keys were gathered for each query, or queries for each
    block of keys.
    - *compressed*: there are fewer keys than queries, or there are more and the last visible key does not advance by
      one with each query. Keys from a source other than that of the queries are never compressed.

    The function waits for the device once or twice and stores no data per pair.
    """
    t, s = (call.logits if isinstance(call, ScoresCall) else call.q).shape[2], _keys(call)
    if isinstance(call, ScoresCall) and call.gathered and t > 1:
        return VisibleSets(visible="sparse", blocks=False, queries=t)
    if isinstance(call, BandCall) and origin != "other" and _by_blocks(call):
        return VisibleSets(visible="sparse", blocks=False, queries=t)
    if s < t and origin != "other":
        return VisibleSets(visible="compressed", blocks=False, queries=t)
    if not _any_hidden(call, t, s):
        return VisibleSets(visible="full", blocks=False, queries=t)
    seen, always, lost = _extent(call, s)
    kept = seen & ~always
    spans = _spans(call, kept)
    if s != t and origin != "other":
        # If a sequence is cut into pieces, a piece may have so few queries that all of them see the keys in the middle
        # of their windows. In the last piece the window may end with the sequence.
        whole = _spans(call, seen)
        if whole.all and whole.slide and whole.follows:
            return VisibleSets(visible="window", blocks=False, queries=t)
        if not spans.steady:
            return VisibleSets(visible="compressed", blocks=False, queries=t)
    if spans.all:
        blocks = spans.several and not spans.slide
        return VisibleSets(visible="window" if spans.slide else "full", blocks=blocks, queries=t)
    # The first keys may stay visible in addition to a window, namely those that no later query loses.
    moving = _spans(call, kept & lost)
    if moving.all and moving.slide:
        return VisibleSets(visible="window", blocks=False, queries=t)
    grouped = s == t and _is_grouped(call, kept, spans.first)
    return VisibleSets(visible="full" if grouped else "sparse", blocks=grouped, queries=t)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spans:
    """The visible sets of a call's rows, restricted to a subset of the keys.

    Attributes:
        all: whether every set is a span.
        slide: whether the start advances by one key from one row to the next at least once.
        several: whether the sets start at different keys.
        steady: whether the end advances by one key with each row.
        follows: whether the end does so until it reaches the last key that any row sees.
        first: the first visible key [n t] of each row.
    """

    all: bool
    slide: bool
    several: bool
    steady: bool
    follows: bool
    first: Tensor


def _spans(call: Seen, kept: Tensor) -> _Spans:
    s, rank = kept.shape[-1], kept.cumsum(-1)
    first, last, count = (torch.cat(parts, -1) for parts in zip(*_rows(call, kept)))
    t, some = first.shape[-1], count > 0
    start, end = rank.gather(-1, first), rank.gather(-1, last)
    spans = ((end - start + 1 == count) | ~some).all()
    both = some[..., 1:] & some[..., :-1] & (torch.minimum(count[..., 1:], count[..., :-1]) > 1)
    slides = (both & (start[..., 1:] == start[..., :-1] + 1)).any()
    ahead = last - torch.arange(t, device=last.device)
    high = ahead.masked_fill(~some, -s - t).amax(-1)
    steady = ((high == ahead.masked_fill(~some, s + t).amin(-1)) | ~some.any(-1)).all()
    before, after, top = last[..., :-1], last[..., 1:], last.masked_fill(~some, -1).amax(-1, keepdim=True)
    apart = ~(some[..., 1:] & some[..., :-1])
    follows = ((after == before + 1) | ((after == before) & (after == top)) | apart).all()
    several = (first.masked_fill(~some, -1).amax(-1) > first.masked_fill(~some, s).amin(-1)) & some.any(-1)
    found = torch.stack([spans, slides, several.any(), steady, follows]).tolist()
    return _Spans(all=found[0], slide=found[1], several=found[2], steady=found[3], follows=found[4], first=first)


def _keys(call: Seen) -> int:
    return call.logits.shape[3] if isinstance(call, ScoresCall) else call.k.shape[2]


def _by_blocks(call: BandCall) -> bool:
    """True if the packed sequences are blocks of keys of equal length, each with the queries that chose it, as in the
    fast implementation of MoBA, where every query sees its full block and the number of queries varies between
    blocks."""
    if call.causal or call.of_key is None:
        return False
    some = call.high > call.low
    of_query = call.low[some].unique(return_counts=True)[1]
    wide, own = (call.high - call.low)[some], call.of_key.unique(return_counts=True)[1]
    alike = [len(own) > 1, len(of_query) > 1, (own == own[:1]).all(), (wide == own[:1]).all()]
    return all(map(bool, alike)) and bool((of_query != of_query[:1]).any())


def _any_hidden(call: Seen, t: int, s: int) -> bool:
    """False if it is certain, without reading tensor values, that all queries see all keys or all keys up to their
    own."""
    if isinstance(call, ScoresCall):
        return call.hidden is not None and call.hidden.shape[2] > 1 and call.hidden.shape[3] > 1
    if type(call) is not AttentionCall or call.window is not None:
        return True
    return call.mask is not None and call.mask.shape[2] > 1 and call.mask.shape[3] > 1


def _blocks(call: Seen) -> Iterator[tuple[slice, Bool[Tensor, "n r s"]]]:
    """The visible pairs in blocks of rows, for each sequence and head that has a separate mask."""
    b, h, t = (call.logits if isinstance(call, ScoresCall) else call.q).shape[:3]
    s = _keys(call)
    rows = max(1, _ROWS // max(1, b * h * s))
    for begin in range(0, t, rows):
        block = slice(begin, min(t, begin + rows))
        if isinstance(call, ScoresCall):
            assert call.hidden is not None
            found: Tensor | None = ~(call.hidden if call.hidden.shape[2] == 1 else call.hidden[:, :, block])
        else:
            found = call.visible(block, slice(0, s))
        if found is None:
            found = torch.ones(1, 1, 1, s, dtype=torch.bool, device=call.query_device)
        yield block, found.expand(*found.shape[:2], block.stop - begin, s).flatten(0, 1)


def _extent(call: Seen, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three masks of keys [n s]: the keys that at least one query sees; the keys that are seen by every query that sees
    any key; and the keys that one query sees but the next query does not, although it sees others."""
    seen = always = lost = before = None
    for _, visible in _blocks(call):
        none = ~visible.any(-1, keepdim=True)
        rows = visible if before is None else torch.cat([before, visible], 1)
        gone = (rows[:, :-1] & ~(rows[:, 1:] | ~rows[:, 1:].any(-1, keepdim=True))).any(1)
        found = visible.any(1), (visible | none).all(1), gone
        if seen is None or always is None or lost is None:
            seen, always, lost = found
        else:
            seen, always, lost = seen | found[0], always & found[1], lost | found[2]
        before = visible[:, -1:]
    assert seen is not None
    assert always is not None
    assert lost is not None
    return seen, always, lost


def _rows(call: Seen, kept: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The indices of the first and the last kept key that each row sees, and the number of these keys [n r]."""
    for _, visible in _blocks(call):
        own = (visible & kept[:, None]).to(torch.uint8)
        yield own.argmax(-1), own.shape[-1] - 1 - own.flip(-1).argmax(-1), own.sum(-1)


def _is_grouped(call: Seen, kept: Tensor, first: Tensor) -> bool:
    """True if tokens with the same first visible key form a group, and every token sees exactly its own group."""
    alike = [
        ((visible == (first[:, rows, None] == first[:, None])) | ~kept[:, None]).all()
        for rows, visible in _blocks(call)
    ]
    return bool(torch.stack(alike).all())
