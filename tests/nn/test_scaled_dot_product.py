"""functional_attention is F.scaled_dot_product_attention: its arguments, shapes, errors, and how it is seen."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from qkeel.kernels.attention import compiled as compiled_attention
from qkeel.kernels.attention.compiled import Native
from qkeel.nn import functional_attention

MASK = torch.rand(2, 1, 13, 13) < 0.6
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = {
    "causal": ((2, 4, 13, 16), (2, 4, 13, 16), {"is_causal": True}, True),
    "full, scaled": ((2, 4, 13, 16), (2, 4, 13, 16), {"scale": 0.5}, True),
    "grouped": (
        (2, 4, 13, 16),
        (2, 2, 13, 16),
        {"enable_gqa": True, "is_causal": True},
        True,
    ),
    "mask": (
        (2, 4, 13, 16),
        (2, 4, 13, 16),
        {"attn_mask": MASK | torch.eye(13, dtype=torch.bool)},
        True,
    ),
    "added": ((2, 4, 13, 16), (2, 4, 13, 16), {"attn_mask": torch.randn(13, 13)}, True),
    "more keys, causal": ((2, 4, 9, 16), (2, 4, 13, 16), {"is_causal": True}, True),
    "more queries, causal": ((2, 4, 13, 16), (2, 4, 9, 16), {"is_causal": True}, False),
    "one query": ((2, 4, 1, 16), (2, 4, 13, 16), {}, False),
    "three dimensions": ((4, 13, 16), (4, 13, 16), {"is_causal": True}, False),
    "odd width": ((2, 4, 13, 10), (2, 4, 13, 10), {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_torchs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    seen: list[object] = []
    inner = Native.__call__
    monkeypatch.setattr(
        Native, "__call__", lambda self, call: (seen.append(call), inner(self, call))[1]
    )
    size, of_keys, how, ours = CALLS[name]
    for dtype, near in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        leaves = [
            torch.randn(s).to(dtype).requires_grad_() for s in (size, of_keys, of_keys)
        ]
        given: dict[str, Any] = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.dtype != torch.bool else v
            for k, v in how.items()
        }
        found = []
        for function in (F.scaled_dot_product_attention, functional_attention):
            out = function(*leaves, **given)
            found.append([out, *torch.autograd.grad(out.float().cos().sum(), leaves)])
        for a, b in zip(*found):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert (a - b).abs().max() <= near * max(1.0, float(a.detach().abs().max()))
    assert bool(seen) is (ours and compiled_attention.ready())


def random_call(source: random.Random) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of any shape, layout, dtype, mask and option, most of which torch takes; seeded."""
    pick, some = source.choice, lambda: source.random() < 0.5
    b, g, t, s, d = (
        pick((1, 2)),
        pick((1, 2, 3)),
        pick((0, 1, 5, 13, 13)),
        pick((1, 5, 13)),
        pick((4, 8, 8, 16, 16)),
    )
    h = g * pick((1, 1, 2))
    dtype = pick((torch.float32,) * 4 + (torch.bfloat16, torch.float16, torch.float64))
    sizes = [(b, h, t, d), (b, g, s, d), (b, g, s, pick((d, 8)))]
    if (
        source.random() < 0.2
    ):  # other numbers of dimensions, and batches that are broadcast
        sizes = [size[1:] if h == g else (1, *size) for size in sizes]
    elif source.random() < 0.1:
        sizes[1], sizes[2] = ((1, *size[1:]) for size in sizes[1:])
    leaves = [torch.randn(size).to(dtype) for size in sizes]
    if some():
        leaves = [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in leaves]
    how: dict[str, Any] = {
        "is_causal": source.random() < 0.4,
        "enable_gqa": h != g or some(),
    }
    if some():
        shape = pick(
            ((t, s), (1, s), (t, 1), (b, 1, t, s), (1, h, 1, s), (h, t, s), (t + 1, s))
        )
        kind = pick((torch.bool, dtype, torch.float32))
        mask = torch.rand(shape) < 0.7
        how["attn_mask"] = mask if kind is torch.bool else torch.randn(shape).to(kind)
        if kind is dtype and some():
            how["attn_mask"] = how["attn_mask"].masked_fill(mask, -torch.inf)
            how["is_causal"] = False
    if some():
        how["scale"] = pick((0.3, 1, -0.5, 0.0))
    if source.random() < 0.1:
        how["dropout_p"] = pick((0.5, 1.0, 1.5))
    return leaves, how


def answer(
    function: Any, given: list[Tensor], how: dict[str, Any]
) -> tuple[str, list[Tensor]]:
    """What it raises, or its output and gradients (of the mask too) under one seed."""
    leaves = [x.detach().requires_grad_() for x in given]
    mask = how.get("attn_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point():
        how = {**how, "attn_mask": mask.detach().requires_grad_()}
    torch.manual_seed(0)
    try:
        out = function(*leaves, **how)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}", []
    ends = [
        *leaves,
        *(
            x
            for x in [how.get("attn_mask")]
            if isinstance(x, Tensor) and x.requires_grad
        ),
    ]
    grads = torch.autograd.grad(out.double().cos().sum(), ends, allow_unused=True)
    return "", [out, *(torch.zeros(0) if g is None else g for g in grads)]


@pytest.mark.slow
def test_random_calls_give_what_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients, dtypes, shapes and errors; where a row sees no key, torch's own answers differ by kernel."""
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    seen: list[object] = []
    inner = Native.__call__
    monkeypatch.setattr(
        Native, "__call__", lambda self, call: (seen.append(call), inner(self, call))[1]
    )
    near = {
        torch.float64: 1e-10,
        torch.float32: 3e-5,
        torch.bfloat16: 4e-2,
        torch.float16: 5e-3,
    }
    source, refused = random.Random(0), 0
    for number in range(400):
        torch.manual_seed(number)
        given, how = random_call(source)
        (refusal, expected), (ours, found) = (
            answer(function, given, how)
            for function in (F.scaled_dot_product_attention, functional_attention)
        )
        told = (number, [tuple(x.shape) for x in given], given[0].dtype, how)
        assert ours == refusal, told
        refused += bool(refusal)
        for a, b in zip(expected, found, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), told
            same = torch.allclose(
                a,
                b,
                rtol=near[given[0].dtype],
                atol=near[given[0].dtype],
                equal_nan=True,
            )
            assert same, (told, (a - b).abs().max())
    assert len(seen) > 40 or not compiled_attention.ready()
    assert 20 < refused < 200


def test_its_parameters_are_those_that_torch_documents() -> None:
    """Read from torch's own docstring: the function is built in, and has no signature."""
    head = (
        (F.scaled_dot_product_attention.__doc__ or "")
        .strip()
        .partition(")")[0]
        .partition("(")[2]
    )
    parts = [part.strip().partition("=") for part in head.split(",")]
    documented = [name for name, _, _ in parts if name != "*"]
    own = inspect.signature(functional_attention).parameters.values()
    assert [p.name for p in own] == documented
    assert {name: default for name, _, default in parts if default} == {
        p.name: str(p.default) for p in own if p.default is not p.empty
    }


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors"
)  # torch's own, inside its CPU path
def test_nested_tensors_go_to_torch() -> None:
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    ours, theirs = (
        f(q, q, q) for f in (functional_attention, F.scaled_dot_product_attention)
    )
    assert torch.equal(ours.values(), theirs.values())


def test_errors_are_torchs() -> None:
    q = torch.randn(1, 2, 3, 8)
    cases: tuple[tuple[Tensor, dict[str, Any]], ...] = (
        (q, {"attn_mask": torch.ones(5, 7)}),
        (q[..., :4], {}),
        (q[:, :1].double(), {}),
        (q.to("meta"), {}),
    )
    for k, how in cases:
        messages = []
        for function in (F.scaled_dot_product_attention, functional_attention):
            with pytest.raises((RuntimeError, ValueError)) as told:
                function(q, k, k, **how)
            messages.append(str(told.value))
        assert messages[0] == messages[1]


def test_a_mask_of_two_dimensions_is_one_of_pairs_though_the_batch_is_as_long() -> None:
    q, mask = (
        torch.randn(3, 2, 3, 8),
        torch.tensor([[True, True, False], [True, False, True], [False, True, True]]),
    )
    assert torch.allclose(
        functional_attention(q, q, q, mask),
        F.scaled_dot_product_attention(q, q, q, mask),
        atol=1e-6,
    )


class Model(nn.Module):
    """Attention as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(
            functional_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


def test_a_model_that_calls_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    model, x = Model(), 3 * torch.randn(2, 11, 32)
    (site,) = qkeel.find_sites(model, x)
    assert (site.n_heads, site.verified) == (4, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with qkeel.watch(
        model, optimizer, every=qkeel.monitor.Adaptive(least=2, most=9)
    ) as monitor:
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
        assert monitor.active
        assert monitor.read()


def test_compiled_it_is_one_graph() -> None:
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(functional_attention, backend="eager", fullgraph=True)
    assert torch.allclose(
        compiled(q, q, q, is_causal=True),
        functional_attention(q, q, q, is_causal=True),
        atol=1e-6,
    )
