"""The compiled pass over logits gives the statistics of torch's path, whose float64 run is the truth here."""

import pytest
import torch
from tests.contract.conformance.cases import widened
from tests.kernels.drawn import drawn, mask_of_pairs
from tests.packed_sequences import CASES, packed
from torch.testing import assert_close

import qkeel
from qkeel.capture.calls import flex_call
from qkeel.functional.statistics import TENSORS
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import AttentionSpec, NoPosition, SlidingWindow, Softpick
from qkeel.spec.call import band_call, make_call, with_query_mask

pytestmark = pytest.mark.usefixtures("library")


def torchs(call, threshold=1.0):
    with pytest.MonkeyPatch.context() as off:
        off.setenv("QKEEL_NATIVE", "0")
        return logit_stats(call, threshold)


def same(ours, theirs, fields, atol):
    for name in fields:
        values = getattr(ours, name), getattr(theirs, name)
        assert_close(*values, rtol=1e-5, atol=atol, equal_nan=True, msg=name)


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
    for name in ("max_logit", "min_logit"):
        assert torch.equal(getattr(extremes, name), getattr(ours, name)), case
    # The mean of a row is a product with summed keys, which the two sum in blocks of other sizes.
    same(extremes, ours, {"logit_spread"}, atol=1e-5)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.slow)], ids=str
)
def test_every_field_of_drawn_calls_is_as_exact_as_torchs(seeds):
    for seed in seeds:
        call = drawn(seed, mask_of_pairs, sizes=(-3.0, 0.1, 1.0, 2.0))
        check(call, f"seed {seed}")


def test_positions_that_ascend_are_taken_and_others_are_left_to_torch():
    q, k = torch.randn(2, 2, 30, 16), torch.randn(2, 2, 50, 16)
    left = (torch.arange(50) - torch.tensor([0, 9])[:, None]).clamp_min(0)
    near = AttentionSpec(position=SlidingWindow(window=7, inner=NoPosition()))
    for spec in (AttentionSpec(), near):
        for causal in (True, False):
            options = {"pos_q": left[:, 20:], "pos_k": left, "causal": causal}
            check(make_call(spec, q, k, k, **options), f"{spec}, {causal}")
    again = torch.arange(50) % 25
    call = make_call(AttentionSpec(), q, k, k, pos_q=again[:30], pos_k=again)
    assert logit_pass.rows_of(call, 1.0) is None


@pytest.mark.parametrize(("name", "options"), CASES)
def test_packed_sequences_and_windows_on_both_sides_are_taken(name, options):
    call = packed(name, **options).call()
    counted = torch.arange(call.q.shape[2])[None] % 3 > 0
    for asked in (call, with_query_mask(call, counted)):
        assert logit_pass.rows_of(asked, 1.0) is not None
        ours = logit_stats(asked)
        same(ours, torchs(asked), {*TENSORS} - {"share_above"}, atol=1e-5)
        assert torch.equal(max_stats(asked).max_logit, ours.max_logit)


def test_calls_that_it_does_not_read_are_left_to_torch():
    q = torch.randn(1, 2, 9, 8)
    spec, rerope = AttentionSpec(), qkeel.preset("baseline")
    rerope = rerope.extrapolate("rerope", train_length=4, window=2)
    added = flex_call(spec, q, q, lambda z, b, h, i, j: z + 100.0 * (i == j), None)
    sloped = make_call(spec, q, q, q, causal=False)
    sloped = band_call(sloped, slopes=torch.full((2,), -50.0))
    others = q.double(), q.to("meta"), q[:0], torch.randn(1, 2, 5, 12)
    for call in (
        added,
        sloped,
        make_call(rerope, q, q, q),
        make_call(AttentionSpec(normalizer=Softpick()), q, q, q),
        make_call(spec, q, q, q, mask=torch.zeros(9, 9).double()),
        *(make_call(spec, x, x, x) for x in others),
    ):
        assert logit_pass.rows_of(call, 1.0) is None
        assert logit_pass.extremes_of(call) is None
    # What it cannot read is in torch's numbers.
    for call, least in ((added, 60.0), (sloped, 360.0)):
        z = call.scores(q, q, slice(0, 9), slice(0, 9))
        visible = call.visible(slice(0, 9), slice(0, 9))
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        assert z.max() > least
        for stats in (max_stats(call), logit_stats(call)):
            assert_close(stats.max_logit, z.amax((0, 2, 3)))
