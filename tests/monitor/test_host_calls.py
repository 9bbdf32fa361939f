"""How many functions of Python a step that is watched, or remedied, calls for each layer beyond those of the plain
step.

Counts are the same on every machine and under every load; the milliseconds are in docs/benchmarks.md. Where the
compiled pass over logits is missing, torch computes the statistics, in more calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 8
# Calls per layer beyond the plain step's, at most; of a step that is not measured all of them are calls per step.
MOST = {
    "watch()": 300,
    'watch(stats="entropy")': 300,
    'watch(stats="max")': 300,
    "watch, no step measured": 21,
    "qk_clip": 120,
    "lalr": 40,
}
# In a process of its own: where annotations are checked, as in this one, every function is called by a checker.
COUNT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from benchmarks.host_time import WATCHERS, Case, transformers_model
from qkeel.kernels.native import logit_pass
names, layers = json.loads(sys.argv[1]), int(sys.argv[2])
if not logit_pass.ready():
    raise SystemExit("no compiler")
def calls(name):
    return Case(lambda n: transformers_model("Llama", n), layers, WATCHERS.get(name)).python_calls(6)
plain = calls("")
print(json.dumps({name: (calls(name) - plain) / layers for name in names}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", COUNT, json.dumps([*MOST]), str(LAYERS)],
        cwd=ROOT,
        env={**os.environ, "QKEEL_NATIVE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "no compiler" in done.stderr:
        pytest.skip("the compiled pass over logits is not to be had here")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MOST)
def test_a_layer_takes_few_calls_of_python(name: str, found: dict[str, float]) -> None:
    assert found[name] <= MOST[name]
