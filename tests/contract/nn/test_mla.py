"""nn.MLA against a plain re-implementation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from qkeel import preset
from qkeel.errors import InvalidValueError, ShapeError
from qkeel.nn import MLA, LatentSizes
from qkeel.spec import AttentionSpec, Rope, Softcap

SIZES = LatentSizes(q_latent=10, kv_latent=7, rope_dim=4, nope_dim=6, value_dim=5)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, pos: int) -> Tensor:
    """One token's rotated part [r], pair by pair (i, i + r/2)."""
    half, out = x.shape[-1] // 2, x.clone()
    for i in range(half):
        angle = pos * 10_000.0 ** (-2 * i / x.shape[-1])
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def by_hand(m: MLA, x: Tensor, cap: float | None = None) -> Tensor:
    """One sequence [t m], head by head, token by token, from the paper's formulas."""
    s, t = m.sizes, x.shape[0]
    c_q, c_kv = (
        x if s.q_latent is None else x @ m.q_down.weight.T,
        x @ m.kv_down.weight.T,
    )
    if m.latent_norm:
        c_q = c_q if s.q_latent is None else rms(c_q, m.q_latent_norm.weight)
        c_kv = rms(c_kv, m.kv_latent_norm.weight)
    heads = []
    for h in range(m.n_heads):
        w_uq = m.q_up.weight[h * s.nope_dim : (h + 1) * s.nope_dim]
        w_qr = m.q_rope.weight[h * s.rope_dim : (h + 1) * s.rope_dim]
        w_uk = m.k_up.weight[h * s.nope_dim : (h + 1) * s.nope_dim]
        w_uv = m.v_up.weight[h * s.value_dim : (h + 1) * s.value_dim]
        rows = []
        for i in range(t):
            logits = []
            for j in range(i + 1):
                plain = (w_uq @ c_q[i]) @ (w_uk @ c_kv[j])
                rotated = turned(w_qr @ c_q[i], i) @ turned(m.k_rope.weight @ x[j], j)
                logits.append((plain + rotated) / math.sqrt(s.nope_dim + s.rope_dim))
            z = torch.stack(logits)
            z = z if cap is None else cap * torch.tanh(z / cap)
            rows.append(z.softmax(0) @ (c_kv[: i + 1] @ w_uv.T))
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ m.o_proj.weight.T


@pytest.mark.parametrize("latent_norm", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("q_latent", [10, None])
@torch.no_grad()
def test_output_is_that_of_the_papers_formulas(
    latent_norm: bool, cap: float | None, q_latent: int | None
) -> None:
    spec = AttentionSpec() if cap is None else AttentionSpec(cap=Softcap(cap))
    sizes = dataclasses.replace(SIZES, q_latent=q_latent)
    module = MLA(12, 3, sizes=sizes, spec=spec, latent_norm=latent_norm).double()
    for name, p in module.named_parameters():
        p.normal_(1.0 if "norm" in name else 0.0, 0.5)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for ours, row in zip(module(x), x):
        assert torch.allclose(ours, by_hand(module, row, cap), rtol=0, atol=1e-12)


def test_the_spec_brings_norm_scale_and_cap_and_the_module_the_rotated_part() -> None:
    module = MLA(12, 3, sizes=SIZES, spec=preset("qwen3"))
    assert module.spec.norm == preset("qwen3").norm
    assert isinstance(module.spec.position, Rope)
    assert module.spec.position.rotary == 4 / 10
    assert set(module.spec_params()) == {"q_norm", "k_norm"}


def test_bad_input_is_refused() -> None:
    module = MLA(12, 3, sizes=SIZES)
    with pytest.raises(ShapeError, match=r"batch tokens 12.*\(2, 5, 11\)"):
        module(torch.randn(2, 5, 11))
    with pytest.raises(InvalidValueError, match="at least 1"):
        MLA(12, 3, sizes=LatentSizes(q_latent=0))
    with pytest.raises(InvalidValueError, match="at least 1"):
        MLA(12, 0)
    with pytest.raises(ShapeError, match="even number of dimensions"):
        MLA(12, 3, sizes=LatentSizes(rope_dim=3))
