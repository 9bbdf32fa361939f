"""Of layers that are alike one is read, the others run once, and a layer that only seems to be alike is seen."""

import pytest
import torch
from tests.attention import Attention, Joint, from_heads, fused_causal
from tests.drawing import randn
from tests.sites.models import SCALE, D, H, Heads, M, T
from torch import nn

from qkeel import find_sites
from qkeel.sites import site_search, verify


def x():
    return randn(2, T, M, seed=1)


class Disguised(Heads):
    """Heads whose queries are permuted in a way that the graph doesn't show, by a buffer, which layers that differ in
    nothing else may fill in different ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(H))

    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in self.operands(x))
        q = q + (q[:, self.order] - q).detach()
        return from_heads((q @ k.mT * SCALE).softmax(-1) @ v)


def layers(n):
    torch.manual_seed(0)
    return nn.Sequential(*(Disguised() for _ in range(n)))


@pytest.fixture
def runs(monkeypatch):
    """The names of the modules that run again."""
    names = []
    logits = verify.Rerun.logits

    def counted(rerun, *args):
        names.append(rerun._calls[0].name)
        return logits(rerun, *args)

    monkeypatch.setattr(verify.Rerun, "logits", counted)
    return names


def test_a_forward_that_notes_its_length_in_the_configuration_has_noted_that_of_the_example():
    transformers = pytest.importorskip("transformers")

    class Sized(Attention):
        def forward(self, x):
            self.config.longest = x.shape[1]
            return super().forward(x)

    config = transformers.LlamaConfig()
    model = nn.Sequential(*[Sized(fused_causal, 16, 2) for _ in range(2)])
    for layer in model:
        layer.config = config
    sites = find_sites(model, randn(4, 100, 16, seed=0))
    assert all(site.verified for site in sites)
    assert config.longest == 100


def verified(sites):
    return [site.verified for site in sites]


def test_of_eight_plain_layers_one_is_read_and_verified(runs, monkeypatch):
    read = []
    read_module = site_search.read_module

    def counted(part, *args, **kwargs):
        read.append(part)
        return read_module(part, *args, **kwargs)

    monkeypatch.setattr(site_search, "read_module", counted)
    torch.manual_seed(0)
    model = nn.Sequential(*(Joint(fused_causal, M, 2 * H) for _ in range(8)))
    assert verified(find_sites(model, x())) == [True] * 8
    assert len(read) == 1
    assert set(runs) == {"0"}


# A permutation of each cycle type, and a second pair.
@pytest.mark.parametrize(
    "order",
    [(1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2), (1, 2, 0, 3), (1, 2, 3, 0)],
)
def test_any_permutation_of_heads_in_a_later_layer_is_seen(
    order,
):
    model = layers(3)
    model[1].order.copy_(torch.tensor(order))
    sites = find_sites(model, x())
    assert verified(sites) == [True, False, True]
    assert "changed the logits of" in sites[1].unverified


def test_heads_whose_logits_are_next_to_nothing_do_not_confirm_their_rows():
    model = layers(1)
    model[0].order.copy_(torch.tensor([1, 0, 2, 3]))
    with torch.no_grad():
        for p in (model[0].q.weight, model[0].q.bias):
            p[: 2 * D] *= 1e-8
    assert verified(find_sites(model, x())) == [False]


class ByNumber(Heads):
    """Heads that do what a table says of their layer, which no setting of the module shows."""

    table = ("plain",)

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm = nn.RMSNorm(D)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in self.operands(x))
        does, scale = self.table[self.number], SCALE
        if does == "normed":
            q, k = self.norm(q), self.norm(k)
        if does == "stretched":
            q, k = self.norm(q) * 2, self.norm(k)
        if does == "scaled":
            q = q * self.gain
        if does == "swapped":
            q, k = k, q
        if does == "cool":
            scale = SCALE / 2
        if does == "capped":
            z = 5 * torch.tanh(q @ k.mT * scale / 5)
        else:
            z = q @ k.mT * scale
        if does == "biased":
            z = z + torch.arange(T)
        return from_heads(z.softmax(-1) @ v)


def facts(site):
    gains = [gain.index.tolist() for gain in site.query_gains + site.key_gains]
    weights = [s.parameter.split(".")[-2] for s in (*site.query, *site.key)]
    between = [s.parameter.split(".")[-1] for s in site.between]
    return (
        *(site.spec, weights, site.normed, gains, between),
        *(site.verified, site.unscaled, site.is_sum, len(site.value_weights)),
    )


class Valued(Attention):
    """Attention whose values may be its keys."""

    def __init__(self, is_shared):
        super().__init__(fused_causal, M, H)
        self.is_shared = is_shared

    def projected(self, x):
        q, k, v = super().projected(x)
        return q, k, k if self.is_shared else v


@pytest.mark.parametrize("first", [False, True])
def test_layers_of_which_one_takes_its_keys_as_values_are_told_apart(first):
    layers = [Valued(is_shared) for is_shared in (first, not first, first)]
    for layer, site in zip(layers, find_sites(nn.Sequential(*layers), x())):
        (values,) = site.value_weights
        assert values.parameter.split(".")[1] == ("k" if layer.is_shared else "v")


@pytest.mark.parametrize("first", ["plain", "normed", "stretched", "capped", "scaled"])
@pytest.mark.parametrize(
    "second", ["plain", "normed", "swapped", "cool", "capped", "scaled", "biased"]
)
def test_a_layer_is_what_it_is_alone(first, second, monkeypatch):
    monkeypatch.setattr(ByNumber, "table", (first, second, first))
    torch.manual_seed(0)
    layers = [ByNumber(number) for number in range(3)]
    together = find_sites(nn.Sequential(*layers), x())
    assert [site.name for site in together] == ["0", "1", "2"]
    for layer, site in zip(layers, together):
        (alone,) = find_sites(layer, x())
        assert facts(site) == facts(alone)


@pytest.mark.parametrize("beside", ["in a list", "as an attribute"])
def test_layers_may_refer_to_the_model_beside_its_tree(beside):
    model = nn.Sequential(*(Joint(fused_causal, M, H) for _ in range(3)))
    for layer in model:
        if beside == "in a list":
            layer.owner = [model]
        else:
            object.__setattr__(layer, "owner", model)
    assert verified(find_sites(model, x())) == [True] * 3


def test_weights_beside_the_tree_of_a_layer_are_never_copied():
    """Those of a teacher in a list: a copy of these would take 1 EiB."""
    model = nn.Sequential(*(Joint(fused_causal, M, H) for _ in range(3)))
    teacher = nn.Linear(1, 1)
    teacher.weight = nn.Parameter(torch.zeros(1, 1).expand(2**30, 2**28))
    for layer in model:
        layer.teachers = [teacher]
    assert verified(find_sites(model, x())) == [True] * 3
