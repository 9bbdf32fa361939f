"""The compiled pass over logits gives the statistics of torch's path, whose float64 run is the truth here."""

import dataclasses

import pytest
import torch
from tests.contract.conformance.cases import widened
from tests.kernels.harness import DTYPES, laid
from tests.packed_sequences import CASES, packed
from tests.quick import one_in

import qkeel
from qkeel.capture.calls import flex_call
from qkeel.functional.statistics import TENSORS
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import (
    AttentionSpec,
    Fixed,
    Learned,
    NoPosition,
    SlidingWindow,
    Softcap,
    Softpick,
)
from qkeel.spec.call import band_call, make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("library")
# Batch, query heads, key heads, queries, keys, head_dim.
SHAPES = [
    (2, 2, 2, 1, 1, 8),
    (2, 4, 2, 7, 7, 64),
    (1, 4, 1, 64, 64, 40),
    (2, 2, 1, 129, 129, 64),
    (1, 4, 2, 300, 300, 64),
    (1, 2, 2, 70, 200, 24),
    (1, 2, 1, 200, 70, 128),
    (3, 8, 4, 1, 150, 64),
]
SPECS = {
    "plain": AttentionSpec(),
    "capped": AttentionSpec(cap=Softcap(5.0), scale=Fixed(0.3)),
    "learned": AttentionSpec(scale=Learned(init=0.2, per="head")),
    "window": AttentionSpec(position=SlidingWindow(window=40, inner=NoPosition())),
    "negative": AttentionSpec(scale=Fixed(-0.2), cap=Softcap(8.0)),
    **{name: qkeel.preset(name) for name in ("qwen3", "cosa_logn", "swin_v2")},
}


def masks(b, h, t, s):
    pairs = torch.rand(b, 1, t, s) < 0.7
    pairs[:, :, t // 2 :, 0] = False
    pairs[0, 0, t // 3] = False  # a row without keys
    lowest = torch.finfo(torch.float16).min
    return {
        "none": None,
        "pairs": pairs,
        "padding": torch.arange(s)[None] >= torch.arange(b)[:, None] * (s // 4),
        "bias": torch.randn(1, h, t, s).masked_fill(~pairs[:1], -torch.inf),
        "bias of keys": torch.randn(1, 1, 1, s),
        "half": torch.randn(b, 1, t, s).masked_fill(~pairs, lowest).half(),
    }


def call_of(
    spec,
    shape,
    dtype,
    layout,
    **more,
):
    b, h, g, t, s, d = shape
    q, k = 2 * torch.randn(b, h, t, d), 2 * torch.randn(b, g, s, d)
    q, k = laid(q.to(dtype), layout), laid(k.to(dtype), layout + 1)
    return make_call(spec, q, k, k, params=spec.init_params(h, g, d), **more)


def torchs(call, threshold=1.0):
    with pytest.MonkeyPatch.context() as off:
        off.setenv("QKEEL_NATIVE", "0")
        return logit_stats(call, threshold)


def check(call, case):
    """Error at most 2 × (that of torch's path + rounding of the largest number); maxima alone are the same bits."""
    assert logit_pass.rows_of(call, 2.0) is not None, case
    ours, theirs = logit_stats(call, 2.0), torchs(call, 2.0)
    truth = logit_stats(widened(call), 2.0)
    for name in TENSORS:
        mine, other, true = (getattr(x, name) for x in (ours, theirs, truth))
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        apart = ~(mine == true)  # equal infinities
        error = (mine - true)[apart].abs()
        if not mine.is_floating_point():
            assert not apart.any(), f"{name}, {case}"
        elif name == "share_above":  # a logit that rounds over the threshold counts
            assert (error <= 2 / truth.n_pairs.min()).all(), case
        elif apart.any():
            size = true[true.isfinite()].abs().max().clamp_min(1)
            allowed = 2 * ((other - true)[apart].abs().max() + 3e-7 * size)
            assert error.max() <= allowed, f"{name}, {case}: {mine} for {true}"
    extremes = max_stats(call)
    assert torch.equal(extremes.max_logit, ours.max_logit), case
    assert torch.equal(extremes.min_logit, ours.min_logit), case


@pytest.mark.parametrize("name", one_in(SPECS, 2))
def test_every_field_is_as_exact_as_torchs(name):
    n = list(SPECS).index(name)
    for i, shape in enumerate(SHAPES):
        b, h, _, t, s, _ = shape
        for j, (kind, mask) in enumerate(masks(b, h, t, s).items()):
            if (i + j + n) % 3 and n > 1:
                continue  # a third of the combinations for most specs
            dtype, causal = DTYPES[(i + j) % 3], (i + j) % 3 > 0
            call = call_of(SPECS[name], shape, dtype, i + j, mask=mask, causal=causal)
            if j % 2:
                call = with_query_mask(call, torch.rand(b, t) < 0.8)
            check(call, f"{shape}, {kind}, {dtype}, causal {causal}")


def test_positions_that_ascend_are_taken_and_others_are_left_to_torch():
    q, k = torch.randn(2, 2, 30, 16), torch.randn(2, 2, 50, 16)
    left = (torch.arange(50) - torch.tensor([0, 9])[:, None]).clamp_min(0)
    near = AttentionSpec(position=SlidingWindow(window=7, inner=NoPosition()))
    for spec in (AttentionSpec(), near):
        for causal in (True, False):
            options = {"pos_q": left[:, 20:], "pos_k": left, "causal": causal}
            check(make_call(spec, q, k, k, **options), f"{spec}, {causal}")  # type: ignore[arg-type]
    again = torch.arange(50) % 25
    call = make_call(AttentionSpec(), q, k, k, pos_q=again[:30], pos_k=again)
    assert logit_pass.rows_of(call, 1.0) is None


@pytest.mark.parametrize(("name", "options"), CASES)
def test_packed_sequences_and_windows_on_both_sides_are_taken(name, options):
    call = packed(name, **options).call()
    counted = torch.arange(call.q.shape[2])[None] % 3 > 0
    for asked in (call, with_query_mask(call, counted)):
        assert logit_pass.rows_of(asked, 1.0) is not None
        ours, theirs = logit_stats(asked), torchs(asked)
        for field in set(TENSORS) - {"share_above"}:
            values = getattr(ours, field), getattr(theirs, field)
            torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5, msg=field)
        assert torch.equal(max_stats(asked).max_logit, ours.max_logit)


def test_calls_that_it_does_not_read_are_left_to_torch():
    q = torch.randn(1, 2, 9, 8)
    spec, rerope = AttentionSpec(), qkeel.preset("baseline")
    rerope = rerope.extrapolate("rerope", train_length=4, window=2)
    added = flex_call(spec, q, q, lambda z, b, h, i, j: z + 100.0 * (i == j), None)
    sloped = make_call(spec, q, q, q, causal=False)
    sloped = band_call(sloped, slopes=torch.full((2,), -50.0))
    wide_mask = torch.zeros(9, 9, dtype=torch.float64)
    softpick = AttentionSpec(normalizer=Softpick())
    for call in (
        added,
        sloped,
        make_call(rerope, q, q, q),
        make_call(softpick, q, q, q),
        make_call(spec, q, q, q, mask=wide_mask),
        *(
            make_call(spec, x, x, x)
            for x in (q.double(), q.to("meta"), q[:0], torch.randn(1, 2, 5, 12))
        ),
    ):
        assert logit_pass.rows_of(call, 1.0) is None
        assert logit_pass.extremes_of(call) is None
    for call, least in ((added, 60.0), (sloped, 360.0)):
        rows = slice(0, 9)
        z, visible = call.scores(q, q, rows, rows), call.visible(rows, rows)
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        assert z.max() > least
        for stats in (max_stats(call), logit_stats(call)):
            torch.testing.assert_close(stats.max_logit, z.amax((0, 2, 3)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "hidden key", "uncounted row", "bias"])
def test_what_is_not_finite_is_reported_as_torch_reports_it(value, where):
    for spec in (AttentionSpec(), AttentionSpec(cap=Softcap(20.0))):
        q, k = torch.randn(1, 3, 40, 8), torch.rand(1, 3, 40, 8) + 0.1
        mask = (
            torch.randn(1, 3, 40, 40)
            if where == "bias"
            else torch.ones(1, 1, 40, 40).bool()
        )
        counted = torch.ones(1, 40, dtype=torch.bool)
        if where == "bias":
            mask[0, 1, 39, 7] = value
        elif where in ("q", "uncounted row"):
            # The last row sees every key: else torch's path takes hidden keys for the largest of -inf.
            q[0, 1, 39] = 0
            q[0, 1, 39, 3] = value
            counted[0, 39] = where == "q"
        else:
            k[0, 1, 20, 3] = value
            mask[..., 20] = where == "k"
        call = with_query_mask(make_call(spec, q, k, k, mask=mask), counted)
        assert logit_pass.rows_of(call, 1.0) is not None
        ours, extremes, theirs = logit_stats(call, 1.0), max_stats(call), torchs(call)
        ours = dataclasses.replace(ours, max_logit=extremes.max_logit)
        for name in TENSORS:
            values = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(
                *values, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name
            )


def test_ends_beyond_the_keys_are_the_ends_of_the_keys():
    q, scale = torch.randn(1, 2, 3, 8), torch.ones(1, 2, 3)
    ends = torch.full((1, 3), -9), torch.full((1, 3), 12)
    far, near = (
        torch.ops.qkeel_native.logit_extremes(q, q, scale, *e, None)
        for e in (ends, (None, None))
    )
    assert torch.equal(far, near)
