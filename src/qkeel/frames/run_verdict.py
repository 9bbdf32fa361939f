"""The verdict on a recorded run, which the terminal, its page and `qkeel check` share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT, Health, Row, judged
from qkeel.metrics.verdict import judged_as, judged_logits
from qkeel.records import NON_FINITE, OVER, Heads, fold_heads


def standing_alarms(events: Sequence[Row]) -> list[Row]:
    """The alarms among the events of a run that are no notices and that no later event has ended."""
    standing: dict[object, Row] = {}
    for event in events:
        if event.get("event") == OVER:
            standing.pop(event.get("rule"), None)
        elif event.get("event") == "alarm" and event.get("severity") != "notice":
            standing.setdefault(event.get("rule"), event)
    return [*standing.values()]


def judge_run(
    heads: Heads, events: Sequence[Row], threshold: float = HARMFUL_LOGIT
) -> Health:
    """Judges a run by all its records: the largest spread of any record, the entropy of the last, and its alarms.

    A run whose records have no "logit_spread", as those of version 0.1, is judged by its largest logit.

    Alarms that are no notices decide; a forecast that was taken back does not count. If an autopilot has acted and the
    last logits are below the alarm threshold, the last record counts alone.

    Args:
        heads: the records of each head, with "max_logit" [records layers heads] in nats.
        events: alarms and an autopilot's decisions, as they were recorded.
        threshold: the largest accepted logit, in nats.

    >>> heads = Heads(steps=np.arange(2), values={"max_logit": np.array([[[1.0]], [[7.0]]])}, layers=("a",))
    >>> print(judge_run(heads, []))
    healthy: largest logit 7 (a head 0, step 1), under 100, where logits begin to count as large
    """
    measured = np.asarray(heads.values["max_logit"], dtype=np.float64)
    capped = heads.values.get("capped_max_logit", measured)
    spreads = heads.values.get("logit_spread")
    numbers = judged_logits(measured, capped, spreads)
    # `argmax` would return the first NaN, which stands for a head that was not measured.
    logits = np.where(np.isnan(numbers), -math.inf, numbers)
    n_layers = logits.shape[1]
    names = [
        name or "the model itself"
        for name in heads.layers or [f"layer {i}" for i in range(n_layers)]
    ]
    has_acted = any(
        event.get("event") == "decision" and event.get("remedy") for event in events
    )
    is_mended = has_acted and float(logits[-1].max()) <= ALARM_THRESHOLD
    # A forecast that is made no longer did not come true; the numbers themselves say how large the logits are.
    alarms = standing_alarms(events)
    # What an autopilot has mended says nothing of the run as it is now.
    first = len(logits) - 1 if is_mended else 0
    record, layer, head = np.unravel_index(
        int(logits[first:].argmax()), logits[first:].shape
    )
    largest = float(logits[first + record, layer, head])
    largest = math.nan if largest == -math.inf else largest
    place = first + record, layer, head
    kind = judged_as(largest, float(measured[place]), float(capped[place]))
    # Between the measured steps, it may have been larger.
    has_gaps = heads.steps[-1] - heads.steps[0] >= len(heads.steps)
    among = f", the largest of {len(heads.steps):,} measured" if has_gaps else ""
    entropies = [math.nan] * n_layers
    if "entropy" in heads.values:
        entropies = [
            float(x) for x in fold_heads("entropy", heads.values["entropy"][-1])
        ]
    lowest = min(
        range(n_layers),
        key=lambda i: math.inf if math.isnan(entropies[i]) else entropies[i],
    )
    non_finite = heads.values.get(NON_FINITE)
    broken = (
        []
        if non_finite is None
        else [name for i, name in enumerate(names) if (non_finite[:, i] > 0).any()]
    )
    status, sentence = judged(
        largest,
        f"{names[layer]} head {head}, step {int(heads.steps[first + record]):,}{among}{kind}",
        entropy=entropies[lowest],
        lowest=names[lowest],
        broken=broken,
        threshold=threshold,
        alarms=[] if is_mended else alarms,
    )
    tops, last = logits.max((0, 2)).tolist(), logits[-1].max(1).tolist()
    rows = []
    for name, *of_layer in zip(names, tops, last, entropies):
        # Here -inf stands for a layer without a measurement, while +inf was measured.
        texts = [
            "-" if not math.isfinite(x) and not x > 0 else f"{x:,.4g}" for x in of_layer
        ]
        rows.append((name, *texts))
    has_spreads = spreads is not None and not np.isnan(spreads).all()
    number = "logit spread" if has_spreads else "max logit"
    columns = ("layer", number, "last", "entropy, last")
    return Health(
        status=status,
        sentence=sentence,
        largest=largest,
        threshold=threshold,
        columns=columns,
        rows=tuple(rows),
    )
