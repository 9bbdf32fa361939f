"""The five minutes on a GPU: sections, each a process with a limit of its own, results written after each.

`make gpu`, or `python -m benchmarks.on_gpu --sections NAME …`, needs torch >= 2.11, Triton and pytest, and nothing of ours
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
from benchmarks.on_gpu.machine import (
    ALL_EACH,
    ALL_TENTH,
    CLIP,
    COMPILED_MODEL,
    LALR,
    MAX_EACH,
    MODEL_OF_1B,
    MODEL_OF_100M,
    PEAK,
    STEPS,
)

ALONE = (
    "pytest",
    "-c",
    "tests/gpu/pytest.ini",
    "--rootdir",
    ".",
    "--confcutdir",
    "tests/gpu",
    "--tb=short",
    "-v",
)
# Nearly all of their time is Triton's compiler, on one core each.
CORES = str(min(8, os.cpu_count() or 1))
TESTS = (*ALONE, *(("-n", CORES) if importlib.util.find_spec("xdist") else ()))
TOY = ("--toy", "--device", "cpu")
NORM, LOGSUMEXP, PROCESSES = "norm and rotation", "logsumexp", "tests of processes"
AT_ONCE = "qkeel, Triton, q and k at once"
INTERPRETER = (
    "cpu-interpreter"  # in the place of a device's name: no goal is a GPU's there
)


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A command of its own, and the seconds after which it is ended; `benchmark`: it takes --out and --toy.

    `extra`: it runs only where it is named."""

    name: str
    seconds: int
    command: tuple[str, ...]
    benchmark: bool = True
    extra: bool = False


# Five minutes in all. `extra` sections run where they are named.
SECTIONS = (
    Section(
        "tests of kernels", 70, (*TESTS, "tests/gpu/test_triton.py"), benchmark=False
    ),
    Section("machine", 10, ("benchmarks.on_gpu.machine",)),
    Section(
        "tests of attention",
        40,
        (*TESTS, "tests/gpu/test_cuda.py", "tests/gpu/test_watched.py"),
        benchmark=False,
    ),
    # In one process: each would need a group of its own.
    Section(PROCESSES, 25, (*ALONE, "tests/gpu/test_processes.py"), benchmark=False),
    Section(LOGSUMEXP, 15, ("benchmarks.on_gpu.logsumexp",)),
    Section(
        "statistics",
        20,
        ("benchmarks.on_gpu.kernels", "--only", "statistics", "--rounds", "10"),
    ),
    Section(
        NORM, 20, ("benchmarks.on_gpu.kernels", "--only", "norm", "--rounds", "10")
    ),
    Section(MODEL_OF_100M, 60, ("benchmarks.on_gpu.watched",)),
    Section(COMPILED_MODEL, 40, ("benchmarks.on_gpu.watched", "--compiled")),
    Section(
        "weights", 50, ("benchmarks.on_gpu.kernels", "--only", "weights"), extra=True
    ),
    Section(MODEL_OF_1B, 60, ("benchmarks.on_gpu.watched", "--large"), extra=True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A number that is to stay under a limit: a ratio of a case, or a number of a table, whose title begins so."""

    text: str
    section: str
    table: str
    case: str
    most: float


GOALS = (
    Goal(
        "norm + RoPE forward, of a copy",
        NORM,
        "norm and rotation, forward;",
        AT_ONCE,
        1 / 0.85,
    ),
    Goal(
        "with backward, of five passes",
        NORM,
        "norm and rotation, forward +",
        AT_ONCE,
        1.35,
    ),
    *(
        Goal(
            f"largest logsumexps, of {backend}'s f + b",
            LOGSUMEXP,
            f"{backend}_ATTENTION, forward",
            "with the largest logsumexps",
            1.005,
        )
        for backend in ("FLASH", "EFFICIENT", "CUDNN")
    ),
    *(
        Goal(f"{text}, of a training step, 100M", MODEL_OF_100M, STEPS, case, most)
        for text, case, most in (
            ("qk_clip, nothing over", CLIP, 1.01),
            ("lalr", LALR, 1.02),
            ("largest logits, at every step", MAX_EACH, 1.25),
            ("everything, at every step", ALL_EACH, 1.5),
            ("everything, every 10th step", ALL_TENTH, 1.03),
        )
    ),
    Goal(
        "peak memory of measured steps, of plain ones",
        MODEL_OF_100M,
        PEAK,
        ALL_EACH,
        1.05,
    ),
    *(
        Goal(f"{text}, compiled, 100M", COMPILED_MODEL, STEPS, case, most)
        for text, case, most in (
            ("qk_clip, nothing over", CLIP, 1.01),
            ("everything, every 10th step", ALL_TENTH, 1.03),
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
            # The limits are those of a machine with a GPU, on which nothing else runs.
            limit = section.seconds * (4 if toy else 1)
            status = "done" if child.wait(limit) == 0 else "failed"
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
    if status == "done":
        return found
    lines = log.read_text(errors="replace").splitlines()
    # Pytest names a failing test where it fails: its summary may never be written.
    failed = [line for line in lines[:-40] if " FAILED" in line or " ERROR" in line]
    return found | {"last lines": failed + lines[-40:]}


def verdicts(sections: dict[str, Any]) -> list[str]:
    """One line for each goal: the median ratio next to its limit, or that it was not measured."""
    lines = []
    for goal in GOALS:
        number = None
        tables = sections.get(goal.section, {}).get("tables", {})
        for title, rows in tables.items():
            if title.startswith(goal.table) and isinstance(rows, dict):
                number = rows.get(goal.case)
            elif title.startswith(goal.table):
                ratios = {row["case"]: row["ratio"][1] for row in rows}
                number = ratios.get(goal.case)
        verdict = "not measured"
        if number is not None:
            verdict = f"{number:.3f} {'met' if number <= goal.most else 'MISSED'}"
        lines.append(f"{goal.text:<55} at most {goal.most:.3f}: {verdict}")
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
        "--sections",
        nargs="+",
        default=[],
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
    default = [section.name for section in SECTIONS if not section.extra]
    options.out.mkdir(parents=True, exist_ok=True)
    path = (
        options.out
        / f"gpu-{name.strip('-')}-{notes['date']}{'-toy' if options.toy else ''}.json"
    )
    for section in SECTIONS:
        if section.name in (options.sections or default):
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
