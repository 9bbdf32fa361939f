"""Every public thing says what it is in whole sentences, and every public function shows how it is used."""

from __future__ import annotations

import ast
import inspect
import re

from . import limits
from .source import MODULES, ROOT, Documented, classes, is_overload, listed, place, public_functions

QUESTIONS = ("How", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why", "That")


def test_every_public_thing_has_a_docstring() -> None:
    missing = []
    for name, (path, tree) in MODULES.items():
        if not ast.get_docstring(tree) and path.name != "__init__.py":
            missing.append(name)
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            overload = isinstance(node, ast.FunctionDef) and is_overload(node)
            if not ast.get_docstring(node) and not overload:
                missing.append(f"{name}.{node.name}")
            if isinstance(node, ast.ClassDef):
                missing += [f"{name}.{node.name}.{method}" for method in undocumented(node)]
    listed(missing)


def undocumented(node: ast.ClassDef) -> list[str]:
    """Public methods without a docstring that no base class of qkeel documents: an override says nothing new."""
    methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
    documented = {m.name for m in methods if ast.get_docstring(m)}  # a property's setter says nothing new
    bare = [m.name for m in methods if m.name not in documented]
    return [name for name in bare if name not in documented_in_bases(node)] if bare else []


def documented_in_bases(node: ast.ClassDef) -> set[str]:
    names = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found: set[str] = set()
    for cls in (cls for name in names for cls in classes().get(name, ())):
        found |= {m.name for m in cls.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
        found |= documented_in_bases(cls)
    return found


def test_the_first_sentence_is_one() -> None:
    """It begins with a capital, a sign or a name in code, ends with a full stop, and is no bare question."""
    found = []
    for name, (_, tree) in MODULES.items():
        for node in ast.walk(tree):
            if not isinstance(node, Documented):
                continue
            text = ast.get_docstring(node)
            if text is not None and (fault := fault_of(text)):
                first = " ".join(text.split("\n\n")[0].split())
                found.append(f"{place(name, node)} {fault}: {first[:90]}")
    listed(found, limits.FIRST_SENTENCES)


def test_the_code_of_the_pages_on_adding_keeps_these_rules() -> None:
    """Classes, functions and whole files that a reader is told to add: those that begin with a docstring are files."""
    files = set()
    for page in sorted((ROOT / "docs").glob("adding-a*.md")):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.S | re.M):
            tree = ast.parse(code)
            files |= {page.stem} if ast.get_docstring(tree) else set()
            texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, Documented)]
            listed([f"{page.name} {fault_of(text)}: {text[:90]}" for text in texts if text and fault_of(text)])
            bare = [
                n for n in tree.body if isinstance(n, ast.ClassDef) and n.decorator_list and not ast.get_docstring(n)
            ]
            listed([f"{page.name}: {node.name} says nothing of itself" for node in bare])
    assert files == {"adding-a-remedy", "adding-a-study", "adding-an-integration"}


def fault_of(text: str) -> str | None:
    paragraph = " ".join(text.split("\n\n")[0].split())
    if re.match(r"[a-z]", paragraph) and not paragraph.startswith("qkeel"):
        return "no capital"
    if not re.search(r"\.(?:\s|$)", paragraph):
        return "no full stop"
    return "a bare question" if paragraph.split()[0] in QUESTIONS else None


def test_a_public_function_explains_its_arguments_from_four_on() -> None:
    found = []
    for name, function in public_functions().items():
        taken = list(inspect.signature(function).parameters)
        if len(taken) >= 4 and "Args:" not in (function.__doc__ or ""):
            found.append(f"{name}: {', '.join(taken)}")
    listed(found, limits.WITHOUT_ARGS)


def test_a_public_function_shows_an_example() -> None:
    without = [name for name, function in public_functions().items() if ">>> " not in (function.__doc__ or "")]
    listed(without, limits.WITHOUT_EXAMPLE)
