"""What a measured step exchanges is small, is as much for four processes as for two, and loses no number."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forked import together
from tests.processes.exchanges import CASES, HEADS, LAYERS, heads

from qkeel.records import MONITOR_EXTREMES

# Bytes for each head and layer; counts that all heads of a layer share are sent once per layer, and flags once.
LIMITS = {"all": 104, "max": 16}
BY_LAYER = {"all": 8 * 5 + 16, "max": 0}  # 5 counts, and the mean of the block's output
FLAGS = 40 + 4 * len(MONITOR_EXTREMES)


@functools.cache
def found(world: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        together("tests.processes.exchanges", world, str(world), folder)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", LIMITS)
def test_a_measured_step_exchanges_few_bytes_whatever_the_number_of_processes(case: str, world: int) -> None:
    for own in found(world):
        _, sizes, warned = own[case]
        assert warned == []
        assert sizes == found(2)[0][case][1]
        per_layer = (sizes[-1] - FLAGS) / LAYERS
        assert 0 < per_layer <= LIMITS[case] * HEADS + BY_LAYER[case]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_one_process(case: str, world: int) -> None:
    """Where heads begin to see unlike keys, that step is dropped with a warning, and those behind it are right."""
    alone, _, _ = heads(range(world), *CASES[case])
    dropped = {1: 0} if case == "unlike heads" else {}
    for own in found(world):
        merged, _, warned = own[case]
        assert [of["step"][0] for of in merged] == [dropped.get(step, step) for step in range(4)]
        assert ["is not recorded" in text for text in warned] == [True] * len(dropped)
        for ours in merged:
            theirs = alone[ours["step"][0]]
            assert ours.keys() == theirs.keys()
            for name, x in ours.items():
                if name != "step":
                    np.testing.assert_allclose(x, theirs[name], rtol=2e-5, atol=2e-6, err_msg=f"{case}: {name}")
