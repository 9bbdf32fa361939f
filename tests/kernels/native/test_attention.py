"""The compiled attention gives the oracle's numbers, the statistics of its rows, and the oracle's gradients."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.contract.conformance.cases import SPECS, fits
from tests.contract.conformance.cases import Geometry as G
from tests.kernels.harness import (
    DTYPES,
    Case,
    check,
    check_gradients,
    check_rows,
    gradients,
)
from tests.quick import quick

from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.kernels.attention import compiled as operator
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.statistics import stats_of_rows
from qkeel.ops import KERNELS, choose, run
from qkeel.spec import (
    ALiBi,
    AttentionSpec,
    Fixed,
    NoPosition,
    Sigmoid,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import AttentionCall, make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("_compiled")
COMPILED = Path(__file__).parents[2] / "compile" / "cases.py"
NATIVE = KERNELS["native"]
assert isinstance(NATIVE, Native)
OPS: Any = torch.ops.qkeel_native


@pytest.fixture
def _compiled(library: object) -> None:
    assert operator.ready()


def check_all(call: AttentionCall, told: str) -> None:
    """Output, rows and gradients."""
    out = check(call, told, NATIVE)
    same, rows = NATIVE.with_rows(call)
    assert torch.equal(out, same), told
    if call.q.dtype == torch.float32:
        check_rows(call, told, rows)
    check_gradients(call, told, NATIVE)


# Specs whose numbers depend on what the kernel does, and not on encoding alone.
NAMES = [
    "qwen3",
    "gemma2",
    "alibi",
    "window",
    "cosa_logn",
    "window_log_n",
    "llama4",
    "capped_log_n",
]
MASKS = [
    "",
    "full",
    "padding_left",
    "additive",
    "bool_per_head",
    "empty_rows",
    "additive_causal_per_head",
]
SHAPES = [
    (1, 1, (2, 2), 8),
    (7, 7, (4, 2), 24),
    (64, 100, (3, 1), 64),
    (129, 129, (4, 2), 40),
    (49, 20, (2, 1), 128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_spec_mask_length_layout_and_width(name: str, dtype: torch.dtype) -> None:
    for i, mask in enumerate(MASKS):
        n = i + NAMES.index(name) + DTYPES.index(dtype)
        t, s, heads, d = SHAPES[n % len(SHAPES)]
        if fits(SPECS[name], G(2, *heads, t, s, d)):
            causal = mask in ("", "padding_left", "additive_causal_per_head")
            case = Case(
                spec=SPECS[name],
                t=t,
                s=s,
                heads=heads,
                widths=(d, d),
                causal=causal,
                mask=mask,
            )
            check_all(case.call(dtype, n), f"{case}")


BAND, NEAR = (
    AttentionSpec(position=SlidingWindow(window=w, inner=NoPosition()))
    for w in (50, 33)
)
SLOPES = AttentionSpec(position=ALiBi())
CAPPED = AttentionSpec(cap=Softcap(5.0))
MIXED = AttentionSpec(
    position=SlidingWindow(window=40, inner=ALiBi()), cap=Softcap(10.0)
)
CASES = [
    Case(t=2048, heads=(1, 1), widths=(16, 16)),
    *(Case(t=t) for t in (1, 7, 64, 129, 512)),
    *(Case(t=t, causal=False, widths=(40, 24)) for t in (1, 7, 64, 129)),
    Case(t=200, s=333, heads=(6, 1), widths=(32, 8)),
    Case(t=1, s=129, widths=(128, 128)),
    Case(t=129, s=70),  # the first queries see nothing
    Case(t=512, heads=(1, 1), widths=(8, 16)),  # few heads: cut by keys
    Case(t=300, spec=BAND),
    Case(t=129, s=300, causal=False, spec=NEAR),
    Case(t=129, spec=CAPPED),
    Case(t=129, spec=CAPPED, mask="additive", widths=(16, 48)),
    Case(t=200, spec=SLOPES),
    Case(t=129, causal=False, spec=MIXED, mask="bool_per_head"),
    *(
        Case(t=129, s=160, mask=mask, causal=causal)
        for mask in ("padding_right", "bool_per_head", "additive", "additive, hiding")
        for causal in (True, False)
    ),
    Case(t=129, mask="empty_rows"),
    Case(t=64, size=3e4),
    Case(t=129, size=1e4, spec=CAPPED),
    Case(t=129, size=1e4, widths=(48, 64)),
]


@pytest.mark.parametrize("case", quick(CASES, lambda case: case.t < 512), ids=str)
def test_plain_specs_of_every_length_and_size(case: Case) -> None:
    for i, dtype in enumerate(DTYPES):
        if case.size < 1e3 or dtype != torch.float16:  # into which q does not fit
            check_all(case.call(dtype, i + CASES.index(case)), f"{dtype}")


@torch.no_grad()
def test_of_heads_largest_logits_and_entropies_are_those_of_rows_that_count_and_see_a_key() -> (
    None
):
    for mask in MASKS:
        call = Case(t=70, spec=SPECS["gemma2"], widths=(24, 24), mask=mask).call(
            torch.float32
        )
        for one in (call, with_query_mask(call, torch.rand(2, 70) < 0.7)):
            _, rows = NATIVE.with_rows(one)
            found = stats_of_rows(one, rows)
            over = rows.lse > -torch.inf
            over = over if one.query_mask is None else over & one.query_mask[:, None]
            assert torch.equal(
                found.max_logit,
                rows.largest.masked_fill(~over, -torch.inf).amax((0, 2)),
            ), mask
            mean = rows.entropy.masked_fill(~over, 0.0).sum((0, 2)) / over.sum((0, 2))
            torch.testing.assert_close(found.entropy, mean)


@pytest.mark.parametrize("size", [1e4, -1e4])
@torch.no_grad()
def test_logits_of_ten_thousand_keep_their_maximum_and_entropy(size: float) -> None:
    # Two keys in pairs: every row's largest weight is one of two equal ones or is alone.
    q = torch.full((1, 1, 9, 8), 1.0)
    k = (
        torch.linspace(-1, 1, 9)
        .repeat_interleave(2)[None, None, :, None]
        .expand(1, 1, 18, 8)
    )
    call = make_call(
        AttentionSpec(scale=Fixed(size / 8)),
        q,
        k,
        torch.randn(1, 1, 18, 8),
        causal=False,
    )
    out, rows = NATIVE.with_rows(call)
    found = stats_of_rows(call, rows)
    assert found.max_logit.item() == pytest.approx(1e4)
    assert found.entropy.item() == pytest.approx(math.log(2))
    assert (out - reference.attend_call(call).out).abs().max() <= 1e-6


def test_two_keys_by_hand() -> None:
    # z = (ln 3, 0): weights 3/4 and 1/4, values 8 and 0, so out 6; dz = 3/4 · (8 - 6) = 1.5 and 1/4 · (0 - 6) = -1.5.
    q, k, v = (torch.zeros(1, 1, n, 8) for n in (1, 2, 2))
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 1.0, math.log(3), 8.0
    up = torch.zeros(1, 1, 1, 8)
    up[..., 0] = 1.0
    rest = (None, None, 1.0, False, 0, 0.0)
    out, lse, top, entropy = OPS.attention(q, k, v, *rest, True)
    assert out.flatten().tolist() == pytest.approx([6.0] + [0.0] * 7)
    assert [x.item() for x in (lse, top, entropy)] == pytest.approx(
        [math.log(4), math.log(3), 0.5623351]
    )
    dq, dk, dv = OPS.attention_backward(up, q, k, v, out, lse, *rest)
    torch.testing.assert_close(dq[0, 0, 0, 0], torch.tensor(1.5 * math.log(3)))
    torch.testing.assert_close(dk[0, 0, :, 0], torch.tensor([1.5, -1.5]))
    torch.testing.assert_close(dv[0, 0, :, 0], torch.tensor([0.75, 0.25]))


def test_a_row_with_all_its_weight_on_one_key_passes_nothing_to_q_and_k() -> None:
    alone = AttentionSpec(position=SlidingWindow(window=1, inner=NoPosition()))
    for dtype in DTYPES[:2]:
        for case in (
            Case(t=1),
            Case(t=64, size=1e8),
            *(Case(t=t, spec=alone) for t in range(2, 15)),
        ):
            call = case.call(dtype)
            dq, dk, dv = gradients(call, NATIVE, torch.randn(call.q.shape).to(dtype))
            assert not dq.any()
            assert not dk.any()
            assert dv.any()


def test_rows_that_see_no_key_give_and_get_nothing() -> None:
    calls = [
        Case(t=60, widths=(16, 16), mask="empty_rows", causal=False),
        Case(t=60, s=20, widths=(16, 16)),
    ]
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    mask[..., 3:5, :], mask[..., 7] = False, False
    x = [torch.randn(2, n, 10, 16) for n in (4, 2, 2)]
    hidden = [
        make_call(AttentionSpec(), *x, causal=False, mask=m)
        for m in (mask, torch.zeros_like(mask))
    ]
    for call in (*(case.call(torch.float32) for case in calls), *hidden):
        out, rows = NATIVE.with_rows(call)
        empty = rows.lse == -torch.inf
        assert empty.any()
        assert torch.equal(
            empty, (reference.attend_call(call).logits == -torch.inf).all(-1)
        )
        assert not out[empty].any()
        assert not rows.entropy[empty].any()
        assert (rows.largest[empty] == -torch.inf).all()
        above = torch.randn(out.shape)
        found = gradients(call, NATIVE, above)
        assert not found[0][empty].any()
        assert all(x.isfinite().all() for x in found)
        if call.mask is mask:
            assert not any(x[:, :, 7].any() for x in found[1:])
        above[empty] = 1e30  # what a row that sees nothing is told
        assert all(map(torch.equal, found, gradients(call, NATIVE, above)))


def test_nan_in_a_visible_key_shows_and_in_a_later_one_does_not() -> None:
    q, k, v = (torch.randn(1, 1, 60, 8) for _ in range(3))
    k[0, 0, 50, 3] = torch.nan
    out, lse, _, entropy = OPS.attention(q, k, v, None, None, 1.0, True, 0, 0.0, True)
    for x in (out[0, 0, :, 0], lse[0, 0], entropy[0, 0]):
        assert x[50:].isnan().all()
        assert x[:50].isfinite().all()


def test_no_queries_and_no_keys_are_no_error() -> None:
    for b, t, s in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        q, k = torch.randn(b, 4, t, 8), torch.randn(b, 2, s, 8)
        rest = (None, None, 1.0, True, 0, 0.0)
        out, lse, *_ = OPS.attention(q, k, k, *rest, True)
        assert out.shape == q.shape
        assert not out.any()
        found = OPS.attention_backward(out, q, k, k, out, lse, *rest)
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
        assert not any(x.any() for x in found)


def test_what_it_cannot_do_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, pos = AttentionSpec(), torch.tensor([0, 2, 4])
    for spec, given, reason in (
        (dataclasses.replace(plain, normalizer=Sigmoid(bias=0.0)), {}, "softmax only"),
        (SPECS["kerple_log"], {}, "neither a rotation nor ALiBi"),
        (SPECS["rerope"], {}, "neither a rotation nor ALiBi"),
        (plain, {"d": 12}, "multiples of 8"),
        (plain, {"dtype": torch.float64}, "float64"),
        (plain, {"dropout": 0.1}, "has no dropout"),
        (plain, {"pos_q": pos, "pos_k": pos}, "positions 0, 1, 2"),
        (
            plain,
            {"mask": torch.zeros(1, 1, 3, 3, requires_grad=True)},
            "with respect to its mask",
        ),
        (plain, {"off": True}, "switched off"),
    ):
        given = {**given}
        q = torch.randn(
            1, 2, 3, d := given.pop("d", 8), dtype=given.pop("dtype", torch.float32)
        )
        monkeypatch.setenv("QKEEL_NATIVE", "0" if given.pop("off", False) else "1")
        call = make_call(spec, q, q, q, params=spec.init_params(2, 2, d), **given)
        with pytest.raises(RefusedError, match=f"native.*{reason}"):
            run(call, "native")
    assert choose(call, "auto") is KERNELS["sdpa"]


@pytest.mark.slow
def test_compiled_into_one_graph_it_gives_eagers_numbers() -> None:
    cases = [
        word
        for case in ("fullgraph", "stated")
        for word in (case, "qwen3", "native", "aot_eager")
    ]
    done = forked.python(
        [str(COMPILED), *cases], COMPILED.parent, environment={"QKEEL_NATIVE": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = map(float, done.stdout.split())
    assert max(first, second) < 1e-5
