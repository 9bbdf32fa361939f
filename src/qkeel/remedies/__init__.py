"""FIX: remedies by name, applied in one line and undone in one line."""

import sys
from types import ModuleType

from qkeel.remedies.apply import (
    ALIASES,
    REMEDIES,
    Note,
    apply,
    canonical,
    note,
    parse,
    remedies,
)
from qkeel.remedies.base import Remedy, Target

__all__ = [
    "ALIASES",
    "REMEDIES",
    "Note",
    "Remedy",
    "Target",
    "apply",
    "canonical",
    "note",
    "parse",
    "remedies",
]


class _Room(ModuleType):
    # The public name qkeel.remedies is both this package and the function that lists what is in it.
    def __call__(self) -> dict[str, str]:
        return remedies()


sys.modules[__name__].__class__ = _Room
