"""The logsumexps that torch's fused operators hand out, and the largest logits beside the output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from qkeel import attention, preset
from qkeel.errors import UnknownNameError
from qkeel.kernels.attention import logsumexp
from qkeel.kernels.attention.logsumexp import fused_with_logsumexp
from qkeel.patching.modes import flash_on_cpu
from qkeel.spec import AttentionSpec, Rope, Sink, SlidingWindow, Softcap


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (AttentionSpec(position=Rope()), {}),
        (AttentionSpec(position=SlidingWindow(window=5)), {}),
        (AttentionSpec(position=Rope()), {"mask": torch.rand(17, 17) < 0.8}),
        (AttentionSpec(cap=Softcap(5.0)), {}),
        (AttentionSpec(normalizer=Sink(learned=False)), {}),
        (AttentionSpec(), {"impl": "chunked"}),
        (AttentionSpec(), {"impl": "sdpa"}),
        (AttentionSpec(), {"pos_q": torch.arange(17), "pos_k": torch.arange(17)}),
    ],
    ids=["plain", "window", "mask", "cap", "sink", "chunked", "sdpa", "positions"],
)
def test_the_largest_logits_are_exact_and_the_output_is_unchanged(
    native: str, spec: AttentionSpec, how: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    q, k, v = torch.randn(2, 4, 17, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 8)
    out, largest = attention(q, k, v, spec=spec, stats="max", **how)
    assert torch.equal(out, attention(q, k, v, spec=spec, **how))
    exact = attention(q, k, v, spec=spec, stats=True, **how)[1]
    torch.testing.assert_close(largest.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
    assert not largest.n_pairs.any()


def test_another_name_of_statistics_is_refused() -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(UnknownNameError, match="max"):
        attention(q, q, q, spec=AttentionSpec(), stats="bracket")  # type: ignore[call-overload]


def test_gradients_are_those_without_statistics() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    spec = preset("baseline")
    plain = torch.autograd.grad(attention(q, k, v, spec=spec).cos().sum(), (q, k, v))
    out, _ = attention(q, k, v, spec=spec, stats="max")
    assert all(map(torch.equal, torch.autograd.grad(out.cos().sum(), (q, k, v)), plain))


def fused(kind: str, seen: list[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What torch's operator on a GPU returns, from the T×T matrix; its logsumexp in the operator's own shape."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, *, scale: float
    ) -> tuple[torch.Tensor, ...]:
        seen.append(kind)
        repeat = q.shape[1] // k.shape[1]
        z = scale * q @ k.repeat_interleave(repeat, 1).mT
        if causal:
            z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        lse = z.logsumexp(-1)
        own = {"cudnn": lse[..., None], "efficient": torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=7.0)}
        return z.softmax(-1) @ v.repeat_interleave(repeat, 1), own.get(kind, lse), torch.zeros(())

    return call


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_fused_operator_of_a_gpu_hands_out_its_logsumexp(
    kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    seen: list[str] = []
    stand_ins = {backend: (fused(name, seen), ()) for name, backend in backends.items() if name != "math"}
    monkeypatch.setattr(logsumexp, "_FUSED", stand_ins)
    monkeypatch.setattr(logsumexp, "kernel_choice", lambda *_, **how: backends[kind].value)
    q, k, v = (torch.randn(2, heads, 17, 8, dtype=torch.float64) for heads in (4, 2, 2))
    pair, truth = fused_with_logsumexp(q, k, v, causal, 0.3), flash_on_cpu(q, k, v, 0.0, causal, scale=0.3)
    if kind == "math":
        assert pair is None
        return
    assert pair is not None
    assert seen == [kind]
    for ours, theirs in zip(pair, truth):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_operators_of_a_gpu_take_what_they_are_given() -> None:
    # No GPU is needed to see that names and arguments are those of this torch.
    for backend, (operator, between) in logsumexp._FUSED.items():
        with pytest.raises(NotImplementedError, match="CPU"):
            operator(*(torch.randn(1, 2, 8, 8) for _ in range(3)), *between, True, scale=0.5)
        assert backend.value in {member.value for member in SDPBackend.__members__.values()}
