"""The attention sites of a model, and the tap that accumulates their statistics."""

from qkeel.capture.described import describe
from qkeel.heads.site import (
    AttentionSite,
    HeadSlice,
    QKProduct,
    Reading,
    Sites,
    UnrecognizedAttention,
)
from qkeel.sites.find import find_sites
from qkeel.sites.tap import Tap

__all__ = [
    "AttentionSite",
    "HeadSlice",
    "QKProduct",
    "UnrecognizedAttention",
    "Reading",
    "Sites",
    "Tap",
    "describe",
    "find_sites",
]
