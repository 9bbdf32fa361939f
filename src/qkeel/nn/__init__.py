"""Modules with parameters: attention, latent attention, gated attention units, cache, blocks, models made of them."""

from qkeel.nn.attention import Attention
from qkeel.nn.block import MLP, Block
from qkeel.nn.cache import Cache, KVCache, LatentCache
from qkeel.nn.decoder import Decoder, DecoderConfig
from qkeel.nn.encoder_decoder import EncoderDecoder
from qkeel.nn.gau import GAU, GAUBlock
from qkeel.nn.image_patches import FusedEmbedding, ViT
from qkeel.nn.mla import MLA, LatentSizes
from qkeel.nn.scaled_dot_product import scaled_dot_product_attention as functional_attention

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
