"""A function that stands for F.scaled_dot_product_attention under its name, while a pass is observed or bounds are asked.

Nearly all models look the function up in torch.nn.functional each time that they call it. Observers read such calls
here, and need no mode, through which every torch function around the call would pass as well.

While somebody asks for bounds, torch's compiler puts the function into the graph as an operator of ours. The operator
calls the one that torch would choose and notes its largest logsumexp, so a compiled pass needs no second one as long as
no logit can be over a threshold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.capture.logsumexp import attention_with_logsumexp
from qkeel.capture.readers import (
    SDPA,
    CallObserver,
    is_mask_object,
    observers,
    sdpa_arguments,
)
from qkeel.errors import caution
from qkeel.patching.modes import number_of_modes, only_reading_modes

_ATEN = torch.ops.aten
_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
_LOCK = threading.RLock()
# Those for whom the function stands under its name, and those of them who ask for bounds.
_holders, _users = [0], [0]


class _Notes(threading.local):
    """The largest logsumexps of this thread's pass, in the order of its calls; None while nobody asks.

    What gradient checkpointing repeats runs in the backward pass, when nobody asks any more."""

    tops: list[Tensor] | None = None


_notes = _Notes()
_LIBRARY = torch.library.Library("qkeel_bounds", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, bool is_causal, Tensor? mask, float? scale) -> (Tensor, Tensor)"
)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    out, lse = _FORWARD(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    if _notes.tops is not None:
        _notes.tops.append(lse.amax())
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, mask, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, above: Tensor, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors
    gradients = _BACKWARD(
        above, q, k, v, out, lse, 0.0, ctx.is_causal, attn_mask=mask, scale=ctx.scale
    )
    return *gradients, None, None, None


_LIBRARY.impl("attend", _attend, "CPU")
torch.library.register_fake("qkeel_bounds::attend", lib=_LIBRARY)(
    lambda q, k, v, is_causal, mask, scale: _FORWARD(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
)
torch.library.register_autograd(
    "qkeel_bounds::attend", _gradients, setup_context=_save, lib=_LIBRARY
)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Stands for F.scaled_dot_product_attention under its name, with the same bits; see the module's description."""
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    is_object = mask is not None and is_mask_object(mask)
    if torch.compiler.is_compiling():
        # A mode may make another call of this one, as remedies do that change it, and sees no operator of qkeel's.
        if number_of_modes():
            return SDPA(*args, **kwargs)
        if not is_object:
            return _in_graph(args, kwargs)
        # As torch would dispatch the call; the mask object compares the function with the one that stands under its
        # name.
        public, kind = F.scaled_dot_product_attention, type(mask)
        return kind.__torch_function__(public, (kind,), args, kwargs)  # type: ignore[union-attr]
    call = _with_mask_object if is_object else SDPA
    present = observers()
    if not present and _notes.tops is None:
        return call(*args, **kwargs)
    return _observed(present, call, args, kwargs)


def _with_mask_object(*args: Any, **kwargs: Any) -> Any:
    """Makes a call whose mask compares the function with what is stored under its name."""
    # No other thread puts the stand-in back meanwhile.
    with _LOCK:
        public = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = SDPA
        try:
            return SDPA(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = public


def _in_graph(args: Any, kwargs: Any) -> Any:
    """Makes a call in code that torch compiles."""
    arguments = sdpa_arguments(args, kwargs)
    # torch guards on this number, so a graph with the operator is not used any more once nobody asks.
    if not _users[0] or torch.compiler.is_exporting() or not _is_fused(**arguments):
        return SDPA(*args, **kwargs)
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    mask = arguments["attn_mask"]
    if mask is not None:  # as the public function converts it
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.qkeel_bounds.attend(
        q, k, v, arguments["is_causal"], mask, arguments["scale"]
    )[0]


def _observed(
    present: tuple[CallObserver, ...],
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Makes a call and hands it to the observers that read names here; the mode of the others sees it."""
    # A mode of anybody else may make another call of this one, which only a mode below it sees.
    if number_of_modes() and not only_reading_modes():
        return call(*args, **kwargs)
    readers: list[CallObserver] = []
    is_bounded = _notes.tops is not None
    for observer in present:
        observer.by_name = True
        if observer.reads_names:
            readers.append(observer)
            is_bounded = is_bounded or observer.wants_logsumexp
    try:
        # A subclass of Tensor may make the call by calling the function again.
        for observer in readers:
            observer.reads_names = False
        rows = None
        if is_bounded and call is SDPA:
            rows = attention_with_logsumexp(args, kwargs)
        out, lse = (call(*args, **kwargs), None) if rows is None else rows
        if _notes.tops is not None and lse is not None:
            _notes.tops.append(lse.detach().amax())
        for observer in readers:
            observer.guard(observer.named_call, args, kwargs, lse)
        return out
    finally:
        for observer in readers:
            observer.reads_names = True
        for observer in present:
            observer.by_name = False


# What reads the function's documentation, and TorchScript, which compiles no variable arguments, find torch's own.
scaled_dot_product_attention.__doc__ = SDPA.__doc__
torch.jit._builtins._register_builtin(  # type: ignore[attr-defined]
    scaled_dot_product_attention, "aten::scaled_dot_product_attention"
)


def _is_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """True if torch chooses its fused operator for a call on a CPU, and no mask adds numbers to the logits.

    `torch._fused_sdp_choice` says the same of a call that is not compiled."""
    inputs = (query, key, value)
    if any([type(x) not in (Tensor, nn.Parameter) or not x.is_cpu for x in inputs]):
        return False
    if any([x.dim() != 4 or x.stride(-1) != 1 or x.numel() == 0 for x in inputs]):
        return False
    if attn_mask is not None and (
        attn_mask.dtype != torch.bool or attn_mask.dim() not in (2, 4)
    ):
        return False
    q, k, v = (x.shape for x in inputs)
    return (
        q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (q[1] == k[1] or (enable_gqa and q[1] % k[1] == 0))
        and q[3] == k[3] == v[3]
        and dropout_p == 0.0
        and not torch.is_autocast_enabled("cpu")
    )


def hold_name() -> bool:
    """Puts the function under its name, until as many calls of `release_name`.

    False, with nothing done, if somebody else's function is there, which may do more than torch's."""
    with _LOCK:
        if F.scaled_dot_product_attention not in (SDPA, scaled_dot_product_attention):
            return False
        # torch lists once what modes can change, by name; the compiler hides from modes what is not in that list.
        torch.overrides.get_overridable_functions()
        _holders[0] += 1
        F.scaled_dot_product_attention = scaled_dot_product_attention
        return True


def release_name() -> None:
    """Gives torch's function its name back when nobody holds it any more."""
    with _LOCK:
        _holders[0] -= 1
        public = F.scaled_dot_product_attention
        if not _holders[0] and public is scaled_dot_product_attention:
            F.scaled_dot_product_attention = SDPA


def hold_name_in(around: ExitStack) -> bool:
    """Puts the function under its name until `around` is closed. Returns False if somebody else's stands there instead,
    or if a mode of theirs may change what a call is."""
    is_held = hold_name()
    if is_held:
        around.callback(release_name)
    return is_held and only_reading_modes()


class CompiledBounds:
    """Asks compiled passes for a bound on their logits, until `remove`.

    Attributes:
        calls: the attention calls of a pass that was observed. As many have to note their logsumexps, or there is no
            bound: a graph from before, another device, dropout. None before the first observed pass.
    """

    def __init__(self) -> None:
        self.calls: int | None = None
        self._passes = 0
        self._outer: list[Tensor] | None = None
        self._is_running = False
        self._is_active = hold_name()
        if self._is_active:
            with _LOCK:
                _users[0] += 1
        else:
            caution(
                "F.scaled_dot_product_attention is not torch's own function here, so logits in compiled code are "
                "computed in an additional pass"
            )

    def begin(self) -> bool:
        """Called before a compiled pass; False if it has to be observed instead, as passes 1, 2, 4, 8, … are, in which
        attention may appear that was not seen before."""
        if self._is_running:
            self.end()  # an interrupt ended the pass before
        self._passes += 1
        is_searched = self._passes & (self._passes - 1) == 0
        if not self._is_active or self.calls is None or is_searched:
            return False
        self._outer, _notes.tops = _notes.tops, []
        self._is_running = True
        return True

    @property
    def running(self) -> bool:
        """True between `begin` and `end` of a pass."""
        return self._is_running

    def end(self) -> float | None:
        """Called after the pass: the largest logsumexp of its rows in nats, or None if a call has noted none."""
        tops, _notes.tops = _notes.tops, self._outer
        self._outer, self._is_running = None, False
        if not tops or len(tops) != self.calls:
            return None
        return float(torch.stack([top.double() for top in tops]).amax())

    def remove(self) -> None:
        """Gives torch's function its name back. Graphs with the operator are compiled again without it."""
        if not self._is_active:
            return
        if self._is_running:
            self.end()
        self._is_active = False
        with _LOCK:
            _users[0] -= 1
        release_name()
