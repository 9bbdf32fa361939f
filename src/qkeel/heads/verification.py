"""Checks by experiment that the known weights of a site make its logits, head by head.

The operators of a recorded pass between a site's projections and its logits are repeated with other weights. Nothing of
the model is changed or run again, and whatever else depends on the same weights (later layers, other calls of the
module) does not change.

The layers of a model mostly run the same operators on tensors of the same form: whether a row moves a logit is decided
by these operators and by what is zero or hidden, not by the other numbers. So the experiment is made on the first site
of each kind. A further one of that kind is compared with it operator by operator, with its zeros, its indices and what
it hides; wherever anything differs, it gets a separate experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import tensors
from qkeel.capture.intercept import CapturedCall
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.heads.walk import (
    Contents,
    Lookup,
    Operation,
    Place,
    Record,
    Repetition,
    Values,
    at_place,
    memory,
    place,
    stored,
)
from qkeel.patching.modes import Args, Kwargs, TorchOperator, function_name
from qkeel.spec import AttentionCall

Parameters = Mapping[str, nn.Parameter]
Chosen = tuple[HeadSlice, Sequence[int] | None]  # the rows of one weight, and of which of their heads; None for all
_ROWS = 32  # enough to see a head's logits move
_AT_ONCE = 1 << 23  # numbers of changed weights that are held at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A captured call, and how many operators had run before it."""

    captured: CapturedCall
    until: int


@final
class Verification:
    """Experiments on the sites of a recorded pass.

    Args:
        model: the model.
        operators: those of the pass.
        given: its arguments.
    """

    def __init__(self, model: nn.Module, operators: Sequence[TorchOperator], given: tuple[Args, Kwargs]) -> None:
        self.model, self.record = model, Record(operators)
        self.dynamic = self.record.reached(map(memory, tensors(given)))
        self.kinds: dict[Hashable, _Kind] = {}

    @torch.no_grad()
    def site(self, site: AttentionSite, calls: Sequence[RecordedCall]) -> AttentionSite:
        """A site, with the reason where the experiment does not confirm its weights.

        Args:
            site: the site.
            calls: its first call, or one for each head where heads are computed one by one.
        """
        if not site.terms:
            return site
        experiment = _Experiment(self, site, calls)
        try:
            why = next(experiment.doubts(), "")
        except Exception as error:
            why = (
                "the operators between its weights and its logits could not be repeated: "
                f"{type(error).__name__}: {error}"
            )
        return dataclasses.replace(site, unverified=why, unscaled="" if why else experiment.unscaled)

    @torch.no_grad()
    def is_of_known_kind(self, site: AttentionSite, calls: Sequence[RecordedCall]) -> bool:
        """True if this site's weights pass through the same operators as those of a confirmed site."""
        try:
            experiment = _Experiment(self, site, calls)
            return not any(experiment.unfit()) and experiment.is_known()
        except Exception:
            return False


@final
class _Experiment:
    """The experiment on one site."""

    def __init__(self, among: Verification, site: AttentionSite, calls: Sequence[RecordedCall]) -> None:
        self._among, self._site, self._calls = among, site, calls
        self.unscaled = ""  # once `doubts` found none: how the logits do not grow with the rows

    def unfit(self) -> Iterator[str]:
        """The reasons why no experiment is possible."""
        site = self._site
        if not self._calls:
            yield "the recorded pass did not show it again"
            return
        self._logits = RepeatedLogits([call.captured.call for call in self._calls])
        self._seen = self._logits()
        if any(z.shape[1] != site.n_heads for z in self._seen):
            yield f"the recorded pass showed {self._seen[0].shape[1]} heads in the place of {site.n_heads}"
            return
        if not any(bool(z.isfinite().any()) for z in self._seen):
            yield "every key is hidden from its queries in this example"

    def is_known(self) -> bool:
        """True if the experiment would give the same result as at another site."""
        chains = [side for term in self._site.terms for side in (term.query, term.key)]
        self._weights = ChangedWeights(self._among.model, [*self._site.query, *self._site.key], chains)
        parameters = self._weights.parameters
        self._path = Path(self._among.record, self._among.dynamic, self._site, parameters, self._logits, self._calls)
        self._narrow = Repetition(self._path.own, set(map(memory, parameters.values())))
        self._wide = Repetition(self._path.wide, self._path.changed)
        self._form, self._kind = self._looked_at([*self._narrow.operations, *self._wide.operations])
        known = self._among.kinds.get(self._form)
        if known is None or not self._kind.zeros_as_in(known):
            return False
        self.unscaled = known.unscaled
        return True

    def doubts(self) -> Iterator[str]:
        """The reasons not to trust the weights that are known, the simplest first."""
        unfit = next(self.unfit(), "")
        if unfit:
            yield unfit
            return
        if self.is_known():
            return
        again = self._narrow({})
        if any(self._heads_that_change(self._seen, self._logits(again))):
            yield "the operators between its weights and its logits gave other logits when they were repeated"
            return
        yield from self._heads(self._narrow, again)
        yield from self._rest(self._wide, self._path)
        self.unscaled = "" if self._site.normed else next(self._disproportions(self._narrow), "")
        # nobody asks for more unless no doubt was found
        self._among.kinds[self._form] = dataclasses.replace(self._kind, unscaled=self.unscaled)

    def _looked_at(self, operations: Sequence[Operation]) -> tuple[Hashable, _Kind]:
        """The form of all that decides which rows move which logits, and the numbers that it starts from."""
        site = self._site
        own = set(map(memory, self._weights.parameters.values()))
        form = _Form()
        steps = [(id(o.function), form.of(o.args), form.of(o.kwargs), form.of(o.out, made=True)) for o in operations]
        rows = [
            (s.axis, s.index.shape, s.index.cpu().numpy().tobytes(), s.bias_shift, *map(form.of, self._weights.of(s)))
            for s in (*site.query, *site.key)
        ]
        logits = [form.of((_signature(call.captured.call), *_tensors(call.captured.call))) for call in self._calls]
        heads = (site.n_heads, site.n_kv_heads, site.key_heads, site.normed)
        terms = tuple((len(t.query), len(t.key)) for t in site.terms)
        boundary = form.of(self._path.boundary)
        changed = frozenset(form.number(m) for m in self._path.changed)
        found = _Kind(
            given=[x for x in form.given if memory(x) not in own],
            dynamic=self._among.dynamic,
            visible=[z.isfinite() for z in self._seen],
            empty=self._weights.empty,
        )
        return (tuple(steps), tuple(rows), tuple(logits), heads, terms, boundary, changed), found

    def _heads(self, narrow: Repetition, again: Lookup) -> Iterator[str]:
        """Rows that move the logits of other heads than theirs, or none."""
        now = narrow(self._weights.base()) if any(self._weights.empty) else again
        self._base = base = self._logits(now)
        patterns = [p for slices in (self._site.query, self._site.key) for p in _patterns(slices, self._site)]
        changes = [functools.partial(self._weights.rotated, chosen) for chosen, _, _ in patterns]
        for (chosen, expected, several), after in zip(patterns, self._after(narrow, changes)):
            moved = self._heads_that_change(base, after)
            if moved != expected and not (sum(moved) == 0 and several and self._idle(narrow, chosen, now)):
                yield _words(chosen, moved, expected)
                return

    def _disproportions(self, narrow: Repetition) -> Iterator[str]:
        """Rows that are multiplied by a factor c, and logits that are then no constant plus c times another.

        A clip multiplies rows of q and of k, and a bound on steps counts on the same: logits are a product. Half of the
        heads are changed at a time, since a step of quantisation is one that all heads share.
        """
        site, several = self._site, len(self._site.query) + len(self._site.key) > 2
        last = [_each_once(paths) for paths in ([t.query[-1] for t in site.terms], [t.key[-1] for t in site.terms])]
        alike = any(s.parameter == other.parameter and s.same(other) for s in last[0] for other in last[1])
        # Where q and k are made by the same rows, each takes a root.
        sides = [("query and key", _each_once([*last[0], *last[1]]), 0.5)] if alike else []
        sides += [] if alike else [("query", last[0], 1.0), ("key", last[1], 1.0)]
        for words, slices, power in sides:
            most = max(s.n for s in slices)
            for first in range(2 if most > 1 else 1):
                numbers = list(range(first, most, 2 if most > 1 else 1))
                chosen = [(s, numbers) for s in slices if s.n == most]
                expected = _expected(site, most, set(numbers))
                changes = [functools.partial(self._weights.multiplied, chosen, c**power) for c in (4.0, 16.0)]
                one, two = self._after(narrow, changes)
                bent, whole = (_per_head(self._base, one, two, factor) for factor in (4.0, 0.0))
                for h, should in enumerate(expected):
                    noise = 64 * self._rounding
                    if should and not several and whole[h] <= self._rounding:
                        grew = "left them as they were"
                    elif bent[h] > max(1e-2 * whole[h], noise) if should else whole[h] > noise:
                        grew = "did not change them in proportion" if should else f"also changed those of head {h}"
                    else:
                        continue
                    yield (
                        f"multiplying the {words} rows of {_heads(numbers)} by {4.0**power:g} and by {16.0**power:g} "
                        f"{grew}: these logits are no plain product of queries and keys"
                    )
                    return

    def _after(
        self, repetition: Repetition, changes: Sequence[Callable[[], Values]], contents: Contents | None = None
    ) -> Iterator[list[Tensor]]:
        """The logits after each of several changes of the weights: of small ones all at once."""
        numbers = sum(p.numel() for p in self._weights.parameters.values())
        if len(changes) > 1 and numbers * len(changes) <= _AT_ONCE and self._logits.foldable:
            values = [{where: x.clone() for where, x in change().items()} for change in changes]
            found = repetition.at_once(values, self._logits.tensors, contents)
            if found is not None:
                yield from self._logits.of_several(found)
                return
        for change in changes:
            yield self._logits(repetition(change(), contents))

    def _idle(self, narrow: Repetition, chosen: Sequence[Chosen], before: Lookup) -> bool:
        """True if these weights are multiplied, but with nothing but zeros: one of several on this side."""
        after = narrow(self._weights.rotated(chosen))
        made = {memory(self._weights.parameters[s.parameter]) for s, _ in chosen}
        outputs = [x for operation in narrow.products(made) for x in tensors((operation.out,))]
        return bool(outputs) and all(torch.equal(before(x), after(x)) for x in outputs)

    def _rest(self, wide: Repetition, path: Path) -> Iterator[str]:
        """An additive part of the logits whose weights are unknown."""
        site, w = self._site, self._weights
        one, other = path.inputs()
        both = ("", "with all the rows that are known at zero its logits still change", site.query + site.key, None)
        query, key = (
            (
                f" from {side} to {side}",
                f"with the {side} rows that are known at zero its logits still change",
                own,
                dim,
            )
            for side, own, dim in (("query", site.query, 2), ("key", site.key, 3))
        )
        # What a norm adds to zero is no weight's: behind one, only all of them at zero leave nothing.
        sides = (both,) if site.normed else (query, key)
        zeros = [functools.partial(w.zeroed, slices) for _, _, slices, _ in sides]
        changed, *afters = self._after(wide, [w.base, *zeros], other)
        scale = [float(difference(a, b).max()) for a, b in zip(self._base, changed)]
        for (where, words, _, dim), before, after in zip(sides, self._after(wide, zeros, one), afters):
            if dim is not None:
                # A constant in the place of a query makes one number per key, which is not a product.
                before, after = ([z - z.nanmean(dim, keepdim=True) for z in parts] for parts in (before, after))
            if self._varies(before, after, scale):
                yield f"{words}{where} with its input: a part of them comes from other weights"

    def _varies(self, a: list[Tensor], b: list[Tensor], scale: list[float]) -> bool:
        noise = 4 * self._rounding
        return any(float(difference(x, y).max()) > max(1e-3 * s, noise) for x, y, s in zip(a, b, scale))

    @functools.cached_property
    def _rounding(self) -> float:
        """The most that rounding may change of a logit."""
        least = min(self._weights.parameters.values(), key=lambda p: torch.finfo(p.dtype).bits).dtype
        steps = 4 if torch.finfo(least).bits < 32 else 64
        return steps * torch.finfo(least).eps * max(float(z.abs().nan_to_num(0.0).max()) for z in self._seen)

    def _heads_that_change(self, before: list[Tensor], after: list[Tensor]) -> list[bool]:
        """Of each head, whether its logits changed by more than rounding."""
        change = torch.stack([difference(a, b).amax((0, 2, 3)) for a, b in zip(before, after)]).amax(0)
        return (change > self._rounding).tolist()


def _patterns(slices: Sequence[HeadSlice], site: AttentionSite) -> Iterator[tuple[list[Chosen], list[bool], bool]]:
    """Rows to change and the heads whose logits must move then, and each weight as a whole; whether it is one of
    several weights of this side.

    Group testing: every head is changed in half of the changes, no two heads in the same half. So if a row also makes
    another head, some change of the row comes without a change of that head.
    """
    per_head = [s for s in slices if s.n > 1]
    for n in sorted({s.n for s in per_head}):
        own = [s for s in per_head if s.n == n]
        changes = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= n)
        codes = list(itertools.islice(itertools.combinations(range(changes), changes // 2), n))
        for change in range(changes):
            heads = [h for h in range(n) if change in codes[h]]
            if heads:
                yield [(s, heads) for s in own], _expected(site, n, set(heads)), len(slices) > 1
    alone = [s for s in slices if s.n == 1 or len(slices) > 1]
    for s in alone:
        yield [(s, None)], [True] * site.n_heads, len(slices) > 1


def _each_once(slices: Sequence[HeadSlice]) -> list[HeadSlice]:
    found: list[HeadSlice] = []
    for s in slices:
        if not any(s.parameter == other.parameter and s.same(other) for other in found):
            found.append(s)
    return found


def _per_head(base: list[Tensor], one: list[Tensor], two: list[Tensor], factor: float) -> list[float]:
    """The largest |(two - one) - factor · (one - base)| of each head, where no key is hidden."""
    bent = [((c - b) - factor * (b - a)).abs().nan_to_num(0.0).amax((0, 2, 3)) for a, b, c in zip(base, one, two)]
    return torch.stack(bent).amax(0).tolist()


def _expected(site: AttentionSite, n: int, chosen: set[int]) -> list[bool]:
    """The query heads that use one of the chosen n parts of a weight."""
    return [h in chosen for h in site.used(n).tolist()]


def _words(chosen: Sequence[Chosen], moved: Sequence[bool], expected: Sequence[bool]) -> str:
    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
    heads, should = ([h for h, yes in enumerate(given) if yes] for given in (moved, expected))
    return (
        f"changing the rows of {names} known for the logits of {_heads(should)} changed the logits of {_heads(heads)}"
    )


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
    return f"{'heads' if len(numbers) > 1 else 'head'} {shown}" if numbers else "no head"


@final
class Path:
    """The path to the logits of one site: `own` are the operators from the products with its weights onwards, `wide`
    those from the input of its module, `boundary`, onwards. `changed` is the memory of the weights and of that input.

    What a weight is multiplied by counts as fixed in `own`, whatever else depends on the weight.
    """

    def __init__(
        self,
        record: Record,
        dynamic: set[int],
        site: AttentionSite,
        parameters: Parameters,
        logits: RepeatedLogits,
        calls: Sequence[RecordedCall],
    ) -> None:
        self._record, self._dynamic, self._until = record, dynamic, max(one.until for one in calls)
        known = {memory(p) for p in parameters.values()}
        first = [
            {memory(parameters[path[0].parameter]) for path in paths}
            for paths in ([term.query for term in site.terms], [term.key for term in site.terms])
        ]
        biases = {memory(parameters[s.bias]) for s in (*site.query, *site.key) if s.bias is not None}
        made = [record.weights_of(side, known, dynamic) for side in first]
        since = self._begin(calls[0], made[0] | made[1])
        query, key = (record.reached(side, since, self._until) for side in made)
        self._sides = ((made[0], key - query), (made[1], query - key))
        self._known = known.union(*made, record.weights_of(biases, known, dynamic))
        wanted = set(map(memory, logits.tensors))
        self.own = record.behind(wanted, self._until, self._activations)
        factors = {m for operation in self.own for m in self._activations(operation)}
        self.boundary, begin = self._inputs(calls, factors)
        given = {memory(x): begin if begin else record.maker(memory(x), self._until) for x in self.boundary}
        below = record.reached(given, 0, self._until)
        self.wide = record.behind(wanted, self._until, lambda o: self._activations(o) - below, given)
        self.changed = known | {*given}

    def _activations(self, operation: Operation) -> frozenset[int]:
        """The memory of what an operator multiplies a first weight by: not of what it puts next to it, nor of queries
        that a table is multiplied by."""
        found: frozenset[int] = frozenset()
        for made, other in self._sides if function_name(operation.function) != "cat" else ():
            if not made.isdisjoint(operation.reads):
                found |= operation.reads - self._known - other
        return found

    def _begin(self, call: RecordedCall, made: set[int]) -> int:
        """The number of operators that had run when the innermost module began that reads these weights."""
        read = max(self._record.readers(made, self._until), default=0)
        begun = (frame.since for frame in call.captured.frame.line())
        return next((since for since in begun if since <= read), 0)

    def _inputs(self, calls: Sequence[RecordedCall], factors: set[int]) -> tuple[list[Tensor], int]:
        """The inputs of the innermost module around the site that its projections depend on and that the model's
        input made, and how many operators had run when it began; where there is none, what they multiply, and 0."""
        for frame in calls[0].captured.frame.line():
            if not frame.inputs:
                continue
            inside = self._record.behind(factors, self._until, since=frame.since)
            behind = self._dynamic & factors.union(*(operation.reads for operation in inside))
            found = [x for x in frame.inputs if x.is_floating_point() and memory(x) in behind]
            if found:
                return found, frame.since
        given = (x for operation in self.own for x in tensors((operation.args, operation.kwargs)))
        return [x for x in given if memory(x) in factors and x.is_floating_point()], 0

    def inputs(self) -> tuple[Contents, Contents]:
        """The memory of the module's input as it was, and with noise of the size of its numbers added."""
        one, other = ({memory(x): x.untyped_storage().clone() for x in self.boundary} for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for x in {place(x): x for x in self.boundary}.values():
            changed = stored(at_place(x, other[memory(x)]))
            noise = torch.randn(changed.shape, generator=generator).to(x)
            size = x.detach().float().square().mean().sqrt()
            changed.add_(noise * size.to(x))
        return one, other


class ChangedWeights:
    """Copies of a site's weights in which the rows of some heads are changed. Heads whose rows are all zero, as in an
    adapter before its first step, get small random ones first: what zero is multiplied by changes no logit. So do those
    whose product with the weight before them is zero, as where an adapter starts from two orthogonal matrices: `chains`
    are the weights of each path, input first.
    """

    def __init__(
        self, model: nn.Module, slices: Sequence[HeadSlice], chains: Iterable[Sequence[HeadSlice]] = ()
    ) -> None:
        names = dict.fromkeys(name for s in slices for name in (s.parameter, s.bias) if name is not None)
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        self._slices = slices
        self.empty = [self._fill(s, self._without_numbers(s)) for s in slices]
        for chain in chains:
            for inner, outer in itertools.pairwise(chain):
                self.empty.append(self._fill(outer, self._vanishing(inner, outer)))
        self._copies: dict[str, Tensor] = {}
        self._changed: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, which of them, what they were

    def of(self, s: HeadSlice) -> list[nn.Parameter | None]:
        """The weight of these rows and its bias."""
        return [None if name is None else self.parameters[name] for name in (s.parameter, s.bias)]

    def base(self) -> dict[Place, Tensor]:
        """The weights without heads of zeros, with which all others are compared."""
        return {place(self.parameters[name]): value for name, value in self._base.items()}

    def rotated(self, chosen: Iterable[Chosen]) -> dict[Place, Tensor]:
        """Moves each row of the chosen heads to the place of the next row of its head; a single row changes its sign.

        A norm over the head, or over all heads together, keeps its value, so no other head changes. Rows that make
        queries and keys alike are stretched instead, since no rotation of both changes their product. The result is
        valid until the next change.
        """
        return self._with(
            (rows, index, self._other(s, rows[index])) for s, heads in chosen for rows, index in self._rows(s, heads)
        )

    def _other(self, s: HeadSlice, rows: Tensor) -> Tensor:
        """Other numbers in the place of rows [heads r …]."""
        if sum(s.parameter == other.parameter and s.same(other) for other in self._slices) > 1:
            factors = 0.5 + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device) % 2
            return rows * factors.view(-1, *[1] * (rows.ndim - 2))
        return rows.roll(1, dims=1) if rows.shape[1] > 1 else -rows

    def multiplied(self, chosen: Iterable[Chosen], factor: float) -> dict[Place, Tensor]:
        """The rows and biases of the chosen heads multiplied by a factor, until the next change."""
        return self._with(
            (rows, index, rows[index] * factor) for s, heads in chosen for rows, index in self._rows(s, heads)
        )

    def zeroed(self, slices: Iterable[HeadSlice]) -> dict[Place, Tensor]:
        """All these rows and their biases are zero, until the next change."""
        return self._with(
            (rows, index, torch.zeros((), dtype=rows.dtype, device=rows.device))
            for s in slices
            for rows, index in self._rows(s, None)
        )

    def _with(self, changes: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[Place, Tensor]:
        """The weights with these numbers in these rows, copied once and put back before the next change."""
        for rows, index, before in reversed(self._changed):
            rows[index] = before
        self._changed.clear()
        for rows, index, numbers in changes:
            self._changed.append((rows, index, rows[index]))
            rows[index] = numbers
        return {place(p): self._copies.get(name, self._base[name]) for name, p in self.parameters.items()}

    def _rows(self, s: HeadSlice, heads: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows [rows …] of a copied weight and of its bias, and which of them belong to the heads [heads r]."""
        for part in filter(None, (s, s.bias_of())):
            if part.parameter not in self._copies:
                self._copies[part.parameter] = self._base[part.parameter].clone()
            copy = self._copies[part.parameter]
            index = part.index if heads is None else part.index[list(heads)]
            yield (s.rows_of(copy) if part is s else copy.view(-1, 1)), index.to(copy.device)

    def _without_numbers(self, s: HeadSlice) -> Tensor | None:
        """Which heads' rows have zeros alone."""
        weight = self._base[s.parameter]
        if bool(weight.ne(0).all()):
            return None
        return ~s.rows_of(weight)[s.index.to(weight.device)].ne(0).flatten(1).any(1)

    def _vanishing(self, inner: HeadSlice, outer: HeadSlice) -> Tensor | None:
        """Of which heads the product of two weights is zero up to rounding; None where these do not follow on rows."""
        first, second = (s.rows_of(self._base[s.parameter]) for s in (inner, outer))
        if first is second or inner.n != 1 or inner.index.shape[1] != second.shape[1] or first.device != second.device:
            return None
        before, after = first[inner.index[0].to(first.device)], second[outer.index.to(second.device)]
        size = after.flatten(1).norm(dim=1) * before.norm()
        return (after @ before).flatten(1).norm(dim=1) <= 8 * torch.finfo(after.dtype).eps * size

    def _fill(self, s: HeadSlice, empty: Tensor | None) -> tuple[int, ...]:
        """Puts small random rows in the place of those of heads that are empty, and returns which these are."""
        if empty is None or not bool(empty.any()):
            return ()
        rows = s.rows_of(self._base[s.parameter])
        index = s.index.to(rows.device)
        generator = torch.Generator().manual_seed(0)
        index = index[empty]
        noise = torch.randn(*index.shape, rows.shape[1], generator=generator) * rows.shape[1] ** -0.5
        self._base[s.parameter] = self._base[s.parameter].clone()
        s.rows_of(self._base[s.parameter])[index] = noise.to(rows)
        return tuple(empty.nonzero().flatten().tolist())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """The numbers that a site's logits start from, besides its weights, and where there are zeros among them.

    Args:
        given: the tensors that its operators read and do not make.
        dynamic: the memory of all that depends on the model's input.
        visible: which logits are not hidden.
        empty: the heads without a number in each weight.
        unscaled: as of a site.
    """

    given: list[Tensor]
    dynamic: set[int]
    visible: list[Tensor]
    empty: list[tuple[int, ...]]
    unscaled: str = ""

    def zeros_as_in(self, other: _Kind) -> bool:
        """True if whatever is zero, hidden or an index here is so there too."""
        if self.empty != other.empty or not all(map(torch.equal, self.visible, other.visible)):
            return False
        return all(map(self._alike, self.given, other.given))

    def _alike(self, x: Tensor, y: Tensor) -> bool:
        if place(x) == place(y):
            return True
        if not (x.is_floating_point() or x.is_complex()):
            return torch.equal(x, y)
        if memory(x) in self.dynamic:
            return bool(x.any())
        return torch.equal(x != 0, y != 0)


@final
class _Form:
    """Numbers memory in the order in which it is met, so that equal operators on other tensors have one form."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []  # every tensor in memory that an operator read before any wrote it
        self._outside: set[int] = set()  # that memory
        self._numbers: dict[int, int] = {}
        self._met: dict[int, tuple[Tensor, Hashable]] = {}  # by id: an operator's output is the argument of others

    def number(self, m: int) -> int:
        """The number of a piece of memory."""
        return self._numbers.setdefault(m, len(self._numbers))

    def of(self, value: object, *, made: bool = False) -> Hashable:
        """Returns a value for arguments, or for what an operator `made`, that is equal if they differ only in
        numbers."""
        if isinstance(value, Tensor):
            if (known := self._met.get(id(value))) is not None:
                return known[1]
            where = place(value)
            if where[0] not in self._numbers and not made:
                self._outside.add(where[0])
            if where[0] in self._outside:
                self.given.append(value)
            form = (self.number(where[0]), *where[1:], value.device)
            self._met[id(value)] = (value, form)
            return form
        if isinstance(value, (tuple, list)):
            return tuple([self.of(x, made=made) for x in value])
        if isinstance(value, Mapping):
            return tuple([(name, self.of(x)) for name, x in value.items()])
        return type(value), value if isinstance(value, Hashable) else id(value)


def _signature(call: Seen) -> Hashable:
    """What makes the logits of a call of its tensors; of one whose mask is a function, the call itself."""
    if isinstance(call, ScoresCall):
        return "scores", call.headless
    plain = type(call) is AttentionCall and call.spec.position.kind == "none" and not call.window
    return ("products", call.spec, call.causal) if plain else id(call)


def unchanged(x: Tensor) -> Tensor:
    """Returns the tensor itself, for logits as they were recorded."""
    return x


class RepeatedLogits:
    """Reads the logits [b h t s] of a site's calls, NaN where a key is hidden."""

    def __init__(self, calls: Sequence[Seen]) -> None:
        self._headless = isinstance(calls[0], ScoresCall) and calls[0].headless
        self._calls = calls
        self.tensors = [x for call in self._calls for x in _tensors(call)]
        self._rows = [_rows(call) for call in self._calls]

    @torch.no_grad()
    def __call__(self, now: Lookup = unchanged) -> list[Tensor]:
        found = [_logits(call, rows, now) for call, rows in zip(self._calls, self._rows)]
        return [torch.cat(found, 1)] if self._headless else found

    @property
    def foldable(self) -> bool:
        """True if the logits of several changes can be read as those of a larger batch."""
        return not self._headless and all(type(call) in (AttentionCall, ScoresCall) for call in self._calls)

    @torch.no_grad()
    def of_several(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The logits of each of n changes, from the values of `self.tensors` under each, [n ...]."""
        n, given = len(tensors[0]), iter(tensors)
        found = []
        for call, rows in zip(self._calls, self._rows):
            b = call.query_shape[0]
            now = {id(x): _folded(next(given), b) for x in _tensors(call)}
            z = _logits(_of_batch(call, n), rows, lambda x, now=now: now.get(id(x), x))
            found.append(z.unflatten(0, (n, b)).unbind(0))
        return [list(parts) for parts in zip(*found)]


def _folded(x: Tensor, b: int) -> Tensor:
    """[n b|1 ...] as [(n b) ...]."""
    return x.expand(-1, b, *x.shape[2:]).flatten(0, 1)


def _of_batch(call: Seen, n: int) -> Seen:
    """A call whose batch is repeated n times, but for the tensors that its logits are read from."""

    def times(x: Tensor | None) -> Tensor | None:
        return x if x is None or len(x) == 1 else x.repeat(n, *[1] * (x.ndim - 1))

    if isinstance(call, ScoresCall):
        return dataclasses.replace(call, hidden=times(call.hidden))
    mask = call.mask if call.mask is None or call.mask.dtype != torch.bool else times(call.mask)
    return dataclasses.replace(call, mask=mask, pos_q=times(call.pos_q), pos_k=times(call.pos_k))


def _tensors(call: AttentionCall | ScoresCall) -> list[Tensor]:
    """The tensors that the logits are read from."""
    if isinstance(call, ScoresCall):
        return [call.logits]
    mask = [] if call.mask is None or call.mask.dtype == torch.bool else [call.mask]
    return [call.q, call.k, *mask]


@torch.no_grad()
def _rows(call: AttentionCall | ScoresCall) -> slice:
    """The last rows or the first, whichever have more logits: some are of padding."""
    t = call.query_shape[1]
    last, first = slice(max(0, t - _ROWS), t), slice(0, min(t, _ROWS))
    if t <= _ROWS or (type(call) is AttentionCall and call.mask is None):
        return last
    return max(last, first, key=lambda rows: int(_logits(call, rows, unchanged).nan_to_num(0.0).count_nonzero()))


def _logits(call: AttentionCall | ScoresCall, rows: slice, now: Lookup) -> Tensor:
    if isinstance(call, ScoresCall):
        z = now(call.logits)[:, :, rows]
        z, visible = z.to(wide(z.dtype)), None
        if call.hidden is not None:
            visible = ~(call.hidden[:, :, rows] if call.hidden.shape[2] > 1 else call.hidden)
    else:
        mask = call.mask if call.mask is None else now(call.mask)
        changed = dataclasses.replace(call, q=now(call.q), k=now(call.k), mask=mask)
        q, k = changed.encoded()
        keys = slice(0, k.shape[2])
        z, visible = changed.scores(q[:, :, rows], k, rows, keys), changed.visible(rows, keys)
    seen = z.isfinite() & (z > torch.finfo(call.logits.dtype if isinstance(call, ScoresCall) else call.q.dtype).min / 2)
    return z.masked_fill(~(seen if visible is None else seen & visible), torch.nan)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """|b - a|, zero where a key is hidden in either."""
    return (b - a).abs().nan_to_num(0.0)
