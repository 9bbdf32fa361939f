"""Images on the command line: bad input is a wrong use, told in one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkeel.cli.app import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr", "--task", "vision", "--images", "nowhere"], "no images 'nowhere'"),
        (["lr", "--task", "vision", "--image-size", "16"], "the images of digits are 8 × 8"),
        (["lr", "--task", "vision", "--patch", "3"], "image_size to be a multiple of patch"),
        (["multimodal", "--mixes", "mixx"], "unknown data mix 'mixx'. Did you mean 'mix'"),
        (["multimodal", "--mixes", "mix:norm=perri"], "unknown norm_order 'perri'"),
        (["multimodal", "--mixes", "mix:variance=big"], "expected a number for image_variance"),
        (["multimodal", "--context", "40"], "a canvas of 4 images takes 65 tokens"),
        (["multimodal", "--data", "nothing_here"], "no corpus 'nothing_here'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words, "--out", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_a_task_brings_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--task", "vision", "--steps", "7"]) == 0
    shown = capsys.readouterr().out
    assert 'attention = "vit"' in shown
    assert "batch = 32" in shown
    assert "steps = 7" in shown
