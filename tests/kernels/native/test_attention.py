"""The compiled attention gives the oracle's numbers, the statistics of its rows, and the oracle's gradients."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.contract.conformance.cases import SPECS, Geometry, fits
from tests.kernels.harness import (
    DTYPES,
    Case,
    check,
    check_gradients,
    check_rows,
)

from qkeel.errors import RefusedError
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.statistics import stats_of_rows
from qkeel.ops import KERNELS, choose, run
from qkeel.spec import (
    ALiBi,
    AttentionSpec,
    NoPosition,
    Sigmoid,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("library")
COMPILED = Path(__file__).parents[2] / "compile" / "cases.py"
NATIVE = KERNELS["native"]
assert isinstance(NATIVE, Native)
OPS = torch.ops.qkeel_native


def check_all(call, case):
    """Output, rows and gradients."""
    out = check(call, case, NATIVE)
    same, rows = NATIVE.with_rows(call)
    assert torch.equal(out, same), case
    if call.q.dtype == torch.float32:
        check_rows(call, case, rows)
    check_gradients(call, case, NATIVE)


# Specs whose numbers depend on what the kernel does, and not on encoding alone.
NAMES = ["qwen3", "gemma2", "alibi", "window", "window_log_n", "llama4", "capped_log_n"]
MASKS = ["", "full", "padding_left", "additive", "bool_per_head", "empty_rows"]
SHAPES = [
    (1, 1, (2, 2), 8),
    (7, 7, (4, 2), 24),
    (64, 100, (3, 1), 64),
    (129, 129, (4, 2), 40),
    (49, 20, (2, 1), 128),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_spec_mask_length_layout_and_width(name):
    for i, mask in enumerate(MASKS):
        # Both half formats take the same way but for the conversion, so they take turns.
        for j, dtype in enumerate((DTYPES[0], DTYPES[1 + i % 2])):
            n = i + j + NAMES.index(name)
            t, s, heads, d = SHAPES[n % len(SHAPES)]
            if fits(SPECS[name], Geometry(2, *heads, t, s, d)):
                causal, widths = mask in ("", "padding_left"), (d, d if n % 2 else 16)
                call = Case(SPECS[name], t, s, 2, heads, widths, causal, mask)
                check_all(call.call(dtype, n), f"{call} {dtype}")


BAND, NEAR = (
    AttentionSpec(position=SlidingWindow(window=w, inner=NoPosition()))
    for w in (50, 33)
)
CAPPED = AttentionSpec(cap=Softcap(5.0))
MIXED = AttentionSpec(
    position=SlidingWindow(window=40, inner=ALiBi()), cap=Softcap(10.0)
)
CASES = [
    *(Case(t=t) for t in (1, 7, 64, 129)),
    *(Case(t=t, causal=False, widths=(40, 24)) for t in (7, 64, 129)),
    Case(t=200, s=333, heads=(6, 1), widths=(32, 8)),
    Case(t=1, s=129, widths=(128, 128)),
    # The first queries see nothing.
    Case(t=129, s=70),
    # Few heads: cut by keys.
    Case(t=300, heads=(1, 1), widths=(8, 16)),
    Case(t=300, spec=BAND),
    Case(t=129, s=300, causal=False, spec=NEAR),
    Case(t=129, spec=CAPPED, mask="additive", widths=(16, 48)),
    Case(t=129, causal=False, spec=MIXED, mask="bool_per_head"),
    Case(t=129, s=160, mask="additive, hiding"),
    Case(t=64, size=3e4),
    Case(t=129, size=1e4, spec=CAPPED),
    pytest.param(Case(t=2048, heads=(1, 1), widths=(16, 16)), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_specs_of_every_length_and_size(case):
    half = DTYPES[
        2 if case.t % 2 and case.size < 1e3 else 1
    ]  # float16 holds no large q
    for i, dtype in enumerate((DTYPES[0], half)):
        check_all(case.call(dtype, i + case.t), f"{dtype}")


@torch.no_grad()
def test_statistics_of_heads_are_those_of_rows_that_count_and_see_a_key():
    for mask in MASKS:
        case = Case(SPECS["gemma2"], 70, widths=(24, 24), mask=mask)
        call = case.call(torch.float32)
        for counted in (torch.ones(2, 70).bool(), torch.rand(2, 70) < 0.7):
            masked = with_query_mask(call, counted)
            out, rows = NATIVE.with_rows(masked)
            assert torch.equal(out, run(call, "native"))
            rows_used = (rows.lse > -torch.inf) & counted[:, None]
            largest = rows.largest.masked_fill(~rows_used, -torch.inf).amax((0, 2))
            entropies = rows.entropy.masked_fill(~rows_used, 0.0).sum((0, 2))
            stats = stats_of_rows(masked, rows)
            assert torch.equal(stats.max_logit, largest), mask
            capped = call.spec.cap.apply(largest)
            torch.testing.assert_close(stats.capped_max_logit, capped)
            mean = entropies / rows_used.sum((0, 2))
            torch.testing.assert_close(stats.entropy, mean)


def test_what_it_cannot_do_is_refused_with_the_reason(
    monkeypatch,
):
    spec, q, pos = AttentionSpec(), torch.randn(1, 2, 3, 8), torch.tensor([0, 2, 4])
    sigmoid = dataclasses.replace(spec, normalizer=Sigmoid(bias=0.0))
    mask = torch.zeros(1, 1, 3, 3, requires_grad=True)
    params = SPECS["kerple_log"].init_params(2, 2, 8)
    for call, reason in (
        (make_call(sigmoid, q, q, q), "softmax only"),
        (make_call(SPECS["kerple_log"], q, q, q, params=params), "neither a rotation"),
        (make_call(spec, *[torch.randn(1, 2, 3, 12)] * 3), "multiples of 8"),
        (make_call(spec, *[q.double()] * 3), "float64"),
        (make_call(spec, q, q, q, dropout=0.1), "has no dropout"),
        (make_call(spec, q, q, q, pos_q=pos, pos_k=pos), "positions 0, 1, 2"),
        (make_call(spec, q, q, q, mask=mask), "with respect to its mask"),
    ):
        with pytest.raises(RefusedError, match=f"native.*{reason}"):
            run(call, "native")
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    call = make_call(spec, q, q, q)
    with pytest.raises(RefusedError, match=r"native.*switched off"):
        run(call, "native")
    assert choose(call, "auto") is KERNELS["sdpa"]


@pytest.mark.slow
def test_compiled_into_one_graph_it_gives_eagers_numbers():
    cases = [(case, "qwen3", "native", "aot_eager") for case in ("fullgraph", "stated")]
    words = [str(COMPILED), *cases[0], *cases[1]]
    done = forked.python(words, COMPILED.parent, environment={"QKEEL_NATIVE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert max(map(float, done.stdout.split())) < 1e-5
