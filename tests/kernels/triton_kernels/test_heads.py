"""The Triton kernels for heads of many weights give their definitions, in float64, of every layout and dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor, nn

import qkeel
from qkeel.kernels.triton import available
from qkeel.monitor import weight_norms
from qkeel.remedies import qk_clip

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def heads(dtype: torch.dtype, device: str, even: bool) -> list[Tensor]:
    """Views [n r m]: dense rows, more than a program takes; else columns, interleaved rows and a vector as well."""
    rows, wide = (torch.randn(shape).to(device, dtype) for shape in ((4 * 16, 80), (2 * 64, 96)))
    views = [rows.view(4, 16, 80), wide.view(2, 64, 96)]
    if even:
        return views
    columns, mixed, vector = (torch.randn(shape).to(device, dtype) for shape in ((50, 2 * 24), (10, 7), (3,)))
    return [*views, columns.as_strided((2, 24, 50), (24, 1, 48)), mixed.view(2, 5, 7).mT, vector[:, None, None]]


def check(dtype: torch.dtype, device: str, even: bool) -> None:
    """A copy with norms, then moves and scalings, against float64."""
    views = heads(dtype, device, even)
    table = available.head_table(views)
    assert table._how["EVEN"] is even
    old = [v.double() for v in views]
    copy, norms = table.copy_and_norms()
    true = torch.cat([v.flatten(1).norm(dim=1) for v in old])
    assert ((norms - true) / true).abs().max() <= 1e-6
    for v in views:
        v.add_(torch.randn_like(v) / 8)
    new = [v.double() for v in views]
    n = len(true)
    factors, keeps = 2 * torch.rand(n, device=device), torch.rand(n, device=device)
    factors[::3], factors[1] = 1.0, 0.0
    split = [len(v) for v in views]
    for kept in (None, keeps):
        for v, w in zip(views, new):
            v.copy_(w)
        table.move(copy, factors, kept)
        decay = torch.ones_like(keeps) if kept is None else kept
        for v, a, b, f, k in zip(views, old, new, factors.split(split), decay.split(split)):
            start, f = k.double()[:, None, None] * a, f.double()[:, None, None]
            near(v, torch.where(f == 1, b, start + f * (b - start)), b)
            assert torch.equal(v[f.flatten() == 1].double(), b[f.flatten() == 1])
    old = [v.double() for v in views]
    table.scale(factors)
    for v, a, f in zip(views, old, factors.split(split)):
        near(v, f.double()[:, None, None] * a, a)
        assert torch.equal(v[f == 1].double(), a[f == 1])
    kept = [v.clone() for v in views]
    table.move(table.copy(), torch.zeros_like(factors), None)
    assert all(map(torch.equal, views, kept))


@pytest.mark.usefixtures("_poisoned")
def test_norms_and_grams_of_all_weights_take_three_launches_and_are_those_of_float64(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_norms, "UNSTACKED", ())  # as on a GPU

    def dense(n: int, r: int, m: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(n, r, m).to(dtype)

    for dtype in (torch.float32, torch.float16):  # of bfloat16 the interpreter has no products
        rows = [dense(2, 80, 72, dtype), dense(1, 80, 48, dtype)]
        columns = [torch.randn(40, 3 * 80).to(dtype).as_strided((3, 16, 40), (16, 1, 240)) for _ in range(2)]
        whole, cut = (
            (rows, columns),
            ([*rows, dense(2, 80, 7, dtype)], [dense(2, 5, 3, dtype).mT, dense(4, 3, 1, dtype)]),
        )
        for weights in whole if dtype == torch.float16 else cut:
            heads = [*weights, *(torch.randn_like(w) for w in weights), dense(2, 9, 5, dtype)]
            launches.clear()
            sizes = [w.shape[1] for w in heads]
            ((numbers, norms),) = weight_norms.norms_and_grams(heads, sizes, len(weights))[0]
            true = torch.cat([heads[i].double().flatten(1).norm(dim=1) for i in numbers])
            assert ((norms - true) / true).abs().max() <= 1e-6
            ((of, grams),) = weight_norms.norms_and_grams(heads, sizes, len(weights))[1]
            assert sorted(of) == list(range(len(weights)))
            exact = torch.cat([heads[i].double() @ heads[i].double().mT for i in of])
            assert (grams - exact).abs().max() <= 2e-6 * exact.abs().max()
            assert launches == {"_copy": 2, "_norms": 2, "_grams": 2}
    weights[0][1, 2, 0] = torch.nan
    assert weight_norms.norms_and_grams(weights, [w.shape[1] for w in weights], 1)[1][0][1][1].isnan().any()


def near(found: Tensor, true: Tensor, new: Tensor) -> None:
    """Within a rounding; Triton's interpreter cuts bfloat16 off instead of rounding it."""
    size = max(float(true.abs().max()), float(new.abs().max()))
    assert (found.double() - true).abs().max() <= torch.finfo(found.dtype).eps * size


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", one_in(DTYPES, 3), ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_heads_are_copied_measured_interpolated_and_scaled(dtype: torch.dtype, even: bool) -> None:
    check(dtype, "cpu", even)


def test_three_and_four_make_five_and_half_a_step_is_half_way() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    table = available.head_table([weight.view(2, 1, 2)])
    old, norms = table.copy_and_norms()
    assert norms.tolist() == [5.0, 2.0]
    weight.copy_(torch.tensor([[4.0, 4.0], [1.0, 1.0]]))
    table.move(old, torch.tensor([0.5, 0.0]), None)
    assert weight.tolist() == [[3.5, 4.0], [0.0, 2.0]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU tensors stand for CUDA's; what was launched, by name."""
    from qkeel.kernels.triton import heads

    found: Counter[str] = Counter()
    run = heads.HeadTable._launch

    def counted(self: Any, kernel: Any, *how: Any) -> None:
        found[kernel.__name__] += 1
        run(self, kernel, *how)

    monkeypatch.setattr(heads.HeadTable, "_launch", counted)
    monkeypatch.setattr(available, "takes_heads", lambda views: views[0].dtype != torch.float64)
    monkeypatch.setattr(qk_clip, "_readable", lambda tensor: False)
    return found


def trained(remedy: str, layers: int) -> nn.Module:
    """A model after four steps, by gradients that do not depend on it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(qkeel.nn.Attention(16, 4, 2, bias=True) for _ in range(layers)))
    x = torch.randn(2, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with qkeel.apply(remedy, model, optimizer):
        for step in range(4):
            model(x)
            for i, p in enumerate(model.parameters()):
                p.grad = (torch.arange(p.numel()) * (i + 1.0) + step).view_as(p).sin()
            optimizer.step()
    return model


LAUNCHED = {
    "lalr:tau=0.5": {"_copy": 5, "_norms": 5, "_move": 4},  # one more for the norms at the start
    "qk_lr:factor=0.5": {"_copy": 4, "_move": 4},
    "lalr:tau=0.5+qk_weight_decay+qk_clip:threshold=0.05": {"_copy": 5, "_norms": 5, "_move": 4, "_scale": 8},
}


@pytest.mark.parametrize("remedy", one_in(LAUNCHED, 3))
def test_remedies_train_as_by_torchs_operators_and_launch_as_much_for_any_number_of_weights(
    remedy: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for layers in (1, 2):
        launches.clear()
        found.append(trained(remedy, layers))
        assert launches == LAUNCHED[remedy]
    monkeypatch.setattr(available, "takes_heads", lambda views: False)
    for a, b in zip(found[-1].parameters(), trained(remedy, 2).parameters()):
        assert (a - b).abs().max() <= 1e-6 * max(1, b.abs().max())


def test_plain_decay_and_a_skipped_step(launches: Counter[str]) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = qkeel.nn.Attention(16, 4, 2).to(dtype)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, fused=True)
        with qkeel.apply("lalr:tau=0.3,decay=plain", model, optimizer):
            for found_inf in (0.0, 1.0, 0.0):
                for i, p in enumerate(model.parameters()):
                    p.grad = torch.linspace(-1, 1, p.numel(), dtype=dtype).view_as(p).sin() * (i + 1)
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
                before = model.q_proj.weight.detach().clone()
                optimizer.step()
                assert torch.equal(before, model.q_proj.weight) is bool(found_inf)
        results.append(list(model.parameters()))
    assert launches == {"_copy": 4, "_norms": 4, "_move": 3}
    for a, b in zip(*results):
        assert (a - b).abs().max() <= 1e-6
