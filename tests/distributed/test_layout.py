"""How a model lies across processes, read from its meshes and wrappers in one process that plays one of four."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from qkeel.distributed.layout import counted, is_flat, split_axes, wrappers


@pytest.fixture
def second_of_four():
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=4
    )
    yield
    torch.distributed.destroy_process_group()


def spread(*placements):
    """A weight on the mesh [[0 1] [2 3]]."""
    mesh = init_device_mesh("cpu", (2, 2))
    return DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)


@pytest.mark.usefixtures("second_of_four")
def test_a_weight_is_split_with_those_that_hold_its_other_parts():
    rows, columns = spread(Shard(0), Replicate()), spread(Replicate(), Shard(1))
    # Of [[0 1] [2 3]], process 1 is at (0, 1): the first axis is its column, the second its row.
    assert split_axes([rows]) == {(1, 3): 0}
    assert split_axes([columns]) == {(0, 1): 1}
    assert split_axes([rows, columns, torch.zeros(2)]) == {(1, 3): 0, (0, 1): 1}
    assert split_axes([spread(Replicate(), Replicate())]) == {}
    # What the first axis gathers before a pass is not split in it.
    assert split_axes([rows], lambda _: 1) == {}


@pytest.mark.usefixtures("second_of_four")
def test_a_replica_counts_once():
    model = nn.Module()
    model.rows = nn.Parameter(spread(Shard(0), Replicate()))
    model.columns = nn.Parameter(spread(Replicate(), Shard(1)))
    counts = counted(model)
    # Replicas of the rows lie along the second axis, where this process is not the first.
    assert not counts(model.rows)
    assert counts(model.columns)


def around(kind, model):
    """A wrapper that is nothing but its type and what it holds."""
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper._modules["_fsdp_wrapped_module"] = model  # where FSDP looks for it
    return wrapper


@pytest.mark.usefixtures("second_of_four")
def test_the_wrappers_of_a_model_are_those_that_hold_it():
    model = nn.Linear(2, 2)
    outer = around(DistributedDataParallel, nn.Sequential(model))
    other = around(DistributedDataParallel, nn.Linear(2, 2))
    assert [id(wrapper) for wrapper in wrappers(model)] == [id(outer)]
    assert id(other) in {id(wrapper) for wrapper in wrappers(nn.Sequential(other))}


def test_only_the_first_version_of_fsdp_flattens_parameters():
    model = nn.Linear(2, 2)
    assert is_flat(around(FullyShardedDataParallel, model))
    assert not is_flat(around(DistributedDataParallel, model))
    assert not is_flat(model)
    assert wrappers(model) == []  # alone
