"""The page in a real browser: it draws every chart, logs no error, and fits a phone."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import struct
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import FLAGS, Chromium
from synthetic_study import drift, grid, make_run, make_study
from synthetic_watch import Seen, make_watch

import qkeel.report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
VIRTUAL = ("--virtual-time-budget=1500", "--enable-logging=stderr", "--v=0")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="needs chromium, chromium-browser or google-chrome on PATH",
    ),
]


def browse(page: Path | str, *flags: str) -> tuple[str, list[str]]:
    """What a browser of its own printed, whose time passes as fast as it can, and what the page's console said."""
    address = page if isinstance(page, str) else page.as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            str(CHROMIUM),
            *FLAGS,
            *VIRTUAL,
            f"--user-data-dir={profile}",
            *flags,
            address,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    made = Chromium(str(CHROMIUM), tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def dom(browser: Chromium) -> Callable[..., str]:
    """The HTML of a page after a script, in a tab that logs nothing."""

    def shown(page: Path, script: str = "", **size: Any) -> str:
        tab = browser.open(page.as_uri(), **size)
        if script:
            tab.run(f"(() => {{ {script} }})()")
        html = tab.html
        assert tab.console == []
        tab.close()
        return html

    return shown


def chart(html: str, name: str) -> str:
    """The SVG of a chart."""
    begin = html.index(f'id="chart-{name}"')
    return html[html.index("<svg", begin) : html.index("</svg>", begin)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    return qkeel.report.write(
        make_study(folder / "study", [*drift(), *grid()]), folder / "report.html"
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    return qkeel.report.write(make_watch(folder / "watch"), folder / "report.html")


def test_every_chart_is_drawn_without_a_word_on_the_console(
    demo: Path, dom: Callable[..., str]
):
    html = dom(demo)
    marks = {"drift": 2, "loss": 6, "logits": 36, "entropy": 36, "train": 36}
    for name, least in marks.items():
        svg = chart(html, name)
        paths = re.findall(r'<path [^>]*d="M[^"]+L[^"]+"', svg)
        assert len(paths) >= least, name
        assert "NaN" not in svg, name
    assert (
        chart(html, "loss").count("aria-description=") >= 18
    )  # a line, a range and dots per remedy
    assert "alarm 100" in chart(html, "drift")


@pytest.mark.parametrize("page", ["demo", "watched"])
def test_every_page_is_seen_in_light_and_dark_and_fits_a_phone(
    page: str, request: pytest.FixtureRequest, browser: Chromium
):
    address = request.getfixturevalue(page).as_uri()
    seen = {}
    for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
        tab = browser.open(address, width=width, height=1600, dark=dark)
        assert tab.run("[innerWidth, document.documentElement.scrollWidth]") == [
            width,
            width,
        ]
        charts = tab.run(
            "[...document.querySelectorAll('[data-chart]')].map((c) => c.querySelector('svg') !== null)"
        )
        assert charts
        assert all(charts)
        assert "NaN" not in tab.run(
            "[...document.querySelectorAll('.chart svg')].map((s) => s.outerHTML).join('')"
        )
        seen[width, dark] = tab.picture()
        assert len(seen[width, dark]) > 15_000
        assert tab.console == []
        tab.close()
    assert len(set(seen.values())) == 4


SAVED = """
  (async () => {
    const made = [];
    URL.createObjectURL = (blob) => { made.push(blob); return "#"; };
    const buttons = [...document.querySelectorAll("button.save")];
    for (const button of buttons) button.click();
    while (made.length < buttons.length) await new Promise((later) => setTimeout(later, 10));
    const by = {svg: [], png: [], csv: []};
    for (const blob of made) {
      const kind = {"image/svg+xml": "svg", "image/png": "png", "text/csv": "csv"}[blob.type];
      by[kind].push(kind === "png" ? [...new Uint8Array(await blob.arrayBuffer()).slice(0, 24)] : await blob.text());
    }
    return by;
  })()
"""


def test_a_chart_is_saved_as_svg_png_and_csv(
    demo: Path, watched: Path, browser: Chromium
):
    for page, charts in ((demo, 5), (watched, 6)):
        tab = browser.open(page.as_uri())
        saved = tab.run(SAVED)
        tab.close()
        assert [len(saved[kind]) for kind in ("svg", "png", "csv")] == [charts] * 3
        for text in saved["svg"]:
            root = ElementTree.fromstring(text)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert not re.search(r"var\(--(series|ink)|currentColor", text)
        for head in saved["png"]:
            width, height = struct.unpack(">II", bytes(head[16:]))
            assert bytes(head[:8]) == b"\x89PNG\r\n\x1a\n"
            assert width > 1000
            assert height > 400
        tables = [list(csv.DictReader(text.splitlines())) for text in saved["csv"]]
        assert all(tables), [text[:60] for text in saved["csv"]]
        if page == demo:
            longer = next(
                i for i, text in enumerate(saved["svg"]) if "The longer runs" in text
            )
            assert "qk_norm" in saved["svg"][longer]
            rows = next(rows for rows in tables if rows[-1].get("step") == "800")
            drawn = {
                name: [row for row in rows if row["remedy"] == name]
                for name in ("none", "qk_norm")
            }
            assert drawn["none"][-1]["step"] == "800"
            assert float(drawn["none"][-1]["max_logit"]) > 50 * float(
                drawn["qk_norm"][-1]["max_logit"]
            )


def test_scale_smoothing_and_lines_are_the_readers_choice(
    demo: Path, dom: Callable[..., str]
):
    script = """
      const pick = (chart, at, value) => {
        const select = document.querySelectorAll(`[data-controls="${chart}-view"] select`)[at];
        select.value = value;
        select.dispatchEvent(new Event("change"));
      };
      const lines = () => document.querySelectorAll('#chart-logits [aria-description="none"] path').length;
      const before = document.getElementById("chart-logits").innerHTML;
      document.body.dataset.each = lines();
      pick("logits", 1, "mean");
      document.body.dataset.mean = lines();
      pick("logits", 2, "5");
      pick("logits", 0, "linear");
      document.body.dataset.changed = before !== document.getElementById("chart-logits").innerHTML;
      for (const chart of ["drift", "loss", "entropy", "train"]) pick(chart, 0, chart === "drift" ? "linear" : "log");
    """
    html = dom(demo, script)
    assert 'data-each="6"' in html
    assert 'data-mean="3"' in html
    assert 'data-changed="true"' in html
    for name in ("drift", "loss", "logits", "entropy", "train"):
        assert "NaN" not in chart(html, name), name


def test_more_remedies_than_colours_stay_distinguishable(
    tmp_path: Path, dom: Callable[..., str]
):
    base = grid(("none", "qk_norm"), (0.01, 0.1), seeds=(0,))
    more = [
        dataclasses.replace(m, remedy=f"remedy{i}")
        for i in range(18)
        for m in base
        if m.remedy == "qk_norm"
    ]
    html = dom(
        qkeel.report.write(
            make_study(tmp_path / "study", base + more), tmp_path / "page.html"
        )
    )
    keys = html.split('data-legend="loss"')[1].split('id="chart-loss"')[0]
    looks = re.findall(r"<svg.*?</svg>", keys, re.S)
    assert len(looks) == 20
    assert len(set(looks)) == 20
    swatches = re.findall(
        r'class="swatch" data-series="(\d)" data-round="(\d)"',
        html.split('id="section-table"')[1].split("</table>")[0],
    )
    assert len(set(swatches)) == 20


def test_tables_sort_and_a_line_can_be_singled_out(demo: Path, dom: Callable[..., str]):
    script = """
      const header = document.querySelector("#section-table thead button");
      header.click();
      document.body.dataset.first = document.querySelector("#section-table tbody th").textContent;
      header.click();
      document.body.dataset.last = document.querySelector("#section-table tbody th").textContent;
      const keys = '[data-legend="logits"] .key';
      document.querySelectorAll(keys)[1].click();
      document.body.dataset.pressed = document.querySelectorAll(`${keys}[aria-pressed="true"]`).length;
    """
    html = dom(demo, script)
    assert 'data-first="lalr:tau=0.1"' in html
    assert 'data-last="softcap:cap=50"' in html
    assert 'data-pressed="1"' in html


def test_empty_failed_and_single_pages_are_quiet(
    tmp_path: Path, dom: Callable[..., str]
):
    runs = grid(("none", "qk_norm"), (0.01, 0.1))
    failed = [dataclasses.replace(made, status="failed") for made in runs[:3]]
    pages = {
        "empty": make_study(tmp_path / "empty", [], absent=runs),
        "failed": make_study(tmp_path / "failed", [*failed, *runs[3:]]),
        "single": make_run(tmp_path / "single", runs[0]),
    }
    shown = {
        name: dom(qkeel.report.write(path, tmp_path / f"{name}.html"))
        for name, path in pages.items()
    }
    assert "<svg" not in re.sub(r"<script.*?</script>", "", shown["empty"], flags=re.S)
    assert "L" in chart(shown["failed"], "logits")
    assert "L" in chart(shown["single"], "logits")


def test_every_chart_of_a_watched_model_is_drawn(
    watched: Path, dom: Callable[..., str]
):
    html = dom(watched)
    least = {"growth": 13, "entropy": 13, "norms": 24, "more": 12, "loss": 1}
    for name, n in least.items():
        svg = chart(html, name)
        assert len(re.findall(r'<path [^>]*d="M[^"]+L[^"]+"', svg)) >= n, name
        assert "NaN" not in svg, name
    cells = chart(html, "map")
    assert cells.count("<rect") == 12 * 12 - 6  # one layer has half the heads
    assert "layer 4 · head 5" in chart(html, "growth")


def test_watched_pages_of_every_size_are_quiet(tmp_path: Path, dom: Callable[..., str]):
    tiny = Seen(samples=1, alarms=0, loss=False, layers=1, heads=1, complete=False)
    paths = {
        "one sample": [make_watch(tmp_path / "one", tiny)],
        "eighty layers": [
            make_watch(
                tmp_path / "big", Seen(layers=80, heads=64, samples=20, complete=False)
            )
        ],
        "two": [
            make_watch(tmp_path / "a", Seen(samples=5, alarms=0)),
            make_watch(tmp_path / "b", Seen(angle=False)),
        ],
    }
    shown = {
        name: dom(qkeel.report.write(runs, tmp_path / "page.html"))
        for name, runs in paths.items()
    }
    assert chart(shown["one sample"], "map").count("<rect") == 1
    assert chart(shown["one sample"], "growth").count("<circle") >= 1
    assert chart(shown["eighty layers"], "map").count("<rect") == 80 * 64 - 32
    assert "L" in chart(shown["two"], "runs")


def test_the_charts_follow_the_chosen_run_and_number(
    tmp_path: Path, dom: Callable[..., str]
):
    runs = [
        make_watch(tmp_path / "a", Seen(layers=3, heads=4)),
        make_watch(tmp_path / "b", Seen(layers=5, heads=2)),
    ]
    script = """
      const pick = (where, value) => {
        const select = document.querySelector(`[data-controls="${where}"] select`);
        select.value = value;
        select.dispatchEvent(new Event("change"));
      };
      pick("run", "b");
      pick("map", "entropy");
      document.body.dataset.cells = document.querySelectorAll("#chart-map rect").length;
      document.body.dataset.scale = document.querySelector('[data-legend="map"]').textContent;
    """
    html = dom(qkeel.report.write(runs, tmp_path / "page.html"), script)
    assert 'data-cells="9"' in html
    assert re.search(r'data-scale="[^"]*mean attention entropy', html)


def test_a_study_in_parts_is_drawn_one_part_at_a_time(
    tmp_path: Path, dom: Callable[..., str]
):
    first = [
        dataclasses.replace(m, role="mla, adamw")
        for m in grid(("none", "qk_norm", "lalr:tau=0.1"), lrs=(0.1,))
    ]
    pair = grid(("none", "qk_norm"), lrs=(0.1,))
    second = [
        dataclasses.replace(m, role="mha, muon", val_loss=m.val_loss + 1) for m in pair
    ]
    page = qkeel.report.write(
        make_study(tmp_path / "study", [*first, *second], name="mla"),
        tmp_path / "page.html",
    )
    html = dom(page)
    script = """
      const select = document.querySelector("[data-controls=part] select");
      const chosen = [...select.options].map((o) => o.value).join("|");
      select.value = "mha, muon";
      select.dispatchEvent(new Event("change"));
      document.body.dataset.chosen = chosen;
    """
    other = dom(page, script)
    assert 'data-chosen="mla, adamw|mha, muon"' in other
    remedies = len({m.remedy for m in first})
    for text, shown in ((html, remedies), (other, 2)):
        for name in ("loss", "logits", "entropy", "train"):
            assert "NaN" not in chart(text, name), name
        assert (
            text.split('data-legend="loss"')[1]
            .split("</figure>")[0]
            .count('class="key"')
            == shown
        )
    assert chart(html, "loss") != chart(other, "loss")
