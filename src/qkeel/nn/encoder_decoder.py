"""An encoder–decoder of qkeel's blocks: self-attention on both sides, and cross-attention from one to the other."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, ShapeError, check
from qkeel.nn.attention import Attention
from qkeel.nn.decoder import DecoderConfig, build_block, init_tokens


@final
class EncoderDecoder(nn.Module):
    """A source and what follows from it, in one sequence: its first `source` tokens are encoded, the others predicted.

    `config.n_layers` blocks without causal mask encode; as many causal ones decode, each with cross-attention to what
    the last block of the encoder gives, normed. Both sides share the embedding.

    Args:
        config: sizes of both sides; multi-head attention.
        source: tokens of a source, at least 1.

    Raises: InvalidValueError for other attention, or no source.

    Source: Vaswani et al. 2017, arXiv 1706.03762; a norm before each branch and after the last block of each side.

    >>> model = EncoderDecoder(DecoderConfig(vocab_size=11, d_model=8, n_heads=2), source=3)
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).shape
    torch.Size([1, 5, 11])
    """

    def __init__(self, config: DecoderConfig, *, source: int) -> None:
        super().__init__()
        check(config.attention == "mha", "attention='mha' of an encoder–decoder", repr(config.attention))
        check(source >= 1, "a source of at least 1 token", source)
        self.config, self.source = config, source
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(build_block(config, spec) for spec in config.specs)
        self.encoder_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.blocks = nn.ModuleList(
            build_block(config, spec, cross=_cross(config, i)) for i, spec in enumerate(config.specs)
        )
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Int[Tensor, "b st"]) -> Float[Tensor, "b t vocab"]:
        """Maps a source and its target in a row [b source+t] (int64) to logits of each target token's successor."""
        if tokens.ndim != 2 or tokens.shape[1] <= self.source:
            raise ShapeError(f"expected tokens of shape [batch more than {self.source}], got {tuple(tokens.shape)}")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InvalidTypeError(f"expected tokens of an integer dtype, got {tokens.dtype}")
        memory, x = self.embedding(tokens).split([self.source, tokens.shape[1] - self.source], dim=1)
        for block in self.encoder:
            memory = block(memory, causal=False)
        memory = self.encoder_norm(memory)
        for block in self.blocks:
            x = block(x, context=memory)
        x = self.norm(x)
        return self.head(x if self.config.output_scale == 1 else x * self.config.output_scale)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """As `Decoder.init_weights`."""
        init_tokens(self, self.config, self.embedding.weight, generator)


def _cross(config: DecoderConfig, layer: int) -> Attention:
    """The cross-attention of a layer, under the layer's spec."""
    sizes = (config.d_model, config.n_heads, config.n_kv_heads, config.head_dim)
    return Attention(*sizes, spec=config.specs[layer], dropout=config.dropout)
