"""The table of remedies, the parser of their spec strings, and `apply`."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import ForwardArguments, arguments
from qkeel.deprecation import Call, accepts_earlier_calls
from qkeel.errors import AlreadyAppliedError, InvalidTypeError, QkeelError, RefusedError
from qkeel.handle import Handle, State
from qkeel.heads.site import APPLIED, AttentionSite, Sites
from qkeel.nn.attention import SpecModule
from qkeel.options import Term, build, lookup
from qkeel.options import parse as parse_terms
from qkeel.patching.forward import ForwardPasses, joining, owners, unwrapped
from qkeel.patching.modes import compile_again, unguarded
from qkeel.patching.optimizers import StepHooks, listed
from qkeel.remedies.base import NoRemedy, Remedy, Target, active_at, compose_all, where
from qkeel.remedies.head_weights import StepRemedy, check_weights, innermost, stepped
from qkeel.remedies.idle_steps import notice_idle_steps
from qkeel.remedies.lalr import LALR
from qkeel.remedies.one_slot import (
    AttentionTemperature,
    LogNRemedy,
    SigmoidRemedy,
    SinkRemedy,
    SoftcapRemedy,
    SoftpickRemedy,
)
from qkeel.remedies.output_gate import OutputGate
from qkeel.remedies.output_head import FinalSoftcap, ZLoss
from qkeel.remedies.processes import (
    WHAT,
    agreed,
    check_added,
    check_peers,
    check_wrapper,
    refused_under_zero,
)
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.qk_norm import Cosine, KeyNorm, QKNorm, QKVNorm, QueryNorm
from qkeel.remedies.qk_weights import FrozenQK, QKLearningRate, QKWeightDecay, SpectralCap
from qkeel.remedies.residual_branches import Dropout, PeriNorm, SwinNorm
from qkeel.remedies.sigma_reparam import SigmaReparam
from qkeel.remedies.weights_in_use import check_weights_in_use
from qkeel.sites.find import Models, found_sites, named_models, of_each, sites_of_each
from qkeel.sites.tap import Tap
from qkeel.sites.trace import ModelTrace, run_once

REMEDIES: dict[str, type[Remedy]] = {
    "none": NoRemedy,
    "qk_norm": QKNorm,
    "qkv_norm": QKVNorm,
    "key_norm": KeyNorm,
    "query_norm": QueryNorm,
    "cosine": Cosine,
    "softcap": SoftcapRemedy,
    "log_n": LogNRemedy,
    "attention_temperature": AttentionTemperature,
    "sigmoid": SigmoidRemedy,
    "softpick": SoftpickRemedy,
    "sink": SinkRemedy,
    "output_gate": OutputGate,
    "qk_clip": QKClip,
    "lalr": LALR,
    "qk_lr": QKLearningRate,
    "frozen_qk": FrozenQK,
    "qk_weight_decay": QKWeightDecay,
    "sigma_reparam": SigmaReparam,
    "spectral_cap": SpectralCap,
    "z_loss": ZLoss,
    "final_softcap": FinalSoftcap,
    "swin_norm": SwinNorm,
    "peri_norm": PeriNorm,
    "dropout": Dropout,
}
ALIASES: dict[str, str] = {"quack": "lalr"}

_GIVE = "For apply: qkeel.apply(model, {!r}, optimizer, batch=batch), with a batch that the model accepts"


RemedySpec = str | Remedy | Sequence[str | Remedy]


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A one-line description of a remedy, and its source."""

    line: str  #: what the remedy does
    source: str  #: author, year and number, or its derivation


def remedies() -> dict[str, str]:
    """Returns the names of all remedies, each with a one-line description and its source.

    Example:
        >>> remedies()["key_norm"]
        'normalises keys alone [Su 2023, kexue.fm 9859 (KNA)]'
    """
    return {name: f"{cls.line} [{cls.source}]" for name, cls in REMEDIES.items()}


def parse(remedy: RemedySpec, **options: float | int | bool | str) -> tuple[Remedy, ...]:
    """Returns Remedy objects from a spec string ("lalr:tau=0.1+qk_clip"), a Remedy, or a list of both.

    Keyword options are allowed only if a string names a single remedy, to which they apply.

    Raises:
        InvalidTypeError: `remedy` is not a remedy, or there are options for several remedies at once.
        UnknownNameError: a remedy or an option is unknown.

    Example:
        >>> parse("quack", tau=0.3)
        (LALR(tau=0.3, norm='frobenius', decay='scaled', heads=None),)
    """
    if isinstance(remedy, Remedy):
        _no_options(options, remedy)
        return (remedy,)
    if isinstance(remedy, str):
        terms = parse_terms(remedy)
        if options and len(terms) > 1:
            raise InvalidTypeError(f"{remedy!r} names {len(terms)} remedies; write the options into the string")
        return tuple(_make(term, options) for term in terms)
    if not isinstance(remedy, Sequence):
        raise InvalidTypeError(
            f"expected a remedy's name, a Remedy or a list of them, got {type(remedy).__name__}; write "
            'qkeel.apply(model, "qk_norm", optimizer)'
        )
    _no_options(options, remedy)
    return tuple(parsed for entry in remedy for parsed in parse(entry))


def canonical(text: str) -> str:
    """Returns the canonical spelling of a remedy string, with aliases resolved and options sorted.

    Example:
        >>> canonical("quack:tau=0.10")
        'lalr:tau=0.1'
    """
    parse(text)
    terms = [Term(ALIASES.get(t.name, t.name), t.options) for t in parse_terms(text)]
    return "+".join(map(str, terms))


def note(text: str) -> Note:
    """Returns a description of the remedies in a spec string, with their sources.

    Example:
        >>> note("softpick").source
        'Zuhri et al. 2025, arXiv 2504.20966, equation 5'
    """
    remedies = parse(text)
    return Note("; ".join(r.line for r in remedies), "; ".join(dict.fromkeys(r.source for r in remedies)))


def _model_first(*args: Any, **kwargs: Any) -> Call | None:
    """Returns the arguments of `apply` with the model first, or None if the remedy was not the first of them."""
    first = args[0] if args else None
    several = isinstance(first, (list, tuple)) and bool(first) and all(isinstance(x, (str, Remedy)) for x in first)
    if not several and not isinstance(first, (str, Remedy)):
        return None
    if "model" in kwargs:
        return args[1:], {**kwargs, "remedy": first}
    return ((args[1], first, *args[2:]), kwargs) if len(args) > 1 else None


@accepts_earlier_calls(_model_first)
def apply(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    remedy: str | Remedy | Sequence[str | Remedy],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    batch: object = None,
    sites: object = None,
    train_length: int | None = None,
    partial: bool = False,
    **options: float | int | bool | str,
) -> Handle:
    """Applies remedies to a model (and its optimizer). `handle.remove()` restores both bit for bit.

    If several processes train one model, all of them must apply the same remedies at the same point in the program;
    otherwise every process raises an error and no model is changed. They must also remove the remedies after the same
    step. In `apply`, a process waits for the others up to the process group's timeout, and warns after 8 seconds.

    A model that `qkeel.watch` has observed in a forward pass needs no batch, because its attention and its last batch
    are known. Any other model needs no batch either if an optimizer is given. The remedies are then applied at the
    beginning of the model's next forward pass, with the batch of that pass, and an optimizer step before that pass
    raises an error.

    Args:
        model: a model, or a part of a model, that contains attention. A list of models, or a dict of models by name, is
            treated as one model, such as all pipeline stages of this process.
        remedy: "lalr", "lalr:tau=0.1+qk_clip", a Remedy, or a list of these.
        optimizer: the optimizer of the model's weights, or a list of several, such as Muon and AdamW. Remedies that
            change its steps need it; of several, each acts on the heads whose weights it holds. Parameters that a
            remedy creates are added to it; of several, to the first that holds gains or biases. A remedy that changes
            steps warns once if something other than this optimizer changes its weights, step after step.
        batch: the input of one pass, which reveals the attention of modules from other libraries. It is a tensor, a
            tuple of the forward's arguments or a dict of its keyword arguments. For several models, give one batch
            for each, as a list or a dict by name. Not needed if an optimizer is given; see above.
        sites: the result of `find_sites` for this model, in place of a batch. Find the sites before fully_shard or
            tensor parallelism splits the weights, because split weights cannot be traced. Sites are matched by name.
            For several models, give one result for each, as for `batch`.
        train_length: the number of tokens per training sequence, for formulas that need it (such as that of an L2 norm
            with a learned scale).
        partial: if True, the remedy is applied even if some attention was observed but not understood. That attention
            stays unchanged.
        options: the options of a single remedy named by a string.

    Raises:
        UnknownNameError: a remedy or an option is unknown.
        RefusedError: the remedy cannot be used here. The message says where and why, and the model is unchanged.
        AlreadyAppliedError: the remedy is already active on this model.

    Example:
        >>> from qkeel.nn import Attention
        >>> attention = Attention(16, 4)
        >>> with apply(attention, "softcap:cap=30"):
        ...     attention.spec.cap.formula()
        '30·tanh(z/30)'
    """
    more = Asked(options=options, train_length=train_length, partial=partial)
    if batch is not None or sites is not None or not isinstance(model, nn.Module) or _knows_itself(model):
        return _apply(model, remedy, optimizer, more, batch=batch, sites=sites)
    remedies, tap = parse(remedy, **options), next((owner for owner in owners(model) if isinstance(owner, Tap)), None)
    if tap is not None and tap.sites and all(parsed.on_steps for parsed in remedies):
        return _apply(model, remedy, optimizer, more, sites=tap.sites)
    if tap is not None and tap.latest is not None:
        with tap.latest.setting(unwrapped(model)):
            latest = ForwardArguments(tap.latest.args, tap.latest.kwargs)
            return _apply(model, remedy, optimizer, more, batch=latest)
    if not listed(optimizer):
        return _apply(model, remedy, optimizer, more)
    return AtNextPass(model, remedy, optimizer, more)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of `apply` other than the remedies, the model and the optimizer."""

    options: Mapping[str, float | int | bool | str] = dataclasses.field(default_factory=dict)
    train_length: int | None = None
    partial: bool = False


def _knows_itself(model: nn.Module) -> bool:
    """True if the model contains qkeel's own attention modules, which can be found without a pass."""
    return any(isinstance(module, SpecModule) for module in unwrapped(model).modules())


@final
class AtNextPass(Handle):
    """Remedies that are applied when the model's next forward pass begins, with that pass's arguments as the batch.

    If a remedy is refused, the error is raised in the call of the model, or passed to `refused` if that is given.
    """

    def __init__(
        self,
        model: nn.Module,
        remedy: RemedySpec,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        more: Asked,
        *,
        refused: Callable[[QkeelError], None] | None = None,
    ) -> None:
        remedies = parse(remedy, **more.options)
        check_wrapper(unwrapped(model), remedies)
        self.about = "+".join(parsed.name for parsed in remedies)
        self._remedy, self._model, self._more = remedy, model, more
        self._refused = refused
        self._inner: Handle | None = None
        self._carried: State | None = None
        self._passes = ForwardPasses(model, self._begin, lambda *_: None, guard=unguarded)
        self._optimizers = [listed(optimizer)]
        self._steps = [StepHooks(self._refuse_step, lambda _: None, innermost(x)) for x in self._optimizers[0]]
        super().__init__(self._take_off, state=self._own_state, load=self._take_state)

    def __repr__(self) -> str:
        waits = self.active and self._inner is None
        return f"<Handle of {self.about}: applied when the next pass begins>" if waits else super().__repr__()

    def or_with(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model. The remedies use the first optimizer with which they can be applied.

        Does nothing if the remedies have already been applied.
        """
        if self._inner is None and self.active:
            self._optimizers.append([optimizer])

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, object], compiled: bool) -> None:
        if not self.active or self._inner is not None:
            return
        self._wait_no_more()
        try:
            with joining(self._model, args, kwargs):
                self._inner = self._applied(ForwardArguments(args, kwargs))
        except QkeelError as error:
            if self._refused is None:
                raise
            self._refused(error)
            return
        if self._carried:  # a state from before the first pass is empty
            self._inner.load(self._carried)

    def _applied(self, batch: ForwardArguments) -> Handle:
        forward = vars(self._model).get("forward")
        handle = self._with_the_first_that_fits(batch)
        if vars(self._model).get("forward") is not forward:
            handle.remove()
            raise RefusedError(
                f"{self.about} replaces the model's own forward, which is running now. {_GIVE.format(self.about)}"
            )
        return handle

    def _with_the_first_that_fits(self, batch: ForwardArguments) -> Handle:
        errors: list[RefusedError] = []
        for optimizers in self._optimizers:
            try:
                return _apply(self._model, self._remedy, optimizers, self._more, batch=batch)
            except RefusedError as error:
                errors.append(error)
        raise errors[0]

    def _refuse_step(self, optimizer: Optimizer) -> None:
        if self.active and self._inner is None and self._passes.active:
            self.remove()
            raise RefusedError(
                f"{self.about} was to be applied when {type(unwrapped(self._model)).__name__} was next called, but "
                f"its optimizer took a step before that call. {_GIVE.format(self.about)}"
            )

    def _wait_no_more(self) -> None:
        self._passes.remove()
        for hooks in self._steps:
            hooks.remove()

    def _take_off(self) -> None:
        self._wait_no_more()
        if self._inner is not None:
            self._inner.remove()

    def _own_state(self) -> State:
        return self._inner.state() if self._inner is not None else dict(self._carried or {})

    def _take_state(self, state: State) -> None:
        if self._inner is not None:
            self._inner.load(state)
        else:
            self._carried = dict(state)


def _apply(
    model: Models,
    remedy: RemedySpec,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    more: Asked,
    *,
    batch: object = None,
    sites: object = None,
) -> Handle:
    """Applies remedies immediately; see `apply`."""
    train_length, partial = more.train_length, more.partial

    def asked() -> tuple[tuple[Remedy, ...], list[tuple[Target, Sites | None]]]:
        remedies = parse(remedy, **more.options)
        optimizers = listed(optimizer)
        models = {"": model} if isinstance(model, nn.Module) else named_models(model, "apply remedies to")
        shown, known = of_each(batch, [*models], "batches"), sites_of_each(sites, models)
        bare: list[tuple[Target, Sites | None]] = []
        for name, single in models.items():
            shown_arguments = ((), {}) if shown[name] is None else arguments(shown[name])
            target = Target(
                model=unwrapped(single),
                optimizer=optimizers[0] if optimizers else None,
                sites=[],
                batch=shown_arguments,
                train_length=train_length,
            )
            bare.append((target, known[name]))
        for target, _ in bare:
            check_wrapper(target.model, remedies)
        return remedies, bare

    def said(request: tuple[tuple[Remedy, ...], Sequence[object]]) -> str:
        arguments = {"optimizer": optimizer, "batch": batch, "sites": sites}
        parts = [name if x is not None else f"no {name}" for name, x in arguments.items()]
        several = [] if isinstance(model, nn.Module) else [f"{len(request[1])} models"]
        return ", ".join([f"{list(request[0])}", *several, *parts, f"train_length={train_length}, partial={partial}"])

    found, bare = dist.agree(WHAT, asked, said, lambda _: None)
    optimizers = listed(optimizer)

    def applied() -> Handle:
        handles = (compose_all(_apply_all(found, target, known, optimizers, partial=partial)) for target, known in bare)
        return next(handles) if isinstance(model, nn.Module) else compose_all(handles)

    handle = dist.agree(WHAT, applied, lambda _: "applied", Handle.remove)
    for target, _ in bare:
        handle = refused_under_zero(handle, target.model, found, optimizers[0] if optimizers else None)
    handle.about = "+".join(parsed.name for parsed in found)
    return handle


def _apply_all(
    remedies: Sequence[Remedy], bare: Target, known: Sites | None, optimizers: Sequence[Optimizer], *, partial: bool
) -> Iterator[Handle]:
    """Applies one remedy after another.

    Sites are found once, and again for the next remedies after a remedy that changes them. A remedy that has not itself
    run the model is followed by one pass, which checks that the model still runs."""
    sites, trace = (known, None) if known is not None else _sites(remedies[0], bare) if remedies else (Sites(), None)
    check_peers(bare.model, sites)
    for remedy in remedies:
        target_of_all = dataclasses.replace(
            bare,
            sites=remedy.chosen(sites),
            trace=None if remedy.on_steps else trace,
            all_sites=sites,
            values={} if trace is None else trace.value_slices(),
        )
        agreed(functools.partial(_check, remedy, target_of_all, sites, partial=partial, given=known is not None))
        for target in _by_optimizer(remedy, target_of_all, optimizers):
            before = dict(bare.model.named_parameters())
            inner = remedy.apply(target)
            try:
                inner = check_added(remedy.name, target, before, inner)
                if remedy.on_steps or known is not None or isinstance(remedy, NoRemedy):
                    pass
                # Remedies that follow or are active already need the sites.
                elif remedy is not remedies[-1] or active_remedies(bare.model):
                    sites, trace = _sites(remedy, bare)
                elif trace is not None and not remedy.changes_spec:
                    run_once(bare.model, *bare.batch)
                _check_others(remedy, sites)
            except BaseException:
                inner.remove()
                raise
            yield _marked(remedy, target, inner)


def _by_optimizer(remedy: Remedy, target: Target, optimizers: Sequence[Optimizer]) -> list[Target]:
    """Returns the target with the optimizer that the remedy needs.

    Of several optimizers, one that holds gains or biases takes new parameters, because Muon accepts matrices only. A
    remedy for steps gets a target for each optimizer that holds query and key weights, with the sites of these."""
    if len(optimizers) < 2:
        return [target]
    if not remedy.on_steps:
        for optimizer in optimizers:
            if any(p.ndim < 2 for group in optimizer.param_groups for p in group["params"]):
                return [dataclasses.replace(target, optimizer=optimizer)]
        return [target]
    sites_of: dict[int, list[AttentionSite]] = {}
    for site in target.sites:
        weights = [target.parameter(s.parameter) for term in site.terms for s in (*term.query, *term.key)]
        holds = (any(stepped(innermost(optimizer), p) is not None for p in weights) for optimizer in optimizers)
        sites_of.setdefault(next((i for i, held in enumerate(holds) if held), 0), []).append(site)
    parts = [dataclasses.replace(target, optimizer=optimizers[i], sites=sites) for i, sites in sorted(sites_of.items())]
    return parts or [target]


def _check(remedy: Remedy, target: Target, sites: Sites, *, partial: bool, given: bool) -> None:
    """Raises RefusedError if a remedy cannot be applied to the sites, which were found on a batch or `given`."""
    if not partial:
        _check_whole(remedy, sites)
    _check_supported(remedy, target)
    if given and remedy.on_attention and not remedy.on_steps:
        raise RefusedError(f"{remedy.name} changes what a pass computes, so give a batch in place of the sites")


def _check_whole(remedy: Remedy, sites: Sites) -> None:
    """Raises RefusedError if a remedy for all attention would leave out attention that is not understood."""
    if sites.missed and remedy.on_attention:
        missed = "; ".join(map(str, sites.missed))
        raise RefusedError(
            f"{remedy.name}: {sites.share} of this model are understood, and the remedy would leave out the others. "
            f"{missed}. With partial=True the remedy is applied to the attention that is understood"
        )


def _check_supported(remedy: Remedy, target: Target) -> None:
    """Raises unless the remedy can be applied at every site."""
    for site in target.sites:
        if any(active.on_steps for active in active_at(site).values()) and (
            remedy.name in active_at(site) or remedy.supports(site) is not None
        ):
            gc.collect()  # an optimizer that the script deleted may still exist, and its remedies with it
        if remedy.name in active_at(site):
            raise AlreadyAppliedError(f"{remedy.name} is already applied to {where(site)}; remove() its handle first")
        refusal = remedy.supports(site)
        if refusal is not None:
            raise RefusedError(f"{remedy.name} at {where(site)}: {refusal}")
    if not isinstance(remedy, NoRemedy):
        check_weights(target, remedy.name, per_head=remedy.on_steps)
    if isinstance(remedy, StepRemedy):
        check_weights_in_use(target, remedy)


def _marked(remedy: Remedy, target: Target, inner: Handle) -> Handle:
    """Records the active remedy on each site's module. The returned handle removes the record and the change.

    A remedy for steps ends with its optimizer, so its record does too."""
    modules = {id(site.module): site.module for site in target.sites}.values()  # a module may have several sites
    for module in modules:
        marks = module.__dict__.get(APPLIED)
        module.__dict__[APPLIED] = record = marks if isinstance(marks, _Marks) else _Marks(marks or {})
        record[remedy.name] = remedy
    compiled = not (remedy.on_steps or isinstance(remedy, NoRemedy))
    if compiled:
        compile_again()  # code compiled earlier does not detect new hooks

    ends = warning = None
    if remedy.on_steps and target.optimizer is not None:
        warning = notice_idle_steps(target, remedy)
        ends = weakref.finalize(
            innermost(target.optimizer), _unmark, [weakref.ref(module) for module in modules], remedy
        )
        ends.atexit = False

    def undo() -> None:
        if warning is not None:
            warning.remove()
        if ends is not None and ends.detach() is None:  # its optimizer no longer exists
            inner.remove()
            return
        marks = [(module, module.__dict__.get(APPLIED, {})) for module in modules]
        if any(record.get(remedy.name) is not remedy for _, record in marks):  # already folded into the weights
            return
        inner.remove()
        if compiled:
            compile_again()
        for module, _ in marks:
            _drop(module, remedy)

    return Handle(undo, state=inner.state, load=inner.load)


def _drop(module: nn.Module, remedy: Remedy) -> None:
    """Drops the record of a remedy on a module, if it is there."""
    record = module.__dict__.get(APPLIED, {})
    if record.get(remedy.name) is remedy:
        del record[remedy.name]
        if not record:
            del module.__dict__[APPLIED]


def _unmark(modules: Sequence[weakref.ref[nn.Module]], remedy: Remedy) -> None:
    """Drops the records of a remedy whose optimizer no longer exists."""
    for module in [found for ref in modules if (found := ref()) is not None]:
        _drop(module, remedy)


def _sites(remedy: Remedy, bare: Target) -> tuple[Sites, ModelTrace | None]:
    """Returns the sites of a model, and the trace of the pass that revealed them, if there was one."""
    args, kwargs = bare.batch
    try:
        return found_sites(bare.model, args, kwargs)
    except RefusedError as error:
        if args or kwargs:
            raise
        raise RefusedError(f"{error} {_GIVE.format(remedy.name)}") from error


class _Marks(dict[str, Remedy]):
    """The active remedies of a module. Copies keep only the remedies that changed the module itself."""

    def __deepcopy__(self, memo: object) -> _Marks:
        return _Marks({name: remedy for name, remedy in self.items() if not remedy.on_steps})

    def __reduce__(self) -> tuple[type, tuple[dict[str, Remedy]] | tuple[()]]:
        kept = {name: remedy for name, remedy in self.items() if not remedy.on_steps}
        return (_Marks, (kept,)) if kept else (dict, ())  # a model with step remedies only loads without qkeel


def active_remedies(model: nn.Module) -> set[str]:
    """Returns the names of the remedies that are active on this model."""
    return {name for module in model.modules() for name in module.__dict__.get(APPLIED, {})}


def forget(model: nn.Module, folded: Callable[[Remedy], bool]) -> None:
    """Drops the records of remedies that are now folded into the weights. Their handles then undo nothing."""
    for module in model.modules():
        marks = module.__dict__.get(APPLIED, {})
        for name in [name for name, remedy in marks.items() if folded(remedy)]:
            del marks[name]
            if not marks:
                del module.__dict__[APPLIED]


def _check_others(remedy: Remedy, sites: Iterable[AttentionSite]) -> None:
    """Raises RefusedError if an earlier remedy is no longer valid after this one, so that their order never matters."""
    for site in sites:
        for earlier in active_at(site).values():
            refusal = earlier.holds(site)
            if refusal is not None:
                raise RefusedError(f"{remedy.name} at {where(site)}, where {earlier.name} is active: {refusal}")


def _make(term: Term, options: dict[str, float | int | bool | str]) -> Remedy:
    name = ALIASES.get(term.name, term.name)
    cls = lookup("remedy", {**REMEDIES, **{a: REMEDIES[n] for a, n in ALIASES.items()}}, name)
    return build(f"remedy {name!r}", cls, {**term.options, **options})


def _no_options(options: dict[str, float | int | bool | str], named: object) -> None:
    if options:
        raise InvalidTypeError(f"options {sorted(options)} need a remedy named by a string, got {named!r}")
