"""A decoder language model made of qkeel's blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError, check, check_known
from qkeel.functional.scaling import deepnorm
from qkeel.nn.attention import Attention, check_heads
from qkeel.nn.block import MLP, NORM_ORDERS, Block, NormOrder
from qkeel.nn.cache import Cache
from qkeel.nn.gau import GAU, GAUBlock
from qkeel.nn.mla import MLA, LatentSizes
from qkeel.nn.spec_module import check_dropout
from qkeel.spec import AttentionSpec, preset
from qkeel.spec.shapes import GivenMask, GivenPosQ


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of a Decoder. `spec` is one for all layers, or one for each (`qkeel.spec.layer_specs`).

    With a `base_width` the outputs follow µP: the head starts as in a model of that width, and its logits are times
    base_width / d_model (Yang et al. 2022, arXiv 2203.03466, table 8). The rates of µP are the optimizer's.
    """

    vocab_size: int  #: tokens of the vocabulary
    d_model: int = 64  #: width of the residual stream
    n_layers: int = 2  #: blocks
    n_heads: int = 4  #: query heads of a block; 1 for gau
    n_kv_heads: int | None = None  #: key heads, which divide the query heads; None: as many
    head_dim: int | None = None  #: numbers of one head's query; None: d_model / n_heads
    spec: AttentionSpec | tuple[AttentionSpec, ...] = dataclasses.field(default_factory=lambda: preset("baseline"))
    attention: Literal["mha", "mla", "gau"] = "mha"  #: Attention, MLA or GAU
    latent: LatentSizes = dataclasses.field(default_factory=LatentSizes)  #: sizes of MLA
    latent_norm: bool = False  #: RMS norm on the latents of MLA
    mlp: Literal["gelu", "swiglu"] = "gelu"  #: activation; a GAU has no MLP
    mlp_ratio: float = 4.0  #: width of the MLP over d_model
    norm_order: NormOrder = "pre"  #: places of a block's norms
    deepnorm: bool = False  #: α and β of DeepNorm, for gau with post
    tied: bool = False  #: whether the head is the embedding
    dropout: float = 0.0  #: of the attention weights, in training
    base_width: int | None = None

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("attention", self.attention, ("mha", "mla", "gau")),
            ("MLP", self.mlp, ("gelu", "swiglu")),
            ("norm order", self.norm_order, NORM_ORDERS),
        ):
            check_known(kind, name, known)
        base = 1 if self.base_width is None else self.base_width
        sizes = (self.vocab_size, self.d_model, self.n_layers, self.n_heads, base)
        for name, size in zip(("vocab_size", "d_model", "n_layers", "n_heads", "base_width"), sizes, strict=True):
            check(size >= 1, f"{name} of at least 1", size)
        check(int(self.mlp_ratio * self.d_model) >= 1, "an MLP of at least one unit", f"mlp_ratio={self.mlp_ratio}")
        check(len(self.specs) == self.n_layers, f"one spec per layer, {self.n_layers}", len(self.specs))
        check_dropout(self.dropout)
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, self.head_dim)
        if self.attention == "gau" and self.n_heads != 1:
            raise InvalidValueError(f"a GAU has one head; expected n_heads=1, got {self.n_heads}")
        if self.deepnorm and not (self.attention == "gau" and self.norm_order == "post"):
            raise InvalidValueError("deepnorm is for attention='gau' with norm_order='post'")

    @property
    def output_scale(self) -> float:
        """The factor on what the head is given: 1, or under µP base_width / d_model."""
        return 1.0 if self.base_width is None else self.base_width / self.d_model

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The spec of each layer's attention."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,) * self.n_layers

    @property
    def sublayers(self) -> int:
        """The number of branches that write to the residual stream: a GAU is attention and MLP in one."""
        return self.n_layers if self.attention == "gau" else 2 * self.n_layers


@final
class Decoder(nn.Module):
    """Embedding, blocks, final RMS norm, head (tied or not), in the sizes of `config`."""

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
        mask: GivenMask | None = None,
        pos: GivenPosQ | None = None,
    ) -> Float[Tensor, "b t vocab"]:
        """Maps tokens [b t] (int64) to logits over the vocabulary [b t vocab]."""
        if tokens.ndim != 2:
            raise ShapeError(f"expected tokens of shape [batch tokens], got {tuple(tokens.shape)}")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InvalidTypeError(f"expected tokens of an integer dtype, got {tokens.dtype}")
        if caches is not None and len(caches) != len(self.blocks):
            raise InvalidValueError(f"expected one cache per layer, {len(self.blocks)}, got {len(caches)}")
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=caches[i] if caches else None, mask=mask, pos=pos)
        x = self.norm(x)
        return self.head(x if self.config.output_scale == 1 else x * self.config.output_scale)

    def new_caches(self, max_length: int | None = None) -> list[Cache]:
        """An empty cache per layer, of the kind its attention takes: keys and values, or latents (MLA)."""
        return [block.attention.new_cache(max_length) for block in self.blocks]  # type: ignore[union-attr, operator]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Embedding std 1, matrices std 1/√fan_in, those that write to the residual stream a further /√(sublayers).
        Under DeepNorm those have its β instead.
        """
        init_tokens(self, self.config, self.embedding.weight, generator)


@torch.no_grad()
def init_tokens(
    model: nn.Module, config: DecoderConfig, table: Float[Tensor, "vocab m"], generator: torch.Generator | None = None
) -> None:
    """Weights of a model from tokens to tokens, see `Decoder.init_weights`; `table` is its embedding's weight."""
    init_linears(model, config, table, generator)
    table.normal_(0.0, 1.0, generator=generator)
    if config.tied:  # a head of std 1 would start with a loss of tens of nats
        table.mul_((config.base_width or config.d_model) ** -0.5)


@torch.no_grad()
def init_linears(
    model: nn.Module, config: DecoderConfig, table: Float[Tensor, "vocab m"], generator: torch.Generator | None = None
) -> None:
    """Matrices std 1/√fan_in, those that write to the residual stream less (see `Decoder.init_weights`).

    `table` is left alone: a head that shares its weight with the embedding.
    """
    n = config.sublayers
    residual = deepnorm(n)[1] if config.deepnorm else 1 / math.sqrt(n)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            fan_in = config.base_width if config.base_width and name == "head" else module.in_features
            std = fan_in**-0.5 * (residual if name.endswith((".o_proj", ".down")) else 1.0)
            if module.weight is not table:
                module.weight.normal_(0.0, std, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def build_block(config: DecoderConfig, spec: AttentionSpec, cross: Attention | None = None) -> Block | GAUBlock:
    """One layer of a model of these sizes and choices, with this cross-attention, if any."""
    width, heads, dropout = config.d_model, config.n_heads, config.dropout
    if config.attention == "gau":
        bias = config.norm_order == "pre"  # the paper's unit; post-norm is GAU-α's, without
        gau = GAU(width, size=config.head_dim or 128, spec=spec, bias=bias, dropout=dropout)
        alpha = deepnorm(config.sublayers)[0] if config.deepnorm else 1.0
        return GAUBlock(gau, norm_order=config.norm_order, alpha=alpha)
    attention: Attention | MLA
    if config.attention == "mla":
        normed = config.latent_norm
        attention = MLA(width, heads, sizes=config.latent, spec=spec, latent_norm=normed, dropout=dropout)
    else:
        attention = Attention(width, heads, config.n_kv_heads, config.head_dim, spec=spec, dropout=dropout)
    mlp = MLP(width, int(config.mlp_ratio * width), config.mlp)
    return Block(attention, mlp, width, config.norm_order, cross)
