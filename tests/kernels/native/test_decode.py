"""Attention of a few tokens to a cache: each key read once, the numbers those of the oracle."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.kernels import compiled_attention as decode
from qkeel.ops import choose, run
from qkeel.spec import AttentionSpec, RMSNorm, Rope
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.logits import Softcap
from qkeel.spec.rope import NoPosition, SlidingWindow

KEYS = [1, 7, 64, 129, 512, 2048]
# query heads, key heads, queries, size of q and k, size of v
SHAPES = [(4, 4, 1, 64, 64), (8, 2, 1, 64, 64), (4, 1, 3, 128, 24), (6, 3, 2, 8, 40), (32, 1, 1, 72, 136)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads apart": lambda x: x.contiguous(),
    "tokens apart": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "with room behind": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, : x.shape[2]],
    "dimensions apart": lambda x: x.mT.contiguous().mT,
}


@pytest.fixture(autouse=True)
def _compiled(_on: None) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert decode.decode_ready()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of q that the kernel was given."""
    seen: list[torch.Size] = []
    whole = decode.Decode.__call__

    def watched(self: decode.Decode, call: AttentionCall) -> Tensor:
        seen.append(call.q.shape)
        return whole(self, call)

    monkeypatch.setattr(decode.Decode, "__call__", watched)
    return seen


def made(
    shape: tuple[int, ...], keys: int, dtype: torch.dtype, layout: str = "heads apart", b: int = 2
) -> list[Tensor]:
    h, g, t, d, width = shape
    sizes = ((b, h, t, d), (b, g, keys, d), (b, g, keys, width))
    return [LAYOUTS[layout](torch.randn(size).to(dtype)) for size in sizes]


def check(call: AttentionCall, told: str = "") -> Tensor:
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number)."""
    exact = {name: getattr(call, name).double() for name in "qkv"}
    truth = reference.attend_call(dataclasses.replace(call, **exact)).out
    ours, theirs = run(call, "decode"), run(call, "sdpa")
    allowed = 2 * ((theirs - truth).abs().max() + torch.finfo(call.q.dtype).eps * truth.abs().max())
    assert ours.dtype == call.q.dtype
    assert (ours.double() - truth).abs().max() <= allowed, told
    return ours


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_every_length_dtype_and_layout(shape: tuple[int, ...], taken: list[torch.Size]) -> None:
    lengths = [s for s in KEYS if s > shape[2]]
    for i, keys in enumerate(lengths):
        for j, dtype in enumerate(DTYPES):
            layout = list(LAYOUTS)[(i + j) % len(LAYOUTS)]
            q, k, v = made(shape, keys, dtype, layout)
            check(make_call(AttentionSpec(), q, k, v, causal=bool(i % 2)), f"{keys} {dtype} {layout}")
    assert len(taken) == len(lengths) * len(DTYPES)


@pytest.mark.parametrize("window", [1, 5, 40, 600])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_windows_hide_what_is_far(window: int, causal: bool, taken: list[torch.Size]) -> None:
    spec = AttentionSpec(position=SlidingWindow(window=window))
    for shape, keys in ((SHAPES[1], 1100), (SHAPES[2], 70), (SHAPES[3], 5)):
        check(make_call(spec, *made(shape, keys, torch.float32), causal=causal))
    assert len(taken) == 3


@torch.no_grad()
def test_boolean_masks_of_every_shape_and_rows_that_see_nothing(taken: list[torch.Size]) -> None:
    b, h, t, keys = 3, 6, 2, 700
    q, k, v = made(SHAPES[3], keys, torch.float32, b=b)
    masks = [torch.rand(size) < 0.5 for size in ((b, keys), (b, 1, 1, keys), (1, h, t, keys), (b, h, t, keys), (t, 1))]
    padded = torch.ones(b, keys, dtype=torch.bool)
    padded[0, :650], padded[1] = False, False
    for mask in (*masks, padded, torch.rand(keys, b, 1, 1).permute(1, 2, 3, 0) < 0.5):
        out = check(make_call(AttentionSpec(), q, k, v, causal=True, mask=mask))
        assert out.isfinite().all()
    blind = run(make_call(AttentionSpec(), q, k, v, causal=True, mask=padded), "decode")
    assert not blind[1].any()
    assert len(taken) == 8


@torch.no_grad()
def test_positions_of_their_own_decide_which_keys_are_visible(taken: list[torch.Size]) -> None:
    q, k, v = made(SHAPES[1], 9, torch.float32)
    for spec in (AttentionSpec(), AttentionSpec(position=SlidingWindow(window=3)), AttentionSpec(position=Rope())):
        pos_k = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
        check(make_call(spec, q, k, v, causal=True, pos_q=torch.tensor([[4], [7]]), pos_k=pos_k))
    assert len(taken) == 3


@pytest.mark.parametrize("size", [1e4, 1e-4])
@torch.no_grad()
def test_logits_of_ten_thousand_and_next_to_nothing(size: float) -> None:
    q, k, v = made(SHAPES[1], 600, torch.float32)
    for sign in (1, -1):
        check(make_call(AttentionSpec(), sign * q * size / 30, k, v))


@torch.no_grad()
def test_one_key_one_weight_and_two_alike_a_half_each() -> None:
    op = torch.ops.qkeel_native.decode
    q, k, v = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 2, 8), torch.arange(16.0).view(1, 1, 2, 8)
    assert torch.equal(op(q, k[:, :, :1], v[:, :, :1], None, None, 1.0, 0.0, True, 0), v[:, :, :1])
    torch.testing.assert_close(op(q, k, v, None, None, 1.0, 0.0, True, 0), v.mean(2, keepdim=True))
    k[:, :, 1] -= torch.log(torch.tensor(3.0)) / 8  # weights 3/4 and 1/4
    torch.testing.assert_close(
        op(q, k, v, None, None, 1.0, 0.0, True, 0)[0, 0, 0], v[0, 0, 0] * 0.75 + v[0, 0, 1] * 0.25
    )


@torch.no_grad()
def test_missing_numbers_show_and_hidden_ones_do_not() -> None:
    q, k, v = made(SHAPES[1], 40, torch.float32)
    k[0, 0, 7] = torch.nan
    out = run(make_call(AttentionSpec(), q, k, v), "decode")
    assert out[0, :4].isnan().all()
    assert out[0, 4:].isfinite().all()
    assert out[1].isfinite().all()
    hidden = torch.ones(2, 40, dtype=torch.bool)
    hidden[:, 7] = False
    assert run(make_call(AttentionSpec(), q, k, v, mask=hidden), "decode").isfinite().all()


@torch.no_grad()
def test_threads_change_no_bit(assert_threads_change_no_bit: Callable[..., None]) -> None:
    q, k, v = made(SHAPES[1], 3000, torch.float32)
    assert_threads_change_no_bit(lambda: [run(make_call(AttentionSpec(), q, k, v), "decode")])


def test_what_is_not_for_it_is_refused_with_the_reason_and_left_to_others() -> None:
    q, k, v = made((4, 2, 1, 16, 16), 9, torch.float32)
    many = made((160, 1, 1, 16, 16), 9, torch.float32)
    spec = AttentionSpec()
    learns = q.clone().requires_grad_()
    for call in (
        make_call(spec, q.double(), k.double(), v.double()),
        make_call(spec, *many),
        make_call(spec, q[..., :12], k[..., :12], v[..., :12]),
        make_call(spec, q, q[:, :2], q[:, :2]),
        make_call(spec, q, k, v, mask=torch.zeros(9)),
        make_call(spec, q, k, v, dropout=0.5),
        make_call(spec, learns, k, v),
        make_call(AttentionSpec(cap=Softcap(cap=5.0)), q, k, v),
    ):
        with pytest.raises(RefusedError, match="kernel 'decode' cannot do this: decoding "):
            run(call, "decode")
        assert not isinstance(choose(call, "auto"), decode.Decode)
    assert isinstance(choose(make_call(spec, q, k, v), "auto"), decode.Decode)


@pytest.mark.parametrize("name", ["baseline", "qwen3", "gemma3", "llama4"])
@torch.no_grad()
def test_a_module_with_a_cache_says_token_by_token_what_it_says_at_once(name: str, taken: list[torch.Size]) -> None:
    torch.manual_seed(1)
    module = qkeel.nn.Attention(64, 8, 2, spec=qkeel.preset(name)).eval()
    x = torch.randn(2, 20, 64)
    whole, cache = module(x), module.new_cache()
    parts = [module(x[:, :9], cache=cache), *(module(x[:, i : i + 1], cache=cache) for i in range(9, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=2e-6)
    assert len(taken) == 11


@torch.no_grad()
def test_left_padding_with_a_cache(taken: list[torch.Size]) -> None:
    module = qkeel.nn.Attention(64, 8, 2, spec=AttentionSpec(norm=RMSNorm(), position=Rope())).eval()
    x = torch.randn(1, 6, 64)
    pads = torch.randn(1, 3, 64)
    cache = module.new_cache()
    pos = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    seen = torch.tensor([[False] * 3 + [True] * 6])
    both = torch.cat([pads, x], 1)
    module(both[:, :8], cache=cache, pos=pos[:, :8], mask=seen[:, None, None, :8])
    last = module(both[:, 8:], cache=cache, pos=pos[:, 8:], mask=seen[:, None, None])
    torch.testing.assert_close(last, module(x)[:, -1:], rtol=1e-5, atol=2e-6)
    assert taken


def test_a_key_that_needs_no_encoding_is_not_copied() -> None:
    from qkeel.kernels.encode import encoded

    q, k = torch.randn(1, 2, 1, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    pos = torch.arange(5)[None]
    ours = encoded(AttentionSpec(position=NoPosition()), q, k, pos[:, 4:], pos, {})
    assert ours[0] is q
    assert ours[1] is k


def test_torch_accepts_the_operator() -> None:
    q, k, v = made(SHAPES[3], 11, torch.float32)
    for mask in (None, torch.rand(2, 1, 1, 11) < 0.5):
        torch.library.opcheck(torch.ops.qkeel_native.decode.default, (q, k, v, mask, None, 0.3, 0.0, True, 4))


def test_wrong_shapes_and_dtypes_raise_and_do_not_crash() -> None:
    op = torch.ops.qkeel_native.decode
    q, k, v = made((4, 2, 1, 16, 16), 9, torch.float32)
    for args in [
        (q[..., :12], k[..., :12], v, None),
        (q.double(), k.double(), v.double(), None),
        (q, k.bfloat16(), v, None),
        (q[:, :3], k, v, None),
        (q, k, v[:, :, :8], None),
        (q, k, v, torch.zeros(1, 1, 1, 9)),
        (q, k, v, torch.ones(1, 1, 1, 8, dtype=torch.bool)),
        (q[0], k, v, None),
    ]:
        with pytest.raises(RuntimeError):
            op(*args, None, 1.0, 0.0, True, 0)


@pytest.mark.slow
def test_one_graph_of_the_compiler() -> None:
    code = """
import torch, qkeel
from qkeel.kernels import compiled_decode as decode
torch.set_grad_enabled(False)
assert decode.ready()
q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
spec = qkeel.AttentionSpec()
attend = lambda q, k, v: qkeel.attention(q, k, v, spec=spec, impl="decode")
f = torch.compile(attend, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(f(q, k, v), qkeel.attention(q, k, v, spec=spec))
"""
    environment = {**os.environ, "QKEEL_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_ten_thousand_calls_keep_no_memory() -> None:
    q, k, v = made((4, 2, 1, 16, 16), 600, torch.bfloat16, b=1)

    def call(times: int) -> int:
        for _ in range(times):
            torch.ops.qkeel_native.decode(q, k, v, None, None, 1.0, 0.0, True, 0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(500)
    assert call(10_000) - before < 8 * 1024
