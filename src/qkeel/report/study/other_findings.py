"""Sentences and tables of length-extrapolation and multimodal studies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from qkeel.metrics import Row, paired_effects
from qkeel.report import html as h
from qkeel.report.html import Finding, Markup
from qkeel.report.study.collect import BASELINE, RunData, StudyData
from qkeel.report.study.compare import (
    HELD,
    MARGIN,
    UNDECIDED,
    SeedEffect,
    Spread,
    less,
    spread,
    spread_cell,
    swatch,
    times,
)

# Length extrapolation: sentences, and the table of measured and published results.

_ACCURACIES = {
    "accuracy_train": "At the training length",
    "accuracy_train_posthoc": "There, post hoc",
    "accuracy_nonrepeat": "Long",
    "accuracy_last": "Last part",
    "accuracy_last_short": "That part alone",
    "accuracy_repeat": "Repeated",
    "needle": "Needle",
}
_MECHANISM = {"cos_outside": "Angles outside", "dilution": "Largest weight"}
_NEEDLE = ("needle_weight", "needle_bound")
_VALUES = (*_ACCURACIES, *_MECHANISM, "kept_nonrepeat", *_NEEDLE)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The results of one form with one method at one length, over its seeds."""

    form: str
    method: str
    length: int
    values: dict[str, Spread]

    @property
    def kept(self) -> float:
        """The share of the accuracy that is retained, averaged over seeds."""
        return self.values["kept_nonrepeat"].mean


def is_long(study: StudyData) -> bool:
    """True if runs of the study were tested at lengths other than the training length."""
    return any(run.long for run in study.runs)


def measured(study: StudyData) -> list[Measured]:
    """Returns the results for every form, method and length that was measured, in the study's order."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for form in study.remedies:
        for run in (run for run in study.runs if run.remedy == form):
            for line in run.long:
                if line.get("kept_nonrepeat") is not None:
                    found.setdefault((form, str(line["posthoc"]), int(line["test_length"])), []).append(line)
    return [Measured(*key, _spreads(lines)) for key, lines in found.items()]


def _spreads(lines: Sequence[Row]) -> dict[str, Spread]:
    """Returns the values that every line has."""
    known = [name for name in _VALUES if all(line.get(name) is not None for line in lines)]
    return {name: spread([line[name] for line in lines]) for name in known}


def train_length(study: StudyData) -> int | None:
    """Returns the training context length if it is the same for all runs."""
    lengths = {run.config["data"]["context"] for run in study.runs if run.config}
    return lengths.pop() if len(lengths) == 1 else None


def length_findings(study: StudyData) -> list[Finding]:
    """Returns findings on the share of accuracy that each form keeps, the agreement with the published order, and
    limitations."""
    rows = measured(study)
    if not rows:
        return []
    longest = max(row.length for row in rows)
    plain = sorted((row for row in rows if row.length == longest and row.method == "none"), key=lambda r: -r.kept)
    held = h.listing([f"{row.form} {row.kept:.2f}" for row in plain])
    short = train_length(study)
    seeds = max(row.values["kept_nonrepeat"].n for row in rows)
    found = []
    if plain:
        text = f"Trained on {short} tokens and tested on {longest}, as trained: the share of accuracy kept is {held}; "
        found.append(Finding("lead", text + f"{h.count(seeds, 'seed')}."))
    reading = [row for row in plain if "accuracy_last_short" in row.values]
    if reading:
        gained = [100 * (row.values["accuracy_last"].mean - row.values["accuracy_last_short"].mean) for row in reading]
        each = h.listing([f"{row.form} {points:+.1f}" for row, points in zip(reading, gained)])
        found.append(Finding("note", f"Gain of the last {short} tokens from the text before them, in points: {each}."))
    found += _needles_found(rows, longest)
    agree, pairs = agreement([row for row in rows if row.length == longest])
    if pairs:
        text = f"{agree} of {pairs} pairs of form and method have the published order of the share kept"
        found.append(Finding("note", f"{text} ({SOURCE}, 512 → 4096, 100M parameters); nothing is fitted."))
    if seeds == 1:
        found.append(Finding("caution", "One seed, so differences of a few points may be chance."))
    return found


def _needles_found(rows: Sequence[Measured], longest: int) -> list[Finding]:
    """Returns findings on retrieval from short and from long texts."""
    share = {(row.form, row.method, row.length): row.values["needle"].mean for row in rows if "needle" in row.values}
    short = min((length for _, _, length in share), default=longest)
    shares = [
        f"{form}{_under(method)} {100 * share[form, method, short]:.0f} and {100 * at:.0f}"
        for (form, method, length), at in share.items()
        if length == longest and (form, method, short) in share
    ]
    if not shares or short == longest:
        return []
    return [Finding("note", f"Needles found among {short} and among {longest} tokens, in %: {h.listing(shares)}.")]


def _under(method: str) -> str:
    return "" if method == "none" else f" under {method}"


def agreement(rows: Sequence[Measured]) -> tuple[int, int]:
    """Returns how many pairs have the published order, and for how many pairs an order was published."""
    known = [(row.kept, theirs) for row in rows if (theirs := published_share(row.form, row.method)) is not None]
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a[1] != b[1]]
    return sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs), len(pairs)


def comparison(study: StudyData) -> Markup:
    """Returns a table of forms, methods and lengths with accuracies in %, the share kept and the published share."""
    rows = measured(study)
    if not rows:
        return Markup("")
    shown = [name for name in _VALUES if any(name in row.values for row in rows)]
    titles = {**_ACCURACIES, "kept_nonrepeat": "Kept", **_MECHANISM}
    head = h.columns("Form", "Post hoc", kind="text")
    head += h.columns("Length", *(title for name, title in titles.items() if name in shown), "Published: kept")
    text = (
        "Share of next tokens predicted, in % (means over seeds, with the range below). Kept: accuracy at the long "
        "length divided by that at "
        "the training length, as trained. "
        "Last part: accuracy on the last part of a text, one training length, with all the text before it and alone; "
        "the difference is what the longer context adds. "
        "Angles outside: share of visible pairs, in %, whose cos(q, k) lies outside the range observed for their head "
        "in training. "
        "Largest weight: the largest weight that one of that many keys can get, in the head where it is smallest. "
        f"Published: {SOURCE}, GAU, {TRAIN_LENGTH} → {TEST_LENGTH}; "
        "the order can be compared, but not the values."
    )
    body = [_line(study, one, [name for name in titles if name in shown]) for one in rows]
    inner = h.table("Accuracy at other lengths, measured and published", head, body, sortable=True)
    return h.join([h.note(text), inner, _needles(study, rows)])


def _needles(study: StudyData, rows: Sequence[Measured]) -> Markup:
    """Returns a table with one row per form and method: the share of needles found for each text length, and the
    attention on needles in the longest text."""
    known = {(row.form, row.method, row.length): row.values for row in rows if "needle" in row.values}
    if not known:
        return Markup("")
    spans = sorted({length for _, _, length in known})
    head = h.columns("Form", "Post hoc", kind="text")
    head += h.columns(*(f"At {length:,}" for length in spans), "Weight on it", "At most")
    text = (
        "Share of values predicted when their key is asked for at the end of a text, in % (means over seeds, with "
        "the range below); "
        "guessing finds one in eight. Weight on it: the weight from the question to the needle in the longest text, in "
        "the head where it is largest. "
        "At most: the largest weight that one key among that many could get, given the norms of that head's queries "
        "and keys."
    )
    body = []
    for form, method in dict.fromkeys(key[:2] for key in known):
        cells = [_cell(known.get((form, method, length), {}).get("needle"), "needle") for length in spans]
        last = known.get((form, method, spans[-1]), {})
        cells += [_cell(last.get(name), name) for name in _NEEDLE]
        body.append(h.table_row(swatch(study, form), h.words(method), *cells))
    return h.join([h.note(text), h.table("Needles found", head, body, sortable=True)])


def _line(study: StudyData, one: Measured, names: Sequence[str]) -> Markup:
    theirs = published_share(one.form, one.method)
    return h.table_row(
        swatch(study, one.form),
        h.words(one.method),
        h.cell(f"{one.length:,}", one.length),
        *(_cell(one.values.get(name), name) for name in names),
        h.NOTHING if theirs is None else h.cell(f"{theirs:.2f}", theirs),
    )


def _cell(value: Spread | None, name: str) -> Markup:
    if value is None:
        return h.NOTHING
    times, places = (100, 3 if name == "cos_outside" else 1) if name not in ("kept_nonrepeat", "dilution") else (1, 2)
    return spread_cell(value, lambda x: f"{times * x:.{places}f}")


# Form -> next-token accuracy in %: at 512 (training), and for each post-hoc method at 4096 repeated and not repeated.
# The model has about 100M parameters and 24 GAU layers of one head, trained on 512 tokens. ReRoPE has window 128.
# cosa_logn as trained has 48.95 in the source's first table and 48.39 in the second.
SOURCE = "Su 2023, kexue.fm 9859"
TRAIN_LENGTH, TEST_LENGTH = 512, 4096
_POSTHOC = ("none", "ntk", "yarn", "rerope")
_PUBLISHED: dict[str, tuple[float, Sequence[tuple[float, float]]]] = {
    "baseline": (49.41, ((24.17, 23.16), (60.57, 42.20), (80.10, 47.45), (76.11, 47.82))),
    "baseline_logn": (49.40, ((24.60, 24.02), (75.86, 47.06), (82.57, 46.52), (85.47, 48.87))),
    "qna": (49.55, ((22.45, 22.18), (52.28, 39.88), (82.53, 47.50), (78.22, 47.72))),
    "qna_logn": (49.42, ((19.55, 18.74), (57.44, 41.56), (80.08, 45.16), (84.71, 48.31))),
    "kna": (49.60, ((61.08, 47.69), (64.44, 43.02), (84.19, 47.44), (77.76, 47.73))),
    "kna_logn": (49.58, ((63.17, 46.40), (79.05, 47.43), (83.95, 47.16), (85.48, 48.78))),
    "cosa": (49.73, ((58.90, 46.98), (62.50, 42.77), (83.40, 47.80), (77.82, 47.80))),
    "cosa_logn": (49.67, ((64.74, 48.95), (78.97, 47.46), (82.28, 45.72), (85.67, 48.39))),
}
#: by form and post-hoc method: at the training length, at 4096 repeated, at 4096 not repeated
ACCURACY: dict[tuple[str, str], tuple[float, float, float]] = {
    (form, method): (trained, repeated, whole)
    for form, (trained, each) in _PUBLISHED.items()
    for method, (repeated, whole) in zip(_POSTHOC, each)
}


def published_share(form: str, method: str) -> float | None:
    """Returns the published share of accuracy kept at 8 times the training length; None if it was not published.

    >>> round(published_share("kna", "none"), 2), published_share("qwen3", "none")
    (0.96, None)
    """
    row = ACCURACY.get((form, method))
    return None if row is None else row[2] / row[0]


# Multimodal studies: the table of values by modality.


def _at_end(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.metrics[-1].get(name)


def _ratio(above: str, below: str) -> Callable[[RunData], float | None]:
    def read(run: RunData) -> float | None:
        top, bottom = (run.metrics[-1].get(name) for name in (above, below))
        return top / bottom if top is not None and bottom else None

    return read


def _row(name: str) -> Callable[[RunData], float | None]:
    return lambda run: (run.row or {}).get(name)


_COLUMNS: dict[str, tuple[Callable[[RunData], float | None], Callable[[float], str]]] = {
    "Image loss": (_at_end("val_loss/image"), h.loss),
    "Caption loss": (_at_end("val_loss/caption"), h.loss),
    "Text loss": (_at_end("val_loss/text"), h.loss),
    "Queries, image / text": (_ratio("query_norm/image", "query_norm/text"), "{:.2f}".format),
    "Keys, image / text": (_ratio("key_norm/image", "key_norm/text"), "{:.2f}".format),
    "Text's weight on images, / even": (
        _ratio("attention_mass/text>image", "uniform_mass/text>image"),
        "{:.2f}".format,
    ),
    "Images' weight on text, / even": (_ratio("attention_mass/image>text", "uniform_mass/image>text"), "{:.2f}".format),
    "Largest logit": (_row("max_logit"), h.number),
    "Entropy at the end": (_row("end_entropy"), h.number),
    "Alarm step": (_row("alarm_step"), h.number),
    "Last block's norm, images": (_at_end("last_block_norm/image"), h.number),
}


def by_modality(study: StudyData) -> Markup:
    """Returns a table with one row per mix, remedy and rate, with means over seeds and the range below."""
    lines = []
    for name, part in (study.parts() or {"": study}).items():
        for remedy in study.remedies:
            for lr in part.lrs():
                runs = [r for r in part.runs if (r.remedy, r.lr) == (remedy, lr) and r.row is not None and r.metrics]
                if runs:
                    lines.append(_modality_line(study, name, (remedy, lr), runs))
    if not lines:
        return Markup("")
    text = (
        "Means over seeds with the range below, measured on one fixed batch that is the same for every mix. Even: the "
        "weight if attention treated all visible keys equally. If a mix never trains on a kind of data, that alone "
        "explains a high loss on this kind."
    )
    head = [*h.columns("Mix", "Remedy", kind="text"), *h.columns("LR", *_COLUMNS)]
    return h.join([h.note(text), h.table("By modality", head, lines, sortable=True)])


def _modality_line(study: StudyData, mix: str, at: tuple[str, float], runs: list[RunData]) -> Markup:
    remedy, lr = at
    cells = [h.words(swatch(study, remedy)), h.cell(h.rate(lr), lr)]
    for read, write in _COLUMNS.values():
        values = [value for run in runs if (value := read(run)) is not None]
        cells.append(_modality_cell(spread(values), write, len(runs)) if values else h.NOTHING)
    return h.table_row(mix, *cells)


def _modality_cell(total: Spread, write: Callable[[float], str], runs: int) -> Markup:
    small = f"{write(total.low)} to {write(total.high)}" if total.n > 1 else ""
    if total.n < runs:
        small += f"{'; ' if small else ''}{total.n} of {runs} runs"
    return h.cell(write(total.mean), total.mean, small)


# Multimodal studies: which claims about mixed modalities held.

REMEDY = "qk_norm"


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A claim about mixed modalities; {} in `sentence` is replaced with its effect."""

    name: str
    sentence: str
    effect: SeedEffect

    @property
    def measured(self) -> str:
        """The sentence with the effect and its interval."""
        return self.sentence.replace("{}", self.effect.text())

    @property
    def held(self) -> bool:
        """True if the interval of the effect supports the claim."""
        return self.effect.verdict == HELD

    @property
    def text(self) -> str:
        """The claim with its measurement and verdict, as one sentence."""
        return f"{self.name}: {self.measured}: {self.effect.said()}."


def is_multimodal(study: StudyData) -> bool:
    """True if runs of the study were measured by modality."""
    return any("query_norm/image" in record for run in study.runs for record in run.metrics[-1:])


def modality_findings(study: StudyData) -> list[Finding]:
    """Returns the answer, followed by one finding per claim."""
    found = claims(study)
    if not found:
        return [Finding("caution", "No claim can be judged yet, because too few runs have finished.")]
    held = [claim for claim in found if claim.held]
    if all(len(claim.effect.values) < 2 for claim in found):
        return [
            Finding("lead", f"{_answer(study, found)}One seed: none of {h.count(len(found), 'claim')} is judged."),
            *_cautions(study),
        ]
    answer = _answer(study, found)
    text = f"Why do mixed modalities blow up? {answer}" if answer else ""
    tally = f"{len(held)} of {h.count(len(found), 'claim')} held, by 95 % intervals for all claims at once (Holm)."
    notes = [Finding("undecided" if claim.effect.verdict == UNDECIDED else "note", claim.text) for claim in found]
    return [Finding("lead", f"{text}{tally}"), *notes, *_cautions(study)]


def _cautions(study: StudyData) -> Iterator[Finding]:
    left = sum(run.row is None for run in study.runs)
    if left:
        yield Finding("caution", f"{left} of {h.count(len(study.runs), 'run')} have no result and appear in no figure.")
    yield Finding(
        "caution",
        "The study uses one small model on small images: what is not shown here may hold at a different size, and vice "
        "versa. Norms and logits are measured on one probe batch, which is the same for every mix.",
    )


def _answer(study: StudyData, found: Sequence[Claim]) -> str:
    regimes = [c for c in found if c.name.startswith("Variance") and "the largest logit is {}" in c.sentence]
    if regimes:
        return "".join(f"{c.name}: {c.measured}, {c.effect.said()}. " for c in regimes)
    text, mixes, rates = _text(study), _mixes(study), _rates(study)
    if not mixes or len(rates) < 2:
        return ""
    low, high = rates[0], rates[-1]
    parts = ([("text alone", text)] if text else []) + [(name, part) for name, part in mixes.items()][:3]
    grown = []
    for name, part in parts:
        one = times(_of(part, high, "max_logit"), _of(part, low, "max_logit"))
        grown += [f"{h.number(one.mean, 2)}× in {name}"] if one else []
    begins = f"at LR {h.rate(high)}, "
    mixed = [c.effect for c in found if c.name.startswith("Mixing makes logits") and c.sentence.startswith(begins)]
    answer = f"From LR {h.rate(low)} to {h.rate(high)}, the largest logit grows {h.listing(grown)}. " if grown else ""
    if mixed:
        more = f"Mixing multiplies it by {h.listing([e.text() for e in mixed])} at LR {h.rate(high)}"
        clear = all(e.verdict == HELD for e in mixed)
        so = "which is shown" if clear else "which is not shown: here the rate makes logits grow, not the mixing"
        answer += f"{more}, {so}. "
    cured = [e for part in mixes.values() if (e := _cured(part, high))] if len(mixes) <= 3 else []
    return answer + (f"{REMEDY} cuts it by {h.listing([e.text() for e in cured])}. " if cured else "")


def claims(study: StudyData) -> list[Claim]:
    """Returns the claims that the study's runs can judge."""
    makers = (_norms, _drift, _mass, _mixing, _alarm, _cure, _hidden, _variance)
    found = [claim for make in makers for claim in make(study)]
    # All claims are tested together, so each gets the level of its own test by Holm's method.
    several = [i for i, claim in enumerate(found) if len(claim.effect.values) > 1]
    # In units of its own margin, every claim has a margin of 1.
    scaled = [[number / found[i].effect.margin for number in found[i].effect.numbers] for i in several]
    for i, judged in zip(several, paired_effects(scaled, 1.0)):
        effect = dataclasses.replace(found[i].effect, level=judged.level)
        found[i] = dataclasses.replace(found[i], effect=effect)
    return found


def _norms(study: StudyData) -> Iterator[Claim]:
    """Compares with a model trained on text alone, if there is one, because that model never saw an image."""
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)[:1]):
        for kind, plural in (("query", "queries"), ("key", "keys")):
            one = times(*(_of(part, lr, f"{kind}_norm/{side}") for side in ("image", "text")))
            if one is None:
                continue
            against = times(_shares(part, lr, f"{kind}_norm"), _shares(text, lr, f"{kind}_norm")) if text else None
            what = f"at LR {h.rate(lr)}, image {plural} are {{}} as long as text {plural}"
            if against is not None:
                what = what.replace("{}", one.text()) + ", which is {} the ratio in a model of text alone"
            yield Claim(f"Mixing makes image {plural} longer ({name})", what, against or one)


def _drift(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)):
        one = times(_shares(part, lr, "query_norm"), _shares(part, lr, "query_norm", at=0))
        if one is not None:
            what = f"at LR {h.rate(lr)}, the ratio of image to text query norms ends at {{}} its value before training"
            yield Claim(f"Norms compete, so their ratio grows ({name})", what, one)


def _mass(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)[:1]):
        one = times(_of(part, lr, "attention_mass/text>image"), _of(part, lr, "uniform_mass/text>image"))
        if one is not None:
            what = f"at LR {h.rate(lr)}, text gives images {{}} the weight that uniform attention would give them"
            yield Claim(f"Images draw the attention of text ({name})", what, one)


def _mixing(study: StudyData) -> Iterator[Claim]:
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)) if text else ():
        both = [_of(p, lr, "max_logit") for p in (part, text) if p]
        one = times(*both)
        if one is not None:
            tops = [h.number(_middle(each.values()), 2) for each in both]
            what = f"at LR {h.rate(lr)}, the largest logit is {{}} that of text alone ({tops[0]} against {tops[1]})"
            yield Claim(f"Mixing makes logits grow ({name})", what, one)


def _alarm(study: StudyData) -> Iterator[Claim]:
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)[-1:]) if text else ():
        steps = [_of(p, lr, "alarm_step") for p in (part, text) if p]
        one = less(*steps, margin=1.0)
        if one is not None:
            means = [f"{_middle(s.values()):.0f}" for s in steps]
            what = f"at LR {h.rate(lr)}, the alarm comes at step {means[0]} against {means[1]} in text alone"
            yield Claim(f"Mixed training fails earlier ({name})", what, one)


def _cured(part: StudyData, lr: float) -> SeedEffect | None:
    return times(_of(part, lr, "max_logit"), _of(part, lr, "max_logit", REMEDY))


def _cure(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)[-1:]):
        one = _cured(part, lr)
        if one is not None:
            what = f"at LR {h.rate(lr)}, the largest logit of {BASELINE} is {{}} that of {REMEDY}"
            yield Claim(f"QK-norm limits the logits ({name})", what, one)
        image = less(_of(part, lr, "val_loss/image", REMEDY), _of(part, lr, "val_loss/image"), MARGIN)
        if image is not None:
            what = f"at LR {h.rate(lr)}, the image loss of {REMEDY} is {{}} nats better than that of {BASELINE}"
            yield Claim(f"QK-norm saves the images ({name})", what, image)


def _hidden(study: StudyData) -> Iterator[Claim]:
    others = [r for r in study.remedies if "swin_norm" in r]
    for name, part, lr in _each(study, _rates(study)[-1:]):
        norm = _of(part, lr, "last_block_norm/image", REMEDY)
        for remedy in others:
            one = times(norm, _of(part, lr, "last_block_norm/image", remedy))
            if one is not None:
                what = (
                    f"at LR {h.rate(lr)}, hidden states leave the last block {{}} as long with {REMEDY} as with "
                    f"{remedy}"
                )
                yield Claim(f"QK-norm alone lets the hidden norm grow ({name})", what, one)


def _variance(study: StudyData) -> Iterator[Claim]:
    """Compares image embeddings of the largest variance with variance 1, at the lowest rate, by norm order of the
    blocks."""
    cells, lrs = _cells(study), _rates(study)[:1]
    top = max((variance for _, _, variance in cells), default=1.0)
    for order in dict.fromkeys(order for order, _, _ in cells) if top > 1 else ():
        for lr in lrs:
            for what, read in _READ.items():
                one = times(*(_over_shares(cells, order, v, lr, read) for v in (top, 1.0)))
                if one is not None:
                    said = f"at LR {h.rate(lr)}, {what} is {{}} that at variance 1"
                    yield Claim(f"Variance ×{top:g} of images, {_NAMES.get(order, order)}", said, one)


_NAMES = {"pre": "norms before attention", "none": "no norms in the blocks"}
ReadScores = Callable[[StudyData, float], dict[int, float]]
Cells = Mapping[tuple[str, float, float], StudyData]


def _cells(study: StudyData) -> Cells:
    """Returns the parts by norm order, image share and image variance."""
    found = {}
    for part in study.parts().values():
        config = part.runs[0].config
        images, model = config.get("images"), config.get("model")
        if isinstance(images, dict) and isinstance(model, dict) and images.get("image_share", 0) > 0:
            found[model["norm_order"], float(images["image_share"]), float(images.get("image_variance", 1.0))] = part
    return found


def _over_shares(cells: Cells, order: str, variance: float, lr: float, read: ReadScores) -> dict[int, float]:
    """Returns one value per seed, the geometric mean over image shares, as runs of one seed are not independent."""
    each = [read(part, lr) for (norm, _, at), part in cells.items() if (norm, at) == (order, variance)]
    seeds = set.intersection(*(set(found) for found in each)) if each else set()  # finished at every share
    return {
        seed: statistics.geometric_mean([found[seed] for found in each])
        for seed in sorted(seeds)
        if all(found[seed] > 0 for found in each)
    }


_READ: dict[str, ReadScores] = {
    "the ratio of image to text query norms before training": lambda part, lr: _shares(part, lr, "query_norm", at=0),
    "the ratio of image to text query norms after training": lambda part, lr: _shares(part, lr, "query_norm"),
    "text's own query norm after training": lambda part, lr: _of(part, lr, "query_norm/text"),
    "the largest text-to-text logit at the end": lambda part, lr: _of(part, lr, "max_logit/text>text"),
    "the largest logit": lambda part, lr: _of(part, lr, "max_logit"),
}


def _shares(part: StudyData, lr: float, name: str, at: int = -1) -> dict[int, float]:
    above, below = (_of(part, lr, f"{name}/{side}", at=at) for side in ("image", "text"))
    return {seed: above[seed] / below[seed] for seed in above.keys() & below.keys() if below[seed]}


def _each(study: StudyData, lrs: Iterable[float]) -> Iterator[tuple[str, StudyData, float]]:
    """Yields every mix with images at every rate, or nothing if there are too many mixes to report individually."""
    mixes = _mixes(study)
    for name, part in mixes.items() if len(mixes) <= 4 else ():
        for lr in lrs:
            yield name, part, lr


def _text(study: StudyData) -> StudyData | None:
    return next((part for part in study.parts().values() if not _share(part.runs[0])), None)


def _mixes(study: StudyData) -> dict[str, StudyData]:
    return {name: part for name, part in study.parts().items() if _share(part.runs[0])}


def _share(run: RunData) -> float:
    images = run.config.get("images")
    return float(images.get("image_share", 0)) if isinstance(images, dict) else 0.0


def _rates(study: StudyData) -> list[float]:
    return sorted({run.lr for run in study.runs if run.row is not None})


def _of(part: StudyData, lr: float, name: str, remedy: str = BASELINE, at: int = -1) -> dict[int, float]:
    """Returns a value of a remedy's finished runs by seed, from the table or from a record of metrics.jsonl."""
    found = {}
    for run in part.runs:
        if run.remedy == remedy and run.lr == lr and run.row is not None and run.metrics:
            value = run.row.get(name) if name in ("max_logit", "alarm_step") else run.metrics[at].get(name)
            if isinstance(value, (int, float)) and not math.isnan(value):
                found[run.seed] = float(value)
    return found


def _middle(values: Iterable[float]) -> float:
    several = sorted(values)
    return several[len(several) // 2]
