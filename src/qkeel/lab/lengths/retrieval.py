"""Retrieval by a model, apart from its predictions: needles found, and the attention that they get."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.functional.bounds import dilution_bound
from qkeel.lab.data.needles import Needles, ask
from qkeel.lab.lengths.angles import largest_logit, observed
from qkeel.options import Json
from qkeel.spec import AttentionCall

_TOKENS = 8192  # of one forward pass


def retrieved(model: nn.Module, windows: Tensor, needles: Needles) -> Json:
    """Needles in held-out windows [n, length + 1]: the share found, by depth too, and the attention that they get.

    needle_weight is the mean weight that a question gives its needle, needle_bound the most that one key can get there
    (`dilution_bound` of the largest logit that the norms allow), both of the head that gives most; each also by head.
    """
    asked = ask(windows.cpu().numpy(), needles, np.random.default_rng(0))
    parts = (asked.windows, asked.questions, asked.places)
    tokens, questions, places = (torch.from_numpy(part).to(windows.device) for part in parts)
    hits: list[Tensor] = []
    weights: dict[int, list[Tensor]] = {}
    largest: dict[int, list[Tensor]] = {}
    count = max(1, _TOKENS // (tokens.shape[1] - 1))
    for part, at in zip(tokens.split(count), questions.split(count), strict=True):

        def see(layer: int, call: AttentionCall, at: Tensor = at) -> None:
            weights.setdefault(layer, []).append(_weights(call, at, places))
            largest.setdefault(layer, []).append(largest_logit(call))

        with observed(model, see):
            predicted = model(part[:, :-1]).argmax(-1)
        hits.append(predicted.gather(1, at) == part.gather(1, at + 1))
    by_depth = torch.cat(hits).cpu().double().mean(0)
    given = torch.stack([torch.cat(weights[layer]).cpu().double().mean((0, 2)) for layer in sorted(weights)])
    bound = dilution_bound(torch.stack([torch.stack(largest[i]).amax(0) for i in sorted(largest)]), tokens.shape[1] - 1)
    return {
        "needle": float(by_depth.mean()),
        "needle_by_depth": by_depth.tolist(),
        "needle_weight": float(given.max()),
        "needle_weight_by_head": given.tolist(),
        "needle_bound": float(bound.flatten()[given.argmax()]),
        "needle_bound_by_head": bound.tolist(),
    }


def _weights(call: AttentionCall, questions: Tensor, places: Tensor) -> Tensor:
    """The weight [b h i] that question i gives the key at places[i]: questions [b i], places [i]."""
    q, k = call.encoded()
    rows, keys = slice(int(questions.min()), q.shape[2]), slice(0, k.shape[2])
    logits = call.spec.cap.apply(call.scores(q[:, :, rows], k, rows, keys))
    weights = call.spec.normalizer.weights(logits, call.visible(rows, keys), call.params)
    one = weights[..., places].transpose(2, 3)  # [b h i row]
    at = (questions - rows.start)[:, None, :, None].expand(*one.shape[:3], 1)
    return one.gather(3, at)[..., 0]
