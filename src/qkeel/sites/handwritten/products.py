"""Products of two activations that may be scores, and what their rows (q) and columns (k) are."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from qkeel.patching.graph_nodes import base_of
from qkeel.patching.modes import Args, Kwargs

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """The factors q [... t d] and k [... s d] with the dimensions of the scores, None where an einsum hides them."""

    q: Tensor | None
    k: Tensor | None
    operands: tuple[Tensor, Tensor]
    added: Tensor | None = None


def product(name: str, args: Args, kwargs: Kwargs, out: object) -> Product | None:
    """The product, if it is one of two activations: at least three dimensions each, neither a parameter."""
    if not isinstance(out, torch.Tensor) or out.ndim < 3:
        return None
    if name == "einsum":
        return _einsum(args)
    given = [*args, *kwargs.values()]
    added = given.pop(0) if name == "baddbmm" else None
    if len(given) < 2 or not _activations(given[0], given[1]):
        return None
    a, b = given[:2]
    return Product(q=a, k=b.mT, operands=(a, b), added=added)


def _activations(a: object, b: object) -> bool:
    return all(
        isinstance(x, torch.Tensor) and x.ndim >= 3 and x.is_floating_point() and not _is_weight(x) for x in (a, b)
    )


def _is_weight(x: Tensor) -> bool:
    """A parameter or a view of one, as in a product with every expert's matrix."""
    return isinstance(x, nn.Parameter) or isinstance(base_of(x), nn.Parameter)


def _einsum(args: Args) -> Product | None:
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not _activations(*operands):
        return None
    a, b = operands
    q, k = _rows_and_columns(args[0].replace(" ", ""), a, b)
    return Product(q=q, k=k, operands=(a, b))


def _rows_and_columns(equation: str, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The operands as [... t d] and [... s d], if the result is [... t s] and one index is summed over."""
    if "->" not in equation or "." in equation:
        return None, None
    given, result = equation.split("->")
    left, right = given.split(",")
    summed = [i for i in left if i in right and i not in result]
    if len(summed) != 1 or len(result) < 3:
        return None, None
    t, s, lead = result[-2], result[-1], result[:-2]
    if t not in left:
        a, b, left, right = b, a, right, left
    known = set(lead) | {t, s, *summed}
    if t not in left or s not in right or t in right or s in left or not set(left + right) <= known:
        return None, None

    def arranged(x: Tensor, names: str, own: str) -> Tensor:
        order = [names.index(i) for i in (*(i for i in lead if i in names), own, *summed)]
        x = x.permute(*order)
        for place, i in enumerate(lead):
            x = x if i in names else x.unsqueeze(place)
        return x

    return arranged(a, left, t), arranged(b, right, s)
