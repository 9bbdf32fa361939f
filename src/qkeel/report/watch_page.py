"""The page about a watched run: reading the run, findings, charts and sections.

Shapes: n samples, layers, heads.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT, Row, drift, growth_exponent
from qkeel.records import (
    BLOCK_FIELDS,
    CLASS_FIELDS,
    HEAD_FIELDS,
    LAYER_FIELDS,
    LINEAR,
    MONITOR_EXTREMES,
    MONITOR_FIELDS,
    VALUE_FIELDS,
    Field,
    Heads,
    RunDirectory,
    RunStatus,
    fold_heads,
    head_field,
    layer_types,
    measured_field,
    of_layers,
)
from qkeel.report import html as h
from qkeel.report.html import Chart, Finding, Markup, Page, Section
from qkeel.report.study.collect import StudyData, as_number, differences, written_times
from qkeel.report.study.provenance import advice

# Reading the directory of a watched model. Nothing on disk is changed.

KIND = "watch"
INTERVENTIONS = ("autopilot", "decision", "refused", "effect")
LEAST_SAMPLES = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The head with the largest logit in the last sample."""

    layer: int
    head: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A watched run; `records` [n] and `heads` [n layers heads] belong to the same n steps."""

    path: Path
    name: str
    status: RunStatus
    about: Row
    env: Row
    records: Sequence[Row]
    heads: Heads
    eval_records: Sequence[Row] = ()
    eval_heads: Heads
    alarms: Sequence[Row] = ()
    interventions: Sequence[Row] = ()  # an autopilot's start, decisions, refusals and effects
    notes: Sequence[Row] = ()

    @property
    def steps(self) -> list[int]:
        """The step of each sample."""
        return [int(record["step"]) for record in self.records]

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the attention layers."""
        return self.heads.layers

    @property
    def types(self) -> dict[str, str]:
        """The type of each layer, if the run recorded it."""
        return layer_types(self.about, self.notes)

    def measured(self) -> list[str]:
        """Returns the head fields that were ever measured, in the order of the file."""
        return [name for name, values in self.heads.values.items() if not np.isnan(values).all()]

    def by_layer(self, name: str) -> np.ndarray | None:
        """Returns [n layers], a head field folded over heads or a value of each layer or block; None if unknown."""
        if of_layers(name):
            found = [[as_number(record.get(f"{name}/{layer}")) for layer in self.layers] for record in self.records]
            return np.array(found).reshape(len(self.records), len(self.layers))
        heads = self.heads.values.get(measured_field(name))
        return None if heads is None or not len(heads) else fold_heads(name, heads)

    def more(self) -> list[str]:
        """Returns the further values per layer that were measured: those of records.LAYER_FIELDS and BLOCK_FIELDS, and
        the values per head that the monitor's table shows."""
        fields = {**HEAD_FIELDS, **LAYER_FIELDS, **BLOCK_FIELDS}
        names = [n for n, f in fields.items() if n not in LINES and (f.column or n not in HEAD_FIELDS)]
        known = {name: self.by_layer(name) for name in names}
        return [name for name, values in known.items() if values is not None and not np.isnan(values).all()]

    def overall(self, name: str) -> np.ndarray:
        """Returns [n], a value of the entire model, as recorded or computed from its heads; NaN if neither exists."""
        return overall(self.records, self.heads, name)

    @property
    def acted(self) -> bool:
        """True if an autopilot applied a remedy during the run."""
        return any(event.get("event") == "decision" and event.get("remedy") for event in self.interventions)

    def leader(self, sample: int = -1) -> Leader | None:
        """Returns the head with the largest logit in a sample, by default the last; None if no head was measured."""
        values = self.heads.values.get("max_logit")
        if values is None or not -len(values) <= sample < len(values) or np.isnan(values[sample]).all():
            return None
        layer, head = (int(i) for i in np.unravel_index(int(np.nanargmax(values[sample])), values[sample].shape))
        return Leader(layer=layer, head=head, name=self.layers[layer] if self.layers else f"layer {layer}")

    def exponent(self) -> float:
        """Returns p of max_logit ~ steps^p over the second half of the samples; NaN if there are too few samples."""
        since = -max(LEAST_SAMPLES, len(self.records) // 2)
        return growth_exponent(self.steps[since:], self.overall("max_logit")[since:].tolist(), LEAST_SAMPLES)


def overall(records: Sequence[Row], heads: Heads, name: str) -> np.ndarray:
    """See Watched.overall."""
    recorded = np.array([as_number(record.get(name)) for record in records])
    values = heads.values.get(name)
    if values is None or not len(values) or not np.isnan(recorded).all():
        return recorded
    return fold_heads(name, values.reshape(len(values), -1))


def is_watched(path: Path) -> bool:
    """True if the directory belongs to a watched model."""
    directory = RunDirectory(path)
    if directory.status is RunStatus.MISSING:
        return False
    return directory.config().get("kind") == KIND


def read_watched(paths: Sequence[Path]) -> list[Watched]:
    """Reads the runs. Runs with equal names are named by their path, and several runs also by the settings that differ.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    runs = [_read(path) for path in paths]
    times = Counter(run.name for run in runs)
    apart = differences([{**run.about, **run.env} for run in runs]) if len(runs) > 1 else [""]
    names = [str(run.path) if times[run.name] > 1 else run.name for run in runs]
    return [dataclasses.replace(r, name=f"{n} ({d})" if d else n) for r, n, d in zip(runs, names, apart, strict=True)]


def _read(path: Path) -> Watched:
    directory = RunDirectory(path)
    events = directory.events()
    records, heads = _aligned(directory.metrics(), _heads(directory, "heads"))
    eval_records, eval_heads = _aligned(directory.eval_metrics(), _heads(directory, "eval_heads"))
    return Watched(
        path=path,
        name=path.resolve().name,
        status=directory.status,
        about=directory.config(),
        env=directory.env() if (path / "env.json").exists() else {},
        records=records,
        heads=heads,
        eval_records=eval_records,
        eval_heads=eval_heads,
        alarms=[event for event in events if event.get("event") == "alarm"],
        interventions=[event for event in events if event.get("event") in INTERVENTIONS],
        notes=[event for event in events if event.get("event") not in ("alarm", *INTERVENTIONS)],
    )


def _heads(directory: RunDirectory, name: str) -> Heads:
    if not (directory.path / f"{name}.json").exists():
        return Heads(steps=np.zeros(0, np.int64), values={})
    return directory.heads() if name == "heads" else directory.eval_heads()


def _aligned(records: Sequence[Row], heads: Heads) -> tuple[Sequence[Row], Heads]:
    """Restricts records and heads to their common steps, as a killed run may lack the heads of its last step."""
    if not heads.values:
        return records, heads
    row = {int(step): i for i, step in enumerate(heads.steps)}
    records = [record for record in records if record["step"] in row]
    rows = [row[record["step"]] for record in records]
    values = {name: v[rows].astype(np.float64) for name, v in heads.values.items()}
    return records, Heads(steps=heads.steps[rows], values=values, layers=heads.layers)


# The table of token classes: ratios of norms between classes, and attention by pairs of classes.

_INDEX = {"query_competition": "|q| ratio", "key_competition": "|k| ratio"}


def class_names(run: Watched) -> list[str]:
    """Returns the measured fields that are split by token class."""
    return [name for name in run.measured() if name.partition("/")[0] in CLASS_FIELDS]


def class_tables(runs: Sequence[Watched]) -> Markup:
    """Returns a table per run of its last sample, by layer: ratios of norms, their change, and attention weights."""
    parts = []
    for run in runs:
        names = class_names(run)
        if not names or not run.records:
            continue
        pairs = [name for name in names if name.startswith("class_mass/")]
        shown = [name for name in _INDEX if name in names]
        head = h.columns("Layer", kind="text")
        for name in shown:
            head += h.columns(_INDEX[name], "since the start")
        head += h.columns(*(f"{name.partition('/')[2].replace('->', ' → ')}, weight" for name in pairs))
        body = [_line(run, i, shown, pairs) for i in range(len(run.layers))]
        text = (
            "Ratio: mean norm of the class with the largest norm, divided by that of the class with the smallest norm, "
            "averaged over heads, followed by the factor by which it has changed since the first sample. Weight: the "
            "weight that queries of the first class give to all keys of the second class; in brackets, the weight that "
            "they would give if all keys had the same weight."
        )
        title = f"Token classes of {run.name} at step {run.steps[-1]:,}"
        parts += [h.tag("p", {}, text), h.table(title, head, body, sortable=True)]
    return h.join(parts)


def _line(run: Watched, layer: int, shown: Sequence[str], pairs: Sequence[str]) -> Markup:
    cells = []
    for name in shown:
        course = fold_heads(name, run.heads.values[name][:, layer])
        for value in (float(course[-1]), drift(course)):
            cells.append(h.measured(value))
    for name in pairs:
        value = float(fold_heads(name, run.heads.values[name][-1, layer]))
        uniform = run.heads.values.get(f"class_uniform_mass/{name.partition('/')[2]}")
        even = "" if uniform is None else f"({h.number(float(fold_heads(name, uniform[-1, layer])))})"
        cells.append(h.measured(value, even))
    return h.table_row(run.layers[layer], *cells)


# The sentences at the top of the page, each computed from numbers and omitted if they are missing.

LEVEL = 0.05  # a smaller exponent does not count as growth
CLEAR = 1.25  # a smaller factor does not count as a cause


def findings(runs: Sequence[Watched]) -> list[Finding]:
    """Returns the sentences below the verdict: one verdict each for several runs, or the results of a single run."""
    if len(runs) > 1:
        return [Finding("note", f"{run.name}: {verdict(run).text}") for run in runs]
    run = runs[0]
    texts = [_growth(run), _growth_or_angle(run), _entropy(run), _loss(run), _evaluation(run)]
    found = [Finding("note", text) for text in texts if text]
    return found + [Finding("caution", text) for text in _cautions(run)]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The first sentence of a page and its traffic light: good, large, bad, or none if nothing is known.

    `why` explains attention logits and their effect to readers who are new to them.
    """

    light: str
    text: str
    why: str = ""


def verdict(run: Watched) -> Verdict:
    """Returns whether the run is healthy, in one sentence with the largest logit and the threshold."""
    if not run.records:
        return Verdict("none", "Nothing is recorded yet.")
    values = run.overall("max_logit")
    known = values[~np.isnan(values)]
    now = float(known[-1]) if len(known) else math.nan
    peak = float(known.max()) if len(known) else math.nan
    span = f"in {h.count(run.steps[-1], 'step')}" if run.steps[-1] else "at the first step"
    grave = [alarm for alarm in run.alarms if alarm.get("severity") != "notice"]
    head = run.leader()
    at_peak = run.leader(int(np.nanargmax(values))) if len(known) else None
    where = "" if at_peak is None else f" in {at_peak.name}, head {at_peak.head}"
    # An alarm is outdated once an autopilot has brought the logits back below the alarm threshold.
    if grave and not (run.acted and now <= ALARM_THRESHOLD):
        first = grave[0]
        cause = str(first.get("cause") or CAUSE)
        text = f"{cause[0].upper()}{cause[1:]} since step {first['step']:,}"
        if cause != CAUSE or math.isnan(peak):
            return Verdict("bad", f"{text}: {first.get('meaning')}{place(first)}.", _WHY if cause == CAUSE else "")
        place_now = "" if head is None else f" ({head.name}, head {head.head})"
        at_most = f"; the peak was {h.number(peak)}" if peak > 1.05 * now else ""
        broken = next((alarm for alarm in grave if alarm.get("rule") == NON_FINITE_RULE), None)
        lost = "" if broken is None else f" At step {broken['step']:,}, logits became NaN or infinite."
        return Verdict("bad", f"{text}. The largest is now {h.number(now)}{place_now}{at_most}.{lost}", _WHY)
    if math.isnan(peak):
        return Verdict("none" if not run.alarms else "large", f"No attention logit was measured {span}.")
    if run.acted and peak > ALARM_THRESHOLD:
        light, lead = ("large", "Still large") if now > ALARM_THRESHOLD else ("good", "Under control")
        text = f"{lead}: the largest attention logit was {h.number(peak)}"
        text += f"; with the remedies applied, it is {h.number(now)}."
        return Verdict(light, text)
    if peak > HARMFUL_LOGIT:
        return Verdict("bad", f"Attention logits are too large: up to {h.number(peak)} {span}.", _WHY)
    if peak > ALARM_THRESHOLD:
        return Verdict("large", f"Attention logits are large: up to {h.number(peak)} {span}{where}.", _WHY)
    text = f"Healthy: the largest attention logit {span} is {h.number(peak)}{where}"
    return Verdict("good", f"{text}. Logits above {h.number(ALARM_THRESHOLD)} count as large.")


CAUSE = "attention logits have grown too large"  # the default for alarms recorded without a cause
NON_FINITE_RULE = "not finite"
_WHY = (
    "An attention logit is the score of a key for a query, before the softmax. "
    f"Above {h.number(HARMFUL_LOGIT)}, the softmax gives nearly all the weight to one key: "
    "the head hardly learns, and the final loss is higher or training diverges."
)


def fix(run: Watched) -> list[str]:
    """Returns the fix for the most severe alarms: a shell command if one started the run, or a line of code.

    The list is empty if there is nothing to do or if an autopilot is already active.
    """
    grave = [alarm for alarm in run.alarms if alarm.get("severity") != "notice" and alarm.get("remedy")]
    if run.acted or not grave:
        return []
    line = str(grave[0]["remedy"])
    found = _APPLY.search(line)
    watcher = str(run.env.get("watcher") or "")
    own, dashes, command = watcher.partition(" -- ")
    if found is None or not dashes:
        return [line]
    return [f"{own} --apply {found[1]} -- {command}", line]


_APPLY = re.compile(r'qkeel\.apply\("([^"]+)", model, optimizer')


def place(alarm: object) -> str:
    """Returns the location of an alarm, like `, h.3.attn head 5`, as far as it is known."""
    layer, head = (alarm.get(name) if isinstance(alarm, dict) else None for name in ("layer", "head"))
    return "" if layer is None else f", {layer}" + ("" if head is None else f" head {head}")


def movement(run: Watched) -> str:
    """Returns how the largest logit changes, e.g. `grows as step^0.31`, or its value at the start if there are too few
    samples."""
    values = run.overall("max_logit")
    power = run.exponent()
    if math.isfinite(power) and abs(power) >= LEVEL:
        return f"grows as step^{power:.2g}" if power > 0 else f"falls as step^{h.MINUS}{-power:.2g}"
    if math.isfinite(power):
        return "stays level"
    return f"was {h.number(values[0])} at step {run.steps[0]:,}" if len(values) > 1 and np.isfinite(values[0]) else ""


def _growth(run: Watched) -> str:
    """Returns a sentence about how the largest logit changes, with the factor per doubling of steps."""
    values, power = run.overall("max_logit"), run.exponent()
    if not math.isfinite(power):
        if len(values) < 2 or not np.isfinite(values[[0, -1]]).all():
            return ""
        return (
            f"The largest logit was {h.number(values[0])} at step {run.steps[0]:,} and is {h.number(values[-1])} now."
        )
    if abs(power) < LEVEL:
        return "The largest logit stays level."
    grows = "grows" if power > 0 else "falls"
    return f"The largest logit {grows} by a factor of {2 ** abs(power):.2g} each time the number of steps doubles."


def norm_product(run: Watched) -> np.ndarray | None:
    """Returns the product of the largest (or, if unknown, mean) norms of q and k [n layers heads]; None if unknown."""
    values = run.heads.values
    for query, key in (("query_norm_max", "key_norm_max"), ("query_norm", "key_norm")):
        if query in values and key in values and not np.isnan(values[query] * values[key]).all():
            return values[query] * values[key]
    return None


def _growth_or_angle(run: Watched) -> str:
    """Returns why the leading head's logit grew: larger norms of q and k, or a smaller angle between them."""
    head, product, cosine = run.leader(), norm_product(run), run.heads.values.get("cos_max")
    if head is None or product is None or cosine is None:
        return ""
    series = [values[:, head.layer, head.head] for values in (run.heads.values["max_logit"], product, cosine)]
    fine = np.flatnonzero(np.all([np.isfinite(s) & (s > 0) for s in series], axis=0))
    if len(fine) < 2:
        return ""
    logit, norm, angle = (float(s[fine[-1]] / s[fine[0]]) for s in series)
    if not logit > CLEAR:
        return ""
    # The logit is a product of norms and cosine, so their shares of its growth add up on a logarithmic scale.
    share = math.log(norm) / math.log(norm * angle) if norm * angle > CLEAR else math.nan
    cause = ""
    if math.isfinite(share):
        grown = "longer" if share > 0.75 else "better aligned" if share < 0.25 else "longer and better aligned"
        cause = f" Queries and keys became {grown}" + (", which explains most of it." if " and " not in grown else ".")
    since = run.steps[int(fine[0])]
    text = (
        f"From step {since:,} on, the logit of {head.name} head {head.head} grew by a factor of {h.number(logit, 2)}: "
    )
    text += f"|q|\u2060·\u2060|k| by {h.number(norm, 2)}, the largest cosine by {h.number(angle, 2)}."
    return text + cause


def _entropy(run: Watched) -> str:
    values = run.overall("entropy")
    if not len(values) or not np.isfinite(values[-1]):
        return ""
    text = f"Mean attention entropy is {h.number(values[-1])} nats"
    text += f" (it was {h.number(values[0])})" if len(values) > 1 and np.isfinite(values[0]) else ""
    heads = run.heads.values.get("entropy")
    if heads is not None and len(run.layers) > 1 and not np.isnan(heads[-1]).all():
        means = fold_heads("entropy", heads[-1])
        low = int(np.nanargmin(means))
        text += f"; the lowest layer is {run.layers[low]} with {h.number(means[low])}"
    return text + "."


def _loss(run: Watched) -> str:
    steps, values = np.array(run.steps), run.overall("train_loss")
    fine = np.flatnonzero(np.isfinite(values))
    if len(fine) < 2:
        return ""
    first, last = (f"{h.loss(float(values[i]))} at step {steps[i]:,}" for i in (fine[0], fine[-1]))
    return f"Training loss went from {first} to {last}."


def _evaluation(run: Watched) -> str:
    values = overall(run.eval_records, run.eval_heads, "max_logit")
    if not np.isfinite(values).any():
        return ""
    peak = values[np.isfinite(values)].max()
    return f"In evaluation mode ({h.count(len(values), 'sample')}) the largest logit was {h.number(peak)}."


def _cautions(run: Watched) -> list[str]:
    found = []
    missed = [one for one in run.about.get("missed") or () if isinstance(one, dict)]
    if missed:
        watched = len(run.about.get("sites") or ())
        others = "; ".join(f"{one.get('module') or 'the model itself'}: {one.get('reason')}" for one in missed)
        text = f"{watched} of {watched + len(missed)} attention layers were watched. Not understood: {others}."
        found.append(text)
    linear = [name for name, of in run.types.items() if of == LINEAR]
    if linear:
        found.append(f"Layers without logits, for which nothing is measured: {h.listing(linear)}.")
    if run.status is not RunStatus.DONE and run.records:
        found.append(f"The run has not finished; the page shows it up to step {run.steps[-1]:,}.")
    peak = np.nanmax(run.overall("max_logit")) if np.isfinite(run.overall("max_logit")).any() else math.nan
    if not run.alarms and peak > ALARM_THRESHOLD:
        found.append(
            f"The largest logit reached {h.number(peak)}, over {h.number(ALARM_THRESHOLD)}; no alarm is recorded."
        )
    if len(run.records) and not math.isfinite(run.exponent()):
        found.append(f"{h.count(len(run.records), 'sample')}, which is too few to tell how the logits grow.")
    notes = list(dict.fromkeys(str(note.get("event")) for note in run.notes))
    return found + ([f"Noted while watching: {h.listing(notes)}."] if notes else [])


# The charts and their data; assets/watch.js draws them. Long runs are thinned by omitting records, not by averaging.

RUNS = Chart(
    "runs",
    "The runs side by side",
    "Largest attention logit, entropy or training loss of each run. The red line is the alarm threshold for logits.",
    "Line chart: the chosen metric against step, one line per run.",
)
GROWTH = Chart(
    "growth",
    "Largest attention logit",
    "Thin lines: the largest logit of each layer, coloured by depth. Pale band: the model's largest logit, labelled "
    "with the head that currently has it. Logarithmic axis; logits under 0.1 are drawn at its lower end. Dots are "
    "alarms, and hollow dots are samples in evaluation mode. Vertical lines are actions of an autopilot; hover over a "
    "line for the reason.",
    "Line chart: largest attention logit against step, one line per layer.",
)
MAP = Chart(
    "map",
    "Head by head, last sample",
    "Each cell is one head. Empty cells were not measured, or the layer has fewer heads. "
    "Where values have both signs, white is zero.",
    "Heat map: one row per layer, one column per head.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy",
    "Mean over query rows and heads. Zero means that attention has collapsed: every row attends to a single key. Pale "
    "band: the mean of the model.",
    "Line chart: attention entropy against step, one line per layer.",
)
NORMS = Chart(
    "norms",
    "Norms of queries and keys",
    "Mean L2 norm of queries and keys as they enter the dot product, by layer. Logarithmic axis.",
    "Two line charts: query norm and key norm against step, one line per layer.",
)
ANGLE = Chart(
    "angle",
    "Is it the norms or the angle?",
    "A logit is scale · |q| · |k| · cosine. Each dot is a head in the last sample, and the line is the path of the "
    "leading head. A path to the right means that its norms grew; a path upwards means that its q and k turned towards "
    "each other.",
    "Scatter plot: largest cosine against norm product, one dot per head, with the path of the leading head.",
)
LOSS = Chart(
    "loss",
    "Training loss",
    "The loss of the training batch, as the training loop reported it.",
    "Line chart: training loss against step.",
)
MORE = Chart(
    "more",
    "Any other metric, by layer",
    "One line per layer, coloured by depth; a layer's heads are aggregated as defined below.",
    "Line chart: the chosen metric against step, one line per layer.",
)
EXTRA = ("cos_max", "logit_change_rms", "gain_bound")


def charts(runs: Sequence[Watched]) -> list[Chart]:
    """Returns the charts that have data, in reading order."""
    shown = [run for run in runs if run.records]
    measured = {name for run in shown for name in run.measured()}
    present = [
        (RUNS, len(shown) > 1),
        (GROWTH, _any(shown, "max_logit")),
        (MAP, bool(measured)),
        (ENTROPY, _any(shown, "entropy")),
        (NORMS, bool({"query_norm", "key_norm"} & measured)),
        (ANGLE, "cos_max" in measured and any(norm_product(run) is not None for run in shown)),
        (MORE, any(name in measured for name in EXTRA) or any(class_names(run) or run.more() for run in shown)),
        (LOSS, _any(shown, "train_loss")),
    ]
    return [chart for chart, wanted in present if wanted]


def _any(runs: Sequence[Watched], name: str) -> bool:
    return any(np.isfinite(run.overall(name)).any() for run in runs)


LINES = ("max_logit", "entropy", "query_norm", "key_norm", "cos_max", "logit_change_rms", "gain_bound")
VALUES = ("max_logit", "entropy", "train_loss", "val_loss", "grad_norm", "lr", "final_hidden_norm")
MOST_LINES = 120_000  # values in all lines of a page, about 600 KB
MOST_CELLS = 60_000  # values in all head maps of a page
LEAST_RECORDS = 30


def chart_data(runs: Sequence[Watched]) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    shown = [run for run in runs if run.records]
    width = sum(max(1, len(run.layers)) * len((*LINES, *class_names(run), *run.more())) for run in shown)
    # Large models show fewer records, so that the size of the page stays bounded.
    most = int(min(h.MAX_RECORDS, max(LEAST_RECORDS, MOST_LINES // max(1, width))))
    names = {name for run in shown for name in run.heads.values} | set(LINES)
    fields: dict[str, Field] = {name: field for name in sorted(names) if (field := head_field(name)) is not None}
    more = {**LAYER_FIELDS, **BLOCK_FIELDS}
    fields |= {name: more[name] for run in shown for name in run.more() if name in more}
    known = {
        name: {"meaning": ": ".join(filter(None, (field.meaning, name.partition("/")[2]))), "unit": field.unit}
        for name, field in fields.items()
    }
    return {
        "alarm": ALARM_THRESHOLD,
        "fields": known,
        "runs": [_run(run, most, MOST_CELLS // len(shown)) for run in shown],
    }


def _run(run: Watched, most: int, cells: int) -> dict[str, object]:
    rows = np.array(h.thin(run.overall("max_logit").tolist(), most))
    head, names = run.leader(), (*class_names(run), *LINES)
    more = {name: values for name in run.more() if (values := run.by_layer(name)) is not None}
    return {
        "name": run.name,
        "status": str(run.status),
        "step": [run.steps[i] for i in rows],
        "values": {name: h.series(values[rows]) for name in VALUES if np.isfinite(values := run.overall(name)).any()},
        "layers": short_names(run.layers),
        "lines": {
            **{
                name: [h.series(layer) for layer in fold_heads(name, run.heads.values[name][rows]).T]
                for name in names
                if name in run.measured()
            },
            **{name: [h.series(line) for line in values[rows].T] for name, values in more.items()},
        },
        "leader": None if head is None else {"layer": head.layer, "head": head.head, **_leading(run, rows)},
        "last": _last_value(run, cells),
        "alarms": [_alarm_mark(run, alarm) for alarm in run.alarms],
        "interventions": _intervention_marks(run),
        "eval": _evaluation_chart(run),
    }


def short_names(layers: Sequence[str]) -> list[str]:
    """Removes the leading and trailing parts that all layer names share.

    >>> short_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in layers]
    if len(parts) < 2:
        return list(layers)
    least = min(map(len, parts))
    front = next((i for i in range(least) if len({p[i] for p in parts}) > 1), least)
    back = next((i for i in range(least - front) if len({p[-1 - i] for p in parts}) > 1), least - front)
    short = [".".join(p[front : len(p) - back]) for p in parts]
    # Fall back to the full names if shortening makes them empty or ambiguous.
    return short if all(short) and len(set(short)) == len(short) else list(layers)


def _leading(run: Watched, rows: np.ndarray) -> dict[str, object]:
    """Returns the values of the leading head in each record, which show whether its norms grew or its angle shrank."""
    head, product = run.leader(), norm_product(run)
    if head is None:
        return {}
    found = {"max_logit": run.heads.values["max_logit"], "cos_max": run.heads.values.get("cos_max"), "norm": product}
    return {
        name: h.series(values[rows, head.layer, head.head])
        for name, values in found.items()
        if values is not None and not np.isnan(values).all()
    }


def _last_value(run: Watched, cells: int) -> dict[str, object] | None:
    """Returns [layer][head] of each field in the last sample, fields of LINES first, as many as fit into `cells`."""
    if not run.records or not run.heads.values:
        return None
    measured = [name for name in run.measured() if not np.isnan(run.heads.values[name][-1]).all()]
    ordered = [*(n for n in LINES if n in measured), *(n for n in measured if n not in LINES)]
    size = run.heads.values[ordered[0]][-1].size if ordered else 1
    fields = {n: [h.series(line, 3) for line in run.heads.values[n][-1]] for n in ordered[: max(2, cells // size)]}
    product = norm_product(run)
    norm = {} if product is None else {"norm": [h.series(line, 3) for line in product[-1]]}
    return {"step": run.steps[-1], "fields": fields, **norm} if fields else None


def _alarm_mark(run: Watched, alarm: Row) -> dict[str, object]:
    layer = alarm.get("layer")
    return {
        "step": int(alarm["step"]),
        "severity": str(alarm.get("severity")),
        "rule": str(alarm.get("rule")),
        "layer": run.layers.index(layer) if layer in run.layers else None,
        "head": alarm.get("head"),
    }


def _intervention_marks(run: Watched) -> list[dict[str, object]]:
    """Returns, for each step, the decisions that changed something, with their sentences."""
    found: dict[int, list[Row]] = {}
    for event in run.interventions:
        if event.get("event") == "decision" and event.get("action") != "watch_closer":
            found.setdefault(int(event["step"]), []).append(event)
    return [
        {
            "step": step,
            "label": ", ".join(dict.fromkeys(f"{'−' if e.get('release') else ''}{e.get('action')}" for e in own)),
            "text": "\n".join(str(e.get("text")) for e in own),
        }
        for step, own in found.items()
    ]


def _evaluation_chart(run: Watched) -> dict[str, object]:
    found = {name: overall(run.eval_records, run.eval_heads, name) for name in ("max_logit", "entropy", "val_loss")}
    every = max(1, len(run.eval_records) // h.MAX_RECORDS)
    steps = [int(record["step"]) for record in run.eval_records]
    return {"step": steps[::every], **{n: h.series(v[::every]) for n, v in found.items() if np.isfinite(v).any()}}


# The sections of the page.

COLUMNS = {
    "max_logit": "Largest logit",
    "min_logit": "Smallest logit",
    "entropy": "Entropy",
    "entropy_min": "Lowest row entropy",
    "query_norm": "|q|",
    "key_norm": "|k|",
    "cos_max": "Largest cosine",
    "sink_head_ratio": "Share of sink heads",
    "logit_change_rms": "Logit change",
    "gain_bound": "Bound by gains",
}
# They are followed by the values in the monitor's table, with the headings of that table.
COLUMNS |= {
    name: field.column
    for name, field in {**HEAD_FIELDS, **LAYER_FIELDS, **BLOCK_FIELDS}.items()
    if field.column and name not in COLUMNS
}
_FOLDS = {"max": "the largest head", "min": "the smallest head", "mean": "the mean over heads"}


def watch_page(runs: Sequence[Watched], study: StudyData | None = None) -> Page:
    """Returns the page about watched runs, with a study's advice on remedies if a study is given."""
    present = charts(runs)
    empty = (
        Markup("") if present else h.empty_note("Nothing is recorded yet: no forward pass in training mode was seen.")
    )
    return Page(
        title=heading(runs),
        meta=_meta(runs),
        verdict=_verdict(runs),
        findings=findings(runs),
        sections=[
            Section("nothing", "Nothing to draw yet", empty),
            Section("alarms", "Alarms", _alarms(runs)),
            Section("advice", "What a study says about the remedies", Markup("") if study is None else advice(study)),
            Section("interventions", "What the autopilot did", _interventions(runs)),
            Section("charts", "Charts", _charts(runs, present)),
            Section("compared", "The runs", _compared(runs)),
            Section("classes", "Token classes, last sample", class_tables(runs)),
            Section("layers", "Layer by layer, last sample", _layers(runs)),
            Section("watched", "What was watched", _facts(runs)),
            Section("definitions", "Definitions", _definitions(runs)),
        ],
        data=chart_data(runs) if present else None,
        drawing="watch.js",
    )


def heading(runs: Sequence[Watched]) -> str:
    """Returns the name of what was watched."""
    models = list(dict.fromkeys(str(run.about.get("model") or "model") for run in runs))
    several = f"{h.count(len(runs), 'watched run')} of " if len(runs) > 1 else ""
    return f"{several}{h.listing(models)}" + ("" if several else ", watched")


def _meta(runs: Sequence[Watched]) -> str:
    if len(runs) > 1:
        return " · ".join(f"{run.name}: {h.count(len(run.records), 'sample')}" for run in runs)
    run = runs[0]
    about = run.about
    size = about.get("parameters")
    parts = [
        h.count(size, "parameter") if isinstance(size, int) else "",
        h.count(len(run.layers or about.get("sites") or ()), "attention layer"),
        str(about["optimizer"]) if isinstance(about.get("optimizer"), str) else "",
        h.count(run.steps[-1], "step") if run.records else "",
        h.count(len(run.records), "sample"),
        f"run {run.name}",
    ]
    return " · ".join(part for part in parts if part)


def _verdict(runs: Sequence[Watched]) -> Markup | None:
    """Returns the traffic light, its sentence, and the fix with a button that copies it."""
    if len(runs) > 1:
        return None
    found, lines = verdict(runs[0]), fix(runs[0])
    light = h.tag("span", {"class": "light", "aria-hidden": "true"})
    sentence = h.tag("p", {"class": f"lead signal signal-{found.light}"}, light, h.tag("span", {}, found.text))
    why = h.tag("p", {"class": "why"}, found.why) if found.why else ""
    if not lines:
        return h.join([sentence, why])
    todo = "" if not _APPLY.search(lines[-1]) else " add this line to the script, after the optimizer is created:"
    todo = " start the run again with this command, which keeps the logits small:" if len(lines) > 1 else todo
    parts = [
        h.tag("p", {"class": "todo"}, h.tag("strong", {}, "What to do:"), todo),
        h.tag("div", {"class": "remedy-line"}, h.command_block(lines[0], "Copy fix")),
    ]
    if len(lines) > 1:
        other = h.tag("code", {}, lines[1])
        parts.append(h.tag("p", {"class": "source"}, "Or in the script, after the optimizer is created: ", other))
    return h.join([sentence, why, h.tag("div", {"class": "fix"}, *parts)])


def _alarms(runs: Sequence[Watched]) -> Markup:
    """Returns one card per cause: since when it has existed, what was observed at which step, and the fix."""
    items = []
    for run in runs:
        causes: dict[str, list[Row]] = {}
        for alarm in run.alarms:
            causes.setdefault(str(alarm.get("cause") or CAUSE), []).append(alarm)
        items += [_story(run, cause, alarms, run.name if len(runs) > 1 else "") for cause, alarms in causes.items()]
    return h.tag("ul", {"class": "alarms"}, *items) if items else Markup("")


_GRAVITY = ("notice", "alarm", "critical")


def _story(run: Watched, cause: str, alarms: Sequence[Row], name: str) -> Markup:
    gravest = max((str(alarm.get("severity")) for alarm in alarms), key=lambda s: (*_GRAVITY, s).index(s))
    since = f"since step {alarms[0]['step']:,}" + (f", {name}" if name else "")
    title = h.tag("strong", {"class": "severity"}, gravest), f" {cause[0].upper()}{cause[1:]} {since}"
    seen = h.tag("ol", {"class": "course"}, *map(_seen, alarms))
    grave = [alarm for alarm in alarms if alarm.get("severity") != "notice"]
    advised = dict.fromkeys(str(alarm["remedy"]) for alarm in grave or alarms if alarm.get("remedy"))
    fixes = [h.tag("div", {"class": "remedy-line"}, h.command_block(line)) for line in list(advised)[:1]]
    if run.acted and cause == CAUSE:
        fixes = [h.tag("p", {"class": "source"}, "The autopilot responds to this alarm; its actions are listed below.")]
    sources = dict.fromkeys(str(alarm.get("source")) for alarm in alarms if alarm.get("source"))
    about = h.tag("ul", {}, *(h.tag("li", {"class": "source"}, source) for source in sources))
    more = h.details("Where the thresholds come from", about) if sources else ""
    return h.tag("li", {"class": f"alarm-{gravest}"}, h.tag("p", {}, *title), seen, *fixes, more)


def _seen(alarm: Row) -> Markup:
    trend = f"; {alarm['trend']}" if alarm.get("trend") else ""
    return h.tag("li", {}, f"Step {alarm['step']:,}{place(alarm)}: {alarm.get('meaning')}{trend}.")


def _interventions(runs: Sequence[Watched]) -> Markup:
    """Returns each decision with its reason and its measured effect; equal decisions at several sites are merged."""
    items = []
    for run in runs:
        seen = {(e.get("of_step"), e.get("action"), e.get("site")): e for e in run.interventions if "of_step" in e}
        alike: dict[object, list[Row]] = {}
        for event in [e for e in run.interventions if e.get("event") != "effect"]:
            key = tuple(event.get(name) for name in ("event", "step", "action", "release", "reason"))
            alike.setdefault(key, []).append(event)
        for own in alike.values():
            effects = [seen.get((e["step"], e.get("action"), e.get("site"))) for e in own if not e.get("release")]
            items.append(_intervention(own, [effect for effect in effects if effect is not None]))
    return h.tag("ul", {"class": "alarms"}, *items) if items else Markup("")


def _intervention(events: Sequence[Row], effects: Sequence[Row]) -> Markup:
    first, text = events[0], str(events[0].get("text"))
    kind = "release" if first.get("release") else str(first.get("action") or first.get("event"))
    below = [str(effect.get("text")) for effect in effects]
    if len(events) > 1:
        start, _, rest = text.partition(": ")
        when, places = (
            start.split(", ")[0],
            [", ".join(str(e.get("text")).partition(": ")[0].split(", ")[1:]) for e in events],
        )
        text = f"{when}, {h.count(len(events), 'site')}: {rest}"
        went = [f"from {e['before']:.4g} to {e['after']:.4g} at {e['site']}" for e in effects]
        below = [
            "; ".join(places),
            *([f"By step {effects[0]['step']:,}, the max logit had gone {'; '.join(went)}"] if went else []),
        ]
    parts = [h.tag("p", {}, h.tag("strong", {"class": "severity"}, kind.replace("_", " ")), f" {text}")]
    return h.tag("li", {"class": "alarm-notice"}, *parts, *(h.tag("p", {"class": "source"}, line) for line in below))


def _charts(runs: Sequence[Watched], present: Sequence[Chart]) -> Markup:
    first = [
        chart.figure() for chart in present if chart is RUNS
    ]  # shows all runs; all other charts show the selected run
    choice = h.choices("run") if sum(bool(run.records) for run in runs) > 1 else ""
    return h.join([*first, choice, *(chart.figure() for chart in present if chart is not RUNS)])


def _compared(runs: Sequence[Watched]) -> Markup:
    if len(runs) < 2:
        return Markup("")
    head = h.columns("Run", kind="text")
    head += h.columns("Steps", "Alarms", "First alarm", "Largest logit, last", "… of the run")
    head += [*h.columns("Moves", kind="text"), *h.columns("Entropy, last", "Training loss, last")]
    return h.table("The watched runs", head, [_compared_line(run) for run in runs], sortable=True)


def _compared_line(run: Watched) -> Markup:
    logits = run.overall("max_logit")
    peak = float(np.fmax.reduce(logits, initial=np.nan))
    return h.table_row(
        run.name,
        h.cell(f"{run.steps[-1]:,}", run.steps[-1]) if run.records else h.cell("–", -1),
        h.cell(str(len(run.alarms)), len(run.alarms)),
        h.cell(f"{run.alarms[0]['step']:,}", run.alarms[0]["step"]) if run.alarms else h.NOTHING,
        _last(logits),
        h.cell(h.number(peak), peak),
        h.words(movement(run) if run.records else ""),
        _last(run.overall("entropy")),
        _last(run.overall("train_loss")),
    )


def _last(values: np.ndarray) -> Markup:
    return h.measured(float(values[-1]) if len(values) else math.nan)


def _layers(runs: Sequence[Watched]) -> Markup:
    """Returns a table per run with one row per layer, for its last sample."""
    parts = []
    for run in runs:
        if not run.records or not run.layers:
            continue
        known = {name: run.by_layer(name) for name in COLUMNS}
        folded = {n: values[-1] for n, values in known.items() if values is not None and not np.isnan(values[-1]).all()}
        shown = list(folded)
        names = ("Layer", "Type")[: 1 + any(of != "full" for of in run.types.values())]
        linear = [name for name, of in run.types.items() if of == LINEAR]
        head = [*h.columns(*names, kind="text"), *h.columns(*(COLUMNS[name] for name in shown))]
        body = [_layer(run, i, folded, typed=len(names) > 1) for i in range(len(run.layers))]
        body += [h.table_row(name, h.words(LINEAR), *[h.measured(math.nan)] * len(shown)) for name in linear]
        inner = h.table(f"Layers of {run.name} at step {run.steps[-1]:,}", head, body, sortable=True)
        title = f"{run.name}, step {run.steps[-1]:,}" if len(runs) > 1 else f"Step {run.steps[-1]:,}"
        parts.append(h.details(f"{title}: {h.count(len(run.layers), 'layer')}", inner))
    return h.join(parts)


def _layer(run: Watched, i: int, folded: Mapping[str, np.ndarray], *, typed: bool) -> Markup:
    cells = [h.words(run.types.get(run.layers[i], ""))] if typed else []
    for name, values in folded.items():
        heads = run.heads.values.get(measured_field(name), np.full((1, len(run.layers), 1), np.nan))[-1][i]
        field = head_field(name)
        fold = "mean" if field is None else field.fold
        which = ""
        if fold != "mean" and not np.isnan(heads).all():
            which = f"head {int(np.nanargmax(heads) if fold == 'max' else np.nanargmin(heads))}"
        cells.append(h.measured(float(values[i]), which))
    return h.table_row(run.layers[i], *cells)


def _facts(runs: Sequence[Watched]) -> Markup:
    """Returns the settings and versions that the runs recorded, by name."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = run.env.get("versions")
        times = written_times(run.path)
        recorded = {k: v for k, v in run.about.items() if k not in ("kind", "sites", "missed", "fields")}
        recorded |= versions if isinstance(versions, dict) else {}
        for name, value in {
            **recorded,
            **times,
            **{name: run.env.get(name) for name in ("system", "commit", "command")},
            "directory": str(run.path),
        }.items():
            if value is not None and value != "":
                found.setdefault(name.replace("_", " "), {})[_word(value)] = None
    return h.join([h.facts({name: list(values) for name, values in found.items()}), *(_sites(run) for run in runs)])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
    return ", ".join(map(_word, value)) if isinstance(value, (list, tuple)) else str(value)


def _sites(run: Watched) -> Markup:
    sites = [site for site in run.about.get("sites") or () if isinstance(site, dict)]
    if not sites:
        return Markup("")
    names = list(dict.fromkeys(key for site in sites for key in site))
    head = h.columns(*(name.replace("_", " ") for name in names), kind="text")
    body = [h.tag("tr", {}, *(h.words(_word(site.get(name, ""))) for name in names)) for site in sites]
    inner = h.table(f"Attention layers of {run.name}", head, body)
    return h.details(f"{run.name}: {h.count(len(sites), 'attention layer')}", inner)


def _definitions(runs: Sequence[Watched]) -> Markup:
    recorded = dict.fromkeys(name.partition("/")[0] for run in runs for name in run.measured())
    fields = {name: field for name in recorded if (field := head_field(name)) is not None}
    found = {n: f"{field.meaning} [{field.unit}]; of a layer: {_FOLDS[field.fold]}" for n, field in fields.items()}
    found |= {n: f"{field.meaning} [{field.unit}]" for n, field in LAYER_FIELDS.items() if field.of in recorded}
    values = dict.fromkeys(name.partition("/")[0] for run in runs for record in run.records[-1:] for name in record)
    monitor = {f"monitor_{name}": field for name, field in {**MONITOR_FIELDS, **MONITOR_EXTREMES}.items()}
    more = {**VALUE_FIELDS, **BLOCK_FIELDS, **monitor}
    found |= {n: f"{field.meaning} [{field.unit}]" for n, field in more.items() if n in values}
    return h.facts(found, code=True)
