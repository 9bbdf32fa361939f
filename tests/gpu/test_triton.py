"""The Triton kernels on a CUDA device: the matrix of the interpreter's tests and more, against float64 on the CPU."""

import dataclasses

import pytest
import torch
from kernels.test_norm_rope import NORMS, case_of, check, position_of, run
from torch import nn

import qkeel
from qkeel.functional.statistics import TENSORS
from qkeel.kernels import triton_access as available
from qkeel.kernels.attention.flex import Flex
from qkeel.kernels.logits.gpu import extremes, row_fields
from qkeel.kernels.norm_rope import encode
from qkeel.kernels.norm_rope import operator as norm_rope
from qkeel.kernels.norm_rope.encode import encoded
from qkeel.kernels.statistics import logit_stats, max_stats, row_logsumexp
from qkeel.spec import (
    AttentionSpec,
    L2Norm,
    LayerNorm,
    RMSNorm,
    Rope,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import make_call, with_query_mask

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 7, 64, 129, 512, 2048]
SIZES = [64, 8, 128, 24, 256, 40]
STEPPED = [
    "lalr",
    "qk_lr",
    "qk_weight_decay",
    "qk_clip:threshold=0.001",
]


STATISTICS = {
    "window": (AttentionSpec(position=SlidingWindow(window=70)), {}),
    "rows left out": (AttentionSpec(), {"left out": True}),
    "causal": (AttentionSpec(), {}),
    "full": (AttentionSpec(position=Rope()), {"causal": False}),
    "norm": (qkeel.preset("qwen3"), {}),
    "softcap": (AttentionSpec(cap=Softcap(5.0)), {}),
    "padding": (AttentionSpec(), {"padding": True}),
}


def call_of(name, dtype, t, d, device, size=1.0):
    spec, how = STATISTICS[name]
    q, k, v = (torch.randn(2, heads, t, d).to(dtype).to(device) for heads in (4, 2, 2))
    params = {n: p.to(device, dtype) for n, p in spec.init_params(4, 2, d).items()}
    mask = (
        (torch.arange(t, device=device) >= torch.tensor([[0], [t // 3]], device=device))
        if "padding" in how
        else None
    )
    call = make_call(
        spec, size * q, k, v, params=params, mask=mask, causal=how.get("causal", True)
    )
    if "left out" in how:
        call = with_query_mask(call, torch.arange(t, device=device)[None] % 3 != 1)
    return call


def on_cpu(call):
    """The same numbers in float64 on the CPU, which no kernel supports."""
    move = lambda x: x.double().cpu() if x.is_floating_point() else x.cpu()  # noqa: E731
    tensors = {
        name: x
        for name in call.__dataclass_fields__
        if isinstance(x := getattr(call, name), torch.Tensor)
    }
    params = {name: move(x) for name, x in call.params.items()}
    return dataclasses.replace(
        call, params=params, **{name: move(x) for name, x in tensors.items()}
    )


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_without_values_are_the_exact_ones(name, dtype):
    for t, d, size in ((1, 64, 1.0), (129, 24, 1.0), (300, 128, 30.0), (65, 256, 1.0)):
        call = call_of(name, dtype, t, d, DEVICE, size)
        truth, every, largest = (
            logit_stats(on_cpu(call)),
            logit_stats(call),
            max_stats(call),
        )
        assert (row_fields(call, 1.0) is None) is (name == "window")
        assert (extremes(call) is None) is (call.spec.cap.kind != "none")
        # A sum of logits, and an exponential of one, are off by what the largest is.
        room = 1e-3 + 1e-6 * float(truth.max_abs_logit.max())
        fields = [(every, field) for field in TENSORS if field != "share_above"]
        alone = ("max_logit", "min_logit", "logit_spread")
        for ours, field in (*fields, *((largest, field) for field in alone)):
            true = getattr(truth, field).double()
            numbers = getattr(ours, field).double().cpu()
            assert torch.allclose(
                numbers, true, rtol=1e-3, atol=room, equal_nan=True
            ), f"{t}, {d}, {field}"


def test_tensors_here_go_through_triton():
    assert available.usable(torch.device(DEVICE))
    assert norm_rope.operators_for(torch.device(DEVICE)) is torch.ops.qkeel_triton


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_norm_and_rotation_of_every_norm_length_and_layout(norm):
    for i, (t, d) in enumerate(zip(LENGTHS, SIZES)):
        turn = i + NORMS.index(norm)
        # All three dtypes of each would be compiled for minutes.
        dtype = DTYPES[(turn + i // len(DTYPES)) % len(DTYPES)]
        position = position_of(turn, norm)
        case = case_of(norm, position, t, d, dtype, turn)
        check(case, f"T {t}, d {d}, {position.formula()}, {dtype}", DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_made_anew_from_the_result(dtype, monkeypatch):
    monkeypatch.setattr(encode, "_keeps", lambda x, gain: False)
    gains = ["none", "dim", "head_dim"] if dtype == torch.float32 else ["none"]
    norms = [kind(gain=gain) for gain in gains for kind in (RMSNorm, LayerNorm)]
    for norm in (*norms, L2Norm()):
        check(case_of(norm, Rope(), 129, 128, dtype, 0), f"{norm}, {dtype}", DEVICE)


def test_the_gradient_of_a_gain_is_the_same_in_every_run():
    case = case_of(RMSNorm(gain="dim"), Rope(), 2048, 128, torch.bfloat16)
    above = [torch.randn_like(x) for x in case[1:3]]  # type: ignore[arg-type]
    first = run(encoded, case, torch.bfloat16, above, DEVICE)
    for _ in range(3):
        again = run(encoded, case, torch.bfloat16, above, DEVICE)
        assert all(map(torch.equal, first, again))


def test_a_module_is_one_graph_when_compiled():
    torch._dynamo.reset()
    module = qkeel.nn.Attention(64, 4, 2, spec=qkeel.preset("qwen3")).to(DEVICE)
    x = torch.randn(2, 33, 64, device=DEVICE, requires_grad=True)
    results = []
    for how in (module, torch.compile(module, fullgraph=True)):
        out = how(x)
        results.append(
            [out, *torch.autograd.grad(out.cos().sum(), [x, *module.parameters()])]
        )
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_flex_hands_out_maxima_and_logsumexp():
    for name in ("causal", "full", "window"):
        call = call_of(name, torch.bfloat16, 256, 64, DEVICE)
        out, lse, top = Flex().with_maxima(call)
        torch.testing.assert_close(
            top.amax((0, 2)), max_stats(call).max_logit, rtol=1e-2, atol=1e-2
        )
        torch.testing.assert_close(
            lse, row_logsumexp(call).to(lse.dtype), rtol=1e-2, atol=1e-2
        )
        assert out.shape == call.q.shape


def trained(remedy, capturable, kind="foreach"):
    torch.manual_seed(1)
    model = nn.Sequential(*(qkeel.nn.Attention(64, 4, 2) for _ in range(2))).to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, capturable=capturable, **{kind: True}
    )
    qkeel.apply(model, remedy, optimizer)
    x = torch.randn(2, 9, 64, device=DEVICE)
    drawn = torch.Generator().manual_seed(2)
    for step in range(3):
        # Kernels of the forward pass round differently, and Adam's first steps magnify what that does to a gradient.
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn).to(DEVICE)
        model(x)
        if step < 2:
            optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("remedy", STEPPED)
def test_a_step_never_makes_the_host_wait(remedy, kind):
    _, optimizer = trained(remedy, capturable=kind == "foreach", kind=kind)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_attention_never_makes_the_host_wait():
    module = qkeel.nn.Attention(64, 4, 2, spec=qkeel.preset("qwen3")).to(DEVICE)
    x = torch.randn(2, 33, 64, device=DEVICE, requires_grad=True)
    module(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("remedy", [name for name in STEPPED if "clip" not in name])
def test_a_step_can_be_captured_in_a_cuda_graph(remedy):
    plain, graphed = trained(remedy, True), trained(remedy, True)
    for _ in range(3):
        plain[1].step()
    graph = torch.cuda.CUDAGraph()
    kept = [p.detach().clone() for p in graphed[0].parameters()]
    with torch.cuda.graph(graph):
        graphed[1].step()
    for p, was in zip(graphed[0].parameters(), kept):
        assert torch.equal(p, was)  # capture runs nothing
    for _ in range(3):
        graph.replay()
    for a, b in zip(plain[0].parameters(), graphed[0].parameters()):
        torch.testing.assert_close(a, b)


def test_an_iteration_with_a_clip_can_be_captured_in_a_cuda_graph():
    x = torch.randn(2, 9, 64, device=DEVICE)
    (plain, own), (graphed, other) = (
        trained("lalr+qk_clip:threshold=0.001", True) for _ in range(2)
    )

    def iterate(model, optimizer):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    own.step()
    other.step()  # by the maxima of forwards before the capture
    for _ in range(3):
        iterate(plain, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(graphed, other)
    for _ in range(3):
        graph.replay()
    for a, b in zip(plain.parameters(), graphed.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_thousand_calls_keep_no_memory():
    case = case_of(RMSNorm(gain="dim"), Rope(), 64, 64)
    above = [torch.randn_like(x) for x in case[1:3]]
    run(encoded, case, torch.float32, above, DEVICE)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        run(encoded, case, torch.float32, above, DEVICE)
    assert torch.cuda.memory_allocated() == before
