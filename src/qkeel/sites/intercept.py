"""Sees every attention that a forward pass computes, whatever the model is called.

A torch function mode, so `torch.nn.TransformerEncoder`'s eval fast path is off while it is active: torch turns it
off under any function mode. The results then are those of `torch.backends.mha.set_fastpath_enabled(False)`, which
differ from the fast path's by rounding; training never takes the fast path. Of visibility and the last bit in
evaluation, visibility was chosen here: inside the fast path one opaque operator would have to be read apart. A Tap
looks at such models in a pass of its own, so that theirs keep both.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from qkeel.functional.stats import LogitStats, merge
from qkeel.kernels.statistics import logit_maxima, logit_stats
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.nn.core import SpecModule
from qkeel.sites.below import Below, bare, in_vmap
from qkeel.sites.blockwise import PackedCall
from qkeel.sites.described import Listening
from qkeel.sites.doors import Watcher, watched
from qkeel.sites.fused import FUSED, Seen
from qkeel.sites.handwritten import Handwritten
from qkeel.sites.plain import PLAIN, UnreadError
from qkeel.sites.scores import ScoresCall, scores_maxima, scores_stats
from qkeel.sites.site import AttentionSite
from qkeel.sites.stack import Frame, ModuleStack

# Per thread: whether an interceptor computes something itself, which is nobody's attention.
_LOOKING: contextvars.ContextVar[bool] = contextvars.ContextVar("qkeel_looking", default=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sighting:
    """One attention call of a forward pass. `ordinal`: which one of those its module made in this call of it.

    `how` is the function it was seen in ("softmax" for a hand-written one); `below` says that only an Interceptor
    with dispatch=True sees it.
    """

    frame: Frame
    ordinal: int
    how: str
    call: Seen
    below: bool = False

    @property
    def name(self) -> str:
        """The site's name: that of the module, "#2" appended for its second call."""
        return self.frame.name if self.ordinal == 0 else f"{self.frame.name}#{self.ordinal + 1}"

    @property
    def headless(self) -> bool:
        """Whether it is one of several heads that are computed one by one."""
        return isinstance(self.call, ScoresCall) and self.call.headless


def statistics(call: Seen, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Exact statistics of a seen call, in its own precision even under autocast."""
    device = call.logits.device if isinstance(call, ScoresCall) else call.q.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if isinstance(call, ScoresCall):
            return scores_stats(call, threshold)
        parts = call.parts() if isinstance(call, PackedCall) else [call]
        return reduce(merge, (logit_stats(part, threshold) for part in parts))


def maxima(call: Seen) -> LogitStats:
    """The max_logit and min_logit of `statistics`, the rest as if nothing was seen: for less than half its cost."""
    logits = call.logits if isinstance(call, ScoresCall) else call.q
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        if isinstance(call, ScoresCall):
            found = [scores_maxima(call)]
        else:
            found = [logit_maxima(part) for part in (call.parts() if isinstance(call, PackedCall) else [call])]
        top, low = (reduce(pick, ends) for pick, ends in zip((torch.maximum, torch.minimum), zip(*found)))
        nothing = LogitStats.empty(len(top), len(top), top)
        return dataclasses.replace(nothing, max_logit=top, min_logit=low)


class Interceptor(Watcher):
    """Reports every attention call of `model` between `__enter__` and `__exit__`.

    Seen are torch's fused functions, products of two activations that reach a softmax, and, at their doors,
    flex_attention, varlen_attn and flash-attn's functions. With `dispatch` also what torch.jit.script and
    torch.func.vmap hide from a function mode, at the price of a callback per operator. `described` sites are read as
    their descriptions say, and nothing else is reported inside them.

    Calls inside qkeel's own modules are left to their observers. `probing` keeps the graph behind q and k. An
    exception in here, or in `report`, goes to `on_fault` if there is one: never into the model's forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[Sighting], None],
        *,
        probing: bool = False,
        dispatch: bool = False,
        described: Sequence[AttentionSite] = (),
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()
        self.stack = ModuleStack(model, keep_inputs=probing, on_fault=on_fault)
        self.probing = probing
        self.unread: collections.Counter[str] = collections.Counter()
        self._on_fault = on_fault
        self._report = report
        self._below = Below(self._look_below) if dispatch else None
        self._inside = 0
        self._is_below = False
        self._described = {site.name for site in described}
        self._listening = [Listening(site, self._heard) for site in described]
        self._undo = ExitStack()
        self.handwritten = Handwritten(lambda frame, call: self._saw(frame, "softmax", call))

    def __enter__(self) -> Interceptor:
        with ExitStack() as undo:
            for listening in self._listening:
                undo.enter_context(listening)
            undo.callback(self.handwritten.tags.clear)
            undo.enter_context(self.stack)
            undo.enter_context(watched(self))
            if self._below is not None:
                undo.enter_context(self._below)
            super().__enter__()
            undo.callback(super().__exit__, None, None, None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or _LOOKING.get():
            return func(*args, **kwargs)
        name = bare(func)
        if name == "get":
            return func(*args, **kwargs)
        if in_vmap():
            if self._below is None:
                self.unread["torch.func.vmap"] += 1
            return func(*args, **kwargs)
        self._inside += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside -= 1
        if name in FUSED or self.handwritten.minds(name):
            self._guarded(self._look, name, args, kwargs, out)
        return out

    @contextmanager
    def aside(self) -> Iterator[None]:
        with ExitStack() as undo:
            if _get_current_function_mode() is self:
                _pop_mode()
                undo.callback(_push_mode, self)
            if self._below is not None and _get_current_dispatch_mode() is self._below:
                undo.enter_context(_pop_mode_temporarily())
            yield

    def passed(self, name: str, arguments: dict[str, Any]) -> None:
        self._guarded(self._read, name, arguments)

    def missed(self, name: str, error: Exception) -> None:
        self.unread[f"{name}, which can't be watched ({error})"] += 1

    def _guarded(self, look: Callable[..., None], *args: Any) -> None:
        token = _LOOKING.set(True)
        try:
            # With gradients only where someone will walk from q and k back to the weights.
            with torch.set_grad_enabled(self.probing and torch.is_grad_enabled()):
                look(*args)
        except Exception as error:
            if self._on_fault is None:
                raise
            self._on_fault(error)
        finally:
            _LOOKING.reset(token)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        top = self.stack.top
        fused = FUSED.get(name)
        if fused is None:
            self.handwritten.follow(name, top, args, kwargs, out)
        elif not self._elsewhere(top):
            self._saw(top, name, fused(top, args, kwargs))

    def _look_below(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._inside or _LOOKING.get():
            return
        self._is_below = True
        try:
            self._guarded(self._look, name, args, kwargs, out)
        finally:
            self._is_below = False

    def _read(self, name: str, arguments: dict[str, Any]) -> None:
        top = self.stack.top
        if self._elsewhere(top):
            return
        try:
            call = PLAIN[name](arguments)
        except UnreadError as error:
            self.unread[f"{name} with {error}"] += 1
            return
        self._saw(top, name, call)

    def _saw(self, frame: Frame, how: str, call: Seen) -> None:
        if self._elsewhere(frame):
            return
        ordinal, frame.calls = frame.calls, frame.calls + 1
        self._report(Sighting(frame=frame, ordinal=ordinal, how=how, call=call, below=self._is_below))

    def _heard(self, site: AttentionSite, read: Callable[[], Seen]) -> None:
        def look() -> None:
            frame = Frame(name=site.name, module=site.module, parent=self.stack.top)
            self._report(Sighting(frame=frame, ordinal=0, how="description", call=read()))

        self._guarded(look)

    def _elsewhere(self, frame: Frame) -> bool:
        """Whether this is the inside of an attention that is reported otherwise."""
        return any(isinstance(f.module, SpecModule) or f.name in self._described for f in frame.line())
