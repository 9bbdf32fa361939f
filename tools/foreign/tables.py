"""The tables of targets, joined."""

from __future__ import annotations

from tools.foreign.sequences import SEQUENCES
from tools.foreign.target import Target
from tools.foreign.vision import VISION

TARGETS: list[Target] = sorted([*VISION, *SEQUENCES], key=lambda t: t.package.lower())
