"""The classes of input that are fuzzed; a new one is two functions and a line in the table of its file."""

from __future__ import annotations

from tests.fuzz import damaged, objects, texts
from tests.fuzz.hunt import Hunt

CLASSES: dict[str, Hunt] = {**texts.CLASSES, **objects.CLASSES, **damaged.CLASSES}
