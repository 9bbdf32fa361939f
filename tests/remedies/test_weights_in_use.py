"""Weights that hooks or parametrizations compute, that layers share, or that also make values: drawn at random, and
compared with float64 references that know nothing of qkeel. A remedy acts exactly, or it is refused."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings

import pytest
import torch
from tests.attention import Attention as Foreign
from tests.attention import from_heads, values
from tests.training import sgd, step
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

import qkeel
from qkeel.errors import RefusedError
from qkeel.nn import Attention
from qkeel.remedies.qk_clip import QKClip

# Draws of every wrap and every sharing, and all kinds of them that some remedy takes.
SEEDS = (0, 1, 3, 6, 7, 9, 10, 11, 13, 14, 17, 19, 20, 23, 24, 26, 27)
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated"
)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled(layer):
    parametrize.register_parametrization(layer, "weight", Double())
    return layer


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.4)


def pruned_rows(layer):
    return prune.ln_structured(layer, "weight", 0.3, n=2, dim=1)


def computed_by_hook(layer):
    stored = layer.weight
    del layer._parameters["weight"]
    layer.register_parameter("raw", stored)

    def compute(module, _):
        module.weight = module.raw / module.raw.norm() * 4

    compute(layer, None)
    layer.register_forward_pre_hook(compute)
    return layer


def with_a_gain(layer):
    """Weight norm whose gain differs from the norm of its weight, as after some training."""
    layer = nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(3)
    return layer


WRAPS = {
    "plain": lambda layer: layer,
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": with_a_gain,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": pruned,
    "pruned rows": pruned_rows,
    "doubled": doubled,
    "own hook": computed_by_hook,
}
SHARING = (
    "nothing",
    "keys",
    "queries",
    "both",
    "a chain",
    "keys and values",
    "values of another",
    "one layer three times",
)


class Layer(Foreign):
    """One attention layer of these projections."""

    def __init__(self, q, k, v, heads, size):
        nn.Module.__init__(self)
        self.q, self.k, self.v, self.size, self.d = q, k, v, size, size

    def parts(self, x):
        q, k, v = self.heads(x)
        return q, *(y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))

    def forward(self, x):
        y = functional.scaled_dot_product_attention(*self.parts(x))
        return x + from_heads(y)


@dataclasses.dataclass
class Drawn:
    """A model, its input, and what was drawn."""

    model: nn.Sequential
    x: Tensor
    wrap: str
    sharing: str

    @torch.no_grad()
    def observed(self):
        """The logits of every layer [b h t s] and its values, each with the drawn input, in evaluation mode."""
        training = self.model.training
        self.model.eval()
        observed = []
        for layer in self.model:
            for module in (layer.q, layer.k, layer.v):
                module(self.x)  # the hooks compute the weights
            q, k, v = layer.parts(self.x)
            observed.append((q @ k.mT / math.sqrt(layer.size), v.clone()))
        self.model.train(training)
        return observed


def draw(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    wrap, sharing = (
        rng.choice([*WRAPS, "plain", "plain", "plain", "pruned"]),
        rng.choice(SHARING),
    )
    heads, size = rng.choice([2, 4]), rng.choice([4, 8])
    groups = rng.choice([heads, heads // 2])
    width = heads * size

    def projection(n):
        layer = nn.Linear(width, n * size, bias=rng.random() < 0.5).double()
        with torch.no_grad():
            layer.weight.mul_(rng.uniform(1, 4))
        return WRAPS[wrap](layer)

    layers = [
        Layer(
            projection(heads),
            projection(groups),
            nn.Linear(width, groups * size).double(),
            heads,
            size,
        )
        for _ in range(3)
    ]
    a, b, c = layers
    if sharing in ("keys", "both"):
        b.k = a.k
    if sharing in ("queries", "both"):
        b.q = a.q
    if sharing == "a chain":
        b.q, c.k = a.q, b.k
    if sharing == "keys and values":
        a.v = a.k
    if sharing == "values of another":
        b.v = a.k
    if sharing == "one layer three times":
        layers = [a, a, a]
    model = nn.Sequential(*layers)
    x = torch.randn(2, 6, width, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(30 if "spectral" in wrap else 1):  # power iterations settle
            model(x)
    return Drawn(model, x, wrap, sharing)


def inputs_of_layers(drawn):
    inputs = []
    x = drawn.x
    with torch.no_grad():
        for layer in drawn.model:
            inputs.append(x)
            x = layer(x)
    return inputs


def largest(drawn, inputs):
    """The largest logit [layer head] of each layer on its own input."""
    tops = []
    with torch.no_grad():
        for layer, x in zip(drawn.model, inputs):
            q, k, _ = layer.parts(x)
            tops.append((q @ k.mT / math.sqrt(layer.size)).amax((0, 2, 3)))
    return torch.stack(tops)


def applied(drawn, spec):
    """The optimizer of a model under a remedy, or None if the remedy is refused."""
    optimizer = sgd(drawn.model, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            qkeel.apply(drawn.model, spec, optimizer, batch=drawn.x)
        except RefusedError:
            return None
    return optimizer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clip_scales_each_head_to_the_threshold_and_changes_nothing_else(
    seed,
):
    drawn = draw(seed)
    inputs = inputs_of_layers(drawn)
    tops, before = largest(drawn, inputs), drawn.observed()
    threshold = float(tops.median())
    if threshold <= 0:
        pytest.skip("no positive logits")
    optimizer = applied(drawn, f"qk_clip:threshold={threshold}")
    if optimizer is None:
        assert (
            drawn.wrap not in ("plain", "pruned", "pruned rows")
            or drawn.sharing != "nothing"
        )
        return
    step(drawn.model, optimizer, drawn.x)
    if drawn.sharing == "one layer three times":  # one head that runs three times
        tops = tops.amax(0, keepdim=True).expand_as(tops)
    if drawn.sharing == "both":
        tops = torch.stack([torch.maximum(tops[0], tops[1])] * 2 + [tops[2]])
    gamma = (threshold / tops).clamp(max=1)
    for (z, v), (old_z, old_v), factor in zip(
        drawn.observed(), before, gamma, strict=True
    ):
        assert_close(z, old_z * factor[:, None, None])
        assert torch.equal(v, old_v)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_a_cap_bounds_the_weights_in_use(seed):
    assert (applied(draw(seed), "lalr") is None) == (draw(seed).wrap != "plain")
    drawn = draw(seed)
    optimizer = applied(drawn, "spectral_cap:cap=0.5")
    if optimizer is None:
        assert drawn.wrap != "plain" or drawn.sharing in (
            "keys and values",
            "values of another",
        )
        return
    made = [v for _, v in drawn.observed()]
    step(drawn.model, optimizer, drawn.x)
    for layer, old, (_, new) in zip(drawn.model, made, drawn.observed(), strict=True):
        assert torch.equal(old, new)
        for module in (layer.q, layer.k):
            heads = module.weight.detach().unflatten(0, (-1, layer.size))
            assert (torch.linalg.matrix_norm(heads, 2) <= 0.5 * (1 + 1e-9)).all()


@pytest.mark.parametrize("shown", ["batch", "sites", "watched", "own"])
def test_keys_that_are_their_own_values_are_left_alone_however_sites_are_known(shown):
    torch.manual_seed(0)
    x, key = 9 * torch.randn(2, 5, 8), nn.Linear(8, 8)
    model = nn.Sequential(Layer(nn.Linear(8, 8), key, key, heads=2, size=4))
    if shown == "own":
        model = nn.Sequential(Attention(8, 2))
        model[0].v_proj.weight = model[0].k_proj.weight
    optimizer = sgd(model, 0.0)
    options = {"batch": lambda: x, "sites": lambda: qkeel.find_sites(model, x)}
    given = {shown: options[shown]()} if shown in options else {}
    with qkeel.watch(model, optimizer if shown == "watched" else None):
        if shown == "watched":
            step(model, optimizer, x)
        before = values(model)
        qkeel.apply(model, "qk_clip:threshold=0.1", optimizer, **given)
        step(model, optimizer, x)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert {name[2] for name in moved} == {"q"}


@pytest.mark.parametrize("clipped", [["0"], ["0", "1"]])
def test_layers_of_the_same_weights_are_clipped_together_or_not_at_all(
    clipped,
):
    torch.manual_seed(0)
    q, k, *values = (nn.Linear(8, 8) for _ in range(4))
    model = nn.Sequential(*(Layer(q, k, v, heads=2, size=4) for v in values))
    x = 9 * torch.randn(2, 5, 8)
    sites = qkeel.find_sites(model, x)
    assert len(sites) == 2
    names = [sites[int(i)].name for i in clipped]
    remedy = QKClip(threshold=0.1, heads=tuple((name, ()) for name in names))
    optimizer = sgd(model, 0.0)
    if len(clipped) == 1:
        with pytest.raises(RefusedError, match="other layers"):
            qkeel.apply(model, remedy, optimizer, batch=x)
        return
    before = q.weight.detach().clone()
    qkeel.apply(model, remedy, optimizer, batch=x)
    step(model, optimizer, x)
    assert not torch.equal(before, q.weight)
