"""The reference has every public name, and no other."""

import importlib
import re
import sys
from pathlib import Path

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
FORMULAS = sorted(
    path.stem
    for path in (PAGES.parents[1] / "src" / "qkeel" / "functional").glob("[a-z]*.py")
)
FORMULAS = [
    stem for stem in FORMULAS if "statistics" not in stem
]  # their public names are those of qkeel.monitor
# Tables of names, which their functions list; and an alias of Any in annotations.
TABLES = {
    "Foreign",
    "ALIASES",
    "DEFAULT",
    "METHODS",
    "POSITIONS",
    "PRESETS",
    "REMEDIES",
    "SINKS",
}


def _named():
    blocks = [
        block
        for page in PAGES.glob("*.md")
        for block in re.findall(
            r"autosummary::\n(?: +:.*\n)*\n((?: +\S+\n)+)", page.read_text()
        )
    ]
    return {
        line.strip().removeprefix("~")
        for block in blocks
        for line in block.splitlines()
    }


def _found(name):
    room, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(room), rest)
    except ModuleNotFoundError:
        return getattr(_found(room), rest)


def test_every_public_name_is_in_the_reference_and_each_of_its_names_exists():
    named = _named()
    listed = [_found(name) for name in named]
    missing = []
    for room in ROOMS:
        module = importlib.import_module(f"qkeel{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if (
                name not in TABLES
                and not name.isupper()
                and f"qkeel.{name}" not in sys.modules
            ):
                missing += (
                    []
                    if any(value is one for one in listed)
                    else [f"qkeel{room}.{name}"]
                )
    for room in ("qkeel.errors", *(f"qkeel.functional.{stem}" for stem in FORMULAS)):
        own = [
            value
            for value in vars(importlib.import_module(room)).values()
            if getattr(value, "__module__", "") == room
        ]
        kinds = (
            type if room == "qkeel.errors" else object
        )  # its functions make errors: they are for our own code
        missing += [
            f"{room}.{one.__name__}"
            for one in own
            if isinstance(one, kinds) and one.__name__[0] != "_" and one not in listed
        ]
    assert not missing


def test_every_page_of_the_reference_is_in_its_index():
    index = (PAGES / "index.md").read_text().split()
    assert {page.stem for page in PAGES.glob("*.md")} - {"index"} <= set(index)
