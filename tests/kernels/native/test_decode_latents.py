"""Latents that all heads share, decoded in one read: the numbers of the oracle, with a factor per head and key."""

from __future__ import annotations

import dataclasses
import resource
import shutil
from collections.abc import Callable

import pytest
import torch
from tests.quick import one_in
from torch import Tensor

from qkeel import reference
from qkeel.kernels import compiled_attention as decode
from qkeel.nn import MLA, LatentSizes, mla
from qkeel.nn.mla import attend_latents
from qkeel.spec import AttentionSpec, InverseSqrt, Learned, LogN, RMSNorm, Sigmoid, Softcap
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.logits import Cap, NoCap
from qkeel.spec.rope import SlidingWindow

KEYS = [1, 7, 64, 129, 512, 2048]
# batch, heads, queries, latent, rotated: panels of the microkernel whole and not, dot products at most eight
SHAPES = [(1, 16, 1, 256, 64), (2, 3, 2, 16, 8), (2, 24, 1, 32, 16), (1, 40, 3, 72, 24), (1, 128, 1, 16, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMULA = 24  # the head size that the scale goes by


@pytest.fixture(autouse=True)
def _compiled(_on: None) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert decode.decode_ready()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call with latents whether the kernel took it."""
    seen: list[bool] = []
    whole = decode.latents

    def watched(*args: object) -> Tensor | None:
        out = whole(*args)  # type: ignore[arg-type]
        seen.append(out is not None)
        return out

    monkeypatch.setattr(mla, "latents", watched)
    return seen


def made(shape: tuple[int, ...], keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents with room behind, and factors of each head."""
    b, h, t, latent, rotated = shape
    room = torch.full((b, 1, keys + 3, latent + rotated), torch.nan, dtype=dtype)
    room[:, :, :keys] = torch.randn(b, 1, keys, latent + rotated)
    factors = torch.full((b, h, keys + 3), torch.nan)
    factors[..., :keys] = torch.rand(b, h, keys) + 0.2
    return 4 * torch.randn(b, h, t, latent + rotated).to(dtype), room[:, :, :keys], factors[..., :keys]


def of(shape: tuple[int, ...], q: Tensor, held: Tensor, spec: AttentionSpec, **who: object) -> AttentionCall:
    return make_call(spec, q, held, held[..., : shape[3]], **who)  # type: ignore[arg-type]


def check(call: AttentionCall, inverse: Tensor | None, told: str = "") -> Tensor:
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number)."""
    h = call.q.shape[1]
    q, k, v = (x.double() for x in (call.q, call.k.expand(-1, h, -1, -1), call.v.expand(-1, h, -1, -1)))
    if inverse is not None:
        k = k * inverse[..., None].double()
    # The oracle's scale is that of its q's size.
    scale = call.spec.factor(call.pos_q, FORMULA, call.params, torch.float64)
    exact = dataclasses.replace(call, q=q * scale * call.q.shape[-1] ** 0.5, k=k, v=v, params={})
    exact = dataclasses.replace(exact, spec=call.spec.replace(scale=InverseSqrt()))
    truth = reference.attend_call(exact).out
    ours = attend_latents(call, inverse, FORMULA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        theirs = attend_latents(call, inverse, FORMULA)
    allowed = 2 * ((theirs - truth).abs().max() + torch.finfo(call.q.dtype).eps * truth.abs().max())
    assert ours.dtype == call.q.dtype
    assert (ours.double() - truth).abs().max() <= allowed, told
    return ours


@pytest.mark.parametrize("shape", one_in([pytest.param(shape, id=str(shape)) for shape in SHAPES], 2))
@torch.no_grad()
def test_every_length_and_dtype_with_factors_and_without(shape: tuple[int, ...], taken: list[bool]) -> None:
    calls = 0
    for i, keys in enumerate(s for s in KEYS if s >= shape[2]):
        for j, dtype in enumerate(DTYPES):
            q, held, inverse = made(shape, keys, dtype)
            factors = (None, inverse, inverse[:, :1])[(i + j) % 3]
            spec = AttentionSpec(cap=Softcap(3.0)) if (i + j) % 4 == 0 else AttentionSpec()
            check(of(shape, q, held, spec, causal=bool(i % 2)), factors, f"{keys} {dtype}")
            calls += 1
    assert taken == [True, False] * calls


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
@torch.no_grad()
def test_masks_windows_and_positions_hide_what_they_hide(shape: tuple[int, ...], taken: list[bool]) -> None:
    (b, h, t, *_), keys = shape, 700
    q, held, inverse = made(shape, keys)
    spec = AttentionSpec()
    for size in ((b, 1, 1, keys), (1, h, t, keys), (b, h, t, keys), (1, 1, t, 1)):
        check(of(shape, q, held, spec, mask=torch.rand(size) < 0.5), inverse)
    for window in (1, 40, 600):
        for causal in (True, False):
            near = AttentionSpec(position=SlidingWindow(window=window))
            check(of(shape, q, held, near, causal=causal), inverse)
    pos_k = torch.arange(keys)[None] // 2
    check(of(shape, q, held, spec, pos_q=pos_k[:, -t:] - 3, pos_k=pos_k), inverse)
    check(of(shape, q, held, AttentionSpec(scale=LogN(train_length=4))), inverse)
    learned = AttentionSpec(scale=Learned(init=0.7, per="head"))
    check(of(shape, q, held, learned, params=learned.init_params(h, 1, q.shape[-1])), inverse)
    assert taken == [True, False] * 13


@torch.no_grad()
def test_large_logits_rows_without_keys_and_missing_numbers() -> None:
    for shape in SHAPES[1:3]:
        q, held, inverse = made(shape, 130)
        for size in (1e4, -1e4, 1e-4):
            check(of(shape, size / 30 * q, held, AttentionSpec()), inverse)
        seen = torch.ones(shape[0], 1, 1, 130, dtype=torch.bool)
        seen[1] = False
        out = check(of(shape, q, held, AttentionSpec(), mask=seen), inverse)
        assert not out[1].any()
        held[0, 0, 5] = torch.nan
        out = attend_latents(of(shape, q, held, AttentionSpec()), inverse, FORMULA)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        alone = of(shape, q, held[:, :, 3:6], AttentionSpec(), mask=torch.tensor([False, False, True]), causal=False)
        assert attend_latents(alone, None, FORMULA)[0].isnan().all(), "also if nothing else is seen"


@torch.no_grad()
def test_threads_change_no_bit(assert_threads_change_no_bit: Callable[..., None]) -> None:
    for shape in SHAPES[1:4]:
        q, held, inverse = made(shape, 3000)
        call = of(shape, q, held, AttentionSpec())
        assert_threads_change_no_bit(lambda c=call, over=inverse: [attend_latents(c, over, FORMULA)])


@pytest.mark.usefixtures("_poisoned")
@torch.no_grad()
def test_every_number_is_written() -> None:
    assert torch.empty(3).isnan().all()
    for shape in SHAPES:
        q, held, inverse = made(shape, 61)
        for causal in (True, False):
            assert attend_latents(of(shape, q, held, AttentionSpec(), causal=causal), inverse, FORMULA).isfinite().all()


def test_torch_accepts_the_operator_and_it_refuses_wrong_factors() -> None:
    op, (q, held, inverse) = torch.ops.qkeel_native.decode, made(SHAPES[2], 11)
    v = held[..., :32]
    torch.library.opcheck(op.default, (q, held, v, None, inverse[:, :1], 0.3, 2.0, True, 4))
    for wrong in (inverse.double(), inverse[..., 1:], inverse[:, :5], inverse[0]):
        with pytest.raises(RuntimeError):
            op(q, held, v, None, wrong, 1.0, 0.0, True, 0)
    with pytest.raises(RuntimeError, match="negative window or cap"):
        op(q, held, v, None, None, 1.0, -1.0, True, 0)


def test_ten_thousand_calls_keep_no_memory() -> None:
    q, held, inverse = made(SHAPES[2], 70, torch.bfloat16)

    def call(times: int) -> int:
        for _ in range(times):
            torch.ops.qkeel_native.decode(q, held, held[..., :32], None, inverse, 1.0, 0.0, True, 0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(500)
    assert call(10_000) - before < 8 * 1024


SIZES = LatentSizes(q_latent=48, kv_latent=64, rope_dim=16, nope_dim=32, value_dim=32)


@pytest.mark.parametrize("cap", [NoCap(), Softcap(2.0)])
@torch.no_grad()
def test_a_module_decodes_with_it_and_says_what_it_says_at_once(cap: Cap, taken: list[bool]) -> None:
    spec = AttentionSpec(norm=RMSNorm(gain="dim"), cap=cap)
    for heads in (4, 16):
        module = MLA(64, heads, sizes=SIZES, spec=spec, latent_norm=True).eval()
        x = torch.randn(2, 20, 64)
        cache, parts = module.new_cache(), []
        for start, end in ((0, 9), (9, 13), *((i, i + 1) for i in range(13, 20))):
            parts.append(module(x[:, start:end], cache=cache))
        torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=1e-5, atol=3e-6)
    assert taken == [True] * 16


def test_what_it_cannot_do_stays_with_torch(taken: list[bool]) -> None:
    shape = SHAPES[1]
    q, held, inverse = made(shape, 9)
    call, spec = of(shape, q, held, AttentionSpec()), AttentionSpec()
    odd = make_call(spec, q[..., :20], held[..., :20], held[..., :16])
    wide = make_call(spec, q.double(), held.double(), held[..., :16].double())
    for other, factors in (
        (odd, None),
        (wide, None),
        (call, inverse.double()),
        (of(shape, q.clone().requires_grad_(), held, spec), inverse),
        (of(shape, q, held, spec, mask=torch.zeros(9)), inverse),
        (of(shape, q, held, spec, dropout=0.5), inverse),
        (of(shape, q, held, AttentionSpec(normalizer=Sigmoid(bias=-2.0))), inverse),
    ):
        attend_latents(other, factors, FORMULA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        attend_latents(call, inverse, FORMULA)
    assert not any(taken)
    attend_latents(call, inverse, FORMULA)
    assert taken[-1]
