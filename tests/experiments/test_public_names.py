"""Experiments are written against the public API alone."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Packages whose public names are their __all__, and modules whose functions are in the reference one by one.
PACKAGES = (
    "",
    ".errors",
    ".lab",
    ".metrics",
    ".monitor",
    ".nn",
    ".remedies",
    ".remedies.retrofit",
    ".report",
    ".spec",
)
MODULES = (
    "qkeel.errors",
    "qkeel.functional.bounds",
    "qkeel.functional.logits",
    "qkeel.lab.text",
)


def private_imports(path):
    """Returns what a file imports from qkeel that is no public name."""
    private = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            private += [
                alias.name for alias in node.names if alias.name.startswith("qkeel.")
            ]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "qkeel"
        ):
            module = node.module or ""
            if module in MODULES:
                names = [
                    name
                    for name in dir(importlib.import_module(module))
                    if not name.startswith("_")
                ]
            elif module.removeprefix("qkeel") in PACKAGES:
                names = importlib.import_module(module).__all__
            else:
                names = []
            private += [
                f"{module}.{alias.name}"
                for alias in node.names
                if alias.name not in names
            ]
    return private


def test_experiments_import_public_names_alone():
    private = {
        str(path.relative_to(ROOT)): private_imports(path)
        for path in (ROOT / "experiments").rglob("*.py")
    }
    assert len(private) > 20
    assert {path: names for path, names in private.items() if names} == {}


def test_a_private_name_is_noticed(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(
        "from qkeel.lab.checkpoint import RunState\nfrom qkeel.lab import run\nimport qkeel.distributed\n"
    )
    assert private_imports(path) == [
        "qkeel.lab.checkpoint.RunState",
        "qkeel.distributed",
    ]
