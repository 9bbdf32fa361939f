"""Multi-head latent attention, materialised: q and k come from small latents, a part of each rotated."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidValueError, RefusedError, ShapeError
from qkeel.nn.cache import KVCache
from qkeel.nn.core import SpecModule
from qkeel.spec import AttentionSpec, NoPosition, Rope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention: latents of q and kv, and per head rotated, plain and value dims."""

    q_latent: int = 32
    kv_latent: int = 24
    rope_dim: int = 8
    nope_dim: int = 8
    value_dim: int = 16


@final
class MLA(SpecModule):
    """q_h = [R W_qr^h c_q ; W_uq^h c_q], k_h = [R W_kr x ; W_uk^h c_kv], v_h = W_uv^h c_kv, c = W_d x.

    The rotated key is one for all heads. `latent_norm` puts an RMS norm on both latents (DeepSeek-V2/V3);
    then the down-projections no longer scale the logits. The order inside a head is [rotated, plain], so the spec's
    RoPE (base 10,000 if it has no position) rotates just the first part; only its share is set here.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        sizes: LatentSizes | None = None,
        spec: AttentionSpec | None = None,
        latent_norm: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        sizes = sizes or LatentSizes()
        if min(dataclasses.astuple(sizes)) < 1 or n_heads < 1:
            raise InvalidValueError(f"expected sizes of at least 1, got {sizes}, n_heads={n_heads}")
        head_dim = sizes.rope_dim + sizes.nope_dim
        spec = spec or AttentionSpec()
        rope = Rope() if isinstance(spec.position, NoPosition) else spec.position
        if not isinstance(rope, Rope):
            raise RefusedError(f"MLA rotates a part of each head by RoPE, which {rope.formula()} cannot do; use Rope")
        position = dataclasses.replace(rope, rotary=sizes.rope_dim / head_dim)
        spec = spec.replace(position=position)
        position.check(head_dim)
        super().__init__(spec, (n_heads, n_heads, head_dim), dropout, impl)
        self.d_model, self.sizes = d_model, sizes
        self.q_down = nn.Linear(d_model, sizes.q_latent, bias=False)
        self.q_up = nn.Linear(sizes.q_latent, n_heads * sizes.nope_dim, bias=False)
        self.q_rope = nn.Linear(sizes.q_latent, n_heads * sizes.rope_dim, bias=False)
        self.kv_down = nn.Linear(d_model, sizes.kv_latent, bias=False)
        self.k_up = nn.Linear(sizes.kv_latent, n_heads * sizes.nope_dim, bias=False)
        self.k_rope = nn.Linear(d_model, sizes.rope_dim, bias=False)
        self.v_up = nn.Linear(sizes.kv_latent, n_heads * sizes.value_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * sizes.value_dim, d_model, bias=False)
        self.latent_norm = latent_norm
        self.q_latent_norm = nn.RMSNorm(sizes.q_latent, eps=1e-6) if latent_norm else nn.Identity()
        self.kv_latent_norm = nn.RMSNorm(sizes.kv_latent, eps=1e-6) if latent_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        cache: KVCache | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
        pos: Tensor | None = None,
    ) -> Tensor:
        """x [b t m] -> [b t m]."""
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ShapeError(f"expected x of shape [batch tokens {self.d_model}], got {tuple(x.shape)}")
        if cache is not None:
            raise RefusedError(
                "nn.MLA computes keys and values anew: its latent cache is not built yet, and a cache of full "
                "keys would hide what it costs. Call it without a cache."
            )
        b, t, _ = x.shape
        q_latent, kv_latent = self.q_latent_norm(self.q_down(x)), self.kv_latent_norm(self.kv_down(x))
        q = torch.cat([self._heads(self.q_rope(q_latent)), self._heads(self.q_up(q_latent))], dim=-1)
        shared = self.k_rope(x)[:, None].expand(b, self.n_heads, t, self.sizes.rope_dim)
        k = torch.cat([shared, self._heads(self.k_up(kv_latent))], dim=-1)
        v = self._heads(self.v_up(kv_latent))
        out = self.attend(
            q,
            k,
            v,
            spec=self.spec,
            params=self.spec_params(),
            causal=causal,
            mask=mask,
            pos_q=pos,
            pos_k=pos,
        )
        return self.o_proj(out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
