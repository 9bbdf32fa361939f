"""Chunked attention and statistics hold O(T) numbers: no T×T tensor is made, and none is kept for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkeel import attention, preset, reference
from qkeel.spec import AttentionSpec, LeakyReRope, ReRope, Sink, Softcap, Softpick

# A square of this side is two of the largest blocks.
T = 2048
SPECS = {
    "qwen3": preset("qwen3"),
    "gemma2": preset("gemma2"),
    "softpick": AttentionSpec(normalizer=Softpick()),
    "capped sink": AttentionSpec(cap=Softcap(5.0), normalizer=Sink()),
}


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operator returned."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(
                    self.elements, x.untyped_storage().nbytes() // x.element_size()
                )
        return out


@contextmanager
def saved_elements() -> Iterator[list[int]]:
    """How many numbers autograd keeps for the backward pass, each storage once."""
    storages: dict[int, int] = {}
    total = [0]

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes() // x.element_size()
        total[0] = sum(storages.values())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total


def inputs(t: int = T) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, 1, t, 8, requires_grad=True) for _ in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("name", one_in(SPECS, 2))
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "padded"])
def test_chunked_attention_makes_no_square_tensor_forward_or_backward(
    name: str, masked: bool
) -> None:
    spec, t = SPECS[name], 2 * T
    params = {n: p.requires_grad_() for n, p in spec.init_params(1, 1, 8).items()}
    mask = (torch.arange(t) > 5)[None, None, None] if masked else None
    with Largest() as seen, saved_elements() as saved:
        out = attention(*inputs(t), spec=spec, params=params, mask=mask, impl="chunked")
        out.sum().backward()
    assert seen.elements <= t * t / 2
    assert saved[0] <= 64 * t


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "padded"])
def test_statistics_make_no_square_tensor(name: str, masked: bool) -> None:
    spec, t = SPECS[name], 2 * T
    mask = (torch.arange(t) > 5)[None, None, None] if masked else None
    params = spec.init_params(1, 1, 8)
    with Largest() as seen:
        attention(
            *inputs(t), spec=spec, params=params, mask=mask, impl="chunked", stats=True
        )
    assert seen.elements <= t * t / 4


@pytest.mark.parametrize("width", [8, 32])
def test_values_narrower_or_wider_than_queries_make_no_square_tensor(
    width: int,
) -> None:
    q, v = torch.randn(1, 1, 1024, 16), torch.randn(1, 1, 1024, width)
    with Largest() as seen:
        attention(q, q, v, spec=AttentionSpec(), impl="sdpa")
    assert seen.elements < 1024**2 / 8


def test_the_largest_tensor_does_not_grow_with_the_square_of_the_length() -> None:
    found = []
    for t in (T // 2, T):
        with Largest() as seen:
            attention(*inputs(t), spec=SPECS["gemma2"], impl="chunked").sum().backward()
        found.append(seen.elements)
    assert found[1] <= 2 * found[0]


@pytest.mark.parametrize(
    "position", [ReRope(window=64), LeakyReRope(window=2048, factor=8.0)]
)
def test_clipped_distances_make_no_square_tensor_forward_or_backward(
    position: ReRope,
) -> None:
    found = []
    for t in (T, 2 * T):
        with Largest() as seen, saved_elements() as saved:
            attention(
                *inputs(t), spec=AttentionSpec(position=position), impl="windowed"
            ).sum().backward()
        found.append((seen.elements, saved[0]))
    assert (
        found[1][0] <= 2 * found[0][0] <= 64 * 2 * T
    )  # 8 numbers a token; blocks are filled up to a window
    assert found[1][1] <= 128 * 2 * T


def test_the_measure_sees_the_square_tensors_of_the_oracle() -> None:
    t = 512
    with Largest() as seen, saved_elements() as saved:
        reference.attend(
            SPECS["qwen3"], *inputs(t), params=SPECS["qwen3"].init_params(1, 1, 8)
        ).out.sum().backward()
    assert seen.elements >= t * t
    assert saved[0] >= t * t
