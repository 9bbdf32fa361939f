"""What a remedy is, and what it is applied to."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel.errors import InvalidTypeError, InvalidValueError, NonFiniteError, RefusedError
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
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
    """A named, sourced change. Subclasses are frozen dataclasses; their fields are the remedy's options."""

    name: ClassVar[str]
    line: ClassVar[str]
    source: ClassVar[str]

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

    def check_held(self, optimizer: Optimizer, remedy: str) -> None:
        """Raise unless the optimizer steps every one of the weights."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for s, p in zip(self.slices, self.parameters):
            if id(p) not in held:
                raise RefusedError(
                    f"{remedy} acts on steps of {s.parameter}, which this {type(optimizer).__name__} does not hold; "
                    "give the optimizer that does"
                )


def check_weights(target: Target, remedy: str) -> None:
    """Raise unless the query and key weights exist and are finite."""
    for s, p in zip((weights := HeadWeights.of(target)).slices, weights.parameters):
        if p.is_meta:
            raise RefusedError(f"{s.parameter} is on the meta device; give it values before {remedy} is applied")
        if not bool(torch.isfinite(p).all()):
            raise NonFiniteError(f"{s.parameter} holds NaN or infinity before {remedy} is applied; load sound weights")


def check_number(remedy: str, option: str, value: object, *, zero: bool = False) -> None:
    """Raise unless an option is a finite number above 0 (with `zero`, at least 0)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"expected a number for {option} of {remedy}, got {value!r}")
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        least = "a finite number of at least 0" if zero else "a finite number above 0"
        raise InvalidValueError(f"expected {least} for {option} of {remedy}, got {value}")
