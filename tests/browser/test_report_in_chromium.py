"""The page in a real browser: it draws every chart, logs no error, and fits a phone."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
import subprocess
import tempfile
import urllib.parse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from synthetic_study import drift, grid, make_run, make_study
from synthetic_watch import Seen, make_watch

import qkeel.report
from qkeel.records import append_line
from qkeel.report.live import serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=1500",
    "--enable-logging=stderr",
    "--v=0",
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome on PATH"),
]


def browse(page: Path | str, *flags: str) -> tuple[str, list[str]]:
    """What the browser printed, and what the page's console said."""
    address = page if isinstance(page, str) else page.as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def dom(page: Path) -> str:
    out, console = browse(page, "--window-size=1280,1000", "--dump-dom")
    assert console == []
    return out


def chart(html: str, name: str) -> str:
    """The SVG of a chart."""
    begin = html.index(f'id="chart-{name}"')
    return html[html.index("<svg", begin) : html.index("</svg>", begin)]


def with_script(page: Path, script: str) -> Path:
    """The page with one script more at its end."""
    other = page.with_name(f"probe-{page.name}")
    text = page.read_text(encoding="utf-8")
    other.write_text(text.replace("</body>\n</html>", f"<script>{script}</script></body></html>"), encoding="utf-8")
    return other


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    return qkeel.report.write(make_study(folder / "study", [*drift(), *grid()]), folder / "report.html")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    return qkeel.report.write(make_watch(folder / "watch"), folder / "report.html")


def test_every_chart_is_drawn_without_a_word_on_the_console(demo: Path):
    html = dom(demo)
    marks = {"drift": 2, "loss": 6, "logits": 36, "entropy": 36, "train": 36}
    for name, least in marks.items():
        svg = chart(html, name)
        paths = re.findall(r'<path [^>]*d="M[^"]+L[^"]+"', svg)
        assert len(paths) >= least, name
        assert "NaN" not in svg, name
    assert chart(html, "loss").count("aria-description=") >= 18  # a line, a range and dots per remedy
    assert chart(html, "heads").count("<rect") == 6 * 8 * 16
    assert "alarm 100" in chart(html, "drift")


def test_light_dark_and_phone_are_rendered(demo: Path, tmp_path: Path):
    looks = {
        "light": ("--window-size=1280,4000", "--blink-settings=preferredColorScheme=1"),
        "dark": ("--window-size=1280,4000", "--blink-settings=preferredColorScheme=0"),
        "phone": ("--window-size=390,4000",),
    }
    sizes = {}
    for name, flags in looks.items():
        picture = tmp_path / f"{name}.png"
        _, console = browse(demo, *flags, f"--screenshot={picture}")
        assert console == []
        sizes[name] = picture.read_bytes()
        assert len(sizes[name]) > 50_000
    assert sizes["light"] != sizes["dark"]


@pytest.mark.parametrize("page", ["demo", "watched"])
def test_a_phone_sees_no_horizontal_scroll(page: str, request: pytest.FixtureRequest):
    demo = request.getfixturevalue(page)
    report = "addEventListener('load', () => setTimeout(() => parent.postMessage("
    report += "`${innerWidth} ${document.documentElement.scrollWidth}`, '*'), 500))"
    inner = with_script(demo, report)
    outer = demo.with_name("phone.html")
    outer.write_text(
        "<script>addEventListener('message', (e) => (document.body.dataset.width = e.data))</script>"
        f"<body><iframe src='{inner.name}' style='width:390px;height:900px;border:0'></iframe></body>"
    )
    found = re.search(r'data-width="(\d+) (\d+)"', dom(outer))
    assert found
    assert (int(found[1]), int(found[2])) == (390, 390)


def test_a_saved_figure_stands_alone(demo: Path):
    script = """
      const texts = [];
      URL.createObjectURL = (blob) => { texts.push(blob.text()); return "#"; };
      for (const button of document.querySelectorAll("button.save")) button.click();
      Promise.all(texts).then((all) => {
        const pre = document.body.appendChild(document.createElement("pre"));
        pre.id = "saved";
        pre.textContent = all.map((text) => btoa(encodeURIComponent(text))).join(" ");
      });
    """
    html = dom(with_script(demo, script))
    found = re.search(r'<pre id="saved">([^<]+)</pre>', html)
    assert found
    saved = [urllib.parse.unquote(base64.b64decode(word).decode()) for word in found[1].split()]
    assert len(saved) == 6
    for text in saved:
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(--series" not in text
        assert "var(--ink" not in text
        assert "currentColor" not in text
    assert "Drift of the largest attention logit" in saved[0]
    assert "qk_norm" in saved[0]


def test_tables_sort_and_a_line_can_be_singled_out(demo: Path):
    script = """
      const header = document.querySelector("#section-ranking thead button");
      header.click();
      document.body.dataset.first = document.querySelector("#section-ranking tbody th").textContent;
      header.click();
      document.body.dataset.last = document.querySelector("#section-ranking tbody th").textContent;
      const keys = '[data-legend="logits"] .key';
      document.querySelectorAll(keys)[1].click();
      document.body.dataset.pressed = document.querySelectorAll(`${keys}[aria-pressed="true"]`).length;
      const select = document.querySelectorAll('[data-controls="heads"] select')[1];
      select.value = "entropy";
      select.dispatchEvent(new Event("change"));
    """
    html = dom(with_script(demo, script))
    assert 'data-first="lalr:tau=0.1"' in html
    assert 'data-last="softcap:cap=50"' in html
    assert 'data-pressed="1"' in html
    assert "entropy (nats)" in html[html.index('data-legend="heads"') : html.index('id="chart-heads"')]


def test_empty_failed_and_single_pages_are_quiet(tmp_path: Path):
    runs = grid(("none", "qk_norm"), (0.01, 0.1))
    failed = [dataclasses.replace(made, status="failed") for made in runs[:3]]
    pages = {
        "empty": make_study(tmp_path / "empty", [], absent=runs),
        "failed": make_study(tmp_path / "failed", [*failed, *runs[3:]]),
        "single": make_run(tmp_path / "single", runs[0]),
    }
    shown = {name: dom(qkeel.report.write(path, tmp_path / f"{name}.html")) for name, path in pages.items()}
    assert "<svg" not in re.sub(r"<script.*?</script>", "", shown["empty"], flags=re.S)
    assert "L" in chart(shown["failed"], "logits")
    assert chart(shown["single"], "heads").count("<rect") == 8 * 16


def test_every_chart_of_a_watched_model_is_drawn(watched: Path):
    html = dom(watched)
    least = {"growth": 13, "entropy": 13, "norms": 24, "angle": 1, "more": 12, "loss": 1}
    for name, n in least.items():
        svg = chart(html, name)
        assert len(re.findall(r'<path [^>]*d="M[^"]+L[^"]+"', svg)) >= n, name
        assert "NaN" not in svg, name
    cells = chart(html, "map")
    assert cells.count("<rect") == 12 * 12 - 6  # one layer has half the heads
    assert "layer 4 · head 5" in chart(html, "growth")
    assert chart(html, "angle").count("<circle") >= 12 * 12 - 6


def test_watched_pages_of_every_size_are_quiet(tmp_path: Path):
    tiny = Seen(samples=1, alarms=0, loss=False, layers=1, heads=1, complete=False)
    paths = {
        "one sample": [make_watch(tmp_path / "one", tiny)],
        "eighty layers": [make_watch(tmp_path / "big", Seen(layers=80, heads=64, samples=20, complete=False))],
        "two": [make_watch(tmp_path / "a", Seen(samples=5, alarms=0)), make_watch(tmp_path / "b", Seen(angle=False))],
    }
    shown = {name: dom(qkeel.report.write(runs, tmp_path / "page.html")) for name, runs in paths.items()}
    assert chart(shown["one sample"], "map").count("<rect") == 1
    assert chart(shown["one sample"], "growth").count("<circle") >= 1
    assert chart(shown["eighty layers"], "map").count("<rect") == 80 * 64 - 32
    assert "L" in chart(shown["two"], "runs")


def test_the_charts_follow_the_chosen_run_and_number(tmp_path: Path):
    runs = [make_watch(tmp_path / "a", Seen(layers=3, heads=4)), make_watch(tmp_path / "b", Seen(layers=5, heads=2))]
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
    html = dom(with_script(qkeel.report.write(runs, tmp_path / "page.html"), script))
    assert 'data-cells="9"' in html
    assert re.search(r'data-scale="[^"]*mean attention entropy', html)


def test_a_live_page_takes_up_what_is_new_without_loading_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_watch(tmp_path / "run", Seen(samples=8, complete=False))
    heads = (run / "heads.f32").read_bytes()
    size = len(heads) // 8
    (run / "heads.f32").write_bytes(heads[: 7 * size])
    looks: list[str] = []
    pages: list[bytes] = []
    with serve(run) as server:
        make = server._page.html

        def over() -> bool:  # asked for at every look: the eighth sample arrives at the first
            if not looks:
                (run / "heads.f32").write_bytes(heads)
                append_line(run / "events.jsonl", {"step": 70, "event": "a thing happened"})
            looks.append("")
            return False

        def html_page() -> bytes:
            pages.append(make())
            return pages[-1]

        monkeypatch.setattr(server._page, "over", over)
        monkeypatch.setattr(server._page, "html", html_page)
        html, console = browse(server.url, "--window-size=1280,1000", "--virtual-time-budget=9000", "--dump-dom")
    assert len(pages) == 2  # the first, and the one whose parts were taken over
    assert len(looks) >= 3
    assert console == []
    assert "8 samples" in html
    assert "a thing happened" in html
    assert "This page is live; it was up to date at" in html
    assert "70" in chart(html, "growth")


def test_a_page_whose_server_is_gone_says_so_and_stays(tmp_path: Path):
    run = make_watch(tmp_path / "run", Seen(samples=8, complete=False))
    with serve(run) as server:
        page = tmp_path / "page.html"
        page.write_bytes(server._page.html())
    html, _ = browse(page, "--virtual-time-budget=5000", "--dump-dom")  # from a file there is no server at all
    assert "The server of this page has stopped; the run may go on" in html
    assert "8 samples" in html


def test_a_study_in_parts_is_drawn_one_part_at_a_time(tmp_path: Path):
    first = [dataclasses.replace(m, role="mla, adamw") for m in grid(lrs=(0.01, 0.1))]
    second = [dataclasses.replace(m, role="mha, muon", val_loss=m.val_loss + 1) for m in grid(("none", "qk_norm"))]
    page = qkeel.report.write(make_study(tmp_path / "study", [*first, *second], name="mla"), tmp_path / "page.html")
    html = dom(page)
    script = """
      const select = document.querySelector("[data-controls=part] select");
      const chosen = [...select.options].map((o) => o.value).join("|");
      document.querySelector("[data-controls=heads] select").value = "LR 0.1, seed 1";
      select.value = "mha, muon";
      select.dispatchEvent(new Event("change"));
      document.body.dataset.chosen = chosen;
    """
    other = dom(with_script(page, script))
    assert 'data-chosen="mla, adamw|mha, muon"' in other
    remedies = len({m.remedy for m in first})
    for text, shown in ((html, remedies), (other, 2)):
        for name in ("loss", "logits", "entropy", "train", "heads"):
            assert "NaN" not in chart(text, name), name
        assert text.split('data-legend="loss"')[1].split("</figure>")[0].count('class="key"') == shown
    assert chart(html, "loss") != chart(other, "loss")
    assert "held-out loss" in html.split("<h2>mla, adamw</h2>")[1].split("<h2>")[0].lower()
