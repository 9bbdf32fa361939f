"""`attn_implementation="qkeel"`: qkeel's attention in any model of transformers, by the switch that they all have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError, needed
from qkeel.nn import functional_attention
from qkeel.ops import attention
from qkeel.patching.modes import Kwargs
from qkeel.spec import AttentionSpec, Fixed, Softcap

with needed("qkeel.integrations.transformers_attention", "'qkeel[hf]'"):
    from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

NAME = "qkeel"
# Tensors that come along and change nothing: the mask and the rotation have them in already.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "cos", "sin", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "token_type_ids"}
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Returns what transformers' "sdpa" does, by `qkeel.nn.functional_attention`; with a softcap too.

    Args:
        module: the attention module.
        query, key, value: [b h t d], [b g s d], [b g s e]; h a multiple of g.
        attention_mask: boolean or additive, broadcast to [b h t s]; None: `is_causal` says what is visible.
        more: `dropout`, `scaling` (1/√d by default), `is_causal` (by default what the module says of itself, else
            true), `position_bias` added to the logits, `softcap`; what transformers hands over besides is ignored
            unless it is a tensor that changes what attention computes.

    Returns: the output [b t h e], and no weights: they are never made.

    Raises: RefusedError if the model gives an argument that changes attention otherwise.
    """
    _check(module, more)
    scaling, bias, causal = more.get("scaling"), more.get("position_bias"), more.get("is_causal")
    t, s = query.shape[2], key.shape[2]
    causal = bool(vars(module).get("is_causal", True) if causal is None else causal)
    causal = causal and attention_mask is None and t > 1
    if causal and s > t:  # a cache of fixed size that is still empty: its first keys are those of the queries
        key, value = key[:, :, :t], value[:, :, :t]
        bias = None if bias is None else bias[..., :t]
    if bias is not None:
        attention_mask, causal = _biased(bias, attention_mask, causal), False
    dropout = more.get("dropout", 0.0)
    if more.get("softcap") is not None:
        scale = Fixed(query.shape[-1] ** -0.5 if scaling is None else scaling)
        spec = AttentionSpec(scale=scale, cap=Softcap(more["softcap"]))
        out = attention(query, key, value, spec=spec, causal=causal, mask=attention_mask, dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    share = query.shape[1] // key.shape[1]
    if share > 1 and attention_mask is not None and not query.is_cpu:  # fused operators of GPUs take one of both
        key, value, share = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1), 1
    gqa = share > 1
    out = functional_attention(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous(), None


def _check(module: nn.Module, more: Kwargs) -> None:
    for name, given in more.items():
        tensor = isinstance(given, Tensor) and name not in (*_HARMLESS, "position_bias")
        if tensor or (name == "cache" and given is not None):
            raise RefusedError(
                f"{type(module).__name__} gives attention {name}=, which {NAME!r} does not compute; "
                'load the model with attn_implementation="eager"'
            )


def _biased(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The bias with the most negative number where a mask or causality hides."""
    if mask is not None and mask.dtype != torch.bool:
        return bias + mask
    if mask is None and not causal:
        return bias
    if mask is None:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def mask(**given) -> Tensor | None:  # type: ignore[no-untyped-def]  # what transformers gives any mask
    """Returns the mask of transformers' "sdpa" for models that call the attention they are set to; else "eager"'s.

    The first is None where causality alone hides, and else boolean; a model that writes attention out itself would
    compute something else with it. Of a model whose class is not known neither is.

    Raises: RefusedError for a model that writes attention out itself: it would not be qkeel's.
    """
    try:
        home = MODEL_MAPPING[type(given["config"])]
    except KeyError:
        return eager_mask(**given)
    home = home[0] if isinstance(home, tuple) else home
    if home is not None and not (home._supports_sdpa or home._supports_attention_backend):
        raise RefusedError(
            f"{home.__name__} writes its attention out itself, which {NAME!r} cannot reach; load it "
            'with attn_implementation="eager", which qkeel.watch sees as well'
        )
    return sdpa_mask(**given)


def register() -> str:
    """Makes `attn_implementation="qkeel"` known to transformers; returns that name. Any number of times."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
