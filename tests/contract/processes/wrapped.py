"""The small model of the tests, wrapped for each setup, and which part of the global batch a process gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCAB, WIDTH, HEADS, KV_HEADS, LAYERS, TOKENS, BATCH = 64, 32, 4, 2, 2, 12, 8


def llama(seed: int = 0, layers: int = LAYERS) -> nn.Module:
    """A Llama of layers of 4 query and 2 key heads in float64."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).double()


def mesh(setup: str) -> DeviceMesh:
    """The mesh of a setup: its axes are named dp, shard, tp."""
    axes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "hsdp": ((2, 2), ("dp", "shard")),
        "tp": ((2,), ("tp",)),
        "tp_sequence": ((2,), ("tp",)),
        "tp_fsdp2": ((2, 2), ("shard", "tp")),
    }
    shape, names = axes.get(setup, ((dist.get_world_size(),), ("dp",)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrapped(model: nn.Module, setup: str, layers: str = "model.layers") -> nn.Module:
    """The model as the setup runs it; `layers` is the name of its list of layers."""
    setup, compiled = setup.removesuffix("_compile"), setup.endswith("_compile")
    axes = mesh(setup)
    if setup.startswith("ddp"):
        whole = torch.compile(model, backend="eager") if compiled else model
        return nn.parallel.DistributedDataParallel(whole)  # type: ignore[arg-type]
    if setup.startswith("tp"):
        split_heads(model, axes["tp"], layers, sequence=setup == "tp_sequence")
    if setup.startswith("fsdp2") or setup in ("hsdp", "tp_fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        over = axes["shard"] if setup == "tp_fsdp2" else axes
        options: dict[str, Any] = {
            "mesh": over,
            "reshard_after_forward": setup != "fsdp2_kept",
        }
        if setup == "fsdp2_mixed":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.float32, reduce_dtype=torch.float64
            )
        for block in model.get_submodule(layers).children():
            fully_shard(block, **options)
        model = fully_shard(model, **options)
    return torch.compile(model, backend="eager") if compiled else model  # type: ignore[return-value]


def split_heads(
    model: nn.Module, axis: DeviceMesh, layers: str, *, sequence: bool = False
) -> None:
    """Splits the heads of every layer over the processes of an axis; `sequence`: the tokens between them too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    at = f"{layers}.*."
    plan: dict[str, ParallelStyle] = {
        **{f"{at}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{at}self_attn.o_proj": RowwiseParallel(
            output_layouts=Shard(1) if sequence else Replicate()
        ),
    }
    if sequence:
        # Tokens are split from the first layer on: the embedding gives all, for the rotation's positions.
        gathered = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan |= {
            f"{layers}.0": PrepareModuleInput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(1),),
                use_local_output=True,
            ),
            f"{at}input_layernorm": SequenceParallel(),
            f"{at}self_attn": gathered,
            f"{at}post_attention_layernorm": SequenceParallel(),
            f"{at}mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{f"{at}mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            f"{at}mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Replicate()
            ),
        }
    parallelize_module(model, axis, plan)


def batch(step: int) -> Tensor:
    """The tokens of the global batch."""
    return torch.randint(
        0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step)
    )


def part(setup: str, step: int) -> Tensor:
    """The sequences of the global batch that this process works on."""
    tokens, rank, setup = batch(step), dist.get_rank(), setup.removesuffix("_compile")
    if setup == "ddp_uneven":
        return tokens[:5] if rank == 0 else tokens[5:]
    if setup.startswith(("ddp", "fsdp2")) or setup == "hsdp":
        return tokens.chunk(dist.get_world_size())[rank]
    if setup == "tp_fsdp2":
        return tokens.chunk(2)[rank // 2]
    return tokens
