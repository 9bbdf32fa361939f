"""The compiled step of Adam, line by line, is torch's fused one at rate 1 and scales it elsewhere."""

from __future__ import annotations

import dataclasses
import random
import resource
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qkeel.kernels.native.operators import AdamOptions, AdamTensors, adam_lines, adamw_ready, scale_heads

LISTS = ("weights", "gradients", "means", "variances", "maxima", "steps", "rates", "squares")
VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3}),
    (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
]


@pytest.fixture(autouse=True)
def _compiled(_on: None) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert adamw_ready()


def made(*shapes: tuple[int, ...], axis: int = 0, top: bool = False, step: float = 0.0) -> AdamTensors:
    """Weights of these shapes with a state, a gradient and random rates."""
    lines = [shape[axis if len(shape) == 2 else 0] for shape in shapes]
    return AdamTensors(
        weights=[torch.randn(s) for s in shapes],
        gradients=[torch.randn(s) for s in shapes],
        means=[torch.randn(s) * (step > 0) for s in shapes],
        variances=[torch.rand(s) * (step > 0) for s in shapes],
        maxima=[torch.rand(s) * (step > 0) for s in shapes] if top else [],
        steps=[torch.tensor(step) for _ in shapes],
        rates=[torch.rand(n) * 1.5 for n in lines],
        squares=[torch.full((n,), torch.nan, dtype=torch.float64) for n in lines],
        axes=[axis] * len(shapes),
    )


def options(**other: Any) -> AdamOptions:
    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.1, "decoupled": True, "maximize": False}
    return AdamOptions(**(usual | other))


def copied(t: AdamTensors, to: torch.dtype | None = None) -> AdamTensors:
    """The same numbers in tensors of their own, each as it lay in memory."""
    return dataclasses.replace(t, **{name: [x.clone().to(to or x.dtype) for x in getattr(t, name)] for name in LISTS})


def truth(t: AdamTensors, o: AdamOptions) -> AdamTensors:
    """The formulas of Kingma & Ba and of Loshchilov & Hutter in float64, and the rate beside them."""
    t = copied(t, torch.float64)
    for i, (w, m, v) in enumerate(zip(t.weights, t.means, t.variances)):
        g, old = -t.gradients[i] if o.maximize else t.gradients[i], w.clone()
        t.steps[i].add_(1)
        n = float(t.steps[i])
        kept = w * (1 - o.lr * o.decay) if o.decoupled else w
        g = g if o.decoupled else g + o.decay * w
        m.copy_(o.beta1 * m + (1 - o.beta1) * g)
        v.copy_(o.beta2 * v + (1 - o.beta2) * g * g)
        if t.maxima:
            torch.maximum(t.maxima[i], v, out=t.maxima[i])
        size = (t.maxima[i] if t.maxima else v) / (1 - o.beta2**n)
        new = kept - o.lr * m / (1 - o.beta1**n) / (size.sqrt() + o.eps)
        rate = t.rates[i] if w.ndim == 1 else t.rates[i].unsqueeze(1 - t.axes[i])
        start = kept if o.plain else old
        w.copy_(start + rate * (new - start))
        t.squares[i].copy_(w.square() if w.ndim == 1 else w.square().sum(1 - t.axes[i]))
    return t


def near(ours: AdamTensors, other: AdamTensors, tolerance: float) -> None:
    for name in LISTS:
        for mine, theirs in zip(getattr(ours, name), getattr(other, name), strict=True):
            torch.testing.assert_close(
                mine.double(), theirs.double(), rtol=tolerance, atol=tolerance * float(theirs.abs().max())
            )


def any_tensors(draw: random.Random) -> tuple[AdamTensors, Any]:
    """Weights of drawn shapes, some that lie crosswise, in a drawn state, and drawn options."""
    top, axis = draw.random() < 0.4, draw.randrange(2)
    sizes = [1, 3, 16, 33, 64, 80, 513]
    shapes = [(draw.choice(sizes), draw.choice(sizes)) for _ in range(draw.randint(1, 3))]
    t = made(*shapes, (draw.choice(sizes),), axis=axis, top=top, step=float(draw.choice([0, 1, 7, 3000])))
    if draw.random() < 0.5:
        names = ("weights", "gradients", "means", "variances", "maxima")
        laid = {n: [x.T.contiguous().T if x.ndim == 2 else x for x in getattr(t, n)] for n in names}
        t = dataclasses.replace(t, **laid)
    decoupled = draw.random() < 0.7
    o = options(
        lr=10 ** draw.uniform(-5, -1), beta1=draw.choice([0.0, 0.9, 0.95]), beta2=draw.choice([0.7, 0.99, 0.999]),
        eps=draw.choice([1e-8, 1e-3]), decay=draw.choice([0.0, 0.1, 0.5]), decoupled=decoupled,
        plain=decoupled and draw.random() < 0.4, maximize=draw.random() < 0.3,
    )  # fmt: skip
    return t, o


@pytest.mark.parametrize(("kind", "more"), VARIANTS, ids=str)
def test_at_rate_1_the_bits_are_those_of_torchs_fused_step(
    kind: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    shapes = [(5, 64), (16, 8), (24,)]
    t = made(*shapes, top=more.get("amsgrad", False))
    t = dataclasses.replace(t, rates=[torch.ones_like(r) for r in t.rates])
    theirs = [torch.nn.Parameter(w.clone()) for w in t.weights]
    torchs: Any = kind(theirs, lr=0.01, fused=True, **more)
    group = torchs.param_groups[0]
    o = options(
        beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], decay=group["weight_decay"],
        decoupled=kind is torch.optim.AdamW, maximize=group["maximize"],
    )  # fmt: skip
    for i in range(50):
        for p, g in zip(theirs, t.gradients):
            g.copy_(torch.randn(g.shape) * 10.0 ** (i % 5 - 4))
            p.grad = g.clone()
        torchs.step()
        adam_lines(t, o)
    for i, p in enumerate(theirs):
        state = torchs.state[p]
        assert torch.equal(t.weights[i], p)
        assert torch.equal(t.means[i], state["exp_avg"])
        assert torch.equal(t.variances[i], state["exp_avg_sq"])
        assert torch.equal(t.steps[i], state["step"])
        assert not t.maxima or torch.equal(t.maxima[i], state["max_exp_avg_sq"])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"plain": True},
        {"decoupled": False},
        {"maximize": True, "decay": 0.0},
        {"top": True},
        {"top": True, "decoupled": False},
        {"top": True, "plain": True},
    ],
    ids=str,
)
def test_every_line_moves_by_its_rate_and_its_squares_are_summed(axis: int, more: dict[str, Any]) -> None:
    top = more.get("top", False)
    t = made((3, 7), (33, 300), (64, 24), (13,), (1, 1), axis=axis, top=top, step=3.0)
    o = options(**{k: v for k, v in more.items() if k != "top"})
    expected = truth(t, o)
    adam_lines(t, o)
    near(t, expected, 1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_that_lies_crosswise_moves_the_same(axis: int) -> None:
    t = made((12, 20), axis=axis, step=2.0)
    names = ("weights", "gradients", "means", "variances")
    lying = dataclasses.replace(copied(t), **{n: [x.T.contiguous().T for x in getattr(t, n)] for n in names})
    adam_lines(t, options())
    adam_lines(lying, options())
    near(lying, t, 1e-6)
    assert torch.equal(lying.weights[0], t.weights[0])


def test_a_line_at_rate_0_stays_bit_for_bit() -> None:
    t = made((4, 40), step=1.0)
    t.rates[0][1] = 0
    before = t.weights[0].clone()
    adam_lines(t, options())
    assert torch.equal(t.weights[0][1], before[1])
    assert not (t.weights[0][0] == before[0]).any()


def test_infinite_and_missing_numbers_stay_in_their_places_as_in_torch() -> None:
    t = made((4, 16), step=1.0)
    t = dataclasses.replace(t, rates=[torch.ones(4)])
    t.gradients[0][0, 3], t.gradients[0][1, 5], t.variances[0][2, 7] = torch.nan, torch.inf, torch.nan
    theirs = copied(t)
    adam_lines(t, options())
    theirs.steps[0].add_(1)
    torch._fused_adamw_(
        *(list(x) for x in (theirs.weights, theirs.gradients, theirs.means, theirs.variances, [], theirs.steps)),
        lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    for mine, other in zip((t.weights, t.means, t.variances), (theirs.weights, theirs.means, theirs.variances)):
        assert torch.equal(mine[0].nan_to_num(7.0), other[0].nan_to_num(7.0))
    assert t.squares[0].isfinite().tolist() == [False, False, False, True]


@pytest.fixture
def _threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("axis", [0, 1])
def test_threads_change_no_bit(axis: int) -> None:
    start = made((300, 512), (700, 90), axis=axis, step=1.0)
    found = []
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        t = copied(start)
        adam_lines(t, options())
        found.append(t)
    for other in found[1:]:
        assert all(torch.equal(a, b) for n in LISTS for a, b in zip(getattr(found[0], n), getattr(other, n)))


def test_what_moves_counts_as_changed() -> None:
    t = made((2, 8), top=True)
    parts = (t.weights, t.means, t.variances, t.maxima, t.steps, t.squares)
    before = [x[0]._version for x in parts]
    seen = t.weights[0].detach()
    adam_lines(t, options())
    assert all(x[0]._version > old for x, old in zip(parts, before))
    assert seen._version == t.weights[0]._version
    assert t.gradients[0]._version == t.rates[0]._version == 0


def called(t: AdamTensors) -> tuple[Any, ...]:
    return (*(list(getattr(t, n)) for n in LISTS), list(t.axes), 0.01, 0.9, 0.99, 1e-8, 0.1, True, False, False)


def test_torch_accepts_the_operator() -> None:
    for top in (False, True):
        torch.library.opcheck(torch.ops.qkeel_native.adam_lines.default, called(made((3, 9), (8,), top=top, step=1.0)))


def test_wrong_tensors_raise_and_do_not_crash() -> None:
    good = made((3, 8), (5, 8))
    wrong: dict[str, Tensor] = {
        "weights": torch.randn(5, 16)[:, ::2],
        "gradients": torch.randn(5, 7),
        "means": torch.randn(5, 8, dtype=torch.float64),
        "variances": torch.randn(8, 5).T,
        "steps": torch.zeros(2),
        "rates": torch.ones(8),
        "squares": torch.zeros(5),
    }
    for name, x in wrong.items():
        with pytest.raises(RuntimeError, match="expected"):
            adam_lines(dataclasses.replace(good, **{name: [getattr(good, name)[0], x]}), options())
        with pytest.raises(RuntimeError, match="expected 2"):
            adam_lines(dataclasses.replace(good, **{"gradients": good.gradients[:1]}), options())
    with pytest.raises(RuntimeError, match="axis"):
        adam_lines(dataclasses.replace(good, axes=[0, 2]), options())
    assert float(good.steps[0]) == 0  # nothing moved


@pytest.mark.usefixtures("_threads")
def test_heads_are_scaled_where_they_lie_and_those_at_1_are_not_touched() -> None:
    for threads in (1, 8):
        torch.set_num_threads(threads)
        weight, columns, fused = torch.randn(12, 20), torch.randn(20, 12), torch.randn(24, 9)
        heads = [weight.view(3, 4, 20), columns.mT.view(3, 4, 20), fused.as_strided((3, 4, 9), (72, 9, 1), 36)]
        factors = [torch.tensor([0.5, 1.0, 0.1]), torch.ones(3), torch.tensor([1.0, 1.0, 1.0, 0.25])[1:]]
        expected = [h * f[:, None, None] for h, f in zip(heads, factors)]
        rest = fused[:4].clone()
        versions = [h._version for h in heads]
        scale_heads(heads, factors)
        assert all(map(torch.equal, heads, expected))
        assert torch.equal(fused[:4], rest)
        assert all(h._version > v for h, v in zip(heads, versions))
        scale_heads([columns.mT.view(3, 4, 20)], [torch.full((3,), 2.0)])
        assert torch.equal(columns.mT.view(3, 4, 20), 2 * expected[1])
    scale_heads([], [])
    torch.library.opcheck(torch.ops.qkeel_native.scale_heads.default, ([torch.randn(2, 3, 4)], [torch.rand(2)]))
    for x, f in [(torch.randn(2, 3), torch.rand(2)), (torch.randn(2, 3, 4), torch.rand(3)), (torch.randn(2, 3, 4), 1)]:
        with pytest.raises(RuntimeError):
            scale_heads([x], [f])  # type: ignore[list-item]


def test_ten_thousand_calls_keep_no_memory() -> None:
    t = made((64, 64), (64, 64), axis=1)

    def call(times: int) -> int:
        for _ in range(times):
            adam_lines(t, options())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(500)
    assert call(10_000) - before < 8 * 1024
