"""Numbers of the weights behind a head: their norms, the largest singular value of W_QᵀW_K, their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.layout import counted
from qkeel.functional.bounds import gram_interaction_norms
from qkeel.functional.norms import wide
from qkeel.monitor.measure.split_weights import SplitWeights
from qkeel.monitor.measure.weight_products import Chain, gram, own_rows
from qkeel.monitor.processes.share import Key, Share
from qkeel.sites.site import AttentionSite, HeadSlice, LogitTerm


@final
class WeightNorms:
    """Reads the q and k weights of some sites, per query head; nothing is changed, nothing waits for the device.

    query_weight_norm, key_weight_norm [h]: Frobenius norm of the head's own rows (of all terms as one matrix); a weight
        that all heads share counts for each of them.
    qk_spectral_norm [h]: largest singular value of W_QᵀW_K = Σ over terms of (product on the query's way)ᵀ (product on
        the key's way), from r×r Gram matrices; rotations are left out, which can only make it too small. It is missing
        where a way is no product of matrices: with a convolution over places in it, or learned keys next to it.
    query_grad_rms, key_grad_rms [h]: root mean square of the gradient of those rows, as the optimizer gets it.
    grad_over_eps [h]: the smaller of both over the optimizer's eps; near or under 1 Adam's step shrinks (Wortsman et
        al. 2023, arXiv 2309.14322, section 3.4).
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[AttentionSite], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._eps = _eps_by_parameter(optimizer)
        known = [site for site in sites if site.terms]
        split = [site for site in known if any(self._is_split(s) for s in (*site.query, *site.key))]
        self.sites = [site for site in known if site not in split]
        counts = counted(model) if split else None
        self._split = [
            SplitWeights(s, self._parameters, counts, self._eps_of(s), all(map(self._multiplies, s.terms)))
            for s in split
            if counts is not None
        ]

    @torch.no_grad()
    def read(self) -> dict[Key, Tensor | Share]:
        """All numbers of all sites as they are now; of weights that are split over processes, this one's share."""
        found: dict[Key, Tensor | Share] = {}
        for split in self._split:
            found |= {(split.site.name, name): share for name, share in split.shares().items()}
        spectral = self._spectral_norms()
        for i, site in enumerate(self.sites):
            for name, value in self._site(site).items():
                found[site.name, name] = value
            if i in spectral:
                found[site.name, "qk_spectral_norm"] = spectral[i]
        return found

    def _spectral_norms(self) -> dict[int, Tensor]:
        """Of each site [h], by its number; those of one size in one call: operations after a step find cold caches."""
        found: dict[int, Tensor] = {}
        alike: dict[tuple[object, ...], list[tuple[int, Tensor, Tensor]]] = {}
        for i, site in enumerate(self.sites):
            if not all(map(self._multiplies, site.terms)):
                continue
            grams = (gram([t.query for t in site.terms], self._weight), gram([t.key for t in site.terms], self._weight))
            a, b = (site.per_query_head(gram) for gram in grams)
            alike.setdefault((a.shape[-1], a.dtype, a.device), []).append((i, a, b))
        for group in alike.values():
            places, a, b = zip(*group)
            norms = gram_interaction_norms(torch.cat(a), torch.cat(b))[1]
            found |= zip(places, norms.split([len(x) for x in a]))
        return found

    def _multiplies(self, term: LogitTerm) -> bool:
        """True if the weights of a product are matrices with a row for each feature, one after the other."""
        parts = {s: self._parameters[s.parameter] for s in (*term.query, *term.key)}
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        if any(p.ndim > 2 and s.axis == 0 and s.index.shape[1] == 1 for s, p in parts.items()):
            return False  # the row is a matrix
        pairs = [pair for path in (term.query, term.key) for pair in itertools.pairwise(path)]
        widths = [(a.index.shape[1], parts[b].numel() // _lines(b, parts[b])) for a, b in pairs if parts[b].ndim > 1]
        return all(rows == width for rows, width in widths)

    def _site(self, site: AttentionSite) -> dict[str, Tensor]:
        query, key = [t.query for t in site.terms], [t.key for t in site.terms]
        found = {
            "query_weight_norm": self._norm(query, site, self._weight),
            "key_weight_norm": self._norm(key, site, self._weight),
        }
        grads = [self._rms(chains, site) for chains in (query, key)]
        for name, rms in zip(("query_grad_rms", "key_grad_rms"), grads):
            if rms is not None:
                found[name] = rms
        eps = self._eps_of(site)
        if eps and all(g is not None for g in grads):
            found["grad_over_eps"] = torch.minimum(*grads) / eps  # type: ignore[arg-type]
        return found

    def _eps_of(self, site: AttentionSite) -> float | None:
        return self._eps.get(id(self._parameters[site.terms[0].query[-1].parameter]))

    def _is_split(self, part: HeadSlice) -> bool:
        return dist.is_split(self._parameters[part.parameter])

    def _norm(self, chains: Sequence[Chain], site: AttentionSite, of: Callable[[HeadSlice], Tensor]) -> Tensor:
        norms = [site.per_query_head(torch.linalg.vector_norm(of(part), dim=(1, 2))) for part in own_rows(chains)]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def _rms(self, chains: Sequence[Chain], site: AttentionSite) -> Tensor | None:
        parts = own_rows(chains)
        if any(self._parameters[part.parameter].grad is None for part in parts):
            return None
        size = sum(self._weight(part)[0].numel() for part in parts)
        return self._norm(chains, site, self._grad) / size**0.5

    def _weight(self, part: HeadSlice) -> Tensor:
        return _whole(part, self._parameters[part.parameter])

    def _grad(self, part: HeadSlice) -> Tensor:
        grad = self._parameters[part.parameter].grad
        assert grad is not None
        return _whole(part, grad)


def _whole(part: HeadSlice, x: Tensor) -> Tensor:
    """The heads' rows [n r m] in float32 or wider."""
    return part.heads(x.detach()).to(wide(x.dtype))


def _lines(part: HeadSlice, x: Tensor) -> int:
    """The number of rows or columns of a weight."""
    return x.shape[0] if part.axis == 0 else x.shape[1:].numel()


def _eps_by_parameter(optimizer: torch.optim.Optimizer | None) -> Mapping[int, float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): group["eps"] for group in groups if isinstance(group.get("eps"), float) for p in group["params"]}
