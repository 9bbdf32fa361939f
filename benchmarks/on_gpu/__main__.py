"""The ten minutes on a GPU: sections, each a process with a limit of its own, results written after each.

`make gpu`, or `python -m benchmarks.on_gpu [SECTION …]`, needs torch >= 2.11, Triton and pytest, and nothing of ours
installed. Writes benchmarks/results/gpu-DEVICE-DATE.json and the same as Markdown, and ends with a table of the goals
that were met. Without a CUDA device it says so and ends; --toy goes through every section on a CPU, with Triton in its
interpreter, and shows that they run: nothing it prints then says anything of a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import about
from benchmarks.on_gpu.machine import COMPILED_MODEL, MODEL_OF_1B, MODEL_OF_100M

TESTS = (
    "pytest",
    "-c",
    "tests/gpu/pytest.ini",
    "--rootdir",
    ".",
    "--confcutdir",
    "tests/gpu",
    "--tb=short",
)
# Nearly all of their time is Triton's compiler, on one core each.
TESTS += (
    ("-n", str(min(8, os.cpu_count() or 1)))
    if importlib.util.find_spec("xdist")
    else ()
)
TOY = ("--toy", "--device", "cpu")
NORM = "norm and rotation"
AT_ONCE = "qkeel, Triton, q and k at once"
INTERPRETER = (
    "cpu-interpreter"  # in the place of a device's name: no goal is a GPU's there
)


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A command of its own, and the seconds after which it is ended; `benchmark`: it takes --out and --toy."""

    name: str
    seconds: int
    command: tuple[str, ...]
    benchmark: bool = True


# Ten minutes in all. What says whether the rest can be trusted comes first.
SECTIONS = (
    Section("machine", 20, ("benchmarks.on_gpu.machine",)),
    Section(
        "tests of attention",
        60,
        (*TESTS, "tests/gpu/test_cuda.py", "tests/gpu/test_watched.py"),
        benchmark=False,
    ),
    Section(
        "tests of kernels", 130, (*TESTS, "tests/gpu/test_triton.py"), benchmark=False
    ),
    Section("statistics", 50, ("benchmarks.on_gpu.kernels", "--only", "statistics")),
    Section(NORM, 60, ("benchmarks.on_gpu.kernels", "--only", "norm")),
    Section("weights", 50, ("benchmarks.on_gpu.kernels", "--only", "weights")),
    Section(MODEL_OF_100M, 100, ("benchmarks.on_gpu.watched",)),
    Section(COMPILED_MODEL, 70, ("benchmarks.on_gpu.watched", "--compiled")),
    Section(MODEL_OF_1B, 60, ("benchmarks.on_gpu.watched", "--large")),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that a case is to stay under, in the first table of a section whose title begins so."""

    what: str
    section: str
    table: str
    case: str
    most: float


GOALS = (
    Goal(
        "norm + RoPE forward, of a copy",
        "norm and rotation",
        "norm and rotation, forward;",
        AT_ONCE,
        1 / 0.85,
    ),
    Goal(
        "with backward, of five passes",
        "norm and rotation",
        "norm and rotation, forward +",
        AT_ONCE,
        1.35,
    ),
    Goal(
        "largest logits, of attention",
        "statistics",
        "statistics;",
        "largest and smallest logit alone",
        0.05,
    ),
    Goal(
        "lalr, of fused AdamW", "weights", "optimizer step", "AdamW, fused + lalr", 1.3
    ),
    *(
        Goal(f"{told}, {model}", model, "ten training steps", case, most)
        for model in (MODEL_OF_100M, MODEL_OF_1B)
        for told, case, most in (
            ("between measured steps", "between measured steps", 1.005),
            ("watched every 10th step", "everything, every 10th step", 1.02),
        )
    ),
    *(
        Goal(
            f"{told}, compiled, 100M", COMPILED_MODEL, "ten training steps", case, 1.02
        )
        for told, case in (
            ("every 10th step", "everything, every 10th step"),
            ("the same by stats=max", "largest logits, every 10th step"),
        )
    ),
)


def run(section: Section, toy: bool, folder: Path) -> dict[str, Any]:
    """Runs one section; returns its status, seconds, tables and, if it failed, its last lines."""
    more = [*(TOY if toy else ()), "--out", str(folder)] if section.benchmark else []
    command = [sys.executable, "-m", *section.command, *more]
    # Losses are to be the same bits.
    variables = {
        **os.environ,
        **(
            {"TRITON_INTERPRET": "1"} if toy else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        ),
    }
    log, start = folder / "log.txt", time.monotonic()
    with log.open("w") as written:
        child = subprocess.Popen(
            command,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )
        try:
            status = "done" if child.wait(section.seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    found: dict[str, Any] = {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "tables": {},
    }
    for path in sorted(folder.glob("*.json")):
        found["tables"] |= json.loads(path.read_text())["tables"]
    lines = log.read_text(errors="replace").splitlines()
    return found if status == "done" else found | {"last lines": lines[-40:]}


def verdicts(sections: dict[str, Any]) -> list[str]:
    """One line for each goal: the median ratio next to its limit, or that it was not measured."""
    lines = []
    for goal in GOALS:
        tables = sections.get(goal.section, {}).get("tables", {})
        rows = next(
            (rows for title, rows in tables.items() if title.startswith(goal.table)), []
        )
        ratio = next(
            (row["ratio"][1] for row in rows if row["case"] == goal.case), None
        )
        said = (
            "not measured"
            if ratio is None
            else f"{ratio:.3f} {'met' if ratio <= goal.most else 'MISSED'}"
        )
        lines.append(f"{goal.what:<55} at most {goal.most:.3f}: {said}")
    return lines


def markdown(results: dict[str, Any]) -> str:
    """The results as a page: what ran, the goals, every table."""
    lines = [
        f"# {results['about']['device']}, {results['about']['date']}\n",
        "| section | seconds | |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['seconds']} | {found['status']} |"
        for name, found in results["sections"].items()
    ]
    lines += ["", *(f"- {line}" for line in results["goals"])]
    for found in results["sections"].values():
        for title, rows in found["tables"].items():
            lines += [f"\n### {title}\n", "| case | |", "|---|---|"]
            if isinstance(rows, list):
                lines += [
                    f"| {row['case']} | {row['ms'][1]:.3f} ms, {row['ratio'][1]:.3f} |"
                    for row in rows
                ]
            else:
                lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes what is known so far, whole or not at all."""
    results["goals"] = (
        []
        if results["about"]["device"] == INTERPRETER
        else verdicts(results["sections"])
    )
    for place, text in ((path, json.dumps(results, indent=1, ensure_ascii=False) + "\n"),
                        (path.with_suffix(".md"), markdown(results))):  # fmt: skip
        part = place.with_suffix(".part")
        part.write_text(text)
        part.replace(place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections that are named, all by default; returns 1 if one of them failed or took too long."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help="; ".join(s.name for s in SECTIONS),
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="tiny sizes on a CPU: only to see that it runs",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(
            f"expected sections out of {[s.name for s in SECTIONS]}, got {sorted(unknown)}"
        )
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: there is no CUDA device here; --toy shows that it runs")
        return 0
    name = (
        INTERPRETER
        if options.toy
        else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    )
    notes = about("make gpu", 0) | {"device": name}
    results: dict[str, Any] = {"about": notes, "sections": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    path = (
        options.out
        / f"gpu-{name.strip('-')}-{notes['date']}{'-toy' if options.toy else ''}.json"
    )
    for section in SECTIONS:
        if not options.sections or section.name in options.sections:
            with tempfile.TemporaryDirectory() as folder:
                found = results["sections"][section.name] = run(
                    section, options.toy, Path(folder)
                )
            write(path, results)
            print(
                f"{section.name:<40} {found['status']:<12} {found['seconds']:6.1f} s",
                flush=True,
            )
            print(
                *(f"    {line}" for line in found.get("last lines", ())),
                sep="\n",
                end="",
                flush=True,
            )
    print("", *results["goals"], f"written: {path}", sep="\n")
    return int(any(found["status"] != "done" for found in results["sections"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
