"""The live view of a notebook, on a display that keeps what it is given."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from tests.monitor.samples import about, alarm, sample

from qkeel.errors import InvalidValueError
from qkeel.integrations import sink


def shown(monkeypatch: pytest.MonkeyPatch, *, notebook: bool = True) -> list[str]:
    """The HTML of each update; IPython's display returns None outside of a notebook."""
    pages: list[str] = []
    place = types.SimpleNamespace(update=lambda one: pages.append(one._repr_html_()))

    def display(one: Any, display_id: bool) -> Any:
        pages.append(one._repr_html_())
        return place if notebook else None

    module = types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return pages


def test_the_cell_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = shown(monkeypatch)
    view = sink("notebook:seconds=0")
    view.open(about())
    for step in (0, 10, 20):
        view.write(sample(step))
    view.write(sample(20, phase="eval"))
    view.alarm(alarm(step=20))
    view.close(True)
    assert len(pages) == 6  # empty, three samples, an alarm, the end
    assert "nothing measured yet" in pages[0]
    assert "step 10" in pages[2]
    assert "ceiling 1000" in pages[4] or str(alarm(step=20))[:20] in pages[4]
    assert repr(view).startswith("step 20")
    slow = sink("notebook:seconds=1000")
    slow.open(about())
    for step in (0, 10, 20):
        slow.write(sample(step))
    slow.close(True)
    assert [("step 0" in page, "step 20" in page) for page in pages[7:]] == [(True, False), (False, True)]


def test_outside_of_a_notebook_it_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    shown(monkeypatch, notebook=False)
    with pytest.raises(InvalidValueError, match='use "log"'):
        sink("notebook").open(about())
