"""Norm and rotation by C++ and by Triton give the numbers of `AttentionSpec.encode`, whose float64 run is the truth.

Triton's kernels run in its interpreter: for q and for k, or for both in one launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.kernels.harness import DTYPES, laid
from tests.quick import one_in
from torch.testing import assert_close

import qkeel
from qkeel.kernels import triton_access as available
from qkeel.kernels.norm_rope import encode
from qkeel.kernels.norm_rope.operator import INTERLEAVED
from qkeel.spec import AttentionSpec, L2Norm, LayerNorm, RMSNorm, Rope, YaRN
from qkeel.spec.norm import NoNorm
from qkeel.spec.rope import NoPosition

GAINS = ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")
NORMS = [
    NoNorm(),
    *(RMSNorm(gain=gain) for gain in GAINS),
    *(L2Norm(gain=gain) for gain in GAINS if gain not in ("one_plus_dim", "head_dim")),
    *(LayerNorm(gain=gain) for gain in ("none", "dim", "head_dim")),
    RMSNorm(on="k", gain="dim"),
    L2Norm(eps=30.0),
]
POSITIONS = [
    Rope(),
    NoPosition(),
    Rope(rotary=0.5),
    Rope(rotary=0.25, pairing="half_reversed"),
    Rope(stretch=YaRN(factor=8, train_length=64)),
]
PAIRED = [Rope(pairing="interleaved"), Rope(pairing="interleaved", rotary=0.5)]
SIZES = [64, 16, 128, 96, 40]


@dataclasses.dataclass
class Door:
    """A way to the operators: the namespace of its backend, and whether x is kept for backward (None: as usual)."""

    name: str
    operators: Any
    keeps: bool | None


@pytest.fixture(params=["native", "triton"])
def door(request, monkeypatch):
    if request.param == "native":
        request.getfixturevalue("library")
        return Door("native", torch.ops.qkeel_native, None)
    request.getfixturevalue("_triton")
    assert available.loaded()
    # What decides on a CPU whether x is kept is compiled, so a test says it for Triton.
    door = Door("triton", torch.ops.qkeel_triton, keeps=False)
    monkeypatch.setattr(encode, "_keeps", lambda x, gain: door.keeps)
    monkeypatch.setattr(encode, "operators_for", lambda device: door.operators)
    return door


in_triton, compiled = (
    pytest.mark.parametrize("door", [name], indirect=True)
    for name in ("triton", "native")
)


def case_of(
    norm,
    position,
    t,
    d,
    dtype=torch.float32,
    layout=1,
    heads=(4, 2),
):
    q, k = (laid(2 * torch.randn(2, h, t, d).to(dtype), layout) for h in heads)
    spec = AttentionSpec(norm=norm, position=position)
    params = spec.init_params(*heads, d)
    moved = {n: (p + 0.2 * torch.randn(p.shape)).to(dtype) for n, p in params.items()}
    return spec, q, k, moved


def run(
    forward,
    case,
    dtype,
    above,
    device="cpu",
):
    """q̃, k̃ and the gradients of q, k and every gain; where t is odd, each sequence has positions of its own."""
    spec, *qk, params = case
    q, k = (x.detach().to(device, dtype).requires_grad_() for x in qk)
    params = {n: p.detach().to(q).requires_grad_() for n, p in params.items()}
    at = torch.arange(5, 5 + q.shape[2], device=device)
    pos = torch.stack([at, 3 * at.flip(0)]) if len(at) % 2 else at[None]
    out = forward(spec, q, k, pos, pos, params)
    above = [a.to(o) for a, o in zip(above, out)]
    grads = torch.autograd.grad(out, [q, k, *params.values()], above)
    return [x.cpu() for x in (*out, *grads)]


def torchs(spec, q, k, *rest):
    ours = spec.encode(q, k, *rest)
    return ours[0].to(q.dtype), ours[1].to(k.dtype)


def check(case, told, device="cpu"):
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number).

    A gain's gradient is a sum over rows: there also the rounding of every term, twice that of independent errors. The result
    and the gradient from above are rounded to the dtype, so each term is.
    """
    dtype = case[1].dtype
    above = [
        laid(torch.randn(x.shape).to(dtype), i + case[1].shape[2])
        for i, x in enumerate(case[1:3])
    ]
    truth = run(torchs, case, torch.float64, above)
    theirs = run(torchs, case, dtype, above)
    ours = run(encode.encoded, case, dtype, above, device)
    terms = sum((a.double() * o).square().sum() for a, o in zip(above, truth)).detach()
    eps = torch.finfo(dtype).eps
    for i, (mine, other, true) in enumerate(zip(ours, theirs, truth)):
        assert mine.dtype == dtype
        summed = 2 * eps * (terms / true.numel()).sqrt() if i >= 4 else 0.0
        allowed = 2 * ((other - true).abs().max() + eps * true.abs().max() + summed)
        assert (mine.double() - true).abs().max() <= allowed, f"{told}, number {i}"


def position_of(turn, norm):
    return POSITIONS[0 if isinstance(norm, NoNorm) else turn % len(POSITIONS)]


def fused(case, pos=None):
    """q and k by the operators, which must take them."""
    spec, q, k, params = case
    pos = torch.arange(q.shape[2])[None] if pos is None else pos
    out = encode.fused(spec, q, k, pos, pos, params)
    assert out is not None
    return out


@compiled
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("norm", one_in(NORMS, 2), ids=repr)
def test_every_norm_gain_length_and_layout(norm, door):
    for turn, t in enumerate([1, 7, 64, 129, 512], NORMS.index(norm)):
        position, d = position_of(turn, norm), SIZES[turn % 5]
        for dtype in (DTYPES[0], DTYPES[1 + turn % 2]):
            case = case_of(norm, position, t, d, dtype, turn)
            check(case, f"T {t}, turn {turn}, {dtype}")


@in_triton
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("norm", one_in(NORMS, 4), ids=repr)
def test_every_norm_gain_and_layout_in_triton(norm, door):
    # x made anew in float32 only: gains differ by more than half precision allows.
    for turn, (t, keep) in enumerate([(1, True), (2, False)], NORMS.index(norm)):
        door.keeps = keep
        dtype = DTYPES[turn % 3] if keep else torch.float32
        position, d = position_of(turn, norm), SIZES[turn % 5]
        case = case_of(norm, position, t, d, dtype, turn, heads=(2, 1))
        check(case, f"{turn}, {keep}")


@pytest.mark.parametrize("norm", one_in(NORMS, 4), ids=repr)
def test_q_and_k_at_once_have_the_bits_of_one_after_the_other(norm, door):
    spec, q, k, params = case_of(norm, Rope(), 5, 48)
    pos = torch.arange(5)[None]
    # Without a gradient: with one they are two calls.
    together, apart = (
        encode.fused(spec, q, k, pos, of_keys, params) for of_keys in (pos, pos.clone())
    )
    assert together is not None
    assert apart is not None
    assert all(map(torch.equal, together, apart))


WIDE = [
    *(
        kind(over="layer", gain=gain)
        for kind in (RMSNorm, LayerNorm)
        for gain in ("none", "head_dim")
    ),
    RMSNorm(over="layer", gain="one_plus_dim"),
    L2Norm(over="layer", gain="head"),
    L2Norm(over="layer", eps=30.0),
]


@in_triton
@pytest.mark.usefixtures("_poisoned")
def test_any_number_of_heads_fills_tiles_or_not_and_too_many_for_one_norm_are_torchs(
    door,
):
    wide = LayerNorm(over="layer", gain="head_dim")
    # More heads than a tile has, none of which they fill.
    for norm in (RMSNorm(gain="head_dim"), wide):
        case = case_of(norm, Rope(), 2, 16, heads=(70, 3))
        check(case, f"{norm}")
    case[1][0, 1, 1, 3] = torch.nan
    lost = fused(case)[0].isnan()
    assert lost.sum() == lost[0, :, 1].sum() == 70 * 16
    pos = torch.zeros(1, 1, dtype=torch.int64)
    for h, d in ((70, 128), (1024, 8)):
        spec, q, k, params = case_of(wide, NoPosition(), 1, d, heads=(h, 2))
        assert encode.fused(spec, q, k, pos, pos, params) is None


def test_gains_near_zero_keep_their_gradients_and_nan_shows_in_its_row(
    door,
):
    door.keeps, t = True, 33 if door.name == "native" else 2
    case = case_of(RMSNorm(gain="dim"), Rope(), t, 64)
    for smallest in (0.0, 1e-30, -0.3):
        case[3]["q_norm"][::5] = smallest
        check(case, f"gain {smallest}")
    case[3]["q_norm"][2] = torch.nan
    q, k = fused(case)
    assert q.isnan().any()
    assert not k.isnan().any()
    for norm in (RMSNorm(), L2Norm(), LayerNorm()):
        case = case_of(norm, Rope(), 3, 16)
        case[2][0, 1, 2, 3] = torch.nan
        q, k = fused(case)
        assert q.isfinite().all()
        assert k.isnan().sum() == k[0, 1, 2].isnan().sum() == 16


@pytest.mark.parametrize("norm", [RMSNorm(), L2Norm(gain="head")])
def test_a_rotation_before_a_norm_that_commutes_is_the_same(norm, door):
    position = Rope(order="rotate_then_norm", pairing="half_reversed")
    check(case_of(norm, position, 3, 16, heads=(2, 1)), repr(norm))


def test_a_rotation_is_differentiable_twice_and_a_norm_once(door):
    for norm in (NoNorm(), RMSNorm()):
        case = case_of(norm, Rope(), 4, 16)
        leaves = [x.requires_grad_() for x in case[1:3]]
        loss = sum(x.square().sum() for x in fused(case))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        total = sum(x.sum() for x in first)
        if isinstance(norm, NoNorm):
            for x in torch.autograd.grad(total, leaves):
                assert_close(x, torch.full_like(x, 2.0))
        else:
            with pytest.raises(RuntimeError, match=r"differentiated( only)? once"):
                torch.autograd.grad(total, leaves)


@pytest.mark.slow
@in_triton
def test_torch_accepts_the_operators_of_triton(door):
    ops, table = torch.ops.qkeel_triton, [torch.rand(1, 1, 2, 8) for _ in range(2)]
    x, y = torch.randn(1, 2, 2, 16), torch.randn(1, 1, 2, 16)
    gain = torch.rand(16) + 0.5
    out, inverse = ops.norm_rope(x, gain, *table, 2, 1e-6, False)
    back = (out, out, inverse, gain, *table, 2, 1e-6, False)
    tracked = [t.clone().requires_grad_() for t in (x, gain)]
    for name, arguments in (
        ("norm_rope", (*tracked, *table, 1, 1e-6, False)),
        ("norm_rope", (tracked[0], None, *table, INTERLEAVED, 0.0, False)),
        ("norm_rope_backward", back),
        ("norm_rope_two", (x, y, gain, gain, *table, 1, 1, 1e-6)),
        ("norm_rope_two", (x, y, None, None, *table, INTERLEAVED, INTERLEAVED, 0.0)),
    ):
        torch.library.opcheck(getattr(ops, name).default, arguments)


def test_what_is_not_for_them_is_left_to_torch_bit_for_bit(door):
    specs = [
        AttentionSpec(),
        AttentionSpec(norm=LayerNorm(gain="dim", bias=True), position=Rope()),
        AttentionSpec(
            norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")
        ),
        qkeel.preset("qwen3").extrapolate("rerope", train_length=64, window=4),
    ]
    if door.name == "native":
        specs += [
            AttentionSpec(norm=RMSNorm(over="layer")),
            AttentionSpec(norm=RMSNorm(), position=PAIRED[0]),
            # Four pairs, which is no whole register.
            AttentionSpec(norm=RMSNorm(), position=Rope(rotary=0.5)),
        ]
    x, pos = torch.randn(1, 2, 3, 16), torch.arange(3)[None]
    for spec in specs:
        arguments = spec, x, x, pos, pos, spec.init_params(2, 2, 16)
        assert encode.fused(*arguments) is None
        assert all(
            map(torch.equal, encode.encoded(*arguments), spec.encode(*arguments[1:]))
        )
    spec = AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope())
    gains = spec.init_params(2, 2, 16)
    far = {n: g.to("meta") for n, g in gains.items()}
    for other in (x[..., :4], x.double(), x.int(), x.to("meta"), x[:0]):
        assert encode.fused(spec, other, other, pos, pos, gains) is None
    assert encode.fused(spec, x, x.to("meta"), pos, pos, gains) is None
    assert encode.fused(spec, x, x, pos, pos, far) is None


def test_a_key_that_needs_no_encoding_is_not_copied():
    q, k, pos = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    ours = encode.encoded(AttentionSpec(), q, k, pos[:, 4:], pos, {})
    assert ours[0] is q
    assert ours[1] is k


@in_triton
@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("norm", [*NORMS, *WIDE], ids=repr)
def test_interleaved_pairs_and_norms_over_all_heads_of_a_token(norm, door):
    turn = [*NORMS, *WIDE].index(norm)
    dtype, position = torch.float32, PAIRED[turn % 2]
    if norm in WIDE:
        dtype = DTYPES[turn % 3]
        position = (Rope(), PAIRED[0], NoPosition(), PAIRED[1])[turn % 4]
    door.keeps = turn % 2 == 0 or dtype != torch.float32
    t, d = (1, 7, 3)[turn % 3], (24, 64, 16)[turn % 3]
    check(case_of(norm, position, t, d, dtype, turn), repr(norm))
