"""Decoding with a cache of latents: one token through the module, as a ratio to absorbed decoding without a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.measure import Cases
from qkeel.nn import MLA, Attention, LatentSizes
from qkeel.spec import AttentionSpec, RMSNorm, Rope

BASE = "absorbed, no norm"
PLAIN = AttentionSpec()
NORMED = AttentionSpec(norm=RMSNorm(gain="dim"))


class Materialised(nn.Module):
    """The same cache, keys and values of every head made again for each token, as transformers does."""

    def __init__(self, inner: MLA) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, cache: object) -> Tensor:
        m = self.inner
        params = m.spec_params()
        q_latent, latent = m.q_latent_norm(m.q_down(x)), m.kv_latent_norm(m.kv_down(x))
        q = torch.cat([m._heads(m.q_rope(q_latent)), m._heads(m.q_up(q_latent))], dim=-1)
        q, held, inverse, _ = m._remember(cache, q, latent, m.k_rope(x)[:, None], None)
        k, v = m._materialised(held, inverse)
        scale = m.spec.factor(torch.zeros(1, 1), m.head_dim, params, q.dtype)
        return m.o_proj(sdpa(q, k, v, scale=scale).transpose(1, 2).flatten(2))


def _filled(module: nn.Module, cache: object, batch: int, length: int, dim: int) -> Callable[[], object]:
    """One step of a sequence of `length` tokens; the token is forgotten again."""
    module.eval()
    with torch.no_grad():
        for start in range(0, length, 256):
            inner = module.inner if isinstance(module, Materialised) else module
            inner(torch.randn(batch, min(256, length - start), dim), cache=cache)
    x = torch.randn(batch, 1, dim)

    @torch.no_grad()
    def step() -> None:
        module(x, cache=cache)
        cache.length = length

    return step


def cases(batch: int, length: int, dim: int, heads: int, sizes: LatentSizes) -> tuple[Cases, dict[str, int]]:
    """Returns one decoding step after `length` tokens by every module, and bytes per token of each cache (float32)."""
    torch.manual_seed(0)

    def latent(spec: AttentionSpec) -> MLA:
        return MLA(dim, heads, sizes=sizes, spec=spec, latent_norm=True)

    modules: dict[str, tuple[nn.Module, MLA | Attention]] = {}
    for name, made in ((BASE, latent(PLAIN)), ("absorbed, QK-norm", latent(NORMED))):
        modules[name] = (made, made)
    for name, spec in (("keys and values made each step", PLAIN), ("keys and values made each step, QK-norm", NORMED)):
        inner = latent(spec)
        modules[name] = (Materialised(inner), inner)
    head_dim = sizes.rope_dim + sizes.nope_dim
    full = Attention(dim, heads, head_dim=head_dim, spec=AttentionSpec(position=Rope(rotary=sizes.rope_dim / head_dim)))
    modules["keys and values cached (MHA)"] = (full, full)
    caches = {name: inner.new_cache(length + 1) for name, (_, inner) in modules.items()}
    made = {name: _filled(module, caches[name], batch, length, dim) for name, (module, _) in modules.items()}
    return made, {name: cache.bytes_per_token for name, cache in caches.items()}
