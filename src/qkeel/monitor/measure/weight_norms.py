"""Numbers of the weights behind a head: their norms, the largest singular value of W_QᵀW_K, their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.layout import counted
from qkeel.functional.bounds import interaction_norm
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice, LogitTerm
from qkeel.monitor.measure.head_stacks import Joined, Place, Places, joined, norms_and_grams
from qkeel.monitor.measure.split_weights import NORMS, SplitWeights
from qkeel.monitor.measure.weight_products import Chain, gram, own_rows
from qkeel.monitor.processes.share import Key, Row, Share, SiteNumbers

# Of each of some tensors the sources that it holds, and how many numbers of each.
_Held = tuple[tuple[tuple[Hashable, int], ...], ...]


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
        self._own = {site.name: {side: own_rows(chains) for side, chains in _sides(site)} for site in self.sites}
        self._squared = [site for site in self.sites if all(map(self._multiplies, site.terms))]
        self._plain = {part for site in self._squared if _is_plain(site) for part in (*site.query, *site.key)}
        self._are_plain = {site.name for site in self._squared if _is_plain(site)}
        self._parts = [*dict.fromkeys(part for sides in self._own.values() for own in sides.values() for part in own)]
        self._known: tuple[tuple[bool, ...] | None, list[tuple[HeadSlice, bool]], int] = None, [], 0
        self._places: dict[Hashable, Places] = {}

    @torch.no_grad()
    def read(self) -> SiteNumbers:
        """All numbers of all sites as they are now; of weights that are split over processes, this one's share."""
        split: dict[Key, Tensor | Share] = {}
        for one in self._split:
            split |= {(one.site.name, name): share for name, share in one.shares().items()}
        rows = list[Row]()
        for kind, key, parts in self._read():
            whole = joined(parts)
            places = self._places.get((kind, key, whole.device))
            if places is None:
                arranged = Joined()
                for x, lengths in zip(parts, key):
                    arranged.add(x, lengths)
                look_up = self._norms if kind == "norms" else self._products
                places = self._places[kind, key, whole.device] = look_up(whole, arranged)
            rows += places.taken(whole, torch.minimum if kind == "norms" else interaction_norm)
        return SiteNumbers(rows, split)

    def _read(self) -> Iterator[tuple[str, _Held, list[Tensor]]]:
        """The norms of the rows of weights and gradients, then Gram matrices, by their size: each as tensors, and for
        each of these which sources it holds, and how many numbers of each."""
        sources, squared = self._sources()
        heads = list[Tensor]()
        for part, of_grad in sources:  # no call of Python's for each: there are some hundred in a step
            p = self._parameters[part.parameter]
            x = (p.grad if of_grad and p.grad is not None else p).detach()
            n, r = part.index.shape
            if x.ndim == 2 and part.axis == 0 and part.grid == (0, r, 1) and x.shape[0] == n * r:
                heads.append(x.view(n, r, x.shape[1]))
            else:
                heads.append(part.heads(x))
        norms, grams = norms_and_grams(heads, squared)
        if norms:
            held = [tuple([(sources[i], heads[i].shape[0]) for i in numbers]) for numbers, _ in norms]
            yield "norms", tuple(held), [x for _, x in norms]
        sizes: dict[int, tuple[list[tuple[tuple[Hashable, int], ...]], list[Tensor]]] = {}
        for numbers, x in grams:
            names, parts = sizes.setdefault(x.shape[1], ([], []))
            names.append(tuple([(sources[i][0], heads[i].shape[0]) for i in numbers]))
            parts.append(x)
        for site in self._squared:
            for side, chains in () if site.name in self._are_plain else _sides(site):
                product = gram(chains, self._weight)
                names, parts = sizes.setdefault(product.shape[-1], ([], []))
                names.append((((site.name, side), product.shape[0]),))
                parts.append(product)
        for r, (names, parts) in sizes.items():
            yield f"products of {r}", tuple(names), parts

    def _sources(self) -> tuple[list[tuple[HeadSlice, bool]], int]:
        """The weights, and the gradients that there are; of the first so many weights products are wanted."""
        graded = tuple([self._parameters[part.parameter].grad is not None for part in self._parts])
        if self._known[0] != graded:
            plain = [part for part in self._parts if part in self._plain]
            sources = [(part, False) for part in dict.fromkeys([*plain, *self._parts])]
            self._known = graded, sources + [(part, True) for part, has in zip(self._parts, graded) if has], len(plain)
        return self._known[1], self._known[2]

    def _norms(self, like: Tensor, arranged: Joined) -> Places:
        alone: dict[Key, Place] = {}
        pairs: dict[Key, tuple[Place, Place]] = {}
        for site in self.sites:
            over_eps: list[Place] = []
            eps = self._eps_of(site)
            for side, own in self._own[site.name].items():
                alone[site.name, NORMS[side]] = [arranged.at((part, False), site) for part in own], 1.0
                if all((part, True) in arranged.sources for part in own):
                    size = sum(p.index.shape[1] * self._columns(p) for p in own) ** 0.5
                    places = [arranged.at((part, True), site) for part in own]
                    alone[site.name, f"{side}_grad_rms"] = places, 1 / size
                    over_eps += [(places, 1 / size / eps)] if eps else []
            if len(over_eps) == 2:
                pairs[site.name, "grad_over_eps"] = over_eps[0], over_eps[1]
        return Places(alone, pairs, like)

    def _products(self, like: Tensor, arranged: Joined) -> Places:
        pairs: dict[Key, tuple[Place, Place]] = {}
        for site in self._squared:
            sources = [own[0] if _is_plain(site) else (site.name, side) for side, own in self._own[site.name].items()]
            if sources[0] in arranged.sources:
                query, key = ([arranged.at(source, site)] for source in sources)
                pairs[site.name, "qk_spectral_norm"] = (query, 1.0), (key, 1.0)
        return Places({}, pairs, like)

    def _multiplies(self, term: LogitTerm) -> bool:
        """True if the weights of a product are matrices with a row for each feature, one after the other."""
        parts = {s: self._parameters[s.parameter] for s in (*term.query, *term.key)}
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        if any(p.ndim > 2 and s.axis == 0 and s.index.shape[1] == 1 for s, p in parts.items()):
            return False  # the row is a matrix
        pairs = [pair for path in (term.query, term.key) for pair in itertools.pairwise(path)]
        widths = [(a.index.shape[1], self._columns(b)) for a, b in pairs if parts[b].ndim > 1]
        return all(rows == width for rows, width in widths)

    def _eps_of(self, site: AttentionSite) -> float | None:
        return self._eps.get(id(self._parameters[site.terms[0].query[-1].parameter]))

    def _is_split(self, part: HeadSlice) -> bool:
        return dist.is_split(self._parameters[part.parameter])

    def _values(self, part: HeadSlice, of_grad: bool) -> Tensor:
        p = self._parameters[part.parameter]
        return p.detach() if p.grad is None or not of_grad else p.grad.detach()

    def _weight(self, part: HeadSlice) -> Tensor:
        """The heads' rows [n r m] in float32 or wider."""
        x = self._values(part, of_grad=False)
        return part.heads(x).to(wide(x.dtype))

    def _columns(self, part: HeadSlice) -> int:
        p = self._parameters[part.parameter]
        return p.numel() // _lines(part, p)


def _sides(site: AttentionSite) -> tuple[tuple[str, list[Chain]], tuple[str, list[Chain]]]:
    return ("query", [t.query for t in site.terms]), ("key", [t.key for t in site.terms])


def _is_plain(site: AttentionSite) -> bool:
    """True if q and k are products of one weight each."""
    return len(site.terms) == 1 and len(site.terms[0].query) == len(site.terms[0].key) == 1


def _lines(part: HeadSlice, x: Tensor) -> int:
    """The number of rows or columns of a weight."""
    return x.shape[0] if part.axis == 0 else x.shape[1:].numel()


def _eps_by_parameter(optimizer: torch.optim.Optimizer | None) -> Mapping[int, float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): group["eps"] for group in groups if isinstance(group.get("eps"), float) for p in group["params"]}
