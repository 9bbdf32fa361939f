"""Norms by head of the query and key weights, of their gradients and products, and what a step adds to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.distributed.layout import counted, local
from qkeel.distributed.sharding import local_block
from qkeel.functional.bounds import interaction_norm, spectrum, step_products
from qkeel.functional.norms import wide, widest
from qkeel.monitor.numbers import Number, NumberKey, Numbers
from qkeel.patching.guards import without_gradients
from qkeel.patching.module_tables import ModuleTree
from qkeel.sites.site import AttentionSite, HeadSlice, unique_slices

# The weights of one term on the path of q or k.
Chain = tuple[HeadSlice, ...]
# The rows of each head [n r m].
RowsOfHeads = Callable[[HeadSlice], Tensor]


def chains_of(site: AttentionSite) -> dict[str, list[Chain]]:
    """The weights on the paths of q and of k, one chain for each term."""
    return {
        "query": [term.query for term in site.terms],
        "key": [term.key for term in site.terms],
    }


def last_weights(chains: Sequence[Chain]) -> list[HeadSlice]:
    """The weights whose rows belong to the heads; the terms of an adapter share the weight that it is added to."""
    return unique_slices([chain[-1] for chain in chains])


def matrix(chains: Sequence[Chain], rows: RowsOfHeads) -> Tensor:
    """Stacks the products of all terms [heads R m], so that their sum of products is one product.

    Inputs of unequal width, such as MLA's normed latent and the tokens, get columns of
    their own, because they share nothing.
    """
    products = []
    for chain in chains:
        product = rows(chain[0])
        for head_slice in chain[1:]:
            weight = rows(head_slice)
            # A weight with one column, such as gains, multiplies row by row.
            product = weight * product if weight.shape[-1] == 1 else weight @ product
        products.append(product)
    if len(products) == 1:
        return products[0]
    widths = list(dict.fromkeys(x.shape[-1] for x in products))
    n_heads = max(x.shape[-3] for x in products)
    stacked = []
    for x in products:
        before = sum(widths[: widths.index(x.shape[-1])])
        after = sum(widths) - before - x.shape[-1]
        # A key's rope part that all heads share stands in the columns of the tokens for each of them.
        x = torch.nn.functional.pad(x, (before, after))
        stacked.append(x.repeat_interleave(n_heads // x.shape[-3], -3))
    return torch.cat(stacked, -2)


def frobenius_norm(parts: Sequence[Tensor], site: AttentionSite) -> Tensor:
    """The Frobenius norm [h] of each query head's rows [n r m] of several weights as one matrix."""
    norms = []
    for x in parts:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=wide(x.dtype))
        norms.append(site.per_query_head(norm))
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


@final
class HeldRows:
    """The rows of each head of a weight, as far as this process holds them.

    Attributes:
        counts: whether this process's rows count; those of a replica count once.
        held: which rows [n r] are on this process, or None for a weight that is not split.
        complete: the heads [n] whose rows are here with all their columns.
    """

    def __init__(self, head_slice: HeadSlice, p: Tensor, counts: bool) -> None:
        self.head_slice, self.counts = head_slice, counts
        self.held: Tensor | None = None
        self.complete = torch.ones(head_slice.n, dtype=torch.bool)
        block = local_block(head_slice.parameter, p)
        if block is None:
            return
        axis = row_axis(head_slice, p)
        first, last = block.spans[axis]
        held = (head_slice.index >= first) & (head_slice.index < last)
        has_columns = all(
            span == (0, n)
            for i, (span, n) in enumerate(zip(block.spans, p.shape))
            if i != axis
        )
        # A singular value needs all entries of a head, a norm only a part of them.
        self.complete = held.all(1) & has_columns
        # Rows that are elsewhere get an index in range; `of` puts 0 in their place.
        self._at = (
            (head_slice.index - first).clamp(0, max(last - first - 1, 0)).to(p.device)
        )
        self.held = held.to(p.device)

    def of(self, x: Tensor) -> Tensor:
        """The rows [n r m] of the weight or of its gradient, with 0 for those that are elsewhere."""
        if self.held is None:
            return self.head_slice.heads(x)
        rows = self.head_slice.rows_of(local(x))
        # More processes than rows: some hold nothing, which no index can read.
        if not len(rows):
            return rows.new_zeros(*self.held.shape, rows.shape[1])
        return rows[self._at].masked_fill(~self.held[..., None], 0.0)


def row_axis(head_slice: HeadSlice, p: Tensor) -> int:
    """The dimension of a parameter along which the rows of heads lie."""
    return head_slice.axis if p.ndim > 1 else 0


@final
class _SiteWeights:
    """The weights of a site, which may be split across processes.

    Attributes:
        site: the site.
        is_split: whether a process holds only parts of the weights.
        has_products: whether the weights are matrices that are multiplied one after the other.
    """

    def __init__(
        self,
        site: AttentionSite,
        parameters: Mapping[str, Tensor],
        counts: Callable[[Tensor], bool],
    ) -> None:
        self.site, self._sides = site, chains_of(site)
        self._weights = {x: parameters[x.parameter] for x in slices_of(site)}
        self._rows = {x: HeldRows(x, p, counts(p)) for x, p in self._weights.items()}
        self.is_split = any(x.held is not None for x in self._rows.values())
        self.has_products = _has_products(site, self._weights)
        # Whether the weights of each query head are all here [h].
        complete = torch.ones(site.n_heads, dtype=torch.bool)
        if self.is_split and self.has_products:
            for head_slice, rows in self._rows.items():
                complete &= rows.complete[site.used(head_slice.n)]
        self._complete = complete.to(next(iter(self._weights.values())).device)

    def read(self) -> tuple[dict[str, Tensor | Number], list[Tensor]]:
        """Returns the norms of weights and gradients by name, and the Gram matrices [h R R] of the query and the key side
        in float32 or wider, if there are products."""
        rows = {x: self._rows[x].of(p) for x, p in self._weights.items()}
        numbers: dict[str, Tensor | Number] = {}
        grams = []
        for side, chains in self._sides.items():
            lasts = last_weights(chains)
            # The norm of a stored weight is not that of the weight computed from it, but its gradient is its own.
            if not self.site.reparametrised:
                norm = self._norm({x: rows[x] for x in lasts})
                numbers[f"{side}_weight_norm"] = norm
            if any([self._weights[x].requires_grad for x in lasts]):
                numbers[f"{side}_grad_rms"] = self._gradient_rms(lasts)
            if self.has_products:
                x = matrix(chains, lambda x: rows[x].to(wide(rows[x].dtype)))
                # `@` calls five operators around the same product.
                grams.append(self.site.per_query_head(torch.bmm(x, x.mT)))
        return numbers, grams

    def _gradient_rms(self, lasts: Sequence[HeadSlice]) -> Tensor | Number:
        gradients, n_entries = {}, 0
        for last in lasts:
            p = self._weights[last]
            # NaN where no gradient has reached a weight in this step.
            gradient = torch.full_like(p, torch.nan) if p.grad is None else p.grad
            gradients[last] = self._rows[last].of(gradient)
            # Of a head; a process may hold some of the columns only.
            n_entries += last.index.shape[1] * p.numel() // p.shape[row_axis(last, p)]
        return self._norm(gradients, n_entries**0.5)

    def _norm(
        self, rows: Mapping[HeadSlice, Tensor], root_size: float = 1.0
    ) -> Tensor | Number:
        """The Frobenius norm of the heads' rows [n r m] of several tensors, over the root of their number of entries for
        a root mean square. Squares of parts add up over the processes."""
        counted = [x for last, x in rows.items() if self._rows[last].counts]
        if not self.is_split:
            counted = [*rows.values()]
        # Where no part counts, the norm of all parts keeps the shape; `Number` below leaves it out of the sum.
        norm = frobenius_norm(counted or [*rows.values()], self.site) / root_size
        if not self.is_split:
            return norm
        return Number(norm.to(widest(norm.device)), len(counted), "root", "weights")

    def spectral(self, norm: Tensor) -> Tensor | Number:
        """The singular values [h] as far as this process knows them."""
        if not self.is_split:
            return norm
        return Number(norm, self._complete, of="weights")


@final
class WeightNorms:
    """Reads the q and k weights of several sites, per query head, without changing them or waiting for the device.

    query_weight_norm, key_weight_norm [h]: the Frobenius norm of the head's own rows (with all terms as one matrix); a
        weight that all heads share counts for each of them.
    qk_spectral_norm [h]: the largest singular value of W_QᵀW_K = Σ over terms of (product on the query's path)ᵀ
        (product on the key's path), computed from r×r Gram matrices; rotations are left out, which can only make it too
        small. It is missing if q or k is not a plain matrix product of the input, as with a convolution over positions
        or with additional learned keys.
    query_grad_rms, key_grad_rms [h]: the root mean square of the gradient of those rows, as the optimizer receives it.

    Of weights that are split across processes, each process reads its part, and nothing is gathered: squares of norms
    add up, and a singular value is read by the process that has all rows of a head.

    Attributes:
        multiplied: the sites whose stored weights are entirely on this process and are matrices that are multiplied by
            one another.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        parameters = dict(model.named_parameters())
        self._tree = ModuleTree(model)
        self._modules = self._tree.named()
        # Each weight with the table of its module and its name there.
        self._held: list[tuple[Mapping[str, Tensor | None], str, Tensor]] = []
        for name in {x.parameter for site in sites for x in slices_of(site)}:
            owner, _, leaf = name.rpartition(".")
            table = model.get_submodule(owner)._parameters
            self._held.append((table, leaf, parameters[name]))
        counts = counted(model)
        self._sites = [_SiteWeights(x, parameters, counts) for x in sites if x.terms]
        self.multiplied = [
            x.site for x in self._sites if x.has_products and not x.is_split
        ]

    def is_outdated(self) -> bool:
        """Whether a weight has another place or a module has changed, as by `load_state_dict(assign=True)`, adapters,
        pruning and new layers."""
        if self._tree.named() is not self._modules:
            return True
        return any([table.get(leaf) is not p for table, leaf, p in self._held])

    @without_gradients
    def read(self) -> Numbers:
        """Returns the current numbers of all sites; for weights that are split across processes, this process's
        part."""
        numbers: dict[NumberKey, Tensor | Number] = {}
        # Heads of one size are decomposed together, because each call is expensive.
        by_shape: dict[object, list[tuple[_SiteWeights, list[Tensor]]]] = {}
        for weights in self._sites:
            norms, grams = weights.read()
            numbers |= {(weights.site.name, name): x for name, x in norms.items()}
            if grams:
                shapes = [(x.shape[-1], x.dtype, x.device) for x in grams]
                by_shape.setdefault(tuple(shapes), []).append((weights, grams))
        for of_shape in by_shape.values():
            queries, keys = zip(*[grams for _, grams in of_shape])
            values = interaction_norm(torch.cat(queries), torch.cat(keys))
            sizes = [*map(len, queries)]
            for (weights, _), norm in zip(of_shape, values.split(sizes)):
                numbers[weights.site.name, "qk_spectral_norm"] = weights.spectral(norm)
        return numbers


def _has_products(site: AttentionSite, weights: Mapping[HeadSlice, Tensor]) -> bool:
    """Whether all weights are matrices with a row for each feature, multiplied one after the other."""
    if site.reparametrised:
        return False
    for term in site.terms:
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        for path in (term.query, term.key):
            for x in path:
                # The row is itself a matrix.
                if weights[x].ndim > 2 and x.axis == 0 and x.index.shape[1] == 1:
                    return False
            for first, second in itertools.pairwise(path):
                p = weights[second]
                width = p.numel() // len(second.rows_of(p)) if p.ndim > 1 else 0
                if width and width != first.index.shape[1]:
                    return False
    return True


def slices_of(site: AttentionSite) -> list[HeadSlice]:
    """All weights on the paths of q and k."""
    return [x for term in site.terms for x in (*term.query, *term.key)]


# Elements of the small matrices whose spectra are computed at once: 1 GiB.
_ENTRIES = 1 << 27


@final
class StepSpectra:
    """Compares the q and k weights of several sites before and after a step, per query head [h].

    delta2_*, delta3_*: as in `functional.bounds.step_products`, computed for the products of all weights on the paths
        of q and of k. As in WeightNorms, rotations and norms behind the weights are left out.
    query_update_ratio, key_update_ratio: ‖ΔW‖ / ‖W‖ (Frobenius, so RMS(ΔW) / RMS(W)) of the head's own rows.

    Between `before` and `after`, it holds a copy of these weights.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._parameters = dict(model.named_parameters())
        self._sites = sites
        self._names: set[str] = set()
        for site in sites:
            self._names |= {x.parameter for x in (*site.query, *site.key)}
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self) -> None:
        """Called before the step."""
        for name in self._names:
            self._before[name] = self._parameters[name].detach().clone()

    @torch.no_grad()
    def after(self) -> dict[NumberKey, Tensor | Number]:
        """Must be called after the step; returns what the step added, or nothing if `before` was not called."""
        weights_before, self._before = self._before, {}
        numbers: dict[NumberKey, Tensor | Number] = {}
        products: dict[tuple[int, ...], list[tuple[NumberKey, Tensor]]] = {}
        for site in self._sites if weights_before else ():
            factors: list[Tensor] = []
            for side, chains in chains_of(site).items():
                stacks, lasts = [], []
                for weights in (weights_before, self._parameters):

                    def rows(head_slice: HeadSlice) -> Tensor:
                        # As wide as possible, because steps are small differences.
                        x = head_slice.heads(weights[head_slice.parameter].detach())  # noqa: B023
                        return x.to(widest(x.device))

                    stacks.append(site.per_query_head(matrix(chains, rows)))
                    lasts.append(
                        [rows(head_slice) for head_slice in last_weights(chains)]
                    )
                factors += [stacks[0], stacks[1] - stacks[0]]
                moved = [new - old for old, new in zip(*lasts)]
                ratio = frobenius_norm(moved, site) / frobenius_norm(lasts[0], site)
                numbers[site.name, f"{side}_update_ratio"] = ratio
            for name, product in zip(("delta2", "delta3"), step_products(*factors)):
                shape = tuple(product.shape[1:])
                products.setdefault(shape, []).append(((site.name, name), product))
        for same_shape in products.values():
            # Each decomposition waits for the device once, so many sites share one.
            n_sites = max(1, _ENTRIES // max(1, same_shape[0][1].numel()))
            for i in range(0, len(same_shape), n_sites):
                batch = same_shape[i : i + n_sites]
                spectra = spectrum(torch.cat([product for _, product in batch]))
                counts = [len(product) for _, product in batch]
                for summary, values in spectra._asdict().items():
                    for ((site_name, name), _), x in zip(batch, values.split(counts)):
                        numbers[site_name, f"{name}_{summary}"] = x
        return numbers
