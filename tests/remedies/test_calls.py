"""softcap, log_n, temperatures, sigmoid, softpick and sinks: the spec they name, in the attention calls of anybody."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, from_heads, to_heads
from tests.drawing import randn
from tests.each_row import each_row
from tests.quick import one_in
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.nn import Attention
from qkeel.spec import (
    AttentionSpec,
    LayerNorm,
    LogN,
    RMSNorm,
    Sigmoid,
    Sink,
    Softcap,
    Softpick,
)
from qkeel.spec.logits import FloorLogTemperature

from .foreign import Hand, assert_refused, example, hf, jolted, out

HOW = ("eager", "sdpa")
BIAS = -math.log(6)
CHANGES = {
    "softcap:cap=0.5": AttentionSpec(cap=Softcap(0.5)),
    "log_n:length=3": AttentionSpec(scale=LogN(train_length=3)),
    "log_n:length=3,clip=true": AttentionSpec(scale=LogN(train_length=3, clip=True)),
    "log_n:learned=head,length=3": AttentionSpec(scale=LogN(train_length=3, learned="head")),
    "log_n:learned=layer,length=3": AttentionSpec(scale=LogN(train_length=3, learned="layer")),
    "attention_temperature:alpha=0.5,floor=2": AttentionSpec(scale=FloorLogTemperature(alpha=0.5, floor=2)),
    "sigmoid:length=6": AttentionSpec(normalizer=Sigmoid(bias=BIAS)),
    "sigmoid:length=6,learned=true": AttentionSpec(normalizer=Sigmoid(bias=BIAS, learned=True)),
    "softpick": AttentionSpec(normalizer=Softpick()),
    "sink": AttentionSpec(normalizer=Sink()),
    "sink:learned=false,init=1": AttentionSpec(normalizer=Sink(learned=False, init=1.0)),
}  # fmt: skip
ADDED = ("sink", "logit_bias", "log_n_scale")
X = randn(2, 6, 16, seed=2).double()
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


def merged(x):
    """[b t (h d)] of heads [b h t d]."""
    return from_heads(x)


# Written out with a mask and fused without one; both other ways for a change of each side of the softmax.
@pytest.mark.parametrize(
    ("change", "how", "masked", "layout"),
    [
        *((x, "eager", True, "linear") for x in CHANGES),
        *((x, "sdpa", False, "interleaved") for x in CHANGES),
        *((x, "eager", False, "interleaved") for x in ("softcap:cap=0.5", "sink")),
        *((x, "sdpa", True, "linear") for x in ("log_n:length=3", "sink")),
    ],
)
def test_a_changed_call_is_that_of_the_spec(change, how, masked, layout):
    model, plain = Hand(layout, how).double(), Hand(layout, how).double()
    spec, rng = CHANGES[change], torch.Generator().manual_seed(8)
    mask, visible = None, CAUSAL.expand(2, 1, 6, 6)
    if masked:
        mask = torch.rand(2, 1, 6, 6, generator=rng) > 0.4
        mask = visible = (mask | torch.eye(6, dtype=torch.bool)) & CAUSAL
    qkeel.apply(model, change, batch=(X,) if mask is None else (X, mask))
    jolted(model, ADDED)
    params = {n: getattr(model, n) for n in spec.init_params(4, 4, 4)}
    q, k, v = plain.heads(X)
    k, v = (y.repeat_interleave(4 // y.shape[1], dim=1) for y in (k, v))
    # n is the number of keys that a query sees.
    options = {"causal": False, "mask": visible, "params": params}
    if spec.scale.follows_position:
        options["pos_q"] = visible[:, 0].sum(-1) - 1
    o = reference.attend(spec, q, k, v, **options).out
    assert (model(X, mask) - plain.o(merged(o))).abs().max() < 1e-12


@pytest.mark.parametrize("change", CHANGES)
def test_own_attention_gets_the_spec_and_a_slot_is_changed_once(change):
    model = Attention(16, 4, spec=AttentionSpec())
    with qkeel.apply(model, change):
        assert model.spec == CHANGES[change]
    built = Attention(16, 4, spec=CHANGES[change])
    with pytest.raises(RefusedError):
        qkeel.apply(built, change)


SOME = ["softcap:cap=0.5", "log_n:length=3", "sigmoid:length=6,learned=true", "sink"]


@pytest.mark.parametrize(
    ("name", "change"), [*zip(("llama", "gpt2", "bert", "deepseek"), SOME)]
)
def test_eager_and_fused_attention_of_padded_batches_are_changed_alike(name, change):
    x = example(name)
    mask = torch.ones(2, x.shape[1], dtype=torch.long)
    mask[0, :2] = 0
    outputs = []
    for how in HOW:
        model = hf(name, how)
        qkeel.apply(model, change, batch={"input_ids": x, "attention_mask": mask})
        jolted(model, ADDED)
        with torch.no_grad():
            outputs.append(out(model, x, attention_mask=mask)[:, 2:])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5 * outputs[0].abs().max()
    if name == "llama":  # a row alone does not see the padding of another
        with torch.no_grad():
            alone = out(model, x[:1, 2:])
        assert (alone - outputs[1][:1]).abs().max() < 1e-4


@pytest.mark.parametrize("how", one_in(HOW, 2))
@pytest.mark.parametrize("change", one_in([*SOME, "softpick"], 2))
def test_generation_with_a_cache_equals_generation_without(change, how):
    model, x = hf("llama", how), example("llama", tokens=9)
    qkeel.apply(model, change, batch=x[:, :4])
    with torch.no_grad():
        whole, first = out(model, x), model(x[:, :5], use_cache=True)
        step = model(x[:, 5:6], past_key_values=first.past_key_values, use_cache=True)
    assert torch.allclose(step.logits[:, 0], whole[:, 5], atol=1e-4)
    # A static cache has room for keys that are not there.
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ways = [{"use_cache": False}, {"cache_implementation": "dynamic"}]
    ways += [{"cache_implementation": "static"}] if how == "sdpa" else []
    texts = [model.generate(x[:, :4], **options, **way) for way in ways]
    assert all(torch.equal(text, texts[0]) for text in texts[1:])


# nn.MultiheadAttention


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        *((name, CHANGES[name]) for name in ("softcap:cap=0.5", "softpick", "sink")),
        ("qk_norm", AttentionSpec(norm=RMSNorm(gain="dim"))),
        (
            "qk_norm:kind=layer,over=layer",
            AttentionSpec(norm=LayerNorm(over="layer", gain="dim")),
        ),
        (
            "qkv_norm:drop_pre_norm=false",
            AttentionSpec(norm=LayerNorm(on="qkv", gain="dim")),
        ),
    ],
)
@pytest.mark.parametrize("cross", [False, True])
def test_multihead_attention_is_changed_with_masks_and_weights(change, spec, cross):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(16, 4, batch_first=True, bias=not cross).double()
    y = torch.randn(2, 3, 16, dtype=torch.float64) if cross else X
    s = y.shape[1]
    qkeel.apply(m, change, batch=(X, y, y))
    jolted(m)
    params = {n: getattr(m, n) for n in spec.init_params(4, 4, 4)}
    weights = m.in_proj_weight.chunk(3)
    biases = [None] * 3 if cross else m.in_proj_bias.chunk(3)
    qkv = [
        to_heads(F.linear(a, w, c), 4, -1)
        for a, w, c in zip((X, y, y), weights, biases)
    ]
    padding, hidden = (torch.zeros(n, s, dtype=torch.bool) for n in (2, 6))
    padding[0, -1] = hidden[2, 0] = True
    masks = {"key_padding_mask": padding, "attn_mask": hidden}
    visible = ~(padding[:, None, None] | hidden)
    for options, mask in (({}, None), (masks, visible)):
        attended = reference.attend(spec, *qkv, params=params, causal=False, mask=mask)
        expected = m.out_proj(merged(attended.out))
        for more, given in (
            ({"average_attn_weights": False}, attended.weights),
            ({}, attended.weights.mean(1)),
            ({"need_weights": False}, None),
        ):
            output, read = m(X, y, y, **options, **more)
            assert (output - expected).abs().max() < 1e-12
            assert (read is None) == (given is None)
            assert read is None or (read - given).abs().max() < 1e-12
    with pytest.raises(RefusedError, match="batch of one"):
        m(X[0], y[0], y[0])


@pytest.mark.parametrize("nested", [True, False])
def test_torchs_encoder_leaves_its_fast_path(nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, padding = X.float(), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 3:] = True
    with qkeel.apply(model, "softcap:cap=0.2", batch=x):
        for options in ({}, {"src_key_padding_mask": padding}):
            with torch.no_grad():
                fast = model(x, **options)
            assert_close(fast[0], model(x, **options)[0], rtol=0, atol=1e-6)
    assert model.use_nested_tensor == nested


# Composition, and what is read


@pytest.mark.parametrize("change", one_in(CHANGES, 2))
def test_written_out_attention_has_the_weights_and_statistics_of_the_fused_one(change):
    """They were those of a softmax, and hidden pairs had the weight of logits of 0."""
    maps, stats = [], []
    for how in HOW:
        model = Hand("linear", how).double()
        qkeel.apply(model, change, batch=X)
        jolted(model, ADDED)
        maps.append(qkeel.attention_maps(model, X)[""])
        with qkeel.watch(model) as monitor:  # a warning would be an error
            model(X).sum().backward()
            stats.append(monitor.read()[""].tensors())
        assert qkeel.check(model, X).healthy
    assert_close(*maps, rtol=1e-9, atol=1e-12)
    assert not maps[0][..., ~CAUSAL].any()
    assert_close(*stats, rtol=1e-9, atol=1e-9, equal_nan=True)


# Attention that later takes another way than the example showed


class TwoWays(Joint):
    """Attention that is fused, or written out while `weights` is set, as for logging them."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(self.by_either, 16, 4)
        self.weights, self.scale = False, 0.5

    def by_either(self, q, k, v):
        if self.weights:
            z = (q @ k.mT * self.scale).masked_fill(~CAUSAL, -math.inf)
            return z.softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, CAUSAL, scale=self.scale)


@pytest.mark.parametrize("remedy", ["softcap:cap=1.0", "sigmoid", "log_n"])
def test_a_softmax_or_a_scale_that_the_example_did_not_show_is_refused(remedy):
    model, x = TwoWays(), 5 * X.float()
    handle = qkeel.apply(model, remedy, batch=x, train_length=3)
    changed = model(x)
    for name, value in (("weights", True), ("scale", 0.25)):
        old = getattr(model, name)
        setattr(model, name, value)
        with pytest.raises(RefusedError):
            model(x)
        setattr(model, name, old)
    assert torch.equal(model(x), changed)
    handle.remove()
    assert not torch.equal(model(x), changed)


def test_a_fused_call_after_a_written_example_is_capped():
    model, x = TwoWays(), 5 * X.float()
    model.weights = True
    qkeel.apply(model, "softcap:cap=1.0", batch=x)
    written = model(x)
    model.weights = False
    assert_close(model(x), written)


def test_fused_attention_of_heads_beside_samples_is_refused():
    def folded(*qkv):
        q, k, v = (y.flatten(0, 1) for y in qkv)
        return F.scaled_dot_product_attention(q, k, v).view_as(qkv[0])

    assert_refused(Joint(folded, 16, 4), "softcap", X.float())


def test_attention_inside_of_attention_is_refused():
    class Outer(Joint):
        def forward(self, x):
            return self.inner(super().forward(x))

    model = Outer(F.scaled_dot_product_attention, 16, 4)
    model.inner = Joint(F.scaled_dot_product_attention, 16, 4)
    with pytest.raises(RefusedError, match="part of the attention"):
        qkeel.apply(model, "softcap", batch=X.float())


# Hand-written attention: hidden pairs are told from low logits, or the remedy is refused


class Written(nn.Module):
    """Causal attention with something in its scores that stands in the way."""

    def __init__(self, way, low=-math.inf, size=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.low = way, low
        self.qkv, self.gate = nn.Linear(16, 48), nn.Linear(16, 4)
        self.qkv.weight.data[:32] *= size**0.5

    def heads(self, x):
        return [to_heads(y, 4, 4) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, x):
        q, k, v = self.heads(x)
        z, hidden = q @ k.mT / 2, ~CAUSAL
        match self.way:
            case "add":
                z = (
                    z + hidden * self.low
                    if math.isfinite(self.low)
                    else z.masked_fill(hidden, self.low)
                )
            case "alpha":
                z = torch.add(z, hidden, alpha=self.low)
            case "integers":
                z = z - 100 * hidden.long()
            case "fill":
                z = z.masked_fill(mask=hidden, value=self.low)
            case "where":
                z = torch.where(hidden, self.low, z)
            case "bias":
                z = (z + torch.linspace(-1, 1, 6)).masked_fill(hidden, self.low)
            case "shift":
                z = z.masked_fill(hidden, self.low)
                z = z - z.amax(-1, keepdim=True).detach()
            case "shift in place":
                z = z.masked_fill(hidden, self.low)
                z -= z.amax(-1, keepdim=True)
        if self.way == "exp":
            e = (z - z.amax(-1, keepdim=True)).exp()
            return merged((e / e.sum(-1, keepdim=True)) @ v)
        y = z.softmax(-1) @ v
        if self.way == "router":
            y = y * self.gate(x).softmax(-1).transpose(1, 2)[..., None]
        return merged(y)


@each_row(
    "way, low, size, remedy",
    [
        *((way, -100.0, 1, "softcap") for way in ("add", "alpha", "integers", "fill", "where")),
        *((way, -math.inf, 1, "softcap") for way in ("shift", "shift in place")),
        ("bias", -math.inf, 1, "log_n:length=9"),  # a factor on q·k would scale it too
        ("fill", -1e9, 1e6, "softcap"),  # logits below any number that hides
        ("router", -math.inf, 1, "softcap"),  # which softmax is attention?
        ("exp", -math.inf, 1, "softcap"),  # no softmax at all
    ],
)  # fmt: skip
def test_scores_that_a_softmax_alone_does_not_tell_are_refused(way, low, size, remedy):
    assert_refused(Written(way, low, size), remedy, X.float())


@pytest.mark.parametrize("cap", [0.25, 1.0])
def test_a_cap_reaches_what_a_forward_compiles_itself(cap):
    """By the formula in float64; the layers compile the same code (trust3, A5)."""

    def compiling(q, k, v):
        def core(q, k, v):
            return torch.softmax(q @ k.mT * 0.5, -1) @ v

        return torch.compile(core, backend="eager")(q, k, v)

    def capped(q, k, v):
        return (cap * torch.tanh(q @ k.mT * 0.5 / cap)).softmax(-1) @ v

    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(Joint(compiling, 12, 3) for _ in "ab")),
        3 * torch.randn(2, 5, 12),
    )
    right = copy.deepcopy(model).double()
    for layer in right:
        layer.attend = capped
    with qkeel.apply(model, f"softcap:cap={cap}", batch=x):
        for _ in range(2):
            near = model(x).double()
            assert_close(near, right(x.double()), atol=1e-5, rtol=0)
