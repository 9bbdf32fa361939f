"""Kernels and statistics on a CUDA device, against the float64 oracle on the CPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from qkeel import preset, reference
from qkeel.kernels.statistics import logit_stats
from qkeel.ops import KERNELS
from qkeel.spec import AttentionCall, AttentionSpec, Sink
from qkeel.spec.call import make_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

SPECS = {
    **{
        name: preset(name)
        for name in ("baseline", "qwen3", "olmo2", "cosa_logn", "gemma2", "swin_v2")
    },
    "sink": AttentionSpec(normalizer=Sink()),
}
B, H, G, T, S, D = 2, 4, 2, 33, 48, 64
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "padding": {"mask": (torch.arange(S) >= torch.tensor([[0], [9]]))[:, None, None]},
    "empty rows": {
        "causal": False,
        "mask": torch.arange(T)[:, None] >= torch.arange(S) - 20 + 25,
    },
    "additive": {"causal": False, "mask": torch.randn(1, H, T, S)},
}


def on(device, call, dtype):
    """The call with its tensors on a device, floating ones in that dtype."""

    def move(x):
        return (
            x
            if x is None
            else x.to(device, dtype)
            if x.is_floating_point()
            else x.to(device)
        )

    moved = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    moved = {n: move(v) if isinstance(v, Tensor) else v for n, v in moved.items()}
    moved["params"] = {n: move(p) for n, p in call.params.items()}
    return AttentionCall(**moved)


def calls(name, dtype):
    """Per mask: its name, the call on the GPU in a low precision, the same numbers in float64 on the CPU."""
    spec, found = SPECS[name], []
    for kind, how in MASKS.items():
        q, k, v = (
            torch.randn(B, H, T, D),
            torch.randn(B, G, S, D),
            torch.randn(B, G, S, D),
        )
        low = on(
            "cuda",
            make_call(spec, q, k, v, params=spec.init_params(H, G, D), **how),
            dtype,
        )
        found.append((kind, low, on("cpu", low, torch.float64)))
    return found


every_spec = pytest.mark.parametrize("name", SPECS)
every_dtype = pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)


@every_spec
@every_dtype
@pytest.mark.parametrize(
    "kernel", [name for name in KERNELS if name != "flex"]
)  # compiles each: test_triton
def test_output_and_gradients_are_near_the_oracles(name, dtype, near, kernel):
    for kind, low, wide in calls(name, dtype):
        if KERNELS[kernel].supports(low) is not None:
            continue
        results = []
        for call, forward in (
            (low, KERNELS[kernel]),
            (wide, lambda c: reference.attend_call(c).out),
        ):
            leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
            out = forward(
                dataclasses.replace(call, q=leaves[0], k=leaves[1], v=leaves[2])
            )
            grads = torch.autograd.grad(out.double().cos().sum(), leaves)
            results.append([x.detach().double().cpu() for x in (out, *grads)])
        for ours, truth in zip(*results):
            assert torch.isfinite(ours).all(), kind
            assert (ours - truth).abs().max() <= near * (1 + truth.abs().max()), kind


def test_chunked_attention_and_statistics_take_memory_linear_in_the_length():
    spec, peaks = preset("gemma2"), []
    for t in (8192, 16384):
        q = torch.randn(1, 1, t, 16, device="cuda", requires_grad=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call = make_call(spec, q, q, q)
        KERNELS["chunked"](call).sum().backward()
        logit_stats(call)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 2.2 * peaks[0]
