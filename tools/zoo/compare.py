"""One architecture: sites found against attention layers that exist, entropies against the weights returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.capture.calls import HeadLayout, cat_heads, statistics
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.sites.find import find_sites
from tools.zoo.build import build
from tools.zoo.overrides import UNRETURNED
from tools.zoo.reference import given_away
from tools.zoo.tables import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one architecture gave on one implementation.

    `layers`: attentions that exist: those whose weights are given away and `unreturned` ones known from the
    configuration. `empty`: calls whose entropies are all next to zero, so that they say little. `told`: sites whose
    weights are known and confirmed by the experiment; `why` the others' are not, in the words of the first.
    """

    layers: int
    unreturned: int
    sites: int
    modules: int
    calls: int
    error: float
    told: int
    why: str
    empty: int


def compare(entry: Entry, implementation: str) -> Result:
    """Find the sites and compare the entropies; the reference is the same model, eager, returning its weights."""
    model = build(entry, implementation)
    batch = entry.maker(model)
    sites = find_sites(model, batch)
    seen = entropies(
        model,
        batch,
        {site.name: site.layout for site in sites if site.layout is not None},
    )
    reference = build(entry, "eager")
    reference.load_state_dict(model.state_dict())
    given = given_away(reference, batch, entry.class_name)
    unreturned = UNRETURNED.get(entry.class_name, (0, ""))[0]
    error, left = closest(given.weights, [x[None] for x in seen])
    if unreturned and len(left) == unreturned:
        # The reference of these is what the softmax kernels made; who of them is an attention is known by count.
        error = max(
            error, closest([x.mean(1, keepdim=True) for x in left], given.kernels)[0]
        )
    return Result(
        layers=len(given.weights) + unreturned,
        unreturned=unreturned,
        sites=len(sites),
        modules=len({s.name.split("#")[0] for s in sites}),
        calls=len(seen),
        error=error,
        told=sum(s.verified for s in sites),
        why=next((s.why or s.unverified for s in sites if not s.verified), ""),
        empty=sum(not bool((x > 1e-3).any()) for x in seen),
    )


def entropies(
    model: nn.Module, batch: dict[str, Any], layouts: Mapping[str, HeadLayout]
) -> list[Tensor]:
    """Entropy per head of every call of a forward pass."""
    calls: list[CapturedCall] = []
    known = KnownSites(layouts=layouts)
    with torch.no_grad(), CaptureMode(model, calls.append, known=known):
        model(**batch)
    groups: dict[int, list[CapturedCall]] = {}
    for call in calls:
        groups.setdefault(id(call.frame) if call.headless else id(call), []).append(
            call
        )
    return [
        cat_heads([statistics(c.call) for c in group]).entropy
        for group in groups.values()
    ]


def closest(references: list[Tensor], seen: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Largest distance between a reference and the nearest of `seen` not taken yet, inf if none; and who is left.

    Both are [readings h], h = 1 for a mean over heads; the readings that are nearest count. Those per head choose
    first.
    """
    left = list(seen)
    worst = 0.0
    for reference in sorted(references, key=lambda x: -x.shape[1]):
        h = reference.shape[1]
        near = [
            s if s.shape[1] == h else s.mean(1, keepdim=True)
            for s in left
            if h in (1, s.shape[1])
        ]
        places = [i for i, s in enumerate(left) if h in (1, s.shape[1])]
        if not near:
            return float("inf"), left
        distance, place = min(
            (float((s[:, None] - reference).abs().amax(-1).min()), i)
            for s, i in zip(near, places)
        )
        worst = max(worst, distance)
        del left[place]
    return worst, left
