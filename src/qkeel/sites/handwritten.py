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
from torch import Tensor

from qkeel.sites.carriers import CARRIES, LOOKS, SHAPES
from qkeel.sites.layout import fewest_keys, head_counts, layout
from qkeel.sites.products import PRODUCTS, product
from qkeel.sites.rules import MASKS, Scores, is_low, joined, lower, step
from qkeel.sites.scores import ScoresCall
from qkeel.sites.stack import Frame
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap


class _Weights:
    """Tag of a softmax output that is on its way to the values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Logarithm:
    """Tag of the logsumexp of scores x over their last dimension, or (`weights`) of x less it: log softmax."""

    of: Scores
    x: Tensor
    weights: bool


_CATS = ("cat", "concat")
_Tag = Scores | _Weights | _Logarithm


class Tags:
    """Tags by the identity of a tensor, gone with it. Never by its address, which batched tensors don't have."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], _Tag]] = {}

    def get(self, x: object) -> _Tag | None:
        """The tag of a tensor."""
        entry = self._of.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: Tensor, tag: _Tag) -> None:
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
            if name in CARRIES or name in SHAPES or name in MASKS or name in _CATS:
                self.tags.put(out, tag)
            return
        if self._logarithms(name, frame, tag, (*args, *kwargs.values()), out):
            return
        assert isinstance(tag, Scores)
        if name in ("softmax", "safe_softmax"):
            self._softmax(frame, tag, args, kwargs)
            self.tags.put(out, _Weights())
            return
        if name in _CATS:
            new = self._joined(args, kwargs, out)
        else:
            new = step(name, tag, place, (args, kwargs), out)
        if new is not None:
            self.tags.put(out, new)
        elif name not in LOOKS:
            self.stopped[name] += 1

    def _logarithms(
        self, name: str, frame: Frame, tag: Scores | _Logarithm, given: tuple[object, ...], out: Tensor
    ) -> bool:
        """Softmax written as exp(x - logsumexp(x)) or exp(log_softmax(x)); whether this call was a part of one."""
        x, second = (*given, None)[:2]
        if isinstance(tag, _Logarithm):
            if name == "exp" and tag.weights:
                self._softmax(frame, tag.of, (tag.x, -1), {})
                self.tags.put(out, _Weights())
            return True
        if name in ("logsumexp", "log_softmax") and isinstance(x, torch.Tensor) and second in (-1, x.ndim - 1):
            self.tags.put(out, _Logarithm(of=tag, x=x, weights=name == "log_softmax"))
            return True
        mass = self.tags.get(second)
        if name in ("sub", "subtract") and isinstance(mass, _Logarithm) and mass.x is x:
            self.tags.put(out, dataclasses.replace(mass, weights=True))
            return True
        return False

    def _joined(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
        tags = [(x, self.tags.get(x)) for x in (args[0] if args else kwargs["tensors"])]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return joined([(x, tag if isinstance(tag, Scores) else None) for x, tag in tags], dim, out)

    def _tagged(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, _Tag] | tuple[None, None]:
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
            tag = lower(tag, found.added, out)
        self.tags.put(out, tag)

    def _write(self, args: tuple[Any, ...]) -> None:
        """x[index] = value, in place."""
        x, index, value = args
        tag = self.tags.get(x)
        if isinstance(tag, Scores) and is_low(value):
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
