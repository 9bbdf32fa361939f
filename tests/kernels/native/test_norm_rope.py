"""The compiled pass gives the numbers of `AttentionSpec.encode`, whose float64 run is the truth here."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.quick import one_in
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

import qkeel
from qkeel.kernels import encode
from qkeel.kernels.encode import encoded
from qkeel.kernels.native import operators
from qkeel.spec import PI, AttentionSpec, L2Norm, LayerNorm, RMSNorm, Rope, YaRN
from qkeel.spec.norm import NoNorm, Norm
from qkeel.spec.rope import NoPosition, Position
from qkeel.spec.slot import Params

pytestmark = pytest.mark.usefixtures("library")

NORMS: list[Norm] = [
    NoNorm(),
    *(RMSNorm(gain=gain) for gain in ("none", "dim", "one_plus_dim", "head_dim", "scalar", "head")),  # type: ignore[arg-type]
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
LENGTHS = [1, 7, 64, 129, 512]
SIZES = [64, 8, 128, 24, 40]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads beside each other": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads apart": lambda x: x.contiguous(),
    "part of a fused projection": lambda x: (
        torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
    ),
    "dimensions apart": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
}
Given = tuple[AttentionSpec, Tensor, Tensor, Params]


def given(norm: Norm, position: Position, t: int, d: int, dtype: torch.dtype, layout: str = "heads apart") -> Given:
    q, k = (LAYOUTS[layout](2 * torch.randn(2, h, t, d).to(dtype)) for h in (4, 2))
    spec = AttentionSpec(norm=norm, position=position)
    made = spec.init_params(4, 2, d)
    return spec, q, k, {n: (p + 0.2 * torch.randn(p.shape)).to(dtype) for n, p in made.items()}


def run(
    how: Callable[..., tuple[Tensor, Tensor] | None], case: Given, dtype: torch.dtype, above: list[Tensor]
) -> list[Tensor]:
    """q̃, k̃ and the gradients of q, k and every gain."""
    spec, *qk, params = case
    q, k = (x.detach().to(dtype).requires_grad_() for x in qk)
    params = {n: p.detach().to(dtype).requires_grad_() for n, p in params.items()}
    pos = torch.arange(5, 5 + q.shape[2])[None]
    out = how(spec, q, k, pos, pos, params)
    assert out is not None
    above = [a.to(o.dtype) for a, o in zip(above, out)]
    return [*out, *torch.autograd.grad(out, [q, k, *params.values()], above)]


def torchs(spec: AttentionSpec, q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    ours = spec.encode(q, k, *rest)  # type: ignore[arg-type]
    return ours[0].to(q.dtype), ours[1].to(k.dtype)


def check(case: Given, dtype: torch.dtype, told: str) -> None:
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number).

    A gain's gradient is a sum over rows: there also the rounding of every term, as of independent errors. The result
    and the gradient from above are rounded to the dtype, so each term is.
    """
    layouts = torch.randint(len(LAYOUTS), (2,)).tolist()
    above = [list(LAYOUTS.values())[i](torch.randn(x.shape).to(x.dtype)) for i, x in zip(layouts, case[1:3])]
    truth, theirs = run(torchs, case, torch.float64, above), run(torchs, case, dtype, above)
    ours = run(encode.encoded, case, dtype, above)
    terms = sum((a.double() * o).square().sum() for a, o in zip(above, truth)).detach()  # type: ignore[union-attr]
    for i, (mine, other, true) in enumerate(zip(ours, theirs, truth)):
        assert mine.dtype == dtype
        own, size = (other - true).abs().max(), true.abs().max()
        summed = torch.finfo(dtype).eps * (terms / true.numel()).sqrt() if i >= 4 else 0.0
        allowed = 2 * (own + torch.finfo(dtype).eps * size + summed)
        assert (mine.double() - true).abs().max() <= allowed, f"{told}, number {i}"


@pytest.mark.parametrize("norm", one_in(NORMS, 2), ids=repr)
def test_every_norm_gain_length_and_layout(norm: Norm) -> None:
    for i, t in enumerate(LENGTHS):
        layout = list(LAYOUTS)[(i + NORMS.index(norm)) % len(LAYOUTS)]
        position = POSITIONS[0 if isinstance(norm, NoNorm) else (i + NORMS.index(norm)) % len(POSITIONS)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            case = given(norm, position, t, SIZES[i], dtype, layout)
            check(case, dtype, f"T {t}, d {SIZES[i]}, {layout}, {position.formula()}, {dtype}")


def test_gains_near_zero_and_zero_keep_their_gradients() -> None:
    for smallest in (0.0, 1e-30, 1e-4, -0.3):
        case = given(RMSNorm(gain="dim"), Rope(), 33, 64, torch.float32)
        case[3]["q_norm"][::5] = smallest
        check(case, torch.float32, f"gain {smallest}")


def test_a_gain_of_nan_shows() -> None:
    spec, q, k, params = given(RMSNorm(gain="dim"), Rope(), 3, 8, torch.float32)
    params["q_norm"][2] = torch.nan
    out = encode.fused(spec, q, k, torch.arange(3)[None], torch.arange(3)[None], params)
    assert out is not None
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


def test_positions_of_each_sequence_are_its_own() -> None:
    spec, q, k, params = given(RMSNorm(), Rope(), 6, 16, torch.float32)
    pos = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 7, 8, 9, 1, 0]])
    ours = encode.fused(spec, q, k, pos, pos, params)
    assert ours is not None
    torch.testing.assert_close(ours, spec.encode(q, k, pos, pos, params), rtol=0, atol=2e-6)


def test_a_rotation_before_a_norm_that_commutes_is_the_same() -> None:
    for norm in (RMSNorm(), L2Norm(gain="head"), RMSNorm(gain="scalar")):
        position = Rope(order="rotate_then_norm", pairing="half_reversed")
        check(given(norm, position, 9, 16, torch.float32), torch.float32, repr(norm))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(),
        AttentionSpec(norm=RMSNorm(over="layer")),
        AttentionSpec(norm=LayerNorm(gain="dim", bias=True), position=Rope()),
        AttentionSpec(norm=RMSNorm(), position=Rope(pairing="interleaved")),
        AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope(order="rotate_then_norm")),
        AttentionSpec(norm=LayerNorm(), position=Rope(order="rotate_then_norm")),
        qkeel.preset("qwen3").extrapolate("rerope", train_length=64, window=4),
    ],
    ids=lambda s: f"{s.norm.formula()}; {s.position.formula()}",
)
def test_what_is_not_for_it_is_left_to_torch_bit_for_bit(spec: AttentionSpec) -> None:
    q, k, pos = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.arange(3)[None]
    params = spec.init_params(2, 2, 8)
    assert encode.fused(spec, q, k, pos, pos, params) is None
    theirs = spec.encode(q, k, pos, pos, params)
    assert all(map(torch.equal, encoded(spec, q, k, pos, pos, params), theirs))


def test_shapes_dtypes_and_tensors_that_are_not_for_it_are_left_to_torch() -> None:
    spec, pos = AttentionSpec(norm=RMSNorm(), position=Rope()), torch.arange(3)[None]
    x = torch.randn(1, 2, 3, 8)
    for other in (torch.randn(1, 2, 3, 12), x.double(), x.to("meta"), torch.randn(1, 2, 3, 2048), x[:0]):
        assert encode.fused(spec, other, other, pos, pos, {}) is None

    def mapped(y: Tensor) -> Tensor:
        assert encode.fused(spec, y, y, pos, pos, {}) is None
        return encoded(spec, y, y, pos, pos, {})[0]

    torch.testing.assert_close(torch.func.vmap(mapped)(x[None])[0], spec.encode(x, x, pos, pos, {})[0])


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_change_no_bit(threads: int) -> None:
    case = given(RMSNorm(gain="dim"), Rope(), 300, 64, torch.float32, "heads beside each other")
    above = [torch.randn_like(x) for x in case[1:3]]
    one = run(encode.encoded, case, torch.float32, above)
    torch.set_num_threads(threads)
    try:
        many = run(encode.encoded, case, torch.float32, above)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, one, many))


@pytest.mark.usefixtures("_poisoned")
def test_every_number_is_written() -> None:
    assert torch.empty(3).isnan().all()
    for norm in (RMSNorm(gain="dim"), LayerNorm(gain="head_dim"), L2Norm()):
        for layout in LAYOUTS:
            case = given(norm, Rope(rotary=0.5), 7, 24, torch.float32, layout)
            found = run(encode.encoded, case, torch.float32, [torch.ones_like(x) for x in case[1:3]])
            assert all(x.isfinite().all() for x in found)


def test_a_tiny_row_under_the_smallest_length_has_the_gradient_of_a_division_by_it() -> None:
    x = torch.full((1, 1, 1, 8), 0.25, requires_grad=True)
    y = operators.norm_rope(x, None, None, 2, 4.0, False)
    (grad,) = torch.autograd.grad(y[..., 0].sum(), x)
    assert torch.equal(y, torch.full_like(y, 0.0625))
    assert grad.flatten().tolist() == [0.25] + [0.0] * 7


def test_three_and_four_over_their_root_mean_square() -> None:
    x = torch.tensor([3.0, 4.0] + [0.0] * 6).view(1, 1, 1, 8)
    y = operators.norm_rope(x, torch.tensor(2.0), None, 1, 0.0, False)
    # √(25 / 8) = 1.767767
    torch.testing.assert_close(y.flatten()[:2], torch.tensor([3.3941126, 4.5254834]))


def test_twice_differentiated_a_norm_raises_and_a_rotation_does_not() -> None:
    x = torch.randn(1, 1, 2, 8, requires_grad=True)
    table = (torch.full((1, 1, 2, 4), 0.6), torch.full((1, 1, 2, 4), 0.8))
    (first,) = torch.autograd.grad(
        operators.norm_rope(x, None, table, 0, 0.0, False).square().sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0))
    (first,) = torch.autograd.grad(
        operators.norm_rope(x, None, table, 1, 1e-6, False).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.slow
def test_torch_accepts_every_operator() -> None:
    ops = torch.ops.qkeel_native
    x, gain = torch.randn(2, 3, 5, 16, requires_grad=True), torch.rand(16).add(0.5).requires_grad_()
    cos, sin = torch.rand(1, 1, 5, 8), torch.rand(1, 1, 5, 8)
    for args in [
        (x, gain, cos, sin, 1, 1e-6, False),
        (x, gain, cos, sin, 3, 1e-6, True),
        (x, None, cos, sin, 0, 0.0, False),
    ]:
        torch.library.opcheck(ops.norm_rope.default, args)
    plain = [a.detach() for a in (x, gain, cos, sin)]
    torch.library.opcheck(ops.norm_rope_alone.default, (*plain, 1, 1e-6))
    seen = ("test_schema", "test_autograd_registration")  # a number of the host has no shape to tell
    torch.library.opcheck(ops.gain_spread.default, (plain[1],), test_utils=seen)
    torch.library.opcheck(
        ops.norm_rope_two.default, (plain[0], plain[0][:, :1], plain[1], None, *plain[2:], 1, 0, 1e-6)
    )
    y, inverse = ops.norm_rope(*plain, 2, 1e-6, False)
    torch.library.opcheck(ops.norm_rope_backward.default, (torch.randn_like(y), y, inverse, *plain[1:], 2, 1e-6, False))


def test_wrong_shapes_and_dtypes_raise_and_do_not_crash() -> None:
    ops, x = torch.ops.qkeel_native, torch.randn(1, 2, 3, 8)
    table = torch.rand(1, 1, 3, 4)
    for args in [
        (x[..., :6], None, None, None, 1, 0.0, False),
        (x.double(), None, None, None, 1, 0.0, False),
        (x, None, table, None, 1, 0.0, False),
        (x, None, table[:, :, :2], table[:, :, :2], 1, 0.0, False),
        (x, None, table.double(), table.double(), 1, 0.0, False),
        (x, torch.rand(7), None, None, 1, 0.0, False),
    ]:
        with pytest.raises(RuntimeError):
            ops.norm_rope(*args)


@pytest.mark.slow
def test_ten_thousand_calls_keep_no_memory() -> None:
    x = torch.randn(1, 2, 64, 64, requires_grad=True)
    gain = torch.ones(64, requires_grad=True)

    def call(times: int) -> int:
        for _ in range(times):
            operators.norm_rope(x, gain, None, 1, 1e-6, False).sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(500)
    assert call(10_000) - before < 16 * 1024  # one call's tensors are 130 KiB


@pytest.mark.slow
def test_ten_thousand_calls_past_the_dispatcher_keep_no_memory() -> None:
    native, x, gain = operators.functions(), torch.randn(1, 2, 64, 64), torch.ones(64)
    assert native is not None

    def call(times: int) -> int:
        for _ in range(times):
            found = native.encode(x.clone(), x.clone(), gain, gain, None, None, 1, 1, 1e-6)
            assert found is not None
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = call(500)
    assert call(10_000) - before < 16 * 1024


def test_a_qk_norm_keeps_next_to_nothing_for_backward() -> None:
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
        kept[name] = sum(n for at, n in seen.items() if at not in weights) / (4 * 2 * 256 * 128)
    assert kept["qwen3"] - kept["baseline"] <= 0.1


def test_a_cached_token_has_the_bits_it_has_in_a_whole_sequence(library: Path) -> None:
    spec = qkeel.preset("qwen3")
    q, k, params = torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64), spec.init_params(2, 2, 64)
    pos = torch.arange(9)[None]
    whole = encoded(spec, q, k, pos, pos, params)
    for t in range(9):
        part = encoded(spec, q[:, :, t : t + 1], k[:, :, t : t + 1], pos[:, t : t + 1], pos[:, t : t + 1], params)
        assert all(torch.equal(a[:, :, t : t + 1], b) for a, b in zip(whole, part))


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@torch.no_grad()
def test_one_token_has_the_bits_of_a_sequence_by_one_operator(norm: Norm) -> None:
    for position in (*POSITIONS[: 1 if isinstance(norm, NoNorm) else 5], Rope(pairing="half_reversed")):
        spec, q, k, params = given(norm, position, 1, 64, torch.float32)
        for place in (0, 3, 1000):
            pos = torch.tensor([[place]])
            alone = encode.fused(spec, q, k, pos, pos, params)
            two = torch.tensor([[place, place]])
            whole = encode.fused(spec, q.expand(-1, -1, 2, -1), k.expand(-1, -1, 2, -1), two, two, params)
            assert alone is not None
            assert whole is not None
            assert all(torch.equal(a, b[:, :, :1]) for a, b in zip(alone, whole))
            torch.testing.assert_close(alone, torchs(spec, q, k, pos, pos, params), rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_a_place_between_two_tokens_is_turned_by_its_own_angle() -> None:
    spec, q, k, params = given(RMSNorm(), Rope(), 1, 16, torch.float32)
    pos = torch.tensor([[2.5]])
    ours = encode.fused(spec, q, k, pos, pos, params)
    assert ours is not None
    torch.testing.assert_close(ours, torchs(spec, q, k, pos, pos, params), rtol=1e-5, atol=2e-6)


def test_interpolated_positions_are_turned_by_their_own_angles() -> None:
    check(given(RMSNorm(gain="dim"), Rope(stretch=PI(factor=4)), 20, 64, torch.float32), torch.float32, "PI")


def test_gains_of_heads_may_be_those_of_a_stack_of_runs() -> None:
    pos = torch.arange(5)[None]
    q, k, weight = torch.randn(1, 4, 5, 16), torch.randn(1, 4, 5, 16), torch.rand(4, 16) + 0.5
    spec = AttentionSpec(norm=RMSNorm(gain="dim"), position=Rope())
    for track in (True, False):
        with torch.set_grad_enabled(track):
            wide = dict.fromkeys(("q_norm", "k_norm"), weight[:, None].requires_grad_(track))
            found = encode.fused(spec, q, k, pos, pos, wide)
        assert found is not None
        for mine, true in zip(found, spec.encode(q, k, pos, pos, wide)):
            torch.testing.assert_close(mine, true)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of make_dual
def test_past_the_dispatcher_modes_transforms_tangents_and_gradients_are_left_to_the_operators() -> None:
    native, x, y = operators.functions(), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    if native is None:
        pytest.skip("compiled where Python's headers are missing")
    args = (None, None, None, None, 1, 1, 1e-6)
    assert native.encode(x, y, *args) is not None
    assert native.encode(torch.nn.Buffer(x), y.to("meta"), *args) is None
    assert native.encode(x.clone().requires_grad_(), y, *args) is None
    assert native.place(torch.tensor([1.0])) is None
    assert native.place(torch.tensor([[7]])) == 7
    with BaseTorchFunctionMode():
        assert native.encode(x, y, *args) is None

    def mapped(z: Tensor) -> Tensor:
        assert native is not None
        assert native.encode(z, z, *args) is None
        return z

    torch.func.vmap(mapped)(x[None])
    with torch.autograd.forward_ad.dual_level():
        assert native.encode(torch.autograd.forward_ad.make_dual(x, y), y, *args) is None
