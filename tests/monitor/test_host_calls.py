"""How many functions of Python and operators of torch a step that is watched, or remedied, calls for each layer beyond
those of the plain step; and how many passes of the model a search for its attention takes.

Counts are the same on every machine and under every load; the milliseconds are in docs/benchmarks.md. Where the
compiled pass over logits is missing, torch computes the statistics, in more calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEW, SOME, MANY = LAYERS = (2, 3, 4)
# Calls beyond the plain step's, at most: per layer at 8 layers, of any step, and of each layer more.
MOST = {
    "watch()": (150, 700, 54),
    'watch(stats="entropy")': (150, 700, 54),
    'watch(stats="max")': (150, 670, 54),
    "watch, no step measured": (13, 103, 0),
    "qk_clip": (60, 180, 38),
    "lalr": (30, 198, 5),
}
# Operators beyond the plain step's, those included that others call, at most: of any step, and of each layer more.
OPERATORS = {
    "watch()": (490, 29),
    'watch(stats="entropy")': (490, 29),
    'watch(stats="max")': (385, 31),
    "watch, no step measured": (6, 0),
    "qk_clip": (10, 25),
    "lalr": (75, 0),
}
STRAIGHT = ("watch()", "qk_clip")  # counted at a third size, between the others
# In a process of its own: where annotations are checked, as in this one, every function is called by a checker, and
# where torch's compiler is loaded, as in forked ones, its wrappers are called too.
COUNT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from benchmarks.host_time import PLAIN, SEARCHES, WATCHERS, Case, passes_of, transformers_model
from qkeel.kernels.native import logit_pass
names, sizes, straight = (json.loads(word) for word in sys.argv[1:])
if not logit_pass.ready():
    raise SystemExit("no compiler")
def counts(name, layers):
    case = Case(lambda n: transformers_model("Llama", n), layers, WATCHERS[name])
    return [case.python_calls(4, watched=True), case.operators(1, watched=True)]
def passes(search, layers):
    case = Case(lambda n: transformers_model("Llama", n), layers, None)
    return passes_of(SEARCHES[search], case.model, case.optimizer, case.ids)
plain = {n: counts(PLAIN, n) for n in sizes}
each = {name: {n: [a - b for a, b in zip(counts(name, n), plain[n])] for n in sizes
               if name in straight or n != sizes[1]} for name in names}
calls, operators = ({name: {n: of[i] for n, of in each[name].items()} for name in names} for i in (0, 1))
found = {search: [passes(search, n) for n in (sizes[0], sizes[-1])] for search in SEARCHES}
print(json.dumps({"calls": calls, "operators": operators, "passes": found}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *map(json.dumps, ([*MOST], LAYERS, STRAIGHT))],
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
def test_a_layer_takes_few_calls_of_python(name: str, found: dict[str, dict[str, Any]]) -> None:
    at_eight, most, most_per_layer = MOST[name]
    counts = found["calls"][name]
    few, many = counts[str(FEW)], counts[str(MANY)]
    per_layer = (many - few) / (MANY - FEW)
    assert per_layer <= most_per_layer
    assert few - FEW * per_layer <= most
    assert (many + (8 - MANY) * per_layer) / 8 <= at_eight
    if name in STRAIGHT:  # so many of any step and so many of each layer: what 4 layers show holds at 8, 32 and 80
        assert counts[str(SOME)] == pytest.approx((few * (MANY - SOME) + many * (SOME - FEW)) / (MANY - FEW), abs=2)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_layer_takes_few_operators(name: str, found: dict[str, dict[str, Any]]) -> None:
    most, most_per_layer = OPERATORS[name]
    few, many = (found["operators"][name][str(layers)] for layers in (FEW, MANY))
    per_layer = (many - few) / (MANY - FEW)
    assert per_layer <= most_per_layer
    assert few - FEW * per_layer <= most


@pytest.mark.parametrize(
    ("search", "most"),
    [
        ("find_sites", 1),
        ('apply("qk_norm")', 2),
        ('apply("qk_clip")', 1),
        ('apply("lalr")', 1),
        ('apply("softcap")', 2),
    ],
)
def test_a_search_takes_few_passes_at_any_depth(search: str, most: int, found: dict[str, dict[str, Any]]) -> None:
    assert found["passes"][search] == [most, most]


def test_the_parts_of_a_step_are_functions_that_there_are() -> None:
    from benchmarks.host_time import PARTS

    for file, function in PARTS.values():
        assert f"def {function}(" in (ROOT / "src" / "qkeel" / file).read_text(encoding="utf-8"), f"{file}: {function}"
