"""Attention that is written by hand, traced from q kᵀ to the softmax.

A product of two activations gets a tag. Operations that scale, mask, cap, cast or rearrange scores pass the tag on. A
softmax whose input has the tag is attention; its output is tagged as weights, so that the product with the values does
not count as scores. Any other operation on scores tags its output as lost, and a lost tensor that is normalised and
multiplied with values is an attention that is missed. What a tag becomes:

    product of two activations        → Scores
    Scores, by scale, mask, cap, view → Scores
    Scores, by softmax                → Weights, with the call that was read
    Scores, by max or logsumexp       → RowTop; Scores - RowTop → Scores
    Scores, by exp                    → Powers, and by sum → RowSum; Powers / RowSum → Weights
    Scores, by anything else          → Lost, and by softmax → missed
    Weights, by a product with values → reported

Statistics are computed from the input of the softmax and from the masks that were met on the way, and never from
q·k·scale computed again, because a scale or a bias may be applied anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor
from torch.autograd.graph import Node

from qkeel.capture.calls import (
    APART,
    HeadLayout,
    ScoresCall,
    Seen,
    UnrecognizedAttention,
    hides,
    is_low,
)
from qkeel.capture.example import ModuleCall, tensors
from qkeel.capture.products import (
    PRODUCTS,
    VIEWS,
    Product,
    is_weight,
    read_product,
    summed_dims,
    view_function,
    viewed,
    widened,
)
from qkeel.capture.score_calls import LayoutReader, normalized, scores_call
from qkeel.capture.tags import (
    JOINS,
    LOGITS,
    SCALES,
    Lost,
    Powers,
    RowSum,
    RowTop,
    Scores,
    Step,
    Tag,
    Tags,
    WaitingCall,
    Weights,
)
from qkeel.patching.autograd import base_of, variable_of
from qkeel.patching.modes import Args, Kwargs
from qkeel.spec.logits import Normalizer

# A larger constant added to a sum of exponentials is more than a guard against 0 / 0.
SMALLEST_CONSTANT = 1e-5
# The nodes of autograd's graph that are visited in search of an input.
_GRAPH_LIMIT = 4000


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of functions, without outer underscores.
_BOUNDS = _names("clamp clamp_max clamp_min clip maximum minimum nan_to_num")
_CASTS = _names("bfloat16 cpu cuda double float half to type type_as")
_COPIES = _names("alias clone contiguous detach positive requires_grad")
# The output is the same scores, scaled, within bounds, cast or copied.
ELEMENTWISE = SCALES | _BOUNDS | _CASTS | _COPIES | {"alpha_dropout", "dropout", "neg"}
# The output is something else, and the scores go on.
_READS = _names(
    "dim get numel size stride all any eq ge gt isinf isnan le lt ne amax amin max mean min sum"
)
# The output has the shape of the scores, and nothing else of them.
_FACTORIES = _names(
    "empty_like full_like new_full new_ones new_zeros ones_like rand_like zeros_like"
)
_MASKS = frozenset({"masked_fill", "where"})
# They return the values first, then their indices.
_CHOICES = frozenset({"topk", "sort", "kthvalue"})
_SOFTMAXES = frozenset({"softmax", "safe_softmax", "log_softmax"})
# The signs of both operands.
_SUMS = {
    **dict.fromkeys(("add", "radd", "iadd"), (1.0, 1.0)),
    **dict.fromkeys(("sub", "subtract", "isub"), (1.0, -1.0)),
    "rsub": (-1.0, 1.0),
}
# What weights go through on their way to the values.
_PASSES = ELEMENTWISE | VIEWS | _MASKS | JOINS | _SUMS.keys()
# What leaves a tensor with one of these tags what it is.
_PASSED_ON: dict[type, Set[str]] = {
    Weights: _PASSES,
    Powers: ELEMENTWISE - SCALES,
    # After a maximum with another block's value it is no longer the largest of these scores.
    RowTop: VIEWS | (ELEMENTWISE - {"neg", "maximum"}),
}

_FOREIGN = "values of several positions are weighted by a softmax of scores that are no products of queries and keys"
_OVER_QUERIES = "its softmax runs over the queries, so the weights that a query gives to its keys do not sum to one"


class EagerAttentionTracer:
    """Reads every call of a torch function in a forward pass and reports the softmaxes that are attention.

    Args:
        report: called with every attention call; returns the site's name.
        known: returns the layout of the scores whose softmax a module computes, if it is known, from the module's call
            and the number of its attention calls so far.
        by_graph: finds out which dimensions are heads from the graph, in a probe. None if there is no graph.
        valued: called with the name of a site and the tensor by which its weights are multiplied.
        chose: called with scores of which the largest are chosen, and with their tag.
        lists_missed: whether what is not understood is looked for, which reads values and the graph.
    """

    def __init__(
        self,
        report: Callable[[ModuleCall, ScoresCall], str | None],
        known: Callable[[ModuleCall, int], HeadLayout | None],
        by_graph: LayoutReader | None,
        valued: Callable[[str, Tensor], None],
        chose: Callable[[ModuleCall, Scores | Lost, Tensor], None],
        *,
        lists_missed: bool,
    ) -> None:
        self.tags = Tags()
        # Whether two activations were multiplied with each other.
        self.multiplied = False
        self.missed: list[UnrecognizedAttention] = []
        # The operations by which scores were lost.
        self.ends: dict[str, None] = {}
        # The products that reached a softmax.
        self.weighed: set[tuple[int, int]] = set()
        self.waiting: list[WaitingCall] = []
        # The latest call that was reported of each running module, by the id of its call: a softmax of the same q and k
        # is the program looking at its weights, and no call of its own.
        self.latest: dict[int, Seen] = {}
        self._report = report
        self._known = known
        self._by_graph, self._lists_missed = by_graph, lists_missed
        self._valued = valued
        self._chose = chose

    def minds(self, name: str) -> bool:
        """True if a call of this function may be relevant now, which is rarely the case."""
        return (
            bool(self.tags)
            or name in PRODUCTS
            or (name == "softmax" and self._lists_missed)
        )

    def follow(
        self, name: str, frame: ModuleCall, args: Args, kwargs: Kwargs, out: object
    ) -> None:
        """Processes one call of a torch function, given the function's name without outer underscores."""
        step = Step(name, frame, args, kwargs, out)
        if name in PRODUCTS:
            product = read_product(name, args, kwargs, out)
            if product is not None and not any(map(self._is_used, product.factors)):
                if not self._weights_values(step, product):
                    self._multiplied(step, product)
                return
        if name == "softmax" and self._lists_missed:
            self._tag_foreign(step)
        if not self.tags or name in _FACTORIES:
            return
        x, tag = None, None
        # The arguments of a write are the tensor, the index and the value; scores in the index would be no operand.
        for argument in step.args[::2] if name == "setitem" else step.arguments():
            candidate = self.tags.get(argument)
            # Scores say more than what others have become.
            if tag is None or (isinstance(tag, Lost) and isinstance(candidate, Scores)):
                x, tag = argument, candidate
        if tag is None or x is None:
            return
        if name == "setitem":
            # What is written to a part of scores, and where scores are written to, is not followed.
            if isinstance(tag, (Scores, Lost)):
                self._tag_lost(dataclasses.replace(step, out=args[0]), tag, x)
            return
        is_features = isinstance(tag, Scores) and tag.only_tables
        if name in PRODUCTS and not is_features:
            self._with_values(step, tag, x)
            return
        is_choice = name == "topk" and step.argument("dim", 2, -1) in (-1, x.ndim - 1)
        if is_choice and isinstance(tag, (Scores, Lost)) and not is_features:
            self._chose(tag.frame.shared_with(frame), tag, x)
        if isinstance(tag, Scores):
            self._scores(step, tag, x)
        elif isinstance(tag, Lost):
            self._tag_lost(step, tag, x)
        elif isinstance(out, Tensor):
            self._normalise(step, tag, x)

    def _is_used(self, x: Tensor) -> bool:
        """True if a tensor lies between q·k and the values, so that it is no factor of scores."""
        tag = self.tags.get(x)
        if tag is None or isinstance(tag, Lost):
            return False
        return not (isinstance(tag, Scores) and tag.only_tables)

    def _multiplied(self, step: Step, product: Product) -> None:
        """Tags the product of two activations."""
        self.multiplied = True
        tag = Scores(
            products=(product,),
            frame=step.frame,
            scale=float(step.kwargs.get("alpha", 1.0)),
        )
        beta = float(step.kwargs.get("beta", 1.0))
        # torch does not read what it adds if beta is 0: that may be uninitialised memory.
        if step.name == "baddbmm" and beta:
            added = step.argument("input", 0)
            other_tag = self.tags.get(added)
            if not isinstance(other_tag, Scores):
                tag = self._with_term(step, tag, added, beta)
            else:
                total = _sum(other_tag, tag, beta, step)
                if total is None:
                    self._tag_lost(step, other_tag, step.out)
                    return
                tag = total
        self.tags[step.out] = tag

    def _scores(self, step: Step, tag: Scores, x: Tensor) -> None:
        name, out = step.name, step.out
        # The largest of all scores is also one number for each row, so subtracting it changes no weight.
        is_of_rows = step.is_over_last(x) or (
            name in ("amax", "max") and len(step.arguments()) == 1
        )
        if name in ("amax", "max", "logsumexp") and is_of_rows:
            top = out if isinstance(out, Tensor) else out[0]
            self.tags[top] = RowTop(name == "logsumexp")
        elif not isinstance(out, Tensor):
            self._tag_lost(step, tag, x)
        elif tag.only_tables and name in (*_SOFTMAXES, "exp", "sigmoid"):
            # Of features, as in a language model's head.
            pass
        elif name in ("softmax", "safe_softmax"):
            self.tags[out] = Weights(self._softmax(step, tag, x))
        elif name == "exp":
            # exp_ has overwritten the scores.
            y = out.log() if out is x else x
            if tag.normalised:
                self.tags[out] = Weights(self._attention(step.frame, tag, y))
            else:
                self.tags[out] = Powers(tag, y)
        elif name == "sigmoid":
            reason = "its values are weighted by the sigmoid of scores"
            self.tags[out] = Weights(reason=reason)
        else:
            new = self._next(step, tag, x)
            base = base_of(x)
            if out is x and new is not tag and base is not None:
                # The scores of which x, which was changed in place, is a part are no longer known.
                for y, tag_of_y in [*self.tags.items()]:
                    is_other = isinstance(tag_of_y, Scores) and y is not x
                    if is_other and (base is y or base is base_of(y)):
                        write = dataclasses.replace(step, name="setitem", out=y)
                        self._tag_lost(write, tag_of_y, y)
            if new is not None:
                self.tags[out] = new
            elif name not in _READS and not tag.only_tables:
                self._tag_lost(step, tag, x)

    def _next(self, step: Step, tag: Scores, x: Tensor) -> Scores | None:
        """The tag of what a function made of scores x, or None if it does not consist of scores."""
        name, out = step.name, step.out
        if name in VIEWS:
            # x.view(dtype) reads the same bits as other numbers.
            is_cast = any(isinstance(y, torch.dtype) for y in step.args)
            return None if is_cast else _viewed(step, tag, x)
        if name in _SUMS:
            return self._added(step, tag, x)
        if name in JOINS:
            is_of_columns = step.argument("dim", 1, 0) % out.ndim == out.ndim - 1
            return self._joined(step.arguments()) if is_of_columns else None
        if name in _MASKS:
            return self._masked(step, tag, x)
        if name == "log_softmax" and step.is_over_last(x):
            unshifted = x if tag.unshifted is None else tag.unshifted
            return dataclasses.replace(tag, unshifted=unshifted, normalised=True)
        if name == "tanh":
            # tanh_ overwrites the logits before the cap, which are then unknown.
            is_kept = out is not x
            return dataclasses.replace(
                tag, uncapped=x if is_kept else None, cap=1.0 if is_kept else None
            )
        # torch.max(a, b) compares element by element; all other forms reduce.
        if name in ("max", "min"):
            return tag if isinstance(step.argument("other", 1), Tensor) else None
        if name not in ELEMENTWISE:
            return None
        factor = step.constant(x)
        return tag if factor is None else tag.multiplied(factor)

    def _added(self, step: Step, tag: Scores, x: Tensor) -> Scores | None:
        """The tag of scores to or from which something was added or subtracted: other scores, a mask or bias, or one
        number per row, which changes no weight."""
        operand = step.operand(x)
        other_tag = self.tags.get(operand)
        signs = list(_SUMS[step.name])
        # torch.rsub(x, y) is y - alpha · x; every other function multiplies y by alpha.
        signs[step.name != "rsub"] *= step.kwargs.get("alpha", 1.0)
        if not step.args or step.args[0] is not x:
            signs.reverse()
        sign, sign_of_other = signs
        if isinstance(other_tag, Scores):
            return _sum(tag, other_tag, sign, step)
        if sign < 0 or isinstance(other_tag, (Weights, Powers, RowSum)):
            return None
        if isinstance(other_tag, RowTop) and sign_of_other < 0:
            unshifted = tag.unshifted
            if unshifted is None:
                unshifted = x if step.out is not x else x + operand
            return dataclasses.replace(
                tag,
                unshifted=unshifted,
                normalised=tag.normalised or other_tag.normalises,
            )
        has_width = isinstance(operand, Tensor) and operand.ndim == x.ndim
        if sign_of_other < 0 and has_width and operand.shape[-1] == 1 < x.shape[-1]:
            # As in a softmax over blocks of keys, whose rows are not whole.
            return None
        return self._with_term(step, tag, operand, sign_of_other)

    def _with_term(self, step: Step, tag: Scores, term: object, sign: float) -> Scores:
        """The tag of scores to which a mask or a bias was added."""
        # A softmax does not change if one number is added to all its logits.
        if not isinstance(term, Tensor) or term.numel() == 1:
            return tag
        added = term.detach() if sign == 1 else sign * term.detach()
        low = hides(added)
        is_mask, is_bias = torch.stack(
            [low.any(), (~low & (added != 0)).any()]
        ).tolist()
        if is_bias and tag.cap is None:
            bias = added if tag.bias is None else tag.bias + added
            tag = dataclasses.replace(tag, bias=bias)
        return tag.hiding(low, step.out) if is_mask else tag

    def _masked(self, step: Step, tag: Scores, x: Tensor) -> Scores | None:
        """The tag of scores after masked_fill or where. `where` of two tensors of scores is a sum, of which each has a
        part of the pairs."""
        out = step.out
        if step.name == "masked_fill":
            is_hidden = is_low(step.argument("value", 2))
            return tag.hiding(step.argument("mask", 1), out) if is_hidden else tag
        # torch.where(condition, a, b) or a.where(condition, b)
        condition, chosen, otherwise = step.arguments()[:3]
        if condition.is_floating_point():
            condition, chosen = chosen, condition
        condition = condition.bool()
        operand = otherwise if chosen is x else chosen
        replaced = ~condition if chosen is x else condition
        other_tag = self.tags.get(operand)
        if isinstance(other_tag, Scores):
            shown, other = (
                dataclasses.replace(y, hidden=None, bias=None) for y in (tag, other_tag)
            )
            total = _sum(shown, other, 1.0, step)
            if total is not None and tag.hidden is not None:
                total = total.hiding(tag.hidden & ~replaced, out)
            if total is not None and other_tag.hidden is not None:
                total = total.hiding(other_tag.hidden & replaced, out)
            return total
        if isinstance(operand, Tensor) and operand.numel() > 1:
            return tag.hiding(replaced & (operand.detach() <= -APART), out)
        return tag.hiding(replaced, out) if is_low(operand) else tag

    def _joined(self, parts: Sequence[Tensor]) -> Scores | None:
        """The tag of scores to which columns were attached: sinks, which have no values, or the scores of other
        keys."""
        tags = [self.tags.get(x) for x in parts]
        scores = [tag for tag in tags if isinstance(tag, Scores)]
        for tag in scores:
            if tag.keys or tag.cap is not None or tag.unshifted is not None:
                return None
        products = scores[0].products
        if len(scores) > 1:
            products = (products[0].unknown(),)
        ends = list(itertools.accumulate([x.shape[-1] for x in parts], initial=0))
        at = [i for i, tag in enumerate(tags) if isinstance(tag, Scores)]
        return dataclasses.replace(
            scores[0],
            products=products,
            hidden=_joined_beside(parts, tags, "hidden", torch.bool),
            bias=_joined_beside(parts, tags, "bias", parts[at[0]].dtype),
            keys=(ends[at[0]], ends[at[-1] + 1]),
        )

    def _normalise(
        self, step: Step, tag: Weights | RowTop | Powers | RowSum, x: Tensor
    ) -> None:
        """Handles a call with what comes after scores: exponentials, their sums, and weights."""
        name, out = step.name, step.out
        tags = [self.tags.get(argument) for argument in step.arguments()]
        totals = [total for total in tags if isinstance(total, RowSum)]
        if totals:
            self._divided(step, totals[0])
        elif isinstance(tag, Powers) and name == "sum" and step.is_over_last(x):
            self.tags[out] = RowSum(tag, x)
        elif name in _PASSED_ON[type(tag)]:
            self.tags[out] = tag
        elif isinstance(tag, Powers) and name not in _READS:
            self._tag_lost(step, tag.scores, x)

    def _divided(self, step: Step, total: RowSum) -> None:
        """Handles a call with a row's sum of exponentials. Any use of it but a guard against 0 / 0 is the division by
        it."""
        name, powers = step.name, total.powers
        operands = [y for y in step.arguments() if self.tags.get(y) is not total]
        constants = [y for y in operands if type(y) in (int, float)]
        if name in _SUMS and constants and constants[0] > SMALLEST_CONSTANT:
            frame = powers.scores.frame.shared_with(step.frame)
            reason = "a constant is added to the sum of its exponentials"
            self._report_missed(frame, name, reason)
            self.tags[total.exponentials] = Weights()
        elif name in _PASSES and not any(isinstance(y, Tensor) for y in operands):
            self.tags[step.out] = total
        else:
            weights = self.tags.get(total.exponentials)
            if not isinstance(weights, Weights):
                call = self._attention(step.frame, powers.scores, powers.x)
                weights = Weights(call)
                self.tags[total.exponentials] = weights
            if step.args and step.args[0] is total.exponentials:
                self.tags[step.out] = weights

    def _with_values(self, step: Step, tag: Tag, x: Tensor) -> None:
        """Handles a product of which x, with this tag, is a factor: with the values, or of scores with a weight."""
        factors = [y for y in tensors((step.args, step.kwargs)) if y is not x]
        if isinstance(tag, Weights) and factors:
            if tag.reason and not is_weight(factors[0]):
                self._report_missed(step.frame, step.name, tag.reason)
            elif tag.call in self.waiting and self._is_over_queries(step, tag.call, x):
                self.waiting.remove(tag.call)
                self._report_missed(tag.call.frame, "softmax", _OVER_QUERIES)
            elif tag.call is not None:
                site = self._meets_values(tag.call)
                if site is not None:
                    self._valued(site, factors[0])
        elif isinstance(tag, (Scores, Lost)) and all(
            is_weight(y) or y.ndim < 3 for y in factors
        ):
            self._tag_lost(step, tag, x)

    def _is_over_queries(self, step: Step, waiting: WaitingCall, x: Tensor) -> bool:
        """True if a softmax ran over another dimension of the weights x than that along which values are summed, and
        nothing made the weights of a query sum to one after it."""
        if not self._lists_missed or waiting.dim is None:
            return False
        # Dropout keeps strides; what was transposed since is not known.
        dims = summed_dims(step.name, step.args, x, step.out)
        if x.stride() != waiting.strides or dims in ([], [waiting.dim]):
            return False
        return not bool(((x.detach().float().sum(dims) - 1).abs() < 1e-3).all())

    def _tag_foreign(self, step: Step) -> None:
        """Tags a softmax over scores that are no products, so that it is missed if it weights values of positions."""
        x, out = next(iter(step.arguments()), None), step.out
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim < 2:
            return
        tag = self.tags.get(x)
        if tag is None or (isinstance(tag, Scores) and tag.only_tables):
            columns = x.shape[step.dim(x)]
            foreign = Lost(
                operation="softmax", frame=step.frame, columns=columns, is_foreign=True
            )
            self.tags[out] = foreign

    def _weights_values(self, step: Step, product: Product) -> bool:
        """Records a product of values with what became of scores, if its rows sum to one; returns whether it is one."""
        for x in product.factors if self._lists_missed else ():
            tag = self.tags.get(x)
            if not isinstance(tag, Lost) or not tag.holds(x):
                continue
            # A router weights experts, of each position by itself: no dimension is of its weights alone. A language
            # model's head may weight the rows of a table.
            if tag.is_foreign and (
                any(map(is_weight, product.factors)) or not product.has_pairs()
            ):
                continue
            y = x.detach().float()
            if bool((y >= 0).all()) and bool(((y.sum(-1) - 1).abs() < 1e-3).all()):
                reason = _FOREIGN if tag.is_foreign else _beyond(tag.operation)
                self._report_missed(
                    step.frame.shared_with(tag.frame), tag.operation, reason
                )
                return True
        return False

    def _tag_lost(self, step: Step, tag: Scores | Lost, x: Tensor) -> None:
        """Records that a function turned x, which are scores or what they became, into something that is not
        understood. A softmax over it is missed."""
        name, outputs = step.name, list(tensors((step.out,)))
        if name in _CHOICES:
            # The others are indices.
            del outputs[1:]
        if isinstance(tag, Scores):
            self.ends[name] = None
            if x.ndim < 4 and not any(product.has_pairs() for product in tag.products):
                # Heads are concatenated, so these are features.
                return
            columns, out = x.shape[-1], outputs[0] if outputs else x
            if name in _CHOICES:
                columns = out.shape[-1]
            elif out.shape[:-1] == x.shape[:-1]:
                # Some were chosen and written into a row of all columns.
                columns = max(columns, out.shape[-1])
            tag = Lost(
                operation=name,
                frame=tag.frame,
                columns=columns,
                products=tag.products,
            )
        is_softmax = name in _SOFTMAXES or name in ("exp", "exp2")
        if is_softmax and tag.is_foreign:
            return
        if is_softmax:
            self.weighed |= products_of(tag)
            frame = step.frame.shared_with(tag.frame)
            self._report_missed(frame, tag.operation, _beyond(tag.operation))
        for y in outputs:
            if is_softmax:
                self.tags[y] = Weights()
            elif tag.holds(y):
                self.tags[y] = tag
            else:
                self.tags.pop(y, None)

    def _report_missed(self, frame: ModuleCall, operation: str, reason: str) -> None:
        """Records an attention that is not understood."""
        self.missed.append(
            UnrecognizedAttention(module=frame.name, operation=operation, reason=reason)
        )

    def _softmax(self, step: Step, tag: Scores, x: Tensor) -> WaitingCall | None:
        """Reads a softmax over scores, unless it is not one over keys."""
        dim = step.dim(x)
        if dim < x.ndim - 2 and not any(p.may_be_keys(dim) for p in tag.products):
            reason = f"its softmax runs over dimension {dim} of {x.ndim}, not over the last or the second-to-last"
            self._report_missed(tag.frame.shared_with(step.frame), "softmax", reason)
            return None
        waiting = self._attention(step.frame, tag, x, dim)
        waiting.dim, waiting.strides = dim, step.out.stride()
        normalizer = step.argument("normalizer", 3)
        if isinstance(normalizer, Normalizer):
            # The softmax that qkeel computes in its place, under a remedy.
            waiting.call = normalized(waiting.call, normalizer, step.args[4])
        return waiting

    def _attention(
        self, frame: ModuleCall, tag: Scores, x: Tensor, dim: int = -1
    ) -> WaitingCall:
        """Reads the attention whose weights are a softmax of x over dimension `dim`."""
        frame = tag.frame.shared_with(frame)
        self.weighed |= products_of(tag)
        if tag.unshifted is not None:
            x = tag.unshifted
        known = self._known(frame, frame.calls + len(self._waiting_in(frame)))
        call = scores_call(
            tag, x, dim % x.ndim, frame, known=known, by_graph=self._by_graph
        )
        waiting = WaitingCall(frame, call, is_matrix=x.ndim == 2)
        self.waiting.append(waiting)
        return waiting

    def _waiting_in(self, frame: ModuleCall) -> list[WaitingCall]:
        return [waiting for waiting in self.waiting if waiting.frame is frame]

    def _meets_values(self, waiting: WaitingCall) -> str | None:
        """Reports a call unless that was done before, and returns its name."""
        if waiting not in self.waiting:
            return None
        n_earlier = self.waiting.index(waiting)
        self.waiting.remove(waiting)
        self.before(waiting.frame, waiting.call, n_earlier)
        return self._report(waiting.frame, waiting.call)

    def before(
        self, frame: ModuleCall, call: Seen, n_earlier: int | None = None
    ) -> None:
        """Called when a call of this module is about to be reported. Reports the module's calls whose softmax came
        before it (the first `n_earlier` of all), so that their order is that of the softmaxes.

        Those of the same q and k are dropped: a program looks at its weights so (their entropy, a picture)."""
        for waiting in self.waiting[:n_earlier]:
            if waiting.frame is frame and not waiting.is_matrix:
                self.waiting.remove(waiting)
                if not _are_equal(waiting.call, call):
                    self._report(frame, waiting.call)
        self.latest[id(frame)] = call

    def end(self, frame: ModuleCall) -> None:
        """Called when a module's call ends: its weights that met no values may do so in a way that is not seen."""
        latest = self.latest.pop(id(frame), None)
        for waiting in self._waiting_in(frame):
            self.waiting.remove(waiting)
            is_new = latest is None or not _are_equal(waiting.call, latest)
            if is_new and not waiting.is_matrix:
                self._report(frame, waiting.call)

    def end_all(self) -> None:
        """Called when the pass is over."""
        while self.waiting:
            self.end(self.waiting[0].frame)
        self.latest.clear()


def _are_equal(first: Seen, second: Seen) -> bool:
    """True if two calls are of the same q and k, up to their dtype and a constant factor."""
    pairs = (first.q, second.q), (first.k, second.k)
    for a, b in pairs:
        if a is None or b is None or a.shape != b.shape:
            return False
        units = [x.detach().double() / x.detach().double().norm() for x in (a, b)]
        if not torch.allclose(*units, rtol=1e-4, atol=1e-8):
            return False
    return True


def _beyond(operation: str) -> str:
    """Why scores are unknown after an operation."""
    words = {
        "setitem": "a write into a part of a tensor",
        "sub": "the subtraction of a number per row, as in a softmax over blocks of keys",
        "topk": "a selection of the largest",
    }
    return f"its scores could not be followed beyond {words.get(operation, operation)}"


def _joined_beside(
    parts: Sequence[Tensor], tags: Sequence[object], name: str, dtype: torch.dtype
) -> Tensor | None:
    """What goes with scores that are joined, such as their masks, with zeros for other columns; None if none has any."""
    values = [getattr(tag, name, None) for tag in tags]
    if not any(value is not None for value in values):
        return None
    columns = [
        x.new_zeros(x.shape, dtype=dtype) if value is None else value.expand_as(x)
        for x, value in zip(parts, values)
    ]
    return torch.cat(columns, -1)


def products_of(tag: Scores | Lost) -> set[tuple[int, int]]:
    """The factors of the products in scores, as pairs of object ids."""
    return {
        (id(first), id(second)) for first, second in (p.factors for p in tag.products)
    }


def _sum(first: Scores, second: Scores, factor: float, step: Step) -> Scores | None:
    """The tag of the sum of `factor` times one tensor of scores and another; None if one of them is capped before."""
    if first.cap is not None or second.cap is not None:
        return None
    frames = [tag.frame.shared_with(step.frame) for tag in (first, second)]
    total = Scores(
        products=tuple(
            widened(product, step.out.ndim)
            for product in (*first.products, *second.products)
        ),
        frame=max(frames, key=lambda frame: len(frame.line())),
        scale=first.scale * factor,
        keys=first.keys or second.keys,
    )
    for tag in (first, second):
        if tag.hidden is not None:
            total = total.hiding(tag.hidden, step.out)
        if tag.bias is not None:
            bias = tag.bias if tag is second or factor == 1 else factor * tag.bias
            bias = bias if total.bias is None else total.bias + bias
            total = dataclasses.replace(total, bias=bias)
    return total


def _viewed(step: Step, tag: Scores, x: Tensor) -> Scores | None:
    """The tag of a view of scores x, which is also one of their masks and of the logits before a cap."""
    name, out, args, kwargs = step.name, step.out, step.args[1:], step.kwargs
    if name == "pad" and step.argument("value", 3):
        return None
    function = view_function(name)

    @torch.no_grad()
    def view(y: Tensor) -> Tensor:
        y = y.broadcast_to(x.shape)
        # Not all functions take booleans.
        if y.dtype == torch.bool:
            return function(y.to(torch.uint8), *args, **kwargs).bool()
        return function(y, *args, **kwargs)

    keys = tag.keys
    if keys is not None and out.shape[-1] < min(keys[1], x.shape[-1]):
        keys = None
    return dataclasses.replace(
        tag,
        products=tuple(
            viewed(product, name, x, step.args, kwargs, out) for product in tag.products
        ),
        keys=keys,
        **tag.beside(("hidden", *LOGITS), view),
    )


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
