"""The page in a real browser: it draws every chart, logs no error, and fits a phone."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from html import escape, unescape
from pathlib import Path

import pytest
from synthetic_study import grid, make_run, make_study
from synthetic_watch import Seen, make_watch

import qkeel.report

PROGRAMS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, PROGRAMS), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",  # the page's time passes as fast as it can
    "--enable-logging=stderr",
    "--v=0",
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH"),
]


def browse(page, script="", *flags):
    """The HTML of a page after a script has run on it; nothing may be written to the console."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "page.html")
        text = page.read_text(encoding="utf-8")
        later = (
            f'<script>addEventListener("load", () => {{ {script} }});</script></body>'
        )
        copy.write_text(text.replace("</body>", later), encoding="utf-8")
        profile = f"--user-data-dir={folder}/profile"
        command = [str(CHROMIUM), *FLAGS, profile, "--dump-dom", *flags, copy.as_uri()]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def browse_all(pages, width=1280, *flags):
    """The HTML of several pages, which are shown in frames of one: most of a browser's time is its start."""
    shape = f"width={width} height=1600 frameborder=0"
    frames = "".join(
        f'<iframe id="{name}" {shape} srcdoc="{escape(path.read_text(encoding="utf-8"))}"></iframe>'
        for name, path in pages.items()
    )
    script = """
      for (const frame of document.querySelectorAll("iframe")) {
        const { innerWidth, document: { documentElement, body } } = frame.contentWindow;
        const { backgroundColor } = frame.contentWindow.getComputedStyle(body);
        body.dataset.sizes = JSON.stringify([innerWidth, documentElement.scrollWidth, backgroundColor]);
        document.body.dataset[frame.id] = documentElement.outerHTML;
      }
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "frames.html")
        page.write_text(f"<!doctype html><body>{frames}</body>", encoding="utf-8")
        html = browse(page, script, *flags)
    return {name: told(html, name) for name in pages}


def told(html, name):
    """What a script has written to `document.body.dataset`."""
    found = re.search(f'data-{name}="([^"]*)"', html)
    assert found, name
    return unescape(found[1])


def chart(html, name):
    """The SVG of a chart."""
    begin = html.index(f'id="chart-{name}"')
    svg = html[html.index("<svg", begin) : html.index("</svg>", begin)]
    assert "NaN" not in svg, name
    return svg


def n_lines(svg):
    return len(re.findall(r'<path [^>]*d="M[^"]+L[^"]+"', svg))


PICK = """
  const pick = (where, value, at = 0) => {
    const select = document.querySelectorAll(`[data-controls="${where}"] select`)[at];
    select.value = value;
    select.dispatchEvent(new Event("change"));
  };
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    study = make_study(folder / "study", grid())
    return qkeel.report.write(study, folder / "report.html")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    return qkeel.report.write(make_watch(folder / "watch"), folder / "report.html")


DARK, LIGHT = 0, 1


@pytest.fixture(scope="module")
def views(demo, watched):
    """Pages as wide as a desk's window and a phone's, in both colours: what of, and how each was shown."""
    pages = {"demo": demo, "watched": watched}
    return {
        (width, scheme): browse_all(
            pages, width, f"--blink-settings=preferredColorScheme={scheme}"
        )
        for width, scheme in ((1280, LIGHT), (390, DARK))
    }


def test_every_chart_is_drawn(views):
    html = views[1280, LIGHT]["demo"]
    marks = {"loss": 6, "logits": 36, "entropy": 36, "train": 36}
    for name, least in marks.items():
        assert n_lines(chart(html, name)) >= least, name
    # A line, a range and dots per remedy.
    assert chart(html, "loss").count("aria-description=") >= 18
    assert "alarm 100" in chart(html, "logits")
    html = views[1280, LIGHT]["watched"]
    marks = {"growth": 13, "entropy": 13, "norms": 24, "loss": 1}
    for name, least in marks.items():
        assert n_lines(chart(html, name)) >= least, name
    # One layer has half the heads.
    assert chart(html, "map").count("<rect") == 12 * 12 - 6
    assert "layer 4 · head 5" in chart(html, "growth")


def test_a_page_fits_its_window_in_light_and_dark(views):
    papers = set()
    for (width, scheme), pages in views.items():
        for html in pages.values():
            window, content, paper = json.loads(told(html, "sizes"))
            assert [window, content] == [width, width]
            papers.add((scheme, paper))
    # One paper for each scheme, on both pages.
    assert len(papers) == len({paper for _, paper in papers}) == 2


SAVE = """
  const made = [], buttons = document.querySelectorAll("button.save");
  URL.createObjectURL = (blob) => { made.push(blob); return "#"; };
  for (const button of buttons) button.click();
  const tell = async () => {
    if (made.length < buttons.length) return setTimeout(tell, 50);
    const by = {"image/svg+xml": [], "image/png": [], "text/csv": []};
    for (const blob of made) by[blob.type].push(blob.type === "image/png" ? blob.size : await blob.text());
    document.body.dataset.saved = JSON.stringify(by);
  };
  tell();
"""


def test_a_chart_is_saved_as_svg_png_and_csv(demo):
    # Pictures are made in real time, so the page gets much of its own; on a busy machine more.
    html = ""
    for budget in (100_000, 1_000_000, 4_000_000):
        if "data-saved" not in html:
            html = browse(demo, SAVE, f"--virtual-time-budget={budget}")
    saved = json.loads(told(html, "saved"))
    assert [len(files) for files in saved.values()] == [4, 4, 4]
    assert min(saved["image/png"]) > 5_000
    for text in saved["image/svg+xml"]:
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"var\(--(series|ink)|currentColor", text)
    tables = [list(csv.DictReader(text.splitlines())) for text in saved["text/csv"]]
    assert all(tables)
    logits = next(rows for rows in tables if "max_logit" in rows[0])
    last = {row["remedy"]: float(row["max_logit"]) for row in logits}
    assert last["none"] > 50 * last["qk_norm"]


def test_scale_smoothing_lines_and_order_are_the_readers_choice(demo):
    script = f"""{PICK}
      const lines = () => document.querySelectorAll('#chart-logits [aria-description="none"] path').length;
      const before = document.getElementById("chart-logits").innerHTML;
      const told = document.body.dataset;
      told.each = lines();
      pick("logits-view", "mean", 1);
      told.mean = lines();
      pick("logits-view", "5", 2);
      pick("logits-view", "linear", 0);
      told.changed = before !== document.getElementById("chart-logits").innerHTML;
      for (const name of ["loss", "entropy", "train"]) pick(`${{name}}-view`, "log");
      const header = document.querySelector("#section-table thead button");
      header.click();
      told.first = document.querySelector("#section-table tbody th").textContent;
      header.click();
      told.last = document.querySelector("#section-table tbody th").textContent;
      const keys = '[data-legend="logits"] .key';
      document.querySelectorAll(keys)[1].click();
      told.pressed = document.querySelectorAll(`${{keys}}[aria-pressed="true"]`).length;
    """
    html = browse(demo, script)
    names = ("each", "mean", "changed", "first", "last", "pressed")
    assert [told(html, name) for name in names] == [
        "6",
        "3",
        "true",
        "lalr:tau=0.1",
        "softcap:cap=50",
        "1",
    ]
    for name in ("loss", "logits", "entropy", "train"):
        chart(html, name)


def test_more_remedies_than_colours_stay_distinguishable(tmp_path):
    runs = grid(("none", "qk_norm"), (0.01, 0.1), seeds=(0,))
    for i in range(18):
        runs += [dataclasses.replace(m, remedy=f"remedy{i}") for m in runs[2:4]]
    study = make_study(tmp_path / "study", runs)
    html = browse(qkeel.report.write(study, tmp_path / "page.html"))
    keys = html.split('data-legend="loss"')[1].split('id="chart-loss"')[0]
    table = html.split('id="section-table"')[1].split("</table>")[0]
    swatches = re.findall(r'class="swatch" data-series="(\d)" data-round="(\d)"', table)
    for looks in (re.findall(r"<svg.*?</svg>", keys, re.S), swatches):
        assert len(set(looks)) == 20


def test_pages_of_little_and_of_much_are_quiet(tmp_path):
    runs = grid(("none", "qk_norm"), (0.01, 0.1))
    failed = [dataclasses.replace(made, status="failed") for made in runs[:3]]
    tiny = Seen(samples=1, alarms=0, loss=False, layers=1, heads=1, complete=False)
    big = Seen(layers=80, heads=64, samples=20, complete=False)
    paths = {
        "empty": [make_study(tmp_path / "empty", [], absent=runs)],
        "failed": [make_study(tmp_path / "failed", [*failed, *runs[3:]])],
        "single": [make_run(tmp_path / "single", runs[0])],
        "tiny": [make_watch(tmp_path / "one", tiny)],
        "big": [make_watch(tmp_path / "big", big)],
    }
    shown = browse_all(
        {
            name: qkeel.report.write(path, tmp_path / f"{name}.html")
            for name, path in paths.items()
        }
    )
    assert "<svg" not in re.sub(r"<script.*?</script>", "", shown["empty"], flags=re.S)
    assert "L" in chart(shown["failed"], "logits")
    assert "L" in chart(shown["single"], "logits")
    assert chart(shown["tiny"], "map").count("<rect") == 1
    assert chart(shown["tiny"], "growth").count("<circle") >= 1
    assert chart(shown["big"], "map").count("<rect") == 80 * 64 - 32


def test_the_charts_follow_the_chosen_run_and_number(tmp_path):
    runs = [
        make_watch(tmp_path / "a", Seen(layers=3, heads=4)),
        make_watch(tmp_path / "b", Seen(layers=5, heads=2)),
    ]
    script = f"""{PICK}
      pick("run", "b");
      pick("map", "entropy");
      document.body.dataset.cells = document.querySelectorAll("#chart-map rect").length;
      document.body.dataset.scale = document.querySelector('[data-legend="map"]').textContent;
    """
    html = browse(qkeel.report.write(runs, tmp_path / "page.html"), script)
    assert told(html, "cells") == "9"
    assert "mean attention entropy" in told(html, "scale")
    assert "L" in chart(html, "runs")


def test_a_study_in_parts_is_drawn_one_part_at_a_time(tmp_path):
    runs = []
    for role, remedies in (
        ("mla, adamw", ("none", "qk_norm", "lalr:tau=0.1")),
        ("mha, muon", ("none", "qk_norm")),
    ):
        runs += [
            dataclasses.replace(made, role=role) for made in grid(remedies, lrs=(0.1,))
        ]
    study = make_study(tmp_path / "study", runs, name="mla")
    page = qkeel.report.write(study, tmp_path / "page.html")
    count = "document.querySelectorAll('[data-legend=\"loss\"] .key').length"
    script = f"""{PICK}
      document.body.dataset.first = {count};
      pick("part", "mha, muon");
      document.body.dataset.second = {count};
    """
    html = browse(page, script)
    assert (told(html, "first"), told(html, "second")) == ("3", "2")
    for name in ("loss", "logits", "entropy", "train"):
        chart(html, name)
