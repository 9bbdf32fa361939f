"""Attention that is written by hand, traced from q kᵀ to the softmax.

A product of two activations gets a tag. Operations that scale, mask, cap, cast or rearrange scores pass the tag on. A
softmax whose input has the tag is attention; its output is tagged as weights, so that the product with the values does
not count as scores. Any other operation on scores tags its output as lost, and a lost tensor that is normalised and
multiplied with values is an attention that is missed.

Statistics are computed from the input of the softmax and from the masks that were met on the way, and never from
q·k·scale computed again, because a scale or a bias may be applied anywhere.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.graph import Node

from qkeel.capture.calls import (
    APART,
    HIDES,
    HeadLayout,
    ScoresCall,
    fewest_keys,
    head_counts,
    hides,
    is_low,
    layout,
)
from qkeel.capture.example import ModuleCall, tensors
from qkeel.capture.products import (
    PRODUCTS,
    VIEWS,
    Operand,
    Product,
    is_weight,
    joined,
    read_product,
    view_function,
    viewed,
    widened,
)
from qkeel.functional.norms import wide
from qkeel.heads.rows import Sides, layout_of
from qkeel.heads.site import UnrecognizedAttention
from qkeel.heads.walk import nodes_of, variable_of
from qkeel.patching.autograd import base_of, is_wrapper, saved_factor
from qkeel.patching.modes import Args, Kwargs
from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap

SMALLEST_CONSTANT = 1e-5  # a larger constant added to a sum of exponentials is more than a guard against 0 / 0
_GRAPH_LIMIT = 4000  # nodes of autograd's graph that are visited in search of an input

# The tags of tensors between the product and the values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """A tensor of scores.

    Args:
        products: the products whose sum the scores are.
        frame: the module call in which they were made.
        scale: the constant by which the products were multiplied.
        lost: what else the scores contain, which could not be traced.
        hidden: the pairs that masks have hidden, or None.
        uncapped: the logits before a tanh cap, and `cap` its bound.
        before_tanh: the input of a tanh whose factor has not been applied yet.
        keys: the range of columns that are keys, if others, such as a sink, were attached.
        unshifted: the scores before each row's largest or its logsumexp was subtracted.
        normalised: whether it was the logsumexp, so that the exponentials are weights.
    """

    products: tuple[Product, ...]
    frame: ModuleCall
    scale: float = 1.0
    lost: tuple[str, ...] = ()
    hidden: Tensor | None = None
    uncapped: Tensor | None = None
    cap: float | None = None
    before_tanh: Tensor | None = None
    keys: tuple[int, int] | None = None
    unshifted: Tensor | None = None
    normalised: bool = False

    @property
    def is_flat(self) -> bool:
        """True if the scores have no dimension besides queries and keys, or may be features of a weight's copy."""
        return self.products[0].flat

    @property
    def only_tables(self) -> bool:
        """True if all products have a possible weight as a factor, so that they are features by themselves."""
        return all(product.table for product in self.products)

    def hiding(self, mask: Tensor, like: Tensor) -> Scores:
        """The tag with more pairs hidden."""
        mask = mask.to(torch.bool).broadcast_to(like.shape)
        return dataclasses.replace(
            self, hidden=mask if self.hidden is None else self.hidden | mask
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a site on their way to the values. `site` is None if they could not be read; `reason` says why
    this has not been reported yet."""

    site: str | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RowTop:
    """The largest score of each row, or its logsumexp, after whose subtraction the exponentials sum to one."""

    normalises: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Exponentials of scores x, which become weights once they are divided by their sum."""

    scores: Scores
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSum:
    """The sums of the rows of exponentials."""

    powers: Powers
    exponentials: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost:
    """The result of an operation on scores that is not understood.

    `columns` is the number of keys, and `rows` are the possible numbers of queries, because a product does not tell
    heads from queries if all heads share their keys. A tensor without dimensions of these sizes is something else.
    `is_foreign` is True for a softmax over scores that no product of queries and keys was seen to make.
    """

    operation: str
    frame: ModuleCall
    rows: frozenset[int]
    columns: int
    products: tuple[Product, ...] = ()
    is_foreign: bool = False

    def holds(self, x: Tensor) -> bool:
        """True if a tensor may hold one value per query and key."""
        if x.ndim < 3 or not x.is_floating_point() or self.columns not in x.shape:
            return False
        sizes = list(x.shape)
        sizes.remove(self.columns)
        return not self.rows.isdisjoint(sizes)


Tag = Scores | Weights | RowTop | Powers | RowSum | Lost


class Tags:
    """Tags by the identity of a tensor, which end with it. Batched tensors have no address that could be a key."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}

    def get(self, x: object) -> Tag | None:
        """The tag of a tensor."""
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: Tensor, tag: Tag) -> None:
        """Tags a tensor."""
        key, entries = id(x), self._entries

        def forget(reference: weakref.ref[Tensor]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is reference:
                del entries[key]

        entries[key] = (weakref.ref(x, forget), tag)

    def drop(self, x: Tensor) -> None:
        """Drops the tag of a tensor."""
        self._entries.pop(id(x), None)

    def scores(self) -> Iterator[tuple[Tensor, Scores]]:
        """The tensors of scores that still exist, with their tags."""
        for reference, tag in list(self._entries.values()):
            x = reference()
            if x is not None and isinstance(tag, Scores):
                yield x, tag

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """Drops all tags."""
        self._entries.clear()


# Names of functions, without outer underscores

_SCALES = frozenset({"mul", "multiply", "rmul", "div", "divide", "true_divide"})
_BOUNDS = frozenset(
    {"clamp", "clamp_max", "clamp_min", "clip", "maximum", "minimum", "nan_to_num"}
)
_CASTS = frozenset(
    {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as"}
)
_COPIES = frozenset(
    {"alias", "clone", "contiguous", "detach", "positive", "requires_grad"}
)
_DROPOUTS = frozenset({"alpha_dropout", "dropout"})
# The output is the same scores, scaled, within bounds, cast or copied.
ELEMENTWISE = _SCALES | _BOUNDS | _CASTS | _COPIES | _DROPOUTS | {"neg"}
# The output is something else, and the scores go on.
_READS = frozenset(
    {
        *("dim", "get", "numel", "size", "stride"),
        *("all", "any", "eq", "ge", "gt", "isinf", "isnan", "le", "lt", "ne"),
        *("amax", "amin", "max", "mean", "min", "sum"),
    }
)
# The output has the shape of the scores, and nothing else of them.
_FACTORIES = frozenset(
    {
        "empty_like",
        "full_like",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "zeros_like",
    }
)
_JOINS = frozenset({"cat", "concat"})
_MASKS = frozenset({"masked_fill", "where"})
_CHOICES = frozenset(
    {"topk", "sort", "kthvalue"}
)  # they return the values first, then their indices
_FOREIGN = "values of several positions are weighted by a softmax of scores that are no products of queries and keys"
_SOFTMAXES = frozenset({"softmax", "safe_softmax", "log_softmax"})
# The signs of both operands.
_SUMS = {
    **dict.fromkeys(("add", "radd", "iadd"), (1.0, 1.0)),
    **dict.fromkeys(("sub", "subtract", "isub"), (1.0, -1.0)),
    "rsub": (-1.0, 1.0),
}
_PASSES = (
    ELEMENTWISE | VIEWS | _MASKS | _JOINS | _SUMS.keys()
)  # what weights go through on their way to the values
_DEPENDS = "a term added to its scores depends on the input and is not a product"
_FLAT = (
    "its scores have two dimensions, which says nothing of heads and of the batch; call the model with a batch "
    "dimension, as in x[None]"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A call of a torch function in a pass, with its name without outer underscores, and what it returned."""

    name: str
    frame: ModuleCall
    args: Args
    kwargs: Kwargs
    out: Any

    def argument(self, name: str, position: int, default: object = None) -> Any:
        """The argument of this name or at this position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def arguments(self) -> list[Any]:
        """All arguments; those of a concatenation are the tensors that it joins."""
        if self.name in _JOINS or self.name == "stack":
            return list(self.argument("tensors", 0))
        return [*self.args, *self.kwargs.values()]

    def other(self, x: Tensor) -> Any:
        """The other operand of a function of two."""
        for key, value in (*enumerate(self.args), *self.kwargs.items()):
            if value is not x and key not in ("alpha", "out"):
                return value
        return x

    def is_over_last(self, x: Tensor) -> bool:
        """True for a reduction over the last dimension of x only."""
        dim = self.argument("dim", 1)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        return type(dim) is int and dim % x.ndim == x.ndim - 1

    def constant(self, x: Tensor) -> float | None:
        """The constant by which a function multiplies x, or None if it does not, or by a tensor."""
        if self.name not in _SCALES:
            return None
        other = self.other(x)
        if (
            isinstance(other, Tensor)
            and other.numel() == 1
            and not isinstance(other, nn.Parameter)
        ):
            other = float(other.detach())
        if isinstance(other, bool) or not isinstance(other, (int, float)):
            return None
        return 1.0 / other if "div" in self.name else float(other)


class EagerAttentionTracer:
    """Reads every call of a torch function in a forward pass and reports the softmaxes that are attention.

    Args:
        report: called with every attention call; returns the site's name.
        known: returns the layout of the scores whose softmax a module computes, if it is known.
        names: the names of parameters by identity in a probe, where the graph shows which dimensions are heads. None if
            there is no graph.
        valued: called with the name of a site and the tensor by which its weights are multiplied.
        chose: called with scores of which the largest are chosen, and with their tag.
    """

    def __init__(
        self,
        report: Callable[[ModuleCall, ScoresCall], str | None],
        known: Callable[[ModuleCall], HeadLayout | None] = lambda frame: None,
        names: dict[int, str] | None = None,
        valued: Callable[[str, Tensor], None] = lambda site, values: None,
        chose: Callable[[ModuleCall, Scores | Lost, Tensor], None] | None = None,
    ) -> None:
        self.tags = Tags()
        self.multiplied = (
            False  # whether two activations were multiplied with each other
        )
        self.missed: list[UnrecognizedAttention] = []
        self.ends: dict[str, None] = {}  # the operations by which scores were lost
        self.weighed: set[tuple[int, int]] = (
            set()
        )  # the products that reached a softmax
        self._report = report
        self._known = known
        self._names = names
        self._valued = valued
        self._chose = chose

    def minds(self, name: str) -> bool:
        """True if a call of this function may be relevant now, which is rarely the case."""
        return (
            bool(self.tags)
            or name in PRODUCTS
            or (name == "softmax" and self._names is not None)
        )

    def follow(
        self, name: str, frame: ModuleCall, args: Args, kwargs: Kwargs, out: object
    ) -> None:
        """Processes one call of a torch function, given the function's name without outer underscores."""
        step = Step(name, frame, args, kwargs, out)
        if name in PRODUCTS:
            product = read_product(name, args, kwargs, out)
            if product is not None and not any(
                self._is_on_its_way(x) for x in product.factors
            ):
                if not self._misses(step, product):
                    self._multiplied(step, product)
                return
        if name == "softmax" and self._names is not None:
            self._tag_foreign(step)
        if not self.tags or name == "get" or name in _FACTORIES:
            return
        if name == "setitem":
            self._written(step)
            return
        x, tag = None, None
        for argument in step.arguments():
            candidate = self.tags.get(argument)
            if candidate is not None and (
                tag is None or isinstance(tag, Lost) > isinstance(candidate, Lost)
            ):
                x, tag = argument, candidate
        if tag is None or x is None:
            return
        is_features = isinstance(tag, Scores) and tag.only_tables
        if name in PRODUCTS and not is_features:
            self._with_values(step, tag, x)
            return
        is_choice = (
            name == "topk"
            and not is_features
            and step.argument("dim", 2, -1) in (-1, x.ndim - 1)
        )
        if is_choice and self._chose is not None and isinstance(tag, (Scores, Lost)):
            self._chose(tag.frame.shared_with(frame), tag, x)
        if isinstance(tag, Scores):
            self._scores(step, tag, x)
        elif isinstance(tag, Lost):
            self._lose(step, tag, x)
        elif isinstance(out, Tensor):
            self._normalise(step, tag, x)

    def _is_on_its_way(self, x: Tensor) -> bool:
        """True if a tensor lies between q·k and the values, so that it is no factor of scores."""
        tag = self.tags.get(x)
        return not (
            tag is None
            or isinstance(tag, Lost)
            or (isinstance(tag, Scores) and tag.only_tables)
        )

    def _multiplied(self, step: Step, product: Product) -> None:
        """Tags the product of two activations."""
        self.multiplied = True
        addend = product.added
        tag = Scores(
            products=(dataclasses.replace(product, added=None),),
            frame=step.frame,
            scale=float(step.kwargs.get("alpha", 1.0)),
        )
        more = self.tags.get(addend)
        if isinstance(more, Scores):
            beta = float(step.kwargs.get("beta", 1.0))
            tag = _sum(more, tag, beta, step)
        elif addend is not None:
            tag = self._with_term(step, tag, addend, 1.0)
        self.tags.put(step.out, tag)

    def _written(self, step: Step) -> None:
        """Handles x[index] = value: what is written to scores, and where scores are written to, is not followed."""
        x, _, value = step.args
        for y in (x, value):
            tag = self.tags.get(y)
            if isinstance(tag, (Scores, Lost)):
                self._lose(dataclasses.replace(step, out=x), tag, y)
                return

    def _scores(self, step: Step, tag: Scores, x: Tensor) -> None:
        """Handles a call with scores x."""
        name, out = step.name, step.out
        over_last = step.is_over_last(x)
        over_all = name in ("amax", "max") and len(step.arguments()) == 1
        if name in ("amax", "max", "logsumexp") and (over_last or over_all):
            self.tags.put(
                out if isinstance(out, Tensor) else out[0], RowTop(name == "logsumexp")
            )
        elif not isinstance(out, Tensor):
            self._lose(step, tag, x)
        elif tag.only_tables and name in (*_SOFTMAXES, "exp", "sigmoid"):
            self.tags.drop(out)  # of features, as in a language model's head
        elif tag.is_flat and name in _SOFTMAXES:
            self.tags.put(out, Weights(reason=_FLAT))
        elif name in ("softmax", "safe_softmax"):
            self.tags.put(out, Weights(self._softmax(step, tag, x)))
        elif name == "exp":
            y = out.log() if out is x else x
            if tag.normalised:
                self.tags.put(out, Weights(self._attention(step.frame, tag, y)))
            else:
                self.tags.put(out, Powers(tag, y))
        elif name == "sigmoid":
            self.tags.put(
                out, Weights(reason="its values are weighted by the sigmoid of scores")
            )
        else:
            new = self._next(step, tag, x)
            if out is x and new is not tag and base_of(x) is not None:
                self._changed_in_a_view(step, x)
            if new is not None:
                self.tags.put(out, new)
            elif name not in _READS and not tag.only_tables:
                self._lose(step, tag, x)

    def _next(self, step: Step, tag: Scores, x: Tensor) -> Scores | None:
        """The tag of what a function made of scores x, or None if it does not consist of scores."""
        name, out = step.name, step.out
        if name in VIEWS:
            is_cast = any(isinstance(y, torch.dtype) for y in step.args)
            return None if is_cast else _viewed(step, tag, x)
        if name in _SUMS:
            return self._added(step, tag, x)
        if name in _JOINS:
            is_of_columns = step.argument("dim", 1, 0) % out.ndim == out.ndim - 1
            return self._joined(step.arguments()) if is_of_columns else None
        if name in _MASKS:
            return _masked(step, tag, self.tags.get(_replacement(step, x)), x)
        if name == "log_softmax" and step.is_over_last(x):
            unshifted = x if tag.unshifted is None else tag.unshifted
            return dataclasses.replace(tag, unshifted=unshifted, normalised=True)
        if name == "tanh":
            return dataclasses.replace(tag, before_tanh=None if out is x else x)
        if name in ("max", "min"):
            return tag if isinstance(step.argument("other", 1), Tensor) else None
        if name not in ELEMENTWISE:
            return None
        factor = step.constant(x)
        if factor is None:
            return tag
        if tag.before_tanh is not None:
            return dataclasses.replace(
                tag,
                uncapped=tag.before_tanh * factor,
                cap=abs(factor),
                before_tanh=None,
            )
        if tag.uncapped is not None:
            return tag
        unshifted = None if tag.unshifted is None else tag.unshifted * factor
        return dataclasses.replace(tag, scale=tag.scale * factor, unshifted=unshifted)

    def _added(self, step: Step, tag: Scores, x: Tensor) -> Scores | None:
        """The tag of scores to or from which something was added or subtracted: other scores, a mask or bias, or one
        number per row, which changes no weight."""
        other = step.other(x)
        more = self.tags.get(other)
        alpha = step.kwargs.get("alpha", 1.0)
        sign, sign_of_other = _SUMS[step.name]
        if step.name == "rsub":
            sign *= alpha
        else:
            sign_of_other *= alpha
        if not step.args or step.args[0] is not x:
            sign, sign_of_other = sign_of_other, sign
        if isinstance(more, Scores):
            return _sum(tag, more, sign, step)
        if sign < 0 or isinstance(more, (Weights, Powers, RowSum)):
            return None
        if isinstance(more, RowTop) and sign_of_other < 0:
            unshifted = tag.unshifted
            if unshifted is None:
                unshifted = x if step.out is not x else x + other
            return dataclasses.replace(
                tag, unshifted=unshifted, normalised=tag.normalised or more.normalises
            )
        is_per_row = (
            isinstance(other, Tensor)
            and other.ndim == x.ndim
            and other.shape[-1] == 1 < x.shape[-1]
        )
        if is_per_row and sign_of_other < 0:
            return None  # as in a softmax over blocks of keys, whose rows are not whole
        return self._with_term(step, tag, other, sign_of_other)

    def _with_term(self, step: Step, tag: Scores, term: object, sign: float) -> Scores:
        """The tag of scores to which a mask or a bias was added."""
        if not isinstance(term, Tensor) or term.numel() == 1:
            return tag
        if (
            self._names is not None
            and not tag.only_tables
            and depends_on_input(term, tag, step.out)
        ):
            tag = dataclasses.replace(tag, lost=(*tag.lost, _DEPENDS))
        low = hides(sign * term.detach())
        return tag.hiding(low, step.out) if bool(low.any()) else tag

    def _joined(self, parts: Sequence[Tensor]) -> Scores | None:
        """The tag of scores to which columns were attached: sinks, which have no values, or the scores of other
        keys."""
        tags = [self.tags.get(x) for x in parts]
        places = [i for i, tag in enumerate(tags) if isinstance(tag, Scores)]
        scores = [tag for tag in tags if isinstance(tag, Scores)]
        for tag in scores:
            if (
                tag.keys is not None
                or tag.uncapped is not None
                or tag.unshifted is not None
            ):
                return None
        first, last = places[0], places[-1]
        if len(scores) == 1:
            products = scores[0].products
        elif last - first == len(scores) - 1 and all(
            len(tag.products) == 1 for tag in scores
        ):
            columns = [parts[i].shape[-1] for i in places]
            products = (joined([tag.products[0] for tag in scores], columns),)
        else:
            products = (scores[0].products[0].unknown(),)
        masks = [x.new_zeros(x.shape, dtype=torch.bool) for x in parts]
        for i, tag in zip(places, scores):
            if tag.hidden is not None:
                masks[i] = tag.hidden.expand_as(parts[i])
        starts = [sum(x.shape[-1] for x in parts[:i]) for i in range(len(parts) + 1)]
        return dataclasses.replace(
            scores[0],
            products=products,
            lost=tuple(dict.fromkeys(reason for tag in scores for reason in tag.lost)),
            hidden=None
            if all(tag.hidden is None for tag in scores)
            else torch.cat(masks, -1),
            keys=(starts[first], starts[last + 1]),
        )

    def _changed_in_a_view(self, step: Step, x: Tensor) -> None:
        """Ends the tags of the scores of which x, which was changed in place, is a part."""
        base = base_of(x)
        for y, tag in self.tags.scores():
            if y is not x and (base is y or base is base_of(y)):
                self._lose(dataclasses.replace(step, name="setitem", out=y), tag, y)

    def _normalise(
        self, step: Step, tag: Weights | RowTop | Powers | RowSum, x: Tensor
    ) -> None:
        """Handles a call with what comes after scores: exponentials, their sums, and weights."""
        name, out = step.name, step.out
        for argument in step.arguments():
            total = self.tags.get(argument)
            if isinstance(total, RowSum):
                self._divided(step, total)
                return
        if isinstance(tag, Powers):
            if name == "sum" and step.is_over_last(x):
                self.tags.put(out, RowSum(tag, x))
            elif name in ELEMENTWISE - _SCALES:
                self.tags.put(out, tag)
            elif name not in _READS:
                self._lose(step, tag.scores, x)
        elif isinstance(tag, RowTop):
            # After a maximum with another block's value it is no longer the largest of these scores.
            if name in VIEWS or name in ELEMENTWISE - {"neg", "maximum"}:
                self.tags.put(out, tag)
        elif name in _PASSES:
            self.tags.put(out, tag)

    def _divided(self, step: Step, total: RowSum) -> None:
        """Handles a call with a row's sum of exponentials. Any use of it but a guard against 0 / 0 is the division by
        it."""
        name = step.name
        others = [y for y in step.arguments() if self.tags.get(y) is not total]
        constants = [y for y in others if type(y) in (int, float)]
        if name in _SUMS and constants and constants[0] > SMALLEST_CONSTANT:
            where = total.powers.scores.frame.shared_with(step.frame)
            self._miss(
                where, name, "a constant is added to the sum of its exponentials"
            )
            self.tags.put(total.exponentials, Weights())
        elif name in _PASSES and not any(isinstance(y, Tensor) for y in others):
            self.tags.put(step.out, total)
        else:
            weights = self.tags.get(total.exponentials)
            if not isinstance(weights, Weights):
                weights = Weights(
                    self._attention(step.frame, total.powers.scores, total.powers.x)
                )
                self.tags.put(total.exponentials, weights)
            if step.args and step.args[0] is total.exponentials:
                self.tags.put(step.out, weights)

    def _with_values(self, step: Step, tag: Tag, x: Tensor) -> None:
        """Handles a product of which x, with this tag, is a factor: with the values, or of scores with a weight."""
        factors = [y for y in tensors((step.args, step.kwargs)) if y is not x]
        if isinstance(tag, Weights):
            if tag.reason and factors and not is_weight(factors[0]):
                self._miss(step.frame, step.name, tag.reason)
            elif tag.site is not None and factors:
                self._valued(tag.site, factors[0])
        elif isinstance(tag, (Scores, Lost)) and all(
            is_weight(y) or y.ndim < 3 for y in factors
        ):
            self._lose(step, tag, x)

    def _tag_foreign(self, step: Step) -> None:
        """Tags a softmax over scores that are no products, so that it is missed if it weights values of positions."""
        x, out = next(iter(step.arguments()), None), step.out
        if (
            not isinstance(x, Tensor)
            or not isinstance(out, Tensor)
            or x.ndim < 3
            or self.tags.get(x) is not None
        ):
            return
        dim = step.argument("dim", 1, -1)
        dim = dim % x.ndim if isinstance(dim, int) else x.ndim - 1
        rows = frozenset(size for i, size in enumerate(x.shape) if i != dim)
        tag = Lost(
            operation="softmax",
            frame=step.frame,
            rows=rows,
            columns=x.shape[dim],
            is_foreign=True,
        )
        self.tags.put(out, tag)

    def _misses(self, step: Step, product: Product) -> bool:
        """Records a product of values with what became of scores, if its rows sum to one; returns whether it is one."""
        for x in product.factors if self._names is not None else ():
            tag = self.tags.get(x)
            # A router weights experts, of each position by itself: no dimension is of its weights alone.
            if (
                isinstance(tag, Lost)
                and tag.is_foreign
                and (product.table or not product.has_pairs())
            ):
                continue
            if isinstance(tag, Lost) and tag.holds(x) and _sums_to_one(x):
                reason = _FOREIGN if tag.is_foreign else _beyond(tag.operation)
                self._miss(step.frame.shared_with(tag.frame), tag.operation, reason)
                return True
        return False

    def _lose(self, step: Step, tag: Scores | Lost, x: Tensor) -> None:
        """Records that a function turned x, which are scores or what they became, into something that is not
        understood. A softmax over it is missed."""
        outputs = list(tensors((step.out,)))
        if isinstance(tag, Scores):
            self.ends[step.name] = None
            if tag.is_flat or (
                x.ndim < 4 and not any(product.has_pairs() for product in tag.products)
            ):
                return  # heads are concatenated, so these are features
            if step.name in _CHOICES:
                del outputs[1:]  # the others are indices
            tag = _lost(step, tag, x, outputs[0] if outputs else x)
        is_softmax = step.name in _SOFTMAXES or step.name in ("exp", "exp2")
        if is_softmax and isinstance(tag, Lost) and tag.is_foreign:
            return
        if is_softmax:
            self.weighed |= products_of(tag)
            self._miss(
                step.frame.shared_with(tag.frame), tag.operation, _beyond(tag.operation)
            )
        for y in outputs:
            if is_softmax:
                self.tags.put(y, Weights())
            elif tag.holds(y):
                self.tags.put(y, tag)
            else:
                self.tags.drop(y)

    def _miss(self, frame: ModuleCall, operation: str, reason: str) -> None:
        """Records an attention that is not understood."""
        self.missed.append(
            UnrecognizedAttention(module=frame.name, operation=operation, reason=reason)
        )

    def _softmax(self, step: Step, tag: Scores, x: Tensor) -> str | None:
        """Reports a softmax over scores, unless it is not one over keys."""
        dim = step.argument("dim", 1, -1)
        dim = dim % x.ndim if isinstance(dim, int) else x.ndim - 1
        if dim < x.ndim - 2 and not any(
            _is_of_keys(product, dim) for product in tag.products
        ):
            reason = f"its softmax runs over dimension {dim} of {x.ndim}, not over the last or the second-to-last"
            self._miss(tag.frame.shared_with(step.frame), "softmax", reason)
            return None
        return self._attention(step.frame, tag, x, dim)

    def _attention(
        self, frame: ModuleCall, tag: Scores, x: Tensor, dim: int = -1
    ) -> str | None:
        """Reports the attention whose weights are a softmax of x over dimension `dim`; returns the site's name."""
        where = tag.frame.shared_with(frame)
        self.weighed |= products_of(tag)
        if tag.unshifted is not None:
            x = tag.unshifted
        call = scores_call(
            tag, x, dim % x.ndim, where, known=self._known(where), names=self._names
        )
        return self._report(where, call)


def _replacement(step: Step, x: Tensor) -> Any:
    """What masked_fill or where puts in the place of some scores x."""
    if step.name == "masked_fill":
        return step.argument("value", 2)
    _, chosen, otherwise = _cases(step)
    return otherwise if chosen is x else chosen


def _cases(step: Step) -> tuple[Tensor, Any, Any]:
    """The condition of torch.where(condition, a, b) or a.where(condition, b), a and b."""
    condition, chosen, otherwise = step.arguments()[:3]
    if condition.is_floating_point():
        return chosen, condition, otherwise
    return condition, chosen, otherwise


def _masked(step: Step, tag: Scores, more: Tag | None, x: Tensor) -> Scores:
    """The tag of scores after masked_fill or where. `where` of two tensors of scores is a sum, of which each has a part
    of the pairs; `more` is the tag of what replaces scores."""
    out, other = step.out, _replacement(step, x)
    if step.name == "masked_fill":
        return tag.hiding(step.argument("mask", 1), out) if is_low(other) else tag
    condition, chosen, _ = _cases(step)
    replaced = ~condition.bool() if chosen is x else condition.bool()
    if isinstance(more, Scores):
        both = _sum(
            dataclasses.replace(tag, hidden=None),
            dataclasses.replace(more, hidden=None),
            1.0,
            step,
        )
        if tag.hidden is not None:
            both = both.hiding(tag.hidden & ~replaced, out)
        if more.hidden is not None:
            both = both.hiding(more.hidden & replaced, out)
        return both
    if isinstance(other, Tensor) and other.numel() > 1:
        return tag.hiding(replaced & (other.detach() <= -APART), out)
    return tag.hiding(replaced, out) if is_low(other) else tag


def _lost(step: Step, tag: Scores, x: Tensor, out: Tensor) -> Lost:
    """The tag of what a function made of scores x that is not understood."""
    rows, columns = {x.shape[-2]}, x.shape[-1]
    for product in tag.products:
        if product.sides is not None and product.sides[0].x.ndim == x.ndim + 1:
            first, second = product.sides
            rows |= {
                n
                for dim, n in enumerate(x.shape[:-1])
                if first.varies(dim) != second.varies(dim)
            }
    if step.name in _CHOICES:
        columns = out.shape[-1]
    elif out.shape[:-1] == x.shape[:-1]:
        columns = max(
            columns, out.shape[-1]
        )  # some were chosen and written into a row of all columns
    return Lost(
        operation=step.name,
        frame=tag.frame,
        rows=frozenset(rows),
        columns=columns,
        products=tag.products,
    )


def _sums_to_one(x: Tensor) -> bool:
    """True if the rows of x are weights."""
    x = x.detach().float()
    return bool((x >= 0).all()) and bool(((x.sum(-1) - 1).abs() < 1e-3).all())


def _beyond(operation: str) -> str:
    """Why scores are unknown after an operation."""
    words = {
        "setitem": "a write into a part of a tensor",
        "sub": "the subtraction of a number per row, as in a softmax over blocks of keys",
        "topk": "a selection of the largest",
    }
    return f"its scores could not be followed beyond {words.get(operation, operation)}"


def products_of(tag: Scores | Lost) -> set[tuple[int, int]]:
    """The factors of the products in scores, as pairs of object ids."""
    return {
        (id(product.factors[0]), id(product.factors[1])) for product in tag.products
    }


def _is_of_keys(product: Product, dim: int) -> bool:
    """True if a dimension may be one of keys, because one factor alone varies along it or because there is only one."""
    if product.sides is None:
        return False
    first, second = product.sides
    return not (first.varies(dim) or second.varies(dim)) or first.varies(
        dim
    ) != second.varies(dim)


def _sum(one: Scores, other: Scores, factor: float, step: Step) -> Scores:
    """The tag of the sum of `factor` times one tensor of scores and another."""
    lost = list(dict.fromkeys((*one.lost, *other.lost)))
    if any(
        tag.uncapped is not None or tag.before_tanh is not None for tag in (one, other)
    ):
        lost.append("a term of the sum is capped before it is added")
    frames = [tag.frame.shared_with(step.frame) for tag in (one, other)]
    both = Scores(
        products=tuple(
            widened(product, step.out.ndim)
            for product in (*one.products, *other.products)
        ),
        frame=max(frames, key=lambda frame: len(frame.line())),
        scale=one.scale * factor,
        lost=tuple(lost),
        keys=one.keys or other.keys,
    )
    for tag in (one, other):
        if tag.hidden is not None:
            both = both.hiding(tag.hidden, step.out)
    return both


def _viewed(step: Step, tag: Scores, x: Tensor) -> Scores:
    """The tag of a view of scores x, which is also one of their masks and of the logits before a cap."""
    name, out = step.name, step.out
    args, kwargs = step.args[1:], step.kwargs  # those for masks
    if name == "pad":
        kwargs = pad_arguments(step.args, step.kwargs)
        is_hidden = is_low(kwargs.get("value"))
        args, kwargs["value"] = (), float(is_hidden)
        if is_hidden and tag.hidden is None:
            tag = tag.hiding(torch.zeros((), dtype=torch.bool, device=x.device), x)
    function = view_function(name)

    def view(y: Tensor | None) -> Tensor | None:
        if y is None:
            return None
        with torch.no_grad():
            y = y.broadcast_to(x.shape)
            if y.dtype == torch.bool:
                return function(y.to(torch.uint8), *args, **kwargs).bool()
            return function(y, *step.args[1:], **step.kwargs)

    keys = tag.keys
    if keys is not None and out.shape[-1] < min(keys[1], x.shape[-1]):
        keys = None
    return dataclasses.replace(
        tag,
        products=tuple(
            viewed(product, name, x, step.args, step.kwargs, out)
            for product in tag.products
        ),
        hidden=view(tag.hidden),
        uncapped=view(tag.uncapped),
        before_tanh=view(tag.before_tanh),
        unshifted=view(tag.unshifted),
        keys=keys,
    )


def pad_arguments(args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of pad(input, pad, mode, value) by name, except for the tensor."""
    return dict(zip(("pad", "mode", "value"), args[1:])) | {
        n: x for n, x in kwargs.items() if n != "input"
    }


def depends_on_input(x: Tensor, tag: Scores, out: Tensor) -> bool:
    """True if a term added to scores depends on the same activations as the scores do, as far as the graph shows.

    A bias or a mask does not. If the module's input has no graph, a tensor is taken to depend on it if the parameters
    that produced the factors also produced the tensor, or if its values differ between sequences. If the term was added
    in place to what is now `out`, only the graph is used.
    """
    node = x.grad_fn
    if x is out and node is not None:
        node = node.next_functions[0][0]
    if node is None:
        return False
    factors = [
        y.grad_fn
        for product in tag.products
        for y in product.factors
        if y.grad_fn is not None
    ]
    for frame in tag.frame.line():
        inputs = reached(factors, nodes_of(frame.inputs))
        if inputs:
            return bool(reached([node], inputs))
    parameters = _met(factors, lambda one: not one.next_functions)
    if reached([node], parameters):
        return True
    inputs = {
        y.untyped_storage().data_ptr()
        for frame in tag.frame.line()
        for y in frame.inputs
        if y.is_floating_point() and not is_wrapper(y)
    }

    def reads_input(one: Node) -> bool:
        factor = saved_factor(one)
        return (
            factor is not None
            and not is_wrapper(factor)
            and factor.untyped_storage().data_ptr() in inputs
        )

    # A projection of an input without a graph keeps the input itself.
    if _met([node], reads_input):
        return True
    by_sequence = (
        x is not out and x.ndim == out.ndim and 1 < x.shape[0] == tag.frame.batch
    )
    return by_sequence and not torch.equal(x.detach(), x.detach()[:1].expand_as(x))


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
    visited: set[Node] = set()
    ends: set[Node] = set()
    queue = list(starts)
    while queue and len(visited) < _GRAPH_LIMIT:
        node = queue.pop()
        if stop(node):
            ends.add(node)
        elif node not in visited:
            visited.add(node)
            queue += [above for above, _ in node.next_functions if above is not None]
    return ends


# The attention call behind a softmax whose input was traced: its logits as [b h t s], with q and k


def scores_call(
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
    start, end = (0, x.shape[keys]) if tag.keys is None else tag.keys
    uncapped = x if tag.uncapped is None else tag.uncapped
    if uncapped.shape != x.shape and uncapped.numel() == x.numel():
        uncapped = uncapped.reshape(x.shape)
    capped = x.narrow(keys, start, end - start)
    uncapped = uncapped.narrow(keys, start, end - start)
    pairs = [_sides(product, capped, keys) for product in tag.products]
    with torch.set_grad_enabled(
        names is not None
    ):  # an autograd.Function that computes the softmax turns it off
        arrangement = _layout(capped, pairs, keys, frame, known, names)
        exact = names is None or (alone and len(pairs) == 1)
        factors = []
        for product, sides in zip(tag.products, pairs):
            unknown = exact and not product.followed
            factors.append(
                (None, None)
                if unknown
                else _factors(sides, arrangement, capped, keys, exact=exact)
            )
    logits = arrangement.apply(uncapped)
    hidden = None
    if tag.hidden is not None:
        hidden = arrangement.apply(
            tag.hidden.broadcast_to(x.shape).narrow(keys, start, end - start)
        )
    filler = None
    if (
        len(pairs) == 1
        and tag.products[0].followed
        and any(call.pads for call in frame.line())
    ):
        filler = _filler_rows(pairs[0], arrangement, capped, keys)
    if filler is not None:
        hidden = filler if hidden is None else hidden | filler
    q, k = factors[0] if len(factors) == 1 and not tag.lost else (None, None)
    rows = _rows(arrangement)
    by_query = [
        rows is not None and sides is not None and sides.key.varies(rows)
        for sides in pairs
    ]
    return ScoresCall(
        spec=AttentionSpec(
            scale=Fixed(tag.scale), cap=NoCap() if tag.cap is None else Softcap(tag.cap)
        ),
        logits=logits,
        capped=logits if tag.uncapped is None else arrangement.apply(capped),
        hidden=hidden,
        q=q,
        k=k,
        products=tuple(factors) if names is not None else (),
        lost=tag.lost,
        layout=arrangement,
        gathered=all(by_query),
        sink=_sink(x, keys, start, end, arrangement),
    )


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
    x = x.detach()
    products = tag.products if isinstance(tag, Scores) else ()
    pairs = [_sides(product, x, x.ndim - 1) for product in products]
    with torch.set_grad_enabled(names is not None):
        arrangement = _layout(x, pairs, x.ndim - 1, frame, known, names)
    arrangement = dataclasses.replace(arrangement, headless=False)
    hidden = (x <= HIDES) | (x == torch.inf)
    if isinstance(tag, Scores) and tag.hidden is not None:
        hidden = hidden | tag.hidden
    logits = arrangement.apply(x)
    hidden = arrangement.apply(hidden)
    return ScoresCall(
        spec=AttentionSpec(),
        logits=logits,
        capped=logits,
        hidden=hidden,
        q=None,
        k=None,
        layout=arrangement,
    )


def fused_layout(
    q: Tensor,
    k: Tensor,
    frame: ModuleCall,
    *,
    known: HeadLayout | None,
    names: dict[int, str] | None,
) -> HeadLayout:
    """The layout of the scores that a fused function computes from q and k [... t d], which need not be [b h t d]."""
    shape = (
        *torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]),
        q.shape[-2],
        k.shape[-2],
    )
    query, key = (y[(None,) * (len(shape) - y.ndim)] for y in (q, k))
    sides = Sides(
        query=Operand(query.unsqueeze(-2), q), key=Operand(key.unsqueeze(-3), k)
    )
    return _layout(
        q.detach().new_zeros(()).expand(shape),
        [sides],
        len(shape) - 1,
        frame,
        known,
        names,
    )


def _sides(product: Product, x: Tensor, keys: int) -> Sides | None:
    """The factors of a product that hold the queries and the keys of scores x."""
    if product.sides is None:
        return None
    left, right = product.sides
    if left.x.ndim != x.ndim + 1:
        return None
    is_key = left.varies(keys)
    if is_key and right.varies(keys):
        # As with relative positions: the keys are those of which some queries see the same.
        others = [dim for dim in range(x.ndim) if dim != keys]
        is_key = any(right.varies(dim) and not left.varies(dim) for dim in others)
    return Sides(query=right, key=left) if is_key else Sides(query=left, key=right)


def _layout(
    x: Tensor,
    pairs: Sequence[Sides | None],
    keys: int,
    frame: ModuleCall,
    known: HeadLayout | None,
    names: dict[int, str] | None,
) -> HeadLayout:
    """The layout if it is known, or else found by experiment, or else guessed from the shape."""
    fitted = None if known is None else known.fitted(x.shape)
    if fitted is not None and fitted.keys == keys:
        return fitted
    rows, is_ambiguous = None, False
    heads = hints(frame)
    # A product whose queries differ by key, such as one with relative positions, says less.
    sides_first = sorted(
        (sides for sides in pairs if sides is not None),
        key=lambda sides: sides.query.varies(keys),
    )
    for sides in sides_first:
        if names is not None:
            shown = layout_of(sides, x.shape, keys, frame, names)
            if shown is not None:
                return shown
        free = [
            dim
            for dim in range(x.ndim)
            if dim != keys and sides.query.varies(dim) and not sides.key.varies(dim)
        ]
        if rows is None and free:
            # Keys that all heads share, such as those of absorbed MLA, vary along neither heads nor queries.
            queries = [dim for dim in free if x.shape[dim] not in heads]
            is_ambiguous = len(free) > 1 and len(queries) != 1
            rows = queries[0] if len(queries) == 1 else free[-1]
    batch = next((call.batch for call in frame.line() if call.batch), 0)
    guessed = layout(x.shape, heads, batch, keys, rows)
    if is_ambiguous and not guessed.guess:
        why = f"scores of shape {tuple(x.shape)} do not show which dimension holds the queries"
        return dataclasses.replace(guessed, guess=why)
    return guessed


def hints(frame: ModuleCall) -> frozenset[int]:
    """The head counts of the innermost module that states any."""
    for call in frame.line():
        counts = head_counts(call.module)
        if counts:
            return counts
    return frozenset()


def _rows(arrangement: HeadLayout) -> int | None:
    """The dimension of the queries, unless heads are merged with it."""
    return arrangement.groups.index("t") if "t" in arrangement.groups else None


def _factors(
    sides: Sides | None, arrangement: HeadLayout, x: Tensor, keys: int, *, exact: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The q [b h t d] and k [b g s d] of a product.

    If `exact`, both are None unless each logit is the product of one q and one k. Otherwise they are the queries for
    the first key and the keys for the last query.
    """
    if sides is None:
        return None, None
    rows = _rows(arrangement)
    q, k = sides.query.x, sides.key.x
    if exact and (
        sides.query.varies(keys) or (rows is not None and sides.key.varies(rows))
    ):
        return None, None
    q = q.narrow(keys, 0, 1)
    if rows is not None:
        k = k.narrow(rows, k.shape[rows] - 1, 1)
    shape = list(x.shape)
    of_queries = [1 if dim == keys else n for dim, n in enumerate(shape)]
    of_keys = [1 if dim == rows else n for dim, n in enumerate(shape)]
    of_keys[keys] = k.shape[keys]
    if rows is not None:
        of_queries[rows] = q.shape[rows]
    shared = [dim for dim, group in enumerate(arrangement.groups) if group == "h"]
    of_few = arrangement
    if len(shared) == 1 and k.shape[shared[0]] == 1:
        # Keys that all heads share are used once.
        of_keys[shared[0]] = 1
        of_few = HeadLayout(groups=arrangement.groups, sizes=(1,))
    try:
        q, k = q.expand(*of_queries, q.shape[-1]), k.expand(*of_keys, k.shape[-1])
    except RuntimeError:  # the scores were rearranged after they had been shifted
        return None, None
    return arrangement.apply_to_vectors(q)[:, :, :, 0], fewest_keys(
        of_few.apply_to_vectors(k)[:, :, -1]
    )


@torch.no_grad()
def _filler_rows(
    sides: Sides | None, arrangement: HeadLayout, x: Tensor, keys: int
) -> Bool[Tensor, "b 1 t 1"] | None:
    """The rows whose queries are zero in all heads, which a module that pads with zeros has added. No row is marked if
    the queries of all rows are zero, as before the first step of some models. None if the queries are unknown."""
    if sides is None or sides.query.varies(keys):
        return None
    zero = (sides.query.x == 0).all(-1)
    shape = [1 if dim == keys else n for dim, n in enumerate(x.shape)]
    zero = arrangement.apply(zero.expand(shape)).all(1, keepdim=True)
    return zero & ~zero.all()


@torch.no_grad()
def _sink(
    x: Tensor, keys: int, start: int, end: int, arrangement: HeadLayout
) -> Tensor | None:
    """The logsumexp [b h t] of the columns that are not keys, or None if there are no such columns."""
    n = x.shape[keys]
    if (start, end) == (0, n):
        return None
    columns = torch.cat([x.narrow(keys, 0, start), x.narrow(keys, end, n - end)], keys)
    return arrangement.apply(columns.to(wide(x.dtype)).logsumexp(keys, keepdim=True))[
        ..., 0
    ]
