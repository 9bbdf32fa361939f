"""Takes the pictures of pages that the docs and README show anew: `python tools/gallery.py [NAME …] [--folder RUNS]`.

Needs Chromium and Pillow. With --folder, runs are kept there and finished ones are not repeated. If a
command fails, the program ends and no picture is changed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images" / "gallery"
SCHEMES = {
    "light": "1",
    "dark": "0",
}  # as Chromium numbers the schemes that a reader may prefer
WATCH = "-- python examples/train_gpt.py --lr 3e-2 --steps 150"
# Name of the picture -> the commands that make its page, the page, and the rows of it that are shown.
PAGES = {
    "demo": (("qkeel demo --out demo",), "demo/report.html", 1500),
    "watch": (
        (f"qkeel watch --out runs/gpt {WATCH}", "qkeel report runs/gpt -o watch.html"),
        "watch.html",
        1765,
    ),
    "autopilot": (
        (
            f"qkeel watch --out runs/pilot --autopilot {WATCH}",
            "qkeel report runs/pilot -o autopilot.html",
        ),
        "autopilot.html",
        2530,
    ),
    "study": (
        (
            "qkeel study lr --remedies none qk_norm lalr:tau=0.1 qk_clip:threshold=30 --lrs 0.01 0.1 --seeds 0 1 2 "
            "--out runs/lr",
            "qkeel report runs/lr -o study.html",
        ),
        "study.html",
        1700,
    ),
}


def run(command: str, folder: Path) -> None:
    """Runs a command line of qkeel in a folder; ends the program if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(
            f"{done.stderr}\n`{command}` failed (exit code {done.returncode}): no picture was changed"
        )


def photograph(page: Path, name: str, height: int) -> None:
    """Writes a picture of the page's first rows in each scheme, in 256 colours: a third of the space."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("expected Chromium to take pictures with; install it")
    for scheme, number in SCHEMES.items():
        picture = IMAGES / f"{name}-{scheme}.png"
        with tempfile.TemporaryDirectory() as profile:
            flags = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--virtual-time-budget=5000",
            ]
            flags += [
                f"--window-size=1200,{height}",
                f"--blink-settings=preferredColorScheme={number}",
            ]
            flags += [
                f"--user-data-dir={profile}",
                f"--screenshot={picture}",
                page.as_uri(),
            ]
            subprocess.run([browser, *flags], check=True, capture_output=True)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
                picture, optimize=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*PAGES, []], help="pictures to take [all]"
    )
    parser.add_argument("--folder", type=Path, help="keeps the runs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        for name in options.names or PAGES:
            commands, page, height = PAGES[name]
            if not (folder / page).exists():
                for command in commands:
                    run(command, folder)
            photograph(folder / page, name, height)


if __name__ == "__main__":
    main()
