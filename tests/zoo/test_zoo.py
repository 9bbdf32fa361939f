"""Sites found are the attention layers that exist, with the entropies of the weights that the model returns."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.zoo.census import IMPLEMENTATIONS, judge, passed, verdict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAST = ("llama", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "qwen3_next")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FAST)
def test_a_few_architectures_are_seen_whole(name: str, implementation: str) -> None:
    result = judge(name, implementation)
    if verdict(name, result) == "no sdpa":
        pytest.skip("transformers has no sdpa for it")
    assert passed(result), result
    assert result["told"] == result["sites"]


@pytest.mark.zoo
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_is_seen_whole(name: str, implementation: str) -> None:
    result = judge(name, implementation)
    found = verdict(name, result)
    if found == "FAIL":
        pytest.fail(str(result))
    if found != "ok":
        pytest.skip(found)
