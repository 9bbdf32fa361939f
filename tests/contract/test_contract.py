"""The contract speaks through the public API alone, and each of its files stands in the table of its README."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
NAMES = {
    *(
        "AttentionSpec",
        "apply",
        "attention",
        "autopilot",
        "check",
        "explain",
        "export",
        "find_sites",
        "fold",
        "load",
    ),
    *("preset", "presets", "retrofit", "watch"),
}
PACKAGES = {
    *(
        "audit",
        "autopilot",
        "errors",
        "functional",
        "integrations",
        "lab",
        "metrics",
        "monitor",
        "nn",
        "reference",
    ),
    *("remedies", "report", "sites", "spec"),
}
# Modules of a package that users import by their own name: formulas by their subject, callbacks by their trainer.
MODULES = ("functional.", "integrations.huggingface", "integrations.lightning")
# Tools of the tests that know nothing of qkeel, and builders of other people's models.
TOOLS = (
    *(
        "tests.contract",
        "tests.each_row",
        "tests.forked",
        "tests.quick",
        "tests.sites.flash_stand_in",
    ),
    *("tools.zoo", "tools.foreign"),
)
INTERNAL_TOOLS = (
    *("tools.zoo.compare", "tools.zoo.census", "tools.zoo.exact"),
    *(
        "tools.foreign.census",
        "tools.foreign.checks",
        "tools.foreign.effects",
        "tools.foreign.work",
    ),
)


def violations(text: str) -> Iterator[str]:
    """What a source takes that is not public, in words."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if not allowed(alias.name, ())
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = tuple(alias.name for alias in node.names)
            yield from (
                ()
                if allowed(node.module or "", names)
                else (f"{node.module}: {', '.join(names)}",)
            )
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "qkeel"
        ):
            yield from () if node.attr in NAMES | PACKAGES else (f"qkeel.{node.attr}",)


def allowed(module: str, names: tuple[str, ...]) -> bool:
    """Whether `from module import names`, or `import module`, is public."""
    first, _, rest = module.partition(".")
    if first in ("tests", "tools"):
        paths = [module, *(f"{module}.{name}" for name in names)]
        return any(path.startswith(TOOLS) for path in paths) and not any(
            path.startswith(INTERNAL_TOOLS) for path in paths
        )
    if first != "qkeel" or any(name.startswith("_") for name in names):
        return first != "qkeel"
    if not rest:
        return set(names) <= NAMES | PACKAGES
    if rest not in PACKAGES:
        return rest.startswith(MODULES)
    public = getattr(importlib.import_module(module), "__all__", names)
    return set(names) <= {*public}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_file_of_the_contract_takes_public_names_alone(path: Path) -> None:
    assert list(violations(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "from qkeel.kernels.statistics import logit_stats",
        "from qkeel.spec.call import make_call",
        "from qkeel.spec import Slot",
        "from qkeel.functional.bounds import _root",
        "import qkeel.capture",
        "import qkeel\nqkeel.ops.run",
        "from qkeel import ops",
        "from tests.remedies.models import decoder",
        "from tools.zoo.compare import compare",
    ],
)
def test_what_is_not_public_is_a_violation(line: str) -> None:
    assert len(list(violations(line))) == 1


def test_every_file_of_the_contract_is_in_the_table_and_every_file_in_the_table_exists() -> (
    None
):
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    tests = {
        str(path.relative_to(FOLDER)) for path in FILES if path.name.startswith("test_")
    }
    assert tests <= named
    assert {name for name in named if not (FOLDER / name).exists()} == set()
    documents = re.findall(r"`((?:README|docs/[\w/]+)\.md)`", table)
    assert documents
    assert {
        name for name in documents if not (FOLDER.parents[1] / name).exists()
    } == set()
