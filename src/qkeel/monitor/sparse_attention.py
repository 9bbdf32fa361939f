"""How much of dense attention the keys that sparse attention chooses retain, and the scores of its indexers."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from qkeel.capture.calls import HIDES, ScoresCall, Seen, dense_rows, statistics
from qkeel.functional.chosen_keys import dense_divergence, index_divergence
from qkeel.functional.norms import widest
from qkeel.functional.statistics import LogitStats, merge
from qkeel.monitor.gather import NumberKey, PartialValue, SiteNumbers
from qkeel.monitor.pass_values import PassValues
from qkeel.monitor.token_classes import PassTokens


@final
class IndexSums(PassValues[str, LogitStats]):
    """Collects, by layer, statistics of an indexer's scores in a step, computed as if the scores went into a softmax:
    index_max_logit, index_mean_logit, index_entropy [h]."""

    def __init__(self, tokens: PassTokens) -> None:
        super().__init__()
        self._tokens = tokens

    @torch.no_grad()
    def add(self, layer: str, call: ScoresCall) -> None:
        """Adds the scores of one more call."""
        self.count(layer, statistics(self._tokens.on(call)))

    def joined(self, key: str, old: LogitStats, new: LogitStats) -> LogitStats:
        return merge(old, new) if old.max_logit.shape == new.max_logit.shape else new

    def read(self) -> SiteNumbers:
        """The numbers since the last read, once."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for layer, x in self.taken().items():
            n = x.n_queries.to(x.entropy.dtype)
            numbers[layer, "index_max_logit"] = PartialValue(
                value=x.max_logit, weight=n, how="max"
            )
            numbers[layer, "index_mean_logit"] = PartialValue(
                value=x.mean_logit, weight=x.n_pairs.to(n.dtype)
            )
            numbers[layer, "index_entropy"] = PartialValue(value=x.entropy, weight=n)
        return numbers


@final
class ChosenKeys(PassValues[tuple[str, str], tuple[Tensor, Tensor]]):
    """Collects, by site, how much of dense attention the chosen keys of sparse attention retain in a step:
    dense_recall, dense_kl [h] and index_kl, from up to 32 query rows of each call that have a choice."""

    ROWS = 32

    def __init__(self, tokens: PassTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self._index: dict[
            str, ScoresCall
        ] = {}  # the latest scores of each layer's indexer

    def begin(self) -> None:
        """Begins a pass."""
        super().begin()
        self._index.clear()

    def scored(self, layer: str, call: ScoresCall) -> None:
        """Records the scores by which a layer's indexer chooses keys."""
        self._index[layer] = call

    @torch.no_grad()
    def add(self, site: str, call: Seen) -> None:
        """Adds the rows of one more call of a sparse site. A call is left out if keys were gathered, or if its queries
        and keys are unknown or differ in number."""
        call = self._tokens.on(call)
        (_, t), index = call.query_shape, self._index.pop(site, None)
        step = -(-t // self.ROWS)
        rows = slice((t - 1) % step, t, step)
        measured = dense_rows(call, rows)
        if measured is None:
            return
        z, chosen, counted = measured
        later = (
            torch.arange(t, device=z.device)
            > torch.arange(t, device=z.device)[rows, None]
        )
        causal = ~(chosen & later).any()
        allowed = ~(later & causal).expand(chosen.shape)
        if (
            call.query_mask is not None
        ):  # a token that does not count cannot be chosen as a key either
            allowed = allowed & call.query_mask[:, None, None]
        allowed = allowed | chosen
        n_chosen = chosen.sum(-1)
        over = counted & (n_chosen > 0) & (n_chosen < allowed.sum(-1))
        divergence = dense_divergence(z, chosen, allowed)
        self._count((site, "dense_kl"), divergence, over)
        self._count((site, "dense_recall"), (-divergence).exp(), over)
        if index is not None and index.logits.shape[2:] == (t, t):
            scores = index.logits[:, :, rows].to(z.dtype)
            seen = allowed.any(1, keepdim=True) & (scores > HIDES)
            self._count(
                (site, "index_kl"),
                index_divergence(scores, z, seen),
                over.any(1, keepdim=True),
            )

    def _count(self, of: tuple[str, str], x: Tensor, over: Tensor) -> None:
        total = x.to(widest(x.device)).masked_fill(~over, 0.0).sum((0, 2))
        n = over.expand(x.shape).sum((0, 2))
        self.count(of, (total, n))

    def joined(
        self,
        key: tuple[str, str],
        old: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        return old[0] + new[0], old[1] + new[1]

    def read(self) -> SiteNumbers:
        """The numbers since the last read, once."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for (site, name), (total, n) in self.taken().items():
            weight = n.to(total.dtype)
            own = not name.startswith("index_")
            numbers[site, name] = PartialValue(
                value=total / weight.clamp_min(1), weight=weight, own=own
            )
        return numbers
