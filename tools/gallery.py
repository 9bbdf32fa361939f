"""Makes the pictures of docs/gallery.md, of the first page and of the README: `python tools/gallery.py`.

Needs chromium, Pillow, matplotlib and the packages that build the docs. If a
folder is given as the first argument, the runs are kept there, and runs that
are newer than the code are not repeated. If names of pictures follow, only
these pictures are made. If a command fails, or its watcher reports a failure,
the program ends, and no picture and no page is changed.

The content of the demo's picture is stored next to it in demo.json, together
with the study's definition; tests compare both with the code and with README.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL import Image

    from qkeel.frames.tables import Foreign

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images" / "gallery"
SCHEMES = {"light": "1", "dark": "0"}  # as Chromium numbers the schemes that a reader may prefer
DARK = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#131416")  # the site's own
STYLES = {"light": ["default"], "dark": ["dark_background", DARK]}  # of matplotlib
# A page that is older than any of these files is made again.
CODE = [path for path in (ROOT / "src").rglob("*.*") if "__pycache__" not in path.parts and path.is_file()]
CODE.append(ROOT / "examples" / "train_gpt.py")
# What stderr contains if the script succeeded but something in qkeel failed.
FAULT = re.compile(r"failed|switched itself off|Not understood|^Traceback|^error", re.M)


class Picture(NamedTuple):
    """File name, title, description, the commands that make it, the page (by default NAME.html), the rows to show."""

    name: str
    title: str
    shows: str
    commands: tuple[str, ...]
    page: str = ""
    rows: tuple[int, int] = (0, 0)

    def outputs(self, folder: Path) -> list[Path]:
        """The run directories; `qkeel watch` would write next to an old one, and a study would resume it."""
        return [folder / out for out in re.findall(r"--out (\S+)", " ".join(self.commands))]


PAGES = (
    Picture(
        "demo",
        "Six remedies at three rates",
        "The demo reports how often attention collapsed, the primary comparison, and the largest logit.",
        ("qkeel demo --out demo",),
        page="demo/report.html",
        rows=(0, 1570),
    ),
    Picture(
        "watch",
        "A training script under watch",
        "The page says what went wrong and what to do, and shows each alarm and the largest logit of each layer.",
        (
            "qkeel watch --out runs/gpt -- python examples/train_gpt.py --lr 3e-2 --steps 150",
            "qkeel report runs/gpt -o watch.html",
        ),
        rows=(0, 1765),
    ),
    Picture(
        "autopilot",
        "The same script with an autopilot",
        "The curve of the logits shows each action of the autopilot, with its reason and its effect.",
        (
            "qkeel watch --out runs/pilot --autopilot -- python examples/train_gpt.py --lr 3e-2 --steps 150",
            "qkeel report runs/pilot -o autopilot.html",
        ),
        rows=(0, 2530),
    ),
    Picture(
        "study",
        "Which remedy at which rate",
        "The page gives the verdict of each comparison, with its interval.",
        (
            "qkeel study lr --remedies none qk_norm lalr:tau=0.1 qk_clip:threshold=30 --lrs 0.01 0.1 "
            "--seeds 0 1 2 --out runs/lr",
            "qkeel report runs/lr -o study.html",
        ),
        rows=(0, 1700),
    ),
    Picture(
        "lengths",
        "Longer texts than in training",
        "The page compares KeyNorm and plain attention at eight times the training length, both as trained and with "
        "ReRoPE.",
        (
            "qkeel study extrapolation --forms baseline kna --posthoc none rerope --seeds 0 --out runs/lengths",
            "qkeel report runs/lengths -o lengths.html",
        ),
        rows=(0, 910),
    ),
)
# What a reader sees before scrolling, on the page of a picture above or on the first page of the docs.
SCREEN = (0, 800)
FIRST = {
    "watch": "The first screen of a run that goes wrong says what is wrong, what that means, and what to do.",
    "demo": "The first screen of the demo shows the counts and the primary comparison.",
    "home": "This is the first screen of the documentation.",
}
PLOT = Picture(
    "plot",
    "A figure of your own",
    "This figure shows the largest logit of each head at the last step of the watched script.",
    ('qkeel.load("runs/gpt").plot("heads")',),
)


def run(command: str, folder: Path) -> None:
    """Runs a qkeel command line in a folder; ends the program if any part of it failed."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode or FAULT.search(done.stderr):
        sys.exit(f"{done.stderr}\n`{command}` failed (exit code {done.returncode}): no picture was changed")


def is_new(page: Path) -> bool:
    """Whether a page exists and is newer than all code."""
    return page.exists() and page.stat().st_mtime > max(path.stat().st_mtime for path in CODE)


def save(image: Image.Image, path: Path) -> None:
    """Writes a PNG with at most 256 colours, which takes a third of the space; small patches keep their colour."""
    from PIL.Image import Quantize

    image.convert("RGB").quantize(256, Quantize.MAXCOVERAGE).save(path, optimize=True)


def photograph(page: Path, name: str, rows: tuple[int, int]) -> None:
    """Writes a picture of the page's rows in each scheme."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for scheme, number in SCHEMES.items():
        shot = page.with_suffix(".png")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        flags += [f"--window-size=1200,{rows[1]}", f"--blink-settings=preferredColorScheme={number}"]
        with tempfile.TemporaryDirectory() as profile:
            flags += [f"--user-data-dir={profile}", f"--screenshot={shot}"]
            subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)
        with Image.open(shot) as whole:
            save(whole.crop((0, rows[0], whole.width, rows[1])), IMAGES / f"{name}-{scheme}.png")


def draw_drift(folder: Path, scheme: str) -> Foreign:
    """The picture of the first page: only the longest runs of the demo, so that it is readable on phones."""
    import matplotlib.pyplot as plt

    import qkeel

    runs = [qkeel.load(done.parent) for done in sorted((folder / "demo" / "runs").glob("*/DONE"))]
    steps = max(run.config["steps"] for run in runs)
    figure, ax = plt.subplots(figsize=(5.6, 2.9), layout="constrained")
    for run in (run for run in runs if run.config["steps"] == steps):
        grey = "0.35" if scheme == "light" else "0.75"
        colour, words = (grey, "no remedy") if run.config["remedy"] == "none" else ("C0", run.config["remedy"])
        drawn, logits = run.steps["step"], run.steps["max_logit"]
        ax.plot(drawn, logits, color=colour, linewidth=2)
        ax.annotate(f" {words}\n {logits[-1]:,.0f}", (drawn[-1], logits[-1]), color=colour, va="center", size=12)
    ax.axhline(100, color="C3", linewidth=1)
    ax.annotate("alarm", (0, 110), color="C3", size=12)
    ax.set(yscale="log", xlim=(0, 1.22 * steps), xlabel="optimizer step", xticks=range(0, steps + 1, 200))
    ax.set_title("largest attention logit", loc="left", size=12)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def draw_heads(folder: Path, scheme: str) -> Foreign:
    """The figure that a reader can draw from the run of the watched script."""
    import qkeel

    return qkeel.load(folder / "runs" / "gpt").plot("heads").get_figure()


def plot(name: str, draw: Callable[[Path, str], Foreign], folder: Path, dpi: int) -> None:
    """Writes a figure of matplotlib in each scheme."""
    import matplotlib.pyplot as plt
    from PIL import Image

    for scheme, style in STYLES.items():
        with plt.style.context(style):
            figure, drawn = draw(folder, scheme), io.BytesIO()
            figure.savefig(drawn, dpi=dpi, bbox_inches="tight")
            plt.close(figure)
        save(Image.open(drawn), IMAGES / f"{name}-{scheme}.png")


DEMO = IMAGES / "demo.json"
DEFINITION = ("remedies", "lrs", "seeds", "primary")  # of study.json


def described(study: Path) -> dict[str, object]:
    """What a finished demo was asked and what it found at the rate of its primary comparison."""
    from qkeel.report.compare import primary_cell
    from qkeel.report.study_runs import read_study

    about = json.loads((study / "study.json").read_text(encoding="utf-8"))
    with open(study / "table.csv", newline="", encoding="utf-8") as file:
        whole = list(csv.DictReader(file))
    lines = [line for line in whole if float(line["lr"]) == about["primary"]["lr"]]
    drifting = {run["run_id"] for run in about["runs"] if run["role"] == "drift"}
    primary = primary_cell(read_study(study))
    assert primary is not None
    gain = primary[0].gain
    assert gain is not None
    assert gain.effect is not None
    by = {name: [line for line in lines if line["remedy"] == name] for name in about["remedies"]}
    return {
        "study": {**{name: about[name] for name in DEFINITION}, "runs": len(about["runs"])},
        "collapsed": {name: [sum(x["collapsed"] == "true" for x in of), len(of)] for name, of in by.items()},
        "largest_logit": {name: round(max(float(x["max_logit"]) for x in of), 1) for name, of in by.items()},
        "drift": {x["remedy"]: round(float(x["max_logit"]), 1) for x in whole if x["run_id"] in drifting},
        "gain": {**{x: round(getattr(gain.effect, x), 4) for x in ("mean", "low", "high")}, "seeds": gain.n},
    }


def alt(found: dict) -> str:
    """The sentence that stands for the picture of the demo."""
    named, gain, tops = found["study"]["primary"], found["gain"], found["largest_logit"]
    mine, theirs = named["remedy"], named["baseline"]
    fallen = [f"{k} of {n}" for k, n in (found["collapsed"][name] for name in (theirs, mine))]
    better = f"{gain['mean']:.3f} nats better ({gain['low']:.3f} to {gain['high']:.3f}, {gain['seeds']} seeds)"
    return (
        f"The page that the demo writes. At LR {named['lr']:g} attention collapsed in {fallen[0]} runs without a "
        "remedy and in "
        f"{fallen[1]} with {mine}; the largest logit was {tops[theirs]:,.0f} against {tops[mine]:,.0f}. "
        f"Held-out loss with {mine} is {better}"
    )


def write_description(study: Path) -> None:
    """Writes demo.json and the picture's text in README."""
    found = described(study)
    names = [f"{name}-{scheme}.png" for name in ("demo", "drift") for scheme in SCHEMES]
    found["sha256"] = {name: hashlib.sha256((IMAGES / name).read_bytes()).hexdigest() for name in names}
    DEMO.write_text(json.dumps({**found, "alt": alt(found)}, indent=1) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    text = re.sub(
        r'<img alt="[^"]*" src="docs/images/gallery/demo',
        f'<img alt="{alt(found)}" src="docs/images/gallery/demo',
        readme.read_text(encoding="utf-8"),
    )
    readme.write_text(text, encoding="utf-8")


def build_site(folder: Path) -> Path:
    """Builds the docs; returns their first page."""
    site = folder / "site"
    subprocess.run([sys.executable, "-m", "sphinx", "-q", str(ROOT / "docs"), str(site)], check=True)
    return site / "index.html"


def shown(name: str, alt: str) -> str:
    """One picture in each scheme."""
    return "\n\n".join(
        f"```{{image}} images/gallery/{name}-{scheme}.png\n:alt: {alt}\n:class: only-{scheme}\n```"
        for scheme in SCHEMES
    )


def section(made: Picture, language: str) -> str:
    """The part of the page about one picture."""
    commands = "\n".join(made.commands)
    return f"## {made.title}\n\n{made.shows}\n\n```{language}\n{commands}\n```\n\n{shown(made.name, made.title)}\n"


def page() -> str:
    """The text of docs/gallery.md."""
    head = (
        "# Gallery\n\nReal pages and figures, each with the commands that made it. `python tools/gallery.py` "
        "generates this page.\n\n"
    )
    screens = [f"{shows}\n\n{shown(f'{name}-first', 'First screen')}\n" for name, shows in FIRST.items()]
    end = "\n**Next:** make one for your own script: [watch your script](tutorials/your-script.md).\n"
    parts = ["## First screens\n", *screens, *(section(made, "sh") for made in PAGES), section(PLOT, "text")]
    return head + "\n".join(parts) + end


def main() -> None:
    """Runs the commands, takes the pictures and writes the page."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder, wanted = Path(*sys.argv[1:2] or [place]).resolve(), {*sys.argv[2:]}
        pages = [made for made in PAGES if made.name in wanted or not wanted]
        folder.mkdir(exist_ok=True)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        places = {made.name: folder / (made.page or f"{made.name}.html") for made in pages}
        for made in pages:
            if not is_new(places[made.name]):
                for old in made.outputs(folder):
                    shutil.rmtree(old, ignore_errors=True)
                for command in made.commands:
                    run(command, folder)
        if "home" in wanted or not wanted:
            places["home"] = build_site(folder)
        for made in pages:
            photograph(places[made.name], made.name, made.rows)
        for name in FIRST.keys() & places.keys():
            photograph(places[name], f"{name}-first", SCREEN)
        if "demo" in places:
            plot("drift", draw_drift, folder, dpi=200)
            write_description(folder / "demo")
        if "watch" in places:
            plot(PLOT.name, draw_heads, folder, dpi=110)
    (ROOT / "docs" / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
