"""The page as a file: from run directories to HTML, without torch, without a network, without stray markup."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import Made, drift, grid, make_run, make_study

import qkeel.report
from qkeel.errors import RunDirectoryError
from qkeel.records import Heads, write_text
from qkeel.report.html import json_script, rounded, tag, thin
from qkeel.report.study.collect import collect
from qkeel.report.study.page import chart_data, head_maps

SMALL = grid(("none", "qk_norm"), (0.01, 0.1))


class Reader(HTMLParser):
    """Checks that elements nest; gathers what could load something."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [value or "" for name, value in attrs if name == "src" or (name == "href" and tag != "a")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sound(html: str) -> None:
    """Elements nest, nothing is loaded, and no name is given twice."""
    reader = Reader()
    reader.feed(html)
    assert (reader.open, reader.loads) == ([], [])
    assert len(reader.ids) == len(set(reader.ids))


def page(paths: object, tmp_path: Path) -> str:
    out = tmp_path / "out" / "report.html"
    assert qkeel.report.write(paths, out) == out  # type: ignore[arg-type]
    return out.read_text(encoding="utf-8")


def embedded(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def test_a_study_becomes_one_file_that_loads_nothing(tmp_path: Path):
    html = page(make_study(tmp_path / "study", [*drift(), *SMALL]), tmp_path)
    sound(html)
    assert "default-src &#x27;none&#x27;" in html
    assert "Learning-rate study" in html
    assert "Permission to use, copy, modify, and/or distribute this software" in html  # the notice travels along


def test_the_demo_stays_under_a_megabyte(tmp_path: Path):
    html = page(make_study(tmp_path / "study", [*drift(), *grid()]), tmp_path)
    assert len(html.encode()) < 1_000_000


# `qkeel/__init__` loads what it likes; the room is imported as on a machine where only it and its cellar exist.
ALONE = """
import importlib.util, sys, types
package = types.ModuleType("qkeel")
package.__path__ = list(importlib.util.find_spec("qkeel").submodule_search_locations)
sys.modules["qkeel"] = package
"""


def alone(code: str, *arguments: str) -> None:
    command = [sys.executable, "-c", ALONE + code, *arguments]
    done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_report_never_imports_torch():
    alone("import qkeel.report\nassert 'torch' not in sys.modules")


def test_a_page_is_written_where_torch_cannot_be_imported(tmp_path: Path):
    make_study(tmp_path / "study", SMALL[:2])
    block = "sys.modules['torch'] = None  # any import of it fails\n"
    code = block + "import qkeel.report\nqkeel.report.write(sys.argv[1], sys.argv[2])"
    alone(code, str(tmp_path / "study"), str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").exists()


def test_every_text_is_escaped(tmp_path: Path):
    nasty = "</script><script>alert(1)</script>&\"'"
    made = Made(remedy=nasty, status="done")
    study = make_study(tmp_path / "study", [])
    about = json.loads((study / "study.json").read_text())
    entries = [("a", nasty, "done"), ("b", "none", "failed")]
    about["runs"] = [{"run_id": i, "remedy": r, "lr": 0.1, "seed": 0, "role": "grid"} for i, r, _ in entries]
    about |= {"remedies": [nasty, "none"], "command": nasty, "study": nasty}
    (study / "study.json").write_text(json.dumps(about))
    make_run(study / "runs" / "a", made)
    write_text(make_run(study / "runs" / "b", Made(status="failed")) / "FAILED", f"Traceback {nasty}\n{nasty}")
    html = page(study, tmp_path)
    assert "<script>alert" not in html
    sound(html)
    assert nasty in embedded(html)["remedies"]  # type: ignore[operator]


def test_data_cannot_end_its_script():
    text = json_script("d", {"a": "</script><!--\u2028"})
    assert text.count("</script>") == 1
    assert "<!--" not in text
    assert json.loads(text[text.index(">") + 1 : -9]) == {"a": "</script><!--\u2028"}


def test_attributes_and_children_are_escaped():
    assert tag("p", {"title": '"<'}, "<b>", tag("i", {}, "&")) == '<p title="&quot;&lt;">&lt;b&gt;<i>&amp;</i></p>'


def test_a_single_run_makes_a_page(tmp_path: Path):
    html = page(make_run(tmp_path / "one", SMALL[-1]), tmp_path)
    assert "<h1>qk_norm at LR 0.1</h1>" in html
    assert 'id="chart-logits"' in html
    assert 'id="chart-loss"' not in html  # one dot is no curve


def test_a_list_of_runs_makes_a_page(tmp_path: Path):
    paths = [make_run(tmp_path / made.run_id, made) for made in SMALL]
    html = page(paths, tmp_path)
    assert f"<h1>{len(SMALL)} runs compared</h1>" in html
    assert "Ranking" in html


def test_the_same_run_twice_counts_once(tmp_path: Path):
    study = make_study(tmp_path / "study", SMALL)
    run = study / "runs" / SMALL[0].run_id
    assert len(collect([study, run, run]).runs) == len(SMALL)


def test_runs_that_share_remedy_rate_and_seed_are_told_apart(tmp_path: Path):
    first = make_run(tmp_path / "small", SMALL[0])
    second = make_run(tmp_path / "large", dataclasses.replace(SMALL[0], heads=8))
    study = collect([first, second])
    assert study.remedies == ["none (n_heads 4)", "none (n_heads 8)"]
    again = make_run(tmp_path / "again", SMALL[0])
    assert collect([first, again]).remedies == ["none (small)", "none (again)"]
    html = page([first, second], tmp_path)
    assert "These runs differ in model: their losses are not comparable." in html


def test_the_baseline_comes_first_and_the_order_is_that_of_the_study(tmp_path: Path):
    runs = [*grid(("qk_norm", "none", "lalr:tau=0.1"), (0.1,), (0,))]
    assert collect(make_study(tmp_path / "study", runs)).remedies == ["none", "qk_norm", "lalr:tau=0.1"]


def test_an_empty_study_says_what_to_do(tmp_path: Path):
    html = page(make_study(tmp_path / "study", [], absent=SMALL), tmp_path)
    assert "Nothing to draw yet" in html
    assert "No run has finished yet (8 missing of 8 runs)." in html
    assert "report-data" not in html


def test_failed_runs_are_listed_with_their_error(tmp_path: Path):
    runs = [dataclasses.replace(SMALL[0], status="failed"), dataclasses.replace(SMALL[1], status="started"), *SMALL[2:]]
    html = page(make_study(tmp_path / "study", runs), tmp_path)
    assert "the loss is NaN at step 60 &lt;&amp;&gt; stop" in html
    assert "1 failed and 1 unfinished of 8 runs" in html
    assert "failed after step 60" in html


def test_every_recorded_field_is_defined(tmp_path: Path):
    html = page(make_run(tmp_path / "one", SMALL[0]), tmp_path)
    assert "first logged step with max_logit &gt; 100" in html
    assert "averaged over query rows, heads and layers [nats]" in html


def test_losses_carry_the_unit_of_the_corpus(tmp_path: Path):
    html = page(make_study(tmp_path / "study", SMALL), tmp_path)
    assert embedded(html)["unit"] == "nats/byte"
    assert "nats/byte, qk_norm at LR 0.01" in re.sub("<[^>]+>", "", html)


def test_provenance_names_versions_corpus_and_command(tmp_path: Path):
    html = page(make_study(tmp_path / "study", SMALL), tmp_path)
    for text in ("2.13.0+cpu", "9f2c" * 16, "7,912,345 training tokens", "131,456", "qkeel study lr --lrs"):
        assert text in html


def test_a_path_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunDirectoryError, match=r"expected the directory of a study .* got no such directory"):
        qkeel.report.write(tmp_path / "absent", tmp_path / "r.html")
    with pytest.raises(RunDirectoryError, match="got a directory with neither"):
        qkeel.report.write(tmp_path, tmp_path / "r.html")
    with pytest.raises(RunDirectoryError, match="empty list"):
        qkeel.report.write([], tmp_path / "r.html")
    with pytest.raises(TypeError):  # InvalidTypeError, or that of the run-time type check of the tests
        qkeel.report.write([3], tmp_path / "r.html")  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("study.json", "{"),
        ("study.json", "[]"),
        ("study.json", '{"runs": 3}'),
        ("study.json", '{"runs": [{"run_id": "x"}]}'),
        ("study.json", '{"runs": [{"run_id": "x", "remedy": "none", "lr": "fast", "seed": 0}]}'),
        ("run/config.json", '{"model"'),
        ("run/summary.json", "[1]"),
        ("run/metrics.jsonl", '{"step": 0}\n{"st\n{"step": 20}\n'),
        ("run/metrics.jsonl", '{"loss": 0}\n'),
        ("run/heads.json", "{}"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str):
    study = make_study(tmp_path / "study", SMALL[:1])
    (study / name.replace("run/", f"runs/{SMALL[0].run_id}/")).write_text(text)
    with pytest.raises(RunDirectoryError, match=Path(name).stem if "fast" not in text else "fast"):
        qkeel.report.write(study, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_torn_tail_is_dropped(tmp_path: Path):
    run = make_run(tmp_path / "run", dataclasses.replace(SMALL[0], status="started"))
    whole = collect(run).runs[0]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 70, "max')
    with open(run / "heads.f32", "ab") as binary:
        binary.write(b"\0\0\0")
    torn = collect(run).runs[0]
    assert torn.metrics == whole.metrics
    assert torn.heads is not None
    assert whole.heads is not None
    assert len(torn.heads.steps) == len(whole.heads.steps)


def test_a_run_without_summary_that_says_done_is_damaged(tmp_path: Path):
    run = make_run(tmp_path / "run", SMALL[0])
    (run / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"summary\.json is missing"):
        collect(run)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", SMALL[0])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot create"):
        qkeel.report.write(run, tmp_path / "file" / "r.html")
    with pytest.raises(RunDirectoryError, match="got a directory"):
        qkeel.report.write(run, tmp_path)


def test_nan_survives_as_null(tmp_path: Path):
    study = make_study(tmp_path / "study", [dataclasses.replace(SMALL[0], val_loss=float("nan")), *SMALL[1:]])
    html = page(study, tmp_path)
    losses = embedded(html)["losses"]
    assert losses[0][3] is None  # type: ignore[index]
    assert "NaN" in html


def test_long_runs_are_thinned_by_leaving_records_out():
    kept = thin([1.0 + (i == 777) * 50 for i in range(5000)], 100)
    assert len(kept) <= 100
    assert kept[0] == 0
    assert kept[-1] == 4999
    assert 777 in kept
    assert kept == sorted(set(kept))
    assert thin([1.0, None, math.nan, 0.0, 2.0], 100) == [0, 1, 2, 3, 4]
    assert thin([0.0, 9.0, None, math.nan, 5.0, 8.0, 1.0], 4)[2] == 3  # NaN is larger than any number


def test_numbers_are_rounded_to_five_digits():
    assert rounded(2.8265123) == 2.8265
    assert rounded(10832.71) == 10833
    assert rounded(None) is None
    assert rounded(float("inf")) is None


def test_many_heads_are_folded_to_the_worst_of_each_layer():
    rng = np.random.default_rng(0)
    values = {"max_logit": rng.uniform(1, 9, (200, 24, 16)), "entropy": rng.uniform(0, 3, (200, 24, 16))}
    maps = head_maps(Heads(steps=np.arange(200), values=values))
    assert maps is not None
    assert maps["folded"]
    assert len(maps["rows"]) == 24
    assert len(maps["step"]) == 60
    assert maps["max_logit"][3][0] == pytest.approx(values["max_logit"][0, 3].max(), rel=5e-3)
    assert maps["entropy"][3][-1] == pytest.approx(values["entropy"][-1, 3].min(), rel=5e-3)


def test_head_rows_are_layer_by_layer(tmp_path: Path):
    run = collect(make_run(tmp_path / "run", SMALL[0]))
    shown = chart_data(run)["runs"][0]["heads"]
    assert shown["rows"] == ["0·0", "0·1", "0·2", "0·3", "1·0", "1·1", "1·2", "1·3"]
    heads = run.runs[0].heads
    assert heads is not None
    assert shown["max_logit"][5][-1] == pytest.approx(heads.values["max_logit"][-1, 1, 1], rel=5e-3)
