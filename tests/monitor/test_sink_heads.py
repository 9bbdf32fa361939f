"""Numbers of a layer made of its heads' sink shares, and the rule on them."""

import numpy as np

from qkeel.monitor import Sample, sample_table
from qkeel.records import SINK_HEAD, explain_field


def test_the_whole_models_share_is_over_heads_and_not_over_layers():
    shares = np.array([[0.9, np.nan, np.nan], [0.1, 0.2, 0.3]])
    one = Sample(step=4, layers=("a", "b"), heads={"sink_share": shares})
    assert one.overall("sink_head_ratio") == 0.25
    found = one.summaries()
    assert found["attn/sink_head_ratio"] == 0.25
    assert found["attn/layer_00/sink_head_ratio"] == 1.0
    assert "sink heads" in sample_table(one)
    assert "sink heads" not in sample_table(
        Sample(step=0, layers=("a",), heads={"entropy": np.ones((1, 1))})
    )
    assert (
        explain_field("sink_head_ratio")
        == f"share of heads with sink_share above {SINK_HEAD} [share]"
    )
