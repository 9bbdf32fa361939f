"""All architectures of both tables, one forked process each, and the page of what was found.

python -m tools.zoo.census [--jobs 2] [--tables causal,others] [--only llama,gpt2] [--out docs/internals/zoo.md]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tools.zoo.compare import compare
from tools.zoo.page import IMPLEMENTATIONS, page, summary, verdict
from tools.zoo.tables import TABLES, Entry, entries

LIMIT = 60.0  # seconds for one architecture on one implementation

Results = dict[Entry, dict[str, dict[str, Any]]]


def judge(entry: Entry, implementation: str) -> dict[str, Any]:
    """The result as a dict, or the reason why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            r = compare(entry, implementation)
    except BaseException as error:
        tail = traceback.extract_tb(error.__traceback__)[-1]
        cause = error.__cause__
        where = f"{Path(tail.filename).name}:{tail.lineno}"
        if cause is not None and cause.__traceback__ is not None:
            last = traceback.extract_tb(cause.__traceback__)[-1]
            where += f" < {Path(last.filename).name}:{last.lineno}"
        return {
            "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"
        }
    return dataclasses.asdict(r)


def in_child(task: tuple[Entry, str], path: Path) -> int:
    """Fork a process for a task; it writes its result to a file."""
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    path.write_text(json.dumps(judge(*task)))
    os._exit(0)


def run(architectures: list[Entry], jobs: int, folder: Path) -> Results:
    """Results per architecture and implementation."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    llama = next(e for e in entries("causal") if e.name == "llama")
    compare(
        llama, "sdpa"
    )  # what every architecture needs is imported once, before the forks
    tasks = [(e, i) for e in architectures for i in IMPLEMENTATIONS]
    paths = {
        task: folder / f"{task[0].class_name}.{task[0].name}.{task[1]}"
        for task in tasks
    }
    running: dict[int, tuple[tuple[Entry, str], float]] = {}
    late: set[tuple[Entry, str]] = set()
    queue = list(tasks)
    while queue or running:
        while queue and len(running) < jobs:
            task = queue.pop(0)
            paths[task].unlink(missing_ok=True)
            running[in_child(task, paths[task])] = (task, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(pid, None)
        for child, (task, start) in running.items():
            if time.monotonic() - start > LIMIT and task not in late:
                late.add(task)
                os.kill(child, signal.SIGKILL)
        if not pid:
            time.sleep(0.05)
    results: Results = {}
    for task, path in paths.items():
        got = (
            json.loads(path.read_text())
            if path.exists()
            else {"reason": f"no result within {LIMIT:.0f} s"}
        )
        results.setdefault(task[0], {})[task[1]] = got
    return results


def main() -> None:
    """Run the census and print or write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/qkeel-zoo"))
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    wanted = set(given.only.split(",")) if given.only else set()
    tables = {
        t: [e for e in entries(t) if not wanted or e.name in wanted]
        for t in given.tables.split(",")
    }
    results = run(
        [e for found in tables.values() for e in found], given.jobs, given.folder
    )
    for entry, result in results.items():
        for implementation in IMPLEMENTATIONS:
            print(
                verdict(entry.name, result[implementation]),
                entry.name,
                implementation,
                result[implementation],
            )
    parts = {
        t: {e.name: (e.class_name, results[e]) for e in found}
        for t, found in tables.items()
    }
    for part in parts.values():
        print("\n".join(summary(part)))
    if given.out is not None:
        given.out.write_text(page(parts))


if __name__ == "__main__":
    main()
