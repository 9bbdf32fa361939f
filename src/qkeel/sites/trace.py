"""One traced pass of a model: its attention calls, and the sites that they belong to.

`traced` runs a model once on a short part of an example, with gradients, reads the sites from that pass and verifies
them. It then runs the full example once, with few observations, to check whether it makes the same calls. `find_sites`
returns the sites. `apply`, its remedies and their checks keep the trace while they run, and take the operands, the
weights of the values, and the called modules from it instead of running the model again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall, fewest_keys, key_heads
from qkeel.capture.eager import is_projected, reached
from qkeel.capture.example import (
    Caller,
    ModuleCall,
    ShortExample,
    Undo,
    copied,
    first_row,
    shorter,
    undisturbed,
)
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.visible_sets import KeyOrigin, VisibleSets, told_apart, visible_sets
from qkeel.errors import InvalidValueError, NoAttentionError, caution
from qkeel.functional.norms import unrounded, widest
from qkeel.heads.norms import seen_gains
from qkeel.heads.rows import (
    UnknownRowsError,
    side,
    sides,
    sum_terms,
)
from qkeel.heads.site import (
    INDEX,
    AttentionSite,
    HeadSlice,
    NormGain,
    QKProduct,
    Sites,
    layer_of,
)
from qkeel.heads.walk import leaves_of, names_of, nodes_of, variable_of
from qkeel.patching.autograd import CheckpointedParts
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import (
    Args,
    DeferredError,
    Guarded,
    Kwargs,
    uncompiled,
    unguarded,
)
from qkeel.sites.run import check_devices, forward, spread, whole_weights
from qkeel.sites.verify import (
    ChangedWeights,
    LogitReader,
    RecordedCall,
    Verification,
    products_of_call,
    smallest_rerun,
)
from qkeel.spec import AttentionCall

_LOG = logging.getLogger(__name__)

ONE_LENGTH = (
    1e-3  # what a norm adds under its root changes norms by less than this fraction
)

Gains = tuple[NormGain, ...]
# How much is read about the sites of a pass: whether a norm precedes the logit, also the weights, or also whether a
# rerun confirms the weights.
Wanted = Literal["norms", "weights", "verified"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperandNorms:
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
        lengths = (
            self.lengths
            if over == "head"
            else self.lengths.square().sum(1, keepdim=True).sqrt()
        )
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
        called: the number of calls of each module, by its id.
        minima: the smallest visible logit of each hand-written site, on the full example.
        hidden_by_small: whether masks of each hand-written site hide pairs by values above -9000, on the full example.
    """

    model: nn.Module
    sites: Sites
    given: tuple[Args, Kwargs]
    calls: dict[str, list[RecordedCall]]
    values: dict[str, Tensor]
    called: Mapping[int, int]
    minima: dict[str, float]
    hidden_by_small: dict[str, bool]

    def verified(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        """Returns the sites, with a reason for each site whose weights a rerun of its module does not confirm."""
        return _verified(self.model, sites, self.calls)

    def inputs_after(
        self, site: AttentionSite, weights: Mapping[str, Tensor]
    ) -> dict[nn.Module, tuple[Tensor, Tensor]]:
        """Runs the module of a site again, as it was and with other weights, by name.

        Returns: the first inputs, in both runs, of the modules without submodules that run after its attention, in the
            order of their calls.
        """
        calls = self.calls[site.name]
        readers = [LogitReader(call.captured.call) for call in calls]
        with extra_pass(self.model):
            rerun = smallest_rerun(
                self.model, site, calls, readers, ChangedWeights(self.model, site)
            )
            with rerun.opened():
                before = rerun.inputs_after({}, site.module)
                after = rerun.inputs_after(weights, site.module)
        return {
            module: (x, after[name][1])
            for name, (module, x) in before.items()
            if name in after
        }

    def operands(self) -> dict[str, list[tuple[OperandNorms, OperandNorms]]]:
        """The operands of every product of each site's first call that was fully observed, keyed by site."""
        names, found = (
            names_of(self.model),
            dict[str, list[tuple[OperandNorms, OperandNorms]]](),
        )
        for name, (first, *_) in self.calls.items():
            captured, call = first.captured, first.captured.call
            pairs = (
                call.products if isinstance(call, ScoresCall) else ((call.q, call.k),)
            )
            read = [
                (_operand(q, captured.frame, names), _operand(k, captured.frame, names))
                for q, k in pairs
            ]
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


def traced(
    model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool
) -> ModelTrace:
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
                trace = _traced(
                    model, short.args, short.kwargs, undo, expected=expected
                )
                undo()
                sites = trace.sites
                known = all(
                    s.verified and (short.rows > 1 or _is_plain(s.layout))
                    for s in sites
                )
                if (
                    known
                    and (whole := _same_calls(model, args, kwargs, trace, undo))
                    is not None
                ):
                    minima, hidden, types = whole
                    sites = Sites(_typed(sites, types), sites.missed, sites.indexers)
                    if short.cut and any(s.normed for s in sites):
                        sites = _with_bounds(
                            model, sites, first_row(args, kwargs), undo
                        )
                    return dataclasses.replace(
                        trace, sites=sites, minima=minima, hidden_by_small=hidden
                    )
            except Exception as error:
                _LOG.debug(
                    "a shorter example of %s fails: %s", type(model).__name__, error
                )
                undo()
        return _traced(model, args, kwargs, undo, expected=expected)


def seen(model: nn.Module, args: Args, kwargs: Kwargs) -> ModelTrace:
    """Returns the trace of a pass over the full example, with its sites and with whether their q or k is normed, but
    without the weights of their heads."""
    model = uncompiled(model)
    with (
        whole_weights(model),
        extra_pass(model),
        torch.inference_mode(False),
        undisturbed(model) as undo,
    ):
        return _traced(model, args, kwargs, undo, expected=True, read="norms")


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
        raise _failed(model, error) from error


def _traced(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    undo: Undo,
    *,
    expected: bool,
    read: Wanted = "verified",
) -> ModelTrace:
    """The trace of one pass over this example, with as much information about its sites as `read` requests."""
    check_devices(model, args, kwargs)
    reading = _read(model, args, kwargs, undo, read)
    watcher = reading.watcher
    if not reading.sites and expected:
        raise NoAttentionError(unseen(model, watcher))
    sites = reading.typed_sites()
    groups = grouped([call.captured for call in reading.order.values()])
    calls = {
        group[0].name: [reading.order[captured.name] for captured in group]
        for group in groups
    }
    least = {name: _least(c.captured.call) for name, (c, *_) in calls.items()}
    if read == "verified":
        undo()  # a module that holds tensors of the pass could not be copied
        sites = _verified(model, sites, calls)
    return ModelTrace(
        model=model,
        sites=Sites(
            sites, watcher.missed, _indexers(watcher, [site.name for site in sites])
        ),
        given=reading.given,
        calls=calls,
        values=watcher.values or {},
        called=watcher.stack.called,
        minima={name: float(x) for name, x in least.items() if x is not None},
        hidden_by_small={
            name: _hidden_by_small(c.captured.call) for name, (c, *_) in calls.items()
        },
    )


def _verified(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    calls: Mapping[str, Sequence[RecordedCall]],
) -> list[AttentionSite]:
    verification = Verification(model)
    with extra_pass(model):
        verified = [verification.site(site, calls.get(site.name, [])) for site in sites]
    verification.tell()
    return verified


def _typed(
    sites: Sequence[AttentionSite], seen: Mapping[str, VisibleSets]
) -> list[AttentionSite]:
    """The sites with the types of their visible sets, where these are known."""
    types = told_apart(seen)
    return [dataclasses.replace(s, visible=types.get(s.name, s.visible)) for s in sites]


def _same_calls(
    model: nn.Module, args: Args, kwargs: Kwargs, trace: ModelTrace, undo: Undo
) -> tuple[dict[str, float], dict[str, bool], dict[str, VisibleSets]] | None:
    """The smallest visible logits, the numbers of pairs hidden by small numbers and the visible sets in a pass without
    gradients, from which nothing else is recorded. None unless the pass has the same sites as the trace, with the same
    numbers of heads, and misses the same attention layers."""
    sites = trace.sites
    origins: dict[str, KeyOrigin] = {site.name: site.origin for site in sites}
    types: dict[str, VisibleSets] = {}
    found: dict[str, int] = {}
    names: set[str] = set()
    least: dict[str, Tensor] = {}
    hidden: dict[str, bool] = {}
    groups: dict[
        int, tuple[str, ModuleCall]
    ] = {}  # the frame is kept so that its id is not reused

    def note(captured: CapturedCall) -> None:
        name, low = captured.name, _least(captured.call)
        if low is not None:
            least[name] = (
                low
                if name not in least
                else torch.minimum(least[name], low.to(least[name].device))
            )
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
    watcher = CaptureMode(model, note, layouts=layouts)
    watcher.key_heads = {
        s.name: (s.n_heads, s.n_kv_heads) for s in sites if s.key_heads is None
    }
    watcher.stack.by_caller = names_by_caller(sites)
    forward(model, watcher, copied(args), copied(kwargs), graph=False)
    undo()
    same = {str(m) for m in watcher.missed} == {str(m) for m in sites.missed}
    same = same and found == {site.name: site.n_heads for site in sites}
    return (
        ({name: float(x) for name, x in least.items()}, hidden, types) if same else None
    )


def _least(call: object) -> Tensor | None:
    """The smallest finite logit of a hand-written call that is not hidden by a mask."""
    if not isinstance(call, ScoresCall):
        return None
    seen = (
        torch.isfinite(call.logits)
        if call.hidden is None
        else ~call.hidden & torch.isfinite(call.logits)
    )
    return call.logits.detach().masked_fill(~seen, torch.inf).amin()


def _hidden_by_small(call: object) -> bool:
    """True if a mask of a hand-written call hides pairs by values above -9000. Rows that see no key are left out, since
    padding may have added them."""
    if not isinstance(call, ScoresCall) or call.hidden is None:
        return False
    by_small_values = call.hidden & (call.capped > HIDES)
    return bool((by_small_values & ~call.hidden.all(-1, keepdim=True)).any())


def _with_bounds(
    model: nn.Module, sites: Sites, whole: ShortExample, undo: Undo
) -> Sites:
    """The same sites with the norms that one full sequence shows, because values computed after a norm may grow with
    the position."""
    try:
        trace = _traced(
            model, whole.args, whole.kwargs, undo, expected=True, read="weights"
        )
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
    gains = {
        s.name: (seen[s.name].query_gains, seen[s.name].key_gains)
        if s.name in seen
        else ((), ())
        for s in sites
    }
    found = [
        dataclasses.replace(s, query_gains=gains[s.name][0], key_gains=gains[s.name][1])
        for s in sites
    ]
    return Sites(found, sites.missed, sites.indexers)


def _is_plain(layout: HeadLayout | None) -> bool:
    """True if heads have a separate dimension; on a single sequence, heads that are merged with the batch seem to have
    one."""
    return layout is None or layout.groups == tuple("bhts")


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
        keep: bool,
    ) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in reversed(self._parameters.items())}
        self.watcher = CaptureMode(
            model,
            self._note,
            probing=True,
            guard=_guard(model),
            names=self._names,
        )
        self.watcher.values = {}
        self.given = given
        self._wanted: Wanted = read
        self.parts = CheckpointedParts(self._at_end_of_part, keep=keep)
        self.sites: dict[str, AttentionSite] = {}
        self.order: dict[str, RecordedCall] = {}  # the first call for each name
        self.visible: dict[str, VisibleSets] = {}
        self._waiting: list[CapturedCall] = []
        # For each call by its first name: the sets of weights with which it was made, and the names of their sites.
        self._weights: dict[str, dict[frozenset[tuple[str, str]] | None, str]] = {}
        self._callers: dict[
            str, list[Caller]
        ] = {}  # by the name of a site whose module is called with several sets

    def _named_by_caller(self, captured: CapturedCall) -> CapturedCall:
        """The call, under another name if its module was called with other weights before."""
        frame, name = captured.frame, captured.name
        by_weights = self._weights.setdefault(name, {})
        behind = sides(products_of_call(captured.call), frame, self._names)
        weights = (
            frozenset((s.name, p.parameter) for s in behind for p in s.walk.nearest)
            or None
        )
        if not by_weights:
            by_weights[weights] = name
            return captured
        if weights is None or None in by_weights or frame.caller is None:
            return captured
        if weights not in by_weights:
            # Named by the module that owns the projections, and the one that is called.
            new = f"{_common_module([parameter for _, parameter in weights])}#{frame.name}"
            by_weights[weights] = (
                f"{new}{len(by_weights) + 1}" if new in self.order else new
            )
        site = by_weights[weights]
        if site == name:
            return captured
        self._callers.setdefault(site, []).append(frame.caller)
        return dataclasses.replace(
            captured, frame=dataclasses.replace(frame, name=site), ordinal=0
        )

    def _note(self, captured: CapturedCall) -> None:
        captured = self._named_by_caller(captured)
        line = captured.frame.line()
        positions = {id(frame): frame.captured for frame in line}
        for frame in line:
            frame.captured += 1
        if captured.name in self.order:
            return
        self.order[captured.name] = RecordedCall(captured=captured, positions=positions)
        self._waiting.append(captured)
        if self._wanted == "verified":
            for frame in line:
                if frame.given is not None:
                    frame.given.copy_tensors()

    def _at_end_of_part(self) -> None:
        running = self.watcher.stack.top.line()
        self.watcher.guard(self.watcher.apart, functools.partial(self._read, running))

    def _read(self, running: Sequence[ModuleCall]) -> None:
        left: list[CapturedCall] = []
        for calls in grouped(self._waiting):
            if calls[0].headless and any(calls[0].frame is frame for frame in running):
                left += calls  # more heads may follow
                continue
            self._read_site(calls)
        self._waiting = left

    def _read_site(self, calls: list[CapturedCall]) -> None:
        with unrounded(scored(calls[0])):
            site = _site(calls, self._names, self._wanted)
        if _parts_share_weights(site, calls[0].frame, self._parameters):
            why = "one weight is applied to several parts of its input, so heads that share it cannot be counted"
            site = dataclasses.replace(site, terms=(), why=why)
        if site.name in self._callers:
            owner = self.watcher.stack.root.module.get_submodule(
                site.name.partition("#")[0]
            )
            site = dataclasses.replace(site, module=owner)
        self.sites[site.name] = self._with_origin(site, calls)

    def typed_sites(self) -> list[AttentionSite]:
        """The sites in the order of their calls, with the types of their layers and the calls of shared modules."""
        found = [self.sites[name] for name in self.order if name in self.sites]
        typed = _typed(found, self.visible)
        return [
            dataclasses.replace(site, callers=tuple(self._callers.get(site.name, ())))
            for site in typed
        ]

    def run(self) -> None:
        """Runs the pass."""
        torch.clear_autocast_cache()  # otherwise the cast of a weight may come from an earlier pass
        watcher = self.watcher
        forward(
            watcher.stack.root.module,
            watcher,
            *self.given,
            parts=self.parts,
            guard=watcher.guard,
        )

    def finished(self) -> bool:
        """Reads the remaining sites. Returns False if that needed a checkpointed part that was not kept."""
        try:
            with torch.enable_grad():
                for calls in grouped(self._waiting):
                    self._read_site(calls)
        except RuntimeError:
            if not self.parts.missed:
                raise
        return not self.parts.missed

    def _with_origin(
        self, site: AttentionSite, calls: list[CapturedCall]
    ) -> AttentionSite:
        """Returns the site with the origin of its keys, and stores the visible sets of its first call. Does neither if
        only norms are read."""
        if self._wanted == "norms":
            return site
        origin: KeyOrigin = "tokens"
        if _of_other_source(calls[0]):
            origin = "other"
        elif _of_latents(site, self._parameters):
            origin = "latent"
        self.visible[site.name] = visible_sets(calls[0].call, origin)
        return dataclasses.replace(site, origin=origin)


def _read(
    model: nn.Module, args: Args, kwargs: Kwargs, undo: Undo, read: Wanted
) -> _Reading:
    """Reads one forward pass. If the weights and the logits computed from them lie in two checkpointed parts, a second
    pass keeps both parts, and a warning reports this."""
    try:
        given = copied(args), copied(kwargs)
    except Exception as error:  # arguments that are not tensors may not support copying
        raise _failed(model, error) from error
    reading = _Reading(model, given, read, keep=False)
    try:
        reading.run()
        if reading.finished():
            return reading
    except dist.ApartError:
        raise
    except Exception as error:
        if not reading.parts.any:
            raise _failed(model, error) from error
    undo()
    reading = _Reading(model, (copied(args), copied(kwargs)), read, keep=True)
    try:
        reading.run()
        reading.finished()
    except dist.ApartError:
        raise
    except Exception as error:
        raise _failed(model, error) from error
    caution(_KEPT.format(type(model).__name__))
    return reading


def _failed(model: nn.Module, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {type(error).__name__}: {error}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    )


def _guard(model: nn.Module) -> Guarded:
    """The guard for reading a pass; if other processes take part, an error is raised only after the pass."""
    return DeferredError() if spread(model) else unguarded


def _parts_share_weights(
    site: AttentionSite, frame: ModuleCall, parameters: Mapping[str, nn.Parameter]
) -> bool:
    """True if scores without a dimension of heads have several dimensions of batches, and the query's weight is as wide
    as a part of the module's input: then one of these dimensions may hold heads that share all weights."""
    if (
        not site.terms
        or site.layout is None
        or site.n_heads > 1
        or site.layout.groups.count("b") < 2
    ):
        return False
    weight = parameters[site.terms[0].query[0].parameter]
    width = weight.flatten(1).shape[1 - site.terms[0].query[0].axis]
    widths = [x.shape[-1] for x in frame.inputs if x.is_floating_point() and x.ndim > 2]
    return any(n > width and n % width == 0 for n in widths)


def names_by_caller(sites: Sequence[AttentionSite]) -> dict[Caller, str] | None:
    """The names of sites by the calls of modules that several sites share, or None if there are none."""
    return {caller: site.name for site in sites for caller in site.callers} or None


def _common_module(parameters: Sequence[str]) -> str:
    """The name of the innermost module that holds all of these parameters."""
    paths = [name.split(".")[:-1] for name in parameters]
    common = []
    for names in zip(*paths):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


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


def _site(
    calls: list[CapturedCall], names: dict[int, str], read: Wanted
) -> AttentionSite:
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
    repeated = (
        () if read == "norms" else (key_heads(b) for _, b in products if b is not None)
    )
    used = next((found for found in repeated if found is not None), None)
    if used is not None:
        k = None if k is None else _first_of_each(k, used)
        products = [
            (a, None if b is None else _first_of_each(b, used)) for a, b in products
        ]
    if read == "norms":
        behind = sides(products, first.frame, names)
        terms, normed, why = (), any(s.normed for s in behind), ""
    else:
        terms, normed, why = _terms(products, lost, first, names)
    if layout is not None and layout.guess:
        # Different features for every head are as conclusive as the experiment would have been.
        shown = bool(terms) and all(s.n > 1 for t in terms for s in t.query[-1:])
        layout = dataclasses.replace(layout, guess="" if shown else layout.guess)
        why = why if shown else "; ".join(filter(None, (why, layout.guess)))
    query_gains, key_gains = ((), ()) if read == "norms" else _gains(calls, q, k, names)
    heads = scored(first).shape[1] * len(calls)
    return AttentionSite(
        name=first.name,
        module=first.frame.module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=max(
            (b.shape[1] for _, b in products if b is not None), default=heads
        ),
        # Products of the same weights, of which a mask chooses one for each pair (ReRoPE), are one term.
        head_dim=sum(
            q.shape[-1]
            for q in _distinct(
                [q for q, _ in products[: 1 if len(terms) == 1 else None]]
            )
        ),
        terms=terms,
        why=why,
        normed=normed,
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
        if (
            of_query
            and of_key
            and any(is_projected(way, stops) for way in (query, key))
        ):  # type: ignore[arg-type]
            return of_query.isdisjoint(of_key)
    return False


def _of_latents(site: AttentionSite, parameters: Mapping[str, nn.Parameter]) -> bool:
    """True if the keys of all heads are computed, each with separate rows, from one vector per token that is narrower
    than the input of the widest weight on the path. The low-rank vector of an adapter that is added to a full weight
    does not count."""

    def width(part: HeadSlice) -> int:
        weight = parameters.get(part.parameter)
        return (
            0
            if weight is None or weight.ndim < 2
            else weight.shape[1 - part.axis]
            if weight.ndim == 2
            else 0
        )

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
        if x is not None and not any(
            x.shape == y.shape and torch.equal(x, y) for y in found
        ):
            found.append(x)
    return found


def _first_of_each(k: Tensor, used: Sequence[int]) -> Tensor:
    """The first copy of each key head [b g s d] among keys that were repeated for query heads."""
    return (
        k
        if k.shape[1] < len(used)
        else k[:, [used.index(j) for j in range(max(used) + 1)]]
    )


def _terms(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    lost: Sequence[str],
    first: CapturedCall,
    names: dict[int, str],
) -> tuple[tuple[QKProduct, ...], bool, str]:
    """The terms of a site, whether there is a norm between its weights and the logit, and why there are no terms, if
    so."""
    if first.ordinal and isinstance(first.frame.module, torch.jit.ScriptModule):
        return (
            (),
            False,
            "it is one of several in a scripted module, whose parts can't be distinguished",
        )
    if (
        any(side is None for pair in products for side in pair)
        and len(products) == 1
        and not lost
    ):
        return (
            (),
            False,
            "the operands of the product could not be brought into the shape of the scores",
        )
    try:
        terms, normed = sum_terms(products, first.frame, names)
    except UnknownRowsError as error:
        return (), False, "; ".join((*lost, str(error)))
    return ((), normed, "; ".join(lost)) if lost else (terms, normed, "")


def _gains(
    calls: list[CapturedCall], q: Tensor | None, k: Tensor | None, names: dict[int, str]
) -> tuple[Gains, Gains]:
    """The norms of q and k, if the logits are exactly the spec's scale times their product."""
    if (
        q is None
        or k is None
        or not all(s.added is None and is_product(s.call) for s in calls)
    ):
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
    scale = call.spec.scale.factor(
        torch.zeros(1, 1, device=call.q.device), call.q.shape[-1], {}
    )
    products = (
        call.q
        @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).mT
        * scale
    )
    seen = (
        torch.isfinite(call.logits)
        if call.hidden is None
        else ~call.hidden & torch.isfinite(call.logits)
    )
    rounding = 16 * torch.finfo(call.logits.dtype).eps * products.abs().max()
    return bool(
        ((call.logits - products).abs() <= rounding)[seen.expand_as(products)].all()
    )


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    known = [p for p in parts if p is not None]
    if len(known) != len(parts):
        return None
    return known[0] if len(known) == 1 else torch.cat(known, dim=1)


def unseen(model: nn.Module, watcher: CaptureMode) -> str:
    """The message for a pass without observed attention: what was looked for, why nothing was found, and what to do."""
    looked = (
        f"saw no attention in a forward pass of this {type(model).__name__}. Looked for "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, varlen_attn, flash-attn's "
        "functions, and a product of two activations that reaches a softmax through scaling, masks, caps, casts and "
        "views. "
    )
    if watcher.missed:
        found = "; ".join(map(str, dict.fromkeys(watcher.missed)))
        return (
            f"{looked}Seen but not understood: {found}. If the logits are just scaled products of queries and keys, "
            f"{_BY_HAND}"
        )
    if watcher.handwritten.multiplied:
        followed = ", ".join(watcher.handwritten.ends)
        ends = f" (they were followed to {followed})" if followed else ""
        way_out = (
            f". If the logits are just scaled products of queries and keys, {_BY_HAND}"
            if followed
            else ""
        )
        return (
            f"{looked}Activations are multiplied with each other, but none of the products reaches a softmax{ends}: "
            "linear attention, state-space models and attention through another function of the scores have no softmax "
            f"over keys, and only attention with one is watched{way_out}"
        )
    out_of_view = [*watcher.hidden]
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        out_of_view.append("what runs inside torch.jit.script")
    hidden = f"Hidden from view: {', '.join(out_of_view)}. " if out_of_view else ""
    return (
        f"{looked}None of these was found: no two activations were multiplied. {hidden}Inside custom C++, CUDA or "
        f"Triton operators nothing can be seen: if attention happens in one, {_BY_HAND}"
    )


def _operand(
    x: Tensor | None, frame: ModuleCall, names: dict[int, str]
) -> OperandNorms | None:
    if x is None:
        return None
    leaves = None if x.grad_fn is None else leaves_of(x.grad_fn, nodes_of(frame.inputs))
    tables = frozenset(names.get(id(variable_of(leaf)), "") for leaf in leaves or ())
    lengths = x.detach().to(widest(x.device)).norm(dim=-1)
    rounding = max(ONE_LENGTH, 2 * torch.finfo(x.dtype).eps)
    return OperandNorms(
        width=x.shape[-1], lengths=lengths, tables=tables, rounding=rounding
    )


def _value_slices(
    captured: CapturedCall, v: Tensor | None, names: dict[int, str]
) -> tuple[HeadSlice, ...] | str:
    if v is None or v.ndim != 4:
        return "no product of its weights with values [b h s d] was seen"
    try:
        behind = side(fewest_keys(v), captured.frame, names, "v")
        return tuple(behind.slices(*path)[-1] for path in behind.paths())
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
