"""Intercepts the attention calls of a forward pass, of any model.

The CaptureMode is a torch function mode, and torch disables the eval fast path of `torch.nn.TransformerEncoder` while
any function mode is active. The results are then those of `torch.backends.mha.set_fastpath_enabled(False)`, which
differ from the results of the fast path only by rounding; training never takes the fast path. Observing the attention
matters more here than the last bits of the results in evaluation, because the fast path is a single opaque operator. A
Tap observes such models in an extra pass, so that the model's own passes keep the fast path.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from qkeel.capture.calls import (
    FlexCall,
    HeadLayout,
    ScoresCall,
    Seen,
    fewest_keys,
    known_keys,
)
from qkeel.capture.eager import (
    EagerAttentionTracer,
    Lost,
    Scores,
    fused_layout,
    index_call,
    pad_arguments,
    products_of,
    scores_call,
)
from qkeel.capture.example import DescribedSiteHooks, ModuleCall, ModuleStack, tensors
from qkeel.capture.logsumexp import attention_with_logsumexp
from qkeel.capture.named_calls import SDPA as SDPA_FUNCTION
from qkeel.capture.named_calls import read_named_calls
from qkeel.capture.readers import (
    FLASH_AND_FLEX,
    SDPA,
    CallGeometry,
    CallObserver,
    UnreadError,
    observed_by,
    returned_rows,
    sdpa_arguments,
    unpacked,
)
from qkeel.errors import caution
from qkeel.functional.statistics import KernelRows
from qkeel.heads.site import AttentionSite, UnrecognizedAttention
from qkeel.heads.walk import names_of
from qkeel.nn import functional_attention
from qkeel.nn.attention import SpecModule
from qkeel.nn.scaled_dot_product import attention_with_rows
from qkeel.patching.modes import (
    ASKED,
    Args,
    Function,
    Guarded,
    Hook,
    Kwargs,
    function_name,
    in_vmap,
    leave,
    number_of_modes,
    push_mode,
    put_hooks,
    remove_hooks,
    suspended,
    take_off,
    transformed_now,
    unguarded,
)

PlainCall = tuple[Tensor, Tensor, float, bool]  # q, k, scale, causality
_SDPA = "scaled_dot_product_attention"
SDPA_ALONE: frozenset[Function] = frozenset({SDPA_FUNCTION})
# Per thread: whether an interceptor is running a computation of its own, which must not be reported as attention.
_READING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "qkeel_reading", default=False
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedCall:
    """An attention call of a forward pass.

    Args:
        frame: the module call that made the attention call.
        ordinal: the index of this call among the attention calls of that module call.
        how: the function in which it was observed, or "softmax" for hand-written attention.
        call: the call as it was read.
        layout: the dimensions of its scores in the module, if they are not [b h t s] by contract.
        added: in a probe, the products whose sum is the additive mask of a fused function.
        rows: the row statistics from its kernel, if requested.
        named: whether it is a call of F.scaled_dot_product_attention made through that name.
    """

    frame: ModuleCall
    ordinal: int
    how: str
    call: Seen
    layout: HeadLayout | None = None
    added: ScoresCall | None = None
    rows: KernelRows | None = None
    named: bool = False

    @property
    def name(self) -> str:
        """The name of the site, which is the module's name, with "#2" appended for its second call."""
        return name_of(self.frame, self.ordinal)

    @property
    def headless(self) -> bool:
        """True if it is one of several heads that are computed in separate calls."""
        return isinstance(self.call, ScoresCall) and self.call.headless


def _turns(function: Function, args: Args) -> bool:
    """True for the getter of x.mT or x.mH, which transposes x."""
    return args[0].ndim > 2 and function.__self__.__name__ in ("mT", "mH")  # type: ignore[attr-defined]


def _adds_zeros(args: Args, kwargs: Kwargs) -> bool:
    """True if pad(x, sizes, mode, value) adds zeros along a dimension other than the last."""
    given = pad_arguments(args, kwargs)
    sizes = given.get("pad")
    others = isinstance(sizes, (tuple, list)) and any(sizes[2:])
    return (
        others
        and given.get("mode", "constant") == "constant"
        and not given.get("value")
    )


def _configured_heads(module: nn.Module, args: Args) -> int:
    """The number of query heads in the configuration of one of transformers' attention modules with grouped heads, and
    0 for any other module and for calls with another number of queries than a group has heads.

    At a site that isn't known yet, nothing else tells the heads of a packed call from its tokens.
    """
    groups, q = getattr(module, "num_key_value_groups", None), args[0] if args else None
    if not (isinstance(q, Tensor) and q.ndim == 4 and q.shape[2] == groups):
        return 0
    try:
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    except Exception:  # a config with a number per layer raises an error of its own
        return 0
    return heads if isinstance(heads, int) else 0


def _in_own(frame: ModuleCall) -> bool:
    """True inside one of qkeel's modules. Their observers compute the statistics, so following them here would cause a
    wait."""
    return any(isinstance(f.module, SpecModule) for f in frame.line())


def name_of(frame: ModuleCall, ordinal: int) -> str:
    """The name of the site of attention call number `ordinal` (from 0) of a module."""
    return frame.name if ordinal == 0 else f"{frame.name}#{ordinal + 1}"


class CaptureMode(CallObserver):
    """A torch function mode that reports every attention call of `model` between `__enter__` and `__exit__`.

    It makes each call itself, once and with the original arguments, so that results are unchanged; `guard` protects
    what reads a call, never the call itself. A function that torch compiles while the mode is active is compiled as if
    it were off, and its calls are not seen.

    It observes torch's fused functions, products of two activations that reach a softmax, flex_attention, varlen_attn
    and the functions of flash-attn. Calls inside qkeel's own modules are left to the observers of these modules.

    Args:
        model: the model whose calls are observed.
        report: the function that is called with every attention call.
        probing: whether to keep the graph behind q and k.
        rows: whether functional_attention reports what its kernel computes for each row.
        described: the sites that are read according to their descriptions; nothing else is reported inside them.
        layouts: the dimensions of the scores at known sites, keyed by name.
        guard: the function through which every method here, and `report`, is called while the model runs.
        only_in: the modules in which to look for attention, keyed by name, each with the torch functions to observe
            there, or None for all functions. If `only_in` is None, the full pass is observed.
        names: the names of the model's parameters keyed by identity, if the caller has them.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[CapturedCall], None],
        *,
        probing: bool = False,
        rows: bool = False,
        described: Sequence[AttentionSite] = (),
        layouts: Mapping[str, HeadLayout] | None = None,
        guard: Guarded = unguarded,
        only_in: Mapping[str, tuple[nn.Module, frozenset[Function] | None]]
        | None = None,
        names: dict[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.guard = guard
        self.only: frozenset[Function] | None = (
            None  # the torch functions to observe now, or None for all
        )
        self._undo = ExitStack()
        self._is_named = False  # whether a call of SDPA through its name is running
        self._modes = (
            0  # how many modes there were when the call of a known module began
        )
        self._thread = threading.get_ident()
        self._has_mode = True
        self._running: list[
            frozenset[Function] | None
        ] = []  # the previous `only` of each call of a known module
        self.stack = ModuleStack(
            model, keep_inputs=probing, guard=guard, hooked=only_in is None
        )
        # Called with q, k, scale and causality of an SDPA call without a mask in a known module; returns whether no
        # further reading of the call is needed. None if calls are not read in this way.
        self.plain: (
            Callable[[ModuleCall, int, Tensor, Tensor, float, bool], bool] | None
        ) = None
        # Called with the logsumexps of an SDPA call's rows, where its kernel hands them out, and with q, k, scale and
        # causality unless there is a mask; returns whether no further reading of the call is needed.
        self.bounded: Callable[[str, Tensor, PlainCall | None], bool] | None = None
        self._lse: Tensor | None = None  # of the call that runs
        self.called_in: list[ModuleCall] = []  # the calls of the modules in `only_in`
        self._only_in = only_in
        self.probing = probing
        self.unread: list[UnrecognizedAttention] = []
        self.hidden: dict[str, None] = {}  # where attention would not be seen
        self._report, self._rows = report, rows
        self._described = {site.name for site in described}
        self._hooks = [
            DescribedSiteHooks(site, self._described_call, guard) for site in described
        ]
        self._layouts = layouts or {}
        # Numbers of query and key heads at known sites. At other sites, keys are compared to find repeated heads, which
        # waits for the device.
        self.key_heads: Mapping[str, tuple[int, int]] = {}
        self.values: dict[str, Tensor] | None = (
            None  # the values v by site, if requested
        )
        # Receives the calls of modules that choose keys; a probe keeps the first of each, with the tensors it was
        # computed from.
        self.index: Callable[[ModuleCall, ScoresCall], None] | None = None
        self.index_layouts: Callable[[str], HeadLayout | None] = lambda name: None
        self._chosen: dict[str, tuple[ModuleCall, ScoresCall, Scores | Lost]] = {}
        self._names = (names_of(model) if names is None else names) if probing else None
        self.handwritten = EagerAttentionTracer(
            lambda frame, call: self._saw(frame, "softmax", call),
            lambda frame: self._layouts.get(name_of(frame, frame.calls)),
            self._names,
            self._valued,
            self._chose,
        )

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._begin(undo)
            super().__enter__()
            undo.callback(super().__exit__, None, None, None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: Args = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func in ASKED
            or (self.only is not None and func not in self.only)
            or torch.compiler.is_compiling()
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._take(func, args, kwargs or {})

    def _take(self, func: Function, args: Args, kwargs: dict[str, Any]) -> Any:
        """Makes a call that may be of interest and reads it, in code that torch does not compile."""
        reads_plain = self.plain is not None or self.bounded is not None
        if self.only is not None and reads_plain and func is SDPA_FUNCTION:
            out = self.attend(args, kwargs)
            out = func(*args, **kwargs) if out is None else out
            if not _READING.get():
                self.guard(self._read_plain, func, args, kwargs, out)
            return out
        if not self.guard(self._minds, func, args, kwargs):
            return func(*args, **kwargs)
        rows = None
        if func is functional_attention and self.probing:
            # A probe follows gradient paths, which torch's operators have.
            out = SDPA_FUNCTION(*args, **kwargs)
        elif func is functional_attention and self._rows:
            out, rows = attention_with_rows(sdpa_arguments(args, kwargs))
        else:
            out = func(*args, **kwargs)
        self.guard(self._read_call, func, args, kwargs, out, rows)
        return out

    def attend(self, args: Args, kwargs: dict[str, Any]) -> Tensor | None:
        """Makes a call of SDPA by the operator that torch would choose, and keeps its logsumexp."""
        self._lse = None
        if self.bounded is None or self.only is None or not self._running:
            return None
        rows = attention_with_logsumexp(args, kwargs)
        if rows is None:
            return None
        out, self._lse = rows
        return out

    def _read_plain(
        self, func: Function, args: Args, kwargs: Kwargs, out: object
    ) -> None:
        """Reads a call of SDPA in a known module; a call without a mask is reported directly."""
        q, k, scale, top = None, None, kwargs.get("scale"), self.stack.top
        lse, self._lse = self._lse, None
        if 3 <= len(args) <= 5 and not transformed_now():
            q, k, mask = (
                args[0],
                args[1],
                args[3] if len(args) > 3 else kwargs.get("attn_mask"),
            )
            known = self.key_heads.get(
                top.name if top.calls == 0 else name_of(top, top.calls)
            )
            # In a packed call, which needs the other way, the query heads lie in the token dimension.
            packed = (
                known is not None and q.shape[1] != known[0] == q.shape[1] * q.shape[-2]
            )
            if (
                mask is None
                and known is not None
                and not packed
                and not self._described
            ):
                k = k if k.shape[1] in (known[1], 1) else known_keys(known, k)
                scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
                plain = (q, k, scale, bool(kwargs.get("is_causal", False)))
                if self._is_bounded(lse, known, plain) or (
                    self.plain is not None and self.plain(top, top.calls, *plain)
                ):
                    top.calls += 1
                    return
            elif (
                known is not None
                and not self._described
                and self._is_bounded(lse, known, None)
            ):
                top.calls += 1
                return
        self._read_sdpa(func, args, kwargs, out)

    def _is_bounded(
        self, lse: Tensor | None, heads: tuple[int, int], plain: PlainCall | None
    ) -> bool:
        """True if the logsumexps of a call's rows say all that is asked of it."""
        if lse is None or self.bounded is None or lse.shape[1] != heads[0]:
            return False
        top = self.stack.top
        return self.bounded(name_of(top, top.calls), lse, plain)

    def _begin(self, undo: ExitStack) -> None:
        for hooks in self._hooks:
            hooks.attach(undo)
        undo.callback(self.handwritten.tags.clear)
        if self._only_in is None:
            self.stack.attach(undo)
        undo.enter_context(observed_by(self))

    @property
    def whole(self) -> bool:
        """True if the full pass is observed."""
        return self._only_in is None

    def look(self, around: ExitStack) -> None:
        """Observes the calls of the pass that is about to run, until `around` is closed."""
        if self._only_in is None:
            read_named_calls(self, around)
            self.__enter__()
            around.callback(leave, self)
            return
        by_name = all([only == SDPA_ALONE for _, only in self._only_in.values()])
        self._has_mode = not (by_name and read_named_calls(self, around))
        # A mode costs one callback for each torch function, so the rest of the pass runs without it.
        if self._has_mode:
            self._begin(around)
        around.callback(self._leave_all)
        hooks: list[Hook] = []
        around.callback(remove_hooks, hooks)
        for name, (module, only) in self._only_in.items():
            hooks += put_hooks(
                module,
                functools.partial(self._enter_module, name, only),
                self._leave_module,
            )

    def _enter_module(
        self,
        name: str,
        only: frozenset[Function] | None,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(self.only)
            self.only = only
            self.guard(self._note_call, name, module, args, kwargs)
            if self._has_mode:
                push_mode(self)
            else:
                self._modes = number_of_modes()

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._take_off()
            top = self.stack.top
            if top.module is module and top.parent is not None:
                self.stack.top = top.parent

    def _leave_all(self) -> None:
        """Cleans up after an interrupt, which ends a pass without calling the hooks."""
        while self._running:
            self._take_off()

    def _take_off(self) -> None:
        if self._has_mode:
            take_off(self)
        self.only = self._running.pop()

    def before_named(self) -> None:
        self._is_named = True

    def after_named(self, args: Args, kwargs: dict[str, Any], out: object) -> None:
        self._is_named = False
        # A mode that was entered meanwhile, such as that of a remedy, may have changed the call. It is left out, and
        # the next pass is searched everywhere.
        if (
            not self._has_mode
            and self._running
            and number_of_modes() <= self._modes
            and not _READING.get()
        ):
            reads_plain = self.plain is not None or self.bounded is not None
            read = self._read_plain if reads_plain else self._read_sdpa
            self.guard(read, SDPA_FUNCTION, args, kwargs, out)

    def _read_sdpa(
        self, func: Function, args: Args, kwargs: Kwargs, out: object
    ) -> None:
        if self._minds(func, args, kwargs):
            self._read_call(func, args, kwargs, out, None)

    def _note_call(
        self, name: str, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> None:
        """Records that a call of a known module begins."""
        batch = 0
        if self.only is None:  # the layout of hand-written scores may depend on it
            batch = next((x.shape[0] for x in tensors((args, kwargs)) if x.ndim > 1), 0)
        inputs = tuple(tensors((args, kwargs))) if self.probing else ()
        self.stack.top = frame = ModuleCall(
            name=name, module=module, parent=self.stack.top, batch=batch, inputs=inputs
        )
        self.called_in.append(frame)

    def _minds(self, function: Function, args: Args, kwargs: Kwargs) -> bool:
        """False for functions that play no part in attention."""
        if _READING.get():
            return False
        name = function_name(function)
        if name == "get" and not _turns(function, args):
            return False
        if name == "pad" and _adds_zeros(args, kwargs):
            self.stack.top.pads = True
        if in_vmap():
            self.hidden["what runs inside torch.func.vmap"] = None
            return False
        return name in SDPA or self.handwritten.minds(name)

    def _read_call(
        self,
        function: Function,
        args: Args,
        kwargs: Kwargs,
        out: object,
        rows: KernelRows | None,
    ) -> None:
        """Reads what a function computed."""
        name = function_name(function)
        if name == "get":
            name, args = "transpose", (args[0], -2, -1)
        if not _in_own(self.stack.top):
            self.apart(lambda: self._read(name, args, kwargs, out, rows))

    @property
    def missed(self) -> list[UnrecognizedAttention]:
        """The attention layers of this pass that were observed but could not be read."""
        return [*self.handwritten.missed, *self.unread]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        token = _READING.set(True)
        try:
            with suspended(self):
                yield
        finally:
            _READING.reset(token)

    def _chose(self, frame: ModuleCall, tag: Scores | Lost, x: Tensor) -> None:
        if self._elsewhere(frame) or not (self.probing or self.index is not None):
            return
        known = self.index_layouts(frame.name)
        frame.indexes += 1
        try:
            call = index_call(tag, x, frame, known=known, names=self._names)
        except Exception as error:  # the attention after it is still observed
            caution(
                f"the scores by which {frame.name or 'the model itself'} chooses keys cannot be read: {error}"
            )
            return
        if self.index is not None:
            self.index(frame, call)
        else:
            self._chosen.setdefault(frame.name, (frame, call, tag))

    @property
    def chosen(self) -> list[tuple[ModuleCall, ScoresCall]]:
        """The scores in a probe by which keys were chosen, except those that are also the input of a softmax."""
        weighed = self.handwritten.weighed
        return [
            (frame, call)
            for frame, call, tag in self._chosen.values()
            if products_of(tag).isdisjoint(weighed)
        ]

    def called(self, name: str, arguments: Kwargs, out: object) -> None:
        self.apart(lambda: self._read_foreign(name, arguments, out))

    def not_observable(self, name: str, error: Exception) -> None:
        self.hidden[f"{name}, which can't be watched ({error})"] = None

    def apart(self, read: Callable[[], None]) -> None:
        """Calls `read` unobserved by this mode, with gradients if a probe's pass has them."""
        # Gradients are enabled only if q and k will be traced back to the weights.
        with (
            self.suspended(),
            torch.set_grad_enabled(self.probing and torch.is_grad_enabled()),
        ):
            read()

    def _read(
        self,
        name: str,
        args: Args,
        kwargs: Kwargs,
        out: object,
        rows: KernelRows | None = None,
    ) -> None:
        top = self.stack.top
        fused = SDPA.get(name)
        if fused is None:
            self.handwritten.follow(name, top, args, kwargs, out)
        if fused is None or self._elsewhere(top):
            return
        site = name_of(top, top.calls)
        known = self.key_heads.get(site)
        heads = _configured_heads(top.module, args) if known is None else known[0]
        packed = (
            unpacked(sdpa_arguments(args, kwargs), heads)
            if name == _SDPA and heads
            else None
        )
        if packed is not None:
            args, kwargs = (), packed
            rows = rows and KernelRows(*(x.reshape(x.shape[0], heads, 1) for x in rows))
        geometry = CallGeometry(
            lambda q, k: fused_layout(
                q, k, top, known=self._layouts.get(site), names=self._names
            ),
            fewest_keys if known is None else functools.partial(known_keys, known),
        )
        call = fused(args, kwargs, geometry)
        added = self._added(name, top, args, kwargs, geometry.used)
        reported = self._saw(top, name, call, geometry.used, added, rows=rows)
        if reported is not None and name == _SDPA:
            self._valued(reported, sdpa_arguments(args, kwargs)["value"])

    def _valued(self, site: str, values: Tensor) -> None:
        if self.values is not None:
            self.values.setdefault(site, values)

    def _added(
        self,
        name: str,
        top: ModuleCall,
        args: Args,
        kwargs: Kwargs,
        how: HeadLayout | None,
    ) -> ScoresCall | None:
        """The products whose sum is the mask of a fused function, such as positions that are multiplied by queries."""
        if self._names is None or name != _SDPA:
            return None
        mask = sdpa_arguments(args, kwargs)["attn_mask"]
        tag = self.handwritten.tags.get(mask)
        if not isinstance(tag, Scores) or not isinstance(mask, Tensor) or mask.ndim < 3:
            return None
        how = (
            HeadLayout(groups=tuple("bhts"), sizes=(mask.shape[1],))
            if how is None and mask.ndim == 4
            else how
        )
        return scores_call(
            tag, mask, mask.ndim - 1, top, known=how, names=self._names, alone=False
        )

    def _read_foreign(self, name: str, arguments: Kwargs, out: object) -> None:
        top = self.stack.top
        if self._elsewhere(top):
            return
        try:
            call = FLASH_AND_FLEX[name](arguments)
        except UnreadError as error:
            reason = f"{name} is called with {error}, whose effect is not known"
            self.unread.append(
                UnrecognizedAttention(module=top.name, operation=name, reason=reason)
            )
            return
        if isinstance(call, FlexCall):
            call = dataclasses.replace(call, largest=returned_rows(out)[1])
        self._saw(top, name, call)

    def _saw(
        self,
        frame: ModuleCall,
        how: str,
        call: Seen,
        layout: HeadLayout | None = None,
        added: ScoresCall | None = None,
        *,
        rows: KernelRows | None = None,
    ) -> str | None:
        if self._elsewhere(frame):
            return None
        ordinal, frame.calls = frame.calls, frame.calls + 1
        layout = call.layout if isinstance(call, ScoresCall) else layout
        self._report(
            CapturedCall(
                frame=frame,
                ordinal=ordinal,
                how=how,
                call=call,
                layout=layout,
                added=added,
                rows=rows,
                named=self._is_named,
            )
        )
        return name_of(frame, ordinal)

    def _described_call(self, site: AttentionSite, read: Callable[[], Seen]) -> None:
        def report() -> None:
            frame = ModuleCall(
                name=site.name, module=site.module, parent=self.stack.top
            )
            self._report(
                CapturedCall(frame=frame, ordinal=0, how="description", call=read())
            )

        self.apart(report)

    def _elsewhere(self, frame: ModuleCall) -> bool:
        """True inside a module whose attention is reported in another way."""
        return _in_own(frame) or any(f.name in self._described for f in frame.line())
