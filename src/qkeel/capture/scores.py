"""What hand-written attention does to its scores before their softmax: sums, masks, changes of shape, a softmax written
as exponentials divided by their sum, and operations through which scores cannot be tracked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from qkeel.capture.calls import APART, hides, is_low
from qkeel.capture.example import ModuleCall, tensors
from qkeel.capture.products import (
    ELEMENTWISE,
    Lost,
    Powers,
    Product,
    ProductOperand,
    RowTop,
    Scores,
    Tags,
    Weights,
    apart,
    is_weight,
    narrowed,
    operand,
    pad_arguments,
)
from qkeel.heads.site import UnrecognizedAttention
from qkeel.heads.walk import nodes_of, variable_of
from qkeel.patching.autograd import base_of
from qkeel.patching.modes import Args, Kwargs

# Addition and subtraction operators, with the signs of both operands.
SUMS = {
    **dict.fromkeys(("add", "radd", "iadd"), (1.0, 1.0)),
    **dict.fromkeys(("sub", "subtract", "isub"), (1.0, -1.0)),
    "rsub": (-1.0, 1.0),
}
# Functions that turn scores into other scores if the other factor is a weight, by mixing heads.
MIXTURES = frozenset({"conv1d", "conv2d", "conv3d", "linear", "einsum", "matmul"})
_LIMIT = 4000


def added(one: Scores, other: Scores, factors: tuple[float, float], out: Tensor, frame: ModuleCall) -> Scores:
    """The tag of `out` = factors[0] · one + factors[1] · other, a sum that was computed while `frame` was running."""
    lost = list(dict.fromkeys((*one.lost, *other.lost)))
    for tag in (one, other):
        if tag.uncapped is not None or tag.before_tanh is not None:
            lost.append("a term of the sum is capped before it is added")
    parts = [_part(p, factors[0], out) for p in one.parts]
    # Scores that are a mixture of these same products do not count as an additional product.
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
    """A product as a part of `out`, which may have more dimensions than the product."""

    def wide(side: ProductOperand | None) -> ProductOperand | None:
        if side is None or side.index is None:
            return side
        return dataclasses.replace(side, index=side.index.broadcast_to(out.shape))

    return dataclasses.replace(p, left=wide(p.left), right=wide(p.right), factor=p.factor * factor)


def _nearest(one: Scores, other: Scores, frame: ModuleCall) -> ModuleCall:
    """The innermost of the module calls in which the products were computed, as seen from the call in which they are
    added."""
    return max((tag.frame.shared_with(frame) for tag in (one, other)), key=lambda f: len(f.line()))


def factors_of(name: str, first: bool, kwargs: Kwargs) -> tuple[float, float]:
    """The factors of the tagged tensor and the other tensor in `name(a, b, alpha=…)`; `first` says whether the tagged
    tensor is a."""
    alpha = kwargs.get("alpha", 1.0)
    a, b = SUMS[name]
    pair = (a * (alpha if name == "rsub" else 1.0), b * (1.0 if name == "rsub" else alpha))
    return pair if first else (pair[1], pair[0])


def mixed(name: str, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    """The tag of scores whose heads were mixed by a weight, or None if `name` does something else.

    Both factors of the product vary along heads, but only one of them varies along queries or keys. If a weight mixes
    along queries or keys, or across concatenated heads, the result consists of features and no longer of scores.
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


def _are_heads(sides: tuple[ProductOperand, ProductOperand] | None, dim: int) -> bool:
    """True if a dimension of scores is a dimension of heads only."""
    if sides is None or sides[0].varies(dim) != sides[1].varies(dim):
        return False
    return apart(sides, dim) or all(side.all_differ(dim) for side in sides)


def _summed_dim(name: str, x: Tensor, args: Args) -> int | None:
    """The dimension of x that `name(…)` sums over with a weight, or None if it does not sum over exactly one."""
    if name.startswith("conv"):
        return x.ndim - 1 - int(name[4])
    if name != "einsum":
        return x.ndim - 1 if args[0] is x else x.ndim - 2
    given, _, result = str(args[0]).replace(" ", "").partition("->")
    letters = dict(zip((id(a) for a in args[1:]), given.split(","))).get(id(x), "")
    summed = [i for i, letter in enumerate(letters) if letter not in result]
    return summed[0] if len(summed) == 1 and len(letters) == x.ndim else None


def depends_on_input(x: object, tag: Scores, out: Tensor) -> bool:
    """True if the term added to scores depends on the same activations as the scores do, as far as the graph shows.

    A bias or a mask does not. If the module's input has no graph, a tensor is taken to depend on it if the parameters
    that produced the factors also produced the tensor, or if its values differ between sequences. If the term was added
    to the scores in place, so that `x` is `out`, only the graph is used.
    """
    node = x.grad_fn if isinstance(x, torch.Tensor) else None
    if x is out:
        node = next((before for before, _ in node.next_functions[:1]), None) if node is not None else None
    if not isinstance(x, torch.Tensor) or node is None:
        return False
    factors = [y.grad_fn for part in tag.parts for y in part.operands if y.grad_fn is not None]
    for frame in tag.frame.line():
        stops = nodes_of(frame.inputs)
        if own := reached(factors, stops):
            return bool(reached([node], own))
    parameters = _met(factors, lambda one: not one.next_functions)
    if reached([node], parameters):
        return True
    own_numbers = x is not out and x.ndim == out.ndim and 1 < x.shape[0] == tag.frame.batch
    return own_numbers and not torch.equal(x.detach(), x.detach()[:1].expand_as(x))


def reached(starts: Sequence[Node], stops: Set[Node]) -> set[Node]:
    """The nodes of `stops` that are reached first when following the graph back from `starts`, if the graph is of
    moderate size."""
    return _met(starts, stops.__contains__) if stops else set()


def is_projected(starts: Sequence[Node], stops: Set[Node]) -> bool:
    """True if a trained matrix is reached on the way back from `starts` to the nodes in `stops`."""

    def is_matrix(node: Node) -> bool:
        variable = variable_of(node)
        return variable is not None and variable.ndim > 1

    return bool(_met(starts, lambda node: node in stops or is_matrix(node)) - stops)


def _met(starts: Sequence[Node], stop: Callable[[Node], bool]) -> set[Node]:
    """The nodes at which the search back from `starts` stops, if the graph is of moderate size."""
    seen: set[Node] = set()
    found: set[Node] = set()
    queue = list(starts)
    while queue and len(seen) < _LIMIT:
        node = queue.pop()
        if stop(node):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            queue += [n for n, _ in node.next_functions if n is not None]
    return found


# --- The effect of masks on scores: values low enough to hide a pair, which are added, filled in or written in place


def hidden_by_sum(tag: Scores, mask: object, like: Tensor, sign: float = 1.0) -> Scores:
    """The tag of scores after adding `sign` times a mask, some of whose values hide pairs."""
    if not isinstance(mask, torch.Tensor) or mask.numel() == 1:
        return tag
    low = hides(sign * mask.detach())
    return tag.also_hidden(low, like) if bool(low.any()) else tag


def _added(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores:
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    return hidden_by_sum(tag, other, out, kwargs.get("alpha", 1) if args and args[0] is x else 1.0)


def _subtracted(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    if not args or args[0] is not x:
        return None
    return hidden_by_sum(tag, args[1] if len(args) > 1 else kwargs.get("other"), out, -kwargs.get("alpha", 1))


def _filled(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    return tag.also_hidden(mask, out) if isinstance(mask, torch.Tensor) and is_low(value) else tag


def _chosen(tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor) -> Scores | None:
    given = [*args, *kwargs.values()]
    if len(given) < 3:
        return None
    # This covers both torch.where(condition, a, b) and a.where(condition, b).
    condition, yes, no = given[:3] if given[0] is not x else (given[1], given[0], given[2])
    hidden = ~condition.bool() if yes is x else condition.bool()
    other = no if yes is x else yes
    if is_low(other):
        return tag.also_hidden(hidden, out)
    if isinstance(other, torch.Tensor) and other.numel() > 1:
        return tag.also_hidden(hidden & (other.detach() <= -APART), out)
    return tag


# From the tag of the scores, the scores, the arguments of the function and its output to the tag of the output
_Rule = Callable[[Scores, Tensor, Args, Kwargs, Tensor], Scores | None]

MASKS: Mapping[str, _Rule] = {
    **dict.fromkeys(("add", "radd", "iadd"), _added),
    **dict.fromkeys(("sub", "subtract", "isub"), _subtracted),
    "masked_fill": _filled,
    "where": _chosen,
}


def written(tag: Scores | None, x: Tensor, index: object, value: object, new: Scores | None) -> Scores | None:
    """The tag of scores x after x[index] = value, or None if x is not a tensor of scores or is no longer one.

    Args:
        tag: the tag of x, or None if it is not a tag of scores. x: the tensor after the write.
        index: the index that was written to.
        value: a value that hides pairs, or scores.
        new: the tag of the value, or None if it is not a tag of scores.
    """
    if tag is None or not (is_low(value) or (new is not None and _same_kind(tag, new))):
        return None
    hidden = None if new is None else new.hidden
    if new is None or hidden is not None or tag.hidden is not None:
        whole = torch.zeros_like(x, dtype=torch.bool) if tag.hidden is None else tag.hidden.expand_as(x).clone()
        whole[index] = new is None if hidden is None else hidden.expand_as(value)  # type: ignore[arg-type,index]
        hidden = whole
    if new is None or products_of(new) == products_of(tag):
        return dataclasses.replace(tag, hidden=hidden)
    if isinstance(value, Tensor) and value.shape == x.shape:
        return dataclasses.replace(new, hidden=hidden)
    return dataclasses.replace(
        tag, hidden=hidden, lost=(*tag.lost, "part of its scores is a sum of more products than the rest")
    )


def hidden_through_view(tags: Tags, x: Tensor, hidden: Tensor) -> None:
    """Marks those pairs of these scores as hidden that were hidden in place in a view x of the scores."""
    for y, tag in tags.of_scores():
        if y is x or base_of(x) is not (y if base_of(y) is None else base_of(y)):
            continue
        more, start = torch.zeros_like(y, dtype=torch.bool), x.storage_offset() - y.storage_offset()
        end = start + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if more.stride() == y.stride() and start >= 0 and end <= more.numel():
            more.as_strided(x.shape, x.stride(), start).copy_(hidden.expand_as(x))
            tags.put(y, tag.also_hidden(more, y))


def _same_kind(tag: Scores, new: Scores) -> bool:
    """True if the new scores are the old scores, possibly masked, or a sum of the old scores and others."""
    plain = all(part is None for one in (tag, new) for part in (one.uncapped, one.before_tanh, one.unshifted, one.keys))
    return plain and not new.lost and new.scale == tag.scale and products_of(tag) <= products_of(new)


def products_of(tag: Scores | Lost) -> set[tuple[int, int]]:
    """The factors of the products in scores, as pairs of object ids."""
    return {(id(a), id(b)) for a, b in (part.operands for part in tag.parts)}


# --- Scores after a view, an index or a concatenation, which is also applied to masks, logits before a cap and vectors

# Functions whose source elements depend on more than the dimensions, so that an expanded index would be written out in
# full.
_COPIES = frozenset({"as_strided", "flip", "gather", "index_select", "pad", "repeat", "roll", "take_along_dim"})


def rearranged(
    name: str, tag: Scores, x: Tensor, args: Args, kwargs: Kwargs, out: Tensor, *, whole: bool
) -> Scores | None:
    """The tag of `name(x, …)`, a view or an index. Unless `whole` is True, the vectors from which the scores are
    computed are tracked through views only, because anything else would write one index for every score."""
    more = (args[1:], kwargs)  # the arguments for masks
    if name == "pad":
        padding = pad_arguments(args, kwargs)
        low = is_low(padding.get("value"))
        more = (), {**padding, "value": float(low)}
        if low and tag.hidden is None:
            tag = tag.also_hidden(torch.zeros((), dtype=torch.bool, device=x.device), x)
    method = getattr(torch.Tensor, "__getitem__" if name == "getitem" else name, None)
    op: Callable[..., Tensor] = torch.nn.functional.pad if name == "pad" else method or getattr(torch.ops.aten, name)

    def taken(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        with torch.no_grad():
            part = part.broadcast_to(x.shape)
            if name == "as_strided":
                part = torch.empty_strided(x.shape, x.stride(), dtype=part.dtype, device=part.device).copy_(part)
            if part.dtype == torch.bool:
                return op(part.to(torch.uint8), *more[0], **more[1]).bool()
            return op(part, *args[1:], **kwargs)

    picked = name in _COPIES or (name == "getitem" and not _is_view(args))

    def side(factor: ProductOperand | None) -> ProductOperand | None:
        if factor is None or factor.index is None:
            return factor
        index = factor.index.broadcast_to(x.shape)
        index = index.to(x.device) if picked else index
        new = _index(name, index, taken, args, whole) if whole or not picked else None
        return dataclasses.replace(factor, index=new)

    keys = tag.keys
    if keys is not None and out.shape[-1] != x.shape[-1]:
        keys = keys if out.shape[-1] >= keys[1] else None
    return dataclasses.replace(
        tag,
        parts=tuple(dataclasses.replace(p, left=side(p.left), right=side(p.right)) for p in tag.parts),
        hidden=taken(tag.hidden),
        uncapped=taken(tag.uncapped),
        before_tanh=taken(tag.before_tanh),
        unshifted=taken(tag.unshifted),
        keys=keys,
    )


def _index(
    name: str, index: Tensor, taken: Callable[[Tensor | None], Tensor | None], args: Args, whole: bool
) -> Tensor | None:
    """The indices of the vectors, rearranged."""
    if name == "pad":
        return torch.nn.functional.pad(index, args[1], value=-1) if len(args) > 1 else None
    if name not in ("view", "reshape", "view_as", "reshape_as") or len(args) < 2:
        return taken(index)
    given = args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
    sizes = [*given] if isinstance(given, (tuple, list, torch.Size)) else [*args[1:]]
    try:
        return index.view(sizes)
    except RuntimeError:  # an expanded index cannot be viewed in this shape
        return index.reshape(sizes) if whole else None


def _is_view(args: Args) -> bool:
    """True if x[index] is a view, that is, if the index contains only slices, integers, None and an ellipsis."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(i is None or i is Ellipsis or isinstance(i, (slice, int)) for i in index)


CATS = ("cat", "concat")


def joined(parts: Sequence[tuple[Tensor, Scores | None]], dim: int, out: Tensor) -> Scores | None:
    """The tag of the result of cat on scores and untagged columns, or None if it attaches anything other than columns.

    Untagged columns are sinks, which receive weight but contribute no value. Several parts that are scores form one row
    of keys (for example global keys and those of a block).
    """
    if dim % out.ndim != out.ndim - 1:
        return None
    starts = [sum(x.shape[-1] for x, _ in parts[:n]) for n in range(len(parts))]
    scores = [(start, x, tag) for start, (x, tag) in zip(starts, parts) if tag is not None]
    keys = [start + place for start, x, tag in scores for place in tag.keys or (0, x.shape[-1])]

    def concatenated(field: str, otherwise: Callable[[Tensor, Scores | None], Tensor]) -> Tensor | None:
        own = [None if tag is None else getattr(tag, field) for _, tag in parts]
        if all(o is None for o in own):
            return None
        return torch.cat(
            [otherwise(x, tag) if o is None else o.detach().expand_as(x) for o, (x, tag) in zip(own, parts)], dim=-1
        )

    def itself(x: Tensor, tag: Scores | None) -> Tensor:
        return torch.zeros_like(x) if tag is None else x.detach()

    return dataclasses.replace(
        scores[0][2],
        parts=_side_by_side(parts, out),
        lost=tuple(dict.fromkeys(text for _, _, tag in scores for text in tag.lost)),
        hidden=concatenated("hidden", lambda x, _: torch.zeros_like(x, dtype=torch.bool)),
        uncapped=concatenated("uncapped", itself),
        unshifted=concatenated("unshifted", itself),
        keys=(min(keys), max(keys)),
    )


def _side_by_side(parts: Sequence[tuple[Tensor, Scores | None]], out: Tensor) -> tuple[Product, ...]:
    """The products of concatenated scores; if each part consists of one product, these are joined into one product with
    the vectors of all parts."""
    tags = [tag for _, tag in parts if tag is not None]
    sides = [tag.parts[0].sides for tag in tags if len(tag.parts) == 1]
    first = tags[0].parts[0]
    unknown = tuple(dataclasses.replace(p, left=None, right=None) for p in max((t.parts for t in tags), key=len))
    if len(sides) < len(tags) or any(pair is None for pair in sides):
        return unknown
    found = []
    for side in (0, 1):
        factors = [pair[side] for pair in sides if pair is not None]
        joint = _one_factor(parts, factors, out)
        if joint is None:
            return unknown
        found.append(joint)
    return (dataclasses.replace(first, left=found[0], right=found[1]),)


def _one_factor(
    parts: Sequence[tuple[Tensor, Scores | None]], factors: Sequence[ProductOperand], out: Tensor
) -> ProductOperand | None:
    """One factor with the vectors of several factors, or None if their vectors differ in size."""
    small = [narrowed(f.index).cpu() for f in factors if f.index is not None]
    first = factors[0]
    if all(f.x is first.x and torch.equal(small[0], s) for f, s in zip(factors, small)) and small[0].shape[-1] == 1:
        return dataclasses.replace(first, index=small[0].expand(out.shape))
    vectors = [f.vectors() for f in factors]
    if len({v.shape[1] for v in vectors}) > 1:
        return None
    lead = torch.broadcast_shapes(*(s.shape[:-1] for s in small))
    columns, each, start = [], iter(zip(small, vectors)), 0
    for x, tag in parts:
        if tag is None:
            columns.append(torch.full((*lead, x.shape[-1]), -1))
            continue
        index, own = next(each)
        columns.append(index.expand(*lead, x.shape[-1]) + start)
        start += len(own)
    return ProductOperand(x=torch.cat(vectors), summed=(1,), index=torch.cat(columns, -1).expand(out.shape))


# --- A softmax that is written out, as exponentials of scores minus the row's largest score or logsumexp, divided by
# their sum

OUTER = frozenset({"mul", "multiply"})


def row_top(name: str, x: Tensor, args: Args, kwargs: Kwargs) -> RowTop | None:
    """The tag of the result of `name(x, …)` on scores, if it is one value per row or one value for all rows."""
    last = over_last(x, args, kwargs)
    if name in ("amax", "max") and (last or (len(args) == 1 and "dim" not in kwargs)):
        return RowTop(False)
    return RowTop(True) if name == "logsumexp" and last else None


def over_last(x: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """True if a reduction is over the last dimension only."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and not isinstance(dim, bool) and dim % x.ndim == x.ndim - 1


def raised(name: str, tag: Powers, x: Tensor, args: Args, kwargs: Kwargs) -> Powers | None:
    """The tag of `name(…)` applied to exponentials x, some of which a mask may set to 0, or None if the result is not
    exponentials."""
    other = next((a for a in (*args, *kwargs.values()) if a is not x), None)
    if name == "masked_fill":
        value = kwargs.get("value", args[2] if len(args) > 2 else None)
        zero = isinstance(other, Tensor) and value == 0
        return dataclasses.replace(tag, scores=tag.scores.also_hidden(other, x)) if zero else None  # type: ignore[arg-type]
    if name in ("mul", "multiply") and isinstance(other, Tensor) and other.numel() > 1:
        # A mask of zeros and ones hides pairs; any other factor gives weights that are not those of a softmax.
        off = other == 0
        if bool((off | (other == 1)).all()):
            return dataclasses.replace(tag, scores=tag.scores.also_hidden(off, x))
        return None
    return tag if name in ELEMENTWISE and name not in ("div", "divide", "true_divide", "mul", "multiply") else None


def may_be_outer(args: Args) -> bool:
    """A quick test that returns False for most arguments that are not an outer product."""
    a, b = args if len(args) == 2 else (None, None)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return len(args) != 2  # passed by name
    n = a.ndim
    return n > 3 and b.ndim == n and (a.shape[-2] == 1 or b.shape[-2] == 1)


def outer(name: str, args: Args, kwargs: Kwargs, out: object) -> Product | None:
    """The outer product q[..., :, None, :] * k[..., None, :, :], before its sum over the last dimension."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if name not in OUTER or len(given) != 2 or not isinstance(out, torch.Tensor):
        return None
    a, b = given
    if a.ndim != b.ndim or a.ndim < 4 or a.shape[-1] != b.shape[-1]:
        return None
    if a.shape[-3] == 1 and b.shape[-2] == 1 and b.shape[-3] > 1:
        a, b = b, a
    if a.shape[-2] == 1 and b.shape[-3] == 1 and b.shape[-2] > 1:
        n = a.ndim - 1
        left, right = (operand(x, (n,), [*range(n)], out[..., 0]) for x in (a, b))
        return Product(left=left, right=right, operands=(a, b))
    return None


# --- Scores that an operation turned into something that is not understood, and the softmaxes over the result

SOFTMAXES = ("softmax", "safe_softmax", "log_softmax")
_FIRST = ("topk", "sort", "kthvalue")  # functions that return the values first, then their indices

# Descriptions of operations that are applied to scores before the softmax.
_WORDS: Mapping[str, str] = {
    "linear": "a linear map",
    "conv2d": "a convolution",
    "einsum": "an einsum with a weight",
    "matmul": "a product with a weight",
    "topk": "a selection of the largest",
    "scatter": "a selection of some elements, written into a new tensor",
    "sub of a number per row": "the subtraction of a number per row, as in a softmax over blocks of keys",
    "setitem": "writing into a tensor piece by piece",
}


class LostScores:
    """Tracks the results of operations after which scores are lost; `missed` lists the softmaxes over such results."""

    def __init__(self, tags: Tags) -> None:
        self.missed: list[UnrecognizedAttention] = []
        self.ends: dict[str, None] = {}  # the operations by which scores were lost
        self.weighed: set[tuple[int, int]] = set()  # the products that reached a softmax
        self._tags = tags

    def begin(self, name: str, frame: ModuleCall, tag: Scores, x: Tensor, out: object) -> None:
        """Records that `name(…)` turned tagged scores x into `out`, which no longer consists of scores."""
        self.ends[name] = None
        if x.ndim < 4 and not any(apart(part.sides) for part in tag.parts):
            return  # heads are concatenated, so these are features
        rows, columns = x.shape[-2:]
        if isinstance(out, Tensor) and out.shape[:-1] == x.shape[:-1]:
            columns = max(columns, out.shape[-1])  # some were chosen and written into a row of all columns
        first, others = name in _FIRST, _queries(tag, x)
        for part in (*tensors((out,)),)[: 1 if first else None]:
            lost = Lost(
                operation=name,
                frame=tag.frame,
                rows=rows,
                columns=part.shape[-1] if first else columns,
                others=others,
                parts=tag.parts,
            )
            self._put(part, lost)

    def product(self, name: str, given: Args, out: object) -> None:
        """Records that `name(…)` multiplied tensors; scores that are multiplied by weights are lost."""
        operands = list(tensors(given))
        for x in operands:
            tag = self._tags.get(x)
            others = [y for y in operands if y is not x]
            if isinstance(tag, (Scores, Lost)) and others and all(_is_weight(y) for y in others):
                if isinstance(tag, Scores):
                    self.begin(name, tag.frame, tag, x, out)
                else:
                    self.go_on(name, tag.frame, tag, out)

    def go_on(self, name: str, frame: ModuleCall, tag: Lost, out: object) -> None:
        """Records that `name(…)` turned a lost tensor into `out`; if `name` is a softmax or an exponential, the
        attention is recorded as missed."""
        weights = name in SOFTMAXES or name in ("exp", "exp2")
        if weights:
            self.weighed |= products_of(tag)
        if weights and not tag.doubtful:
            words = _WORDS.get(tag.operation, tag.operation)
            self.miss(frame.shared_with(tag.frame), tag.operation, f"its scores could not be followed beyond {words}")
        for part in tensors((out,)):
            if weights and not tag.doubtful:
                self._tags.put(part, Weights())
            elif weights:
                self._tags.drop(part)
            else:
                self._put(part, tag)

    def miss(self, frame: ModuleCall, operation: str, reason: str) -> None:
        """Records an attention that is not understood."""
        self.missed.append(UnrecognizedAttention(module=frame.name, operation=operation, reason=reason))

    def _put(self, out: Tensor, tag: Lost) -> None:
        if not tag.doubtful and tag.passes_to(out):
            self._tags.put(out, tag)
        elif tag.may_pass_to(out):
            self._tags.put(out, dataclasses.replace(tag, doubtful=True))
        else:
            self._tags.drop(out)


def _queries(tag: Scores, x: Tensor) -> frozenset[int]:
    """The sizes of the dimensions of scores, except the last, along which only one of the factors varies."""
    found = set[int]()
    for sides in (part.sides for part in tag.parts):
        if sides is not None:
            found |= {n for i, n in enumerate(x.shape[:-1]) if sides[0].varies(i) != sides[1].varies(i)}
    return frozenset(found)


def is_index(tags: Tags, tag: object, x: Tensor) -> bool:
    """True if a tensor with this tag holds scores of keys for queries, as a product of activations or as a result
    computed from one."""
    if isinstance(tag, Lost):
        return tag.may_pass_to(x) and x.shape[-1] == tag.columns
    if not isinstance(tag, Scores) or tag.table:
        return False
    made = [any([isinstance(tags.get(y), (Lost, Scores)) for y in part.operands]) for part in tag.parts]  # noqa: C419
    return any(made) or any([apart(part.sides) for part in tag.parts])  # noqa: C419


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or x.ndim < 3


def is_lost(tag: object) -> bool:
    """True if a tensor with this tag counts as untagged, except for results that are computed from it."""
    return tag is None or isinstance(tag, Lost)
