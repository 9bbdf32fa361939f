"""The compatibility page is the tests' own output."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkeel.ops import KERNELS
from qkeel.remedies import REMEDIES
from qkeel.spec import PRESETS

from .matrix import FOREIGN, foreign_refusal, kernel_refusal, matrix, refusal_of
from .modes import MODES, mode_refusal, ways

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_matrix_has_a_row_for_every_preset_and_remedy() -> None:
    text = matrix()
    for name in (*PRESETS, *REMEDIES):
        assert f"\n| `{name}` |" in text


HINT = "python -m tests.conformance.modes > docs/compatibility.md"


def test_the_page_in_the_docs_begins_with_the_matrix() -> None:
    if PAGE.exists():
        assert PAGE.read_text(encoding="utf-8").partition("\n## Remedies and ways to run")[0] == matrix(), HINT


@pytest.mark.slow
def test_the_page_in_the_docs_ends_with_the_ways_to_run() -> None:
    if PAGE.exists():
        assert PAGE.read_text(encoding="utf-8") == matrix() + ways(), HINT


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_remedy_holds_in_every_mode_but_those_named(mode: str) -> None:
    refused = {name for name in REMEDIES if mode_refusal(name, mode)}
    assert refused == {
        "Llama, flex_attention": {*CALLS, "qkv_norm"},
        "Llama, micro-batches": {"sigma_reparam", "dropout"},  # a power iteration, and masks, per forward pass
    }.get(mode, set())


def test_every_preset_has_a_kernel_and_the_last_takes_all() -> None:
    last = list(KERNELS)[-1]
    assert [name for name in PRESETS if kernel_refusal(name, last)] == []


def test_only_a_capped_preset_is_refused_by_sdpa() -> None:
    refused = {name for name in PRESETS if kernel_refusal(name, "sdpa")}
    assert refused == {"gemma2"}
    assert "cap" in kernel_refusal("gemma2", "sdpa")


def test_plain_attention_refuses_no_remedy() -> None:
    assert {name: refusal_of(name, "MHA") for name in REMEDIES if refusal_of(name, "MHA")} == {}


NORMS = ("qk_norm", "key_norm", "query_norm", "cosine")
CALLS = ("softcap", "log_n", "attention_temperature", "sigmoid", "softpick", "sink")


def test_forward_remedies_fit_every_layout_of_heads() -> None:
    for kind, (layout, _) in FOREIGN.items():
        refused = {name for name in (*NORMS, *CALLS) if foreign_refusal(name, kind)}
        assert refused <= (set(NORMS) if layout == "deepseek" else set()), kind
