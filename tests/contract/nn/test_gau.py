"""nn.GAU against its formulas written out, its size, its cache, its blocks, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from qkeel import apply, find_sites, preset
from qkeel.errors import InvalidValueError, RefusedError, ShapeError, UnknownNameError
from qkeel.nn import GAU, Decoder, DecoderConfig, GAUBlock
from qkeel.spec import AttentionSpec, L2Norm, RMSNorm, Rope, SquaredReLU

LENGTH, WIDTH, SIZE = 6, 10, 8
SPECS = {
    **{
        name: preset(name, train_length=8)
        for name in ("baseline", "qna", "kna", "cosa", "kna_logn")
    },
    "relu2": AttentionSpec(position=Rope(), normalizer=SquaredReLU()),
    "rerope": preset("baseline").extrapolate("rerope", train_length=8, window=3),
}


def turned(x: Tensor, pos: float) -> Tensor:
    half, out = x.shape[-1] // 2, x.clone()
    for i in range(half):
        angle = pos * 10_000.0 ** (-2 * i / x.shape[-1])
        a, b = x[i], x[i + half]
        out[i], out[i + half] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return out


def logit(name: str, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """One logit from the published formulas, of q at i and k at j."""
    distance = min(i - j, 3) if name == "rerope" else i - j
    q = turned(q, distance)
    if name == "qna":
        return q / q.norm() @ k
    if name == "kna":
        return q @ k / k.norm()
    if name == "kna_logn":
        return math.log(i + 1) / math.log(8) * (q @ k / k.norm())
    if name == "cosa":
        return 4 * math.log(4) * (q / q.norm() @ (k / k.norm()))
    return q @ k / math.sqrt(SIZE)


def by_hand(m: GAU, x: Tensor, name: str) -> Tensor:
    """One sequence [t m], token by token."""

    def silu(y: Tensor) -> Tensor:
        return y / (1 + torch.exp(-y))

    u, v = silu(x @ m.uv_proj.weight.T).split(m.hidden, -1)
    z = silu(x @ m.qk_proj.z_proj.weight.T)
    offsets = (
        (0.0, 0.0) if m.qk_proj.q_bias is None else (m.qk_proj.q_bias, m.qk_proj.k_bias)
    )
    q, k = z * m.qk_proj.q_gain + offsets[0], z * m.qk_proj.k_gain + offsets[1]
    rows = []
    for i in range(len(x)):
        z_i = torch.stack([logit(name, q[i], k[j], i, j) for j in range(i + 1)])
        weights = (
            z_i.clamp_min(0).square() / (i + 1)
            if name == "relu2"
            else z_i.exp() / z_i.exp().sum()
        )
        rows.append(u[i] * (weights @ v[: i + 1]))
    return torch.stack(rows) @ m.o_proj.weight.T


def random_gau(name: str, bias: bool = True, **options: int) -> GAU:
    module = GAU(WIDTH, size=SIZE, spec=SPECS[name], bias=bias, **options).double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0.3, 0.7)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_output_is_that_of_the_formulas(name: str, bias: bool) -> None:
    module, x = (
        random_gau(name, bias),
        torch.randn(2, LENGTH, WIDTH, dtype=torch.float64),
    )
    for ours, row in zip(module(x), x):
        assert torch.allclose(ours, by_hand(module, row, name), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["kna", "relu2", "rerope"])
def test_gradients_are_those_of_the_formulas(name: str) -> None:
    module, x = random_gau(name), torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    weights = list(module.parameters())
    ours = torch.autograd.grad(module(x[None]).square().sum(), weights)
    theirs = torch.autograd.grad(by_hand(module, x, name).square().sum(), weights)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_layer_of_gau_alpha_has_3_637_504_parameters() -> None:
    with torch.device("meta"):
        assert (
            sum(p.numel() for p in GAU(768).parameters())
            == 768 * 3200 + 1536 * 768 + 2 * 128
            == 3_637_504
        )
        assert (
            sum(p.numel() for p in GAU(768, bias=True).parameters())
            == 3_637_504 + 2 * 128
        )


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_with_a_cache_tokens_come_out_as_without(name: str) -> None:
    module, x = random_gau(name), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    cache = module.new_cache(LENGTH)
    parts = [
        module(x[:, :3], cache=cache),
        *(module(x[:, i : i + 1], cache=cache) for i in range(3, LENGTH)),
    ]
    assert torch.allclose(torch.cat(parts, 1), module(x), rtol=0, atol=1e-12)
    assert cache.bytes_per_token == 8 * (SIZE + 2 * WIDTH)


@torch.no_grad()
def test_blocks_norm_before_or_after_and_weigh_the_stream() -> None:
    module, x = random_gau("kna"), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)

    def norm(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    pre = GAUBlock(module).double()
    assert torch.allclose(pre(x), x + module(norm(x)), rtol=0, atol=1e-12)
    pre.norm.weight.mul_(3.0)
    assert torch.allclose(pre(x), x + module(3.0 * norm(x)), rtol=0, atol=1e-12)
    post = GAUBlock(module, norm_order="post", alpha=2.0)
    assert torch.allclose(post(x), norm(2.0 * x + module(x)), rtol=0, atol=1e-12)
    assert not list(post.norm.parameters())


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_a_decoder_of_gaus_starts_near_guessing_learns_and_decodes(
    norm_order: str,
) -> None:
    choices = {
        "d_model": 16,
        "n_layers": 3,
        "n_heads": 1,
        "head_dim": 8,
        "attention": "gau",
        "norm_order": norm_order,
    }
    deep = {"deepnorm": True} if norm_order == "post" else {}
    model = Decoder(DecoderConfig(vocab_size=20, spec=SPECS["kna"], **choices, **deep))  # type: ignore[arg-type]
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.randint(20, (4, 13), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.log(20) - 0.2 < losses[0] < math.log(20) + 0.8
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        caches = model.new_caches()
        steps = torch.cat(
            [model(tokens[:, i : i + 1], caches=caches) for i in range(13)], dim=1
        )
        assert torch.allclose(steps, model(tokens), atol=1e-5)


@torch.no_grad()
def test_own_positions_and_a_mask_hide_padding() -> None:
    module, x = (
        random_gau("baseline"),
        torch.randn(1, LENGTH, WIDTH, dtype=torch.float64),
    )
    padded = torch.cat([torch.randn(1, 2, WIDTH, dtype=torch.float64), x], dim=1)
    mask = torch.tensor([False] * 2 + [True] * LENGTH)[None, None, None]
    out = module(padded, mask=mask, pos=torch.arange(-2, LENGTH)[None].clamp_min(0))
    assert torch.allclose(out[:, 2:], module(x), rtol=0, atol=1e-12)


def test_its_site_is_one_head_made_by_gains_on_one_projection_and_takes_and_loses_a_norm() -> (
    None
):
    model = nn.Sequential(GAU(WIDTH, size=SIZE), GAU(WIDTH, size=SIZE, bias=True))
    sites = find_sites(model)
    assert [(s.name, s.n_heads, s.head_dim) for s in sites] == [
        ("0", 1, SIZE),
        ("1", 1, SIZE),
    ]
    made = [[(w.parameter.partition(".")[2], w.bias) for w in s.query] for s in sites]
    assert made[0] == [("qk_proj.z_proj.weight", None), ("qk_proj.q_gain", None)]
    assert made[1][1] == ("qk_proj.q_gain", "1.qk_proj.q_bias")
    optimizer = torch.optim.AdamW(model.parameters())
    before, x = model(torch.ones(1, LENGTH, WIDTH)), torch.ones(1, LENGTH, WIDTH)
    with apply(model, "qk_norm:gain=scalar", optimizer):
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least 1"):
        GAU(0)
    with pytest.raises(InvalidValueError, match="even"):
        GAU(8, size=7)
    with pytest.raises(ShapeError, match="batch tokens 8"):
        GAU(8)(torch.ones(3, 8))
    with pytest.raises(RefusedError, match="values of this GAU have 16 numbers"):
        GAU(8, size=4, spec=AttentionSpec(norm=RMSNorm(on="qkv", gain="dim")))(
            torch.ones(1, 3, 8)
        )
    assert GAU(8, size=4, spec=AttentionSpec(norm=L2Norm(on="qkv")))(
        torch.ones(1, 3, 8)
    ).shape == (1, 3, 8)
    with pytest.raises(UnknownNameError, match="swin"):
        GAUBlock(GAU(8), norm_order="swin")
    with pytest.raises(InvalidValueError, match="alpha"):
        GAUBlock(GAU(8), alpha=2.0)
    with pytest.raises(InvalidValueError, match="one head"):
        DecoderConfig(vocab_size=5, attention="gau")
    with pytest.raises(InvalidValueError, match="deepnorm"):
        DecoderConfig(vocab_size=5, deepnorm=True)
