"""By how much an optimizer step changes the logits of a fixed probe batch."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from qkeel.kernels.stats.per_head import logit_change
from qkeel.patching.graph_nodes import version_of
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.sites.calls.scores import ScoresCall, scores_change
from qkeel.sites.example import Arguments
from qkeel.sites.tap import Tap
from qkeel.spec import AttentionCall

MEAN_QUERIES = 64  # query rows that the mean absolute change is estimated from, the same ones at every step


@final
class LogitChanges:
    """Compares the logits of a probe batch before and after a step, by a pass of its own each, without gradients.

    Both passes draw the same random numbers, so that dropout hides no change; the model and its random streams are
    left as they were. logit_change_rms [h]: root mean square over all visible pairs, exactly. logit_change_mean_abs
    [h]: mean magnitude over the pairs of a fixed sample of query rows. Where nothing but the step has touched the
    weights the pass after one step is the pass before the next.
    """

    def __init__(self, tap: Tap, probe: Arguments) -> None:
        self._tap, self._probe = tap, probe
        self._calls: dict[str, Seen] = {}
        self._of: tuple[int, ...] = ()

    def before(self) -> None:
        """The step is about to be done."""
        if self._of != self._versions():
            self._calls = self._tap.calls(*self._probe)

    def after(self) -> dict[tuple[str, str], Tensor]:
        """The step is done: by how much the logits have changed, per site and head."""
        old, new = self._calls, self._tap.calls(*self._probe)
        self._calls, self._of = new, self._versions()
        found = {}
        for site in old.keys() & new.keys():
            exact, sampled = _change(old[site], new[site], None), _change(old[site], new[site], MEAN_QUERIES)
            if exact is not None and sampled is not None:
                found[site, "logit_change_rms"], found[site, "logit_change_mean_abs"] = exact[0], sampled[1]
        return found

    def _versions(self) -> tuple[int, ...]:
        """Goes up with every change of a weight that torch knows of."""
        return tuple(version_of(p) for p in self._tap.model.parameters())


def _change(before: Seen, after: Seen, n_queries: int | None) -> tuple[Tensor, Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    if isinstance(before, ScoresCall) and isinstance(after, ScoresCall):
        change = scores_change(before, after, n_queries=n_queries, generator=generator)
    elif isinstance(before, AttentionCall) and isinstance(after, AttentionCall):
        change = logit_change(before, after, n_queries=n_queries, generator=generator)
    else:
        return None  # packed sequences
    return change.rms, change.mean_abs
