"""The bracket from logsumexps holds the exact maximum, closes when asked to, and never changes the output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from qkeel import attention, preset
from qkeel.kernels import statistics
from qkeel.kernels.encode import folded
from qkeel.kernels.statistics import attend_with_logsumexp, bracket, fused_with_logsumexp, logit_stats
from qkeel.ops import PRICES
from qkeel.spec import AttentionCall, AttentionSpec, Rope, Sink, SlidingWindow, Softcap
from qkeel.spec.call import make_call, with_query_mask

NAMES = ["baseline", "qwen3", "olmo2", "cosa_logn", "qknorm_2020", "swin_v2"]


def call_of(name: str, size: float = 1.0, dtype: torch.dtype = torch.float64, causal: bool = True) -> AttentionCall:
    spec = preset(name)
    q, k, v = (torch.randn(2, heads, 17, 8, dtype=dtype) for heads in (4, 2, 2))
    params = {n: p.to(dtype) for n, p in spec.init_params(4, 2, 8).items()}
    return make_call(spec, size * q, k, v, params=params, causal=causal)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_the_bracket_holds_the_exact_maximum(name: str, causal: bool, size: float) -> None:
    call = call_of(name, size, causal=causal)
    pair = attend_with_logsumexp(call)
    assert pair is not None
    exact = logit_stats(call)
    for price in PRICES.values():
        found = bracket(call, pair[1], price)
        assert (found.lower <= exact.max_logit + 1e-9).all()
        assert (found.upper >= exact.max_logit - 1e-9).all()
        assert (found.entropy is None) == (price in ("bracket", "max"))
        assert (found.certified is None) == (price == "bracket")
        if found.certified is not None:
            assert torch.allclose(found.lower[found.certified], exact.max_logit[found.certified], rtol=1e-12)
            assert torch.equal(found.lower[found.certified], found.upper[found.certified])
    assert found.entropy is not None
    assert torch.allclose(found.entropy, exact.entropy, atol=1e-9)


def test_large_logits_are_certified_and_small_ones_only_bracketed() -> None:
    certified = {}
    for size in (0.01, 30.0):
        call = call_of("baseline", size)
        pair = attend_with_logsumexp(call)
        assert pair is not None
        certified[size] = bracket(call, pair[1], "max").certified
    assert certified[30.0] is not None
    assert certified[30.0].all()
    assert certified[0.01] is not None
    assert not certified[0.01].any()


@pytest.mark.parametrize("causal", [True, False])
def test_the_bracket_leaves_out_the_rows_that_a_query_mask_does(causal: bool) -> None:
    for size in (1.0, 30.0):
        call = call_of("baseline", size, causal=causal)
        for mask in (torch.rand(2, 17) < 0.5, torch.arange(17).expand(2, 17) == 3, torch.zeros(2, 17).bool()):
            masked = with_query_mask(call, mask)
            pair = attend_with_logsumexp(masked)
            assert pair is not None
            exact, found = logit_stats(masked), bracket(masked, pair[1], "entropy")
            for bounds in (found, bracket(masked, pair[1], "bracket")):
                assert (bounds.lower <= exact.max_logit + 1e-9).all()
                assert (bounds.upper >= exact.max_logit - 1e-9).all()
            assert found.entropy is not None
            assert torch.allclose(found.entropy, exact.entropy, atol=1e-9)


@pytest.mark.parametrize("stats", PRICES)
@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (AttentionSpec(position=Rope()), {}),
        (AttentionSpec(position=Rope()), {"mask": torch.rand(17, 17) < 0.8}),
        (AttentionSpec(cap=Softcap(5.0)), {}),
        (AttentionSpec(normalizer=Sink(learned=False)), {}),
        (AttentionSpec(), {"impl": "chunked"}),
        (AttentionSpec(), {"pos_q": torch.arange(17), "pos_k": torch.arange(17)}),
    ],
    ids=["plain", "mask", "cap", "sink", "chunked", "positions"],
)
def test_output_is_unchanged_and_the_maximum_is_inside(stats: str, spec: AttentionSpec, how: dict) -> None:
    q, k, v = torch.randn(2, 4, 17, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 8)
    out, found = attention(q, k, v, spec=spec, stats=stats, **how)  # type: ignore[call-overload]
    assert torch.allclose(out, attention(q, k, v, spec=spec, **how), atol=1e-6)
    exact = attention(q, k, v, spec=spec, stats=True, **how)[1].max_logit
    assert (found.lower <= exact + 1e-5).all()
    assert (found.upper >= exact - 1e-5).all()


NO_LOGSUMEXP: dict[str, tuple[AttentionSpec, dict, str]] = {
    "mask": (AttentionSpec(), {"mask": torch.rand(17, 17) < 0.8}, "a mask"),
    "dropout": (AttentionSpec(), {"dropout": 0.1}, "dropout"),
    "window": (AttentionSpec(position=SlidingWindow(window=4)), {"impl": "sdpa"}, "a window"),
    "fewer queries": (AttentionSpec(), {"t": 9}, "fewer causal queries than keys"),
    "narrow values": (AttentionSpec(), {"width": 4}, "values as wide as the queries"),
    "softcap": (AttentionSpec(cap=Softcap(5.0)), {}, "returns no logsumexp"),
}


@pytest.mark.parametrize("name", NO_LOGSUMEXP)
def test_a_pass_of_its_own_says_that_it_was_one_and_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, how, reason = NO_LOGSUMEXP[name]
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    how = dict(how)
    q, k, v = (
        torch.randn(2, 4, how.pop("t", 17), 8),
        torch.randn(2, 2, 17, 8),
        torch.randn(2, 2, 17, how.pop("width", 8)),
    )
    for stats in PRICES.values():
        found = attention(q, k, v, spec=spec, stats=stats, **how)[1]
        assert found.note.startswith("computed in a full pass over all logits: ")
        assert reason in found.note
        assert found.certified is not None
        assert found.certified.all()
    plain = attention(k, k, k, spec=AttentionSpec(), stats="max", impl="sdpa")[1]
    assert plain.note == ""


def test_gradients_are_those_without_statistics() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    spec = preset("baseline")
    plain = torch.autograd.grad(attention(q, k, v, spec=spec).cos().sum(), (q, k, v))
    for stats in PRICES:
        out, _ = attention(q, k, v, spec=spec, stats=stats)  # type: ignore[call-overload]
        ours = torch.autograd.grad(out.cos().sum(), (q, k, v))
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, plain))


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
    monkeypatch.setattr(statistics, "_FUSED", stand_ins)
    monkeypatch.setattr(statistics, "kernel_choice", lambda *_, **how: backends[kind].value)
    call = call_of("baseline", causal=causal)
    q, k, v, scale = folded(call)
    pair, truth = fused_with_logsumexp(q, k, v, causal, scale), attend_with_logsumexp(call)
    if kind == "math":
        assert pair is None
        return
    assert pair is not None
    assert truth is not None
    assert seen == [kind]
    for ours, theirs in zip(pair, truth):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_operators_of_a_gpu_take_what_they_are_given() -> None:
    # No GPU is needed to see that names and arguments are those of this torch.
    for backend, (operator, between) in statistics._FUSED.items():
        with pytest.raises(NotImplementedError, match="CPU"):
            operator(*(torch.randn(1, 2, 8, 8) for _ in range(3)), *between, True, scale=0.5)
        assert backend.value in {member.value for member in SDPBackend.__members__.values()}
