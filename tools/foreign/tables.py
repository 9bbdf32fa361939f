"""The tables of targets, joined."""

from __future__ import annotations

from tests.foreign.sequences import SEQUENCES
from tests.foreign.target import Target
from tests.foreign.vision import VISION

TARGETS: list[Target] = sorted([*VISION, *SEQUENCES], key=lambda t: t.package.lower())
