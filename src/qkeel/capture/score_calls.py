"""The attention call behind a softmax whose input was traced: its logits as [b h t s], with q and k."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.capture.calls import (
    HIDES,
    HeadLayout,
    ScoresCall,
    fewest_keys,
    head_counts,
    layout,
)
from qkeel.capture.example import ModuleCall
from qkeel.capture.products import Operand, Product
from qkeel.capture.tags import Lost, Scores
from qkeel.functional.norms import wide
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap
from qkeel.spec.logits import Normalizer
from qkeel.spec.slot import Params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The factors of a product of scores that serve as queries and keys."""

    query: Operand
    key: Operand


# Finds the layout of scores of this shape in the graph behind their factors, from the dimension of the keys and the
# call of the module; None if the graph does not show it.
LayoutReader = Callable[[Sides, torch.Size, int, ModuleCall], HeadLayout | None]


def scores_call(
    tag: Scores,
    x: Tensor,
    keys: int,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    by_graph: LayoutReader | None,
    alone: bool = True,
) -> ScoresCall:
    """The attention call whose softmax has the input x.

    Args:
        tag: the tag of x.
        x: the scores after all operations on them.
        keys: the dimension that the softmax normalises.
        frame: the module call that made it.
        known: the layout of the scores, if it is known.
        by_graph: finds the layout in the graph, in a probe; otherwise None.
        alone: whether x is final, with nothing else to be added.
    """
    start, end = (0, x.shape[keys]) if tag.keys is None else tag.keys

    def of_keys(y: Tensor) -> Tensor:
        # Without columns that are no keys, such as sinks.
        return y.broadcast_to(x.shape).narrow(keys, start, end - start)

    capped = of_keys(x)
    pairs = [_sides(product, capped, keys) for product in tag.products]
    # An autograd.Function that computes the softmax turns gradients off.
    with torch.set_grad_enabled(by_graph is not None):
        arrangement = _layout(capped, pairs, keys, frame, known, by_graph)
        is_exact = by_graph is None or (alone and len(pairs) == 1)
        factors = [
            (None, None)
            if sides is None or (is_exact and not product.followed)
            else _factors(sides, arrangement, capped, keys, is_exact)
            for product, sides in zip(tag.products, pairs)
        ]
    logits = capped_logits = arrangement.apply(capped)
    if tag.uncapped is not None:
        logits = arrangement.apply(of_keys(tag.uncapped))
    bias = None
    if tag.bias is not None:
        bias = arrangement.apply(of_keys(tag.bias).to(wide(x.dtype)))
    q, k = factors[0] if len(factors) == 1 else (None, None)
    return ScoresCall(
        spec=AttentionSpec(
            scale=Fixed(tag.scale), cap=NoCap() if tag.cap is None else Softcap(tag.cap)
        ),
        logits=logits,
        capped=capped_logits,
        mask=_mask(tag, of_keys, pairs, arrangement, capped, keys, frame),
        q=q,
        k=k,
        products=tuple(factors) if by_graph is not None else (),
        layout=arrangement,
        gathered=all(
            sides is not None
            and arrangement.rows is not None
            and sides.key.varies(arrangement.rows)
            for sides in pairs
        ),
        sink=None if tag.keys is None else _sink(x, keys, start, end, arrangement),
        bias=bias,
    )


def _mask(
    tag: Scores,
    of_keys: Callable[[Tensor], Tensor],
    pairs: Sequence[Sides | None],
    arrangement: HeadLayout,
    x: Tensor,
    keys: int,
    frame: ModuleCall,
) -> Bool[Tensor, "#b #h #t #s"] | None:
    """Which keys the queries of the scores x may see; None if they see all."""
    mask = None
    if tag.hidden is not None:
        mask = ~_unexpanded(arrangement.apply(of_keys(tag.hidden)))
    is_filled = any([around.pads for around in frame.line()])
    if is_filled and len(pairs) == 1 and tag.products[0].followed:
        filler = _filler_rows(pairs[0], arrangement, x, keys)
        if filler is not None:
            mask = ~filler if mask is None else mask & ~filler
    return mask


@torch.no_grad()
def _sink(
    x: Tensor, keys: int, start: int, end: int, arrangement: HeadLayout
) -> Float[Tensor, "b h t"] | None:
    """The logsumexp of the columns of scores x that are no keys; None if all are keys."""
    before, _, after = x.split((start, end - start, x.shape[keys] - end), keys)
    columns = torch.cat((before, after), keys).to(wide(x.dtype))
    if not columns.shape[keys]:
        return None
    return arrangement.apply(columns.logsumexp(keys, keepdim=True))[..., 0]


def _unexpanded(x: Tensor) -> Tensor:
    """A view with size 1 along dimensions that repeat the same elements."""
    for dim, step in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if step == 0 and x.shape[dim] else x
    return x


def normalized(call: ScoresCall, normalizer: Normalizer, params: Params) -> ScoresCall:
    """Returns a call whose weights are not a softmax's but those of a normalizer."""
    params = {name: x.detach() for name, x in params.items()}
    sink = normalizer.sink_logit(params, call.query_device)
    if sink is not None:
        b, h, t, _ = call.logits.shape
        sink = sink[None].expand(b, h, t)
    spec = dataclasses.replace(call.spec, normalizer=normalizer)
    return dataclasses.replace(call, spec=spec, params=params, sink=sink)


def index_call(
    tag: Scores | Lost,
    x: Tensor,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    by_graph: LayoutReader | None,
) -> ScoresCall:
    """Returns an attention call whose logits are the scores x by which keys are chosen, as a softmax over them would
    receive them; the call has no values.

    A pair is hidden if a mask of the same value would hide it, or if it is always chosen (+inf).
    """
    x, keys = x.detach(), x.ndim - 1
    products = tag.products if isinstance(tag, Scores) else ()
    pairs = [_sides(product, x, keys) for product in products]
    with torch.set_grad_enabled(by_graph is not None):
        arrangement = _layout(x, pairs, keys, frame, known, by_graph)
    arrangement = dataclasses.replace(arrangement, headless=False)
    hidden = (x <= HIDES) | (x == torch.inf)
    if isinstance(tag, Scores) and tag.hidden is not None:
        hidden = hidden | tag.hidden
    logits = arrangement.apply(x)
    return ScoresCall(
        spec=AttentionSpec(),
        logits=logits,
        capped=logits,
        mask=~arrangement.apply(hidden),
        q=None,
        k=None,
        layout=arrangement,
    )


def fused_layout(
    q: Tensor,
    k: Tensor,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    by_graph: LayoutReader | None,
) -> HeadLayout:
    """The layout of the scores that a fused function computes from q and k [... t d], which need not be [b h t d]."""
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    shape = (*lead, q.shape[-2], k.shape[-2])
    query, key = (y[(None,) * (len(shape) - y.ndim)] for y in (q, k))
    sides = Sides(
        query=Operand(query.unsqueeze(-2), q), key=Operand(key.unsqueeze(-3), k)
    )
    x = q.detach().new_zeros(()).expand(shape)
    return _layout(x, [sides], len(shape) - 1, frame, known, by_graph)


def _sides(product: Product, x: Tensor, keys: int) -> Sides | None:
    """The factors of a product that hold the queries and the keys of scores x."""
    if product.sides is None or product.sides[0].x.ndim != x.ndim + 1:
        return None
    left, right = product.sides
    is_key = left.varies(keys)
    if is_key and right.varies(keys):
        # As with relative positions: the keys are those of which some queries see the same.
        others = [dim for dim in range(x.ndim) if dim != keys]
        is_key = any(right.varies(dim) and not left.varies(dim) for dim in others)
    return Sides(query=right, key=left) if is_key else Sides(query=left, key=right)


def _layout(
    x: Tensor,
    pairs: Sequence[Sides | None],
    keys: int,
    frame: ModuleCall,
    known: HeadLayout | None,
    by_graph: LayoutReader | None,
) -> HeadLayout:
    """The layout if it is known, or else found by experiment, or else guessed from the shape."""
    fitted = None if known is None else known.fitted(x.shape)
    if fitted is not None and fitted.keys == keys:
        return fitted
    rows, is_ambiguous = None, False
    # The innermost module that states any numbers of heads.
    hints = next(
        filter(None, (head_counts(f.module) for f in frame.line())), frozenset()
    )
    # A product whose queries differ by key, such as one with relative positions, says less.
    known_pairs = [sides for sides in pairs if sides is not None]
    for sides in sorted(known_pairs, key=lambda sides: sides.query.varies(keys)):
        if by_graph is not None:
            shown = by_graph(sides, x.shape, keys, frame)
            if shown is not None:
                return shown
        free = [
            dim
            for dim in range(x.ndim)
            if dim != keys and sides.query.varies(dim) and not sides.key.varies(dim)
        ]
        if rows is None and free:
            # Keys that all heads share, such as those of absorbed MLA, vary along neither heads nor queries.
            queries = [dim for dim in free if x.shape[dim] not in hints]
            is_ambiguous = len(free) > 1 and len(queries) != 1
            rows = queries[0] if len(queries) == 1 else free[-1]
    batch = next((call.batch for call in frame.line() if call.batch), 0)
    guessed = layout(x.shape, hints, batch, keys, rows)
    if is_ambiguous and not guessed.guess:
        why = f"scores of shape {tuple(x.shape)} do not show which dimension holds the queries"
        return dataclasses.replace(guessed, guess=why)
    return guessed


def _factors(
    sides: Sides, arrangement: HeadLayout, x: Tensor, keys: int, exact: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The q [b h t d] and k [b g s d] of a product.

    If `exact`, both are None unless each logit is the product of one q and one k. Otherwise they are the queries for
    the first key and the keys for the last query.
    """
    rows, q, k = arrangement.rows, sides.query.x, sides.key.x
    if exact and sides.query.varies(keys):
        return None, None
    if exact and rows is not None and sides.key.varies(rows):
        return None, None
    q = q.narrow(keys, 0, 1)
    of_queries, of_keys = list(x.shape), list(x.shape)
    of_queries[keys], of_keys[keys] = 1, k.shape[keys]
    if rows is not None:
        k = k.narrow(rows, k.shape[rows] - 1, 1)
        of_queries[rows], of_keys[rows] = q.shape[rows], 1
    try:
        q, k = q.expand(*of_queries, q.shape[-1]), k.expand(*of_keys, k.shape[-1])
    except RuntimeError:  # the scores were rearranged after they had been shifted
        return None, None
    q, k = (arrangement.apply(y, vectors=True) for y in (q, k))
    return q[:, :, :, 0], fewest_keys(k[:, :, -1])


@torch.no_grad()
def _filler_rows(
    sides: Sides | None, arrangement: HeadLayout, x: Tensor, keys: int
) -> Bool[Tensor, "b 1 t 1"] | None:
    """The rows whose queries are zero in all heads, which a module that pads with zeros has added. No row is marked if
    the queries of all rows are zero, as before the first step of some models. None if the queries are unknown."""
    if sides is None or sides.query.varies(keys):
        return None
    shape = list(x.shape)
    shape[keys] = 1
    zero = (sides.query.x == 0).all(-1).expand(shape)
    zero = arrangement.apply(zero).all(1, keepdim=True)
    return zero & ~zero.all()
