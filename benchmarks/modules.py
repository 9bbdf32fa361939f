"""Attention modules end to end: forward and forward+backward, QK-norm on and off, activation memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from benchmarks.measure import Row, interleave

BASE = "GEMM + SDPA (no norm, no rope)"


class Bare(nn.Module):
    """Projections and SDPA, nothing else: the base of all ratios."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def ours(dim: int, heads: int, norm: bool) -> nn.Module:
    """qkeel's module with RoPE, with and without QK-norm (Qwen3's recipe)."""
    spec = qkeel.preset("qwen3") if norm else qkeel.preset("baseline")
    return qkeel.nn.Attention(dim, heads, spec=spec)


class Qwen3(nn.Module):
    """transformers' Qwen3 attention, SDPA; without the norm its modules are replaced by identities."""

    def __init__(self, dim: int, heads: int, norm: bool, length: int) -> None:
        super().__init__()
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

        config = Qwen3Config(
            hidden_size=dim, num_attention_heads=heads, num_key_value_heads=heads, head_dim=dim // heads,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.inner = Qwen3Attention(config, layer_idx=0)
        if not norm:
            self.inner.q_norm, self.inner.k_norm = nn.Identity(), nn.Identity()
        rotary = Qwen3RotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1, length, dim), torch.arange(length)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, position_embeddings=(self.cos, self.sin), attention_mask=None)[0]


class Olmo2(nn.Module):
    """transformers' OLMo 2 attention, SDPA."""

    def __init__(self, dim: int, heads: int, norm: bool, length: int) -> None:
        super().__init__()
        from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
        from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

        config = Olmo2Config(
            hidden_size=dim, num_attention_heads=heads, num_key_value_heads=heads, attn_implementation="sdpa"
        )
        self.inner = Olmo2Attention(config, layer_idx=0)
        if not norm:
            self.inner.q_norm, self.inner.k_norm = nn.Identity(), nn.Identity()
        cos, sin = Olmo2RotaryEmbedding(config)(torch.zeros(1, length, dim), torch.arange(length)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, position_embeddings=(self.cos, self.sin), attention_mask=None)[0]


class XTransformers(nn.Module):
    """x-transformers' attention, flash, rotary."""

    def __init__(self, dim: int, heads: int, norm: bool, length: int) -> None:
        super().__init__()
        from x_transformers.x_transformers import Attention, RotaryEmbedding

        options = {"qk_norm": True, "qk_norm_dim_scale": True} if norm else {}
        self.inner = Attention(dim, dim_head=dim // heads, heads=heads, causal=True, flash=True, **options)
        self.register_buffer("freqs", RotaryEmbedding(dim // heads)(torch.arange(length))[0])

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, rotary_pos_emb=(self.freqs, 1.0))
        return out[0] if isinstance(out, tuple) else out


class TorchMHA(nn.Module):
    """torch.nn.MultiheadAttention: no rope, no norm."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False)[0]


def modules(dim: int, heads: int, length: int, compiled: bool) -> dict[str, nn.Module]:
    """Every module of the table; a peer that is not installed is left out and said so."""
    made: dict[str, Callable[[], nn.Module]] = {
        BASE: lambda: Bare(dim, heads),
        "qkeel rope": lambda: ours(dim, heads, False),
        "qkeel rope + norm": lambda: ours(dim, heads, True),
        "transformers Qwen3 rope": lambda: Qwen3(dim, heads, False, length),
        "transformers Qwen3 rope + norm": lambda: Qwen3(dim, heads, True, length),
        "transformers OLMo 2 rope": lambda: Olmo2(dim, heads, False, length),
        "transformers OLMo 2 rope + norm": lambda: Olmo2(dim, heads, True, length),
        "x-transformers rope": lambda: XTransformers(dim, heads, False, length),
        "x-transformers rope + norm": lambda: XTransformers(dim, heads, True, length),
        "nn.MultiheadAttention (no rope)": lambda: TorchMHA(dim, heads, length),
    }
    if compiled:
        made["qkeel rope + norm, compiled"] = lambda: _compiled(ours(dim, heads, True))
        made["transformers Qwen3 rope + norm, compiled"] = lambda: _compiled(Qwen3(dim, heads, True, length))
        made["transformers OLMo 2 rope + norm, compiled"] = lambda: _compiled(Olmo2(dim, heads, True, length))
    found = {}
    for name, make in made.items():
        try:
            torch.manual_seed(0)
            found[name] = make()
        except ImportError as error:
            print(f"  left out: {name} ({error})")
    return found


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def bench(dim: int, heads: int, batch: int, length: int, rounds: int, compiled: bool) -> dict[str, list[Row]]:
    """Forward (no_grad) and forward+backward of every module."""
    found = modules(dim, heads, length, compiled)
    x = torch.randn(batch, length, dim)
    grad = torch.randn(batch, length, dim)

    def forward(module: nn.Module) -> Callable[[], object]:
        def call() -> Tensor:
            with torch.no_grad():
                return module(x)

        return call

    def both(module: nn.Module) -> Callable[[], object]:
        y = x.clone().requires_grad_()

        def call() -> None:
            module(y).backward(grad)

        return call

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "forward": interleave({n: forward(m) for n, m in found.items()}, BASE, rounds),
            "forward + backward": interleave({n: both(m) for n, m in found.items()}, BASE, rounds),
        }


def activation_memory(dim: int, heads: int, batch: int, length: int) -> dict[str, float]:
    """Bytes kept for backward by one module, in units of batch·length·dim float32 numbers."""
    units = {}
    for name, module in modules(dim, heads, length, compiled=False).items():
        seen: dict[int, int] = {}

        def pack(t: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = t.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return t

        x = torch.randn(batch, length, dim, requires_grad=True)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        weights |= {b.untyped_storage().data_ptr() for b in module.buffers()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(x)
        kept = sum(n for pointer, n in seen.items() if pointer not in weights)
        units[name] = kept / (4 * batch * length * dim)
        del out
    return units
