"""From logits to weights: maps with hidden keys, entropy, caps, scales at the ends of their ranges, the loss on logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each_row import each_row
from torch.testing import assert_close

from qkeel.errors import InvalidValueError, QkeelError
from qkeel.functional import logits as F
from qkeel.functional.position_biases import alibi_slopes

from .properties import few, randn, seeds, some_visible
from .test_laws import WEIGHTS

LINE = torch.linspace(-2000, 2000, 4001, dtype=torch.float64)


@few
@given(seed=seeds, size=st.floats(0.1, 1e4), name=st.sampled_from(sorted(WEIGHTS)))
def test_hidden_keys_weigh_nothing_whatever_stands_there_and_the_others_as_if_alone(
    seed, size, name
):
    z, visible = size * randn(seed, 6, 5), some_visible(seed, 6, 5)
    weigh = WEIGHTS[name]
    weights = weigh(z, visible)
    assert (weights >= 0).all()
    for junk in (1e9, -torch.inf, torch.nan):
        assert torch.equal(weigh(z.masked_fill(~visible, junk), visible), weights)
    for row, shown, w in zip(z, visible, weights):
        assert not w[~shown].any()
        alone = weigh(row[None, shown], None)[0]
        assert_close(w[shown], alone, rtol=1e-12, atol=1e-15)
    if name == "softmax":
        total = visible.any(-1).double()
        assert_close(weights.sum(-1), total, rtol=0, atol=1e-12)


@each_row("weigh", WEIGHTS.values(), ids=WEIGHTS)
def test_an_empty_row_has_finite_gradients_and_without_keys_there_are_no_weights(weigh):
    z, visible = (50 * randn(0, 6, 5)).requires_grad_(), some_visible(0, 6, 5)
    (weigh(z, visible) * randn(1, 6, 5)).sum().backward()
    assert z.grad.isfinite().all()
    assert (z.grad[~visible] == 0).all()
    assert weigh(z[:, :0], None).shape == (6, 0)


def test_the_eps_of_softpick_is_added_behind_the_maximum():
    for z in ([0.5, -1.0, 0.25], [-0.5, -1.0, -2.0], [2.0, 1.0, 0.0]):
        m = max(*z, 0.0)
        rises = [math.exp(x - m) - math.exp(-m) for x in z]
        expected = [max(x, 0.0) / (sum(map(abs, rises)) + 0.5) for x in rises]
        (weights,) = F.softpick(torch.tensor([z]).double(), None, eps=0.5).tolist()
        assert weights == pytest.approx(expected, rel=1e-12), z


@few
@given(seed=seeds, factor=st.floats(1e-6, 1e6))
def test_entropy_is_that_of_the_row_made_to_sum_to_one(seed, factor):
    p = randn(seed, 9).abs()
    assert F.entropy(factor * p).item() == pytest.approx(F.entropy(p).item(), rel=1e-10)


@few
@given(cap=st.floats(0.1, 1e3))
def test_softcap_is_monotone_odd_and_within_the_cap(cap):
    y = F.softcap(LINE, cap)
    assert (y.diff() >= 0).all()
    assert torch.equal(y.flip(0), -y)
    assert (y.abs() <= LINE.abs().clamp_max(cap)).all()


@few
@given(alpha=st.floats(0, 2), floor=st.integers(1, 100))
def test_the_floor_temperature_is_one_below_the_floor_and_never_falls(alpha, floor):
    at = torch.arange(-20, 500)
    factor = F.floor_log_temperature(at, alpha, floor, torch.float64)
    assert (factor[: 20 + floor - 1] == 1).all()
    assert (factor.diff() >= 0).all()
    assert factor[20 + floor - 1].item() == pytest.approx(1 + alpha * math.log(2))


def test_scales_of_the_fewest_keys_heads_and_layers():
    assert F.log_n(torch.tensor([1, 0, -3]), 2).tolist() == [0.0] * 3
    assert F.gradient_scale(2.0) < F.gradient_scale(3.0)
    # On a circle M is the Bessel function I₀, M(2λ)/M(λ)² ≈ √(πλ): λ (1 - √(πλ)/n) is largest at (2n/3)²/π.
    circle = F.gradient_scale(16, 2)
    assert circle == pytest.approx((2 * 16 / 3) ** 2 / math.pi, rel=0.01)
    assert F.cosine_scale(2.5) == pytest.approx(4 * math.log(1.25))
    assert F.qk_norm_init(1.5) == pytest.approx(math.log2(0.75))
    assert F.deepnorm(1) == pytest.approx((1.0, 4**-0.25))
    exact = (2 * 24) ** 0.25, (8 * 24) ** -0.25
    assert F.deepnorm(48) == pytest.approx(exact, rel=1e-15)
    # As published for 24 layers of two sublayers.
    assert F.deepnorm(48) == pytest.approx((2.632, 0.2686), abs=5e-4)


@each_row(
    "of, says",
    [
        (lambda: F.deepnorm(0), "at least one sublayer, got 0"),
        (lambda: alibi_slopes(0), "at least one head, got 0"),
        (lambda: F.gradient_scale(16, 1), "head_dim of at least 2"),
        *(
            (lambda cap=cap: F.softcap(LINE, cap), "expected a cap above 0")
            for cap in (0.0, -1.0, math.nan, -math.inf)
        ),
    ],
)
def test_what_a_formula_cannot_take_is_refused(of, says):
    with pytest.raises(InvalidValueError, match=says) as caught:
        of()
    assert isinstance(caught.value, QkeelError)
    assert isinstance(caught.value, ValueError)


def test_the_loss_on_output_logits_is_the_mean_square_of_their_logsumexp_in_float32_or_wider():
    z = 80 * randn(0, 5, 7)
    rows = [math.log(math.fsum(math.exp(x) for x in row)) for row in z.tolist()]
    loss = F.z_loss(z, 0.5)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(0.5 * sum(x * x for x in rows) / 5, rel=1e-12)
    half = (4 * z).half()  # squares beyond 65,504
    assert F.z_loss(half).dtype == torch.float32
    assert_close(F.z_loss(half).double(), F.z_loss(half.double()))
