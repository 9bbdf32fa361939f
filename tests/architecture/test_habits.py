"""Habits that the source avoids: hasattr, options passed on unread, late imports, tables filled at run time."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

from .source import MODULES, ROOT, Function, all_functions, functions, listed, place, walk

# What need not be installed may be imported where it is used: all that is neither Python's nor a dependency. So may
# what a platform or a Python may lack, and what needs such a library itself.
_DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
_THERE = {"", "qkeel", *sys.stdlib_module_names, *(re.split(r"\W", line)[0] for line in _DEPENDENCIES)}
MAY_BE_MISSING = ("fcntl", "joblib", "pydoc_data", "torch.utils.tensorboard", "qkeel.kernels.triton")


DRAWER = re.compile(r"_*(utils?|common|helpers?|misc|tools|shared)_*")


def test_no_module_is_a_drawer_for_anything() -> None:
    listed([name for name in MODULES if DRAWER.fullmatch(name.rpartition(".")[2])])


def test_no_hasattr() -> None:
    listed([place(name, call) for name in MODULES for call in calls(name, "hasattr")])


def calls(name: str, function: str) -> list[ast.Call]:
    found = [n for n in walk(MODULES[name][1]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [n for n in found if n.func.id == function]  # type: ignore[attr-defined]


def test_keyword_arguments_without_a_name_are_read_and_not_passed_through() -> None:
    """A function that takes **options uses them as a mapping, or gives them to one of its module that does.

    The methods of a class with a foreign base take what that base hands over.
    """
    strange = []
    for name, (_, tree) in MODULES.items():
        if name.startswith("qkeel.patching."):
            continue  # what stands in for a function of torch takes what torch hands over
        foreign = {
            method
            for cls in walk(tree)
            if isinstance(cls, ast.ClassDef) and any(_is_foreign(base, tree) for base in cls.bases)
            for method in cls.body
        }
        taking = [(qualified, node) for qualified, node in functions(tree) if node.args.kwarg and node not in foreign]
        readers = {qualified for qualified, node in taking if _reads(node, set())}
        unread = [(qualified, node) for qualified, node in taking if not _reads(node, readers)]
        strange += [f"{place(name, node)} {qualified}" for qualified, node in unread]
    listed(strange)


def _is_foreign(base: ast.expr, tree: ast.Module) -> bool:
    """Whether the module imports this base class from outside of qkeel."""
    own = [n for n in walk(tree) if isinstance(n, ast.ImportFrom) and not (n.module or "").startswith("qkeel")]
    return isinstance(base, ast.Name) and base.id in {alias.asname or alias.name for n in own for alias in n.names}


def _reads(node: Function, readers: set[str]) -> bool:
    """Whether **options are used as a value of their own, or unpacked into one of the readers."""
    assert node.args.kwarg is not None
    calls = [(n, k.value) for n in walk(node) if isinstance(n, ast.Call) for k in n.keywords if k.arg is None]
    passed = {id(value) for call, value in calls if ast.unparse(call.func) not in readers}
    uses = [n for n in walk(node) if isinstance(n, ast.Name) and n.id == node.args.kwarg.arg]
    return any(id(n) not in passed for n in uses)


def test_nothing_is_imported_inside_a_function_but_what_may_be_missing() -> None:
    """The command line is the other exception: a command imports what it runs, so that `--help` waits for nothing."""
    late = []
    for name, node in all_functions().items():
        if name.startswith(("qkeel.cli.", "qkeel.__main__.")):
            continue
        for n in walk(node):
            wanted = [a.name for a in n.names] if isinstance(n, ast.Import) else []
            wanted += [n.module or "."] if isinstance(n, ast.ImportFrom) else []
            late += [f"{name} imports {w}" for w in wanted if not _is_optional(w)]
    listed(sorted(set(late)))


def _is_optional(module: str) -> bool:
    return module.split(".")[0] not in _THERE or f"{module}.".startswith(tuple(f"{m}." for m in MAY_BE_MISSING))


def test_tables_are_not_filled_at_run_time_and_there_are_no_mutable_globals() -> None:
    found = []
    for name, (_, tree) in MODULES.items():
        found += [f"{place(name, n)} global" for n in walk(tree) if isinstance(n, ast.Global)]
        for qualified, node in functions(tree):
            found += [f"{place(name, node)} {qualified} writes to {own}" for own in _written(node) & _tables(tree)]
    listed(found)


def _tables(tree: ast.Module) -> set[str]:
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def _written(node: Function) -> set[str]:
    """Names of outer things that a function assigns entries of."""
    local = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
    written = [n for n in walk(node) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del)]
    return {n.value.id for n in written if isinstance(n.value, ast.Name)} - local
