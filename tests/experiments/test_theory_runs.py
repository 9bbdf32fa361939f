"""The figures of experiments/notes/theory.md can be made."""

from __future__ import annotations

import pytest
from experiments import theory

from qkeel.lab.config import DataConfig
from qkeel.lab.text import load
from qkeel.spec import AttentionSpec, Rope


def test_a_few_steps_of_training_give_every_number() -> None:
    found = theory.train(AttentionSpec(position=Rope()), load(DataConfig(context=32)), 2, 0, 0.01, norm_order="swin")
    assert set(found) == {"loss", "max_logit", "mlp", "block"}
    assert all(value > 0 for value in found.values())


def test_presets_under_one_over_root_d_start_with_logits_of_standard_deviation_one() -> None:
    spread = theory.initial_spread()
    for name in ("baseline", "qna", "kna", "vit22b", "chameleon", "qwen3", "llama4"):
        assert spread[name] == pytest.approx(1, rel=0.03)


def test_a_missing_root_saturates_more_the_wider_the_head() -> None:
    tops = [theory.saturation(d, 1.0)[0] for d in (16, 64, 256)]
    assert tops == sorted(tops)
    assert theory.saturation(64, 1 / 8)[0] < 0.1
