"""What is compiled, in a process of its own: the import hook of the unit tests would break the graph.

`python cases.py CASE PRESET IMPL BACKEND ...` ends with the largest difference to eager, one line for each case, or
with an error.
"""

import sys
import warnings

import torch
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.func import jvp

import qkeel
from qkeel.nn import Attention
from qkeel.patching.torch_state import with_tangents


def difference(module, compiled, length=12):
    """Largest difference of outputs and gradients, relative to the largest number."""
    x = torch.randn(2, length, module.d_model)
    found = []
    for forward in (compiled, module):
        leaf = x.clone().requires_grad_()
        out = forward(leaf)
        grads = torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
        found.append([out.detach(), *grads])
    return max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in zip(*found))


def attention(preset, impl):
    """A small grouped-query module whose gains are off their initial values."""
    torch.manual_seed(0)
    module = Attention(32, 4, 2, 8, spec=qkeel.preset(preset), impl=impl)
    for p in module.spec_params().values():
        p.data.add_(0.1 * torch.randn_like(p))
    return module


def fullgraph(preset, impl, backend):
    """One graph, forward and backward, equal to eager; another length too."""
    module = attention(preset, impl)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    # Another length compiles anew with a symbolic one: left to the slow cases. One query may have a kernel of its own.
    lengths = {"aot_eager": (12,), "eager": (12, 1)}.get(backend, (12, 7))
    return max(difference(module, compiled, length) for length in lengths)


def tangents(preset, impl, backend):
    """One graph, in and out of forward-mode differentiation that begins later or within the graph."""
    module = attention(preset, impl)
    x, along = torch.randn(2, 2, 5, 32)
    want = jvp(module, (x,), (along,))
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    compiled(x)
    with forward_ad.dual_level():
        dual = compiled(forward_ad.make_dual(x, along))
        got = [*forward_ad.unpack_dual(dual)]
    within = torch.compile(
        lambda x, along: (*jvp(module, (x,), (along,)), module(x)),
        fullgraph=True,
        backend=backend,
    )
    got += within(x, along)
    asked = torch.compile(with_tangents, fullgraph=True, backend=backend)
    assert not asked()
    with forward_ad.dual_level():
        assert asked()
    pairs = zip(got, [*want, *want, want[0]], strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def watched(preset, impl, backend):
    """Watched by what the kernel finds: outputs, gradients and the number of graphs are the unwatched ones."""
    found, graphs = [], []
    for stats in (None, "max"):
        torch._dynamo.reset()
        counters.clear()
        module = attention(preset, impl)
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        monitor = None if stats is None else qkeel.watch(compiled, stats=stats)
        x = torch.randn(2, 12, 32)
        out = [compiled(x) for _ in range(3)][-1]
        found.append(
            [
                out.detach(),
                *torch.autograd.grad(out.square().sum(), list(module.parameters())),
            ]
        )
        graphs.append(counters["stats"]["unique_graphs"])
    assert monitor is not None
    assert len(monitor.history) == 3
    (stats,) = monitor.read().values()
    assert stats.max_logit.isfinite().all()
    assert not stats.n_pairs.any(), "a pass of its own was made"
    assert graphs[0] == graphs[1], graphs
    return max(float((a - b).abs().max()) for a, b in zip(*found))


def stated(preset, impl, backend):
    """Statistics come out of one graph, next to the output, and are eager's."""
    spec = qkeel.preset(preset)
    params = spec.init_params(4, 2, 16)
    q, k, v = (torch.randn(1, heads, 33, 16) for heads in (4, 2, 2))

    def both(q, k, v):
        out, found = qkeel.attention(
            q, k, v, spec=spec, params=params, impl=impl, stats="max"
        )
        return [out, found.max_logit, found.entropy]

    eager, ours = (
        both(q, k, v),
        torch.compile(both, fullgraph=True, backend=backend)(q, k, v),
    )
    return max(float((a - b).abs().max()) for a, b in zip(eager, ours, strict=True))


CASES = {
    "fullgraph": fullgraph,
    "tangents": tangents,
    "watched": watched,
    "stated": stated,
}

if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    # Dynamo's own look at what a break left behind.
    warnings.filterwarnings("ignore", message="The .grad attribute")
    torch.set_num_threads(1)
    for i in range(1, len(sys.argv), 4):
        kind, preset, impl, backend = sys.argv[i : i + 4]
        print(f"{CASES[kind](preset, impl, backend):.3e}")
        torch._dynamo.reset()
