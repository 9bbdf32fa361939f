"""What commands print during runs and when they end: lines and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qkeel.lab.execute import run_directory
from qkeel.lab.executors import Outcome
from qkeel.lab.plan import PlannedRun
from qkeel.metrics import Row
from qkeel.records import RunDirectory
from qkeel.report.html import number

# The output during runs.


def make_console() -> Console:
    """Returns a console, which is 200 characters wide if it writes to a pipe or file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


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
        self.left = dict(self.runs)
        self.started = time.monotonic()

    def on_outcome(self, outcome: Outcome) -> None:
        """Prints the line of a run that has ended, with the time that the others will take by the steps of those that
        have ended, if that is 10 s or more."""
        run = self.left.pop(outcome.directory)
        if outcome.error:
            text = f"failed: {outcome.error.splitlines()[0]}"
        else:
            row = RunDirectory(Path(outcome.directory)).summary()
            text = (
                f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}"
            )
            text += ", collapsed" if row["collapsed"] else ""
        total = sum(planned.config.steps for planned in self.runs.values())
        left = sum(planned.config.steps for planned in self.left.values())
        seconds = (time.monotonic() - self.started) * left / (total - left)
        if seconds >= 10:
            text += f"; about {spent(seconds)} left"
        n_ended = len(self.runs) - len(self.left)
        line = f"[{n_ended}/{len(self.runs)}] {run.title}: {text}"
        self.console.print(escape(line), highlight=False, soft_wrap=True)


@final
class RunView:
    """Follows one run and prints a line per record."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def on_record(self, record: Row) -> None:
        """Prints a record of metrics.jsonl as one line: step, losses, grad_norm, max_logit, entropy and tok/s."""
        line = f"step {record['step']:>{len(str(self.steps))}}"
        for name, label in (
            ("train_loss", "loss"),
            ("val_loss", "val_loss"),
            ("grad_norm", "grad_norm"),
        ):
            if record[name] is not None:
                line += f"  {label} {record[name]:.3f}"
        line += f"  max_logit {number(record['max_logit'])}  entropy {record['entropy']:.2f}"
        if record["tokens_per_second"] is not None:
            line += f"  tok/s {number(record['tokens_per_second'])}"
        self.console.print(line, highlight=False, soft_wrap=True)


def ranking(runs: Sequence[Row]) -> Table:
    """Returns a table of the held-out loss and the largest logit, by remedy and learning rate."""
    done = [run for run in runs if run["status"] == "done"]
    lrs = sorted({run["lr"] for run in done})
    shown = Table(box=None, pad_edge=False)
    shown.add_column("remedy", overflow="fold")
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
