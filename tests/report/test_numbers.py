"""Every number of a page's tables and charts is that of the records, computed here once more; figures show the same."""

import dataclasses
import itertools
import re
import sys
from html import unescape
from unittest.mock import MagicMock

import numpy as np
import pytest
from synthetic_study import LRS, TABLE, grid, make_study
from synthetic_watch import Seen, make_watch

import qkeel.report
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.monitor.sinks import load
from qkeel.records import RunDirectory, append_line, read_json, write_json
from qkeel.report import figures, study_page, watch_page
from qkeel.report.html import MAX_RECORDS
from qkeel.report.study_runs import read_study
from qkeel.report.watched_runs import read_watched

SEEN = Seen(layers=3, heads=4, samples=12)
# How a head's value becomes a layer's.
FOLDS = {"max_logit": np.nanmax, "min_logit": np.nanmin, "entropy": np.nanmean}
FOLDS |= {"query_norm": np.nanmean, "key_norm": np.nanmean}


def page(paths, tmp_path):
    return qkeel.report.write(paths, tmp_path / "r.html").read_text(encoding="utf-8")


def plain(html):
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def table(html, section):
    """The headings of a section's table, and of each row its name, cells, and what the cells are sorted by."""
    part = html[html.index(f'id="section-{section}"') :]
    part = part[: part.index("</table>")]
    head = [plain(x) for x in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', part)]
    rows = []
    for name, cells in re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', part):
        keys = [float(x) for x in re.findall(r'data-sort="([^"]*)"', cells)]
        shown = [plain(x) for x in re.findall(r"<td[^>]*>(.*?)</td>", cells)]
        rows.append((plain(name), shown, keys))
    return head, rows


def facts(html):
    """The names of a page's facts with their values."""
    part = html[html.index('<dl class="facts">') :]
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", part[: part.index("</dl>")])
    return {plain(name): plain(value) for name, value in pairs}


def near(values):
    return pytest.approx(values, rel=1e-4, nan_ok=True)


def test_the_table_of_several_runs_has_their_ends_and_peaks(tmp_path):
    quiet = dataclasses.replace(SEEN, alarms=0, loss=False, seed=1, complete=False)
    paths = [
        make_watch(tmp_path / name, seen) for name, seen in (("a", SEEN), ("b", quiet))
    ]
    html = page(paths, tmp_path)
    _, rows = table(html, "compared")
    for path, (name, _, keys) in zip(paths, rows, strict=True):
        steps, alarms = load(path).steps, len(RunDirectory(path).events())
        last = [float(steps[x][-1]) for x in ("max_logit", "entropy")]
        loss = float(steps["train_loss"][-1]) if path.name == "a" else np.inf
        first = 40.0 if alarms else np.inf
        peak = float(max(steps["max_logit"]))
        expected = [110.0, alarms, first, last[0], peak, last[1], loss]
        assert name.startswith(path.name)
        assert keys == near(expected)
    assert "a (complete" not in html
    for run in read_watched(paths):
        assert f"{run.name}: {watch_page.verdict(run)[1]}" in plain(html)
        assert f"{run.name}: 12 samples" in plain(html)


def test_the_table_of_layers_has_the_last_record_folded_over_its_heads(tmp_path):
    path = make_watch(tmp_path / "run", SEEN)
    heads = load(path).history.heads
    html = page(path, tmp_path)
    head, rows = table(html, "layers")
    columns = [title.lower().replace(" ", "_") for title in head]
    assert len(rows) == 3
    for layer, (_, _, keys) in enumerate(rows):
        for name in ("max_logit", "min_logit", "entropy"):
            folded = float(FOLDS[name](heads[name][-1][layer]))
            assert keys[columns.index(name) - 1] == near(folded)
    about = facts(html)
    expected = {
        "parameters": "124,439,808",
        "optimizer": "AdamW",
        "qkeel": "0.1.0",
        "command": "python train.py --config small.toml",
    }
    assert expected.items() <= about.items()
    assert not {"sites", "missed", "fields", "kind"} & {*about}


def test_layers_of_another_type_are_named(tmp_path):
    path = make_watch(tmp_path / "run", SEEN)
    config = read_json(path / "config.json")
    config["sites"][1]["type"] = "window"
    write_json(path / "config.json", config)
    html = page(path, tmp_path)
    head, rows = table(html, "layers")
    assert head[:2] == ["Layer", "Type"]
    assert [shown[0] for _, shown, _ in rows] == ["", "window", ""]


def asked(ax, name):
    """The first argument of each call of a method of axes."""
    return [call.args[0] for call in getattr(ax, name).call_args_list]


def test_the_charts_of_a_watched_run_have_its_records_alarms_and_evaluations(tmp_path):
    path = make_watch(tmp_path / "run", SEEN)
    for event in (
        {"action": "clip", "text": "step 50, a: clip"},
        {"action": "clip", "text": "step 50, b: clip"},
        {"action": "norm", "release": True, "text": "step 50, b: release"},
        {"action": "watch_closer", "text": "no"},
    ):
        event = {"event": "decision", "step": 50, "remedy": "x", **event}
        append_line(path / "events.jsonl", event)
    (run,) = read_watched([path])
    data = watch_page.chart_data([run])
    assert data["alarm"] == ALARM_THRESHOLD
    assert data["fields"]["max_logit"]["unit"] == "nats"
    (drawn,) = data["runs"]
    recorded = load(path)
    assert drawn["step"] == [*range(0, 120, 10)]
    for name in ("max_logit", "entropy", "train_loss", "lr"):
        expected = [float(f"{x:.4g}") for x in recorded.steps[name]]
        assert drawn["values"][name] == expected
    assert {"max_logit", "entropy", "query_norm", "key_norm"} <= {*drawn["lines"]}
    for name, fold in FOLDS.items():
        heads = recorded.history.heads[name]
        shown = np.array(drawn["last"]["fields"][name], dtype=float)
        assert shown == pytest.approx(heads[-1], rel=1e-2, nan_ok=True)
        if name in drawn["lines"]:
            folded = np.array([[fold(x) for x in step] for step in heads]).T
            ours = np.array(drawn["lines"][name])
            assert ours == pytest.approx(folded, rel=5e-4, nan_ok=True)
    last = recorded.history.heads["max_logit"][-1]
    leader = np.unravel_index(np.nanargmax(last), last.shape)
    assert tuple(drawn["leader"].values()) == leader
    assert drawn["last"]["step"] == 110
    assert drawn["eval"]["step"] == [100]
    expected = float(recorded.eval_steps["max_logit"][-1])
    assert drawn["eval"]["max_logit"] == [float(f"{expected:.4g}")]
    alarms = [(x["step"], x["layer"], x["head"]) for x in drawn["alarms"]]
    assert alarms == [(40, 1, 5)] * 2
    assert {x["severity"] for x in drawn["alarms"]} == {"notice", "alarm"}
    text = "step 50, a: clip\nstep 50, b: clip\nstep 50, b: release"
    label = "clip, \N{MINUS SIGN}norm"
    assert drawn["interventions"] == [{"step": 50, "label": label, "text": text}]
    many = [{"step": i, "val_loss": float(i)} for i in range(3 * MAX_RECORDS)]
    long = dataclasses.replace(run, eval_records=many)
    course = watch_page.chart_data([long])["runs"][0]["eval"]
    assert course["step"] == course["val_loss"] == [*range(0, 3 * MAX_RECORDS, 3)]


def test_the_table_and_charts_of_a_study_have_means_gains_and_curves(tmp_path):
    remedies, rates = ("none", "qk_norm"), (0.01, 0.1)
    path = make_study(tmp_path / "s", grid(remedies, rates))
    for folder in (path / "runs").iterdir():
        env = read_json(folder / "env.json")
        env["torch"] = folder.name
        write_json(folder / "env.json", env)
    html, study = page(path, tmp_path), read_study(path)
    _, rows = table(html, "table")
    arms = itertools.product(remedies, rates)
    for (remedy, lr), (name, shown, keys) in zip(arms, rows, strict=True):
        logit, entropy, loss = TABLE[remedy][LRS.index(lr)]
        gain = TABLE["none"][LRS.index(lr)][2] - loss
        collapsed, spread = 2 * (entropy < 0.1), 0.004 if lr < 0.05 else 0.012
        assert name == remedy
        gain = np.inf if remedy == "none" else gain
        assert keys == near([lr, loss, gain, collapsed, 1.1 * logit])
        assert shown[3] == f"{collapsed} of 2"
        assert shown[1].endswith(f"{loss - spread:.3f} to {loss + spread:.3f}")
    data = study_page.chart_data(study)
    assert (data["start"], data["alarm"]) == (5.553, 100)
    assert data["unit"] == "nats/byte"
    for (i, lr, seed, loss, logit, collapsed), run in zip(
        data["losses"], study.finished, strict=True
    ):
        assert (remedies[i], lr, seed) == (run.remedy, run.lr, run.seed)
        assert (loss, logit) == near((run.row["val_loss"], run.row["max_logit"]))
        assert collapsed == run.row["collapsed"]
    for curves, run in zip(data["runs"], study.runs, strict=True):
        records = RunDirectory(run.path).metrics()
        for name in ("step", "max_logit", "entropy", "train_loss"):
            ours, truth = curves[name], [x[name] for x in records]
            assert np.array(ours, float) == near(np.array(truth, float))
        held_out = [(x["step"], x["val_loss"]) for x in records if x["val_loss"]]
        assert np.array(curves["val_loss"]) == near(np.array(held_out))
    about = facts(html)
    expected = {
        "Parameters": "131,456",
        "Corpus": "stdlib",
        "Optimizer": "name adamw, schedule constant, warmup 0.1, grad_clip 1.0",
    }
    assert expected.items() <= about.items()
    assert "These runs differ in torch" in plain(html)
    assert html.count("qkeel study lr --lrs 0.01 0.03 0.1") == 1


@pytest.fixture
def axes(monkeypatch):
    """Draws on a stand-in of matplotlib's axes, which notes the calls."""
    library = MagicMock(colormaps={"viridis": lambda shades: [*shades]})
    monkeypatch.setitem(sys.modules, "matplotlib", library)

    def drawn(drawings):
        noted = {}
        for name, draw in drawings:
            noted[name] = MagicMock()
            draw(noted[name])
        return noted

    return drawn


def lines(ax):
    """Abscissas, ordinates and label of each line."""
    calls = [(call.args, call.kwargs.get("label")) for call in ax.plot.call_args_list]
    return [([*x], [*y], label) for (x, y), label in calls]


def test_figures_of_a_study_show_means_ranges_courses_and_gains(tmp_path, axes):
    runs = grid(("none", "qk_norm"), (0.01, 0.1))
    study = read_study(make_study(tmp_path / "s", runs))
    drawn = axes(figures._of_study(study))
    courses = ["max_logit_lr_0.01", "max_logit_lr_0.1"]
    assert [*drawn] == ["val_loss_by_lr", "max_logit_by_lr", *courses, "gains"]
    one_rate = make_study(tmp_path / "one", grid(("none", "qk_norm"), (0.1,)))
    names = [*axes(figures._of_study(read_study(one_rate)))]
    assert names == ["max_logit_lr_0.1", "gains"]
    losses = drawn["val_loss_by_lr"]
    ranges = [call.args[1:] for call in losses.fill_between.call_args_list]
    spread = np.array([0.004, 0.012])
    for remedy, line, ends in zip(
        ("none", "qk_norm"), lines(losses), ranges, strict=True
    ):
        means = [TABLE[remedy][i][2] for i in (0, 2)]
        assert line == ([0.01, 0.1], near(means), remedy)
        assert np.array(ends) == near(np.array([means - spread, means + spread]))
    for name, ax in drawn.items():
        assert asked(ax, "set_xscale") == ["log"] * name.endswith("by_lr")
        assert asked(ax, "set_yscale") == ["log"] * name.startswith("max_logit")
        assert asked(ax, "axhline") == [ALARM_THRESHOLD] * ("lr_" in name)
        assert ax.legend.called == (name != "gains")
    labels = ("none", "", "qk_norm", "")
    at_rate = [run for run in study.runs if run.lr == 0.1]
    for run, label, line in zip(at_rate, labels, lines(drawn[courses[1]]), strict=True):
        logits = [x["max_logit"] for x in run.metrics]
        assert line == ([x["step"] for x in run.metrics], near(logits), label)
    gains = drawn["gains"]
    # An interval and a dot of each rate, from the bottom up.
    dots = [(x[0], y[0]) for x, y, _ in lines(gains) if len(x) == 1]
    expected = [TABLE["none"][i][2] - TABLE["qk_norm"][i][2] for i in (2, 0)]
    assert dots == [near((x, y)) for y, x in enumerate(expected)]
    at, labels = gains.set_yticks.call_args.args
    assert [*at] == [0, 1]
    assert labels == ["qk_norm, LR 0.1", "qk_norm, LR 0.01"]


def test_figures_of_a_watched_run_show_its_layers(tmp_path, axes):
    path = make_watch(tmp_path / "run", SEEN)
    drawn = axes(figures._of_watched(read_watched([path])[0]))
    names = ["max_logit", "entropy", "query_norm", "key_norm"]
    assert [*drawn] == [*names, "heads"]
    for name in names:
        heads = load(path).history.heads[name]
        folded = np.array([[FOLDS[name](x) for x in step] for step in heads]).T
        for layer, line in enumerate(lines(drawn[name])):
            values = near([float(x) for x in folded[layer]])
            assert line == ([*range(0, 120, 10)], values, f"layer {layer}")
        assert len(lines(drawn[name])) == len(folded) == 3
        assert drawn[name].axhline.called == (name == "max_logit")


def test_a_figure_is_between_half_an_inch_and_fifty_wide(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    for width in (0.5, 50):
        figures.check_settings(["png"], width)
    for width in (0.49, 50.1):
        with pytest.raises(qkeel.errors.InvalidValueError, match=r"0\.5 to 50 inches"):
            figures.check_settings(["png"], width)
