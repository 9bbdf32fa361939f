"""The package's source as syntax trees, read once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "qkeel"
MODULES: dict[str, tuple[Path, ast.Module]] = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): (path, ast.parse(path.read_text("utf-8")))
    for path in sorted(PACKAGE.rglob("*.py"))
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def imports(tree: ast.AST, own: str) -> set[str]:
    """Modules of qkeel that a module imports, absolute names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = own.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name in MODULES}
