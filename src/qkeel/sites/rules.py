"""What becomes of tagged scores when a torch function takes them: masks, caps, views, columns attached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.sites.blockwise import HIDES
from qkeel.sites.carriers import CARRIES, SHAPES
from qkeel.sites.products import Product
from qkeel.sites.stack import Frame


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


def step(
    name: str, tag: Scores, x: Tensor | None, given: tuple[tuple[Any, ...], dict[str, Any]], out: Tensor
) -> Scores | None:
    """The tag of `name(…)` of tagged scores x, or None if what comes out are no scores any more."""
    assert x is not None
    args, kwargs = given
    if name in SHAPES:
        return _rearranged(name, tag, x, args, kwargs, out)
    if name == "tanh":
        return dataclasses.replace(tag, before_tanh=None if out is x else x)
    if name in MASKS:
        return MASKS[name](tag, x, args, kwargs, out)
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
    if out.dtype != x.dtype:
        return None  # the same bits read as other numbers
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


def lower(tag: Scores, mask: object, like: Tensor, sign: float = 1.0) -> Scores:
    """The tag after something was added: where it is very negative, a pair is hidden."""
    if not isinstance(mask, torch.Tensor) or mask.numel() == 1:
        return tag
    low = sign * mask.detach() <= HIDES
    return tag.also_hidden(low, like) if bool(low.any()) else tag


def is_low(value: object) -> bool:
    """Whether a number written over scores hides them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and float(value.detach()) <= HIDES
    return isinstance(value, (int, float)) and value <= HIDES


def _added(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores:
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    return lower(tag, other, out)


def _subtracted(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
    if not args or args[0] is not x:
        return None
    return lower(tag, args[1] if len(args) > 1 else kwargs.get("other"), out, -1.0)


def _filled(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    return tag.also_hidden(mask, out) if isinstance(mask, torch.Tensor) and is_low(value) else tag


def _chosen(tag: Scores, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Scores | None:
    given = [*args, *kwargs.values()]
    if len(given) < 3:
        return None
    # torch.where(condition, a, b) and a.where(condition, b)
    condition, yes, no = given[:3] if given[0] is not x else (given[1], given[0], given[2])
    hidden = ~condition.bool() if yes is x else condition.bool()
    other = no if yes is x else yes
    if is_low(other):
        return tag.also_hidden(hidden, out)
    if isinstance(other, torch.Tensor) and other.numel() > 1:
        return tag.also_hidden(hidden & (other.detach() <= HIDES), out)
    return tag


def joined(parts: Sequence[tuple[Tensor, Scores | None]], dim: int, out: Tensor) -> Scores | None:
    """cat: untagged columns attached to scores are sinks, which take weight and give no value.

    Several parts that are scores are one row of keys (global ones and those of a block).
    """
    if dim % out.ndim != out.ndim - 1:
        return None
    starts = [sum(x.shape[-1] for x, _ in parts[:n]) for n in range(len(parts) + 1)]
    scores = [(start, x, tag) for start, (x, tag) in zip(starts, parts) if tag is not None]
    keys = [start + place for start, x, tag in scores for place in tag.keys or (0, x.shape[-1])]

    def together(field: str, otherwise: Callable[[Tensor, Scores | None], Tensor]) -> Tensor | None:
        own = [None if tag is None else getattr(tag, field) for _, tag in parts]
        if all(o is None for o in own):
            return None
        return torch.cat(
            [otherwise(x, tag) if o is None else o.detach().expand_as(x) for o, (x, tag) in zip(own, parts)], dim=-1
        )

    return dataclasses.replace(
        scores[0][2],
        product=_side_by_side([tag.product for _, _, tag in scores]),
        hidden=together("hidden", lambda x, _: torch.zeros_like(x, dtype=torch.bool)),
        uncapped=together("uncapped", lambda x, tag: torch.zeros_like(x) if tag is None else x.detach()),
        keys=(min(keys), max(keys)),
    )


def _side_by_side(products: list[Product]) -> Product:
    """One product with the keys of all, where their other dimensions allow it."""
    first = products[0]
    if len(products) == 1:
        return first
    sides = [p.k for p in products if p.k is not None]
    if len(sides) < len(products) or len({k.ndim for k in sides}) > 1:
        return dataclasses.replace(first, k=None)
    lead = torch.broadcast_shapes(*(k.shape[:-2] for k in sides))
    return dataclasses.replace(first, k=torch.cat([k.expand(*lead, *k.shape[-2:]) for k in sides], dim=-2))


Rule = Callable[[Scores, Tensor, tuple[Any, ...], dict[str, Any], Tensor], Scores | None]
MASKS: dict[str, Rule] = {
    "add": _added,
    "radd": _added,
    "iadd": _added,
    "sub": _subtracted,
    "subtract": _subtracted,
    "isub": _subtracted,
    "masked_fill": _filled,
    "where": _chosen,
}
