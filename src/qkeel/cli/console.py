"""What commands print during runs and when they end: lines and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

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
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


@final
class StudyView:
    """Follows a study: prints a line when a run ends, with the time left."""

    def __init__(self, console: Console, runs: Sequence[PlannedRun], out: Path) -> None:
        self.console = console
        self.runs = {str(run_directory(out, run)): run for run in runs}
        self.over: set[str] = set()
        self.before = sum(
            last_step(Path(place)) for place in self.runs
        )  # steps that earlier processes took
        self.started = time.monotonic()

    def on_outcome(self, outcome: Outcome) -> None:
        """Prints the line of a run that has ended."""
        self.over.add(outcome.directory)
        run = self.runs[outcome.directory]
        name = f"[{len(self.over)}/{len(self.runs)}] {run.title}"
        self.console.print(
            escape(f"{name}: {self._result(outcome)}{self._left()}"),
            highlight=False,
            soft_wrap=True,
        )

    def _left(self) -> str:
        """Returns the time left by the steps that all runs took since the start, or "" if unknown or below 10 s."""
        steps = {
            place: run.config.steps if place in self.over else last_step(Path(place))
            for place, run in self.runs.items()
        }
        done = sum(steps.values())
        rest = sum(run.config.steps for run in self.runs.values()) - done
        here = done - self.before
        seconds = (time.monotonic() - self.started) * rest / max(here, 1)
        return f"; about {spent(seconds)} left" if here > 0 and seconds >= 10 else ""

    def _result(self, outcome: Outcome) -> str:
        if outcome.error:
            return f"failed: {outcome.error.splitlines()[0] if outcome.error else ''}"
        row = RunDirectory(Path(outcome.directory)).summary()
        collapsed = ", collapsed" if row["collapsed"] else ""
        return f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}{collapsed}"


@final
class RunView:
    """Follows one run and prints a line per record."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.first: tuple[float, int] | None = None

    def on_record(self, record: Row) -> None:
        """Prints a record of metrics.jsonl as one line: step, losses, grad_norm, max_logit, entropy, tok/s and ETA."""
        now, step = time.monotonic(), record["step"]
        if self.first is None:
            self.first = (now, step)
        seconds = now - self.first[0]
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
    shown = Table(box=None, pad_edge=False)
    names = (
        "accuracy_train",
        "accuracy_nonrepeat",
        "accuracy_repeat",
        "kept_nonrepeat",
    )
    for head in ("block", "form", "post hoc"):
        shown.add_column(head)
    for head in ("length", "trained", "non-repeat", "repeat", "kept", "seeds"):
        shown.add_column(head, justify="right")
    keys = ("block", "form", "posthoc", "test_length")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in table):
        rows = [
            row
            for row in table
            if tuple(row[k] for k in keys) == key
            and row["accuracy_nonrepeat"] is not None
        ]
        means = (
            [100 * sum(row[name] or 0 for row in rows) / len(rows) for name in names]
            if rows
            else []
        )
        cells = (
            [*(f"{mean:.1f}" for mean in means), str(len(rows))] if rows else ["–"] * 5
        )
        shown.add_row(*map(str, key), *cells)
    return shown


def ranking(table: Sequence[Row]) -> Table:
    """Returns a table of the held-out loss and the largest logit, by remedy and learning rate."""
    rows = [row for row in table if row["status"] == "done"]
    lrs = sorted({row["lr"] for row in rows})
    shown = Table(box=None, pad_edge=False)
    shown.add_column("remedy", overflow="fold")
    for lr in lrs:
        shown.add_column(f"lr {lr:g}", justify="right")
    for remedy in dict.fromkeys(row["remedy"] for row in rows):
        cells = []
        for lr in lrs:
            here = [row for row in rows if row["remedy"] == remedy and row["lr"] == lr]
            mean = sum(row["val_loss"] for row in here) / len(here) if here else None
            top = max((row["max_logit"] for row in here), default=None)
            right = [
                row["val_accuracy"]
                for row in here
                if row.get("val_accuracy") is not None
            ]
            share = f", {100 * sum(right) / len(right):.1f} % correct" if right else ""
            bleu = [row["val_bleu"] for row in here if row.get("val_bleu") is not None]
            share += f", BLEU {sum(bleu) / len(bleu):.1f}" if bleu else ""
            cells.append(
                f"{mean:.3f}{share} ({number(top)})" if mean is not None else "–"
            )
        shown.add_row(escape(remedy), *cells)
    return shown
