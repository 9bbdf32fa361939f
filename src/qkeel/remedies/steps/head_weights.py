"""The query and key weights of a model by head, each once, and the tensor that the optimizer steps for each of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import NonFiniteError, RefusedError
from qkeel.patching.graph_nodes import is_wrapper
from qkeel.patching.optimizer_hooks import runs_step_hooks
from qkeel.remedies.base import Target
from qkeel.sites.site import HeadSlice

LOW_PRECISION = (torch.bfloat16, torch.float16)


def has_plain_rows(weight: Tensor) -> bool:
    """True if the rows of a weight can be read and scaled as they are."""
    return weight.is_floating_point() and not is_wrapper(weight)


def check_plain_rows(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a weight that is sharded or quantised, of whose heads no process may hold all rows.

    FSDP2 and tensor parallelism keep a weight as a DTensor, of which each process has a part; its rows cannot be
    measured or scaled head by head. The flat copies of ZeRO and FSDP1 are not recognised as copies either.
    """
    if not has_plain_rows(weight):
        raise RefusedError(
            f"{name} is quantised or sharded ({type(weight).__name__} of {weight.dtype}), so the rows of its heads "
            f"cannot be read or scaled; apply {remedy} to plain floating point weights"
        )


def check_weights(target: Target, remedy: str) -> None:
    """Raise unless the query and key weights exist and are finite."""
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = target.parameter(name)
        if p.is_meta:
            raise RefusedError(f"{name} is on the meta device; give it values before {remedy} is applied")
        if has_plain_rows(p) and not bool(torch.isfinite(p).all()):
            raise NonFiniteError(f"{name} holds NaN or infinity before {remedy} is applied; load sound weights")


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps: wrappers that are none themselves (accelerate's) run no hooks. A wrapper
    that runs hooks, and steps another optimizer inside its own step, is kept: it may do more than that one."""
    while not runs_step_hooks(optimizer):
        inner = vars(optimizer).get("optimizer")
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """The tensor that a GradScaler gives a fused optimizer: not zero where the step, whose hooks run, is skipped."""
    return vars(optimizer).get("found_inf")


def stepped(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """The tensor in the optimizer's groups that becomes the weight: itself, or its one float32 copy.

    Training in low precision the way of apex and Megatron gives the optimizer float32 copies, and copies them back
    after each step. Such a copy is recognised by its values: of one shape and device, rounding to the weight's bits.
    """
    held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p is weight for p in held):
        return weight
    copies = [p for p in held if _rounds_to(p, weight)]
    return copies[0] if len(copies) == 1 else None


def copies_in_state(optimizer: Optimizer, weight: Tensor) -> tuple[str, ...]:
    """Under which names the optimizer keeps float32 copies of a low-precision weight in its state."""
    state: dict[str, object] = optimizer.state.get(weight, {})
    return tuple(name for name, x in state.items() if isinstance(x, Tensor) and _rounds_to(x, weight))


def _rounds_to(copy: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype in LOW_PRECISION
        and copy.dtype == torch.float32
        and copy.shape == weight.shape
        and copy.device == weight.device
        and torch.equal(copy.detach().to(weight.dtype), weight.detach())
    )


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
