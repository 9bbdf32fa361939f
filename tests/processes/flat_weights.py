"""What processes record whose weights are flat pieces between their passes, as FullyShardedDataParallel keeps them."""

import functools
import pickle
import traceback
from contextlib import nullcontext

import pytest
import torch
from tests.contract.processes.watching import loss_of, passes, trained
from tests.contract.processes.wrapped import BATCH, batch, llama
from tests.training import adamw
from torch import distributed as dist

import qkeel
from qkeel.errors import RefusedError

ON_STEPS = ("lalr", "qk_clip", "qk_lr:factor=0.5", "frozen_qk", "qk_weight_decay")
# By name: options of the wrapper, and whether each block is wrapped for itself.
SETUPS = {
    "blocks": ({"use_orig_params": True}, True),
    "blocks, flat": ({"use_orig_params": False}, True),
    "whole": ({"use_orig_params": True}, False),
    "whole, flat": ({"use_orig_params": False}, False),
    "no_sync": ({"use_orig_params": True}, True),
    "checkpointed": ({"use_orig_params": True}, True),
    "float32": ({"use_orig_params": True}, True),
}


def wrapped(name):
    """The small Llama, as the setup wraps it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    options, by_block = SETUPS[name]
    model = llama()
    kind = type(model.get_submodule("model.layers.0"))
    if by_block:
        options = options | {"auto_wrap_policy": ModuleWrapPolicy({kind})}
    if name == "float32":
        options = options | {
            "mixed_precision": MixedPrecision(param_dtype=torch.float32)
        }
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    if name == "checkpointed":
        apply_activation_checkpointing(flat, check_fn=lambda x: isinstance(x, kind))
    return flat


def part(step):
    """The sequences of this process."""
    return batch(step).chunk(2)[dist.get_rank()]


def step_of(name):
    """The passes and the step of a setup."""
    if name != "no_sync":
        return passes(name, part)

    def accumulated(model, optimizer, step):
        total = 0.0
        for last in (False, True):
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model, part(2 * step + last)) / 2
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return accumulated


def watched(folder, name):
    """Leaves what this process has recorded, or the error, in a file; a watched step changes no bit."""
    try:
        plain, model = wrapped(name), wrapped(name)
        before = trained(plain, step_of(name), False)
        seen = trained(model, step_of(name), True)
        assert seen.losses == before.losses, "watching changed a loss"
        assert seen.collectives == before.collectives, "watching added collectives"
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b), "watching changed a weight"
    except Exception:
        seen = traceback.format_exc()
    path = folder / f"{name}-{dist.get_rank()}.pickle"
    path.write_bytes(pickle.dumps(seen))


def refusals():
    """Remedies that act on steps are refused before and after the wrapping; the model trains on."""
    tokens = torch.zeros(BATCH, 4, dtype=torch.long)
    for remedy in ON_STEPS:
        flat = wrapped("blocks")
        optimizer = adamw(flat)
        for model in (flat, flat.get_submodule("_fsdp_wrapped_module")):
            _refused(functools.partial(qkeel.apply, model, remedy, optimizer))
        loss_of(flat, tokens).backward()
        optimizer.step()
    for remedy in ON_STEPS:
        model = llama()
        # The parameters of the model stay those of the optimizer.
        optimizer = adamw(model)
        example = {"input_ids": tokens, "use_cache": False}
        handle = qkeel.apply(model, remedy, optimizer, batch=example)
        from torch.distributed.fsdp import FullyShardedDataParallel

        flat = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True
        )
        loss_of(flat, tokens).backward()
        _refused(optimizer.step)
        handle.remove()
        optimizer.step()


def _refused(act):
    with pytest.raises(RefusedError, match=r"torch\.distributed\.fsdp\.fully_shard"):
        act()


def found_before():
    """Sites that were found before the wrapping keep their heads and layouts, and lose their weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = llama()
    example = {"input_ids": batch(0), "use_cache": False}
    sites = qkeel.find_sites(model, example)
    flat = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = adamw(flat)
    monitor = qkeel.watch(flat, optimizer, sites=sites)
    passes("whole", part)(flat, optimizer, 0)
    assert [(x.name, x.n_heads, x.n_kv_heads) for x in monitor.sites] == [
        (x.name, x.n_heads, x.n_kv_heads) for x in sites
    ]
    assert all("flat pieces" in site.why for site in monitor.sites)
    assert "query_weight_norm" not in monitor.sample.heads
    monitor.close()
