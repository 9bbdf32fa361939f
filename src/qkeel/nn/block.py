"""Transformer blocks: attention and MLP with the norm before, after, or on the branch."""

from __future__ import annotations

from typing import Literal, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, check_known
from qkeel.nn.attention import Attention
from qkeel.nn.cache import Cache
from qkeel.nn.mla import MLA
from qkeel.spec.shapes import GivenMask, GivenPosQ, Hidden

NormOrder = Literal["pre", "post", "swin", "peri", "none"]
NORM_ORDERS: dict[str, str] = {
    "pre": "x + F(N(x)): GPT-2, Llama",
    "post": "N(x + F(x)): Vaswani et al. 2017",
    "swin": "x + N(F(x)): Swin V2 (arXiv 2111.09883), Chameleon 34B (arXiv 2405.09818), OLMo 2",
    "peri": "x + N(F(N(x))): Gemma 2, Peri-LN (arXiv 2502.02732)",
    "none": "x + F(x): σReparam's pure variant (arXiv 2303.06296)",
}


@final
class MLP(nn.Module):
    """The MLP of a block, [b t d_model] to the same shape: W₂ gelu(W₁ x), or with swiglu W₂ (silu(W_g x) ∘ W₁ x).

    No biases; W₁ and W_g make `hidden` numbers. Raises: UnknownNameError for another kind.
    Source: Shazeer 2020, arXiv 2002.05202 (SwiGLU).
    """

    def __init__(self, d_model: int, hidden: int, kind: Literal["gelu", "swiglu"] = "gelu") -> None:
        super().__init__()
        check_known("MLP", kind, ("gelu", "swiglu"))
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.gate = nn.Linear(d_model, hidden, bias=False) if kind == "swiglu" else None
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        """Maps x [b t m] to [b t m]."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


@final
class Block(nn.Module):
    """One attention and one MLP branch on the residual stream [b t d_model], with norms in one of NORM_ORDERS.

    With norm_order="pre": x ← x + attention(N₁ x), then x ← x + mlp(N₂ x). With `cross_attention` there is a branch
    between them that attends to a context.

    Args:
        attention, mlp: the branches. d_model: width of the stream. norm_order: of every branch. cross_attention: to the
            `context` of a call.
    """

    def __init__(
        self,
        attention: Attention | MLA,
        mlp: MLP,
        d_model: int,
        norm_order: NormOrder = "pre",
        cross_attention: Attention | None = None,
    ) -> None:
        super().__init__()
        check_known("norm order", norm_order, NORM_ORDERS)
        self.norm_order = norm_order
        self.attention = attention
        self.mlp = mlp
        before, after = norm_order in ("pre", "peri"), norm_order in ("post", "swin", "peri")
        self.attention_norm = _rms(d_model, before)
        self.mlp_norm = _rms(d_model, before)
        self.attention_post_norm = _rms(d_model, after)
        self.mlp_post_norm = _rms(d_model, after)
        self.cross_attention = cross_attention
        if cross_attention is not None:
            self.cross_attention_norm = _rms(d_model, before)
            self.cross_attention_post_norm = _rms(d_model, after)

    def forward(
        self,
        x: Hidden,
        *,
        cache: Cache | None = None,
        mask: GivenMask | None = None,
        pos: GivenPosQ | None = None,
        causal: bool = True,
        context: Float[Tensor, "b s m"] | None = None,
    ) -> Hidden:
        """Maps x [b t m] to [b t m]; `context` [b s m] is for cross-attention, and only for that."""
        if (context is None) != (self.cross_attention is None):
            raise InvalidValueError("expected a context for a block with cross-attention, and for no other")
        branch = self.attention(self.attention_norm(x), cache=cache, causal=causal, mask=mask, pos=pos)
        if self.norm_order == "post":
            x = self.attention_post_norm(x + branch)
            if self.cross_attention is not None:
                x = self.cross_attention_post_norm(x + self.cross_attention(x, context=context))
            return self.mlp_post_norm(x + self.mlp(x))
        x = x + self.attention_post_norm(branch)
        if self.cross_attention is not None:
            branch = self.cross_attention(self.cross_attention_norm(x), context=context)
            x = x + self.cross_attention_post_norm(branch)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


def _rms(d_model: int, wanted: bool) -> nn.Module:
    return nn.RMSNorm(d_model, eps=1e-6) if wanted else nn.Identity()
