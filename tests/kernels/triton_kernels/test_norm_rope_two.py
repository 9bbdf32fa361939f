"""One launch for q and k gives the bits of two, there and back, and a module takes it."""

from __future__ import annotations

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

import qkeel
from qkeel.kernels import encode
from qkeel.kernels.triton import available
from qkeel.spec import AttentionSpec, L2Norm, LayerNorm, RMSNorm, Rope
from qkeel.spec.norm import NoNorm, Norm
from qkeel.spec.rope import NoPosition

from ..native.test_norm_rope import LAYOUTS, NORMS, POSITIONS, Given, check, given


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors take the way of CUDA tensors; the launches made, "two" for one of q and k together."""
    assert available.loaded()
    from qkeel.kernels.triton import norm_rope
    from qkeel.kernels.triton import norm_rope as norm_rope_two

    seen: list[str] = []

    def two(*how: object, **step: int) -> tuple[Tensor, Tensor]:
        seen.append("two")
        return norm_rope_two.norm_rope_two(*how, **step)  # type: ignore[arg-type]

    def one(*how: object, **step: int) -> Tensor:
        seen.append("one")
        return norm_rope.norm_rope(*how, **step)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "operator_for", lambda device: one)
    monkeypatch.setattr(encode, "both_operator", lambda device: two)
    monkeypatch.setattr(encode, "_keeps", lambda x, gain: gain is not None)
    return seen


def found(case: Given, apart: bool = False) -> list[Tensor]:
    """What q and k become, and the gradients of both and of all gains."""
    spec, q, k, params = case
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    gains = {n: p.detach().requires_grad_() for n, p in params.items() if n.endswith("norm")}
    pos = torch.arange(q.shape[2])[None]
    out = encode.fused(spec, *leaves, pos, pos.clone() if apart else pos, {**params, **gains})
    assert out is not None
    loss = sum(((i + 1.3) * x.float()).cos().sum() for i, x in enumerate(out))
    return [*out, *torch.autograd.grad(loss, [*leaves, *gains.values()])]


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("part", one_in(range(2), 2))
def test_the_bits_are_those_of_two_launches(part: int, launches: list[str]) -> None:
    for turn, norm in list(enumerate(NORMS))[part::2]:
        position = POSITIONS[turn % len(POSITIONS)]
        if isinstance(norm, NoNorm) and isinstance(position, NoPosition):
            continue
        dtype = (torch.float32, torch.float16)[turn % 2]
        case = given(norm, position, (1, 7)[turn % 2], (24, 64)[turn % 2], dtype, list(LAYOUTS)[turn % len(LAYOUTS)])
        launches.clear()
        ours = found(case)
        mixed = norm.sides != "qk" and len(norm.sides) == 1
        assert launches == (["one", "one"] if mixed else ["two"]), norm
        if not mixed and not isinstance(position, NoPosition):
            for a, b in zip(ours, found(case, apart=True), strict=True):
                assert torch.equal(a, b), (norm, position)


@pytest.mark.slow
@pytest.mark.parametrize("part", one_in(range(4), 4))
def test_interleaved_pairs_have_the_numbers_of_the_definition(part: int, launches: list[str]) -> None:
    for turn, norm in list(enumerate(NORMS))[part::4]:
        position = Rope(pairing="interleaved", rotary=(1.0, 0.5)[turn % 2])
        case = given(norm, position, (5, 1)[turn % 2], (24, 16)[turn % 2], torch.float32, list(LAYOUTS)[turn % 5])
        check(case, torch.float32, f"{norm} {position.formula()}")
        for a, b in zip(found(case), found(case, apart=True), strict=True):
            assert torch.equal(a, b), (norm, position)
        launches.clear()
        found(case)
        assert launches == (["one", "one"] if norm.sides != "qk" and len(norm.sides) == 1 else ["two"]), norm


def test_nan_stays_in_its_row_and_other_widths_and_types_take_two_launches(launches: list[str]) -> None:
    for norm in (RMSNorm(), L2Norm(), LayerNorm()):
        spec, q, k, params = given(norm, Rope(), 3, 16, torch.float32)
        k[0, 1, 2, 3] = torch.nan
        pos = torch.arange(3)[None]
        out = encode.fused(spec, q, k, pos, pos, params)
        assert out is not None
        assert out[0].isfinite().all()
        assert out[1].isnan().sum() == out[1][0, 1, 2].isnan().sum() == 16
    assert set(launches) == {"two"}
    launches.clear()
    assert encode.fused(spec, q, k.half(), pos, pos, params) is not None
    assert launches == ["one", "one"]


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
def test_a_norm_over_all_heads_of_a_token_is_that_of_the_definition(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide: list[Norm] = [kind(over="layer", gain=gain) for kind in (RMSNorm, LayerNorm) for gain in ("none", "head_dim")]
    wide += [
        RMSNorm(over="layer", gain="one_plus_dim"),
        L2Norm(over="layer", gain="head"),
        L2Norm(over="layer", eps=30.0),
    ]
    positions = [Rope(), Rope(pairing="interleaved"), NoPosition(), Rope(rotary=0.5, pairing="interleaved")]
    for turn, norm in enumerate(wide):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[turn % 3]
        keeps = turn % 2 == 0 or dtype != torch.float32
        monkeypatch.setattr(encode, "_keeps", lambda x, gain, keeps=keeps: keeps)
        t, d = (5, 1, 3)[turn % 3], (24, 16, 64)[turn % 3]
        position = positions[turn % 4]
        case = given(norm, position, t, d, dtype, list(LAYOUTS)[turn % len(LAYOUTS)])
        check(case, dtype, f"{norm} {position.formula()} {dtype}")
        if not isinstance(position, NoPosition):
            for a, b in zip(found(case), found(case, apart=True), strict=True):
                assert torch.equal(a, b), (norm, position)
    assert {"one", "two"} == set(launches)


@pytest.mark.usefixtures("launches", "_poisoned")
def test_a_norm_over_any_number_of_heads_is_of_its_token_alone_and_too_many_are_left_to_torch() -> None:
    for heads in ((1, 1), (70, 3)):  # more than a tile of heads has, and none that it fills
        spec = AttentionSpec(norm=LayerNorm(over="layer", gain="head_dim"), position=Rope())
        q, k = (torch.randn(2, 2, h, 16).transpose(1, 2) for h in heads)
        check((spec, q, k, spec.init_params(*heads, 16)), torch.float32, f"{heads}")
    q[0, 1, 1, 3] = torch.nan
    pos = torch.arange(2)[None]
    out = encode.fused(spec, q, k, pos, pos, spec.init_params(70, 3, 16))
    assert out is not None
    assert out[0].isnan().sum() == out[0][0, :, 1].isnan().sum() == 70 * 16
    spec = AttentionSpec(norm=RMSNorm(over="layer", gain="none"))
    for heads, d in ((70, 128), (1024, 8)):
        assert (
            encode.fused(spec, torch.randn(1, heads, 1, d), torch.randn(1, 2, 1, d), pos[:, :1], pos[:, :1], {}) is None
        )


def test_a_rotation_is_differentiable_twice_and_a_norm_once(launches: list[str]) -> None:
    pos = torch.arange(4)[None]
    for norm in (NoNorm(), RMSNorm()):
        spec, q, k, params = given(norm, Rope(), 4, 8, torch.float32)
        q, k = q.requires_grad_(), k.requires_grad_()
        out = encode.fused(spec, q, k, pos, pos, params)
        assert out is not None
        first = torch.autograd.grad(sum(x.square().sum() for x in out), [q, k], create_graph=True)
        total = sum(x.sum() for x in first)
        if isinstance(norm, NoNorm):
            for x in torch.autograd.grad(total, [q, k]):
                torch.testing.assert_close(x, torch.full_like(x, 2.0))
        else:
            with pytest.raises(RuntimeError, match="differentiated once"):
                torch.autograd.grad(total, [q, k])


@pytest.mark.slow
@pytest.mark.slow
def test_torch_accepts_the_operators(launches: list[str]) -> None:
    ops = torch.ops.qkeel_triton
    q, k = torch.randn(1, 2, 2, 16, requires_grad=True), torch.randn(1, 1, 2, 16, requires_grad=True)
    gains = [torch.rand(16).add(0.5).requires_grad_() for _ in "qk"]
    table = torch.rand(1, 1, 2, 8), torch.rand(1, 1, 2, 8)
    torch.library.opcheck(ops.norm_rope_two.default, (q, k, *gains, *table, 1, 1, 1e-6, 1, True, False, True))
    torch.library.opcheck(ops.norm_rope_two.default, (q, k, None, None, *table, 0, 0, 0.0, 2, False, False, True))
    plain = [x.detach() for x in (q, k, *gains)]
    y, z, *inverses = ops.norm_rope_two(*plain, *table, 1, 1, 1e-6, 1, True, True, True)
    back = (
        torch.randn_like(y),
        torch.randn_like(z),
        *plain[:2],
        *inverses,
        *plain[2:],
        *table,
        1,
        1,
        1e-6,
        1,
        True,
        True,
    )
    torch.library.opcheck(ops.norm_rope_two_backward.default, back)


def test_a_module_takes_one_launch_and_gives_the_numbers_of_torch(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in (qkeel.preset("qwen3"), AttentionSpec(position=Rope())):
        module, x = qkeel.nn.Attention(32, 2, spec=spec), torch.randn(1, 5, 32, requires_grad=True)
        with monkeypatch.context() as patch:
            launches.clear()
            ours = [module(x), *torch.autograd.grad(module(x).cos().sum(), [x, *module.parameters()])]
            assert launches == ["two", "two"]
            patch.setattr(encode, "operator_for", lambda device: None)
            theirs = [module(x), *torch.autograd.grad(module(x).cos().sum(), [x, *module.parameters()])]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
