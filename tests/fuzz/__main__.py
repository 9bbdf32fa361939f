"""`python -m tests.fuzz`: every class of input in a process of its own, with a limit of seconds for each case.

Exit code 1 if a case ended in a traceback, a hang, a wrong exit code or a wrong number; the smallest such case is
printed. The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.classes import CLASSES
from tests.fuzz.hunt import hunt

LIMIT = 60.0  # seconds for one case


def main() -> int:
    options = _options()
    if options.one:
        refused = hunt(CLASSES[options.one], options.cases, options.seed, limit=LIMIT, note=options.note)
        print(f"{refused:,} refused")
        return 0
    failed = [name for name in options.classes or CLASSES if not _passes(name, options.cases, options.seed)]
    print(f"failed: {', '.join(failed)}" if failed else "no finding")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=f"of {', '.join(CLASSES)} [default: all]")
    parser.add_argument("--cases", type=int, default=10_000, help="of each class [default: 10000]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", choices=CLASSES, help=argparse.SUPPRESS)
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.classes) - set(CLASSES):
        parser.error(f"unknown class {', '.join(unknown)}; known: {', '.join(CLASSES)}")
    return options


def _passes(name: str, cases: int, seed: int) -> bool:
    """Runs a class in a process of its own and prints how it went."""
    with tempfile.TemporaryDirectory(prefix="qkeel-fuzz-") as folder:
        note = Path(folder) / "case"
        command = [sys.executable, "-m", "tests.fuzz", "--one", name, "--cases", str(cases), "--seed", str(seed)]
        start = time.monotonic()
        done = subprocess.run([*command, "--note", str(note)], capture_output=True, text=True, errors="replace")
        seconds = time.monotonic() - start
        if done.returncode == 0:
            print(f"{name}: {cases:,} cases, seed {seed}, {done.stdout.strip()}, {seconds:.0f} s", flush=True)
            return True
        print(
            f"{name}: FAILED after {seconds:.0f} s (seed {seed}, --cases {cases})\n{done.stderr[-20_000:]}", flush=True
        )
        if "Traceback" not in done.stderr and note.exists():  # a hang or a crash: hypothesis could not report it
            print(f"the case was {note.read_text(encoding='utf-8')[:5000]}", flush=True)
        return False


if __name__ == "__main__":
    sys.exit(main())
