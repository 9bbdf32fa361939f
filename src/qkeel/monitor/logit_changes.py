"""How much an optimizer step changes the logits of a fixed probe batch."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import Arguments
from qkeel.functional.bounds import LogitChange
from qkeel.kernels.statistics import logit_change, score_change
from qkeel.patching.autograd import version_of
from qkeel.sites.tap import Tap
from qkeel.spec import AttentionCall


@final
class LogitChanges:
    """Compares the logits of a probe batch before and after a step, in one extra pass each, without gradients.

    Both passes draw the same random numbers, so that dropout does not hide the change; the state of the model and of
    its generators is restored. logit_change_rms [h]: the root mean square of the change over all visible pairs. If
    nothing but the step has changed the weights, the pass after one step is the pass before the next.
    """

    def __init__(self, tap: Tap, probe: Arguments) -> None:
        self._tap, self._probe = tap, probe
        self._calls: dict[str, Seen] = {}
        self._of: tuple[int, ...] = ()

    def before(self) -> None:
        """Called before the step."""
        if self._of != self._versions():
            self._calls = {
                name: frozen(call)
                for name, call in self._tap.calls(*self._probe).items()
            }

    def after(self) -> dict[tuple[str, str], Tensor]:
        """Called after the step; returns how much the logits have changed, per site and head."""
        old, new = self._calls, self._tap.calls(*self._probe)
        self._calls, self._of = (
            {name: frozen(call) for name, call in new.items()},
            self._versions(),
        )
        changes = {}
        # In the same order in every process.
        for site in (name for name in old if name in new):
            change = change_between(old[site], new[site])
            if change is not None:
                changes[site, "logit_change_rms"] = change.rms
        return changes

    def _versions(self) -> tuple[int, ...]:
        """The versions of all weights, which increase with every change that torch tracks."""
        return tuple(version_of(p) for p in self._tap.model.parameters())


def frozen(call: Seen) -> Seen:
    """The call with copies of its parameters, because a step changes gains and learned scales in place."""
    if not isinstance(call, AttentionCall):
        return call
    return dataclasses.replace(
        call, params={name: p.detach().clone() for name, p in call.params.items()}
    )


def change_between(before: Seen, after: Seen) -> LogitChange | None:
    """The change of the logits between two calls of one site with the same batch; None if they do not match."""
    if isinstance(before, ScoresCall) and isinstance(after, ScoresCall):
        return score_change(before, after)
    if isinstance(before, AttentionCall) and isinstance(after, AttentionCall):
        # Products of differences need full precision.
        with torch.autocast(after.q.device.type, enabled=False):
            return logit_change(before, after)
    return None
