"""The precision study: its formats are torch's, its thresholds are predicted, the alarm is where it says."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from qkeel.errors import UnknownNameError
from qkeel.lab.studies.grids import (
    COLUMNS,
    FORMATS,
    PRECISION_SIZES,
    REMEDIES,
    TOLERANCE,
    HeadShape,
    forward,
    rows,
    tensors,
    thresholds,
)
from qkeel.metrics import stored_logit_error
from qkeel.monitor import Resolution

SMALL = HeadShape(heads=2, tokens=64)


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, ...], dict[str, float | str]]:
    found = thresholds(list(rows(SMALL, sizes=PRECISION_SIZES[::2])))
    return {tuple(str(line[name]) for name in COLUMNS[:4]): line for line in found}


def test_the_fused_forward_is_torchs_own_kernel_up_to_its_rounding_of_weights() -> None:
    q, k, v = tensors("spread", 4.0, SMALL, 0)
    for name in ("bf16", "fp16"):
        dtype = FORMATS[name]
        theirs = torch.nn.functional.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        ours = forward(REMEDIES["none"], q, k, v, dtype, eager=False)[1]
        error = (theirs.double() - ours).norm() / ours.norm()
        assert error < 2 * torch.finfo(dtype).eps


def test_the_eager_forward_is_the_one_that_models_write_out() -> None:
    q, k, v = (x.bfloat16() for x in tensors("shifted", 90.0, SMALL, 0))
    weights = torch.softmax(q @ k.mT * 64**-0.5, dim=-1, dtype=torch.float32).bfloat16()
    ours = forward(REMEDIES["none"], q.double(), k.double(), v.double(), torch.bfloat16, eager=True)[1]
    assert torch.equal((weights @ v).double(), ours)


def test_logits_are_of_the_size_asked_for() -> None:
    for size in (8.0, 512.0):
        for data, what in (("spread", torch.std), ("shifted", torch.mean)):
            q, k, _ = tensors(data, size, HeadShape(tokens=256), 1)
            assert float(what(q @ k.mT / 8)) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["fused", "eager"])
def test_thresholds_are_predicted_within_a_factor_of_two(
    name: str, kernel: str, lines: dict[tuple[str, ...], dict[str, float | str]]
) -> None:
    for data, seen in (("spread", "logit"), ("shifted", "logit"), ("shifted", "output")):
        line = lines[data, "none", name, kernel]
        ratio = float(line[seen]) / float(line["predicted"])
        assert 0.5 < ratio < 2, (data, seen, line)


def test_sixteen_bits_of_fp16_overflow_where_the_unscaled_product_passes_their_range(
    lines: dict[tuple[str, ...], dict[str, float | str]],
) -> None:
    edge = 65504 / math.sqrt(64)
    for data in ("spread", "shifted"):
        assert edge < float(lines[data, "none", "fp16", "eager"]["overflow"]) < 2 * edge
        for other in ("bf16", "fp32"):
            assert math.isnan(float(lines[data, "none", other, "eager"]["overflow"]))


def test_norms_keep_every_format_from_its_threshold_and_a_cap_keeps_none(
    lines: dict[tuple[str, ...], dict[str, float | str]],
) -> None:
    for data in ("spread", "shifted"):
        for remedy in ("qk_norm", "cosine"):
            for name in ("bf16", "fp16"):
                for kernel in ("fused", "eager"):
                    assert math.isnan(float(lines[data, remedy, name, kernel]["logit"]))
                    assert math.isnan(float(lines[data, remedy, name, kernel]["output"]))
        for kernel in ("fused", "eager"):
            none, capped = (lines[data, r, "bf16", kernel]["logit"] for r in ("none", "softcap:cap=50"))
            assert capped == none


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_alarm_for_stored_scores_stands_within_a_factor_of_two_of_what_is_seen(
    name: str, lines: dict[tuple[str, ...], dict[str, float | str]]
) -> None:
    tolerance = Resolution(dtype="bf16", kernel="eager", head_dim=64).tolerance
    assert tolerance == TOLERANCE
    alarms_at = next(z for z in range(1, 1 << 14) if stored_logit_error(float(z), name) > tolerance)
    for data in ("spread", "shifted"):
        assert 0.5 < float(lines[data, "none", name, "eager"]["logit"]) / alarms_at < 2


def test_float64_attention_is_reproduced_by_float32_to_its_precision() -> None:
    for row in rows(SMALL, sizes=(4.0,), remedies=("none", "qk_norm")):
        if row["format"] == "fp32":
            assert float(row["output_error"]) < 1e-5
            assert row["flipped"] == 0


def test_an_unknown_remedy_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="qk_norm"):
        list(rows(SMALL, sizes=(4.0,), remedies=("qknorm",)))


def test_the_command_writes_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cyclopts")
    from qkeel.cli.app import main

    assert main(["study", "precision", "--out", str(tmp_path), "--remedies", "none", "--head-dim", "16"]) == 0
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert {row["format"] for row in read} == set(FORMATS)
    assert "Where low precision loses attention" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "predicted" in capsys.readouterr().out
    assert main(["study", "precision", "--out", str(tmp_path), "--head-dim", "1"]) == 2
