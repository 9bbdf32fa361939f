"""Every number of a page's tables and charts is that of the records, computed here once more; figures show the same."""

import dataclasses
import re
import sys
from html import unescape
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from synthetic_study import LRS, TABLE, grid, make_study
from synthetic_watch import Seen, make_watch

import qkeel.report
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.monitor.sinks import load
from qkeel.records import LINEAR, RunDirectory, append_line, read_json, write_json
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
    titles = {"max logit": "max_logit", "entropy": "entropy", "min logit": "min_logit"}
    places = {titles[x.lower()]: i for i, x in enumerate(head) if x.lower() in titles}
    assert {"max_logit", "entropy", "min_logit"} <= {*places}
    assert len(rows) == 3
    for layer, (_, shown, keys) in enumerate(rows):
        for name, place in places.items():
            values = heads[name][-1][layer]
            assert keys[place - 1] == near(float(FOLDS[name](values)))
            finder = {"max_logit": np.nanargmax, "min_logit": np.nanargmin}.get(name)
            told = "" if finder is None else f"head {finder(values)}"
            assert shown[place - 1].endswith(told)
            assert ("head" in shown[place - 1]) == (finder is not None)
    about = facts(html)
    assert about["parameters"] == "124,439,808"
    assert about["optimizer"] == "AdamW"
    assert about["qkeel"] == "0.1.0"
    assert about["command"] == "python train.py --config small.toml"
    assert not {"sites", "missed", "fields", "kind"} & {*about}


def test_layers_of_another_type_and_without_logits_are_named(tmp_path):
    path = make_watch(tmp_path / "run", SEEN)
    config = read_json(path / "config.json")
    config["sites"][1]["type"] = "window"
    write_json(path / "config.json", {**config, LINEAR: ["mixer"]})
    html = page(path, tmp_path)
    head, rows = table(html, "layers")
    assert head[:2] == ["Layer", "Type"]
    assert [shown[0] for _, shown, _ in rows] == ["", "window", "", LINEAR]
    assert (rows[3][0], {*rows[3][1][1:]}) == ("mixer", {"–"})
    assert "for which nothing is measured: mixer." in plain(html)


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
    (drawn,) = data["runs"]
    recorded, steps = load(path), [*range(0, 120, 10)]
    assert drawn["step"] == steps
    for name in ("max_logit", "entropy", "train_loss", "lr"):
        expected = [float(f"{x:.4g}") for x in recorded.steps[name]]
        assert drawn["values"][name] == expected
    for name, fold in FOLDS.items():
        values = recorded.history.heads[name]
        lines = [[float(fold(x)) for x in values[:, layer]] for layer in range(3)]
        if name in drawn["lines"]:
            ours = np.array(drawn["lines"][name])
            assert ours == pytest.approx(np.array(lines), rel=5e-4, nan_ok=True)
        shown = np.array(drawn["last"]["fields"][name], dtype=float)
        assert shown == pytest.approx(values[-1], rel=1e-2, nan_ok=True)
    assert {"max_logit", "entropy", "query_norm", "key_norm"} <= {*drawn["lines"]}
    last = recorded.history.heads["max_logit"][-1]
    place = np.unravel_index(np.nanargmax(last), last.shape)
    assert [*drawn["leader"].values()] == [int(x) for x in place]
    assert drawn["last"]["step"] == 110
    assert drawn["eval"]["step"] == [100]
    expected = float(recorded.eval_steps["max_logit"][-1])
    assert drawn["eval"]["max_logit"] == [float(f"{expected:.4g}")]
    assert [(x["step"], x["layer"], x["head"]) for x in drawn["alarms"]] == [
        (40, 1, 5),
        (40, 1, 5),
    ]
    assert {x["severity"] for x in drawn["alarms"]} == {"notice", "alarm"}
    assert drawn["interventions"] == [
        {
            "step": 50,
            "label": "clip, \N{MINUS SIGN}norm",
            "text": "step 50, a: clip\nstep 50, b: clip\nstep 50, b: release",
        }
    ]
    unit = data["fields"]["max_logit"]["unit"]
    assert unit == "nats"


def test_the_table_and_charts_of_a_study_have_means_gains_and_curves(tmp_path):
    remedies = ("none", "qk_norm")
    path = make_study(tmp_path / "s", grid(remedies, (0.01, 0.1)))
    for folder in (path / "runs").iterdir():
        env = read_json(folder / "env.json")
        env |= {"counted_bigrams": 3.5, "command": f"qkeel run {folder.name}"}
        env["torch"] = folder.name  # more versions than are listed
        write_json(folder / "env.json", env)
    chosen = [
        {"remedy": "none", "lr": 0.1, "border": "highest", "role": "grid"},
        {"remedy": "qk_norm", "lr": 0.01, "border": "", "role": "mha"},
    ]
    about = {**read_json(path / "study.json"), "tuned": chosen}
    write_json(path / "study.json", about)
    html, study = page(path, tmp_path), read_study(path)
    _, rows = table(html, "table")
    made = {
        (remedy, lr): TABLE[remedy][LRS.index(lr)]
        for remedy in remedies
        for lr in (0.01, 0.1)
    }
    assert len(rows) == len(made)
    for (remedy, lr), (name, shown, keys) in zip(made, rows, strict=True):
        logit, entropy, loss = made[remedy, lr]
        gain = made["none", lr][2] - loss
        collapsed = 2 if entropy < 0.1 else 0
        assert name == remedy
        assert keys == near(
            [lr, loss, gain if remedy != "none" else np.inf, collapsed, 1.1 * logit]
        )
        assert shown[3] == f"{collapsed} of 2"
        spread = 0.004 * (1 + 2 * (lr > 0.05))
        assert shown[1].endswith(f"{loss - spread:.3f} to {loss + spread:.3f}")
    data = study_page.chart_data(study)
    assert (data["start"], data["counted"], data["alarm"]) == (5.553, 3.5, 100)
    assert data["unit"] == "nats/byte"
    for (i, lr, seed, loss, logit, collapsed), run in zip(
        data["losses"], study.finished, strict=True
    ):
        row = run.row
        assert (remedies[i], lr, seed) == (run.remedy, run.lr, run.seed)
        assert (loss, logit) == near((row["val_loss"], row["max_logit"]))
        assert collapsed == row["collapsed"]
    for curves, run in zip(data["runs"], study.runs, strict=True):
        records = RunDirectory(run.path).metrics()
        assert curves["step"] == [x["step"] for x in records]
        for name in ("max_logit", "entropy", "train_loss"):
            ours = [np.nan if x is None else x for x in curves[name]]
            truth = [np.nan if x[name] is None else x[name] for x in records]
            assert ours == near(truth)
        held_out = [(x["step"], x["val_loss"]) for x in records if x["val_loss"]]
        assert np.array(curves["val_loss"]) == near(np.array(held_out))
    about = facts(html)
    assert about["Parameters"] == "131,456"
    rates = "none 0.1, the highest of the grid mha: qk_norm 0.01"
    assert about["Rates, chosen on other seeds"] == rates
    assert about["Corpus"] == "stdlib"
    assert (
        about["Optimizer"] == "name adamw, schedule constant, warmup 0.1, grad_clip 1.0"
    )
    assert "These runs differ in torch" in plain(html)
    assert html.count("qkeel study lr --lrs 0.01 0.03 0.1") == 1


def test_long_courses_of_evaluations_are_thinned(tmp_path):
    path = make_watch(tmp_path / "run", dataclasses.replace(SEEN, samples=2))
    (run,) = read_watched([path])
    many = [{"step": i, "val_loss": float(i)} for i in range(3 * MAX_RECORDS)]
    run = dataclasses.replace(run, eval_records=many)
    drawn = watch_page.chart_data([run])["runs"][0]["eval"]
    assert drawn["step"] == drawn["val_loss"] == [*range(0, 3 * MAX_RECORDS, 3)]


@pytest.fixture
def axes(monkeypatch):
    """Draws on a stand-in of matplotlib's axes, which notes the calls."""
    library = ModuleType("matplotlib")
    library.colormaps = {"viridis": lambda shades: [*shades]}  # type: ignore[attr-defined]
    library.colors = MagicMock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", library)

    def drawn(drawings):
        found = {}
        for name, draw in drawings:
            found[name] = MagicMock()
            draw(found[name])
        return found

    return drawn


def lines(ax):
    """Abscissas, ordinates and label of each line."""
    calls = ax.plot.call_args_list
    return [
        ([*x], [*y], call.kwargs.get("label")) for call in calls for x, y in [call.args]
    ]


def test_figures_of_a_study_show_means_ranges_courses_and_gains(tmp_path, axes):
    study = read_study(
        make_study(tmp_path / "s", grid(("none", "qk_norm"), (0.01, 0.1)))
    )
    drawn = axes(figures._of_study(study))
    assert [*drawn] == [
        "val_loss_by_lr",
        "max_logit_by_lr",
        "max_logit_lr_0.01",
        "max_logit_lr_0.1",
        "gains",
    ]
    losses = drawn["val_loss_by_lr"]
    for i, (remedy, (rates, means, label)) in enumerate(
        zip(("none", "qk_norm"), lines(losses), strict=True)
    ):
        expected = [TABLE[remedy][j][2] for j in (0, 2)]
        assert (rates, label) == ([0.01, 0.1], remedy)
        assert means == near(expected)
        ends = losses.fill_between.call_args_list[i].args[1:]
        spread = np.array([0.004, 0.012])
        assert np.array(ends) == near(np.array([expected - spread, expected + spread]))
    for name, ax in drawn.items():
        logarithmic = [call.args for call in ax.set_xscale.call_args_list]
        assert logarithmic == [("log",)] * name.endswith("by_lr")
        scaled = [call.args for call in ax.set_yscale.call_args_list]
        assert scaled == [("log",)] * name.startswith("max_logit")
        assert ax.legend.called == (name != "gains")
        alarm = [call.args for call in ax.axhline.call_args_list]
        assert alarm == [(ALARM_THRESHOLD,)] * ("lr_" in name)
    courses = lines(drawn["max_logit_lr_0.1"])
    assert [label for *_, label in courses] == ["none", "", "qk_norm", ""]
    runs = [run for run in study.runs if run.lr == 0.1]
    for (steps, logits, _), run in zip(courses, runs, strict=True):
        assert steps == [x["step"] for x in run.metrics]
        assert logits == near([x["max_logit"] for x in run.metrics])
    gains = drawn["gains"]
    # An interval and a dot of each rate, from the bottom up.
    dots = [(x[0], y[0]) for x, y, _ in lines(gains) if len(x) == 1]
    expected = [TABLE["none"][i][2] - TABLE["qk_norm"][i][2] for i in (2, 0)]
    assert dots == [near((x, y)) for y, x in enumerate(expected)]
    labels = gains.set_yticks.call_args.args
    assert [*labels[0]] == [0, 1]
    assert labels[1] == ["qk_norm, LR 0.1", "qk_norm, LR 0.01"]


def test_figures_of_a_watched_run_show_its_layers(tmp_path, axes):
    path = make_watch(tmp_path / "run", SEEN)
    drawn = axes(figures._of_watched(read_watched([path])[0]))
    assert [*drawn] == ["max_logit", "entropy", "query_norm", "key_norm", "heads"]
    heads = load(path).history.heads
    for name, ax in drawn.items():
        if name == "heads":
            continue
        shown = lines(ax)
        assert [label for *_, label in shown] == ["layer 0", "layer 1", "layer 2"]
        for layer, (steps, values, _) in enumerate(shown):
            assert steps == [*range(0, 120, 10)]
            folded = [float(FOLDS[name](x)) for x in heads[name][:, layer]]
            assert values == near(folded)
        assert ax.axhline.called == (name == "max_logit")


@pytest.mark.parametrize(
    ("width", "good"), [(0.5, True), (50, True), (0.49, False), (50.1, False)]
)
def test_a_figure_is_between_half_an_inch_and_fifty_wide(
    width, good, tmp_path, monkeypatch
):
    made, library = [], ModuleType("matplotlib")
    library.rc_context = MagicMock()  # type: ignore[attr-defined]
    figure = SimpleNamespace(Figure=lambda **how: made.append(how) or MagicMock())
    for name, module in {
        "": library,
        ".figure": figure,
        ".colors": MagicMock(),
    }.items():
        monkeypatch.setitem(sys.modules, f"matplotlib{name}", module)
    monkeypatch.setattr(figures, "_of_watched", lambda run: [("one", lambda ax: None)])
    path = make_watch(tmp_path / "run", dataclasses.replace(SEEN, samples=1))
    ask = lambda: figures.figures(path, tmp_path / "out", width=width, formats=["png"])  # noqa: E731
    if good:
        assert ask() == [tmp_path / "out" / "one.png"]
        assert made[0]["figsize"] == pytest.approx((width, 0.68 * width))
    else:
        with pytest.raises(qkeel.errors.InvalidValueError, match=r"0\.5 to 50 inches"):
            ask()
