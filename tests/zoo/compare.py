"""One architecture: sites found against attention layers that exist, entropies against the weights returned."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from tests.zoo.build import build, example
from torch import Tensor, nn

from qkeel.functional.normalizers import entropy
from qkeel.sites.find import find_sites
from qkeel.sites.intercept import Interceptor, Sighting, statistics
from qkeel.sites.scores import cat_heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one architecture gave on one implementation."""

    layers: int
    sites: int
    modules: int
    calls: int
    error: float
    told: int


def compare(model_type: str, implementation: str) -> Result:
    """Find the sites and compare the entropies; the reference is the same model, eager, returning its weights."""
    model = build(model_type, implementation)
    batch = example(model)
    sites = find_sites(model, **batch)
    seen = entropies(model, batch)
    reference = build(model_type, "eager")
    reference.load_state_dict(model.state_dict())
    weights = returned(reference, batch)
    return Result(
        layers=len(weights),
        sites=len(sites),
        modules=len({s.name.split("#")[0] for s in sites}),
        calls=len(seen),
        error=closest(weights, seen),
        told=sum(bool(s.terms) for s in sites),
    )


def entropies(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Entropy per head of every call of a forward pass."""
    calls: list[Sighting] = []
    with torch.no_grad(), Interceptor(model, calls.append):
        model(**batch)
    groups: dict[int, list[Sighting]] = {}
    for call in calls:
        groups.setdefault(id(call.frame) if call.headless else id(call), []).append(call)
    return [cat_heads([statistics(c.call) for c in group]).entropy for group in groups.values()]


def returned(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Entropy per head of the attention weights that the model returns, in its own order."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(**batch, output_attentions=True)
    found: list[Tensor] = []
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for weights in _flat(getattr(out, name, None)):
            if bool((weights >= 0).all()):  # the state of a linear attention is no distribution
                found.append(_mean(weights.float()))
    return found


def _mean(weights: Tensor) -> Tensor:
    """Mean entropy per head over the rows that see a key."""
    rows = weights.sum(-1) > 0
    return entropy(weights).sum((0, 2)) / rows.sum((0, 2)).clamp_min(1)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.ndim == 4 else []
    return [w for v in value for w in _flat(v)] if isinstance(value, (tuple, list)) else []


def closest(references: list[Tensor], seen: list[Tensor]) -> float:
    """Largest distance between a reference and the nearest call that is not taken; inf where there is none."""
    left = list(seen)
    worst = 0.0
    for reference in references:
        fits = [(float((s - reference).abs().max()), i) for i, s in enumerate(left) if s.shape == reference.shape]
        if not fits:
            return float("inf")
        distance, place = min(fits)
        worst = max(worst, distance)
        del left[place]
    return worst
