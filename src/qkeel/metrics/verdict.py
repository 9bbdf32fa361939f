"""The verdict on attention: by which numbers heads are judged, and the sentence that the terminal, the page and `qkeel
check` show, with its number and threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import final

import numpy as np

from qkeel.metrics.run_scalars import (
    ALARM_THRESHOLD,
    COLLAPSE_ENTROPY,
    HARMFUL_LOGIT,
    Row,
)

# Nats, for one layer; half the threshold for a whole model.
LAYER_ENTROPY = COLLAPSE_ENTROPY / 2


def judged_logits(
    logits: np.ndarray,
    capped: np.ndarray | None = None,
    spreads: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the numbers by which heads are judged: their spreads, or the largest logits that enter the softmax where no
    spread was measured, as in runs of older versions.

    The spread is how far a row's largest logit lies over the row's mean. A constant on all logits of a row, which
    changes no weight, does not change it.

    Args:
        logits: the largest signed logits before a cap, in nats.
        capped: those after the cap, equal to `logits` if there is none; NaN or None where they were not measured.
        spreads: the spreads of the same heads, in nats; NaN or None where they were not measured.

    >>> judged_logits(np.array([1936.0, 120.0]), np.array([20.0, 120.0]), np.array([np.nan, 3.0])).tolist()
    [20.0, 3.0]
    """
    entering = logits
    if capped is not None:
        entering = np.where(np.isfinite(capped), capped, logits)
    return (
        entering if spreads is None else np.where(np.isnan(spreads), entering, spreads)
    )


def bound_signs(
    logits: np.ndarray, spreads: np.ndarray, bound: float, *, caps: bool = False
) -> np.ndarray:
    """Returns where a constant decides what a clip or a cap does to a head: 1 where it would flatten the head, that is,
    leave less than a nat of its spread, -1 where it would do nothing, and else 0, as where something was not measured.

    A clip multiplies the logits by bound / (the largest), if that is over the bound; so it does nothing where a constant
    holds the largest logit down, under a quarter of the spread. A cap makes bound · tanh(z / bound) of each logit z.

    Args:
        logits: the largest signed logits before a cap, in nats.
        spreads: the spreads of the same heads, in nats.
        bound: the threshold of the clip, or the cap, in nats.
        caps: whether it is a cap.

    >>> logits, spreads = np.array([4000.0, 1200.0, -800.0, np.inf]), np.array([150.0, 150.0, 150.0, np.inf])
    >>> bound_signs(logits, spreads, 15.0).tolist(), bound_signs(logits, spreads, 50.0, caps=True).tolist()
    ([1, 0, -1, 0], [1, 1, 1, 0])
    """
    # Of an infinite logit nothing can be said, which is NaN, and no comparison holds.
    with np.errstate(invalid="ignore"):
        if caps:
            low = (logits - spreads) / bound
            left = bound * (np.tanh(logits / bound) - np.tanh(low))
        else:
            left = spreads * bound / np.maximum(logits, bound)
        is_flat = (left < 1) & (left < spreads)
        is_idle = (logits <= bound) & (logits < spreads / 4) & (not caps)
    return is_flat.astype(int) - is_idle


def judged_as(judged: float, logit: float, capped: float) -> str:
    """Returns words on what a judged number is: over its row's mean, after a cap; "" if it is the largest logit itself.

    >>> judged_as(35.0, 1936.0, 20.0)
    ", over its row's mean, after a cap; 1,936 before it"
    """
    is_capped = math.isfinite(capped) and capped != logit and not math.isnan(logit)
    entering = capped if is_capped else logit
    words = "" if judged == entering or math.isnan(judged) else ", over its row's mean"
    if is_capped:
        words += f", after a cap; {_number(logit)} before it"
    return words


class Status(StrEnum):
    """The verdict of a health check.

    >>> str(Status.NOT_KNOWN)
    'not known'
    """

    HEALTHY = "healthy"
    NOT_HEALTHY = "not healthy"
    NOT_KNOWN = "not known"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A verdict, the sentence that explains it, and a table with one row per layer.

    `status` is the verdict as a word. `largest` is the largest distance (nats) of a measured attention logit from its
    row's mean, or the largest logit where that was not recorded, or the largest that the weights allow; NaN if none is
    known. `threshold` is the number above which attention counts as not healthy. `columns` and `rows` contain the
    table.

    >>> print(Health(status=Status.HEALTHY, sentence="healthy: largest logit 7"))
    healthy: largest logit 7
    """

    status: Status
    sentence: str
    largest: float = math.nan
    threshold: float = HARMFUL_LOGIT
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return self.sentence

    @property
    def healthy(self) -> bool:
        """Whether the verdict is Status.HEALTHY."""
        return self.status is Status.HEALTHY

    def table(self) -> str:
        """The numbers behind the verdict, one line per layer."""
        return text_table([self.columns, *self.rows])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as lines of text, with the first column left-aligned and all others right-aligned.

    >>> print(text_table([("layer", "max logit"), ("attn", "3")]))
    layer  max logit
    attn           3
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        ).rstrip()
        for row in rows
    )


def judged(
    largest: float,
    where: str = "",
    *,
    entropy: float = math.nan,
    lowest: str = "",
    broken: Sequence[str] = (),
    threshold: float = HARMFUL_LOGIT,
    alarms: Sequence[Row] = (),
) -> tuple[Status, str]:
    """Returns the verdict on measured logits and entropies, and the sentence that explains it.

    The terminal, the page and `qkeel check` all show this sentence.

    Args:
        largest: the largest attention logit, in nats, less the mean of its row where that was measured.
        where: the layer and head of that logit, and whether the mean was taken off.
        entropy: the lowest mean attention entropy of any layer, in nats.
        lowest: the name of that layer.
        broken: the layers with NaN or infinite logits.
        threshold: the logit above which attention counts as not healthy.
        alarms: the alarms of a run that are no notices. They decide, unless `threshold` is another than their rules'.

    >>> print(*judged(7.0, "h.1.attn head 0"), sep=" | ")
    healthy | healthy: largest logit 7 (h.1.attn head 0), under 100, where logits begin to count as large
    >>> print(judged(1340.0, "h.0.attn head 2")[1])
    not healthy: largest logit 1,340 (h.0.attn head 2) is over 1,000, where training suffers
    """
    place = f" ({where})" if where else ""
    if broken:
        return (
            Status.NOT_HEALTHY,
            f"not healthy: attention logits are NaN or infinite in {_few(broken)}",
        )
    if alarms and threshold == HARMFUL_LOGIT:
        first = alarms[0]
        head = "" if first.get("head") is None else f" head {first['head']}"
        at = f", {first['layer']}{head}" if first.get("layer") else ""
        cause = first.get("cause") or "attention logits have grown too large"
        text = f"{cause} since step {first['step']:,}: {first.get('meaning')}{at}"
        return (
            Status.NOT_HEALTHY,
            f"not healthy: {text}; the largest logit is {_number(largest)}{place}",
        )
    if largest > threshold:
        suffers = (
            ", where training suffers"
            if threshold == HARMFUL_LOGIT
            else ", the threshold that was given"
        )
        return (
            Status.NOT_HEALTHY,
            f"not healthy: largest logit {_number(largest)}{place} is over {threshold:,g}{suffers}",
        )
    if entropy < LAYER_ENTROPY:
        text = f"attention has collapsed in {lowest or 'a layer'}: mean entropy {entropy:.3g} nats"
        return (
            Status.NOT_HEALTHY,
            f"not healthy: {text} is under {LAYER_ENTROPY:g}, so each query attends to one key",
        )
    if math.isnan(largest):
        return Status.NOT_KNOWN, "not known: no attention logit was measured"
    if largest > ALARM_THRESHOLD:
        text = f"largest logit {_number(largest)}{place} is over {ALARM_THRESHOLD:,g}"
        return (
            Status.HEALTHY,
            f"healthy, but large: {text} and under {threshold:,g}, where training suffers",
        )
    large = min(ALARM_THRESHOLD, threshold)
    begins = (
        ", where logits begin to count as large"
        if large == ALARM_THRESHOLD
        else ", the threshold that was given"
    )
    return (
        Status.HEALTHY,
        f"healthy: largest logit {_number(largest)}{place}, under {large:,g}{begins}",
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
