"""Hand-written attention, tracked from q kᵀ to its softmax.

The product of two activations gets a tag. Operations that scale, mask, cap, cast or rearrange scores pass the tag on;
any other operation ends it. The output of any other operation is tagged as lost, and a softmax over it is reported as a
missed attention. A softmax whose input is a tagged tensor is attention; its output is tagged as weights, so that the
product with the values does not count as scores. A softmax that is written out, as exponentials divided by their sum,
is treated in the same way.

Statistics are computed from the input of the softmax and from the masks met on the path, and never from q·k·scale
computed again, because a scale or a bias may be applied anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall, fewest_keys, head_counts, layout
from qkeel.capture.example import ModuleCall
from qkeel.capture.products import (
    ELEMENTWISE,
    PRODUCTS,
    READS,
    VIEWS,
    Lost,
    Powers,
    Product,
    ProductOperand,
    RowSum,
    RowTop,
    Scores,
    ShiftedOne,
    Tag,
    Tags,
    Weights,
    along_keys,
    narrowed,
    operand,
    product,
)
from qkeel.capture.scores import (
    CATS,
    MASKS,
    OUTER,
    SUMS,
    LostScores,
    added,
    depends_on_input,
    factors_of,
    hidden_by_sum,
    hidden_through_view,
    is_index,
    is_lost,
    joined,
    may_be_outer,
    mixed,
    outer,
    over_last,
    products_of,
    raised,
    rearranged,
    row_top,
    written,
)
from qkeel.functional.norms import wide
from qkeel.heads.rows import Sides, layout_of
from qkeel.patching.autograd import base_of
from qkeel.patching.modes import Args, Kwargs
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap

Given = tuple[Args, Kwargs]
SMALLEST_CONSTANT = 1e-5  # a larger constant added to a sum of exponentials is more than a guard against 0 / 0


class EagerAttentionTracer:
    """Reads every call of a torch function in a forward pass and reports the softmaxes that are attention.

    Args:
        report: called with every attention call, and with whether a function mode alone misses part of it; returns the
            site's name.
        known: returns the layout of the scores whose softmax a module computes, if it is known.
        names: maps each parameter's identity to its name when probing, where tracing the graph back to the parameters
            reveals which dimensions are heads. None if there is no graph to trace.
        valued: called with the name of a site and the tensor by which its weights are multiplied.
        chose: called with scores of which the largest are chosen, and with their tag.
    """

    def __init__(
        self,
        report: Callable[[ModuleCall, ScoresCall, bool], str | None],
        known: Callable[[ModuleCall], HeadLayout | None] = lambda frame: None,
        names: dict[int, str] | None = None,
        valued: Callable[[str, Tensor], None] = lambda site, values: None,
        chose: Callable[[ModuleCall, Scores | Lost, Tensor], None] | None = None,
    ) -> None:
        self._chose = chose
        self.tags = Tags()
        self.lost = LostScores(self.tags)
        self.below = False  # whether the current calls were observed as operators only
        self.multiplied = False  # whether two activations were multiplied with each other
        self._report, self._known, self._names, self._valued = report, known, names, valued

    def minds(self, name: str, args: Args) -> bool:
        """True if a call of this function may be relevant now, which is rarely the case."""
        return bool(self.tags) or name in PRODUCTS or (name in OUTER and may_be_outer(args))

    def follow(self, name: str, frame: ModuleCall, args: Args, kwargs: Kwargs, out: object) -> None:
        """Processes one call of a torch function, given the function's name without outer underscores."""
        found = product(name, args, kwargs, out) if name in PRODUCTS else outer(name, args, kwargs, out)
        if found is not None and not any(self._is_made(x) for x in found.operands):
            assert isinstance(out, torch.Tensor)
            self._multiplied(found, frame, out, kwargs, summed=name in PRODUCTS)
            return
        if not self.tags or name == "get":
            return
        if name == "setitem":
            self._write(args)
        place, tag = self._tagged(name, args, kwargs)
        if name in PRODUCTS and not (isinstance(tag, (Scores, Lost)) and not (isinstance(tag, Scores) and tag.table)):
            if isinstance(tag, Powers) and tag.totals and place is not None:
                tag = Weights(self._divided(frame, tag.totals[0]))
            if isinstance(tag, Weights) and tag.site is not None and len(args) > 1 and args[0] is place:
                self._valued(tag.site, args[1])
            return
        if name == "topk" and isinstance(tag, (Scores, Lost)) and place is not None and self._chose is not None:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            if dim in (-1, place.ndim - 1) and is_index(self.tags, tag, place):
                self._chose(tag.frame.shared_with(frame), tag, place)
        if isinstance(tag, Lost):
            if name in PRODUCTS:
                self.lost.product(name, (args, kwargs), out)
            else:
                self.lost.go_on(name, frame, tag, out)
        elif isinstance(tag, Scores) and place is not None:
            self._scores(name, frame, tag, place, (args, kwargs), out)
        elif place is not None and isinstance(out, torch.Tensor):
            self._others(name, frame, tag, place, (args, kwargs), out)

    def _is_made(self, x: Tensor) -> bool:
        """True if a tensor is on its way from q and k to the values, so that it is not a factor of a product of
        scores."""
        tag = self.tags.get(x)
        return not is_lost(tag) and not (isinstance(tag, Scores) and tag.table)

    def _scores(self, name: str, frame: ModuleCall, tag: Scores, x: Tensor, given: Given, out: object) -> None:
        """Handles `name(…)` applied to tagged scores x, which returned `out`."""
        args, kwargs = given
        top = row_top(name, x, args, kwargs)
        if top is not None:
            self.tags.put(out if isinstance(out, torch.Tensor) else out[0], top)  # type: ignore[index]
        if top is None and not isinstance(out, torch.Tensor):
            self.lost.begin(name, frame, tag, x, out)
        if top is not None or not isinstance(out, torch.Tensor):
            return
        if name in ("softmax", "safe_softmax"):
            if not tag.table:
                self.tags.put(out, Weights(self._softmax(frame, tag, args, kwargs)))
            return
        if name == "exp":
            if not tag.table:
                self._raised(frame, tag, x, out)
            return
        new = self._less(tag, x, args, kwargs, out) if name in ("sub", "subtract", "isub", "rsub") else None
        if new is None and name in SUMS:
            new = self._sum(name, frame, tag, x, given, out)
        if name in CATS:
            new = self._joined(args, kwargs, out)
        elif name == "log_softmax" and over_last(x, args, kwargs):
            new = dataclasses.replace(tag, unshifted=x if tag.unshifted is None else tag.unshifted, normalised=True)
        elif new is None:
            new = self._step(name, tag, x, given, out)
        if isinstance(new, Scores):
            if out is x and new.hidden is not None and new.hidden is not tag.hidden and base_of(x) is not None:
                hidden_through_view(self.tags, x, new.hidden)
            self.tags.put(out, dataclasses.replace(new, below=new.below or self.below))
        elif name in PRODUCTS:
            self.lost.product(name, given, out)
        elif name not in READS and not tag.table:
            self.lost.begin(new or name, frame, tag, x, out)

    def _sum(self, name: str, frame: ModuleCall, tag: Scores, x: Tensor, given: Given, out: Tensor) -> Scores | None:
        """The tag of scores to which other scores, or another term that depends on the input, were added; None for any
        other sum."""
        args, kwargs = given
        operands = [a for n, a in (*enumerate(args), *kwargs.items()) if n != "alpha"]
        other = next((a for a in operands if a is not x), None)
        more = self.tags.get(other)
        if isinstance(more, Scores) and isinstance(other, torch.Tensor):
            return added(tag, more, factors_of(name, bool(args) and args[0] is x, kwargs), out, frame)
        if self._names is None or more is not None or tag.table or not depends_on_input(other, tag, out):
            return None
        why = "a term added to its scores depends on the input and is not a product"
        new = dataclasses.replace(tag, lost=(*tag.lost, why))
        return new if name.startswith(("sub", "rsub", "isub")) else hidden_by_sum(new, other, out)

    def _joined(self, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
        tags = [(x, self.tags.get(x)) for x in (args[0] if args else kwargs["tensors"])]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return joined([(x, tag if isinstance(tag, Scores) else None) for x, tag in tags], dim, out)

    def _others(self, name: str, frame: ModuleCall, tag: object, x: Tensor, given: Given, out: Tensor) -> None:
        """Handles `name(…)` applied to a tensor x with a tag other than scores, which returned `out`."""
        args, kwargs = given
        same = name in ELEMENTWISE or name in VIEWS
        total = next((t for a in (*args, *kwargs.values()) if isinstance(t := self.tags.get(a), RowSum)), None)
        if total is not None:
            self._summed(name, frame, total, given, out)
        elif isinstance(tag, Product):
            if name == "sum" and over_last(x, args, kwargs):
                self.tags.put(out, Scores(parts=(tag,), frame=frame, below=self.below))
        elif isinstance(tag, Weights):
            if same or name in MASKS or name in CATS:
                self.tags.put(out, tag)
        elif isinstance(tag, RowTop):
            # After a maximum with another block's value it is no longer the largest of these scores.
            if same and name != "maximum":
                self.tags.put(out, dataclasses.replace(tag, negative=tag.negative != (name == "neg")))
            elif name == "exp" and tag.negative and not tag.normalises:
                self.tags.put(out, ShiftedOne())
        elif isinstance(tag, ShiftedOne):
            if same:
                self.tags.put(out, tag)
        elif isinstance(tag, Powers):
            if name == "sum" and over_last(x, args, kwargs):
                tag.totals[:] = [RowSum(tag, x)]
                self.tags.put(out, tag.totals[0])
            elif (new := raised(name, tag, x, args, kwargs)) is not None:
                self.tags.put(out, new)

    def _summed(self, name: str, frame: ModuleCall, total: RowSum, given: Given, out: Tensor) -> None:
        """Handles `name(…)` applied to a row's sum of exponentials, which returned `out`: a constant was added to the
        sum, or the exponentials were divided by it."""
        args, kwargs = given
        others = [a for a in (*args, *kwargs.values()) if self.tags.get(a) is not total]
        if name in ("add", "radd", "iadd") and len(others) == 1 and not total.constant:
            shifted = total.powers.scores.unshifted is not None
            if shifted and isinstance(self.tags.get(others[0]), ShiftedOne):
                total = dataclasses.replace(total, constant=1.0)
            elif type(others[0]) in (int, float):
                # A smaller constant only keeps the quotient finite. Added to exponentials of shifted scores, a constant
                # is not the exponential of a fixed logit.
                counts = others[0] > SMALLEST_CONSTANT and not shifted
                total = dataclasses.replace(total, constant=float(others[0])) if counts else total
            else:
                self._divided(frame, total)
                return
            total.powers.totals[:] = [total]
            self.tags.put(out, total)
        elif (name in ELEMENTWISE or name in VIEWS) and not any(isinstance(a, Tensor) for a in others):
            self.tags.put(out, total)
        else:
            weights = Weights(self._divided(frame, total))
            if args and args[0] is total.exponentials:
                self.tags.put(out, weights)

    def _divided(self, frame: ModuleCall, total: RowSum) -> str | None:
        """Reports the softmax of exponentials that are divided by their sum, and returns the site's name."""
        known = self.tags.get(total.exponentials)
        if isinstance(known, Weights):
            return known.site
        powers = total.powers
        site = self._report_softmax(frame, powers.scores, powers.x, constant=total.constant)
        self.tags.put(total.exponentials, Weights(site))
        return site

    def _raised(self, frame: ModuleCall, tag: Scores, x: Tensor, out: Tensor) -> None:
        """Tags exponentials of scores: as weights if the logsumexp was subtracted from the scores, otherwise as
        exponentials that still have to be divided by their sum."""
        x = out.log() if out is x else x
        if tag.normalised:
            self.tags.put(out, Weights(self._report_softmax(frame, tag, x)))
        else:
            self.tags.put(out, Powers(dataclasses.replace(tag, below=tag.below or self.below), x))

    def _less(self, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | str | None:
        """The tag of scores minus one value per row, which does not change the weights; None if something else is
        subtracted."""
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if not args or args[0] is not x or not isinstance(other, torch.Tensor):
            return None
        top = self.tags.get(other)
        if isinstance(top, RowTop):
            before = x if out is not x else out + other
            before = before if tag.unshifted is None else tag.unshifted
            return dataclasses.replace(tag, unshifted=before, normalised=tag.normalised or top.normalises)
        per_row = other.ndim == x.ndim and other.shape[-1] == 1 < x.shape[-1]
        return "sub of a number per row" if per_row else None

    def _tagged(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tag] | tuple[None, None]:
        given = list(args[0] if args else ()) if name in (*CATS, "stack") and args else [*args, *kwargs.values()]
        tagged = [(x, tag) for x in given if (tag := self.tags.get(x)) is not None]
        return min(tagged, key=lambda one: is_lost(one[1]), default=(None, None))

    def _multiplied(self, found: Product, frame: ModuleCall, out: Tensor, kwargs: Kwargs, *, summed: bool) -> None:
        """Tags the product of two activations, which has been summed over the dimensions of a head or will be later."""
        if not summed:
            self.tags.put(out, found)
            return
        self.multiplied = True
        tag = Scores(parts=(dataclasses.replace(found, factor=1.0, added=None),), frame=frame, scale=found.factor)
        tag = dataclasses.replace(tag, below=self.below)
        more = self.tags.get(found.added)
        if isinstance(more, Scores):
            tag = added(more, tag, (float(kwargs.get("beta", 1.0)), 1.0), out, frame)
        elif found.added is not None:
            tag = hidden_by_sum(tag, found.added, out)
            if self._names is not None and not tag.table and depends_on_input(found.added, tag, out):
                tag = dataclasses.replace(
                    tag, lost=("a term added to its scores depends on the input and is not a product",)
                )
        self.tags.put(out, tag)

    @torch.no_grad()
    def _write(self, args: Args) -> None:
        """Handles x[index] = value, which writes in place."""
        x, index, value = args
        tag, more = (found if isinstance(found := self.tags.get(y), Scores) else None for y in (x, value))
        new = written(tag, x, index, value, more)
        if new is not None:
            self.tags.put(x, new)
        elif more is not None or (tag is not None and isinstance(self.tags.get(value), Lost)):
            was = more or tag
            assert was is not None
            self.lost.begin("setitem", was.frame, was, x, x)

    def _softmax(self, frame: ModuleCall, tag: Scores, args: Args, kwargs: Kwargs) -> str | None:
        x = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        dim = dim % x.ndim if isinstance(dim, int) else x.ndim - 1
        if dim < x.ndim - 2 and not any(along_keys(part.sides, dim) for part in tag.parts):
            where = f"its softmax runs over dimension {dim} of {x.ndim}, not over the last or the second-to-last"
            self.lost.miss(tag.frame.shared_with(frame), "softmax", where)
            return None
        return self._report_softmax(frame, tag, x, dim)

    def _report_softmax(
        self, frame: ModuleCall, tag: Scores, x: Tensor, dim: int = -1, *, constant: float = 0.0
    ) -> str | None:
        where = tag.frame.shared_with(frame)
        self.lost.weighed |= products_of(tag)
        x = x if tag.unshifted is None else tag.unshifted
        call = seen_call(tag, x, dim % x.ndim, where, known=self._known(where), names=self._names)
        if constant:
            sink = call.logits.new_full(call.logits.shape[:-1], math.log(constant), dtype=wide(x.dtype))
            call = dataclasses.replace(call, sink=sink if call.sink is None else torch.logaddexp(call.sink, sink))
        return self._report(where, call, tag.below or self.below)

    def _step(self, name: str, tag: Scores, x: Tensor, given: Given, out: Tensor) -> Scores | None:
        """The tag of `name(…)` applied to tagged scores x, or None if the result no longer consists of scores."""
        args, kwargs = given
        if any(isinstance(arg, torch.dtype) for arg in args[1:]) and name == "view":
            return None  # the bits of the scores, reinterpreted in another dtype
        if name in VIEWS:
            return rearranged(name, tag, x, args, kwargs, out, whole=self._names is not None)
        return _elementwise(name, tag, x, given, out)


def _elementwise(name: str, tag: Scores, x: Tensor, given: Given, out: Tensor) -> Scores | None:
    """The tag of scores that were masked, capped, scaled, cast, or whose heads were mixed."""
    args, kwargs = given
    if name == "tanh":
        return dataclasses.replace(tag, before_tanh=None if out is x else x)
    if name in MASKS:
        return MASKS[name](tag, x, args, kwargs, out)
    if name in ("abs", "absolute"):
        # The hidden pairs would become the largest of all, and a preceding cap or shift could not be undone.
        changed = (tag.hidden, tag.uncapped, tag.before_tanh, tag.unshifted, tag.keys)
        why = "its softmax takes the absolute values of the scores"
        return None if any(x is not None for x in changed) else dataclasses.replace(tag, lost=(*tag.lost, why))
    if name in ("max", "min"):
        return tag if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    if name not in ELEMENTWISE:
        return mixed(name, tag, x, args, kwargs, out)
    factor = _factor(name, x, args, kwargs)
    if factor is None:
        return tag
    if tag.before_tanh is not None:
        return dataclasses.replace(tag, uncapped=tag.before_tanh * factor, cap=factor, before_tanh=None)
    if tag.unshifted is not None:
        tag = dataclasses.replace(tag, unshifted=tag.unshifted * factor)
    return tag if tag.uncapped is not None else dataclasses.replace(tag, scale=tag.scale * factor)


def _factor(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> float | None:
    """The factor that a multiplication or division by a constant applies."""
    if name not in ("mul", "multiply", "rmul", "div", "divide", "true_divide"):
        return None
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    if isinstance(other, torch.Tensor) and other.numel() == 1 and not isinstance(other, nn.Parameter):
        other = float(other.detach())
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        return None
    return 1.0 / other if "div" in name else float(other)


# --- The attention call behind a softmax whose input was tracked: its logits as [b h t s], with q and k

Factors = tuple[Tensor | None, Tensor | None]


def seen_call(
    tag: Scores,
    x: Tensor,
    keys: int,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    names: dict[int, str] | None,
    alone: bool = True,
) -> ScoresCall:
    """The attention call whose softmax has the input x.

    Args:
        tag: the tag of x.
        x: the scores after all operations on them.
        keys: the dimension that the softmax normalises.
        frame: the module call that made it.
        known: the layout of the scores, if it is known.
        names: the names of parameters by identity in a probe, otherwise None.
        alone: whether x is final, with nothing else to be added.
    """
    uncapped = x if tag.uncapped is None else tag.uncapped
    if uncapped.shape != x.shape and uncapped.numel() == x.numel():
        uncapped = uncapped.reshape(x.shape)
    hidden = None if tag.hidden is None else tag.hidden.broadcast_to(x.shape)
    columns = (0, x.shape[keys]) if tag.keys is None else tag.keys
    found = [p if p is None else p.narrow(keys, columns[0], columns[1] - columns[0]) for p in (uncapped, x, hidden)]
    assert found[1] is not None
    parts = [_sides(part, x, keys, columns) for part in tag.parts]
    with torch.set_grad_enabled(names is not None):  # an autograd.Function that computes the softmax turns it off
        how = _layout(found[1], parts, keys, frame, known, names)
        factors = [_factors(sides, how, keys, exact=names is None or (alone and len(parts) == 1)) for sides in parts]
    logits, capped, hidden = (p if p is None else how.apply(p) for p in found)
    if any([f.pads for f in frame.line()]):  # noqa: C419
        filler = _filler_rows(parts, how, keys)
        hidden = filler if hidden is None or filler is None else hidden | filler
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
        gathered=_is_gathered(parts, how),
        sink=None if tag.keys is None else _sink(x, keys, columns, how),
    )


@torch.no_grad()
def _filler_rows(parts: Sequence[Sides | None], how: HeadLayout, keys: int) -> Tensor | None:
    """The rows [b 1 t 1] whose queries are zero in all heads, which a module that pads with zeros has added. No row is
    marked if the queries of all rows are zero, as before the first step of some models. None if the queries are
    unknown."""
    sides = parts[0] if len(parts) == 1 else None
    if sides is None or sides.query.index is None or sides.query.varies(keys):
        return None
    rows = how.apply(sides.query.index.narrow(keys, 0, 1))
    zero = (sides.query.vectors() == 0).all(-1)[rows.clamp_min(0)].all(1, keepdim=True)
    return zero & ~zero.all()


def index_call(
    tag: Scores | Lost,
    x: Tensor,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    names: dict[int, str] | None,
) -> ScoresCall:
    """Returns an attention call whose logits are the scores x by which keys are chosen, as a softmax over them would
    receive them; the call has no values.

    A pair is hidden if a mask of the same value would hide it, or if it is always chosen (+inf).
    """
    if isinstance(tag, Lost):
        tag = Scores(parts=(), frame=tag.frame)
    keys, x = x.ndim - 1, x.detach()
    parts = [_sides(part, x, keys, (0, x.shape[keys])) for part in tag.parts]
    with torch.set_grad_enabled(names is not None):
        how = _layout(x, parts, keys, frame, known, names)
    how = dataclasses.replace(how, headless=False)
    hidden = (x <= HIDES) | (x == torch.inf)
    hidden = hidden if tag.hidden is None else hidden | tag.hidden
    logits = how.apply(x)
    return ScoresCall(
        spec=AttentionSpec(),
        logits=logits,
        capped=logits,
        hidden=how.apply(hidden),
        q=None,
        k=None,
        layout=how,
    )


@torch.no_grad()
def _sink(x: Tensor, keys: int, columns: tuple[int, int], how: HeadLayout) -> Tensor | None:
    """The logsumexp [b h t] of the columns that are not keys, or None if there are no such columns."""
    n = x.shape[keys]
    beside = [x.narrow(keys, 0, columns[0]), x.narrow(keys, columns[1], n - columns[1])]
    if columns == (0, n):
        return None
    return how.apply(torch.cat(beside, keys).to(wide(x.dtype)).logsumexp(keys, keepdim=True))[..., 0]


def _is_gathered(parts: Sequence[Sides | None], how: HeadLayout) -> bool:
    """True if the keys were picked for each query, so that the keys of every product vary along queries too."""
    rows = next((i for i, group in enumerate(how.groups) if group == "t"), None)
    return rows is not None and bool(parts) and all([p is not None and p.key.varies(rows) for p in parts])  # noqa: C419


def fused_layout(
    q: Tensor, k: Tensor, frame: ModuleCall, *, known: HeadLayout | None, names: dict[int, str] | None
) -> HeadLayout:
    """The layout of the scores that a fused function computes from q and k [... t d], which need not be [b h t d]."""
    shape = torch.Size((*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]))
    out, n = q.detach().new_zeros(()).expand(shape), len(shape)
    query = operand(q, (q.ndim - 1,), [*range(n - q.ndim, n - 1)], out)
    key = operand(k, (k.ndim - 1,), [*range(n - k.ndim, n - 2), n - 1], out)
    return _layout(out, [Sides(query=query, key=key)], n - 1, frame, known, names)


def _sides(part: Product, x: Tensor, keys: int, columns: tuple[int, int]) -> Sides | None:
    """The factors of a product that hold the queries and the keys, with the index of their vectors for each score of
    x."""
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
        found.append(ProductOperand(x=side.x, summed=side.summed, index=index))
    left, right = found
    return Sides(query=right, key=left) if _is_key(left, right, keys) else Sides(query=left, key=right)


def _is_key(one: ProductOperand, other: ProductOperand, keys: int) -> bool:
    """True if `one` holds the keys, because it varies along the softmax. If both factors do, as with relative
    positions, the factor with the keys is the one that stays the same for some queries while the other varies."""
    if not one.varies(keys) or not other.varies(keys):
        return one.varies(keys)
    assert one.index is not None
    return any(other.varies(i) and not one.varies(i) for i in range(one.index.ndim) if i != keys)


def _layout(
    x: Tensor,
    parts: Sequence[Sides | None],
    keys: int,
    frame: ModuleCall,
    known: HeadLayout | None,
    names: dict[int, str] | None,
) -> HeadLayout:
    """The layout if it is known, or else found by experiment, or else guessed from the shape."""
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
            # Keys that all heads share, such as those of absorbed MLA, vary along neither heads nor queries.
            queries = [i for i in free if x.shape[i] not in heads]
            rows, several = (queries if len(queries) == 1 else free)[-1], len(free) > 1 and len(queries) != 1
    batch = next((f.batch for f in frame.line() if f.batch), 0)
    found = layout(x.shape, heads, batch, keys, rows)
    if several and not found.guess:
        why = f"scores of shape {tuple(x.shape)} do not show which dimension holds the queries"
        return dataclasses.replace(found, guess=why)
    return found


def hints(frame: ModuleCall) -> frozenset[int]:
    """The head counts of the innermost module that states any."""
    return next((found for f in frame.line() if (found := head_counts(f.module))), frozenset())


def _factors(sides: Sides | None, how: HeadLayout, keys: int, *, exact: bool) -> Factors:
    """The q [b h t d] and k [b g s d] of a product. If `exact`, both are None unless each logit is the product of one q
    and one k; otherwise they are the queries for the first key and the keys for the last query."""
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
        # Keys that all heads share are used once.
        if group == "h" and narrowed(k.index).shape[place] == 1 and how.groups.count("h") == 1:
            other, how = other.narrow(place, 0, 1), HeadLayout(groups=how.groups, sizes=(1,))
    return q.picked(own), fewest_keys(k.picked(how.apply(other)[:, :, -1]))
