"""What several processes record of the residual stream is what one process records of the same micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from tests.contract.processes.wrapped import batch, llama
from tests.forked import together
from tests.processes.streams import measured


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    together("tests.processes.streams", 2, str(folder), "ddp", "fsdp2", "tp")
    return folder


@pytest.mark.parametrize("setup", ["ddp", "fsdp2", "tp"])
def test_each_process_has_the_numbers_of_one_that_sees_all(
    setup: str, found: Path
) -> None:
    whole = batch(0)
    one = measured(llama(), [whole] if setup == "tp" else [*torch.chunk(whole, 2)])
    assert len(one) == 12
    for rank in range(2):
        own = json.loads((found / f"{setup}-{rank}.json").read_text())
        assert {name.rpartition("/")[0] for name in own} == {
            name.rpartition("/")[0] for name in one
        }
        assert own == pytest.approx(one, rel=1e-9)
