"""How a model lies across processes, read from its meshes and wrappers in one process that plays one of four."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from qkeel.distributed.layout import (
    Layout,
    counted,
    gathered_axes,
    hides_weights,
    peer_ranks,
    split_axes,
    splits_heads,
    stage_of,
    wrapped_by,
    wrappers,
)
from qkeel.distributed.sharding import PartialSums, local_block
from qkeel.errors import RefusedError, UnknownNameError


@pytest.fixture
def second_of_four():
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=4
    )
    yield
    torch.distributed.destroy_process_group()


def spread(*placements, mesh=None):
    """A weight on the mesh [[0 1] [2 3]]."""
    mesh = mesh or init_device_mesh("cpu", (2, 2))
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


def holding(*weights):
    """A module with these weights."""
    module = nn.Module()
    for i, weight in enumerate(weights):
        module.register_parameter(f"w{i}", nn.Parameter(weight))
    return module


@pytest.mark.usefixtures("second_of_four")
def test_a_mesh_says_which_data_heads_layers_and_queries_a_process_has():
    # Process 1 is at (1, 1).
    mesh = DeviceMesh("cpu", [[0, 2], [3, 1]], mesh_dim_names=("dp", "tp"))
    assert Layout.of_mesh(mesh) == Layout(data=3)
    assert Layout.of_mesh(mesh, heads="tp") == Layout(
        data=1, head_part=1, head_parts=2, stage=None, context=0, shard=""
    )
    assert Layout.of_mesh(mesh, layers="dp") == Layout(data=1, stage=1)
    assert Layout.of_mesh(mesh, context="tp") == Layout(data=1, context=1)
    with pytest.raises(UnknownNameError, match="axis of the mesh 'pp'"):
        Layout.of_mesh(mesh, heads="tp", layers="pp")


@pytest.mark.usefixtures("second_of_four")
def test_the_weights_of_a_model_say_which_heads_a_process_has():
    plain, columns = nn.Linear(2, 2), holding(spread(Replicate(), Shard(1)))
    rows = holding(spread(Shard(0), Replicate()))
    both = nn.Sequential(plain, columns)
    assert Layout.of_model(both, both, 2) == Layout(
        data=0, head_part=1, head_parts=2, stage=2, shard="1 of 2: 1"
    )
    assert Layout.of_model(plain, [plain], None) == Layout(data=1)
    assert Layout().data == Layout().context == 0
    assert (splits_heads(both), splits_heads(plain)) == (True, False)
    assert not splits_heads(holding(spread(Replicate(), Replicate())))
    assert [*map(wrapped_by, (both, plain))] == ["tensor parallel", ""]
    assert (peer_ranks(both), peer_ranks(plain)) == ((0, 1, 2, 3), (1,))
    with pytest.raises(RefusedError, match="more than one axis"):
        Layout.of_model(both, [columns, rows], None)


@pytest.mark.usefixtures("second_of_four")
def test_a_process_holds_a_block_of_a_split_weight_and_adds_it_once():
    rows = spread(Shard(0), Replicate())
    mesh = rows.device_mesh
    columns = spread(Replicate(), Shard(1), mesh=mesh)
    blocks = [None, *(local_block("w", w) for w in (rows, columns))]
    assert [block and (block.spans, block.in_pass, block.over) for block in blocks] == [
        None,
        (((0, 2), (0, 2)), ((0, 2), (0, 2)), (True, False)),
        (((0, 2), (2, 4)), ((0, 2), (2, 4)), (False, True)),
    ]
    short = DTensor.from_local(
        torch.zeros(1, 2),
        mesh,
        [Replicate(), Shard(0)],
        run_check=False,
        shape=torch.Size([3, 2]),
        stride=(2, 1),
    )
    # Of three rows the last chunk has one.
    assert local_block("w", short).spans == ((2, 3), (0, 2))
    quarter = local_block("w", spread(Shard(0), Shard(0), mesh=mesh), gathered=1)
    # In a pass the first axis has gathered its parts.
    assert (quarter.spans[0], quarter.in_pass[0]) == ((2, 4), (4, 8))
    assert local_block("w", torch.zeros(2)) is None
    sums = PartialSums([*blocks, quarter])
    assert sums.counted == [False, False, True, True]
    assert torch.equal(sums.add_up(torch.ones(2)), torch.ones(2))
    with pytest.raises(RefusedError, match="no process holds a block"):
        local_block("w", spread(Partial(), Replicate()))


@pytest.mark.usefixtures("second_of_four")
def test_what_fully_shard_gathers_does_not_split_heads():
    for sizes, n_axes in (((4,), 1), ((2, 2), 2)):
        names = ("replicas", "shards")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))
        assert list(gathered_axes(model).values()) == [n_axes] * 2
        assert wrapped_by(model) == "fully_shard"
        assert not splits_heads(model)
        # Process 1 is the second of its shards.
        shard = f"shards of {sizes[-1]}: 1"
        assert Layout.of_model(model, model, None) == Layout(data=1, shard=shard)


@pytest.mark.usefixtures("second_of_four")
def test_a_model_is_a_stage_if_a_pipeline_runs_it():
    model = nn.Sequential(nn.Linear(2, 2))
    stage = PipelineStage.__new__(PipelineStage)
    stage.submod, stage.stage_index, stage.num_stages = model, 1, 2
    assert stage_of(model) == stage_of(model[0]) == (1, True)
    assert stage_of(nn.Linear(2, 2)) is None


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


def test_only_the_first_version_of_fsdp_flattens_parameters(monkeypatch):
    # A wrapper is made in a process group, without which nobody looks for one.
    monkeypatch.setattr("qkeel.distributed.layout.on", lambda: True)
    model = nn.Linear(2, 2)
    outer = around(DistributedDataParallel, model)
    assert hides_weights(model) == hides_weights(outer) == ""
    flat = around(FullyShardedDataParallel, nn.Sequential(model))
    assert "FSDP1" in hides_weights(model)
    assert "FSDP1" in hides_weights(nn.Sequential(flat))
    assert hides_weights(nn.Linear(2, 2)) == ""
    assert wrappers(model) == []  # alone
