"""What a remedy is: its options, what it is applied to, and the one that changes nothing."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel.capture.example import Arguments, copied, undisturbed
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.options import Bound, annotations, check_bound, checked
from qkeel.sites.trace import ModelTrace, seen

# The interface of a remedy, and of what it is applied to.

HeadsBySite = tuple[tuple[str, tuple[int, ...]], ...]  # the heads of each site, by its name; () for all of them
Args = tuple[Any, ...]  # of a call of somebody else's function
Kwargs = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """The model, sites and optimizer that a remedy is applied to."""

    model: nn.Module  #: the whole model
    optimizer: Optimizer | None  #: what steps it; None where none was given
    sites: list[AttentionSite]  #: the model's attention, where it is known
    example: Arguments = ((), {})  #: arguments of a forward pass that shows the sites; empty for qkeel's own modules
    train_length: int | None = None  #: tokens per training sequence, where a formula needs it
    trace: ModelTrace | None = None  #: the pass that showed the sites; None where all are qkeel's own, or were given

    def seen(self) -> ModelTrace:
        """The pass that showed the sites; without one the example is run, or what there is of it."""
        args, kwargs = self.example
        return self.trace or seen(self.model, args, kwargs)

    def short(self) -> Arguments:
        """Arguments of a pass that shows the sites: as little of the example as does."""
        if self.trace is None:
            return self.example
        args, kwargs = self.trace.given
        return args, dict(kwargs)

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter of the model by qualified name."""
        try:
            return self.model.get_parameter(name)
        except AttributeError as error:
            raise RefusedError(
                f"this model has no parameter {name!r}; a weight that hooks or a parametrization compute from others "
                "cannot be stepped or scaled on its own: remove that first"
            ) from error

    def need_optimizer(self, remedy: str) -> Optimizer:
        """The optimizer, or the error that asks for it."""
        if self.optimizer is None:
            raise RefusedError(f"{remedy} acts on optimizer steps: call qkeel.apply({remedy!r}, model, optimizer)")
        return self.optimizer

    def returned(self) -> object:
        """The model's output for the example, from a pass that leaves it as it was."""
        args, kwargs = self.example
        with torch.no_grad(), undisturbed(self.model):
            return self.model(*copied(args), **copied(kwargs))

    def logit_slices(self) -> Iterator[HeadSlice]:
        """The heads' parts of every weight from which a logit is made, site by site and term by term."""
        for site in self.sites:
            for term in site.terms:
                yield from (*term.query, *term.key)


class Remedy(abc.ABC):
    """A named, sourced change. Subclasses are frozen dataclasses; their fields are the remedy's options.

    An option's annotation says what it may be: true or false, one of a Literal's words, a number above 0; numbers that
    `may_be_zero` names are at least 0. `rule` is the formula of a remedy that changes no slot of the spec, with the
    options in braces. `on_steps` says that the remedy acts through hooks of the optimizer only: a copy
    of the model is without it. `changes_spec` says that it gives sites a new spec, which their calls are run with
    before it is active. `on_attention` says that it changes attention, all of it. `stacks`: runs with it may train
    as one stack, which neither hooks on a forward pass nor weights computed from others nor random numbers allow.
    """

    name: ClassVar[str]
    line: ClassVar[str]
    source: ClassVar[str]
    rule: ClassVar[str] = ""
    on_steps: ClassVar[bool] = False
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    on_attention: ClassVar[bool] = True
    changes_spec: ClassVar[bool] = False
    stacks: ClassVar[bool] = False

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise unless every option is what its annotation says."""
        for option, value in dataclasses.asdict(self).items():  # type: ignore[call-overload]
            name = f"{option} of {self.name}"
            if option == "heads":
                check_heads(self.name, value)
            checked(value, annotations(type(self))[option], name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                check_bound(value, Bound(0.0, included=option in self.may_be_zero), name)

    def chosen(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        """The sites of a model that the remedy is for: all, unless an option names some."""
        return list(sites)

    def supports(self, site: AttentionSite) -> Refusal | None:
        """None if the remedy can be applied at this site as it is now, else the reason."""
        return self.holds(site)

    def holds(self, site: AttentionSite) -> Refusal | None:
        """None if the remedy, once applied, still means something at the site as another remedy left it."""
        return None

    def written_rule(self) -> str:
        """The rule with this remedy's options in it; empty where the spec's formula says what it does."""
        return self.rule.format(**dataclasses.asdict(self))  # type: ignore[call-overload]

    @abc.abstractmethod
    def apply(self, target: Target) -> Handle:
        """Make the change; the handle undoes it. A change that raises leaves everything as it was."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards that and whatever a pass changes is put back."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        with undisturbed(model):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


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


def unconfirmed(site: AttentionSite) -> Refusal:
    """The refusal to change the weights of a site's heads where an experiment did not confirm which these are."""
    return Refusal(
        f"the weights of its heads are not confirmed: {site.unverified}",
        "give an example in which its inputs differ, apply the remedy to a part of the model without this attention, "
        "or use one that changes what the call computes (softcap)",
    )


def check_heads(remedy: str, value: object) -> None:
    """Raise unless an option names heads by site, or is None."""
    for pair in value if isinstance(value, tuple) else () if value is None else (value,):
        site, heads = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if (
            not isinstance(site, str)
            or not isinstance(heads, tuple)
            or not all(type(h) is int and h >= 0 for h in heads)
        ):
            raise InvalidTypeError(
                f"expected heads of {remedy} by site, as ((site.name, (0, 3)),) with () for all of them, got {value!r}"
            )


def where(site: AttentionSite) -> str:
    """The name of a site in errors."""
    return site.name or "the model itself"


def module_name(site: AttentionSite) -> str:
    """The name of the site's module: that of the site without the number of its call."""
    return site.name.partition("#")[0]


def inside(module: str, name: str) -> str:
    """The name in the model of what a module, perhaps the model itself, calls by that name."""
    return f"{module}.{name}" if module else name


# The baseline, which changes nothing.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoRemedy(Remedy):
    """Leaves everything as it is."""

    name, stacks = "none", True
    line = "no remedy"
    source = "the baseline"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        return Handle(lambda: None)
