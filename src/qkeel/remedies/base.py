"""The interfaces of a remedy and its target, and the remedy that changes nothing."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import Arguments, copied, undisturbed
from qkeel.deprecation import warn
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.options import Bound, Term, annotations, check_bound, checked
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.forward import extra_pass
from qkeel.remedies.optimizer_trials import check_one_optimizer, innermost
from qkeel.sites.site import APPLIED, AttentionSite, HeadSlice

#: Heads by site name; () for all heads of a site.
HeadsBySite = tuple[tuple[str, tuple[int, ...]], ...]
# Arguments of a call of code from other libraries.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """The model, sites and optimizer that a remedy is applied to."""

    model: nn.Module  #: the whole model
    optimizer: Optimizer | None  #: the model's optimizer, if given
    #: all optimizers that were given, if there are several; `optimizer` is the first that holds weights of the sites
    optimizers: Sequence[Optimizer] = ()
    sites: list[AttentionSite]  #: the model's attention, as far as it is known
    #: arguments of a forward pass that reveals the sites; empty for qkeel's own modules
    batch: Arguments = ((), {})
    #: tokens per training sequence, for formulas that need it
    train_length: int | None = None
    #: all attention of the model; `sites` may be a part of it
    all_sites: Sequence[AttentionSite] = ()

    @property
    def example(self) -> Arguments:
        """The name of `batch` in version 0.1.0."""
        warn("write target.batch, which was called example", stacklevel=2)
        return self.batch

    def parameter(self, name: str) -> nn.Parameter:
        """Returns a parameter of the model by qualified name."""
        # `get_parameter` asks each module on the way several times, and a remedy asks for hundreds of weights.
        try:
            parameter = operator.attrgetter(name)(self.model)
        except AttributeError:
            parameter = None
        if not isinstance(parameter, nn.Parameter):
            raise RefusedError(
                f"this model has no parameter {name!r}; a weight that is computed by hooks or a parametrization "
                "cannot be updated or scaled separately. Remove the hook or parametrization first"
            )
        return parameter

    def overlap(self, s: HeadSlice, other: HeadSlice) -> bool:
        """True if two slices have a row of one parameter in common, or an entry of one bias."""
        for a, b in ((s, other), (s.bias_of(), other.bias_of())):
            if (
                a is None
                or b is None
                or self.parameter(a.parameter) is not self.parameter(b.parameter)
            ):
                continue
            if a.axis == b.axis and bool(torch.isin(a.index, b.index).any()):
                return True
        return False

    def need_optimizers(self, remedy: str) -> list[Optimizer]:
        """Returns the optimizers that take the steps, `optimizer` first, or raises RefusedError if there is none."""
        if self.optimizer is None:
            raise RefusedError(
                f"{remedy} acts on optimizer steps: call qkeel.apply(model, {remedy!r}, optimizer)"
            )
        optimizers: list[Optimizer] = []
        for optimizer in (self.optimizer, *self.optimizers):
            check_one_optimizer(optimizer, remedy)
            if (inner := innermost(optimizer)) not in optimizers:
                optimizers.append(inner)
        return optimizers

    def returned(self) -> object:
        """Returns the model's output for the batch, from a pass that leaves the model unchanged."""
        args, kwargs = self.batch
        # An extra pass is counted by no monitor.
        with extra_pass(self.model), torch.no_grad(), undisturbed(self.model):
            return self.model(*copied(args), **copied(kwargs))

    def logit_slices(self) -> Iterator[HeadSlice]:
        """Yields the heads' slices of every weight from which a logit is computed, site by site and term by term."""
        for site in self.sites:
            for term in site.terms:
                yield from (*term.query, *term.key)


class Remedy(abc.ABC):
    """A named change to a model or its training, with its source.

    Subclasses are frozen dataclasses with the options as fields. The annotation of an option defines its valid values:
    true or false, one of the values of a Literal, or a number above 0 (at least 0 if the option is in `may_be_zero`).

    Attributes:
        name: the name in specs and in `REMEDIES`.
        line: a one-line description of what the remedy does.
        source: the publication in which the remedy was proposed.
        rule: the formula of a remedy that changes no slot of the spec, with the options in braces.
        on_steps: True if the remedy works only through optimizer hooks, so that a copy of the model does not have it.
        may_be_zero: the options that may be 0.
        on_attention: True if the remedy changes all attention in the model.
        changes_spec: True if the remedy gives sites a new spec. Before it becomes active, it runs the sites' calls
            under this spec.
    """

    name: ClassVar[str]
    line: ClassVar[str]
    source: ClassVar[str]
    rule: ClassVar[str] = ""
    on_steps: ClassVar[bool] = False
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    on_attention: ClassVar[bool] = True
    changes_spec: ClassVar[bool] = False

    __slots__ = ()

    def __post_init__(self) -> None:
        """Validates every option against its annotation."""
        for option, value in dataclasses.asdict(self).items():  # type: ignore[call-overload]
            name = f"{option} of {self.name}"
            if option == "heads":
                check_heads(self.name, value)
            checked(value, annotations(type(self))[option], name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                check_bound(
                    value, Bound(0.0, included=option in self.may_be_zero), name
                )

    def __str__(self) -> str:
        """The remedy as in a spec string, with its first option and those that have another value than by default."""
        options = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {
            option.name: getattr(self, option.name)
            for n, option in enumerate(options)
            if not n or getattr(self, option.name) != option.default
        }
        return str(Term(self.name, {n: x for n, x in values.items() if n != "heads"}))

    @property
    def limit(self) -> float | None:
        """The logit at which the remedy holds every head, in nats, or None if it holds none at a logit."""
        return None

    def chosen(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        """Returns the sites to which the remedy applies, which are all of them unless an option names some."""
        return list(sites)

    def supports(self, site: AttentionSite) -> Refusal | None:
        """Returns None if the remedy can be applied at this site, or else the reason why it cannot."""
        return self.holds(site)

    def holds(self, site: AttentionSite) -> Refusal | None:
        """Returns None if the applied remedy is still valid after another remedy has changed the site, or else the
        reason why it is not."""
        return None

    def written_rule(self) -> str:
        """Returns the rule with this remedy's options filled in, or "" if the spec's formula describes the remedy."""
        return self.rule.format(**dataclasses.asdict(self))  # type: ignore[call-overload]

    @abc.abstractmethod
    def apply(self, target: Target) -> Handle:
        """Applies the change and returns a handle that undoes it. A change that fails leaves everything unchanged."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode. It restores the modes, and whatever a pass has changed but
    the weights, which may be fitted in it."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        with undisturbed(model, weights=False):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


def compose_all(handles: Iterable[Handle]) -> Handle:
    """Makes changes one by one and returns one handle for all of them. If one fails, the earlier ones are undone."""
    done: list[Handle] = []
    try:
        for handle in handles:
            done.append(handle)
    except BaseException:
        compose(done).remove()
        raise
    return compose(done)


def quantised(site: AttentionSite) -> Refusal | None:
    """Returns the refusal to change weights that are stored in other numbers than they are used in, such as integers, or
    None if there are none in the attention."""
    kinds = {
        type(p).__name__
        for p in site.module.parameters()
        if is_wrapper(dist.local(p)) or not (p.is_floating_point() or p.is_complex())
    }
    if not kinds:
        return None
    return Refusal(
        f"weights of its heads are quantised ({', '.join(sorted(kinds))}), and rows of such weights cannot be scaled",
        "apply it to a model that is not quantised, as from_pretrained(..., dtype=torch.bfloat16) loads it; "
        "qkeel.watch(model, optimizer) measures the logits of a quantised model",
    )


def unconfirmed(site: AttentionSite) -> Refusal:
    """Returns the refusal to change the weights of a site's heads, which an experiment did not confirm."""
    refusal = quantised(site)
    if refusal is not None:
        return refusal
    return Refusal(
        f"the weights of its heads are not confirmed: {site.unverified}",
        "give a batch in which its inputs differ, apply the remedy to a part of the model without this attention, "
        "or use a remedy that changes what the call computes (softcap)",
    )


def check_heads(remedy: str, heads: object) -> None:
    """Raises InvalidTypeError unless the value of an option names heads by site or is None."""
    if heads is None:
        return
    try:
        pairs: Any = tuple(heads)  # type: ignore[arg-type]
        is_valid = bool(pairs) and all(
            isinstance(name, str) and all(type(x) is int and x >= 0 for x in numbers)
            for name, numbers in pairs
        )
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise InvalidTypeError(
            f"expected heads of {remedy} by site, as ((site.name, (0, 3)),) with () for all of them, got {heads!r}"
        )


def active_on(module: nn.Module) -> dict[str, Remedy]:
    """Returns the remedies that are active on a module, by name."""
    return vars(module).get(APPLIED, {})


def active_at(site: AttentionSite) -> dict[str, Remedy]:
    """Returns the remedies that are active at a site, by name."""
    return active_on(site.module)


def where(site: AttentionSite) -> str:
    """Returns the name of a site for error messages."""
    return site.name or "the model itself"


def module_name(site: AttentionSite) -> str:
    """Returns the name of a site's module, which is the site's name without the call number."""
    return site.name.partition("#")[0]


def inside(module: str, name: str) -> str:
    """Returns the model-wide name of something that a module (possibly the model itself) calls `name`."""
    return f"{module}.{name}" if module else name


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoRemedy(Remedy):
    """Changes nothing."""

    name = "none"
    line = "no remedy"
    source = "the baseline"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        return Handle(lambda: None)
