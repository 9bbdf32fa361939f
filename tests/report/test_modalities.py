"""The page of the multimodal study judges claims by numbers and seed spread; accuracy stands on that of vision."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from synthetic_study import Made, make_run

from qkeel.metrics import paired_effect
from qkeel.records import RunDirectory, append_line, read_json, read_lines, write_json
from qkeel.report import write
from qkeel.report.study import findings, other_findings
from qkeel.report.study.collect import StudyData, collect
from qkeel.report.study.compare import HELD, INSIDE, REVERSE, UNDECIDED, SeedEffect, less, times
from qkeel.report.study.other_findings import by_modality
from qkeel.report.study.page import study_page

WIDE = "qk_norm:kind=layer+swin_norm"
FIELDS = ("query_norm", "key_norm", "last_block_norm", "val_loss")


def add(run: Path, images: Mapping[str, object], **last: float) -> None:
    """Numbers by modality into a made-up run: the same in every record, but where `last` names others."""
    config = read_json(run / "config.json")
    config["images"] = images
    config.setdefault("model", {})["norm_order"] = images.get("norm_order", "pre")
    write_json(run / "config.json", config)
    same = {f"{name}/{side}": 1.0 for name in FIELDS for side in ("text", "image")}
    same |= {"attention_mass/text>image": 0.1, "uniform_mass/text>image": 0.2}
    same |= {"attention_mass/image>text": 0.2, "uniform_mass/image>text": 0.2}
    lines = [{**record, **same} for record in read_lines(run / "metrics.jsonl")]
    lines[-1].update({name.replace("__", "/"): value for name, value in last.items()})
    (run / "metrics.jsonl").unlink()
    for line in lines:
        append_line(run / "metrics.jsonl", line)
    RunDirectory(run).finish(read_json(run / "summary.json"))


def study(path: Path, seeds: int = 3) -> StudyData:
    entries = []
    for mix, share in (("text", 0.0), ("mix", 0.5)):
        for remedy in ("none", "qk_norm"):
            for lr in (0.01, 0.1):
                for seed in range(seeds):
                    tame = remedy == "qk_norm"
                    top = 20.0 if tame else (30.0 if lr == 0.01 else 3000.0 * (seeds - seed if share else 1 + seed))
                    made = Made(remedy=remedy, lr=lr, seed=seed, role=mix, max_logit=top, entropy=1.0)
                    run = make_run(path / "runs" / made.run_id, made)
                    norm = {"query_norm__image": 1.17 + seed / 100 if share else 1.0, "key_norm__image": 1.2}
                    norm["attention_mass__text>image"] = 0.1 + seed / 1000
                    add(run, {"image_share": share}, **norm, val_loss__image=1.0 if tame else 1.5 + seed / 100)
                    entry = {"run_id": made.run_id, "remedy": remedy, "lr": lr, "seed": seed, "role": mix}
                    entries.append(entry)
    about = {"study": "multimodal", "command": "qkeel study multimodal", "remedies": ["none", "qk_norm"]}
    write_json(path / "study.json", {**about, "runs": entries, "base": {}})
    return collect(path)


def claim(data: StudyData, name: str) -> other_findings.Claim:
    return next(c for c in other_findings.claims(data) if c.name.startswith(name))


def effect(values: tuple[float, ...], below: float = 1.0) -> SeedEffect:
    found = times(dict(enumerate(values)), dict.fromkeys(range(len(values)), below))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.16, 1.17, 1.18), HELD),
        ((0.8, 0.79, 0.81), REVERSE),
        ((1.04, 1.05, 1.045), INSIDE),
        ((0.9, 1.9, 1.2), UNDECIDED),
        ((5.0,), UNDECIDED),
    ],
)
def test_a_ratio_holds_where_its_interval_lies_above_one_and_a_tenth(values: tuple[float, ...], verdict: str) -> None:
    assert effect(values).verdict == verdict


def test_a_difference_is_how_much_lower_it_is() -> None:
    found = less({0: 1.0, 1: 1.1, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0}, margin=0.01)
    assert found is not None
    assert found.verdict == HELD
    assert found.text() == "+0.967 (+0.823 to +1.110, 3 seeds)"  # 0.9667 ± 4.3027 · 0.0577 / √3


def test_seeds_that_only_one_side_has_are_left_out() -> None:
    assert times({0: 1.0}, {1: 1.0}) is None
    found = times({0: 2.0, 1: 3.0}, {1: 1.5})
    assert found is not None
    assert found.text() == "2.00× (one seed)"


def test_claims_are_judged_one_by_one(tmp_path: Path) -> None:
    data = study(tmp_path / "s")
    norms = claim(data, "Mixing makes image queries longer")
    assert norms.held
    assert "image queries are 1.18× (1.16× to 1.21×, 3 seeds) as long as text queries, which is 1.18×" in norms.text
    assert norms.text.endswith("the ratio in a model of text alone: held.")
    assert not claim(data, "Mixing makes image keys longer").held, "they are as long in the model of text alone"
    mixing = [c for c in other_findings.claims(data) if c.name.startswith("Mixing makes logits")]
    assert [c.effect.verdict for c in mixing] == [INSIDE, UNDECIDED]
    assert "the reverse was seen" in claim(data, "Images draw the attention").text
    cure = claim(data, "QK-norm saves the images")
    assert cure.held
    assert "+0.510 (+0.433 to +0.587, 3 seeds) nats" in cure.measured


def test_all_claims_are_tested_together_each_against_the_margin_of_its_own_unit(tmp_path: Path) -> None:
    effects = [c.effect for c in other_findings.claims(study(tmp_path / "s"))]
    p = [paired_effect(e.numbers, e.margin).p for e in effects]
    assert len({e.margin for e in effects}) > 1
    level = 0.95
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):  # Holm's procedure by hand
        level = 1 - 0.05 / (len(p) - rank)
        assert effects[i].level == pytest.approx(level)
        if p[i] > 1 - level:
            break
    assert rank > 2
    assert all((e.verdict in (HELD, REVERSE)) == (own <= 1 - e.level) for e, own in zip(effects, p))


def test_the_lead_answers_with_numbers(tmp_path: Path) -> None:
    data = study(tmp_path / "s")
    lead, *others = other_findings.modality_findings(data)
    assert lead.kind == "lead"
    kinds = {f.text: f.kind for f in others if f.kind != "caution"}
    for claimed in other_findings.claims(data):
        assert kinds.pop(claimed.text) == ("undecided" if claimed.effect.verdict == UNDECIDED else "note")
    assert not kinds
    page = study_page(dataclasses.replace(data, remedies=[*data.remedies, "swin_norm", WIDE]))
    text = page.html()
    assert text.index("not shown</summary>") < text.index("Charts</h2>")
    marked = page.mark(f"as with {WIDE}: more than none, and swin_norm:a=1")
    assert re.findall('"name">([^<]*)', marked) == [WIDE, "none"]
    assert lead.text.startswith("Why do mixed modalities blow up? From LR 0.01 to 0.1, the largest logit grows")
    assert "which is not shown" in lead.text


def test_one_seed_judges_nothing(tmp_path: Path) -> None:
    data = study(tmp_path / "s", seeds=1)
    assert not any(c.held for c in other_findings.claims(data))
    assert any(f.kind == "lead" and "One seed: none of" in f.text for f in other_findings.modality_findings(data))


def test_the_variance_of_images_is_judged_over_shares_and_seeds(tmp_path: Path) -> None:
    entries = []
    for order, ratio in (("pre", 1.0), ("none", 4.0)):
        for variance in (1.0, 16.0):
            for seed in (0, 1):
                role = f"patches:norm={order},variance={variance:g}"
                made = Made(lr=0.01, seed=seed, role=role)
                run = make_run(tmp_path / "s" / "runs" / made.run_id, made)
                end = (ratio if variance > 1 else 1.0) + seed / 100
                add(run, {"image_share": 0.5, "image_variance": variance, "norm_order": order}, query_norm__image=end)
                entries.append({"run_id": made.run_id, "remedy": "none", "lr": 0.01, "seed": seed, "role": role})
    write_json(tmp_path / "s" / "study.json", {"study": "multimodal", "remedies": ["none"], "runs": entries})
    found = [c for c in other_findings.claims(collect(tmp_path / "s")) if "norms after training" in c.measured]
    assert [c.held for c in found] == [False, True]
    assert found[1].name == "Variance ×16 of images, no norms in the blocks"


def test_the_page_has_the_claims_and_the_table_by_modality(tmp_path: Path) -> None:
    data = study(tmp_path / "s")
    write(tmp_path / "s", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Text and images in one sequence" in page
    assert "Mixing makes image queries longer" in page
    assert by_modality(data) in page
    assert "Queries, image / text" in page


def test_a_study_without_modalities_has_neither(tmp_path: Path) -> None:
    made = Made(lr=0.01)
    make_run(tmp_path / "r", made)
    data = collect(tmp_path / "r")
    assert not other_findings.is_multimodal(data)
    assert findings.accuracy_findings(data) == []
    assert findings.table_of(data) == ""


def test_accuracy_is_told_and_tabled(tmp_path: Path) -> None:
    paths = []
    for remedy, values in (("none", (0.5, 0.6)), ("qk_norm", (0.8, 0.91))):
        for seed, value in enumerate(values):
            run = make_run(tmp_path / f"{remedy}-{seed}", Made(remedy=remedy, lr=0.1, seed=seed, entropy=1.0))
            row = read_json(run / "summary.json")
            write_json(run / "summary.json", {**row, "val_accuracy": value})
            paths.append(run)
    data = collect(paths)
    text = findings.accuracy_findings(data)[0].text
    assert text == "Highest held-out accuracy: 85.5 %, qk_norm at LR 0.1; the highest of none is 55.0 %, at LR 0.1."
    assert "80.0 to 91.0" in findings.table_of(data)
