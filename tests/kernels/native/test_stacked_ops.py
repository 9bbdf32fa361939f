"""What a stack of runs is computed by: each run's numbers are right, and its own alone."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.kernels.native import operators

pytestmark = pytest.mark.usefixtures("library", "_poison")
OWN = torch.ops.qkeel_native


@pytest.fixture
def _poison() -> Iterator[None]:
    """Memory that is not written holds NaN."""
    assert operators.stacked_ready()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


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
    "gelu": (gelu, lambda: (torch.randn(5, 70, 1001),)),
    "norms": (norm, lambda: (torch.randn(5, 700, 64), torch.randn(5, 64), torch.randn(5, 700, 64))),
    "losses": (entropy, lambda: (torch.randn(5, 300, 259), torch.randint(259, (5, 300)))),
    "clipping": (lambda x: (operators.clip_([x], 1.0), x), lambda: (torch.randn(5, 3001),)),
}


@pytest.mark.parametrize("name", CASES)
def test_neither_threads_nor_other_runs_change_a_bit(name: str) -> None:
    function, make = CASES[name]
    given = make()
    found = function(*(x.clone() for x in given))
    for threads in (2, 8):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, function(*(x.clone() for x in given)), found))
    for r in (0, 3):
        own = function(*(x[r : r + 1].clone() for x in given))
        if name != "gelu":
            assert all(torch.equal(a[0], b[r]) for a, b in zip(own, found))


def test_a_run_that_is_not_finite_leaves_the_others_alone() -> None:
    gradients = [torch.randn(3, 50), torch.randn(3, 8, 8)]
    expected = [g.clone() for g in gradients]
    operators.clip_(expected, 0.5)
    gradients[0][1, 7] = float("nan")
    norms = operators.clip_(gradients, 0.5)
    assert norms.isnan().tolist() == [False, True, False]
    assert all(torch.equal(g[[0, 2]], e[[0, 2]]) for g, e in zip(gradients, expected))


@pytest.mark.slow
def test_torch_accepts_the_operators() -> None:
    x, w, gain = torch.randn(2, 3, 8), torch.randn(2, 16, 8), torch.randn(2, 8)
    y, inverse = operators.rms_norm(x, gain, 1e-6)
    calls = {
        OWN.stacked_linear.default: (x, w),
        OWN.stacked_linear_backward.default: (torch.randn(2, 3, 16), x, w),
        OWN.stacked_gelu_.default: (x.clone(),),
        OWN.stacked_rms_norm.default: (x, gain, 1e-6),
        OWN.stacked_rms_norm_backward.default: (y, x, inverse, gain),
        OWN.stacked_cross_entropy_.default: (x.clone(), torch.zeros(2, 3, dtype=torch.int64), True),
        OWN.stacked_clip_.default: ([x.clone()], 1.0),
        OWN.stacked_adamw_.default: (
            *([x.clone()] for _ in range(4)),
            torch.zeros(1, 2),
            torch.ones(1, 2, dtype=torch.float64),
            [0.0, 0.0],
            0.9,
            0.95,
            1e-8,
        ),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments)


def test_wrong_tensors_raise_and_do_not_crash() -> None:
    x, w, gain, targets = torch.randn(2, 3, 8), torch.randn(2, 16, 8), torch.randn(2, 8), torch.zeros(2, 3).long()
    wrong: list[Callable[[], object]] = [
        lambda: operators.linear(x.double(), w.double()),
        lambda: operators.linear(x, w[:, :7].contiguous()),
        lambda: operators.linear(x, w[:1]),
        lambda: operators.linear_backward(x, x, w),
        lambda: operators.gelu_(x.mT),
        lambda: operators.rms_norm(x[0], None, 1e-6),
        lambda: operators.rms_norm(x, gain[:1], 1e-6),
        lambda: operators.rms_norm_backward(x, x, torch.zeros(1), gain),
        lambda: operators.cross_entropy_(x, targets + 8, True),
        lambda: operators.cross_entropy_(x, targets[:, :1].contiguous(), True),
        lambda: operators.clip_([], 1.0),
        lambda: operators.clip_([x, x[:1]], 1.0),
        lambda: operators.adamw_(
            [x], [w], ([x], [x], torch.zeros(1, 2)), torch.ones(1, 2).double(), ([0.0] * 2, 0.9, 0.9, 1)
        ),
    ]
    for call in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            call()


def test_ten_thousand_calls_keep_no_memory() -> None:
    given = [
        make() for _, make in ((1, CASES["products"][1]), (1, lambda: (torch.randn(2, 40, 64), torch.randn(2, 64))))
    ]

    def call(times: int) -> int:
        for _ in range(times):
            operators.linear(*given[0][:2])
            operators.rms_norm(*given[1], 1e-6)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = call(300)
    assert call(5000) - before < 8 * 1024
