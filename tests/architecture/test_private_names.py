"""Private names of torch are used in qkeel.patching alone, and each that is used there has a row in its table."""

from __future__ import annotations

import ast
import sys

import pytest
import torch
import torch.distributed.distributed_c10d
import torch.utils.checkpoint
from tests.patching.private_names import PRIVATE_NAMES
from torch import nn

from .source import MODULES, walk

TABLE = {name: row for row in PRIVATE_NAMES for name in row.name.split(" or ")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_" * 2) and name != "_"


def places() -> list[object]:
    """Where torch has private names that code may reach through any variable."""
    layer = nn.Linear(1, 1)
    modules = ("torch.optim.optimizer", "torch.utils._python_dispatch", "torch.nn.modules.module", "torch.overrides")
    return [
        *(layer, torch.optim.AdamW(layer.parameters()), layer.weight, torch, torch._C),
        *(torch.utils.checkpoint, torch.distributed.distributed_c10d, *(sys.modules[name] for name in modules)),
    ]


KNOWN = {name for place in places() for name in dir(place) if is_private(name)} | {*TABLE}


def private_names_in(tree: ast.Module) -> set[str]:
    """Private names of torch in a module: imported, read from something of torch, or known to be torch's."""
    own, of_torch, found = defined_in(tree), {"torch"}, set()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            ours = [a for a in node.names if a.name.partition(".")[0] == "torch"]
            of_torch |= {a.asname for a in ours if a.asname}
            found |= {part for a in ours for part in a.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            of_torch |= {a.asname or a.name for a in node.names}
            found |= {*(node.module or "").split("."), *(a.name for a in node.names)}
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node.value).partition(".")[0].partition("(")[0]
            known = node.attr in KNOWN or node.attr.startswith("_saved_")
            if root in of_torch or (known and node.attr not in own):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KNOWN - own:
            found.add(node.value)
    return {name for name in found if is_private(name)}


def defined_in(tree: ast.Module) -> set[str]:
    """Names that the module itself defines: they are not torch's, whatever they are called."""
    found = {n.name for n in walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor",
        "from torch.overrides import _push_mode",
        "import torch\ntorch._C._get_tracing_state()",
        "from torch import optim as steps\nsteps._anything",
        "def f(module): return module._forward_hooks",
        "def f(optimizer): optimizer._init_group({})",
        "def f(node): return node._saved_anything",
        "def f(module): return vars(module)['_buffers']",
    ],
)
def test_a_private_name_of_torch_is_noticed_however_it_is_reached(source: str) -> None:
    assert private_names_in(ast.parse(source))


def test_private_names_of_others_are_not_taken_for_those_of_torch() -> None:
    source = "class A:\n    def __init__(self): self._hooks = 1\n    def f(self): return self._hooks, self._mine"
    assert not private_names_in(ast.parse(source))


def test_private_names_of_torch_are_used_in_patching_alone() -> None:
    for name, (_, tree) in MODULES.items():
        if not name.startswith("qkeel.patching."):
            used = ", ".join(sorted(private_names_in(tree)))
            assert not used, f"{name} uses {used} of torch: call a function of qkeel.patching, or add one there"


def test_the_table_has_every_private_name_that_patching_uses_and_no_other() -> None:
    used = {
        (name, home.rpartition(".")[2])
        for home, (_, tree) in MODULES.items()
        if home.startswith("qkeel.patching.")
        for name in private_names_in(tree)
    }
    missing = {name for name, _ in used} - {*TABLE}
    assert not missing, f"{missing} of torch: add rows to PRIVATE_NAMES"
    stale = {(name, row.used_by) for name, row in TABLE.items()} - used
    assert not stale, f"{stale} have rows in PRIVATE_NAMES, and no use"
