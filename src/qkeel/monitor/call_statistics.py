"""The statistics of attention calls, what the calls have in common, and the moments of their logsumexps."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from qkeel.capture.calls import ScoresCall, Seen, call_logsumexp, maxima, statistics
from qkeel.errors import unknown
from qkeel.functional.norms import widest
from qkeel.functional.statistics import KernelRows, LogitStats, sink_gate
from qkeel.kernels.statistics import (
    CallRows,
    call_rows,
    plain_max_stats,
    plain_rows,
    stats_of_tops,
)
from qkeel.monitor.alarms import Setting
from qkeel.monitor.numbers import Number, PassNumbers, Reduction
from qkeel.monitor.token_classes import PassTokens
from qkeel.patching.guards import beside_function_modes
from qkeel.spec import AttentionCall, Sink

T = TypeVar("T")
# True for every statistic; "max" for the largest logit only.
Wanted = Literal[True, "max"]


# What is measured in addition if it is requested by name.
Extra = Literal["gates", "updates", "residual", "chosen"]


def wanted(stats: bool | str) -> tuple[Wanted, frozenset[Extra]]:
    """Returns the statistics that a string requests, and the additional ones joined to it by `+`, as in "all+gates" or
    "max+gates".

    Raises: UnknownNameError for a name that does not exist.

    >>> wanted("all+gates")
    (True, frozenset({'gates'}))
    """
    first, *extras = ["all"] if stats is True else str(stats).split("+")
    choices = get_args(Wanted)[1:]
    if first != "all" and first not in choices:
        raise unknown("statistics", first, ("all", *choices))
    for name in extras:
        if name not in get_args(Extra):
            raise unknown("further statistics", name, get_args(Extra))
    return (True if first == "all" else first), frozenset(extras)  # type: ignore[return-value]


@final
class CallStatistics:
    """Statistics of calls over the tokens that count; what the calls have in common is recorded in `setting`."""

    def __init__(
        self, tokens: PassTokens, setting: SettingSeen, wanted: Wanted = True
    ) -> None:
        self.tokens, self.setting, self._wanted = tokens, setting, wanted

    def call(self, call: Seen) -> LogitStats | CallRows:
        """Measures a call in a separate pass over its logits."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        if self._wanted == "max":
            return maxima(counted)
        # Statistics are computed in the call's precision, not in autocast's.
        with torch.autocast(counted.query_device.type, enabled=False):
            rows = call_rows(counted)
        return statistics(counted) if rows is None else rows

    def plain(
        self, q: Tensor, k: Tensor, scale: float, causal: bool
    ) -> LogitStats | CallRows | None:
        """Like `call`, but for a call of torch's own attention function without a mask; None if that is not
        supported."""
        # The kernel behind it knows neither masks of queries nor classes.
        if not self.tokens.all_count:
            return None
        self.setting.shapes.add((q.shape[-1], scale))
        self.setting.formats.add((q.dtype, "fused"))
        return (plain_max_stats if self._wanted == "max" else plain_rows)(
            q, k, scale, causal
        )

    def of_rows(self, call: AttentionCall, rows: KernelRows) -> LogitStats:
        """The largest logits, from the attention pass itself, whose kernel returns them for each row."""
        self.setting.see(call)
        # Each operator would be seen by the mode that reads calls.
        with beside_function_modes():
            counted = self.tokens.on(call)
            assert isinstance(counted, AttentionCall)
            return stats_of_tops(counted, rows.largest)


_NAMES: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@final
class SettingSeen:
    """Collects what the calls have in common. If the calls differ in a fact, the rules that need this fact stay off.

    Attributes:
        formats: number formats of the logits, with how they are computed.
        shapes: widths of heads, with the scales of their logits.
    """

    def __init__(self) -> None:
        self.formats: set[tuple[torch.dtype, Literal["fused", "eager"]]] = set()
        self.shapes: set[tuple[int, float | None]] = set()

    def see(self, call: Seen) -> None:
        """Records the setting of one attention call; the scores of a hand-written one are in memory."""
        is_eager = isinstance(call, ScoresCall)
        if call.q is not None:
            head_dim = call.q.shape[-1]
            self.shapes.add((head_dim, call.spec.scale.constant(head_dim)))
            self.formats.add((call.q.dtype, "eager" if is_eager else "fused"))
        elif isinstance(call, ScoresCall):
            self.formats.add((call.logits.dtype, "eager"))

    def facts(self) -> Setting:
        """The facts that all calls have in common."""
        scale = _only({scale for _, scale in self.shapes})
        dtype, kernel = _only(self.formats) or (None, None)
        is_known = dtype is not None and (kernel == "eager" or scale is not None)
        return Setting(
            dtype=_NAMES.get(dtype) if is_known else None,  # type: ignore[arg-type]
            kernel=kernel,
            head_dim=_only({head_dim for head_dim, _ in self.shapes}),
            scale=scale,
        )


def _only(values: Set[T]) -> T | None:
    """Returns the value that all have in common, or None if there are several or none."""
    return next(iter(values)) if len(values) == 1 else None


@torch.no_grad()
def add_gates(numbers: PassNumbers, site: str, call: Seen) -> None:
    """Adds the logsumexps of a call's query rows, and the gates that learned sinks compute from them.

    lse_mean, lse_min, sink_logit, gate_mean [h]
    """
    lse = call_logsumexp(call)
    # NaN must remain visible.
    counted = lse != -torch.inf
    if call.query_mask is not None:
        counted = counted & call.query_mask[:, None]

    def add(name: str, value: Tensor, weight: Tensor, how: Reduction = "mean") -> None:
        numbers.add((site, name), Number(value, weight, how, own=True))

    wide = widest(lse.device)
    n = counted.expand_as(lse).to(wide).sum((0, 2))

    def add_mean(name: str, x: Tensor) -> None:
        total = x.to(wide).masked_fill(~counted, 0.0).sum((0, 2))
        add(name, total / n.clamp_min(1), n)

    add_mean("lse_mean", lse)
    least = lse.masked_fill(~counted, torch.inf).amin((0, 2))
    add("lse_min", least.to(n.dtype), n, "min")
    sink = _learned_sink(call)
    if sink is not None:
        # A head's sink is one number, which is repeated over sequences and queries.
        logit = sink.mean((0, 2)).expand(lse.shape[1])
        add("sink_logit", logit, torch.ones_like(logit))
        add_mean("gate_mean", sink_gate(lse, sink))


def _learned_sink(call: Seen) -> Tensor | None:
    """The logit of each head's learned sink, which broadcasts to [b h t]; None if there is no learned sink."""
    normalizer = call.spec.normalizer
    # Of columns that are no keys, the model makes the logits.
    is_learned = isinstance(normalizer, Sink) and normalizer.learned
    sink = call.sink if is_learned or call.params is None else None
    return None if sink is None else sink.to(widest(sink.device))
