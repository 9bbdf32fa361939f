"""The Triton pass gives the numbers of `AttentionSpec.encode`: the matrix of the C++ pass, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

import qkeel
from qkeel.kernels import encode
from qkeel.kernels.encode import encoded
from qkeel.kernels.triton import available
from qkeel.spec import AttentionSpec, L2Norm, LayerNorm, RMSNorm, Rope
from qkeel.spec.norm import NoNorm, Norm

from ..native.test_norm_rope import LAYOUTS, NORMS, POSITIONS, check, given, run

SIZES = [64, 8, 128, 24, 40]


@pytest.fixture(autouse=True)
def _on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the way of CUDA tensors, and x is made anew from the result unless a test says otherwise."""
    assert available.loaded()
    from qkeel.kernels.triton import norm_rope

    monkeypatch.setattr(encode, "operator_for", lambda device: norm_rope.norm_rope)
    monkeypatch.setattr(encode, "_keeps", lambda x, gain: False)


@pytest.mark.parametrize("norm", one_in(NORMS, 4), ids=repr)
def test_every_norm_gain_and_layout(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    # x made anew in float32 only: these gains differ by more than half precision allows.
    for turn, (t, keep) in enumerate([(1, True), (5, False)], NORMS.index(norm)):
        monkeypatch.setattr(encode, "_keeps", lambda x, gain, keep=keep: keep)
        layout, d = list(LAYOUTS)[turn % len(LAYOUTS)], SIZES[turn % len(SIZES)]
        position = POSITIONS[0 if isinstance(norm, NoNorm) else turn % len(POSITIONS)]
        dtype = (torch.float32, torch.bfloat16, torch.float16)[turn % 3] if keep else torch.float32
        case = given(norm, position, t, d, dtype, layout)
        check(case, dtype, f"T {t}, d {d}, {layout}, {position.formula()}, {dtype}, x kept: {keep}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_x_is_made_again_from_a_result_in_half_precision(dtype: torch.dtype) -> None:
    for norm in (RMSNorm(), L2Norm(), LayerNorm(gain="none")):
        check(given(norm, Rope(), 9, 64, dtype, "heads beside each other"), dtype, repr(norm))


@pytest.mark.parametrize("heads", [(1, 1), (70, 3)])
def test_any_number_of_heads_and_tokens_fills_tiles_or_not(heads: tuple[int, int]) -> None:
    for gain in ("dim", "head_dim"):
        spec = AttentionSpec(norm=RMSNorm(gain=gain), position=Rope())
        q, k = (torch.randn(2, 2, h, 16).transpose(1, 2) for h in heads)
        params = {n: p + 0.2 * torch.randn(p.shape) for n, p in spec.init_params(*heads, 16).items()}
        check((spec, q, k, params), torch.float32, gain)


def test_positions_of_each_sequence_are_its_own() -> None:
    spec, q, k, params = given(RMSNorm(), Rope(), 6, 16, torch.float32)
    pos = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 7, 8, 9, 1, 0]])
    ours = encode.fused(spec, q, k, pos, pos, params)
    assert ours is not None
    torch.testing.assert_close(ours, spec.encode(q, k, pos, pos, params), rtol=0, atol=2e-6)


def test_gains_of_zero_and_nan_are_respected_where_x_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_keeps", lambda x, gain: True)
    case = given(RMSNorm(gain="dim"), Rope(), 2, 16, torch.float32)
    case[3]["q_norm"][::5] = 0.0
    check(case, torch.float32, "gain 0")
    case[3]["q_norm"][2] = torch.nan
    out = encode.fused(case[0], case[1], case[2], torch.arange(2)[None], torch.arange(2)[None], case[3])
    assert out is not None
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


def test_a_row_of_nan_is_nan_under_every_norm() -> None:
    for norm in (RMSNorm(), L2Norm(), LayerNorm()):
        spec, q, k, params = given(norm, Rope(), 2, 16, torch.float32)
        q[0, 1, 1, 3] = torch.nan
        out = encode.fused(spec, q, k, torch.arange(2)[None], torch.arange(2)[None], params)
        assert out is not None
        assert out[0][0, 1, 1].isnan().all()
        assert out[0].isnan().sum() == 16


def test_tiny_and_zero_rows_under_the_smallest_length_of_l2() -> None:
    from qkeel.kernels.triton.norm_rope import norm_rope

    x = torch.full((1, 1, 2, 8), 0.25)
    x[0, 0, 1] = 0.0
    x.requires_grad_()
    y = norm_rope(x, None, None, 2, 4.0, False)
    (grad,) = torch.autograd.grad(y[..., 0].sum(), x)
    assert y.flatten().tolist() == [0.0625] * 8 + [0.0] * 8
    assert grad.flatten().tolist() == [0.25] + [0.0] * 7 + [0.25] + [0.0] * 7


def test_three_and_four_over_their_root_mean_square() -> None:
    from qkeel.kernels.triton.norm_rope import norm_rope

    x = torch.tensor([3.0, 4.0] + [0.0] * 6).view(1, 1, 1, 8)
    y = norm_rope(x, torch.tensor(2.0), None, 1, 0.0, False)
    torch.testing.assert_close(y.flatten()[:2], torch.tensor([3.3941126, 4.5254834]))


@pytest.mark.usefixtures("_poisoned")
def test_every_number_is_written() -> None:
    assert torch.empty(3).isnan().all()
    for norm, layout in zip((RMSNorm(gain="dim"), LayerNorm(gain="head_dim"), L2Norm()), list(LAYOUTS)[2:]):
        case = given(norm, Rope(rotary=0.5), 2, 24, torch.float32, layout)
        found = run(encode.encoded, case, torch.float32, [torch.ones_like(x) for x in case[1:3]])
        assert all(x.isfinite().all() for x in found)


def test_twice_differentiated_a_norm_raises_and_a_rotation_does_not() -> None:
    from qkeel.kernels.triton.norm_rope import norm_rope

    x = torch.randn(1, 1, 2, 8, requires_grad=True)
    table = (torch.full((1, 1, 2, 4), 0.6), torch.full((1, 1, 2, 4), 0.8))
    (first,) = torch.autograd.grad(norm_rope(x, None, table, 0, 0.0, False).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0))
    (first,) = torch.autograd.grad(norm_rope(x, None, table, 1, 1e-6, False).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.slow
@pytest.mark.slow
def test_torch_accepts_every_operator() -> None:
    ops = torch.ops.qkeel_triton
    x, gain = torch.randn(1, 2, 1, 16, requires_grad=True), torch.rand(16).add(0.5).requires_grad_()
    cos, sin = torch.rand(1, 1, 1, 8), torch.rand(1, 1, 1, 8)
    for args in [(x, gain, cos, sin, 1, 1e-6, 1, False), (x, None, cos, sin, 0, 0.0, 2, False)]:
        torch.library.opcheck(ops.norm_rope.default, args)
    plain = [a.detach() for a in (x, gain, cos, sin)]
    torch.library.opcheck(ops.norm_rope_alone.default, (*plain, 1, 1e-6, 1))
    y, inverse = ops.norm_rope(*plain, 2, 1e-6, 1, False)
    torch.library.opcheck(
        ops.norm_rope_backward.default, (torch.randn_like(y), y, inverse, *plain[1:], 2, 1e-6, 1, False)
    )


def test_a_module_takes_it_and_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = qkeel.nn.Attention(32, 2, spec=qkeel.preset("qwen3"))
    x = torch.randn(1, 5, 32, requires_grad=True)
    seen = []
    inner = encode.operator_for(torch.device("cpu"))
    assert inner is not None

    def counted(*args: object) -> Tensor:
        seen.append(args)
        return inner(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "operator_for", lambda device: counted)
    ours = [module(x), *torch.autograd.grad(module(x).cos().sum(), [x, *module.parameters()])]
    assert len(seen) == 4
    monkeypatch.setattr(encode, "operator_for", lambda device: None)
    theirs = [module(x), *torch.autograd.grad(module(x).cos().sum(), [x, *module.parameters()])]
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_tensors_on_two_devices_and_types_it_does_not_hold_are_left_to_torch() -> None:
    spec, pos, x = (
        AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope()),
        torch.arange(3)[None],
        torch.randn(1, 2, 3, 8),
    )
    gains = spec.init_params(2, 2, 8)
    assert encode.fused(spec, x, x.to("meta"), pos, pos, gains) is None
    assert encode.fused(spec, x, x, pos, pos, {n: g.to("meta") for n, g in gains.items()}) is None
    for other in (x.double(), x.int(), x.to(torch.float8_e4m3fn), torch.randn(1, 2, 3, 12), torch.randn(1, 1, 1, 2048)):
        here = pos[:, : other.shape[2]]
        assert encode.fused(spec, other, other, here, here, gains) is None
    with pytest.raises(RuntimeError, match="device"):
        encoded(spec, x, x, pos, pos, {n: g.to("meta") for n, g in gains.items()})


@pytest.mark.slow
def test_a_compiled_module_is_one_graph_with_the_operator_in_it() -> None:
    # In a process of its own: the compiler does not go with checked annotations.
    command = [sys.executable, str(Path(__file__).with_name("whole_graph.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-5
