"""What the runs of the table need around the unedited programs; Python imports this before a program begins.

- QKEEL_LOSSES: a file that gets each loss whose backward pass is run, in full precision; one a process of several.
- QKEEL_SEED: of a program that draws other numbers in every run.
- QKEEL_ROUNDS: where to end loops of a fixed number of rounds (`tqdm(range(...))`), and a program that counts its own
  (`tqdm()`).
- QKEEL_CUDA: a program that knows only CUDA gets the CPU under its names.
- QKEEL_ACCELERATOR: a program that asks torch for its accelerator gets the CPU: with FlexAttention's backward pass,
  which torch can compute on a CPU but refuses to, and with gloo for what is asked of NCCL.
- A torchvision that was built for another torch (PyPI has none for the CPU alone) is imported without its operators.
- QKEEL_XFORMERS: a program that imports xformers, and is told to use torch's attention, gets the names it imports.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def record_losses(path: str) -> None:
    import torch

    backward, path = torch.Tensor.backward, path + os.environ.get("RANK", "")

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1 and not self.is_meta:
            with open(path, "a", encoding="utf-8") as file:
                file.write(float(self.detach().double()).hex() + "\n")
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[assignment,method-assign]


def end_after(rounds: int) -> None:
    import tqdm

    class Cut(tqdm.tqdm):  # type: ignore[type-arg]
        def __init__(self, iterable: Any = None, *args: Any, **kwargs: Any) -> None:
            fixed, self.by_hand = isinstance(iterable, range), iterable is None
            super().__init__(
                itertools.islice(iterable, rounds) if fixed else iterable,
                *args,
                **kwargs,
            )

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.by_hand and self.n >= rounds:
                sys.exit()
            return shown

    tqdm.tqdm = Cut  # type: ignore[misc]


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None:
        pass

    wait = synchronize = record

    def elapsed_time(self, other: object) -> float:
        return 1.0


def cuda_is_the_cpu() -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes
    from torch import nn

    def same(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    nn.Module.cuda = torch.Tensor.cuda = same  # type: ignore[assignment,method-assign]
    to_empty, mesh, group, fork = (
        nn.Module.to_empty,
        meshes.init_device_mesh,
        dist.init_process_group,
        torch.random.fork_rng,
    )

    def empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        return to_empty(
            self,
            device="cpu" if str(device).startswith("cuda") else device,
            recurse=recurse,
        )

    def cpu_mesh(kind: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu" if kind == "cuda" else kind, *args, **kwargs)

    def gloo(backend: object = None, *args: Any, **kwargs: Any) -> Any:
        return group(
            "gloo",
            *args,
            **{name: x for name, x in kwargs.items() if name != "device_id"},
        )

    nn.Module.to_empty = empty  # type: ignore[assignment,method-assign]
    meshes.init_device_mesh = dist.init_device_mesh = cpu_mesh  # type: ignore[assignment]
    dist.init_process_group = gloo  # type: ignore[assignment]
    torch.random.fork_rng = lambda devices=None, *args, **kwargs: fork(
        [], *args, **kwargs
    )  # type: ignore[assignment]
    silent = (
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "set_device",
    )
    zero = (
        "current_device",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "power_draw",
    )
    # Each its own function: torch.compile has a rule for each name.
    answers: dict[str, Any] = {name: lambda *args, **kwargs: None for name in silent}
    answers |= {name: lambda *args, **kwargs: 0 for name in zero}
    answers |= {
        "Event": _Event,
        "get_device_name": lambda *_: "cpu",
        "memory_stats": lambda *_, **__: defaultdict(int),
    }
    answers["get_device_properties"] = lambda *_: SimpleNamespace(
        total_memory=1 << 30, name="cpu"
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def the_accelerator_is_the_cpu() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn.attention import flex_attention as flex

    torch._utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Any] = {
        name: lambda *_: None for name in ("empty_cache", "reset_peak_memory_stats")
    }
    answers |= {
        "current_device": lambda: 0,
        "get_device_name": str,
        "memory_stats": lambda _: {},
    }
    answers["get_device_properties"] = lambda _: SimpleNamespace(
        total_memory=1 << 30, name="cpu"
    )
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    barrier, options, made = (
        dist.barrier,
        flex._apply_kernel_options,
        FSDPParamGroup.__init__,
    )

    def with_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.force_sum_reduction_for_comms = (
            True  # gloo has no sum that multiplies first
        )

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        return {**options(*args, **kwargs), "OUTPUT_LOGSUMEXP": True}

    dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]  # of a newer torch
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(
        group, async_op
    )  # type: ignore[assignment]
    FSDPParamGroup.__init__ = with_sums  # type: ignore[method-assign]
    flex._apply_kernel_options, flex._validate_device = with_gradients, lambda *_: None  # type: ignore[assignment]


def name_xformers() -> None:
    import torch

    attention = torch.library.Library("xformers_flash", "DEF")
    attention.define("flash_fwd(Tensor query) -> Tensor")
    kept = {
        "xformers.ops": {
            "AttentionBias": type("AttentionBias", (), {}),
            "library": attention,
        }
    }
    kept["xformers.profiler"] = {
        "MemSnapshotsProfiler": object,
        "PyTorchProfiler": object,
        "step": lambda: None,
    }
    for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.profiler"):
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(kept.get(name, {}), __path__=[])
        within, _, own = name.rpartition(".")
        if within:
            setattr(sys.modules[within], own, module)


kept: list[object] = []


def import_torchvision_without_operators() -> None:
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        kept.append(operators)  # it ends with its last reference


import_torchvision_without_operators()
if os.environ.get("QKEEL_XFORMERS"):
    name_xformers()
if os.environ.get("QKEEL_CUDA"):
    cuda_is_the_cpu()
if os.environ.get("QKEEL_ACCELERATOR"):
    the_accelerator_is_the_cpu()
if path := os.environ.get("QKEEL_LOSSES"):
    record_losses(path)
if seed := os.environ.get("QKEEL_SEED"):
    import torch

    random.seed(int(seed))
    torch.manual_seed(int(seed))
if number := os.environ.get("QKEEL_ROUNDS"):
    end_after(int(number))
