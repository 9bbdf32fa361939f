"""The attention call behind a softmax whose input was followed: its logits as [b h t s], and q and k next to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.sites.calls.head_layout import Layout, fewest_keys, head_counts, layout
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.handwritten.products import Operand, Product, narrowed, operand
from qkeel.sites.handwritten.tags import Scores
from qkeel.sites.see.running_modules import Frame
from qkeel.sites.weights.head_dims import Sides, layout_of
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap

Factors = tuple[Tensor | None, Tensor | None]


def seen_call(
    tag: Scores,
    x: Tensor,
    keys: int,
    frame: Frame,
    *,
    known: Layout | None,
    names: dict[int, str] | None,
    alone: bool = True,
) -> ScoresCall:
    """The call whose softmax takes x.

    Args:
        tag: what x is known to be.
        x: the scores, with whatever was done to them.
        keys: the dimension that the softmax runs over.
        frame: the module's call that made it.
        known: the layout of the scores, where it is known.
        names: parameters by identity in a probe, else None.
        alone: that nothing else will be added to x.
    """
    uncapped = x if tag.uncapped is None else tag.uncapped
    if uncapped.shape != x.shape and uncapped.numel() == x.numel():
        uncapped = uncapped.reshape(x.shape)
    hidden = None if tag.hidden is None else tag.hidden.broadcast_to(x.shape)
    columns = (0, x.shape[keys]) if tag.keys is None else tag.keys
    found = [p if p is None else p.narrow(keys, columns[0], columns[1] - columns[0]) for p in (uncapped, x, hidden)]
    assert found[1] is not None
    parts = [_sides(part, x, keys, columns) for part in tag.parts]
    with torch.set_grad_enabled(names is not None):  # an autograd.Function that takes the softmax turns it off
        how = _layout(found[1], parts, keys, frame, known, names)
        factors = [_factors(sides, how, keys, exact=names is None or (alone and len(parts) == 1)) for sides in parts]
    logits, capped, hidden = (p if p is None else how.apply(p) for p in found)
    assert logits is not None
    assert capped is not None
    q, k = factors[0] if len(factors) == 1 and not tag.lost else (None, None)
    cap = NoCap() if tag.cap is None else Softcap(abs(tag.cap))
    return ScoresCall(
        spec=AttentionSpec(scale=Fixed(tag.scale), cap=cap),
        logits=logits,
        capped=logits if tag.uncapped is None else capped,
        hidden=hidden,
        q=q,
        k=k,
        products=tuple(factors) if names is not None else (),
        lost=tag.lost,
        layout=how,
    )


def fused_layout(q: Tensor, k: Tensor, frame: Frame, *, known: Layout | None, names: dict[int, str] | None) -> Layout:
    """The layout of the scores that a fused function makes of q and k [... t d], which need not be [b h t d]."""
    shape = torch.Size((*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]))
    out, n = q.detach().new_zeros(()).expand(shape), len(shape)
    query = operand(q, (q.ndim - 1,), [*range(n - q.ndim, n - 1)], out)
    key = operand(k, (k.ndim - 1,), [*range(n - k.ndim, n - 2), n - 1], out)
    return _layout(out, [Sides(query=query, key=key)], n - 1, frame, known, names)


def _sides(part: Product, x: Tensor, keys: int, columns: tuple[int, int]) -> Sides | None:
    """The factors of a product that make queries and keys, with the numbers of their vectors for each score of x."""
    pair = part.sides
    if pair is None:
        return None
    found = []
    for side in pair:
        assert side.index is not None
        try:
            index = side.index.broadcast_to(x.shape).narrow(keys, columns[0], columns[1] - columns[0])
        except RuntimeError:
            return None
        found.append(Operand(x=side.x, summed=side.summed, index=index))
    left, right = found
    return Sides(query=right, key=left) if _is_key(left, right, keys) else Sides(query=left, key=right)


def _is_key(one: Operand, other: Operand, keys: int) -> bool:
    """True if `one` makes the keys: it changes along the softmax; where both do, as with relative positions, it is the
    same for some queries that the other tells apart."""
    if not one.varies(keys) or not other.varies(keys):
        return one.varies(keys)
    assert one.index is not None
    return any(other.varies(i) and not one.varies(i) for i in range(one.index.ndim) if i != keys)


def _layout(
    x: Tensor,
    parts: Sequence[Sides | None],
    keys: int,
    frame: Frame,
    known: Layout | None,
    names: dict[int, str] | None,
) -> Layout:
    """The layout that is known, or found by experiment, or else guessed from the shape."""
    if known is not None and (fitted := known.fitted(x.shape)) is not None and fitted.keys == keys:
        return fitted
    rows: int | None = None
    several = False
    heads = hints(frame)
    for sides in sorted((p for p in parts if p is not None), key=lambda p: p.query.varies(keys)):
        if names is not None and (found := layout_of(sides, x.shape, keys, frame, names)) is not None:
            return found
        free = [i for i in range(x.ndim) if i != keys and sides.query.varies(i) and not sides.key.varies(i)]
        if rows is None and free:
            # Keys that all heads share, as those of absorbed MLA, change along neither heads nor queries.
            queries = [i for i in free if x.shape[i] not in heads]
            rows, several = (queries if len(queries) == 1 else free)[-1], len(free) > 1 and len(queries) != 1
    batch = next((f.batch for f in frame.line() if f.batch), 0)
    found = layout(x.shape, heads, batch, keys, rows)
    if several and not found.guess:
        why = f"scores of shape {tuple(x.shape)} do not show which dimension is queries"
        return dataclasses.replace(found, guess=why)
    return found


def hints(frame: Frame) -> frozenset[int]:
    """The numbers that the innermost module which has any calls heads."""
    return next((found for f in frame.line() if (found := head_counts(f.module))), frozenset())


def _factors(sides: Sides | None, how: Layout, keys: int, *, exact: bool) -> Factors:
    """The q [b h t d] and k [b g s d] of a product; with `exact` only where each logit is one of these by one of those,
    else those of the first key and of the last query."""
    if sides is None:
        return None, None
    rows = next((i for i, group in enumerate(how.groups) if "t" in group), None)
    q, k = sides.query, sides.key
    if exact and (q.varies(keys) or (rows is not None and how.groups[rows] == "t" and k.varies(rows))):
        return None, None
    assert q.index is not None
    assert k.index is not None
    own = how.apply(q.index.narrow(keys, 0, 1))[..., 0]
    other = k.index
    if rows is not None and how.groups[rows] == "t":
        other = other.narrow(rows, other.shape[rows] - 1, 1)
    for place, group in enumerate(how.groups):
        # Keys that all heads share are taken once.
        if group == "h" and narrowed(k.index).shape[place] == 1 and how.groups.count("h") == 1:
            other, how = other.narrow(place, 0, 1), Layout(groups=how.groups, sizes=(1,))
    return q.picked(own), fewest_keys(k.picked(how.apply(other)[:, :, -1]))
