"""A clip says which head it cannot lower, where its logits have what no weight makes."""

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Attention
from tests.training import adamw, step, warned

import qkeel


class Shifted(Attention):
    """Attention with a constant that is joined to q and k."""

    def __init__(self, constant):
        super().__init__(self.attended, 32)
        self.constant = constant
        for projection in (self.q, self.k):
            projection.weight.data.mul_(8)

    def attended(self, q, k, v):
        q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 7))
        k = F.pad(F.pad(k, (0, 1), value=self.constant), (0, 7))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


@pytest.mark.parametrize(
    ("constant", "says"), [(60.0, True), (4e3, True), (0.0, False)]
)
def test_a_constant_over_the_threshold_is_told_once(constant, says):
    torch.manual_seed(0)
    model = Shifted(constant)
    x, optimizer = torch.randn(4, 12, 32), adamw(model, 0.001)
    handle = qkeel.apply(model, "qk_clip:threshold=15", optimizer, batch=x)
    with warned() as caught:
        for _ in range(12):
            step(model, optimizer, x)
    told = [text for text in caught if "does not bring" in text]
    assert len(told) == says
    if says:
        assert "head 0, under 15" in told[0]
        assert "joined to q and k" in told[0]
    handle.remove()


def test_a_head_that_was_below_zero_may_grow_over_the_threshold_in_one_step():
    torch.manual_seed(0)
    model = Shifted(0.0)
    x, optimizer = torch.randn(4, 1, 32), adamw(model, 1e-6)
    with torch.no_grad():
        model.k.weight.copy_(model.q.weight)
        model.k.weight[:16].mul_(-1)
    qkeel.apply(model, "qk_clip:threshold=15", optimizer, batch=x)
    with warned() as caught:
        step(model, optimizer, x)
        with torch.no_grad():
            model.k.weight[:16].mul_(-1)
        step(model, optimizer, x)
    assert not [text for text in caught if "does not bring" in text]


def test_a_head_that_came_under_the_threshold_may_grow_over_it_again():
    torch.manual_seed(0)
    model = Shifted(0.0)
    x, optimizer = torch.randn(4, 12, 32), adamw(model, 1e-6)
    qkeel.apply(model, "qk_clip:threshold=15", optimizer, batch=x)
    with warned() as caught:
        for number in range(8):  # the first head is over it in each
            with torch.no_grad():
                model.q.weight[:16].mul_(1.5)
                model.q.weight[16:].mul_(1e5 if number in (0, 7) else 0.9)
            step(model, optimizer, x)
    assert not [text for text in caught if "does not bring" in text]
