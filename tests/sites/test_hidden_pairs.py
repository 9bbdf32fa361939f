"""What counts as hidden: the numbers of masks, and none of a bias, in every kind of call."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.attention import Attention
from torch.testing import assert_close

import qkeel
from qkeel.capture.calls import hides, is_low

B, H, T, D = 2, 2, 6, 8
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


@given(
    st.lists(st.floats(-9e3, 0.0, exclude_min=True), min_size=2, max_size=20),
    st.floats(-100, 100),
)
def test_hiding_follows_the_definition(numbers, shift):
    x = torch.tensor([*numbers, shift], dtype=torch.float64)
    found = hides(x)
    ordered = x.sort().values
    gaps = ordered.diff()
    cut = int(gaps.argmax())
    gap, lower, upper = float(gaps[cut]), ordered[: cut + 1], ordered[cut + 1 :]
    two = (
        gap >= 60
        and gap > lower[-1] - lower[0]
        and gap > upper[-1] - upper[0]
        and lower[-1] <= -60
    )
    assert torch.equal(found, (x <= lower[-1]) if two else torch.zeros_like(found))


def test_nothing_at_all_and_not_a_number_hide_nothing():
    assert hides(torch.zeros(0)).shape == (0,)
    assert not hides(torch.tensor([0.0, math.nan, -1.0])).any()
    assert hides(torch.full((3,), -1e9)).all()
    assert [
        is_low(x)
        for x in (-60, -59.0, torch.tensor(-1e4), torch.tensor([-1e4, 0.0]), None, True)
    ] == [*(True, False, True, False, False, False)]


class Padded(Attention):
    """Attention that fills its queries, keys and values up to a multiple of four tokens and cuts the output again."""

    def __init__(self, *, local=False):
        super().__init__(m=H * D, heads=H, bias=False)
        self.local, self.pads = local, True

    def forward(self, x):
        n, (b, t) = -x.shape[1] % 4, x.shape[:2]
        q, k, v = self.heads(x)
        real = torch.arange(t + n if self.pads else t) < t
        if self.pads:
            q, k, v = (F.pad(y, (0, 0, 0, n)) for y in (q, k, v))
        if self.local:
            q, k, v = (y.unflatten(2, (-1, 4)) for y in (q, k, v))
            real = real.unflatten(0, (-1, 4))[:, None]
        out = (q @ k.mT / D**0.5).masked_fill(~real, -torch.inf).softmax(-1) @ v
        out = out.flatten(2, 3) if self.local else out
        return out[:, :, :t].transpose(1, 2).reshape(b, t, H * D)


@pytest.mark.parametrize("local", [False, True])
def test_rows_that_a_module_adds_as_zeros_do_not_count(local):
    torch.manual_seed(0)
    model, x = (
        Padded(local=local).double(),
        torch.randn(B, 10, H * D, dtype=torch.float64),
    )
    q, k, _ = model.heads(x)
    near = (
        torch.arange(10) // 4 == torch.arange(10)[:, None] // 4
        if local
        else torch.ones(10, 10, dtype=torch.bool)
    )
    weights = (q @ k.mT / D**0.5).masked_fill(~near, -torch.inf).softmax(-1)
    with qkeel.watch(model) as monitor:
        for _ in range(2):  # the second pass is looked at in the module alone
            model(x)
            found = monitor.read()[""]
            assert found.n_queries.tolist() == [B * 10] * H
            assert_close(
                found.entropy, torch.special.entr(weights).sum(-1).mean((0, 2))
            )
            assert_close(found.query_norm, q.norm(dim=-1).mean((0, 2)))


def test_queries_that_are_zeros_count_unless_the_module_has_added_them():
    """ESM and XLM multiply the embeddings of padding by 0."""
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(B, 10, H * D)
    x[1, 6:], model.pads = 0, False
    with qkeel.watch(model) as monitor:
        model(x)
        assert monitor.read()[""].n_queries.tolist() == [B * 10] * H
