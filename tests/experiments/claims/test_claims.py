"""The claims as code: the page is what the committed results say, and verdicts follow from numbers."""

from __future__ import annotations

import csv
import math
import types
from typing import Any

import numpy as np
import pytest
from experiments.claims.__main__ import columns, configured, joined, main, whole_seeds
from experiments.claims.claim import OF_ALL_RATES, Cell, Claim, sensitivity, stable
from experiments.claims.judge import (
    HERE,
    PAGE,
    counted,
    differences,
    judge,
    page,
    short,
)
from experiments.claims.measures import MEASURES
from experiments.claims.site_page import SITE, site_page
from experiments.claims.studies import CORPORA, STUDIES
from experiments.claims.table import CLAIMS, EVERY

from qkeel.errors import RunDirectoryError
from qkeel.lab import Grid, RunConfig
from qkeel.lab.plan import PlannedRun
from qkeel.lab.studies import find_study
from qkeel.records import EXTRAPOLATION_COLUMNS, TABLE_COLUMNS, read_json
from qkeel.records.names_and_units import TASK_FIELDS
from qkeel.remedies import canonical

ROOT = HERE.parents[1]
KNOWN = {*EXTRAPOLATION_COLUMNS, *TABLE_COLUMNS, *TASK_FIELDS, *MEASURES}


# Document and verdict -> sentences there, and the claim that each follows from; figures in braces are those of the
# effect.
SENTENCES: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("docs/what-we-found.md", "reproduced"): [
        (
            "ends {mean:.3f} nats ahead of no remedy",
            "QK-norm trains better at a high learning rate (LR 0.1)",
        ),
        ("QK-norm limits the logits", "QK-norm keeps the logits under 100 at LR 0.1"),
        (
            "QK-norm allows a learning rate at least 3 times as high",
            'QK-norm allows 3 times the rate or more ("up to 3× in some cases")',
        ),
        (
            "Mixing text and images makes logits grow at a high learning rate",
            "Mixing text and images makes logits grow (against text alone, LR 0.1)",
        ),
    ],
    ("docs/what-we-found.md", "undecided"): [
        (
            "At 0.01 it costs {mean:.3f} nats at this size, which is undecided",
            "QK-norm costs nothing at a healthy rate (LR 0.01)",
        ),
    ],
    ("docs/guides/choose-a-remedy.md", "undecided"): [
        ("and QK-norm {mean:.3f}", "QK-norm costs nothing at a healthy rate (LR 0.01)"),
    ],
    ("docs/what-we-found.md", "contradicted"): [
        (
            "as a power of the summed learning rate, not exponentially",
            "Logits grow exponentially in steps, rather than as a power of Σlr (R², LR 0.1)",
        ),
        (
            "Within 150 steps the loss does not diverge",
            "… and the loss diverges, back to its value at initialisation or worse (LR 0.1, within 150 steps)",
        ),
        (
            "A softcap does not limit the logits that enter it",
            "Softcapping keeps the logits that enter the cap under 100 (LR 0.1)",
        ),
    ],
    ("docs/remedies.md", "contradicted"): [
        (
            "did not help Kimi; here it is among the best",
            "Lowering only the rate of q and k does not help (LR 0.1)",
        ),
    ],
    ("experiments/notes/theory.md", "contradicted"): [
        (
            "So shift invariance is not the cause",
            "Softmax's shift invariance makes logits grow: without it (sigmoid) they stay under 100 (LR 0.1)",
        ),
    ],
    ("experiments/notes/multimodal.md", "contradicted"): [
        (
            "Text gives images less than an even share of its attention, not more.",
            "Images dominate attention: text gives them more than an even share (LR 0.01)",
        ),
        (
            "Longer queries or keys of images, against a model of text alone under the same probe, are not shown",
            "Mixing makes image queries longer than text queries (against a model of text alone, LR 0.01)",
        ),
        (
            "dropout does not lower the loss",
            "Dropout with QK-norm trains better than QK-norm alone (LR 0.1)",
        ),
        (
            "norms after the branches gain {mean:.2f} nats",
            "Norms after the branches do not change the loss where the plain order trains (both with QK-norm, LR 0.1)",
        ),
        (
            "Behind norms before attention they lower it, to {times:.2f} times.",
            "… behind norms before attention too (LR 0.01)",
        ),
    ],
    ("experiments/notes/multimodal.md", "reproduced"): [
        (
            "The recipe of 34B is better than that of 7B.",
            "The recipe of Chameleon 34B (norms after the branches and z-loss) trains better than that of 7B (LR 0.1)",
        ),
    ],
    ("experiments/notes/multimodal.md", "undecided"): [
        (
            "that a z-loss gains 0.01 or more is not decided",
            "A z-loss with QK-norm trains better than QK-norm alone (LR 0.1)",
        ),
    ],
    ("experiments/notes/precision.md", "undecided"): [
        (
            "With {n} seeds on the default path ([claims](claims.md)) {mean:.0f} of 150 steps are skipped in the "
            "mean, but by seed they range too widely to decide",
            "Without a remedy fp16 overflows: steps are skipped (LR 0.3)",
        ),
        (
            "that QK-norm spares them is not shown",
            "With QK-norm, fp16 training skips fewer steps (LR 0.3)",
        ),
        (
            "nor with {n} seeds against float32",
            "Logits beyond the range of bf16 break training: bf16 loses against float32 without a remedy (LR 0.1)",
        ),
    ],
    ("experiments/notes/translation.md", "reproduced"): [
        (
            "with {n} seeds, judged by intervals ([claims](claims.md)), the first paper's form gains {mean:.2f} nats",
            "… and at a high rate (LR 0.1)",
        ),
    ],
    ("experiments/notes/translation.md", "undecided"): [
        (
            "at LR 0.01 it is not decided whether either norm gains",
            "RMS QK-norm translates better (by loss, 1,000 pairs, LR 0.01)",
        ),
    ],
    ("experiments/notes/vision.md", "contradicted"): [
        (
            "it does not rise again, as that of the published 8B model did",
            "Without a norm the loss of a vision transformer falls, then rises (LR 0.1, last two thirds of training)",
        ),
    ],
    ("experiments/notes/vision.md", "reproduced"): [
        (
            "With {n} seeds on the default path ([claims](claims.md)) LayerNorm on q and k gains {points:.0f} "
            "points at LR",
            "LayerNorm on q and k trains a vision transformer better at a high rate (accuracy, LR 0.1)",
        ),
    ],
    ("docs/guides/choose-a-remedy.md", "contradicted"): [
        (
            "at a low rate, LALR ended {mean:.3f} nats worse than no remedy at all",
            "LALR is free at a low rate (LR 0.01)",
        ),
    ],
    ("experiments/notes/extrapolation.md", "reproduced"): [
        (
            "ReRoPE (window 16) keeps at least 95 %",
            "ReRoPE extends a plain model to 8 times the training length without training (95 % kept)",
        ),
        (
            "KNA and CosA keep more of their accuracy than the plain model",
            "KeyNorm keeps more of its accuracy at 8 times the training length",
        ),
        ("as it is beats Baseline under PI and under ABF", "… and of one under ABF"),
    ],
    ("experiments/notes/extrapolation.md", "contradicted"): [
        (
            "Long texts do not bring plain models a share of unseen angles that is larger than under KNA by a point.",
            "Plain models fail because long texts bring more unseen angles than under KeyNorm (share of pairs)",
        ),
    ],
}


def results() -> dict[str, Any]:
    file = HERE / "results.json"
    return read_json(file) if file.exists() else {}


def test_the_page_says_what_the_committed_results_say() -> None:
    assert page(results()) == PAGE.read_text(encoding="utf-8"), (
        "run python -m experiments.claims"
    )
    assert site_page(results()) == SITE.read_text(encoding="utf-8"), (
        "run python -m experiments.claims"
    )


def test_a_short_source_is_names_and_year() -> None:
    assert (
        short("Henry et al., Query-Key Normalization for Transformers, 2020")
        == "Henry et al. 2020"
    )
    assert (
        short("an introduction to QK-norm, 2025") == "an introduction to QK-norm 2025"
    )
    assert (
        short("our own question; the norm: Henry et al., Query-Key Normalization, 2020")
        == "our own question; Henry et al. 2020"
    )


def test_sentences_of_other_documents_follow_from_verdicts() -> None:
    """Who changes a verdict finds here what else says so."""
    judged = judge(results())
    assert counted(judged[: len(CLAIMS)]) in text_of("docs/what-we-found.md")
    for file, verdict, sentence, claim in (
        (*of, *pair) for of, pairs in SENTENCES.items() for pair in pairs
    ):
        (found,) = [one for one in judged if one.claim.text == claim]
        assert found.verdict.strip("*") == verdict, f"{file} says: {sentence}"
        size = abs(found.mean)
        figures = {
            "mean": size,
            "points": 100 * size,
            "times": math.exp(found.mean),
            "n": len(found.differences),
        }
        sentence = sentence.format(**figures)
        assert sentence in text_of(file), f"{file} no longer says: {sentence}"


def test_the_range_of_the_cost_of_qk_norm_in_the_readme_is_that_of_the_tables_of_gains() -> (
    None
):
    gains: dict[tuple[str, str], list[float]] = {}
    for name in ("gain-fit.csv", "gain-test.csv"):
        with (ROOT / "experiments" / "results" / name).open(newline="") as text:
            table = [row for row in csv.DictReader(text) if row["lr"] == "0.01"]
        losses = {
            (r["width"], r["depth"], r["seed"], r["remedy"]): float(r["val_loss"])
            for r in table
        }
        for width, depth, seed, remedy in losses:
            if remedy == "qk_norm":
                pair = [
                    losses[width, depth, seed, other] for other in ("none", "qk_norm")
                ]
                gains.setdefault((width, depth), []).append(pair[0] - pair[1])
    means = [float(np.mean(own)) for own in gains.values()]
    said = f"it ranges from a cost of {-min(means):.3f} to a gain of {max(means):.3f}"
    assert f"over thirteen sizes, {said}" in text_of("docs/what-we-found.md")
    assert len(means) == 13


def text_of(file: str) -> str:
    return " ".join((ROOT / file).read_text(encoding="utf-8").split())


def runs_of(name: str) -> list[PlannedRun]:
    """The plan of a study for one seed, as far as no text is read for it."""
    about = STUDIES[name]
    study = find_study(about.study)
    base = configured(study.base or RunConfig(), about.settings)
    axes = {
        axis: getattr(study.grid, axis)
        for axis in ("remedies", "lrs", "blocks", "optimizers", "mixes")
    }
    return list(study.plan(base, Grid(**{**axes, **about.grid, "seeds": [0]})).runs)


def test_every_claim_reads_runs_that_its_study_makes() -> None:
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


def about(run: PlannedRun) -> dict[str, object]:
    config, model = run.config, run.config.model
    named = {
        "remedy": config.remedy,
        "form": run.name,
        "lr": config.optim.lr,
        "part": run.part,
        "mix": run.role,
    }
    return {**named, "block": model.block, "optimizer": config.optim.name}


def rows(**by_remedy: tuple[float, ...]) -> list[dict[str, object]]:
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


def claim(**more: object) -> Claim:
    sides = {
        name: Cell({"remedy": remedy, "lr": 0.1}, "val_loss")
        for name, remedy in (("left", "a"), ("right", "b"))
    }
    return Claim(**{"text": "t", "source": "s", "study": "micro", **sides, **more})  # type: ignore[arg-type]


def found(table: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {"micro": {"rows": table}}


def verdict(made: Claim, **by_remedy: tuple[float, ...]) -> str:
    (judged,) = judge(found(rows(**by_remedy)), [made])
    return judged.verdict.strip("*")


def seeds(*values: float) -> tuple[float, ...]:
    """Eight seeds around each of these, a thousandth apart."""
    return tuple(value + k / 1000 for value in values for k in range(8))


def test_verdicts_follow_from_interval_and_margin_in_the_direction_of_the_claim() -> (
    None
):
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


def test_an_effect_that_crosses_the_margin_against_the_claim_contradicts_a_direction_and_leaves_equality_open() -> (
    None
):
    left, right = tuple(2.5 - 0.004 * k for k in range(8)), (2.5,) * 8
    assert verdict(claim(), a=left, b=right) == "contradicted"
    assert verdict(claim(equal=True), a=left, b=right) == "undecided"


def test_differences_are_of_left_and_right_or_of_their_logarithms() -> None:
    top = Cell({"remedy": "a", "lr": 0.1}, "max_logit")
    assert differences(
        claim(left=top, right=100.0, ratio=True), found(rows(a=(1.0, math.e)))
    ) == pytest.approx([0.0, 1.0])


def test_numbers_of_all_rates_are_of_the_seeds_with_every_rate() -> None:
    table = [
        {
            **row,
            "lr": lr,
            "val_loss": 2.0 + lr,
            "collapsed": lr > 0.1 and row["remedy"] == "a",
        }
        for lr in (0.1, 0.3)
        for row in rows(a=(0.0, 0.0), b=(0.0, 0.0))
    ]
    made = claim(left=sensitivity("a"), right=0.0)
    assert differences(made, found(table)) == pytest.approx([0.1, 0.1])
    assert differences(made, found(table[:-3])) == pytest.approx([0.1])
    rate = claim(left=stable("a", 3.0), right=stable("b"), ratio=True)
    assert differences(rate, found(table)) == pytest.approx([0.0, 0.0])


class Recorded:
    """A run whose largest logit is the square of the summed rate, from norms alone."""

    def config(self) -> dict[str, object]:
        return configured(
            RunConfig(),
            {"steps": 40, "optim.schedule": "constant", "optim.warmup": 0.0},
        ).to_dict()

    def metrics(self) -> list[dict[str, float | None]]:
        return [
            {
                "step": s,
                "max_logit": (0.01 * s) ** 2,
                "logit_change": s or None,
                "val_loss": 3.0 - s / 20,
            }
            for s in range(0, 41, 10)
        ]

    def heads(self) -> types.SimpleNamespace:
        logit = np.array([[[1.0, 2.0]], [[50.0, 3.0]]])
        values = {
            "max_logit": logit,
            "query_norm": np.array([[[1.0, 9.0]], [[5.0, 9.0]]]),
        }
        return types.SimpleNamespace(
            values={**values, "key_norm": values["query_norm"]}
        )

    def summary(self) -> dict[str, float]:
        return {
            "query_norm/image": 3.0,
            "query_norm/text": 2.0,
            "key_norm/image": 1.0,
            "key_norm/text": 2.0,
        }


def test_kept_rows_are_those_before_a_seed_that_gave_the_same_again() -> None:
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


def test_measures_of_a_run_whose_course_is_known() -> None:
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


def test_another_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CORPORA, "stdlib", "0" * 64)
    assert main(["--only", "micro", "--results", "r.json", "--page", "p.md"]) == 1
    assert "use CPython 3.11.7" in capsys.readouterr().err
