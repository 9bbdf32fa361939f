"""Norms of queries, keys and values: each remedy is the spec it names, on own attention and on anybody's."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from tests.attention import from_heads, to_heads
from tests.drawing import randn
from tests.each_row import each_row
from tests.training import sgd
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel import reference
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.nn import MLA, Attention
from qkeel.nn.mla import LatentSizes
from qkeel.remedies.insert_norms import KINDS
from qkeel.spec import AttentionSpec, Fixed, L2Norm, Learned, RMSNorm, Rope, Sqrt

from .foreign import (
    LAYOUTS,
    Hand,
    assert_refused,
    everything,
    example,
    hf,
)
from .models import (
    D_MODEL,
    assert_same,
    attention,
    decoder,
    loss,
    snapshot,
    tokens,
    train,
)

GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")
HOW = ("eager", "sdpa")
X = randn(2, 6, 16, seed=1).double()
START = math.log2(32 * 32 - 32)


def norm_spec(kind, over, gain, on="qk"):
    """The spec that a norm's options name."""
    norm = KINDS[kind](on=on, over=over, gain=gain)
    if kind != "l2":
        return AttentionSpec(norm=norm)
    if gain not in ("scalar", "head"):
        return AttentionSpec(norm=norm, scale=Sqrt())
    per = "layer" if gain == "scalar" else "head"
    norm = L2Norm(over=over)
    return AttentionSpec(norm=norm, scale=Learned(init=START, per=per))


def model_of(where):
    """Attention by qkeel, or as somebody lays out its heads."""
    if where == "own":
        return attention(spec=AttentionSpec())
    layout, _, how = where.partition(", ")
    return Hand(layout, how or "eager").double()


def attend(plain, spec, params):
    """What attention of this spec computes between the projections of a model."""
    if isinstance(plain, Hand):
        heads, project = plain.heads(X), plain.o
    else:
        layers = ((plain.q_proj, 4), (plain.k_proj, 2), (plain.v_proj, 2))
        heads = [to_heads(f(X), n, -1) for f, n in layers]
        project = plain.o_proj
    o = reference.attend(spec, *heads, params=params).out
    return project(from_heads(o))


def check(where, remedy, spec):
    """Compares a model under a remedy, its new parameters off their start, with attention of a spec in float64."""
    model, plain = model_of(where), model_of(where)
    known = set(plain.state_dict())
    qkeel.apply(model, remedy, batch=X, train_length=32)
    shapes = spec.parameter_shapes(
        4, plain.k_proj.out_features // 4 if where == "own" else plain.g, 4
    )
    params, rng = {}, torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if name not in known:
            with torch.no_grad():
                p.add_(0.3 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
            name = name.removesuffix(".weight").rpartition(".")[2]
            params[name] = p.detach().reshape(shapes[name])
    assert set(params) == set(shapes)
    assert (model(X) - attend(plain, spec, params)).abs().max() < 1e-12


OPTIONS = [
    *itertools.product(KINDS, ("head",), GAINS),
    *itertools.product(KINDS, ("layer",), ("dim", "head")),
]
# On anybody's attention a kind normalises as on our own, so there all gains are of one.
ELSEWHERE = OPTIONS[::3]


@pytest.mark.parametrize(
    ("kind", "over", "gain", "where"),
    [(*x, "own") for x in OPTIONS] + [(*x, "linear") for x in ELSEWHERE],
)
def test_qk_norm_is_the_spec_it_names(kind, over, gain, where):
    remedy = f"qk_norm:kind={kind},over={over},gain={gain}"
    check(where, remedy, norm_spec(kind, over, gain))


REMEDIES = {
    "qk_norm:gain=head_dim": norm_spec("rms", "head", "head_dim"),
    "qk_norm:kind=layer,over=layer": norm_spec("layer", "layer", "dim"),
    "key_norm": AttentionSpec(norm=RMSNorm(on="k")),
    "query_norm": AttentionSpec(norm=RMSNorm(on="q")),
    "key_norm:kind=l2": AttentionSpec(norm=L2Norm(on="k"), scale=Fixed(1.0)),
    "query_norm:kind=l2": AttentionSpec(norm=L2Norm(on="q"), scale=Fixed(1.0)),
    "cosine:length=512": AttentionSpec(norm=L2Norm(), scale=Fixed(4 * math.log(256))),
    "cosine:scale=9": AttentionSpec(norm=L2Norm(), scale=Fixed(9.0)),
    "qkv_norm:drop_pre_norm=false": norm_spec("layer", "head", "dim", "qkv"),
    "qkv_norm:drop_pre_norm=false,kind=rms,gain=head": norm_spec("rms", "head", "head", "qkv"),
}  # fmt: skip


# Every remedy on our own attention, and one of them in every layout of heads, written out or fused.
NAMES = [*REMEDIES]
PLACES = [f"{layout}, {how}" for layout in LAYOUTS for how in HOW]
PAIRS = [(NAMES[i % 10], place) for i, place in enumerate(PLACES)]


@pytest.mark.parametrize(("remedy", "where"), [*((x, "own") for x in NAMES), *PAIRS])
def test_every_norm_in_every_layout_of_heads_is_the_spec_it_names(remedy, where):
    check(where, remedy, REMEDIES[remedy])


def test_a_norm_of_a_kind_of_its_own_is_put_into_own_attention_alone():
    class Mine(RMSNorm):
        def normalise(self, x):
            return x / x.abs().mean(-1, keepdim=True)

    with mock.patch.dict(KINDS, mine=Mine):
        check("own", "qk_norm:kind=mine", norm_spec("mine", "head", "dim"))
        assert_refused(Hand("linear").double(), "qk_norm:kind=mine", X)


def test_the_norm_is_of_heads_whatever_axes_are_in_front():
    model = Hand("linear").double()
    x = X.unflatten(1, (2, 3))
    expected = [y.unflatten(-1, (4, 4)) for y in (model.q(x), model.q(x[0, 0]))]
    qkeel.apply(model, "qk_norm", batch=X)
    for y, before in zip((model.q(x), model.q(x[0, 0])), expected):
        assert_close(y, RMSNorm().normalise(before).flatten(-2))


def test_under_autocast_the_norm_is_taken_in_float32():
    model = Hand("linear", "sdpa")
    qkeel.apply(model, "qk_norm", batch=X.float())
    with torch.autocast("cpu", torch.bfloat16):
        q = model.q(X.float())
    assert q.dtype == torch.bfloat16
    assert (q.float().unflatten(-1, (4, 4)).norm(dim=-1) - 2).abs().max() < 0.02


class Spare(Hand):
    """As timm's: the norm that was left out is an Identity, which the forward calls."""

    def __init__(self, layout):
        super().__init__(layout)
        self.k_norm, self.q_norm = nn.Identity(), nn.Identity()

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        (Spare, "interleaved", ":kind=l2,gain=head"),
        (Spare, "linear", ":over=layer"),
    ],
)
def test_what_a_module_does_with_its_projections_besides_makes_no_difference(
    kind, layout, options
):
    model, plain = kind(layout).double(), Hand(layout).double()
    before, y = everything(model), model(X)
    handle = qkeel.apply(model, f"qk_norm{options}", batch=X, train_length=32)
    qkeel.apply(plain, f"qk_norm{options}", batch=X, train_length=32)
    assert torch.equal(model(X), plain(X))
    assert not torch.equal(model(X), y)
    handle.remove()
    assert everything(model) == before
    assert torch.equal(model(X), y)


# Several modules for a side, several calls for a module


def parts(x):
    """[b h t d] of [b t (h d)]."""
    return to_heads(x, -1, 4)


class Several(nn.Module):
    """Attention whose logits are made of the outputs of its projections as a test says."""

    def __init__(self, logits):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.q2, self.k2, self.v = (nn.Linear(16, 16) for _ in range(5))
        self.table, self.lora = nn.Embedding(12, 4), nn.Linear(16, 16, bias=False)
        self.logits = logits

    def projections(self, x):
        made = {name: getattr(self, name)(x) for name in ("q", "k", "q2", "k2")}
        return {**made, "x": x}

    def attend(self, made):
        z = self.logits(self, made) / 2
        v = parts(self.v(made["x"]))
        v = torch.cat([v] * (z.shape[-1] // 6), 2)
        return from_heads(z.softmax(-1) @ v)

    def forward(self, x):
        return self.attend(self.projections(x))


def two_streams(a, y):  # as SD3: of an image and a text
    q, k = (torch.cat([parts(y[n]), parts(y[f"{n}2"])], 2) for n in "qk")
    return q @ k.mT


def two_products(a, y):
    return parts(y["q"]) @ parts(y["k"]).mT + parts(y["q2"]) @ parts(y["k2"]).mT


def relative(a, y):  # Shaw
    far = a.table(torch.arange(6)[:, None] - torch.arange(6) + 6)
    q = parts(y["q"])
    return q @ parts(y["k"]).mT + torch.einsum("bhtd,tsd->bhts", q, far)


# What is refused, and leaves the model as it was


def adapter(a, y):
    return parts(y["q"] + a.lora(y["x"])) @ parts(y["k"]).mT


def concatenated(a, y):  # as latent attention
    q, k = (torch.cat([parts(y[n]), parts(y[f"{n}2"])], -1) for n in "qk")
    return q @ k.mT


def late_bias(a, y):  # which the norm would precede
    q, k = (nn.functional.linear(y["x"], m.weight) + m.bias for m in (a.q, a.k))
    return parts(q) @ parts(k).mT


def behind(a, y):  # the module's back
    q, k = (y["x"] @ m.weight.mT + m.bias for m in (a.q, a.k))
    return parts(q) @ parts(k).mT


def pooled(a, y):  # each query is the larger of two
    q = y["q"].unflatten(1, (-1, 2)).amax(2).repeat_interleave(2, 1)
    return parts(q) @ parts(y["k"]).mT


@each_row(
    "logits",
    [
        adapter,
        concatenated,
        late_bias,
        behind,
        pooled,
        two_streams,
        two_products,
        relative,
    ],
)
def test_a_norm_that_would_not_be_that_of_the_heads_is_refused(
    logits,
):
    assert_refused(Several(logits).double(), "qk_norm", X)


def biased(a, y):
    far = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    return parts(y["q"]) @ parts(y["k"]).mT - far


def activated(a, y):
    return parts(y["q"].tanh()) @ parts(y["k"]).mT


def gated(a, y):
    return parts(y["q"] * y["q2"].sigmoid()) @ parts(y["k"]).mT


def over_std(a, y):
    z = parts(y["q"]) @ parts(y["k"]).mT
    return z / z.std(-1, keepdim=True)


@pytest.mark.parametrize("remedy", ["qk_clip", "lalr:tau=0.1", "qk_norm"])
def test_a_bias_leaves_a_product_of_the_rows_and_what_is_none_is_refused(
    remedy,
):
    for logits in (biased, activated, gated, over_std):
        model = Several(logits).double()
        optimizer = sgd(model)
        if logits is biased:
            (site,) = qkeel.find_sites(model, X)
            assert site.verified
            assert not site.unscaled
            qkeel.apply(model, remedy, optimizer, batch=X).remove()
        else:
            assert_refused(model, remedy, X, optimizer)


LATE = AttentionSpec(position=Rope(order="rotate_then_norm"))
WIDE = MLA(D_MODEL, 2, sizes=LatentSizes(value_dim=12))
L2 = {"kind": "l2", "gain": "scalar"}
OWN = [
    (InvalidValueError, AttentionSpec(), "qk_norm", L2),  # starts at which length?
    *((InvalidValueError, AttentionSpec(), "qk_norm", {**L2, "length": n}) for n in (1, 0, -3)),
    (InvalidTypeError, AttentionSpec(), "qk_norm", {**L2, "length": math.nan}),
    (InvalidValueError, AttentionSpec(), "qk_norm", {"length": 32}),  # for nothing
    (InvalidValueError, AttentionSpec(), "cosine", {"length": 32, "scale": 2.0}),
    (RefusedError, AttentionSpec(scale=Fixed(0.3)), "qk_norm", {"kind": "l2"}),
    (None, AttentionSpec(scale=Fixed(0.3)), "qk_norm", {}),
    # After the rotation, scores would depend on more than the distance.
    *((RefusedError, LATE, "qk_norm", {"gain": gain}) for gain in ("dim", "head_dim")),
    (RefusedError, LATE, "qk_norm", {"kind": "layer", "gain": "none"}),
    (RefusedError, LATE, "qkv_norm", {}),
    (None, LATE, "qk_norm", {"gain": "head"}),
    (RefusedError, WIDE, "qkv_norm", {}),  # a gain of q and k does not fit values
    (None, WIDE, "qkv_norm", {"gain": "head"}),
    (RefusedError, qkeel.preset("qwen3"), "qk_norm", {}),
]  # fmt: skip


@each_row("error, spec, remedy, options", OWN)
def test_options_and_own_attention_that_do_not_fit_are_refused(
    error, spec, remedy, options
):
    model = (
        Attention(D_MODEL, 4, spec=spec) if isinstance(spec, AttentionSpec) else spec
    )
    before = snapshot(model)
    if error is None:
        qkeel.apply(model, remedy, **options).remove()
    else:
        with pytest.raises(error):
            qkeel.apply(model, remedy, **options)
    assert_same(before, snapshot(model))


@each_row(
    "name, how, remedy",
    [
        ("qwen3", "sdpa", "qk_norm"),
        ("deepseek", "sdpa", "qk_norm"),  # a gain per dimension behind the rotation
        ("deepseek", "sdpa", "qk_norm:gain=head"),  # behind the repetition of keys
        ("deepseek", "eager", "qk_norm:gain=none"),  # a softmax alone shows no q and k
        ("deepseek", "sdpa", "qkv_norm:drop_pre_norm=false"),
        ("neox", "sdpa", "qkv_norm"),  # parallel residual
        ("bert", "sdpa", "qkv_norm"),  # post-norm
        ("qwen3", "sdpa", "qkv_norm"),
    ],
)
def test_families_that_take_no_such_norm_are_left_alone(name, how, remedy):
    assert_refused(hf(name, how), remedy, example(name))


# qkv_norm and the norm before attention


@pytest.mark.parametrize("order", ["pre", "post", "swin", "peri"])
@pytest.mark.parametrize("drop", [True, False])
def test_qkv_norm_drops_the_norm_before_attention(order, drop):
    model = decoder(norm_order=order)
    optimizer = sgd(model)
    loss(model, tokens()).backward()
    had = order in ("pre", "peri")
    dropped = getattr(model.blocks[0], "attention_norm" if had else "mlp")
    old = copy.deepcopy(dropped.state_dict())
    with qkeel.apply(model, "qkv_norm", optimizer, drop_pre_norm=drop):
        names = set(model.state_dict())
        assert ("blocks.0.attention_norm.weight" in names) == (had and not drop)
        assert ("blocks.0.attention_post_norm.weight" in names) == (order != "pre")
        model.zero_grad()
        optimizer.step()  # a dropped norm is not stepped by a gradient it still had
    if had and drop:
        assert torch.equal(dropped.weight, old["weight"])


# New gains and the optimizer


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "name",
    ["AdamW", "Adagrad", "SGD", "RMSprop", "ASGD", "Rprop", "Adafactor", "NAdam"],
)
def test_every_optimizer_takes_a_gain_before_and_during_training(name, fresh):
    model = decoder()
    cls = getattr(torch.optim, name)

    class Mine(cls):  # a class that cannot be made again from its groups
        def __init__(self, model):
            super().__init__(model.parameters(), lr=0.01)

    optimizer = Mine(model) if name == "SGD" else cls(model.parameters(), lr=0.01)
    if not fresh:
        train(model, optimizer, 2)
    with qkeel.apply(model, "qk_norm", optimizer):
        gain = model.get_parameter("blocks.0.attention.q_norm")
        old = gain.detach().clone()
        train(model, optimizer, 2)
        assert not torch.equal(old, gain)
    assert gain not in optimizer.state
    train(model, optimizer, 1)


def test_new_gains_are_named_where_groups_are_and_muon_takes_none():
    model = decoder()
    gains = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": gains}])
    group = optimizer.param_groups[1]
    with qkeel.apply(model, "qk_norm", optimizer):
        assert group["param_names"][len(gains) :] == [
            f"blocks.{i}.attention.{side}_norm" for i in (0, 1) for side in "qk"
        ]
        assert len(group["params"]) == len(group["param_names"])
    assert len(group["params"]) == len(group["param_names"]) == len(gains)
    muon = torch.optim.Muon([p for _, p in matrices])
    with pytest.raises(RefusedError):
        qkeel.apply(model, "qk_norm", muon)
    qkeel.apply(model, "qk_norm:gain=none", muon)


class CheckpointedBlock(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.attention, self.reentrant = Hand("fused", "eager"), reentrant

    def forward(self, x):
        return checkpoint(self.attention, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_norm_of_a_fused_projection_in_a_checkpoint_can_be_looked_through(reentrant):
    model = nn.Sequential(nn.Linear(16, 16), CheckpointedBlock(reentrant))
    x = torch.randn(2, 6, 16, requires_grad=True)
    optimizer = sgd(model)
    qkeel.apply(model, "qk_norm", optimizer, batch=x)
    qkeel.apply(model, "softcap:cap=2", optimizer, batch=x)
    (site,) = qkeel.find_sites(model, x)
    assert site.n_heads == 4
