"""What a remedy is, and what it is applied to."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qkeel.errors import InvalidTypeError, InvalidValueError, NonFiniteError, RefusedError
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.remedies.masters import LOW_PRECISION, stepped
from qkeel.sites.example import Arguments
from qkeel.sites.site import AttentionSite, HeadSlice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """What a remedy is applied to.

    `example`: arguments of a forward pass that shows the sites; empty where all are qkeel's own modules.
    `train_length`: tokens per training sequence, where a formula needs it.
    """

    model: nn.Module
    optimizer: Optimizer | None
    sites: list[AttentionSite]
    example: Arguments = ((), {})
    train_length: int | None = None

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter of the model by qualified name."""
        try:
            return self.model.get_parameter(name)
        except AttributeError as error:
            raise RefusedError(
                f"this model has no parameter {name!r}; a weight that hooks or a parametrization make anew from "
                "others cannot be stepped or scaled on its own: remove that first"
            ) from error

    def need_optimizer(self, remedy: str) -> Optimizer:
        """The optimizer, or the error that asks for it."""
        if self.optimizer is None:
            raise RefusedError(f"{remedy} acts on optimizer steps: call qkeel.apply({remedy!r}, model, optimizer)")
        return self.optimizer


class Remedy(abc.ABC):
    """A named, sourced change. Subclasses are frozen dataclasses; their fields are the remedy's options.

    `on_steps` says that it acts through hooks of the optimizer only: a copy of the model is without it.
    """

    name: ClassVar[str]
    line: ClassVar[str]
    source: ClassVar[str]
    on_steps: ClassVar[bool] = False

    __slots__ = ()

    def supports(self, site: AttentionSite) -> Refusal | None:
        """None if the remedy can be applied at this site as it is now, else the reason."""
        return self.holds(site)

    def holds(self, site: AttentionSite) -> Refusal | None:
        """None if the remedy, once applied, still means something at the site as another remedy left it."""
        return None

    @abc.abstractmethod
    def apply(self, target: Target) -> Handle:
        """Make the change; the handle undoes it. A change that raises leaves everything as it was."""


def compose_all(handles: Iterable[Handle]) -> Handle:
    """One handle for changes that are made one after the other; if one raises, those before it are undone."""
    done: list[Handle] = []
    try:
        for handle in handles:
            done.append(handle)
    except BaseException:
        compose(done).remove()
        raise
    return compose(done)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """The query and key weights of a target, without repetition.

    `slices[i]` says which part of `parameters[i]` belongs to each head. One parameter may appear in several
    entries (a fused projection), and one entry in several sites (tied layers): `place` finds the entry of a
    site's slice.
    """

    slices: list[HeadSlice]
    parameters: list[nn.Parameter]
    _entry: dict[int, int]

    @classmethod
    def of(cls, target: Target) -> HeadWeights:
        """All weights on the way to a logit, each once."""
        slices: list[HeadSlice] = []
        parameters: list[nn.Parameter] = []
        entry: dict[int, int] = {}
        for s in (s for site in target.sites for term in site.terms for s in (*term.query, *term.key)):
            parameter = target.parameter(s.parameter)
            if any(p is parameter and other.axis != s.axis for p, other in zip(parameters, slices)):
                raise RefusedError(f"{s.parameter} makes heads of its rows and of its columns; no factor fits both")
            like = (i for i, p in enumerate(parameters) if p is parameter and slices[i].same(s))
            i = next(like, len(slices))
            if i == len(slices):
                slices.append(s)
                parameters.append(parameter)
            entry[id(s)] = i
        return cls(slices=slices, parameters=parameters, _entry=entry)

    def place(self, s: HeadSlice) -> int:
        """The entry of a slice of one of the target's sites."""
        return self._entry[id(s)]

    def owners(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Each parameter once, with its entries."""
        found: dict[int, tuple[nn.Parameter, list[int]]] = {}
        for i, parameter in enumerate(self.parameters):
            found.setdefault(id(parameter), (parameter, []))[1].append(i)
        return list(found.values())

    def of_optimizer(self, optimizer: Optimizer, remedy: str) -> list[Tensor | None]:
        """What the optimizer steps for each entry: the weight, its float32 copy, or None for a frozen weight.

        Raises: RefusedError unless it steps every weight that is trained, and one at least.
        """
        for s, p in zip(self.slices, self.parameters):
            if not _plain(p):
                raise RefusedError(
                    f"{s.parameter} is quantised or sharded ({type(p).__name__} of {p.dtype}), so its rows are not at "
                    f"hand; apply {remedy} to plain floating point weights"
                )
        tensors = [stepped(optimizer, p) for p in self.parameters]
        for s, p, tensor in zip(self.slices, self.parameters, tensors):
            if tensor is None and (p.requires_grad or not any(t is not None for t in tensors)):
                raise RefusedError(
                    f"{remedy} acts on steps of {s.parameter}, which this {type(optimizer).__name__} does not hold; "
                    f"give the optimizer that does{self._strangers(optimizer)}"
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

    def _strangers(self, optimizer: Optimizer) -> str:
        """A hint where the optimizer steps tensors that may be float32 copies in another form."""
        shapes = {p.shape for p in self.parameters}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.dtype in LOW_PRECISION for p in self.parameters) or all(p.shape in shapes for p in held):
            return ""
        return (
            ". Float32 copies are known by their shape and values; flattened, sharded or stale ones are not: copy the "
            "weights over first, or use float32 weights under autocast"
        )


def _plain(p: Tensor) -> bool:
    """Whether its rows can be read and scaled as they are."""
    return p.is_floating_point() and not is_traceable_wrapper_subclass(p)


def refuse_untold(site: AttentionSite) -> Refusal | None:
    """The refusal where the weights that make the heads are not known."""
    if site.terms:
        return None
    return Refusal(
        f"which rows of which weights make its heads could not be told: {site.why or 'no reason is known'}",
        "apply the remedy to a part of the model without this attention",
    )


def refuse_rescaled(site: AttentionSite, so: str) -> Refusal | None:
    """The refusal where the weight that makes the logit is another than the one that is stored; `so` says what follows.

    Parametrizations show in the weight's name. DoRA divides by a norm of its weights that no gradient passes, so only
    the magnitudes that it learns instead give it away.
    """
    dora = any(
        module._modules.get("lora_magnitude_vector")
        and any(f".{name}." in s.parameter for s in (*site.query, *site.key))
        for name, module in site.module.named_modules()
    )
    if not (dora or site.reparametrised):
        return None
    return Refusal(f"the weight that makes the logit is computed from another, so {so}", "use one of the two")


def check_weights(target: Target, remedy: str) -> None:
    """Raise unless the query and key weights exist and are finite."""
    for s, p in zip((weights := HeadWeights.of(target)).slices, weights.parameters):
        if p.is_meta:
            raise RefusedError(f"{s.parameter} is on the meta device; give it values before {remedy} is applied")
        if _plain(p) and not bool(torch.isfinite(p).all()):
            raise NonFiniteError(f"{s.parameter} holds NaN or infinity before {remedy} is applied; load sound weights")


def check_number(remedy: str, option: str, value: object, *, zero: bool = False) -> None:
    """Raise unless an option is a finite number above 0 (with `zero`, at least 0)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"expected a number for {option} of {remedy}, got {value!r}")
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        least = "a finite number of at least 0" if zero else "a finite number above 0"
        raise InvalidValueError(f"expected {least} for {option} of {remedy}, got {value}")
