"""Norms by head of the query and key weights, of their gradients and products, and what a step adds to them."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.distributed.layout import counted, local
from qkeel.distributed.sharding import local_block
from qkeel.functional.bounds import interaction_norm, spectrum, step_products
from qkeel.functional.norms import wide, widest
from qkeel.monitor.numbers import Number, NumberKey, Numbers
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.guards import without_gradients
from qkeel.patching.module_tables import ModuleTree
from qkeel.sites.site import AttentionSite, HeadSlice, unique_slices

# Entries of the weights of sites that are read as one tensor: 16 MB in float32.
_TOGETHER = 1 << 22
# A map of it calls no function of Python.
_GRADIENT = operator.attrgetter("grad")
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
    """Stacks the products of all terms [… heads R m], so that their sum of products is one product.

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
    """The Frobenius norm [… h] of each query head's rows [… n r m] of several weights as one matrix."""
    norms = [
        per_query_head(
            site, torch.linalg.vector_norm(x, dim=(-2, -1), dtype=wide(x.dtype)), -1
        )
        for x in parts
    ]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def per_query_head(site: AttentionSite, x: Tensor, dim: int) -> Tensor:
    """Expands the values for each head of a weight, along a dimension, to the query heads that use these heads."""
    if x.shape[dim] == site.n_heads and site.key_heads is None:
        return x
    return site.per_query_head(x.movedim(dim, 0)).movedim(0, dim)


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
class _AlikeSites:
    """Sites whose weights have the same shapes, and are read together as one tensor along their rows; or one site,
    whose weights may be split across processes.

    Attributes:
        site: the first site, whose structure all have.
        names: the names of the sites.
        has_products: whether the weights are matrices that are multiplied one after the other.
        complete: of a site that is split, whether the weights of each query head are all here [1 h]; None for all.
    """

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        parameters: Mapping[str, Tensor],
        counts: Callable[[Tensor], bool],
    ) -> None:
        self.site, self.names = sites[0], tuple([site.name for site in sites])
        self._sides, self._lasts = chains_of(self.site), _lasts(self.site)
        # The weights of all sites and their rows, by the slice of the first site.
        self._weights: dict[HeadSlice, list[Tensor]] = {}
        self._rows: dict[HeadSlice, HeldRows] = {}
        for of_sites in zip(*map(_slices, sites), strict=True):
            first, p = of_sites[0], parameters[of_sites[0].parameter]
            self._weights[first] = [parameters[x.parameter] for x in of_sites]
            joint = first
            if len(sites) > 1:
                n_rows = p.shape[row_axis(first, p)]
                indices = [x.index + i * n_rows for i, x in enumerate(of_sites)]
                joint = dataclasses.replace(first, index=torch.cat(indices))
            self._rows[first] = HeldRows(joint, p, counts(p))
        self.is_split = any(x.held is not None for x in self._rows.values())
        self.has_products = _has_products(self.site, parameters)
        # The norm of a stored weight is not that of the weight computed from it, but its gradient is its own.
        self._has_norms = not self.site.reparametrised
        # The root of the number of entries of a head; a process may hold some of the columns only.
        self._root_sizes: dict[str, float] = {}
        for side, lasts in self._lasts.items():
            size = 0
            for last in lasts:
                p = self._weights[last][0]
                size += last.index.shape[1] * p.numel() // p.shape[row_axis(last, p)]
            self._root_sizes[side] = size**0.5
        self.complete: Tensor | None = None
        p = parameters[self.site.query[0].parameter]
        if self.is_split and self.has_products:
            complete = torch.ones(self.site.n_heads, dtype=torch.bool)
            for head_slice, rows in self._rows.items():
                complete &= rows.complete[self.site.used(head_slice.n)]
            self.complete = complete.to(p.device)[None]

    def read(self) -> tuple[dict[str, Tensor | Number], dict[HeadSlice, Tensor]]:
        """Returns the norms of weights and gradients by name, and the rows [sites n r m] of the weights of each slice."""
        numbers: dict[str, Tensor | Number] = {}
        rows: dict[HeadSlice, Tensor] = {}
        for first, weights in self._weights.items():
            rows[first] = self._rows_of(first, weights)
        for side, lasts in self._lasts.items():
            if self._has_norms:
                norm = self._norm(lasts, [rows[x] for x in lasts])
                numbers[f"{side}_weight_norm"] = norm
            of_gradients, is_any = [], False
            for last in lasts:
                gradients = [*map(_GRADIENT, self._weights[last])]
                for i, weight in enumerate(self._weights[last]):
                    if gradients[i] is None:
                        # Layers that are frozen, or that no gradient has reached in this step, have NaN.
                        nan = weight.detach().new_full((), torch.nan)
                        gradients[i] = nan.expand(weight.shape)
                    else:
                        is_any = True
                of_gradients.append((last, gradients))
            if not is_any:
                continue
            parts = [self._rows_of(*of_weight) for of_weight in of_gradients]
            rms = self._norm(lasts, parts, self._root_sizes[side])
            numbers[f"{side}_grad_rms"] = rms
        return numbers, rows

    def _rows_of(self, first: HeadSlice, tensors: list[Tensor]) -> Tensor:
        """The rows [sites n r m] of each head of the weights of all sites, or of their gradients."""
        if len(tensors) == 1:
            return self._rows[first].of(tensors[0])[None]
        joint = torch.cat(tensors, row_axis(first, tensors[0]))
        rows = self._rows[first].of(joint)
        return rows.reshape(len(tensors), -1, *rows.shape[1:])

    def _norm(
        self,
        lasts: Sequence[HeadSlice],
        rows: Sequence[Tensor],
        root_size: float | None = None,
    ) -> Tensor | Number:
        """The Frobenius norm of the heads' rows [sites n r m] of several tensors, over the root of their number of
        entries for a root mean square. Squares of parts add up over the processes."""
        counted = rows
        if self.is_split:
            counted = [x for last, x in zip(lasts, rows) if self._rows[last].counts]
        # Where no part counts, the norm of all parts keeps the shape; `Number` below leaves it out of the sum.
        norm = frobenius_norm(counted or rows, self.site)
        norm = norm if root_size is None else norm / root_size
        if not self.is_split:
            return norm
        return Number(norm.to(widest(norm.device)), len(counted), "root", "weights")

    def grams(self, rows: Mapping[HeadSlice, Tensor]) -> list[Tensor]:
        """The Gram matrices [sites·heads R R] of the query and the key side, in float32 or wider."""

        def weight(head_slice: HeadSlice) -> Tensor:
            x = rows[head_slice]
            return x.to(wide(x.dtype))

        sides = []
        for chains in self._sides.values():
            x = matrix(chains, weight)
            # `@` calls five operators around the same product.
            gram = torch.bmm(x.flatten(0, 1), x.flatten(0, 1).mT)
            gram = per_query_head(self.site, gram.unflatten(0, x.shape[:2]), 1)
            sides.append(gram.flatten(0, 1))
        return sides


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

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[AttentionSite],
    ) -> None:
        parameters = dict(model.named_parameters())
        self._tree = ModuleTree(model)
        self._modules = self._tree.named()
        # Each weight with the table of its module and its name there.
        self._held: list[tuple[Mapping[str, Tensor | None], str, Tensor]] = []
        for name in {x.parameter for site in sites for x in _slices(site)}:
            owner, _, leaf = name.rpartition(".")
            table = model.get_submodule(owner)._parameters
            self._held.append((table, leaf, parameters[name]))
        counts = counted(model)
        # By the shapes of their weights, whose sites are read by a few operators for all.
        alike: dict[object, list[AttentionSite]] = {}
        for site in sites:
            if not site.terms:
                continue
            slices, weights = _slices(site), _weights(site, parameters)
            # A site that is split is read for itself, and so are convolutions and weights that refuse operators.
            is_alone = any(
                dist.is_split(p) or p.ndim > 2 or is_wrapper(p) for p in weights
            )
            shapes = [
                (x.index.shape, p.shape, p.dtype, p.device, x.axis)
                for x, p in zip(slices, weights)
            ]
            chain_lengths = [
                len(x) for chains in chains_of(site).values() for x in chains
            ]
            lasts = [slices.index(x) for x in itertools.chain(*_lasts(site).values())]
            heads = site.n_heads, site.n_kv_heads, site.key_heads
            facts = _has_products(site, parameters), site.reparametrised
            form = (*shapes, *chain_lengths, *lasts, *heads, *facts)
            alike.setdefault((*form, site.name if is_alone else ""), []).append(site)
        self._groups: list[_AlikeSites] = []
        self.multiplied: list[AttentionSite] = []
        for members in alike.values():
            n_entries = sum([p.numel() for p in _weights(members[0], parameters)])
            # Of a few million entries at most, so that large weights are not copied.
            n = max(1, _TOGETHER // max(1, n_entries))
            for i in range(0, len(members), n):
                group = _AlikeSites(members[i : i + n], parameters, counts)
                self._groups.append(group)
                if group.has_products and not group.is_split:
                    self.multiplied += members[i : i + n]
        self.multiplied.sort(key=sites.index)

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
        by_shape: dict[object, list[tuple[_AlikeSites, list[Tensor]]]] = {}
        for group in self._groups:
            norms, rows = group.read()
            numbers |= {(group.names, name): x for name, x in norms.items()}
            if group.has_products:
                grams = group.grams(rows)
                query, key = grams
                form = (query.shape[-1], key.shape[-1], query.dtype, query.device)
                by_shape.setdefault(form, []).append((group, grams))
        for of_shape in by_shape.values():
            queries, keys = zip(*[grams for _, grams in of_shape])
            values = interaction_norm(torch.cat(queries), torch.cat(keys))
            for (group, _), of_group in zip(
                of_shape, values.split([*map(len, queries)])
            ):
                spectral: Tensor | Number = of_group.view(len(group.names), -1)
                if group.complete is not None:
                    spectral = Number(spectral, group.complete, of="weights")
                numbers[group.names, "qk_spectral_norm"] = spectral
        return numbers


def _has_products(site: AttentionSite, parameters: Mapping[str, Tensor]) -> bool:
    """Whether all weights are matrices with a row for each feature, multiplied one after the other."""
    if site.reparametrised:
        return False
    for term in site.terms:
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        for path in (term.query, term.key):
            weights = [parameters[head_slice.parameter] for head_slice in path]
            for x, p in zip(path, weights):
                # The row is itself a matrix.
                if p.ndim > 2 and x.axis == 0 and x.index.shape[1] == 1:
                    return False
            for (first, second), p in zip(itertools.pairwise(path), weights[1:]):
                width = p.numel() // len(second.rows_of(p)) if p.ndim > 1 else 0
                if width and width != first.index.shape[1]:
                    return False
    return True


def _weights(site: AttentionSite, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    return [parameters[head_slice.parameter] for head_slice in _slices(site)]


def _slices(site: AttentionSite) -> list[HeadSlice]:
    chains = itertools.chain(*chains_of(site).values())
    return [*itertools.chain(*chains)]


def _lasts(site: AttentionSite) -> dict[str, list[HeadSlice]]:
    return {side: last_weights(chains) for side, chains in chains_of(site).items()}


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
