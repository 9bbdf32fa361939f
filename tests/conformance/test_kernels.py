"""Kernels cut rows into blocks; the numbers do not depend on where."""

import pytest
import torch
from tests.contract.conformance import cases
from tests.contract.conformance.test_kernels import (
    KERNELS,
    every_kernel,
    gradients,
    gradients_of_kernels,
    oracle,
)
from tests.quick import one_in

from qkeel.kernels.attention import chunked, sdpa
from qkeel.ops import KERNELS as HELD


def test_the_kernels_of_the_contract_are_those_that_there_are():
    assert set(KERNELS) == set(HELD)


@every_kernel
@pytest.mark.parametrize(
    "name",
    one_in(
        ["qwen3", "cosa_logn", "gemma2", "capped_sink", "softpick", "squared_relu"], 3
    ),
)
def test_cutting_the_rows_into_blocks_changes_nothing(kernel, name, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", 40)
    monkeypatch.setattr(sdpa, "MASK_BLOCK", 40)
    for case, call in cases.calls(cases.SPECS[name], torch.float64, cases.SOME, seed=4):
        for _, ours in gradients_of_kernels(call, (kernel,)):
            assert (call.attention(kernel) - oracle(call)).abs().max() <= 1e-12, case
            for n, grad in gradients(call, oracle).items():
                assert (ours[n] - grad).abs().max() <= 1e-11 * (1 + grad.abs().max()), (
                    f"{n}, {case}"
                )
