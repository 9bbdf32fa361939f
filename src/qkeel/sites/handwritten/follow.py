"""Hand-written attention, followed from q kᵀ to its softmax.

The product of two activations gets a tag; operations that scale, mask, cap, cast or rearrange scores pass it on, any
other one ends it. What such a one made is followed as lost, and a softmax of that is an attention that is missed. The
softmax that receives a tagged tensor is an attention; its output is tagged as weights, so that the product with the
values is no score. A softmax that is written out, as exponentials over their sum, is treated alike.

Statistics come from what the softmax received and from the masks met on the path, never from q·k·scale computed again:
a scale or a bias may be anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.head_layout import fewest_keys, head_counts, layout
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.handwritten.added_masks import MASKS, hidden_by_sum, is_low
from qkeel.sites.handwritten.concatenation import CATS, joined
from qkeel.sites.handwritten.lost_scores import LostScores, is_lost
from qkeel.sites.handwritten.products import PRODUCTS, Product, product
from qkeel.sites.handwritten.score_operators import ELEMENTWISE, READS, VIEWS
from qkeel.sites.handwritten.tags import Lost, Powers, RowTop, Scores, Tag, Tags, Weights
from qkeel.sites.handwritten.written_softmax import OUTER, outer, over_last, raised, row_top
from qkeel.sites.see.running_modules import Frame
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap

Given = tuple[Args, Kwargs]


class Handwritten:
    """A reader of every torch function of a forward pass that reports the softmaxes that are attention."""

    def __init__(self, report: Callable[[Frame, ScoresCall, bool], None]) -> None:
        self.tags = Tags()
        self.lost = LostScores(self.tags)
        self.below = False  # what is followed now was seen as operators only
        self.multiplied = False  # two activations were multiplied with each other
        self._report = report

    def minds(self, name: str) -> bool:
        """True if a call of this function can matter now: most can't."""
        return bool(self.tags) or name in PRODUCTS or name in OUTER

    def follow(self, name: str, frame: Frame, args: Args, kwargs: Kwargs, out: object) -> None:
        """Take one call of a torch function into account; its name without underscores around it."""
        found = product(name, args, kwargs, out) if name in PRODUCTS else outer(name, args, kwargs)
        if found is not None and all(is_lost(self.tags.get(x)) for x in found.operands):
            assert isinstance(out, torch.Tensor)
            self._multiplied(found, frame, out, summed=name in PRODUCTS)
            return
        if self.tags and name in PRODUCTS:
            self.lost.product(name, (args, kwargs), out)
        if not self.tags or name == "get" or name in PRODUCTS:
            return
        if name == "setitem":
            self._write(args)
        place, tag = self._tagged(name, args, kwargs)
        if isinstance(tag, Lost):
            self.lost.go_on(name, frame, tag, out)
        elif isinstance(tag, Scores) and place is not None:
            self._scores(name, frame, tag, place, (args, kwargs), out)
        elif place is not None and isinstance(out, torch.Tensor):
            self._others(name, frame, tag, place, (args, kwargs), out)

    def _scores(self, name: str, frame: Frame, tag: Scores, x: Tensor, given: Given, out: object) -> None:
        """`name(…)` of tagged scores x made `out`."""
        args, kwargs = given
        top = row_top(name, x, args, kwargs)
        if top is not None:
            self.tags.put(out if isinstance(out, torch.Tensor) else out[0], top)  # type: ignore[index]
        if top is None and not isinstance(out, torch.Tensor):
            self.lost.begin(name, frame, tag, x, out)
        if top is not None or not isinstance(out, torch.Tensor):
            return
        if name in ("softmax", "safe_softmax"):
            self._softmax(frame, tag, args, kwargs)
            self.tags.put(out, Weights())
            return
        if name == "exp":
            self._raised(frame, tag, x, out)
            return
        new = self._less(tag, x, args, kwargs, out) if name in ("sub", "subtract", "isub", "rsub") else None
        if name in CATS:
            new = self._joined(args, kwargs, out)
        elif name == "log_softmax" and over_last(x, args, kwargs):
            new = dataclasses.replace(tag, unshifted=x if tag.unshifted is None else tag.unshifted, normalised=True)
        elif new is None:
            new = _step(name, tag, x, given, out)
        if isinstance(new, Scores):
            self.tags.put(out, dataclasses.replace(new, below=new.below or self.below))
        elif name not in READS:
            self.lost.begin(new or name, frame, tag, x, out)

    def _joined(self, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
        tags = [(x, self.tags.get(x)) for x in (args[0] if args else kwargs["tensors"])]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return joined([(x, tag if isinstance(tag, Scores) else None) for x, tag in tags], dim, out)

    def _others(self, name: str, frame: Frame, tag: object, x: Tensor, given: Given, out: Tensor) -> None:
        """`name(…)` of x, tagged as something that is not scores, made `out`."""
        args, kwargs = given
        same = name in ELEMENTWISE or name in VIEWS
        if isinstance(tag, Product):
            if name == "sum" and over_last(x, args, kwargs):
                self.tags.put(out, Scores(product=tag, frame=frame, below=self.below))
        elif isinstance(tag, Weights):
            if same or name in MASKS or name in CATS:
                self.tags.put(out, tag)
        elif isinstance(tag, RowTop):
            # With another block's it is no longer the top of these scores.
            if same and name != "maximum":
                self.tags.put(out, tag)
        elif isinstance(tag, Powers):
            if name == "sum" and over_last(x, args, kwargs):
                self._report_softmax(frame, tag.scores, tag.x)
                self.tags.put(x, Weights())
            elif (new := raised(name, tag, x, args, kwargs)) is not None:
                self.tags.put(out, new)

    def _raised(self, frame: Frame, tag: Scores, x: Tensor, out: Tensor) -> None:
        """Exponentials of scores: weights if these were less their logsumexp, else with their sum."""
        x = out.log() if out is x else x
        if tag.normalised:
            self._report_softmax(frame, tag, x)
            self.tags.put(out, Weights())
        else:
            self.tags.put(out, Powers(dataclasses.replace(tag, below=tag.below or self.below), x))

    def _less(self, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | str | None:
        """Scores less one number per row, which changes no weight; None where something else is subtracted."""
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

    def _multiplied(self, found: Product, frame: Frame, out: Tensor, *, summed: bool) -> None:
        """Two activations were multiplied, and summed over the dimensions of a head or not yet."""
        if not summed:
            self.tags.put(out, found)
            return
        self.multiplied = True
        tag = Scores(product=found, frame=frame, below=self.below)
        self.tags.put(out, tag if found.added is None else hidden_by_sum(tag, found.added, out))

    def _write(self, args: Args) -> None:
        """Follows x[index] = value, in place."""
        x, index, value = args
        tag = self.tags.get(x)
        if isinstance(tag, Scores) and is_low(value):
            with torch.no_grad():
                more = torch.zeros_like(x, dtype=torch.bool)
                more[index] = True
            self.tags.put(x, tag.also_hidden(more, x))
        elif isinstance(written := self.tags.get(value), Scores):
            self.lost.begin("setitem", written.frame, written, value, x)

    def _softmax(self, frame: Frame, tag: Scores, args: Args, kwargs: Kwargs) -> None:
        x = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        dim = dim % x.ndim if isinstance(dim, int) else x.ndim - 1
        if dim < x.ndim - 2:
            where = f"its softmax runs over dimension {dim} of {x.ndim}, not over the last or the one before"
            self.lost.miss(tag.frame.shared_with(frame), "softmax", where)
            return
        self._report_softmax(frame, tag, x, turned=dim == x.ndim - 2)

    def _report_softmax(self, frame: Frame, tag: Scores, x: Tensor, *, turned: bool = False) -> None:
        where = tag.frame.shared_with(frame)
        call = _call(tag, x if tag.unshifted is None else tag.unshifted, where, turned=turned)
        self._report(where, call, tag.below or self.below)


def _call(tag: Scores, x: Tensor, frame: Frame, *, turned: bool) -> ScoresCall:
    """The call whose softmax takes x; `turned` if it runs over rows, k qᵀ."""
    q, k = tag.product.q, tag.product.k
    uncapped = x if tag.uncapped is None else tag.uncapped
    if uncapped.shape != x.shape and uncapped.numel() == x.numel():
        uncapped = uncapped.reshape(x.shape)
    hidden = None if tag.hidden is None else tag.hidden.broadcast_to(x.shape)
    parts = [uncapped, x, hidden]
    if turned:
        q, k = k, q
        parts = [p if p is None else p.mT for p in parts]
    if tag.keys is not None:
        parts = [p if p is None else p[..., slice(*tag.keys)] for p in parts]
    shape = parts[1].shape  # type: ignore[union-attr]
    how = layout(shape, _hints(frame), next((f.batch for f in frame.line() if f.batch), 0))
    logits, capped, hidden = (p if p is None else how.apply(p) for p in parts)
    assert logits is not None
    assert capped is not None
    keys = _operand(k, shape, shape[-1])
    queries = _operand(q, shape, shape[-2])
    cap = NoCap() if tag.cap is None else Softcap(abs(tag.cap))
    return ScoresCall(
        spec=AttentionSpec(scale=Fixed(tag.scale), cap=cap),
        logits=logits,
        capped=logits if tag.uncapped is None else capped,
        hidden=hidden,
        q=None if queries is None else how.apply(queries),
        k=None if keys is None else fewest_keys(how.apply(keys)),
        headless=how.headless,
    )


def _operand(x: Tensor | None, scores: torch.Size, length: int) -> Tensor | None:
    """A factor of the product with the leading dimensions of the scores as the softmax takes them."""
    if x is None or x.shape[-2] != length:
        return None
    lead = scores[:-2]
    if x.ndim == len(scores) and all(n in (1, m) for n, m in zip(x.shape, lead)):
        return x.expand(*lead, *x.shape[-2:])
    return x.reshape(*lead, *x.shape[-2:]) if x.shape[:-2].numel() == lead.numel() else None


def _hints(frame: Frame) -> frozenset[int]:
    for f in frame.line():
        if hints := head_counts(f.module):
            return hints
    return frozenset()


def _step(name: str, tag: Scores, x: Tensor | None, given: tuple[Args, Kwargs], out: Tensor) -> Scores | None:
    """The tag of `name(…)` of tagged scores x, or None if what comes out are no scores any more."""
    assert x is not None
    args, kwargs = given
    if any(isinstance(arg, torch.dtype) for arg in args[1:]) and name == "view":
        return None  # the bits of scores, as numbers of another kind
    if name in VIEWS:
        return _rearranged(name, tag, x, args, kwargs, out)
    if name == "tanh":
        return dataclasses.replace(tag, before_tanh=None if out is x else x)
    if name in MASKS:
        return MASKS[name](tag, x, args, kwargs, out)
    if name in ("max", "min"):
        return tag if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    if name not in ELEMENTWISE:
        return None
    factor = _factor(name, x, args, kwargs)
    if factor is None:
        return tag
    if tag.before_tanh is not None:
        return dataclasses.replace(tag, uncapped=tag.before_tanh * factor, cap=factor, before_tanh=None)
    if tag.unshifted is not None:
        tag = dataclasses.replace(tag, unshifted=tag.unshifted * factor)
    return tag if tag.uncapped is not None else dataclasses.replace(tag, scale=tag.scale * factor)


def _factor(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> float | None:
    """The number that a multiplication or division by a constant applies."""
    if name not in ("mul", "multiply", "rmul", "div", "divide", "true_divide"):
        return None
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    if isinstance(other, torch.Tensor) and other.numel() == 1 and not isinstance(other, nn.Parameter):
        other = float(other.detach())
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        return None
    return 1.0 / other if "div" in name else float(other)


def _rearranged(name: str, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    """The tag after a view or an index, which masks and logits before the cap go through too."""
    method = getattr(torch.Tensor, "__getitem__" if name == "getitem" else name, None)
    op = torch.nn.functional.pad if name == "pad" else method or getattr(torch.ops.aten, name)

    def rearranged(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        with torch.no_grad():
            part = part.broadcast_to(x.shape)
            return (
                op(part.to(torch.uint8), *args[1:], **kwargs).bool()
                if part.dtype == torch.bool
                else op(part, *args[1:], **kwargs)
            )

    keys = tag.keys
    if keys is not None and out.shape[-1] != x.shape[-1]:
        keys = keys if out.shape[-1] >= keys[1] else None
    return dataclasses.replace(
        tag,
        hidden=rearranged(tag.hidden),
        uncapped=rearranged(tag.uncapped),
        before_tanh=rearranged(tag.before_tanh),
        unshifted=rearranged(tag.unshifted),
        keys=keys,
    )
