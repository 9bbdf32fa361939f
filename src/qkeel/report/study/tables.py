"""The ranking, every run, and the runs without a result, as HTML tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from qkeel.records import RunStatus
from qkeel.report.html.formats import count, loss, number, rate, signed
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row, tag, words
from qkeel.report.html.page import details
from qkeel.report.study.collect import RunData, StudyData
from qkeel.report.study.compare import Gain, Spread, Standing, standings

SERIES = 8  # colours in assets/report.css


def swatch(study: StudyData, remedy: str) -> Markup:
    """Returns the remedy's name next to its colour, the same on the whole page."""
    index = study.remedies.index(remedy)
    attributes = {
        "class": "swatch",
        "data-series": str(index % SERIES),
        "data-round": str(index // SERIES),
        "aria-hidden": "true",
    }
    return join([tag("span", attributes), remedy])


def ranking(study: StudyData) -> Markup:
    """Returns a table with one line per remedy; empty where there is nothing to rank."""
    lines = standings(study)
    if not lines:
        return Markup()
    several = len(study.lrs()) > 1
    clips = any(line.sensitivity != line.sensitivity_clipped for line in lines)
    gain_lrs = study.lrs() if any(line.gains for line in lines) else []
    head = columns("Remedy", kind="text")
    head += columns("LR sensitivity", *["… clipped at initial loss"] * clips) if several else []
    head += columns("Best held-out loss", *(f"Gain at LR\u00a0{rate(lr)}" for lr in gain_lrs))
    head += columns("Largest logit", "Alarm step", "Largest LR without collapse", f"CPU, ×\u00a0{study.baseline}")
    body = [_line(study, line, gain_lrs, several + several * clips) for line in lines]
    return table("Ranking of the remedies", head, body, sortable=True)


def _line(study: StudyData, line: Standing, gain_lrs: Sequence[float], sensitivities: int) -> Markup:
    cells = [_loss(line.sensitivity), _loss(line.sensitivity_clipped)][:sensitivities]
    best = f"at LR {rate(line.best_lr)}{', collapsed' if line.collapsed else ''}"
    cells.append(cell(loss(line.best_loss.mean), line.best_loss.mean, best))
    cells += [_gain(line.gains.get(lr), line.remedy == study.baseline) for lr in gain_lrs]
    cells.append(cell(number(line.max_logit), line.max_logit))
    if line.alarm is None:
        cells.append(cell("never", math.inf))
    else:
        cells.append(cell(f"{line.alarm[0]:,}", line.alarm[0], f"at LR {rate(line.alarm[1])}"))
    top = study.lrs()[-1]
    note = "all tried" if line.stable_lr == top else _stable(line.stable_lrs)
    cells.append(cell("no LR" if line.stable_lr is None else rate(line.stable_lr), line.stable_lr or 0.0, note))
    return table_row(swatch(study, line.remedy), *cells, cost_cell(line))


def _loss(total: Spread | None) -> Markup:
    return cell("–", math.inf, "needs every LR") if total is None else spread_cell(total, loss)


def spread_cell(total: Spread, write: Callable[[float], str]) -> Markup:
    """Returns the cell of a mean over seeds with the range below it."""
    return cell(write(total.mean), total.mean, f"{write(total.low)} to {write(total.high)}" if total.n > 1 else "")


def _gain(one: Gain | None, baseline: bool) -> Markup:
    if one is None:
        return cell("" if baseline else "–", -math.inf)
    return gain_cell(one, f"{one.over()}{'; collapsed' if one.collapsed else ''}")


def gain_cell(one: Gain, small: str) -> Markup:
    """Returns the cell of a gain, grey where it is equal, undecided, or of a remedy that collapsed."""
    faint = one.collapsed or one.verdict in ("equal", "undecided")
    return cell(signed(one.mean), one.mean, small, "faint" if faint else "")


def cost_cell(line: Standing) -> Markup:
    """Returns the cell of a remedy's processor time over that of the baseline."""
    return NOTHING if line.cpu_ratio is None else cell(f"{line.cpu_ratio:.2f}", line.cpu_ratio)


def _stable(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else " to ".join("no LR" if end == 0 else rate(end) for end in ends)


RUN_COLUMNS: Mapping[str, str] = {
    "val_loss": "Held-out loss",
    "init_loss": "… before training",
    "max_logit": "Largest logit",
    "end_max_logit": "… at the end",
    "end_entropy": "Entropy at the end",
    "alarm_step": "Alarm step",
    "collapsed": "Collapsed",
    "spike_score": "Spike score",
    "cpu_seconds": "CPU s",
    "steps": "Steps",
}


def every_run(study: StudyData) -> Markup:
    """Returns a table with one line per finished run, drift runs included."""
    runs = [run for run in study.runs if run.row is not None]
    if not runs:
        return Markup()
    head = [*columns("Remedy", kind="text"), *columns("LR", "Seed", *RUN_COLUMNS.values())]
    head += columns("Run", kind="text")
    inner = table("Every finished run", head, [_run_line(study, run) for run in runs], sortable=True)
    return details(count(len(runs), "finished run"), inner)


def _run_line(study: StudyData, run: RunData) -> Markup:
    results = run.row or {}
    cells = [cell(rate(run.lr), run.lr), cell(str(run.seed), run.seed)]
    for name in RUN_COLUMNS:
        value = results.get(name)
        if isinstance(value, bool):
            cells.append(cell("yes" if value else "no", value))
        elif value is None:
            cells.append(NOTHING)
        else:
            text = loss(value) if name in ("val_loss", "init_loss") else _plain(value)
            cells.append(cell(text, value))
    head = join([swatch(study, run.remedy), tag("small", {}, _role(run)) if _role(run) else ""])
    return table_row(head, *cells, words(tag("code", {}, run.run_id)))


def _plain(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)


def without_result(study: StudyData) -> Markup:
    """Returns the failed, unfinished and missing runs, each with what is known; empty where there are none."""
    failed = [_failure(study, run) for run in study.runs if run.status is RunStatus.FAILED]
    waiting = [_waiting(study, status) for status in WAITING]
    items = [item for item in [*failed, *waiting] if item]
    return tag("ul", {"class": "failures"}, *items) if items else Markup("")


WAITING = {
    RunStatus.STARTED: ("unfinished", "They are still running or were stopped; the same command resumes them."),
    RunStatus.MISSING: ("missing", "They are planned, but have no directory yet; the same command runs them."),
}


def _run_name(study: StudyData, run: RunData) -> Markup:
    return join([swatch(study, run.remedy), f", LR {rate(run.lr)}, seed {run.seed}{_role(run)}"])


def _role(run: RunData) -> str:
    return "" if run.role == "grid" else f" ({run.role})"


def _reached(run: RunData) -> str:
    return f" after step {int(run.metrics[-1]['step']):,}" if run.metrics else ""


def _waiting(study: StudyData, status: RunStatus) -> Markup:
    runs = [run for run in study.runs if run.status is status]
    if not runs:
        return Markup("")
    word, hint = WAITING[status]
    names = [tag("span", {"class": "run"}, _run_name(study, run), _reached(run)) for run in runs]
    head = tag("strong", {}, f"{count(len(runs), 'run')} {word}")
    return tag("li", {"class": "waiting"}, head, tag("p", {}, hint), tag("p", {"class": "runs"}, *names))


def _failure(study: StudyData, run: RunData) -> Markup:
    lines = [line for line in run.error.strip().splitlines() if line.strip()]
    title = join([_run_name(study, run), ": ", tag("strong", {}, "failed" + _reached(run))])
    last = tag("p", {"class": "error"}, tag("code", {}, lines[-1] if lines else "no message was written"))
    if len(lines) < 2:
        return tag("li", {}, title, last)
    return tag("li", {}, title, last, details("Traceback", tag("pre", {}, run.error.strip())))
