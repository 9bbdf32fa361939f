"""The page of a watched model: what it says in words, what it carries, and that it needs no torch."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import Made, grid, make_run, make_study
from synthetic_watch import Seen, make_watch
from test_report_page import alone, sound

import qkeel.report
from qkeel.errors import RunDirectoryError
from qkeel.monitor import RunDirectorySink, Sample
from qkeel.monitor.rules import NonFinite
from qkeel.report.watch_page import (
    MOST_CELLS,
    MOST_LINES,
    chart_data,
    findings,
    fix,
    is_watched,
    movement,
    read_watched,
    short_names,
    verdict,
)

SMALL = Seen(layers=3, heads=4, samples=12)


def page(paths: object, tmp_path: Path) -> str:
    return qkeel.report.write(paths, tmp_path / "report.html").read_text(encoding="utf-8")  # type: ignore[arg-type]


def words(seen: Seen, tmp_path: Path) -> list[str]:
    return [finding.text for finding in findings(read_watched([make_watch(tmp_path / "run", seen)]))]


def exact(path: Path, steps: list[int], **fields: list[float]) -> Path:
    """One layer of one head, by hand."""
    sink = RunDirectorySink(path)
    sink.open({"model": "Toy", "sites": [{"name": "attn", "n_heads": 1}]})
    for i, step in enumerate(steps):
        heads = {name: np.array([[values[i]]]) for name, values in fields.items()}
        sink.write(Sample(step=step, layers=("attn",), heads=heads))
    sink.close(complete=True)
    return path


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path):
    html = page(make_watch(tmp_path / "run"), tmp_path)
    sound(html)
    assert "connect-src" not in html
    assert len(html.encode()) < 500_000


def test_without_an_alarm_the_first_sentence_is_the_largest_logit_and_how_it_grows(tmp_path: Path):
    steps = list(range(0, 2001, 100))
    run = exact(tmp_path / "r", steps, max_logit=[1.0, *(14.2 * (s / 2000) ** 0.3 for s in steps[1:])])
    found = verdict(read_watched([run])[0])
    assert found.light == "good"
    text = (
        "Healthy: the largest attention logit in 2,000 steps is 14.2 in attn, head 0. Logits above 100 count as large."
    )
    assert found.text == text
    grows = "The largest logit grows by a factor of 1.2 each time the number of steps doubles."
    assert findings(read_watched([run]))[0].text == grows


@pytest.mark.parametrize(("top", "sentence"), [(84.0, "Healthy: the largest"), (168.0, "are large: up to 168")])
def test_the_sentence_names_the_head_that_had_the_largest_logit_not_the_one_that_has_it_now(
    top: float, sentence: str, tmp_path: Path
):
    sink = RunDirectorySink(tmp_path / "r")
    sink.open({"model": "Toy", "sites": [{"name": name, "n_heads": 2} for name in ("a", "b")]})
    for step, logits in enumerate([[[1.0, 2.0], [1.0, 1.0]], [[3.0, top], [4.0, 5.0]], [[3.0, 4.0], [9.0, 5.0]]]):
        sink.write(Sample(step=step, layers=("a", "b"), heads={"max_logit": np.array(logits)}))
    sink.close(complete=True)
    text = verdict(read_watched([tmp_path / "r"])[0]).text
    assert sentence in text
    assert "in a, head 1" in text


@pytest.mark.parametrize(
    ("power", "says"), [(-0.5, "falls as step^−0.5"), (0.01, "stays level"), (0.5, "grows as step^0.5")]
)
def test_the_movement_is_named(power: float, says: str, tmp_path: Path):
    steps = list(range(1, 20))
    run = exact(tmp_path / "r", steps, max_logit=[8.0 * s**power for s in steps])
    assert movement(read_watched([run])[0]) == says


def test_an_alarm_leads_the_page_with_a_red_light_a_plain_sentence_and_one_fix_to_copy(tmp_path: Path):
    run = make_watch(tmp_path / "run")
    found = verdict(read_watched([run])[0])
    assert found.light == "bad"
    assert found.text.startswith("Attention logits have grown too large since step 200. The largest is now ")
    assert "Above 1,000, the softmax gives nearly all the weight to one key" in found.why
    html = page(run, tmp_path)
    header = html[html.index("<header") : html.index("</header>")]
    line = "qkeel.apply(model, &quot;qk_clip:threshold=15,steps=matched&quot;, optimizer)"
    assert header.count(line) == 1
    assert header.count('class="copy"') == 1
    assert ">Copy fix</button>" in header
    assert "<strong>What to do:</strong> add this line to the script, after the optimizer is created:" in header
    assert 'class="lead signal signal-bad"' in header


def test_alarms_of_one_cause_are_one_card_with_one_fix(tmp_path: Path):
    html = page(make_watch(tmp_path / "run"), tmp_path)
    section = html[html.index('id="section-alarms"') : html.index('id="section-charts"')]
    assert section.count('<li class="alarm-alarm"') == 1
    assert section.count("alarm-notice") == 0
    assert section.count("<li>Step 200") == 2  # what was seen, in its order
    assert section.count('class="copy"') == 1
    assert "2309.14322" in section


def test_a_run_that_a_command_watched_is_fixed_by_that_command(tmp_path: Path):
    run = read_watched([make_watch(tmp_path / "run")])[0]
    line = 'qkeel.apply(model, "qk_clip:threshold=15,steps=matched", optimizer)'
    assert fix(run) == [line]
    started = dataclasses.replace(run, env={"watcher": "qkeel watch --every 5 -- python train.py --lr 0.1"})
    again = "qkeel watch --every 5 --apply qk_clip:threshold=15,steps=matched -- python train.py --lr 0.1"
    assert fix(started) == [again, line]
    decided = {"event": "decision", "step": 210, "remedy": "qk_clip:threshold=15"}
    assert fix(dataclasses.replace(run, interventions=[decided])) == []


@pytest.mark.parametrize(
    ("logits", "light", "says"),
    [
        ([1.0, 7.0], "good", "Healthy: the largest attention logit in 1 step is 7"),
        ([1.0, 168.0], "large", "Attention logits are large: up to 168 in 1 step"),
        ([1.0, 1340.0], "bad", "Attention logits are too large: up to 1,340 in 1 step."),
        ([np.nan, np.nan], "none", "No attention logit was measured in 1 step."),
    ],
)
def test_the_light_has_the_colour_of_the_sentence(logits: list[float], light: str, says: str, tmp_path: Path):
    found = verdict(read_watched([exact(tmp_path / "r", [0, 1], max_logit=logits)])[0])
    assert (found.light, found.text[: len(says)]) == (light, says)


@pytest.mark.parametrize(
    ("norm", "cosine", "cause"),
    [
        ([1, 10], [0.5, 0.5], "Queries and keys became longer, which explains most of it."),
        ([1, 1], [0.1, 0.9], "Queries and keys became better aligned, which explains most of it."),
        ([1, 3], [0.3, 0.9], "Queries and keys became longer and better aligned."),
    ],
)
def test_growth_by_norm_is_told_from_growth_by_angle(
    norm: list[float], cosine: list[float], cause: str, tmp_path: Path
):
    logits = [n * c * 10 for n, c in zip(norm, cosine)]
    fields = {"query_norm": norm, "key_norm": [1.0, 1.0], "cos_max": cosine}
    run = exact(tmp_path / "r", [0, 10], max_logit=logits, **fields)
    text = next(finding.text for finding in findings(read_watched([run])) if "cosine" in finding.text)
    assert cause in text
    assert text.startswith("From step 0 on, the logit of attn head 0 grew by a factor of ")


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path):
    found = words(Seen(layers=3, heads=4, samples=12, complete=False), tmp_path)
    assert "The run has not finished; the page shows it up to step 110." in found


def test_a_run_before_its_first_sample_has_a_page(tmp_path: Path):
    sink = RunDirectorySink(tmp_path / "run")
    sink.open({"model": "Toy", "sites": [{"name": "attn", "n_heads": 1}]})
    html = page(tmp_path / "run", tmp_path)
    assert "Nothing is recorded yet." in html
    assert "report-data" not in html


def test_one_sample_without_alarm_or_loss_has_a_page(tmp_path: Path):
    seen = Seen(samples=1, alarms=0, loss=False, angle=False, evaluated=False, layers=1, heads=1, complete=False)
    html = page(make_watch(tmp_path / "run", seen), tmp_path)
    assert "1 sample, which is too few to tell how the logits grow." in html
    assert 'data-chart="growth"' in html
    assert 'data-chart="loss"' not in html
    assert 'data-chart="angle"' not in html
    assert "section-alarms" not in html


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    run = exact(tmp_path / "r", [0, 1], max_logit=[-np.inf, np.inf], entropy=[np.nan, 1.0])
    html = page(run, tmp_path)
    found = re.search(r'id="report-data">(.*?)</script>', html, re.S)
    assert found
    data = json.loads(found[1])
    assert data["runs"][0]["lines"]["max_logit"] == [[None, None]]


@pytest.mark.slow
def test_eighty_layers_of_128_heads_stay_under_two_megabytes(tmp_path: Path):
    run = make_watch(tmp_path / "run", Seen(layers=80, heads=128, samples=150))
    data = chart_data(read_watched([run]))["runs"][0]
    assert sum(len(line) for lines in data["lines"].values() for line in lines) <= MOST_LINES
    assert sum(len(row) for rows in data["last"]["fields"].values() for row in rows) <= MOST_CELLS
    assert len(page(run, tmp_path).encode()) < 2_000_000


def test_thinning_keeps_the_peak(tmp_path: Path):
    logits = [1.0] * 3000
    logits[1234] = 77.0
    run = exact(tmp_path / "r", list(range(3000)), max_logit=logits)
    data = chart_data(read_watched([run]))["runs"][0]
    assert len(data["step"]) <= 300
    assert data["values"]["max_logit"][data["step"].index(1234)] == 77


def test_the_heads_of_a_killed_runs_last_step_may_be_missing(tmp_path: Path):
    run = make_watch(tmp_path / "run", dataclasses.replace(SMALL, complete=False))
    heads = run / "heads.f32"
    heads.write_bytes(heads.read_bytes()[:-10])
    seen = read_watched([run])[0]
    assert seen.steps == list(range(0, 110, 10))
    assert len(seen.heads.values["max_logit"]) == 11


def test_several_runs_have_a_table_and_names_that_differ(tmp_path: Path):
    runs = [make_watch(tmp_path / "a" / "watch", SMALL), make_watch(tmp_path / "b" / "watch", SMALL)]
    html = page(runs, tmp_path)
    assert "2 watched runs of GPT2LMHeadModel" in html
    assert 'id="section-compared"' in html
    assert 'data-chart="runs"' in html
    names = [run.name for run in read_watched(runs)]
    assert len(set(names)) == 2


def test_a_watched_model_has_a_page_with_the_study_that_advises_on_it(tmp_path: Path):
    watched = make_watch(tmp_path / "watch", SMALL)
    run = make_run(tmp_path / "run", Made(remedy="none", status="done"))
    assert is_watched(watched)
    assert not is_watched(run)
    assert not is_watched(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match="compares no remedies"):
        qkeel.report.write([watched, run], tmp_path / "r.html")
    runs = grid(("none", "qk_norm"), (0.01, 0.1), seeds=(0, 1, 2))
    uneven = [dataclasses.replace(m, val_loss=m.val_loss + 0.002 * m.seed**2 * (m.remedy == "none")) for m in runs]
    study = make_study(tmp_path / "study", uneven)
    html = page([watched, study], tmp_path)
    assert 'id="section-alarms"' in html
    advice = html.split('id="section-advice"')[1].split("</section>")[0]
    assert "qkeel.apply(model, &quot;qk_norm&quot;, optimizer)" in advice
    assert "better at LR 0.1" in advice


def test_damaged_files_are_named(tmp_path: Path):
    run = make_watch(tmp_path / "run", SMALL)
    (run / "heads.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"heads.json has no fields"):
        qkeel.report.write(run, tmp_path / "r.html")
    other = make_watch(tmp_path / "other", SMALL)
    lines = (other / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (other / "metrics.jsonl").write_bytes(b"".join([*lines[:4], lines[4].replace(b"{", b"[", 1), *lines[5:]]))
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line 5 "):
        qkeel.report.write(other, tmp_path / "r.html")


def test_every_text_is_escaped(tmp_path: Path):
    html = page(make_watch(tmp_path / "run", Seen(layers=2, heads=2, samples=3, model="</script><b>M")), tmp_path)
    assert "<b>M" not in html
    sound(html)


def test_layer_names_lose_what_all_share():
    assert short_names(["model.layers.0.self_attn", "model.layers.11.self_attn"]) == ["0", "11"]
    assert short_names(["encoder.0.attn", "decoder.0.attn"]) == ["encoder", "decoder"]
    assert short_names(["attn"]) == ["attn"]
    assert short_names(["h.0", "h.0#2"]) == ["0", "0#2"]
    assert short_names(["a", "a"]) == ["a", "a"]


def test_a_page_is_written_where_torch_cannot_be_imported(tmp_path: Path):
    run = make_watch(tmp_path / "run", SMALL)
    code = "sys.modules['torch'] = None\nimport qkeel.report\nqkeel.report.write(sys.argv[1], sys.argv[2])"
    alone(code, str(run), str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").exists()


def test_a_run_whose_logits_became_nan_says_so_first(tmp_path: Path):
    run = read_watched([make_watch(tmp_path / "run")])[0]
    broken = {**run.alarms[-1], "rule": NonFinite().name, "step": 210}
    found = verdict(dataclasses.replace(run, alarms=[*run.alarms, broken]))
    assert found.text.endswith(" At step 210, logits became NaN or infinite.")
    assert "NaN" not in verdict(run).text


def test_a_logit_under_the_end_of_the_axis_is_labelled_with_its_own_value(tmp_path: Path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium")
    run = exact(tmp_path / "r", list(range(10)), max_logit=[*np.linspace(0.9, 0.2, 9), 0.0288])
    place = qkeel.report.write(run, tmp_path / "report.html")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom")
    shown = subprocess.run([browser, *flags, place.as_uri()], capture_output=True, text=True, check=True).stdout
    chart = shown[shown.index('id="chart-growth"') :].partition("</svg>")[0]
    assert ">0.0288<" in chart
