"""Length extrapolation on the page: numbers, order beside the published one, curves."""

from __future__ import annotations

from pathlib import Path

from synthetic_study import Made, make_run

from qkeel.records import append_line, read_json, write_json
from qkeel.report import write
from qkeel.report.study import other_findings
from qkeel.report.study.collect import StudyData, collect
from qkeel.report.study.page import chart_data

# kept per seed; published: kna 0.96, baseline 0.47, baseline + rerope 0.97
KEPT = {("kna", "none"): (0.98, 0.94), ("baseline", "none"): (0.80, 0.70), ("baseline", "rerope"): (0.95, 0.93)}


def study(path: Path) -> Path:
    entries = []
    for form in ("baseline", "kna"):
        for seed in (0, 1):
            made = Made(remedy=form, lr=0.01, seed=seed, max_logit=20.0, entropy=1.0)
            run = make_run(path / "runs" / made.run_id, made)
            config = read_json(run / "config.json")
            config["data"]["context"] = 64
            write_json(run / "config.json", config)
            entries.append({"run_id": made.run_id, "remedy": form, "lr": 0.01, "seed": seed, "role": "gau"})
            for (name, method), kept in KEPT.items():
                if name == form:
                    shares = dict.fromkeys(("accuracy_train", "accuracy_repeat"), 0.5)
                    long = dict.fromkeys(("accuracy_nonrepeat", "accuracy_last"), 0.5 * kept[seed])
                    if method == "none":
                        long |= {"accuracy_last_short": 0.47, "cos_outside": 0.001, "dilution": 0.9}
                    line = {"posthoc": method, "test_length": 512, **shares, **long, "kept_nonrepeat": kept[seed]}
                    append_line(run / "extrapolation.jsonl", {**line, "segments": [0.5, kept[seed] / 2]})
            refused = {"posthoc": "log_n", "test_length": 512, "refused": "no"}
            append_line(run / "extrapolation.jsonl", refused)
    about = {"study": "extrapolation", "command": "qkeel study extrapolation", "remedies": ["baseline", "kna"]}
    write_json(path / "study.json", {**about, "runs": entries, "base": {}})
    return path


def part(tmp_path: Path) -> StudyData:
    return collect(study(tmp_path / "s")).parts()["gau"]


def test_kept_shares_are_means_over_seeds_and_what_was_refused_is_left_out(tmp_path: Path) -> None:
    rows = {(row.form, row.method): row for row in other_findings.measured(part(tmp_path))}
    assert set(rows) == set(KEPT)
    assert rows["kna", "none"].kept == (0.98 + 0.94) / 2
    assert rows["baseline", "none"].values["kept_nonrepeat"].low == 0.70


def test_pairs_in_the_published_order_are_counted(tmp_path: Path) -> None:
    # Here kna > baseline + rerope; published the other way round. The two pairs with plain baseline agree.
    assert other_findings.agreement(other_findings.measured(part(tmp_path))) == (2, 3)


def test_the_lead_says_what_is_kept_from_most_to_least(tmp_path: Path) -> None:
    lead = next(f.text for f in other_findings.length_findings(part(tmp_path)) if f.kind == "lead")
    assert "Trained on 64 tokens and tested on 512" in lead
    assert "kna 0.96 and baseline 0.75; 2 seeds." in lead


def test_curves_are_means_by_position(tmp_path: Path) -> None:
    data = chart_data(part(tmp_path))
    assert data["context"] == 64
    assert [(c["remedy"], c["method"], c["share"]) for c in data["long"]] == [
        (0, "none", [0.5, 0.375]),
        (0, "rerope", [0.5, 0.47]),
        (1, "none", [0.5, 0.48]),
    ]


def test_the_page_sets_the_published_numbers_beside_the_measured_ones(tmp_path: Path) -> None:
    text = write(study(tmp_path / "s"), tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Length extrapolation" in text
    assert 'data-chart="lengths"' in text
    assert 'data-chart="loss"' not in text
    table = text[text.index("Published: kept") :]
    assert ">0.96<" in table
    assert ">0.47<" in table
    assert "2 of 3 pairs" in text


def test_what_reading_on_is_worth_is_told_and_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    made = part(tmp_path)
    found = [f.text for f in other_findings.length_findings(made)]
    assert "Gain of the last 64 tokens from the text before them, in points: kna +1.0 and baseline -9.5." in found
    text = str(other_findings.comparison(made))
    assert "Angles outside" in text
    assert ">0.100<" in text
    assert ">0.90<" in text
    assert "Needle" not in text
    assert text.count(">–<") == 3


def test_needles_have_a_table_by_length_and_a_sentence(tmp_path: Path) -> None:
    path = study(tmp_path / "s")
    for run in sorted((path / "runs").iterdir()):
        for length, share in ((64, 0.9), (1024, 0.25)):
            line = {"posthoc": "none", "test_length": length, "accuracy_train": 0.5, "kept_nonrepeat": 0.8}
            found = {"needle": share, "needle_weight": share / 2, "needle_bound": 0.061}
            append_line(run / "extrapolation.jsonl", {**line, **found})
    made = collect(path).parts()["gau"]
    text = str(other_findings.comparison(made))
    table = text[text.index("Needles found") :]
    for shown in ("At 64", "At 1,024", ">90.0<", ">25.0<", ">12.5<", ">6.1<"):
        assert shown in table
    said = [f.text for f in other_findings.length_findings(made)]
    assert "Needles found among 64 and among 1024 tokens, in %: baseline 90 and 25 and kna 90 and 25." in said
