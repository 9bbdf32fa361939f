"""LoRA adapters of peft: what makes a head are the base weight's rows, lora_B's rows, and lora_A for all heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from qkeel import find_sites  # noqa: E402
from qkeel.capture.intercept import CaptureMode  # noqa: E402
from qkeel.sites import AttentionSite, HeadSlice  # noqa: E402

# peft asks transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

H, G, D = 4, 2, 8
IDS = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=H * D,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=H,
        num_key_value_heads=G,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=H * D, n_layer=1, n_head=H, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


def adapted(
    model: nn.Module, *targets: str, random: bool = True, **options: Any
) -> nn.Module:
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=list(targets), **options)
    ).double()
    if random:
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p)
    return model.eval()


@torch.no_grad()
def q_and_k(model: nn.Module) -> tuple[Tensor, Tensor]:
    calls: list[Any] = []
    with CaptureMode(model, lambda s: calls.append(s.call)):
        model(input_ids=IDS)
    return calls[0].q, calls[0].k


def ways(site: AttentionSite, side: str) -> list[list[str]]:
    found: list[list[str]] = []
    for term in site.terms:
        names = [
            part.parameter.split(".attn.")[-1].split("self_attn.")[-1]
            for part in getattr(term, side)
        ]
        if names not in found:
            found.append(names)
    return sorted(found)


@torch.no_grad()
def check_by_differences(model: nn.Module, site: AttentionSite) -> None:
    """Moving the rows of a head moves that head of q or k and no other, moving what all share moves all."""
    before = q_and_k(model)
    for side, (what, n) in enumerate((("query", H), ("key", site.n_kv_heads))):
        for part in getattr(site, what):
            weight = model.get_parameter(part.parameter)
            for h in range(part.n):
                moved = nudged(model, weight, part, h)[side] - before[side]
                reached = moved.abs().amax((0, 2, 3)) > 1e-9
                expected = (
                    torch.ones(n, dtype=torch.bool)
                    if part.n == 1
                    else torch.arange(n) == h
                )
                assert torch.equal(reached, expected), (part.parameter, h)


def nudged(
    model: nn.Module, weight: Tensor, part: HeadSlice, h: int
) -> tuple[Tensor, Tensor]:
    kept = weight.clone()
    lines = torch.zeros(weight.shape[part.axis], dtype=torch.float64)
    lines[part.index[h]] = 1e-3
    # Not one number for all: after a LayerNorm a row of equal numbers sees nothing.
    weight += torch.rand_like(weight) * (lines[:, None] if part.axis == 0 else lines)
    after = q_and_k(model)
    weight.copy_(kept)
    return after


BASE, A, B = (
    "q_proj.base_layer.weight",
    "q_proj.lora_A.default.weight",
    "q_proj.lora_B.default.weight",
)


@pytest.mark.parametrize("random", [True, False])
def test_both_projections_wrapped_give_every_pair_of_ways_even_before_the_first_step(
    random: bool,
) -> None:
    model = adapted(llama(), "q_proj", "k_proj", random=random)
    (site,) = find_sites(model, {"input_ids": IDS})
    assert len(site.terms) == 4
    assert ways(site, "query") == [[BASE], [A, B]]
    assert ways(site, "key") == [
        [n.replace("q_", "k_") for n in way] for way in ([BASE], [A, B])
    ]
    by_name = {p.parameter.split("self_attn.")[-1]: p for p in (*site.query, *site.key)}
    rows = torch.arange(H * D).view(H, D)
    assert torch.equal(by_name[BASE].index, rows)
    assert torch.equal(by_name[B].index, rows)
    assert by_name[A].index.tolist() == [[0, 1]]
    assert torch.equal(by_name["k_proj.lora_B.default.weight"].index, rows[:G])
    if random:
        check_by_differences(model, site)


def test_one_wrapped_projection_leaves_the_other_plain() -> None:
    model = adapted(llama(), "q_proj")
    (site,) = find_sites(model, {"input_ids": IDS})
    assert ways(site, "query") == [[BASE], [A, B]]
    assert ways(site, "key") == [["k_proj.weight"]]
    check_by_differences(model, site)


def test_a_wrapped_fused_projection_has_rows_for_q_and_for_k_in_base_and_adapter() -> (
    None
):
    model = adapted(gpt2(), "c_attn", fan_in_fan_out=True)
    (site,) = find_sites(model, {"input_ids": IDS})
    assert len(site.terms) == 4
    key = {p.parameter.rsplit("c_attn.")[-1]: p for p in site.key}
    assert (key["base_layer.weight"].axis, key["lora_B.default.weight"].axis) == (1, 0)
    rows = torch.arange(H * D).view(H, D)
    for name in ("base_layer.weight", "lora_B.default.weight"):
        assert torch.equal(key[name].index, H * D + rows)
    check_by_differences(model, site)


def test_of_several_adapters_those_that_are_active_count() -> None:
    model = adapted(llama(), "q_proj")
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    for p in model.parameters():
        p.data = p.data.double()
    second = ["q_proj.lora_A.second.weight", "q_proj.lora_B.second.weight"]
    states: list[tuple[Callable[[], object], list[list[str]]]] = [
        (lambda: model.set_adapter("second"), [[BASE], second]),
        (
            lambda: model.base_model.set_adapter(["default", "second"]),
            [[BASE], [A, B], second],
        ),
        (lambda: model.base_model.disable_adapter_layers(), [[BASE]]),
    ]
    for change, expected in states:
        change()
        (site,) = find_sites(model, {"input_ids": IDS})
        assert ways(site, "query") == sorted(expected)


def test_a_merged_adapter_is_part_of_the_base_weight() -> None:
    model = adapted(llama(), "q_proj")
    model.merge_adapter()
    (site,) = find_sites(model, {"input_ids": IDS})
    assert ways(site, "query") == [[BASE]]
    check_by_differences(model, site)
    model.unmerge_adapter()
    (site,) = find_sites(model.merge_and_unload(), {"input_ids": IDS})
    assert ways(site, "query") == [["q_proj.weight"]]


def test_frozen_weights_stay_frozen_and_untouched() -> None:
    model = adapted(llama(), "q_proj")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    find_sites(model, {"input_ids": IDS})
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == frozen
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
