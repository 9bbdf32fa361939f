"""A record as arrays [layers heads], read from the vector in which the numbers of a step arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from qkeel.distributed.reduce import Entry, StepTable
from qkeel.functional import statistics
from qkeel.monitor.finite_stages import finite_stages, place_of_row
from qkeel.monitor.record import repeat_groups
from qkeel.records import HEAD_FIELDS, NON_FINITE


def _smaller_over_eps(
    query: np.ndarray, key: np.ndarray, eps: np.ndarray
) -> np.ndarray:
    return np.minimum(query, key) / eps


def _spread(mean: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Returns the population standard deviation from a mean and a mean square."""
    return np.sqrt(np.maximum(square - mean * mean, 0.0))


# Numbers that are computed from merged ones: from which, and how. Those that are no recorded field serve only for this.
COMPUTED: Mapping[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "grad_over_eps": (("query_grad_rms", "key_grad_rms", "eps"), _smaller_over_eps),
    "lse_std": (("lse_mean", "lse_square"), _spread),
    "gate_std": (("gate_mean", "gate_square"), _spread),
    "gain_bound": (("query_bound", "key_bound"), np.multiply),
}
_SERVING = {
    part for parts, _ in COMPUTED.values() for part in parts if part not in HEAD_FIELDS
} | {
    "non_finite_data",
    "non_finite_input",
    "non_finite_output",
    "first_empty_row",
}
# The recorded statistics by the count of what they cover.
_COUNTED: dict[str, list[str]] = {}
for _name, _field in HEAD_FIELDS.items():
    if _name in statistics.RECORDED:
        _COUNTED.setdefault(_field.count, []).append(_name)


# The statistics by token class that are recorded, and the counts that say whether they were measured.
_CLASS_PAIRS = ("class_max_logit", "class_mass", "class_uniform_mass")
_CLASS_COUNTS = {
    "class_max_logit": "n_pairs",
    "class_mass": "n_queries",
    "class_uniform_mass": "n_queries",
    "class_query_norm": "n_normed",
    "class_key_norm": "n_keys",
}


def class_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that are recorded for these classes, according to records.CLASS_FIELDS.

    >>> class_fields(["text", "image"])[1:4]
    ('key_competition', 'class_max_logit/text->text', 'class_max_logit/text->image')
    """
    fields = ["query_competition", "key_competition"]
    for field in _CLASS_COUNTS:
        if field in _CLASS_PAIRS:
            fields += [f"{field}/{query}->{key}" for query in names for key in names]
        else:
            fields += [f"{field}/{name}" for name in names]
    return tuple(fields)


def _largest_over_smallest(norms: np.ndarray) -> np.ndarray:
    """Returns the ratio [layers heads] of the largest to the smallest norm [classes layers heads]; NaN if fewer than
    two classes were seen."""
    largest = np.fmax.reduce(norms, axis=0)
    smallest = np.fmin.reduce(norms, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((~np.isnan(norms)).sum(0) > 1, largest / smallest, np.nan)


@final
class RecordArrays:
    """Reads the arrays [layers heads] of a record from the vectors in which the numbers of steps arrive.

    NaN stands where a layer has fewer heads or was not measured.
    """

    def __init__(self, table: StepTable, sites: Sequence[str], width: int) -> None:
        """Takes the layers of the record, and the number of heads of the layer with the most heads."""
        layers = {site: layer for layer, site in enumerate(sites)}
        # The index of a NaN behind the vector.
        self._shape, self._nan = (
            (len(sites), width),
            table.size,
        )
        self._index: dict[str, np.ndarray] = {}
        self._counts: dict[
            str, np.ndarray
        ] = {}  # for values by token class, the indices of the counts behind them
        self.classes: tuple[str, ...] = ()
        self._scalars: dict[str, int] = {}
        for entry in table.form:
            name, layer = entry.name, layers.get(entry.site)
            if "\t" in name:
                if layer is not None:
                    self._add_classes(table, entry, layer)
                continue
            if name in HEAD_FIELDS or name in _SERVING or name in statistics.TENSORS:
                if layer is None or not entry.shape:
                    continue
                indices, statistic = (
                    table.indices(entry),
                    table.entries.get((entry.site, "max_logit")),
                )
                if statistic is not None and (
                    name in statistics.TENSORS
                    or (name in _SERVING and len(indices) == 1)
                ):
                    indices = repeat_groups(indices, statistic.shape[0])
                self._put(self._index, name, layer, indices)
            elif not entry.shape and not name.endswith(":weight"):
                self._scalars[f"{name}/{entry.site}" if entry.site else name] = (
                    table.firsts[entry.site, name]
                )

    def _put(
        self, index: dict[str, np.ndarray], name: str, layer: int, indices: np.ndarray
    ) -> None:
        n = min(len(indices), self._shape[1])
        index.setdefault(name, np.full(self._shape, self._nan))[layer, :n] = indices[:n]

    def _add_classes(self, table: StepTable, entry: Entry, layer: int) -> None:
        """Adds a statistic by token class, [heads classes] or [heads classes classes]."""
        name, *classes = entry.name.split("\t")
        self.classes = tuple(classes)
        count = _CLASS_COUNTS.get(f"class_{name}")
        if count is None:
            return
        n_heads = table.entries[entry.site, "max_logit"].shape[0]
        indices = table.indices(entry)
        counts = table.indices(table.entries[entry.site, "\t".join([count, *classes])])
        # Of the values of a key head, for each query head of its group.
        repeats = n_heads // len(indices)
        indices, counts = (
            np.repeat(indices, repeats, axis=0),
            np.repeat(counts, repeats, axis=0),
        )
        for a, query in enumerate(classes):
            if indices.ndim == 2:
                self._put(self._index, f"class_{name}/{query}", layer, indices[:, a])
                self._put(self._counts, f"class_{name}/{query}", layer, counts[:, a])
                continue
            for b, key in enumerate(classes):
                column = counts[:, a] if counts.ndim == 2 else counts[:, a, b]
                self._put(
                    self._index, f"class_{name}/{query}->{key}", layer, indices[:, a, b]
                )
                self._put(self._counts, f"class_{name}/{query}->{key}", layer, column)

    def read(
        self, vector: np.ndarray
    ) -> tuple[dict[str, np.ndarray], set[str], dict[str, float]]:
        """Returns the arrays by name, in the order of HEAD_FIELDS; the names of the statistics that were measured for
        at least one head; and the numbers without heads."""
        extended = np.append(vector, np.nan)
        arrays = {name: extended[index] for name, index in self._index.items()}
        measured = self._mask_statistics(arrays) if "max_logit" in arrays else set()
        for name, (parts, compute) in COMPUTED.items():
            if all(part in arrays for part in parts):
                computed = compute(*[arrays[part] for part in parts])
                arrays[name] = (
                    np.where(np.isnan(computed), arrays[name], computed)
                    if name in arrays
                    else computed
                )
        heads = {name: arrays[name] for name in HEAD_FIELDS if name in arrays}
        for name, counts in self._counts.items():
            arrays[name] = np.where(extended[counts] > 0, arrays[name], np.nan)
        if self.classes:
            for side in ("query", "key"):
                norms = np.stack(
                    [arrays[f"class_{side}_norm/{label}"] for label in self.classes]
                )
                arrays[f"{side}_competition"] = _largest_over_smallest(norms)
            heads |= {name: arrays[name] for name in class_fields(self.classes)}
        return (
            heads,
            measured,
            {name: float(vector[position]) for name, position in self._scalars.items()},
        )

    def _mask_statistics(self, arrays: dict[str, np.ndarray]) -> set[str]:
        """Adds what is computed from the statistics, and puts NaN in place of what was not measured.

        Returns the names of the statistics that were measured for at least one head.
        """
        top, low, entropy = arrays["max_logit"], arrays["min_logit"], arrays["entropy"]
        arrays["max_abs_logit"] = np.maximum(np.maximum(top, -low), 0.0)
        # Without pairs, the minimum was not measured.
        low_is_finite = np.isfinite(low) | (arrays["n_pairs"] == 0)
        arrays[NON_FINITE] = 1.0 - (
            np.isfinite(top) & low_is_finite & np.isfinite(entropy)
        )
        is_weight: np.ndarray | bool = False
        for name in ("query_weight_norm", "key_weight_norm"):
            if name in arrays:
                is_known = self._index[name] != self._nan
                is_weight |= is_known & np.isnan(arrays[name])
        stages = finite_stages(arrays, is_weight)
        if stages is not None:
            arrays["finite_stages"] = stages
        if "first_empty_row" in arrays:
            sample, query = place_of_row(arrays["first_empty_row"])
            arrays["empty_sample"], arrays["empty_query"] = sample, query
        # Only maxima may be known of a head, of which nothing was counted.
        is_known = ~np.isnan(arrays["n_queries"])
        of_maxima = {
            "max_logit": is_known & (top != -np.inf),
            "capped_max_logit": is_known & (arrays["capped_max_logit"] != -np.inf),
        }
        of_maxima[NON_FINITE] = of_maxima["max_logit"]
        names: set[str] = set()
        for count, counted in _COUNTED.items():
            is_counted = arrays[count] > 0
            has_any = is_counted.any()
            for name in counted:
                if name not in arrays:
                    continue
                measured = is_counted
                if name in of_maxima:
                    measured = is_counted | of_maxima[name]
                # In place, as fancy indexing has copied it; the functions of numpy would be hundreds of calls a step.
                arrays[name][~measured] = np.nan
                if has_any or (measured is not is_counted and measured.any()):
                    names.add(name)
        return names
