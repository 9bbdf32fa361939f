"""The drawn test: the committed draw is the code's, every setting can be trained, and verdicts follow from rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments.ladder import drawn
from experiments.ladder.drawn import DRAWS, Draw
from experiments.ladder.rows import read

from qkeel.errors import RefusedError
from qkeel.lab.build_run import check, resolve
from qkeel.records import read_json

FIRST = DRAWS[1]
each_draw = pytest.mark.parametrize("test", DRAWS.values(), ids=lambda test: test.name)


@each_draw
def test_the_committed_draw_is_that_of_the_code(test: Draw) -> None:
    found = drawn.drawn(test)
    assert read_json(test.settings_file) == {"seed": test.seed, "settings": found}
    assert len(found) == 40
    assert all(0.3 <= setting["times"] <= 10 for setting in found)


def test_no_draw_repeats_a_setting_or_a_seed_of_another() -> None:
    settings = [tuple(one.items()) for test in DRAWS.values() for one in drawn.drawn(test)]
    seeds = [seed for test in DRAWS.values() for seed in test.seeds]
    assert len({*settings}) == len(settings)
    assert len({*seeds}) == len(seeds)


@each_draw
def test_every_setting_can_be_trained_with_every_arm(test: Draw) -> None:
    for setting in drawn.drawn(test):
        for arm in test.arms:
            check(resolve(drawn.config(setting, arm, test.seeds[0])))


def test_a_run_becomes_a_row_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [{**drawn.drawn(FIRST)[0], "steps": 2, "width": 32, "blocks": 1, "block": "mha", "context": 16, "batch": 4}]
    monkeypatch.setattr(drawn, "read_json", lambda _: {"settings": small})

    class Never:
        asked = False

    drawn.run_left(FIRST, tmp_path / "work", tmp_path, Never())  # type: ignore[arg-type]
    found = read("drawn", tmp_path)
    assert [(r["arm"], r["seed"]) for r in found] == [(arm, s) for s in FIRST.seeds for arm in FIRST.arms]
    assert all(r["val_loss"] for r in found)
    monkeypatch.setattr(drawn, "row_of", lambda *_: pytest.fail("a finished run was run again"))
    drawn.run_left(FIRST, tmp_path / "work", tmp_path, Never())  # type: ignore[arg-type]


def rows(i: int, losses: dict[str, tuple[float, float]], lost: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [
        {"setting": i, "arm": arm, "seed": seed, "val_loss": own[k], "collapsed": arm in lost, "touched": False}
        for arm, own in losses.items()
        for k, seed in enumerate(FIRST.seeds)
    ]


def test_the_rival_is_the_best_of_the_other_seed() -> None:
    losses = dict.fromkeys(FIRST.arms, (3.0, 3.0))
    losses |= {"qk_norm": (2.0, 2.5), "lalr:tau=0.1": (2.2, 2.1), "autopilot": (2.3, 2.4)}
    # On the first seed the rival is lalr, best on the second, and the other way round.
    assert drawn.gap(FIRST, rows(0, losses)) == pytest.approx(((2.3 - 2.2) + (2.4 - 2.5)) / 2)


def test_a_setting_counts_as_kept_and_gaps_fall_into_bands() -> None:
    even = dict.fromkeys(FIRST.arms, (2.0, 2.0))
    settings = [{"times": 0.5 + i / 100} for i in range(8)]
    table = [row for i in range(8) for row in rows(i, even, lost=("none",) if i < 3 else ())]
    found = drawn.judge(FIRST, table, settings)
    assert found["kept"] == (3, 3)
    assert found["untouched"] == (5, 5)
    assert found["loss, 0.3 to 1 times the tuned rate"] == (8, 0.0, 0.0, 0.0)
    assert drawn.judge(FIRST, table[1:], settings)["settings"] == 7, "a setting with a run missing is not judged"


def test_the_page_says_what_the_rows_say() -> None:
    settings = [{**drawn.drawn(FIRST)[i], "times": 0.5 + i / 100} for i in range(8)]
    losses = dict.fromkeys(FIRST.arms, (2.0, 2.0)) | {"autopilot": (2.5, 2.5), "none": (3.0, 4.0)}
    table = [row for i in range(8) for row in rows(i, losses, lost=("none",) if i < 3 else ())]
    text = drawn.page(FIRST, table, settings)
    # Clopper-Pearson: all of n have a lower end of 0.025^(1 / n).
    assert f"are kept from it | 3 of 3 | {0.025 ** (1 / 3):.0%} to 100% | not decided |" in text
    assert "| +0.500 over 8 settings | +0.500 to +0.500 | **no** |" in text
    assert "| 0.3 to 1 | none | -1.500 (-1.500 to -1.500), 8 |" in text
    first = next(line for line in text.splitlines() if line.startswith("| 0:"))
    assert first.endswith("| 2, 0 | 0 | 3.500\\* | 2.000 | 2.000 | 2.000 | 2.000 | 2.500 | +0.500 |")


def test_a_draw_of_a_policy_that_is_gone_is_not_run_with_the_present_one(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="check out 1ab047e3ca7b"):
        drawn.main(["run", "--draw", "1", "--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@each_draw
def test_the_committed_page_is_that_of_the_committed_rows(test: Draw) -> None:
    found = read(test.name)
    if not found:
        assert not test.page.exists()
        return
    assert test.page.read_text(encoding="utf-8") == drawn.page(test, found, read_json(test.settings_file)["settings"])
