"""Intercepts the attention calls of a forward pass, of any model.

The CaptureMode is a torch function mode, and torch disables the eval fast path of `torch.nn.TransformerEncoder` while
any function mode is active. The results are then those of `torch.backends.mha.set_fastpath_enabled(False)`, which
differ from the results of the fast path only by rounding; training never takes the fast path. Observing the attention
matters more here than the last bits of the results in evaluation, because the fast path is a single opaque operator. A
Tap observes such models in an extra pass, so that the model's own passes keep the fast path.

A torch function mode does it here; `named_attention` replaces F.scaled_dot_product_attention under its name, where no mode is
needed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.capture.calls import (
    HeadLayout,
    ScoresCall,
    Seen,
    UnrecognizedAttention,
    fewest_keys,
    known_keys,
)
from qkeel.capture.described import DescribedSite, DescribedSiteHooks
from qkeel.capture.example import ModuleCall, ModuleStack
from qkeel.capture.hand_written import EagerAttentionTracer, products_of
from qkeel.capture.known_sites import KnownSites
from qkeel.capture.logsumexp import attention_with_logsumexp
from qkeel.capture.named_attention import hold_name_in
from qkeel.capture.readers import (
    FUSED,
    READERS,
    SDPA,
    UnreadError,
    arranged,
    observed_by,
    sdpa_arguments,
    unobserved,
    unpacked,
)
from qkeel.capture.score_calls import (
    LayoutReader,
    fused_layout,
    index_call,
    scores_call,
)
from qkeel.capture.tags import Lost, Scores
from qkeel.capture.user_hooks import recording_code
from qkeel.errors import caution
from qkeel.functional.statistics import KernelRows
from qkeel.nn import functional_attention
from qkeel.nn.attention import Observer, RowObserver, SpecModule
from qkeel.nn.scaled_dot_product import attention_with_rows
from qkeel.patching.guards import Guarded, in_this_thread, unguarded
from qkeel.patching.modes import (
    ASKED,
    Args,
    Function,
    Kwargs,
    ReadingMode,
    function_name,
    push_mode,
    take_off,
)
from qkeel.patching.module_tables import modules_of, put_hooks, remove_hooks
from qkeel.patching.torch_state import in_vmap, running_frames, transformed_now
from qkeel.spec import AttentionCall

# Called with the call of a module that is about to make an attention call, or that `chooses` keys: it has made scores of
# which the largest are chosen. Returns what is known of sites then, or None if nothing has changed.
Search = Callable[..., KnownSites | None]


# q, k, scale, causality.
PlainCall = tuple[Tensor, Tensor, float, bool]
_SDPA = "scaled_dot_product_attention"


class Watch(enum.IntEnum):
    """What calls are watched in a module; a larger one includes the smaller ones."""

    #: those by the name of torch's function, which need no mode
    NAME = 0
    #: those of torch's fused functions, and of functions whose code is exchanged
    FUSED = 1
    #: those of every torch function, as for attention that is written by hand
    ALL = 2


# The torch functions to observe, or None for all.
_FUNCTIONS = {
    Watch.NAME: frozenset({SDPA}),
    Watch.FUSED: frozenset(
        {SDPA, F.multi_head_attention_forward, functional_attention}
    ),
    Watch.ALL: None,
}
# The modules in which to look for attention, by name.
Places = dict[str, tuple[nn.Module, Watch]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedCall:
    """An attention call of a forward pass.

    Args:
        frame: the module call that made the attention call.
        ordinal: the index of this call among the attention calls of that module call.
        how: the function in which it was observed, "softmax" for hand-written attention, or "module" for one of qkeel's
            modules.
        call: the call as it was read.
        layout: the dimensions of its scores in the module, if they are not [b h t s] by contract.
        added: in a probe, the products whose sum is the additive mask of a fused function.
        rows: the row statistics from its kernel, if requested.
        by_name: whether it arrived by the name F.scaled_dot_product_attention.
    """

    frame: ModuleCall
    ordinal: int
    how: str
    call: Seen
    layout: HeadLayout | None = None
    added: ScoresCall | None = None
    rows: KernelRows | None = None
    by_name: bool = False

    @property
    def name(self) -> str:
        """The name of the site, which is the module's name, with "#2" appended for its second call."""
        return name_of(self.frame.name, self.ordinal)

    @property
    def headless(self) -> bool:
        """True if it is one of several heads that are computed in separate calls."""
        return isinstance(self.call, ScoresCall) and self.call.headless


def name_of(module: str, ordinal: int) -> str:
    """The name of the site of attention call number `ordinal` (from 0) of a module."""
    return module if ordinal == 0 else f"{module}#{ordinal + 1}"


class CaptureMode(ReadingMode):
    """A torch function mode that reports every attention call of `model` between `__enter__` and `__exit__`.

    It makes each call itself, once and with the original arguments, so that results are unchanged; `guard` protects
    what reads a call, never the call itself. In modules whose calls all arrive by the name of torch's function, they
    are read there, and the mode stays off (see `named_attention`). A function that torch compiles while the mode is
    active is compiled as if it were off, and its calls are not seen.

    It observes torch's fused functions, products of two activations that reach a softmax, flex_attention, varlen_attn
    and the functions of flash-attn. Calls inside qkeel's own modules are left to the observers of these modules.

    Args:
        model: the model whose calls are observed.
        report: the function that is called with every attention call.
        by_graph: in a probe, which keeps the graph behind q and k, finds the layout of scores in it.
        rows: whether functional_attention reports what its kernel computes for each row.
        known: what is known of the model's sites. Those that are described are read according to their descriptions;
            nothing else is reported inside them.
        guard: the function through which every method here, and `report`, is called while the model runs.
        own: qkeel's own modules whose calls are reported too, with their names; the others' are left to their observers.
        only_in: the modules in which to look for other attention; if None, the full pass is observed.
        search: called with the call of a module that is about to make an attention call, before the attention call is
            read.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[CapturedCall], object],
        *,
        by_graph: LayoutReader | None = None,
        rows: bool = False,
        known: KnownSites | None = None,
        guard: Guarded = unguarded,
        own: Sequence[tuple[str, nn.Module]] = (),
        only_in: Places | None = None,
        search: Search | None = None,
    ) -> None:
        super().__init__()
        self.guard, self.probing = guard, by_graph is not None
        # True while a call is made that arrived by the name F.scaled_dot_product_attention; whether such calls are
        # handed to `named_call`, because the mode is not active; whether their rows' logsumexps are wanted.
        self.by_name = self.reads_names = self.wants_logsumexp = False
        # The torch functions to observe now, or None for all, and those of the calls of known modules further out.
        self.only: frozenset[Function] | None = None
        self._outer: list[tuple[frozenset[Function] | None, bool]] = []
        self._only_in = only_in
        # Whether calls by the name of torch's function arrive in this pass.
        self._knows_name = False
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        modules = None
        if only_in is not None:
            modules = {name: module for name, (module, _) in only_in.items()}
        self.stack = ModuleStack(
            model,
            modules=modules,
            keep_inputs=self.probing or search is not None,
            guard=guard,
        )
        self._search = search
        # Called with an SDPA call in a known module: the site, q, k, scale and causality if there is no mask, and the
        # logsumexps of its rows if they are wanted and its kernel hands them out. Returns whether that was enough.
        self.measure: Callable[[str, PlainCall | None, Tensor | None], bool] | None = (
            None
        )
        # The code of the user's hooks that record.
        self._recording: frozenset[CodeType] = frozenset()
        # The calls of the modules in `only_in`.
        self.called_in: list[ModuleCall] = []
        self.unread: list[UnrecognizedAttention] = []
        # Where attention would not be seen.
        self.hidden: dict[str, None] = {}
        self._report, self._rows, self._own = report, rows, own
        self.know(known or KnownSites())
        described = [site for site in self.known.sites if site.description is not None]
        self._described = {site.name for site in described}
        self._hooks = [
            DescribedSiteHooks(site, self._described_call, guard) for site in described
        ]
        # The values v by site, if requested.
        self.values: dict[str, Tensor] | None = None
        # Receives the layers and calls of known indexers; a probe keeps the first of each module that chooses keys, with
        # the tensors it was computed from.
        self.index: Callable[[str, ScoresCall], None] | None = None
        self._chosen: dict[str, tuple[ModuleCall, ScoresCall, Scores | Lost]] = {}
        self._by_graph = by_graph
        self.handwritten = EagerAttentionTracer(
            lambda frame, call: self._saw(frame, "softmax", call, call.layout),
            self._known_layout,
            self._by_graph,
            self._valued,
            self._chose,
            lists_missed=self.probing or search is not None,
        )

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self.look(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def know(self, known: KnownSites) -> None:
        """Reads and names the calls that follow by what is known of the sites."""
        self.known = known
        # Where sites are looked for, callers are told apart from the start.
        tells_callers = self.probing or self._search is not None
        self.stack.by_caller = known.by_caller or ({} if tells_callers else None)

    @property
    def whole(self) -> bool:
        """True if the full pass is observed."""
        return self._only_in is None

    @property
    def searches(self) -> bool:
        """True if sites are looked for in this pass."""
        return self._search is not None

    @property
    def missed(self) -> list[UnrecognizedAttention]:
        """The attention layers of this pass that were observed but could not be read."""
        return [*self.handwritten.missed, *self.unread]

    @property
    def chosen(self) -> list[tuple[ModuleCall, ScoresCall]]:
        """The scores in a probe by which keys were chosen, except those that are also the input of a softmax."""
        weighed = self.handwritten.weighed
        return [
            (frame, call)
            for frame, call, tag in self._chosen.values()
            if products_of(tag).isdisjoint(weighed)
        ]

    def look(
        self, around: ExitStack, modules: Iterable[nn.Module] | None = None
    ) -> None:
        """Observes the calls of the pass that is about to run, until `around` is closed.

        modules: those in which calls are observed, by default all of the model."""
        for described in self._hooks:
            described.attach(around)
        for name, module in self._own:
            assert isinstance(module, SpecModule)
            observer = self._observer(name, module)
            module.observers.append(observer)
            around.callback(module.observers.remove, observer)
        if self._only_in == {}:
            return
        around.callback(self.handwritten.tags.clear)
        around.callback(self.end)
        self._knows_name = hold_name_in(around)
        sought = [Watch.ALL]
        if self._only_in is not None:
            sought = [watch for _, watch in self._only_in.values()]
        # Calls that are read by their name alone leave nothing that waits for the end of their module.
        most = max([Watch.NAME, *sought])
        if not self._knows_name or most > Watch.NAME:
            self.stack.ended = self._module_ended
        around.enter_context(observed_by(self, exchanges=most > Watch.NAME))
        if modules is None:
            modules = modules_of(self.stack.root.module).values()
        self._recording = recording_code(modules)
        if self._only_in is None:
            self.stack.attach(around)
            push_mode(self)
            around.callback(take_off, self)
            return
        # A mode costs one callback for each torch function, so the rest of the pass runs without it.
        around.callback(self._leave_all)
        hooks = [
            (module, functools.partial(self._enter_module, watch), self._leave_module)
            for module, watch in self._only_in.values()
        ]
        around.callback(remove_hooks, put_hooks(hooks))

    def _observer(self, name: str, module: SpecModule) -> Observer:
        """What reports the calls of one of qkeel's own modules."""
        frame = ModuleCall(name=name, module=module, parent=None)

        def report(call: AttentionCall, rows: KernelRows | None = None) -> None:
            captured = CapturedCall(
                frame=frame, ordinal=0, how="module", call=call, rows=rows
            )
            self._report(captured)

        see = in_this_thread(functools.partial(self.guard, report))
        return RowObserver(see, see) if self._rows else see

    def end(self) -> None:
        """Reports what is still waiting; the pass is over, or about to be."""
        if self.handwritten.latest or self.handwritten.waiting:
            self.guard(self.apart, self.handwritten.end_all)

    def _module_ended(self, frame: ModuleCall) -> None:
        if self.handwritten.latest or self.handwritten.waiting:
            self.apart(lambda: self.handwritten.end(frame))

    def _enter_module(
        self,
        watch: Watch,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        if threading.get_ident() == self._thread:
            # Where the mode is active already, it sees the calls by name too.
            is_mode_off = not self._outer or self.reads_names
            reads_names = self._knows_name and watch is Watch.NAME and is_mode_off
            self._outer.append((self.only, self.reads_names))
            self.only = _FUNCTIONS[watch]
            self.reads_names = reads_names
            self.guard(self.stack.push, module, args, kwargs)
            self.called_in.append(self.stack.top)
            if not reads_names:
                push_mode(self)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self._thread and self._outer:
            if not self.reads_names:
                take_off(self)
            self.only, self.reads_names = self._outer.pop()
            self.stack.pop(module, args, output)

    def _leave_all(self) -> None:
        """Cleans up after an interrupt, which ends a pass without calling the hooks."""
        while self._outer:
            if not self.reads_names:
                take_off(self)
            self.only, self.reads_names = self._outer.pop()

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: Args = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func in ASKED
            # The compiler traces this method, and fails at a set that an active mode holds.
            or torch.compiler.is_compiling()
            or (self.only is not None and func not in self.only)
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._make_call(func, args, kwargs or {})

    def _make_call(self, func: Function, args: Args, kwargs: dict[str, Any]) -> Any:
        """Makes a call that may be of interest and reads it, in code that torch does not compile."""
        rows = with_lse = lse = None
        if func is SDPA and self.wants_logsumexp and self.only is not None:
            with_lse = attention_with_logsumexp(args, kwargs)
        if with_lse is not None:
            out, lse = with_lse
        elif func is functional_attention and self.probing:
            # A probe follows gradient paths, which torch's operators have.
            out = SDPA(*args, **kwargs)
        elif func is functional_attention and self._rows:
            out, rows = attention_with_rows(sdpa_arguments(args, kwargs))
        else:
            out = func(*args, **kwargs)
        self.guard(self._read_call, func, args, kwargs, out, rows, lse)
        return out

    def _read_call(
        self,
        func: Function,
        args: Args,
        kwargs: Kwargs,
        out: object,
        rows: KernelRows | None,
        lse: Tensor | None,
    ) -> None:
        """Reads what a function computed, if it plays a part in attention."""
        name = function_name(func)
        if name == "get":
            # The getter of x.mT or x.mH transposes x; others compute nothing.
            is_transpose = func.__self__.__name__ in ("mT", "mH")  # type: ignore[attr-defined]
            if not is_transpose or args[0].ndim < 3:
                return
            name, args = "transpose", (args[0], -2, -1)
        if name == "pad" and _adds_zeros(*args, **kwargs):
            self.stack.top.pads = True
        if name not in FUSED and not self.handwritten.minds(name):
            return
        if in_vmap():
            self.hidden["what runs inside torch.func.vmap"] = None
            return
        top = self.stack.top
        if _in_own(top) or self._is_recording():
            return
        if func is SDPA and self._measured(args, kwargs, lse):
            return
        if name in FUSED:
            self.apart(lambda: self._read(name, FUSED[name](args, kwargs), rows))
        else:
            self.apart(lambda: self.handwritten.follow(name, top, args, kwargs, out))

    def named_call(self, args: Args, kwargs: Kwargs, lse: Tensor | None) -> None:
        """Reads a call that arrived by name, and its rows' logsumexps if its kernel hands them out."""
        if self._is_recording() or self._measured(args, kwargs, lse):
            return
        if in_vmap():
            self.hidden["what runs inside torch.func.vmap"] = None
        else:
            self.apart(lambda: self._read(_SDPA, sdpa_arguments(args, kwargs)))

    def _measured(self, args: Args, kwargs: Kwargs, lse: Tensor | None) -> bool:
        """Hands an SDPA call in a known module to `measure`; returns whether no further reading is needed."""
        top = self.stack.top
        name = name_of(top.name, top.calls)
        heads = self.known.key_heads.get(name)
        if (
            self.measure is None
            or self.only is None
            or self._described
            or heads is None
        ):
            return False
        # Inside a transform no kernel has handed out logsumexps.
        if lse is None and transformed_now():
            return False
        plain, mask = None, args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if mask is None and 3 <= len(args) <= 5:
            q, k, *_ = iter(args)
            scale = kwargs.get("scale")
            # Of a packed call, which has to be unpacked first, or one with other heads than are known.
            if q.ndim > 3 and q.shape[1] != heads[0]:
                return False
            k = k if k.shape[1] in (heads[1], 1) else known_keys(heads, k)
            scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
            plain = q, k, scale, bool(kwargs.get("is_causal", False))
        if lse is not None and lse.shape[1] != heads[0]:
            lse = None
        is_measured = self.measure(name, plain, lse)
        top.calls += is_measured
        return is_measured

    def apart(self, read: Callable[[], None]) -> None:
        """Calls `read` unobserved, with gradients if q and k of a probe will be traced back to the weights."""
        with_graph = self.probing and torch.is_grad_enabled()
        with unobserved(), torch.set_grad_enabled(with_graph):
            read()

    def _read(
        self, name: str, arguments: Kwargs, rows: KernelRows | None = None
    ) -> None:
        """Reads a call of an attention function from its arguments, all of them by name."""
        top = self.stack.top
        if self._elsewhere(top):
            return
        self._find(top)
        site = name_of(top.name, top.calls)
        n_heads, layout, added = self.known.key_heads.get(site), None, None
        if name == _SDPA:
            q, mask = arguments["query"], arguments["attn_mask"]
            heads = _configured_heads(top.module, q) if n_heads is None else n_heads[0]
            packed = unpacked(arguments, heads) if heads else None
            if packed is not None:
                arguments, rows = packed, None
            elif q.ndim != 4 and not q.is_nested:
                layout = fused_layout(
                    q,
                    arguments["key"],
                    top,
                    known=self.known.layouts.get(site),
                    by_graph=self._by_graph,
                )
                arguments = arranged(arguments, layout)
            if self.probing:
                added = self._added(top, mask, layout)
        try:
            call = READERS[name](arguments)
        except UnreadError as error:
            reason = f"{name} is called with {error}, whose effect is not known"
            self.unread.append(
                UnrecognizedAttention(module=top.name, operation=name, reason=reason)
            )
            return
        # With fewer key heads, no head is repeated, and the comparison would wait for the device.
        if call.k.shape[1] == call.q.shape[1]:
            k = fewest_keys(call.k) if n_heads is None else known_keys(n_heads, call.k)
            call = call if k is call.k else dataclasses.replace(call, k=k)
        reported = self._saw(top, name, call, layout, added, rows)
        if reported is not None and name == _SDPA:
            self._valued(reported, arguments["value"])

    def _known_layout(self, frame: ModuleCall, ordinal: int) -> HeadLayout | None:
        self._find(frame)
        return self.known.layouts.get(name_of(frame.name, ordinal))

    def _find(self, frame: ModuleCall, *, chooses: bool = False) -> None:
        if self._search is not None and not self._elsewhere(frame):
            facts = self._search(frame, chooses=chooses)
            if facts is not None:
                self.know(facts)

    def _added(
        self, top: ModuleCall, mask: Tensor | None, layout: HeadLayout | None
    ) -> ScoresCall | None:
        """The products whose sum is the mask of a fused function, such as positions that are multiplied by queries."""
        tag = self.handwritten.tags.get(mask)
        if not isinstance(tag, Scores) or mask is None or mask.ndim < 3:
            return None
        if layout is None and mask.ndim == 4:
            layout = HeadLayout(groups=tuple("bhts"), sizes=(mask.shape[1],))
        return scores_call(
            tag,
            mask,
            mask.ndim - 1,
            top,
            known=layout,
            by_graph=self._by_graph,
            alone=False,
        )

    def called(self, name: str, arguments: Kwargs) -> None:
        """Reads a call of a function whose code was exchanged."""
        self.apart(lambda: self._read(name, arguments))

    def _saw(
        self,
        frame: ModuleCall,
        how: str,
        call: Seen,
        layout: HeadLayout | None = None,
        added: ScoresCall | None = None,
        rows: KernelRows | None = None,
    ) -> str | None:
        """Reports a call and returns the name of its site, or None if it is reported in another way."""
        if self._elsewhere(frame):
            return None
        if how != "softmax":
            self.handwritten.before(frame, call)
        ordinal, frame.calls = frame.calls, frame.calls + 1
        captured = CapturedCall(
            frame=frame,
            ordinal=ordinal,
            how=how,
            call=call,
            layout=layout,
            added=added,
            rows=rows,
            by_name=self.by_name,
        )
        self._report(captured)
        return captured.name

    def _valued(self, site: str, values: Tensor) -> None:
        if self.values is not None:
            self.values.setdefault(site, values)

    def _chose(self, frame: ModuleCall, tag: Scores | Lost, x: Tensor) -> None:
        """Reads scores x of which the largest are chosen."""
        if self._elsewhere(frame):
            return
        self._find(frame, chooses=True)
        layer = self.known.indexed_layer(frame.name)
        if not self.probing and (layer is None or self.index is None):
            return
        frame.indexes += 1
        try:
            layout = None if layer is None else self.known.indexers[layer]
            call = index_call(tag, x, frame, known=layout, by_graph=self._by_graph)
        except Exception as error:  # the attention after it is still observed
            caution(
                f"the scores by which {frame.name or 'the model itself'} chooses keys cannot be read: {error}"
            )
            return
        if layer is not None and self.index is not None:
            self.index(layer, call)
        else:
            self._chosen.setdefault(frame.name, (frame, call, tag))

    def _described_call(self, site: DescribedSite, read: Callable[[], Seen]) -> None:
        frame = ModuleCall(name=site.name, module=site.module, parent=self.stack.top)

        def report() -> None:
            self._report(
                CapturedCall(frame=frame, ordinal=0, how="description", call=read())
            )

        self.apart(report)

    def _elsewhere(self, frame: ModuleCall) -> bool:
        """True inside a module whose attention is reported in another way."""
        if _in_own(frame) or any(f.name in self._described for f in frame.line()):
            return True
        return self._is_recording()

    def _is_recording(self) -> bool:
        """True inside a hook of the user's that records."""
        return bool(self._recording) and any(
            frame.f_code in self._recording for frame in running_frames()
        )


def _adds_zeros(
    _: object, pad: Sequence[int], mode: str = "constant", value: object = None
) -> bool:
    """True if torch's pad with these arguments adds zeros along a dimension other than the last."""
    return any(pad[2:]) and mode == "constant" and not value


def _in_own(frame: ModuleCall) -> bool:
    """True inside one of qkeel's modules, whose observers compute the statistics: following them would make the host
    wait for the device."""
    return any(isinstance(f.module, SpecModule) for f in frame.line())


def _configured_heads(module: nn.Module, q: Tensor) -> int:
    """The number of query heads in the configuration of one of transformers' attention modules with grouped heads, and
    0 for any other module and for calls with another number of queries than a group has heads.

    At a site that isn't known yet, nothing else tells the heads of a packed call from its tokens.
    """
    groups = getattr(module, "num_key_value_groups", None)
    if not (q.ndim == 4 and q.shape[2] == groups):
        return 0
    try:
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    except Exception:  # a config with a number per layer raises an error of its own
        return 0
    return heads if isinstance(heads, int) else 0
