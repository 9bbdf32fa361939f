"""What is recorded: the sample of a step, its table, and the description of a run."""

from __future__ import annotations

import dataclasses
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import nn

from qkeel import distributed as dist
from qkeel.metrics import text_table
from qkeel.monitor.cadence import Cadence
from qkeel.monitor.rules import Alarm, Severity
from qkeel.records import (
    BLOCK_FIELDS,
    CLASS_FIELDS,
    HEAD_FIELDS,
    fold_heads,
    layer_fields,
    layer_values,
)
from qkeel.records.run_directory import made_on
from qkeel.sites.find import site_label
from qkeel.sites.site import APPLIED, AttentionSite, UnrecognizedAttention
from qkeel.version import VERSION

# One record of a watched model, as the sinks receive it.

# Fields whose distribution over the heads is sent to trackers.
HISTOGRAMS = (
    "max_logit",
    "entropy",
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The measurements of one step: values by name, for the whole model (records.STEP_FIELDS) and for
    each head (records.HEAD_FIELDS; NaN where a layer has fewer heads or the value was not measured).
    """

    step: int  #: optimizer steps done (forward passes if there is no optimizer)
    values: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  #: values for the whole model
    layers: tuple[str, ...] = ()  #: names of the sites, constant over a run
    heads: Mapping[str, np.ndarray] = dataclasses.field(
        default_factory=dict
    )  #: [layers heads] each
    #: the role of the passes that were measured: "train" for trained ones, "eval" for all others
    phase: Literal["train", "eval"] = "train"
    monitor: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  #: on the monitor itself, see MONITOR_FIELDS
    #: type of each layer (see capture.visible_pattern), where it is known
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """A short description: the step and how much was measured."""
        size = f"{len(self.layers)} layers, {len(self.heads)} numbers per head"
        return f"<Sample of {self.phase} step {self.step:,}: {size}>"

    def by_layer(self, name: str) -> np.ndarray:
        """Returns [layers]: a head field, aggregated over heads as records.HEAD_FIELDS specifies, or a field of
        records.BLOCK_FIELDS; NaN where nothing was measured."""
        values = layer_values(name, self.layers, self.values, self.heads)
        return np.full(len(self.layers), np.nan) if values is None else values

    def overall(self, name: str) -> float:
        """Returns a head or block field aggregated over the whole model, or else the value with that name, or
        else NaN."""
        heads = self.heads.get(name)
        if name in BLOCK_FIELDS:
            prefix = f"{name}/"
            blocks = [x for key, x in self.values.items() if key.startswith(prefix)]
            heads = np.array(blocks, dtype=np.float64)
        if heads is None:
            return float(self.values.get(name, math.nan))
        return float(fold_heads(name, heads.reshape(1, -1))[0])

    def head_values(self) -> dict[str, np.ndarray]:
        """Returns the values of all heads for histograms, keyed as in trackers: attn/heads/max_logit and
        attn/heads/entropy.

        >>> Sample(step=0, layers=("a",), heads={"entropy": np.array([[1.0, np.nan]])}).head_values()
        {'attn/heads/entropy': array([1.])}
        """
        prefix = "eval/" if self.phase == "eval" else ""
        measured = {}
        for name in HISTOGRAMS:
            values = self.heads.get(name, np.zeros(0))
            values = values[np.isfinite(values)]
            if len(values):
                measured[f"{prefix}attn/heads/{name}"] = values
        return measured

    @property
    def numbers(self) -> dict[str, float]:
        """Returns a line of metrics: the values, and the monitor's statistics on itself as monitor_NAME.

        >>> Sample(step=0, values={"step": 0.0}, monitor={"calls": 2.0}).numbers
        {'step': 0.0, 'monitor_calls': 2.0}
        """
        return {
            **self.values,
            **{f"monitor_{name}": value for name, value in self.monitor.items()},
        }

    def summaries(self, per_layer: Sequence[str] | None = None) -> dict[str, float]:
        """Returns values keyed as in trackers, such as attn/max_logit and attn/layer_07/max_logit; no value is per head
        or NaN.

        per_layer: the fields that get one key per layer; None stands for the fields marked per_layer in
        records.HEAD_FIELDS and BLOCK_FIELDS.

        The loss and the learning rate are left out, because the trainer logs them under its own names.
        """
        if per_layer is None:
            per_layer = layer_fields()
        # Padded, because trackers sort names as text.
        digits = max(2, len(str(len(self.layers) - 1)))
        key_of = {x: f"layer_{i:0{digits}d}" for i, x in enumerate(self.layers)}
        names = [*self.heads]
        names += [n for n in self.values if n in HEAD_FIELDS and n not in self.heads]
        summaries = {f"attn/{name}": self.overall(name) for name in names}
        for name in per_layer:
            if name in self.heads:
                for key, value in zip(key_of.values(), self.by_layer(name)):
                    summaries[f"attn/{key}/{name}"] = float(value)
        for name, value in self.values.items():
            field, _, layer = name.partition("/")
            if field in BLOCK_FIELDS:
                summaries[f"hidden/{field}"] = self.overall(field)
            if field in BLOCK_FIELDS and field in per_layer:
                key = f"hidden/{key_of.get(layer, layer)}/{field}"
                summaries[key] = float(value)
        for name, value in self.monitor.items():
            summaries[f"monitor/{name}"] = float(value)
        prefix = "eval/" if self.phase == "eval" else ""
        return {
            prefix + key: value
            for key, value in summaries.items()
            if not math.isnan(value)
        }


# A sample as text for people: a line, a table for a terminal, or a table for a notebook. No library is needed.

# Below a table.
MOST_ALARMS = 5
_ORDER = {Severity.CRITICAL: 0, Severity.ALARM: 1, Severity.NOTICE: 2}


def leading_head(sample: Sample) -> tuple[str, int, float] | None:
    """The layer and head with the largest logit, and that logit; None if none was measured."""
    logits = sample.heads.get("max_logit")
    if logits is None or np.isnan(logits).all():
        return None
    layer, head = np.unravel_index(int(np.nanargmax(logits)), logits.shape)
    return sample.layers[layer], int(head), float(logits[layer, head])


def sample_line(sample: Sample, root: str = "") -> str:
    """One line: step, loss, the largest logit and its head, entropy, norms; numbers that were not measured are left
    out.

    >>> sample_line(Sample(step=5, values={"max_logit": 3.0}))
    'step 5, max logit 3'
    """
    parts = [
        f"step {sample.step:,}" + (" (untrained)" if sample.phase == "eval" else "")
    ]
    loss = sample.values.get("train_loss", math.nan)
    if not math.isnan(loss):
        parts.append(f"loss {loss:.4f}")
    lead = leading_head(sample)
    if lead is not None:
        parts.append(
            f"max logit {_number(lead[2])} ({f'{site_label(lead[0], root)} head {lead[1]}'.strip()})"
        )
    for name, word in [*_columns().items()][1 if lead is not None else 0 : 4]:
        value = sample.overall(name)
        if not math.isnan(value):
            parts.append(f"{word} {_number(value)}")
    return ", ".join(parts)


def shown_samples(
    latest: Mapping[Literal["train", "eval"], Sample], root: str = ""
) -> tuple[Sample | None, str]:
    """Returns the sample whose table is shown, of trained passes if there were any, and the line on the others below
    it.

    latest: the latest sample of each phase. root: as in `sample_table`.
    """
    trained, untrained = latest.get("train"), latest.get("eval")
    if trained is None or untrained is None:
        return trained or untrained, ""
    return trained, f"passes that were not trained: {sample_line(untrained, root)}"


def coverage(watched: int, missed: Sequence[str]) -> str:
    """A line that says how much of a model's attention is watched, or "" if all of it is.

    >>> coverage(4, ["odd: its scores …"])
    '4 of 5 attention layers watched; not understood: odd: its scores …'
    """
    others = "; ".join(missed)
    return (
        f"{watched} of {watched + len(missed)} attention layers watched; not understood: {others}"
        if missed
        else ""
    )


def sample_table(
    sample: Sample, alarms: Sequence[Alarm] = (), note: str = "", *, root: str = ""
) -> str:
    """Returns a table with one line per layer (the largest logit and its head, entropy, norms), followed by the most
    severe alarms.

    Logits and entropy are in nats. Fields that were not measured have no column.

    Args:
        sample: the measurements of the step.
        alarms: the alarms of the run so far; the most severe are printed below the table.
        note: a sentence to show between the table and the alarms.
        root: the name for attention if the whole model is one attention module.

    >>> print(sample_table(Sample(step=5, values={"max_logit": 3.0})))
    step 5, max logit 3
    """
    head, rows = _rows(sample, root)
    gravest = sorted(alarms, key=lambda alarm: (_ORDER[alarm.severity], alarm.step))
    return "\n".join(
        [
            sample_line(sample, root),
            *([text_table([head, *rows])] if rows else []),
            *filter(None, [note]),
            *map(str, gravest[:MOST_ALARMS]),
        ]
    )


def _columns() -> dict[str, str]:
    """The headings of the fields that the table shows."""
    fields = {**HEAD_FIELDS, **BLOCK_FIELDS, **CLASS_FIELDS}
    return {name: field.column for name, field in fields.items() if field.column}


def _rows(sample: Sample, root: str) -> tuple[list[str], list[list[str]]]:
    columns = {}
    for name, heading in _columns().items():
        values = sample.by_layer(name)
        if not np.isnan(values).all():
            columns[name] = heading, values
    typed = any(kind != "full" for kind in sample.types.values())
    head = ["layer", *["type"] * typed]
    for name, (heading, _) in columns.items():
        head += [heading, "head"] if name == "max_logit" else [heading]
    rows = []
    for i, layer in enumerate(sample.layers if columns else ()):
        row = [site_label(layer, root), *[sample.types.get(layer, "-")] * typed]
        for name, (_, values) in columns.items():
            row.append(_number(float(values[i])))
            if name == "max_logit":
                logits = sample.heads[name][i]
                row.append("-" if np.isnan(logits).all() else str(np.nanargmax(logits)))
        rows.append(row)
    return head, rows


def _number(value: float) -> str:
    """Formats a number with three significant digits, or as an integer with thousands separators.

    >>> _number(14.23), _number(2213.4), _number(0.0312), _number(float("nan"))
    ('14.2', '2,213', '0.0312', '-')
    """
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


# The description of what is watched, as plain data for the sinks.


def about(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    missed: Sequence[UnrecognizedAttention],
    optimizers: Sequence[torch.optim.Optimizer],
    cadence: Cadence,
) -> dict[str, object]:
    """The model, sites, optimizer, cadence, versions and command, as plain data.

    Args:
        model: the watched model, or an nn.ModuleDict of several models.
        sites: the attention layers that are watched.
        missed: the attention layers that are not understood.
        optimizers: the optimizers that update the model, if known.
        cadence: the cadence that chooses the measured steps.
    """
    parameters = list(model.parameters())
    models = [*model.children()] if type(model) is nn.ModuleDict else [model]
    remedies: list[str] = []
    for module in model.modules():
        remedies += map(str, vars(module).get(APPLIED, {}).values())
    return {
        "model": " and ".join(dict.fromkeys(type(one).__name__ for one in models)),
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "sites": site_facts(sites),
        "missed": [dataclasses.asdict(one) for one in missed],
        "optimizer": ", ".join(type(x).__name__ for x in optimizers) or None,
        "remedies": list(dict.fromkeys(remedies)),
        "cadence": repr(cadence),
        "processes": dist.world(),
        "versions": {
            "qkeel": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **made_on(),
        "command": shlex.join(sys.argv),
    }


def site_facts(sites: Sequence[AttentionSite]) -> list[dict[str, object]]:
    """The name, geometry and type of each site, and whether its weights are known."""
    return [
        {
            "name": site.name,
            "n_heads": site.n_heads,
            "n_kv_heads": site.n_kv_heads,
            "head_dim": site.head_dim,
            "type": site.layer_type,
            "weights": _weights(site),
        }
        for site in sites
    ]


def _weights(site: AttentionSite) -> str:
    if not site.terms:
        return f"unknown: {site.why}"
    return f"not confirmed: {site.unverified}" if site.unverified else "known"
