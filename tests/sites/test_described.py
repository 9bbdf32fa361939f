"""Attention that nothing can see is watched as its description says."""

import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from tests.contract.watch.test_functions import opaque
from torch import nn
from torch.testing import assert_close

from qkeel.capture.described import arranged
from qkeel.capture.intercept import CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelWarning,
    ShapeError,
    UnknownNameError,
)
from qkeel.patching.guards import FaultGuard
from qkeel.sites import Reading, describe
from qkeel.spec import AttentionSpec, RMSNorm

from .oracle import observed

B, H, G, T, D = 2, 4, 2, 6, 8


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(H * D, H * D)
        self.kv = nn.Linear(H * D, 2 * G * D, bias=False)

    def heads(self, x):
        q = to_heads(self.q_proj(x), H, D)
        return q, *self.kv(x).unflatten(2, (2, G, D)).transpose(1, 3).unbind(2)

    def forward(self, x):
        q, k, v = self.heads(x)
        k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))
        return from_heads(opaque(q, k, v))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Opaque(), Opaque()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


QUERY = Reading(module="q_proj")
KEY = Reading(module="kv", layout="b t (n h d)", part=0, parts=2)


def described(model, name="layers.0", **more):
    return describe(
        model, name, **{"query": QUERY, "key": KEY, "heads": (H, G), **more}
    )


def read(model, sites, *inputs, **named):
    """By name, the functions and statistics of the calls of a model with described sites."""
    known = KnownSites.of(sites)
    calls, _ = observed(lambda: model(*inputs, **named), model, known=known)
    assert len({name for name, _, _ in calls}) == len(calls)
    return {name: (how, stats) for name, how, stats in calls}


@torch.no_grad()
def test_the_rows_of_a_description_are_those_of_its_heads():
    model = Model()
    site = described(model)
    assert (site.n_heads, site.n_kv_heads, site.head_dim, site.why) == (H, G, D, "")
    (term,) = site.terms
    query, key = term.query[0], term.key[0]
    assert (query.parameter, query.bias, key.parameter, key.bias) == (
        "layers.0.q_proj.weight",
        "layers.0.q_proj.bias",
        "layers.0.kv.weight",
        None,
    )
    assert torch.equal(key.index, torch.arange(G * D).view(G, D))
    # Zeroing a head's rows silences its logits and nobody else's.
    x = torch.randn(B, T, H * D)
    before = read(model, [site], x)["layers.0"][1].max_logit
    of_query = described(model, key=lambda module, x: module.heads(x)[1])
    assert (of_query.head_dim, of_query.terms) == (D, ())
    assert torch.equal(read(model, [of_query], x)["layers.0"][1].max_logit, before)
    query.heads(model.get_parameter(query.parameter))[1] = 0
    model.get_parameter("layers.0.q_proj.bias").view(H, D)[1] = 0
    after = read(model, [site], x)["layers.0"][1].max_logit
    assert after[1] == 0
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_functions_may_read_q_k_and_the_mask_from_the_arguments_of_the_forward():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 8, 8))

        def forward(self, x, *, keep):
            return x

    model = Bare()
    site = describe(
        model,
        "",
        query=lambda module, x, keep: (x @ module.w[0])[:, None],
        key=lambda module, x, keep: (x @ module.w[1])[:, None],
        heads=1,
        causal=False,
        mask=lambda module, x, keep: keep,
    )
    assert site.terms == ()
    assert "computes it" in site.why
    x, keep = torch.randn(B, T, 8), torch.ones(B, T, dtype=torch.bool)
    keep[1, 4:] = False
    ((_, stats),) = read(model, [site], x, keep=keep).values()
    assert stats.n_pairs.tolist() == [T * T + T * 4]


def test_what_is_visible_inside_a_described_module_is_reported_once_as_described():
    class Visible(Opaque):
        def forward(self, x):
            y = F.scaled_dot_product_attention(
                *self.heads(x), is_causal=True, enable_gqa=True
            )
            return from_heads(y)

    model, x = nn.Sequential(Visible(), Visible()), torch.randn(B, T, H * D)
    described_and_not = read(model, [described(model, "0")], x)
    plain = read(model, [], x)
    how = {name: how for name, (how, _) in described_and_not.items()}
    assert how == {"0": "description", "1": "scaled_dot_product_attention"}
    assert_close(described_and_not["0"][1].max_logit, plain["0"][1].max_logit)


def test_a_fault_in_a_description_goes_to_the_handler_and_not_into_the_model():
    model, x = Model(), torch.randn(B, T, H * D)
    site = described(
        model,
        key=Reading(
            module="kv", layout="b t (n h d)", parts=2, then=lambda k: k[..., 1:]
        ),
    )
    guard = FaultGuard("off: {}")
    watcher = CaptureMode(model, pytest.fail, known=KnownSites.of([site]), guard=guard)
    with pytest.warns(QkeelWarning, match="off: expected"), watcher:
        model(x)
    assert isinstance(guard.error, ShapeError)


def test_an_output_that_is_laid_out_otherwise_is_an_error():
    for shape in ((2, 6, 32), (2, 3, 6, 8)):  # another number of dimensions, of heads
        with pytest.raises(ShapeError):
            arranged(torch.ones(shape), Reading(module="q", layout="b h t d"), 4)


NORMED = AttentionSpec(norm=RMSNorm(on="qk", over="head", gain="dim"))


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"name": "layer.0"}, UnknownNameError, "Did you mean 'layers.0'"),
        ({"query": Reading(module="q")}, UnknownNameError, "Known: kv, q_proj"),
        ({"heads": (4, 3)}, InvalidValueError, "got 4 and 3"),
        ({"heads": 5}, ShapeError, "with 5 heads"),
        ({"key": Reading(module="kv")}, InvalidValueError, r"unequal sizes, \[8, 16\]"),
        ({"spec": NORMED}, InvalidValueError, "this spec has parameters"),
    ],
)
def test_a_description_that_does_not_fit_is_refused_at_once(changes, error, told):
    with pytest.raises(error, match=told):
        described(Model(), **changes)


def test_only_a_module_can_be_described():
    with pytest.raises(InvalidTypeError, match=r"expected a torch\.nn\.Module"):
        described({})


@pytest.mark.parametrize(
    "layout", ["b t", "b t (h d", "b t h d d", "b t (h x)", "b h d"]
)
def test_a_layout_that_names_no_tokens_or_dims_is_refused(layout):
    with pytest.raises(InvalidValueError, match="expected a layout of b h t d"):
        Reading(module="q", layout=layout)
    with pytest.raises(InvalidValueError, match="expected part 0 to 1 of 2, got 2"):
        Reading(module="q", part=2, parts=2)
