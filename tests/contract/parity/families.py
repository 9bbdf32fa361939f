"""One row per model family of transformers: how its attention module maps to a qkeel spec.

The rows only translate names. What a family computes is in its preset; what lies outside the five slots (output
projection, output gate) is in `finish`. A new family is one more row.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.spec import AttentionSpec, preset


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A random small geometry, and the constants that configs leave open."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    tokens: int
    base: float
    eps: float
    bias: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """A stock attention module, its rotary table maker and what they were made from."""

    attention: nn.Module
    rotary: nn.Module | None


Params = dict[str, Tensor]
Project = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Tensor]]


def _project(attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)


def _o_proj(attention: nn.Module, out: Tensor, x: Tensor) -> Tensor:
    return attention.o_proj(out)


def _call(attention: nn.Module, x: Tensor, table: Any, mask: Tensor) -> Tensor:
    return attention(x, position_embeddings=table, attention_mask=mask)[0]


def _gains(attention: nn.Module) -> Params:
    return {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family is built, called and said in qkeel's words."""

    name: str
    package: str
    attention: str
    config: str
    spec: Callable[[Sizes], AttentionSpec]
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {
        "rms_norm_eps": sizes.eps
    }
    params: Callable[[nn.Module], Params] = _gains
    rotary: str | None = None
    rotary_share: float = 1.0
    layer_type: str | None = None  # for rotary modules with a table per layer type
    layer: int = 0
    grouped: bool = True  # may have fewer key heads than query heads
    square: bool = False  # insists on d_model = n_heads · head_dim
    tokens: int | None = None  # where the module insists on a number
    causal: bool = True
    paddable: bool = True  # reads position_ids, so left padding moves the positions
    project: Project = _project
    finish: Callable[[nn.Module, Tensor, Tensor], Tensor] = _o_proj
    call: Callable[[nn.Module, Tensor, Any, Tensor], Tensor] = _call
    make: Callable[[type, Any, Sizes], nn.Module] | None = None

    def sizes(self, seed: int) -> Sizes:
        """The seed's geometry, as far as the family allows it."""
        draw = random.Random(f"{self.name} {seed}")
        groups, per_group, head_dim = (
            draw.choice([1, 2, 3]),
            draw.choice([1, 2, 3]),
            draw.choice([8, 16, 24]),
        )
        heads = groups * per_group
        return Sizes(
            n_heads=heads,
            n_kv_heads=groups if self.grouped else heads,
            head_dim=head_dim,
            d_model=heads * head_dim if self.square else heads * draw.choice([5, 12]),
            tokens=self.tokens or (draw.choice([1, 7, 11]) if seed else 9),
            base=draw.choice([100.0, 10_000.0, 1_000_000.0]),
            eps=draw.choice([1e-6, 1e-5, 1e-2]),
            bias=draw.random() < 0.5,
        )

    def build(self, sizes: Sizes) -> Stock:
        """The stock module with random weights, biases and gains."""
        model = importlib.import_module(
            f"transformers.models.{self.package}.modeling_{self.package}"
        )
        configs = importlib.import_module(
            f"transformers.models.{self.package}.configuration_{self.package}"
        )
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.base}
        if self.rotary_share != 1:
            rope["partial_rotary_factor"] = self.rotary_share
        if self.layer_type:
            other = {"rope_type": "default", "rope_theta": 7.0}
            rope = {
                "full_attention": other,
                "sliding_attention": other,
                self.layer_type: rope,
            }
        common: dict[str, Any] = {
            "hidden_size": sizes.d_model,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.n_kv_heads,
            "head_dim": sizes.head_dim,
            "attention_bias": sizes.bias,
            "num_hidden_layers": 4,
            "rope_parameters": rope,
        }
        config = getattr(configs, self.config)(**{**common, **self.options(sizes)})
        config._attn_implementation = "eager"
        kind = getattr(model, self.attention)
        attention = (
            self.make(kind, config, sizes) if self.make else kind(config, self.layer)
        )
        rotary = getattr(model, self.rotary)(config) if self.rotary else None
        for module in attention.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, nn.Linear) and parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                else:  # gains, biases, scales: around their start, be it 1 or 0
                    parameter.data.add_(0.3 * torch.randn_like(parameter))
        return Stock(attention=attention.eval(), rotary=rotary)

    def table(self, stock: Stock, x: Tensor, pos: Tensor) -> Any:
        """The stock module's rotary table."""
        if stock.rotary is None:
            return None
        return (
            stock.rotary(x, pos, self.layer_type)
            if self.layer_type
            else stock.rotary(x, pos)
        )


# Qwen3-Next takes an output gate from a widened query projection: [query | gate] within each head.


def _qwen3_next_project(
    attention: nn.Module, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q = (
        attention.q_proj(x)
        .unflatten(-1, (-1, 2, attention.head_dim))[..., 0, :]
        .flatten(-2)
    )
    return q, attention.k_proj(x), attention.v_proj(x)


def _qwen3_next_finish(attention: nn.Module, out: Tensor, x: Tensor) -> Tensor:
    gate = (
        attention.q_proj(x)
        .unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :]
        .flatten(-2)
    )
    return attention.o_proj(out * gate.sigmoid())


def _clip_of_olmoe(attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # OLMoE may also clamp q and k after the norm and v after its projection (clip_qkv); released models don't.
    assert attention.config.clip_qkv is None
    return _project(attention, x)


def _flat_gains(attention: nn.Module) -> Params:
    return {
        name: w.unflatten(0, (-1, attention.head_dim))
        for name, w in _gains(attention).items()
    }


def _gains_and_biases(attention: nn.Module) -> Params:
    return {
        **_gains(attention),
        "q_norm_bias": attention.q_norm.bias,
        "k_norm_bias": attention.k_norm.bias,
    }


def _stablelm_gains(attention: nn.Module) -> Params:
    modules = {"q_norm": attention.q_layernorm, "k_norm": attention.k_layernorm}
    return {
        name: torch.stack([norm.weight for norm in module.norms])
        for name, module in modules.items()
    }


def _phi_gains(attention: nn.Module) -> Params:
    q, k = attention.q_layernorm, attention.k_layernorm
    return {
        "q_norm": q.weight,
        "k_norm": k.weight,
        "q_norm_bias": q.bias,
        "k_norm_bias": k.bias,
    }


def _phi_finish(attention: nn.Module, out: Tensor, x: Tensor) -> Tensor:
    return attention.dense(out)


def _gemma4_call(attention: nn.Module, x: Tensor, table: Any, mask: Tensor) -> Tensor:
    return attention(
        x, position_embeddings=table, attention_mask=mask, shared_kv_states={}
    )[0]


# Swin V2: windows of 3 × 3 tokens, no mask. Its bias 16·σ(network) is made zero.


def _swin_make(kind: type, config: Any, sizes: Sizes) -> nn.Module:
    attention = kind(config, dim=sizes.d_model, num_heads=sizes.n_heads, window_size=3)
    if torch.get_default_dtype() == torch.float64:
        # One head far above the clamp at ln 100, the others around the published start of 10.
        attention.logit_scale.data[0] = 9.0
    else:
        # Temperatures around 4: logits of 20 already round by 2e-6 in float32.
        attention.logit_scale.data.fill_(math.log(4.0))
    attention.continuous_position_bias_mlp = _NoPositionBias(sizes.n_heads)
    return attention


class _NoPositionBias(nn.Module):
    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, coordinates: Tensor) -> Tensor:
        return coordinates.new_full((*coordinates.shape[:-1], self.n_heads), -torch.inf)


def _swin_project(attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attention.query(x), attention.key(x), attention.value(x)


FAMILIES = (
    Family(
        name="qwen3",
        package="qwen3",
        attention="Qwen3Attention",
        config="Qwen3Config",
        rotary="Qwen3RotaryEmbedding",
        spec=lambda s: preset("qwen3", base=s.base, eps=s.eps),
    ),
    Family(
        name="qwen3_next",
        package="qwen3_next",
        attention="Qwen3NextAttention",
        config="Qwen3NextConfig",
        rotary="Qwen3NextRotaryEmbedding",
        rotary_share=0.25,
        spec=lambda s: preset("qwen3_next", base=s.base, eps=s.eps, rotary=0.25),
        project=_qwen3_next_project,
        finish=_qwen3_next_finish,
    ),
    Family(
        name="olmo2",
        package="olmo2",
        attention="Olmo2Attention",
        config="Olmo2Config",
        rotary="Olmo2RotaryEmbedding",
        spec=lambda s: preset("olmo2", base=s.base, eps=s.eps),
        params=_flat_gains,
    ),
    Family(
        name="olmoe",
        package="olmoe",
        attention="OlmoeAttention",
        config="OlmoeConfig",
        rotary="OlmoeRotaryEmbedding",
        square=True,
        spec=lambda s: preset("olmoe", base=s.base, eps=s.eps),
        params=_flat_gains,
        project=_clip_of_olmoe,
    ),
    Family(
        name="minimax_m2",
        package="minimax_m2",
        attention="MiniMaxM2Attention",
        config="MiniMaxM2Config",
        rotary="MiniMaxM2RotaryEmbedding",
        rotary_share=0.5,
        spec=lambda s: preset("minimax_m2", base=s.base, eps=s.eps),
        params=_flat_gains,
    ),
    Family(
        name="gemma2",
        package="gemma2",
        attention="Gemma2Attention",
        config="Gemma2Config",
        rotary="Gemma2RotaryEmbedding",
        options=lambda s: {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5},
        spec=lambda s: preset("gemma2", base=s.base, query_scalar=3, cap=1.5),
        params=lambda attention: {},
    ),
    Family(
        name="gemma3",
        package="gemma3",
        attention="Gemma3Attention",
        config="Gemma3TextConfig",
        rotary="Gemma3RotaryEmbedding",
        layer_type="full_attention",
        options=lambda s: {
            "rms_norm_eps": s.eps,
            "query_pre_attn_scalar": 5,
            "layer_types": ["full_attention"] * 4,
        },
        spec=lambda s: preset("gemma3", base=s.base, eps=s.eps, query_scalar=5),
    ),
    Family(
        name="gemma4",
        package="gemma4",
        attention="Gemma4TextAttention",
        config="Gemma4TextConfig",
        rotary="Gemma4TextRotaryEmbedding",
        layer_type="sliding_attention",
        options=lambda s: {
            "rms_norm_eps": s.eps,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 64,
            "num_kv_shared_layers": 0,
        },
        spec=lambda s: preset("gemma4", base=s.base, eps=s.eps),
        call=_gemma4_call,
    ),
    Family(
        name="cohere",
        package="cohere",
        attention="CohereAttention",
        config="CohereConfig",
        rotary="CohereRotaryEmbedding",
        options=lambda s: {"use_qk_norm": True, "layer_norm_eps": s.eps},
        spec=lambda s: preset("cohere", base=s.base, eps=s.eps),
    ),
    Family(
        name="stablelm2",
        package="stablelm",
        attention="StableLmAttention",
        config="StableLmConfig",
        rotary="StableLmRotaryEmbedding",
        rotary_share=0.25,
        square=True,
        options=lambda s: {
            "qk_layernorm": True,
            "layer_norm_eps": s.eps,
            "use_qkv_bias": s.bias,
        },
        spec=lambda s: preset("stablelm2", base=s.base, eps=s.eps),
        params=_stablelm_gains,
    ),
    Family(
        name="phi",
        package="phi",
        attention="PhiAttention",
        config="PhiConfig",
        rotary="PhiRotaryEmbedding",
        rotary_share=0.5,
        square=True,
        options=lambda s: {"qk_layernorm": True, "layer_norm_eps": s.eps},
        spec=lambda s: preset("phi", base=s.base, eps=s.eps),
        params=_phi_gains,
        finish=_phi_finish,
    ),
    Family(
        name="chameleon",
        package="chameleon",
        attention="ChameleonAttention",
        config="ChameleonConfig",
        rotary="ChameleonRotaryEmbedding",
        square=True,
        spec=lambda s: preset("chameleon", base=s.base),
        params=_gains_and_biases,
    ),
    Family(
        name="llama4",
        package="llama4",
        attention="Llama4TextAttention",
        config="Llama4TextConfig",
        rotary="Llama4TextRotaryEmbedding",
        spec=lambda s: preset("llama4", base=s.base, eps=s.eps),
        params=lambda attention: {},
    ),
    Family(
        name="llama4_nope",
        package="llama4",
        attention="Llama4TextAttention",
        config="Llama4TextConfig",
        layer=3,
        options=lambda s: {
            "attn_temperature_tuning": True,
            "floor_scale": 3,
            "attn_scale": 0.7,
        },
        spec=lambda s: preset("llama4_nope", alpha=0.7, floor=3),
        params=lambda attention: {},
        paddable=False,
    ),
    Family(
        name="nanochat",
        package="nanochat",
        attention="NanoChatAttention",
        config="NanoChatConfig",
        rotary="NanoChatRotaryEmbedding",
        # The port leaves out the 1.2 on q and on k that upstream has.
        spec=lambda s: preset("nanochat", base=s.base, eps=s.eps, multiplier=1.0),
        params=lambda attention: {},
    ),
    Family(
        name="swin_v2",
        package="swinv2",
        attention="Swinv2SelfAttention",
        config="Swinv2Config",
        grouped=False,
        square=True,
        tokens=9,
        causal=False,
        paddable=False,
        options=lambda s: {
            "qkv_bias": s.bias,
            "embed_dim": s.d_model,
            "num_heads": [s.n_heads],
            "depths": [1],
        },
        make=_swin_make,
        spec=lambda s: preset("swin_v2"),
        params=lambda attention: {"logit_scale": attention.logit_scale},
        project=_swin_project,
        finish=lambda attention, out, x: out,
        call=lambda attention, x, table, mask: attention(x)[0],
    ),
)
