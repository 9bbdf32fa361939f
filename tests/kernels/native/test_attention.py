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
    gradients,
)
from torch.testing import assert_close

from qkeel import reference
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
from qkeel.spec.call import make_call

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
    stats = stats_of_rows(call, rows)
    sees = stats.max_logit > -torch.inf
    capped = call.spec.cap.apply(stats.max_logit[sees])
    assert_close(stats.capped_max_logit[sees], capped)
    assert (stats.capped_max_logit[~sees] == -torch.inf).all()
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


def test_a_row_with_all_its_weight_on_one_key_passes_nothing_to_q_and_k():
    alone = AttentionSpec(position=SlidingWindow(window=1, inner=NoPosition()))
    for dtype in DTYPES[:2]:
        for case in (Case(t=1), Case(t=64, size=1e8), Case(t=14, spec=alone)):
            call = case.call(dtype)
            dq, dk, dv = gradients(call, NATIVE, torch.randn(call.q.shape).to(dtype))
            assert not dq.any()
            assert not dk.any()
            assert dv.any()


def test_rows_that_see_no_key_give_and_get_nothing():
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    mask[..., 3:5, :], mask[..., 7] = False, False
    q, k, v = (torch.randn(2, n, 10, 16) for n in (4, 2, 2))
    for call in (
        Case(t=60, s=20, widths=(16, 16)).call(torch.float32),
        make_call(AttentionSpec(), q, k, v, causal=False, mask=mask),
        make_call(AttentionSpec(), q, k, v, mask=torch.zeros_like(mask)),
    ):
        out, rows = NATIVE.with_rows(call)
        empty = rows.lse == -torch.inf
        hidden = reference.attend_call(call).logits == -torch.inf
        assert torch.equal(empty, hidden.all(-1))
        assert not out[empty].any()
        assert not rows.entropy[empty].any()
        assert (rows.largest[empty] == -torch.inf).all()
        above = torch.randn(out.shape)
        before = gradients(call, NATIVE, above)
        assert not before[0][empty].any()
        unseen = hidden.all(2).unflatten(1, (2, -1)).all(2)
        assert not any(x[unseen].any() for x in before[1:])
        above[empty] = 1e30  # a gradient for a row that sees nothing reaches nobody
        assert all(map(torch.equal, before, gradients(call, NATIVE, above)))


def test_nan_in_a_visible_key_shows_and_in_a_later_one_does_not():
    q, k, v = (torch.randn(1, 1, 60, 8) for _ in range(3))
    k[0, 0, 50, 3] = torch.nan
    out, lse, _, entropy = OPS.attention(q, k, v, None, None, 1.0, True, 0, 0.0, True)
    for x in (out[0, 0, :, 0], lse[0, 0], entropy[0, 0]):
        assert x[50:].isnan().all()
        assert x[:50].isfinite().all()


def test_what_it_cannot_do_is_refused_with_the_reason(
    monkeypatch,
):
    spec, q, pos = AttentionSpec(), torch.randn(1, 2, 3, 8), torch.tensor([0, 2, 4])
    sigmoid = dataclasses.replace(spec, normalizer=Sigmoid(bias=0.0))
    mask = torch.zeros(1, 1, 3, 3, requires_grad=True)
    params = SPECS["kerple_log"].init_params(2, 2, 8)
    for call, reason in (
        (make_call(sigmoid, q, q, q), "softmax only"),
        (
            make_call(SPECS["kerple_log"], q, q, q, params=params),
            "not for softmax.*KERPLE",
        ),
        (make_call(spec, *[torch.randn(1, 2, 3, 12)] * 3), "multiples of 8"),
        (make_call(spec, *[q.double()] * 3), "not torch.float64"),
        (make_call(spec, q, q, q, dropout=0.1), "no dropout"),
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
