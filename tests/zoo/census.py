"""All causal language models of transformers, one forked process each, and the table of what was found.

python -m tests.zoo.census [--jobs 2] [--only llama,gpt2] [--out docs/zoo.md]
"""

from __future__ import annotations

import argparse
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
from tests.zoo.compare import compare
from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LIMIT = 60.0  # seconds for one architecture on one implementation
IMPLEMENTATIONS = ("eager", "sdpa")


def judge(model_type: str, implementation: str) -> dict[str, Any]:
    """The result as a dict, or the reason why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            r = compare(model_type, implementation)
    except BaseException as error:
        tail = traceback.extract_tb(error.__traceback__)[-1]
        cause = error.__cause__
        where = f"{Path(tail.filename).name}:{tail.lineno}"
        if cause is not None and cause.__traceback__ is not None:
            last = traceback.extract_tb(cause.__traceback__)[-1]
            where += f" < {Path(last.filename).name}:{last.lineno}"
        return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"}
    return {"layers": r.layers, "sites": r.sites, "error": r.error, "told": r.told}


def in_child(task: tuple[str, str], folder: Path) -> int:
    """Fork a process for a task; it writes its result to a file."""
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    (folder / ".".join(task)).write_text(json.dumps(judge(*task)))
    os._exit(0)


def run(names: list[str], jobs: int, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Results per model type and implementation."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    compare("llama", "sdpa")  # what every architecture needs is imported once, before the forks
    tasks = [(n, i) for n in names for i in IMPLEMENTATIONS]
    running: dict[int, tuple[tuple[str, str], float]] = {}
    late: set[tuple[str, str]] = set()
    queue = list(tasks)
    while queue or running:
        while queue and len(running) < jobs:
            task = queue.pop(0)
            (folder / ".".join(task)).unlink(missing_ok=True)
            running[in_child(task, folder)] = (task, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(pid, None)
        for child, (task, start) in running.items():
            if time.monotonic() - start > LIMIT and task not in late:
                late.add(task)
                os.kill(child, signal.SIGKILL)
        if not pid:
            time.sleep(0.05)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, implementation in tasks:
        path = folder / f"{name}.{implementation}"
        got = json.loads(path.read_text()) if path.exists() else {"reason": f"no result within {LIMIT:.0f} s"}
        results.setdefault(name, {})[implementation] = got
    return results


def passed(result: dict[str, Any]) -> bool:
    """Whether all layers were found, with the entropies of the weights returned."""
    return "layers" in result and 0 < result["layers"] == result["sites"] and result["error"] < 1e-4


def main() -> None:
    """Run the census and print or write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/qkeel-zoo"))
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    results = run(names, given.jobs, given.folder)
    for name, result in results.items():
        for implementation in IMPLEMENTATIONS:
            print("ok  " if passed(result[implementation]) else "FAIL", name, implementation, result[implementation])
    print(__version__, {i: sum(passed(r[i]) for r in results.values()) for i in IMPLEMENTATIONS}, len(results))


if __name__ == "__main__":
    main()
