"""FIX: remedies by name, applied in one line, undone in one line."""

from qkeel.remedies.apply import ALIASES, REMEDIES, Note, apply, canonical, note, parse, remedies
from qkeel.remedies.base import Remedy, Target

__all__ = ["ALIASES", "REMEDIES", "Note", "Remedy", "Target", "apply", "canonical", "note", "parse", "remedies"]
