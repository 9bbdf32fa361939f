"""The type of a layer, named by which keys its queries were seen to reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, final

import torch
from jaxtyping import Bool
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.spec import AttentionCall

# The keys that the queries reach: all that come before them (or all), a window that slides with the query, some of them
# with others between that are hidden, or keys that stand for several tokens each.
VisibleType = Literal["full", "window", "sparse", "compressed"]
# What the keys are made of: the tokens of the queries, a vector of each token that is narrower than the keys of all
# heads, or something else than the queries are made of.
KeyOrigin = Literal["tokens", "latent", "other"]
LayerType = Literal["full", "window", "sparse", "compressed", "latent", "cross", "indexer"]  # see records.LAYER_TYPES

_ROWS = 1 << 22  # pairs that are looked at together


def layer_type(visible: VisibleType, origin: KeyOrigin) -> LayerType:
    """The type of a layer: "cross" for keys of another source, "latent" for full latents, else its visible sets.

    >>> layer_type("sparse", "latent"), layer_type("full", "latent"), layer_type("window", "other")
    ('sparse', 'latent', 'cross')
    """
    if origin == "other":
        return "cross"
    return "latent" if visible == "full" and origin == "latent" else visible


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisibleSets:
    """The properties of one call's visible sets.

    `blocks`: they are full within groups of neighbouring tokens and empty between them. Packed sequences and attention
    in chunks both look like this; `told_apart` distinguishes them. `queries` is how many there were.
    """

    visible: VisibleType
    blocks: bool
    queries: int


def told_apart(found: Mapping[str, VisibleSets]) -> dict[str, VisibleType]:
    """The visible types of the sites of one pass: blocks are windows if another site with as many queries is full
    without blocks. Packed sequences are separate in every layer.

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
    """Returns the properties of a call's visible sets.

    Keys that every query sees, such as sinks and memory, and keys that no query sees are ignored. In the others, in
    their order, the keys that a row sees either form a span or do not. All rows have spans: a *window* if the beginning
    of the span advances by one key from one query to the next, else *full*. Some row has
    none: *sparse*, unless tokens are grouped and see exactly their group (*full*, in blocks that need not be
    neighbours). If keys and queries differ in number, the keys are *compressed* if they are fewer, or if the last
    visible key does not advance by one with each query; keys of another source are never compressed. Keys that were
    gathered for each query are *sparse*.

    It waits for the device once or twice, and stores nothing per pair.
    """
    t, s = (call.logits if isinstance(call, ScoresCall) else call.q).shape[2], _keys(call)
    if isinstance(call, ScoresCall) and call.gathered and t > 1:
        return VisibleSets(visible="sparse", blocks=False, queries=t)
    if s < t and origin != "other":
        return VisibleSets(visible="compressed", blocks=False, queries=t)
    if not _any_hidden(call, t, s):
        return VisibleSets(visible="full", blocks=False, queries=t)
    seen, always, lost = _extent(call, s)
    kept = seen & ~always
    spans = _spans(call, kept)
    if s != t and origin != "other" and not spans.steady:
        return VisibleSets(visible="compressed", blocks=False, queries=t)
    if spans.all:
        blocks = spans.several and not spans.slide
        return VisibleSets(visible="window" if spans.slide else "full", blocks=blocks, queries=t)
    # The first keys may stay visible beside a window: those that no later query loses.
    moving = _spans(call, kept & lost)
    if moving.all and moving.slide:
        return VisibleSets(visible="window", blocks=False, queries=t)
    grouped = s == t and _is_grouped(call, kept, spans.first)
    return VisibleSets(visible="full" if grouped else "sparse", blocks=grouped, queries=t)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spans:
    """What the visible sets of a call's rows are among some of its keys.

    `all`: each is a span. `slide`: somewhere its beginning moves on by one key. `several`: they begin at several keys.
    `steady`: its end moves on by one key with each row. `first` is the first key [n t] of each row.
    """

    all: bool
    slide: bool
    several: bool
    steady: bool
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
    several = (first.masked_fill(~some, -1).amax(-1) > first.masked_fill(~some, s).amin(-1)) & some.any(-1)
    found = torch.stack([spans, slides, several.any(), steady]).tolist()
    return _Spans(all=found[0], slide=found[1], several=found[2], steady=found[3], first=first)


def _keys(call: Seen) -> int:
    return call.logits.shape[3] if isinstance(call, ScoresCall) else call.k.shape[2]


def _any_hidden(call: Seen, t: int, s: int) -> bool:
    """False where it shows without a look at numbers that all queries see all keys, or all up to their own."""
    if isinstance(call, ScoresCall):
        return call.hidden is not None and call.hidden.shape[2] > 1 and call.hidden.shape[3] > 1
    if type(call) is not AttentionCall or call.window is not None:
        return True
    return call.mask is not None and call.mask.shape[2] > 1 and call.mask.shape[3] > 1


def _blocks(call: Seen) -> Iterator[tuple[slice, Bool[Tensor, "n r s"]]]:
    """The pairs that are visible, some rows at a time, of each sequence and head that has pairs of its own."""
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
    """The keys [n s] that some query sees, those that every query sees which sees any, and those that one query sees
    and the next one does not, though it sees others."""
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
    """The first, the last and the number [n r] of the kept keys that each row sees."""
    for _, visible in _blocks(call):
        own = (visible & kept[:, None]).to(torch.uint8)
        yield own.argmax(-1), own.shape[-1] - 1 - own.flip(-1).argmax(-1), own.sum(-1)


def _is_grouped(call: Seen, kept: Tensor, first: Tensor) -> bool:
    """True if every token belongs to one group, by the first key that it sees, and sees exactly that group."""
    alike = [
        ((visible == (first[:, rows, None] == first[:, None])) | ~kept[:, None]).all()
        for rows, visible in _blocks(call)
    ]
    return bool(torch.stack(alike).all())
