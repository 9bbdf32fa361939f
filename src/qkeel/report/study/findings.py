"""Sentences about a study, computed from its results: remedies, accuracy, chaos and reference losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from qkeel.errors import QkeelError
from qkeel.metrics import (
    ALARM_THRESHOLD,
    COLLAPSE_ENTROPY,
    Row,
    alarm_step,
    paired_effect,
    paired_effects,
    paired_gain,
    planned_power,
)
from qkeel.options import Term, parse
from qkeel.records import RunStatus
from qkeel.report import html as h
from qkeel.report.html import Finding, Markup
from qkeel.report.study.collect import BASELINE, RunData, StudyData
from qkeel.report.study.compare import (
    MARGIN,
    PairedGain,
    Spread,
    collapses,
    differences_beside,
    gains,
    interval_text,
    judge,
    less,
    losses,
    more_seeds,
    page_gains,
    primary_gain,
    spread,
    spread_cell,
    swatch,
)
from qkeel.report.study.provenance import collapsed_at

# Accuracy on held-out images, for studies that classify.

ACCURACY_MARGIN = 0.01  # share; one percentage point


def cells(study: StudyData) -> dict[tuple[str, float], dict[int, float]]:
    """Returns the accuracy by seed for each remedy and rate, in the study's order."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for remedy in study.remedies:
        for line in (line for line in study.rows() if line["remedy"] == remedy):
            if isinstance(line.get("val_accuracy"), float):
                found.setdefault((remedy, line["lr"]), {})[line["seed"]] = line["val_accuracy"]
    return found


def accuracy_findings(study: StudyData) -> list[Finding]:
    """Returns the best accuracy among settings that do not collapse, the settings indistinguishable from it, and the
    best accuracy without a remedy."""
    found = {key: each for key, each in cells(study).items() if not collapses(study.rows(), *key)}
    if not found:
        return []
    totals = {key: spread(list(each.values())) for key, each in found.items()}
    best = max(found, key=lambda key: totals[key].mean)
    text = f"Highest held-out accuracy: {_percent(totals[best])}, {best[0]} at LR {h.rate(best[1])}"
    against = {key: less(each, found[best], ACCURACY_MARGIN) for key, each in found.items() if key != best}
    known = {key: one for key, one in against.items() if one is not None and len(one.values) > 1}
    judged = zip(known, paired_effects([one.numbers for one in known.values()], ACCURACY_MARGIN))
    close = [f"{remedy} at LR {h.rate(lr)}" for (remedy, lr), one in judged if one.verdict in ("equal", "undecided")]
    more = f"{100 * ACCURACY_MARGIN:g} point"
    text += f" ({h.listing(close)} {_are(close)} not shown to differ from it by more than {more})" if close else ""
    plain = [key for key in found if key[0] == BASELINE]
    if plain and best[0] != BASELINE:
        top = max(plain, key=lambda key: totals[key].mean)
        text += f"; the highest of {BASELINE} is {_percent(totals[top])}, at LR {h.rate(top[1])}"
    return [Finding("note", text + ".")]


def _percent(one: Spread) -> str:
    return f"{100 * one.mean:.1f} %"


def table_of(study: StudyData) -> Markup:
    """Returns the table of accuracies by remedy and rate; empty if the task is not classification."""
    found = {key: spread(list(each.values())) for key, each in cells(study).items()}
    if not found:
        return Markup("")
    lrs = study.lrs()
    head = [*h.columns("Remedy", kind="text"), *h.columns(*(f"LR\u00a0{h.rate(lr)}" for lr in lrs))]
    text = "Share of held-out images that are classified correctly, mean over seeds in %, with the range below."
    body = [
        h.table_row(swatch(study, remedy), *(_cell(found.get((remedy, lr))) for lr in lrs))
        for remedy in dict.fromkeys(remedy for remedy, _ in found)
    ]
    return h.join([h.note(text), h.table("Accuracy on held-out images", head, body, sortable=True)])


def _cell(one: Spread | None) -> Markup:
    return h.cell("–", -1.0) if one is None else spread_cell(one, lambda share: f"{100 * share:.1f}")


# Chaos studies: the differences due to one float32 step in one weight.

_LEVEL = 0.95


def _pairs(study: StudyData) -> dict[tuple[str, float, str], list[Row]]:
    """Returns the pairs of each remedy, rate and part of the study."""
    found: dict[tuple[str, float, str], list[Row]] = {}
    known = [pair for pair in study.chaos if pair["remedy"] in study.remedies]
    for pair in sorted(known, key=lambda pair: (study.remedies.index(pair["remedy"]), pair["lr"])):
        found.setdefault((pair["remedy"], float(pair["lr"]), pair.get("part", "")), []).append(pair)
    return found


def _floor(pairs: Sequence[Row]) -> float:
    return math.sqrt(math.fsum(float(pair["loss_difference"]) ** 2 for pair in pairs) / len(pairs))


def chaos_findings(study: StudyData) -> list[Finding]:
    """Returns the largest chaos floor and, for each remedy, the lowest rate at which the floor exceeds the margin."""
    floors = {key: _floor(pairs) for key, pairs in _pairs(study).items()}
    floors = {key: floor for key, floor in floors.items() if math.isfinite(floor)}
    if not floors:
        return [Finding("caution", "No pair of runs has finished yet.")]
    top = max(floors, key=floors.__getitem__)
    seeds = h.count(len({pair["seed"] for pair in study.chaos}), "seed")
    lead = (
        f"One float32 step in one weight changes the final held-out loss by up to {h.number(floors[top], 2)} nats "
        f"({top[0]} at LR {h.rate(top[1])}{', ' * bool(top[2])}{top[2]}, root mean square over {seeds})."
    )
    parts = []
    for remedy in dict.fromkeys(remedy for remedy, _, _ in floors):
        above = [lr for (name, lr, _), floor in floors.items() if name == remedy and floor > MARGIN]
        parts.append(f"{remedy} from LR {h.rate(min(above))} on" if above else f"{remedy} at no LR tried")
    text = f"Above {MARGIN:g} nats: {h.listing(parts)}."
    return [Finding("lead", lead), Finding("note", text)]


def floors_table(study: StudyData) -> Markup:
    """Returns a table with one row per remedy and rate; empty if no pair has finished."""
    lines = [_line(study, *key, pairs) for key, pairs in _pairs(study).items()]
    if not lines:
        return Markup("")
    text = (
        "Each run is compared with a run that differs by one float32 step in one weight. The chaos floor is the root "
        "mean square over seeds of the difference in final held-out loss. The exponent is the slope, against steps, of "
        "the logarithm of the distance between the two runs' logits (the largest and smallest of each head), until the "
        "distance exceeds a tenth of their size, with its mean and 95 % interval over seeds."
    )
    head = [*h.columns("Remedy", kind="text")]
    head += h.columns(
        "LR", "Chaos floor", "Largest difference", "Distance between logits at the end", "Exponent per step"
    )
    return h.join([h.note(text), h.table("What one float32 step does", head, lines, sortable=True)])


def _line(study: StudyData, remedy: str, lr: float, part: str, pairs: Sequence[Row]) -> Markup:
    worst, apart = (max(float(pair[name]) for pair in pairs) for name in ("loss_difference", "logit_distance"))
    known = [float(pair["exponent"]) for pair in pairs if pair.get("exponent") is not None]
    exponent = h.NOTHING
    if known:
        mean = math.fsum(known) / len(known)
        one = paired_effect(known, level=_LEVEL) if len(known) > 1 else None
        small = f"{h.number(one.low, 2)} to {h.number(one.high, 2)}" if one else "one seed"
        exponent = h.cell(h.number(mean, 2), mean, small)
    cells = [h.cell(h.number(value, 2), value) for value in (_floor(pairs), worst, apart)]
    return h.table_row(swatch(study, remedy), h.cell(h.rate(lr), lr, part), *cells, exponent)


# Reference losses: bigram counts, and attention that is never trained.

FROZEN = "frozen_qk"


def reference_findings(study: StudyData) -> list[Finding]:
    """Returns a sentence about bigram counts, and one for each rate of runs with frozen queries and keys."""
    return [Finding("note", text) for text in (*_counted(study), *_over_frozen(study.rows(), study.remedies))]


def _counted(study: StudyData) -> Iterator[str]:
    runs = [run for run in study.runs if run.row is not None and run.role == "grid"]
    level = study.counted_bigrams()
    if level is None:
        return
    means: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        assert run.row is not None
        means.setdefault((run.remedy, run.lr), []).append(run.row["val_loss"])
    over = sum(not statistics.fmean(own) < level for own in means.values())
    yield (
        f"A bigram model fitted to the text that a run reads has a held-out loss of {h.loss(level)} "
        f"{study.loss_unit()}. Averaged over seeds, {over} of {h.count(len(means), 'combination')} of remedy and LR "
        f"{'does' if over == 1 else 'do'} not get below that."
    )


def _over_frozen(rows: Sequence[Row], remedies: Sequence[str]) -> Iterator[str]:
    for lr in sorted({row["lr"] for row in rows if row["remedy"] == FROZEN}):
        gains = {other: paired_gain(rows, other, FROZEN, lr) for other in remedies if other != FROZEN}
        gains = {other: own for other, own in gains.items() if len(own) > 1 and all(map(math.isfinite, own))}
        effects = dict(zip(gains, paired_effects(list(gains.values()), MARGIN)))
        parts = [f"{other} {h.signed(one.mean)} ({interval_text(one)})" for other, one in effects.items()]
        if parts:
            yield (
                f"Gain over queries and keys that are never trained ({FROZEN}) at LR {h.rate(lr)}, nats: "
                f"{'; '.join(parts)}. Where an interval does not lie above {MARGIN:+g}, no gain from training queries "
                "and keys is shown."
            )


# The sentences at the top of a study's page, each computed from numbers and omitted if they are missing.


def findings(study: StudyData) -> list[Finding]:
    """Returns the sentences of the page's first screen."""
    rows = study.rows()
    if study.primary:
        drift = [Finding("note", lead.text) for lead in _drift(study)]
        counts, references = _counts(study, study.primary, rows), reference_findings(study)
        return [*counts, *_primary(study, study.primary), *drift, *references, *_unfinished(study)]
    found = _drift(study)
    if len({row["remedy"] for row in rows}) > 1:
        found += _headline(study, rows) + _ties(study, rows) + _losses_against_baseline(study)
    if len(rows) > 1:
        found += _collapse(study, rows) + _best(study, rows)
    elif not found:
        found += [text for run in study.runs for text in _single(run, study.loss_unit())]
    return found + reference_findings(study) + _seeds(study, rows) + _unfinished(study)


def _counts(study: StudyData, named: Row, rows: Sequence[Row]) -> list[Finding]:
    """Returns the collapses and largest logits of every remedy at the rate of the primary comparison.

    These counts need no test.
    """
    here = [row for row in rows if row["lr"] == named["lr"]]
    if not here:
        return []
    found: dict[tuple[int, int], list[str]] = {}
    tops: dict[str, float] = {}
    for remedy in study.remedies:
        mine = [row for row in here if row["remedy"] == remedy]
        if mine:
            found.setdefault((sum(row["collapsed"] for row in mine), len(mine)), []).append(remedy)
            tops[remedy] = spread([row["max_logit"] for row in mine]).high
    parts = [f"in {k} of {h.count(n, 'run')} with {h.listing(names)}" for (k, n), names in sorted(found.items())[::-1]]
    logits = [f"{h.number(top, 2)} with {remedy}" for remedy, top in tops.items()]
    return [
        Finding("lead", f"At LR {h.rate(named['lr'])} attention collapsed {'; '.join(parts)}."),
        Finding("lead", f"The largest attention logit of these runs was {h.listing(logits)}."),
    ]


def _primary(study: StudyData, named: Row) -> list[Finding]:
    """Returns the result of the primary comparison and how its number of seeds was chosen."""
    both, at = f"{named['remedy']} against {named['baseline']}", f"at LR {h.rate(named['lr'])}"
    what = f"Primary comparison, named before the runs: held-out loss of {both} {at}."
    gain = primary_gain(study)
    if gain is None:
        return [Finding("lead", f"{what} No seed has finished both.")]
    if gain.effect is None:
        text = (
            "One seed is not enough to decide"
            if math.isfinite(gain.mean)
            else "A loss is not finite, so nothing is compared"
        )
        return [Finding("lead", f"{what} {text}.")]
    outcome = {
        "better": f"{gain.remedy} is better by {h.loss(gain.mean)} nats",
        "worse": f"{gain.remedy} is worse by {h.loss(-gain.mean)} nats",
        "equal": f"The two are equal to within {MARGIN:g} nats",
        "undecided": f"Undecided; {more_seeds(gain.effect)}",
    }[gain.verdict]
    fallen = f" Attention collapsed in a run of {gain.remedy}." if gain.collapsed else ""
    text = f"{what} {outcome} ({'' if gain.verdict in ('better', 'worse') else 'difference '}{gain.over()}).{fallen}"
    rest = "Every other comparison is secondary and is given below, with an interval but without a verdict."
    method = "The interval is Student's t at 95 %, paired by seed, and needs no correction because it is the only one."
    return [Finding("lead", text), Finding("caution", f"{_planned(study, named)} {method} {rest}")]


def _planned(study: StudyData, named: Row) -> str:
    """Returns a sentence about the power of the planned number of seeds."""
    sides = (
        {run.seed for run in study.runs if run.role == "grid" and run.lr == named["lr"] and run.remedy == one}
        for one in (named["remedy"], named["baseline"])
    )
    n = len(set.intersection(*sides))
    if named.get("expected") is None or named.get("spread") is None:
        return f"{h.count(n, 'seed')}; no power analysis was made for these settings."
    # Rounding must not turn a probability below 1 into 100 %.
    power = min(0.999, planned_power(named["expected"], named["spread"], n, margin=MARGIN)) if n > 1 else 0.0
    source = f" ({named['source']})" if named.get("source") else ""
    chance = f"over {100 * power:.1f} %" if power == 0.999 else f"{100 * power:.0f} %"
    return (
        f"Planned: {h.count(n, 'seed')}. A true difference of {named['expected']:g} nats is shown to be beyond "
        f"±{MARGIN:g} with a probability of {chance}, if the differences of pairs have a standard deviation of "
        f"{named['spread']:g}{source}."
    )


def _drift(study: StudyData) -> list[Finding]:
    runs = [run for run in study.runs if run.role == "drift" and run.row is not None and run.metrics]
    if not runs:
        return []
    runs.sort(key=lambda run: (study.remedies.index(run.remedy), run.seed))
    first = runs[0]
    parts = [_drift_clause(run, alone=len(runs) == 1) for run in runs]
    where = f"Over {h.count(int(first.metrics[-1]['step']), 'step')} at LR {h.rate(first.lr)}"
    held = h.listing([f"{h.loss(run.row['val_loss'])} ({run.remedy})" for run in runs if run.row])
    seeds = len({run.seed for run in runs})
    tail = f" Held-out loss at the end: {held}; {'one seed' if seeds == 1 else h.count(seeds, 'seed')}."
    return [Finding("lead", f"{where}, {', while '.join(parts)}.{tail}")]


def _drift_clause(run: RunData, *, alone: bool) -> str:
    row = run.row or {}
    peak = h.number(row["max_logit"], 2)
    alarm = alarm_step(run.metrics)
    start = run.metrics[0].get("max_logit")
    name = f"the largest attention logit of {run.remedy}" if alone or run.remedy == BASELINE else run.remedy
    name += " (its attention collapsed)" if row["collapsed"] else ""
    if alarm is None:
        return f"{name} stays at or below {peak}"
    return (
        f"{name} grows from {h.number(start, 2)} to {peak} and passes the alarm threshold of "
        f"{h.number(ALARM_THRESHOLD)} by step {alarm:,}"
    )


def _headline(study: StudyData, rows: Sequence[Row]) -> list[Finding]:
    if not any(row["remedy"] == study.baseline for row in rows):
        without = "without a remedy (none)" if study.baseline == BASELINE else f"of {study.baseline}"
        text = f"No run {without} has finished, so no gain can be computed: add {study.baseline} to the remedies."
        return [Finding("caution", text)]
    judged = page_gains(study)
    found = [g for g in judged if math.isfinite(g.mean)]
    if judged and not found:
        text = f"A loss is not finite in each comparison, so no remedy is judged against {study.baseline}."
        return [Finding("lead", text)]
    if not found:
        return [
            Finding("caution", f"No seed has finished both with a remedy and with {study.baseline} at the same LR.")
        ]
    praised = [g for g in found if g.praised]
    if not praised:
        return [Finding("lead", _nothing_shown(found, broken=len(found) < len(judged))), *_logits(rows, found)]
    best = max(praised, key=lambda g: g.mean)
    better = f"its held-out loss is {h.loss(best.mean)} nats better ({best.over()})"
    low = min((g for g in found if g.remedy == best.remedy), key=lambda g: g.lr)
    at_low = f"; at LR {h.rate(low.lr)} it {_cost(low)}" if low.lr < best.lr else ""
    return [
        Finding("lead", f"At LR {h.rate(best.lr)}, {_held(rows, best)}, and {better}{at_low}."),
        *_peers(rows, best, found),
    ]


def _nothing_shown(found: Sequence[PairedGain], *, broken: bool) -> str:
    """Returns the lead if no remedy is better: the largest difference, and how many seeds would decide it.

    `broken` is whether the losses of further comparisons are not finite.
    """
    if all(g.effect is None for g in found):
        other = ", and the losses of all other comparisons are not finite" if broken else ""
        return f"One seed is not enough to decide{other}, so no remedy is judged against {found[0].baseline}."
    text = f"No remedy's held-out loss is shown to be better than that of {found[0].baseline} at any LR"
    near = [g for g in found if g.effect and g.verdict == "undecided" and g.mean > 0 and not g.collapsed]
    if not near:
        return text + "."
    top = max(near, key=lambda g: g.mean)
    largest = f"the largest difference is that of {top.remedy} at LR {h.rate(top.lr)} ({top.figures()})"
    return f"{text}; {largest}: {more_seeds(top.effect)}."


def _held(rows: Sequence[Row], one: PairedGain) -> str:
    mine, theirs = (
        spread([row["max_logit"] for row in rows if row["remedy"] == name and row["lr"] == one.lr]).high
        for name in (one.remedy, one.baseline)
    )
    if mine < theirs:
        held = f"{one.remedy} keeps the largest attention logit at {h.number(mine, 2)}"
        return f"{held} where {one.baseline} reaches {h.number(theirs, 2)}"
    return f"the largest attention logit of {one.remedy} is {h.number(mine, 2)} ({one.baseline}: {h.number(theirs, 2)})"


def _cost(one: PairedGain) -> str:
    figures = one.figures()
    if one.verdict == "equal":
        return f"costs nothing ({figures}: inside ±{MARGIN:g})"
    if one.verdict == "undecided":
        figures += f"; {more_seeds(one.effect)}" if one.effect else ""
        return f"cannot be called better, worse or equal ({figures})"
    return f"{'is also better' if one.praised else 'has the lower loss' if one.mean > 0 else 'costs loss'} ({figures})"


_BEYOND = f" by more than {MARGIN:g} nats"


def _are(several: Sequence[str]) -> str:
    return "is" if len(several) == 1 else "are"


def _logits(rows: Sequence[Row], found: Sequence[PairedGain]) -> list[Finding]:
    """Returns the smallest of the largest logits at the highest rate, among remedies whose attention works there."""
    top = max(g.lr for g in found)
    here = {g.remedy: g for g in found if g.lr == top and not g.collapsed}
    peak = {r: spread([row["max_logit"] for row in rows if row["remedy"] == r and row["lr"] == top]).high for r in here}
    lowest = [here[min(peak, key=lambda remedy: peak[remedy])]] if here else []
    return [Finding("note", f"At LR {h.rate(top)}, {_held(rows, one)}.") for one in lowest]


def _peers(rows: Sequence[Row], best: PairedGain, found: Sequence[PairedGain]) -> list[Finding]:
    """Returns the remedies that are not shown to differ from the best remedy at its rate by more than the margin."""
    others = {g.remedy: g for g in found if g.lr == best.lr and g.remedy != best.remedy and not g.collapsed}
    apart = judge(rows, [(name, best.remedy, best.lr) for name in others])
    near = [f"{g.remedy} ({h.signed(others[g.remedy].mean)})" for g in apart if g.verdict in ("equal", "undecided")]
    if not near:
        return []
    text = f"There, {h.listing(near)} {_are(near)} not shown to differ from {best.remedy} ({h.signed(best.mean)})"
    return [Finding("note", f"{text}{_BEYOND}.")]


def _ties(study: StudyData, rows: Sequence[Row]) -> list[Finding]:
    """Compares per-head learning rates (lalr) with the ablation that lowers them equally for all heads (qk_lr)."""
    words = {
        "equal": "are equal",
        "undecided": "cannot be called different or equal",
        "better": "differ, {} ahead,",
        "worse": "differ, {} ahead,",
    }
    found = []
    for remedy, ablation in _ablations(study.remedies):
        groups: dict[str, list[str]] = {}
        for one in gains(rows, [remedy], ablation):
            groups.setdefault(one.verdict, []).append(f"{h.rate(one.lr)} ({one.figures()})")
        parts = [
            f"{said.format(remedy if verdict == 'better' else ablation)} at LR {h.listing(groups[verdict])}"
            for verdict, said in words.items()
            if verdict in groups
        ]
        if parts:
            kind = "caution" if {"equal", "undecided"} & groups.keys() else "note"
            found.append(Finding(kind, f"{remedy} and its ablation {ablation} {'; '.join(parts)}."))
    return found


def _ablations(remedies: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs each lalr with the qk_lr of the same value (tau=0.1, factor=0.1); if no values match, returns all pairs."""
    terms = [(remedy, term) for remedy in remedies if (term := _term(remedy)) is not None]
    left = [(remedy, list(term.options.values())) for remedy, term in terms if term.name == "lalr"]
    right = [(remedy, list(term.options.values())) for remedy, term in terms if term.name == "qk_lr"]
    same = [(a, b) for a, x in left for b, y in right if x == y]
    return same or [(a, b) for a, _ in left for b, _ in right]


def _term(remedy: str) -> Term | None:
    try:
        terms = parse(remedy)
    except QkeelError:  # labels that are not spec strings have no ablation
        return None
    return terms[0] if len(terms) == 1 else None


def _losses_against_baseline(study: StudyData) -> list[Finding]:
    """Returns the remedies that are worse than the baseline."""
    found = [g for g in page_gains(study) if g.verdict == "worse"]
    worse = [f"{g.remedy} at LR {h.rate(g.lr)} ({g.figures()})" for g in found]
    return [Finding("note", f"Worse than {study.baseline}: {h.listing(worse)}.")] if worse else []


def _collapse(study: StudyData, rows: Sequence[Row]) -> list[Finding]:
    fallen = {remedy: lrs for remedy in study.remedies if (lrs := collapsed_at(rows, remedy))}
    test = f"mean entropy under {COLLAPSE_ENTROPY} nats, or held-out loss NaN or no better than before training"
    if not fallen:
        return [Finding("note", f"No finished run collapsed ({test}).")]
    parts = [f"{remedy} at LR {h.listing(lrs)}" for remedy, lrs in fallen.items()]
    return [Finding("note", f"Attention collapsed ({test}) with {'; '.join(parts)}.")]


def _best(study: StudyData, rows: Sequence[Row]) -> list[Finding]:
    cells = {
        (remedy, lr): spread(list(losses(rows, remedy, lr).values()))
        for remedy in study.remedies
        for lr in study.lrs()
        if losses(rows, remedy, lr) and not collapses(rows, remedy, lr)
    }
    finite = {cell: total for cell, total in cells.items() if math.isfinite(total.mean)}
    if not finite:
        return [Finding("caution", "No learning rate has a finite held-out loss without collapse.")]
    remedy, lr = min(finite, key=lambda cell: finite[cell].mean)
    text = f"Lowest held-out loss: {h.loss(finite[remedy, lr].mean)} {study.loss_unit()}, {remedy} at LR {h.rate(lr)}"
    apart = judge(rows, [(remedy, r, lr) for r in study.remedies if r != remedy])
    close = [g.baseline for g in apart if g.effect and g.verdict in ("equal", "undecided")]
    text += f" ({h.listing(close)} {_are(close)} not shown to differ from it{_BEYOND})" if close else ""
    others = {cell: total for cell, total in finite.items() if cell[0] == study.baseline}
    if others and remedy != study.baseline:
        cell = min(others, key=lambda c: others[c].mean)
        text += f"; the lowest of {study.baseline} is {h.loss(others[cell].mean)}, at LR {h.rate(cell[1])}"
    return [Finding("note", text + ".")]


def _single(run: RunData, unit: str) -> list[Finding]:
    if run.row is None:
        return []
    row = run.row
    name = f"{run.remedy} at LR {h.rate(run.lr)}, seed {run.seed}"
    steps = "" if row["steps"] is None else f" after {h.count(row['steps'], 'step')}"
    before = "" if math.isnan(row["init_loss"]) else f"; it was {h.loss(row['init_loss'])} before training"
    alarm = row["alarm_step"]
    line = f"the alarm threshold of {h.number(ALARM_THRESHOLD)}"
    passed = f"never passed {line}" if alarm is None else f"passed {line} by step {alarm:,}"
    entropy = f"mean attention entropy ended at {h.number(row['end_entropy'])} nats"
    state = "attention collapsed" if row["collapsed"] else "attention did not collapse"
    return [
        Finding("lead", f"{name}: held-out loss {h.loss(row['val_loss'])} {unit}{steps}{before}."),
        Finding("note", f"The largest attention logit reached {h.number(row['max_logit'])} and {passed}."),
        Finding("note", f"{entropy[0].upper()}{entropy[1:]}; {state}."),
    ]


def _seeds(study: StudyData, rows: Sequence[Row]) -> list[Finding]:
    if len({row["remedy"] for row in rows}) < 2:
        return []
    seeds = {row["seed"] for row in rows}
    if len(seeds) == 1:
        return [Finding("caution", "One seed: no interval, so no difference is judged.")]
    others = len(differences_beside(study))
    tests = sum(g.effect is not None for g in page_gains(study)) + others
    text = "Differences are paired by seed: mean, then 95 % interval"
    if tests > 1:
        where = " in all parts" if others else ""
        text += f" (Student's t, corrected by Holm's method for {tests} comparisons with {study.baseline}{where})"
    return [Finding("caution", f"{text}; {len(seeds)} seeds.")]


def _unfinished(study: StudyData) -> list[Finding]:
    words = {RunStatus.FAILED: "failed", RunStatus.STARTED: "unfinished", RunStatus.MISSING: "missing"}
    tally = {word: sum(run.status is status for run in study.runs) for status, word in words.items()}
    parts = [f"{n} {word}" for word, n in tally.items() if n]
    if not parts:
        return []
    if len(study.runs) == 1:
        return [Finding("lead", _stopped(study.runs[0]))]
    text = f"{h.listing(parts)} of {h.count(len(study.runs), 'run')}: "
    text += "they do not appear in any table or loss figure, and are listed below."
    if not any(run.row for run in study.runs):
        text = f"No run has finished yet ({h.listing(parts)} of {h.count(len(study.runs), 'run')})."
    return [Finding("caution", text)]


def _stopped(run: RunData) -> str:
    name = f"{run.remedy} at LR {h.rate(run.lr)}, seed {run.seed}"
    where = f"after step {int(run.metrics[-1]['step']):,}" if run.metrics else "before its first record"
    if run.status is not RunStatus.FAILED:
        return f"{name} is not finished: its curves on this page end {where}."
    lines = run.error.strip().splitlines()
    return f"{name} failed {where}" + (f": {lines[-1].strip()}" if lines else ".")
