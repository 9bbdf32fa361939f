"""Verifies by experiment that the known weights of a site determine its logits, head by head.

The operators of a recorded pass between a site's projections and its logits are repeated with other weights. Nothing in
the model is changed or run again, and anything else that depends on the same weights (later layers, other calls of the
module) does not change.

Most layers of a model run the same operators on tensors of the same shapes. Whether a row changes a logit depends on
these operators and on what is zero or hidden, but not on the other values. The experiment is therefore made on the
first site of each kind. Every further site of that kind is compared with the first one operator by operator, including
its zeros, its indices and its hidden pairs; if anything differs, a separate experiment is made on it. The values needed
for the comparison are computed for all sites of a kind at once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import tensors
from qkeel.capture.intercept import CapturedCall
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice, QKProduct
from qkeel.heads.walk import (
    Contents,
    Lookup,
    Operation,
    Place,
    Record,
    Repetition,
    at_place,
    contents_of,
    memory,
    place,
    stored,
)
from qkeel.patching.modes import Args, Kwargs, TorchOperator
from qkeel.spec import AttentionCall

Parameters = Mapping[str, nn.Parameter]
Chosen = tuple[HeadSlice, Sequence[int] | None]  # the rows of a weight, and some of their heads or None for all
# For each weight, or bias without a slice: its name, its slice, the indices of the rows, and their new values.
Edits = list[tuple[str, HeadSlice | None, Tensor, Tensor]]
_ROWS = 32  # enough rows to see whether the logits of a head change
_AT_ONCE = 1 << 23  # elements of changed weights that are in memory at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A captured call, and the number of operators that had run before it."""

    captured: CapturedCall
    until: int


@final
class Verification:
    """Runs experiments on the sites of a recorded pass.

    Args:
        model: the model.
        operators: the operators of the pass.
        given: the arguments of the pass.
    """

    def __init__(self, model: nn.Module, operators: Sequence[TorchOperator], given: tuple[Args, Kwargs]) -> None:
        self.model, self.record = model, Record(operators)
        self.dynamic = self.record.reached(map(memory, tensors(given)))
        self._patterns: dict[type[nn.Module], list[Pattern]] = collections.defaultdict(list)
        self._names = {place(p): name for name, p in reversed([*model.named_parameters()])}

    @torch.no_grad()
    def site(self, site: AttentionSite, calls: Sequence[RecordedCall]) -> AttentionSite:
        """Returns the site; if the experiment does not confirm its weights, `unverified` gives the reason.

        Args:
            site: the site.
            calls: the first call of the site, or one call for each head if the heads are computed one by one.
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
        site = dataclasses.replace(site, unverified=why, unscaled="" if why else experiment.unscaled)
        if not why and (pattern := Pattern.of(experiment, site, calls)) is not None:
            self._patterns[type(site.module)].append(pattern)
        return site

    @torch.no_grad()
    def another(self, calls: Sequence[RecordedCall], tried: Collection[int] = ()) -> Copy | None:
        """Looks for a confirmed site in a module of the same class whose weights pass through the same operators on the
        way to its logits. Returns this call's site as a copy of it, or None if there is no such site. `same_numbers`
        completes the comparison.

        Args:
            calls: the calls of the site.
            tried: the ids of patterns that the site is known not to match.
        """
        if len(calls) > 1:
            return None
        patterns = self._patterns.get(type(calls[0].captured.frame.module), ())
        copies = (p.copy(self.record, self.dynamic, self._names, calls[0]) for p in patterns if id(p) not in tried)
        return next((copy for copy in copies if copy is not None), None)

    @torch.no_grad()
    def same_numbers(self, copies: Sequence[Copy]) -> list[bool]:
        """For each site that `another` returned, whether the experiment on it would have the same result as the
        experiment on the confirmed site, because the same elements are zero or hidden and all indices are equal."""
        by_pattern: dict[int, list[Copy]] = {}
        for copy in copies:
            by_pattern.setdefault(id(copy.pattern), []).append(copy)
        same: dict[int, bool] = {}
        for group in by_pattern.values():
            try:
                found = group[0].pattern.same_numbers(self, group)
            except Exception:
                found = [False] * len(group)
            same |= {id(copy): yes for copy, yes in zip(group, found, strict=True)}
        return [same[id(copy)] for copy in copies]


@final
class _Experiment:
    """The experiment on one site."""

    def __init__(self, among: Verification, site: AttentionSite, calls: Sequence[RecordedCall]) -> None:
        self.among, self._site, self._calls = among, site, calls
        self.unscaled = ""  # set after `doubts` found none: how the logits fail to scale with the rows

    def unfit(self) -> Iterator[str]:
        """Yields the reasons why no experiment is possible."""
        site = self._site
        if not self._calls:
            yield "the recorded pass did not contain its attention call"
            return
        self._logits = RepeatedLogits([call.captured.call for call in self._calls])
        self.seen = self._logits()
        if any(z.shape[1] != site.n_heads for z in self.seen):
            yield f"the recorded pass showed {self.seen[0].shape[1]} heads instead of {site.n_heads}"
            return
        if not any(bool(z.isfinite().any()) for z in self.seen):
            yield "every key is hidden from its queries in this example"

    def doubts(self) -> Iterator[str]:
        """Yields the reasons not to trust the known weights, the simplest first."""
        unfit = next(self.unfit(), "")
        if unfit:
            yield unfit
            return
        chains = [side for term in self._site.terms for side in (term.query, term.key)]
        self.weights = ChangedWeights(self.among.model, [*self._site.query, *self._site.key], chains)
        parameters = self.weights.parameters
        self.path = Path(self.among.record, self.among.dynamic, self._site, parameters, self._logits, self._calls)
        self._narrow = Repetition(self.path.own, set(self.path.weights))
        self._wide = Repetition(self.path.wide, self.path.changed)
        self.operations = [*self._narrow.operations, *self._wide.operations]
        again = now = self._narrow({})
        self._base = self._logits(again)
        if any(self._heads_that_change(self.seen, self._base)):
            yield "the operators between its weights and its logits gave different logits when they were repeated"
            return
        if any(self.weights.empty):
            now = self._narrow(self.weights.base())
            self._base = self._logits(now)
        patterns = [p for slices in (self._site.query, self._site.key) for p in _patterns(slices, self._site)]
        factors = [] if self._site.normed else [*self._factors()]
        changes = [self.weights.rotated(chosen) for chosen, _, _ in patterns]
        changes += [self.weights.multiplied(f.chosen, c**f.power) for c in (4.0, 16.0) for f in factors]
        others, inputs = self._other_inputs()
        rest, found = list[Tensor](), list[Tensor]()
        if _same_operations(self._narrow, Repetition(self.path.wide, set(self.path.weights))):
            # With its original input, the module computes the same as the operators after its products with weights.
            all_inputs = [self._one, *inputs, *[self._one] * len(changes)]
            found = self._after(self._wide, [[], *others, *changes], all_inputs)
            n = 1 + len(others)
            if not any(self._heads_that_change(self._base, [z[0] for z in found])):
                rest, found = [z[1:n] for z in found], [z[n:] for z in found]
        if not rest:
            found = self._after(self._narrow, changes)
        yield from self._heads(patterns, [z[: len(patterns)] for z in found], now)
        yield from self._rest(rest or self._after(self._wide, others, inputs))
        # The code below runs only if no doubt was found, because callers ask only for the first one.
        self.unscaled = next(self._disproportions(factors, [z[len(patterns) :] for z in found]), "")

    def _heads(
        self, patterns: Sequence[tuple[list[Chosen], list[bool], bool]], after: Sequence[Tensor], now: Lookup
    ) -> Iterator[str]:
        """Yields a description of rows that change the logits of heads other than their own, or of no head."""
        each = zip(patterns, self._heads_that_change_in_each(after), strict=True)
        for (chosen, expected, several), moved in each:
            if moved != expected and not (sum(moved) == 0 and several and self._idle(chosen, now)):
                yield _words(chosen, moved, expected)
                return

    def _factors(self) -> Iterator[_Factor]:
        """Yields the rows to multiply, for half of the heads at a time, because a quantisation step is shared by all
        heads."""
        site = self._site
        last = [_each_once(paths) for paths in ([t.query[-1] for t in site.terms], [t.key[-1] for t in site.terms])]
        alike = any(s.parameter == other.parameter and s.same(other) for s in last[0] for other in last[1])
        # If q and k are computed from the same rows, each side gets the square root of the factor.
        sides = [("query and key", _each_once([*last[0], *last[1]]), 0.5)] if alike else []
        sides += [] if alike else [("query", last[0], 1.0), ("key", last[1], 1.0)]
        for words, slices, power in sides:
            most = max(s.n for s in slices)
            for first in range(2 if most > 1 else 1):
                numbers = list(range(first, most, 2 if most > 1 else 1))
                chosen: list[Chosen] = [(s, numbers) for s in slices if s.n == most]
                yield _Factor(words, chosen, numbers, _expected(site, most, set(numbers)), power)

    def _disproportions(self, factors: Sequence[_Factor], after: Sequence[Tensor]) -> Iterator[str]:
        """Yields a description of rows that are multiplied by a factor c, if the logits then are not a constant plus c
        times another constant.

        A clip multiplies rows of q and of k, and the bound on a step relies on the same assumption, namely that logits
        are a product. `after` holds the logits after multiplication by 4, for each of the factors, and then by 16.
        """
        if not factors:
            return
        several = len(self._site.query) + len(self._site.key) > 2
        pairs = [z.chunk(2) for z in after]
        bent, whole = (
            _largest([(two - one) - c * (one - z) for (one, two), z in zip(pairs, self._base)]) for c in (4.0, 0.0)
        )
        noise = 64 * self._rounding
        for factor, curved, grown in zip(factors, bent.tolist(), whole.tolist(), strict=True):
            for h, should in enumerate(factor.expected):
                if should and not several and grown[h] <= self._rounding:
                    grew = "left the logits as they were"
                elif curved[h] > max(1e-2 * grown[h], noise) if should else grown[h] > noise:
                    grew = (
                        "did not change the logits in proportion" if should else f"also changed the logits of head {h}"
                    )
                else:
                    continue
                yield (
                    f"multiplying the {factor.words} rows of {_heads(factor.heads)} by {4.0**factor.power:g} and by "
                    f"{16.0**factor.power:g} {grew}: these logits are not a plain product of queries and keys"
                )
                return

    def _after(
        self, repetition: Repetition, changes: Sequence[Edits], inputs: Sequence[Contents] | None = None
    ) -> list[Tensor]:
        """The logits [n b h t s] of each call after each of n changes of the weights. Changes of small weights are
        evaluated all at once.

        `inputs` is the memory of the module's input for each of the changes, if it differs from the recorded one.
        """
        numbers = sum(p.numel() for p in self.weights.parameters.values())
        together = max(1, min(len(changes), _AT_ONCE // max(1, numbers)) if self._logits.foldable else 1)
        alone = together == 1 or (inputs is not None and not self.path.plain(repetition))
        parts: list[list[Tensor]] = []
        for start in range(0, len(changes), together):
            some = changes[start : start + together]
            given = None if inputs is None else inputs[start : start + together]
            found = None
            if not alone:
                values = self.weights.several(some)
                found = repetition.at_once(values | self._inputs_of_several(given), self._logits.tensors)
            if found is not None:
                parts.append(self._logits.of_several(found))
                continue
            for i, edits in enumerate(some):
                values = {where: x[0] for where, x in self.weights.several([edits]).items()}
                parts.append([z[None] for z in self._logits(repetition(values, None if given is None else given[i]))])
        return [torch.cat(zs) for zs in zip(*parts, strict=True)]

    def _inputs_of_several(self, given: Sequence[Contents] | None) -> dict[Place, Tensor]:
        """The inputs [n ...] of the module, read from their memory for each of n changes."""
        distinct = {id(one): one for one in given or ()}
        which = torch.tensor([[*distinct].index(id(one)) for one in given or ()])
        found = {}
        for x in self.path.boundary if distinct else ():
            each = torch.stack([at_place(x, one[memory(x)]) for one in distinct.values()])
            found[place(x)] = each[which.to(x.device)]
        return found

    def _idle(self, chosen: Sequence[Chosen], before: Lookup) -> bool:
        """True if these weights are multiplied, but only by zeros, as one of several weights on this side may be."""
        narrow = self._narrow
        changed = self.weights.several([self.weights.rotated(chosen)])
        after = narrow({where: x[0] for where, x in changed.items()})
        made = {memory(self.weights.parameters[s.parameter]) for s, _ in chosen}
        outputs = [x for operation in narrow.products(made) for x in tensors((operation.out,))]
        return bool(outputs) and all(torch.equal(before(x), after(x)) for x in outputs)

    def _other_inputs(self) -> tuple[list[Edits], list[Contents]]:
        """Changes of the weights for the experiment on the module's input, and the memory of the input for each change.
        First the weights are unchanged and the input is different; then all known weights are zero, with the different
        input and with the recorded one."""
        self._one, other = self.path.inputs()
        zeros = [self.weights.zeroed(slices) for _, _, slices, _ in self._sides]
        return [[], *zeros, *zeros], [other] * (1 + len(zeros)) + [self._one] * len(zeros)

    @property
    def _sides(self) -> Sequence[tuple[str, str, list[HeadSlice], int | None]]:
        """What is set to zero together: its description, the rows, and the dimension along which the remaining part may
        be constant."""
        site = self._site
        if site.normed:  # a norm may add a constant to zeros, so nothing remains only if all weights before it are zero
            return (("", "with all known rows set to zero, its logits still change", site.query + site.key, None),)
        sides = ("query", site.query, 2), ("key", site.key, 3)
        return [
            (
                f" from {side} to {side}",
                f"with the known {side} rows set to zero, its logits still change",
                own,
                dim,
            )
            for side, own, dim in sides
        ]

    def _rest(self, found: Sequence[Tensor]) -> Iterator[str]:
        """Yields a description of an additive part of the logits whose weights are unknown, given the logits after the
        changes of `_other_inputs`."""
        scale = [float(difference(a, z[0]).max()) for a, z in zip(self._base, found)]
        n = len(self._sides)
        for i, (where, words, _, dim) in enumerate(self._sides):
            after, before = ([z[1 + i + j] for z in found] for j in (0, n))
            if dim is not None:
                # A constant in place of a query gives one value per key, which is not a product.
                before, after = ([z - z.nanmean(dim, keepdim=True) for z in parts] for parts in (before, after))
            if self._varies(before, after, scale):
                yield f"{words}{where} with its input: part of them comes from other weights"

    def _varies(self, a: list[Tensor], b: list[Tensor], scale: list[float]) -> bool:
        noise = 4 * self._rounding
        return any(float(difference(x, y).max()) > max(1e-3 * s, noise) for x, y, s in zip(a, b, scale))

    @functools.cached_property
    def _rounding(self) -> float:
        """The largest change of a logit that rounding may cause."""
        least = min(self.weights.parameters.values(), key=lambda p: torch.finfo(p.dtype).bits).dtype
        steps = 4 if torch.finfo(least).bits < 32 else 64
        return steps * torch.finfo(least).eps * max(float(z.abs().nan_to_num(0.0).max()) for z in self.seen)

    def _heads_that_change(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> list[bool]:
        """For each head, whether its logits changed by more than rounding."""
        return (_largest([(b - a)[None] for a, b in zip(before, after)])[0] > self._rounding).tolist()

    def _heads_that_change_in_each(self, after: Sequence[Tensor]) -> list[list[bool]]:
        """Like `_heads_that_change`, but for each of n changes, after which the logits are [n b h t s]."""
        return (_largest([z - a for a, z in zip(self._base, after)]) > self._rounding).tolist()


def _largest(changes: Sequence[Tensor]) -> Tensor:
    """The largest absolute value [n h] of n changes [n b h t s] of the logits of the calls, over keys that are not
    hidden."""
    return torch.stack([z.abs().nan_to_num(0.0).amax((1, 3, 4)) for z in changes]).amax(0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """Rows that are multiplied by two factors: their description, the rows, their heads, the query heads whose logits
    must grow, and the power to which the factors are raised."""

    words: str
    chosen: list[Chosen]
    heads: list[int]
    expected: list[bool]
    power: float


def _same_operations(one: Repetition, two: Repetition) -> bool:
    """True if both repetitions run the same operators."""
    return [*map(id, one.operations)] == [*map(id, two.operations)]


def _patterns(slices: Sequence[HeadSlice], site: AttentionSite) -> Iterator[tuple[list[Chosen], list[bool], bool]]:
    """Yields rows to change (rows of some heads, and each weight as a whole), the heads whose logits must change, and
    whether this side has several weights.

    This is group testing: every head is in half of the changes, and no two heads are in the same half. If a row also
    affects another head, there is therefore a change that contains the row but not that head.
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


def _expected(site: AttentionSite, n: int, chosen: set[int]) -> list[bool]:
    """For each query head, whether it uses one of the chosen parts of a weight with n parts."""
    return [h in chosen for h in site.used(n).tolist()]


def _words(chosen: Sequence[Chosen], moved: Sequence[bool], expected: Sequence[bool]) -> str:
    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
    heads, should = ([h for h, yes in enumerate(given) if yes] for given in (moved, expected))
    return (
        f"changing the rows of {names} that produce the logits of {_heads(should)} changed the logits of "
        f"{_heads(heads)}"
    )


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
    return f"{'heads' if len(numbers) > 1 else 'head'} {shown}" if numbers else "no head"


@final
class Path:
    """The path to the logits of one site. `own` holds the operators from the products with its weights onwards, and
    `wide` those from the input of its module, `boundary`, onwards. `changed` is the memory that holds the weights and
    that input.

    In `own`, the other factor in a product with a weight counts as fixed, even if it depends on the weight in another
    way.
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
        self.weights = frozenset(known)
        first = [
            {memory(parameters[path[0].parameter]) for path in paths}
            for paths in ([term.query for term in site.terms], [term.key for term in site.terms])
        ]
        biases = {memory(parameters[s.bias]) for s in (*site.query, *site.key) if s.bias is not None}
        made = [record.weights_of(side, known, dynamic) for side in first]
        self.since = since = self._begin(calls[0], made[0] | made[1])
        query, key = (record.reached(side, since, self._until) for side in made)
        self._sides = ((made[0], key - query), (made[1], query - key))
        self._known = known.union(*made, record.weights_of(biases, known, dynamic))
        wanted = set(map(memory, logits.tensors))
        self.own = record.behind(wanted, self._until, self._activations)
        factors = {m for operation in self.own for m in self._activations(operation)}
        self.boundary, begin = self._inputs(calls, factors)
        self.begin = begin  # the number of operators that had run before the module call with these inputs, if any
        given = {memory(x): begin if begin else record.maker(memory(x), self._until) for x in self.boundary}
        below = record.reached(given, 0, self._until)
        self.wide = record.behind(wanted, self._until, lambda o: self._activations(o) - below, given)
        self.changed = known | {*given}

    def _activations(self, operation: Operation) -> frozenset[int]:
        """The memory of the tensors by which an operator multiplies one of the first weights. It excludes tensors that
        the operator concatenates with the weight, and queries by which a table is multiplied."""
        found: frozenset[int] = frozenset()
        for made, other in self._sides if operation.name != "cat" else ():
            if not made.isdisjoint(operation.reads):
                found |= operation.reads - self._known - other
        return found

    def _begin(self, call: RecordedCall, made: set[int]) -> int:
        """The number of operators that had run when the innermost module that reads these weights began."""
        read = max(self._record.readers(made, self._until), default=0)
        begun = (frame.since for frame in call.captured.frame.line())
        return next((since for since in begun if since <= read), 0)

    def _inputs(self, calls: Sequence[RecordedCall], factors: set[int]) -> tuple[list[Tensor], int | None]:
        """The inputs of the innermost module around the site on which its projections depend and which depend on the
        model's input, and the number of operators that had run when that module began. If there is no such module, the
        tensors that the projections multiply, and None."""
        for frame in calls[0].captured.frame.line():
            if not frame.inputs:
                continue
            inside = self._record.behind(factors, self._until, since=frame.since)
            behind = self._dynamic & factors.union(*(operation.reads for operation in inside))
            found = [x for x in frame.inputs if x.is_floating_point() and memory(x) in behind]
            if found:
                return found, frame.since
        given = (x for operation in self.own for x in tensors((operation.args, operation.kwargs)))
        return [x for x in given if memory(x) in factors and x.is_floating_point()], None

    def plain(self, repetition: Repetition) -> bool:
        """True if the operators read the module's input only as it was passed, or through views that they created, and
        read nothing else in its memory."""
        inputs, places = set(map(memory, self.boundary)), {place(x) for x in self.boundary}
        if len(inputs) < len(places):
            return False
        for o in repetition.operations:
            if any(memory(x) in inputs and place(x) not in places for x in tensors((o.args, o.kwargs))):
                return False
            places |= {place(x) for x in tensors((o.out,))}
        return True

    def inputs(self) -> tuple[Contents, Contents]:
        """The memory of the module's input as recorded, and the same with noise added that has the size of the input's
        values."""
        one, other = ({memory(x): contents_of(x) for x in self.boundary} for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for x in {place(x): x for x in self.boundary}.values():
            changed = stored(at_place(x, other[memory(x)]))
            noise = torch.randn(changed.shape, generator=generator).to(x)
            size = x.detach().float().square().mean().sqrt()
            changed.add_(noise * size.to(x))
        return one, other


class ChangedWeights:
    """Copies of a site's weights in which the rows of some heads are changed. Heads whose rows are all zero, as in an
    adapter before its first step, first get small random rows, because a factor of zero hides every change of the other
    factor. The same is done for heads whose product with the preceding weight is zero, as when an adapter starts from
    two orthogonal matrices; for this, `chains` holds the weights of each path, input first.
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

    def of(self, s: HeadSlice) -> list[nn.Parameter | None]:
        """The weight that contains these rows, and its bias."""
        return [None if name is None else self.parameters[name] for name in (s.parameter, s.bias)]

    def base(self) -> dict[Place, Tensor]:
        """The weights in which no head is zero, with which all changed weights are compared."""
        return {place(self.parameters[name]): value for name, value in self._base.items()}

    def several(self, changes: Sequence[Edits]) -> dict[Place, Tensor]:
        """The weights [n ...] after each of n changes."""
        found = {name: value.expand(len(changes), *value.shape) for name, value in self._base.items()}
        for name in {name for edits in changes for name, *_ in edits}:
            found[name] = found[name].clone()
        for i, edits in enumerate(changes):
            for name, s, index, numbers in edits:
                _rows_of(s, found[name][i])[index] = numbers
        return {place(self.parameters[name]): x for name, x in found.items()}

    def rotated(self, chosen: Iterable[Chosen]) -> Edits:
        """Moves each row of the chosen heads to the place of the next row of its head; if a head has a single row, its
        sign is changed.

        A norm over the head, or over all heads together, keeps its value, so that no other head changes. Rows from
        which both queries and keys are computed are scaled instead, because rotating both leaves their product
        unchanged.
        """
        return [(*part, self._other(s, rows)) for s, heads in chosen for part, rows in self._parts(s, heads)]

    def _other(self, s: HeadSlice, rows: Tensor) -> Tensor:
        """The values that replace rows [heads r …]."""
        if sum(s.parameter == other.parameter and s.same(other) for other in self._slices) > 1:
            factors = 0.5 + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device) % 2
            return rows * factors.view(-1, *[1] * (rows.ndim - 2))
        return rows.roll(1, dims=1) if rows.shape[1] > 1 else -rows

    def multiplied(self, chosen: Iterable[Chosen], factor: float) -> Edits:
        """Multiplies the rows and biases of the chosen heads by a factor."""
        return [(*part, rows * factor) for s, heads in chosen for part, rows in self._parts(s, heads)]

    def zeroed(self, slices: Iterable[HeadSlice]) -> Edits:
        """Sets all these rows and their biases to zero."""
        return [(*part, rows.new_zeros(())) for s in slices for part, rows in self._parts(s, None)]

    def _parts(
        self, s: HeadSlice, heads: Sequence[int] | None
    ) -> Iterator[tuple[tuple[str, HeadSlice | None, Tensor], Tensor]]:
        """Yields the name of a weight, its slice, the indices of the rows of some heads [heads r], and these rows
        [heads r …], and then the same for its bias, with None for the slice."""
        biased = s.bias_of()
        for part, own in ((s, s), *(() if biased is None else ((biased, None),))):
            rows = _rows_of(own, self._base[part.parameter])
            index = (part.index if heads is None else part.index[list(heads)]).to(rows.device)
            yield (part.parameter, own, index), rows[index]

    def _without_numbers(self, s: HeadSlice) -> Tensor | None:
        """Whether the rows of each head are all zero."""
        weight = self._base[s.parameter]
        if bool(weight.ne(0).all()):
            return None
        return ~s.rows_of(weight)[s.index.to(weight.device)].ne(0).flatten(1).any(1)

    def _vanishing(self, inner: HeadSlice, outer: HeadSlice) -> Tensor | None:
        """Whether the product of two weights is zero up to rounding, for each head; None if the second weight does not
        act on the rows of the first."""
        first, second = (s.rows_of(self._base[s.parameter]) for s in (inner, outer))
        if first is second or inner.n != 1 or inner.index.shape[1] != second.shape[1] or first.device != second.device:
            return None
        before, after = first[inner.index[0].to(first.device)], second[outer.index.to(second.device)]
        size = after.flatten(1).norm(dim=1) * before.norm()
        return (after @ before).flatten(1).norm(dim=1) <= 8 * torch.finfo(after.dtype).eps * size

    def _fill(self, s: HeadSlice, empty: Tensor | None) -> tuple[int, ...]:
        """Replaces the rows of empty heads by small random rows, and returns the indices of these heads."""
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


def _rows_of(s: HeadSlice | None, weight: Tensor) -> Tensor:
    """The rows [rows …] of a weight, or, for a bias, which has no slice, its entries as rows."""
    return weight.view(-1, 1) if s is None else s.rows_of(weight)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """A site that resembles a confirmed site operator by operator: the pattern that it matches, its call, and the index
    of its first operator."""

    pattern: Pattern
    site: AttentionSite
    call: RecordedCall
    since: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """A confirmed site, with a sequence of operators in a module call that contains its complete experiment.

    Attributes:
        site, call: the confirmed site and its call.
        parameters: the site's weights and biases by name.
        level: how many levels the module call is outside the call in which the attention was seen, which is level 0.
        since, count: the index of the first operator, and the number of operators.
        started: for each module call inside, innermost first, how many of these operators had run when it began.
        given: the tensors, except weights, that the experiment's operators read but do not compute, each as the index
            of an operator and the index of a tensor of this operator.
        first: the memory of the weights and of the input, which no earlier operator may read.
        visible: a mask of the logits that are not hidden.
        empty: for each weight, the heads whose values are all zero.
    """

    site: AttentionSite
    call: RecordedCall
    parameters: Parameters
    level: int
    since: int
    count: int
    started: tuple[int, ...]
    given: tuple[tuple[int, int], ...]
    first: frozenset[int]
    visible: list[Tensor]
    empty: list[tuple[int, ...]]

    @classmethod
    def of(cls, experiment: _Experiment, site: AttentionSite, calls: Sequence[RecordedCall]) -> Pattern | None:
        """The pattern of a site, or None if not all operators of its experiment are in a single module call."""
        record, path = experiment.among.record, experiment.path
        if len(calls) > 1 or calls[0].captured.headless or path.begin is None:
            return None
        call, used = calls[0], {id(o) for o in experiment.operations}
        line, until = call.captured.frame.line(), call.until
        found = (
            (level, numbers)
            for level, frame in enumerate(line)
            if frame.since <= min(path.begin, path.since)
            and len(numbers := [i for i in range(frame.since, until) if id(record.operations[i]) in used]) == len(used)
        )
        level, numbers = next(found, (-1, []))
        if level < 0:
            return None
        since = line[level].since
        first = frozenset(map(memory, path.boundary)) | path.weights
        if record.readers(first, since):
            return None
        return cls(
            site=site,
            call=call,
            parameters=experiment.weights.parameters,
            level=level,
            since=since,
            count=until - since,
            started=tuple([f.since - since for f in line[: level + 1]]),
            given=tuple([(i - since, j) for i, j in _given(record, numbers, path.weights)]),
            first=first,
            visible=[z.isfinite() for z in experiment.seen],
            empty=experiment.weights.empty,
        )

    def copy(self, record: Record, dynamic: set[int], names: Mapping[Place, str], call: RecordedCall) -> Copy | None:
        """The site of another call, before its values are compared."""
        captured = call.captured
        line, known = captured.frame.line(), self.call.captured
        if captured.headless or len(line) <= self.level or _fixed(captured) != _fixed(known):
            return None
        since = line[self.level].since
        if call.until - since != self.count or self.started != tuple([f.since - since for f in line[: self.level + 1]]):
            return None
        there = record.alike(self.since, since, self.count)
        if there is None or not self.first <= there.keys() or record.readers({there[m] for m in self.first}, since):
            return None
        if any((m in dynamic) != (n in dynamic) for m, n in there.items()):
            return None
        seen = zip(_tensors(known.call), _tensors(captured.call), strict=True)
        if any(there.get(memory(x), 0) != memory(y) or place(x)[1:] != place(y)[1:] for x, y in seen):
            return None
        named = {n: names.get((there[memory(p)], *place(p)[1:])) for n, p in self.parameters.items()}
        if None in named.values():
            return None

        def here(s: HeadSlice) -> HeadSlice:
            return s.renamed(named[s.parameter] or "", s.bias and named[s.bias])

        terms = tuple(QKProduct(query=(*map(here, t.query),), key=(*map(here, t.key),)) for t in self.site.terms)
        site = dataclasses.replace(self.site, name=captured.name, module=captured.frame.module, terms=terms)
        return Copy(pattern=self, site=site, call=call, since=since)

    def same_numbers(self, among: Verification, copies: Sequence[Copy]) -> list[bool]:
        """Whether, in each of the copies, the same elements are zero or hidden as in the confirmed site and all indices
        are equal."""
        same = [self._same_weights(among.model, copy.site) for copy in copies]
        for i, j in self.given:
            known = among.record.tensors_of(self.since + i)[j]
            others = [among.record.tensors_of(copy.since + i)[j] for copy in copies]
            found = _may_replace(known, others, dynamic=memory(known) in among.dynamic)
            same = [a and b for a, b in zip(same, found, strict=True)]
        seen = _visible(self.call.captured.call, [copy.call.captured.call for copy in copies])
        return [yes and all(map(torch.equal, one, self.visible)) for yes, one in zip(same, seen, strict=True)]

    def _same_weights(self, model: nn.Module, site: AttentionSite) -> bool:
        chains = [side for term in site.terms for side in (term.query, term.key)]
        return ChangedWeights(model, [*site.query, *site.key], chains).empty == self.empty


def _given(record: Record, numbers: Sequence[int], weights: Collection[int]) -> Iterator[tuple[int, int]]:
    """Where operators read tensors in memory that none of them created, other than weights: yields the index of the
    operator and the index of the tensor within the operator, for the first occurrence of each tensor."""
    made, seen = set[int](), set[int]()
    for i in numbers:
        for j, x in enumerate(record.tensors_of(i)):
            if memory(x) not in made and memory(x) not in weights and id(x) not in seen:
                seen.add(id(x))
                if memory(x) in record.operations[i].reads or memory(x) not in record.operations[i].makes:
                    yield i, j
        made |= record.operations[i].makes


def _may_replace(known: Tensor, others: Sequence[Tensor], *, dynamic: bool) -> list[bool]:
    """For each tensor, whether it may replace one from which a confirmed site was computed. A tensor that depends on
    the model's input must not be all zero, any other must have zeros in the same places, and indices must be equal."""
    own = place(known)
    apart = {id(x): x for x in others if x is not known and place(x) != own}
    if not (known.is_floating_point() or known.is_complex()):
        same = {i: torch.equal(x, known) for i, x in apart.items()}
    elif dynamic:
        largest = torch.stack([x.abs().amax() for x in apart.values()]).tolist() if apart else []
        same = {i: size != 0 for i, size in zip(apart, largest, strict=True)}
    else:
        same = {i: torch.equal(x != 0, known != 0) for i, x in apart.items()}
    return [same.get(id(x), True) for x in others]


def _fixed(captured: CapturedCall) -> Hashable:
    """Everything apart from tensors that calls of the same form have in common. A call with additional parts is
    identified by itself."""
    call, layout = captured.call, captured.layout
    products = call.products if isinstance(call, ScoresCall) else ((call.q, call.k),)
    shapes = tuple([None if x is None else x.shape for pair in products for x in pair])
    lost = call.lost if isinstance(call, ScoresCall) else ()
    arranged = None if layout is None else (layout.groups, layout.sizes, layout.guess)
    modules = tuple([type(frame.module) for frame in captured.frame.line()[:1]])
    how = (captured.how, captured.ordinal, captured.below, id(captured) if captured.added is not None else None)
    return type(call), call.spec, _signature(call), shapes, lost, arranged, how, modules


def _visible(known: Seen, calls: Sequence[Seen]) -> Iterator[list[Tensor]]:
    """A mask of the logits that are not hidden, for each call. The masks are computed together for calls with the same
    mask as a known call."""
    like = RepeatedLogits([known])
    together = [
        type(known) is AttentionCall and type(call) is AttentionCall and like.foldable and _same_mask(known, call)
        for call in calls
    ]
    tensors = [_tensors(call) for call, yes in zip(calls, together, strict=True) if yes]
    several = iter(like.of_several([torch.stack(parts) for parts in zip(*tensors)])[0] if tensors else ())
    for call, yes in zip(calls, together, strict=True):
        yield [z.isfinite() for z in ([next(several)] if yes else RepeatedLogits([call])())]


def _same_mask(one: AttentionCall, two: AttentionCall) -> bool:
    """True if the same pairs are hidden in two calls regardless of their queries and keys, because they have the same
    mask or none."""

    def same(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y or (x is not None and y is not None and place(x) == place(y))

    masks = one.mask is None or one.mask.dtype == torch.bool, same(one.mask, two.mask)
    return all(masks) and all(
        same(x, y) or torch.equal(x, y) for x, y in ((one.pos_q, two.pos_q), (one.pos_k, two.pos_k))
    )


def _signature(call: Seen) -> Hashable:
    """What determines how the logits of a call are computed from its tensors. A call whose mask is a function is
    identified by itself."""
    if isinstance(call, ScoresCall):
        return "scores", call.headless
    plain = type(call) is AttentionCall and call.spec.position.kind == "none" and not call.window
    return ("products", call.spec, call.causal) if plain else id(call)


def unchanged(x: Tensor) -> Tensor:
    """Returns the tensor itself, which gives the logits as they were recorded."""
    return x


class RepeatedLogits:
    """Reads the logits [b h t s] of a site's calls, with NaN where a key is hidden."""

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
        """True if the logits for several changes can be computed as those of a larger batch."""
        return not self._headless and all(type(call) in (AttentionCall, ScoresCall) for call in self._calls)

    @torch.no_grad()
    def of_several(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The logits [n b h t s] of each call for n changes, computed from the values of `self.tensors`, [n ...]."""
        n, given = len(tensors[0]), iter(tensors)
        found = []
        for call, rows in zip(self._calls, self._rows):
            b = call.query_shape[0]
            now = {id(x): _folded(next(given), b) for x in _tensors(call)}
            z = _logits(_of_batch(call, n), rows, lambda x, now=now: now.get(id(x), x))
            found.append(z.unflatten(0, (n, b)))
        return found


def _folded(x: Tensor, b: int) -> Tensor:
    """Folds [n b|1 ...] into [(n b) ...]."""
    return x.expand(-1, b, *x.shape[2:]).flatten(0, 1)


def _of_batch(call: Seen, n: int) -> Seen:
    """A call whose batch is repeated n times, except for the tensors from which its logits are computed."""

    def times(x: Tensor | None) -> Tensor | None:
        return x if x is None or len(x) == 1 else x.repeat(n, *[1] * (x.ndim - 1))

    if isinstance(call, ScoresCall):
        return dataclasses.replace(call, hidden=times(call.hidden))
    mask = call.mask if call.mask is None or call.mask.dtype != torch.bool else times(call.mask)
    return dataclasses.replace(call, mask=mask, pos_q=times(call.pos_q), pos_k=times(call.pos_k))


def _tensors(call: AttentionCall | ScoresCall) -> list[Tensor]:
    """The tensors from which the logits are computed."""
    if isinstance(call, ScoresCall):
        return [call.logits]
    mask = [] if call.mask is None or call.mask.dtype == torch.bool else [call.mask]
    return [call.q, call.k, *mask]


@torch.no_grad()
def _rows(call: AttentionCall | ScoresCall) -> slice:
    """The last rows or the first rows, whichever have more nonzero logits, because some rows may be padding."""
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
    """|b - a|, or zero where a key is hidden in either."""
    return (b - a).abs().nan_to_num(0.0)
