"""A probe puts back buffers of every kind: sparse, quantised, nested, without values."""

import pytest
import torch
from tests.attention import Joint
from tests.training import sgd, step

import qkeel

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*"),
]

KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "ragged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.empty(3, device="meta"),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "plain": lambda: torch.ones(3),
}


def values(x):
    if x.is_nested:
        return torch.cat([*x.unbind()])
    return x.dequantize() if x.is_quantized else x.to_dense()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_buffer_is_what_it_was_after_a_probe(kind):
    class Holding(Joint):
        """Writes to its buffer in place in every pass, as far as a tensor of that kind can be written to."""

        def __init__(self):
            super().__init__(m=16, heads=4)
            self.register_buffer("held", KINDS[kind]())

        def forward(self, x):
            if kind == "quantised":
                self.held.copy_(torch.zeros(3))
            elif kind != "meta":
                self.held.mul_(2.0)
            return super().forward(x)

    model, x = Holding(), torch.randn(2, 5, 16)
    held, before = model.held, KINDS[kind]()
    (site,) = qkeel.find_sites(model, x)
    assert site.terms
    assert model.held is held
    optimizer = sgd(model)
    qkeel.apply(model, "lalr", optimizer, batch=x).remove()
    if kind != "meta":
        assert torch.equal(values(model.held), values(before))
    with qkeel.watch(model, optimizer) as monitor:
        step(model, optimizer, x)
        assert monitor.read()
