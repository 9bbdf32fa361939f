"""Small folders, small modules, small functions, few parameters, names that are used once."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from . import limits
from .source import MODULES, PACKAGE, ROOMS_OF_VARIANTS, Function, all_functions, is_overload, listed, parameters

# The two widest public signatures. Whoever takes more than eight parameters takes a part of one of these.
SIGNATURES = ("qkeel.ops.attention", "qkeel.monitor.watch.watch")


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_module_has_at_most_400_lines() -> None:
    listed([f"{name}: {lines(path)}" for name, (path, _) in MODULES.items() if lines(path) > limits.MODULE_LINES])


def test_the_source_grows_no_further() -> None:
    found = sum(lines(path) for path, _ in MODULES.values())
    assert found <= limits.SOURCE_LINES, (
        f"src has {found} lines, {limits.SOURCE_LINES} are agreed on: delete what nothing calls, or raise SOURCE_LINES "
        "in tests/architecture/limits.py by what a new capability takes"
    )


def test_a_folder_holds_at_most_14_modules_but_for_rooms_of_variants() -> None:
    counts = Counter(path.parent for path, _ in MODULES.values() if not path.name.startswith("__"))
    rooms = {PACKAGE.joinpath(*room.split(".")[1:]) for room in ROOMS_OF_VARIANTS}
    wide = {folder: n for folder, n in counts.items() if n > limits.MODULES_IN_A_FOLDER and folder not in rooms}
    listed([f"{folder.relative_to(PACKAGE)}: {n} modules" for folder, n in wide.items()])


def test_a_file_name_is_used_twice_only_for_the_same_noun_seen_from_two_rooms() -> None:
    places = defaultdict(list)
    for path, _ in MODULES.values():
        if not path.name.startswith("__"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    listed([f"{stem}: {', '.join(found)}" for stem, found in places.items() if len(found) > 1], limits.NAMES_USED_TWICE)


def test_no_module_is_a_drawer_for_anything() -> None:
    drawer = re.compile(r"_*(utils?|common|helpers?|misc|tools|shared)_*")
    listed([name for name in MODULES if drawer.fullmatch(name.rpartition(".")[2])])


def code_lines(node: Function) -> int:
    """Lines of the body, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def test_a_function_has_at_most_40_lines() -> None:
    long = {name: code_lines(node) for name, node in all_functions().items()}
    listed([f"{name}: {n} lines" for name, n in long.items() if n > limits.FUNCTION_LINES])


def is_kernel(node: Function) -> bool:
    # What a GPU runs gets every pointer, stride and size on its own.
    return any(ast.unparse(d) == "triton.jit" for d in node.decorator_list)


def test_a_function_has_at_most_8_parameters_or_a_part_of_a_signature_of_the_design() -> None:
    known = [set(parameters(all_functions()[name])) for name in SIGNATURES]
    wide = {
        name: parameters(node)
        for name, node in all_functions().items()
        if len(parameters(node)) > limits.PARAMETERS and not is_overload(node) and not is_kernel(node)
    }
    strange = {name: own for name, own in wide.items() if not any(set(own) <= signature for signature in known)}
    listed([f"{name}: {', '.join(own)}" for name, own in strange.items()])
    for name in wide:
        args = all_functions()[name].args
        assert len(args.kwonlyargs) >= len(parameters(all_functions()[name])) - 5, f"{name} takes too many by position"
