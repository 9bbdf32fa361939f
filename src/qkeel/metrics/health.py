"""Whether attention is healthy, in one sentence with its number and its threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import final

from qkeel.metrics.run_scalars import ALARM_THRESHOLD, COLLAPSE_ENTROPY, HARMFUL_LOGIT

LAYER_ENTROPY = COLLAPSE_ENTROPY / 2  # of a layer; half of what counts as collapsed for a whole model


class Status(StrEnum):
    """What a look at attention found."""

    HEALTHY = "healthy"
    NOT_HEALTHY = "not healthy"
    NOT_KNOWN = "not known"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A verdict, the sentence that gives its number and its threshold, and the rows of a table: layer by layer.

    `status` is the verdict as a word, and `columns` are the titles of the table.
    `largest` is the largest attention logit (nats) that was seen, or that weights allow; NaN where neither is known.
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
        """Returns whether nothing is wrong, as far as that is known."""
        return self.status is Status.HEALTHY

    def table(self) -> str:
        """The numbers behind the verdict, one line per layer."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )


def judged(
    largest: float,
    where: str = "",
    *,
    entropy: float = math.nan,
    lowest: str = "",
    broken: Sequence[str] = (),
    threshold: float = HARMFUL_LOGIT,
) -> tuple[Status, str]:
    """Returns the verdict on what was measured, and its sentence.

    Args:
        largest: the largest attention logit, in nats. where: its layer and head.
        entropy: the mean attention entropy of the layer that has the lowest, in nats. lowest: that layer.
        broken: where logits are NaN or infinite.
        threshold: the logit above which attention counts as not healthy.

    >>> print(*judged(7.0, "h.1.attn head 0"), sep=" | ")
    healthy | healthy: largest logit 7 (h.1.attn head 0), under 100, where logits begin to count as large
    >>> print(judged(1340.0, "h.0.attn head 2")[1])
    not healthy: largest logit 1,340 (h.0.attn head 2) is over 1,000, where training suffers
    """
    place = f" ({where})" if where else ""
    if broken:
        return Status.NOT_HEALTHY, f"not healthy: attention logits are NaN or infinite in {_few(broken)}"
    if largest > threshold:
        suffers = ", where training suffers" if threshold == HARMFUL_LOGIT else ", the threshold that was given"
        return (
            Status.NOT_HEALTHY,
            f"not healthy: largest logit {_number(largest)}{place} is over {threshold:,g}{suffers}",
        )
    if entropy < LAYER_ENTROPY:
        text = f"attention has collapsed in {lowest or 'a layer'}: mean entropy {entropy:.3g} nats"
        return Status.NOT_HEALTHY, f"not healthy: {text} is under {LAYER_ENTROPY:g}, so each query attends to one key"
    if math.isnan(largest):
        return Status.NOT_KNOWN, "not known: no attention logit was measured"
    if largest > ALARM_THRESHOLD:
        text = f"largest logit {_number(largest)}{place} is over {ALARM_THRESHOLD:,g}"
        return Status.HEALTHY, f"healthy, but large: {text} and under {threshold:,g}, where training suffers"
    large = min(ALARM_THRESHOLD, threshold)
    begins = ", where logits begin to count as large" if large == ALARM_THRESHOLD else ", the threshold that was given"
    return Status.HEALTHY, f"healthy: largest logit {_number(largest)}{place}, under {large:,g}{begins}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
