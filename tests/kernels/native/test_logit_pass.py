"""The compiled pass over logits gives the statistics of torch's path, whose float64 run is the truth here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.contract.conformance.cases import widened
from tests.each_row import each_row
from tests.kernels.harness import laid
from tests.packed_sequences import CASES, packed
from tests.quick import one_in
from torch import Tensor

import qkeel
from qkeel.capture.calls import flex_call
from qkeel.functional.statistics import TENSORS, LogitStats
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import (
    AttentionCall,
    AttentionSpec,
    Fixed,
    Learned,
    NoPosition,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import band_call, make_call, with_query_mask

NARROW = SlidingWindow(window=40, inner=NoPosition())
# Batch, query heads, key heads, queries, keys, head_dim.
SHAPES = [
    (2, 2, 2, 1, 1, 8),
    (2, 4, 2, 7, 7, 64),
    (1, 4, 1, 64, 64, 40),
    (2, 2, 1, 129, 129, 64),
]
SHAPES += [
    (1, 4, 2, 512, 512, 64),
    (1, 2, 2, 70, 200, 24),
    (1, 2, 1, 200, 70, 128),
    (3, 8, 4, 1, 150, 64),
]
SPECS = {
    "plain": AttentionSpec(),
    "capped": AttentionSpec(cap=Softcap(5.0), scale=Fixed(0.3)),
    "learned": AttentionSpec(scale=Learned(init=0.2, per="head")),
    "window": AttentionSpec(position=NARROW),
    "negative": AttentionSpec(scale=Fixed(-0.2), cap=Softcap(8.0)),
    **{
        name: qkeel.preset(name) for name in ("qwen3", "gemma2", "cosa_logn", "swin_v2")
    },
}


@pytest.fixture(autouse=True)
def _ready(library: object) -> None:
    assert logit_pass.ready()


def masks(b: int, h: int, t: int, s: int) -> dict[str, Tensor | None]:
    pairs = torch.rand(b, 1, t, s) < 0.7
    pairs[:, :, t // 2 :, 0] = False
    pairs[0, 0, t // 3] = False  # a row without keys
    return {
        "none": None,
        "pairs": pairs,
        "padding": torch.arange(s)[None] >= torch.arange(b)[:, None] * (s // 4),
        "bias": torch.randn(1, h, t, s).masked_fill(~pairs[:1], -torch.inf),
        "bias of keys": torch.randn(1, 1, 1, s),
        "half": (torch.randn(b, 1, t, s))
        .masked_fill(~pairs, torch.finfo(torch.float16).min)
        .half(),
    }


def call_of(
    spec: AttentionSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    **how: object,
) -> AttentionCall:
    b, h, g, t, s, d = shape
    q, k = 2 * torch.randn(b, h, t, d), 2 * torch.randn(b, g, s, d)
    q, k = (laid(x.to(dtype), seed + i) for i, x in enumerate((q, k)))
    return make_call(spec, q, k, k, params=spec.init_params(h, g, d), **how)  # type: ignore[arg-type]


def torchs(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> object:
    with monkeypatch.context() as off:
        off.setenv("QKEEL_NATIVE", "0")
        return do()


def assert_near(
    ours: LogitStats, theirs: LogitStats, truth: LogitStats, told: str
) -> None:
    """Error at most 2 × (that of torch's path + rounding of the largest number)."""
    for name in TENSORS:
        mine, other, true = (getattr(x, name) for x in (ours, theirs, truth))
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        if not mine.is_floating_point():
            assert torch.equal(mine, true), f"{name}, {told}"
            continue
        far = ~(mine == true)  # equal infinities
        if far.any():
            own, size = (
                (other - true)[far].abs().max(),
                true[true.isfinite()].abs().max().clamp_min(1),
            )
            assert (mine - true)[far].abs().max() <= 2 * (own + 3e-7 * size), (
                f"{name}, {told}: {mine} for {true}"
            )


@pytest.mark.parametrize("name", one_in(SPECS, 3))
def test_every_field_is_as_exact_as_torchs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for i, shape in enumerate(SHAPES):
        b, h, _, t, s, _ = shape
        for j, (told, mask) in enumerate(masks(b, h, t, s).items()):
            if (i + j + list(SPECS).index(name)) % 3 and name not in (
                "plain",
                "capped",
            ):
                continue  # a third of the combinations for most specs
            causal = (i + j) % 3 > 0
            call = call_of(
                SPECS[name], shape, dtypes[(i + j) % 3], i + j, mask=mask, causal=causal
            )
            if j % 2:
                call = with_query_mask(call, torch.rand(b, t) < 0.8)
            assert logit_pass.rows_of(call, 2.0) is not None
            ours, truth = logit_stats(call, 2.0), logit_stats(widened(call), 2.0)
            theirs = torchs(monkeypatch, lambda call=call: logit_stats(call, 2.0))
            told = f"{shape}, {told}, {call.q.dtype}, causal {causal}"
            assert abs(
                ours.share_above - truth.share_above
            ).max() <= 2 / truth.n_pairs.min().clamp_min(1), told
            same = {
                "share_above": truth.share_above.float()
            }  # a logit that rounds over the threshold counts
            ours, theirs = (dataclasses.replace(x, **same) for x in (ours, theirs))  # type: ignore[type-var]
            assert_near(ours, theirs, truth, told)
            for field in ("max_logit", "min_logit"):
                assert torch.equal(
                    getattr(max_stats(call), field), getattr(ours, field)
                ), told


def test_positions_that_ascend_are_taken_and_others_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = torch.randn(2, 2, 30, 16), torch.randn(2, 2, 50, 16)
    left = (torch.arange(50) - torch.tensor([0, 9])[:, None]).clamp_min(0)
    for spec in (
        AttentionSpec(),
        SPECS["window"].replace(position=SlidingWindow(window=7, inner=NoPosition())),
    ):
        for causal in (True, False):
            call = make_call(
                spec, q, k, k, pos_q=left[:, 20:], pos_k=left, causal=causal
            )
            assert logit_pass.rows_of(call, 1.0) is not None
            theirs = torchs(monkeypatch, lambda call=call: logit_stats(call))
            assert_near(
                logit_stats(call), theirs, logit_stats(widened(call)), f"{spec}"
            )  # type: ignore[arg-type]
    packed = torch.arange(50) % 25
    assert (
        logit_pass.rows_of(
            make_call(AttentionSpec(), q, k, k, pos_q=packed[:30], pos_k=packed), 1.0
        )
        is None
    )


@each_row("name, how", CASES)
def test_packed_sequences_and_windows_on_both_sides_are_taken(
    name: str, how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = packed(name, **how).call()  # type: ignore[arg-type]
    counted = with_query_mask(call, torch.arange(call.q.shape[2])[None] % 3 > 0)
    for one in (call, counted):
        assert logit_pass.rows_of(one, 1.0) is not None
        ours, theirs = (
            logit_stats(one),
            torchs(monkeypatch, lambda one=one: logit_stats(one)),
        )
        for field in TENSORS:
            torch.testing.assert_close(
                getattr(ours, field),
                getattr(theirs, field),
                rtol=1e-5,
                atol=1e-5,
                msg=field,
            )
        assert torch.equal(max_stats(one).max_logit, ours.max_logit)


def test_calls_whose_mask_or_score_is_a_function_are_left_to_torch() -> None:
    q = torch.randn(1, 2, 9, 8)
    spec = AttentionSpec()
    for call, hidden in (
        (
            flex_call(
                spec, q, q, lambda score, b, h, i, j: score + 100.0 * (i == j), None
            ),
            100.0,
        ),
        (
            band_call(
                make_call(spec, q, q, q, causal=False), slopes=torch.full((2,), -50.0)
            ),
            400.0,
        ),
    ):
        assert logit_pass.rows_of(call, 1.0) is None
        assert logit_pass.extremes_of(call) is None
        every = slice(0, 9)
        z, seen = call.scores(q, q, every, every), call.visible(every, every)
        z = z if seen is None else z.masked_fill(~seen, -torch.inf)
        assert z.max() > hidden - 40
        for top in (max_stats(call).max_logit, logit_stats(call).max_logit):
            torch.testing.assert_close(top, z.amax((0, 2, 3)))


def test_what_is_not_for_it_is_left_to_torch() -> None:
    q = torch.randn(1, 2, 5, 8)
    for name in ("rerope", "self_extend"):
        spec = qkeel.preset("qwen3").extrapolate(name, train_length=4, window=2)
        assert (
            logit_pass.rows_of(
                make_call(spec, q, q, q, params=spec.init_params(2, 2, 8)), 1.0
            )
            is None
        )
    spec = AttentionSpec(normalizer=qkeel.spec.Softpick())
    assert logit_pass.rows_of(make_call(spec, q, q, q), 1.0) is None
    assert logit_pass.extremes_of(make_call(spec, q, q, q)) is None
    for x in (
        q.double(),
        torch.randn(1, 2, 5, 12),
        q.to("meta"),
        q[:0],
        torch.randn(1, 2, 5, 2048),
    ):
        assert logit_pass.rows_of(make_call(AttentionSpec(), x, x, x), 1.0) is None
    wide = make_call(
        AttentionSpec(), q, q, q, mask=torch.zeros(5, 5, dtype=torch.float64)
    )
    assert logit_pass.rows_of(wide, 1.0) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "hidden key", "uncounted row", "bias"])
def test_what_is_not_finite_is_reported_as_torch_reports_it(
    value: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in (AttentionSpec(), AttentionSpec(cap=Softcap(20.0))):
        q, k = torch.randn(1, 3, 40, 8), torch.rand(1, 3, 40, 8) + 0.1
        mask = (
            torch.ones(1, 1, 40, 40, dtype=torch.bool)
            if where != "bias"
            else torch.randn(1, 3, 40, 40)
        )
        counted = torch.ones(1, 40, dtype=torch.bool)
        if where in ("q", "uncounted row"):
            q[0, 1, 39] = (
                0  # a row that sees every key: else torch's path takes hidden keys for the largest of -inf
            )
            q[0, 1, 39, 3] = value
        elif where == "bias":
            mask[0, 1, 39, 7] = value
        else:
            k[0, 1, 20, 3] = value
        mask[..., 20] = where != "hidden key" if where != "bias" else 0.5
        counted[0, 39] = where != "uncounted row"
        call = with_query_mask(make_call(spec, q, k, k, mask=mask), counted)
        assert logit_pass.rows_of(call, 1.0) is not None
        ours, theirs = (
            logit_stats(call, 1.0),
            torchs(monkeypatch, lambda call=call: logit_stats(call, 1.0)),
        )
        for name in TENSORS:
            mine, other = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(
                mine,
                other,
                rtol=1e-5,
                atol=1e-6,
                equal_nan=True,
                msg=f"{name}: {mine} {other}",
            )
        ours, theirs = (
            max_stats(call),
            torchs(monkeypatch, lambda call=call: max_stats(call)),
        )
        for name in ("max_logit", "min_logit"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(
                mine, other, rtol=1e-5, atol=1e-6, equal_nan=True
            )


def test_ends_beyond_the_keys_are_the_ends_of_the_keys() -> None:
    q, scale = torch.randn(1, 2, 3, 8), torch.ones(1, 2, 3)
    ends = torch.full((1, 3), -9), torch.full((1, 3), 12)
    far, near = (
        torch.ops.qkeel_native.logit_extremes(q, q, scale, *e, None)
        for e in (ends, (None, None))
    )
    assert torch.equal(far, near)
