"""Compiles a module whose norm and rotation go through Triton, and prints how far it is from eager; run by a test."""

import torch

import qkeel
from qkeel.kernels import triton_access as available
from qkeel.kernels.norm_rope import encode


def main():
    """Forward and backward in one graph."""
    choose, device = encode.operators_for, torch.device("cuda", 0)
    available._modern = lambda _: True
    # A CPU's tensors take the way of a GPU's.
    encode.operators_for = lambda _: choose(device)
    encode._keeps = lambda x, gain: True
    module = qkeel.nn.Attention(16, 2, spec=qkeel.preset("qwen3"))
    x = torch.randn(1, 3, 16, requires_grad=True)
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    results = []
    for how in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        out = how(x)
        results.append(
            [out, *torch.autograd.grad(out.cos().sum(), [x, *module.parameters()])]
        )
    torch.compile(module, fullgraph=True, backend=backend)(x)
    assert any("qkeel_triton" in name for name in seen), seen
    print(max(float((a - b).detach().abs().max()) for a, b in zip(*results)))


if __name__ == "__main__":
    main()
