"""The comparison with other monitors names every key of theirs that concerns attention, and only numbers that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qkeel.errors import UnknownNameError
from qkeel.records import explain_field

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "other-monitors.md"
# As in the source code of llm-internal-medicine that the page is about: QK and DSA monitors, updates, status.
KEYS = re.findall(
    r"\w+",
    """
max mean entropy_avg entropy_min entropy_max entropy_std sink sink_head_ratio sink_head_max sink_nonsink_gap
attn_sink_logit lse lse_std lse_std_max_mean_ratio gate_avg gate_std gate_std_max_mean_ratio gate_max_median_ratio
gate_min_median_ratio q_norm_mean q_norm_max k_norm_mean k_norm_max
delta2_norm delta2_stable_rank delta2_singular_spectrum delta3_norm delta3_stable_rank delta3_singular_spectrum
update_rms param_rms update_param_ratio
index_q_rms index_q_abs_max index_k_rms index_k_abs_max index_weights_mean index_weights_abs_max index_weights_neg_ratio
score_selected_mean score_unselected_mean score_topk_mass select_ratio select_dist_mean select_dist_max
select_local_ratio select_key_coverage attn_recall attn_recall_min attn_kl attn_top1_hit attn_dense_entropy
attn_sparse_entropy select_iou_prev
activation_rms channel_max channel_median channel_max_ratio massive_act_channel_count attn_update_rms_ratio
ffn_update_rms_ratio compatible_sources_min compatible_sources_max observations_min observations_max
observed_layers_min observed_layers_max runtime_errors_max
""",
)
NAME = re.compile(r"`([^`]+)`")
LAYER_TYPE = {"sparse"}


def tables() -> list[list[list[str]]]:
    """The cells of each table, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in x.splitlines()[2:]] for x in blocks]


def test_every_number_of_ours_exists_and_no_cell_is_empty() -> None:
    overview, keys = tables()
    assert len(overview) > 15
    assert len(keys) > 30
    for ours in [row[1] for row in overview] + [row[2] for row in keys]:
        names = [name for name in NAME.findall(ours) if name not in LAYER_TYPE]
        assert names or "rules" in ours, ours
        for name in names:
            assert explain_field(name)
    with pytest.raises(UnknownNameError):
        explain_field("no_such_number")


def test_every_key_of_theirs_that_concerns_attention_has_a_row() -> None:
    _, keys = tables()
    named = [name for row in keys for name in NAME.findall(row[1])]
    assert len(named) == len(set(named))
    assert set(KEYS) <= set(named)
