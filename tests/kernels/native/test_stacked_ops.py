"""What a stack of runs is computed by: each run's numbers are right, and its own alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.kernels.native import operators

pytestmark = pytest.mark.usefixtures("_ready", "_poisoned")


@pytest.fixture
def _ready(library: object) -> None:
    assert operators.stacked_ready()


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [x.double().requires_grad_() for x in tensors]


def linear(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return operators.linear(x, w), *operators.linear_backward(dy, x, w)


def gelu(x: Tensor) -> tuple[Tensor, ...]:
    slope = x.clone()
    return operators.gelu_(slope), slope


def norm(x: Tensor, gain: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y, inverse = operators.rms_norm(x, gain, 1e-6)
    return y, *operators.rms_norm_backward(dy, x, inverse, gain)


def entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    share = logits.clone()
    return operators.cross_entropy_(share, targets, grad=True), share


SIZES = [(1, 8, 8), (7, 24, 40), (256, 64, 256), (129, 264, 64)]


@pytest.mark.parametrize(("rows", "inside", "out"), SIZES)
def test_products_and_their_gradients_are_those_of_float64(rows: int, inside: int, out: int) -> None:
    given = torch.randn(3, rows, inside), torch.randn(3, out, inside), torch.randn(3, rows, out)
    x, w, dy = doubled(*given)
    y = x @ w.mT
    y.backward(dy.detach())
    for mine, right in zip(linear(*given), (y, x.grad, w.grad)):
        assert right is not None
        torch.testing.assert_close(mine.double(), right.detach(), rtol=1e-5, atol=1e-6 * max(rows, inside, out) ** 0.5)


def test_gelu_and_its_slope_are_those_of_float64() -> None:
    numbers = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4])])
    (x,) = doubled(numbers)
    F.gelu(x).sum().backward()
    y, slope = gelu(numbers)
    assert x.grad is not None
    torch.testing.assert_close(y.double(), F.gelu(x).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slope.double(), x.grad, rtol=1e-6, atol=1e-6)
    assert all(x.isnan().all() for x in gelu(torch.tensor([float("nan")] * 9)))


@pytest.mark.parametrize(("rows", "d"), [(1, 8), (7, 24), (129, 64), (64, 256)])
def test_norms_and_their_gradients_are_those_of_float64(rows: int, d: int) -> None:
    given = torch.randn(3, rows, d), 1 + 0.2 * torch.randn(3, d), torch.randn(3, rows, d)
    x, gain, dy = doubled(*given)
    y = F.rms_norm(x, (d,), None, 1e-6) * gain[:, None]
    y.backward(dy.detach())
    for mine, right in zip(norm(*given), (y, x.grad, gain.grad)):
        assert right is not None
        torch.testing.assert_close(mine.double(), right.detach(), rtol=1e-5, atol=1e-6 * rows)
    bare, _ = operators.rms_norm(given[0], None, 1e-6)
    torch.testing.assert_close(bare.double(), (y / gain[:, None]).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 5, 64, 259])
def test_losses_and_their_gradients_are_those_of_float64(vocab: int) -> None:
    logits, targets = 4 * torch.randn(3, 17, vocab), torch.randint(vocab, (3, 17))
    logits[0, 0] += 1e4
    (z,) = doubled(logits)
    losses = torch.stack([F.cross_entropy(a, b) for a, b in zip(z, targets)])
    losses.sum().backward()
    found, share = entropy(logits, targets)
    assert z.grad is not None
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(share.double(), z.grad, rtol=1e-5, atol=1e-7)
    kept = logits.clone()
    assert torch.equal(operators.cross_entropy_(kept, targets, grad=False), found)
    assert torch.equal(kept, logits)
    same = operators.cross_entropy_(kept, targets[1].contiguous(), grad=False)
    assert torch.equal(same[1], found[1]), "the same targets for all runs"


def test_clipping_and_adamw_are_torchs_of_each_run() -> None:
    shapes, rates = ((24, 8), (5,), (70, 40)), (0.1, 0.003)
    whole = [torch.randn(2, *shape) for shape in shapes]
    own = [[torch.nn.Parameter(w[r].clone()) for w in whole] for r in range(2)]
    decays = (0.1, 3.0)
    each = zip(own, rates, decays)
    adams = [torch.optim.AdamW(o, lr=lr, betas=(0.9, 0.95), weight_decay=wd, fused=True) for o, lr, wd in each]
    state = [torch.zeros_like(w) for w in whole], [torch.zeros_like(w) for w in whole], torch.zeros(3, 2)
    table = torch.tensor([rates] * 3, dtype=torch.float64)
    for size in (10.0, 1e-3, 1.0):
        gradients = [size * torch.randn_like(w) for w in whole]
        norms = []
        for r, adam in enumerate(adams):
            for p, g in zip(own[r], gradients):
                p.grad = g[r].clone()
            norms.append(torch.nn.utils.clip_grad_norm_(own[r], 1.0))
            adam.step()
        torch.testing.assert_close(operators.clip_(gradients, 1.0), torch.stack(norms), rtol=1e-6, atol=0)
        operators.adamw_(whole, gradients, state, table, (decays * 3, 0.9, 0.95, 1e-8))
    for i, w in enumerate(whole):
        torch.testing.assert_close(w, torch.stack([o[i].detach() for o in own]), rtol=1e-5, atol=1e-6)
    assert state[2].tolist() == [[3.0, 3.0]] * 3
    before = [w.clone() for w in whole]
    table[1, 0] = -1.0
    operators.adamw_(whole, gradients, state, table, (decays * 3, 0.9, 0.95, 1e-8))
    assert torch.equal(whole[1][0], before[1][0]), "what has a rate below 0 is left alone"
    assert not torch.equal(whole[1][1], before[1][1])
    assert state[2].tolist() == [[4.0, 4.0], [3.0, 4.0], [4.0, 4.0]]


CASES: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]] = {
    "products": (linear, lambda: (torch.randn(5, 70, 24), torch.randn(5, 40, 24), torch.randn(5, 70, 40))),
    "norms": (norm, lambda: (torch.randn(5, 700, 64), torch.randn(5, 64), torch.randn(5, 700, 64))),
    "losses": (entropy, lambda: (torch.randn(5, 300, 259), torch.randint(259, (5, 300)))),
    "clipping": (lambda x: (operators.clip_([x], 1.0), x), lambda: (torch.randn(5, 3001),)),
}


@pytest.mark.parametrize("name", CASES)
def test_other_runs_change_no_bit(name: str) -> None:
    function, make = CASES[name]
    given = make()
    found = function(*(x.clone() for x in given))
    for r in (0, 3):
        own = function(*(x[r : r + 1].clone() for x in given))
        assert all(torch.equal(a[0], b[r]) for a, b in zip(own, found))


def test_a_run_that_is_not_finite_leaves_the_others_alone() -> None:
    gradients = [torch.randn(3, 50), torch.randn(3, 8, 8)]
    expected = [g.clone() for g in gradients]
    operators.clip_(expected, 0.5)
    gradients[0][1, 7] = float("nan")
    norms = operators.clip_(gradients, 0.5)
    assert norms.isnan().tolist() == [False, True, False]
    assert all(torch.equal(g[[0, 2]], e[[0, 2]]) for g, e in zip(gradients, expected))
