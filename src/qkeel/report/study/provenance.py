"""The verdict table of a study, and the sections on remedies, provenance and definitions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import get_args

from qkeel.errors import RunDirectoryError
from qkeel.metrics import ALARM_THRESHOLD, COLLAPSE_ENTROPY, Row, Verdict
from qkeel.records import EXTRAPOLATION_COLUMNS, STEP_FIELDS, TABLE_COLUMNS, TASK_FIELDS
from qkeel.report import html as h
from qkeel.report.html import Markup
from qkeel.report.study.collect import RunData, StudyData, duration, written_times
from qkeel.report.study.compare import MARGIN, PairedGain, Standing, cost_cell, gain_cell, standings, swatch

# The verdict table: each remedy's gain with its interval, largest logit, collapses and cost.


def verdict_table(study: StudyData) -> Markup:
    """Returns a table with one row per remedy, sorted by collapses and then by gain; empty for a single remedy.

    If the study has a primary comparison, the table contains only the collapses and largest logits at each rate, which
    need no test.

    >>> verdict_table(StudyData(name="", command="", remedies=(), runs=()))
    ''
    """
    lines, rows = standings(study), study.rows()
    if len(lines) < 2:
        return Markup("")
    if study.primary:
        return _certain(study, rows)
    fallen = {line.remedy: collapsed_at(rows, line.remedy) for line in lines}
    lines.sort(key=lambda line: (line.remedy == study.baseline, len(fallen[line.remedy]), -_shown(line)[1]))
    head = [
        *h.columns("Remedy", f"Against {study.baseline}", kind="text"),
        *h.columns("Gain", "Largest logit", "Collapsed at"),
    ]
    head += h.columns(f"Cost: CPU, ×\u00a0{study.baseline}")
    return h.table("Verdict", head, [_line(study, line, fallen[line.remedy]) for line in lines], sortable=True)


def advice(study: StudyData) -> Markup:
    """Returns the verdict of a study for the page of a watched model: its table, and the line for the best remedy.

    Raises:
        RunDirectoryError: the study does not compare remedies.
    """
    verdict = verdict_table(study)
    if not verdict:
        raise RunDirectoryError(
            f"{study.name or study.runs[0].path} compares no remedies: expected a study with runs of several remedies, "
            "such as `qkeel study lr` writes. Omit it, or create a separate page for it."
        )
    rows = study.rows()
    judged = [gain for line in standings(study) for gain in line.gains.values()]
    shown = [gain for gain in judged if gain.praised]
    best = max(shown, key=lambda gain: (not collapsed_at(rows, gain.remedy), gain.mean), default=None)
    text = f"From {study.name or 'runs of the lab'}, {h.count(len(study.rows()), 'run')} of a small model: "
    if best is None:
        return h.join([h.note(f"{text}no remedy is shown to be better than {study.baseline}."), verdict])
    text += (
        f"{best.remedy} gains most, {h.signed(best.mean)} {study.loss_unit()} at LR {h.rate(best.lr)} ({best.over()})."
    )
    line = h.command_block(f'qkeel.apply(model, "{best.remedy}", optimizer)')
    return h.join([h.note(text), h.tag("div", {"class": "remedy-line"}, line), verdict])


def _certain(study: StudyData, rows: Sequence[Row]) -> Markup:
    """Returns, per remedy and rate, the number of runs whose attention collapsed and the largest logit of all runs."""
    lrs = study.lrs()
    head = h.columns("Remedy", kind="text")
    for lr in lrs:
        head += h.columns(f"Collapsed at LR\u00a0{h.rate(lr)}", f"Largest logit at LR\u00a0{h.rate(lr)}")
    body = []
    for remedy in study.remedies:
        cells = []
        for lr in lrs:
            here = [row for row in rows if row["remedy"] == remedy and row["lr"] == lr]
            fallen, top = sum(row["collapsed"] for row in here), max((row["max_logit"] for row in here), default=0.0)
            cells += (
                [h.cell(f"{fallen} of {len(here)}", fallen), h.cell(h.number(top), top)]
                if here
                else [h.NOTHING, h.NOTHING]
            )
        body.append(h.table_row(swatch(study, remedy), *cells))
    return h.table("Counts", head, body, sortable=True)


def collapsed_at(rows: Sequence[Row], remedy: str) -> list[str]:
    """Returns the rates at which attention collapsed with a remedy, with the number of seeds unless all collapsed."""
    found = []
    for lr in sorted({row["lr"] for row in rows}):
        here = [row["collapsed"] for row in rows if row["remedy"] == remedy and row["lr"] == lr]
        if any(here):
            found.append(h.rate(lr) + ("" if all(here) else f" ({sum(here)} of {len(here)} seeds)"))
    return found


def _line(study: StudyData, line: Standing, fallen: Sequence[str]) -> Markup:
    gain, _ = _shown(line)
    shown = h.NOTHING if gain is None else gain_cell(gain, f"at LR {h.rate(gain.lr)}: {gain.over()}")
    return h.table_row(
        swatch(study, line.remedy),
        h.tag("td", {"class": "text wide"}, _words(line, study.baseline)),
        h.cell("", -math.inf) if line.remedy == study.baseline else shown,
        h.cell(h.number(line.max_logit), line.max_logit),
        h.cell(f"LR {h.listing(fallen)}" if fallen else "never", len(fallen)),
        cost_cell(line),
    )


def _shown(line: Standing) -> tuple[PairedGain | None, float]:
    """Returns the gain that represents a remedy, which is at the highest rate at which its attention works, and its
    mean."""
    works = [gain for gain in line.gains.values() if not gain.collapsed and math.isfinite(gain.mean)]
    best = max(works, key=lambda gain: gain.lr, default=None)
    return best, -math.inf if best is None else best.mean


def _words(line: Standing, baseline: str) -> str:
    """Returns the verdicts by rate; rates with collapsed attention get no verdict on the loss."""
    if line.remedy == baseline:
        return "the baseline"
    at = {
        verdict: [
            h.rate(lr) for lr, gain in sorted(line.gains.items()) if not gain.collapsed and gain.verdict == verdict
        ]
        for verdict in get_args(Verdict)
    }
    parts = [f"{verdict} at LR {h.listing(lrs)}" for verdict, lrs in at.items() if lrs]
    fallen = [h.rate(lr) for lr, gain in sorted(line.gains.items()) if gain.collapsed]
    parts += [f"attention collapsed at LR {h.listing(fallen)}"] if parts and fallen else []
    return "; ".join(parts) or ("collapsed wherever it was tried" if line.gains else "not compared: no seed has both")


# The sections below the charts: formulas and sources of remedies, provenance, definitions.

_MOST_VALUES = 8  # number of values of one kind to list; further values are counted
ARXIV = re.compile(r"\b(\d{4}\.\d{4,5})\b")


def remedies(study: StudyData) -> Markup:
    """Returns, for each remedy, its description, the formula and its source."""
    items = []
    for remedy in study.remedies:
        env = next((run.env for run in study.runs if run.remedy == remedy and run.env.get("formula")), None)
        if env is not None:
            items.append(_remedy(study, remedy, env))
    return h.tag("div", {"class": "remedies"}, *items) if items else Markup("")


def _remedy(study: StudyData, remedy: str, env: Row) -> Markup:
    own = any(run.remedy == remedy and run.config.get("remedy") == remedy for run in study.runs)
    # For an attention form, the line and source would be those of the remedy "none"; only the formula is specific.
    line, source = (str(env.get(name) or "") if own else "" for name in ("remedy_line", "remedy_source"))
    return h.tag(
        "section",
        {"class": "remedy"},
        h.tag("h3", {}, swatch(study, remedy)),
        h.tag("p", {}, line) if line else "",
        h.tag("pre", {}, str(env["formula"]).strip("\n")),
        h.tag("p", {"class": "source"}, "Source: ", _linked(source)) if source else "",
    )


def _linked(source: str) -> Markup:
    """Turns arXiv numbers in a source into links."""
    parts: list[str] = []
    for i, part in enumerate(ARXIV.split(source)):
        link = h.tag("a", {"href": f"https://arxiv.org/abs/{part}", "rel": "noreferrer"}, part)
        parts.append(link if i % 2 else part)
    return h.join(parts)


Reads = dict[str, Callable[[RunData], object]]


def _in_env(**names: str) -> Reads:
    """Returns readers of names in env.json, by their labels."""
    return {words: lambda run, name=name: run.env.get(name) for words, name in names.items()}


_READS: Reads = {
    **_in_env(qkeel="qkeel", Commit="commit", Python="python", torch="torch", System="system", Processor="cpu"),
    "Compiled kernels": lambda run: run.env.get("compiled_kernels") and "yes",
    "Device": lambda run: " ".join(str(run.env[k]) for k in ("device", "dtype") if run.env.get(k)),
    "Corpus": lambda run: _corpus(run.env.get("corpus")),
    "Corpus SHA-256": lambda run: corpus.get("sha256") if isinstance(corpus := run.env.get("corpus"), dict) else None,
    "Model": lambda run: _settings(run.config.get("model")),
    "Parameters": lambda run: _number(run.env.get("n_parameters")),
    "Optimizer": lambda run: _settings(run.config.get("optim"), leave=("lr",)),
    "Steps": lambda run: _number(run.config.get("steps")),
}
# Runs whose losses are compared must agree in these settings.
_ALIKE: Reads = {
    "corpus": _READS["Corpus SHA-256"],
    "steps": lambda run: run.config.get("steps"),
    "model": lambda run: json.dumps(_compared(run), sort_keys=True, default=str),
    **_in_env(dtype="dtype", device="device", torch="torch", processor="cpu", kernels="compiled_kernels"),
}


def provenance(study: StudyData) -> Markup:
    """Returns the versions, machine, corpus, model, and the commands that reproduce the page's runs."""
    found: dict[str, str | list[str]] = dict(written_times(*(run.path for run in study.runs if run.row is not None)))
    spent = sum(run.row["cpu_seconds"] for run in study.runs if run.row and math.isfinite(run.row["cpu_seconds"]))
    found |= {"Processor time": duration(spent)} if spent else {}
    for name, read in _READS.items():
        values = list(dict.fromkeys(str(value) for run in study.runs if (value := read(run))))
        if values:
            more = [f"and {h.count(len(values) - _MOST_VALUES, 'more value')}"] if len(values) > _MOST_VALUES else []
            found[name] = [*values[:_MOST_VALUES], *more]
    if study.tuned:
        found["Rates, chosen on other seeds"] = [_chosen(choice) for choice in study.tuned]
    own = dict.fromkeys(str(run.env["command"]) for run in study.runs if run.env.get("command"))
    return h.join([h.facts(found), h.make_again(study.command or "\n".join(own))])


def unlike(study: StudyData) -> str:
    """Returns what differs between runs of one grid, so that their losses are not comparable; "" if nothing does."""
    runs = [run for run in study.runs if run.row is not None and run.role != "drift"]
    return ", ".join(name for name, read in _ALIKE.items() if len({read(run) for run in runs}) > 1)


def _compared(run: RunData) -> object:
    """Returns the model settings that must agree, which are all except the attention if the study compares forms."""
    model = run.config.get("model")
    if isinstance(model, dict) and run.config.get("remedy") != run.remedy and run.long:
        return {k: v for k, v in model.items() if k != "attention"}
    return model


def _corpus(corpus: object) -> str | None:
    if not isinstance(corpus, dict):
        return None
    parts = [str(corpus.get("name") or "")]
    for key, word in (("train_tokens", "training tokens"), ("heldout_tokens", "held out"), ("vocab_size", "symbols")):
        if isinstance(corpus.get(key), int):
            parts.append(f"{corpus[key]:,} {word}")
    return ", ".join(part for part in parts if part)


def _number(value: object) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def _chosen(choice: Row) -> str:
    """Returns the rate of a remedy, and whether it is at the border of the grid."""
    part = "" if choice.get("role") == "grid" else f"{choice.get('role')}: "
    edge = f", the {choice['border']} of the grid" if choice.get("border") else ""
    return f"{part}{choice.get('remedy')} {choice.get('lr')}{edge}"


def _settings(value: object, leave: tuple[str, ...] = ()) -> str | None:
    if not isinstance(value, dict):
        return None
    return ", ".join(f"{k} {_word(v)}" for k, v in value.items() if k not in leave and v is not None)


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def definitions() -> Markup:
    """Returns the definition of each value on the page."""
    own = {
        "Collapsed": f"The mean attention entropy is under {COLLAPSE_ENTROPY} nats after the last step, or the "
        "held-out loss is NaN or no better than before training.",
        "Alarm line": f"A largest attention logit above {h.number(ALARM_THRESHOLD)} nats. Alarm step: the first logged "
        "step above it; in the ranking, the earliest over LRs and seeds.",
        "LR sensitivity": "Mean over learning rates of the held-out loss minus the smallest held-out loss, per seed; "
        "then the mean and bootstrap interval over seeds. Clipped: losses above the loss at initialisation count as "
        "that loss (Wortsman "
        "et al. 2023, arXiv 2309.14322).",
        "Gain": "Held-out loss of none minus that of the remedy, seed by seed, with the same initial weights and the "
        "same batches. Positive means that the remedy is better. Below it is the interval of the mean by Student's t, "
        "at 95 % for all "
        "gains of the table at once (Holm), or for each gain alone if the study names a primary comparison.",
        "Verdict": f"Better or worse: the interval lies beyond ±{MARGIN:g} nats. Equal: it lies inside. Otherwise: "
        "undecided. "
        "One seed has no interval and no verdict. A remedy whose attention collapsed is not called better.",
        "Chaos floor": "The change in the final held-out loss caused by one float32 step in one weight, as the root "
        "mean square over the "
        "pairs of runs of a chaos study with the same configuration; for two remedies, the root of the sum of their "
        "squares. "
        "Rounding alone can explain any smaller difference in a single pair.",
        "Largest LR without collapse": "The largest learning rate up to which no run of the remedy collapsed, with its "
        "bootstrap interval over seeds.",
        "CPU, × none": "CPU seconds of the remedy divided by those of none, summed over the LRs and seeds of both.",
    }
    names = {**EXTRAPOLATION_COLUMNS, **TASK_FIELDS, **STEP_FIELDS, **TABLE_COLUMNS}
    recorded = {name: f"{field.meaning} [{field.unit}]" for name, field in names.items()}
    return h.join([h.facts(own), h.details("Every recorded field", h.facts(recorded, code=True))])
