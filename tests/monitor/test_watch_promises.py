"""Watching changes nothing: losses, gradients, weights, buffers and random streams are the unwatched ones, bit for bit.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.monitor.families import FAMILIES, train  # noqa: E402


@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_watched_steps_are_the_unwatched_ones(name: str) -> None:
    family = FAMILIES[name]
    plain = train(family, every=None)
    seen = train(family, every=3)
    assert seen.same(plain)
    monitor = seen.monitor
    assert monitor is not None
    assert not monitor.active
    assert monitor.steps == 30
    assert len(monitor.history) == 10
    stats = monitor.read("train")
    assert len(stats) == family.sites == len(monitor.sites)
    assert torch.get_rng_state() is not None
