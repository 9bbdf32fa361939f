"""The places of attention in a model, and the tap that accumulates their statistics."""

from qkeel.sites.by_hand import describe
from qkeel.sites.find import find_sites
from qkeel.sites.missed import Missed, Sites
from qkeel.sites.site import AttentionSite, HeadSlice, LogitTerm, Reading
from qkeel.sites.tap import Tap

__all__ = ["AttentionSite", "HeadSlice", "LogitTerm", "Missed", "Reading", "Sites", "Tap", "describe", "find_sites"]
