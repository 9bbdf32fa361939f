"""The page of a watched model: its verdict and fix, what it carries, and that it needs no torch."""

import dataclasses
import json
import re
from html import unescape

import numpy as np
import pytest
from synthetic_study import Made, make_run
from synthetic_watch import Seen, make_watch
from test_study_page import sound, written_without_torch

import qkeel.report
from qkeel.audit import check
from qkeel.errors import RunDirectoryError
from qkeel.monitor import RunDirectorySink, Sample
from qkeel.records import RunDirectory, append_line
from qkeel.report.watch_page import (
    MAX_CELLS,
    MAX_LINES,
    cautions,
    chart_data,
    fix,
    short_names,
    verdict,
)
from qkeel.report.watched_runs import is_watched, read_watched

SMALL = Seen(layers=3, heads=4, samples=12)


def page(paths, tmp_path):
    html = qkeel.report.write(paths, tmp_path / "report.html").read_text(
        encoding="utf-8"
    )
    sound(html)
    return html


def exact(path, steps, **fields):
    """One layer of one head, by hand."""
    sink = RunDirectorySink(path)
    sink.open({"model": "Toy", "sites": [{"name": "attn", "n_heads": 1}]})
    for i, step in enumerate(steps):
        heads = {name: np.array([[values[i]]]) for name, values in fields.items()}
        sink.write(Sample(step=step, layers=("attn",), heads=heads))
    sink.close(complete=True)
    return path


def test_a_page_is_written_where_torch_cannot_be_imported(tmp_path):
    written_without_torch(make_watch(tmp_path / "run", SMALL), tmp_path / "r.html")


@pytest.mark.parametrize(
    ("logits", "light", "says"),
    [
        (
            [1.0, 7.0],
            "good",
            "Healthy: largest logit 7 (attn head 0, step 1), under 100, where logits begin to count as large.",
        ),
        (
            [168.0, 1.0],
            "large",
            "Healthy, but large: largest logit 168 (attn head 0, step 0) is over 100",
        ),
        (
            [1.0, 1340.0],
            "bad",
            "Not healthy: largest logit 1,340 (attn head 0, step 1) is over 1,000, where training",
        ),
        ([np.nan, np.nan], "none", "Not known: no attention logit was measured."),
    ],
)
def test_without_an_alarm_the_verdict_is_that_of_check(logits, light, says, tmp_path):
    colour, text = verdict(
        read_watched([exact(tmp_path / "r", [0, 1], max_logit=logits)])[0]
    )
    assert (colour, text[: len(says)]) == (light, says)


def test_an_alarm_leads_the_page_with_a_red_light_and_one_fix_to_copy(
    tmp_path,
):
    run = make_watch(tmp_path / "run")
    light, text = verdict(read_watched([run])[0])
    assert light == "bad"
    assert "since step 200: max logit 104 will pass 1,000" in text
    assert text.lower() == f"{check(run)}.".lower()
    html = page(run, tmp_path)
    header = html[html.index("<header") : html.index("</header>")]
    meta = "124,439,808 parameters · 12 attention layers · AdamW · 590 steps · 60 samples · run"
    assert meta in header
    assert 'class="lead signal signal-bad"' in header
    assert (
        header.count(
            "qkeel.apply(model, &#34;qk_clip:threshold=15,steps=matched&#34;, optimizer)"
        )
        == 1
    )
    assert header.count('class="copy"') == 1
    section = html[
        html.index('id="section-alarms"') : html.index('id="section-charts"')
    ]
    assert section.count('<li class="alarm-alarm"') == 1  # one card for one cause
    assert section.count("<li>Step 200") == 2  # what was seen, in its order
    assert section.count('class="copy"') == 1
    assert "2309.14322" in section


@pytest.mark.parametrize(
    "line",
    [
        'qkeel.apply("qk_norm", model, optimizer)',
        'qkeel.apply(model, "qk_norm", optimizer)',
    ],
)
def test_a_run_that_a_command_watched_is_fixed_by_that_command(line, tmp_path):
    run = read_watched([make_watch(tmp_path / "run", SMALL)])[0]
    run = dataclasses.replace(
        run, alarms=[{**alarm, "remedy": line} for alarm in run.alarms]
    )
    assert fix(run) == [line]
    started = dataclasses.replace(
        run, env={"watcher": "qkeel watch --every 5 -- python train.py --lr 0.1"}
    )
    assert fix(started) == [
        "qkeel watch --every 5 --apply qk_norm -- python train.py --lr 0.1",
        line,
    ]
    decided = {"event": "decision", "step": 210, "remedy": "qk_clip:threshold=15"}
    assert fix(dataclasses.replace(run, interventions=[decided])) == []
    waits = dataclasses.replace(run, interventions=[{**decided, "remedy": ""}])
    assert fix(waits) == [line]


def test_under_an_autopilot_what_counts_is_what_is_left_and_equal_decisions_share_an_entry(
    tmp_path,
):
    path = exact(tmp_path / "r", [0, 1, 2], max_logit=[5.0, 400.0, 20.0])
    sink = RunDirectorySink(path.with_name("s"))
    sink.open({"model": "Toy", "sites": [{"name": "attn", "n_heads": 1}]})
    for step, logit in enumerate((5.0, 400.0, 20.0)):
        sink.write(
            Sample(
                step=step, layers=("attn",), heads={"max_logit": np.array([[logit]])}
            )
        )
    decision = {
        "event": "decision",
        "step": 1,
        "action": "clip",
        "remedy": "qk_clip",
        "reason": "it grows",
    }
    for site in ("a", "b"):
        sink.event(
            {
                **decision,
                "site": site,
                "text": f"step 1, {site}: clip, because <it> grows",
            }
        )
    sink.close(complete=True)
    html = page(path.with_name("s"), tmp_path)
    assert verdict(read_watched([path.with_name("s")])[0])[0] == "good"
    section = html[
        html.index('id="section-interventions"') : html.index('id="section-charts"')
    ]
    assert section.count("<li") == 1
    assert "because &lt;it&gt; grows" in section
    assert "<summary>at 1 more site</summary>" in section


def test_what_is_not_watched_or_not_over_is_said(tmp_path):
    run = read_watched(
        [make_watch(tmp_path / "run", dataclasses.replace(SMALL, complete=False))]
    )[0]
    missed = {
        **run.about,
        "missed": [{"module": "h.3", "reason": "its scores were lost"}],
    }
    assert cautions(
        dataclasses.replace(run, about=missed, notes=[{"event": "late"}])
    ) == [
        "3 of 4 attention layers were watched. Not understood: h.3: its scores were lost.",
        "The run has not finished; the page shows it up to step 110.",
        "Noted while watching: late.",
    ]


def test_a_run_of_no_or_one_sample_has_a_page(tmp_path):
    sink = RunDirectorySink(tmp_path / "none")
    sink.open({"model": "Toy", "sites": [{"name": "attn", "n_heads": 1}]})
    html = page(tmp_path / "none", tmp_path)
    assert "Nothing is recorded yet." in html
    assert "report-data" not in html
    seen = Seen(
        samples=1,
        alarms=0,
        loss=False,
        angle=False,
        evaluated=False,
        layers=1,
        heads=1,
        complete=False,
    )
    html = page(make_watch(tmp_path / "one", seen), tmp_path)
    assert 'data-chart="growth"' in html
    assert 'data-chart="loss"' not in html
    assert 'data-chart="runs"' not in html
    assert "section-alarms" not in html


def test_numbers_that_are_not_finite_become_null(tmp_path):
    html = page(
        exact(
            tmp_path / "r", [0, 1], max_logit=[-np.inf, np.inf], entropy=[np.nan, 1.0]
        ),
        tmp_path,
    )
    found = re.search(r'id="report-data">(.*?)</script>', html, re.S)
    assert found
    assert json.loads(found[1])["runs"][0]["lines"]["max_logit"] == [[None, None]]


@pytest.mark.slow
def test_eighty_layers_of_128_heads_stay_under_two_megabytes(tmp_path):
    run = make_watch(tmp_path / "run", Seen(layers=80, heads=128, samples=150))
    data = chart_data(read_watched([run]))["runs"][0]
    assert (
        sum(len(line) for lines in data["lines"].values() for line in lines)
        <= MAX_LINES
    )
    assert (
        sum(len(row) for rows in data["last"]["fields"].values() for row in rows)
        <= MAX_CELLS
    )
    assert len(page(run, tmp_path).encode()) < 2_000_000


def test_thinning_keeps_the_peak(tmp_path):
    logits = [1.0] * 3000
    logits[1234] = 77.0
    run = exact(tmp_path / "r", list(range(3000)), max_logit=logits)
    data = chart_data(read_watched([run]))["runs"][0]
    assert len(data["step"]) <= 300
    assert data["values"]["max_logit"][data["step"].index(1234)] == 77


def test_several_runs_have_a_table_and_names_that_differ(tmp_path):
    runs = [
        make_watch(tmp_path / "a" / "watch", SMALL),
        make_watch(tmp_path / "b" / "watch", SMALL),
    ]
    html = page(runs, tmp_path)
    assert "2 watched runs of GPT2LMHeadModel" in html
    assert 'id="section-compared"' in html
    assert 'data-chart="runs"' in html
    assert len({run.name for run in read_watched(runs)}) == 2


def test_watched_runs_and_studies_do_not_share_a_page(tmp_path):
    watched, run = (
        make_watch(tmp_path / "watch", SMALL),
        make_run(tmp_path / "run", Made()),
    )
    assert [is_watched(path) for path in (watched, run, tmp_path / "nowhere")] == [
        True,
        False,
        False,
    ]
    with pytest.raises(RunDirectoryError, match="create a page of each kind"):
        qkeel.report.write([watched, run], tmp_path / "r.html")


def test_damaged_files_are_named(tmp_path):
    run = make_watch(tmp_path / "run", SMALL)
    (run / "heads.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"heads.json has no fields"):
        qkeel.report.write(run, tmp_path / "r.html")
    other = make_watch(tmp_path / "other", SMALL)
    lines = (other / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (other / "metrics.jsonl").write_bytes(
        b"".join([*lines[:4], lines[4].replace(b"{", b"[", 1), *lines[5:]])
    )
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line 5 "):
        qkeel.report.write(other, tmp_path / "r.html")


def test_a_notice_that_is_over_says_until_when(tmp_path):
    run = make_watch(tmp_path / "run", dataclasses.replace(SMALL, alarms=1))
    (raised,) = read_watched([run])[0].alarms
    html = page(run, tmp_path)
    assert f"since step {raised['step']:,}" in html
    assert unescape(html).count(raised["remedy"]) == 1
    event = {"step": 12_345, "event": "notice over", "rule": raised["rule"], "text": ""}
    append_line(run / "events.jsonl", event)
    html = page(run, tmp_path)
    assert f"from step {raised['step']:,}, and no longer at step 12,345" in html
    assert "Noted while watching" not in html


@pytest.mark.parametrize(
    "name", ["heads.json", "heads.f32", "metrics.jsonl", "events.jsonl", "env.json"]
)
def test_a_file_that_a_finished_run_has_lost_is_named(tmp_path, name):
    run = make_watch(tmp_path / "run", SMALL)
    (run / "env.json").write_text("{}")
    RunDirectory(run).finish({})
    qkeel.report.write(run, tmp_path / "r.html")
    (run / name).unlink()
    for read in (
        lambda: qkeel.report.write(run, tmp_path / "r.html"),
        lambda: check(run),
    ):
        with pytest.raises(RunDirectoryError, match=re.escape(name)):
            read()


def test_every_text_is_escaped(tmp_path):
    html = page(
        make_watch(
            tmp_path / "run", Seen(layers=2, heads=2, samples=3, model="</script><b>M")
        ),
        tmp_path,
    )
    assert "<b>M" not in html


def test_layer_names_lose_what_all_share():
    assert short_names(["model.layers.0.self_attn", "model.layers.11.self_attn"]) == [
        "0",
        "11",
    ]
    assert short_names(["encoder.0.attn", "decoder.0.attn"]) == ["encoder", "decoder"]
    assert short_names(["attn"]) == ["attn"]
    assert short_names(["h.0", "h.0#2"]) == ["0", "0#2"]
    assert short_names(["a", "a"]) == ["a", "a"]
