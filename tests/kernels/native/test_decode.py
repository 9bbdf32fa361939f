"""Attention of a few tokens to a cache of keys or of latents: each read once, the numbers those of the oracle."""

import dataclasses

import pytest
import torch
from tests import forked
from tests.kernels.harness import DTYPES, laid
from tests.quick import one_in
from torch.testing import assert_close

from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.kernels.decoding import compiled as decode
from qkeel.nn import MLA, LatentSizes, mla
from qkeel.nn.mla import attend_latents
from qkeel.ops import KERNELS, choose, run
from qkeel.spec import (
    AttentionSpec,
    InverseSqrt,
    Learned,
    LogN,
    RMSNorm,
    Sigmoid,
    Softcap,
)
from qkeel.spec.call import make_call
from qkeel.spec.logits import NoCap
from qkeel.spec.rope import SlidingWindow

pytestmark = pytest.mark.usefixtures("library")
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
    (1, 40, 3, 72, 24),
    (2, 24, 1, 32, 16),
]
FORMULA = 24  # the head size that the scale of latents goes by
PLAIN = AttentionSpec()


@pytest.fixture
def taken(monkeypatch):
    """Of every call whether the kernel took it."""
    calls = []
    of_keys, of_latents = decode.Decode.__call__, decode.latents

    def watched(self, call):
        calls.append(True)
        return of_keys(self, call)

    def with_latents(*arguments):
        out = of_latents(*arguments)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(decode.Decode, "__call__", watched)
    monkeypatch.setattr(mla, "latents", with_latents)
    return calls


def qkv(
    shape,
    keys,
    dtype=torch.float32,
    layout=1,
):
    h, g, t, d, width = shape
    sizes = ((2, h, t, d), (2, g, keys, d), (2, g, keys, width))
    return [laid(torch.randn(size).to(dtype), layout) for size in sizes]


def latents(shape, keys, dtype=torch.float32):
    """Queries, latents with room behind, and factors of each head."""
    b, h, t, latent, rotated = shape
    room = torch.full((b, 1, keys + 3, latent + rotated), torch.nan, dtype=dtype)
    room[:, :, :keys] = torch.randn(b, 1, keys, latent + rotated)
    q = 4 * torch.randn(b, h, t, latent + rotated).to(dtype)
    return q, room[:, :, :keys], torch.rand(b, h, keys + 3)[..., :keys] + 0.2


def near(ours, theirs, truth, case):
    """Error at most 2 × (that of torch's path in the same dtype + rounding of the largest number)."""
    rounding = torch.finfo(ours.dtype).eps * truth.abs().max()
    allowed = 2 * ((theirs - truth).abs().max() + rounding)
    assert ours.dtype == theirs.dtype
    assert (ours.double() - truth).abs().max() <= allowed, case
    return ours


def check(call, case=""):
    exact = {name: getattr(call, name).double() for name in "qkv"}
    truth = reference.attend_call(dataclasses.replace(call, **exact)).out
    return near(run(call, "decode"), run(call, "sdpa"), truth, case)


def of(
    shape,
    q,
    k,
    spec=PLAIN,
    **more,
):
    return make_call(spec, q, k, k[..., : shape[3]], **more)


def check_latents(call, inverse, case=""):
    """Against the oracle with the keys that latents and factors stand for; its scale is that of its q's size."""
    h = call.q.shape[1]
    k, v = (x.double().expand(-1, h, -1, -1) for x in (call.k, call.v))
    if inverse is not None:
        k = k * inverse[..., None].double()
    scale = call.spec.factor(call.pos_q, FORMULA, call.params, torch.float64)
    q = call.q.double() * scale * call.q.shape[-1] ** 0.5
    spec = call.spec.replace(scale=InverseSqrt())
    exact = dataclasses.replace(call, spec=spec, q=q, k=k, v=v, params={})
    ours = attend_latents(call, inverse, FORMULA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        theirs = attend_latents(call, inverse, FORMULA)
    return near(ours, theirs, reference.attend_call(exact).out, case)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_every_length_dtype_and_layout(shape, taken):
    lengths = [s for s in KEYS if s > shape[2]]
    for i, keys in enumerate(lengths):
        for j, dtype in enumerate((DTYPES[0], DTYPES[1 + i % 2])):
            call = make_call(PLAIN, *qkv(shape, keys, dtype, i + j), causal=i % 2 == 1)
            check(call, f"{keys} {dtype} {i + j}")
    assert len(taken) == 2 * len(lengths)


@pytest.mark.parametrize(
    "shape", one_in([pytest.param(shape, id=str(shape)) for shape in LATENTS], 2)
)
@torch.no_grad()
def test_latents_of_every_length_and_dtype_with_factors_and_without(shape, taken):
    for i, keys in enumerate(s for s in KEYS if s >= shape[2]):
        for j, dtype in enumerate((DTYPES[0], DTYPES[1 + i % 2])):
            q, k, inverse = latents(shape, keys, dtype)
            factors = (None, inverse, inverse[:, :1])[(i + j) % 3]
            spec = AttentionSpec(cap=Softcap(3.0)) if (i + j) % 4 == 0 else PLAIN
            call = of(shape, q, k, spec, causal=i % 2 == 1)
            check_latents(call, factors, f"{keys} {dtype}")
    assert taken == [True, False] * (len(taken) // 2)


@pytest.mark.parametrize(
    ("shape", "latent"), [(SHAPES[3], False), (LATENTS[1], True), (LATENTS[2], True)]
)
@torch.no_grad()
def test_masks_windows_and_positions_hide_what_they_hide(shape, latent, taken):
    s = 700
    q, k, third = latents(shape, s) if latent else qkv(shape, s)
    (b, h, t), d = q.shape[:3], q.shape[3]

    def check_with(spec=PLAIN, **options):
        if latent:
            return check_latents(of(shape, q, k, spec, **options), third, f"{options}")
        return check(make_call(spec, q, k, third, **options), f"{options}")

    padded = torch.rand(b, 1, 1, s) < 0.5
    padded[0, ..., :650] = False
    masks = [torch.rand(size) < 0.5 for size in ((1, h, t, s), (b, h, t, s), (t, 1))]
    crossed = torch.rand(s, b, 1, 1).permute(1, 2, 3, 0) < 0.5
    for mask in (padded, *masks, crossed):
        assert check_with(mask=mask).isfinite().all()
    for window in (1, 40, 600):
        spec = AttentionSpec(position=SlidingWindow(window=window))
        for causal in (True, False):
            check_with(spec, causal=causal)
    # Positions of each sequence decide which keys are visible.
    pos_k = torch.stack([torch.arange(s) // 2, torch.arange(s)])[:b]
    near_only = AttentionSpec(position=SlidingWindow(window=3))
    for spec in (PLAIN, near_only):
        check_with(spec, pos_q=pos_k[:, -t:] - 3, pos_k=pos_k)
    check_with(AttentionSpec(scale=LogN(train_length=4)))
    learned = AttentionSpec(scale=Learned(init=0.7, per="head"))
    check_with(learned, params=learned.init_params(h, k.shape[1], d))
    assert taken == ([True, False] if latent else [True]) * 15
    padded[-1] = False
    assert not check_with(mask=padded)[-1].any()


@torch.no_grad()
def test_large_and_tiny_logits_and_missing_numbers():
    q, k, v = qkv(SHAPES[1], 600)
    hidden = torch.arange(600).expand(2, 600) != 7
    for size in (1e4, -1e4, 1e-4):
        check(make_call(PLAIN, q * size / 30, k, v))
    k[0, 0, 7] = torch.nan
    out = run(make_call(PLAIN, q, k, v), "decode")
    assert out[0, :4].isnan().all()
    assert out[0, 4:].isfinite().all()
    assert out[1].isfinite().all()
    assert run(make_call(PLAIN, q, k, v, mask=hidden), "decode").isfinite().all()
    for shape in (LATENTS[1], LATENTS[3]):
        q, k, inverse = latents(shape, 130)
        for size in (1e4, -1e4, 1e-4):
            check_latents(of(shape, size / 30 * q, k), inverse)
        k[0, 0, 5] = torch.nan
        out = attend_latents(of(shape, q, k), inverse, FORMULA)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
        alone = torch.tensor([False, False, True])
        call = of(shape, q, k[:, :, 3:6], mask=alone, causal=False)
        assert attend_latents(call, None, FORMULA)[0].isnan().all()


def test_what_is_not_for_it_is_refused_and_left_to_others():
    q, k, v = qkv((4, 2, 1, 16, 16), 9)
    for call in (
        make_call(PLAIN, *qkv((160, 1, 1, 16, 16), 9)),
        make_call(PLAIN, q, q[:, :2], q[:, :2]),
        make_call(AttentionSpec(cap=Softcap(cap=5.0)), q, k, v),
    ):
        with pytest.raises(RefusedError, match="kernel 'decode' cannot do this"):
            run(call, "decode")
        assert choose(call, "auto") is not KERNELS["decode"]
    assert choose(make_call(PLAIN, q, k, v), "auto") is KERNELS["decode"]


def test_latents_that_it_cannot_read_stay_with_torch(taken, monkeypatch):
    shape = LATENTS[1]
    q, k, inverse = latents(shape, 9)
    sigmoid = AttentionSpec(normalizer=Sigmoid(bias=-2.0))
    for call, factors in (
        (make_call(PLAIN, q[..., :20], k[..., :20], k[..., :16]), None),
        (of(shape, q.double(), k.double()), None),
        (of(shape, q, k), inverse.double()),
        (of(shape, q.clone().requires_grad_(), k), inverse),
        (of(shape, q, k, mask=torch.zeros(9)), inverse),
        (of(shape, q, k, dropout=0.5), inverse),
        (of(shape, q, k, sigmoid), inverse),
    ):
        attend_latents(call, factors, FORMULA)
    with monkeypatch.context() as patch:
        patch.setenv("QKEEL_NATIVE", "0")
        attend_latents(of(shape, q, k), inverse, FORMULA)
    assert not any(taken)
    attend_latents(of(shape, q, k), inverse, FORMULA)
    assert taken[-1]


@pytest.mark.parametrize("cap", [NoCap(), Softcap(2.0)])
@torch.no_grad()
def test_a_module_of_latents_decodes_with_it_what_it_computes_at_once(cap, taken):
    sizes = LatentSizes(
        q_latent=48, kv_latent=64, rope_dim=16, nope_dim=32, value_dim=32
    )
    spec = AttentionSpec(norm=RMSNorm(gain="dim"), cap=cap)
    module = MLA(64, 16, sizes=sizes, spec=spec, latent_norm=True).eval()
    x, cache, outputs = torch.randn(2, 16, 64), module.new_cache(), []
    for start, end in ((0, 9), (9, 13), (13, 14), (14, 15), (15, 16)):
        outputs.append(module(x[:, start:end], cache=cache))
    assert_close(torch.cat(outputs, 1), module(x), rtol=1e-5, atol=3e-6)
    assert taken == [True] * 4


@pytest.mark.slow
def test_one_graph_of_the_compiler(tmp_path):
    (tmp_path / "graph.py").write_text("""
import torch, qkeel
torch.set_grad_enabled(False)
q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
spec = qkeel.AttentionSpec()
qkeel.attention(q, k, v, spec=spec, impl="decode")
attend = lambda q, k, v: qkeel.attention(q, k, v, spec=spec, impl="decode")
f = torch.compile(attend, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(f(q, k, v), qkeel.attention(q, k, v, spec=spec))
""")
    done = forked.python(["graph.py"], tmp_path, environment={"QKEEL_NATIVE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
