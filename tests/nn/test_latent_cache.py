"""With a cache of latents MLA says what it says without one, under every norm that a latent can carry."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.quick import one_in
from torch import Tensor, nn

import qkeel
from qkeel import preset
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError, ShapeError
from qkeel.functional.statistics import LogitStats
from qkeel.kernels.statistics import logit_stats
from qkeel.nn import MLA, Decoder, DecoderConfig, KVCache, LatentCache, LatentSizes
from qkeel.sites import Tap
from qkeel.spec import (
    AttentionCall,
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
from qkeel.spec.norm import Norm

D, H, T = 12, 3, 9
SIZES = LatentSizes(q_latent=10, kv_latent=7, rope_dim=4, nope_dim=6, value_dim=5)
NORMS: dict[str, Norm] = {
    "rms": RMSNorm(),
    "rms dim": RMSNorm(gain="dim"),
    "rms one_plus_dim": RMSNorm(gain="one_plus_dim"),
    "rms scalar": RMSNorm(gain="scalar"),
    "rms dim, large eps": RMSNorm(gain="dim", eps=0.5),
    "rms dim, shared": RMSNorm(gain="dim", shared=True),
    "rms dim, over all heads": RMSNorm(gain="dim", over="layer"),
    "rms dim, keys alone": RMSNorm(gain="dim", on="k"),
    "l2": L2Norm(),
    "l2 dim": L2Norm(gain="dim"),
    "queries alone, anything goes": LayerNorm(gain="head_dim", on="q", bias=True),
}
SPECS: dict[str, AttentionSpec] = {
    "plain": AttentionSpec(),
    **{
        name: AttentionSpec(
            norm=norm, scale=Sqrt() if name.startswith("l2") else InverseSqrt()
        )
        for name, norm in NORMS.items()
    },
    "rms dim after the rotation": AttentionSpec(
        norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")
    ),
    "rms dim, interleaved": AttentionSpec(
        norm=RMSNorm(gain="dim"), position=Rope(pairing="interleaved", base=100.0)
    ),
    "rms dim, capped": AttentionSpec(norm=RMSNorm(gain="dim"), cap=Softcap(1.5)),
    "rms, log n, sink": AttentionSpec(
        norm=RMSNorm(), scale=LogN(train_length=4), normalizer=Sink()
    ),
    "rms, scale per head": AttentionSpec(
        norm=RMSNorm(), scale=Learned(init=0.7, per="head")
    ),
    "sigmoid": AttentionSpec(normalizer=Sigmoid(bias=-2.0, learned=True)),
    "yarn, rms dim": AttentionSpec(
        norm=RMSNorm(gain="dim"),
        position=Rope(stretch=YaRN(factor=4.0, train_length=4)),
    ),
    "qwen3": preset("qwen3"),
}
NO_TOKEN = [
    torch.empty(1, n, 0, *d, dtype=torch.float64) for n, *d in ((1, 7), (1, 4), (H,))
]  # appended, it adds none
PIECES = [[1] * T, [5, 1, 1, 1, 1], [3, 2, 4], [T]]


def make(
    spec: AttentionSpec,
    *,
    dtype: torch.dtype = torch.float64,
    latent_norm: bool = False,
    **sizes: int | None,
) -> MLA:
    module = (
        MLA(
            D,
            H,
            sizes=dataclasses.replace(SIZES, **sizes),
            spec=spec,
            latent_norm=latent_norm,
        )
        .to(dtype)
        .eval()
    )
    for p in (*module.spec_params().values(), *module.kv_latent_norm.parameters()):
        p.data.add_(0.3 * torch.randn_like(p))
    return module


def in_pieces(module: MLA, x: Tensor, sizes: list[int]) -> Tensor:
    cache, start, parts = module.new_cache(), 0, []
    for size in sizes:
        parts.append(module(x[:, start : start + size], cache=cache))
        start += size
        assert cache.length == start
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", one_in(SPECS, 4))
@pytest.mark.parametrize("sizes", PIECES, ids=str)
@torch.no_grad()
def test_pieces_give_the_full_forward_pass(name: str, sizes: list[int]) -> None:
    for latent_norm in (False, True):
        for q_latent in (10, None):
            module = make(SPECS[name], latent_norm=latent_norm, q_latent=q_latent)
            x = torch.randn(2, T, D, dtype=torch.float64)
            assert torch.allclose(
                in_pieces(module, x, sizes), module(x), rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("name", ["plain", "rms dim", "l2 dim"])
@torch.no_grad()
def test_in_float32_absorbed_and_materialised_differ_by_1e_5_at_most(name: str) -> None:
    sizes = LatentSizes(
        q_latent=48, kv_latent=64, rope_dim=16, nope_dim=32, value_dim=32
    )
    module = MLA(128, 8, sizes=sizes, spec=SPECS[name], latent_norm=True).eval()
    for p in module.spec_params().values():
        p.add_(0.3 * torch.randn_like(p))
    x = 3 * torch.randn(1, 200, 128)
    cache = module.new_cache()
    module(x[:, :150], cache=cache)
    absorbed = torch.cat(
        [module(x[:, i : i + 1], cache=cache) for i in range(150, 200)], dim=1
    )
    whole = module(x)[:, 150:]
    assert whole.abs().max() > 0.1
    assert (absorbed - whole).abs().max() <= 1e-5 * whole.abs().max()


@torch.no_grad()
def test_bfloat16_decodes_no_worse_than_it_attends() -> None:
    module, x = make(SPECS["rms dim"], dtype=torch.float32), torch.randn(2, T, D)
    exact, low = module(x), make(SPECS["rms dim"], dtype=torch.float32)
    low.load_state_dict(module.state_dict())
    low.bfloat16()
    whole, pieces = low(x.bfloat16()), in_pieces(low, x.bfloat16(), [4, 1, 1, 1, 1, 1])
    assert pieces.dtype == torch.bfloat16
    limit = (
        2 * (whole - exact).abs().max()
        + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    )
    assert (pieces - exact).abs().max() <= limit


@pytest.mark.parametrize("name", ["plain", "rms dim", "rms, log n, sink"])
@pytest.mark.parametrize("sizes", [[T - 3, 1, 1, 1], [3, 3, 3], [1] * T], ids=str)
@torch.no_grad()
def test_left_padding_with_own_positions_gives_the_sequence_without_padding(
    name: str, sizes: list[int]
) -> None:
    module, x = make(SPECS[name]), torch.randn(3, T, D, dtype=torch.float64)
    pad = torch.tensor([0, 2, 4])
    pos = (torch.arange(T) - pad[:, None]).clamp_min(0)
    real = torch.arange(T) >= pad[:, None]
    cache, start, parts = module.new_cache(), 0, []
    for size in sizes:
        now = slice(start, start + size)
        parts.append(
            module(
                x[:, now],
                cache=cache,
                pos=pos[:, now],
                mask=real[:, None, None, : now.stop],
            )
        )
        start = now.stop
    padded = torch.cat(parts, dim=1)
    for i, n in enumerate(pad.tolist()):
        assert torch.allclose(
            padded[i : i + 1, n:], module(x[i : i + 1, n:]), rtol=0, atol=1e-12
        ), f"{n} padded"
    with pytest.raises(InvalidValueError, match="mask that hides the padding"):
        module(x[:, :1], cache=cache)


@torch.no_grad()
def test_masks_count_in_absorbed_attention_as_without_a_cache() -> None:
    module, x = make(SPECS["rms dim"]), torch.randn(2, T, D, dtype=torch.float64)
    hidden = torch.rand(2, H, T, T) < 0.7
    added = torch.randn(2, 1, T, T, dtype=torch.float64)
    for mask in (hidden, added):
        for causal in (True, False):
            cache = module.new_cache()
            module(x[:, :5], cache=cache)
            rest = module(x[:, 5:], cache=cache, mask=mask[:, :, 5:], causal=causal)
            assert torch.allclose(
                rest, module(x, mask=mask, causal=causal)[:, 5:], rtol=0, atol=1e-12
            )


@torch.no_grad()
def test_a_decoder_of_latent_attention_decodes_with_its_caches() -> None:
    for spec in (AttentionSpec(), AttentionSpec(norm=RMSNorm(gain="dim"))):
        config = DecoderConfig(
            vocab_size=11, d_model=16, attention="mla", spec=spec, latent_norm=True
        )
        model, tokens = Decoder(config).double().eval(), torch.randint(11, (2, T))
        caches = model.new_caches()
        parts = [
            model(tokens[:, i : i + n], caches=caches)
            for i, n in ((0, 4), (4, 1), (5, 1), (6, 3))
        ]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-11)


@torch.no_grad()
def test_a_token_takes_latent_and_rotated_key_and_one_number_per_head_under_a_norm() -> (
    None
):
    x = torch.randn(2, 4, D)
    plain, normed = (
        make(SPECS[name], dtype=torch.float32) for name in ("plain", "rms dim")
    )
    for module, numbers in ((plain, 7 + 4), (normed, 7 + 4 + H)):
        cache = module.new_cache()
        module(x, cache=cache)
        assert cache.bytes_per_token == 4 * numbers
    cache, low = normed.new_cache(), normed.bfloat16()
    low(x.bfloat16(), cache=cache)
    assert cache.bytes_per_token == 2 * (7 + 4) + 4 * H


@torch.no_grad()
def test_the_cached_number_is_one_over_the_size_of_each_heads_whole_key() -> None:
    module, x = make(SPECS["rms dim"]), torch.randn(1, 4, D, dtype=torch.float64)
    cache = module.new_cache()
    module(x, cache=cache)
    _, inverse = cache.append(*NO_TOKEN)
    assert inverse is not None
    latent = module.kv_down(x)[0]
    for h in range(H):
        plain = latent @ module.k_up.weight[h * 6 : h * 6 + 6].T
        squares = plain.square().sum(-1) + module.k_rope(x)[0].square().sum(-1)
        assert torch.allclose(
            inverse[0, h], 1 / (squares / 10 + 1e-6).sqrt(), rtol=1e-12
        )


@torch.no_grad()
def test_the_gain_of_the_rotated_part_must_go_on_before_the_rotation() -> None:
    # q·R(g∘k) ≠ (g∘q)·Rk, so a gain put on the query's side instead would be another formula.
    module, x = make(SPECS["rms dim"]), torch.randn(1, 3, D, dtype=torch.float64)
    q, k, g = torch.randn(3, 4, dtype=torch.float64)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    turned = torch.block_diag(turn, turn)
    assert abs(q @ (turned @ (g * k)) - (g * q) @ (turned @ k)) > 0.1
    cache = module.new_cache()
    module(x, cache=cache)
    first = cache.append(*NO_TOKEN)[0][0, 0, 0, 7:]  # position 0: not turned
    assert torch.allclose(first, module.k_norm[:4] * module.k_rope(x)[0, 0], rtol=1e-12)


REFUSED: dict[str, tuple[Norm, str]] = {
    "layer norm": (LayerNorm(), "LayerNorm subtracts the mean"),
    "a gain per head": (
        RMSNorm(gain="head"),
        "rotated key, which is cached once for all heads",
    ),
    "a gain per head and dimension": (
        RMSNorm(gain="head_dim"),
        "rotated key, which is cached once for all heads",
    ),
    "a bias": (RMSNorm(gain="dim", bias=True), "a bias after the norm"),
    "a norm on values": (RMSNorm(on="qkv"), "a norm on the values"),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_a_latent_cannot_carry_is_refused_with_the_reason(name: str) -> None:
    norm, reason = REFUSED[name]
    module, x = (
        make(AttentionSpec(norm=norm)),
        torch.randn(1, 2, D, dtype=torch.float64),
    )
    assert module(x).isfinite().all()  # materialised it is fine
    with pytest.raises(RefusedError, match=reason):
        module.new_cache()
    cache = LatentCache()
    with pytest.raises(RefusedError, match="use RMSNorm or L2Norm"):
        module(x, cache=cache)
    assert cache.length == 0


def test_a_norm_over_the_plain_part_alone_is_refused_with_the_reason() -> None:
    with pytest.raises(
        RefusedError, match="unbounded, and is reported to harm long contexts"
    ):
        RMSNorm(over="nope")  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="use over='head'"):
        qkeel.apply(make(AttentionSpec()), "qk_norm:over=nope")


@torch.no_grad()
def test_a_latent_cache_of_another_kind_layer_or_norm_is_refused() -> None:
    module, x = make(SPECS["plain"]), torch.randn(2, 2, D, dtype=torch.float64)
    with pytest.raises(
        InvalidTypeError, match=r"expected a qkeel\.nn\.LatentCache, got KVCache"
    ):
        module(x, cache=KVCache())  # type: ignore[arg-type]
    cache = module.new_cache(max_length=3)
    module(x, cache=cache)
    with pytest.raises(ShapeError, match="one LatentCache per layer and batch"):
        make(SPECS["plain"], kv_latent=8)(x[:, :1], cache=cache)
    with pytest.raises(InvalidValueError, match="create a longer LatentCache"):
        module(x, cache=cache)
    with (
        qkeel.apply(module, "qk_norm"),
        pytest.raises(ShapeError, match="start a new cache"),
    ):
        module(x[:, :1], cache=cache)
    assert cache.length == 2


@torch.no_grad()
def test_an_up_projection_that_is_no_plain_matrix_is_refused() -> None:
    module, x = make(SPECS["plain"]), torch.randn(1, 1, D, dtype=torch.float64)
    module.k_up = nn.Sequential(module.k_up)  # type: ignore[assignment]
    with pytest.raises(RefusedError, match="got Sequential; merge adapters first"):
        module(x, cache=(cache := module.new_cache()))
    assert cache.length == 0


def test_a_rotation_that_follows_the_length_is_refused_with_the_reason() -> None:
    spec = AttentionSpec(position=Rope(stretch=DynamicNTK(factor=2.0, train_length=4)))
    with pytest.raises(RefusedError, match="every key is rotated again"):
        make(spec).new_cache()


# torch's RMSNorm says so once where its input is low and its gain is not.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", ["plain", "rms dim"])
@torch.no_grad()
def test_under_autocast_decoding_is_no_worse_than_attending(name: str) -> None:
    module, x = (
        make(SPECS[name], dtype=torch.float32, latent_norm=True),
        torch.randn(2, T, D),
    )
    exact = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, pieces = module(x), in_pieces(module, x, [4, 1, 1, 1, 1, 1])
    assert pieces.dtype == whole.dtype
    limit = (
        2 * (whole - exact).abs().max()
        + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    )
    assert (pieces - exact).abs().max() <= limit


@pytest.mark.parametrize(
    "remedy",
    [
        "qk_norm",
        "qk_norm:gain=none",
        "qk_norm:kind=l2,gain=none",
        "softcap:cap=2",
        "sigma_reparam",
    ],
)
@torch.no_grad()
def test_remedies_that_change_the_forward_pass_decode_as_they_attend(
    remedy: str,
) -> None:
    module, x = make(AttentionSpec()), torch.randn(2, T, D, dtype=torch.float64)
    plain = module(x)
    with qkeel.apply(module, remedy):
        module.eval()
        whole = module(x)
        # σReparam starts as the model it is applied to.
        assert (whole - plain).abs().max() > 1e-4 or remedy == "sigma_reparam"
        for sizes in PIECES:
            assert torch.allclose(
                in_pieces(module, x, sizes), whole, rtol=0, atol=1e-12
            )
    assert torch.equal(module(x), plain)


def stats_of(
    model: nn.Module, x: Tensor, caches: object = None
) -> dict[str, LogitStats]:
    with torch.no_grad(), Tap(model) as tap:
        model(x, caches=caches)
        return tap.read()


@pytest.mark.parametrize("norm", [False, True])
def test_absorbed_decoding_is_watched_with_the_numbers_of_the_keys_it_stands_for(
    norm: bool,
) -> None:
    spec = AttentionSpec(norm=RMSNorm(gain="dim")) if norm else AttentionSpec()
    model = (
        Decoder(DecoderConfig(vocab_size=11, d_model=16, attention="mla", spec=spec))
        .double()
        .eval()
    )
    tokens, caches = torch.randint(11, (2, T)), model.new_caches()
    calls: list[AttentionCall] = []
    model.blocks[0].attention.observers.append(calls.append)  # type: ignore[union-attr]
    with torch.no_grad():
        model(tokens)
        model(tokens[:, :-1], caches=caches)
    seen = stats_of(model, tokens[:, -1:], caches)
    whole, last = (logit_stats(call) for call in (calls[0], calls[-1]))
    assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]
    mine = seen["blocks.0.attention"]
    assert mine.n_queries.tolist() == [2] * 4
    assert mine.n_pairs.tolist() == [2 * T] * 4
    for name in ("max_logit", "entropy", "query_norm", "key_norm", "key_norm_max"):
        assert torch.equal(getattr(mine, name), getattr(last, name)), name
    assert torch.allclose(last.key_norm, whole.key_norm, rtol=1e-12)
    full = spec_logits(calls[0])[:, :, -1:]
    assert torch.allclose(mine.max_logit, full.amax((0, 2, 3)), rtol=1e-12)


def spec_logits(call: AttentionCall) -> Tensor:
    return call.spec.logits(call.q, call.k, call.pos_q, call.pos_k, call.params)


@torch.no_grad()
def test_watching_does_not_change_absorbed_decoding() -> None:
    module, x = make(SPECS["rms dim"], dtype=torch.float32), torch.randn(2, T, D)
    alone = in_pieces(module, x, PIECES[1])
    module.observers.append(lambda call: None)
    assert torch.equal(in_pieces(module, x, PIECES[1]), alone)


@torch.no_grad()
def test_the_scale_is_that_of_the_head_not_of_the_latent() -> None:
    module = make(SPECS["plain"])
    seen: list[AttentionCall] = []
    module.observers.append(seen.append)
    cache, x = module.new_cache(), torch.randn(1, 2, D, dtype=torch.float64)
    module(x[:, :1], cache=cache)
    assert seen[0].spec.factor(
        seen[0].pos_q, seen[0].q.shape[-1], {}, torch.float64
    ) == 1 / math.sqrt(10)
