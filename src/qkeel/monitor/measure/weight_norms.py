"""Numbers of the weights behind a head: their norms, the largest singular value of W_QᵀW_K, their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.dist import whole
from qkeel.functional.bounds import gram_interaction_norms
from qkeel.functional.norms import wide
from qkeel.sites.site import AttentionSite, HeadSlice, LogitTerm

Key = tuple[str, str]  # the site, "" for the whole model, and the name of the number
Numbers = dict[Key, Tensor]
Chain = tuple[HeadSlice, ...]


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
        self.sites = [site for site in sites if site.terms]
        self._parameters = dict(model.named_parameters())
        self._eps = _eps_by_parameter(optimizer)

    @torch.no_grad()
    def read(self) -> Numbers:
        """All numbers of all sites as they are now."""
        found: Numbers = {}
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
            grams = (self._gram([t.query for t in site.terms]), self._gram([t.key for t in site.terms]))
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
        eps = self._eps.get(id(self._parameters[query[0][-1].parameter]))
        if eps and all(g is not None for g in grads):
            found["grad_over_eps"] = torch.minimum(*grads) / eps  # type: ignore[arg-type]
        return found

    def _norm(self, chains: Sequence[Chain], site: AttentionSite, of: Callable[[HeadSlice], Tensor]) -> Tensor:
        norms = [site.per_query_head(torch.linalg.vector_norm(of(part), dim=(1, 2))) for part in _own(chains)]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def _rms(self, chains: Sequence[Chain], site: AttentionSite) -> Tensor | None:
        parts = _own(chains)
        if any(self._parameters[part.parameter].grad is None for part in parts):
            return None
        size = sum(self._weight(part)[0].numel() for part in parts)
        return self._norm(chains, site, self._grad) / size**0.5

    def _gram(self, chains: Sequence[Chain]) -> Tensor:
        """W Wᵀ [heads R R], W the products of all terms one under the other; weights that add up come as terms too."""
        if len(chains) == 1:
            return self._product(chains[0], chains[0])
        heads = max(chain[-1].n for chain in chains)
        rows = [torch.cat([self._product(a, b).expand(heads, -1, -1) for b in chains], -1) for a in chains]
        return torch.cat(rows, -2)

    def _product(self, a: Chain, b: Chain) -> Tensor:
        """(product of a)(product of b)ᵀ [heads r r'], from the input's side: nothing of its width is kept. Inputs
        of unequal width (MLA's normed latent and the tokens) are two inputs: nothing is shared.
        """
        first, second = self._weight(a[0]), self._weight(b[0])
        if first.shape[-1] == second.shape[-1]:
            inner = first @ second.mT
        else:
            inner = first.new_zeros(max(len(first), len(second)), first.shape[1], second.shape[1])
        for part in a[1:]:
            inner = self._after(part, inner)
        for part in b[1:]:
            inner = self._after(part, inner.mT).mT
        return inner

    def _after(self, part: HeadSlice, inner: Tensor) -> Tensor:
        """A weight times what comes before it; gains multiply row by row."""
        weight = self._weight(part)
        return weight * inner if self._parameters[part.parameter].ndim == 1 else weight @ inner

    def _weight(self, part: HeadSlice) -> Tensor:
        return _whole(part, self._parameters[part.parameter])

    def _grad(self, part: HeadSlice) -> Tensor:
        grad = self._parameters[part.parameter].grad
        assert grad is not None
        return _whole(part, grad)


def _whole(part: HeadSlice, x: Tensor) -> Tensor:
    """The heads' rows [n r m] in float32 or wider, of sharded weights gathered."""
    x = whole(x)
    return part.heads(x.detach()).to(wide(x.dtype))


def _lines(part: HeadSlice, x: Tensor) -> int:
    """The number of rows or columns of a weight."""
    return x.shape[0] if part.axis == 0 else x.shape[1:].numel()


def _own(chains: Sequence[Chain]) -> list[HeadSlice]:
    """The last weight of each way, each once: the one with rows for the head."""
    found: list[HeadSlice] = []
    for chain in chains:
        if not any(chain[-1].parameter == f.parameter and chain[-1].same(f) for f in found):
            found.append(chain[-1])
    return found


def _eps_by_parameter(optimizer: torch.optim.Optimizer | None) -> Mapping[int, float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): group["eps"] for group in groups if isinstance(group.get("eps"), float) for p in group["params"]}
