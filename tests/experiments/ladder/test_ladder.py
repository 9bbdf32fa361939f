"""The ladder goes on where it stopped, never runs a run twice, and predicts a rung from those below before its runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.ladder import __main__ as written
from experiments.ladder import predict, rows, run
from experiments.ladder.__main__ import PAGE, page
from experiments.ladder.plan import ARMS, FIRST_SEED, QUESTIONS, RUNGS, Question, units
from scipy import stats

from qkeel.errors import DataError
from qkeel.lab.config import DataConfig, ModelConfig
from qkeel.lab.text import bigram_loss, load
from qkeel.nn import Decoder, DecoderConfig
from qkeel.records import read_json


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two rungs of seconds, in place of the plan's."""
    model = ModelConfig(d_model=16, n_layers=1, n_heads=2)
    data = DataConfig(context=8, batch=4, windows="once")
    first = dataclasses.replace(
        *(RUNGS["0.13M"],),
        model=model,
        data=data,
        steps=20,
        seeds=2,
        lrs=(0.01, 0.1),
        roles={"tuned": 0.01, "hot": 0.1},
    )
    table = {"0.13M": first, "1M": dataclasses.replace(first, name="1M", seeds=1, together=1)}
    for place in ("run", "plan", "rows", "predict"):
        monkeypatch.setattr(f"experiments.ladder.{place}.RUNGS", table)
    return table


class After:
    """Asks to stop once it was looked at so often."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    @property
    def asked(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "cpu_seconds"} for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_it_stops_goes_on_to_the_same_rows_and_never_runs_a_run_twice(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out in (whole, parts):
        out.mkdir()
    run.climb(["0.13M"], tmp_path / "a", whole, After(math.inf))
    for looks in (3, 30, 60, math.inf):
        run.climb(["0.13M"], tmp_path / "b", parts, After(looks))
    found = without_times(whole / "0.13M.jsonl")
    assert without_times(parts / "0.13M.jsonl") == found
    assert len(found) == len(ARMS) * 2 * 2 == len({rows.point(row) for row in found})
    monkeypatch.setattr(run, "train", lambda *_, **__: pytest.fail("a finished run was run again"))
    run.climb(["0.13M"], tmp_path / "a", whole, After(math.inf))
    frozen = [row for row in found if row["arm"] == "frozen_qk"]
    assert all(abs(row["logits"][-1] / row["logits"][0] - 1) < 1 for row in frozen)


@pytest.mark.slow
def test_a_rung_is_predicted_once_and_only_from_whole_rungs_below(small: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.13M is not finished"):
        run.climb(["1M"], tmp_path / "a", tmp_path, After(math.inf))
    run.climb(["0.13M"], tmp_path / "a", tmp_path, After(math.inf))
    run.predict_before("1M", tmp_path, begun=False)
    text = (tmp_path / "predicted-1M.json").read_text()
    rows.append("0.13M", [{**rows.read("0.13M", tmp_path)[0], "val_loss": 9.0, "seed": 7}], tmp_path)
    run.predict_before("1M", tmp_path, begun=False)
    assert (tmp_path / "predicted-1M.json").read_text() == text
    (tmp_path / "predicted-1M.json").unlink()
    with pytest.raises(DataError, match="would be no prediction now"):
        run.predict_before("1M", tmp_path, begun=True)


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_row(tmp_path: Path) -> None:
    rows.append("1M", [{"a": 1}], tmp_path)
    with (tmp_path / "1M.jsonl").open("a") as file:
        file.write('{"a": 2, "b')
    assert rows.read("1M", tmp_path) == [{"a": 1}]
    rows.append("1M", [{"a": 3}], tmp_path)
    assert rows.read("1M", tmp_path) == [{"a": 1}, {"a": 3}]


def question(**changes: Any) -> Question:
    return dataclasses.replace(QUESTIONS[0], **changes)


def test_with_one_rung_below_the_prediction_is_its_mean_and_the_interval_has_all_three_errors() -> None:
    own = [0.01, 0.03, 0.02, 0.04]
    one = question(slope=0.01, scatter=0.02)
    found = predict.next_rung(one, {"0.13M": own}, "1M")
    at, sd = predict.place("1M"), float(np.std(own, ddof=1))
    variance = 2 * 0.02**2 + sd**2 / 4 + (0.01 * at) ** 2 + sd**2 / RUNGS["1M"].seeds
    assert found.value == pytest.approx(0.025, abs=1e-6)
    assert (found.high - found.low) / 2 == pytest.approx(1.6448536 * math.sqrt(variance), rel=1e-4)


def test_on_many_equal_rungs_the_line_is_the_weighted_least_squares_line_when_the_prior_is_wide() -> None:
    known = {"0.13M": [1.0, 1.1], "1M": [1.5, 1.4], "10M": [2.2, 2.1]}
    found = predict.line(question(slope=100.0, scatter=0.05), known)
    x = np.array([predict.place(name) for name in known])
    y = np.array([np.mean(v) for v in known.values()])
    assert found.mean[::-1] == pytest.approx(np.polyfit(x, y, 1), rel=1e-3)


def test_intervals_cover_what_is_drawn_from_the_model_they_are_of() -> None:
    rng, inside, n = np.random.default_rng(0), 0, 4000
    one = question(slope=0.05, scatter=0.1)
    for _ in range(n):
        a, b = rng.normal(0, 1), rng.normal(0, one.slope)
        means = {r: a + b * predict.place(r) + rng.normal(0, one.scatter) for r in ("0.13M", "1M", "10M")}
        known = {r: means[r] + rng.normal(0, 0.03, RUNGS[r].seeds) for r in ("0.13M", "1M")}
        target = means["10M"] + rng.normal(0, 0.03 / math.sqrt(RUNGS["10M"].seeds))
        expected = predict.next_rung(one, known, "10M")
        inside += expected.low <= target <= expected.high
    assert 0.88 < inside / n < 0.92


def test_a_value_is_of_one_rate_by_seed_and_a_diverged_run_is_left_out() -> None:
    at = {"rung": "1M", "lr": RUNGS["1M"].roles["tuned"], "max_abs_logit": math.e}
    table = [
        {**at, "arm": "qk_norm", "seed": 1, "val_loss": 2.5},
        {**at, "arm": "none", "seed": 1, "val_loss": 2.25},
        {**at, "arm": "qk_norm", "seed": 2, "val_loss": None},
        {**at, "arm": "none", "seed": 2, "val_loss": 2.0},
        {**at, "arm": "qk_norm", "seed": 1, "val_loss": 9.0, "lr": 0.02},
    ]
    assert rows.values(question(left="qk_norm", right="none", role="tuned"), "1M", table) == {1: 0.25}
    logits = question(left="none", right=None, role="tuned", logits=True)
    assert rows.values(logits, "1M", table) == {1: 1.0, 2: 1.0}
    assert rows.values(question(role="above"), "124M", table) == {}


@pytest.mark.parametrize("name", list(RUNGS))
def test_the_plan_has_each_run_once_and_every_question_has_its_runs(name: str) -> None:
    rung = RUNGS[name]
    points = [point for unit in units(rung) for point in unit]
    assert len(set(points)) == len(points)
    assert all(point.seed >= FIRST_SEED for point in points)
    assert set(rung.roles.values()) <= set(rung.lrs)
    assert all(point.config.steps * point.config.data.batch for point in points)
    if not rung.points:
        assert len(points) == len(ARMS) * len(rung.lrs) * rung.seeds
        asked = {(arm, rung.roles[q.role]) for q in QUESTIONS for arm in (q.left, q.right) if arm}
        assert asked <= {(point.arm, point.lr) for point in points}


@pytest.mark.parametrize(("name", "low", "high"), [("0.13M", 1.2e5, 1.4e5), ("1M", 1e6, 1.1e6), ("10M", 9.9e6, 1.1e7)])
def test_sizes_are_what_they_are_called(name: str, low: float, high: float) -> None:
    m = RUNGS[name].model
    sizes = DecoderConfig(vocab_size=256, d_model=m.d_model, n_layers=m.n_layers, n_heads=m.n_heads, tied=m.tied)
    exact = sum(p.numel() for p in Decoder(sizes).parameters())
    assert low < RUNGS[name].parameters < high
    assert abs(exact / RUNGS[name].parameters - 1) < 0.01


def test_the_largest_rung_is_gpt_2_small() -> None:
    assert RUNGS["124M"].parameters == 12 * 12 * 768**2 + 50257 * 768  # 123.5 million


def test_bigrams_are_counted_as_worked_by_hand() -> None:
    # Read: 0 1 0 1 1. After 0 two tokens of one kind, after 1 two of two kinds; the second tokens are 1 0 1 1.
    single = np.array([2, 4, 1]) / 7
    zero_one, one_zero = (2 + 1 * single[1]) / 3, (1 + 2 * single[0]) / 4
    held = np.array([[0, 1, 0], [2, 2, 2]])
    expected = -(math.log(zero_one) + math.log(one_zero) + 2 * math.log(single[2])) / 4
    assert bigram_loss(np.array([[0, 1, 0, 1, 1]]), held, 3) == pytest.approx(expected, rel=1e-12)


def test_of_every_token_the_counted_probabilities_add_up_to_one() -> None:
    rng = np.random.default_rng(1)
    read = rng.integers(0, 6, (7, 20))
    for a in range(8):
        total = sum(math.exp(-bigram_loss(read, np.array([[a, b]]), 8)) for b in range(8))
        assert total == pytest.approx(1.0, rel=1e-12)


def test_the_committed_predictions_of_the_frozen_laws_are_those_of_the_code() -> None:
    committed = read_json(rows.RESULTS / "frozen-laws.json")
    found = predict.frozen_laws()
    assert committed.keys() == found.keys() == RUNGS.keys()
    for name, own in found.items():
        assert committed[name].keys() == own.keys()
        for asked, said in own.items():
            assert [committed[name][asked][end] for end in ("low", "value", "high")] == pytest.approx(
                [said[end] for end in ("low", "value", "high")], rel=1e-9
            )


def test_the_page_says_what_the_committed_rows_and_predictions_say() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m experiments.ladder"


def test_no_row_is_there_twice_and_each_is_of_the_plan() -> None:
    for name, rung in RUNGS.items():
        found = [rows.point(row) for row in rows.read(name)]
        planned = {point for unit in units(rung) for point in unit}
        assert len(found) == len(set(found))
        assert set(found) <= planned


def test_an_exponent_between_rungs_is_that_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = RUNGS["1M"].model.d_model / RUNGS["0.13M"].model.d_model
    found = {
        name: [
            row(name, RUNGS[name].roles["tuned"], seed, 10.0 * factor * ratio ** (0.7 * i)) for seed, factor in SPREAD
        ]
        for i, name in enumerate(("0.13M", "1M"))
    }
    monkeypatch.setattr(written, "read", lambda name: found.get(name, []))
    # Two seeds a side whose logarithms differ by ln 2: variances of ln² 2 / 4 of both means, so Welch's t has 1 + 1
    # degrees of freedom.
    half = stats.t.ppf(0.95, 2) * math.sqrt(2 * math.log(2) ** 2 / 4) / math.log(ratio)
    assert written.exponent("0.13M", "1M") == f"0.70 ({0.7 - half:.2f} to {0.7 + half:.2f})".replace("-", "−")
    # With one seed its variance is ln² 2 / 2, from the other rung; (1/4 + 1/2)² / (1/16 + 1/4) = 1.8 degrees, rounded
    # down.
    found["1M"] = found["1M"][:1]
    rise = 0.7 - math.log(2) / 2 / math.log(ratio)
    half = stats.t.ppf(0.95, 1) * math.sqrt(0.75 * math.log(2) ** 2) / math.log(ratio)
    assert written.exponent("0.13M", "1M") == f"{rise:.2f} ({rise - half:.2f} to {rise + half:.2f})".replace("-", "−")


def test_an_interval_is_scipys_and_that_of_one_seed_has_the_spread_of_the_other_rungs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng()
    logits = {name: random.lognormal(5, 1, n) for name, n in (("0.13M", 8), ("1M", 4), ("10M", 2), ("124M", 1))}
    found = {
        name: [row(name, RUNGS[name].roles["tuned"], 5000 + i, z) for i, z in enumerate(own)]
        for name, own in logits.items()
    }
    monkeypatch.setattr(written, "read", found.__getitem__)
    question = next(q for q in QUESTIONS if q.logits and q.role == "tuned")
    spreads = [np.log(own).var(ddof=1) * (len(own) - 1) for own in logits.values() if len(own) > 1]
    pooled = math.sqrt(sum(spreads) / 11)
    for name, own in logits.items():
        x = np.log(own)
        freedom, error = (len(x) - 1, stats.sem(x)) if len(x) > 1 else (11, pooled)
        low, high = stats.t.interval(0.9, freedom, x.mean(), error)
        text, mean = written.measured(question, name)
        assert mean == pytest.approx(x.mean())
        assert text == f"{math.exp(x.mean()):,.3g} ({math.exp(low):,.3g} to {math.exp(high):,.3g})"


def test_the_largest_rate_without_a_collapse_is_given_over_that_of_no_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_, last = RUNGS["1M"].lrs
    found = [{"arm": "none", "lr": first, "collapsed": False}, {"arm": "none", "lr": second, "collapsed": True}]
    found += [{"arm": "qk_norm", "lr": lr, "collapsed": False} for lr in RUNGS["1M"].lrs]
    found += [{"arm": "lalr", "lr": lr, "collapsed": lr > second} for lr in RUNGS["1M"].lrs]
    monkeypatch.setattr(written, "read", lambda _: found)
    assert written.stable_ratios("1M") == f"qk_norm ≥ {last / first:.3g}, lalr {second / first:.3g}"


SPREAD = ((5000, 1.0), (5001, 2.0))


def row(rung: str, lr: float, seed: int, logit: float) -> dict[str, Any]:
    return {"rung": rung, "arm": "none", "lr": lr, "seed": seed, "max_abs_logit": logit, "collapsed": False}


def test_a_process_runs_its_own_seeds_alone_and_a_seed_that_the_plan_lacks_is_refused(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(run, "check_text", lambda name, source: None)
    monkeypatch.setattr(run, "train", lambda config, *_, **__: asked.append(config.seed))
    monkeypatch.setattr(run, "row", lambda of, *_: dataclasses.asdict(of))
    run.climb(["0.13M"], tmp_path / "a", tmp_path, After(math.inf), run.Share(seeds=[FIRST_SEED + 1]))
    assert set(asked) == {FIRST_SEED + 1}
    with pytest.raises(DataError, match=f"has the seeds {FIRST_SEED} to {FIRST_SEED + 1}, got 7"):
        run.climb(["0.13M"], tmp_path / "a", tmp_path, After(math.inf), run.Share(seeds=[FIRST_SEED, 7]))


def test_a_text_that_was_saved_is_the_text_it_was_saved_from_and_another_is_refused(tmp_path: Path) -> None:
    run.save_text(tmp_path / "library")
    data = RUNGS["1M"].data
    saved = run.Share(text=str(tmp_path / "library")).config(next(units(RUNGS["1M"]))[0]).data
    assert load(saved).sha256 == load(data).sha256
    (tmp_path / "other.txt").write_text("no library " * 500)
    with pytest.raises(DataError, match=r"other\.txt is another; let that Python write it"):
        run.check_text("1M", str(tmp_path / "other.txt"))


def test_on_a_gpu_a_run_differs_from_the_plan_in_where_and_in_how_many_parts_alone() -> None:
    of = next(units(RUNGS["10M"]))[0]
    assert run.EVERYTHING.config(of) == of.config
    found = run.Share(device="cuda").config(of)
    assert found.dtype == "fp32"
    assert dataclasses.replace(found, device="cpu", accumulate=4, checkpoint_every=25) == of.config


def test_the_autopilot_is_predicted_from_its_own_runs_before_the_first_of_them(
    small: dict[str, Any], tmp_path: Path
) -> None:
    about = {"max_abs_logit": 5.0, "collapsed": False}
    table = [
        {**dataclasses.asdict(p), **about, "val_loss": 2.0 + 0.01 * p.seed + (0.5 if p.arm == "autopilot" else 0.0)}
        for unit in units(small["0.13M"])
        for p in unit
        if p.arm in ("none", "qk_norm", "autopilot")
    ]
    rows.append("0.13M", table[:-1], tmp_path)
    with pytest.raises(DataError, match=r"0\.13M is not finished"):
        run.predict_autopilot("1M", tmp_path, begun=False)
    rows.append("0.13M", table[-1:], tmp_path)
    run.predict_autopilot("0.13M", tmp_path, begun=False)
    run.predict_autopilot("1M", tmp_path, begun=False)
    (path,) = tmp_path.glob("predicted-*")
    assert path.name == "predicted-1M-autopilot.json"
    found = {name: own for name, own in read_json(path).items() if isinstance(own, list)}
    assert found.keys() == {q.name for q in QUESTIONS if "autopilot" in q.name and q.role != "above"}
    assert all(own[0]["value"] == pytest.approx(0.5, abs=1e-3) for own in found.values())
