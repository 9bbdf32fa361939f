"""How far the numbers of each attention layer are finite, and what that says of the origin of a NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall
from qkeel.functional.norms import wide, widest
from qkeel.monitor.hidden_states import dense
from qkeel.monitor.history import History
from qkeel.records import NON_FINITE, STAGES

WEIGHTS, DATA, INPUT, PRODUCTS, LOGITS, OUTPUT, ALL = range(len(STAGES) + 1)
# A sample and a query are one number, so that they are reduced together.
_QUERIES = 1 << 24
# The largest number of each format; logits in it overflow beyond.
_LARGEST = {"fp16": 65504.0}
_FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def weights_not_finite(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's weights that have NaN or infinity, as far as this process holds them."""
    names = []
    for name, parameter in model.named_parameters():
        weight = dense(parameter.detach())
        if not weight.is_meta and not bool(
            weight.sum(dtype=wide(weight.dtype)).isfinite()
        ):
            names.append(name)
    return tuple(names)


@torch.no_grad()
def first_empty_row(call: ScoresCall) -> Tensor | None:
    """The first row of attention written by hand whose logits are all -infinity, as -(sample · 2²⁴ + query) [1], so that
    the first is the largest; -infinity if there is none.

    None if no row can be: fused kernels give such rows zeros, and a sink makes them finite.
    """
    if (
        call.mask is None
        or call.sink is not None
        or call.spec.normalizer.kind != "softmax"
    ):
        return None
    # A mask of a large negative number hides keys from the statistics, and leaves softmax finite.
    is_empty = (~call.mask.any(-1) & (call.capped[..., 0] == -torch.inf)).any(1)
    n_samples, n_queries = is_empty.shape
    device = is_empty.device
    samples = torch.arange(n_samples, device=device)[:, None] * _QUERIES
    positions = samples + torch.arange(n_queries, device=device)
    positions = positions.to(widest(device))
    return -positions.masked_fill(~is_empty, torch.inf).amin().view(1)


def place_of_row(position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The samples and queries of `first_empty_row`; NaN where there is none.

    >>> place_of_row(np.array([-(3 * 2.0**24 + 17), -np.inf]))
    (array([ 3., nan]), array([17., nan]))
    """
    position = np.where(np.isfinite(position), -position, np.nan)
    return position // _QUERIES, position % _QUERIES


def finite_stages(
    arrays: Mapping[str, np.ndarray], is_weight: np.ndarray | bool
) -> np.ndarray | None:
    """Returns how many of `STAGES` are finite before the first that is not [layers heads]; None if no pass has noted
    what enters the layers.

    A weight or the data is named only where what it makes is not finite.

    Args:
        arrays: the numbers of a record, in which NaN may be a value.
        is_weight: where a norm of a query or key weight is known and NaN.
    """
    if "non_finite_input" not in arrays:
        return None
    flags = {}
    for end in ("data", "input", "output"):
        name = f"non_finite_{end}"
        flags[end] = arrays[name] > 0 if name in arrays else np.array(False)
    is_input = flags["input"]
    # A sum is not finite as soon as one of its terms is not.
    norms = arrays["query_norm_max"] + arrays["key_norm_max"]
    is_product = (arrays["n_products"] > 0) & ~np.isfinite(norms)
    is_logit = arrays[NON_FINITE] > 0
    # In the order of a pass: everything behind the first stage that is not finite inherits it.
    stages = (
        is_weight & (is_input | is_product | is_logit),
        flags["data"] & is_input,
        is_input,
        is_product,
        is_logit,
        flags["output"],
    )
    first = np.full(is_input.shape, float(ALL))
    for stage in reversed(range(ALL)):
        first[stages[stage]] = stage
    is_known = (arrays["non_finite_input"] >= 0) & ~np.isnan(arrays["n_queries"])
    first[~is_known] = np.nan
    return first


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a NaN or infinity began, in words, with the index of the layer, the head, and the stage in `STAGES`."""

    layer: int
    head: int | None
    stage: int
    meaning: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What records do not say, as far as it is known.

    weights: the names of the query weights and of the key weights of each layer. dtype: the number format of the
    logits.
    """

    weights: Mapping[str, tuple[Sequence[str], Sequence[str]]] = dataclasses.field(
        default_factory=dict
    )
    dtype: str = ""


def first_origin(history: History, facts: Facts) -> Origin | None:
    """Names where the numbers of the last record cease to be finite; None if they don't, or if nobody has looked.

    The layers of the history are in the order in which they ran.
    """
    series = history.heads.get("finite_stages")
    if series is None or not len(series):
        return None
    # Heads that a layer does not have are NaN, which fmin passes over.
    stages = np.fmin.reduce(series[-1], axis=1)
    broken = np.flatnonzero(stages < ALL)
    if not len(broken):
        return None
    # A weight is read before the pass, so it comes before all that the pass computes.
    with_weights = np.flatnonzero(stages == WEIGHTS)
    layer = int(with_weights[0] if len(with_weights) else broken[0])
    stage = int(stages[layer])
    # The other stages are those of all heads.
    head = None
    if stage in (PRODUCTS, LOGITS):
        head = int(np.flatnonzero(series[-1, layer] == stage)[0])
    name = _name(history, layer)
    last = functools.partial(_last, history, layer, head or 0)
    if stage == WEIGHTS:
        meaning = _in_weights(history, with_weights, facts)
    elif stage == DATA:
        meaning = "in the data: what the model is called with has NaN or infinity"
    elif stage == INPUT:
        # The layer before is finite, or it would be the first.
        before = f"the output of {_name(history, layer - 1)}" if layer else "the data"
        meaning = _between(before, f"the input of {name}")
    elif stage == PRODUCTS:
        sides = [x for x in ("query", "key") if not np.isfinite(last(f"{x}_norm_max"))]
        nouns = {"query": "queries", "key": "keys"}
        words = " and ".join(nouns[side] for side in sides) or "queries and keys"
        meaning = _between(f"the input of {name}", f"its {words}")
        if sides == ["key"] and history.types.get(name) == "cross":
            meaning += ", which come from another sequence"
    elif stage == LOGITS:
        size = last("query_norm_max") * last("key_norm_max")
        kind = facts.dtype or "fp32"
        if size > _LARGEST.get(kind, float(np.finfo(np.float32).max)):
            meaning = f"in the logits of {name}, which overflow {_FORMATS[kind]}: |q| |k| reaches {size:,.0f}"
        elif np.isnan(size):
            meaning = _between(f"the input of {name}", "its logits")
        else:
            meaning = (
                f"between the queries and keys of {name} (finite, |q| |k| at most {size:,.3g}) and its logits (not "
                "finite): look at its mask and biases"
            )
    elif np.isnan(last("empty_sample")):
        meaning = _between(f"the logits of {name}", "its output")
    else:
        sample, query = last("empty_sample"), last("empty_query")
        meaning = (
            f"in an empty row in {name}: sample {sample:.0f}, query {query:.0f} sees no key, and a softmax over "
            "nothing is NaN"
        )
    heirs = len(broken) - 1
    if heirs and stage != WEIGHTS:
        meaning += (
            f"; {heirs} other layer{'s' * (heirs > 1)} inherit{'s' * (heirs == 1)} it"
        )
    return Origin(layer=layer, head=head, stage=stage, meaning=meaning)


def _between(before: str, after: str) -> str:
    return f"between {before} (finite) and {after} (not finite)"


def _name(history: History, layer: int) -> str:
    if not history.layers:
        return f"layer {layer}"
    return history.layers[layer] or "the model itself"


def _last(history: History, layer: int, head: int, name: str) -> float:
    """A number of the last record; NaN if it was not measured."""
    series = history.heads.get(name)
    return np.nan if series is None else float(series[-1, layer, head])


def _in_weights(history: History, layers: np.ndarray, facts: Facts) -> str:
    """Names the weights that were not finite before the pass, or says that an earlier step made all of them so."""
    stages, names, n_whole = history.heads["finite_stages"][-1], [], 0
    for layer in layers:
        heads = ~np.isnan(stages[layer])
        site = history.layers[layer] if history.layers else ""
        sides = facts.weights.get(site, ((), ()))
        is_whole = True
        for side, weights in zip(("query", "key"), sides):
            is_nan = np.isnan(history.heads[f"{side}_weight_norm"][-1, layer])[heads]
            is_whole &= bool(is_nan.all())
            if is_nan.any():
                names += [x for x in weights if x not in names]
        n_whole += is_whole
    if n_whole < len(layers) or len(history) == 1:
        return f"in a weight: {', '.join(names)} is not finite before the step"
    # A forward pass that is not finite would have been said at its own step.
    since = f"an optimizer step since the record of step {history.steps[-2]:,.0f}"
    if n_whole == len(stages):
        # Clipping by the norm spreads a NaN to all gradients.
        return f"in the loss or in gradients: {since} has made the query and key weights of all layers NaN"
    last = int(layers[-1])
    behind = _name(history, last + 1) if last + 1 < len(stages) else "the loss"
    place = _between(behind, _name(history, last))
    return f"in gradients, {place}: {since} has made query and key weights NaN"
