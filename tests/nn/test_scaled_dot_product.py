"""functional_attention is F.scaled_dot_product_attention: its arguments, shapes, errors, and how it is seen."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads
from tests.training import sgd, step
from torch import Tensor, nn
from torch.testing import assert_close

import qkeel
from qkeel.kernels.attention import compiled as compiled_attention
from qkeel.kernels.attention.compiled import Native
from qkeel.nn import functional_attention

BOTH = (F.scaled_dot_product_attention, functional_attention)
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 3e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}


@pytest.fixture
def taken(monkeypatch):
    """The calls that the compiled kernel computed."""
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    calls = []
    inner = Native.__call__

    def counted(self, call):
        calls.append(call)
        return inner(self, call)

    monkeypatch.setattr(Native, "__call__", counted)
    return calls


def answer(function, qkv, options):
    """What it raises, or its output and gradients (of the mask too) under one seed."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    mask = options.get("attn_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point():
        options = {**options, "attn_mask": mask.detach().requires_grad_()}
        leaves.append(options["attn_mask"])
    torch.manual_seed(0)
    try:
        out = function(*leaves[:3], **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}", []
    loss = out.double().cos().sum()
    return "", [out, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def check(qkv, options, case=""):
    """Compares values, gradients, dtypes, shapes and errors; returns whether the call is refused."""
    (refusal, theirs), (ours, found) = (answer(f, qkv, options) for f in BOTH)
    assert ours == refusal, case
    tolerance = TOLERANCES[qkv[0].dtype]
    for a, b in zip(theirs, found, strict=True):
        assert_close(
            b, a, rtol=tolerance, atol=tolerance, equal_nan=True, msg=f"{case}"
        )
    return bool(refusal)


def test_an_output_lies_in_memory_as_torchs():
    x = torch.randn(2, 13, 4, 16).transpose(1, 2)
    for v in (x, x[..., :8]):
        ours, theirs = (function(x, x, v) for function in BOTH)
        assert ours.stride() == theirs.stride()


def random_call(source):
    """Arguments of any shape, layout, dtype, mask and option, most of which torch takes."""
    pick, toss = source.choice, lambda: source.random() < 0.5
    lengths = ((13, 13), (13, 13), (9, 13), (13, 9), (5, 5), (1, 5), (0, 5))
    b, g, (t, s) = pick((1, 2, 5)), pick((1, 2, 3)), pick(lengths)
    d, h = pick((4, 8, 16, 16, 16)), g * pick((1, 1, 2))
    dtype = pick((torch.float32, torch.float32, *TOLERANCES))
    sizes = [(b, h, t, d), (b, g, s, d), (b, g, s, pick((d, 8)))]
    if source.random() < 0.1:  # other numbers of dimensions
        sizes = [size[1:] if h == g else (1, *size) for size in sizes]
    elif source.random() < 0.1:  # batches that are broadcast
        sizes[1:] = [(1, *size[1:]) for size in sizes[1:]]
    qkv = [torch.randn(size).to(dtype) for size in sizes]
    if toss():
        qkv = [x.mT.contiguous().mT for x in qkv]
    options = {
        "is_causal": source.random() < 0.4,
        "enable_gqa": h != g or toss(),
    }
    if toss():
        shape = pick(
            ((t, s), (1, s), (b, 1, t, s), (1, h, 1, s), (h, t, s), (t + 1, s))
        )
        kind = pick((torch.bool, dtype, torch.float32))
        shown = torch.rand(shape) < 0.7
        options["attn_mask"] = (
            shown if kind is torch.bool else torch.randn(shape).to(kind)
        )
        if kind is dtype and toss():
            options["attn_mask"] = options["attn_mask"].masked_fill(shown, -torch.inf)
            options["is_causal"] = False
    if toss():
        options["scale"] = pick((0.3, 1, -0.5, 0.0))
    if options["is_causal"] and t < s and options.get("scale", 1) <= 0:
        # torch's kernel multiplies the mask's -inf by the scale, which makes NaN.
        del options["scale"]
    if source.random() < 0.1:
        options["dropout_p"] = pick((0.5, 1.0, 1.5))
    return qkv, options


@pytest.mark.parametrize("many", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_random_calls_have_the_output_gradients_and_errors_of_torchs(many, taken):
    """Where a row sees no key, torch's own answers differ by kernel."""
    source, refused = random.Random(0), 0
    for number in range(many):
        torch.manual_seed(number)
        qkv, options = random_call(source)
        case = (number, [tuple(x.shape) for x in qkv], qkv[0].dtype, options)
        refused += check(qkv, options, case)
    # torch aligns the first query with the first key.
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 13, 16)
    assert not check((q, k, k), {"is_causal": True})
    if compiled_attention.ready():
        assert many / 14 < len(taken) < many / 2
        assert any(call.q.shape[1] > call.k.shape[1] for call in taken)
        assert any(call.mask is not None for call in taken)
    assert many / 20 < refused < many / 2


class Model(nn.Module):
    """Attention as a user writes it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = functional_attention(q, k, v, is_causal=True)
        return self.out(from_heads(out))


def test_a_model_that_calls_it_is_watched_and_compiled_into_one_graph(
    taken,
):
    model, x = Model(), 3 * torch.randn(2, 11, 32)
    (site,) = qkeel.find_sites(model, x)
    assert (site.n_heads, site.verified) == (4, True)
    optimizer = sgd(model, 0.01)
    with qkeel.watch(model, optimizer) as monitor:
        for _ in range(3):
            step(model, optimizer, x)
        assert monitor.active
        assert monitor.read()
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(functional_attention, backend="eager", fullgraph=True)
    out = functional_attention(q, q, q, is_causal=True)
    assert_close(compiled(q, q, q, is_causal=True), out)
