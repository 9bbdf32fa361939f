"""Sees every attention that a forward pass computes, whatever the model is called.

A torch function mode, so `torch.nn.TransformerEncoder`'s eval fast path is off while it is active: torch turns it
off under any function mode. The results then are those of `torch.backends.mha.set_fastpath_enabled(False)`, which
differ from the fast path's by rounding; training never takes the fast path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qkeel.functional.stats import LogitStats
from qkeel.kernels.statistics import logit_stats
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.nn.core import SpecModule
from qkeel.sites.fused import FUSED, Seen
from qkeel.sites.handwritten import Handwritten
from qkeel.sites.scores import ScoresCall, scores_stats
from qkeel.sites.stack import Frame, ModuleStack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sighting:
    """One attention call of a forward pass. `ordinal`: which one of those its module made in this call of it."""

    frame: Frame
    ordinal: int
    how: str
    call: Seen

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
        return scores_stats(call, threshold) if isinstance(call, ScoresCall) else logit_stats(call, threshold)


class Interceptor(TorchFunctionMode):
    """Reports every attention call of `model` between `__enter__` and `__exit__`.

    Calls inside qkeel's own modules are left to their observers. `probing` keeps the graph behind q and k. An
    exception in here, or in `report`, goes to `on_fault` if there is one: never into the model's forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[Sighting], None],
        *,
        probing: bool = False,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()
        self.stack = ModuleStack(model, keep_inputs=probing)
        self._probing = probing
        self._on_fault = on_fault
        self._report = report
        self.handwritten = Handwritten(lambda frame, call: self._saw(frame, "softmax", call))

    def __enter__(self) -> Interceptor:
        self.stack.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.stack.__exit__()
        self.handwritten.tags.clear()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__" and not torch.compiler.is_compiling():
            try:
                # With gradients only where someone will walk from q and k back to the weights.
                with torch.set_grad_enabled(self._probing and torch.is_grad_enabled()):
                    self._look(name.strip("_"), args, kwargs, out)
            except Exception as error:
                if self._on_fault is None:
                    raise
                self._on_fault(error)
        return out

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        top = self.stack.top
        fused = FUSED.get(name)
        if fused is None:
            self.handwritten.follow(name, top, args, kwargs, out)
        elif not _own(top):
            self._saw(top, name, fused(top, args, kwargs))

    def _saw(self, frame: Frame, how: str, call: Seen) -> None:
        if _own(frame):
            return
        ordinal, frame.calls = frame.calls, frame.calls + 1
        self._report(Sighting(frame=frame, ordinal=ordinal, how=how, call=call))


def _own(frame: Frame) -> bool:
    return any(isinstance(f.module, SpecModule) for f in frame.line())
