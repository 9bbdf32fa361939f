"""Images on their way into a transformer: patches next to tokens of text, and a vision transformer."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkeel.errors import ShapeError
from qkeel.nn.decoder import DecoderConfig, build_block, init_linears


@final
class FusedEmbedding(nn.Embedding):
    """Embeddings of text from a table, of image patches from their pixels: x_t = W z_t where token t is a patch.

    Args:
        embedding: the table of all tokens, whose weight stays the same object; its rows of patches are not used.
        pixels: [codes p], standardised pixels of each patch code, the last tokens of the vocabulary.
    """

    def __init__(self, embedding: nn.Embedding, pixels: Float[Tensor, "codes p"]) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight)
        self.weight = embedding.weight
        self.patch = nn.Linear(pixels.shape[1], embedding.embedding_dim, bias=False)
        self.first = embedding.num_embeddings - len(pixels)
        self.register_buffer("pixels", pixels, persistent=False)

    def forward(self, input: Int[Tensor, "b t"]) -> Float[Tensor, "b t m"]:
        """Maps tokens [b t] to [b t m]."""
        code = input - self.first
        seen = self.patch(self.pixels[code.clamp_min(0)])  # type: ignore[index]
        return torch.where((code >= 0)[..., None], seen, super().forward(input))


@final
class ViT(nn.Module):
    """Patches by a linear map plus learned positions, blocks without causal mask, mean over patches, head.

    Args:
        config: sizes of the blocks; `vocab_size` is the number of classes.
        patches: patches of an image. width: numbers in a patch.

    Source: Dosovitskiy et al. 2020, arXiv 2010.11929; mean over patches in place of a class token: Beyer et al. 2022,
    arXiv 2205.01580.
    """

    def __init__(self, config: DecoderConfig, *, patches: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Linear(width, config.d_model, bias=False)
        self.position = nn.Embedding(patches, config.d_model)
        self.blocks = nn.ModuleList(build_block(config, spec) for spec in config.specs)
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, patches: Float[Tensor, "b patches p"]) -> Float[Tensor, "b classes"]:
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
        """As `Decoder.init_weights`, positions of std 1."""
        init_linears(self, self.config, self.position.weight, generator)
        self.position.weight.normal_(0.0, 1.0, generator=generator)
