"""A mode that bounds the largest attention logit of a forward pass, at next to no cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from qkeel.patching.compiler_state import in_function_transform
from qkeel.patching.modes import Args, Function, FunctionMode, Kwargs, function_name
from qkeel.patching.private_operators import flash_on_cpu, kernel_choice, operator_name
from qkeel.sites.calls.sdpa_arguments import sdpa_arguments

_OWN = "qkeel_native::attention"  # returns its logsumexp as well


class BracketMode(FunctionMode):
    """While it is entered, `bound` is at least the largest logit of every attention call seen, capped where it is.

    F.scaled_dot_product_attention on the CPU: its kernel computes row logsumexps anyway, so the kernel itself is
    called, which returns them; output and gradients are the same bits. lse - ln n <= max <= lse over n keys. qkeel's
    compiled attention returns them too. Where another kernel would be chosen (dropout, a GPU), and under autocast,
    which casts what enters it: scale·max|q|·max|k|, O(T d). Softmax over rows of scores: their maximum. Attention
    inside torch.nn.MultiheadAttention, flex_attention and compiled code is not seen, nor is what torch.func transforms.
    `bound` is None until something was.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self.bound: Tensor | None = None
        self._on_fault = on_fault

    def call(self, function: Function, args: Args, kwargs: Kwargs) -> object:
        """Calls the function, or the kernel under it, and notes what bounds its logits."""
        if in_function_transform():
            return function(*args, **kwargs)  # tensors inside torch.func's transforms mean nothing outside
        name = function_name(function)
        if name == "scaled_dot_product_attention":
            return self._sdpa(function, args, kwargs)
        out = function(*args, **kwargs)
        if operator_name(function) == _OWN:
            self._safely(lambda: out[1].detach().amax())
        if name == "softmax" and args and isinstance(args[0], Tensor) and args[0].ndim > 2:
            self._safely(lambda: args[0].detach().amax())
        return out

    def _sdpa(self, function: Function, args: Args, kwargs: Kwargs) -> Tensor:
        given = sdpa_arguments(args, kwargs)
        if not _flash_on_cpu(given):
            self._safely(lambda: _norm_bound(given["query"], given["key"], given["scale"]))
            return function(*args, **kwargs)
        out, lse = flash_on_cpu(
            given["query"],
            given["key"],
            given["value"],
            0.0,
            bool(given["is_causal"]),
            attn_mask=given["attn_mask"],
            scale=given["scale"],
        )
        self._safely(lambda: lse.amax())
        return out

    def _safely(self, measure: Callable[[], Tensor]) -> None:
        try:
            with torch.no_grad():
                new = measure().to(torch.float32)
                self.bound = new if self.bound is None else torch.maximum(self.bound, new)
        except Exception as error:
            self._on_fault(error)


def _flash_on_cpu(given: Kwargs) -> bool:
    """True if SDPA would run torch's CPU flash kernel on these arguments."""
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    if not all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in (q, k, v)):
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
