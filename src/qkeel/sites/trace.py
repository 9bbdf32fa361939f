"""One recorded pass of a model: its attention calls and sites, and the operators that computed them.

`traced` runs a model once on a short part of an example, with gradients and with every operator recorded, reads the
sites from that pass and verifies them. It then runs the full example once, with few observations, to check whether it
makes the same calls. `find_sites` returns the sites. `apply`, its remedies and their checks keep the trace while they
run, and take the operands, the weights of the values, and the called modules from it instead of running the model
again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkeel import dist
from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall, fewest_keys, key_heads
from qkeel.capture.eager import is_projected, reached
from qkeel.capture.example import ModuleCall, ShortExample, Undo, copied, first_row, shorter, tensors, undisturbed
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.visible_sets import KeyOrigin, VisibleSets, told_apart, visible_sets
from qkeel.errors import InvalidValueError, NoAttentionError, caution
from qkeel.functional.norms import unrounded, widest
from qkeel.heads.norms import seen_gains
from qkeel.heads.rows import UnknownRowsError, normed_on_the_way, side, sum_terms
from qkeel.heads.site import (
    INDEX,
    AttentionSite,
    HeadSlice,
    NormGain,
    QKProduct,
    Sites,
    UnrecognizedAttention,
    layer_of,
)
from qkeel.heads.verification import Copy, RecordedCall, Verification
from qkeel.heads.walk import Record, Repetition, Values, leaves_of, memory, names_of, nodes_of, variable_of
from qkeel.nn.attention import SpecModule
from qkeel.patching.autograd import CheckpointedParts
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import (
    Args,
    DeferredError,
    Function,
    Guarded,
    Kwargs,
    TorchOperator,
    buffers_of,
    gathered,
    modules_of,
    no_operators_seen,
    parameters_in,
    running_stage,
    uncompiled,
    unguarded,
)
from qkeel.patching.named_calls import SDPA_BY_NAME
from qkeel.sites.linear_layers import linear_layers
from qkeel.sites.unrecognized import unrecognized_attention
from qkeel.spec import AttentionCall

_LOG = logging.getLogger(__name__)

SEARCH = "the search for attention in a model that is split across processes"
ONE_LENGTH = 1e-3  # what a norm adds under its root changes norms by less than this fraction

Gains = tuple[NormGain, ...]
Places = dict[str, tuple[nn.Module, frozenset[Function] | None]]  # see `CaptureMode`: modules to observe, by name
# How much is read about the sites of a pass: whether a norm precedes the logit ("plain norms", or "norms" to include
# attention that only operators show), also the weights, or also whether an experiment confirms the weights.
Wanted = Literal["plain norms", "norms", "weights", "verified"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """The q or k of one product of a site.

    Attributes:
        width: the number of features over which a logit is summed.
        lengths: the norm of each vector.
        tables: the names of the parameters of which the operand is a view or a selection of entries, as with relative
            positions; empty if the operand was computed from the input.
        rounding: the relative difference that rounding in its dtype may cause between the norms of normed vectors.
    """

    width: int
    lengths: Float[Tensor, "b h t"]
    tables: frozenset[str]
    rounding: float = ONE_LENGTH

    def normed(self, over: str, tolerance: float | None = None) -> bool:
        """True if all vectors of a head, or of all heads together, have the same norm (or are zero), up to rounding or
        up to the relative `tolerance`."""
        if self.tables:
            return True
        lengths = self.lengths if over == "head" else self.lengths.square().sum(1, keepdim=True).sqrt()
        most = lengths.amax((0, 2))
        least = lengths.where(lengths > 0, most[None, :, None]).amin((0, 2))
        return bool((most - least <= max(self.rounding, tolerance or 0.0) * most).all())

    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest mean square among the nonzero vectors."""
        squares = self.lengths.square() / self.width
        shown = squares[squares > 0]
        return (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 0.0)


@final
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelTrace:
    """The attention calls of one pass of a model, and what was computed on the way to them.

    A trace holds every tensor of the pass and should be released as soon as it has been used.

    Args:
        model: the model.
        sites: the attention sites, in the order of the calls.
        given: the arguments of the pass, which may be a part of a larger example.
        calls: the first call of each site, or one call for each head if the heads are computed one by one.
        values: the tensors by which the softmax weights of each site were multiplied.
        called: the ids of the modules that ran.
        minima: the smallest visible logit of each hand-written site, on the full example.
        hidden_by_small: the number of pairs that masks hide at each hand-written site where some of these are hidden by
            values above -9000, on the full example.
        unrecognized: the entries of `sites.missed` that were found from the operators, and not by a reader of calls.
        operators: every operator that ran, if operators were recorded.
        frames: every module call, if operators were recorded.
    """

    model: nn.Module
    sites: Sites
    given: tuple[Args, Kwargs]
    calls: dict[str, list[RecordedCall]]
    values: dict[str, Tensor]
    called: frozenset[int]
    minima: dict[str, float]
    hidden_by_small: dict[str, int]
    unrecognized: tuple[UnrecognizedAttention, ...] = ()
    operators: Sequence[TorchOperator] = ()
    frames: Sequence[ModuleCall] = ()

    def verified(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        """Returns the sites, with a reason for each site whose weights an experiment on the recorded operators does not
        confirm."""
        checks = Verification(self.model, self.operators, self.given)
        return [checks.site(site, self.calls.get(site.name, [])) for site in sites]

    def places(self) -> Places | None:
        """Returns the modules that made the calls, keyed by name, if all attention calls are calls of
        F.scaled_dot_product_attention through that name in modules inside the model; otherwise returns None."""
        calls = [one.captured for each in self.calls.values() for one in each]
        named = all(c.named and c.frame.name and not c.below and not c.headless for c in calls)
        plain = named and not self.sites.missed and {c.name for c in calls} == {site.name for site in self.sites}
        return {c.frame.name: (c.frame.module, SDPA_BY_NAME) for c in calls} if plain and calls else None

    @functools.cached_property
    def record(self) -> Record:
        """The operators, with an index of the memory that each operator reads and writes."""
        return Record(self.operators)

    def repeated(self, name: str, values: Values, frame: ModuleCall, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of a module that follows a site's attention, once as it was and once as it would be with
        other weights.

        Args:
            name: the name of the site.
            values: the values that replace the weights, keyed by the places of the weights.
            frame: the call of the following module, inside the call of the site's module.
            x: that module's input.
        """
        first, weights = self.calls[name][0], {where[0] for where in values}
        inside = self.record.behind({memory(x)}, frame.since, since=first.captured.frame.since)
        again = Repetition(inside, weights)
        return again({})(x), again(values)(x)

    def operands(self) -> dict[str, list[tuple[Operand, Operand]]]:
        """The operands of every product of each site's first call that was fully observed, keyed by site."""
        names, found = names_of(self.model), dict[str, list[tuple[Operand, Operand]]]()
        for name, (first, *_) in self.calls.items():
            captured, call = first.captured, first.captured.call
            pairs = call.products if isinstance(call, ScoresCall) else ((call.q, call.k),)
            read = [(_operand(q, captured.frame, names), _operand(k, captured.frame, names)) for q, k in pairs]
            found[name] = [(q, k) for q, k in read if q is not None and k is not None]
        return found

    def value_slices(self) -> dict[str, tuple[HeadSlice, ...] | str]:
        """The last weights on the path of each site's values [b g s d], or the reason why they are unknown, keyed by
        site."""
        names = names_of(self.model)
        # A view made here belongs to the graph of the pass, regardless of the caller's mode.
        with torch.inference_mode(False), torch.enable_grad():
            return {
                name: _value_slices(first.captured, self.values.get(name), names)
                for name, (first, *_) in self.calls.items()
            }


def traced(model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool) -> ModelTrace:
    """Returns the trace of the shortest part of an example that suffices.

    A part suffices if all its sites are verified and a pass over the full example, whose tensors are discarded, makes
    the same calls. Several processes have to make the same passes, so they use the full example.

    Raises:
        RefusedError: no attention was observed although it was `expected`.
        InvalidValueError: the forward pass with this example fails, or the example is on another device.
    """
    model = uncompiled(model)
    with extra_pass(model), torch.inference_mode(False), undisturbed(model) as undo:
        for short in () if dist.world() > 1 else shorter(args, kwargs):
            try:
                trace = _traced(model, short.args, short.kwargs, undo, expected=expected)
                undo()
                sites = trace.sites
                known = all(s.verified and (short.rows > 1 or _is_plain(s.layout)) for s in sites)
                if known and (whole := _same_calls(model, args, kwargs, trace, undo)) is not None:
                    minima, hidden, types = whole
                    sites = Sites(_typed(sites, types), sites.missed, sites.indexers, sites.linear)
                    if short.cut and any(s.normed for s in sites):
                        sites = _with_bounds(model, sites, first_row(args, kwargs), undo)
                    return dataclasses.replace(trace, sites=sites, minima=minima, hidden_by_small=hidden)
            except Exception as error:
                _LOG.debug("a shorter example of %s fails: %s", type(model).__name__, error)
                undo()
        return _traced(model, args, kwargs, undo, expected=expected)


def seen(
    model: nn.Module, args: Args, kwargs: Kwargs, *, below: bool = True, earlier: ModelTrace | None = None
) -> ModelTrace:
    """Returns the trace of a pass over the full example, with its sites and with whether their q or k is normed, but
    without the weights of their heads.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        below: whether to observe operators too.
        earlier: the trace of a pass on the same example. If all its attention calls were calls of
            F.scaled_dot_product_attention through that name, only such calls in the same modules are observed.
    """
    model = uncompiled(model)
    places = None if earlier is None or below else earlier.places()
    with whole_weights(model), extra_pass(model), torch.inference_mode(False), undisturbed(model) as undo:
        read: Wanted = "norms" if below else "plain norms"
        return _traced(model, args, kwargs, undo, expected=True, read=read, places=places)


def run_once(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Makes a pass that is not observed and whose results are discarded, for the sake of the values that the model
    itself records in it.

    Raises:
        InvalidValueError: the pass fails; its error is the cause of this one.
    """
    model = uncompiled(model)
    try:
        with extra_pass(model), torch.inference_mode(False), undisturbed(model):
            forward(model, nullcontext(), copied(args), copied(kwargs), graph=False)
    except Exception as error:
        raise _failed(model, f"{type(error).__name__}: {error}") from error


def biased(model: nn.Module, args: Args, kwargs: Kwargs) -> set[str]:
    """The names of hand-written sites whose logits are not only a scale times q·k, for example because of a bias."""
    found: set[str] = set()

    def note(captured: CapturedCall) -> None:
        call = captured.call
        if isinstance(call, ScoresCall) and not is_product(call):
            found.add(captured.name)

    with extra_pass(model), undisturbed(model):
        forward(model, CaptureMode(model, note, probing=True), copied(args), copied(kwargs))
    return found


# --- the passes


def _traced(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    undo: Undo,
    *,
    expected: bool,
    read: Wanted = "verified",
    places: Places | None = None,
) -> ModelTrace:
    """The trace of one pass over this example, with as much information about its sites as `read` requests."""
    check_devices(model, args, kwargs)
    reading, below = _watched(model, args, kwargs, undo, read, places)
    watcher = reading.watcher
    unrecognized = tuple(reading.unrecognized())
    if not reading.sites and expected:
        raise NoAttentionError(unseen(model, watcher, unrecognized))
    if below:
        caution(f"attention inside torch.jit.script and torch.func.vmap is not searched for: {below}")
    sites = _typed([reading.sites[name] for name in reading.order if name in reading.sites], reading.visible)
    if read == "verified" and below:
        why = f"the forward pass that records operators failed: {below}"
        sites = [dataclasses.replace(s, unverified=why) if s.terms else s for s in sites]
    groups = grouped([call.captured for call in reading.order.values()])
    calls = {group[0].name: [reading.order[captured.name] for captured in group] for group in groups}
    least = {name: _least(c.captured.call) for name, (c, *_) in calls.items()}
    missed, linear = (*watcher.missed, *unrecognized), reading.linear(unrecognized)
    return ModelTrace(
        model=model,
        sites=Sites(sites, missed, _indexers(watcher, [site.name for site in sites]), linear),
        unrecognized=unrecognized,
        given=reading.given,
        calls=calls,
        values=watcher.values or {},
        called=frozenset(watcher.stack.called),
        minima={name: float(x) for name, x in least.items() if x is not None},
        hidden_by_small={name: _hidden_by_small(c.captured.call) for name, (c, *_) in calls.items()},
        operators=watcher.operations,
        frames=watcher.stack.frames,
    )


def _typed(sites: Sequence[AttentionSite], seen: Mapping[str, VisibleSets]) -> list[AttentionSite]:
    """The sites with the types of their visible sets, where these are known."""
    types = told_apart(seen)
    return [dataclasses.replace(s, visible=types.get(s.name, s.visible)) for s in sites]


def _same_calls(
    model: nn.Module, args: Args, kwargs: Kwargs, trace: ModelTrace, undo: Undo
) -> tuple[dict[str, float], dict[str, int], dict[str, VisibleSets]] | None:
    """The smallest visible logits, the numbers of pairs hidden by small numbers and the visible sets in a pass without
    gradients, from which nothing else is recorded. None unless the pass has the same sites as the trace, with the same
    numbers of heads, and misses the same attention layers."""
    sites = trace.sites
    origins: dict[str, KeyOrigin] = {site.name: site.origin for site in sites}
    types: dict[str, VisibleSets] = {}
    found: dict[str, int] = {}
    names: set[str] = set()
    least: dict[str, Tensor] = {}
    hidden: dict[str, int] = {}
    groups: dict[int, tuple[str, ModuleCall]] = {}  # the frame is kept so that its id is not reused

    def note(captured: CapturedCall) -> None:
        name, low = captured.name, _least(captured.call)
        if low is not None:
            least[name] = low if name not in least else torch.minimum(least[name], low.to(least[name].device))
        if name in names:
            return
        names.add(name)
        hidden[name] = _hidden_by_small(captured.call)
        if name in origins:
            types[name] = visible_sets(captured.call, origins[name])
        if captured.headless:
            name, _ = groups.setdefault(id(captured.frame), (name, captured.frame))
        found[name] = found.get(name, 0) + scored(captured).shape[1]

    layouts = {site.name: site.layout for site in sites if site.layout is not None}
    for below in (False, True):
        watcher = CaptureMode(model, note, dispatch=below, layouts=layouts)
        watcher.key_heads = {s.name: (s.n_heads, s.n_kv_heads) for s in sites if s.key_heads is None}
        forward(model, watcher, copied(args), copied(kwargs), graph=False)
        undo()
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
        if below or not (watcher.hidden or scripted or any(site.below for site in sites)):
            break
        for kept in (found, names, least, hidden, groups, types):
            kept.clear()
    same = {str(m) for m in watcher.missed} == {str(m) for m in sites.missed if m not in trace.unrecognized}
    same = same and found == {site.name: site.n_heads for site in sites}
    return ({name: float(x) for name, x in least.items()}, hidden, types) if same else None


def _least(call: object) -> Tensor | None:
    """The smallest finite logit of a hand-written call that is not hidden by a mask."""
    if not isinstance(call, ScoresCall):
        return None
    seen = torch.isfinite(call.logits) if call.hidden is None else ~call.hidden & torch.isfinite(call.logits)
    return call.logits.detach().masked_fill(~seen, torch.inf).amin()


def _hidden_by_small(call: object) -> int:
    """The number of pairs that the masks of a hand-written call hide, or 0 if none of these pairs is hidden by a value
    above -9000. Rows that see no key are left out, since padding may have added them."""
    if not isinstance(call, ScoresCall) or call.hidden is None:
        return 0
    if not bool((call.hidden & (call.capped > HIDES)).any()):
        return 0
    hidden = call.hidden.expand(*call.hidden.shape[:3], call.logits.shape[3])
    hidden = hidden & ~hidden.all(-1, keepdim=True)
    return int(hidden.sum()) * (call.logits.numel() // hidden.numel())


def _with_bounds(model: nn.Module, sites: Sites, whole: ShortExample, undo: Undo) -> Sites:
    """The same sites with the norms that one full sequence shows, because values computed after a norm may grow with
    the position."""
    try:
        trace = _traced(model, whole.args, whole.kwargs, undo, expected=True, read="weights")
        seen = {site.name: site for site in trace.sites}
    except Exception as error:
        undo()
        if torch.OutOfMemoryError not in (type(error), type(error.__cause__)):
            raise
        caution(
            f"the logit bounds that the norms of {type(model).__name__} imply are unknown and not watched: there is "
            "not enough memory to read them from one whole sequence. Everything else is known from a short sequence. "
            "For the bounds, call find_sites with a batch of one sequence that is as long as memory allows, and "
            "pass the sites that it returns to watch(sites=...)"
        )
        seen = {}
    gains = {s.name: (seen[s.name].query_gains, seen[s.name].key_gains) if s.name in seen else ((), ()) for s in sites}
    found = [dataclasses.replace(s, query_gains=gains[s.name][0], key_gains=gains[s.name][1]) for s in sites]
    return Sites(found, sites.missed, sites.indexers, sites.linear)


def _is_plain(layout: HeadLayout | None) -> bool:
    """True if heads have a separate dimension; on a single sequence, heads that are merged with the batch seem to have
    one."""
    return layout is None or layout.groups == tuple("bhts")


def check_devices(model: nn.Module, *example: object) -> None:
    """Refuses an example that is not on the device of the model, before running it.

    Raises:
        InvalidValueError: the example is on another device; the message names both devices.
    """
    modules = modules_of(model).values()
    buffers = [x for module in modules for x in buffers_of(module).values() if x is not None]
    homes = {x.device for x in (*parameters_in(modules), *buffers)}
    for x in tensors(example):
        # A scalar on the CPU can be combined with tensors on any device.
        if homes and x.device not in homes and (x.ndim or x.device.type != "cpu"):
            where = ", ".join(sorted(map(str, homes)))
            raise InvalidValueError(
                f"expected the example on the model's device, {where}; got a tensor of shape {tuple(x.shape)} on "
                f"{x.device}. Move one of them: inputs.to({where.split(', ')[0]!r})"
            )


@final
class _Reading:
    """The sites of a pass, read from the first call of each site. Sites that are complete at the end of a checkpointed
    part are read there, because nothing of the part's graph is kept; the other sites are read at the end of the
    pass."""

    def __init__(
        self,
        model: nn.Module,
        given: tuple[Args, Kwargs],
        read: Wanted,
        *,
        dispatch: bool,
        keep: bool,
        places: Places | None = None,
    ) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in reversed(self._parameters.items())}
        self.watcher = CaptureMode(
            model,
            self._note,
            probing=True,
            dispatch=dispatch,
            record=read == "verified",
            guard=_guard(model),
            only_in=places,
            names=self._names,
        )
        self.watcher.values = {}
        self.given = given
        self._wanted: Wanted = read
        self.parts = CheckpointedParts(self._at_end_of_part, keep=keep)
        self.sites: dict[str, AttentionSite] = {}
        self.order: dict[str, RecordedCall] = {}  # the first call for each name
        self.visible: dict[str, VisibleSets] = {}
        self.checks: Verification | None = None
        self._waiting: list[CapturedCall] = []
        self._recorded: dict[str, list[RecordedCall]] = {}  # the calls of sites that were read before the end

    def _note(self, captured: CapturedCall) -> None:
        if captured.name not in self.order:
            self.order[captured.name] = RecordedCall(captured=captured, until=len(self.watcher.operations))
            self._waiting.append(captured)

    def _at_end_of_part(self) -> None:
        running = self.watcher.stack.top.line()
        with no_operators_seen():
            self.watcher.guard(self.watcher.apart, functools.partial(self._read, running))

    def _read(self, running: Sequence[ModuleCall]) -> None:
        left: list[CapturedCall] = []
        for calls in grouped(self._waiting):
            if calls[0].headless and any(calls[0].frame is frame for frame in running):
                left += calls  # more heads may follow
                continue
            self._recorded[calls[0].name] = [self.order[call.name] for call in calls]
            with unrounded(scored(calls[0])):
                site = _site(calls, self._names, self._wanted)
            self.sites[calls[0].name] = self._with_origin(site, calls)
        self._waiting = left

    def run(self) -> None:
        """Runs the pass."""
        torch.clear_autocast_cache()  # otherwise the cast of a weight may come from an earlier pass
        watcher = self.watcher
        forward(watcher.stack.root.module, _looking(watcher), *self.given, parts=self.parts, guard=watcher.guard)

    def finished(self) -> bool:
        """Reads the remaining sites and verifies those of a recorded pass. Returns False if that needed a checkpointed
        part that was not kept."""
        if self.watcher.operations:
            self.checks = Verification(self.watcher.stack.root.module, self.watcher.operations, self.given)
            for name, site in self.sites.items():
                self.sites[name] = self._checked(site, self._recorded[name])
        try:
            with torch.enable_grad():
                self._read_by_kind([*grouped(self._waiting)])
        except RuntimeError:
            if not self.parts.missed:
                raise
        return not self.parts.missed

    def _read_by_kind(self, groups: Sequence[list[CapturedCall]]) -> None:
        """Reads the sites of these calls. One site of each kind is read from the graph, and similar sites are read by
        analogy to it."""
        tried: dict[str, set[int]] = {calls[0].name: set() for calls in groups}
        while groups:
            copies: list[tuple[Copy, list[CapturedCall]]] = []
            for calls in groups:
                recorded, name = [self.order[call.name] for call in calls], calls[0].name
                copy = None if self.checks is None else self.checks.another(recorded, tried[name])
                if copy is None:
                    with unrounded(scored(calls[0])):
                        site = _site(calls, self._names, self._wanted)
                    site = site if self.checks is None else self.checks.site(site, recorded)
                    self.sites[name] = self._with_origin(site, calls)
                else:
                    copies.append((copy, calls))
                    tried[name].add(id(copy.pattern))
            same = [] if self.checks is None else self.checks.same_numbers([copy for copy, _ in copies])
            for (copy, calls), yes in zip(copies, same, strict=True):
                if yes:
                    self.sites[calls[0].name] = self._with_origin(self._with_gains(copy.site, calls), calls)
            groups = [calls for (_, calls), yes in zip(copies, same, strict=True) if not yes]

    def _with_gains(self, site: AttentionSite, calls: list[CapturedCall]) -> AttentionSite:
        if not site.normed:
            return site
        with unrounded(scored(calls[0])):
            query, key = _gains(calls, calls[0].call.q, calls[0].call.k, self._names)
        return dataclasses.replace(site, query_gains=query, key_gains=key)

    def _checked(self, site: AttentionSite, calls: Sequence[RecordedCall]) -> AttentionSite:
        """A site that was read earlier, with the result of the experiment on it or on a site that it resembles."""
        assert self.checks is not None
        copy = self.checks.another(calls)
        if copy is not None and _same_terms(copy.site, site) and all(self.checks.same_numbers([copy])):
            return dataclasses.replace(site, unscaled=copy.site.unscaled)
        return self.checks.site(site, calls)

    def unrecognized(self) -> list[UnrecognizedAttention]:
        """The attention in a recorded pass that no reader of calls has recognized."""
        if self.checks is None:
            return []
        watcher = self.watcher
        weights = {memory(x) for x in watcher.handwritten.tags.weights or ()}
        record, dynamic = self.checks.record, self.checks.dynamic
        found = unrecognized_attention(record, dynamic, watcher.stack.frames, weights, watcher.fused)
        return [one for one in found if not watcher.accounts_for(one.module)]

    def linear(self, unrecognized: Sequence[UnrecognizedAttention]) -> tuple[str, ...]:
        """The modules of a recorded pass that mix positions without logits."""
        if self.checks is None:
            return ()
        own = [
            name for name, module in self.watcher.stack.root.module.named_modules() if isinstance(module, SpecModule)
        ]
        attending = [*self.order, *own, *(one.module for one in (*self.watcher.missed, *unrecognized))]
        return linear_layers(self.checks.record, self.checks.dynamic, self.watcher.stack.frames, attending)

    def _with_origin(self, site: AttentionSite, calls: list[CapturedCall]) -> AttentionSite:
        """Returns the site with the origin of its keys, and stores the visible sets of its first call. Does neither if
        only norms are read."""
        if self._wanted.endswith("norms"):
            return site
        origin: KeyOrigin = "tokens"
        if _of_other_source(calls[0]):
            origin = "other"
        elif _of_latents(site, self._parameters):
            origin = "latent"
        self.visible[site.name] = visible_sets(calls[0].call, origin)
        return dataclasses.replace(site, origin=origin)


def _same_terms(one: AttentionSite, two: AttentionSite) -> bool:
    """True if two sites have the same rows of the same weights in the same terms."""
    if [(len(t.query), len(t.key)) for t in one.terms] != [(len(t.query), len(t.key)) for t in two.terms]:
        return False
    mine, others = ([s for t in site.terms for s in (*t.query, *t.key)] for site in (one, two))
    pairs = zip(mine, others, strict=True)
    return all(s.parameter == o.parameter and s.bias == o.bias and s.same(o) for s, o in pairs)


@contextmanager
def _looking(watcher: CaptureMode) -> Iterator[None]:
    """A context in which a mode observes the calls of a pass, and which of them are made through the function's
    name."""
    with ExitStack() as around:
        watcher.look(around)
        yield


def _watched(
    model: nn.Module, args: Args, kwargs: Kwargs, undo: Undo, read: Wanted, places: Places | None
) -> tuple[_Reading, str]:
    """Returns what was read in one forward pass, and the reason if its operators could not be recorded. If the weights
    and the logits computed from them lie in two checkpointed parts, a second pass keeps both parts, and a warning
    reports this."""
    for keep in (False, True):
        reading, failed, why = _passed(model, args, kwargs, undo, read, places, keep=keep)
        if failed is None and reading.finished():
            if keep:
                caution(_KEPT.format(type(model).__name__))
            return reading, why
        undo()
        if not reading.parts.any:
            break
    raise _failed(model, why) from failed


def _failed(model: nn.Module, why: str) -> InvalidValueError:
    return InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {why}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    )


def _passed(
    model: nn.Module, args: Args, kwargs: Kwargs, undo: Undo, read: Wanted, places: Places | None, *, keep: bool
) -> tuple[_Reading, Exception | None, str]:
    """Runs a pass with recorded operators, or an ordinary one if that fails. Returns what was read, the error of the
    pass, and the reason why recording failed."""
    try:
        given = copied(args), copied(kwargs)
    except Exception as error:  # arguments that are not tensors may not support copying
        raise _failed(model, f"{type(error).__name__}: {error}") from error
    reading = _Reading(model, given, read, dispatch=read != "plain norms", keep=keep, places=places)
    below = _failure(reading, undo)
    if below is None or read == "plain norms":
        return reading, below, "" if below is None else f"{type(below).__name__}: {below}"
    given = copied(args), copied(kwargs)
    reading = _Reading(model, given, read, dispatch=False, keep=keep)
    failed = _failure(reading, undo)
    why = below if failed is None else failed
    return reading, failed, f"{type(why).__name__}: {why}"


def _failure(reading: _Reading, undo: Undo) -> Exception | None:
    """Runs the pass and returns the error that it raises, if any."""
    try:
        reading.run()
    except dist.ApartError:
        raise
    except Exception as error:
        undo()
        return error
    return None


def spread(model: nn.Module) -> bool:
    """Returns whether all processes take part in a pass of this model, rather than taking turns as the stages of a
    pipeline do."""
    return dist.world() > 1 and any(map(dist.is_split, model.parameters())) and running_stage() is None


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each process holds all weights that fully_shard has split, so that a pass in it shows what is
    computed from which weights. All processes enter it together, and if one process fails in it, the others do not wait
    for it."""
    with ExitStack() as undo:
        if spread(model):
            with dist.agreed_collectives(SEARCH):
                undo.enter_context(gathered(model))
            if spread(model):  # the weights are split by heads and remain so
                undo.enter_context(dist.agreed_collectives(SEARCH))
        elif dist.world() == 1:  # on a single process, too, fully_shard stores other weights than those used in a pass
            undo.enter_context(gathered(model))
        yield


def _guard(model: nn.Module) -> Guarded:
    """The guard for reading a pass; if other processes take part, an error is raised only after the pass."""
    return DeferredError() if spread(model) else unguarded


def forward(
    model: nn.Module,
    watcher: AbstractContextManager[object],
    args: Args,
    kwargs: Kwargs,
    *,
    graph: bool = True,
    parts: CheckpointedParts | None = None,
    guard: Guarded = unguarded,
) -> None:
    """Runs one eager forward pass under the watcher, with gradients unless `graph` is False.

    Args:
        model, args, kwargs: the model and the arguments of the call.
        watcher: the context that is entered around the call.
        graph: whether gradients are enabled.
        parts: the checkpointed parts of the pass; by default nothing of their graphs is kept.
        guard: the guard that calls the readers of the pass; an error that it has deferred is raised after the pass.

    Raises: ApartError if the pass involves all processes and fails on only some of them.
    """
    # An optimised script runs as a single node of the graph, through which no gradient path can be traced. (A script
    # that was already optimised remains so.)
    unoptimised = torch.jit.optimized_execution(False)
    grads = torch.inference_mode(False), torch.enable_grad() if graph else torch.no_grad()
    agreed = dist.agreed_collectives(SEARCH) if spread(model) else nullcontext()
    noticed = (parts or CheckpointedParts()).noticed()
    try:
        # A stance is set when it is created, so that an error before the context is entered would leave it set for the
        # process.
        with agreed, torch.compiler.set_stance("force_eager"), unoptimised, grads[0], grads[1], noticed, watcher:
            model(*args, **kwargs)
        if isinstance(guard, DeferredError):
            guard.settle()
    except Exception as error:
        if spread(model) and not isinstance(error, dist.ApartError):
            dist.fail_on_all(SEARCH, error)
        raise


def grouped(firsts: Sequence[CapturedCall]) -> Iterator[list[CapturedCall]]:
    """Groups the first calls of sites: a single call for each site, or the calls of all heads if a module computes them
    one by one."""
    done: set[int] = set()
    for first in firsts:
        if id(first) in done:
            continue
        heads = [first]
        if first.headless:
            heads = [s for s in firsts if s.frame is first.frame and s.headless]
        done.update(id(s) for s in heads)
        yield heads


def _site(calls: list[CapturedCall], names: dict[int, str], read: Wanted) -> AttentionSite:
    first = calls[0]
    call = first.call
    q, k = (_stacked([getattr(s.call, side) for s in calls]) for side in ("q", "k"))
    products = [(q, k)]
    lost, layout = (), first.layout
    if isinstance(call, ScoresCall):
        lost = call.lost
        products = products if len(calls) > 1 else list(call.products)
    elif first.added is not None:
        lost = first.added.lost
        products += first.added.products
    repeated = () if read.endswith("norms") else (key_heads(b) for _, b in products if b is not None)
    used = next((found for found in repeated if found is not None), None)
    if used is not None:
        k = None if k is None else _first_of_each(k, used)
        products = [(a, None if b is None else _first_of_each(b, used)) for a, b in products]
    if read.endswith("norms"):
        terms, normed, why = (), normed_on_the_way(products, first.frame, names), ""
    else:
        terms, normed, why = _terms(products, lost, first, names)
    if layout is not None and layout.guess:
        # Different features for every head are as conclusive as the experiment would have been.
        shown = bool(terms) and all(s.n > 1 for t in terms for s in t.query[-1:])
        layout = dataclasses.replace(layout, guess="" if shown else layout.guess)
        why = why if shown else "; ".join(filter(None, (why, layout.guess)))
    query_gains, key_gains = ((), ()) if read.endswith("norms") else _gains(calls, q, k, names)
    heads = scored(first).shape[1] * len(calls)
    return AttentionSite(
        name=first.name,
        module=first.frame.module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=max((b.shape[1] for _, b in products if b is not None), default=heads),
        head_dim=sum(q.shape[-1] for q in _distinct([q for q, _ in products])),
        terms=terms,
        why=why,
        normed=normed,
        below=first.below,
        query_gains=query_gains,
        key_gains=key_gains,
        key_heads=used,
        layout=layout,
    )


def _indexers(watcher: CaptureMode, names: Sequence[str]) -> list[AttentionSite]:
    """The indexers that choose keys for the named sites, one for each layer that has any."""
    found: dict[str, AttentionSite] = {}
    for frame, call in watcher.chosen:
        layer = layer_of(frame.name, names)
        if layer is not None and layer not in found:
            found[layer] = AttentionSite(
                name=f"{layer}{INDEX}",
                module=frame.module,
                spec=call.spec,
                n_heads=call.logits.shape[1],
                n_kv_heads=call.logits.shape[1],
                head_dim=0,
                why="its scores choose keys and do not weight values",
                layout=call.layout,
                chooses=True,
            )
    return list(found.values())


def _of_other_source(captured: CapturedCall) -> bool:
    """True if queries and keys come from different inputs of the module that projects them.

    That module is the one of the call, or one that contains it. A module that receives queries and keys as arguments
    only multiplies them, and there two projections of the same hidden state are two different inputs.
    """
    call = captured.call
    pairs = call.products if isinstance(call, ScoresCall) else ((call.q, call.k),)
    nodes = [[None if x is None else x.grad_fn for x in pair] for pair in pairs[:1]]
    if not nodes or any(node is None for node in nodes[0]):
        return False
    query, key = ([node] for node in nodes[0])
    for frame in captured.frame.line():
        stops = nodes_of(frame.inputs)
        of_query, of_key = reached(query, stops), reached(key, stops)  # type: ignore[arg-type]
        if of_query and of_key and any(is_projected(way, stops) for way in (query, key)):  # type: ignore[arg-type]
            return of_query.isdisjoint(of_key)
    return False


def _of_latents(site: AttentionSite, parameters: Mapping[str, nn.Parameter]) -> bool:
    """True if the keys of all heads are computed, each with separate rows, from one vector per token that is narrower
    than the input of the widest weight on the path. The low-rank vector of an adapter that is added to a full weight
    does not count."""

    def width(part: HeadSlice) -> int:
        weight = parameters.get(part.parameter)
        return 0 if weight is None or weight.ndim < 2 else weight.shape[1 - part.axis] if weight.ndim == 2 else 0

    last = [term.key[-1] for term in site.terms if term.key]
    widest_of = max((width(part) for part in (*site.query, *site.key)), default=0)
    own = [width(part) for part in last if part.n > 1]
    return bool(own) and all(0 < n < widest_of for n in own)


def scored(captured: CapturedCall) -> Tensor:
    """The logits of a call, or its q; the second dimension of either is the heads."""
    call = captured.call
    return call.logits if isinstance(call, ScoresCall) else call.q


def _distinct(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors without None and without repetitions of equal tensors."""
    found: list[Tensor] = []
    for x in tensors:
        if x is not None and not any(x.shape == y.shape and torch.equal(x, y) for y in found):
            found.append(x)
    return found


def _first_of_each(k: Tensor, used: Sequence[int]) -> Tensor:
    """The first copy of each key head [b g s d] among keys that were repeated for query heads."""
    return k if k.shape[1] < len(used) else k[:, [used.index(j) for j in range(max(used) + 1)]]


def _terms(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    lost: Sequence[str],
    first: CapturedCall,
    names: dict[int, str],
) -> tuple[tuple[QKProduct, ...], bool, str]:
    """The terms of a site, whether there is a norm between its weights and the logit, and why there are no terms, if
    so."""
    if first.ordinal and isinstance(first.frame.module, torch.jit.ScriptModule):
        return (), False, "it is one of several in a scripted module, whose parts can't be distinguished"
    if any(side is None for pair in products for side in pair) and len(products) == 1 and not lost:
        return (), False, "the operands of the product could not be brought into the shape of the scores"
    try:
        terms, normed = sum_terms(products, first.frame, names)
    except UnknownRowsError as error:
        return (), False, "; ".join((*lost, str(error)))
    return ((), normed, "; ".join(lost)) if lost else (terms, normed, "")


def _gains(calls: list[CapturedCall], q: Tensor | None, k: Tensor | None, names: dict[int, str]) -> tuple[Gains, Gains]:
    """The norms of q and k, if the logits are exactly the spec's scale times their product."""
    if q is None or k is None or not all(s.added is None and is_product(s.call) for s in calls):
        return (), ()
    query = seen_gains(q, names)
    return query, seen_gains(k, names) if query else ()


@torch.no_grad()
def is_product(call: object) -> bool:
    """True if the logits of a call are exactly its scale times q·k, without a bias."""
    if not isinstance(call, ScoresCall):
        return isinstance(call, AttentionCall) and call.spec.norm.kind == "none"
    if call.q is None or call.k is None:
        return False
    scale = call.spec.scale.factor(torch.zeros(1, 1, device=call.q.device), call.q.shape[-1], {})
    products = call.q @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).mT * scale
    seen = torch.isfinite(call.logits) if call.hidden is None else ~call.hidden & torch.isfinite(call.logits)
    rounding = 16 * torch.finfo(call.logits.dtype).eps * products.abs().max()
    return bool(((call.logits - products).abs() <= rounding)[seen.expand_as(products)].all())


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    known = [p for p in parts if p is not None]
    if len(known) != len(parts):
        return None
    return known[0] if len(known) == 1 else torch.cat(known, dim=1)


def unseen(model: nn.Module, watcher: CaptureMode, unrecognized: Sequence[UnrecognizedAttention] = ()) -> str:
    """The message for a pass without observed attention: what was looked for, why nothing was found, and what to do."""
    looked = (
        f"saw no attention in a forward pass of this {type(model).__name__}. Looked for "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, varlen_attn, flash-attn's "
        "functions, and a product of two activations that reaches a softmax through scaling, masks, caps, casts and "
        "views; also operator by operator, inside torch.jit.script and torch.func.vmap. "
    )
    if watcher.missed or unrecognized:
        found = "; ".join(map(str, dict.fromkeys((*watcher.missed, *unrecognized))))
        return (
            f"{looked}Seen but not understood: {found}. If the logits are just scaled products of queries and keys, "
            f"{_BY_HAND}"
        )
    if watcher.handwritten.multiplied:
        followed = ", ".join(watcher.handwritten.ends)
        ends = f" (they were followed to {followed})" if followed else ""
        return (
            f"{looked}Activations are multiplied with each other, but none of the products reaches a softmax{ends}: "
            "linear attention, state-space models and attention through another function of the scores have no softmax "
            "over keys, and only attention with one is watched"
        )
    hidden = f"Hidden from view: {', '.join(watcher.hidden)}. " if watcher.hidden else ""
    return (
        f"{looked}None of these was found: no two activations were multiplied. {hidden}Inside custom C++, CUDA or "
        f"Triton operators nothing can be seen: if attention happens in one, {_BY_HAND}"
    )


def _operand(x: Tensor | None, frame: ModuleCall, names: dict[int, str]) -> Operand | None:
    if x is None:
        return None
    leaves = None if x.grad_fn is None else leaves_of(x.grad_fn, nodes_of(frame.inputs))
    tables = frozenset(names.get(id(variable_of(leaf)), "") for leaf in leaves or ())
    lengths = x.detach().to(widest(x.device)).norm(dim=-1)
    rounding = max(ONE_LENGTH, 2 * torch.finfo(x.dtype).eps)
    return Operand(width=x.shape[-1], lengths=lengths, tables=tables, rounding=rounding)


def _value_slices(captured: CapturedCall, v: Tensor | None, names: dict[int, str]) -> tuple[HeadSlice, ...] | str:
    if v is None or v.ndim != 4:
        return "no product of its weights with values [b h s d] was seen"
    try:
        found = side(fewest_keys(v), captured.frame, names, "v")
        return tuple(found.slices(path, path.dims)[-1] for path in found.paths)
    except UnknownRowsError as error:
        return str(error)


_KEPT = (
    "the search for the attention of {} keeps tensors that gradient checkpointing would drop: weights and the logits "
    "they produce lie in two checkpointed parts, or a part can't be run separately. It needs as much memory as a "
    "pass without checkpointing; if that is too much, give find_sites a batch of one short sequence, and its sites "
    "to watch(sites=...)"
)
_BY_HAND = (
    "describe it by hand, as in\n"
    "    from qkeel.sites import Reading, describe\n"
    '    site = describe(model, "name.of.its.module", query=Reading(module="q_proj"), '
    'key=Reading(module="k_proj"), heads=8)'
)
