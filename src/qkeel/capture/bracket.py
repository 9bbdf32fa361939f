"""A mode that bounds the largest attention logit of a forward pass, at next to no cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from qkeel.capture.foreign import LOGSUMEXPS, CallObserver, observed_by
from qkeel.capture.readers import FLASH_AND_FLEX, UnreadError, returned_rows, sdpa_arguments
from qkeel.kernels.native.operator import is_plain
from qkeel.kernels.stats.logsumexp import fused_with_logsumexp
from qkeel.nn import functional_attention
from qkeel.nn.scaled_dot_product import attention_with_logsumexp
from qkeel.patching.compiler_state import in_function_transform
from qkeel.patching.guard import Guarded, unguarded
from qkeel.patching.modes import Args, Function, Kwargs, function_name, suspended
from qkeel.patching.private_operators import flash_on_cpu, kernel_choice, operator_name
from qkeel.spec import AttentionCall
from qkeel.spec.band_call import BandCall

_GPU = "cuda"
_OWN = "qkeel_native::attention"  # returns its logsumexp as well
Instead = Callable[[], tuple[Tensor, Tensor | None]]


class BracketMode(CallObserver):
    """While it is entered, `bound` is at least the largest logit of every attention call seen, capped where it is.

    F.scaled_dot_product_attention: torch's fused kernels compute row logsumexps anyway, so the kernel that it would
    choose is called itself, which returns them; output and gradients are the same bits. lse - ln n <= max <= lse over n
    keys. qkeel's compiled attention returns them too, and so does functional_attention. Where no fused kernel is
    chosen, with dropout, on a GPU with a mask, and on a CPU under autocast, which casts what enters it:
    scale·max|q|·max|k|, O(T d). flash-attn's functions and torch's varlen_attn are asked for the logsumexps that they
    compute anyway; with dropout, and where these are padded, the same bound. flex_attention: the logsumexps or maxima
    that its caller asked for, as transformers does on a GPU (to ask for more would compile it again); else the same
    bound, with a score_mod none. Softmax over rows of scores: their maximum. Attention inside
    torch.nn.MultiheadAttention and compiled code is not seen, nor is what torch.func transforms. `bound` is None until
    something was.
    """

    logsumexps = True

    def __init__(self, guard: Guarded = unguarded) -> None:
        super().__init__(guard)
        self._found: list[Tensor] = []  # the largest of each call

    def begin(self, undo: ExitStack) -> None:
        undo.enter_context(observed_by(self))

    def suspended(self) -> AbstractContextManager[None]:
        return suspended(self)

    def not_observable(self, name: str, error: Exception) -> None:
        """Its calls bound nothing, as those of compiled code don't."""

    @torch.no_grad()
    def called(self, name: str, arguments: Kwargs, out: object) -> None:
        """Notes what bounds the logits of a call of flex_attention or of flash-attn's functions."""
        if not isinstance(out, Tensor | tuple) or not (out[0] if isinstance(out, tuple) else out).numel():
            return
        if name == "flex_attention":
            lse, largest = returned_rows(out)
            rows = lse if largest is None else largest
            if rows is not None:
                self._found.append(rows.detach().amax())
            elif arguments["score_mod"] is None:
                self._found.append(_norm_bound(arguments["query"], arguments["key"], arguments["scale"]))
            return
        try:
            call = FLASH_AND_FLEX[name](arguments) if name in LOGSUMEXPS else None
        except UnreadError:
            return
        if call is None:
            return
        lse = _by_row(out[1], call.q.shape[2]) if isinstance(out, tuple) and len(out) > 1 else None
        if lse is None:
            scale = call.spec.factor(call.pos_q, call.q.shape[-1], {}, torch.float32)
            self._found.append(_norm_bound(call.q, call.k, float(scale)))
            return
        # Rows that see no key have +inf there, -inf or what was in memory before.
        seen = call.high > call.low if isinstance(call, BandCall) else _some_key(call)
        self._found.append((lse if seen is None else lse.where(seen, -torch.inf)).amax())

    @property
    def bound(self) -> Tensor | None:
        """The largest of all calls so far: two launches, whatever their number."""
        if not self._found:
            return None
        device = self._found[0].device  # parts of a model may be on others
        return torch.stack([x.to(device, torch.float32, non_blocking=True) for x in self._found]).amax()

    def wanted(self, function: Function, args: Args, kwargs: Kwargs) -> bool | str | Instead:
        """Returns the kernel under a call of SDPA, where it returns what bounds the logits."""
        if any(isinstance(x, Tensor) and not x.numel() for x in args):
            return False  # no rows, as of an expert that got no tokens
        if in_function_transform():
            return False  # tensors inside torch.func's transforms mean nothing outside
        name = function_name(function)
        given = sdpa_arguments(args, kwargs) if name == "scaled_dot_product_attention" else {}
        if given and _on_one_gpu(given):
            return functools.partial(_on_gpu, function, given)
        if function is functional_attention:
            return functools.partial(attention_with_logsumexp, given)
        if not given:
            return name == "softmax" or operator_name(function) == _OWN
        if not _flash_on_cpu(given):
            return True
        q, k, v, causal = given["query"], given["key"], given["value"], bool(given["is_causal"])
        return functools.partial(flash_on_cpu, q, k, v, 0.0, causal, attn_mask=given["attn_mask"], scale=given["scale"])

    @torch.no_grad()
    def saw(self, function: Function, args: Args, kwargs: Kwargs, out: Any, more: Tensor | None) -> None:
        """Notes what bounds the logits of the call; `more` are logsumexps."""
        if function_name(function) == "scaled_dot_product_attention":
            given = sdpa_arguments(args, kwargs)
            new = _norm_bound(given["query"], given["key"], given["scale"]) if more is None else more.detach().amax()
        elif operator_name(function) == _OWN:
            new = out[1].detach().amax()
        elif args and isinstance(args[0], Tensor) and args[0].ndim > 2:
            new = args[0].detach().amax()
        else:
            return
        self._found.append(new)


def _by_row(lse: object, t: int) -> Tensor | None:
    """Logsumexps [... t] of [... t] or [t h]; None where those of packed sequences are padded, as in old versions."""
    if not isinstance(lse, Tensor) or t not in (lse.shape[-1], lse.shape[0]):
        return None
    return lse.detach() if lse.shape[-1] == t else lse.detach().mT


def _some_key(call: AttentionCall) -> Tensor | None:
    """True for the rows [1 t] of a call without window that see a key at all; None where all do."""
    return call.pos_q >= 0 if call.causal and call.q.shape[2] > call.k.shape[2] else None


def _on_one_gpu(given: Kwargs) -> bool:
    """True if the fused operators of a GPU may take these arguments: dense, without mask and dropout."""
    qkv = [given[name] for name in ("query", "key", "value")]
    if given["attn_mask"] is not None or given["dropout_p"]:
        return False
    return all(is_plain(x) and x.ndim == 4 and x.device.type == _GPU for x in qkv)


def _on_gpu(function: Function, given: Kwargs) -> tuple[Tensor, Tensor | None]:
    """SDPA's output, cast as autocast casts its inputs; and the logsumexps where a kernel returns them."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if torch.is_autocast_enabled(_GPU):
        kind = torch.get_autocast_dtype(_GPU)
        q, k, v = (x if x.dtype == torch.float64 else x.to(kind) for x in (q, k, v))
    same = q.shape[1] == k.shape[1] or given["enable_gqa"]
    pair = fused_with_logsumexp(q, k, v, bool(given["is_causal"]), given["scale"]) if same else None
    return (function(**given), None) if pair is None else pair


def _flash_on_cpu(given: Kwargs) -> bool:
    """True if SDPA would run torch's CPU flash kernel on these arguments."""
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    if not all(is_plain(x) and x.device.type == "cpu" for x in (q, k, v)):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if given["dropout_p"] or (mask is not None and (mask.dtype == torch.bool or mask.requires_grad)):
        return False  # SDPA turns a boolean mask into an additive one of its own
    choice = kernel_choice(
        q, k, v, mask, 0.0, bool(given["is_causal"]), scale=given["scale"], enable_gqa=bool(given["enable_gqa"])
    )
    return choice == SDPBackend.FLASH_ATTENTION.value


def _norm_bound(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """The bound scale·max|q|·max|k|: Cauchy–Schwarz."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    return q.detach().float().norm(dim=-1).amax() * k.detach().float().norm(dim=-1).amax() * scale
