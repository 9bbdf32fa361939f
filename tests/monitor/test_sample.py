"""A sample folds heads as the table of fields says, and gives trackers few keys."""

import numpy as np
import pytest

from qkeel.monitor import Sample, sample_line, sample_table

from .samples import LAYERS, sample


def test_the_whole_model_is_folded_over_heads_and_not_over_layers():
    one = sample(3)
    assert one.by_layer("entropy").tolist() == [3.0, 1.5]
    assert one.overall("entropy") == pytest.approx(12 / 5)
    assert np.isnan(one.overall("key_norm"))


def test_trackers_get_layers_but_no_heads_and_nothing_unmeasured():
    found = sample(
        3,
        cos_max=[[0.5, 0.6, 0.7], [np.nan, np.nan]],
        key_norm=[[np.nan] * 3, [1.0, 3.0]],
    ).summaries()
    assert found == {
        "attn/max_logit": 14.23,
        "attn/entropy": pytest.approx(2.4),
        "attn/cos_max": 0.7,
        "attn/key_norm": 2.0,
        "attn/layer_00/max_logit": 3.0,
        "attn/layer_01/max_logit": 14.23,
        "attn/layer_00/entropy": 3.0,
        "attn/layer_01/entropy": 1.5,
        "attn/layer_01/key_norm": 2.0,
    }
    assert all(type(value) is float for value in found.values())


def test_blocks_and_evaluation_have_keys_of_their_own():
    values = {
        "block_output_rms/h.1.attn": 3.0,
        "lr": 0.1,
        "max_logit": 5.0,
    }
    one = Sample(step=0, values=values, layers=LAYERS, phase="eval")
    assert one.summaries() == {
        "eval/attn/max_logit": 5.0,
        "eval/hidden/block_output_rms": 3.0,
        "eval/hidden/layer_01/block_output_rms": 3.0,
    }


def test_a_sample_without_heads_is_one_line():
    assert sample_table(Sample(step=0, layers=LAYERS)) == "step 0"
    assert (
        sample_line(Sample(step=5, values={"max_logit": 3.0}, phase="eval"))
        == "step 5 (untrained), max logit 3"
    )
