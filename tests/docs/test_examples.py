"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import qkeel

PACKAGE = Path(qkeel.__file__).parent
WITH_EXAMPLES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
ROOMS = sorted(
    {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in WITH_EXAMPLES}
)


@pytest.mark.parametrize("room", ROOMS)
def test_the_examples_of_a_room_run(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    reports = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    for path in WITH_EXAMPLES:
        inside = path.relative_to(PACKAGE)
        if inside.parts[0].removesuffix(".py") == room:
            name = ".".join(("qkeel", *inside.with_suffix("").parts)).removesuffix(
                ".__init__"
            )
            for test in doctest.DocTestFinder(exclude_empty=True).find(
                importlib.import_module(name)
            ):
                runner.run(test, out=reports.append)
    assert not runner.failures, "".join(reports)
    assert runner.tries, f"no example of {room} was found"
