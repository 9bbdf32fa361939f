"""Modules with parameters: attention, latent attention, gated attention units, cache, blocks, a decoder."""

from qkeel.nn.attention import Attention
from qkeel.nn.block import MLP, Block
from qkeel.nn.cache import Cache, KVCache, LatentCache
from qkeel.nn.decoder import Decoder, DecoderConfig
from qkeel.nn.gau import GAU, GAUBlock
from qkeel.nn.mla import MLA, LatentSizes
from qkeel.nn.patches import FusedEmbedding, ViT

__all__ = [
    "GAU",
    "MLA",
    "MLP",
    "Attention",
    "Block",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "FusedEmbedding",
    "GAUBlock",
    "KVCache",
    "LatentCache",
    "LatentSizes",
    "ViT",
]
