"""Products of queries and keys, and how views of the scores change which vectors of q and k a score is made of."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkeel.patching.autograd import base_of, is_wrapper
from qkeel.patching.modes import Args, Kwargs

PRODUCTS = frozenset({"matmul", "mm", "bmm", "baddbmm", "einsum"})

PERMUTATIONS = frozenset(
    {"moveaxis", "movedim", "permute", "swapaxes", "swapdims", "t", "transpose"}
)
RESHAPES = frozenset(
    {
        "flatten",
        "reshape",
        "reshape_as",
        "squeeze",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
PARTS = frozenset({"expand", "expand_as", "getitem", "narrow", "select"})
# Elements that are moved, repeated or picked, as for relative positions: which vectors make a score is then no longer
# followed.
SHIFTS = frozenset(
    {
        "flip",
        "gather",
        "index_select",
        "pad",
        "repeat",
        "repeat_interleave",
        "roll",
        "take_along_dim",
    }
)
VIEWS = PERMUTATIONS | RESHAPES | PARTS | SHIFTS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """The queries or keys of a product, as they were multiplied.

    `x` has one dimension for each dimension of the scores, of size 1 where the vector stays the same, and the features
    at the end, so that the scores are (q.x * k.x).sum(-1). It is a view of the factor where torch has one. `factor` is
    the tensor that was multiplied.
    """

    x: Float[Tensor, "*scores d"]
    factor: Tensor

    def varies(self, dim: int) -> bool:
        """True if the scores along this dimension are computed from different vectors."""
        return self.x.shape[dim] > 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product of two factors.

    Args:
        factors: the tensors that were multiplied.
        sides: the vectors of both factors, or None if they are unknown.
        table: whether a factor is a parameter or has two dimensions, as a weight has; the product then counts as scores
            only if it is added to other scores, as with relative positions.
        followed: False if the scores were shifted or picked, so that `sides` still have the form that they had before.
    """

    factors: tuple[Tensor, Tensor]
    sides: tuple[Operand, Operand] | None = None
    table: bool = False
    followed: bool = True

    def varying(self) -> list[tuple[bool, bool]]:
        """For each dimension of the scores, which of the two factors vary along it; nothing if they are unknown."""
        if self.sides is None:
            return []
        left, right = self.sides
        return [(left.varies(dim), right.varies(dim)) for dim in range(left.x.ndim - 1)]

    def has_pairs(self) -> bool:
        """True if there is a dimension of queries and one of keys, along each of which one factor alone varies."""
        return {(True, False), (False, True)} <= {*self.varying()}

    def may_be_keys(self, dim: int) -> bool:
        """True if a dimension may be one of keys, because one factor alone varies along it or because there is only one
        key."""
        return self.sides is not None and self.varying()[dim] != (True, True)

    def unknown(self) -> Product:
        """The product without its vectors."""
        return dataclasses.replace(self, sides=None, followed=False)

    def with_vectors(self, vectors: Iterable[Tensor]) -> Product:
        """The product after a change of its sides to these vectors."""
        assert self.sides is not None
        left, right = (
            Operand(x, side.factor) for x, side in zip(vectors, self.sides, strict=True)
        )
        return dataclasses.replace(self, sides=(left, right))


def is_weight(x: Tensor) -> bool:
    """True for a parameter or a view of one, as in a product with the matrices of all experts."""
    return isinstance(x, nn.Parameter) or isinstance(base_of(x), nn.Parameter)


def read_product(name: str, args: Args, kwargs: Kwargs, out: object) -> Product | None:
    """Returns the product that `name(*args, **kwargs)` computed, or None if no two activations, nor an activation and a
    table, were multiplied."""
    if not isinstance(out, Tensor) or out.ndim < 2:
        return None
    arguments = [*args]
    arguments += [
        value for key, value in kwargs.items() if key not in ("alpha", "beta", "out")
    ]
    factors = arguments[1:] if name in ("einsum", "baddbmm") else arguments
    if len(factors) == 1 and isinstance(factors[0], (tuple, list)):
        factors = list(factors[0])
    if len(factors) != 2 or not all(
        isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 for x in factors
    ):
        return None
    # A layer in 8-bit floats multiplies tensors of its own, which may support nothing but that product.
    if any(is_wrapper(x) and type(x).__name__ != "DTensor" for x in factors):
        return None
    first, second = factors
    # A matrix may be a table, such as the weight of a language model's head in another precision, or, where both are
    # and the product is square, the tokens of a single sequence.
    is_square = out.ndim == 2 and out.shape[0] == out.shape[1]
    least = 2 if is_square else 3
    active = [x.ndim >= least and not is_weight(x) for x in factors]
    if not any(active) and any(is_weight(x) for x in factors):
        return None
    sides = None
    letters = _letters(name, arguments[0], first, second, out.ndim)
    if letters is not None:
        of_first, of_second, of_scores = letters
        summed = _summed(letters)
        sides = (
            _operand(first, of_first, of_scores, summed),
            _operand(second, of_second, of_scores, summed),
        )
    return Product((first, second), sides, table=not all(active))


def _operand(x: Tensor, letters: str, of_scores: str, summed: Sequence[str]) -> Operand:
    """A factor with the dimensions of the scores, whose letters are `of_scores`, and the summed ones at the end."""
    sizes = dict(zip(letters, x.shape))
    order = [letters.index(y) for y in (*of_scores, *summed) if y in sizes]
    shape = [sizes.get(letter, 1) for letter in of_scores]
    width = math.prod([sizes[letter] for letter in summed])
    return Operand(x.permute(order).reshape(*shape, width), x)


def summed_dims(name: str, args: Args, x: Tensor, out: Tensor) -> list[int]:
    """The dimensions of x over which `out = name(*args)` sums, if x is one of its two factors and they are known."""
    factors = [y for y in args if isinstance(y, Tensor)]
    if len(factors) != 2:
        return []
    first, second = factors
    letters = _letters(name, args[0], first, second, out.ndim)
    if letters is None:
        return []
    of_x = letters[0] if first is x else letters[1]
    return [of_x.index(letter) for letter in _summed(letters)]


def _summed(letters: tuple[str, str, str]) -> list[str]:
    of_first, of_second, of_result = letters
    return [y for y in of_first if y in of_second and y not in of_result]


def _letters(
    name: str, equation: object, first: Tensor, second: Tensor, ndim: int
) -> tuple[str, str, str] | None:
    """The letters of the dimensions of both factors of a product and of its result, or None if they are not known."""
    if name == "einsum":
        return _einsum_letters(equation, first.ndim, second.ndim)
    batch = string.ascii_lowercase[: ndim - 2]
    of_first, of_second = batch[ndim - first.ndim :], batch[ndim - second.ndim :]
    return f"{of_first}TD", f"{of_second}DS", f"{batch}TS"


def _einsum_letters(
    equation: object, first: int, second: int
) -> tuple[str, str, str] | None:
    """The letters of the dimensions of both factors of an einsum and of its result, with those of an ellipsis; None if
    the equation names no result, or the result is not one of scores, because a letter is repeated, summed alone, or
    nothing is summed."""
    if not isinstance(equation, str):
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        return None
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    n_left = first - len(left.replace("...", ""))
    n_right = second - len(right.replace("...", ""))
    ellipsis = "".join(spare[: max(n_left, n_right, 0)])
    left = left.replace("...", ellipsis[len(ellipsis) - n_left :])
    right = right.replace("...", ellipsis[len(ellipsis) - n_right :])
    operands = left + right
    result = result.replace("...", ellipsis)
    summed = set(left) & set(right) - set(result)
    for letters in (left, right, result):
        if len(set(letters)) < len(letters):
            return None
    if not summed or set(operands) - summed != set(result):
        return None
    return left, right, result


# Products whose scores were viewed, added or joined


def view_function(name: str) -> Callable[..., Tensor]:
    """Returns the function of torch for a view of this name."""
    if name == "pad":
        return torch.nn.functional.pad
    return getattr(Tensor, "__getitem__" if name == "getitem" else name)


def viewed(
    product: Product, name: str, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor
) -> Product:
    """The product after `out = name(x, ...)`, one of VIEWS, was applied to its scores x."""
    if product.sides is None:
        return product
    left, right = product.sides
    if left.x.ndim != x.ndim + 1:
        return product.unknown()
    # Columns that are no keys, such as a sink, may have been attached to the scores.
    has_own_columns = max(left.x.shape[-2], right.x.shape[-2]) in (1, x.shape[-1])
    pair = None
    if name in RESHAPES and x.numel():
        pair = _reshaped(left.x, right.x, x.shape, out.shape)
    elif name in PERMUTATIONS or (
        name in PARTS and product.followed and has_own_columns
    ):
        index = args[1] if name == "getitem" else ()
        entries = index if isinstance(index, tuple) else (index,)
        # An index of tensors, lists or booleans copies, and the strides of a copy do not show along what a factor
        # varies.
        if not any(isinstance(entry, (Tensor, list, bool)) for entry in entries):
            function = view_function(name)
            pair = [
                _part(side.x, x, lambda y: function(y, *args[1:], **kwargs))
                for side in (left, right)
            ]
    if pair is None:
        return dataclasses.replace(product, followed=False)
    return product.with_vectors(pair)


def _part(factor: Tensor, x: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """A factor after a view of the scores x. It keeps the size 1 along what it does not vary along."""
    sizes = [n if m == 1 else m for n, m in zip(x.shape, factor.shape)]
    # The features are a dimension of their own, which the view does not know of.
    view_of_factor = torch.vmap(view, in_dims=-1, out_dims=-1)(
        factor.expand(*sizes, factor.shape[-1])
    )
    # Expanded dimensions have a stride of 0.
    for dim, step in enumerate(view_of_factor.stride()[:-1]):
        if step == 0 and view_of_factor.shape[dim] > 1:
            view_of_factor = view_of_factor.narrow(dim, 0, 1)
    return view_of_factor


def _reshaped(
    left: Tensor, right: Tensor, before: Sequence[int], after: Sequence[int]
) -> list[Tensor] | None:
    """Both factors after a reshape of the scores from `before` to `after`, or None if it mixes queries and keys."""
    shapes: list[list[int]] = [[], []]
    spread = [list(left.shape[:-1]), list(right.shape[:-1])]
    for old, new in _groups(before, after):
        size = math.prod(before[old])
        held = [math.prod(side.shape[:-1][old]) for side in (left, right)]
        if len(before[old]) == len(after[new]) == 1:
            # Factors may have another size here: of keys without a sink, or of positions before a shift.
            shapes[0].append(held[0])
            shapes[1].append(held[1])
            continue
        if held[0] not in (1, size) and held[1] not in (1, size):
            return None
        for i, n in enumerate(held):
            if n not in (1, size):
                if held[1 - i] != size:
                    return None
                # Keys that heads share are repeated where heads are merged with the batch.
                spread[i][old] = before[old]
            shapes[i] += [1 if n == 1 else m for m in after[new]]
    pair = zip((left, right), spread, shapes)
    return [
        x.expand(*wide, x.shape[-1]).reshape(*shape, x.shape[-1])
        for x, wide, shape in pair
    ]


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[slice, slice]]:
    """The smallest ranges of dimensions of two shapes that hold as many elements as each other."""
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        n = before[i] if i < len(before) else 1
        m = after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while n != m:
            if n < m:
                n *= before[i]
                i += 1
            else:
                m *= after[j]
                j += 1
        yield slice(start_i, i), slice(start_j, j)


def widened(product: Product, ndim: int) -> Product:
    """The product as a part of a sum of scores with `ndim` dimensions."""
    if product.sides is None or product.sides[0].x.ndim > ndim:
        return product
    missing = ndim + 1 - product.sides[0].x.ndim
    return product.with_vectors([side.x[(None,) * missing] for side in product.sides])
