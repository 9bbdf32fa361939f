"""Sites found are the attention layers that exist, with the entropies of the weights that the model gives away."""

import pytest

pytest.importorskip("transformers")

import torch
from tests.quick import one_in
from tools.zoo.census import judge
from tools.zoo.compare import closest
from tools.zoo.page import IMPLEMENTATIONS, passed, verdict
from tools.zoo.tables import TABLES, Entry, entries

CAUSAL = (
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "bloom",
    "qwen3_next",
)
OTHERS = ("bert", "t5", "whisper", "wavlm", "vit", "swin", "clip", "detr", "qwen2_vl")
FAST = [
    e
    for table, names in (("causal", CAUSAL), ("others", OTHERS))
    for e in entries(table)
    if e.name in names
]
ALL = [e for table in TABLES for e in entries(table)]


def named(entry):
    return entry.class_name if isinstance(entry, Entry) else None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("entry", one_in(FAST, 3), ids=named)
def test_a_few_architectures_are_seen_whole(entry, implementation):
    result = judge(entry, implementation)
    if verdict(entry.name, result) == "no sdpa":
        pytest.skip("transformers has no sdpa for it")
    assert passed(result), result
    # WavLM's relative positions are gated by the input, so its logits depend on more than the rows of q and k.
    assert result["told"] == (0 if entry.name == "wavlm" else result["sites"])


def test_the_second_table_has_classes_of_its_own():
    causal, others = (
        [e.class_name for e in entries(table)] for table in ("causal", "others")
    )
    assert len(causal) > 180
    assert len(others) > 200
    assert len(set(others)) == len(others)
    assert not set(others) & set(causal)


def test_a_layer_too_few_or_too_many_and_a_wrong_entropy_are_no_pass():
    good = {"layers": 6, "sites": 6, "modules": 6, "calls": 6, "error": 1e-6}
    assert passed(good)
    assert passed({**good, "sites": 12})  # two calls of each module
    for wrong in (
        {"error": 2e-4},
        {"error": float("inf")},
        {"error": float("nan")},
        {"layers": 5},
        {"layers": 7},
    ):
        assert not passed({**good, **wrong})
    assert not passed({**good, "layers": 0, "sites": 0})
    assert not passed({"reason": "no attention"})


def test_each_reference_takes_a_call_of_its_own():
    a, b = torch.tensor([[0.5, 1.0]]), torch.tensor([[0.6, 1.0]])
    assert closest([a, b], [b, a]) == (0.0, [])
    error, left = closest([a, a], [a, b])
    assert error == pytest.approx(0.1)
    assert left == []
    assert closest([a, a], [a])[0] == float("inf")
    assert closest([a.mean(1, keepdim=True)], [b, a]) == (0.0, [b])


@pytest.mark.zoo
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("entry", ALL, ids=named)
def test_every_architecture_is_seen_whole(entry, implementation):
    result = judge(entry, implementation)
    found = verdict(entry.name, result)
    if found == "FAIL":
        pytest.fail(str(result))
    if found != "ok":
        pytest.skip(found)
