"""One traced pass of a model: its attention calls, and the sites that they belong to.

`traced` runs a model once on a short part of an example, with gradients, reads the sites
from that pass and verifies them. It then runs the full example once, with few
observations, to check whether it makes the same calls. `find_sites` returns the sites.
`apply`, its remedies and their checks keep the trace while they run, and take the
operands, the weights of the values, and the called modules from it instead of running
the model again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall, fewest_keys, key_heads
from qkeel.capture.eager import is_projected, reached
from qkeel.capture.example import (
    Caller,
    ModuleCall,
    Undo,
    copied,
    doubled,
    first_row,
    shorter,
    undisturbed,
)
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.user_hooks import hooks_held_back
from qkeel.capture.visible_sets import KeyOrigin, VisibleSets, told_apart, visible_sets
from qkeel.errors import InvalidValueError, NoAttentionError, QkeelError, caution
from qkeel.functional.norms import unrounded, widest
from qkeel.patching.autograd import CheckpointedParts, nodes_of, variable_of
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import Args, DeferredError, Kwargs, uncompiled, unguarded
from qkeel.sites.graph import leaves_of, names_of
from qkeel.sites.norms import seen_gains
from qkeel.sites.rows import UnknownRowsError, layout_of, side, sides, sum_terms
from qkeel.sites.run import (
    check_devices,
    forget_casts,
    forward,
    spread,
    whole_weights,
)
from qkeel.sites.site import (
    INDEX,
    AttentionSite,
    HeadSlice,
    NormGain,
    QKProduct,
    Sites,
    layer_of,
)
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

# What a norm adds under its root changes lengths by less than this fraction.
_ONE_LENGTH = 1e-3

Gains = tuple[NormGain, ...]
Products = list[tuple[Tensor | None, Tensor | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperandNorms:
    """The q or k of one product of a site.

    Attributes:
        width: the number of features over which a logit is summed.
        lengths: the norm of each vector.
        tables: the names of the parameters of which the operand is a view or a selection of entries, as with relative
            positions; empty if the operand was computed from the input.
        rounding: the relative difference that rounding may cause between the norms of normed vectors.
    """

    width: int
    lengths: Float[Tensor, "b h t"]
    tables: frozenset[str]
    rounding: float

    @classmethod
    def of(cls, x: Tensor, frame: ModuleCall, names: dict[int, str]) -> OperandNorms:
        """Reads q or k [b h t d] of a traced call."""
        leaves = leaves_of(x.grad_fn, nodes_of(frame.inputs)) or ()
        return cls(
            width=x.shape[-1],
            lengths=x.detach().to(widest(x.device)).norm(dim=-1),
            tables=frozenset(names.get(id(variable_of(leaf)), "") for leaf in leaves),
            rounding=max(_ONE_LENGTH, 2 * torch.finfo(x.dtype).eps),
        )

    def normed(self, over: str, tolerance: float | None = None) -> bool:
        """True if all vectors of a head, or of all heads together, have the same norm (or are zero), up to rounding or
        up to the relative `tolerance`."""
        if self.tables:
            return True
        lengths = self.lengths
        if over != "head":
            lengths = lengths.square().sum(1, keepdim=True).sqrt()
        most = lengths.amax((0, 2))
        least = lengths.where(lengths > 0, most[None, :, None]).amin((0, 2))
        return bool((most - least <= max(self.rounding, tolerance or 0.0) * most).all())

    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest mean square among the nonzero vectors."""
        squares = self.lengths[self.lengths > 0].square() / self.width
        return (float(squares.min()), float(squares.max())) if len(squares) else (0, 0)


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
        unclear_masks: why hidden pairs of a hand-written site are not known by their scores, on the full example, or "".
    """

    model: nn.Module
    sites: Sites
    given: tuple[Args, Kwargs]
    calls: dict[str, list[RecordedCall]]
    values: dict[str, Tensor]
    called: Mapping[int, int]
    unclear_masks: dict[str, str]

    def verified(
        self,
        sites: Sequence[AttentionSite],
        verification: Verification | None = None,
    ) -> list[AttentionSite]:
        """Returns the sites, with a reason for each site whose weights a rerun of its module does not confirm. The
        caller tells what a `verification` of his has found."""
        checks = verification or Verification()
        with extra_pass(self.model), hooks_held_back(self.model):
            checked = [
                checks.site(self.model, site, self.calls.get(site.name, []))
                for site in sites
            ]
        if verification is None:
            checks.tell()
        return checked

    def inputs_after(
        self, site: AttentionSite, weights: Mapping[str, Tensor]
    ) -> dict[nn.Module, tuple[Tensor, Tensor]]:
        """Runs the module of a site again, as it was and with other weights, by name.

        Returns: the first inputs, in both runs, of the modules without submodules that run after its attention, in the
            order of their calls.
        """
        calls = self.calls[site.name]
        readers = [LogitReader(call.captured.call) for call in calls]
        with extra_pass(self.model), hooks_held_back(self.model):
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
        names = names_of(self.model)
        operands: dict[str, list[tuple[OperandNorms, OperandNorms]]] = {}
        for name, (first, *_) in self.calls.items():
            frame = first.captured.frame
            operands[name] = [
                (OperandNorms.of(q, frame, names), OperandNorms.of(k, frame, names))
                for q, k in products_of_call(first.captured.call)
                if q is not None and k is not None
            ]
        return operands

    def value_slices(
        self, of: Container[str] | None = None
    ) -> dict[str, tuple[HeadSlice, ...] | str]:
        """The last weights on the path of each site's values [b g s d], or the reason why they are unknown, keyed by
        site. of: the parameters whose rows are looked for; by default all."""
        names = names_of(self.model)
        slices: dict[str, tuple[HeadSlice, ...] | str] = {}
        # A view made here belongs to the graph of the pass, regardless of the caller's mode.
        with torch.inference_mode(False), torch.enable_grad():
            for name, (first, *_) in self.calls.items():
                v = self.values.get(name)
                slices[name] = (
                    "no product of its weights with values [b h s d] was seen"
                )
                if v is None or v.ndim != 4:
                    continue
                try:
                    values = side(fewest_keys(v), first.captured.frame, names, "v")
                    slices[name] = tuple(
                        values.slices(*path)[-1]
                        for path in values.paths()
                        if of is None or path[0][-1].parameter in of
                    )
                except UnknownRowsError as error:
                    slices[name] = str(error)
        return slices


def traced(
    model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool
) -> ModelTrace:
    """Returns the trace of the shortest part of an example that suffices.

    A part suffices if all its sites are verified and a pass over the full example, whose tensors are discarded, makes
    the same calls. Several processes have to make the same passes, so they use the full example.

    Raises:
        NoAttentionError: no attention was observed although it was `expected`.
        InvalidValueError: the forward pass with this example fails.
    """
    model = uncompiled(model)
    with extra_pass(model), torch.inference_mode(False), undisturbed(model) as undo:
        for short in () if dist.world() > 1 else shorter(args, kwargs):
            try:
                trace = _traced(
                    model, short.args, short.kwargs, undo, expected=expected
                )
                # On a single sequence, heads that are merged with the batch seem to have a dimension.
                if not all(
                    site.verified and (short.rows > 1 or _is_plain(site.layout))
                    for site in trace.sites
                ):
                    continue
                full = _same_calls(model, args, kwargs, trace, undo)
                if full is not None and short.cut and any(s.normed for s in full.sites):
                    full = _with_gains(model, full, args, kwargs, undo)
                if full is not None:
                    return full
            except Exception as error:
                _LOG.debug(
                    "a shorter example of %s fails: %s", type(model).__name__, error
                )
            finally:
                undo()
        return _traced_whole(model, args, kwargs, undo, expected=expected)


def traced_alone(
    model: nn.Module, args: Args, kwargs: Kwargs, verification: Verification
) -> ModelTrace:
    """Returns the trace of a pass of a part of a model that runs alone on this process.

    Raises:
        InvalidValueError: the pass fails.
    """
    with extra_pass(model), torch.inference_mode(False), undisturbed(model) as undo:
        return _traced_whole(
            model, args, kwargs, undo, expected=False, verification=verification
        )


def _traced_whole(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    undo: Undo,
    *,
    expected: bool,
    verification: Verification | None = None,
) -> ModelTrace:
    """The trace of one pass over this example, or over its only sample twice."""
    trace = _traced(
        model, args, kwargs, undo, expected=expected, verification=verification
    )
    twice = None if dist.world() > 1 else doubled(args, kwargs)
    if twice is None or all(_is_plain(site.layout) for site in trace.sites):
        return trace
    # With one sample, (h b) and (b h) look alike, and larger batches may follow.
    undo()
    try:
        return _traced(
            model, *twice, undo, expected=expected, verification=verification
        )
    except QkeelError as error:
        _LOG.debug("two samples of %s fail: %s", type(model).__name__, error)
        return trace


def seen(
    model: nn.Module, args: Args, kwargs: Kwargs, *, rows: bool = True
) -> ModelTrace:
    """Returns the trace of a pass over the full example, whose sites are not verified.

    Without `rows`, which take most of its time, the sites say no more of their weights than whether a norm follows."""
    model = uncompiled(model)
    with (
        whole_weights(model),
        extra_pass(model),
        torch.inference_mode(False),
        undisturbed(model) as undo,
    ):
        return _traced(
            model, args, kwargs, undo, expected=True, verifies=False, rows=rows
        )


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
    verifies: bool = True,
    rows: bool = True,
    verification: Verification | None = None,
) -> ModelTrace:
    """The trace of one pass over this example. `verification` is told of by the caller.

    If the weights and the logits computed from them lie in two checkpointed parts, a second pass keeps both parts, and
    a warning reports this.
    """
    check_devices(model, args, kwargs)
    for keep in (False, True):
        parts = None
        try:
            # Arguments that are not tensors may not support copying.
            given = copied(args), copied(kwargs)
            reading = _Reading(model, given, keep=keep, verifies=verifies, rows=rows)
            # The pass fills caches among them, with tensors of its graph.
            unused = copied(args), copied(kwargs)
            parts = reading.parts
            reading.run()
        except dist.ApartError:
            raise
        except Exception as error:
            if keep or parts is None or not parts.any:
                raise _failed(model, error) from error
            undo()
            continue
        if reading.lacks_graph and not reading.parts.missed:
            reading = _with_graphs(reading, model, (args, kwargs), undo)
        if not reading.parts.missed:
            trace = _trace_of(reading, unused)
            try:
                if rows:
                    trace = _with_sites(trace, _with_value_weights(trace))
                break
            except RuntimeError:
                # A norm between a fused projection and its values needs what the part has freed.
                if not reading.parts.missed:
                    raise
        undo()
    if keep:
        caution(_KEPT.format(type(model).__name__))
    if not reading.sites and expected:
        raise NoAttentionError(unseen(model, reading.watcher))
    if verifies:
        # a module that holds tensors of the pass could not be copied.
        undo()
        trace = _with_sites(trace, trace.verified(trace.sites, verification))
    return trace


def _trace_of(reading: _Reading, given: tuple[Args, Kwargs]) -> ModelTrace:
    """The trace of what was read in a pass with these arguments."""
    watcher = reading.watcher
    groups = grouped([call.captured for call in reading.order.values()])
    calls = {
        group[0].name: [reading.order[captured.name] for captured in group]
        for group in groups
    }
    sites = reading.typed_sites()
    return ModelTrace(
        model=watcher.stack.root.module,
        sites=Sites(sites, watcher.missed, _indexers(watcher, sites)),
        given=given,
        calls=calls,
        values=watcher.values or {},
        called=watcher.stack.called,
        unclear_masks={
            name: _unclear_masks(first.captured.call)
            for name, (first, *_) in calls.items()
        },
    )


def _with_value_weights(trace: ModelTrace) -> list[AttentionSite]:
    """The sites with the weights of logits that make values too, as keys that are their own values."""
    sites = trace.sites
    logits = {s.parameter for site in sites for s in (*site.query, *site.key)}
    values = trace.value_slices(of=logits)
    return [
        site
        if isinstance(weights := values.get(site.name, ()), str)
        else dataclasses.replace(site, value_weights=weights)
        for site in sites
    ]


def _with_graphs(
    reading: _Reading, model: nn.Module, given: tuple[Args, Kwargs], undo: Undo
) -> _Reading:
    """A second reading for which the graph is kept where the model itself computes without one: in checkpoint functions
    of its own (Megatron, DeepSpeed, unsloth) and in the first rounds of a truncated recurrence. The first reading
    where that shows no more weights."""
    undo()
    again = _Reading(
        model,
        (copied(given[0]), copied(given[1])),
        keep=reading.keep,
        verifies=reading.verifies,
        rows=reading.rows,
        always_with_graph=True,
    )
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            again.run()
    except dist.ApartError:
        raise
    except Exception as error:
        _LOG.debug("%s fails with graphs everywhere: %s", type(model).__name__, error)
        return reading
    known, more = (
        sum([bool(site.terms or site.normed) for site in x.sites.values()])
        for x in (reading, again)
    )
    return again if more > known else reading


def _with_sites(trace: ModelTrace, sites: Sequence[AttentionSite]) -> ModelTrace:
    others = trace.sites
    return dataclasses.replace(
        trace, sites=Sites(sites, others.missed, others.indexers)
    )


def _typed(
    sites: Sequence[AttentionSite], visible: Mapping[str, VisibleSets]
) -> list[AttentionSite]:
    """The sites with the types of their visible sets, where these are known."""
    types = told_apart(visible)
    return [dataclasses.replace(s, visible=types.get(s.name, s.visible)) for s in sites]


def _same_calls(
    model: nn.Module, args: Args, kwargs: Kwargs, trace: ModelTrace, undo: Undo
) -> ModelTrace | None:
    """The trace, with what masks show on the full example; from that pass, without gradients, nothing else is recorded.
    None unless the pass has the same sites as the trace, with the same numbers of heads, and misses the same attention
    layers."""
    sites = {site.name: site for site in trace.sites}
    visible: dict[str, VisibleSets] = {}
    unclear: dict[str, str] = {}
    heads: dict[str, int] = {}
    groups: dict[int, tuple[str, ModuleCall]] = {}

    def note(captured: CapturedCall) -> None:
        name = captured.name
        if name in unclear:
            return
        unclear[name] = _unclear_masks(captured.call)
        if name in sites:
            visible[name] = visible_sets(captured.call, sites[name].origin)
        if captured.headless:
            # The frame is kept so that its id is not reused.
            name, _ = groups.setdefault(id(captured.frame), (name, captured.frame))
        heads[name] = heads.get(name, 0) + scored(captured).shape[1]

    layouts = {name: s.layout for name, s in sites.items() if s.layout is not None}
    watcher = CaptureMode(model, note, layouts=layouts)
    watcher.key_heads = {
        name: (s.n_heads, s.n_kv_heads)
        for name, s in sites.items()
        if s.key_heads is None
    }
    watcher.stack.by_caller = names_by_caller(trace.sites)
    forward(model, watcher, copied(args), copied(kwargs), graph=False)
    undo()
    if heads != {name: s.n_heads for name, s in sites.items()}:
        return None
    if {str(m) for m in watcher.missed} != {str(m) for m in trace.sites.missed}:
        return None
    trace = _with_sites(trace, _typed(trace.sites, visible))
    return dataclasses.replace(trace, unclear_masks=unclear)


def _with_gains(
    model: nn.Module, trace: ModelTrace, args: Args, kwargs: Kwargs, undo: Undo
) -> ModelTrace:
    """The trace with the norms that one full sequence shows, because values computed after a norm may grow with the
    position."""
    row = first_row(args, kwargs)
    by_name: dict[str, AttentionSite] = {}
    try:
        full = _traced(model, row.args, row.kwargs, undo, expected=True, verifies=False)
        by_name = {site.name: site for site in full.sites}
    except Exception as error:
        # A model that runs without gradients may have no memory for a graph of one.
        if torch.OutOfMemoryError not in (type(error), type(error.__cause__)):
            raise
        caution(_NO_BOUNDS.format(type(model).__name__))
    sites = []
    for site in trace.sites:
        other = by_name.get(site.name)
        query, key = (other.query_gains, other.key_gains) if other else ((), ())
        sites.append(dataclasses.replace(site, query_gains=query, key_gains=key))
    return _with_sites(trace, sites)


def _unclear_masks(call: object) -> str:
    """Why the hidden pairs of a hand-written call can't be told from others by their scores, or "". Rows that see no
    key are left out, since padding may have added them."""
    if not isinstance(call, ScoresCall):
        return ""
    is_low, hidden = (
        call.capped <= HIDES,
        torch.zeros_like(call.capped, dtype=torch.bool),
    )
    if call.hidden is not None:
        hidden = hidden | call.hidden
    if bool((hidden & ~is_low & ~hidden.all(-1, keepdim=True)).any()):
        return f"its mask hides keys by a number above {HIDES:.0f} (such as -100)"
    if bool((is_low & ~hidden & call.capped.isfinite()).any()):
        return f"a logit that no mask hides is below {HIDES:.0f} on this example"
    return ""


def _is_plain(layout: HeadLayout | None) -> bool:
    """True if heads have a separate dimension."""
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
        *,
        keep: bool,
        verifies: bool,
        rows: bool,
        always_with_graph: bool = False,
    ) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in reversed(self._parameters.items())}
        self.watcher = CaptureMode(
            model,
            self._note,
            by_graph=functools.partial(layout_of, self._names),
            # While other processes take part, an error is raised only after the pass.
            guard=DeferredError() if spread(model) else unguarded,
        )
        self.watcher.values = {}
        self.watcher.always_with_graph = always_with_graph
        # Whether a site's q or k has no graph.
        self.lacks_graph = False
        self.given, self.keep, self.verifies, self.rows = given, keep, verifies, rows
        self.parts = CheckpointedParts(self._at_end_of_part, keep=keep)
        self.sites: dict[str, AttentionSite] = {}
        # The first call for each name.
        self.order: dict[str, RecordedCall] = {}
        self._visible: dict[str, VisibleSets] = {}
        self._waiting: list[CapturedCall] = []
        # For each call by its first name: the sets of weights with which it was made, and the names of their sites.
        self._weights: dict[str, dict[frozenset[tuple[str, str]] | None, str]] = {}
        # By the name of a site whose module is called with several sets.
        self._callers: dict[str, list[Caller]] = {}

    def run(self) -> None:
        """Runs the pass and reads its sites; `parts.missed` says if that needed a checkpointed part that was not kept."""
        # Otherwise the cast of a weight may come from an earlier pass.
        forget_casts()
        model, guard = self.watcher.stack.root.module, self.watcher.guard
        forward(model, self.watcher, *self.given, parts=self.parts, guard=guard)
        try:
            with torch.enable_grad():
                for calls in grouped(self._waiting):
                    self._read_site(calls)
        except RuntimeError:
            if not self.parts.missed:
                raise

    def _note(self, captured: CapturedCall) -> None:
        captured = self._named_by_caller(captured)
        line = captured.frame.line()
        positions = {id(frame): frame.captured for frame in line}
        for frame in line:
            frame.captured += 1
        if captured.name in self.order:
            return
        self.order[captured.name] = RecordedCall(captured=captured, positions=positions)
        factors = itertools.chain(*products_of_call(captured.call))
        if any([x is not None and x.grad_fn is None for x in factors]):
            self.lacks_graph = True
        self._waiting.append(captured)
        for frame in line if self.verifies else ():
            if frame.given is not None:
                frame.given.copy_tensors()

    def _named_by_caller(self, captured: CapturedCall) -> CapturedCall:
        """The call, under another name if its module was called with other weights before."""
        frame, name = captured.frame, captured.name
        if name not in self.order:
            return captured
        self._note_weights(self.order[name].captured)
        by_weights, weights = self._weights[name], self._weights_behind(captured)
        if weights is None or None in by_weights or frame.caller is None:
            return captured
        if weights not in by_weights:
            # Named by the module that owns the projections, and the one that is called.
            owner = common_module([parameter for _, parameter in weights])
            new = f"{owner}#{frame.name}"
            taken = new in self.order
            by_weights[weights] = f"{new}{len(by_weights) + 1}" if taken else new
        site = by_weights[weights]
        if site == name:
            return captured
        self._callers.setdefault(site, []).append(frame.caller)
        frame = dataclasses.replace(frame, name=site)
        return dataclasses.replace(captured, frame=frame, ordinal=0)

    def _note_weights(self, first: CapturedCall) -> None:
        """Notes the weights behind the first call of a module, while its graph exists."""
        if first.name not in self._weights:
            self._weights[first.name] = {self._weights_behind(first): first.name}

    def _weights_behind(
        self, captured: CapturedCall
    ) -> frozenset[tuple[str, str]] | None:
        """The sides and names of the nearest weights behind a call, or None if they are unknown."""
        products = products_of_call(captured.call)
        behind = sides(products, captured.frame, self._names)
        return (
            frozenset((s.name, p.parameter) for s in behind for p in s.walk.nearest)
            or None
        )

    def _at_end_of_part(self) -> None:
        running = self.watcher.stack.top.line()
        self.watcher.guard(
            self.watcher.apart, functools.partial(self._read_complete, running)
        )

    def _read_complete(self, running: Sequence[ModuleCall]) -> None:
        incomplete: list[CapturedCall] = []
        for captured in self._waiting:
            self._note_weights(captured)
        for calls in grouped(self._waiting):
            if calls[0].headless and any(calls[0].frame is frame for frame in running):
                # More heads may follow.
                incomplete += calls
            else:
                self._read_site(calls)
        self._waiting = incomplete

    def _read_site(self, calls: list[CapturedCall]) -> None:
        with unrounded(scored(calls[0])):
            site = _site(calls, self._names, rows=self.rows)
        if self._parts_share_weights(site, calls[0].frame):
            why = "one weight is applied to several parts of its input, so heads that share it cannot be counted"
            site = dataclasses.replace(site, terms=(), why=why)
        module, origin = site.module, self._origin(site, calls[0])
        if site.name in self._callers:
            root = self.watcher.stack.root.module
            module = root.get_submodule(site.name.partition("#")[0])
        self.sites[site.name] = dataclasses.replace(site, module=module, origin=origin)
        self._visible[site.name] = visible_sets(calls[0].call, origin)

    def _parts_share_weights(self, site: AttentionSite, frame: ModuleCall) -> bool:
        """True if scores without a dimension of heads have several dimensions of batches, and the query's weight is as
        wide as a part of the module's input: then one of these dimensions may hold heads that share all weights."""
        batches = 0 if site.layout is None else site.layout.groups.count("b")
        if not site.terms or site.n_heads > 1 or batches < 2:
            return False
        first = site.terms[0].query[0]
        width = self._parameters[first.parameter].flatten(1).shape[1 - first.axis]
        widths = [x.shape[-1] for x in frame.inputs if x.is_floating_point()]
        return any(n > width and n % width == 0 for n in widths)

    def _origin(self, site: AttentionSite, captured: CapturedCall) -> KeyOrigin:
        """What the keys are computed from: other tokens than the queries, latents if each head's rows act on a vector
        that is narrower than the input of the widest weight on the path, or the tokens."""
        if _of_other_source(captured):
            return "other"

        def width(s: HeadSlice) -> int:
            weight = self._parameters[s.parameter]
            return weight.shape[1 - s.axis] if weight.ndim == 2 else 0

        widths = [width(s) for s in (*site.query, *site.key)]
        last = [width(t.key[-1]) for t in site.terms if t.key[-1].n > 1]
        # The low-rank vector of an adapter that is added to a full weight does not count.
        return (
            "latent" if last and min(last) > 0 and max(last) < max(widths) else "tokens"
        )

    def typed_sites(self) -> list[AttentionSite]:
        """The sites in the order of their calls, with the types of their layers and the calls of shared modules."""
        sites = [self.sites[name] for name in self.order if name in self.sites]
        return [
            dataclasses.replace(site, callers=tuple(self._callers.get(site.name, ())))
            for site in _typed(sites, self._visible)
        ]


def _failed(model: nn.Module, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {type(error).__name__}: {error}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    )


def names_by_caller(sites: Sequence[AttentionSite]) -> dict[Caller, str] | None:
    """The names of sites by the calls of modules that several sites share, or None if there are none."""
    return {caller: site.name for site in sites for caller in site.callers} or None


def common_module(parameters: Sequence[str]) -> str:
    """The name of the innermost module that holds all of these parameters."""
    common = []
    for names in zip(*(name.split(".")[:-1] for name in parameters)):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def grouped(firsts: Sequence[CapturedCall]) -> Iterator[list[CapturedCall]]:
    """Groups the first calls of sites: a single call for each site, or the calls of all heads if a module computes them
    one by one."""
    groups: dict[int, list[CapturedCall]] = {}
    for first in firsts:
        key = id(first.frame) if first.headless else id(first)
        groups.setdefault(key, []).append(first)
    yield from groups.values()


def scored(captured: CapturedCall) -> Tensor:
    """The logits of a call, or its q; the second dimension of either is the heads."""
    call = captured.call
    return call.logits if isinstance(call, ScoresCall) else call.q


# --- The site of a call


def _site(
    calls: list[CapturedCall], names: dict[int, str], *, rows: bool
) -> AttentionSite:
    """The site of a call, or of the calls of its heads."""
    first = calls[0]
    call, layout = first.call, first.layout
    q, k = (
        None
        if any(getattr(s.call, name) is None for s in calls)
        else torch.cat([getattr(s.call, name) for s in calls], dim=1)
        for name in "qk"
    )
    products: Products = [(q, k)]
    lost: Sequence[str] = ()
    if isinstance(call, ScoresCall):
        lost = call.lost
        products = products if len(calls) > 1 else list(call.products)
    elif first.added is not None:
        lost = first.added.lost
        products += first.added.products
    repeats = (key_heads(b) for _, b in products if b is not None)
    heads_of_keys = next((heads for heads in repeats if heads is not None), None)
    if heads_of_keys is not None:
        # The first copy of each key head among keys that were repeated for query heads.
        firsts = [heads_of_keys.index(j) for j in range(max(heads_of_keys) + 1)]
        k, *keys = (
            b if b is None or b.shape[1] < len(heads_of_keys) else b[:, firsts]
            for b in (k, *(b for _, b in products))
        )
        products = [(a, b) for (a, _), b in zip(products, keys)]
    terms: tuple[QKProduct, ...] = ()
    why = "; ".join(lost)
    try:
        if not rows:
            raise UnknownRowsError("its rows were not looked for")
        known_terms, normed = sum_terms(products, first.frame, names)
        terms = () if lost else known_terms
    except UnknownRowsError as error:
        normed = any(s.normed for s in sides(products, first.frame, names))
        why = "; ".join((*lost, str(error)))
    if layout is not None and layout.guess:
        # Different features for every head are as conclusive as the experiment would have been.
        if terms and all(term.query[-1].n > 1 for term in terms):
            layout = dataclasses.replace(layout, guess="")
        else:
            why = "; ".join(filter(None, (why, layout.guess)))
    query_gains: Gains = ()
    key_gains: Gains = ()
    is_plain = all(s.added is None and is_product(s.call) for s in calls)
    if rows and q is not None and k is not None and is_plain:
        query_gains = seen_gains(q, names)
        key_gains = seen_gains(k, names) if query_gains else ()
    heads = scored(first).shape[1] * len(calls)
    # Each query vector counts once, and products of the same weights, of which a mask chooses one for each pair
    # (ReRoPE), are one term.
    queries: list[Tensor] = []
    for a, _ in products[: 1 if len(terms) == 1 else None]:
        if a is not None and not any(
            a.shape == b.shape and torch.equal(a, b) for b in queries
        ):
            queries.append(a)
    return AttentionSite(
        name=first.name,
        module=first.frame.module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=max([b.shape[1] for _, b in products if b is not None] or [heads]),
        head_dim=sum(a.shape[-1] for a in queries),
        terms=terms,
        why=why,
        normed=normed,
        query_gains=query_gains,
        key_gains=key_gains,
        key_heads=heads_of_keys,
        layout=layout,
    )


def _indexers(
    watcher: CaptureMode, sites: Sequence[AttentionSite]
) -> list[AttentionSite]:
    """The indexers that choose keys for the sites, one for each layer that has any."""
    indexers: dict[str, AttentionSite] = {}
    for frame, call in watcher.chosen:
        layer = layer_of(frame.name, [site.name for site in sites])
        if layer is not None and layer not in indexers:
            heads = call.logits.shape[1]
            indexers[layer] = AttentionSite(
                name=f"{layer}{INDEX}",
                module=frame.module,
                spec=call.spec,
                n_heads=heads,
                n_kv_heads=heads,
                head_dim=0,
                why="its scores choose keys and do not weight values",
                layout=call.layout,
                chooses=True,
            )
    return list(indexers.values())


def _of_other_source(captured: CapturedCall) -> bool:
    """True if queries and keys come from different inputs of the module that projects them.

    That module is the one of the call, or one that contains it. A module that receives queries and keys as arguments
    only multiplies them, and there two projections of the same hidden state are two different inputs.
    """
    q, k = products_of_call(captured.call)[0]
    if q is None or k is None or q.grad_fn is None or k.grad_fn is None:
        return False
    query, key = [q.grad_fn], [k.grad_fn]
    for frame in captured.frame.line():
        stops = nodes_of(frame.inputs)
        of_query, of_key = reached(query, stops), reached(key, stops)
        projects = is_projected(query, stops) or is_projected(key, stops)
        if of_query and of_key and projects:
            return of_query.isdisjoint(of_key)
    return False


@torch.no_grad()
def is_product(call: object) -> bool:
    """True if the logits of a call are exactly its scale times q·k, without a bias."""
    if not isinstance(call, ScoresCall):
        return isinstance(call, AttentionCall) and call.spec.norm.kind == "none"
    if call.q is None or call.k is None:
        return False
    q, z = call.q, call.logits
    scale = call.spec.scale.factor(q.new_zeros(1, 1), q.shape[-1], {})
    k = call.k.repeat_interleave(q.shape[1] // call.k.shape[1], 1)
    products = q @ k.mT * scale
    visible = z.isfinite() if call.hidden is None else ~call.hidden & z.isfinite()
    rounding = 16 * torch.finfo(z.dtype).eps * products.abs().max()
    return not bool((((z - products).abs() > rounding) & visible).any())


def unseen(model: nn.Module, watcher: CaptureMode) -> str:
    """The message for a pass without observed attention: what was looked for, why nothing was found, and what to do."""
    if watcher.missed:
        missed = "; ".join(map(str, dict.fromkeys(watcher.missed)))
        why = f"Seen but not understood: {missed}. {_BY_HAND}"
    elif watcher.handwritten.multiplied:
        why = "Activations are multiplied with each other, but none of the products reaches a softmax"
        if ends := ", ".join(watcher.handwritten.ends):
            why += f" (they were followed to {ends})"
        why += (
            ": linear attention, state-space models and attention through another function of the scores have no "
            "softmax over keys, and only attention with one is watched"
        )
        why += f". {_BY_HAND}" if ends else ""
    else:
        hidden = [*watcher.hidden]
        if any(
            isinstance(module, torch.jit.ScriptModule) for module in model.modules()
        ):
            hidden.append("what runs inside torch.jit.script")
        why = "None of these was found: no two activations were multiplied. "
        why += f"Hidden from view: {', '.join(hidden)}. " if hidden else ""
        why += (
            "Inside custom C++, CUDA or Triton operators nothing can be seen. "
            f"{_BY_HAND}"
        )
    return (
        f"saw no attention in a forward pass of this {type(model).__name__}. Looked for "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, varlen_attn, flash-attn's "
        "functions, and a product of two activations that reaches a softmax through scaling, masks, caps, casts and "
        f"views. {why}"
    )


_KEPT = (
    "the search for the attention of {} keeps tensors that gradient checkpointing would drop: weights and the logits "
    "they produce lie in two checkpointed parts, a norm lies between weights and the values they produce, or a part "
    "can't be run separately. It needs as much memory as a pass without checkpointing; if that is too much, give "
    "find_sites a batch of one short sequence, and its sites "
    "to watch(sites=...)"
)
_NO_BOUNDS = (
    "the logit bounds that the norms of {} imply are unknown and not watched: there is not enough memory to read them "
    "from one whole sequence. For the bounds, call find_sites with a batch of one sequence that is as long as memory "
    "allows, and pass the sites that it returns to watch(sites=...)"
)
_BY_HAND = (
    "If the logits are just scaled products of queries and keys, describe it by hand, as in\n"
    "    from qkeel.sites import Reading, describe\n"
    '    site = describe(model, "name.of.its.module", query=Reading(module="q_proj"), '
    'key=Reading(module="k_proj"), heads=8)'
)
