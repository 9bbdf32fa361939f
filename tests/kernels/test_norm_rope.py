"""Norm and rotation by C++ and by Triton give the numbers of `AttentionSpec.encode`, whose float64 run is the truth.

Triton's kernels run in its interpreter: for q and for k, or for both in one launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.kernels.harness import DTYPES, LAYOUTS
from tests.quick import one_in
from torch import Tensor

import qkeel
from qkeel.kernels.native import triton as available
from qkeel.kernels.norm_rope import encode
from qkeel.kernels.norm_rope.operator import INTERLEAVED, norm_rope
from qkeel.spec import PRESETS, AttentionSpec, L2Norm, LayerNorm, RMSNorm, Rope, YaRN
from qkeel.spec.norm import NoNorm, Norm
from qkeel.spec.rope import NoPosition, Position
from qkeel.spec.slot import Params

NORMS: list[Norm] = [
    NoNorm(),
    *(
        RMSNorm(gain=gain)
        for gain in ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")
    ),  # type: ignore[arg-type]
    *(L2Norm(gain=gain) for gain in ("none", "dim", "scalar", "head")),  # type: ignore[arg-type]
    LayerNorm(gain="none"),
    LayerNorm(gain="dim"),
    LayerNorm(gain="head_dim"),
    RMSNorm(on="k", gain="dim"),
    L2Norm(eps=30.0),
]
POSITIONS: list[Position] = [
    Rope(),
    NoPosition(),
    Rope(rotary=0.5),
    Rope(rotary=0.25, pairing="half_reversed"),
    Rope(stretch=YaRN(factor=8, train_length=64)),
]
PAIRED = [Rope(pairing="interleaved"), Rope(pairing="interleaved", rotary=0.5)]
LENGTHS = [1, 7, 64, 129, 512]
SIZES = [64, 8, 128, 24, 40]
CPU = torch.device("cpu")
Given = tuple[AttentionSpec, Tensor, Tensor, Params]
Encode = Callable[..., "tuple[Tensor, Tensor] | None"]


@dataclasses.dataclass
class Door:
    """A way to the operators: the namespace of its backend, and whether x is kept for backward (None: as usual)."""

    name: str
    operators: Any
    keeps: bool | None


@pytest.fixture(params=["native", "triton"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Door:
    if request.param == "native":
        request.getfixturevalue("library")
        return Door("native", torch.ops.qkeel_native, None)
    request.getfixturevalue("_triton")
    assert available.loaded()
    made = Door("triton", torch.ops.qkeel_triton, None)
    keeps = encode._keeps
    monkeypatch.setattr(
        encode,
        "_keeps",
        lambda x, gain: keeps(x, gain) if made.keeps is None else made.keeps,
    )
    monkeypatch.setattr(encode, "operators_for", lambda device: made.operators)
    # What decides on a CPU whether x is kept is compiled.
    made.keeps = False
    return made


def of_doors(*names: str) -> Any:
    return pytest.mark.parametrize("door", names, indirect=True)


in_triton, compiled = of_doors("triton"), of_doors("native")


def given(
    norm: Norm,
    position: Position,
    t: int,
    d: int,
    dtype: torch.dtype,
    layout: str = "heads apart",
) -> Given:
    q, k = (LAYOUTS[layout](2 * torch.randn(2, h, t, d).to(dtype)) for h in (4, 2))
    spec = AttentionSpec(norm=norm, position=position)
    made = spec.init_params(4, 2, d)
    return (
        spec,
        q,
        k,
        {n: (p + 0.2 * torch.randn(p.shape)).to(dtype) for n, p in made.items()},
    )


def run(
    how: Encode,
    case: Given,
    dtype: torch.dtype,
    above: list[Tensor],
    device: str = "cpu",
) -> list[Tensor]:
    """q̃, k̃ and the gradients of q, k and every gain."""
    spec, *qk, params = case
    q, k = (x.detach().to(device, dtype).requires_grad_() for x in qk)
    params = {
        n: p.detach().to(device, dtype).requires_grad_() for n, p in params.items()
    }
    pos = torch.arange(5, 5 + q.shape[2], device=device)[None]
    out = how(spec, q, k, pos, pos, params)
    assert out is not None
    above = [a.to(o) for a, o in zip(above, out)]
    return [
        x.cpu()
        for x in (*out, *torch.autograd.grad(out, [q, k, *params.values()], above))
    ]


def torchs(
    spec: AttentionSpec, q: Tensor, k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    ours = spec.encode(q, k, *rest)
    return ours[0].to(q.dtype), ours[1].to(k.dtype)


def check(case: Given, told: str, device: str = "cpu") -> None:
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number).

    A gain's gradient is a sum over rows: there also the rounding of every term, as of independent errors. The result
    and the gradient from above are rounded to the dtype, so each term is.
    """
    dtype = case[1].dtype
    layouts = torch.randint(len(LAYOUTS), (2,)).tolist()
    above = [
        list(LAYOUTS.values())[i](torch.randn(x.shape).to(x.dtype))
        for i, x in zip(layouts, case[1:3])
    ]
    truth, theirs = (
        run(torchs, case, torch.float64, above),
        run(torchs, case, dtype, above),
    )
    ours = run(encode.encoded, case, dtype, above, device)
    terms = sum((a.double() * o).square().sum() for a, o in zip(above, truth)).detach()  # type: ignore[union-attr]
    for i, (mine, other, true) in enumerate(zip(ours, theirs, truth)):
        assert mine.dtype == dtype
        own, size = (other - true).abs().max(), true.abs().max()
        summed = (
            torch.finfo(dtype).eps * (terms / true.numel()).sqrt() if i >= 4 else 0.0
        )
        allowed = 2 * (own + torch.finfo(dtype).eps * size + summed)
        assert (mine.double() - true).abs().max() <= allowed, f"{told}, number {i}"


def place(turn: int, norm: Norm, among: list[Position] = POSITIONS) -> Position:
    return among[0] if isinstance(norm, NoNorm) else among[turn % len(among)]


def fused(case: Given, pos: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q and k by the operators, which must take them."""
    spec, q, k, params = case
    pos = torch.arange(q.shape[2])[None] if pos is None else pos
    out = encode.fused(spec, q, k, pos, pos, params)
    assert out is not None
    return out


@compiled
@pytest.mark.parametrize("norm", one_in(NORMS, 2), ids=repr)
def test_every_norm_gain_length_and_layout(norm: Norm, door: Door) -> None:
    for turn, t in enumerate(LENGTHS, NORMS.index(norm)):
        for dtype in DTYPES:
            case = given(
                norm,
                place(turn, norm),
                t,
                SIZES[turn % 5],
                dtype,
                list(LAYOUTS)[turn % 5],
            )
            check(case, f"T {t}, turn {turn}, {dtype}")


@in_triton
@pytest.mark.parametrize("norm", one_in(NORMS, 4), ids=repr)
def test_every_norm_gain_and_layout_in_triton(norm: Norm, door: Door) -> None:
    # x made anew in float32 only: gains differ by more than half precision allows.
    for turn, (t, keep) in enumerate([(1, True), (5, False)], NORMS.index(norm)):
        door.keeps = keep
        dtype = DTYPES[turn % 3] if keep else torch.float32
        check(
            given(
                norm,
                place(turn, norm),
                t,
                SIZES[turn % 5],
                dtype,
                list(LAYOUTS)[turn % 5],
            ),
            f"{turn}, {keep}",
        )


@in_triton
@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_interleaved_pairs_have_the_numbers_of_the_definition(
    norm: Norm, door: Door
) -> None:
    turn = NORMS.index(norm)
    for position, dtype in (
        (place(turn, norm), DTYPES[2 * (turn % 2)]),
        (PAIRED[turn % 2], torch.float32),
    ):
        door.keeps = True
        case = given(
            norm,
            position,
            (1, 7)[turn % 2],
            (24, 64)[turn % 2],
            dtype,
            list(LAYOUTS)[turn % 5],
        )
        check(case, repr(position))


@pytest.mark.parametrize("norm", one_in(NORMS, 4), ids=repr)
def test_q_and_k_at_once_have_the_bits_of_one_after_the_other(
    norm: Norm, door: Door
) -> None:
    door.keeps = True
    spec, q, k, params = given(norm, Rope(), 5, 24, torch.float32)
    found = []
    for apart in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        pos = torch.arange(5)[None]
        out = encode.fused(spec, *leaves, pos, pos.clone() if apart else pos, params)
        assert out is not None
        loss = sum(((i + 1.3) * x).cos().sum() for i, x in enumerate(out))
        found.append([*out, *torch.autograd.grad(loss, leaves)])
    assert all(map(torch.equal, *found))


WIDE: list[Norm] = [
    kind(over="layer", gain=gain)
    for kind in (RMSNorm, LayerNorm)
    for gain in ("none", "head_dim")
]
WIDE += [
    RMSNorm(over="layer", gain="one_plus_dim"),
    L2Norm(over="layer", gain="head"),
    L2Norm(over="layer", eps=30.0),
]


@in_triton
@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
def test_a_norm_over_all_heads_of_a_token_is_that_of_the_definition(door: Door) -> None:
    positions = [Rope(), PAIRED[0], NoPosition(), PAIRED[1]]
    for turn, norm in enumerate(WIDE):
        dtype = DTYPES[turn % 3]
        door.keeps = turn % 2 == 0 or dtype != torch.float32
        case = given(
            norm,
            positions[turn % 4],
            (5, 1, 3)[turn % 3],
            (24, 16, 64)[turn % 3],
            dtype,
            list(LAYOUTS)[turn % 5],
        )
        check(case, f"{norm} {turn}")


@in_triton
@pytest.mark.usefixtures("_poisoned")
def test_any_number_of_heads_fills_tiles_or_not_and_too_many_for_one_norm_are_left_to_torch(
    door: Door,
) -> None:
    for heads in (
        (1, 1),
        (70, 3),
    ):  # more than a tile of heads has, and none that it fills
        for norm in (
            RMSNorm(gain="dim"),
            RMSNorm(gain="head_dim"),
            LayerNorm(over="layer", gain="head_dim"),
        ):
            spec = AttentionSpec(norm=norm, position=Rope())
            q, k = (torch.randn(2, 2, h, 16).transpose(1, 2) for h in heads)
            params = {
                n: p + 0.2 * torch.randn(p.shape)
                for n, p in spec.init_params(*heads, 16).items()
            }
            check((spec, q, k, params), f"{heads} {norm}")
    q[0, 1, 1, 3] = torch.nan
    out = fused((spec, q, k, params))
    assert out[0].isnan().sum() == out[0][0, :, 1].isnan().sum() == 70 * 16
    spec, pos = (
        AttentionSpec(norm=RMSNorm(over="layer", gain="none")),
        torch.zeros(1, 1, dtype=torch.int64),
    )
    for h, d in ((70, 128), (1024, 8)):
        assert (
            encode.fused(
                spec, torch.randn(1, h, 1, d), torch.randn(1, 2, 1, d), pos, pos, {}
            )
            is None
        )


def test_gains_near_zero_and_zero_keep_their_gradients_and_nan_shows(
    door: Door,
) -> None:
    door.keeps = True
    for smallest in (0.0, 1e-30, 1e-4, -0.3):
        case = given(
            RMSNorm(gain="dim"),
            Rope(),
            33 if door.name == "native" else 2,
            64,
            torch.float32,
        )
        case[3]["q_norm"][::5] = smallest
        check(case, f"gain {smallest}")
    case[3]["q_norm"][2] = torch.nan
    out = fused(case)
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


def test_a_row_of_nan_is_nan_under_every_norm_and_no_other(door: Door) -> None:
    for norm in (RMSNorm(), L2Norm(), LayerNorm()):
        case = given(norm, Rope(), 3, 16, torch.float32)
        case[2][0, 1, 2, 3] = torch.nan
        out = fused(case)
        assert out[0].isfinite().all()
        assert out[1].isnan().sum() == out[1][0, 1, 2].isnan().sum() == 16


def test_positions_of_each_sequence_are_its_own(door: Door) -> None:
    case = given(RMSNorm(), Rope(), 6, 16, torch.float32)
    pos = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 7, 8, 9, 1, 0]])
    torch.testing.assert_close(
        fused(case, pos),
        case[0].encode(*case[1:3], pos, pos, case[3]),
        rtol=0,
        atol=2e-6,
    )


def test_a_rotation_before_a_norm_that_commutes_is_the_same(door: Door) -> None:
    for norm in (RMSNorm(), L2Norm(gain="head"), RMSNorm(gain="scalar")):
        position = Rope(order="rotate_then_norm", pairing="half_reversed")
        check(given(norm, position, 9, 16, torch.float32), repr(norm))


@pytest.mark.usefixtures("_poisoned")
def test_every_number_is_written(door: Door) -> None:
    assert torch.empty(3).isnan().all()
    for norm, layout in zip(
        (RMSNorm(gain="dim"), LayerNorm(gain="head_dim"), L2Norm()), list(LAYOUTS)[2:]
    ):
        case = given(norm, Rope(rotary=0.5), 2, 24, torch.float32, layout)
        found = run(
            encode.encoded, case, torch.float32, [torch.ones_like(x) for x in case[1:3]]
        )
        assert all(x.isfinite().all() for x in found)


def test_rows_by_hand(door: Door) -> None:
    x = torch.tensor([3.0, 4.0] + [0.0] * 6).view(1, 1, 1, 8)
    y = norm_rope(door.operators, x, torch.tensor(2.0), None, 1, 0.0, False)
    torch.testing.assert_close(
        y.flatten()[:2], torch.tensor([3.3941126, 4.5254834])
    )  # 2 · x / √(25 / 8)
    x = torch.full(
        (1, 1, 2, 8), 0.25
    )  # under the smallest length the gradient is that of a division by it
    x[0, 0, 1] = 0.0
    x.requires_grad_()
    y = norm_rope(door.operators, x, None, None, 2, 4.0, False)
    (grad,) = torch.autograd.grad(y[..., 0].sum(), x)
    assert y.flatten().tolist() == [0.0625] * 8 + [0.0] * 8
    assert grad.flatten().tolist() == [0.25] + [0.0] * 7 + [0.25] + [0.0] * 7


def test_a_rotation_is_differentiable_twice_and_a_norm_once(door: Door) -> None:
    pos = torch.arange(4)[None]
    for norm in (NoNorm(), RMSNorm()):
        spec, q, k, params = given(norm, Rope(), 4, 8, torch.float32)
        q, k = q.requires_grad_(), k.requires_grad_()
        out = encode.fused(spec, q, k, pos, pos, params)
        assert out is not None
        first = torch.autograd.grad(
            sum(x.square().sum() for x in out), [q, k], create_graph=True
        )
        total = sum(x.sum() for x in first)
        if isinstance(norm, NoNorm):
            for x in torch.autograd.grad(total, [q, k]):
                torch.testing.assert_close(x, torch.full_like(x, 2.0))
        else:
            with pytest.raises(RuntimeError, match=r"differentiated( only)? once"):
                torch.autograd.grad(total, [q, k])


@pytest.mark.slow
@of_doors("triton")
def test_torch_accepts_the_operators_of_triton(door: Door) -> None:
    ops = torch.ops.qkeel_triton
    x, y = (
        torch.randn(1, 2, 2, 16, requires_grad=True),
        torch.randn(1, 1, 2, 16, requires_grad=True),
    )
    gains = [torch.rand(16).add(0.5).requires_grad_() for _ in "qk"]
    table = torch.rand(1, 1, 2, 8), torch.rand(1, 1, 2, 8)
    plain = [a.detach() for a in (x, y, *gains)]
    out, inverse = ops.norm_rope(plain[0], plain[2], *table, 2, 1e-6, False)
    for name, args in (
        ("norm_rope", (x, gains[0], *table, 1, 1e-6, False)),
        ("norm_rope", (x, None, *table, INTERLEAVED, 0.0, False)),
        (
            "norm_rope_backward",
            (torch.randn_like(out), out, inverse, plain[2], *table, 2, 1e-6, False),
        ),
        ("norm_rope_two", (*plain, *table, 1, 1, 1e-6)),
        (
            "norm_rope_two",
            (*plain[:2], None, None, *table, INTERLEAVED, INTERLEAVED, 0.0),
        ),
    ):
        torch.library.opcheck(getattr(ops, name).default, args)


def test_what_is_not_for_them_is_left_to_torch_bit_for_bit(door: Door) -> None:
    q, k, pos = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.arange(3)[None]
    not_on_a_cpu = [
        AttentionSpec(norm=RMSNorm(over="layer")),
        AttentionSpec(norm=RMSNorm(), position=Rope(pairing="interleaved")),
    ]
    for spec in (
        AttentionSpec(),
        *(not_on_a_cpu if door.name == "native" else []),
        AttentionSpec(norm=LayerNorm(gain="dim", bias=True), position=Rope()),
        AttentionSpec(
            norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")
        ),
        AttentionSpec(norm=LayerNorm(), position=Rope(order="rotate_then_norm")),
        qkeel.preset("qwen3").extrapolate("rerope", train_length=64, window=4),
    ):
        params = spec.init_params(2, 2, 8)
        assert encode.fused(spec, q, k, pos, pos, params) is None
        theirs = spec.encode(q, k, pos, pos, params)
        assert all(
            map(torch.equal, encode.encoded(spec, q, k, pos, pos, params), theirs)
        )


def test_tensors_of_other_shapes_types_and_devices_are_left_to_torch(
    door: Door,
) -> None:
    spec, pos = (
        AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope()),
        torch.arange(3)[None],
    )
    x, gains = torch.randn(1, 2, 3, 8), spec.init_params(2, 2, 8)
    wide = torch.randn(1, 1, 3, 2048)
    for other in (
        torch.randn(1, 2, 3, 12),
        x.double(),
        x.int(),
        x.to(torch.float8_e4m3fn),
        x.to("meta"),
        wide,
        x[:0],
    ):
        assert encode.fused(spec, other, other, pos, pos, gains) is None
    far = {n: g.to("meta") for n, g in gains.items()}
    assert encode.fused(spec, x, x.to("meta"), pos, pos, gains) is None
    assert encode.fused(spec, x, x, pos, pos, far) is None
    with pytest.raises(RuntimeError, match="device"):
        encode.encoded(spec, x, x, pos, pos, far)


@pytest.mark.slow
@of_doors("triton")
def test_a_compiled_module_is_one_graph_with_the_operator_in_it(door: Door) -> None:
    # In a process of its own: the compiler does not go with checked annotations.
    path = Path(__file__).parent / "triton_kernels" / "whole_graph.py"
    done = forked.python([path.name], path.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-5


# Of the compiled operators alone.


@compiled
def test_a_qk_norm_keeps_next_to_nothing_for_backward(door: Door) -> None:
    kept = {}
    for name in ("baseline", "qwen3"):
        module = qkeel.nn.Attention(128, 2, spec=qkeel.preset(name))
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        seen: dict[int, int] = {}

        def pack(x: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            module(torch.randn(2, 256, 128, requires_grad=True))
        kept[name] = sum(n for at, n in seen.items() if at not in weights) / (
            4 * 2 * 256 * 128
        )
    assert kept["qwen3"] - kept["baseline"] <= 0.1


@compiled
@pytest.mark.parametrize("norm", NORMS, ids=repr)
@torch.no_grad()
def test_one_token_has_the_bits_it_has_in_a_whole_sequence(
    norm: Norm, door: Door
) -> None:
    for position in (
        *POSITIONS[: 1 if isinstance(norm, NoNorm) else 5],
        Rope(pairing="half_reversed"),
    ):
        spec, q, k, params = given(norm, position, 9, 64, torch.float32)
        for first in (0, 3, 1000):
            pos = torch.arange(first, first + 9)[None]
            whole = fused((spec, q, k, params), pos)
            for t in (0, 4, 8):
                part = q[:, :, t : t + 1], k[:, :, t : t + 1], params
                alone = fused((spec, *part), pos[:, t : t + 1])
                assert all(
                    torch.equal(a, b[:, :, t : t + 1]) for a, b in zip(alone, whole)
                )
            torch.testing.assert_close(
                alone,
                torchs(spec, *part[:2], *[pos[:, 8:]] * 2, params),
                rtol=1e-5,
                atol=2e-6,
            )


@compiled
@torch.no_grad()
def test_presets_with_half_pairs_use_it_and_norms_over_a_layer_do_not(
    door: Door,
) -> None:
    pos, q, used = torch.arange(9)[None], torch.randn(2, 4, 9, 16), set()
    for name in PRESETS:
        spec = qkeel.preset(name)
        if encode.fused(spec, q, q, pos, pos, spec.init_params(4, 4, 16)) is not None:
            used.add(name)
    assert {
        "baseline",
        "qna",
        "kna",
        "cosa",
        "qwen3",
        "gemma3",
        "qwen3_next",
        "nanochat",
        "vit22b",
    } <= used
    assert not used & {"olmo2", "chameleon", "llama4"}


@compiled
def test_an_exported_program_holds_torchs_operators_alone(door: Door) -> None:
    module, x = (
        qkeel.nn.Attention(16, 2, spec=qkeel.preset("qwen3")),
        torch.randn(1, 5, 16),
    )
    program = torch.export.export(module, (x,))
    assert "qkeel_native" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), module(x))
