"""Recommendations: numbers where something was measured, elsewhere "not known" and why, one error for bad input."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from qkeel.cli.app import main
from qkeel.errors import QkeelError
from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig, recommend
from qkeel.lab.recommendation import evidence, expected_logit, predict, summed_rates
from qkeel.records import write_json

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"hidden_act": "silu", "vocab_size": 32000}


def at(lr: float, width: int = 64, depth: int = 2) -> RunConfig:
    model = ModelConfig(d_model=width, n_layers=depth, n_heads=width // 16)
    return RunConfig(model=model, optim=OptimConfig(lr=lr))


def test_logits_grow_with_rate_and_steps_and_intervals_hold_them() -> None:
    ends = []
    for lr in (0.003, 0.01, 0.03, 0.1):
        advice = recommend(at(lr))
        assert not advice.outside
        assert all(z.low < z.value < z.high for _, z in advice.logits)
        assert [step for step, _ in advice.logits] == sorted({step for step, _ in advice.logits})
        ends.append(advice.logits[-1][1].value)
    assert ends == sorted(ends)
    for logit, step, early, late in recommend(at(0.1)).passes:
        assert early is not None, logit
        assert step is not None, logit
        assert early <= step, logit
        assert late is None or late >= step, logit


def test_the_law_is_its_coefficients_and_intervals_widen_outside_of_the_fitted_sizes() -> None:
    law = {"coefficients": {"": 1.0, "s": 2.0, "sw": 0.5}, "fitted": {"w": [32, 64]}, "rates": [0.05]}
    law |= {"half_widths": [[0.1, 0.3], [1.0, 0.5]]}
    summed = summed_rates(dataclasses.replace(at(0.01), steps=3))[-1]
    assert summed == pytest.approx(0.01 * (1 + (0.05 + 0.95 * 0.75) + (0.05 + 0.95 * 0.25)))
    found = predict(at(0.01, width=128), law, math.e)
    assert found.value == pytest.approx(1 + 2 + 0.5 * math.log(2))
    assert found.high - found.value == pytest.approx(0.3)
    assert predict(at(0.1, width=128), law, math.e).high - found.value == pytest.approx(1.0)
    assert expected_logit(at(0.01), law, 1.0).value == pytest.approx(math.e)


def test_outside_of_what_was_measured_every_setting_is_named_and_no_number_is_given() -> None:
    base = RunConfig()
    cases = {
        "width is 512; measured: 64 to 256": at(0.03, width=512),
        "optimizer is muon; measured: adamw": dataclasses.replace(base, optim=OptimConfig(name="muon")),
        "schedule is constant; measured: cosine": dataclasses.replace(
            at(0.03, width=256), optim=OptimConfig(schedule="constant", lr=0.03)
        ),
        "attention is qwen3; measured: baseline": dataclasses.replace(base, model=ModelConfig(attention="qwen3")),
        "context is 64; measured: 32": dataclasses.replace(base, data=DataConfig(context=64)),
        "kv share is 0.5; measured: 1.0": dataclasses.replace(base, model=ModelConfig(n_kv_heads=2)),
        "parametrisation is mup; measured: standard": dataclasses.replace(
            base, model=ModelConfig(parametrisation="mup")
        ),
    }
    for sentence, config in cases.items():
        advice = recommend(config)
        assert sentence in advice.outside, (sentence, advice.outside)
        assert not advice.logits
        assert not advice.passes
        assert advice.remedy is None
        assert "not known" in str(advice)
        assert all(one.gain is None for one in advice.remedies)


def test_the_logits_of_a_run_with_a_remedy_are_not_known_but_a_remedy_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = recommend(at(0.1))
    normed = dataclasses.replace(at(0.1), remedy="qk_norm")
    write_json(tmp_path / "config.json", normed.to_dict())
    for source in (normed, tmp_path):
        advice = recommend(source)
        assert advice.outside == ("remedy is qk_norm; measured: none",)
        assert not advice.logits
        assert not advice.passes
        assert (advice.outside_gain, advice.remedies) == (plain.outside_gain, plain.remedies)
        assert advice.remedy == plain.remedy is not None
    assert main(["recommend", "--remedy", "softcap:cap=5", "--lr", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "remedy is softcap:cap=5; measured: none" in said
    assert "step 150" not in said


def test_a_remedy_is_recommended_where_its_interval_lies_above_zero_and_its_evidence_is_near() -> None:
    for lr in (0.03, 0.1):
        advice = recommend(at(lr, width=128, depth=1))
        sure = [one.remedy for one in advice.remedies if one.gain and one.gain.low > 0]
        assert advice.remedy == (sure[0] if sure else None)
        for one in advice.remedies:
            assert {(row["width"], row["depth"], row["lr"]) for row in one.rows} == {(128, 1, lr)}
            assert one.cost.low <= one.cost.value <= one.cost.high
        assert (advice.remedy or "no gain was found") in str(advice)
    assert set(evidence()["remedies"]) == {one.remedy for one in recommend(RunConfig()).remedies}


def test_a_path_is_read_as_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path / "llama", tmp_path / "llama" / "config.json"):
        said = recommend(path).outside
        assert "width is 4096; measured: 32 to 128" in said or "width is 4096; measured: 64 to 256" in said
        assert any("mlp is swiglu" in line for line in said)
    (tmp_path / "gpt2.json").write_text(json.dumps({**LLAMA, "model_type": "gpt2"}))
    assert any("model type gpt2" in line for line in recommend(tmp_path / "gpt2.json").outside)
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", at(0.1).to_dict())
    assert recommend(tmp_path / "run") == recommend(at(0.1))
    (tmp_path / "recipe.toml").write_text("steps = 75\n[optim]\nlr = 0.1\n")
    assert recommend(tmp_path / "recipe.toml").logits[-1][0] == 75
    sites = [{"name": "a", "n_heads": 4, "head_dim": 16}] * 2
    (tmp_path / "watched").mkdir()
    write_json(tmp_path / "watched" / "config.json", {"kind": "watch", "model": "GPT", "sites": sites})
    assert "not recorded" in recommend(tmp_path / "watched").outside[0]
    assert main(["recommend", str(tmp_path / "run"), "--lr", "0.03", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logits"][-1][1]["value"] == recommend(at(0.03)).logits[-1][1].value


def test_what_is_no_configuration_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"torn.json": '{"a": 1', "list.json": "[1]", "empty.json": "{}", "recipe.toml": "steps = 'many'"}
    texts |= {"wrong.json": json.dumps({**LLAMA, "hidden_size": "wide"}), "watch.json": '{"kind": "watch"}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in (*texts, "missing", "."):
        with pytest.raises(QkeelError):
            recommend(tmp_path / name)
        assert main(["recommend", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: "), said
        assert said.count("\n") == 1, said


def test_one_block_is_outside_of_what_the_law_of_logits_answers() -> None:
    one = recommend(RunConfig(model=ModelConfig(n_layers=1)))
    assert not one.logits
    assert any("blocks is 1" in reason for reason in one.outside)
    assert recommend(RunConfig(model=ModelConfig(n_layers=2))).logits
