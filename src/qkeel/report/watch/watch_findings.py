"""The sentences at the top of a watched run's page. Each is computed from numbers and left out where they lack."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT
from qkeel.records import RunStatus, fold_heads
from qkeel.report.html.formats import MINUS, count, listing, loss, number
from qkeel.report.html.page import Finding
from qkeel.report.watch.watched_run import Watched, overall

LEVEL = 0.05  # an exponent smaller than this is no growth to speak of
CLEAR = 1.25  # a factor smaller than this explains nothing


def findings(runs: Sequence[Watched]) -> list[Finding]:
    """Returns the sentences below the verdict: of several runs one verdict for each, of a single one its numbers."""
    if len(runs) > 1:
        return [Finding("note", f"{run.name}: {verdict(run).text}") for run in runs]
    run = runs[0]
    texts = [_growth(run), _growth_or_angle(run), _entropy(run), _loss(run), _evaluation(run)]
    found = [Finding("note", text) for text in texts if text]
    return found + [Finding("caution", text) for text in _cautions(run)]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The first sentence of a page and its light: good, large, bad, or none where nothing is known."""

    light: str
    text: str


def verdict(run: Watched) -> Verdict:
    """Returns whether the run is healthy, in one sentence with its number and its threshold."""
    if not run.records:
        return Verdict("none", "Nothing is recorded yet.")
    values = run.overall("max_logit")
    known = values[~np.isnan(values)]
    now = float(known[-1]) if len(known) else math.nan
    peak = float(known.max()) if len(known) else math.nan
    span = f"in {count(run.steps[-1], 'step')}" if run.steps[-1] else "at the first step"
    grave = [alarm for alarm in run.alarms if alarm.get("severity") != "notice"]
    head = run.leader()
    where = "" if head is None else f" in {head.name}, head {head.head}"
    if grave and not (run.acted and now <= ALARM_THRESHOLD):
        first = grave[0]
        cause = str(first.get("cause") or CAUSE)
        text = f"{cause[0].upper()}{cause[1:]} since step {first['step']:,}"
        if cause != CAUSE or math.isnan(peak):
            return Verdict("bad", f"{text}: {first.get('meaning')}{place(first)}.")
        at_most = f"; it was {number(peak)} at most" if peak > 1.05 * now else ""
        return Verdict("bad", f"{text}. The largest is {number(now)}{where}{at_most}. {_LIMIT}")
    if math.isnan(peak):
        return Verdict("none" if not run.alarms else "large", f"No attention logit was measured {span}.")
    if run.acted and peak > ALARM_THRESHOLD:
        text = (
            f"Held: the largest attention logit was {number(peak)}, and is {number(now)} since remedies were applied."
        )
        return Verdict("large" if now > ALARM_THRESHOLD else "good", text)
    if peak > HARMFUL_LOGIT:
        return Verdict("bad", f"Attention logits are too large: {number(peak)} at most {span}. {_LIMIT}")
    if peak > ALARM_THRESHOLD:
        return Verdict("large", f"Attention logits are large: {number(peak)} at most {span}{where}. {_LIMIT}")
    text = f"Healthy: the largest attention logit {span} is {number(peak)}{where}"
    return Verdict("good", f"{text}. They count as large from {number(ALARM_THRESHOLD)} on.")


CAUSE = "attention logits grow too large"  # of alarms that were recorded without one
_LIMIT = f"Above {number(HARMFUL_LOGIT)} training suffers."


def fix(run: Watched) -> list[str]:
    """Returns what to do about the gravest alarms: a command for the shell where the run was started by one, or a line
    of code; nothing where nothing is to be done, or is being done already."""
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
    """Returns `, h.3.attn head 5`, as far as it is known."""
    layer, head = (alarm.get(name) if isinstance(alarm, dict) else None for name in ("layer", "head"))
    return "" if layer is None else f", {layer}" + ("" if head is None else f" head {head}")


def movement(run: Watched) -> str:
    """Returns how the largest logit moves: `grows as step^0.31`; with few samples, where it was at the start."""
    values = run.overall("max_logit")
    power = run.exponent()
    if math.isfinite(power) and abs(power) >= LEVEL:
        return f"grows as step^{power:.2g}" if power > 0 else f"falls as step^{MINUS}{-power:.2g}"
    if math.isfinite(power):
        return "holds its level"
    return f"was {number(values[0])} at step {run.steps[0]:,}" if len(values) > 1 and np.isfinite(values[0]) else ""


def _growth(run: Watched) -> str:
    """How the largest logit moves, as what a doubling of the training does to it."""
    values, power = run.overall("max_logit"), run.exponent()
    if not math.isfinite(power):
        if len(values) < 2 or not np.isfinite(values[[0, -1]]).all():
            return ""
        return f"The largest logit was {number(values[0])} at step {run.steps[0]:,} and is {number(values[-1])} now."
    if abs(power) < LEVEL:
        return "The largest logit holds its level."
    grows = "grows" if power > 0 else "falls"
    return f"The largest logit {grows}: each doubling of the training multiplies it by {2**power:.2g}."


def norm_product(run: Watched) -> np.ndarray | None:
    """Returns [n layers heads], the largest |q| times the largest |k| of each head, or the mean ones, or None."""
    values = run.heads.values
    for query, key in (("query_norm_max", "key_norm_max"), ("query_norm", "key_norm")):
        if query in values and key in values and not np.isnan(values[query] * values[key]).all():
            return values[query] * values[key]
    return None


def _growth_or_angle(run: Watched) -> str:
    """The cause of the leading head's growth: longer q and k, or a smaller angle between them."""
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
    share = math.log(norm) / math.log(norm * angle) if norm * angle > CLEAR else math.nan
    cause = ""
    if math.isfinite(share):
        cause = "mostly by the norms" if share > 0.75 else "mostly by the angle" if share < 0.25 else "by both"
        cause = f" It grew {cause}."
    since = run.steps[int(fine[0])]
    text = f"Since step {since:,} the logit of {head.name} head {head.head} grew {number(logit, 2)}-fold: "
    return f"{text}|q|\u2060·\u2060|k| by {number(norm, 2)}, the largest cosine by {number(angle, 2)}.{cause}"


def _entropy(run: Watched) -> str:
    values = run.overall("entropy")
    if not len(values) or not np.isfinite(values[-1]):
        return ""
    text = f"Mean attention entropy is {number(values[-1])} nats"
    text += f" (it was {number(values[0])})" if len(values) > 1 and np.isfinite(values[0]) else ""
    heads = run.heads.values.get("entropy")
    if heads is not None and len(run.layers) > 1 and not np.isnan(heads[-1]).all():
        means = fold_heads("entropy", heads[-1])
        low = int(np.nanargmin(means))
        text += f"; the lowest layer is {run.layers[low]} with {number(means[low])}"
    return text + "."


def _loss(run: Watched) -> str:
    steps, values = np.array(run.steps), run.overall("train_loss")
    fine = np.flatnonzero(np.isfinite(values))
    if len(fine) < 2:
        return ""
    start, end = float(values[fine[0]]), float(values[fine[-1]])
    return (
        f"Training loss went from {loss(start)} at step {steps[fine[0]]:,} to {loss(end)} at step {steps[fine[-1]]:,}."
    )


def _evaluation(run: Watched) -> str:
    values = overall(run.eval_records, run.eval_heads, "max_logit")
    if not np.isfinite(values).any():
        return ""
    peak = values[np.isfinite(values)].max()
    return f"In evaluation mode ({count(len(values), 'sample')}) the largest logit was {number(peak)}."


def _cautions(run: Watched) -> list[str]:
    found = []
    missed = [one for one in run.about.get("missed") or () if isinstance(one, dict)]
    if missed:
        watched = len(run.about.get("sites") or ())
        others = "; ".join(f"{one.get('module') or 'the model itself'}: {one.get('reason')}" for one in missed)
        text = f"{watched} of {watched + len(missed)} attentions were watched. Not understood: {others}."
        found.append(text)
    if run.status is not RunStatus.DONE and run.records:
        found.append(f"The run is not finished: the page shows it up to step {run.steps[-1]:,}.")
    peak = np.nanmax(run.overall("max_logit")) if np.isfinite(run.overall("max_logit")).any() else math.nan
    if not run.alarms and peak > ALARM_THRESHOLD:
        found.append(f"The largest logit reached {number(peak)}, over {number(ALARM_THRESHOLD)}; no alarm is recorded.")
    if len(run.records) and not math.isfinite(run.exponent()):
        found.append(f"{count(len(run.records), 'sample')}: too few to say how the logits grow.")
    notes = list(dict.fromkeys(str(note.get("event")) for note in run.notes))
    return found + ([f"Noted while watching: {listing(notes)}."] if notes else [])
