"""Attention that is not understood is listed, said once, and left out by remedies only when asked."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Attention, from_heads
from tests.drawing import randn
from tests.training import sgd
from torch import Tensor, nn

from qkeel import apply, find_sites
from qkeel.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

H, D, M, T = 4, 8, 32, 6
Between = Callable[["Odd", Tensor], Tensor]


class Odd(Attention):
    """Attention that does something to its scores before the softmax."""

    def __init__(self, between):
        super().__init__(self.attended, M, H)
        self.between = between
        self.conv = nn.Conv2d(H, H, 1)
        self.keys = nn.Linear(T, T)

    def attended(self, q, k, v):
        return self.between(self, q @ k.mT).softmax(-1) @ v


class Model(nn.Module):
    """An attention that is understood, on what another one makes."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.odd, self.plain = Odd(between), Odd(lambda _, z: z)

    def forward(self, x):
        return self.plain(x + self.odd(x))


def largest(odd, z):
    index = z.topk(3, -1).indices
    return torch.full_like(z, -torch.inf).scatter(-1, index, z.gather(-1, index))


def pieces(odd, z):
    out = torch.zeros_like(z)
    out[..., :3] = z[..., :3]
    return out


WAYS = {
    "conv2d": lambda odd, z: odd.conv(F.gelu(odd.conv(z))),
    "linear": lambda odd, z: odd.keys(z),
    "relu": lambda odd, z: F.relu(z),
    "abs": lambda odd, z: z.abs(),
    "batch_norm": lambda odd, z: F.batch_norm(z, None, None, training=True),
    "pow": lambda odd, z: z.pow(2) * z.sign(),
    "scatter": largest,
    "setitem": pieces,
}


def x():
    return randn(2, T, M, seed=1)


def model(name="relu"):
    return Model(WAYS[name])


@pytest.mark.parametrize("name", WAYS)
def test_what_was_seen_and_not_understood_is_listed(name):
    sites = find_sites(model(name), x())
    assert [site.name for site in sites] == ["plain"]
    (missed,) = sites.missed
    assert (missed.module, missed.operation) == ("odd", name)
    assert "could not be followed beyond" in missed.reason
    assert sites.share == "1 of 2 attention layers"


NORMALISERS = {
    "a constant in the sum": lambda z: z.exp() / (1 + z.exp().sum(-1, keepdim=True)),
    "exponentials times a mask": lambda z: (
        (e := z.exp() * torch.ones(T, T).tril()) / e.sum(-1, keepdim=True)
    ),
    "sparsemax, by its squares": lambda z: (
        z.relu().square() / z.relu().square().sum(-1, keepdim=True)
    ),
}


@pytest.mark.parametrize("name", NORMALISERS)
def test_scores_that_are_normalised_in_another_way_and_multiplied_with_values_are_missed(
    name,
):
    class Normalised(Odd):
        def attended(self, q, k, v):
            return NORMALISERS[name](q @ k.mT) @ v

    torch.manual_seed(0)
    model = nn.Sequential(Normalised(lambda _, z: z), Odd(lambda _, z: z))
    sites = find_sites(model, x())
    assert [site.name for site in sites] == ["1"]
    assert {missed.module for missed in sites.missed} == {"0"}
    assert all(missed.reason for missed in sites.missed)


class Transposed(Odd):
    """A softmax of scores over one of the two dimensions of tokens, and values summed along one."""

    def __init__(self, order, over, along, draw):
        super().__init__(lambda _, z: z)
        self.order, self.over, self.along = order, over, along
        self.is_masked, self.rate = draw.random() < 0.5, draw.choice([0.0, 0.2])

    def attended(self, q, k, v):
        z = torch.einsum(f"bhtd,bhsd->{self.order}", q, k)
        if self.is_masked and self.order.startswith("bh"):
            z = z.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        # A row in which all is hidden would be NaN.
        weights = F.dropout(z.softmax(self.order.index(self.over)), self.rate)
        rest = "ts".replace(self.along, "")
        return torch.einsum(
            f"{self.order},bh{self.along}d->bh{rest}d", weights.nan_to_num(), v
        )


@pytest.mark.parametrize("over", "ts")
@pytest.mark.parametrize("along", "ts")
@pytest.mark.parametrize("order", ["bhts", "bhst", "btsh", "bsth"])
def test_weights_that_are_normalised_along_another_dimension_than_values_are_summed_are_missed(
    order, over, along
):
    torch.manual_seed(0)
    odd = Transposed(order, over, along, random.Random(order + over + along))
    sites = find_sites(nn.Sequential(odd, Odd(lambda _, z: z)), x())
    if odd.over == odd.along:
        assert [site.name for site in sites] == ["0", "1"]
        assert not sites.missed
    else:
        assert [site.name for site in sites] == ["1"]
        assert "over the queries" in sites.missed[0].reason


def test_a_classifier_with_a_copy_of_its_weight_is_not_missed():
    class Classifier(Odd):
        def forward(self, x):
            y = super().forward(x)[:, 0]
            return (y @ self.q.weight.clone().mT).softmax(-1)

    sites = find_sites(Classifier(lambda _, z: z), x())
    assert ([site.name for site in sites], sites.missed) == ([""], ())


def test_a_softmax_over_heads_is_missed():
    class OverHeads(Odd):
        def forward(self, x):
            q, k, _ = self.heads(x)
            return (q @ k.mT).softmax(1).sum(1) @ x

    with pytest.raises(
        RefusedError, match="its softmax runs over dimension 1 of 4, not over the last"
    ):
        find_sites(OverHeads(lambda _, z: z), x())


def test_what_is_no_attention_is_not_missed():
    class Others(Odd):
        """Linear attention, a gate, a router, and a softmax over classes."""

        def forward(self, x):
            q, k, v = self.heads(x)
            linear = q.relu() @ (k.relu().mT @ v)
            gated = torch.sigmoid(q) * v
            mixed = from_heads(linear + gated)
            return mixed * self.q(mixed).softmax(-1)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.others, self.plain = Others(lambda _, z: z), Odd(lambda _, z: z)

        def forward(self, x):
            return self.plain(self.others(x))

    sites = find_sites(Both(), x())
    assert [site.name for site in sites] == ["plain"]
    assert sites.missed == ()
    with pytest.raises(
        RefusedError, match=r"none of the products reaches a softmax.*linear attention"
    ) as refusal:
        find_sites(Others(lambda _, z: z), x())
    assert "by hand" not in str(refusal.value)


def test_a_remedy_for_all_attention_is_refused_unless_it_may_be_partial():
    m = model()
    optimizer = sgd(m)
    for remedy in ("lalr", "softcap:cap=5", "qk_norm"):
        with pytest.raises(
            RefusedError,
            match=rf"{remedy[:4]}.*1 of 2 attention .*odd: its scores .*partial=True",
        ):
            apply(m, remedy, optimizer, batch=x())
        apply(m, remedy, optimizer, batch=x(), partial=True).remove()
    apply(
        m, "z_loss", optimizer, batch=x()
    ).remove()  # has nothing to do with attention


@pytest.mark.parametrize(("constant", "is_read"), [(1e-6, True), (1e-4, False)])
def test_a_constant_in_the_sum_is_a_guard_if_it_is_tiny(constant, is_read):
    class Guarded(Odd):
        def attended(self, q, k, v):
            z = q @ k.mT
            e = (z - z.amax(-1, keepdim=True)).exp()
            return e / (e.sum(-1, keepdim=True) + constant) @ v

    sites = find_sites(nn.Sequential(Guarded(lambda _, z: z), Odd(lambda _, z: z)), x())
    assert [site.name for site in sites] == (["0", "1"] if is_read else ["1"])
    assert len(sites.missed) == (0 if is_read else 1)
