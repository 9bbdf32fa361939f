"""Products that may be attention scores, and the tags by which they are tracked from q kᵀ to a softmax."""

from __future__ import annotations

import dataclasses
import string
import weakref
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from qkeel.capture.example import ModuleCall
from qkeel.patching.autograd import base_of
from qkeel.patching.modes import Args, Kwargs

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductOperand:
    """A factor of a product: the tensor `x`, of which the dimensions `summed` are summed over in the product.

    `index` has the shape of the scores. For each score, it holds the index of the vector of x from which the score is
    computed, or -1 in columns that are not keys. Vectors are counted over the dimensions of x that are not summed.
    Along dimensions in which the vector stays the same, `index` is an expanded view. It is on the CPU unless scores
    were picked by indices, so reading it does not wait for another device. It is None if an operation on the scores has
    made the vectors unknown.
    """

    x: Tensor
    summed: tuple[int, ...]
    index: Int64[Tensor, ...] | None

    def vectors(self) -> Float[Tensor, "n d"]:
        """The vectors to which `index` refers, one per row."""
        arranged = self._arranged()
        return arranged.reshape(-1, arranged.shape[-1])

    def picked(self, index: Int64[Tensor, ...]) -> Float[Tensor, "... d"]:
        """The vectors at these indices; if the indices select all vectors in order, the factor itself without a
        copy."""
        arranged, flat = self._arranged(), index.reshape(-1)
        n = arranged.shape[:-1].numel()
        if len(flat) == n and torch.equal(flat, torch.arange(n, device=flat.device)):
            return arranged if arranged.shape[:-1] == index.shape else arranged.reshape(*index.shape, -1)
        return self.vectors()[flat.clamp_min(0)].view(*index.shape, -1)

    def _arranged(self) -> Tensor:
        """The factor with the summed dimensions moved to the end and merged into one."""
        kept = [i for i in range(self.x.ndim) if i not in self.summed]
        x = self.x.permute(*kept, *self.summed)
        return x if len(self.summed) == 1 else x.flatten(len(kept))

    def all_differ(self, dim: int) -> bool:
        """True if no two scores along this dimension are computed from the same vector."""
        assert self.index is not None
        along = narrowed(self.index).movedim(dim, 0).flatten(1)[:, 0]
        return along.unique().numel() == self.index.shape[dim]

    def varies(self, dim: int) -> bool:
        """True if the scores along this dimension are computed from different vectors."""
        assert self.index is not None
        small = narrowed(self.index)
        return small.shape[dim] > 1 and not bool((small == small.narrow(dim, 0, 1)).all())


def narrowed(index: Tensor) -> Tensor:
    """Returns an expanded tensor with size 1 along each dimension that it was expanded over."""
    for dim, step in enumerate(index.stride()):
        if step == 0 and index.shape[dim] > 1:
            index = index.narrow(dim, 0, 1)
    return index


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """A product of two factors, which are both None if the product could not be read.

    `operands` are the tensors that were multiplied, and `added` is the tensor that baddbmm adds. `table` is True if one
    factor is a parameter or has two dimensions, as a weight does; the product then counts as scores only if it is added
    to other scores. `factor` is its coefficient in the sum that it is part of.
    """

    left: ProductOperand | None
    right: ProductOperand | None
    operands: tuple[Tensor, Tensor]
    added: Tensor | None = None
    table: bool = False
    factor: float = 1.0

    @property
    def sides(self) -> tuple[ProductOperand, ProductOperand] | None:
        """Both factors, if it is known which vectors of each factor produce each score."""
        if self.left is None or self.right is None or self.left.index is None or self.right.index is None:
            return None
        return self.left, self.right


def apart(sides: tuple[ProductOperand, ProductOperand] | None, but: int | None = None) -> bool:
    """True if, apart from dimension `but`, there is a query dimension and a key dimension, that is, two dimensions
    along each of which only one of the factors varies."""
    if sides is None or (index := sides[0].index) is None:
        return False
    changes = {(sides[0].varies(i), sides[1].varies(i)) for i in range(index.ndim) if i != but}
    return {(True, False), (False, True)} <= changes


def along_keys(sides: tuple[ProductOperand, ProductOperand] | None, dim: int) -> bool:
    """True if a dimension may be a key dimension, because only one of the factors varies along it or because there is
    only one key."""
    if sides is None or (index := sides[0].index) is None:
        return False
    return index.shape[dim] == 1 or sides[0].varies(dim) != sides[1].varies(dim)


def product(name: str, args: Args, kwargs: Kwargs, out: object) -> Product | None:
    """The product, if it multiplies two activations or an activation and a table."""
    if not isinstance(out, torch.Tensor) or out.ndim < 3:
        return None
    if name == "einsum":
        return _einsum(args, out)
    given = [*args, *(v for n, v in kwargs.items() if n not in ("alpha", "beta"))]
    added = given.pop(0) if name == "baddbmm" else None
    if kwargs.get("beta", 1.0) == 0:
        added = None  # torch does not read this tensor, which may be uninitialised memory
    if len(given) < 2:
        return None
    a, b = given[:2]
    kind = _kind(a, b)
    if kind is None or a.ndim < 2 or b.ndim < 2:
        return None
    n = out.ndim
    left = operand(a, (a.ndim - 1,), [*range(n - a.ndim, n - 1)], out)
    right = operand(b, (b.ndim - 2,), [*range(n - b.ndim, n - 2), n - 1], out)
    factor = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
    return Product(left=left, right=right, operands=(a, b), added=added, table=kind == "table", factor=factor)


def operand(x: Tensor, summed: tuple[int, ...], places: Sequence[int], out: Tensor) -> ProductOperand:
    """The factor x of `out`, where the dimensions of x that are not summed over correspond to the dimensions `places`
    of `out`."""
    index = torch.zeros((1,) * out.ndim, dtype=torch.int64)
    kept = [i for i in range(x.ndim) if i not in summed]
    step = 1
    for dim, place in zip(reversed(kept), reversed(places)):
        n = x.shape[dim]
        if n > 1:
            shape = [n if i == place else 1 for i in range(out.ndim)]
            index = index + step * torch.arange(n).view(shape)
        step *= n
    return ProductOperand(x=x, summed=summed, index=index.expand(out.shape))


def is_weight(x: object) -> bool:
    """True for a parameter or a view of one, as in a product with the matrices of all experts."""
    return isinstance(x, nn.Parameter) or (isinstance(x, torch.Tensor) and isinstance(base_of(x), nn.Parameter))


def _kind(a: object, b: object) -> str | None:
    """ "scores" for two activations, "table" for an activation and a possible weight, None for anything else."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    if not (a.is_floating_point() and b.is_floating_point()):
        return None
    active = [x.ndim >= 3 and not is_weight(x) for x in (a, b)]
    if all(active):
        return "scores"
    return "table" if any(active) else None


def _einsum(args: Args, out: Tensor) -> Product | None:
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2:
        return None
    a, b = operands
    kind = _kind(a, b)
    if kind is None:
        return None
    read = _letters(args[0].replace(" ", ""), a.ndim, b.ndim)
    left = right = None
    if read is not None:
        first, second, result = read
        summed = set(first) & set(second) - set(result)
        known = all(len(set(x)) == len(x) for x in read) and set(first) | set(second) <= set(result) | summed
        if known and summed:
            left, right = (_named(x, own, summed, result, out) for x, own in ((a, first), (b, second)))
    return Product(left=left, right=right, operands=(a, b), table=kind == "table")


def _named(x: Tensor, letters: str, summed: set[str], result: str, out: Tensor) -> ProductOperand:
    places = [result.index(i) for i in letters if i not in summed]
    order = sorted(summed)
    return operand(x, tuple(letters.index(i) for i in order), places, out)


def _letters(equation: str, first: int, second: int) -> tuple[str, str, str] | None:
    """The letters of the dimensions of both operands and of the result, including those of an ellipsis."""
    given, arrow, result = equation.partition("->")
    left, comma, right = given.partition(",")
    if not comma or "," in right:
        return None
    spare = [c for c in string.ascii_letters if c not in equation]
    wide = max(first - len(left.replace("...", "")), second - len(right.replace("...", "")), 0)
    rest = "".join(spare[:wide])

    def full(letters: str, ndim: int) -> str:
        n = ndim - len(letters.replace("...", ""))
        return letters.replace("...", rest[len(rest) - n :] if n else "")

    left, right = full(left, first), full(right, second)
    if not arrow:
        result = rest + "".join(sorted(i for i in set(left + right) if (left + right).count(i) == 1 and i not in rest))
    return left, right, result.replace("...", rest)


# --- Tags of the tensors between q kᵀ and a softmax, which say what is known about each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """A tag for a tensor of scores: its origin, its hidden pairs, the logits before a cap, and which columns are keys.

    `parts` are the products whose sum the scores are, and `lost` says what else the scores contain that could not be
    tracked. `before_tanh` is the input of a tanh whose factor has not been applied yet. `keys` is the range of columns
    that are keys, if other columns (sinks) were attached. `unshifted` holds the scores before each row's largest score
    or, if `normalised` is True, its logsumexp was subtracted. `below` is True if a function mode alone does not see all
    operations on the scores.
    """

    parts: tuple[Product, ...]
    frame: ModuleCall
    lost: tuple[str, ...] = ()
    hidden: Tensor | None = None
    uncapped: Tensor | None = None
    cap: float | None = None
    before_tanh: Tensor | None = None
    scale: float = 1.0
    keys: tuple[int, int] | None = None
    unshifted: Tensor | None = None
    normalised: bool = False
    below: bool = False

    @property
    def table(self) -> bool:
        """True if the tensor is not a tensor of scores by itself, but contains only products with a possible weight."""
        return all(part.table for part in self.parts)

    def also_hidden(self, more: Tensor, like: Tensor) -> Scores:
        """Returns the tag with more pairs hidden."""
        more = more.to(torch.bool).broadcast_to(like.shape)
        return dataclasses.replace(self, hidden=more if self.hidden is None else self.hidden | more)


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Tag for a softmax output that is on its way to the values; `site` is None if the attention could not be read."""

    site: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RowTop:
    """Tag for the largest score of each row, or for its logsumexp, after whose subtraction the exponentials sum to 1.

    `normalises` is True for the logsumexp, and `negative` if the tensor holds that value times −1.
    """

    normalises: bool
    negative: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShiftedOne:
    """Tag for exp(−m), where m is the largest score of each row. This is the constant of softmax plus one when the
    exponentials are those of the scores minus m."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Tag for exponentials of scores x, which become softmax weights once divided by their row sum.

    `totals` is empty or holds the tag of this sum.
    """

    scores: Scores
    x: Tensor
    totals: list[RowSum] = dataclasses.field(default_factory=list, init=False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSum:
    """Tag for a row's sum of exponentials. `constant` is the constant added to it, which is the exponential of a logit
    without a value."""

    powers: Powers
    exponentials: Tensor
    constant: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost:
    """Tag for the result of an operation on scores that is not understood; a softmax over the result is still
    attention.

    `rows` and `columns` are the numbers of queries and keys of the scores; a tensor without dimensions of these sizes
    is something else. `others` are further possible numbers of queries, because a product does not distinguish heads
    from queries if all heads share their keys. `doubtful` is True if only a size in `others` still occurs, so that a
    softmax over the tensor is not certain to be attention. `frame` is the module call in which the product was made,
    `parts` are the products.
    """

    operation: str
    frame: ModuleCall
    rows: int
    columns: int
    others: frozenset[int] = frozenset()
    parts: tuple[Product, ...] = ()
    doubtful: bool = False

    def passes_to(self, out: Tensor) -> bool:
        """True if a tensor may still hold one value per query and key."""
        return self._has(out, self.rows)

    def may_pass_to(self, out: Tensor) -> bool:
        """True if a tensor may hold one value per query and key for any of the possible numbers of queries."""
        return any([self._has(out, n) for n in (self.rows, *self.others)])  # noqa: C419

    def _has(self, out: Tensor, rows: int) -> bool:
        sizes = list(out.shape)
        if rows not in sizes or not out.is_floating_point():
            return False
        sizes.remove(rows)
        return self.columns in sizes and out.ndim > 2


# A Product by itself is the tag of the elementwise products q·k before the sum over a head's dimensions.
Tag = Scores | Product | RowTop | ShiftedOne | Powers | RowSum | Weights | Lost


class Tags:
    """Tags keyed by the identity of a tensor and dropped together with it. Batched tensors have no address that could
    serve as a key."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}
        self.weights: list[Tensor] | None = None  # all tensors that were tagged as weights, if they are kept

    def get(self, x: object) -> Tag | None:
        """The tag of a tensor."""
        entry = self._of.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: Tensor, tag: Tag) -> None:
        """Tags a tensor."""
        key, table = id(x), self._of

        def forget(dead: weakref.ref[Tensor]) -> None:
            entry = table.get(key)
            if entry is not None and entry[0] is dead:
                del table[key]

        self._of[key] = (weakref.ref(x, forget), tag)
        if self.weights is not None and isinstance(tag, Weights):
            self.weights.append(x)

    def of_scores(self) -> list[tuple[Tensor, Scores]]:
        """The tensors of scores that still exist, and their tags."""
        alive = [(ref(), tag) for ref, tag in self._of.values()]
        return [(x, tag) for x, tag in alive if x is not None and isinstance(tag, Scores)]

    def drop(self, x: Tensor) -> None:
        """Drops the tag of a tensor."""
        self._of.pop(id(x), None)

    def __bool__(self) -> bool:
        return bool(self._of)

    def clear(self) -> None:
        """Drops all tags."""
        self._of.clear()


# --- The names of the torch functions that turn scores into scores, and of those that only read scores

# Elementwise functions, whose output is the same scores, scaled or cast.
ELEMENTWISE = frozenset(
    {
        *("div", "divide", "mul", "multiply", "neg", "rmul", "true_divide"),  # by a constant
        *("clamp", "clamp_max", "clamp_min", "clip", "maximum", "minimum", "nan_to_num", "softcap"),  # within bounds
        *("bfloat16", "double", "float", "half", "to", "type", "type_as"),  # to another dtype
        *("alias", "clone", "contiguous", "cpu", "cuda", "detach", "positive", "requires_grad"),  # unchanged
        *("alpha_dropout", "dropout"),
    }
)

# Views and indices, which are applied to masks too.
VIEWS = frozenset(
    {
        *("flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"),  # other sizes
        *("moveaxis", "movedim", "permute", "swapaxes", "swapdims", "t", "transpose"),  # another order of dimensions
        *("as_strided", "getitem", "narrow", "select", "slice"),  # a part, as a view
        *("gather", "index_select", "take_along_dim"),  # some elements, by their indices
        *("expand", "expand_as", "pad", "repeat"),  # more elements
        *("flip", "roll"),  # in another order
    }
)

# Functions whose output is something else, while the scores themselves are still tracked.
READS = frozenset(
    {
        *("dim", "get", "numel", "size", "stride"),
        *("all", "any", "eq", "ge", "gt", "isinf", "isnan", "le", "lt", "ne"),
        *("amax", "amin", "max", "mean", "min", "sum"),
    }
)


def pad_arguments(args: Args, kwargs: Kwargs) -> dict[str, object]:
    """The arguments of pad(input, pad, mode, value) by name, except for the tensor."""
    return dict(zip(("pad", "mode", "value"), args[1:])) | {n: x for n, x in kwargs.items() if n != "input"}
