"""How much of dense attention the keys that sparse attention chooses retain, and the scores of its indexers."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from qkeel.capture.calls import HIDES, ScoresCall, Seen, dense_rows, statistics
from qkeel.functional.chosen_keys import dense_divergence, index_divergence
from qkeel.functional.norms import widest
from qkeel.monitor.numbers import Number, NumberKey, PassNumbers
from qkeel.monitor.token_classes import PassTokens

# Query rows of each call that are compared with dense attention.
ROWS = 32


@final
class SparseAttention:
    """Collects, by layer, the numbers of sparse attention.

    index_max_logit, index_mean_logit, index_entropy [h]: of an indexer's scores, as if they went into a softmax.
    dense_recall, dense_kl [h], index_kl: how much of dense attention the chosen keys retain, from up to 32 query rows of
        each call that have a choice; only if `compares`.
    """

    def __init__(
        self, tokens: PassTokens, numbers: PassNumbers, *, compares: bool
    ) -> None:
        self._tokens, self._numbers, self._compares = tokens, numbers, compares
        # An indexer scores the keys before its layer attends to those that it chose.
        self._index: dict[str, ScoresCall] = {}

    def begin(self) -> None:
        """Begins a pass."""
        self._index.clear()

    @torch.no_grad()
    def index(self, layer: str, call: ScoresCall) -> None:
        """Adds the scores by which a layer's indexer chooses keys."""
        self._index[layer] = call
        x = statistics(self._tokens.on(call))
        rows, pairs = (n.to(x.entropy.dtype) for n in (x.n_queries, x.n_pairs))
        for name, number in (
            ("index_max_logit", Number(x.max_logit, rows, "max")),
            ("index_mean_logit", Number(x.mean_logit, pairs)),
            ("index_entropy", Number(x.entropy, rows)),
        ):
            self._numbers.add((layer, name), number)

    @torch.no_grad()
    def compare(self, site: str, call: Seen) -> None:
        """Adds the rows of a call of a sparse site. A call is left out if keys were gathered, or if its queries and
        keys are unknown or differ in number."""
        if not self._compares:
            return
        call = self._tokens.on(call)
        (_, t), index = call.query_shape, self._index.pop(site, None)
        step = -(-t // ROWS)
        rows = slice((t - 1) % step, t, step)
        measured = dense_rows(call, rows)
        if measured is None:
            return
        z, chosen, counted = measured
        positions = torch.arange(t, device=z.device)
        later = positions > positions[rows, None]
        # Where no chosen key lies behind its query, later keys were not there to be chosen, and dense attention has
        # none either.
        causal = ~(chosen & later).any()
        allowed = ~(later & causal).expand(chosen.shape)
        if call.query_mask is not None:
            # A token that does not count cannot be chosen as a key either.
            allowed = allowed & call.query_mask[:, None, None]
        allowed = allowed | chosen
        n_chosen = chosen.sum(-1)
        over = counted & (n_chosen > 0) & (n_chosen < allowed.sum(-1))
        divergence = dense_divergence(z, chosen, allowed)
        self._mean((site, "dense_kl"), divergence, over)
        self._mean((site, "dense_recall"), (-divergence).exp(), over)
        if index is not None and index.logits.shape[2:] == (t, t):
            scores = index.logits[:, :, rows].to(z.dtype)
            visible = allowed.any(1, keepdim=True) & (scores > HIDES)
            divergence = index_divergence(scores, z, visible)
            self._mean((site, "index_kl"), divergence, over.any(1, keepdim=True))

    def _mean(self, key: NumberKey, x: Tensor, over: Tensor) -> None:
        """Adds the means [h] over the rows that count."""
        total = x.to(widest(x.device)).masked_fill(~over, 0.0).sum((0, 2))
        n = over.expand(x.shape).sum((0, 2)).to(total.dtype)
        of_heads = not key[1].startswith("index_")
        self._numbers.add(key, Number(total / n.clamp_min(1), n, own=of_heads))
