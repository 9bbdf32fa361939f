"""The operators between the weights of a site, or the input of its module, and its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.patching.modes import Args, Kwargs, function_name
from qkeel.sites.see.intercept import Sighting
from qkeel.sites.see.running_modules import tensors
from qkeel.sites.site import AttentionSite
from qkeel.sites.verify.recorded_operators import Operation, Record, memory, place
from qkeel.sites.verify.repeated_operators import Contents, RepeatedLogits, at_place

Parameters = Mapping[str, nn.Parameter]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A sighting, how many operators had run then, and how many when each of its frames began."""

    sighting: Sighting
    until: int
    begun: Mapping[int, int]


@final
class Path:
    """The way to the logits of one site: `own`, operators from the products with its weights on, and `wide`, those
    from the input of its module on. `changed` is the memory of the weights and of that input.

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
        query, key = (record.reached(side, since) for side in made)
        self._sides = ((made[0], key - query), (made[1], query - key))
        self._known = known.union(*made, record.weights_of(biases, known, dynamic))
        wanted = set(map(memory, logits.tensors))
        self.own = record.behind(wanted, self._until, self._activations)
        factors = {m for operation in self.own for m in self._activations(operation)}
        self._boundary, begin = self._inputs(calls, factors)
        given = {memory(x): begin if begin else record.maker(memory(x), self._until) for x in self._boundary}
        below = record.reached(given)
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
        read = max((i for i in range(self._until) if not made.isdisjoint(self._record.operations[i].reads)), default=0)
        begun = (call.begun.get(id(frame)) for frame in call.sighting.frame.line())
        return next((since for since in begun if since is not None and since <= read), 0)

    def _inputs(self, calls: Sequence[RecordedCall], factors: set[int]) -> tuple[list[Tensor], int]:
        """The inputs of the innermost module around the site that its projections depend on and that the model's
        input made, and how many operators had run when it began; where there is none, what they multiply, and 0."""
        one = calls[0]
        for frame in one.sighting.frame.line():
            since = one.begun.get(id(frame))
            if since is None:
                continue
            inside = self._record.behind(factors, self._until, since=since)
            behind = self._dynamic & factors.union(*(operation.reads for operation in inside))
            found = [x for x in frame.inputs if x.is_floating_point() and memory(x) in behind]
            if found:
                return found, since
        given = (x for operation in self.own for x in tensors((operation.args, operation.kwargs)))
        return [x for x in given if memory(x) in factors and x.is_floating_point()], 0

    def inputs(self) -> tuple[Contents, Contents]:
        """The memory of the module's input as it was, and with noise of the size of its numbers added."""
        one, other = ({memory(x): x.untyped_storage().clone() for x in self._boundary} for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for x in {place(x): x for x in self._boundary}.values():
            noise = torch.randn(x.shape, generator=generator).to(x)
            size = x.detach().float().square().mean().sqrt()
            at_place(x, other[memory(x)]).add_(noise * size.to(x))
        return one, other


def dynamic_memory(record: Record, args: Args, kwargs: Kwargs) -> set[int]:
    """The memory of all that was computed from the model's input."""
    return record.reached(map(memory, tensors((args, kwargs))))
