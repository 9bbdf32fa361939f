"""A step of Adam with a rate per line, by C++ and by Triton, is torch's fused one at rate 1 and scales it elsewhere."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

from qkeel.kernels.native import operators
from qkeel.kernels.native.operators import AdamOptions, AdamTensors, adamw_ready, scale_heads
from qkeel.kernels.triton import available

LISTS = ("weights", "gradients", "means", "variances", "maxima", "steps", "rates", "squares")
VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3}),
    (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
]


@pytest.fixture(params=["native", "triton"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """What takes the step: compiled operators, or Triton's kernels in its interpreter."""
    if request.param == "native":
        request.getfixturevalue("library")
        assert adamw_ready()
        return operators
    request.getfixturevalue("_triton")
    assert available.loaded()
    from qkeel.kernels.triton import adamw

    return adamw


compiled = pytest.mark.parametrize("kernels", ["native"], indirect=True)


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


def check_seeds(kernels: Any, seeds: range, device: str = "cpu") -> None:
    """Drawn weights and options give the formula in float64, and squares that are those of the weights alone."""
    for seed in seeds:
        torch.manual_seed(seed)
        t, o = any_tensors(random.Random(seed))
        told = f"seed {seed}: {[tuple(w.shape) for w in t.weights]}, {o}"
        there, expected = moved(t, device), truth(t, o)
        kernels.adam_lines(there, o)
        try:
            near(moved(there, "cpu"), expected, 2e-6)
        except AssertionError as error:
            raise AssertionError(told) from error
        left = [x.clone() for x in there.squares]
        for x in there.squares:
            x.fill_(torch.nan)
        kernels.sum_lines(there.weights, there.squares, there.axes)
        assert all(map(torch.equal, left, there.squares)), told


def moved(t: AdamTensors, device: str) -> AdamTensors:
    return dataclasses.replace(t, **{name: [x.to(device) for x in getattr(t, name)] for name in LISTS})


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 80), marks=pytest.mark.slow)], ids=str)
def test_any_weights_and_options_give_the_formula_in_float64_and_the_squares(kernels: Any, seeds: range) -> None:
    check_seeds(kernels, seeds)


@pytest.mark.parametrize(("kind", "more"), VARIANTS, ids=str)
@compiled
def test_at_rate_1_the_bits_are_those_of_torchs_fused_step(
    kernels: Any, kind: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    check_rate_1(kernels, kind, more, steps=50, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), VARIANTS, ids=str)
@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_at_rate_1_it_is_torchs_fused_step_to_a_few_roundings(
    kernels: Any, kind: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    check_rate_1(kernels, kind, more, steps=5, exact=False)


def check_rate_1(
    kernels: Any, kind: type[torch.optim.Optimizer], more: dict[str, Any], *, steps: int, exact: bool
) -> None:
    t = made((5, 64), (16, 8), (24,), top=more.get("amsgrad", False))
    t = dataclasses.replace(t, rates=[torch.ones_like(r) for r in t.rates])
    theirs = [nn.Parameter(w.clone()) for w in t.weights]
    torchs: Any = kind(theirs, lr=0.01, fused=True, **more)
    group = torchs.param_groups[0]
    o = options(
        beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], decay=group["weight_decay"],
        decoupled=kind is torch.optim.AdamW, maximize=group["maximize"],
    )  # fmt: skip
    for i in range(steps):
        for p, g in zip(theirs, t.gradients):
            g.copy_(torch.randn(g.shape) * 10.0 ** (i % 5 - 4))
            p.grad = g.clone()
        torchs.step()
        kernels.adam_lines(t, o)
    for i, p in enumerate(theirs):
        state = torchs.state[p]
        pairs = [(t.weights[i], p.detach()), (t.means[i], state["exp_avg"]), (t.variances[i], state["exp_avg_sq"])]
        pairs += [(t.maxima[i], state["max_exp_avg_sq"])] if t.maxima else []
        assert torch.equal(t.steps[i], state["step"])
        for mine, other in pairs:
            assert not exact or torch.equal(mine, other)
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-6 * float(other.abs().max()))


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
@compiled
def test_every_line_moves_by_its_rate_and_its_squares_are_summed(kernels: Any, axis: int, more: dict[str, Any]) -> None:
    top = more.get("top", False)
    t = made((3, 7), (33, 300), (64, 24), (13,), (1, 1), axis=axis, top=top, step=3.0)
    o = options(**{k: v for k, v in more.items() if k != "top"})
    expected = truth(t, o)
    kernels.adam_lines(t, o)
    near(t, expected, 1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_that_lies_crosswise_moves_the_same(kernels: Any, axis: int) -> None:
    t = made((12, 20), axis=axis, step=2.0)
    names = ("weights", "gradients", "means", "variances")
    lying = dataclasses.replace(copied(t), **{n: [x.T.contiguous().T for x in getattr(t, n)] for n in names})
    kernels.adam_lines(t, options())
    kernels.adam_lines(lying, options())
    near(lying, t, 1e-6)
    assert torch.equal(lying.weights[0], t.weights[0])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, where the interpreter divides
@pytest.mark.parametrize("axis", [0, 1])
def test_lines_at_rate_0_stay_and_nan_and_infinity_stay_in_their_places_as_in_torch(kernels: Any, axis: int) -> None:
    t = made((6, 16) if axis == 0 else (16, 6), axis=axis, step=1.0)
    t = dataclasses.replace(t, rates=[torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])])
    rows = [x[0] if axis == 0 else x[0].T for x in (t.weights, t.gradients, t.means, t.variances)]
    rows[1][0, 3], rows[1][1, 5], rows[3][2, 7] = torch.nan, torch.inf, torch.nan
    before, theirs = rows[0].clone(), copied(t)
    kernels.adam_lines(t, options())
    assert torch.equal(rows[0][4], before[4])
    assert not (rows[0][5] == before[5]).any()
    theirs.steps[0].add_(1)
    torch._fused_adamw_(
        *(list(x) for x in (theirs.weights, theirs.gradients, theirs.means, theirs.variances, [], theirs.steps)),
        lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    for mine, other in zip((t.weights, t.means, t.variances), (theirs.weights, theirs.means, theirs.variances)):
        assert torch.equal(mine[0].isnan(), other[0].isnan())
        assert torch.equal(mine[0].isinf(), other[0].isinf())
    assert t.squares[0].isfinite().tolist() == [False, False, False, True, True, True]


def test_what_moves_counts_as_changed(kernels: Any) -> None:
    t = made((2, 8), top=True)
    parts = (t.weights, t.means, t.variances, t.maxima, t.steps, t.squares)
    before = [x[0]._version for x in parts]
    seen = t.weights[0].detach()
    kernels.adam_lines(t, options())
    assert all(x[0]._version > old for x, old in zip(parts, before))
    assert seen._version == t.weights[0]._version
    assert t.gradients[0]._version == t.rates[0]._version == 0


@compiled
def test_heads_are_scaled_where_they_lie_and_those_at_1_are_not_touched(kernels: Any) -> None:
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
