"""Modules with parameters: attention, latent attention, gated attention units, caches, blocks, and models built from
them.

The files:

    attention            MHA, GQA, MQA and GAU, with a cache; mla: latent attention
    decoder              blocks, and the lab's models
    scaled_dot_product   F.scaled_dot_product_attention on qkeel's kernels
"""

from qkeel.nn.attention import GAU, Attention, Cache, GAUBlock, KVCache, LatentCache
from qkeel.nn.decoder import (
    MLP,
    Block,
    Decoder,
    DecoderConfig,
    EncoderDecoder,
    FusedEmbedding,
    ViT,
)
from qkeel.nn.mla import MLA, LatentSizes
from qkeel.nn.scaled_dot_product import (
    scaled_dot_product_attention as functional_attention,
)

__all__ = [
    "GAU",
    "MLA",
    "MLP",
    "Attention",
    "Block",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "FusedEmbedding",
    "GAUBlock",
    "KVCache",
    "LatentCache",
    "LatentSizes",
    "ViT",
    "functional_attention",
]
