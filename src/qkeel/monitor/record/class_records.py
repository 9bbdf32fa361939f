"""The records of statistics that are split by token classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from qkeel.functional.statistics.class_stats import ClassStats
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.monitor.record.sample import repeat_groups
from qkeel.records import HEAD_FIELDS

_COMPETITION = ("query_competition", "key_competition")
_PAIRS = {"class_max_logit": "n_pairs", "class_mass": "n_queries", "class_uniform_mass": "n_queries"}
_SINGLE = {"class_query_norm": "n_normed", "class_key_norm": "n_keys"}


def class_facts(stats: Mapping[str, LogitStats]) -> dict[str, object]:
    """The names of the classes and of all that is recorded per head, for the sinks; nothing where there are none."""
    names = next((s.classes.names for s in stats.values() if s.classes is not None), None)
    return {} if names is None else {"classes": list(names), "fields": [*HEAD_FIELDS, *class_fields(names)]}


def class_fields(names: Sequence[str]) -> tuple[str, ...]:
    """The recorded names, by records.CLASS_FIELDS.

    >>> class_fields(["text", "image"])[1:6]
    ('key_competition', 'class_max_logit/text->text', 'class_max_logit/text->image', 'class_max_logit/image->text', \
'class_max_logit/image->image')
    """
    pairs = [f"{a}->{b}" for a in names for b in names]
    return (*_COMPETITION, *(f"{f}/{p}" for f in _PAIRS for p in pairs), *(f"{f}/{n}" for f in _SINGLE for n in names))


def class_rows(stats: Sequence[LogitStats | None]) -> dict[str, list[np.ndarray | None]]:
    """By recorded name one row [heads] per layer, NaN where nothing was measured; None for a layer without classes."""
    names = next((s.classes.names for s in stats if s is not None and s.classes is not None), None)
    if names is None:
        return {}
    layers = [{} if s is None or s.classes is None else _rows(s.classes, len(s.max_logit)) for s in stats]
    return {field: [layer.get(field) for layer in layers] for field in class_fields(names)}


def _rows(stats: ClassStats, n_heads: int) -> dict[str, np.ndarray]:
    values = stats.tensors()
    competition = stats.query_competition, stats.key_competition
    found = {name: _row(value, n_heads) for name, value in zip(_COMPETITION, competition)}
    for field, count in (_PAIRS | _SINGLE).items():
        value, counts = values[field.removeprefix("class_")], values[count]
        if field in _PAIRS and counts.ndim == 2:
            counts = counts[..., None].expand_as(value)
        value = value.double().masked_fill(counts == 0, np.nan)
        for a, query in enumerate(stats.names):
            if field in _SINGLE:
                found[f"{field}/{query}"] = _row(value[:, a], n_heads)
                continue
            for b, key in enumerate(stats.names):
                found[f"{field}/{query}->{key}"] = _row(value[:, a, b], n_heads)
    return found


def _row(value: Tensor, n_heads: int) -> np.ndarray:
    return repeat_groups(value.double().numpy(), n_heads)
