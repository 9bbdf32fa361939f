"""Follows hand-written attention from q kᵀ to its softmax.

The product of two activations gets a tag; operations that scale, mask, cap, cast or rearrange scores hand it on,
any other one ends it (and is noted, for the error that asks for a description by hand). The softmax that receives
a tagged tensor is an attention; its output is tagged as weights, so that the product with the values is no score.

Statistics come from what the softmax received and from the masks met on the way, never from q·k·scale anew: a
scale or a bias may hide anywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.sites.blockwise import HIDES
from qkeel.sites.carriers import CARRIES, LOOKS, SHAPES
from qkeel.sites.layout import fewest_keys, head_counts, layout
from qkeel.sites.products import PRODUCTS, Product, product
from qkeel.sites.scores import ScoresCall
from qkeel.sites.stack import Frame
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What is known of a tensor of scores: its origin, who is hidden, the logits before a cap, which columns count.

    `before_tanh` is the input of a tanh whose factor has not come yet. `keys` are the columns that are keys, where
    others (sinks) were attached.
    """

    product: Product
    frame: Frame
    hidden: Tensor | None = None
    uncapped: Tensor | None = None
    cap: float | None = None
    before_tanh: Tensor | None = None
    scale: float = 1.0
    keys: tuple[int, int] | None = None

    def also_hidden(self, more: Tensor, like: Tensor) -> Scores:
        """The same with more pairs hidden."""
        more = more.to(torch.bool).broadcast_to(like.shape)
        return dataclasses.replace(self, hidden=more if self.hidden is None else self.hidden | more)


class _Weights:
    """Tag of a softmax output that is on its way to the values."""


class Tags:
    """Tags by the identity of a tensor, gone with it. Never by its address, which batched tensors don't have."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Scores | _Weights]] = {}

    def get(self, x: object) -> Scores | _Weights | None:
        """The tag of a tensor."""
        entry = self._of.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: Tensor, tag: Scores | _Weights) -> None:
        """Tag a tensor."""
        key, table = id(x), self._of

        def forget(dead: weakref.ref[Tensor]) -> None:
            entry = table.get(key)
            if entry is not None and entry[0] is dead:
                del table[key]

        self._of[key] = (weakref.ref(x, forget), tag)

    def __bool__(self) -> bool:
        return bool(self._of)

    def clear(self) -> None:
        """Forget everything."""
        self._of.clear()


class Handwritten:
    """Sees every torch function of a forward pass and reports the softmaxes that are attention."""

    def __init__(self, report: Callable[[Frame, ScoresCall], None]) -> None:
        self.tags = Tags()
        self.stopped: collections.Counter[str] = collections.Counter()
        self._report = report

    def follow(self, name: str, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Take one call of a torch function into account. `name` is bare: no underscores around it."""
        if name in PRODUCTS:
            self._multiplied(name, frame, args, kwargs, out)
            return
        if not self.tags or name == "get":
            return
        if name == "setitem":
            self._write(args)
        if not isinstance(out, torch.Tensor):
            return
        place, tag = self._tagged(name, args, kwargs)
        if tag is None:
            return
        if isinstance(tag, _Weights):
            if name in CARRIES or name in SHAPES or name in _MASKS:
                self.tags.put(out, tag)
            return
        if name in ("softmax", "safe_softmax"):
            self._softmax(frame, tag, args, kwargs)
            self.tags.put(out, _Weights())
            return
        new = _step(name, tag, place, (args, kwargs), out)
        if new is not None:
            self.tags.put(out, new)
        elif name not in LOOKS:
            self.stopped[name] += 1

    def _tagged(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Scores | _Weights] | tuple[None, None]:
        given = (
            list(args[0] if args else ()) if name in ("cat", "concat", "stack") and args else [*args, *kwargs.values()]
        )
        for x in given:
            tag = self.tags.get(x)
            if tag is not None:
                return x, tag
        return None, None

    def _multiplied(self, name: str, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        found = product(name, args, kwargs, out)
        if found is None or any(self.tags.get(x) is not None for x in found.operands):
            return
        assert isinstance(out, torch.Tensor)
        tag = Scores(product=found, frame=frame)
        if found.added is not None:
            tag = _lower(tag, found.added, out)
        self.tags.put(out, tag)

    def _write(self, args: tuple[Any, ...]) -> None:
        """x[index] = value, in place."""
        x, index, value = args
        tag = self.tags.get(x)
        if isinstance(tag, Scores) and _is_low(value):
            with torch.no_grad():
                more = torch.zeros_like(x, dtype=torch.bool)
                more[index] = True
            self.tags.put(x, tag.also_hidden(more, x))
        elif isinstance(self.tags.get(value), Scores):
            self.stopped["setitem"] += 1

    def _softmax(self, frame: Frame, tag: Scores, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        dim = dim % x.ndim if isinstance(dim, int) else x.ndim - 1
        if dim < x.ndim - 2:
            self.stopped[f"softmax over dimension {dim} of {x.ndim}"] += 1
            return
        where = tag.frame.shared_with(frame)
        self._report(where, _call(tag, x, where, turned=dim == x.ndim - 2))


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
    how = layout(shape, _hints(frame), _batch(frame))
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


def _batch(frame: Frame) -> int:
    return next((f.batch for f in frame.line() if f.batch), 0)


def _step(
    name: str, tag: Scores, x: Tensor | None, given: tuple[tuple[Any, ...], dict[str, Any]], out: Tensor
) -> Scores | None:
    """The tag of `name(…)` of tagged scores x, or None if what comes out are no scores any more."""
    assert x is not None
    args, kwargs = given
    if name in SHAPES:
        return _rearranged(name, tag, x, args, kwargs, out)
    if name == "tanh":
        return dataclasses.replace(tag, before_tanh=None if out is x else x)
    if name in _MASKS:
        return _MASKS[name](tag, x, args, kwargs, out)
    if name in ("max", "min"):
        return tag if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    if name not in CARRIES:
        return None
    factor = _factor(name, x, args, kwargs)
    if factor is None:
        return tag
    if tag.before_tanh is not None:
        return dataclasses.replace(tag, uncapped=tag.before_tanh * factor, cap=factor, before_tanh=None)
    return tag if tag.uncapped is not None else dataclasses.replace(tag, scale=tag.scale * factor)


def _factor(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The number that a multiplication or division by a constant applies."""
    if name not in ("mul", "multiply", "rmul", "div", "divide", "true_divide"):
        return None
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    if isinstance(other, torch.Tensor) and other.numel() == 1 and not isinstance(other, nn.Parameter):
        other = float(other.detach())
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        return None
    return 1.0 / other if "div" in name else float(other)


def _rearranged(
    name: str, tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Scores | None:
    """The tag after a view or an index: masks and logits before the cap move along."""
    method = getattr(torch.Tensor, "__getitem__" if name == "getitem" else name, None)
    op = torch.nn.functional.pad if name == "pad" else method or getattr(torch.ops.aten, name)

    def moved(part: Tensor | None) -> Tensor | None:
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
        tag, hidden=moved(tag.hidden), uncapped=moved(tag.uncapped), before_tanh=moved(tag.before_tanh), keys=keys
    )


def _lower(tag: Scores, mask: object, like: Tensor, sign: float = 1.0) -> Scores:
    """The tag after something was added: where it is very negative, a pair is hidden."""
    if not isinstance(mask, torch.Tensor) or mask.numel() == 1:
        return tag
    low = sign * mask.detach() <= HIDES
    return tag.also_hidden(low, like) if bool(low.any()) else tag


def _is_low(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and float(value.detach()) <= HIDES
    return isinstance(value, (int, float)) and value <= HIDES


def _added(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores:
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    return _lower(tag, other, out)


def _subtracted(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
    if not args or args[0] is not x:
        return None
    return _lower(tag, args[1] if len(args) > 1 else kwargs.get("other"), out, -1.0)


def _filled(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    return tag.also_hidden(mask, out) if isinstance(mask, torch.Tensor) and _is_low(value) else tag


def _chosen(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
    given = [*args, *kwargs.values()]
    if len(given) < 3:
        return None
    # torch.where(condition, a, b) and a.where(condition, b)
    condition, yes, no = given[:3] if given[0] is not x else (given[1], given[0], given[2])
    hidden = ~condition.bool() if yes is x else condition.bool()
    other = no if yes is x else yes
    if _is_low(other):
        return tag.also_hidden(hidden, out)
    if isinstance(other, torch.Tensor) and other.numel() > 1:
        return tag.also_hidden(hidden & (other.detach() <= HIDES), out)
    return tag


def _attached(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
    """cat: columns attached to the scores are sinks, which take weight and give no value."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim % out.ndim != out.ndim - 1:
        return None
    before = 0
    for part in args[0] if args else kwargs["tensors"]:
        if part is x:
            break
        before += part.shape[-1]
    after = out.shape[-1] - before - x.shape[-1]

    def padded(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return torch.nn.functional.pad(part.detach().broadcast_to(x.shape), (before, after))

    first, last = tag.keys or (0, x.shape[-1])
    return dataclasses.replace(
        tag, hidden=padded(tag.hidden), uncapped=padded(tag.uncapped), keys=(before + first, before + last)
    )


_Rule = Callable[[Scores, Tensor, tuple[Any, ...], dict[str, Any], Tensor], Scores | None]
_MASKS: dict[str, _Rule] = {
    "add": _added,
    "radd": _added,
    "iadd": _added,
    "sub": _subtracted,
    "subtract": _subtracted,
    "isub": _subtracted,
    "masked_fill": _filled,
    "where": _chosen,
    "cat": _attached,
    "concat": _attached,
}
