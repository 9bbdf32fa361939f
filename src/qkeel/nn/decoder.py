"""Transformer blocks and the lab's small models built from them: decoders, encoder-decoders, vision transformers.

Shapes: b batch, t tokens, s context tokens, m width of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    ShapeError,
    check,
    check_known,
)
from qkeel.functional.logits import deepnorm
from qkeel.nn.attention import (
    GAU,
    Attention,
    Cache,
    GAUBlock,
    check_dropout,
    check_heads,
)
from qkeel.nn.mla import MLA, LatentSizes
from qkeel.spec import AttentionSpec, preset
from qkeel.spec.slot import AttentionMask, Hidden, QueryPositions

# Transformer blocks: attention and MLP branches with norms in different places.

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
    """The MLP of a block, W₂ gelu(W₁ x), or with "swiglu" W₂ (silu(W_g x) ∘ W₁ x), without biases.

    Args:
        d_model: width of input and output.
        hidden: width of W₁ x and W_g x.
        kind: "gelu" or "swiglu".

    Raises:
        UnknownNameError: `kind` is neither of these.

    Source: Shazeer 2020, arXiv 2002.05202 (SwiGLU).

    >>> MLP(8, 32)(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self, d_model: int, hidden: int, kind: Literal["gelu", "swiglu"] = "gelu"
    ) -> None:
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
    """One attention branch and one MLP branch on the residual stream [b t d_model], with norms placed as in one of
    NORM_ORDERS.

    With norm_order="pre": x ← x + attention(N₁ x), then x ← x + mlp(N₂ x). A `cross_attention` adds a branch between
    the two.

    Args:
        attention: the first branch.
        mlp: the last branch.
        d_model: width of the stream.
        norm_order: position of the norms in every branch.
        cross_attention: the branch that attends to the `context` of a call.

    >>> from qkeel.nn import Attention
    >>> Block(Attention(8, 2), MLP(8, 32), 8)(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
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
        before, after = (
            norm_order in ("pre", "peri"),
            norm_order in ("post", "swin", "peri"),
        )
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
        mask: AttentionMask | None = None,
        pos: QueryPositions | None = None,
        causal: bool = True,
        context: Float[Tensor, "b s m"] | None = None,
    ) -> Hidden:
        """Maps x [b t m] to [b t m]. A `context` [b s m] is required for cross-attention and not allowed without it."""
        if (context is None) != (self.cross_attention is None):
            raise InvalidValueError(
                "expected a context if, and only if, the block has cross-attention"
            )
        branch = self.attention(
            self.attention_norm(x), cache=cache, causal=causal, mask=mask, pos=pos
        )
        # Only here does the norm follow the sum; in all other orders the stream itself is never normed.
        if self.norm_order == "post":
            x = self.attention_post_norm(x + branch)
            if self.cross_attention is not None:
                x = self.cross_attention_post_norm(
                    x + self.cross_attention(x, context=context)
                )
            return self.mlp_post_norm(x + self.mlp(x))
        x = x + self.attention_post_norm(branch)
        if self.cross_attention is not None:
            branch = self.cross_attention(self.cross_attention_norm(x), context=context)
            x = x + self.cross_attention_post_norm(branch)
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


def _rms(d_model: int, has_norm: bool) -> nn.Module:
    # An identity in place of each missing norm, so that one forward pass serves every order.
    return nn.RMSNorm(d_model, eps=1e-6) if has_norm else nn.Identity()


# A decoder language model.


def _check_integers(tokens: Tensor) -> None:
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise InvalidTypeError(
            f"expected tokens of an integer dtype, got {tokens.dtype}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a Decoder. `spec` is one spec for all layers, or a tuple with one spec per layer (see
    `layer_specs`).

    >>> DecoderConfig(vocab_size=100, n_heads=8, n_kv_heads=2).d_model
    64
    """

    vocab_size: int  #: number of tokens in the vocabulary
    d_model: int = 64  #: width of the residual stream
    n_layers: int = 2  #: number of blocks
    n_heads: int = 4  #: query heads per block; 1 for gau
    n_kv_heads: int | None = None  #: key heads, a divisor of n_heads; None for n_heads
    head_dim: int | None = None  #: width of one head; None for d_model / n_heads
    spec: AttentionSpec | tuple[AttentionSpec, ...] = dataclasses.field(
        default_factory=lambda: preset("baseline")
    )
    attention: Literal["mha", "mla", "gau"] = "mha"  #: Attention, MLA or GAU
    #: sizes of MLA
    latent: LatentSizes = dataclasses.field(default_factory=LatentSizes)
    latent_norm: bool = False  #: whether the latents of MLA have an RMS norm
    mlp: Literal["gelu", "swiglu"] = "gelu"  #: activation; a GAU has no MLP
    mlp_ratio: float = 4.0  #: width of the MLP relative to d_model
    norm_order: NormOrder = "pre"  #: position of a block's norms
    #: whether to use DeepNorm's α and β; requires gau with post-norm
    deepnorm: bool = False
    tied: bool = False  #: whether the head shares the embedding's weight
    dropout: float = 0.0  #: dropout on the attention weights, in training

    def __post_init__(self) -> None:
        for kind, name, choices in (
            ("attention", self.attention, ("mha", "mla", "gau")),
            ("MLP", self.mlp, ("gelu", "swiglu")),
            ("norm order", self.norm_order, NORM_ORDERS),
        ):
            check_known(kind, name, choices)
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            size = getattr(self, name)
            check(size >= 1, f"{name} of at least 1", size)
        check(
            int(self.mlp_ratio * self.d_model) >= 1,
            "an MLP of at least one unit",
            f"mlp_ratio={self.mlp_ratio}",
        )
        check(
            len(self.specs) == self.n_layers,
            f"one spec per layer, {self.n_layers}",
            len(self.specs),
        )
        check_dropout(self.dropout)
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, self.head_dim)
        if self.attention == "gau" and self.n_heads != 1:
            raise InvalidValueError(
                f"a GAU has one head; expected n_heads=1, got {self.n_heads}"
            )
        if self.deepnorm and not (
            self.attention == "gau" and self.norm_order == "post"
        ):
            raise InvalidValueError(
                "deepnorm needs attention='gau' with norm_order='post'"
            )

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The spec of each layer's attention."""
        return (
            self.spec if isinstance(self.spec, tuple) else (self.spec,) * self.n_layers
        )

    @property
    def sublayers(self) -> int:
        """The number of branches on the residual stream. A GAU combines attention and MLP in one branch."""
        return self.n_layers if self.attention == "gau" else 2 * self.n_layers


@final
class Decoder(nn.Module):
    """A language model: embedding, blocks, final RMS norm and head (tied or not), as `config` specifies.

    >>> model = Decoder(DecoderConfig(vocab_size=100))
    >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 100])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(build_block(config, spec) for spec in config.specs)
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        *,
        caches: Sequence[Cache] | None = None,
        mask: AttentionMask | None = None,
        pos: QueryPositions | None = None,
    ) -> Float[Tensor, "b t vocab"]:
        """Maps tokens [b t] (int64) to logits over the vocabulary [b t vocab]."""
        if tokens.ndim != 2:
            raise ShapeError(
                f"expected tokens of shape [batch tokens], got {tuple(tokens.shape)}"
            )
        _check_integers(tokens)
        if caches is not None and len(caches) != len(self.blocks):
            raise InvalidValueError(
                f"expected one cache per layer, {len(self.blocks)}, got {len(caches)}"
            )
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=caches[i] if caches else None, mask=mask, pos=pos)
        x = self.norm(x)
        return self.head(x)

    def new_caches(self, max_length: int | None = None) -> list[Cache]:
        """Returns an empty cache for each layer, of the kind that the layer's attention uses."""
        return [block.attention.new_cache(max_length) for block in self.blocks]  # type: ignore[union-attr, operator]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialises the embedding with std 1 and matrices with std 1/√fan_in.

        Matrices that write to the residual stream are divided by √(sublayers), or multiplied by DeepNorm's β.
        """
        init_tokens(self, self.config, self.embedding.weight, generator)


@torch.no_grad()
def init_tokens(
    model: nn.Module,
    config: DecoderConfig,
    table: Float[Tensor, "vocab m"],
    generator: torch.Generator | None = None,
) -> None:
    """Initialises a model that maps tokens to tokens, see `Decoder.init_weights`; `table` is its embedding's weight."""
    init_linears(model, config, table, generator)
    table.normal_(0.0, 1.0, generator=generator)
    # a head with std 1 would start at a loss of tens of nats.
    if config.tied:
        table.mul_(config.d_model**-0.5)


@torch.no_grad()
def init_linears(
    model: nn.Module,
    config: DecoderConfig,
    table: Float[Tensor, "vocab m"],
    generator: torch.Generator | None = None,
) -> None:
    """Initialises linear layers; see `Decoder.init_weights`.

    `table` is skipped because it is the embedding's weight, which a tied head shares.
    """
    n = config.sublayers
    residual = deepnorm(n)[1] if config.deepnorm else 1 / math.sqrt(n)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5 * (
                residual if name.endswith((".o_proj", ".down")) else 1.0
            )
            if module.weight is not table:
                module.weight.normal_(0.0, std, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def build_block(
    config: DecoderConfig, spec: AttentionSpec, cross: Attention | None = None
) -> Block | GAUBlock:
    """Builds one layer of a model, with the given cross-attention, if any."""
    width, heads, dropout = config.d_model, config.n_heads, config.dropout
    if config.attention == "gau":
        # As in the paper; post-norm follows GAU-α, which has none.
        bias = config.norm_order == "pre"
        # 128 is the head size of the paper.
        gau = GAU(
            width, size=config.head_dim or 128, spec=spec, bias=bias, dropout=dropout
        )
        alpha = deepnorm(config.sublayers)[0] if config.deepnorm else 1.0
        return GAUBlock(gau, norm_order=config.norm_order, alpha=alpha)
    attention: Attention | MLA
    if config.attention == "mla":
        normed = config.latent_norm
        attention = MLA(
            width,
            heads,
            sizes=config.latent,
            spec=spec,
            latent_norm=normed,
            dropout=dropout,
        )
    else:
        attention = Attention(
            width, heads, config.n_kv_heads, config.head_dim, spec=spec, dropout=dropout
        )
    mlp = MLP(width, int(config.mlp_ratio * width), config.mlp)
    return Block(attention, mlp, width, config.norm_order, cross)


# Image input: patches next to text tokens, and a vision transformer.


@final
class FusedEmbedding(nn.Embedding):
    """Embeds text tokens from a table and image patches from their pixels, with x_t = W z_t if token t is a patch.

    Args:
        embedding: the table of all tokens. Its weight is shared with this module, and its rows for patches are not
            used.
        pixels: standardised pixels [codes p] of each patch code; patch codes are the last tokens of the vocabulary.

    >>> embed = FusedEmbedding(nn.Embedding(6, 8), torch.zeros(4, 3))
    >>> embed(torch.tensor([[0, 5]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self, embedding: nn.Embedding, pixels: Float[Tensor, "codes p"]
    ) -> None:
        super().__init__(
            embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight
        )
        self.weight = embedding.weight
        self.patch = nn.Linear(pixels.shape[1], embedding.embedding_dim, bias=False)
        # Codes of patches follow the text tokens.
        self.first = embedding.num_embeddings - len(pixels)
        # Read from the data again, so a checkpoint does not need them.
        self.register_buffer("pixels", pixels, persistent=False)

    def forward(self, input: Int[Tensor, "b t"]) -> Float[Tensor, "b t m"]:
        """Maps tokens [b t] to embeddings [b t m]."""
        code = input - self.first
        # Text tokens look up some patch too, because a shape that depends on the tokens would make the GPU wait.
        embedded_patches = self.patch(self.pixels[code.clamp_min(0)])  # type: ignore[index]
        return torch.where(
            (code >= 0)[..., None],
            embedded_patches,
            super().forward(input),
        )


@final
class ViT(nn.Module):
    """A vision transformer: linear patch embedding, learned positions, non-causal blocks, mean over patches, head.

    Args:
        config: sizes of the blocks; `vocab_size` is the number of classes.
        patches: number of patches per image.
        width: number of values per patch.

    Source: Dosovitskiy et al. 2020, arXiv 2010.11929; mean over patches in place of a class token: Beyer et al. 2022,
    arXiv 2205.01580.

    >>> model = ViT(DecoderConfig(vocab_size=10), patches=4, width=12)
    >>> model(torch.zeros(2, 4, 12)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: DecoderConfig, *, patches: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Linear(width, config.d_model, bias=False)
        self.position = nn.Embedding(patches, config.d_model)
        self.blocks = nn.ModuleList(build_block(config, spec) for spec in config.specs)
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self, patches: Float[Tensor, "b patches p"]
    ) -> Float[Tensor, "b classes"]:
        """Maps patches [b t p] to logits over the classes [b classes]."""
        expected = (self.position.num_embeddings, self.patch.in_features)
        if patches.ndim != 3 or tuple(patches.shape[1:]) != expected:
            raise ShapeError(
                f"expected patches of shape [batch {expected[0]} {expected[1]}], got {tuple(patches.shape)}"
            )
        x = self.patch(patches) + self.position.weight
        for block in self.blocks:
            x = block(x, causal=False)
        return self.head(self.norm(x).mean(1))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialises weights as `Decoder.init_weights` does, and positions with std 1."""
        init_linears(self, self.config, self.position.weight, generator)
        self.position.weight.normal_(0.0, 1.0, generator=generator)


# An encoder-decoder: self-attention on both sides, and cross-attention from the decoder to the encoder.


@final
class EncoderDecoder(nn.Module):
    """An encoder-decoder over one sequence: its first `source` tokens are encoded, and the remaining tokens are
    predicted.

    The encoder has `config.n_layers` non-causal blocks. The decoder has the same number of causal blocks, each with
    cross-attention to the normed output of the encoder. Both sides share the embedding.

    Args:
        config: sizes of both sides; attention must be multi-head.
        source: number of source tokens, at least 1.

    Raises:
        InvalidValueError: the attention is not multi-head, or `source` is below 1.

    Source: Vaswani et al. 2017, arXiv 1706.03762, with a norm before each branch and after the last block of each side.

    Example:
        >>> model = EncoderDecoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2), source=3)
        >>> model(torch.zeros(1, 8, dtype=torch.int64)).shape
        torch.Size([1, 5, 11])
    """

    def __init__(self, config: DecoderConfig, *, source: int) -> None:
        super().__init__()
        check(
            config.attention == "mha",
            "attention='mha' for an encoder–decoder",
            repr(config.attention),
        )
        check(source >= 1, "a source of at least 1 token", source)
        self.config, self.source = config, source
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(build_block(config, spec) for spec in config.specs)
        self.encoder_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.blocks = nn.ModuleList(
            build_block(config, spec, cross=_cross(config, i))
            for i, spec in enumerate(config.specs)
        )
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Int[Tensor, "b st"]) -> Float[Tensor, "b t vocab"]:
        """Maps source and target, concatenated into one sequence [b source+t] (int64), to logits [b t vocab] for the
        next target token at each position.
        """
        if tokens.ndim != 2 or tokens.shape[1] <= self.source:
            raise ShapeError(
                f"expected tokens of shape [batch more than {self.source}], got {tuple(tokens.shape)}"
            )
        _check_integers(tokens)
        memory, x = self.embedding(tokens).split(
            [self.source, tokens.shape[1] - self.source], dim=1
        )
        for block in self.encoder:
            memory = block(memory, causal=False)
        memory = self.encoder_norm(memory)
        for block in self.blocks:
            x = block(x, context=memory)
        x = self.norm(x)
        return self.head(x)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialises weights as `Decoder.init_weights` does."""
        init_tokens(self, self.config, self.embedding.weight, generator)


def _cross(config: DecoderConfig, layer: int) -> Attention:
    """Builds a layer's cross-attention, under the layer's spec."""
    sizes = (config.d_model, config.n_heads, config.n_kv_heads, config.head_dim)
    return Attention(*sizes, spec=config.specs[layer], dropout=config.dropout)
