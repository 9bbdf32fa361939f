"""All causal language models of transformers, one forked process each, and the table of what was found.

python -m tests.zoo.census [--jobs 2] [--only llama,gpt2] [--out docs/zoo.md]
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
from tests.zoo.compare import compare
from tests.zoo.tables import TABLES, Entry, entries
from tests.zoo.overrides import NEEDS, REASONS, WITHOUT_ATTENTION
from transformers import __version__

LIMIT = 60.0  # seconds for one architecture on one implementation
IMPLEMENTATIONS = ("eager", "sdpa")


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
        return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"}
    return dataclasses.asdict(r)


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
    """Whether all layers were found, with the entropies of the weights returned.

    A layer may make two calls (differential attention) and a module may run several times (shared, recurrent).
    """
    if "layers" not in result or not result["error"] < 1e-4:
        return False
    return 0 < result["layers"] in (result["sites"], result["modules"], result["calls"])


def verdict(model_type: str, result: dict[str, Any]) -> str:
    """ok, FAIL, or why it does not count."""
    if model_type in WITHOUT_ATTENTION:
        return "no attention" if "saw no attention" in result.get("reason", "") or _no_sdpa(result) else "FAIL"
    if model_type in NEEDS and "ImportError" in result.get("reason", ""):
        return f"needs {NEEDS[model_type]}"
    if _no_sdpa(result):
        return "no sdpa"
    return "ok" if passed(result) else "FAIL"


def _no_sdpa(result: dict[str, Any]) -> bool:
    return "does not support an attention implementation through" in result.get("reason", "")


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page docs/zoo.md."""
    verdicts = {i: [verdict(n, r[i]) for n, r in results.items()] for i in IMPLEMENTATIONS}
    lines = ["# The zoo", "", *_INTRODUCTION.splitlines(), ""]
    for i in IMPLEMENTATIONS:
        good, bad = verdicts[i].count("ok"), verdicts[i].count("FAIL")
        share = f"{100 * good / max(1, good + bad):.1f} %"
        others = len(verdicts[i]) - good - bad
        lines.append(f"- {i}: {good} of {good + bad} pass ({share}); {others} of {len(verdicts[i])} do not count")
    lines += [
        "",
        "| model type | layers | sites | weights told | error, eager | error, sdpa | remark |",
        "|---|" + "---|" * 6,
    ]
    for name, result in results.items():
        lines.append(_row(name, result))
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""Every causal language model class of transformers {__version__}, built tiny from its configuration
class by `make zoo`. *layers*: attention weights that the model returns with `output_attentions=True`. *sites*: what
`find_sites` found. *weights told*: sites whose heads' rows are known. *error*: largest distance, over layers and
heads, of the entropy to that of the weights returned. A pass needs all layers and an error under 1e-4. *no sdpa*:
transformers has no sdpa for the class."""


def _row(name: str, result: dict[str, dict[str, Any]]) -> str:
    got = next((r for r in result.values() if "layers" in r), {})
    cells = [str(got.get(key, "")) for key in ("layers", "sites", "told")]
    remarks: list[str] = []
    for i in IMPLEMENTATIONS:
        found = verdict(name, result[i])
        error = result[i].get("error")
        cells.append(f"{error:.1e}" if error is not None and found == "ok" else found)
        if found == "FAIL":
            remarks.append(f"{i}: {result[i].get('reason', f'error {error}')}"[:160])
    if remarks and name in REASONS:
        remarks = [f"-: {REASONS[name]}"]
    remarks = remarks[:1] if len({r.split(": ", 1)[1] for r in remarks}) == 1 else remarks
    return f"| {name} | " + " | ".join(cells) + " | " + "; ".join(remarks).replace("|", "/") + " |"


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
            print(verdict(name, result[implementation]), name, implementation, result[implementation])
    page = table(results)
    print("\n".join(line for line in page.splitlines() if line.startswith("- ")))
    if given.out is not None:
        given.out.write_text(page)


if __name__ == "__main__":
    main()
