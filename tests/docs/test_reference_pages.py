"""The reference has every public name, and no other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from enum import Enum
from pathlib import Path

from tests.docs.page_text import loaded

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
ROOMS = (
    "",
    ".nn",
    ".spec",
    ".sites",
    ".remedies",
    ".monitor",
    ".lab",
    ".metrics",
    ".frames",
    ".kernels.native",
    ".remedies.retrofit",
    ".records",
    ".audit",
    ".report",
    ".integrations",
    ".autopilot",
)
# Rooms without a list of names: what a module of theirs defines. Aliases of annotations have no page.
FORMULAS = sorted(path.stem for path in (PAGES.parents[1] / "src" / "qkeel" / "functional").glob("[a-z]*.py"))
FORMULAS = [stem for stem in FORMULAS if "statistics" not in stem]  # their public names are those of qkeel.monitor
# Tables of names, which their functions list; and an alias of Any in annotations.
TABLES = {"Foreign", "ALIASES", "DEFAULT", "POLICIES", "METHODS", "POSITIONS", "PRESETS", "REMEDIES", "SINKS"}
# Functions of qkeel.functional that are no published or derived formula, and those defined in their first sentence.
PLAIN = {"check_pairs", "repeat_groups", "unrounded", "wide", "widest", "spectral_norm", "gram_spectral_norm"}
PLAIN |= {"change_rows", "no_change_rows", "reduce_changes"}  # what a change of logits is recorded as


def _named() -> set[str]:
    blocks = [
        block
        for page in PAGES.glob("*.md")
        for block in re.findall(r"autosummary::\n(?: +:.*\n)*\n((?: +\S+\n)+)", page.read_text())
    ]
    return {line.strip().removeprefix("~") for block in blocks for line in block.splitlines()}


def _found(name: str) -> object:
    room, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(room), rest)
    except ModuleNotFoundError:
        return getattr(_found(room), rest)


def test_every_public_name_is_in_the_reference_and_each_of_its_names_exists() -> None:
    named = _named()
    listed = [_found(name) for name in named]
    missing = []
    for room in ROOMS:
        module = importlib.import_module(f"qkeel{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if name not in TABLES and not name.isupper() and f"qkeel.{name}" not in sys.modules:
                missing += [] if any(value is one for one in listed) else [f"qkeel{room}.{name}"]
    for room in ("qkeel.errors", *(f"qkeel.functional.{stem}" for stem in FORMULAS)):
        own = [
            value for value in vars(importlib.import_module(room)).values() if getattr(value, "__module__", "") == room
        ]
        kinds = type if room == "qkeel.errors" else object  # its functions make errors: they are for our own code
        missing += [
            f"{room}.{one.__name__}"
            for one in own
            if isinstance(one, kinds) and one.__name__[0] != "_" and one not in listed
        ]
    assert not missing


def test_every_page_of_the_reference_is_in_its_index() -> None:
    index = (PAGES / "index.md").read_text().split()
    assert {page.stem for page in PAGES.glob("*.md")} - {"index"} <= set(index)


def test_the_page_of_each_remedy_names_its_spec_string_and_source_and_the_sidebar_is_short() -> None:
    pages = loaded("made_pages")
    said = [pages.sourced(_found(name)) for name in _named() if re.match(r"qkeel\.remedies\.(?!retrofit)\w+\.", name)]
    assert len(said) > 20
    assert all(any(line.startswith("Source: ") for line in lines) for lines in said)
    inside = '<a href="x">qkeel.nn</a><input id="1"/><label for="1">v</label><ul><li>a</li></ul></li>'
    closed = f'<li class="toctree-l2 has-children">{inside}'
    mine = closed.replace("has-children", "current has-children")
    groups = [f'<p class="caption" role="heading">{name}</p>\n<ul>{name}</ul>' for name in "abc"]
    shut, shown = "<details><summary", "<details open><summary"
    tree = pages.pruned("<div>" + "".join(groups) + "</div>")
    assert (tree.count(shown), tree.count(shut)) == (2, 1)
    assert tree.endswith("<ul>c</ul></details></div>")
    tree = pages.pruned("".join(groups) + '<ul class="current"></ul>')
    assert tree.startswith(shut)
    assert tree.count(shown) == 1
    assert pages.pruned(closed + mine) == '<li class="toctree-l2"><a href="x">qkeel.nn</a></li>' + mine


def test_functions_say_their_arguments_and_errors() -> None:
    """From four parameters on each has its line; one that raises an error of ours says when, a formula its source."""
    functions = {name: _found(name) for name in sorted(_named())}
    functions = {name: one for name, one in functions.items() if inspect.isfunction(one)}
    said = {name: one.__doc__ or "" for name, one in functions.items()}
    assert len(said) > 100
    unsaid = [name for name, one in functions.items() if len(inspect.signature(one).parameters) >= 4]
    assert not [name for name in unsaid if "Args:" not in said[name]]
    raising = r"raise (?!AssertionError)(\w+Error|unknown)\(|^\s+check(_known)?\("
    silent = [name for name, one in functions.items() if re.search(raising, inspect.getsource(one), re.M)]
    assert not [name for name in silent if not re.search(r"Raises:|Error|refus|raises", said[name])]
    formulas = [name for name in said if name.startswith("qkeel.functional.") and functions[name].__name__ not in PLAIN]
    assert not [name for name in formulas if "ource" not in said[name]]


def test_classes_say_their_fields() -> None:
    """Each field, or argument of a constructor, is named in the docstring or has a text that its page shows."""
    texts = loaded("made_pages").field_texts
    classes = {name: one for name in sorted(_named()) if isinstance(one := _found(name), type)}
    assert len(classes) > 150
    assert "severity" in texts(classes["qkeel.monitor.Ceiling"])  # of its base
    silent = []
    for name, one in classes.items():
        said, known = one.__doc__ or "", texts(one)
        fields = list(_fields(one))
        if not dataclasses.is_dataclass(one) and re.search(r"(?:created|inserted|returned) by `", said):
            continue  # nobody calls its constructor
        silent += [f"{name}.{f}" for f in fields if f not in known and not re.search(rf"(?<!\w){f}(?!\w)", said)]
    assert not silent


def _fields(cls: type) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if field.name[0] != "_"]
    if cls.__init__ is object.__init__ or issubclass(cls, (Enum, BaseException)):
        return list(getattr(cls, "_fields", ()))
    return [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
