"""With a cache, token by token or in chunks, a decoder says what it says in one forward pass."""

from __future__ import annotations

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel import preset
from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError
from qkeel.nn import Attention, Decoder, DecoderConfig, KVCache, LatentCache
from qkeel.spec import (
    PRESETS,
    ALiBi,
    AttentionSpec,
    DynamicNTK,
    Kerple,
    LeakyReRope,
    LogN,
    ReRope,
    RMSNorm,
    Rope,
    Sigmoid,
    Sink,
    SlidingWindow,
    XPos,
    YaRN,
)

T = 9
SPECS = {
    **{
        name: preset(name) for name in PRESETS if name != "swin_v2"
    },  # Swin V2 looks at images: no decoder
    "sink": AttentionSpec(position=Rope(), normalizer=Sink()),
    "sigmoid": AttentionSpec(
        position=Rope(), normalizer=Sigmoid(bias=-2.0, learned=True)
    ),
    "log_n": AttentionSpec(
        position=Rope(rotary=0.5), scale=LogN(train_length=4, clip=True)
    ),
    "yarn": AttentionSpec(
        norm=RMSNorm(), position=Rope(stretch=YaRN(factor=8, train_length=512))
    ),
    # These keep raw keys.
    "rerope": AttentionSpec(norm=RMSNorm(), position=ReRope(window=3)),
    "leaky_rerope": AttentionSpec(position=LeakyReRope(window=3, factor=4)),
    "self_extend": AttentionSpec(
        position=LeakyReRope(window=3, factor=2, rounded=True)
    ),
    "alibi": AttentionSpec(position=ALiBi()),
    "kerple": AttentionSpec(position=Kerple(kind="power")),
    "xpos": AttentionSpec(position=XPos()),
    "window": AttentionSpec(
        norm=RMSNorm(), position=SlidingWindow(window=4), scale=LogN(train_length=4)
    ),
    "window_rerope": AttentionSpec(
        position=SlidingWindow(window=5, inner=ReRope(window=3))
    ),
}
every_spec = pytest.mark.parametrize("name", one_in(SPECS, 3))


def make(name: str) -> Attention:
    h, g = (4, 4) if name == "ngpt" else (4, 2)
    module = Attention(16, h, g, 8, spec=SPECS[name], bias=True).double()
    for p in module.spec_params().values():
        p.data.add_(0.3 * torch.randn_like(p) * p.abs().clamp_min(0.3))
    return module.eval()


def in_pieces(module: Attention, x: Tensor, sizes: list[int]) -> Tensor:
    cache, start, parts = KVCache(), 0, []
    for size in sizes:
        parts.append(module(x[:, start : start + size], cache=cache))
        start += size
        assert cache.length == start
    return torch.cat(parts, dim=1)


@every_spec
@torch.no_grad()
def test_pieces_give_the_full_forward_pass(name: str) -> None:
    module, x = make(name), torch.randn(2, T, 16, dtype=torch.float64)
    whole = module(x)
    for sizes in ([1] * T, [5, 1, 1, 1, 1], [3, 2, 4], [T]):
        assert torch.allclose(in_pieces(module, x, sizes), whole, rtol=0, atol=1e-12), (
            sizes
        )


@every_spec
@torch.no_grad()
def test_left_padding_with_own_positions_gives_the_sequence_without_padding(
    name: str,
) -> None:
    module, x = make(name), torch.randn(3, T, 16, dtype=torch.float64)
    pad = torch.tensor([0, 2, 4])
    pos = (torch.arange(T) - pad[:, None]).clamp_min(0)
    real = torch.arange(T) >= pad[:, None]
    padded = {"in one pass": module(x, pos=pos, mask=real[:, None, None])}
    for sizes in ([T - 3, 1, 1, 1], [3, 3, 3], [1] * T):
        cache, start, parts = KVCache(), 0, []
        for size in sizes:
            now = slice(start, start + size)
            seen = real[:, None, None, : now.stop]
            parts.append(module(x[:, now], cache=cache, pos=pos[:, now], mask=seen))
            start = now.stop
        padded[f"cached, {sizes}"] = torch.cat(parts, dim=1)
    for i, n in enumerate(pad.tolist()):
        alone = module(x[i : i + 1, n:])
        for how, found in padded.items():
            assert torch.allclose(found[i : i + 1, n:], alone, rtol=0, atol=1e-12), (
                f"{how}, {n} padded"
            )


@torch.no_grad()
def test_a_decoder_with_caches_gives_the_logits_of_the_full_pass() -> None:
    for norm_order in ("pre", "post", "swin", "peri"):
        spec = preset("cosa_logn", train_length=4)
        config = DecoderConfig(
            vocab_size=11,
            d_model=16,
            n_heads=4,
            n_kv_heads=2,
            spec=spec,
            norm_order=norm_order,
        )
        model, tokens = Decoder(config).double().eval(), torch.randint(11, (2, T))
        caches = [KVCache(max_length=T) for _ in model.blocks]
        parts = [
            model(tokens[:, i : i + n], caches=caches)
            for i, n in ((0, 4), (4, 1), (5, 1), (6, 3))
        ]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-11), (
            norm_order
        )


def test_a_cache_grows_by_doubling_and_keeps_what_it_holds() -> None:
    cache, rooms = KVCache(), []
    seen = []
    for _ in range(9):
        k = torch.randn(1, 2, 1, 4)
        seen.append(k)
        keys, values = cache.append(k, 2 * k)
        rooms.append(keys.untyped_storage().nbytes() // (4 * 2 * 4))
        assert torch.equal(keys, torch.cat(seen, 2))
        assert torch.equal(values, 2 * keys)
    assert rooms == [1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_a_cache_with_a_limit_reserves_it_at_once_and_refuses_one_token_more() -> None:
    cache = KVCache(max_length=3)
    k = torch.randn(1, 2, 2, 4)
    assert cache.append(k, k)[0].untyped_storage().nbytes() == 4 * 2 * 4 * 3
    with pytest.raises(InvalidValueError, match="holds 3 tokens, but 4 are needed"):
        cache.append(k, k)
    assert cache.length == 2
    keys, _ = cache.append(k[:, :, :1], k[:, :, :1])
    assert torch.equal(keys, torch.cat([k, k[:, :, :1]], 2))


def test_reset_forgets_and_keeps_the_memory() -> None:
    module, x = make("qwen3"), torch.randn(2, T, 16, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        first, nothing = (
            module(x, cache=cache),
            torch.empty(2, 2, 0, 8, dtype=torch.float64),
        )
        memory, _ = cache.append(nothing, nothing)
        cache.reset()
        assert cache.length == 0
        assert torch.equal(module(x, cache=cache), first)
        assert cache.append(nothing, nothing)[0].data_ptr() == memory.data_ptr()


def test_after_a_reset_own_positions_start_again() -> None:
    module, x = make("log_n"), torch.randn(2, 4, 16, dtype=torch.float64)
    pos, real = (
        torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]]),
        torch.tensor([[True] * 4, [False] + [True] * 3]),
    )
    cache = KVCache()
    with torch.no_grad():
        first = module(x, cache=cache, pos=pos, mask=real[:, None, None])
        cache.reset()
        assert torch.equal(
            module(x, cache=cache, pos=pos, mask=real[:, None, None]), first
        )
        cache.reset()
        assert torch.allclose(module(x, cache=cache), module(x), rtol=0, atol=1e-12)


def test_a_cache_of_another_layer_or_batch_is_refused() -> None:
    cache = KVCache()
    cache.append(torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4))
    for shape in ((2, 2, 1, 4), (1, 3, 1, 4), (1, 2, 1, 5)):
        with pytest.raises(ShapeError, match="one KVCache per layer and batch"):
            cache.append(torch.randn(shape), torch.randn(shape))
    assert cache.length == 2
    with pytest.raises(InvalidValueError, match="max_length"):
        KVCache(max_length=0)


@torch.no_grad()
def test_positions_go_on_after_the_last_ones_when_none_are_given() -> None:
    module, x = make("log_n"), torch.randn(2, T, 16, dtype=torch.float64)
    cache, pad = KVCache(), torch.tensor([0, 3])[:, None]
    real = (torch.arange(T) >= pad)[:, None, None]
    module(
        x[:, :4],
        cache=cache,
        pos=(torch.arange(4) - pad).clamp_min(0),
        mask=real[..., :4],
    )
    rest = module(x[:, 4:], cache=cache, mask=real)
    assert torch.equal(cache.pos, (torch.arange(T) - pad).clamp_min(0))
    assert torch.allclose(rest[1], module(x[1:, 3:])[0, 1:], rtol=0, atol=1e-12)
    with pytest.raises(InvalidValueError, match="mask that hides the padding"):
        module(x[:, :1], cache=cache)


def test_positions_of_another_shape_are_refused() -> None:
    module, x, mask = (
        make("qwen3"),
        torch.randn(2, 3, 16).double(),
        torch.ones(2, 1, 1, 3, dtype=torch.bool),
    )
    with pytest.raises(ShapeError, match=r"pos of shape \[2 3\].*\(2, 4\)"):
        module(x, cache=KVCache(), pos=torch.zeros(2, 4).long(), mask=mask)


def test_own_positions_without_a_mask_are_refused_with_a_cache() -> None:
    with pytest.raises(InvalidValueError, match="mask that hides the padding"):
        make("qwen3")(
            torch.randn(2, 3, 16).double(), cache=KVCache(), pos=torch.arange(3)
        )


def test_a_token_takes_what_its_keys_and_values_take() -> None:
    cache = KVCache()
    assert cache.bytes_per_token == 0
    cache.append(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6))
    assert cache.bytes_per_token == 4 * 2 * (4 + 6)


def test_a_cache_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(
        InvalidTypeError, match=r"expected a qkeel\.nn\.KVCache, got LatentCache"
    ):
        make("qwen3")(torch.randn(2, 3, 16).double(), cache=LatentCache())  # type: ignore[arg-type]


def test_a_decoder_makes_the_caches_its_attention_takes() -> None:
    for attention, kind in (("mha", KVCache), ("mla", LatentCache)):
        caches = Decoder(
            DecoderConfig(vocab_size=5, d_model=16, attention=attention)
        ).new_caches(max_length=7)
        assert [(type(c), c.max_length) for c in caches] == [(kind, 7)] * 2


def test_a_decoder_wants_one_cache_per_layer() -> None:
    model = Decoder(DecoderConfig(vocab_size=5, d_model=16, n_layers=2))
    with pytest.raises(InvalidValueError, match="one cache per layer, 2, got 1"):
        model(torch.zeros(1, 2, dtype=torch.int64), caches=[KVCache()])


@torch.no_grad()
def test_frequencies_that_follow_the_length_turn_all_cached_keys_again() -> None:
    module = Attention(
        16,
        4,
        2,
        8,
        spec=AttentionSpec(position=Rope(stretch=DynamicNTK(train_length=4))),
    ).double()
    x, cache = torch.randn(2, T, 16, dtype=torch.float64), KVCache()
    for end in range(1, T + 1):
        last = module(x[:, end - 1 : end], cache=cache)
        # The last token of a pass over everything so far: its frequencies are those of this length.
        assert torch.allclose(last, module(x[:, :end])[:, -1:], rtol=0, atol=1e-12)
