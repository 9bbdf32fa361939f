"""Makes the pictures of docs/gallery.md, of the first page and of the README: `make gallery`.

Needs chromium, Pillow and matplotlib. With a folder as argument the runs
are kept there, and what is there is not run again.
"""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images" / "gallery"
SCHEMES = {"light": "1", "dark": "0"}  # as Chromium numbers the schemes that a reader may prefer


class Picture(NamedTuple):
    """name of the files; title; what it shows; the commands that make it; the page, else NAME.html; its rows."""

    name: str
    title: str
    shows: str
    commands: tuple[str, ...]
    page: str = ""
    rows: tuple[int, int] = (0, 0)


PAGES = (
    Picture(
        "demo",
        "Six remedies at three rates",
        "The demo: what each remedy gained, with its interval, and the largest logit with and without QK-norm.",
        ("qkeel demo --out demo",),
        page="demo/report.html",
        rows=(0, 1640),
    ),
    Picture(
        "watch",
        "A training script under watch",
        "What happened in words, each alarm with the line of code that helps, and the largest logit of each layer.",
        (
            "qkeel watch --out runs/gpt -- python examples/train_gpt.py --lr 3e-2 --steps 150",
            "qkeel report runs/gpt -o watch.html",
        ),
        rows=(0, 1820),
    ),
    Picture(
        "autopilot",
        "The same script with an autopilot",
        "The interventions on the course of the logits, each with its reason and its effect.",
        (
            "qkeel watch --out runs/pilot --autopilot -- python examples/train_gpt.py --lr 3e-2 --steps 150",
            "qkeel report runs/pilot -o autopilot.html",
        ),
        rows=(0, 2730),
    ),
    Picture(
        "study",
        "Which remedy at which rate",
        "Four remedies, two rates, three seeds: the verdict of each comparison, with its interval.",
        (
            "qkeel study lr --remedies none qk_norm lalr:tau=0.1 qk_clip:threshold=30 --lrs 0.01 0.1 "
            "--seeds 0 1 2 --out runs/lr",
            "qkeel report runs/lr -o study.html",
        ),
        rows=(0, 1550),
    ),
    Picture(
        "lengths",
        "Longer texts than in training",
        "KeyNorm and plain attention at eight times the training length, as trained and under ReRoPE.",
        (
            "qkeel study extrapolation --forms baseline kna --posthoc none rerope --seeds 0 --out runs/lengths",
            "qkeel report runs/lengths -o lengths.html",
        ),
        rows=(0, 910),
    ),
    Picture(
        "precision",
        "How large a logit may be in bf16",
        "The error of attention in each number format, over logits of growing size.",
        ("qkeel study precision --out runs/precision",),
        page="runs/precision/report.html",
        rows=(0, 1040),
    ),
)
FIRST = Picture("drift", "", "", PAGES[0].commands, PAGES[0].page, rows=(1060, 1620))  # the picture of the first page
PLOT = Picture(
    "plot",
    "A figure of your own",
    "The largest logit of each head at the last step of the watched script, by matplotlib.",
    ('qkeel.load("runs/gpt").plot("heads")',),
)


def run(command: str, folder: Path) -> None:
    """Runs one command line of qkeel in a folder."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def save(image: Image.Image, path: Path) -> None:
    """Writes a PNG of at most 256 colours, a third of the size, in which small patches keep their colour."""
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


def plot(folder: Path) -> None:
    """Writes the figure in each scheme."""
    import matplotlib.pyplot as plt
    from PIL import Image

    import qkeel

    for scheme, style in (("light", "default"), ("dark", "dark_background")):
        with plt.style.context(style):
            figure = qkeel.load(folder / "runs" / "gpt").plot("heads").get_figure()
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=110, bbox_inches="tight")
            plt.close(figure)
        save(Image.open(drawn), IMAGES / f"{PLOT.name}-{scheme}.png")


def section(made: Picture, language: str) -> str:
    """The part of the page about one picture."""
    shown = "\n\n".join(
        f"```{{image}} images/gallery/{made.name}-{scheme}.png\n:alt: {made.shows}\n:class: only-{scheme}\n```"
        for scheme in SCHEMES
    )
    return f"## {made.title}\n\n{made.shows}\n\n```{language}\n" + "\n".join(made.commands) + f"\n```\n\n{shown}\n"


def page() -> str:
    """The text of docs/gallery.md."""
    head = (
        "# Gallery\n\nReal pages and figures, each with the commands that made it. `make gallery` makes this page. "
        "Pictures follow the scheme of the site, light or dark.\n\nTerms used here: remedy, study, "
        "alarm ([glossary](glossary.md)).\n\n"
    )
    end = "\n**Next:** make one of your own script: [watch your script](watch-tutorial.md).\n"
    return head + "\n".join([*(section(made, "sh") for made in PAGES), section(PLOT, "text")]) + end


def main() -> None:
    """Runs the commands, takes the pictures and writes the page."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(*sys.argv[1:] or [place]).resolve()
        folder.mkdir(exist_ok=True)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        for made in (*PAGES, FIRST):
            made_page = folder / (made.page or f"{made.name}.html")
            for command in made.commands if not made_page.exists() else ():
                run(command, folder)
            photograph(made_page, made.name, made.rows)
        plot(folder)
    (ROOT / "docs" / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
