"""Numbers of a layer made of its heads' sink shares, and the rule on them."""

import math
import statistics

import numpy as np
import pytest

from qkeel.monitor import Sample, sample_table
from qkeel.records import LAYER_FIELDS, SINK_HEAD, explain_field, fold_heads


def by_hand(name, heads):
    """The definition, head by head in Python floats."""
    known = [x for x in heads if not math.isnan(x)]
    over, under = [x for x in known if x > 0.3], [x for x in known if x <= 0.3]
    if not known:
        return math.nan
    if name == "sink_head_ratio":
        return len(over) / len(known)
    if name == "sink_head_max":
        return max(known)
    if name.endswith("_ratio"):
        return min(known) / statistics.median(known)
    return (
        math.fsum(over) / len(over) - math.fsum(under) / len(under)
        if over and under
        else math.nan
    )


@pytest.mark.parametrize("name", LAYER_FIELDS)
def test_a_layers_number_is_its_definition_and_leaves_out_what_was_not_measured(
    name,
):
    rng = np.random.default_rng(3)
    values = rng.random((50, 7))
    values[rng.random(values.shape) < 0.4] = np.nan
    values[0], values[1] = (
        np.nan,
        [0.3, 0.30000001, *[np.nan] * 5],
    )  # exactly 0.3 is no sink head
    found = fold_heads(name, values)
    assert np.allclose(
        found,
        [by_hand(name, row.tolist()) for row in values],
        rtol=1e-12,
        equal_nan=True,
    )


def test_the_whole_models_share_is_over_heads_and_not_over_layers():
    shares = np.array([[0.9, np.nan, np.nan], [0.1, 0.2, 0.3]])
    one = Sample(step=4, layers=("a", "b"), heads={"sink_share": shares})
    assert one.overall("sink_head_ratio") == 0.25
    found = one.summaries()
    assert found["attn/sink_head_ratio"] == 0.25
    assert found["attn/layer_00/sink_head_ratio"] == 1.0
    assert found["attn/sink_head_gap"] == pytest.approx(0.7)
    assert "attn/layer_00/sink_head_gap" not in found
    assert "sink heads" in sample_table(one)
    assert "sink heads" not in sample_table(
        Sample(step=0, layers=("a",), heads={"entropy": np.ones((1, 1))})
    )
    assert (
        explain_field("sink_head_ratio")
        == f"share of heads with sink_share above {SINK_HEAD} [share]"
    )
