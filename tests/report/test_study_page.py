"""The page of a study as a file: from run directories to HTML, without torch, a network or stray markup."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

from synthetic_study import Made, grid, make_run, make_study, planned
from test_compare import long_study

import qkeel.report
from qkeel.records import (
    RunDirectory,
    append_line,
    read_json,
    read_lines,
    write_json,
)
from qkeel.report.html import rounded, thin
from qkeel.report.study_page import chart_data
from qkeel.report.study_runs import read_study

SMALL = grid(("none", "qk_norm"), (0.01, 0.1))


class Reader(HTMLParser):
    """Checks that elements nest; gathers what could load something."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.loads = []
        self.ids = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [
            value or ""
            for name, value in attrs
            if name == "src" or (name == "href" and tag != "a")
        ]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def sound(html):
    """Elements nest, nothing is loaded, and no name is given twice."""
    reader = Reader()
    reader.feed(html)
    assert (reader.open, reader.loads) == ([], [])
    assert len(reader.ids) == len(set(reader.ids))


def page(paths, tmp_path):
    out = tmp_path / "out" / "report.html"
    assert qkeel.report.write(paths, out) == out
    html = out.read_text(encoding="utf-8")
    sound(html)
    return html


def text_of(html):
    """What a reader sees, each cell of a table apart."""
    seen = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", seen)))


def embedded(html):
    found = re.search(
        r'<script type="application/json" id="report-data">(.*?)</script>', html, re.S
    )
    assert found
    return json.loads(found[1])


# `qkeel/__init__` loads what it likes; the room is imported as on a machine where only it and its cellar exist.
ALONE = """
import importlib.util, sys, types
package = types.ModuleType("qkeel")
package.__path__ = list(importlib.util.find_spec("qkeel").submodule_search_locations)
sys.modules["qkeel"] = package
sys.modules["torch"] = None  # any import of it fails
import qkeel.report
qkeel.report.write(sys.argv[1], sys.argv[2])
"""


def written_without_torch(run, out):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(run), str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert out.exists()


def test_a_study_becomes_one_small_file_that_loads_nothing(tmp_path):
    html = page(make_study(tmp_path / "study", grid()), tmp_path)
    assert "default-src &#39;none&#39;" in html
    assert "Learning-rate study" in html
    assert (
        "Permission to use, copy, modify, and/or distribute this software" in html
    )  # the notice travels along
    assert len(html.encode()) < 600_000


def test_the_lead_is_the_primary_comparison_with_its_interval(tmp_path):
    text = text_of(page(planned(tmp_path / "study"), tmp_path))
    lead = (
        "At LR 0.1, the largest attention logit is 42.3 with qk_norm and 18,400 with none; held-out loss is 0.287 "
        "nats/byte lower with qk_norm (95 % interval 0.257 to 0.316, 8 seeds)."
    )
    assert lead in text


def test_a_loss_that_is_higher_is_called_so(tmp_path):
    worse = [
        dataclasses.replace(
            m, val_loss=m.val_loss + m.seed / 100 + (m.remedy != "none")
        )
        for m in SMALL
    ]
    text = text_of(page(make_study(tmp_path / "study", worse), tmp_path))
    assert (
        "held-out loss is 0.999 nats/byte higher with qk_norm (the same in each of 2 seeds)"
        in text
    )
    alone = [made for made in SMALL if made.seed == 0]
    assert "qk_norm (one seed, no interval)" in text_of(
        page(make_study(tmp_path / "one", alone), tmp_path)
    )


def test_a_study_in_parts_has_a_column_for_them_and_a_choice_of_charts(
    tmp_path,
):
    runs = [
        dataclasses.replace(made, role=role)
        for role in ("mla, adamw", "mha, muon")
        for made in SMALL
    ]
    html = page(make_study(tmp_path / "study", runs, name="mla"), tmp_path)
    assert list(embedded(html)["parts"]) == ["mla, adamw", "mha, muon"]
    assert html.count('<td class="text">mha, muon</td>') == 2 * 2
    text = text_of(html)
    assert "mla, adamw, LR 0.01: the largest attention logit is" in text
    assert text.count("none mha, muon 0.1") == 1


def test_numbers_by_modality_and_accuracy_have_columns_where_they_were_measured(
    tmp_path,
):
    paths = []
    for made in SMALL:
        run = make_run(tmp_path / made.run_id, made)
        lines = list(read_lines(run / "metrics.jsonl"))
        (run / "metrics.jsonl").unlink()
        for line in lines:
            append_line(
                run / "metrics.jsonl",
                {**line, "query_norm/image": 3.0, "query_norm/text": 2.0},
            )
        RunDirectory(run).finish(
            {**read_json(run / "summary.json"), "val_accuracy": 0.5 + made.seed / 10}
        )
        paths.append(run)
    text = text_of(page(paths, tmp_path))
    assert "Held-out accuracy |q|, image / text" in text
    assert re.search(r"qk_norm 0\.1 2\.537 .* 0\.55 1\.5 ", text)


def test_a_study_of_lengths_leads_with_what_is_kept(tmp_path):
    html = page(long_study(tmp_path / "s"), tmp_path)
    text = text_of(html)
    lead = "Tested on 512 tokens, kna keeps 0.96 of its accuracy at the training length, +0.21 against baseline"
    assert (
        f"{lead} (95 % interval −0.171 to +0.591, 2 seeds)." in text
    )  # 0.21 ± 12.706 · 0.0424 / √2
    assert "baseline rerope 512 50.0 47.0 0.94" in text
    assert 'data-chart="lengths"' in html
    assert 'id="section-table"' in html
    assert 'data-chart="loss"' not in html
    data = chart_data(read_study(tmp_path / "s"))
    assert data["context"] == 64
    assert [(c["remedy"], c["method"], c["share"]) for c in data["long"]] == [
        (0, "none", [0.5, 0.375]),
        (0, "rerope", [0.5, 0.47]),
        (1, "none", [0.5, 0.48]),
    ]


def test_every_text_is_escaped(tmp_path):
    nasty = "</script><script>alert(1)</script>&\"'"
    study = make_study(tmp_path / "study", [])
    about = read_json(study / "study.json")
    entries = [("a", nasty), ("b", "none")]
    about["runs"] = [
        {"run_id": i, "remedy": r, "lr": 0.1, "seed": 0, "role": "grid"}
        for i, r in entries
    ]
    write_json(
        study / "study.json",
        {**about, "remedies": [nasty, "none"], "command": nasty, "study": nasty},
    )
    make_run(study / "runs" / "a", Made(remedy=nasty))
    make_run(study / "runs" / "b", Made(status="failed"))
    html = page(study, tmp_path)
    assert "<script>alert" not in html
    assert nasty in embedded(html)["remedies"]


def test_single_runs_make_a_page(tmp_path):
    paths = [make_run(tmp_path / made.run_id, made) for made in SMALL]
    html = page(paths[-1], tmp_path)
    assert "<h1>qk_norm at LR 0.1</h1>" in html
    assert "Held-out loss 2.549 nats/byte; it was 5.553 before training." in html
    assert 'id="chart-logits"' in html
    assert 'id="chart-loss"' not in html  # one dot is no curve
    assert "qkeel run --remedy qk_norm --lr 0.1 --seed 1" in html
    assert f"<h1>{len(SMALL)} runs compared</h1>" in page(paths, tmp_path)


def test_runs_of_different_models_are_said_not_to_be_comparable(tmp_path):
    runs = [
        make_run(tmp_path / str(n), dataclasses.replace(SMALL[0], heads=n))
        for n in range(1, 12)
    ]
    html = page(runs, tmp_path)
    assert "These runs differ in model: their losses are not comparable." in html


def test_runs_without_a_result_are_listed(tmp_path):
    runs = [
        dataclasses.replace(SMALL[0], status="failed"),
        dataclasses.replace(SMALL[1], status="started"),
        *SMALL[2:],
    ]
    text = text_of(page(make_study(tmp_path / "study", runs), tmp_path))
    said = "2 of 8 runs have no result and appear in no number: 1 failed and 1 started"
    assert said in text
    html = page(make_study(tmp_path / "empty", [], absent=SMALL), tmp_path)
    assert "8 of 8 runs have no result and appear in no number: 8 missing" in html
    assert "report-data" not in html


def test_long_curves_of_held_out_loss_are_thinned_to_every_nth(tmp_path):
    run = make_run(tmp_path / "run", Made(steps=6500))
    (curves,) = chart_data(read_study(run))["runs"]
    assert [step for step, _ in curves["val_loss"]] == list(range(0, 6501, 100))


def test_nan_survives_as_null(tmp_path):
    study = make_study(
        tmp_path / "study",
        [dataclasses.replace(SMALL[0], val_loss=float("nan")), *SMALL[1:]],
    )
    html = page(study, tmp_path)
    assert embedded(html)["losses"][0][3] is None
    assert "a value is not finite" in html


def test_long_runs_are_thinned_by_leaving_records_out():
    kept = thin([1.0 + (i == 777) * 50 for i in range(5000)], 100)
    assert len(kept) <= 100
    assert (kept[0], kept[-1], 777 in kept) == (0, 4999, True)
    assert kept == sorted(set(kept))
    assert thin([1.0, None, math.nan, 0.0, 2.0], 100) == [0, 1, 2, 3, 4]
    assert (
        thin([0.0, 9.0, None, math.nan, 5.0, 8.0, 1.0], 4)[2] == 3
    )  # NaN is larger than any number
    assert [rounded(x) for x in (2.8265123, 10832.71, None, float("inf"))] == [
        2.8265,
        10833,
        None,
        None,
    ]
