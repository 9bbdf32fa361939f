"""Text and images in one sequence: which of the folklore's claims held, and the numbers by modality."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from qkeel.metrics import paired_effects
from qkeel.report.html.formats import count, listing, number, rate
from qkeel.report.html.page import Finding
from qkeel.report.study.collect import BASELINE, RunData, StudyData
from qkeel.report.study.compare import HELD, UNDECIDED, Effect, less, times

REMEDY = "qk_norm"


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A claim about mixed modalities; {} in `sentence`, what was measured, is where its effect stands."""

    name: str
    sentence: str
    effect: Effect

    @property
    def measured(self) -> str:
        """The sentence with the effect and its interval."""
        return self.sentence.replace("{}", self.effect.text())

    @property
    def held(self) -> bool:
        """True if the interval of the effect lies on the claim's side."""
        return self.effect.verdict == HELD

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.name}: {self.measured}: {self.effect.said()}."


def is_multimodal(study: StudyData) -> bool:
    """True if runs of the study were measured by modality."""
    return any("query_norm/image" in record for run in study.runs for record in run.metrics[-1:])


def findings(study: StudyData) -> list[Finding]:
    """The answer, then claim by claim."""
    found = claims(study)
    if not found:
        return [Finding("caution", "No claim can be judged yet: too few of the runs have finished.")]
    held = [claim for claim in found if claim.held]
    if all(len(claim.effect.values) < 2 for claim in found):
        return [
            Finding("lead", f"{_answer(study, found)}One seed: none of {count(len(found), 'claim')} is judged."),
            *_cautions(study),
        ]
    answer = _answer(study, found)
    text = f"Why do mixed modalities blow up? {answer}" if answer else ""
    tally = f"{len(held)} of {count(len(found), 'claim')} held, by intervals of 95 % for all at once (Holm)."
    notes = [Finding("undecided" if claim.effect.verdict == UNDECIDED else "note", claim.text) for claim in found]
    return [Finding("lead", f"{text}{tally}"), *notes, *_cautions(study)]


def _cautions(study: StudyData) -> Iterator[Finding]:
    left = sum(run.row is None for run in study.runs)
    if left:
        yield Finding("caution", f"{left} of {count(len(study.runs), 'run')} have no result; they are in no figure.")
    yield Finding(
        "caution",
        "One small model on small images: what is not shown here may be true at another size, and the reverse. "
        "Norms and logits are measured on one probe, the same for every mix.",
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
        grown += [f"{number(one.mean, 2)}× in {name}"] if one else []
    begins = f"at LR {rate(high)} "
    mixed = [c.effect for c in found if c.name.startswith("Mixing makes logits") and c.sentence.startswith(begins)]
    said = f"From LR {rate(low)} to {rate(high)} the largest logit grows {listing(grown)}. " if grown else ""
    if mixed:
        more = f"Mixing multiplies it by {listing([e.text() for e in mixed])} at LR {rate(high)}"
        clear = all(e.verdict == HELD for e in mixed)
        so = "which is shown" if clear else "which is not shown: here the rate does it, not the mixing"
        said += f"{more}, {so}. "
    cured = [e for part in mixes.values() if (e := _cured(part, high))] if len(mixes) <= 3 else []
    return said + (f"{REMEDY} cuts it by {listing([e.text() for e in cured])}. " if cured else "")


def claims(study: StudyData) -> list[Claim]:
    """Those that the study's runs can judge."""
    makers = (_norms, _drift, _mass, _mixing, _alarm, _cure, _hidden, _variance)
    found = [claim for make in makers for claim in make(study)]
    several = [i for i, claim in enumerate(found) if len(claim.effect.values) > 1]
    for i, judged in zip(several, paired_effects([found[i].effect.numbers for i in several])):
        effect = dataclasses.replace(found[i].effect, level=judged.level)
        found[i] = dataclasses.replace(found[i], effect=effect)
    return found


def _norms(study: StudyData) -> Iterator[Claim]:
    """Judged against a model of text alone under the same probe, where there is one: it never saw an image."""
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)[:1]):
        for kind, words in (("query", "queries"), ("key", "keys")):
            one = times(*(_of(part, lr, f"{kind}_norm/{side}") for side in ("image", "text")))
            if one is None:
                continue
            against = times(_shares(part, lr, f"{kind}_norm"), _shares(text, lr, f"{kind}_norm")) if text else None
            what = f"at LR {rate(lr)} image {words} are {{}} text {words}"
            if against is not None:
                what = what.replace("{}", one.text()) + ", which is {} what a model of text alone makes of them"
            yield Claim(f"Mixing makes image {words} longer ({name})", what, against or one)


def _drift(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)):
        one = times(_shares(part, lr, "query_norm"), _shares(part, lr, "query_norm", at=0))
        if one is not None:
            what = f"at LR {rate(lr)} the ratio of image to text queries ends {{}} what it was before training"
            yield Claim(f"Norms compete, so their ratio grows ({name})", what, one)


def _mass(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)[:1]):
        one = times(_of(part, lr, "attention_mass/text>image"), _of(part, lr, "uniform_mass/text>image"))
        if one is not None:
            what = f"at LR {rate(lr)} text gives images {{}} the weight that even attention would"
            yield Claim(f"Images draw the attention of text ({name})", what, one)


def _mixing(study: StudyData) -> Iterator[Claim]:
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)) if text else ():
        both = [_of(p, lr, "max_logit") for p in (part, text) if p]
        one = times(*both)
        if one is not None:
            tops = [number(_middle(each.values()), 2) for each in both]
            what = f"at LR {rate(lr)} the largest logit is {{}} that of text alone ({tops[0]} against {tops[1]})"
            yield Claim(f"Mixing makes logits grow ({name})", what, one)


def _alarm(study: StudyData) -> Iterator[Claim]:
    text = _text(study)
    for name, part, lr in _each(study, _rates(study)[-1:]) if text else ():
        steps = [_of(p, lr, "alarm_step") for p in (part, text) if p]
        one = less(*steps)
        if one is not None:
            means = [f"{_middle(s.values()):.0f}" for s in steps]
            what = f"at LR {rate(lr)} the alarm comes at step {means[0]} against {means[1]} in text alone"
            yield Claim(f"Mixed training fails earlier ({name})", what, one)


def _cured(part: StudyData, lr: float) -> Effect | None:
    return times(_of(part, lr, "max_logit"), _of(part, lr, "max_logit", REMEDY))


def _cure(study: StudyData) -> Iterator[Claim]:
    for name, part, lr in _each(study, _rates(study)[-1:]):
        one = _cured(part, lr)
        if one is not None:
            what = f"at LR {rate(lr)} the largest logit of {BASELINE} is {{}} that of {REMEDY}"
            yield Claim(f"QK-norm holds the logits ({name})", what, one)
        image = less(_of(part, lr, "val_loss/image", REMEDY), _of(part, lr, "val_loss/image"))
        if image is not None:
            what = f"at LR {rate(lr)} the image loss of {REMEDY} is {{}} nats better than that of {BASELINE}"
            yield Claim(f"QK-norm saves the images ({name})", what, image)


def _hidden(study: StudyData) -> Iterator[Claim]:
    others = [r for r in study.remedies if "swin_norm" in r]
    for name, part, lr in _each(study, _rates(study)[-1:]):
        norm = _of(part, lr, "last_block_norm/image", REMEDY)
        for remedy in others:
            one = times(norm, _of(part, lr, "last_block_norm/image", remedy))
            if one is not None:
                what = f"at LR {rate(lr)} hidden states leave the last block {{}} as long with it as with {remedy}"
                yield Claim(f"QK-norm alone leaves the hidden norm to grow ({name})", what, one)


def _variance(study: StudyData) -> Iterator[Claim]:
    """Image embeddings of the largest variance against 1 at the lowest rate, by where the norms of the blocks stand."""
    cells, lrs = _cells(study), _rates(study)[:1]
    top = max((variance for _, _, variance in cells), default=1.0)
    for order in dict.fromkeys(order for order, _, _ in cells) if top > 1 else ():
        for lr in lrs:
            for what, read in _READ.items():
                one = times(*(_over_shares(cells, order, v, lr, read) for v in (top, 1.0)))
                if one is not None:
                    said = f"at LR {rate(lr)} {what} is {{}} that at variance 1"
                    yield Claim(f"Variance ×{top:g} of images, {_NAMES.get(order, order)}", said, one)


_NAMES = {"pre": "norms before attention", "none": "no norms in the blocks"}
Read = Callable[[StudyData, float], dict[int, float]]
Cells = Mapping[tuple[str, float, float], StudyData]


def _cells(study: StudyData) -> Cells:
    """The parts by norm order, image share and image variance."""
    found = {}
    for part in study.parts().values():
        config = part.runs[0].config
        images, model = config.get("images"), config.get("model")
        if isinstance(images, dict) and isinstance(model, dict) and images.get("image_share", 0) > 0:
            found[model["norm_order"], float(images["image_share"]), float(images.get("image_variance", 1.0))] = part
    return found


def _over_shares(cells: Cells, order: str, variance: float, lr: float, read: Read) -> dict[int, float]:
    """One number per seed, the geometric mean over image shares: runs of one seed are no independent samples."""
    each = [read(part, lr) for (norm, _, at), part in cells.items() if (norm, at) == (order, variance)]
    seeds = set.intersection(*(set(found) for found in each)) if each else set()
    return {
        seed: statistics.geometric_mean([found[seed] for found in each])
        for seed in sorted(seeds)
        if all(found[seed] > 0 for found in each)
    }


_READ: dict[str, Read] = {
    "before training the ratio of image to text query norms": lambda part, lr: _shares(part, lr, "query_norm", at=0),
    "after training the ratio of image to text query norms": lambda part, lr: _shares(part, lr, "query_norm"),
    "text's own query norm after training": lambda part, lr: _of(part, lr, "query_norm/text"),
    "the largest logit between text and text at the end": lambda part, lr: _of(part, lr, "max_logit/text>text"),
    "the largest logit": lambda part, lr: _of(part, lr, "max_logit"),
}


def _shares(part: StudyData, lr: float, name: str, at: int = -1) -> dict[int, float]:
    above, below = (_of(part, lr, f"{name}/{side}", at=at) for side in ("image", "text"))
    return {seed: above[seed] / below[seed] for seed in above.keys() & below.keys() if below[seed]}


def _each(study: StudyData, lrs: Iterable[float]) -> Iterator[tuple[str, StudyData, float]]:
    """Every mix with images at every rate; nothing for a grid of more mixes than can be read one by one."""
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
    """A number of a remedy's finished runs by seed: of the table, or of a record of metrics.jsonl."""
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
