"""The attention sites of a model, and the tap that accumulates their statistics."""

from qkeel.capture.calls import UnrecognizedAttention
from qkeel.capture.described import Reading
from qkeel.sites.description import describe
from qkeel.sites.find import (
    find_sites,
)
from qkeel.sites.site import AttentionSite, HeadSlice, QKProduct, Sites
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
