"""What a Monitor computes of an attention call: everything, or what its kernel found while it attended."""

from __future__ import annotations

from typing import Literal, final

from qkeel.functional.rows import KernelRows
from qkeel.functional.stats import LogitStats
from qkeel.kernels.statistics import stats_of_rows
from qkeel.monitor.classes import Tokens
from qkeel.monitor.observed import Observed
from qkeel.sites.intercept import Seen, statistics
from qkeel.spec import AttentionCall

Wanted = Literal[True, "entropy"]


@final
class Measuring:
    """Statistics of calls over the tokens that count; what the calls have in common is noted in `observed`."""

    def __init__(self, tokens: Tokens, threshold: float) -> None:
        self.observed = Observed()
        self._tokens, self._threshold = tokens, threshold

    def call(self, call: Seen) -> LogitStats:
        """Everything, by a pass of its own."""
        self.observed.see(call)
        return statistics(self._tokens.on(call), self._threshold)

    def rows(self, call: AttentionCall, rows: KernelRows) -> LogitStats:
        """Largest logits and entropies, from the pass that attended."""
        self.observed.see(call)
        counted = self._tokens.on(call)
        assert isinstance(counted, AttentionCall)
        return stats_of_rows(counted, rows)
