"""Norms by head of query and key weights, of their products, of gains, and of weights split across processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.distributed.layout import counted, local
from qkeel.distributed.sharding import local_block
from qkeel.functional.bounds import interaction_norm, spectrum, step_products
from qkeel.functional.norms import wide, widest
from qkeel.heads.site import AttentionSite, HeadSlice, NormGain, QKProduct
from qkeel.monitor.gather import NumberKey, PartialValue, SiteNumbers
from qkeel.nn.attention import SpecModule
from qkeel.patching.modes import without_gradients
from qkeel.spec.slot import ParameterSizes, Params

# Products of the weights on the paths of q and k from the input to a head's logits.

Chain = tuple[HeadSlice, ...]
RowsOfHeads = Callable[[HeadSlice], Tensor]  # the rows of each head [n r m]


def own_rows(chains: Sequence[Chain]) -> list[HeadSlice]:
    """The last weight of each path (the one whose rows belong to the head), without duplicates."""
    found: list[HeadSlice] = []
    for chain in chains:
        if not any(
            chain[-1].parameter == f.parameter and chain[-1].same(f) for f in found
        ):
            found.append(chain[-1])
    return found


def gram(chains: Sequence[Chain], weight: RowsOfHeads) -> Tensor:
    """W Wᵀ [heads R R], where W stacks the products of all terms; weights that add up count as terms too."""
    if len(chains) == 1:
        return _product(chains[0], chains[0], weight)
    products = [[_product(a, b, weight) for b in chains] for a in chains]
    heads = max(len(x) for line in products for x in line)
    return torch.cat(
        [torch.cat([x.expand(heads, -1, -1) for x in line], -1) for line in products],
        -2,
    )


def _product(a: Chain, b: Chain, weight: RowsOfHeads) -> Tensor:
    """(product of a)(product of b)ᵀ [heads r r'], computed from the input's side, so that no matrix of the input's
    width is kept. Inputs of unequal width (MLA's normed latent and the tokens) count as two inputs that share
    nothing."""
    first = weight(a[0])
    second = first if a is b else weight(b[0])
    if first.shape == second.shape:
        inner = torch.bmm(
            first, second.mT
        )  # what @ calls, between five other operators
    elif first.shape[-1] == second.shape[-1]:
        inner = first @ second.mT
    else:
        inner = first.new_zeros(
            max(len(first), len(second)), first.shape[1], second.shape[1]
        )
    for part in a[1:]:
        inner = _after(weight(part), inner)
    for part in b[1:]:
        inner = _after(weight(part), inner.mT).mT
    return inner


def matrix(chains: Sequence[Chain], weight: RowsOfHeads) -> Tensor:
    """Stacks the products of all terms [heads R m]; inputs of unequal width get separate columns."""
    found = []
    for chain in chains:
        x = weight(chain[0])
        for part in chain[1:]:
            x = _after(weight(part), x)
        found.append(x)
    widths = list(dict.fromkeys(x.shape[-1] for x in found))
    heads = max(len(x) for x in found)
    lines = []
    for x in found:
        before = sum(widths[: widths.index(x.shape[-1])])
        placed = torch.nn.functional.pad(
            x, (before, sum(widths) - before - x.shape[-1])
        )
        lines.append(
            placed if len(x) == heads else placed.repeat_interleave(heads // len(x), 0)
        )
    return torch.cat(lines, -2)


def _after(weight: Tensor, inner: Tensor) -> Tensor:
    """A weight times what comes before it; a weight with one column, such as gains, multiplies row by row."""
    return weight * inner if weight.shape[-1] == 1 else weight @ inner


# The norms of the weights behind the heads of one site, computed from the part of them that this process holds.

NORMS = {"query": "query_weight_norm", "key": "key_weight_norm"}


@final
class SplitWeights:
    """The statistics of one site's weights if they are split across processes. Squares of norms add up over the
    processes, but a singular value is known only to a process that has all rows of a head.

    Nothing is gathered. The statistics are those of WeightNorms, [h] per query head of the whole model.
    """

    def __init__(
        self,
        site: AttentionSite,
        parameters: Mapping[str, Tensor],
        counted: Callable[[Tensor], bool],
        eps: float | None,
        multiplies: bool,
    ) -> None:
        """counted: whether this process's part of a parameter counts. eps: the optimizer's eps, if it has one.
        multiplies: whether the weights are matrices that are multiplied by one another."""
        self.site, self._parameters, self._eps, self._multiplies = (
            site,
            parameters,
            eps,
            multiplies,
        )
        self._parts = {
            s.parameter: local_block(s.parameter, parameters[s.parameter])
            for s in (*site.query, *site.key)
        }
        sides = {
            "query": [t.query for t in site.terms],
            "key": [t.key for t in site.terms],
        }
        self._rows = {
            side: [self._local(s, counted) for s in own_rows(chains)]
            for side, chains in sides.items()
        }
        self._whole = self._whole_heads(sides["query"] + sides["key"])

    def shares(self) -> dict[str, PartialValue]:
        """Returns all current statistics of the site."""
        found: dict[str, PartialValue] = {}
        grads = {}
        for side, rows in self._rows.items():
            if not self.site.reparametrised:
                found[NORMS[side]] = self._norm(
                    rows, [self._parameters[s.parameter] for s, _, _ in rows]
                )
            of = [self._parameters[s.parameter].grad for s, _, _ in rows]
            if all(grad is not None for grad in of):
                grads[f"{side}_grad_rms"] = self._norm(rows, of, root_mean=True)  # type: ignore[arg-type]
        found |= grads
        if self._eps and len(grads) == 2:
            eps = torch.full((1,), self._eps, dtype=self._dtype, device=self._device)
            found["eps"] = PartialValue(
                value=eps, weight=torch.ones_like(eps), of="weights"
            )
        if self._multiplies:
            found["qk_spectral_norm"] = self._spectral()
        return found

    @property
    def _dtype(self) -> torch.dtype:
        """The widest dtype that the device supports."""
        return widest(self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _local(
        self, s: HeadSlice, counted: Callable[[Tensor], bool]
    ) -> tuple[HeadSlice, Tensor, Tensor]:
        """Returns a weight, the head of each row on this process, and how many elements of each query head are on
        it."""
        p = self._parameters[s.parameter]
        here = s.rows_of(local(p))
        part = self._parts[s.parameter]
        first = 0 if part is None else part.spans[s.axis if p.ndim > 1 else 0][0]
        at = s.index - first
        heads = torch.full((len(here),), s.n)
        inside = (at >= 0) & (at < len(here))
        if counted(p):
            heads[at[inside]] = torch.arange(s.n)[:, None].expand_as(at)[inside]
        count = (
            torch.zeros(s.n + 1).index_add_(0, heads, torch.ones(len(here)))[: s.n]
            * here.shape[1]
        )
        return s, heads.to(p.device), self.site.per_query_head(count).to(p.device)

    def _norm(
        self,
        rows: Sequence[tuple[HeadSlice, Tensor, Tensor]],
        of: Sequence[Tensor],
        *,
        root_mean: bool = False,
    ) -> PartialValue:
        squares, counts = [], []
        for (s, heads, count), x in zip(rows, of, strict=True):
            here = s.rows_of(local(x))
            norms = torch.linalg.vector_norm(here.to(wide(here.dtype)), dim=1)
            total = torch.zeros(
                s.n + 1, dtype=self._dtype, device=norms.device
            )  # keeps the squares finite
            total = total.index_add_(0, heads, norms.to(self._dtype).square())[: s.n]
            squares.append(self.site.per_query_head(total))
            counts.append(count)
        square, count = torch.stack(squares).sum(0), torch.stack(counts).sum(0)
        if root_mean:
            value = (square / count.clamp_min(1)).sqrt()
            return PartialValue(
                value=value, weight=count, how="root_mean", of="weights"
            )
        return PartialValue(value=square.sqrt(), weight=count, how="root", of="weights")

    def _whole_heads(self, chains: Sequence[Chain]) -> Tensor:
        """The query heads for which all weights on both paths are on this process."""
        whole = torch.ones(self.site.n_heads, dtype=torch.bool)
        for s in (s for chain in chains for s in chain):
            part = self._parts[s.parameter]
            if part is not None:
                p = self._parameters[s.parameter]
                axis = s.axis if p.ndim > 1 else 0
                first, last = part.spans[axis]
                here = ((s.index >= first) & (s.index < last)).all(1)
                others = all(
                    part.spans[i] == (0, n) for i, n in enumerate(p.shape) if i != axis
                )
                whole &= here[self.site.used(s.n)] & others
        return whole.nonzero().flatten()

    def _spectral(self) -> PartialValue:
        value = torch.zeros(self.site.n_heads, dtype=self._dtype, device=self._device)
        weight = torch.zeros_like(value)
        if len(self._whole):
            at = self._whole.to(self._device)
            a, b = (
                gram([getattr(t, side) for t in self.site.terms], self._heads)
                for side in ("query", "key")
            )
            n = len(at)
            norms = interaction_norm(a.expand(n, -1, -1), b.expand(n, -1, -1))
            value[at], weight[at] = norms.to(value.dtype), 1.0
        return PartialValue(value=value, weight=weight, of="weights")

    def _heads(self, s: HeadSlice) -> Tensor:
        """The rows [n r m] of the query heads that are entirely on this process."""
        p, part = self._parameters[s.parameter], self._parts[s.parameter]
        first = 0 if part is None else part.spans[s.axis if p.ndim > 1 else 0][0]
        here = s.rows_of(local(p)).detach()
        at = s.index[self.site.used(s.n)[self._whole]] - first
        return here[at.to(here.device)].to(wide(here.dtype))


# Bounds on the largest logit of each head from the gains of a q/k norm, for any weights before the norm.


@final
class GainBounds:
    """Reads `gain_bound` [h] for the sites whose q and k are both outputs of a norm.

    The bound is |scale| · ‖q‖max · ‖k‖max with ‖x‖max = factor · (length · max|g| + ‖b‖) per head, where length is √n
    for an RMS or layer norm over n elements and 1 for an L2 norm (Cauchy–Schwarz; a rotation preserves norms). The
    bound is in nats, before any cap, and excludes what a mask or a position bias adds. It is reached by a head whose q
    and k lie along the dimension of the largest gain. For scales that grow with the position (LogN,
    FloorLogTemperature), it is valid up to the training length, below the first floor.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._parameters = dict(model.named_parameters())
        self.sites = [
            site
            for site in sites
            if site.query_gains and site.key_gains and not self._unknown(site)
        ]
        self._placed: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._in_order: set[tuple[int, torch.device]] = (
            set()
        )  # those that are all elements, in their order

    @without_gradients
    def read(self) -> SiteNumbers:
        """Returns the bound of each site for the current gains; for gains that are split across processes, returns this
        process's part of the factors of query and key."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for site in self.sites:
            query = self._longest_heads(site.query_gains, site.n_heads)
            key = site.per_query_head(
                self._longest_heads(site.key_gains, site.n_kv_heads)
            )
            query = query * _scale(site, query)
            if self._is_split(site):
                numbers[site.name, "query_bound"] = _largest(query)
                numbers[site.name, "key_bound"] = _largest(key)
            else:
                numbers[site.name, "gain_bound"] = query * key
        return numbers

    def _longest_heads(self, norms: tuple[NormGain, ...], n_heads: int) -> Tensor:
        """The largest norm [heads] of each head's vectors."""
        lengths = [
            self._longest(norm)
            if norm.factor == 1
            else norm.factor * self._longest(norm)
            for norm in norms
        ]
        if len(norms) == 1:
            return lengths[0].expand(n_heads)
        of_heads = lengths[0].new_zeros(n_heads)
        for norm, length in zip(norms, lengths):
            of_heads[list(norm.heads)] = length
        return of_heads

    def _is_split(self, site: AttentionSite) -> bool:
        norms = (*site.query_gains, *site.key_gains)
        return any(
            n.parameter is not None and dist.is_split(self._parameters[n.parameter])
            for n in norms
        )

    def _longest(self, norm: NormGain) -> Tensor:
        """‖x‖max [n] behind a norm, before later operations stretch it."""
        if norm.parameter is None or norm.index is None:
            length = torch.full(
                (1,), norm.length, device=next(iter(self._parameters.values())).device
            )
        else:
            gains = self._gains(norm.parameter, norm.index, norm.offset)
            gains = gains.to(wide(gains.dtype))
            gains = gains + norm.offset if norm.offset else gains
            length = gains.abs().amax(-1) * norm.length
        if norm.bias is not None and norm.bias_index is not None:
            bias = self._gains(norm.bias, norm.bias_index, 0.0)
            length = length + bias.to(wide(bias.dtype)).norm(dim=-1)
        return length

    def _gains(self, name: str, index: Tensor, offset: float) -> Tensor:
        """The elements of a parameter for each head [n r], or -offset for elements that another process has."""
        p = self._parameters[name]
        x = local(p).detach()
        part = local_block(name, p)
        key = id(index), x.device
        if key not in self._placed:
            first, last = (
                (0, p.numel())
                if part is None
                else (n * (p.numel() // len(p)) for n in part.spans[0])
            )
            at = index.to(x.device)
            self._placed[key] = (
                (at - first).clamp(0, max(x.numel() - 1, 0)),
                (at >= first) & (at < last),
            )
            if (
                part is None
                and index.numel() == x.numel()
                and index.flatten().equal(torch.arange(x.numel()))
            ):
                self._in_order.add(key)
        if key in self._in_order:
            return x.view(index.shape)
        x = x.flatten()
        at, here = self._placed[key]
        if not len(x):
            return x.new_full(at.shape, -offset)
        return x[at] if part is None else x[at].masked_fill(~here, -offset)

    def _unknown(self, site: AttentionSite) -> bool:
        """Returns whether no process can compute the bound, because a part of its scale or of a bias is on another
        process."""
        biases = [
            norm.bias
            for norm in (*site.query_gains, *site.key_gains)
            if norm.bias is not None
        ]
        learned = _scale_params(site).values()
        return any(
            map(dist.is_split, (*learned, *(self._parameters[name] for name in biases)))
        )


def _largest(value: Tensor) -> PartialValue:
    return PartialValue(
        value=value, weight=torch.ones_like(value), how="max", of="weights"
    )


def _scale_params(site: AttentionSite) -> Params:
    """The parameters from which a learned scale is computed, or {} if the scale is not learned."""
    heads = ParameterSizes(
        n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim
    )
    if not isinstance(site.module, SpecModule) or not site.spec.scale.parameters(heads):
        return {}
    return site.module.spec_params()


def _scale(site: AttentionSite, like: Tensor) -> Tensor:
    """|scale|, as one value or as one value for each head."""
    at = torch.full((1, 1), site.spec.scale.last_position, device=like.device)
    factor = site.spec.scale.factor(at, site.head_dim, _scale_params(site))
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device).abs().flatten()


# Statistics of the weights behind a head: their norms, the largest singular value of W_QᵀW_K, their gradients.


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
    grad_over_eps [h]: the smaller of the two divided by the optimizer's eps; near or below 1, Adam's step shrinks
        (Wortsman et al. 2023, arXiv 2309.14322, section 3.4).
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[AttentionSite],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._eps = _eps_by_parameter(optimizer)
        known = [site for site in sites if site.terms]
        split = [
            site
            for site in known
            if any(self._is_split(s) for s in (*site.query, *site.key))
        ]
        self.sites = [site for site in known if site not in split]
        counts = counted(model) if split else None
        self._split = [
            SplitWeights(
                s, self._parameters, counts, self._eps_of(s), self._has_products(s)
            )
            for s in split
            if counts is not None
        ]
        self._own = {
            site.name: {side: own_rows(chains) for side, chains in _sides(site)}
            for site in self.sites
        }
        self._squared = [site for site in self.sites if self._has_products(site)]

    @property
    def multiplied(self) -> list[AttentionSite]:
        """The sites whose stored q and k weights are entirely on this process and are matrices that are multiplied by
        one another."""
        return self._squared

    @without_gradients
    def read(self) -> SiteNumbers:
        """Returns the current statistics of all sites; for weights that are split across processes, this process's
        part."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for split in self._split:
            numbers |= {
                (split.site.name, name): share for name, share in split.shares().items()
            }
        for site in self.sites:
            grads = []
            for side, parts in self._own[site.name].items():
                if not site.reparametrised:
                    weights = [
                        part.heads(self._parameters[part.parameter]) for part in parts
                    ]
                    numbers[site.name, NORMS[side]] = _length(weights, site)
                of_grad = [self._parameters[part.parameter].grad for part in parts]
                if all(grad is not None for grad in of_grad):
                    rows = [
                        part.heads(grad)
                        for part, grad in zip(parts, of_grad)
                        if grad is not None
                    ]
                    size = sum(x.shape[1] * x.shape[2] for x in rows)
                    grads.append(_length(rows, site) / size**0.5)
                    numbers[site.name, f"{side}_grad_rms"] = grads[-1]
            eps = self._eps_of(site)
            if eps and len(grads) == 2:
                numbers[site.name, "grad_over_eps"] = torch.minimum(*grads) / eps
        numbers |= self._products()
        return numbers

    def _products(self) -> dict[NumberKey, Tensor]:
        """The largest singular values; heads of one size are decomposed together, because each call is expensive."""
        grams: dict[object, list[tuple[AttentionSite, Tensor, Tensor]]] = {}
        for site in self._squared:
            query, key = (
                site.per_query_head(gram(chains, self._weight))
                for _, chains in _sides(site)
            )
            grams.setdefault(
                (query.shape[-1], key.shape[-1], query.dtype, query.device), []
            ).append((site, query, key))
        numbers: dict[NumberKey, Tensor] = {}
        for group in grams.values():
            norms = interaction_norm(
                torch.cat([query for _, query, _ in group]),
                torch.cat([key for *_, key in group]),
            )
            for (site, *_), values in zip(
                group, norms.split([site.n_heads for site, *_ in group])
            ):
                numbers[site.name, "qk_spectral_norm"] = values
        return numbers

    def _has_products(self, site: AttentionSite) -> bool:
        return not site.reparametrised and all(map(self._multiplies, site.terms))

    def _multiplies(self, term: QKProduct) -> bool:
        """True if the weights of a product are matrices with a row for each feature, multiplied one after the other."""
        parts = {s: self._parameters[s.parameter] for s in (*term.query, *term.key)}
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        if any(
            p.ndim > 2 and s.axis == 0 and s.index.shape[1] == 1
            for s, p in parts.items()
        ):
            return False  # the row is itself a matrix
        pairs = [
            pair for path in (term.query, term.key) for pair in itertools.pairwise(path)
        ]
        widths = [
            (a.index.shape[1], self._columns(b)) for a, b in pairs if parts[b].ndim > 1
        ]
        return all(rows == width for rows, width in widths)

    def _eps_of(self, site: AttentionSite) -> float | None:
        return self._eps.get(id(self._parameters[site.terms[0].query[-1].parameter]))

    def _is_split(self, part: HeadSlice) -> bool:
        return dist.is_split(self._parameters[part.parameter])

    def _weight(self, part: HeadSlice) -> Tensor:
        """The heads' rows [n r m] in float32 or wider."""
        x = part.heads(self._parameters[part.parameter].detach())
        return x.to(wide(x.dtype))

    def _columns(self, part: HeadSlice) -> int:
        p = self._parameters[part.parameter]
        return p.numel() // _lines(part, p)


_ENTRIES = (
    1 << 27
)  # the number of elements of the small matrices whose spectra are computed at once: 1 GiB


@final
class StepSpectra:
    """Compares the q and k weights of several sites before and after a step, per query head [h].

    delta2_*, delta3_*: as in `functional.bounds.step_products`, computed for the products of all weights on the paths
        of q and of k. As in WeightNorms, rotations are left out. If a q/k norm applies to the rows of the head's
        weight, its gains multiply these rows, before and after the step; the divisor of such a norm is left out.
    query_update_ratio, key_update_ratio: ‖ΔW‖ / ‖W‖ (Frobenius, so RMS(ΔW) / RMS(W)) of the head's own rows.

    Between `before` and `after`, it holds a copy of these weights.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._parameters = dict(model.named_parameters())
        self._sites = sites
        weights = [
            part.parameter for site in sites for part in (*site.query, *site.key)
        ]
        gains = [
            norm.parameter
            for site in sites
            for norm in (*site.query_gains, *site.key_gains)
        ]
        self._names = list(
            dict.fromkeys([*weights, *(name for name in gains if name is not None)])
        )
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self) -> None:
        """Called before the step."""
        self._kept = {
            name: self._parameters[name].detach().clone() for name in self._names
        }

    @torch.no_grad()
    def after(self) -> dict[NumberKey, Tensor | PartialValue]:
        """Must be called after the step; returns what the step added, or nothing if `before` was not called."""
        kept, self._kept = self._kept, {}
        found: dict[NumberKey, Tensor | PartialValue] = {}
        products: dict[
            tuple[int, ...], list[tuple[str, str, Tensor]]
        ] = {}  # by shape, for many sites at once
        for site in self._sites if kept else ():
            factors: list[Tensor] = []
            for side, chains in _sides(site):
                now = matrix(
                    chains, lambda part: _rows(part, self._parameters[part.parameter])
                )
                old = matrix(chains, lambda part: _rows(part, kept[part.parameter]))
                norms = site.query_gains if side == "query" else site.key_gains
                own_heads = site.n_heads if side == "query" else site.n_kv_heads
                if len(site.terms) == 1 and norms:
                    old, now = (
                        _gained(x, norms, own_heads, of)
                        for x, of in ((old, kept), (now, self._parameters))
                    )
                factors += [site.per_query_head(x) for x in (old, now - old)]
                own = own_rows(chains)
                news, olds = (
                    [_rows(part, of[part.parameter]) for part in own]
                    for of in (self._parameters, kept)
                )
                moved = _length([new - was for new, was in zip(news, olds)], site)
                found[site.name, f"{side}_update_ratio"] = moved / _length(olds, site)
            for name, product in zip(("delta2", "delta3"), step_products(*factors)):
                products.setdefault(tuple(product.shape[1:]), []).append(
                    (site.name, name, product)
                )
        for alike in products.values():
            most = max(1, _ENTRIES // max(1, alike[0][2].numel()))
            for some in (alike[i : i + most] for i in range(0, len(alike), most)):
                spectra = spectrum(torch.cat([product for _, _, product in some]))
                counts = [len(product) for _, _, product in some]
                for of, values in spectra._asdict().items():
                    for (site_name, name, _), x in zip(some, values.split(counts)):
                        found[site_name, f"{name}_{of}"] = x
        return found


def _gained(
    x: Tensor, norms: tuple[NormGain, ...], heads: int, of: Mapping[str, Tensor]
) -> Tensor:
    """Multiplies the rows of weights [n r m] by the gains of the norm behind them, as diagonal matrices.

    If the gains of the norm do not correspond to these rows, the rows are unchanged.
    """
    gains = torch.ones(heads, x.shape[1], dtype=x.dtype, device=x.device)
    for norm in norms:
        if (
            norm.parameter is None
            or norm.index is None
            or norm.index.shape[1] not in (1, x.shape[1])
        ):
            return x
        p = of[norm.parameter].detach()
        if dist.is_split(p):
            return x
        own = norm.offset + p.flatten()[norm.index.to(p.device)].to(x.dtype)
        gains[list(norm.heads)] = norm.factor * own.expand(len(norm.heads), x.shape[1])
    if heads % len(x):
        return x
    return x.repeat_interleave(heads // len(x), 0) * gains[..., None]


def _rows(part: HeadSlice, x: Tensor) -> Tensor:
    """The heads' rows [n r m], in the widest dtype that the device supports, because steps are small differences."""
    return part.heads(x.detach()).to(widest(x.device))


def _length(parts: Sequence[Tensor], site: AttentionSite) -> Tensor:
    """The Frobenius norm [h] of each query head's rows of several weights as one matrix."""
    norms = [
        site.per_query_head(
            torch.linalg.vector_norm(x, dim=(1, 2), dtype=wide(x.dtype))
        )
        for x in parts
    ]
    return (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack(norms), dim=0)
    )


def _sides(
    site: AttentionSite,
) -> tuple[tuple[str, list[Chain]], tuple[str, list[Chain]]]:
    return ("query", [t.query for t in site.terms]), (
        "key",
        [t.key for t in site.terms],
    )


def _lines(part: HeadSlice, x: Tensor) -> int:
    """The number of rows or columns of a weight."""
    return x.shape[0] if part.axis == 0 else x.shape[1:].numel()


def _eps_by_parameter(optimizer: torch.optim.Optimizer | None) -> Mapping[int, float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        id(p): group["eps"]
        for group in groups
        if isinstance(group.get("eps"), float)
        for p in group["params"]
    }
