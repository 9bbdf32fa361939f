"""With a cache of latents MLA says what it says without one, under every norm that a latent can carry."""

import dataclasses

import pytest
import torch
from tests.quick import one_in
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel import preset
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError, ShapeError
from qkeel.kernels.statistics import logit_stats
from qkeel.nn import MLA, Decoder, DecoderConfig, KVCache, LatentSizes
from qkeel.sites import Tap
from qkeel.spec import (
    AttentionSpec,
    DynamicNTK,
    InverseSqrt,
    L2Norm,
    LayerNorm,
    Learned,
    LogN,
    RMSNorm,
    Rope,
    Sigmoid,
    Sink,
    Softcap,
    Sqrt,
    YaRN,
)

D, H, T = 12, 3, 9
SIZES = LatentSizes(q_latent=10, kv_latent=7, rope_dim=4, nope_dim=6, value_dim=5)
GAINED = RMSNorm(gain="dim")
NORMS = [
    RMSNorm(),
    GAINED,
    RMSNorm(gain="one_plus_dim"),
    RMSNorm(gain="scalar"),
    RMSNorm(gain="dim", eps=0.5),
    RMSNorm(gain="dim", over="layer"),
    RMSNorm(gain="dim", shared=True),
    RMSNorm(gain="dim", on="k"),
    L2Norm(),
    L2Norm(gain="dim"),
    # Of queries anything goes.
    LayerNorm(gain="head_dim", on="q", bias=True),
]
SPECS = [
    AttentionSpec(),
    *(
        AttentionSpec(norm=n, scale=Sqrt() if n.kind == "l2" else InverseSqrt())
        for n in NORMS
    ),
    *(
        AttentionSpec(norm=GAINED, position=position)
        for position in (
            Rope(order="rotate_then_norm"),
            Rope(pairing="interleaved", base=100.0),
            Rope(stretch=YaRN(factor=4.0, train_length=4)),
        )
    ),
    AttentionSpec(norm=GAINED, cap=Softcap(1.5)),
    AttentionSpec(norm=RMSNorm(), scale=LogN(train_length=4), normalizer=Sink()),
    AttentionSpec(norm=RMSNorm(), scale=Learned(init=0.7, per="head")),
    AttentionSpec(normalizer=Sigmoid(bias=-2.0, learned=True)),
    preset("qwen3"),
]
PIECES = [[1] * T, [5, 1, 1, 1, 1], [3, 2, 4]]


def make(
    spec,
    dtype=torch.float64,
    latent_norm=False,
    **sizes,
):
    own = dataclasses.replace(SIZES, **sizes)
    module = MLA(D, H, sizes=own, spec=spec, latent_norm=latent_norm).to(dtype).eval()
    for p in (*module.spec_params().values(), *module.kv_latent_norm.parameters()):
        p.data.add_(0.3 * torch.randn_like(p))
    return module


def in_pieces(module, x, sizes, **options):
    """The output piece by piece; options are tensors by token."""
    cache, outputs = module.new_cache(), []
    for size in sizes:
        now = slice(cache.length, cache.length + size)
        of_piece = {name: value[:, now] for name, value in options.items()}
        if "mask" in of_piece:
            of_piece["mask"] = options["mask"][:, None, None, : now.stop]
        outputs.append(module(x[:, now], cache=cache, **of_piece))
    return torch.cat(outputs, dim=1)


def near(a, b, atol=1e-12):
    assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("spec", one_in(SPECS, 3), ids=str)
@torch.no_grad()
def test_pieces_give_the_full_forward_pass(spec):
    for latent_norm, q_latent in ((False, 10), (True, None)):
        module = make(spec, latent_norm=latent_norm, q_latent=q_latent)
        x = torch.randn(2, T, D, dtype=torch.float64)
        for sizes in PIECES:
            near(in_pieces(module, x, sizes), module(x))


@pytest.mark.parametrize("spec", [AttentionSpec(), SPECS[2]])
@torch.no_grad()
def test_left_padding_with_own_positions_gives_the_sequence_without_padding(
    spec,
):
    module, x = make(spec), torch.randn(3, T, D, dtype=torch.float64)
    padding = torch.tensor([0, 2, 4])
    pos = (torch.arange(T) - padding[:, None]).clamp_min(0)
    real = torch.arange(T) >= padding[:, None]
    for sizes in ([T - 3, 1, 1, 1], [3, 3, 3]):
        padded = in_pieces(module, x, sizes, pos=pos, mask=real)
        for i, n in enumerate(padding.tolist()):
            near(padded[i : i + 1, n:], module(x[i : i + 1, n:]))
    cache = module.new_cache()
    module(x, cache=cache, pos=pos, mask=real)
    with pytest.raises(InvalidValueError, match="mask that hides the padding"):
        module(x[:, :1], cache=cache)


@torch.no_grad()
def test_masks_count_in_absorbed_attention_as_without_a_cache(monkeypatch):
    # A block is one row, as of long sequences.
    monkeypatch.setattr("qkeel.nn.mla.BLOCK", 1)
    module, x = make(SPECS[2]), torch.randn(2, T, D, dtype=torch.float64)
    hidden, added = torch.rand(2, H, T, T) < 0.7, torch.randn(2, 1, T, T).double()
    for mask in (hidden, added):
        for causal in (True, False):
            cache = module.new_cache()
            module(x[:, :-2], cache=cache)
            last = module(x[:, -2:], cache=cache, mask=mask[:, :, -2:], causal=causal)
            near(last, module(x, mask=mask, causal=causal)[:, -2:])


@torch.no_grad()
def test_a_decoder_decodes_and_its_statistics_are_those_of_the_keys_it_stands_for():
    config = DecoderConfig(
        vocab_size=11, d_model=16, attention="mla", spec=SPECS[2], latent_norm=True
    )
    model, tokens = Decoder(config).double().eval(), torch.randint(11, (2, T))
    caches, calls = model.new_caches(), []
    model.blocks[0].attention.observers.append(calls.append)
    whole = model(tokens)
    near(model(tokens[:, :-1], caches=caches), whole[:, :-1], 1e-11)
    with Tap(model) as tap:
        near(model(tokens[:, -1:], caches=caches), whole[:, -1:], 1e-11)
        stats = tap.read()["blocks.0.attention"]
    call, last = calls[0], logit_stats(calls[-1])
    assert stats.n_pairs.tolist() == [2 * T] * 4
    for name in ("max_logit", "entropy", "query_norm", "key_norm", "key_norm_max"):
        assert torch.equal(getattr(stats, name), getattr(last, name)), name
    near(last.key_norm, logit_stats(call).key_norm)
    logits = call.spec.logits(call.q, call.k, call.pos_q, call.pos_k, call.params)
    near(stats.max_logit, logits[:, :, -1:].amax((0, 2, 3)))


@torch.no_grad()
def test_a_token_takes_latent_and_rotated_key_and_one_number_per_head_under_a_norm():
    x = torch.randn(2, 4, D)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        for spec, of_heads in ((SPECS[0], 0), (SPECS[2], 4 * H)):
            module = make(spec, dtype)
            cache = module.new_cache()
            module(x.to(dtype), cache=cache)
            assert cache.bytes_per_token == size * (7 + 4) + of_heads


REFUSED = [
    (AttentionSpec(norm=norm), words)
    for norm, words in (
        (LayerNorm(), "LN"),
        (RMSNorm(gain="head"), "g_h"),
        (RMSNorm(gain="dim", bias=True), "w . b"),
        (RMSNorm(on="qkv"), "RMS.v"),
    )
]
NTK = AttentionSpec(position=Rope(stretch=DynamicNTK(factor=2.0, train_length=4)))


@pytest.mark.parametrize(
    ("spec", "words"), [*REFUSED, (NTK, "every key is rotated again")]
)
def test_what_a_latent_cannot_carry_is_refused_with_the_reason(spec, words):
    module, x = make(spec), torch.randn(1, 2, D, dtype=torch.float64)
    assert module(x).isfinite().all()  # materialised it is fine
    with pytest.raises(RefusedError, match=f"{words}.*; .*use "):
        module.new_cache()
    with pytest.raises(RefusedError, match="unbounded"):
        RMSNorm(over="nope")


@torch.no_grad()
def test_a_latent_cache_of_another_kind_layer_or_norm_is_refused():
    module, x = make(SPECS[0]), torch.randn(2, 2, D, dtype=torch.float64)
    with pytest.raises(InvalidTypeError):
        module(x, cache=KVCache())
    cache = module.new_cache(max_length=3)
    module(x, cache=cache)
    with pytest.raises(ShapeError, match="one LatentCache per layer and batch"):
        make(SPECS[0], kv_latent=8)(x[:, :1], cache=cache)
    with pytest.raises(InvalidValueError, match="create a longer LatentCache"):
        module(x, cache=cache)
    with qkeel.apply(module, "qk_norm"), pytest.raises(ShapeError, match="a new cache"):
        module(x[:, :1], cache=cache)
    module.k_up = nn.Sequential(module.k_up)
    with pytest.raises(RefusedError, match="merge adapters first"):
        module(x[:, :1], cache=cache)
    assert cache.length == 2
