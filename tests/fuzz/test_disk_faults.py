"""Power losses, failing calls and damaged files: the same result or an error that names the file, never another one.

A sample; all of them is what `python -m tests.fuzz.crash` and the slow test do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz import disk_faults
from tests.fuzz.disk_faults import CLASSES, SUBJECTS, cases, hunt, undisturbed
from tests.fuzz.disk_model import Journal, after_power_loss, in_place

from qkeel.records import RunDirectory, disk, file_formats

PAIRS = list(itertools.product(CLASSES, SUBJECTS))
FEW = {"study": 2, "watched": 8}


def sampled(found: Iterator[Any], count: int) -> list[Any]:
    every = list(found)
    return random.Random(1).sample(every, min(count, len(every)))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_sample_of_faults_is_never_silent(kind: str, name: str) -> None:
    few = sampled(cases(kind, name, 3, 1 if kind == "power" else FEW[name]), FEW[name])
    ends, findings = hunt(kind, name, iter(few))
    assert not findings
    assert ends.total() == len(few)
    assert ends["wrong"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_no_fault_is_silent(kind: str, name: str) -> None:
    ends, findings = hunt(kind, name, cases(kind, name, 0, 2 if kind == "power" else 300))
    assert not findings
    assert ends.total() >= 200


@pytest.mark.slow
def test_without_checksums_damage_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hunt finds where nothing is checked: it can fail."""
    monkeypatch.setattr(file_formats, "check_seal", lambda text, needed=False: disk.is_sealed(text))
    ends, findings = hunt("damage", "watched", disk_faults.damages("watched", 0, 40))
    assert ends["wrong"] > 3
    assert any("Silent" in finding for finding in findings)


def test_without_a_wait_for_the_disk_nothing_is_left() -> None:
    """What the model of a disk finds where nothing is synced."""
    whole, _, ended = undisturbed("study")
    journal = Journal(whole.root)
    journal.calls = [call for call in whole.calls if call[0] != "sync"]
    assert after_power_loss(journal, len(journal.calls), False) == {}
    left = after_power_loss(journal, len(journal.calls), True).keys() - {"out"}
    locks = ("lock", "lock.files")  # whose names may or may not have reached the disk
    assert {one for one in left if not one.endswith(locks)} == {one for one in ended if not one.endswith(locks)}


def test_a_finished_run_is_on_the_disk(tmp_path: Path) -> None:
    """Once a run is done, a loss of power takes nothing of it but what is of no account."""
    journal = Journal(tmp_path)
    with in_place(journal):
        SUBJECTS["watched"].make(tmp_path / "out")
    left = after_power_loss(journal, len(journal.calls), False)
    assert {name: (tmp_path / name).read_bytes() for name in left if left[name] is not None} == {
        name: content for name, content in left.items() if content is not None
    }
    assert set(RunDirectory(tmp_path / "out").sizes()) <= {Path(name).name for name in left}
