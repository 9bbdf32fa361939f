"""The installed torch has every private name that qkeel uses; where it lacks one, a sentence says what that costs."""

from __future__ import annotations

import dataclasses
import importlib

import torch
import torch._dynamo
from tests.patching.private_names import PRIVATE_NAMES, PrivateName
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn import functional


def test_the_installed_torch_has_every_private_name() -> None:
    missing = [
        f"torch {torch.__version__} has no {row.home}.{row.name} any more, which qkeel.patching.{row.used_by} uses "
        f"{row.purpose}. Without it these do not work: {row.without}. Read what torch has in its place and change "
        f"qkeel.patching.{row.used_by} and its row of PRIVATE_NAMES, or ask for an older torch in pyproject.toml."
        for row in PRIVATE_NAMES
        if not is_there(row)
    ]
    assert not missing, "\n".join(missing)


ROW = torch.ones(1, 2, requires_grad=True)


class Joined(Joinable):
    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: object) -> None:  # type: ignore[override]
        pass

    join_device = join_process_group = None  # type: ignore[assignment]


# What has the private name where its home alone does not show it.
EXAMPLES = {
    "a graph node of torch.nn.functional.layer_norm": lambda: (
        functional.layer_norm(ROW, (2,), ROW[0]).grad_fn
    ),
    "a graph node of a product": lambda: (ROW * ROW).grad_fn,
    "a graph node of addmm": lambda: torch.addmm(ROW, ROW[:, :1], ROW).grad_fn,
    "a graph node of a convolution": lambda: (
        functional.conv1d(ROW[None], ROW[None]).grad_fn
    ),
    "a graph node of a slice": lambda: ROW[:, 1:].grad_fn,
    "a graph node": lambda: (ROW * ROW).grad_fn,
    "a Joinable": lambda: Joined(),
    "the state of a sharded module": FSDPState,
    "torch._dynamo.OptimizedModule": lambda: torch._dynamo.OptimizedModule(
        nn.Linear(1, 1), torch._dynamo.optimize()
    ),
    "torch.compiler.assume_constant_result": lambda: (
        torch.compiler.assume_constant_result(lambda: 0)
    ),
}


def is_there(row: PrivateName) -> bool:
    return any(
        has(dataclasses.replace(row, name=name)) for name in row.name.split(" or ")
    )


def has(row: PrivateName) -> bool:
    if row.home in EXAMPLES:
        return hasattr(EXAMPLES[row.home](), row.name)
    parts = row.home.split(".")
    for n in range(len(parts), 0, -1):
        try:
            home: object = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            home = getattr(home, part)
        annotated = (
            getattr(home, "__annotations__", {}) if isinstance(home, type) else {}
        )
        return row.name in annotated or hasattr(home, row.name)
    return False
