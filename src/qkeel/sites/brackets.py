"""A bound on the largest attention logit of a forward pass, at next to no cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from qkeel.sites.arguments import sdpa_arguments

_OWN = "qkeel_native::attention"  # hands its logsumexp out as well


class BracketMode(TorchFunctionMode):
    """While it is entered, `bound` is at least the largest logit of every attention call seen, capped where it is.

    F.scaled_dot_product_attention on the CPU: its kernel computes row logsumexps anyway, so it is called one level
    below, where it hands them out; output and gradients are the same bits. lse - ln n <= max <= lse over n keys. So
    does qkeel's compiled attention. Where another kernel would be chosen (dropout, a GPU), and under autocast, which
    casts what enters it: scale·max|q|·max|k|, O(T d). Softmax over rows of scores: their maximum. Attention inside
    torch.nn.MultiheadAttention, flex_attention and compiled code is not seen, nor is what torch.func transforms.
    `bound` is None until something was.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self.bound: Tensor | None = None
        self._on_fault = on_fault

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if retrieve_all_functorch_interpreters():
            return func(*args, **kwargs)  # tensors inside torch.func's transforms mean nothing outside
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._sdpa(func, args, kwargs)
        out = func(*args, **kwargs)
        if getattr(func, "_qualified_op_name", "") == _OWN:
            self._safely(lambda: out[1].detach().amax())
        if name in ("softmax", "_softmax") and args and isinstance(args[0], Tensor) and args[0].ndim > 2:
            self._safely(lambda: args[0].detach().amax())
        return out

    def _sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = sdpa_arguments(args, kwargs)
        if not _flash_on_cpu(given):
            self._safely(lambda: _norm_bound(given["query"], given["key"], given["scale"]))
            return func(*args, **kwargs)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
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


def _flash_on_cpu(given: Mapping[str, Any]) -> bool:
    """Whether SDPA would run torch's CPU flash kernel on these arguments."""
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    if not all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in (q, k, v)):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if given["dropout_p"] or (mask is not None and (mask.dtype == torch.bool or mask.requires_grad)):
        return False  # SDPA turns a boolean mask into an additive one of its own
    choice = torch._fused_sdp_choice(
        q,
        k,
        v,
        mask,
        0.0,
        bool(given["is_causal"]),
        scale=given["scale"],
        enable_gqa=bool(given["enable_gqa"]),
    )
    return choice == SDPBackend.FLASH_ATTENTION.value


def _norm_bound(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """scale·max|q|·max|k|: Cauchy–Schwarz."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    return q.detach().float().norm(dim=-1).amax() * k.detach().float().norm(dim=-1).amax() * scale
