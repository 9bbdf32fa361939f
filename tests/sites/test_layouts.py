"""Where the scores have their heads: what no experiment shows is a guess, and a changed softmax has them too."""

import pytest
import torch
from tests.attention import to_heads
from tests.sites.models import CASES, SCALE, D, H, Heads, causal
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel import find_sites
from qkeel.errors import RefusedError
from qkeel.sites import Tap

from .oracle import check, tapped

B, T = 4, 4  # as many as heads: no shape says which is which


def channels(q, k, v):
    """XCiT: attention between the features of a head."""
    q, k, v = (x.permute(0, 2, 3, 1) for x in (q, k, v))
    return ((q @ k.mT * SCALE).softmax(-1) @ v).permute(0, 3, 1, 2)


def neighbours(q, k, v):
    """Keys of its own for every query: its own and the one before."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    near = torch.stack([k, k.roll(1, 2)], 3)
    z = torch.einsum("bhtd,bhtwd->bhtw", q, near) * SCALE
    return torch.einsum(
        "bhtw,bhtwd->bhtd", z.softmax(-1), torch.stack([v, v.roll(1, 2)], 3)
    ).transpose(1, 2)


@pytest.mark.parametrize(("attend", "keys"), [(channels, D), (neighbours, 2)])
def test_what_is_attended_to_need_not_be_all_tokens(attend, keys):
    torch.manual_seed(0)
    model, x = Heads(attend), torch.randn(B, T, 32)
    (site,) = find_sites(model, x)
    assert (site.n_heads, str(site.layout)) == (H, "b h t s")
    stats = tapped(model, x, [site])
    assert stats.n_pairs.tolist() == [B * (D if attend is channels else T) * keys] * H


def test_a_layout_that_only_the_shape_shows_is_reported_once_as_a_guess():
    """Queries and keys that nothing in the model makes: no experiment says which dimension is heads."""

    model, q = Given(), torch.randn(H, H, T, D)
    (site,) = find_sites(model, (q, q))
    assert site.terms == ()
    assert "do not show which dimension holds the heads" in site.why
    for sites in ([], [site]):
        with torch.no_grad(), Tap(model) as tap:
            tap.sites = sites
            with pytest.warns(
                UserWarning, match="the heads of the model itself are a guess"
            ) as seen:
                [model(q, q) for _ in range(2)]
            assert len(seen) == 1
    (certain,) = find_sites(model, (q[:2], q[:2]))
    assert certain.layout.guess == ""


class Given(nn.Module):
    """Queries and keys that nothing in the model makes."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, q, k):
        return (q @ k.mT).softmax(-1) @ k


@pytest.mark.parametrize(
    "name",
    ["b s h t", "i j b n", "heads and batch merged", "keys by queries", "windows"],
)
def test_a_changed_softmax_has_the_heads_of_its_layout(name):
    """A sink per head: weights are e^z / (e^s + Σ e^z), of a z under a cap."""
    case = CASES[name]
    model, x = case.model(), case.x()
    assert isinstance(model, Heads)
    y = model(x)
    q, k, v = (operand.transpose(-3, -2) for operand in model.operands(x))
    weights = causal(q @ k.mT * SCALE).softmax(-1)
    assert_close(qkeel.attention_maps(model, x)[""].view_as(weights), weights)
    handle = qkeel.apply(model, ["softcap:cap=2", "sink"], batch=x)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0]).view(H, 1, 1)
    with torch.no_grad():
        model.get_parameter("sink").copy_(sinks)
    e = causal(2 * torch.tanh(q @ k.mT * SCALE / 2)).exp()
    w = e / (e.sum(-1, keepdim=True) + model.get_parameter("sink").exp())
    assert_close(model(x), (w @ v).transpose(-3, -2).flatten(-2))
    handle.remove()
    assert torch.equal(model(x), y)


def test_parameters_of_heads_are_refused_where_the_heads_are_a_guess_and_a_cap_is_not():
    model, q = Given(), torch.randn(H, H, T, D)
    with pytest.raises(
        RefusedError,
        match="which dimension holds the heads, and each head would need a separate parameter",
    ):
        qkeel.apply(model, "sink", batch=(q, q))
    qkeel.apply(model, "softcap:cap=2", batch=(q, q))
    assert_close(model(q, q), (2 * torch.tanh(q @ q.mT / 2)).softmax(-1) @ q)


class HeadsBeforeBatch(nn.Module):
    """Scores [(h b) t s], as the Set Transformer's are; head 1 has the largest logits."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.q.weight[4:8] *= 30

    def forward(self, x):
        q, k = (torch.cat(y(x).split(4, 2), 0) for y in (self.q, self.k))
        weights = (q @ k.mT / 2).softmax(2)
        return torch.cat((weights @ k).split(len(x), 0), 2)


def test_a_first_batch_of_one_sample_does_not_mix_heads_with_samples():
    torch.manual_seed(0)
    model, x = HeadsBeforeBatch().double(), torch.randn(3, 6, 16, dtype=torch.float64)
    q, k = (to_heads(y(x), 4, 4) for y in (model.q, model.k))
    check(tapped(model, x, qkeel.find_sites(model, x[:1])), q @ k.mT / 2)
