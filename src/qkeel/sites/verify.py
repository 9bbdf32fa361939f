"""Verifies that the known weights of a site determine its logits, head by head.

A copy of the smallest module that holds the projections and the attention call runs again
with the inputs that it had, and with other weights. Where logits are plain products, one run
suffices: all rows of q and of k are multiplied by numbers that differ from head to head,
and each logit must be multiplied by the product of its two numbers. This tells every head
from every other one, and leaves no room for a part that comes from other weights.

Otherwise the rows of some heads are changed, and exactly the logits of these heads must
change. Rows are *rotated* within their head (row i takes the place of row i + 1), not
scaled: a norm over all heads keeps its value then, so that no other head moves. Each head
is in half of the changes and no two heads are in the same half, so that about log₂ h + 1
runs tell every head from every other one.

The copy is put back between runs (see `LoneCall`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.hand_written import reached
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.errors import caution
from qkeel.patching.autograd import nodes_of
from qkeel.patching.modes import CollectiveMode
from qkeel.sites.module_copy import (
    CannotRerunError,
    EnoughError,
    LoneCall,
    refuse_collective,
)
from qkeel.sites.rows import half_codes
from qkeel.sites.site import AttentionSite, HeadSlice, unique_slices

Weights = Mapping[str, Tensor]
Logits = list[Tensor]
# The rows of a weight, and some of their heads or None for all.
RowsOfHeads = tuple[HeadSlice, Sequence[int] | None]
# Enough rows of logits to see whether a head changes.
_ROWS = 32
# By which rows of queries and of keys are multiplied.
_BASES = (4.0, 3.0)


class CallPlace(NamedTuple):
    """The number of an attention call among those of a run, and the name under which each run reports it."""

    number: int
    name: str


@final
class Verification:
    """Verifies the sites of parts of a model that run alone."""

    def __init__(self) -> None:
        self._confirmed: set[str] = set()
        self._by_gradients: dict[str, str] = {}

    def site(
        self,
        lone: LoneCall,
        site: AttentionSite,
        calls: Sequence[CapturedCall],
        places: Sequence[CallPlace],
    ) -> AttentionSite:
        """Returns the site; if its weights are not confirmed, `unverified` gives the reason.

        Args:
            lone: what runs again; it is open.
            site: the site.
            calls: the first call of the site, or one call for each head if the heads are computed one by one.
            places: where they are among the calls of a run.
        """
        if not site.terms:
            return site
        doubt = unscaled = ""
        try:
            doubt, unscaled = self._check(lone, site, calls, places)
        except CannotRerunError as error:
            name = site.name or type(lone.part).__name__
            self._by_gradients[name] = str(error)
        except Exception as error:
            doubt = f"its module cannot run again: {type(error).__name__}: {error}"
        return dataclasses.replace(site, unverified=doubt, unscaled=unscaled)

    def _check(
        self,
        lone: LoneCall,
        site: AttentionSite,
        calls: Sequence[CapturedCall],
        places: Sequence[CallPlace],
    ) -> tuple[str, str]:
        """Why the weights are not confirmed, or "", and why the logits do not scale with them, or ""."""
        rerun = Rerun(lone, site, calls, places)
        heads = sum(z.shape[1] for z in rerun.recorded)
        if heads != site.n_heads:
            return f"the pass showed {heads} heads instead of {site.n_heads}", ""
        if not any(bool(z.isfinite().any()) for z in rerun.recorded):
            return "every key is hidden from its queries in this example", ""
        for path in itertools.chain(*((t.query, t.key) for t in site.terms)):
            if len({s.parameter for s in path}) < len(path):
                # Changed rows would reach the logits in two ways, by which every head moves.
                raise CannotRerunError("one weight is used twice on the way to a logit")
        weights = ChangedWeights(lone.part, site)
        experiment = Experiment(site, weights, rerun)
        unscaled = ""
        # With a single weight on each side, all of which has then been changed, nothing is left to ask.
        is_simple = len(site.query) + len(site.key) == 2
        if not (experiment.is_proportional() and is_simple):
            doubt = experiment.doubt_heads() or experiment.doubt_unknown_weights()
            if doubt:
                return doubt, ""
            unscaled = experiment.disproportion()
        self._confirmed.add(site.name)
        return "", unscaled

    def confirms(self, name: str) -> bool:
        """True if reruns have confirmed the weights of the site of this name."""
        return name in self._confirmed

    def tell(self) -> None:
        """Says once which sites were verified by gradients alone."""
        if self._by_gradients:
            names = ", ".join(self._by_gradients)
            reason = next(iter(self._by_gradients.values()))
            caution(
                f"the weights of each head of {names} are known from gradients alone: {reason}"
            )


# --- Running a module again


@final
class RepeatedCalls:
    """Reads the calls of one site in runs of a copy, each of which ends after the last of them.

    Args:
        site: the site.
        places: where its calls are among those of a run.
    """

    def __init__(self, site: AttentionSite, places: Sequence[CallPlace]) -> None:
        self._numbers = [place.number for place in places]
        names = {place.name for place in places}
        heads = site.n_heads, site.n_kv_heads
        self._known = KnownSites(
            layouts={} if site.layout is None else dict.fromkeys(names, site.layout),
            key_heads={} if site.key_heads else dict.fromkeys(names, heads),
        )

    def read(
        self,
        lone: LoneCall,
        weights: Weights | None = None,
        inputs: Mapping[int, Tensor] | None = None,
    ) -> list[CapturedCall]:
        """The calls of the site in a run with these weights and inputs.

        Raises: CannotRerunError if the run does not make them.
        """
        calls: list[CapturedCall] = []
        numbers = itertools.count()

        def note(captured: CapturedCall) -> None:
            if len(calls) < len(self._numbers):
                if next(numbers) in self._numbers:
                    calls.append(captured)
                if len(calls) == len(self._numbers):
                    raise EnoughError

        lone.run(CaptureMode(lone.part, note, known=self._known), weights, inputs)
        if len(calls) < len(self._numbers):
            raise CannotRerunError(
                "running their modules again made other attention calls"
            )
        return calls


@final
class Rerun:
    """The logits of one site, of its calls in the pass that was read and of runs with other weights and inputs.

    Attributes:
        recorded: those of the pass that was read.
    """

    def __init__(
        self,
        lone: LoneCall,
        site: AttentionSite,
        calls: Sequence[CapturedCall],
        places: Sequence[CallPlace],
    ) -> None:
        self._lone, self._calls = lone, calls
        self._readers = [LogitReader(call.call) for call in calls]
        self._repeated = RepeatedCalls(site, places)
        self.recorded = [reader.recorded for reader in self._readers]

    def check(self) -> Logits:
        """Returns the logits with the module's weights.

        Raises: CannotRerunError unless they are those of the pass that was read or, if they are random, the same in
        every run.
        """
        first = self.logits({})
        if not (_alike(first, self.recorded) or _alike(first, self.logits({}))):
            raise CannotRerunError("running their modules again gave other logits")
        return first

    def logits(
        self, weights: Weights, inputs: Mapping[int, Tensor] | None = None
    ) -> Logits:
        """The logits of the site's calls with these weights, and with other inputs, by their number, if given."""
        # One process alone repeats a run that all made together.
        alone = CollectiveMode(refuse_collective) if dist.world() > 1 else nullcontext()
        with alone:
            calls = self._repeated.read(self._lone, weights, inputs)
        return [reader(x.call) for reader, x in zip(self._readers, calls)]

    def inputs_of_heads(self) -> dict[int, Tensor]:
        """The inputs, with their numbers, from which q or k was computed in the pass that was read."""
        operands = [
            x.grad_fn
            for call in self._calls
            for pair in products_of_call(call.call)
            for x in pair
            if x is not None and x.grad_fn is not None
        ]
        inputs = self._lone.inputs
        behind = reached(operands, nodes_of(inputs))
        return {i: x.detach() for i, x in enumerate(inputs) if x.grad_fn in behind}


def products_of_call(call: Seen) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """The pairs of q and k whose products add up to the logits of a call."""
    return (
        call.products
        if isinstance(call, ScoresCall) and call.products
        else ((call.q, call.k),)
    )


# --- Reading logits


class LogitReader:
    """Reads up to 32 rows of the logits [b h t s] of a call, with NaN where a key is hidden. `recorded` holds those of
    the call in the model's pass."""

    def __init__(self, call: Seen) -> None:
        t = call.scores_shape[2]

        def shown(rows: slice) -> int:
            self._rows = rows
            return int(self(call).nan_to_num(0.0).count_nonzero())

        self._rows = slice(0, t)
        if t > _ROWS:
            # Some rows may be padding, so the end with more nonzero logits is read.
            self._rows = max(slice(t - _ROWS, t), slice(0, _ROWS), key=shown)
        self.recorded = self(call)

    @torch.no_grad()
    def __call__(self, call: Seen) -> Tensor:
        rows, keys = self._rows, slice(0, call.scores_shape[3])
        dtype = (call.logits if isinstance(call, ScoresCall) else call.q).dtype
        q, k = call.encoded()
        z = call.scores(q[:, :, rows], k, rows, keys)
        visible = call.visible(rows, keys)
        shows = z.isfinite() & (z > torch.finfo(dtype).min / 2)
        return z.masked_fill(
            ~(shows if visible is None else shows & visible), torch.nan
        )


def _alike(first: Logits, second: Logits) -> bool:
    """True if the logits differ by no more than rounding, and the same keys are hidden."""
    return all(
        a.shape == b.shape
        and torch.equal(a.isfinite(), b.isfinite())
        and _largest([a], [b]) <= 1e-2 * _largest([a])
        for a, b in zip(first, second)
    )


def _largest(logits: Logits, others: Logits | None = None) -> float:
    """The largest absolute logit, or the largest difference from others, where no key is hidden."""
    return float(_by_head(logits, others).max())


def _by_head(logits: Logits, others: Logits | None = None) -> Tensor:
    """The largest absolute logit [h] of each head, or difference from others; heads may be in several calls."""
    if others is not None:
        logits = [b - a for a, b in zip(logits, others, strict=True)]
    return torch.cat([z.abs().nan_to_num(0.0).amax((0, 2, 3)) for z in logits])


# --- The experiment on one site


@final
class Experiment:
    """Compares the logits of a site after changes of its weights and inputs."""

    def __init__(
        self, site: AttentionSite, weights: ChangedWeights, rerun: Rerun
    ) -> None:
        self._site, self._weights, self._rerun = site, weights, rerun
        # The logits with the known weights as they are, which every change is compared with.
        self._base = rerun.check()
        if weights.filled():
            self._base = rerun.logits(weights.filled())
        dtypes = [torch.finfo(p.dtype) for p in weights.parameters.values()]
        least = min(dtypes, key=lambda dtype: dtype.bits)
        steps = 4 if least.bits < 32 else 64
        #: the largest relative and absolute change of a logit that rounding may cause
        self._relative = steps * least.eps
        self._rounding = self._relative * _largest(self._base)

    def _sides(self) -> dict[str, list[HeadSlice]]:
        """The last weights of q and of k, or all of them if these are the same."""
        query = unique_slices(term.query[-1] for term in self._site.terms)
        key = unique_slices(term.key[-1] for term in self._site.terms)
        distinct = unique_slices([*query, *key])
        if len(distinct) < len(query) + len(key):
            return {"query and key": distinct}
        return {"query": query, "key": key}

    def _multiplied(
        self, sides: Iterable[Sequence[HeadSlice]]
    ) -> tuple[Tensor, float, Logits]:
        """Multiplies the rows of sides by numbers that differ from head to head. Returns the product [h] of each head's
        numbers, how far two of them are apart at least, relative to one, and the logits."""
        weights: Weights = self._weights.filled()
        factors, least = torch.ones(self._site.n_heads), math.inf
        for base, slices in zip(_BASES, sides):
            numbers = _multipliers(slices, base)
            n = len(numbers)
            least = min(least, abs(base ** (1 / n) - 1))
            for s in slices:
                by_head = numbers.expand(s.n) if n == 1 else numbers
                weights = self._weights.multiplied([(s, None)], by_head, weights)
            factors = factors * numbers[self._site.used(n)]
        return factors, least, self._rerun.logits(weights)

    def is_proportional(self) -> bool:
        """True if multiplying the rows of all query heads and of all key heads by different numbers multiplies the
        logits of each head by the numbers of its two heads, and by nothing else."""
        sides = self._sides()
        if self._site.normed or len(sides) < 2:
            return False
        factors, least, after = self._multiplied(sides.values())
        expected = _times(self._base, factors)
        # Small logits don't tell the numbers of two heads apart.
        limit = 4 * self._relative * _largest(expected)
        is_clear = bool((_by_head(expected) * least > 4 * limit).all())
        return is_clear and _largest(expected, after) <= limit

    def _moved(self, chosen: Sequence[RowsOfHeads]) -> list[bool]:
        """For each head, whether its logits change if rows are rotated."""
        after = self._rerun.logits(self._weights.rotated(chosen))
        return (_by_head(self._base, after) > self._rounding).tolist()

    def doubt_heads(self) -> str:
        """Rows that change the logits of heads other than their own, or of no head."""
        for slices in (self._site.query, self._site.key):
            for chosen, expected in _patterns(slices, self._site):
                moved = self._moved(chosen)
                if moved != expected:
                    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
                    return (
                        f"changing the rows of {names} that produce the logits of {_heads(expected)} changed the "
                        f"logits of {_heads(moved)}"
                    )
        return ""

    def doubt_unknown_weights(self) -> str:
        """An additive part of the logits that comes from other weights.

        With all known weights of one side set to zero, the logits must not depend on the module's input in the way of a
        product: from query to query, or from key to key.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = self._rerun.inputs_of_heads()
        for i, x in inputs.items():
            noise = torch.randn(x.shape, generator=generator).to(x)
            inputs[i] = x + noise * x.float().square().mean().sqrt().to(x)
        if not inputs:
            return ""
        changed = self._rerun.logits(self._weights.filled(), inputs)
        limit = max(1e-3 * _largest(self._base, changed), 4 * self._rounding)
        site = self._site
        sides = [
            ("the known query rows", " from query to query", site.query, 2),
            ("the known key rows", " from key to key", site.key, 3),
        ]
        if site.normed:
            # A norm may add a constant to zeros, so nothing remains only if all weights before it are zero.
            sides = [("all known rows", "", [*site.query, *site.key], None)]
        for rows, direction, slices, dim in sides:
            zeros = self._weights.changed([(s, None) for s in slices], torch.zeros_like)
            before, after = self._rerun.logits(zeros), self._rerun.logits(zeros, inputs)
            if dim is not None:
                # A constant in place of a query gives one value per key, which is not a product.
                before, after = (
                    [z - z.nanmean(dim, keepdim=True) for z in logits]
                    for logits in (before, after)
                )
            if _largest(before, after) > limit:
                return (
                    f"with {rows} set to zero, its logits still change{direction} with its input: part of them comes "
                    "from other weights"
                )
        return ""

    def disproportion(self) -> str:
        """How the logits fail to scale with the rows of q or of k, or "".

        A clip multiplies rows of q and of k, and the bound on a step relies on the same assumption, namely that logits
        are a product: multiplied by c, they must be a constant plus c times another constant.
        """
        if self._site.normed:
            return ""
        sides = self._sides()
        for words, slices in sides.items():
            factors, _, after = self._multiplied([slices])
            if len(sides) == 1:
                factors = factors.square()
            zero = self._rerun.logits(
                self._weights.multiplied([(s, None) for s in slices], 0.0)
            )
            # Where rows are divided by their length, as in DoRA, zeros give NaN, and all but the biases stays.
            zero = [torch.where(z.isfinite(), z, x) for z, x in zip(zero, self._base)]
            expected = _times([x - z for x, z in zip(self._base, zero)], factors)
            grown = [x - z for x, z in zip(after, zero)]
            error, size = _by_head(expected, grown), _by_head(grown)
            is_bent = (error > 1e-2 * size) & (error > 64 * self._rounding)
            if bool((is_bent | (size <= self._rounding)).any()):
                return (
                    f"multiplied by 0 and by up to 16, the {words} rows did not change its logits in proportion: these "
                    "are not a plain product of queries and keys"
                )
        return ""


def _times(logits: Logits, factors: Tensor) -> Logits:
    """The logits of each head times its factor."""
    by_call = factors.split([z.shape[1] for z in logits])
    return [z * f.to(z).view(-1, 1, 1) for z, f in zip(logits, by_call)]


def _multipliers(slices: Sequence[HeadSlice], base: float) -> Tensor:
    """A number for each head of a side, or one for all where heads share a part of their rows."""
    n = min(s.n for s in slices)
    if any(s.n > n for s in slices):
        n = 1
    # Large numbers, so that a bound or a quantisation step between rows and logits shows.
    return 4 * base ** (torch.arange(1.0, n + 1) / n)


def _patterns(
    slices: Sequence[HeadSlice], site: AttentionSite
) -> Iterator[tuple[list[RowsOfHeads], list[bool]]]:
    """Yields rows to change (rows of some heads, and each weight as a whole), and the heads whose logits must change.

    This is group testing: every head is in half of the changes, and no two heads are in the same half. If a row also
    affects another head, there is therefore a change that contains the row but not that head.
    """
    for n in sorted({s.n for s in slices if s.n > 1}):
        for half in half_codes(n).T:
            heads = half.nonzero().flatten().tolist()
            if heads:
                rows: list[RowsOfHeads] = [(s, heads) for s in slices if s.n == n]
                yield rows, _expected(site, n, heads)
    for s in slices:
        if s.n == 1 or len(slices) > 1:
            yield [(s, None)], [True] * site.n_heads


def _expected(site: AttentionSite, n: int, chosen: Sequence[int]) -> list[bool]:
    """For each query head, whether it uses one of the chosen parts of a weight with n parts."""
    return [h in chosen for h in site.used(n).tolist()]


def _heads(flags: Sequence[bool]) -> str:
    heads = [str(h) for h, flag in enumerate(flags) if flag]
    listed = ", ".join(heads[:6]) + (", …" if len(heads) > 6 else "")
    return f"{'heads' if len(heads) > 1 else 'head'} {listed}" if heads else "no head"


# --- Changed weights


@final
class ChangedWeights:
    """Copies of a site's weights in which the rows of some heads are changed.

    Rows that are all zero, as in an adapter before its first step, first get small random values, because a factor of
    zero hides every change of the other factor. So do the last weights of a product of several, because an adapter may
    also start from two orthogonal matrices.
    """

    def __init__(self, model: nn.Module, site: AttentionSite) -> None:
        self._slices = [*site.query, *site.key]
        names = [name for s in self._slices for name in (s.parameter, s.bias) if name]
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        self._filled: set[str] = set()
        outer = [
            path[-1]
            for term in site.terms
            for path in (term.query, term.key)
            if len(path) > 1
        ]
        generator = torch.Generator().manual_seed(0)
        for s in self._slices:
            weight = self._base[s.parameter]
            index = s.index.to(weight.device)
            if not any(s is last for last in outer):
                if bool(weight.ne(0).all()):
                    continue
                index = index[~s.rows_of(weight)[index].ne(0).flatten(1).any(1)]
            if index.numel():
                weight = weight.clone()
                rows = s.rows_of(weight)
                shape = (*index.shape, rows.shape[1])
                noise = torch.randn(shape, generator=generator) * rows.shape[1] ** -0.5
                rows[index] = noise.to(rows)
                self._base[s.parameter] = weight
                self._filled.add(s.parameter)

    def filled(self) -> dict[str, Tensor]:
        """The weights in which no head is zero, with which all changed weights are compared."""
        return {name: self._base[name] for name in self._filled}

    def rotated(self, chosen: Iterable[RowsOfHeads]) -> dict[str, Tensor]:
        """Moves each row of the chosen heads to the place of the next row of its head; if a head has a single row, its
        sign is changed.

        Rows from which both queries and keys are computed are scaled instead, because rotating both leaves their
        product unchanged.
        """
        weights = self.filled()
        for s, heads in chosen:
            uses = [x for x in self._slices if s.parameter == x.parameter and s.same(x)]

            def rotate(rows: Tensor, uses: int = len(uses)) -> Tensor:
                n = rows.shape[1]
                if uses > 1:
                    factors = 0.5 + torch.arange(n, device=rows.device) % 2
                    return rows * factors.to(rows).view(-1, *[1] * (rows.ndim - 2))
                return rows.roll(1, dims=1) if n > 1 else -rows

            weights |= self.changed([(s, heads)], rotate, weights)
        return weights

    def multiplied(
        self,
        chosen: Iterable[RowsOfHeads],
        factor: float | Tensor,
        weights: Weights | None = None,
    ) -> dict[str, Tensor]:
        """Multiplies the rows and biases of the chosen heads by a factor, or by one for each head."""

        def multiply(rows: Tensor) -> Tensor:
            factors = torch.as_tensor(factor).to(rows)
            return rows * factors.view(-1, *[1] * (rows.ndim - 1))

        return self.changed(chosen, multiply, weights)

    def changed(
        self,
        chosen: Iterable[RowsOfHeads],
        change: Callable[[Tensor], Tensor],
        weights: Weights | None = None,
    ) -> dict[str, Tensor]:
        """The weights after a change of rows [heads r …], and of the entries of a bias at the same indices. `weights`
        are those that were changed before."""
        changed = dict(self.filled() if weights is None else weights)
        for s, heads in chosen:
            for part in filter(None, (s, s.bias_of())):
                base = self._base[part.parameter]
                if changed.get(part.parameter, base) is base:
                    changed[part.parameter] = base.clone()
                index = part.index if heads is None else part.index[list(heads)]
                index = index.to(base.device)
                rows = part.rows_of(changed[part.parameter])
                rows[index] = change(part.rows_of(base)[index])
        return changed
