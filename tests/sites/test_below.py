"""What a function mode can't see is seen operator by operator: scripts, vmap, attention called by its operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import find_sites
from qkeel.capture.calls import statistics
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.functional.statistics import LogitStats, merge

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented"),
]

B, H, T, D = 2, 4, 6, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.size(-2), k.size(-2)).tril() == 0
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1), v)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked_softmax(scores: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(scores.size(-2), scores.size(-1)).tril() == 0
    return torch.softmax((scores * scale).masked_fill(hidden, -float("inf")), dim=-1)


def softmax_in_a_script() -> Attend:
    softmax = torch.jit.script(masked_softmax)
    return lambda q, k, v: softmax(q @ k.mT, D**-0.5) @ v


def heads_one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(attention, in_dims=1, out_dims=1)(q, k, v)


# How to make it, and whether only the second pass sees it.
WAYS: dict[str, tuple[Callable[[], Attend], bool]] = {
    "script": (lambda: torch.jit.script(attention), True),
    "fused script": (lambda: torch.jit.script(fused), True),
    "script of the softmax alone": (softmax_in_a_script, True),
    "vmap over the batch": (lambda: torch.func.vmap(attention), True),
    "vmap over heads": (lambda: heads_one_by_one, True),
    "vmap of a fused function": (lambda: torch.func.vmap(fused), True),
    "operator": (lambda: lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True), False),
    "overload": (
        lambda: lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True),
        False,
    ),
    "plain": (lambda: attention, False),
}
every_way = pytest.mark.parametrize("name", WAYS)


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.n_head, self.attend = H, attend
        self.c_attn = nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (H, D)).transpose(1, 2) for y in self.c_attn(x).split(H * D, dim=2))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def seen(model: nn.Module, x: Tensor, *, dispatch: bool) -> tuple[Tensor, list[LogitStats], list[bool]]:
    found: list[LogitStats] = []
    below: list[bool] = []

    def note(sighting: CapturedCall) -> None:
        found.append(statistics(sighting.call))
        below.append(sighting.below)

    with torch.no_grad(), CaptureMode(model, note, dispatch=dispatch):
        out = model(x)
    return out, found, below


@every_way
def test_statistics_are_the_plain_ones_and_the_output_is_the_same(name: str) -> None:
    make, only_below = WAYS[name]
    model = Block(make())
    x = torch.randn(B, T, H * D)
    with torch.no_grad():
        expected = model(x)
    out, found, below = seen(model, x, dispatch=True)
    assert torch.equal(out, expected)
    # From 2.14 on torch has no batching rule for its fused kernel on a CPU: it is called sample by sample.
    assert len(found) == 1 or (name == "vmap of a fused function" and len(found) == B)
    assert below == [only_below] * len(found)
    stats = merge(*found)
    model.attend = attention
    _, (plain,), _ = seen(model, x, dispatch=False)
    torch.testing.assert_close(stats.max_logit, plain.max_logit, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, plain.entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(stats.n_pairs, plain.n_pairs)


@every_way
def test_without_the_second_pass_what_is_below_is_not_seen_and_nothing_breaks(name: str) -> None:
    make, only_below = WAYS[name]
    model, x = Block(make()), torch.randn(B, T, H * D)
    with torch.no_grad():
        expected = model(x)
    out, found, _ = seen(model, x, dispatch=False)
    assert torch.equal(out, expected)
    assert len(found) == (0 if only_below else 1)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H * D, H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(x.size(0), x.size(1), 4, 8).transpose(1, 2)
        k = self.k(x).view(x.size(0), x.size(1), 4, 8).transpose(1, 2)
        return (torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ k).transpose(1, 2).flatten(2)


class Also(Scripted):
    """Scripts of one class share what they optimised: one class per test."""


def test_functional_calls_and_their_gradients_are_seen() -> None:
    model, x = Block(attention), torch.randn(B, T, H * D)
    _, (plain,), _ = seen(model, x, dispatch=False)
    params = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x,)).sum()

    runs: dict[str, tuple[Callable[[], object], bool]] = {
        "functional_call": (lambda: loss(params, x), False),
        "grad": (lambda: torch.func.grad(loss)(params, x), False),
        "gradients per sample": (
            lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x[:, None]),
            True,
        ),
    }
    for name, (run, dispatch) in runs.items():
        found: list[LogitStats] = []
        with CaptureMode(model, lambda s: found.append(statistics(s.call)), dispatch=dispatch):  # noqa: B023
            run()
        (stats,) = found
        torch.testing.assert_close(stats.max_logit, plain.max_logit, msg=name)
        torch.testing.assert_close(stats.entropy, plain.entropy, msg=name)


def test_training_under_the_second_pass_is_bit_for_bit_the_same() -> None:
    def train(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(torch.jit.script(attention)), Block(attention), Block(fused))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            x = torch.randn(B, T, H * D, generator=torch.Generator().manual_seed(step))
            if watched:
                found: list[LogitStats] = []
                with CaptureMode(model, lambda s: found.append(statistics(s.call)), dispatch=True):  # noqa: B023
                    loss = model(x).square().mean()
                assert len(found) == 3
            else:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(train(watched=False), train(watched=True)):
        assert torch.equal(a, b)


def test_what_one_watcher_computes_is_no_attention_to_another() -> None:
    model, x = Block(attention), torch.randn(B, T, H * D)
    counts = [0, 0]

    def note(i: int, sighting: CapturedCall) -> None:
        statistics(sighting.call)  # exponentials over their sums
        counts[i] += 1

    outer, inner = (
        CaptureMode(model, functools.partial(note, i), dispatch=dispatch) for i, dispatch in ((0, True), (1, False))
    )
    with outer, inner:
        model(x)
    assert counts == [1, 1]


def test_a_product_with_a_view_of_a_weight_makes_no_scores() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(H, D, D))

        def forward(self, x: Tensor) -> Tensor:
            q = torch.bmm(x, self.w.mT)  # tagged, q @ k would be no product of two activations
            return torch.softmax(q @ x.mT, dim=-1) @ x

    (site,) = find_sites(Experts(), torch.randn(H, T, D))
    assert site.head_dim == D
