"""What the losses of a study are measured against: counted pairs of tokens, and attention that is never trained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from qkeel.metrics import Row, paired_effects, paired_gain
from qkeel.report.html.formats import count, loss, rate, signed
from qkeel.report.html.page import Finding
from qkeel.report.study.collect import StudyData
from qkeel.report.study.compare import interval_text

FROZEN = "frozen_qk"


def findings(study: StudyData) -> list[Finding]:
    """Returns a line on counted pairs, and one for each rate at which frozen queries and keys were trained."""
    return [Finding("note", text) for text in (*_counted(study), *_over_frozen(study.rows(), study.remedies))]


def _counted(study: StudyData) -> Iterator[str]:
    runs = [run for run in study.runs if run.row is not None and run.role == "grid"]
    known = [run.env["counted_bigrams"] for run in runs if run.env.get("counted_bigrams") is not None]
    if not known or len(known) < len(runs):
        return
    means: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        assert run.row is not None
        means.setdefault((run.remedy, run.lr), []).append(run.row["val_loss"])
    level = statistics.fmean(known)
    over = sum(not statistics.fmean(own) < level for own in means.values())
    yield (
        f"Counting the pairs of tokens that a run reads, without any training, predicts the held-out text at "
        f"{loss(level)} {study.loss_unit()}. Of the mean losses of {count(len(means), 'remedy-rate pair')} {over} "
        f"{'is' if over == 1 else 'are'} not below that."
    )


def _over_frozen(rows: Sequence[Row], remedies: Sequence[str]) -> Iterator[str]:
    for lr in sorted({row["lr"] for row in rows if row["remedy"] == FROZEN}):
        gains = {other: paired_gain(rows, other, FROZEN, lr) for other in remedies if other != FROZEN}
        gains = {other: own for other, own in gains.items() if len(own) > 1 and all(map(math.isfinite, own))}
        effects = dict(zip(gains, paired_effects(list(gains.values()))))
        parts = [f"{other} {signed(one.mean)} ({interval_text(one)})" for other, one in effects.items()]
        if parts:
            yield (
                f"Gain over queries and keys that are never trained ({FROZEN}) at LR {rate(lr)}, nats: "
                f"{'; '.join(parts)}. Where a gain is not above 0, training queries and keys gained nothing."
            )
