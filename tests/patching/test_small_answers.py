"""What the doors to torch's private parts answer in the simplest cases."""

import torch
from torch import distributed, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from qkeel.patching.module_tables import gradient_hooks, put_hooks, remove_hooks
from qkeel.patching.sharded_models import _parameter_groups, shard_alike
from qkeel.patching.torch_state import transformed_now, with_tangents


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


def test_a_new_part_is_sharded_as_its_neighbour_where_fully_shard_takes_it():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, norm = fully_shard(nn.Linear(4, 4)), nn.LayerNorm(4)
        model.set_gradient_divide_factor(3.0)
        shard_alike(model, norm, model.weight)
        (group,) = _parameter_groups(norm)
        assert group.gradient_divide_factor == 3.0
        # Scalars cannot be split, and tensor parallelism splits without fully_shard.
        scalar = nn.ParameterList([torch.tensor(1.0)])
        mesh = init_device_mesh("cpu", (1,))
        elsewhere = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        for part, near in (
            (scalar, model.weight),
            (nn.Identity(), model.weight),
            (nn.LayerNorm(4), elsewhere),
        ):
            shard_alike(model, part, near)
            assert not isinstance(part, FSDPModule)
    finally:
        distributed.destroy_process_group()
