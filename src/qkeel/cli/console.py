"""What commands print during runs and when they end: lines and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qkeel.lab.execute import last_step, run_directory
from qkeel.lab.executors import Outcome
from qkeel.lab.plan import PlannedRun
from qkeel.metrics import Row
from qkeel.records import RunDirectory
from qkeel.report.html import number

# The output during runs.


def make_console(stderr: bool = False) -> Console:
    """Returns a console, which is 200 characters wide if it writes to a pipe or file."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200)


def print_line(console: Console, text: str) -> None:
    """Prints one line unchanged, however long: paths are not broken, and brackets are not read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def spent(seconds: float) -> str:
    """Returns a number of seconds as text, like 8 s, 1 min 20 s or 2 h 05 min.

    >>> spent(80)
    '1 min 20 s'
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@final
class StudyView:
    """Follows a study: prints a line when a run ends, with the time left."""

    def __init__(self, console: Console, runs: Sequence[PlannedRun], out: Path) -> None:
        self.console = console
        self.runs = {str(run_directory(out, run)): run for run in runs}
        self.over: set[str] = set()
        # Steps that earlier processes took.
        self.before = sum(last_step(Path(directory)) for directory in self.runs)
        self.started = time.monotonic()

    def on_outcome(self, outcome: Outcome) -> None:
        """Prints the line of a run that has ended, with the time left by the steps that all runs took since the start
        if that is 10 s or more."""
        self.over.add(outcome.directory)
        run = self.runs[outcome.directory]
        if outcome.error:
            text = f"failed: {outcome.error.splitlines()[0]}"
        else:
            row = RunDirectory(Path(outcome.directory)).summary()
            text = (
                f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}"
            )
            text += ", collapsed" if row["collapsed"] else ""
        taken, total = -self.before, 0
        for directory, planned in self.runs.items():
            is_over = directory in self.over
            steps = planned.config.steps
            taken += steps if is_over else last_step(Path(directory))
            total += steps
        left = total - self.before - taken
        seconds = (time.monotonic() - self.started) * left / max(taken, 1)
        if taken > 0 and seconds >= 10:
            text += f"; about {spent(seconds)} left"
        line = f"[{len(self.over)}/{len(self.runs)}] {run.title}: {text}"
        self.console.print(escape(line), highlight=False, soft_wrap=True)


@final
class RunView:
    """Follows one run and prints a line per record."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.first: tuple[float, int] | None = None

    def on_record(self, record: Row) -> None:
        """Prints a record of metrics.jsonl as one line: step, losses, grad_norm, max_logit, entropy, tok/s and ETA."""
        at, step = time.monotonic(), record["step"]
        if self.first is None:
            self.first = (at, step)
        seconds = at - self.first[0]
        line = f"step {step:>{len(str(self.steps))}}"
        for name, label in (
            ("train_loss", "loss"),
            ("val_loss", "val_loss"),
            ("grad_norm", "grad_norm"),
        ):
            if record[name] is not None:
                line += f"  {label} {record[name]:.3f}"
        line += f"  max_logit {number(record['max_logit'])}  entropy {record['entropy']:.2f}"
        if step > self.first[1] and seconds > 0:
            left = (self.steps - step) * seconds / (step - self.first[1])
            line += f"  tok/s {number(record['tokens_per_second'])}  ETA {spent(left)}"
        self.console.print(line, highlight=False, soft_wrap=True)


def extrapolated(table: Sequence[Row]) -> Table:
    """Returns a table of accuracies and the shares of accuracy retained, by block, form, method and length."""
    shown = _table("block", "form", "post hoc")
    for title in ("length", "trained", "non-repeat", "repeat", "kept", "seeds"):
        shown.add_column(title, justify="right")
    names = ("train", "nonrepeat", "repeat")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in table:
        key = tuple(row[k] for k in ("block", "form", "posthoc", "test_length"))
        rows = groups.setdefault(key, [])
        if row["accuracy_nonrepeat"] is not None:
            rows.append(row)
    for key, rows in groups.items():
        cells = ["–"] * 5
        if rows:
            fields = [*(f"accuracy_{name}" for name in names), "kept_nonrepeat"]
            means = [_mean([row[field] or 0 for row in rows]) for field in fields]
            cells = [*(f"{100 * mean:.1f}" for mean in means), str(len(rows))]
        shown.add_row(*map(str, key), *cells)
    return shown


def ranking(runs: Sequence[Row]) -> Table:
    """Returns a table of the held-out loss and the largest logit, by remedy and learning rate."""
    done = [run for run in runs if run["status"] == "done"]
    lrs = sorted({run["lr"] for run in done})
    shown = _table("remedy")
    for lr in lrs:
        shown.add_column(f"lr {lr:g}", justify="right")
    for remedy in dict.fromkeys(run["remedy"] for run in done):
        cells = []
        for lr in lrs:
            of_cell = [
                run for run in done if (run["remedy"], run["lr"]) == (remedy, lr)
            ]
            if not of_cell:
                cells.append("–")
                continue
            cell = f"{_mean([run['val_loss'] for run in of_cell]):.3f}"
            for field, factor, text in (
                ("val_accuracy", 100, ", {:.1f} % correct"),
                ("val_bleu", 1, ", BLEU {:.1f}"),
            ):
                values = [run[field] for run in of_cell if run.get(field) is not None]
                cell += text.format(factor * _mean(values)) if values else ""
            cells.append(f"{cell} ({number(max(run['max_logit'] for run in of_cell))})")
        shown.add_row(escape(remedy), *cells)
    return shown


def _table(*titles: str) -> Table:
    shown = Table(box=None, pad_edge=False)
    for title in titles:
        shown.add_column(title, overflow="fold")
    return shown


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
