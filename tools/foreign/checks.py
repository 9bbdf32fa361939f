"""The questions that are asked of a model, and the verdicts: right, reported or wrong, by question and by attention."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable

from qkeel.errors import QkeelError, RefusedError
from tools.foreign import effects, sight
from tools.foreign.work import MODEL, Answers, Finding, Subject, Verdict, Work, short

Ask = Callable[[Work], Answers]

QUESTIONS: dict[str, Ask] = {
    "sites": sight.count,
    "heads": sight.heads,
    "statistics": sight.statistics,
    "maps": sight.maps,
    "rows": sight.rows,
    "watch": sight.watched,
    "lalr": effects.asked(effects.Lalr()),
    "qk_clip": effects.asked(effects.QKClip()),
    "qk_norm": effects.asked(effects.QKNorm()),
    "softcap": effects.asked(effects.Softcap()),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The findings on a model, and the verdict on each attention call of the reference."""

    found: list[Finding]
    attentions: list[Verdict]


def judged(subject: Subject, questions: Iterable[str] | None = None) -> Judged:
    """These questions (all of them), in order. Without sites there are no more questions."""
    try:
        work = Work(subject)
    except RefusedError as error:
        unseen = Finding(question="sites", verdict="reported", said=short(error))
        return Judged(
            found=[unseen],
            attentions=["reported"]
            * len(subject.truth(subject.model, subject.example)),
        )
    found: list[Finding] = []
    for question, ask in QUESTIONS.items():
        if questions is None or question in questions:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                found += _asked(question, ask, work)
    verdicts = {
        site.name: overall(f for f in found if f.site in (None, site.name))
        for site in work.sites
    }
    attentions: list[Verdict] = ["reported" if work.missed else "wrong"] * len(
        work.calls
    )
    for name, places in work.places.items():
        for place in places:
            attentions[place] = verdicts[name]
    return Judged(
        found=[f for f in found if f.verdict != "right" or f.site in (None, MODEL)],
        attentions=attentions,
    )


def _asked(question: str, ask: Ask, work: Work) -> list[Finding]:
    """The answers to a question; an exception that is not one of qkeel's is wrong."""
    found = []
    try:
        for verdict, said, site in ask(work):
            found.append(
                Finding(question=question, verdict=verdict, said=said, site=site)
            )
    except QkeelError as error:
        found.append(Finding(question=question, verdict="reported", said=short(error)))
    except Exception as error:
        found.append(
            Finding(
                question=question,
                verdict="wrong",
                said=f"{type(error).__name__}: {short(error)}",
            )
        )
    return found


def overall(found: Iterable[Finding]) -> Verdict:
    """wrong if anything is, else reported if anything is, else right."""
    verdicts = {f.verdict for f in found}
    return (
        "wrong"
        if "wrong" in verdicts
        else "reported"
        if "reported" in verdicts
        else "right"
    )
