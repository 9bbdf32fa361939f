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
LayerType = Literal[
    "full", "window", "sparse", "compressed", "latent", "cross", "indexer"
]  # see records.LAYER_TYPES

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
    whole = {
        one.queries
        for one in found.values()
        if one.visible == "full" and not one.blocks
    }
    return {
        name: "window"
        if one.visible == "full" and one.blocks and one.queries in whole
        else one.visible
        for name, one in found.items()
    }


@torch.no_grad()
def visible_sets(call: Seen, origin: KeyOrigin = "tokens") -> VisibleSets:
    """Determines the type of the visible sets of a call from what the call says, or else from its mask.

    Keys that every query sees, such as sinks and memory, and keys that no query sees are left out. A row's set is a
    span if it has no gaps among the remaining keys.

    - *window*: the keys of every row form a span, and at least once the start of the span advances by one key from one
      query to the next.
    - *full*: all rows have spans that do not advance in this way.
    - *sparse*: at least one row's keys do not form a span, or keys were gathered for each query, or queries for each
      block of keys.
    - *compressed*: there are fewer keys than queries, or there are more and some row's keys do not form a span. Keys
      from a source other than that of the queries are never compressed.

    The function waits for the device once and stores no data per pair.
    """
    t, s = call.query_shape[1], _keys(call)
    blocks = False
    if isinstance(call, ScoresCall) and call.gathered and t > 1:
        visible: VisibleType = "sparse"
    elif isinstance(call, BandCall) and origin != "other" and _by_blocks(call):
        visible = "sparse"
    elif s < t and origin != "other":
        visible = "compressed"
    elif not _any_hidden(call):
        visible = "full"
    else:
        spans, slides, several = _spans(call)
        if spans:
            visible, blocks = ("window", False) if slides else ("full", several)
        else:
            visible = "sparse" if s == t or origin == "other" else "compressed"
    return VisibleSets(visible=visible, blocks=blocks, queries=t)


def _spans(call: Seen) -> tuple[bool, bool, bool]:
    """Whether the set of every row is a span, whether the start of a span advances by one key from one row to the next,
    and whether spans start at different keys."""
    masks = [
        (visible.any(1), (visible | ~visible.any(-1, keepdim=True)).all(1))
        for visible in _blocks(call)
    ]
    seen, always = (torch.stack(parts) for parts in zip(*masks))
    kept = seen.any(0) & ~always.all(0)  # [n s]
    rows = []
    for visible in _blocks(call):
        row = (visible & kept[:, None]).to(torch.uint8)
        rows.append(
            (row.argmax(-1), row.shape[-1] - 1 - row.flip(-1).argmax(-1), row.sum(-1))
        )
    first, last, count = (torch.cat(parts, -1) for parts in zip(*rows))  # [n t]
    rank = kept.cumsum(-1)  # keys that are left out make no gaps
    start, end, some = rank.gather(-1, first), rank.gather(-1, last), count > 0
    spans = ((end - start + 1 == count) | ~some).all()
    # A row of one key has no start of its own: in a causal mask, the first row sees one key as well.
    wide = torch.minimum(count[..., 1:], count[..., :-1]) > 1
    slides = (wide & (start[..., 1:] == start[..., :-1] + 1)).any()
    several = (
        start.masked_fill(~some, -1).amax(-1)
        > start.masked_fill(~some, kept.shape[-1] + 1).amin(-1)
    ).any()
    are_spans, do_slide, are_several = torch.stack([spans, slides, several]).tolist()
    return are_spans, do_slide, are_several


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
    alike = [
        len(own) > 1,
        len(of_query) > 1,
        (own == own[:1]).all(),
        (wide == own[:1]).all(),
    ]
    return all(map(bool, alike)) and bool((of_query != of_query[:1]).any())


def _any_hidden(call: Seen) -> bool:
    """False if it is certain, without reading tensor values, that all queries see all keys or all keys up to their
    own."""
    if isinstance(call, ScoresCall):
        return (
            call.hidden is not None
            and call.hidden.shape[2] > 1
            and call.hidden.shape[3] > 1
        )
    if type(call) is not AttentionCall or call.window is not None:
        return True
    return call.mask is not None and call.mask.shape[2] > 1 and call.mask.shape[3] > 1


def _blocks(call: Seen) -> Iterator[Bool[Tensor, "n r s"]]:
    """The visible pairs in blocks of rows, for each sequence and head that has a separate mask."""
    b, h, t = (call.logits if isinstance(call, ScoresCall) else call.q).shape[:3]
    s = _keys(call)
    n_rows = max(1, _ROWS // max(1, b * h * s))
    for begin in range(0, t, n_rows):
        rows = slice(begin, min(t, begin + n_rows))
        if isinstance(call, ScoresCall):
            assert call.hidden is not None
            visible: Tensor | None = ~(
                call.hidden if call.hidden.shape[2] == 1 else call.hidden[:, :, rows]
            )
        else:
            visible = call.visible(rows, slice(0, s))
        if visible is None:
            visible = torch.ones(1, 1, 1, s, dtype=torch.bool, device=call.query_device)
        yield visible.expand(*visible.shape[:2], rows.stop - begin, s).flatten(0, 1)
