"""The baseline, which changes nothing."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.handle import Handle
from qkeel.remedies.base import Remedy, Target


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoRemedy(Remedy):
    """Leaves everything as it is."""

    name, stacks = "none", True
    line = "no remedy"
    source = "the baseline"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        return Handle(lambda: None)
