"""Attention of a few tokens to a cache of keys or of latents: each read once, the numbers those of the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.kernels.harness import DTYPES, laid
from tests.quick import one_in
from torch import Tensor

from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.kernels.decoding import compiled as decode
from qkeel.kernels.norm_rope.encode import encoded
from qkeel.nn import MLA, LatentSizes, mla
from qkeel.nn.mla import attend_latents
from qkeel.ops import KERNELS, choose, run
from qkeel.spec import (
    AttentionSpec,
    InverseSqrt,
    Learned,
    LogN,
    RMSNorm,
    Rope,
    Sigmoid,
    Softcap,
)
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.logits import Cap, NoCap
from qkeel.spec.rope import NoPosition, SlidingWindow

pytestmark = pytest.mark.usefixtures("_compiled")
KEYS = [1, 7, 64, 129, 512, 2048]
# query heads, key heads, queries, size of q and k, size of v
SHAPES = [
    (4, 4, 1, 64, 64),
    (8, 2, 1, 64, 64),
    (4, 1, 3, 128, 24),
    (6, 3, 2, 8, 40),
    (32, 1, 1, 72, 136),
]
# batch, heads, queries, latent, rotated: panels of the microkernel whole and not, dot products at most eight
LATENTS = [
    (1, 16, 1, 256, 64),
    (2, 3, 2, 16, 8),
    (2, 24, 1, 32, 16),
    (1, 40, 3, 72, 24),
    (1, 128, 1, 16, 8),
]
FORMULA = 24  # the head size that the scale of latents goes by
PLAIN = AttentionSpec()


@pytest.fixture
def _compiled(library: object) -> None:
    assert decode.ready()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call whether the kernel took it."""
    seen: list[bool] = []
    whole, of_latents = decode.Decode.__call__, decode.latents

    def watched(self: decode.Decode, call: AttentionCall) -> Tensor:
        seen.append(True)
        return whole(self, call)

    def with_latents(*given: object) -> Tensor | None:
        out = of_latents(*given)  # type: ignore[arg-type]
        seen.append(out is not None)
        return out

    monkeypatch.setattr(decode.Decode, "__call__", watched)
    monkeypatch.setattr(mla, "latents", with_latents)
    return seen


def made(
    shape: tuple[int, ...],
    keys: int,
    dtype: torch.dtype = torch.float32,
    layout: int = 1,
) -> list[Tensor]:
    """q, k and v in layouts of their own."""
    h, g, t, d, width = shape
    sizes = ((2, h, t, d), (2, g, keys, d), (2, g, keys, width))
    return [laid(torch.randn(size).to(dtype), layout) for size in sizes]


def held(
    shape: tuple[int, ...], keys: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents with room behind, and factors of each head."""
    b, h, t, latent, rotated = shape
    room = torch.full((b, 1, keys + 3, latent + rotated), torch.nan, dtype=dtype)
    room[:, :, :keys] = torch.randn(b, 1, keys, latent + rotated)
    factors = torch.full((b, h, keys + 3), torch.nan)
    factors[..., :keys] = torch.rand(b, h, keys) + 0.2
    return (
        4 * torch.randn(b, h, t, latent + rotated).to(dtype),
        room[:, :, :keys],
        factors[..., :keys],
    )


def near(ours: Tensor, theirs: Tensor, truth: Tensor, told: str) -> Tensor:
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number)."""
    allowed = 2 * (
        (theirs - truth).abs().max() + torch.finfo(ours.dtype).eps * truth.abs().max()
    )
    assert ours.dtype == theirs.dtype
    assert (ours.double() - truth).abs().max() <= allowed, told
    return ours


def check(call: AttentionCall, told: str = "") -> Tensor:
    exact = {name: getattr(call, name).double() for name in "qkv"}
    truth = reference.attend_call(dataclasses.replace(call, **exact)).out
    return near(run(call, "decode"), run(call, "sdpa"), truth, told)


def of(
    shape: tuple[int, ...],
    q: Tensor,
    kept: Tensor,
    spec: AttentionSpec = PLAIN,
    **who: object,
) -> AttentionCall:
    return make_call(spec, q, kept, kept[..., : shape[3]], **who)  # type: ignore[arg-type]


def check_latents(
    call: AttentionCall, inverse: Tensor | None, told: str = ""
) -> Tensor:
    """Against the oracle with the keys that latents and factors stand for; its scale is that of its q's size."""
    h = call.q.shape[1]
    q, k, v = (
        x.double()
        for x in (call.q, call.k.expand(-1, h, -1, -1), call.v.expand(-1, h, -1, -1))
    )
    if inverse is not None:
        k = k * inverse[..., None].double()
    scale = call.spec.factor(call.pos_q, FORMULA, call.params, torch.float64)
    exact = dataclasses.replace(
        call, q=q * scale * call.q.shape[-1] ** 0.5, k=k, v=v, params={}
    )
    exact = dataclasses.replace(exact, spec=call.spec.replace(scale=InverseSqrt()))
    ours = attend_latents(call, inverse, FORMULA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        theirs = attend_latents(call, inverse, FORMULA)
    return near(ours, theirs, reference.attend_call(exact).out, told)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_every_length_dtype_and_layout(
    shape: tuple[int, ...], taken: list[bool]
) -> None:
    lengths = [s for s in KEYS if s > shape[2]]
    for i, keys in enumerate(lengths):
        for j, dtype in enumerate(DTYPES):
            check(
                make_call(PLAIN, *made(shape, keys, dtype, i + j), causal=bool(i % 2)),
                f"{keys} {dtype} {i + j}",
            )
    assert len(taken) == len(lengths) * len(DTYPES)


@pytest.mark.parametrize(
    "shape", one_in([pytest.param(shape, id=str(shape)) for shape in LATENTS], 2)
)
@torch.no_grad()
def test_latents_of_every_length_and_dtype_with_factors_and_without(
    shape: tuple[int, ...], taken: list[bool]
) -> None:
    for i, keys in enumerate(s for s in KEYS if s >= shape[2]):
        for j, dtype in enumerate(DTYPES):
            q, kept, inverse = held(shape, keys, dtype)
            factors = (None, inverse, inverse[:, :1])[(i + j) % 3]
            spec = AttentionSpec(cap=Softcap(3.0)) if (i + j) % 4 == 0 else PLAIN
            check_latents(
                of(shape, q, kept, spec, causal=bool(i % 2)), factors, f"{keys} {dtype}"
            )
    assert taken == [True, False] * (len(taken) // 2)


def checks(shape: tuple[int, ...], keys: int, latent: bool) -> Callable[..., Tensor]:
    """Returns a check of one q, k and v, or of latents, under any spec and visibility."""
    q, k, v = held(shape, keys) if latent else made(shape, keys)

    def check_one(spec: AttentionSpec = PLAIN, **who: object) -> Tensor:
        if latent:
            return check_latents(of(shape, q, k, spec, **who), v, f"{who}")
        return check(make_call(spec, q, k, v, **who), f"{who}")  # type: ignore[arg-type]

    return check_one


@torch.no_grad()
def test_masks_windows_and_positions_hide_what_they_hide(taken: list[bool]) -> None:
    keys = 700
    padded = torch.ones(2, keys, dtype=torch.bool)
    padded[0, :650], padded[1] = False, False
    for shape, latent in ((SHAPES[3], False), (LATENTS[1], True), (LATENTS[3], True)):
        taken.clear()
        one = checks(shape, keys, latent)
        b, h, t = shape[:3] if latent else (2, shape[0], shape[2])
        padding = (
            (b, 1, 1) if b == t else (b,)
        )  # where [b keys] could be [t keys], it is refused
        sizes = (
            (*padding, keys),
            (b, 1, 1, keys),
            (1, h, t, keys),
            (b, h, t, keys),
            (t, 1),
        )
        crossed = torch.rand(keys, b, 1, 1).permute(1, 2, 3, 0) < 0.5
        for mask in (
            *(torch.rand(size) < 0.5 for size in sizes),
            padded[:b].view(*padding, keys),
            crossed,
        ):
            assert one(mask=mask).isfinite().all()
        for window in (1, 5, 40, 600):
            for causal in (True, False):
                one(AttentionSpec(position=SlidingWindow(window=window)), causal=causal)
        pos_k = torch.arange(keys)[None] // 2
        for spec in (PLAIN, AttentionSpec(position=SlidingWindow(window=3))):
            one(spec, pos_q=pos_k[:, -t:] - 3, pos_k=pos_k)
        one(AttentionSpec(scale=LogN(train_length=4)))
        learned = AttentionSpec(scale=Learned(init=0.7, per="head"))
        one(
            learned,
            params=learned.init_params(
                h, 1 if latent else shape[1], sum(shape[3:]) if latent else shape[3]
            ),
        )
        assert taken == ([True, False] if latent else [True]) * 19
    blind = run(
        make_call(PLAIN, *made(SHAPES[3], keys), mask=padded[:, None, None]), "decode"
    )
    assert not blind[1].any()


@torch.no_grad()
def test_positions_of_each_sequence_decide_which_keys_are_visible(
    taken: list[bool],
) -> None:
    for spec in (
        PLAIN,
        AttentionSpec(position=SlidingWindow(window=3)),
        AttentionSpec(position=Rope()),
    ):
        pos_k = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
        check(
            make_call(
                spec, *made(SHAPES[1], 9), pos_q=torch.tensor([[4], [7]]), pos_k=pos_k
            )
        )
    assert len(taken) == 3


@torch.no_grad()
def test_large_and_tiny_logits_rows_without_keys_and_missing_numbers() -> None:
    q, k, v = made(SHAPES[1], 600)
    for size in (1e4, -1e4, 1e-4):
        check(make_call(PLAIN, q * size / 30, k, v))
    k[0, 0, 7] = torch.nan
    out = run(make_call(PLAIN, q, k, v), "decode")
    assert out[0, :4].isnan().all()
    assert out[0, 4:].isfinite().all()
    assert out[1].isfinite().all()
    hidden = torch.ones(2, 600, dtype=torch.bool)
    hidden[:, 7] = False
    assert run(make_call(PLAIN, q, k, v, mask=hidden), "decode").isfinite().all()
    for shape in LATENTS[1:3]:
        q, kept, inverse = held(shape, 130)
        for size in (1e4, -1e4, 1e-4):
            check_latents(of(shape, size / 30 * q, kept), inverse)
        seen = torch.ones(shape[0], 1, 1, 130, dtype=torch.bool)
        seen[1] = False
        assert not check_latents(of(shape, q, kept, mask=seen), inverse)[1].any()
        kept[0, 0, 5] = torch.nan
        out = attend_latents(of(shape, q, kept), inverse, FORMULA)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        alone = of(
            shape,
            q,
            kept[:, :, 3:6],
            mask=torch.tensor([False, False, True]),
            causal=False,
        )
        assert attend_latents(alone, None, FORMULA)[0].isnan().all(), (
            "also if nothing else is seen"
        )


@torch.no_grad()
def test_one_key_one_weight_and_two_alike_a_half_each() -> None:
    op = torch.ops.qkeel_native.decode
    rest = (None, None, 1.0, 0.0, True, 0)
    q, k, v = (
        torch.ones(1, 1, 1, 8),
        torch.ones(1, 1, 2, 8),
        torch.arange(16.0).view(1, 1, 2, 8),
    )
    assert torch.equal(op(q, k[:, :, :1], v[:, :, :1], *rest), v[:, :, :1])
    torch.testing.assert_close(op(q, k, v, *rest), v.mean(2, keepdim=True))
    k[:, :, 1] -= torch.log(torch.tensor(3.0)) / 8  # weights 3/4 and 1/4
    torch.testing.assert_close(
        op(q, k, v, *rest)[0, 0, 0], v[0, 0, 0] * 0.75 + v[0, 0, 1] * 0.25
    )


def test_what_is_not_for_it_is_refused_with_the_reason_and_left_to_others() -> None:
    q, k, v = made((4, 2, 1, 16, 16), 9)
    learns = q.clone().requires_grad_()
    for call in (
        make_call(PLAIN, q.double(), k.double(), v.double()),
        make_call(PLAIN, *made((160, 1, 1, 16, 16), 9)),
        make_call(PLAIN, q[..., :12], k[..., :12], v[..., :12]),
        make_call(PLAIN, q, q[:, :2], q[:, :2]),
        make_call(PLAIN, q, k, v, mask=torch.zeros(9)),
        make_call(PLAIN, q, k, v, dropout=0.5),
        make_call(PLAIN, learns, k, v),
        make_call(AttentionSpec(cap=Softcap(cap=5.0)), q, k, v),
    ):
        with pytest.raises(
            RefusedError, match="kernel 'decode' cannot do this: decoding "
        ):
            run(call, "decode")
        assert choose(call, "auto") is not KERNELS["decode"]
    assert choose(make_call(PLAIN, q, k, v), "auto") is KERNELS["decode"]


def test_latents_that_it_cannot_read_stay_with_torch(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = LATENTS[1]
    q, kept, inverse = held(shape, 9)
    call = of(shape, q, kept)
    for other, factors in (
        (make_call(PLAIN, q[..., :20], kept[..., :20], kept[..., :16]), None),
        (make_call(PLAIN, q.double(), kept.double(), kept[..., :16].double()), None),
        (call, inverse.double()),
        (of(shape, q.clone().requires_grad_(), kept), inverse),
        (of(shape, q, kept, mask=torch.zeros(9)), inverse),
        (of(shape, q, kept, dropout=0.5), inverse),
        (of(shape, q, kept, AttentionSpec(normalizer=Sigmoid(bias=-2.0))), inverse),
    ):
        attend_latents(other, factors, FORMULA)
    with monkeypatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        attend_latents(call, inverse, FORMULA)
    assert not any(taken)
    attend_latents(call, inverse, FORMULA)
    assert taken[-1]


@pytest.mark.parametrize("cap", [NoCap(), Softcap(2.0)])
@torch.no_grad()
def test_a_module_of_latents_decodes_with_it_and_says_what_it_says_at_once(
    cap: Cap, taken: list[bool]
) -> None:
    sizes = LatentSizes(
        q_latent=48, kv_latent=64, rope_dim=16, nope_dim=32, value_dim=32
    )
    spec = AttentionSpec(norm=RMSNorm(gain="dim"), cap=cap)
    for heads in (4, 16):
        module = MLA(64, heads, sizes=sizes, spec=spec, latent_norm=True).eval()
        x = torch.randn(2, 20, 64)
        cache, parts = module.new_cache(), []
        for start, end in ((0, 9), (9, 13), *((i, i + 1) for i in range(13, 20))):
            parts.append(module(x[:, start:end], cache=cache))
        torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=1e-5, atol=3e-6)
    assert taken == [True] * 16


def test_a_key_that_needs_no_encoding_is_not_copied() -> None:
    q, k = torch.randn(1, 2, 1, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    pos = torch.arange(5)[None]
    ours = encoded(AttentionSpec(position=NoPosition()), q, k, pos[:, 4:], pos, {})
    assert ours[0] is q
    assert ours[1] is k


@pytest.mark.slow
def test_one_graph_of_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text("""
import torch, qkeel
from qkeel.kernels.decoding import compiled as compiled_attention
torch.set_grad_enabled(False)
assert compiled_attention.ready()
q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
spec = qkeel.AttentionSpec()
attend = lambda q, k, v: qkeel.attention(q, k, v, spec=spec, impl="decode")
f = torch.compile(attend, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(f(q, k, v), qkeel.attention(q, k, v, spec=spec))
""")
    done = forked.python(["graph.py"], tmp_path, environment={"QKEEL_NATIVE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
