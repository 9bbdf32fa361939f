"""Small modules, small functions, few parameters, docstrings, and habits that are not taken up."""

from __future__ import annotations

import ast
import re

import pytest

from .source import MODULES, Function, functions

every_module = pytest.mark.parametrize("name", MODULES)

# More than 8 parameters, each with the reason. All but the tensors are keyword-only.
WIDE = {
    "qkeel.ops.attention": "the public signature of DESIGN §10",
    "qkeel.reference.attend": "the public signature of DESIGN §10, that of attention without the kernel's options",
    "qkeel.spec.call.make_call": "checks exactly what attention takes",
    "qkeel.monitor.watch.watch": "the public signature of DESIGN §10 and what to measure besides, each on its own",
    "qkeel.nn.core.SpecModule.attend": "hands on exactly what attention takes",
    "qkeel.lab.twins.StackedAttend.__call__": "stands in for SpecModule.attend",
}
# **options of a named thing: read against its own literal list of options, never passed through unread.
OPTIONS = {
    "qkeel.spec.attention.AttentionSpec.extrapolate": "options of one method; an unknown one names the nearest",
    "qkeel.spec.presets.preset": "options of the preset's own constants; an unknown one names the nearest",
    "qkeel.spec.attention.AttentionSpec.replace": "slots by name; an unknown one names the nearest",
    "qkeel.remedies.apply.parse": "options of one remedy",
    "qkeel.sites.find.find_sites": "the example, as the model takes it",
    "qkeel.remedies.apply.apply": "options of one remedy",
    "qkeel.remedies.stand_in.StandIn.__call__": "stands in for a module's forward and takes what that takes",
    **{
        f"qkeel.integrations.huggingface.KeelCallback.{event}": "the Trainer's own protocol: it hands over all it has"
        for event in ("on_train_begin", "on_log", "on_train_end")
    },
}


@every_module
def test_a_module_has_at_most_400_lines(name: str) -> None:
    path, _ = MODULES[name]
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@every_module
def test_a_function_has_at_most_40_lines_and_8_parameters(name: str) -> None:
    for qualified, node in functions(MODULES[name][1]):
        assert code_lines(node) <= 40, f"{qualified}: {code_lines(node)} lines"
        if f"{name}.{qualified}" not in WIDE and not is_overload(node) and not is_kernel(node):
            assert parameters(node) <= 8, f"{qualified}: {parameters(node)} parameters"


def code_lines(node: Function) -> int:
    """Lines of the body, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def parameters(node: Function) -> int:
    args = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([a for a in args if a not in ("self", "cls")])


def is_overload(node: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


def is_kernel(node: Function) -> bool:
    # What a GPU runs gets every pointer, stride and size on its own.
    return any(ast.unparse(d) == "triton.jit" for d in node.decorator_list)


@pytest.mark.parametrize("exception", [*WIDE, *OPTIONS])
def test_every_exception_is_still_needed(exception: str) -> None:
    module = next(n for n in sorted(MODULES, key=len, reverse=True) if exception.startswith(n + "."))
    found = dict(functions(MODULES[module][1]))
    node = found[exception.removeprefix(module + ".")]
    if exception in WIDE:
        assert parameters(node) > 8
        assert len(node.args.kwonlyargs) >= parameters(node) - 5
    else:
        assert node.args.kwarg is not None


@every_module
def test_no_module_is_a_drawer_for_anything(name: str) -> None:
    own = name.rpartition(".")[2]
    assert not re.fullmatch(r"_*(utils?|common|helpers?|misc|tools|shared)_*", own)


@every_module
def test_no_hasattr_and_no_unread_keyword_arguments(name: str) -> None:
    tree = MODULES[name][1]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert [n.lineno for n in calls if n.func.id == "hasattr"] == []  # type: ignore[attr-defined]
    for qualified, node in functions(tree):
        if node.args.kwarg is not None:
            assert f"{name}.{qualified}" in OPTIONS, f"{qualified} takes **{node.args.kwarg.arg}"


@every_module
def test_every_public_thing_has_a_docstring(name: str) -> None:
    tree = MODULES[name][1]
    own = name.rpartition(".")[2]
    assert ast.get_docstring(tree) or own == "__init__", "module"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node) or is_overload(node), node.name
            continue
        assert ast.get_docstring(node), node.name
        known = defined_in_bases(node)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and method.name not in known:
                assert ast.get_docstring(method), f"{node.name}.{method.name}"


def defined_in_bases(node: ast.ClassDef) -> set[str]:
    """Methods that a base class of qkeel documents: an override says nothing new."""
    names = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found: set[str] = set()
    for _, tree in MODULES.values():
        for cls in tree.body:
            if isinstance(cls, ast.ClassDef) and cls.name in names:
                found |= {m.name for m in cls.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
                found |= defined_in_bases(cls)
    return found


@every_module
def test_values_are_frozen_and_tables_are_not_filled_at_run_time(name: str) -> None:
    # No mutable globals, no registering decorators: nothing at module level is changed by a function.
    tree = MODULES[name][1]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)]
    tables = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for qualified, node in functions(tree):
        local = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        for n in ast.walk(node):
            written = isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del)
            if written and isinstance(n.value, ast.Name):  # type: ignore[attr-defined]
                owner = n.value.id  # type: ignore[attr-defined]
                assert owner not in tables - local, f"{qualified} writes to {owner}"
