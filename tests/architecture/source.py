"""The package's source as syntax trees, read once, and the questions that several rules ask of them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "qkeel"


class Modules(Mapping[str, tuple[Path, ast.Module]]):
    """Path and syntax tree of each module by its name; parsed when asked for, as every worker collects every test."""

    def __init__(self) -> None:
        files = sorted(PACKAGE.rglob("*.py"))
        self.paths = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in files}
        self.parsed: dict[str, ast.Module] = {}

    def __getitem__(self, name: str) -> tuple[Path, ast.Module]:
        path = self.paths[name]
        if name not in self.parsed:
            self.parsed[name] = ast.parse(path.read_text("utf-8"))
        return path, self.parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


MODULES = Modules()
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Rooms that hold nothing but variants of one thing, one a file, and what their variants build on.
ROOMS_OF_VARIANTS = ("qkeel.remedies", "qkeel.integrations", "qkeel.lab.studies")


@functools.cache
def walk(node: ast.AST) -> list[ast.AST]:
    """The node and all below it: several rules ask for them."""
    return [*ast.walk(node)]


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, Function]]:
    """Every function with its qualified name, nested ones too."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((prefix + node.name, node))
            found += functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            found += functions(node, f"{prefix}{node.name}.")
        else:
            found += functions(node, prefix)
    return found


@functools.cache
def all_functions() -> dict[str, Function]:
    """Every function of the package by its full name."""
    return {f"{name}.{own}": node for name, (_, tree) in MODULES.items() for own, node in functions(tree)}


def imports(tree: ast.AST, own: str) -> set[str]:
    """Modules of qkeel that a module imports, absolute names."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = own.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name in MODULES}


def place(name: str, node: ast.AST) -> str:
    """Where something stands, for a list of violations: path and line."""
    return f"{MODULES[name][0].relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def listed(violations: list[str], limit: int = 0) -> None:
    """Fails with every violation, one a line, where there are more than the limit."""
    assert len(violations) <= limit, f"{len(violations)}, at most {limit}:\n" + "\n".join(violations)
