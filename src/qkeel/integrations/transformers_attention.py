"""`attn_implementation="qkeel"`: qkeel's attention in any model of transformers, by the switch that they all have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError, missing
from qkeel.nn import functional_attention
from qkeel.ops import attention
from qkeel.spec import AttentionSpec, Fixed, Softcap

try:
    from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig
    from transformers.masking_utils import eager_mask, sdpa_mask
except ImportError as error:
    raise missing("qkeel.integrations.transformers_attention", "'qkeel[hf]'") from error

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
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' "sdpa" computes of the same arguments, by `qkeel.nn.functional_attention`; softcaps too.

    Args:
        module: the attention module. query [b h t d], key [b g s d], value [b g s e]: h a multiple of g.
        attention_mask: boolean or additive, broadcast to [b h t s]; None: `is_causal` says what is visible.
        dropout: probability of dropping a weight. scaling: of the logits, 1/√d by default.
        is_causal: None: what the module says of itself, else that it is.
        position_bias: added to the logits, [b|1 h t s].
        softcap: the logits z become softcap · tanh(z / softcap).

    Returns: the output [b t h e], and no weights: they are never made.

    Raises: RefusedError if the model gives an argument that changes attention otherwise.
    """
    for name, given in kwargs.items():
        if given is not None and (name == "cache" or (isinstance(given, Tensor) and name not in _HARMLESS)):
            raise RefusedError(
                f"{type(module).__name__} gives attention {name}=, which {NAME!r} does not compute; "
                'load the model with attn_implementation="eager"'
            )
    t, s = query.shape[2], key.shape[2]
    causal = bool(vars(module).get("is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and t > 1
    if causal and s > t:  # a cache of fixed size that is still empty: its first keys are those of the queries
        key, value = key[:, :, :t], value[:, :, :t]
        position_bias = None if position_bias is None else position_bias[..., :t]
    if position_bias is not None:
        attention_mask, causal = _biased(position_bias, attention_mask, causal), False
    if softcap is not None:
        spec = AttentionSpec(scale=Fixed(query.shape[-1] ** -0.5 if scaling is None else scaling), cap=Softcap(softcap))
        out = attention(query, key, value, spec=spec, causal=causal, mask=attention_mask, dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    gqa = query.shape[1] != key.shape[1]
    if gqa and attention_mask is not None and not query.is_cpu:  # with both, torch's fused operators on GPUs refuse
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        gqa = False
    how: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "scale": scaling, "enable_gqa": gqa}
    out = functional_attention(query, key, value, attention_mask, **how)
    return out.transpose(1, 2).contiguous(), None


def _biased(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The bias with the most negative number where a mask or causality hides."""
    if mask is not None and mask.dtype != torch.bool:
        return bias + mask
    if mask is None and not causal:
        return bias
    if mask is None:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def mask(*, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """The mask of transformers' "sdpa" for models that call the attention they are told to; else that of "eager".

    The first is None where causality alone hides, and else boolean; a model that writes attention out itself would
    compute something else with it. Of a model whose class is not known neither is.

    Raises: RefusedError for a model that writes attention out itself: it would not be qkeel's.
    """
    try:
        home: Any = MODEL_MAPPING[type(config)]
    except KeyError:
        return eager_mask(config=config, **kwargs)
    home = home[0] if isinstance(home, tuple) else home
    if not (home._supports_sdpa or home._supports_attention_backend):
        raise RefusedError(
            f"{home.__name__} writes its attention out itself, which {NAME!r} cannot reach; load it "
            'with attn_implementation="eager", which qkeel.watch sees as well'
        )
    return sdpa_mask(config=config, **kwargs)


def register() -> str:
    """Makes `attn_implementation="qkeel"` known to transformers; returns that name. Any number of times."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
