"""Laws that every norm of `spec.norm` keeps, a class that was added yesterday included: the classes are looked up."""

from __future__ import annotations

import itertools
from typing import get_args, get_type_hints

import pytest
import torch
from tests.each_row import each_row
from torch import Tensor

from qkeel import attention, reference, spec
from qkeel.spec import AttentionSpec, L2Norm, LayerNorm, NoNorm, RMSNorm, Rope

CLASSES = [
    x
    for name in spec.__all__
    if "gain" in getattr(x := getattr(spec, name), "__dataclass_fields__", {})
]
GAINS: tuple[str, ...] = get_args(get_type_hints(RMSNorm)["gain"])
GainNorm = L2Norm | LayerNorm | RMSNorm


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 6, 8, dtype=torch.float64, generator=rng).to(dtype)
        for heads in (4, 2, 2)
    )
    return q, k, v


def learned(spec: AttentionSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The spec's parameters away from where they start."""
    rng = torch.Generator().manual_seed(1)
    return {
        n: p.to(dtype) + 0.1 * torch.randn(p.shape, generator=rng)
        for n, p in spec.init_params(4, 2, 8).items()
    }


@each_row("kind", CLASSES)
def test_a_norm_is_of_one_vector_alone_and_keeps_its_dtype(
    kind: type[GainNorm],
) -> None:
    norm, (q, _, _) = kind(on="q"), qkv()
    whole = norm.apply("q", q, {})
    alone = torch.stack([norm.normalise(x) for x in q.flatten(0, 2)])
    torch.testing.assert_close(alone.view_as(whole), whole, rtol=1e-12, atol=0)
    assert torch.equal(
        kind(over="layer").apply("q", q, {})[:, :, :3],
        kind(over="layer").apply("q", q[:, :, :3], {}),
    )
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):  # squares of these are beyond float16
        large = (2000 * q).to(dtype)
        found = norm.apply("q", large, {})
        assert found.dtype == dtype
        exact = norm.apply("q", large.double(), {})
        torch.testing.assert_close(
            found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6
        )


@pytest.mark.parametrize("kind", CLASSES)
def test_every_gain_starts_at_the_norm_without_one(kind: type[GainNorm]) -> None:
    q, k, v = qkv()
    for gain, over in itertools.product(GAINS, ("head", "layer")):
        spec, plain = (
            AttentionSpec(norm=kind(on="qkv", over=over, gain=g))
            for g in (gain, "none")
        )  # type: ignore[arg-type]
        start = spec.init_params(4, 2, 8)
        found = reference.attend(spec, q, k, v, params=start).out
        assert torch.equal(found, reference.attend(plain, q, k, v).out), (gain, over)


@pytest.mark.parametrize("kind", CLASSES)
def test_kernels_agree_with_the_oracle_about_a_norm(
    kind: type[GainNorm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "QKEEL_NATIVE", "1"
    )  # compiled kernels as well: a class that names a wrong kind shows
    q, k, v = qkv(torch.float32)
    for gain, on, impl in itertools.product(
        GAINS, ("qk", "k", "qkv"), ("auto", "chunked")
    ):
        spec = AttentionSpec(norm=kind(on=on, gain=gain), position=Rope())  # type: ignore[arg-type]
        params = learned(spec, torch.float32)
        exact = {name: p.double() for name, p in params.items()}
        truth = reference.attend(
            spec, q.double(), k.double(), v.double(), params=exact
        ).out
        found = attention(q, k, v, spec=spec, params=params, impl=impl)
        torch.testing.assert_close(
            found.double(), truth, rtol=0, atol=3e-6, msg=lambda m, s=spec: f"{s}: {m}"
        )


@each_row("norm", [NoNorm(), *(kind(gain=gain) for kind in CLASSES for gain in GAINS)])
def test_a_norm_commutes_with_a_rotation_where_it_says_so(
    norm: GainNorm | NoNorm,
) -> None:
    (q, k, _), pos = qkv(), torch.arange(6)[None]
    ends = []
    for order in ("norm_then_rotate", "rotate_then_norm"):
        spec = AttentionSpec(norm=norm, position=Rope(order=order))  # type: ignore[arg-type]
        ends.append(spec.encode(q, k, pos, pos, learned(spec, torch.float64))[0])
    same = torch.allclose(*ends, rtol=0, atol=1e-6)
    assert same == norm.commutes_with_rotation or (
        same and norm.kind == "other"
    )  # of another nothing is known
