"""softcap, log_n, temperatures, sigmoid, softpick and sinks in the attention calls of models nobody prepared."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.quick import one_in, quick
from torch import Tensor, nn

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.spec import AttentionSpec, LogN, Sigmoid, Sink, Softcap, Softpick
from qkeel.spec.logits import FloorLogTemperature

from .foreign import Hand, everything, example, hf, jolted, out

HOW = ("eager", "sdpa")
CHANGES: dict[str, AttentionSpec] = {
    "softcap:cap=0.5": AttentionSpec(cap=Softcap(0.5)),
    "log_n:length=3": AttentionSpec(scale=LogN(train_length=3)),
    "log_n:length=3,clip=true": AttentionSpec(scale=LogN(train_length=3, clip=True)),
    "log_n:learned=head,length=3": AttentionSpec(
        scale=LogN(train_length=3, learned="head")
    ),
    "log_n:learned=layer,length=3": AttentionSpec(
        scale=LogN(train_length=3, learned="layer")
    ),
    "attention_temperature:alpha=0.5,floor=2": AttentionSpec(
        scale=FloorLogTemperature(alpha=0.5, floor=2)
    ),
    "sigmoid:length=6": AttentionSpec(normalizer=Sigmoid(bias=-1.791759469228055)),
    "sigmoid:length=6,learned=true": AttentionSpec(
        normalizer=Sigmoid(bias=-1.791759469228055, learned=True)
    ),
    "softpick": AttentionSpec(normalizer=Softpick()),
    "sink": AttentionSpec(normalizer=Sink()),
    "sink:learned=false,init=1": AttentionSpec(
        normalizer=Sink(learned=False, init=1.0)
    ),
}
SCALES = ("log_n", "attention")


def x_of(model: Hand) -> Tensor:
    return torch.randn(
        2, 6, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


# Written out with a mask and fused without one; both other ways for one of them.
@pytest.mark.parametrize(
    ("change", "how", "masked"),
    quick(
        itertools.product(CHANGES, HOW, (False, True)),
        lambda case: (case[1] == "eager") == case[2] or case[0] == "softcap:cap=0.5",
    ),
)
def test_a_changed_call_equals_the_oracle(change: str, how: str, masked: bool) -> None:
    for layout in ("linear", "interleaved"):
        model, plain = Hand(layout, how).double(), Hand(layout, how).double()
        x, spec = x_of(model), CHANGES[change]
        mask = (
            torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(8)) > 0.4
            if masked
            else None
        )
        if mask is not None:
            mask = (mask | torch.eye(6, dtype=torch.bool)) & torch.ones(
                6, 6, dtype=torch.bool
            ).tril()
        qkeel.apply(model, change, batch=(x,) if mask is None else (x, mask))
        jolted(model, ("sink", "logit_bias", "log_n_scale"))
        params = {n: getattr(model, n) for n in spec.init_params(4, 4, 4)}
        q, k, v = Hand.heads(plain, x)
        k, v = (y.repeat_interleave(4 // y.shape[1], dim=1) for y in (k, v))
        if mask is None or not change.startswith(SCALES):
            expected = reference.attend(spec, q, k, v, params=params, mask=mask).out
        else:  # n keys that the query sees
            seen = torch.ones(6, 6, dtype=torch.bool).tril() if mask is None else mask
            pos = seen.expand(2, 1, 6, 6)[:, 0].sum(-1) - 1
            expected = reference.attend(
                spec, q, k, v, params=params, causal=False, mask=mask, pos_q=pos
            ).out
        assert (
            model(x, mask) - plain.o(expected.transpose(1, 2).flatten(2))
        ).abs().max() < 1e-12


def gemma2_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
) -> Any:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    return eager_attention_forward(
        module, q, k, v, mask, scaling=rest["scaling"], softcap=0.7
    )


def gpt_oss_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
) -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module.sinks = torch.tensor([0.3, -1.0, 2.0, 0.5])
    return eager_attention_forward(module, q, k, v, mask, scaling=rest["scaling"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("remedy", "stock"),
    [("softcap:cap=0.7", gemma2_attention), ("sink", gpt_oss_attention)],
)
def test_llama_attends_as_the_models_that_were_built_so(
    how: str, remedy: str, stock: Any
) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(stock.__name__, stock)
    AttentionMaskInterface.register(stock.__name__, eager_mask)
    model, theirs, x = hf("llama", how), hf("llama", stock.__name__), example("llama")
    qkeel.apply(model, remedy, batch=x)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".sink"):
                p.copy_(torch.tensor([0.3, -1.0, 2.0, 0.5])[:, None, None])
        for module in theirs.modules():
            if "sinks" in vars(module):
                del module.sinks
        ours = out(model, x)
        assert (ours - out(theirs, x)).abs().max() < 2e-6 * ours.abs().max()


@pytest.mark.parametrize(
    "change",
    one_in(
        ["softcap:cap=0.5", "log_n:length=3", "sigmoid:length=6,learned=true", "sink"],
        3,
    ),
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "deepseek"])
def test_eager_and_fused_attention_are_changed_alike(name: str, change: str) -> None:
    x = example(name)
    mask = torch.ones(2, x.shape[1], dtype=torch.long)
    mask[0, :2] = 0
    outputs = []
    for how in HOW:
        model = hf(name, how)
        qkeel.apply(model, change, batch={"input_ids": x, "attention_mask": mask})
        jolted(model, ("sink", "logit_bias"))
        with torch.no_grad():
            outputs.append(out(model, x, attention_mask=mask)[:, 2:])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5 * outputs[0].abs().max()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "change", ["log_n:length=3", "softcap:cap=0.5", "sigmoid:length=6", "sink"]
)
def test_padding_changes_nothing_for_those_who_do_not_see_it(
    change: str, how: str
) -> None:
    model, x = hf("llama", how), example("llama", batch=1)
    qkeel.apply(model, change, batch=x)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), x], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(x)], dim=1)
    with torch.no_grad():
        y = out(model, padded, attention_mask=mask)[:, 3:]
        assert (y - out(model, x)).abs().max() < 1e-4


@pytest.mark.parametrize("how", one_in(HOW, 3))
@pytest.mark.parametrize(
    "change",
    one_in(
        ["softcap:cap=0.5", "log_n:length=3", "sigmoid:length=6", "softpick", "sink"], 2
    ),
)
def test_generation_with_a_cache_equals_generation_without(
    change: str, how: str
) -> None:
    model, x = hf("llama", how), example("llama", tokens=4)
    qkeel.apply(model, change, batch=x)
    with torch.no_grad():
        whole = out(model, example("llama", tokens=9))
        first = model(example("llama", tokens=9)[:, :5], use_cache=True)
        rest = model(
            example("llama", tokens=9)[:, 5:6],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
    assert torch.allclose(rest.logits[:, 0], whole[:, 5], atol=1e-4)
    made = [
        model.generate(
            x, max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0
        )  # type: ignore[operator]
        for cache in (True, False)
    ]
    assert torch.equal(*made)


def test_a_static_cache_counts_the_keys_that_are_there() -> None:
    model, x = hf("llama", "sdpa"), example("llama", tokens=4)
    qkeel.apply(model, "log_n:length=3", batch=x)
    made = [
        model.generate(
            x,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=kind,
        )  # type: ignore[operator]
        for kind in ("static", "dynamic")
    ]
    assert torch.equal(*made)


# --- nn.MultiheadAttention


def by_hand(
    m: nn.MultiheadAttention,
    x: Tensor,
    y: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
) -> Any:
    q, k, v = (
        F.linear(a, w, c).unflatten(-1, (4, -1)).transpose(1, 2)
        for a, w, c in zip(
            (x, y, y), m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3)
        )
    )
    got = reference.attend(spec, q, k, v, params=own(m, spec), causal=False, mask=mask)
    return m.out_proj(got.out.transpose(1, 2).flatten(2)), got.weights


def own(m: nn.Module, spec: AttentionSpec) -> dict[str, Tensor]:
    return {
        n: p
        for n, p in m._parameters.items()
        if n in spec.init_params(4, 4, 4) and p is not None
    }


@pytest.mark.parametrize(
    "change",
    [
        "softcap:cap=0.5",
        "softpick",
        "sink",
        "qk_norm",
        "qk_norm:kind=layer,over=layer",
        "qkv_norm:drop_pre_norm=false",
    ],
)
@pytest.mark.parametrize("cross", [False, True])
def test_multihead_attention_is_changed_with_masks_and_weights(
    change: str, cross: bool
) -> None:
    torch.manual_seed(0)
    m = nn.MultiheadAttention(16, 4, batch_first=True).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    y = torch.randn(2, 3, 16, dtype=torch.float64) if cross else x
    qkeel.apply(m, change, batch=(x, y, y))
    jolted(m)
    spec = CHANGES.get(change, AttentionSpec())
    if change == "qk_norm":
        spec = AttentionSpec(norm=qkeel.spec.RMSNorm(gain="dim"))
    elif change.startswith("qkv_norm"):
        spec = AttentionSpec(norm=qkeel.spec.LayerNorm(on="qkv", gain="dim"))
    elif change.startswith("qk_norm"):
        spec = AttentionSpec(norm=qkeel.spec.LayerNorm(over="layer", gain="dim"))
    padding = torch.zeros(2, y.shape[1], dtype=torch.bool)
    padding[0, -1] = True
    hidden = torch.zeros(5, y.shape[1], dtype=torch.bool)
    hidden[2, 0] = True
    seen = ~(padding[:, None, None] | hidden)
    for options, mask in (
        ({}, None),
        ({"key_padding_mask": padding, "attn_mask": hidden}, seen),
    ):
        expected, weights = by_hand(m, x, y, spec, mask)
        got = m(x, y, y, average_attn_weights=False, **options)
        assert (got[0] - expected).abs().max() < 1e-12
        assert (got[1] - weights).abs().max() < 1e-12
        assert (m(x, y, y, **options)[1] - weights.mean(1)).abs().max() < 1e-12
        fast = m(x, y, y, need_weights=False, **options)
        assert fast[1] is None
        assert (fast[0] - expected).abs().max() < 1e-12
    assert m(x[0], y[0], y[0])[0].shape == x[0].shape


@pytest.mark.parametrize("nested", [True, False])
def test_torchs_encoder_leaves_its_fast_path(nested: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    qkeel.apply(model, "softcap:cap=0.2", batch=x)
    with torch.no_grad():
        fast, fast_padded = model(x), model(x, src_key_padding_mask=padding)
    assert torch.allclose(fast, model(x), atol=1e-6)
    assert torch.allclose(
        fast_padded[0], model(x, src_key_padding_mask=padding)[0], atol=1e-6
    )


# --- handles, copies, refusals


ORDERS = [
    pytest.param(order)
    for order in itertools.permutations(["log_n:length=3", "softcap:cap=1", "sink"])
]


@pytest.mark.parametrize("order", one_in(ORDERS, 4))
@pytest.mark.parametrize("how", HOW)
def test_changes_compose_in_any_order_and_come_off_in_any_order(
    order: tuple[str, ...], how: str
) -> None:
    spec = AttentionSpec(
        scale=LogN(train_length=3), cap=Softcap(1.0), normalizer=Sink()
    )
    model, plain = Hand("fused", how).double(), Hand("fused", how).double()
    x = x_of(model)
    before = everything(model)
    handles = [qkeel.apply(model, one, batch=x) for one in order]
    expected = reference.attend(spec, *plain.heads(x), params={"sink": model.sink}).out
    assert (model(x) - plain.o(expected.transpose(1, 2).flatten(2))).abs().max() < 1e-12
    for handle in handles:
        handle.remove()
    assert everything(model) == before
    assert torch.equal(model(x), plain(x))


def test_a_models_signature_still_shows() -> None:
    model, x = Hand("fused"), torch.randn(2, 6, 16)
    plain = inspect.signature(model.forward)
    qkeel.apply(model, "softcap", batch=x)
    assert inspect.signature(model.forward) == plain


@pytest.mark.parametrize("how", HOW)
def test_statistics_see_the_changed_call(how: str) -> None:
    model, x = hf("llama", how), example("llama")
    qkeel.apply(model, "softcap:cap=0.5+log_n:length=3", batch=x)
    with qkeel.watch(model) as monitor:
        model(x)
        stats = monitor.read()
    assert set(stats) == {f"model.layers.{i}.self_attn" for i in (0, 1)}
    for one in stats.values():
        assert one.capped_max_logit is not None
        assert (one.capped_max_logit <= 0.5).all()


class Odd(nn.Module):
    """Attention with something in its forward that stands in the way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.gate = kind, nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        z = q @ k.mT / 2
        if self.kind == "bias":
            z = z + torch.linspace(-1, 1, x.shape[1])
        if self.kind == "exp":
            e = (z - z.amax(-1, keepdim=True)).exp()
            return ((e / e.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2)
        y = torch.softmax(z, -1) @ v
        if self.kind == "router":
            y = y * torch.softmax(self.gate(x), -1).transpose(1, 2)[..., None]
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("kind", "remedy", "message"), [
    ("router", "softcap", r"expected scores \[b h t s\]|it is not known which of them are attention"),
    ("exp", "softcap", "its attention is not computed by F.scaled_dot_product_attention"),
    ("bias", "log_n:length=9", "a bias or a cap is in the scores before the softmax"),
])  # fmt: skip
def test_what_cannot_be_changed_is_refused_with_a_reason(
    kind: str, remedy: str, message: str
) -> None:
    model, x = Odd(kind), torch.randn(2, 6, 16)
    before, y = everything(model), model(x)
    with pytest.raises(RefusedError, match=message):
        qkeel.apply(model, remedy, batch=x)
    assert everything(model) == before
    assert torch.equal(model(x), y)


def test_another_scale_than_the_examples_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.scale = nn.Linear(16, 48), 0.5

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                y.unflatten(-1, (4, 4)).transpose(1, 2)
                for y in self.qkv(x).chunk(3, -1)
            )
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

    model, x = Fickle(), torch.randn(2, 6, 16)
    qkeel.apply(model, "softcap", batch=x)
    model.scale = 0.25
    with pytest.raises(
        RefusedError,
        match=r"called with the scale 0.25, but with \[0.5\] on the example",
    ):
        model(x)


@pytest.mark.parametrize("low", [-1e4, -1e9, float(torch.finfo(torch.float32).min)])
def test_logits_of_any_size_are_told_from_hidden_ones(low: float) -> None:
    class Masked(Hand):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.heads(x)
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1) * low
            w = F.softmax(q @ k.mT * 0.5 + hidden, dim=-1)
            return self.o((w @ v).transpose(1, 2).flatten(2))

    size = 3000.0 if low < -1e5 else 30.0
    model, x = Masked("fused"), torch.randn(2, 6, 16)
    with torch.no_grad():
        model.qkv.weight[:32].mul_(size**0.5)
    qkeel.apply(model, "softcap:cap=5", batch=x)
    q, k, v = model.heads(x)
    expected = reference.attend(AttentionSpec(cap=Softcap(5.0)), q, k, v).out
    assert torch.allclose(
        model(x), model.o(expected.transpose(1, 2).flatten(2)), atol=1e-4
    )
