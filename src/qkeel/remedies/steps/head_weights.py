"""The query and key weights of a model by head, each once."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.heads.site import HeadSlice
from qkeel.remedies.base import Target, unconfirmed, where
from qkeel.remedies.steps.mixed_precision import LOW_PRECISION, stepped
from qkeel.remedies.steps.sharded_weights import check_plain_rows, has_plain_rows


def check_weights(target: Target, remedy: str, *, per_head: bool) -> None:
    """Raise unless the query and key weights exist and are finite, and, where they are changed `per_head`, unless they
    are confirmed to make the logits of these heads."""
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = target.parameter(name)
        if p.is_meta:
            raise RefusedError(f"{name} is on the meta device; give it values before {remedy} is applied")
        if has_plain_rows(p) and not bool(torch.isfinite(dist.local(p)).all()):
            raise NonFiniteError(f"{name} holds NaN or infinity before {remedy} is applied; load sound weights")
    for site in target.sites if per_head else ():
        if site.unverified:
            raise RefusedError(f"{remedy} at {where(site)}: {unconfirmed(site)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """The query and key weights of a target, without repetition.

    `slices[i]` says which part of `parameters[i]` belongs to each head. One parameter may appear in several entries (a
    fused projection), and one entry in several sites (tied layers): `place` finds the entry of a site's slice.
    """

    slices: list[HeadSlice]
    parameters: list[nn.Parameter]
    _entry: dict[int, int]

    @classmethod
    def of(cls, target: Target) -> HeadWeights:
        """All weights from which the logits of the target's sites are made."""
        slices: list[HeadSlice] = []
        parameters: list[nn.Parameter] = []
        entry: dict[int, int] = {}
        for s in target.logit_slices():
            parameter = target.parameter(s.parameter)
            if any(p is parameter and other.axis != s.axis for p, other in zip(parameters, slices)):
                raise RefusedError(f"{s.parameter} makes heads of its rows and of its columns; no factor fits both")
            same = (i for i, p in enumerate(parameters) if p is parameter and slices[i].same(s))
            i = next(same, len(slices))
            if i == len(slices):
                slices.append(s)
                parameters.append(parameter)
            entry[id(s)] = i
        return cls(slices=slices, parameters=parameters, _entry=entry)

    @property
    def names(self) -> list[str]:
        """The parameter's name of each entry."""
        return [s.parameter for s in self.slices]

    @property
    def counts(self) -> list[int]:
        """The number of heads of each entry."""
        return [s.n for s in self.slices]

    def place(self, s: HeadSlice) -> int:
        """The entry of a slice of one of the target's sites."""
        return self._entry[id(s)]

    def of_optimizer(self, optimizer: Optimizer, remedy: str) -> list[Tensor | None]:
        """The tensor that the optimizer steps for each entry: the weight, its float32 copy, None for a frozen weight.

        Raises: RefusedError unless it steps every weight that is trained, and at least one.
        """
        for s, p in zip(self.slices, self.parameters):
            check_plain_rows(s.parameter, p, remedy)
        tensors = [stepped(optimizer, p) for p in self.parameters]
        for s, p, tensor in zip(self.slices, self.parameters, tensors):
            if tensor is None and (p.requires_grad or not any(t is not None for t in tensors)):
                raise RefusedError(
                    f"{remedy} acts on steps of {s.parameter}, which this {type(optimizer).__name__} does not hold; "
                    f"give the optimizer that does{self._unknown_copies(optimizer)}"
                )
        return tensors

    def in_full_precision(self, optimizer: Optimizer, remedy: str, does: str) -> list[Tensor | None]:
        """`of_optimizer`, refused where what the remedy `does` to a weight would be rounded away."""
        tensors = self.of_optimizer(optimizer, remedy)
        for s, p in zip(self.slices, tensors):
            if p is not None and p.dtype in LOW_PRECISION:
                raise RefusedError(
                    f"{remedy} {does}, which {p.dtype} weights round away ({s.parameter}); keep float32 weights and "
                    "use autocast"
                )
        return tensors

    def _unknown_copies(self, optimizer: Optimizer) -> str:
        """A hint where the optimizer steps tensors that may be float32 copies in another form."""
        shapes = {p.shape for p in self.parameters}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.dtype in LOW_PRECISION for p in self.parameters) or all(p.shape in shapes for p in held):
            return ""
        return (
            ". Float32 copies are known by their shape and values; flattened, sharded or stale ones are not: copy the "
            "weights over first, or use float32 weights under autocast"
        )
