"""Heads whose W_Qᵀ W_K stands out from those of the same checkpoint."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from qkeel.audit.scan.head_bounds import SiteReport

Z_SCORE = 3.5  # Iglewicz & Hoaglin 1993, "How to detect and handle outliers": modified z-score above 3.5
RATIO = 2.0  # and at least this many times the median: a tight checkpoint has no outliers


def outliers(sites: Sequence[SiteReport]) -> list[tuple[bool, ...]]:
    """Per site and head: ‖W_Qᵀ W_K‖₂ · scale far above the median of all heads, on a logarithmic scale.

    z = 0.6745 (ln x - median ln x) / median |ln x - median|; an outlier has z > 3.5 and x > 2 · median. NaN is one.
    """
    logs = [[_log(x * site.scale) for x in site.interaction_spectral] for site in sites]
    known = [x for row in logs for x in row if math.isfinite(x)]
    if not known:
        return [tuple(math.isnan(x) for x in row) for row in logs]
    middle = statistics.median(known)
    spread = max(statistics.median(abs(x - middle) for x in known), 1e-12)
    high = middle + max(Z_SCORE * spread / 0.6745, math.log(RATIO))
    return [tuple(math.isnan(x) or x > high for x in row) for row in logs]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
