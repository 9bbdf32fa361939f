"""The claims as code: the page is what the committed results say, and verdicts follow from numbers."""

import math
import types

import numpy as np
import pytest
from experiments.claims.__main__ import columns, configured, joined, main, whole_seeds
from experiments.claims.claim import OF_ALL_RATES, Cell, Claim
from experiments.claims.judge import HERE, PAGE, judge, page
from experiments.claims.measures import MEASURES
from experiments.claims.site_page import SITE, site_page
from experiments.claims.studies import CORPORA, STUDIES
from experiments.claims.table import CLAIMS, EVERY

from qkeel.errors import RunDirectoryError
from qkeel.lab import Grid, RunConfig
from qkeel.lab.studies import find_study
from qkeel.records import EXTRAPOLATION_COLUMNS, TABLE_COLUMNS, read_json
from qkeel.records.recorded_fields import TASK_FIELDS
from qkeel.remedies import canonical

ROOT = HERE.parents[1]
KNOWN = {*EXTRAPOLATION_COLUMNS, *TABLE_COLUMNS, *TASK_FIELDS, *MEASURES}


def results():
    file = HERE / "results.json"
    return read_json(file) if file.exists() else {}


def test_the_page_says_what_the_committed_results_say():
    assert page(results()) == PAGE.read_text(encoding="utf-8"), (
        "run python -m experiments.claims"
    )
    assert site_page(results()) == SITE.read_text(encoding="utf-8"), (
        "run python -m experiments.claims"
    )


def runs_of(name):
    """The plan of a study for one seed, as far as no text is read for it."""
    about = STUDIES[name]
    study = find_study(about.study)
    base = configured(study.base or RunConfig(), about.settings)
    axes = {
        axis: getattr(study.grid, axis)
        for axis in ("remedies", "lrs", "blocks", "optimizers", "mixes")
    }
    return list(study.plan(base, Grid(**{**axes, **about.grid, "seeds": [0]})).runs)


def test_every_claim_reads_runs_that_its_study_makes():
    assert {claim.study for claim in CLAIMS} == set(STUDIES)
    runs = {name: runs_of(name) for name in STUDIES}
    for claim in EVERY:
        for cell in (
            side for side in (claim.left, claim.right) if isinstance(side, Cell)
        ):
            study, where = cell.study or claim.study, dict(cell.where)
            remedy = str(where.get("remedy", "none"))
            assert canonical(remedy) == remedy, (
                "tables have remedies in their one spelling"
            )
            assert where.pop("posthoc", "none") in (
                "none",
                *(text.rpartition("/")[2] for text in STUDIES[study].posthoc),
            )
            assert any(where.items() <= about(run).items() for run in runs[study]), (
                claim.text
            )
            assert cell.column in (*columns(study), *OF_ALL_RATES), claim.text
    for name in STUDIES:
        strange = (
            {column.partition("/")[0] for column in columns(name)}
            - KNOWN
            - {"attention_mass", "uniform_mass"}
        )
        assert not strange, f"no table has {strange}"


def about(run):
    config, model = run.config, run.config.model
    named = {
        "remedy": config.remedy,
        "form": run.name,
        "lr": config.optim.lr,
        "part": run.part,
        "mix": run.role,
    }
    return {**named, "block": model.block, "optimizer": config.optim.name}


def rows(**by_remedy):
    return [
        {
            "remedy": remedy,
            "lr": 0.1,
            "seed": seed,
            "val_loss": value,
            "max_logit": 100 * value,
            "init_loss": 5.0,
        }
        for remedy, values in by_remedy.items()
        for seed, value in enumerate(values)
    ]


def claim(**more):
    sides = {
        name: Cell({"remedy": remedy, "lr": 0.1}, "val_loss")
        for name, remedy in (("left", "a"), ("right", "b"))
    }
    return Claim(**{"text": "t", "source": "s", "study": "micro", **sides, **more})  # type: ignore[arg-type]


def found(table):
    return {"micro": {"rows": table}}


def verdict(made, **by_remedy):
    (judged,) = judge(found(rows(**by_remedy)), [made])
    return judged.verdict.strip("*")


def seeds(*values):
    """Eight seeds around each of these, a thousandth apart."""
    return tuple(value + k / 1000 for value in values for k in range(8))


def test_verdicts_follow_from_interval_and_margin_in_the_direction_of_the_claim():
    high, low, near = seeds(2.5), seeds(2.3), seeds(2.501)
    assert verdict(claim(), a=high, b=low) == "reproduced"
    assert verdict(claim(), a=low, b=high) == "contradicted"
    assert verdict(claim(), a=near, b=high) == "contradicted", (
        "an effect inside the margin is none, however sure"
    )
    assert verdict(claim(equal=True), a=near, b=high) == "reproduced"
    assert verdict(claim(equal=True), a=high, b=low) == "contradicted"
    assert verdict(claim(equal=True), a=low, b=high) == "contradicted"
    wild = tuple(2.5 + x for x in (0.3, -0.2, 0.1, -0.4, 0.2, -0.1, 0.4, -0.3))
    assert (
        verdict(claim(), a=wild, b=high)
        == verdict(claim(equal=True), a=wild, b=high)
        == "undecided"
    )
    assert verdict(claim(), a=high[:6], b=low[:6]) == "undecided", (
        "six signs reach no level that the page has"
    )
    assert verdict(claim(), a=(2.5,), b=(2.3,)) == "not run yet", (
        "one seed decides nothing"
    )
    assert verdict(claim(), a=(2.5, math.nan), b=(2.3, 2.3)) == "not run yet", (
        "a loss of NaN is no number"
    )


class Recorded:
    """A run whose largest logit is the square of the summed rate, from norms alone."""

    def config(self):
        return configured(
            RunConfig(),
            {"steps": 40, "optim.schedule": "constant", "optim.warmup": 0.0},
        ).to_dict()

    def metrics(self):
        return [
            {
                "step": s,
                "max_logit": (0.01 * s) ** 2,
                "logit_change": s or None,
                "val_loss": 3.0 - s / 20,
            }
            for s in range(0, 41, 10)
        ]

    def heads(self):
        logit = np.array([[[1.0, 2.0]], [[50.0, 3.0]]])
        values = {
            "max_logit": logit,
            "query_norm": np.array([[[1.0, 9.0]], [[5.0, 9.0]]]),
        }
        return types.SimpleNamespace(
            values={**values, "key_norm": values["query_norm"]}
        )

    def summary(self):
        return {
            "query_norm/image": 3.0,
            "query_norm/text": 2.0,
            "key_norm/image": 1.0,
            "key_norm/text": 2.0,
        }


def test_kept_rows_are_those_before_a_seed_that_gave_the_same_again():
    before = {
        "identity": {"torch": "2"},
        "cpu_seconds": 30,
        "rows": rows(a=(1.0, 2.0, 3.0)),
    }
    assert whole_seeds(before["rows"]) == 3
    assert whole_seeds([*before["rows"], *rows(b=(1.0,))]) == 1
    assert whole_seeds(()) == 0
    again = rows(a=(1.0, 2.0, 3.0, 4.0))[2:]
    made = joined("micro", before, {**before, "cpu_seconds": 20, "rows": again}, 2)
    assert made == {
        **before,
        "cpu_seconds": 40,
        "kept_seeds": 2,
        "rows": rows(a=(1.0, 2.0, 3.0, 4.0)),
    }
    for other in (
        {"rows": rows(a=(1.0, 2.0, 3.1))[2:]},
        {"rows": again, "identity": {"torch": "3"}},
    ):
        with pytest.raises(
            RunDirectoryError, match="seed 2 of micro, run again, is not as it was"
        ):
            joined("micro", before, {**before, **other}, 2)


def test_measures_of_a_run_whose_course_is_known():
    got = {name: measure(Recorded()) for name, measure in MEASURES.items()}  # type: ignore[arg-type]
    assert got.pop("power_law") == pytest.approx(1.0)
    assert got.pop("exponential") == pytest.approx(got.pop("exponential_in_rates"))
    assert got == pytest.approx(
        {
            "logit_change": 40,
            "norm_factor": 25.0,
            "angle_factor": 2.0,
            "loss_rise": -1.0,
            "query_ratio": 1.5,
            "key_ratio": 0.5,
        }
    )


def test_another_text_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(CORPORA, "stdlib", "0" * 64)
    assert main(["--only", "micro", "--results", "r.json", "--page", "p.md"]) == 1
    assert "use CPython 3.11.7" in capsys.readouterr().err
