"""Logits that are a sum: scores added to scores, and what depends on the input and could not be followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.handwritten.products import Operand, Product, apart, is_weight
from qkeel.sites.handwritten.tags import Scores
from qkeel.sites.see.running_modules import Frame
from qkeel.sites.weights.autograd_walk import nodes_of

# Names of sums, with the sign of what is added, and of what it is added to.
SUMS = {
    **dict.fromkeys(("add", "radd", "iadd"), (1.0, 1.0)),
    **dict.fromkeys(("sub", "subtract", "isub"), (1.0, -1.0)),
    "rsub": (-1.0, 1.0),
}
# What makes other scores of scores where the other factor is a weight: a mixture of heads.
MIXTURES = frozenset({"conv1d", "conv2d", "conv3d", "linear", "einsum", "matmul"})
_LIMIT = 4000


def added(one: Scores, other: Scores, factors: tuple[float, float], out: Tensor, frame: Frame) -> Scores:
    """The tag of factors[0] · one + factors[1] · other, which is `out`, added up while `frame` was running."""
    lost = list(dict.fromkeys((*one.lost, *other.lost)))
    for tag in (one, other):
        if tag.uncapped is not None or tag.before_tanh is not None:
            lost.append("a part of it is capped before it is added")
    parts = [_part(p, factors[0], out) for p in one.parts]
    # What was mixed from these very products is no product besides them.
    known = {(id(a), id(b)) for a, b in (p.operands for p in one.parts)}
    ratio = factors[1] * other.scale / one.scale if one.scale else factors[1]
    for p in other.parts:
        if not other.lost or (id(p.operands[0]), id(p.operands[1])) not in known:
            parts.append(_part(p, ratio, out))
    plain = Scores(parts=tuple(parts), lost=tuple(lost), frame=_nearest(one, other, frame), scale=one.scale)
    plain = dataclasses.replace(plain, below=one.below or other.below)
    for tag in (one, other):
        if tag.hidden is not None:
            plain = plain.also_hidden(tag.hidden, out)
    return dataclasses.replace(plain, keys=one.keys or other.keys)


def _part(p: Product, factor: float, out: Tensor) -> Product:
    """A product as a part of `out`, which may have more dimensions than it."""

    def wide(side: Operand | None) -> Operand | None:
        if side is None or side.index is None:
            return side
        return dataclasses.replace(side, index=side.index.broadcast_to(out.shape))

    return dataclasses.replace(p, left=wide(p.left), right=wide(p.right), factor=p.factor * factor)


def _nearest(one: Scores, other: Scores, frame: Frame) -> Frame:
    """The innermost of the calls in which the products were made, as seen from where they are added up."""
    return max((tag.frame.shared_with(frame) for tag in (one, other)), key=lambda f: len(f.line()))


def factors_of(name: str, first: bool, kwargs: Kwargs) -> tuple[float, float]:
    """The factors of the tagged tensor and of the other one in `name(a, b, alpha=…)`; `first`: the tagged one is a."""
    alpha = kwargs.get("alpha", 1.0)
    a, b = SUMS[name]
    pair = (a * (alpha if name == "rsub" else 1.0), b * (1.0 if name == "rsub" else alpha))
    return pair if first else (pair[1], pair[0])


def mixed(name: str, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    """The tag of scores whose heads a weight has mixed; None if `name` does something else.

    Both factors of the product change along heads; along queries or keys one of them does, and what a weight mixes
    there, or where heads are concatenated, are no scores any more, but features.
    """
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a is not x]
    if name not in MIXTURES or not others or out.ndim != x.ndim or not is_weight(others[0]):
        return None
    dim = _summed_dim(name, x, args)
    pairs = [p.sides for p in tag.parts]
    if dim is None or not all(_are_heads(sides, dim) for sides in pairs):
        return None
    same = out.shape == x.shape
    parts = tag.parts if same else tuple(dataclasses.replace(p, left=None, right=None) for p in tag.parts)
    return Scores(
        parts=parts,
        lost=(*tag.lost, f"its heads are mixed by a weight ({name}) before the softmax"),
        frame=tag.frame,
        hidden=tag.hidden if same else None,
        scale=tag.scale,
        keys=tag.keys,
        below=tag.below,
    )


def _are_heads(sides: tuple[Operand, Operand] | None, dim: int) -> bool:
    """True if a dimension of scores is one of heads alone."""
    if sides is None or sides[0].varies(dim) != sides[1].varies(dim):
        return False
    return apart(sides, dim) or all(side.all_differ(dim) for side in sides)


def _summed_dim(name: str, x: Tensor, args: Args) -> int | None:
    """The dimension of x that `name(…)` sums over with a weight; None where that is not one."""
    if name.startswith("conv"):
        return x.ndim - 1 - int(name[4])
    if name != "einsum":
        return x.ndim - 1 if args[0] is x else x.ndim - 2
    given, _, result = str(args[0]).replace(" ", "").partition("->")
    letters = dict(zip((id(a) for a in args[1:]), given.split(","))).get(id(x), "")
    summed = [i for i, letter in enumerate(letters) if letter not in result]
    return summed[0] if len(summed) == 1 and len(letters) == x.ndim else None


def depends_on_input(x: object, tag: Scores, out: Tensor) -> bool:
    """True if what is added to scores was made of the same activations as these, as far as the graph shows.

    A bias or a mask was not. Where the module's input itself has no graph, a tensor that holds different numbers for
    each sequence is taken for one that was. Of what the scores were added to in place, `x` being `out`, the graph
    alone speaks.
    """
    node = x.grad_fn if isinstance(x, torch.Tensor) else None
    if x is out:
        node = next((before for before, _ in node.next_functions[:1]), None) if node is not None else None
    if not isinstance(x, torch.Tensor) or node is None:
        return False
    factors = [y.grad_fn for part in tag.parts for y in part.operands if y.grad_fn is not None]
    for frame in tag.frame.line():
        stops = nodes_of(frame.inputs)
        if own := _reached(factors, stops):
            return bool(_reached([node], own))
    own_numbers = x is not out and x.ndim == out.ndim and 1 < x.shape[0] == tag.frame.batch
    return own_numbers and not torch.equal(x.detach(), x.detach()[:1].expand_as(x))


def _reached(starts: Sequence[Node], stops: set[Node]) -> set[Node]:
    """Those of the nodes `stops` that are met first on the way back from `starts`."""
    seen: set[Node] = set()
    found: set[Node] = set()
    queue = list(starts) if stops else []
    while queue and len(seen) < _LIMIT:
        node = queue.pop()
        if node in stops:
            found.add(node)
        elif node not in seen:
            seen.add(node)
            queue += [n for n, _ in node.next_functions if n is not None]
    return found
