"""What the doors to torch's private parts answer in the simplest cases."""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from qkeel.patching.autograd import saved_factor
from qkeel.patching.module_tables import gradient_hooks, put_hooks, remove_hooks
from qkeel.patching.torch_state import transformed_now, with_tangents


def test_the_first_factor_of_a_product_is_what_the_weight_multiplies():
    x, layer = torch.randn(3, 4), nn.Linear(4, 2)
    for product in (layer(x), functional.linear(x, layer.weight)):
        factor = saved_factor(product.grad_fn)
        assert factor is not None
        assert torch.equal(factor, x)
    assert saved_factor((layer.weight * 2).sum().grad_fn) is None


def test_hooks_on_the_gradients_of_parameters_are_among_those_of_a_module():
    layer, plain = nn.Linear(4, 2), nn.Linear(4, 2)

    def double(grad):
        return 2 * grad

    layer.weight.register_hook(double)
    found = [hook for table in gradient_hooks([layer]) for hook in table.values()]
    assert found == [double]
    assert not any(gradient_hooks([plain]))


def test_one_level_of_forward_differentiation_counts():
    assert not transformed_now()
    assert not with_tangents()
    with forward_ad.dual_level():
        assert transformed_now()
        assert with_tangents()


def test_hooks_of_ours_come_before_those_of_the_program():
    layer, order = nn.Linear(4, 2), []
    layer.register_forward_pre_hook(lambda *_: order.append("program"))
    before, after = (
        (lambda *_: order.append("before")),
        (lambda *_: order.append("after")),
    )
    hooks = put_hooks([(layer, before, after)])
    layer(torch.randn(1, 4))
    remove_hooks(hooks)
    layer(torch.randn(1, 4))
    assert order == ["before", "program", "after", "program"]
