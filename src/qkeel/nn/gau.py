"""The gated attention unit: one wide head of attention and a gated MLP in one layer, under any AttentionSpec."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, RefusedError, check, check_known
from qkeel.nn.cache import KVCache
from qkeel.nn.spec_module import SpecModule, check_input
from qkeel.spec import AttentionSpec, preset
from qkeel.spec.shapes import GivenMask, GivenPosQ, Hidden, Tokens


@final
class GAU(SpecModule):
    """The layer out = (u ∘ A v) W_o; [u v] = silu(x W_uv), z = silu(x W_z), q = γ_q ∘ z + β_q, k = γ_k ∘ z + β_k.

    A are the weights of one head of `size` numbers under `spec`; u and v have `hidden`. Two such layers take the place
    of one of attention and one of MLP. With SquaredReLU as normalizer A = relu(z)²/n, n the visible keys, as in
    bert4keras; the paper's own code divides by n before it squares. No T5 bias, no linear attention between chunks.

    Args:
        d_model: width of the input. hidden: of u and v, default 2·d_model. size: of q and k. spec: what attention
        computes, default preset("baseline"). bias: β_q and β_k. dropout: on the weights, in training. impl: a kernel's
        name or "auto".

    Source: Hua et al. 2022, arXiv 2202.10447, section 3.2; γ = 1, β = 0 at the start and no biases: GAU-α (bert4keras).
    """

    def __init__(
        self,
        d_model: int,
        *,
        hidden: int | None = None,
        size: int = 128,
        spec: AttentionSpec | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        width = 2 * d_model if hidden is None else hidden
        given = f"d_model={d_model}, hidden={width}, size={size}"
        check(min(d_model, width, size) >= 1, "sizes of at least 1", given)
        spec = preset("baseline") if spec is None else spec
        spec.position.check(size)
        super().__init__(spec, (1, 1, size), dropout, impl)
        self.d_model, self.hidden = d_model, width
        self.uv_proj = nn.Linear(d_model, 2 * width, bias=False)
        self.qk_proj = OffsetScale(d_model, size, bias)
        self.o_proj = nn.Linear(width, d_model, bias=False)

    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        causal: bool = True,
        mask: GivenMask | None = None,
        pos: Tokens | None = None,
    ) -> Hidden:
        """Maps x [b t m] to [b t m]. cache: keys and values of earlier tokens; x are those after them. pos [b t]."""
        check_input(x, self.d_model, self.uv_proj)
        if any(name.startswith("v_norm") and p.numel() > 1 for name, p in self.spec_params().items()):
            raise RefusedError(
                f"a gain on values of {self.head_dim} numbers does not fit the {self.hidden} of a GAU; "
                "use gain none or scalar on v, or leave v alone"
            )
        u, v = F.silu(self.uv_proj(x)).chunk(2, dim=-1)
        q, k = self.qk_proj(x)
        heads = (q[:, None], k[:, None], v[:, None])
        return self.o_proj(u * self.attend_self(cache, heads, causal=causal, mask=mask, pos=pos))


@final
class OffsetScale(nn.Module):
    """Returns q and k [b t s] of x [b t m]: z = silu(x W_z), each with a gain (and an offset) per number of its own."""

    def __init__(self, d_model: int, size: int, bias: bool) -> None:
        super().__init__()
        self.z_proj = nn.Linear(d_model, size, bias=False)
        self.q_gain, self.k_gain = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))
        self.q_bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.k_bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Hidden) -> tuple[Hidden, Hidden]:
        """Maps x [b t m] to q, k [b t s]."""
        z = F.silu(self.z_proj(x))
        q, k = z * self.q_gain, z * self.k_gain
        if self.q_bias is not None and self.k_bias is not None:
            return q + self.q_bias, k + self.k_bias
        return q, k


@final
class GAUBlock(nn.Module):
    """A GAU on the residual stream: x + F(N(x)) ("pre"), or N(αx + F(x)) ("post").

    F is `gau`, N RMS norm, with a gain before the branch, without one behind it (`norm_order`); `alpha` is α > 0.

    Source: pre-norm: arXiv 2202.10447, there LayerNorm or ScaleNorm; post-norm: GAU-α; α: DeepNorm,
    `functional.scaling.deepnorm`.
    """

    def __init__(self, gau: GAU, *, norm_order: str = "pre", alpha: float = 1.0) -> None:
        super().__init__()
        check_known("norm order of a GAU", norm_order, ("pre", "post"))
        check(alpha > 0, "alpha above 0", alpha)
        if alpha != 1 and norm_order == "pre":
            raise InvalidValueError(f"alpha is for norm_order='post', got {alpha} with 'pre'")
        self.norm_order, self.alpha = norm_order, alpha
        self.attention = gau
        self.norm = nn.RMSNorm(gau.d_model, eps=1e-6, elementwise_affine=norm_order == "pre")

    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        mask: GivenMask | None = None,
        pos: GivenPosQ | None = None,
        causal: bool = True,
    ) -> Hidden:
        """Maps x [b t m] to [b t m]."""
        pre = self.norm_order == "pre"
        branch = self.attention(self.norm(x) if pre else x, cache=cache, causal=causal, mask=mask, pos=pos)
        return x + branch if pre else self.norm(self.alpha * x + branch)
