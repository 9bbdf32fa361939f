"""A record as arrays [layers heads], read from the vector in which the numbers of a step arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from qkeel.distributed.reduce import Column, StepTable
from qkeel.functional import statistics
from qkeel.monitor.finite_stages import finite_stages, place_of_row
from qkeel.records import CLASS_FIELDS, HEAD_FIELDS, NON_FINITE, fold_heads


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


# Statistics of the whole model, in STEP_FIELDS.
_WHOLE = (
    "max_logit",
    "min_logit",
    "max_abs_logit",
    "capped_max_logit",
    "entropy",
)


def class_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that are recorded for these classes, according to records.CLASS_FIELDS.

    >>> class_fields(["text", "image"])[1:4]
    ('key_competition', 'class_max_logit/text->text', 'class_max_logit/text->image')
    """
    fields = []
    for field in CLASS_FIELDS:
        if not field.startswith("class_"):
            fields.append(field)
        elif field.endswith("_norm"):
            fields += [f"{field}/{name}" for name in names]
        else:
            pairs = itertools.product(names, repeat=2)
            fields += [f"{field}/{query}->{key}" for query, key in pairs]
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
        self._table, self._layers = table, {site: i for i, site in enumerate(sites)}
        self._shape = len(sites), width
        # The index of the NaN behind the vector stands where there is no number.
        self._index: dict[str, np.ndarray] = {}
        self.classes: tuple[str, ...] = ()
        self._scalars: dict[str, int] = {}
        tops = [column for column in table.form if column.name == "max_logit"]
        n_heads = {site: column.shape[0] for column in tops for site in column.sites}
        for column in table.form:
            self.classes = self.classes or column.classes
            for site, indices in zip(column.sites, table.indices(column)):
                if not indices.ndim and not column.name.endswith(":weight"):
                    name = f"{column.name}/{site}" if site else column.name
                    self._scalars[name] = int(indices)
                elif indices.ndim and site in self._layers:
                    self._add_heads(column, site, indices, n_heads.get(site))

    def _add_heads(
        self, column: Column, site: str, indices: np.ndarray, n_heads: int | None
    ) -> None:
        """Adds the number of a site's heads [heads], or by token class [heads classes] or [heads classes classes]."""
        name, is_serving = column.name, column.name in _SERVING
        is_statistic = bool(column.classes) or name in statistics.TENSORS
        if not (is_statistic or is_serving or name in HEAD_FIELDS):
            return
        # The value of a key head, or of all heads, stands at each query head.
        if n_heads and (is_statistic or (is_serving and len(indices) == 1)):
            indices = np.repeat(indices, n_heads // len(indices), axis=0)
        labels = itertools.product(column.classes, repeat=indices.ndim - 1)
        n = min(len(indices), self._shape[1])
        for label, of_label in zip(labels, indices.reshape(len(indices), -1).T):
            field = f"{name}/{'->'.join(label)}" if label else name
            blank = np.full(self._shape, self._table.size)
            index = self._index.setdefault(field, blank)
            index[self._layers[site], :n] = of_label[:n]

    def read(
        self, vector: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the arrays by name, in the order of HEAD_FIELDS and `class_fields`; and the numbers without heads, which
        begin with those of the whole model."""
        numbers = np.append(self._table.known(vector), np.nan)
        arrays = {name: numbers[index] for name, index in self._index.items()}
        if "max_logit" in arrays:
            self._add_derived(arrays)
        for name, (parts, compute) in COMPUTED.items():
            if all(part in arrays for part in parts):
                computed = compute(*[arrays[part] for part in parts])
                # A bound from the gains is either known whole, or computed from the factors of split gains.
                arrays[name] = (
                    np.where(np.isnan(computed), arrays[name], computed)
                    if name in arrays
                    else computed
                )
        for side in ("query", "key") if self.classes else ():
            norms = [arrays[f"class_{side}_norm/{label}"] for label in self.classes]
            arrays[f"{side}_competition"] = _largest_over_smallest(np.stack(norms))
        fields = (*HEAD_FIELDS, *(class_fields(self.classes) if self.classes else ()))
        heads = {name: arrays[name] for name in fields if name in arrays}
        # What was measured may be NaN everywhere.
        has_rows = "n_queries" in arrays and (arrays["n_queries"] > 0).any()
        values = {}
        for name in _WHOLE:
            if name in heads and (has_rows or not np.isnan(heads[name]).all()):
                values[name] = float(fold_heads(name, heads[name].reshape(1, -1))[0])
        values |= {name: float(numbers[at]) for name, at in self._scalars.items()}
        return heads, values

    def _add_derived(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds what is computed from the statistics, in which NaN may be a value."""
        top, low, entropy = arrays["max_logit"], arrays["min_logit"], arrays["entropy"]
        n_queries, n_pairs = arrays["n_queries"], arrays["n_pairs"]
        is_counted = n_queries > 0
        arrays["min_logit"] = low = np.where(n_pairs > 0, low, np.nan)
        arrays["max_abs_logit"] = np.maximum(np.maximum(top, -low), 0.0)
        is_finite = np.isfinite(top)
        is_finite &= np.isfinite(low) | (n_pairs == 0)
        is_finite &= np.isfinite(entropy) | (n_queries == 0)
        # Only maxima may be known of a head, of which nothing was counted.
        is_known = is_counted | ((n_queries == 0) & (top != -np.inf))
        arrays[NON_FINITE] = np.where(is_known, 1.0 - is_finite, np.nan)
        for name in ("max_logit", "capped_max_logit"):
            is_unknown = ~is_counted & (arrays[name] == -np.inf)
            arrays[name] = np.where(is_unknown, np.nan, arrays[name])
        # Queries and keys may be unknown where scores are written by hand.
        has_products = arrays["n_products"] > 0
        arrays["query_norm"] = np.where(has_products, arrays["query_norm"], np.nan)
        is_weight: np.ndarray | bool = False
        for name in ("query_weight_norm", "key_weight_norm"):
            if name in arrays:
                is_recorded = self._index[name] != self._table.size
                is_weight |= is_recorded & np.isnan(arrays[name])
        stages = finite_stages(arrays, is_weight)
        if stages is not None:
            arrays["finite_stages"] = stages
        if "first_empty_row" in arrays:
            sample, query = place_of_row(arrays["first_empty_row"])
            arrays["empty_sample"], arrays["empty_query"] = sample, query
