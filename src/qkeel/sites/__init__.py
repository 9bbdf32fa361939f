"""Where attention lives in a model, and the tap that accumulates a site's statistics."""

from qkeel.sites.described import describe
from qkeel.sites.find import find_sites
from qkeel.sites.site import AttentionSite, HeadSlice, LogitTerm, Reading
from qkeel.sites.tap import Tap

__all__ = ["AttentionSite", "HeadSlice", "LogitTerm", "Reading", "Tap", "describe", "find_sites"]
