"""A query goes through few files of qkeel on its way through attention, and nothing is made only to be checked."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import qkeel
from qkeel.nn import Attention

HOME = Path(qkeel.__file__).parent


def entered(module: nn.Module, x: torch.Tensor) -> set[str]:
    """The files of qkeel in which a function is called during a forward."""
    found = set()

    def see(frame: FrameType, event: str, _given: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
            found.add(frame.f_code.co_filename.removeprefix(f"{HOME}/"))

    sys.setprofile(see)
    try:
        module(x)
    finally:
        sys.setprofile(None)
    return found


# Either asks patching.compiler_state whether tangents are under way.
@pytest.mark.parametrize(
    ("native", "most"), [("0", 15), ("1", 14)], ids=["torch", "compiled kernels"]
)
def test_a_forward_of_attention_enters_few_files(
    native: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    module, x = Attention(64, 4, spec=qkeel.preset("qwen3")), torch.randn(2, 12, 64)
    module(x)  # compiles, and remembers what depends on the spec alone
    files = entered(module, x)
    assert "nn/attention.py" in files
    assert len(files) <= most, sorted(files)
