"""Norms by head of query and key weights, of their products, of gains, and of weights split across processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.dist.sharding import counted, local, local_block
from qkeel.functional.bounds import interaction_norm, spectrum, step_products
from qkeel.functional.norms import wide, widest
from qkeel.heads.site import AttentionSite, HeadSlice, NormGain, QKProduct
from qkeel.monitor.gather import NumberKey, PartialValue, SentRow, SiteNumbers
from qkeel.nn.attention import SpecModule
from qkeel.patching.modes import without_gradients
from qkeel.spec.slot import ParameterSizes, Params

# The heads of many weights in few operations; heads of the same shape are combined into one tensor.

STACKED = 128 * 2**20  # bytes of a stack, which is created when backward has freed the activations
_K = TypeVar("_K", bound=Hashable)
TOGETHER = 1 << 16  # elements of small weights that are read together on the host, so that they stay in a core's cache
UNSTACKED = frozenset({"cpu"})  # types of devices where an operation costs less than a copy


NormsByWeight = list[tuple[list[int], Tensor]]  # indices of weights, and the values for all of their heads


def norms_and_grams(
    weights: Sequence[Tensor], rows: Sequence[int], squared: int
) -> tuple[NormsByWeight, NormsByWeight]:
    """The norms [Σn] of the heads of all weights, and W Wᵀ [Σn r r] for the heads of the first `squared` weights, in
    float32 or wider.

    On a CPU small weights of one shape are read together; on a GPU all heads are read in `stacks`.

    Args:
        weights: the heads of each weight as [n r m], or concatenated as [n·r m].
        rows: r for each weight.
        squared: the number of weights for which products are computed.
    """
    norms, grams = NormsByWeight(), NormsByWeight()
    if all([x.device.type in UNSTACKED for x in weights]):  # noqa: C419
        for own in _small_together(weights, rows):
            x = _heads(weights[own[0]] if len(own) == 1 else torch.cat([weights[i] for i in own]), rows[own[0]])
            kind = wide(x.dtype)
            norms.append((own, torch.linalg.vector_norm(x, dim=(1, 2), dtype=None if x.dtype == kind else kind)))
            if some := [i for i in own if i < squared]:  # they come first
                x = x if len(some) == len(own) else x[: len(x) * len(some) // len(own)]  # weights of one shape
                x = x if x.dtype == kind else x.to(kind)
                grams.append((some, torch.bmm(x, x.mT)))
        return norms, grams
    heads = [_heads(x, r) for x, r in zip(weights, rows)]
    for own, stack in stacks(heads):
        norms.append((own, torch.linalg.vector_norm(stack, dim=(1, 2), dtype=wide(stack.dtype))))
        if some := [i for i in own if i < squared]:  # they come first
            x = stack[: sum(len(heads[i]) for i in some)].to(wide(stack.dtype))
            grams.append((some, x @ x.mT))
    return norms, grams


def _heads(weight: Tensor, r: int) -> Tensor:
    """The heads [n r m] of a weight that has this shape or the shape [n·r m]."""
    return weight if weight.ndim == 3 else weight.view(-1, r, weight.shape[1])


def _small_together(weights: Sequence[Tensor], rows: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of weights that are read in one operation on the host: small weights of the same shape and
    dtype, because an operation costs more than copying them."""
    waiting: dict[object, list[int]] = {}
    for i, x in enumerate(weights):  # no Python call for each, because there are some hundred in a step
        n = x.numel()
        if n > TOGETHER:
            yield [i]
            continue
        kind = x.shape, rows[i], x.dtype
        own = waiting.get(kind)
        if own is None:
            own = waiting[kind] = []
        own.append(i)
        if len(own) * n > TOGETHER:
            yield waiting.pop(kind)
    yield from waiting.values()


def stacks(heads: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields stacks of the heads [n r m] of several weights, concatenated to [Σn r m], with the indices of these
    weights.

    The heads in a stack have the same shape, dtype and device. A stack is a copy of at most STACKED bytes in float32; a
    weight that is alone in its stack is not copied, and neither is any weight on a device in UNSTACKED.
    """
    for _, places in _grouped(range(len(heads)), lambda i: (heads[i].shape[1:], heads[i].dtype, heads[i].device)):
        first = heads[places[0]]
        most = 0 if first.device.type in UNSTACKED else STACKED // wide(first.dtype).itemsize
        while places:
            n, numbers = 1, heads[places[0]].numel()
            while n < len(places) and (numbers := numbers + heads[places[n]].numel()) <= most:
                n += 1
            chunk, places = places[:n], places[n:]
            yield chunk, _one([heads[i] for i in chunk])


def _grouped(numbers: Iterable[int], key: Callable[[int], _K]) -> Iterable[tuple[_K, list[int]]]:
    found: dict[_K, list[int]] = {}
    for i in numbers:
        found.setdefault(key(i), []).append(i)
    return found.items()


@final
class Joined:
    """Concatenated tensors [n …], and the indices of each source in them."""

    def __init__(self) -> None:
        self.sources: dict[Hashable, range] = {}
        self._parts: list[Tensor] = []
        self._length = 0

    def add(self, x: Tensor, lengths: Iterable[tuple[Hashable, int]]) -> None:
        """Adds a tensor that contains the given number of values for each source, in this order."""
        self._parts.append(x)
        for source, n in lengths:
            self.sources[source] = range(self._length, self._length + n)
            self._length += n

    def at(self, source: Hashable, site: AttentionSite) -> Tensor:
        """The indices [h] of the values that each query head of the site uses from a source."""
        mine = self.sources[source]
        return mine.start + site.used(len(mine))

    def whole(self) -> Tensor:
        """Returns the concatenation on the device of the first tensor, in the widest of the dtypes."""
        return joined(self._parts)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors on the device of the first tensor, in the widest of their dtypes."""
    first = parts[0]
    if all([x.dtype == first.dtype and x.device == first.device for x in parts]):  # noqa: C419
        return _one(parts)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in parts])
    return _one([x.to(first.device, dtype) for x in parts])


WeightParts = tuple[
    Sequence[Tensor], float | Tensor
]  # the indices [h] of each part that counts, and a factor, a scalar or [h]


@final
class Places:
    """The indices of each query head's values in a tensor [n …], by name; the host never waits for them during a step.

    If there are several indices for a value, it is the root of the sum of squares at these indices, times the factor.
    """

    def __init__(
        self,
        alone: Mapping[NumberKey, WeightParts],
        pairs: Mapping[NumberKey, tuple[WeightParts, WeightParts]],
        like: Tensor,
    ) -> None:
        """alone: names with one set of indices. pairs: names whose values are computed from two sets. like: the tensor,
        or one like it."""
        self._alone, single = _by_name({key: len(place[0][0]) for key, place in alone.items()})
        self._pairs, double = _by_name({key: len(place[0][0][0]) for key, place in pairs.items()})
        self._sizes = sum(row.total for row in self._alone), *(2 * [sum(row.total for row in self._pairs)])
        self._any = bool(alone or pairs)
        if not self._any:
            return
        wanted = [alone[key] for key in single] + [pairs[key][i] for i in (0, 1) for key in double]
        rows = [
            torch.cat([parts[i] if i < len(parts) else torch.full_like(parts[0], len(like)) for parts, _ in wanted])
            for i in range(max(len(parts) for parts, _ in wanted))
        ]
        self._index = (rows[0] if len(rows) == 1 else torch.stack(rows)).to(like.device)
        factors = torch.cat([torch.as_tensor(f, dtype=like.dtype).expand(len(parts[0])) for parts, f in wanted])
        self._factors = None if bool((factors == 1).all()) else factors.to(like.device)

    def taken(self, x: Tensor, made: Callable[[Tensor, Tensor], Tensor]) -> list[SentRow]:
        """Returns the values in the current tensor; for a pair, what `made` computes from both, for all pairs at
        once."""
        if not self._any:
            return []
        if self._index.ndim == 1:
            found = x[self._index]
        else:
            found = torch.linalg.vector_norm(torch.nn.functional.pad(x, (0, 1))[self._index], dim=0)
        found = found if self._factors is None else found * self._factors
        alone, first, second = found.split_with_sizes(self._sizes)
        parts = [*alone.split_with_sizes([row.total for row in self._alone])] if self._alone else []
        if self._pairs:
            parts += made(first, second).split_with_sizes([row.total for row in self._pairs])
        return [
            SentRow(name=row.name, sites=row.sites, counts=row.counts, values=part)
            for row, part in zip((*self._alone, *self._pairs), parts)
        ]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A row without its values."""

    name: str
    sites: tuple[str, ...]
    counts: tuple[int, ...]
    total: int


def _by_name(counts: Mapping[NumberKey, int]) -> tuple[list[_Row], list[NumberKey]]:
    """Returns one row per name, and all keys in the order of the rows."""
    found: dict[str, dict[str, int]] = {}
    for (site, name), n in counts.items():
        found.setdefault(name, {})[site] = n
    rows = [_Row(name, tuple(of), tuple(of.values()), sum(of.values())) for name, of in found.items()]
    return rows, [(site, row.name) for row in rows for site in row.sites]


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


# Products of the weights on the paths of q and k from the input to a head's logits.

Chain = tuple[HeadSlice, ...]
RowsOfHeads = Callable[[HeadSlice], Tensor]  # the rows of each head [n r m]


def own_rows(chains: Sequence[Chain]) -> list[HeadSlice]:
    """The last weight of each path (the one whose rows belong to the head), without duplicates."""
    found: list[HeadSlice] = []
    for chain in chains:
        if not any(chain[-1].parameter == f.parameter and chain[-1].same(f) for f in found):
            found.append(chain[-1])
    return found


def gram(chains: Sequence[Chain], weight: RowsOfHeads) -> Tensor:
    """W Wᵀ [heads R R], where W stacks the products of all terms; weights that add up count as terms too."""
    if len(chains) == 1:
        return _product(chains[0], chains[0], weight)
    products = [[_product(a, b, weight) for b in chains] for a in chains]
    heads = max(len(x) for line in products for x in line)
    return torch.cat([torch.cat([x.expand(heads, -1, -1) for x in line], -1) for line in products], -2)


def _product(a: Chain, b: Chain, weight: RowsOfHeads) -> Tensor:
    """(product of a)(product of b)ᵀ [heads r r'], computed from the input's side, so that no matrix of the input's
    width is kept. Inputs of unequal width (MLA's normed latent and the tokens) count as two inputs that share
    nothing."""
    first, second = weight(a[0]), weight(b[0])
    if first.shape[-1] == second.shape[-1]:
        inner = first @ second.mT
    else:
        inner = first.new_zeros(max(len(first), len(second)), first.shape[1], second.shape[1])
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
        placed = torch.nn.functional.pad(x, (before, sum(widths) - before - x.shape[-1]))
        lines.append(placed if len(x) == heads else placed.repeat_interleave(heads // len(x), 0))
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
        self.site, self._parameters, self._eps, self._multiplies = site, parameters, eps, multiplies
        self._parts = {s.parameter: local_block(s.parameter, parameters[s.parameter]) for s in (*site.query, *site.key)}
        sides = {"query": [t.query for t in site.terms], "key": [t.key for t in site.terms]}
        self._rows = {side: [self._local(s, counted) for s in own_rows(chains)] for side, chains in sides.items()}
        self._whole = self._whole_heads(sides["query"] + sides["key"])

    def shares(self) -> dict[str, PartialValue]:
        """Returns all current statistics of the site."""
        found: dict[str, PartialValue] = {}
        grads = {}
        for side, rows in self._rows.items():
            if not self.site.reparametrised:
                found[NORMS[side]] = self._norm(rows, [self._parameters[s.parameter] for s, _, _ in rows])
            of = [self._parameters[s.parameter].grad for s, _, _ in rows]
            if all(grad is not None for grad in of):
                grads[f"{side}_grad_rms"] = self._norm(rows, of, root_mean=True)  # type: ignore[arg-type]
        found |= grads
        if self._eps and len(grads) == 2:
            eps = torch.full((1,), self._eps, dtype=self._dtype, device=self._device)
            found["eps"] = PartialValue(value=eps, weight=torch.ones_like(eps), of="weights")
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

    def _local(self, s: HeadSlice, counted: Callable[[Tensor], bool]) -> tuple[HeadSlice, Tensor, Tensor]:
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
        count = torch.zeros(s.n + 1).index_add_(0, heads, torch.ones(len(here)))[: s.n] * here.shape[1]
        return s, heads.to(p.device), self.site.per_query_head(count).to(p.device)

    def _norm(
        self, rows: Sequence[tuple[HeadSlice, Tensor, Tensor]], of: Sequence[Tensor], *, root_mean: bool = False
    ) -> PartialValue:
        squares, counts = [], []
        for (s, heads, count), x in zip(rows, of, strict=True):
            here = s.rows_of(local(x))
            norms = torch.linalg.vector_norm(here.to(wide(here.dtype)), dim=1)
            total = torch.zeros(s.n + 1, dtype=self._dtype, device=norms.device)  # keeps the squares finite
            total = total.index_add_(0, heads, norms.to(self._dtype).square())[: s.n]
            squares.append(self.site.per_query_head(total))
            counts.append(count)
        square, count = torch.stack(squares).sum(0), torch.stack(counts).sum(0)
        if root_mean:
            value = (square / count.clamp_min(1)).sqrt()
            return PartialValue(value=value, weight=count, how="root_mean", of="weights")
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
                others = all(part.spans[i] == (0, n) for i, n in enumerate(p.shape) if i != axis)
                whole &= here[self.site.used(s.n)] & others
        return whole.nonzero().flatten()

    def _spectral(self) -> PartialValue:
        value = torch.zeros(self.site.n_heads, dtype=self._dtype, device=self._device)
        weight = torch.zeros_like(value)
        if len(self._whole):
            at = self._whole.to(self._device)
            a, b = (gram([getattr(t, side) for t in self.site.terms], self._heads) for side in ("query", "key"))
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
        self.sites = [site for site in sites if site.query_gains and site.key_gains and not self._unknown(site)]
        self._placed: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._places: Places | None = None

    @without_gradients
    def read(self) -> SiteNumbers:
        """Returns the bound of each site for the current gains; for gains that are split across processes, returns this
        process's part of the factors of query and key."""
        if not self.sites:
            return SiteNumbers()
        joined = Joined()
        norms = dict.fromkeys(norm for site in self.sites for norm in (*site.query_gains, *site.key_gains))
        gained = [norm for norm in norms if _has_gain_alone(norm)]
        for offset in dict.fromkeys(norm.offset for norm in gained):
            alike = [norm for norm in gained if norm.offset == offset]
            rows = [self._gains(*_gain(norm), offset)[..., None] for norm in alike]
            for numbers, stack in stacks(rows):
                gains = stack.to(wide(stack.dtype))
                largest = torch.linalg.vector_norm(gains + offset if offset else gains, torch.inf, dim=(1, 2))
                joined.add(largest, [(alike[i], len(rows[i])) for i in numbers])
        for norm in norms:
            if not _has_gain_alone(norm):
                longest = self._longest(norm)
                joined.add(longest, [(norm, len(longest))])
        lengths = joined.whole()
        self._places = self._places or self._looked_up(joined, lengths)
        rows = SiteNumbers(self._places.taken(lengths, torch.mul))
        if not any([self._is_split(site) or _scale_params(site) for site in self.sites]):  # noqa: C419
            return rows
        found: dict[NumberKey, Tensor] = dict(rows)  # type: ignore[arg-type]
        for site in self.sites:
            scaled = (site.name, "query_bound" if self._is_split(site) else "gain_bound")
            if _scale_params(site):
                found[scaled] = _scale(site, found[scaled]) * found[scaled]
        return SiteNumbers((), {key: _largest(x) if key[1] != "gain_bound" else x for key, x in found.items()})

    def _looked_up(self, joined: Joined, like: Tensor) -> Places:
        alone: dict[NumberKey, WeightParts] = {}
        pairs: dict[NumberKey, tuple[WeightParts, WeightParts]] = {}
        for site in self.sites:
            at, factor = _served(site.query_gains, site.n_heads, joined)
            query: WeightParts = [at], factor * (1.0 if _scale_params(site) else _scale(site, factor))
            at, factor = _served(site.key_gains, site.n_kv_heads, joined)
            used = site.used(site.n_kv_heads)
            key: WeightParts = [at[used]], factor[used]
            if self._is_split(site):
                alone |= {(site.name, "query_bound"): query, (site.name, "key_bound"): key}
            else:
                pairs[site.name, "gain_bound"] = query, key
        return Places(alone, pairs, like)

    def _is_split(self, site: AttentionSite) -> bool:
        norms = (*site.query_gains, *site.key_gains)
        return any(n.parameter is not None and dist.is_split(self._parameters[n.parameter]) for n in norms)

    def _longest(self, norm: NormGain) -> Tensor:
        """‖x‖max [n] for a norm with a bias or without a gain."""
        length = torch.full((1,), norm.length, device=next(iter(self._parameters.values())).device)
        if norm.parameter is not None:
            gains = self._gains(*_gain(norm), norm.offset)
            length = norm.length * (norm.offset + gains.to(wide(gains.dtype))).abs().amax(-1)
        if norm.bias is not None and norm.bias_index is not None:
            bias = self._gains(norm.bias, norm.bias_index, 0.0)
            length = length + bias.to(wide(bias.dtype)).norm(dim=-1)
        return length

    def _gains(self, name: str, index: Tensor, offset: float) -> Tensor:
        """The elements of a parameter for each head [n r], or -offset for elements that another process has."""
        p = self._parameters[name]
        x = local(p).detach().flatten()
        part = local_block(name, p)
        if part is None and index.numel() == len(x) and index.flatten().equal(torch.arange(len(x))):
            return x.view(index.shape)
        key = id(index), x.device
        if key not in self._placed:
            first, last = (0, p.numel()) if part is None else (n * (p.numel() // len(p)) for n in part.spans[0])
            at = index.to(x.device)
            self._placed[key] = (at - first).clamp(0, max(len(x) - 1, 0)), (at >= first) & (at < last)
        at, here = self._placed[key]
        if not len(x):
            return x.new_full(at.shape, -offset)
        return x[at] if part is None else x[at].masked_fill(~here, -offset)

    def _unknown(self, site: AttentionSite) -> bool:
        """Returns whether no process can compute the bound, because a part of its scale or of a bias is on another
        process."""
        biases = [norm.bias for norm in (*site.query_gains, *site.key_gains) if norm.bias is not None]
        learned = _scale_params(site).values()
        return any(map(dist.is_split, (*learned, *(self._parameters[name] for name in biases))))


def _has_gain_alone(norm: NormGain) -> bool:
    return norm.parameter is not None and norm.bias is None


def _gain(norm: NormGain) -> tuple[str, Tensor]:
    assert norm.parameter is not None
    assert norm.index is not None
    return norm.parameter, norm.index


def _served(norms: tuple[NormGain, ...], heads: int, joined: Joined) -> tuple[Tensor, Tensor]:
    """The index of each head's vector with the largest norm, and the factor by which it is multiplied."""
    at, factors = torch.empty(heads, dtype=torch.long), torch.empty(heads, dtype=torch.float64)
    for norm in norms:
        mine, own = joined.sources[norm], torch.tensor(norm.heads)
        at[own] = torch.arange(mine.start, mine.stop).expand(len(own))
        factors[own] = norm.factor * (norm.length if _has_gain_alone(norm) else 1.0)
    return at, factors


def _largest(value: Tensor) -> PartialValue:
    return PartialValue(value=value, weight=torch.ones_like(value), how="max", of="weights")


def _scale_params(site: AttentionSite) -> Params:
    """The parameters from which a learned scale is computed, or {} if the scale is not learned."""
    heads = ParameterSizes(n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim)
    if not isinstance(site.module, SpecModule) or not site.spec.scale.parameters(heads):
        return {}
    return site.module.spec_params()


def _scale(site: AttentionSite, like: Tensor) -> Tensor:
    """|scale|, as one value or as one value for each head."""
    at = torch.full((1, 1), site.spec.scale.last_position, device=like.device)
    factor = site.spec.scale.factor(at, site.head_dim, _scale_params(site))
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device).abs().flatten()


# Statistics of the weights behind a head: their norms, the largest singular value of W_QᵀW_K, their gradients.

# For each of several tensors, the sources that it contains and the number of values for each.
_SourceSizes = tuple[tuple[tuple[Hashable, int], ...], ...]


# A weight; whether its gradient is meant; its heads; the rows of each; whether these are all its rows in order.
_Source = tuple[HeadSlice, bool, int, int, bool]


def _source(part: HeadSlice, of_grad: bool) -> _Source:
    n, r = part.index.shape
    return part, of_grad, n, r, part.axis == 0 and part.grid == (0, r, 1)


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
        self, model: nn.Module, sites: Sequence[AttentionSite], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._eps = _eps_by_parameter(optimizer)
        known = [site for site in sites if site.terms]
        split = [site for site in known if any(self._is_split(s) for s in (*site.query, *site.key))]
        self.sites = [site for site in known if site not in split]
        counts = counted(model) if split else None
        self._split = [
            SplitWeights(s, self._parameters, counts, self._eps_of(s), self._has_products(s))
            for s in split
            if counts is not None
        ]
        self._own = {site.name: {side: own_rows(chains) for side, chains in _sides(site)} for site in self.sites}
        self._squared = [site for site in self.sites if self._has_products(site)]
        self._plain = {part for site in self._squared if _is_plain(site) for part in (*site.query, *site.key)}
        self._are_plain = {site.name for site in self._squared if _is_plain(site)}
        self._parts = [*dict.fromkeys(part for sides in self._own.values() for own in sides.values() for part in own)]
        self._known: tuple[tuple[bool, ...] | None, list[_Source], int] = None, [], 0
        self._places: dict[Hashable, Places] = {}

    @property
    def multiplied(self) -> list[AttentionSite]:
        """The sites whose stored q and k weights are entirely on this process and are matrices that are multiplied by
        one another."""
        return self._squared

    @without_gradients
    def read(self) -> SiteNumbers:
        """Returns the current statistics of all sites; for weights that are split across processes, this process's
        part."""
        split: dict[NumberKey, Tensor | PartialValue] = {}
        for one in self._split:
            split |= {(one.site.name, name): share for name, share in one.shares().items()}
        rows = list[SentRow]()
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

    def _read(self) -> Iterator[tuple[str, _SourceSizes, list[Tensor]]]:
        """Yields the norms of the rows of weights and gradients, then Gram matrices, grouped by size: for each, the
        tensors, and for each tensor which sources it contains and how many values of each."""
        sources, squared = self._sources()
        weights, rows = list[Tensor](), list[int]()
        for (
            part,
            of_grad,
            n,
            r,
            one_by_one,
        ) in sources:  # no Python call for each, because there are some hundred in a step
            p = self._parameters[part.parameter]
            x = p.grad if of_grad and p.grad is not None else p
            weights.append(x if one_by_one and x.ndim == 2 and x.shape[0] == n * r else part.heads(x))
            rows.append(r)
        norms, grams = norms_and_grams(weights, rows, squared)
        if norms:
            held = [tuple([(sources[i][:2], sources[i][2]) for i in numbers]) for numbers, _ in norms]
            yield "norms", tuple(held), [x for _, x in norms]
        sizes: dict[int, tuple[list[tuple[tuple[Hashable, int], ...]], list[Tensor]]] = {}
        for numbers, x in grams:
            names, parts = sizes.setdefault(x.shape[1], ([], []))
            names.append(tuple([(sources[i][0], sources[i][2]) for i in numbers]))
            parts.append(x)
        for site in self._squared:
            for side, chains in () if site.name in self._are_plain else _sides(site):
                product = gram(chains, self._weight)
                names, parts = sizes.setdefault(product.shape[-1], ([], []))
                names.append((((site.name, side), product.shape[0]),))
                parts.append(product)
        for r, (names, parts) in sizes.items():
            yield f"products of {r}", tuple(names), parts

    def _sources(self) -> tuple[list[_Source], int]:
        """The weights and the existing gradients, and the number of weights at the front for which products are
        computed."""
        graded = tuple([self._parameters[part.parameter].grad is not None for part in self._parts])
        if self._known[0] != graded:
            plain = [part for part in self._parts if part in self._plain]
            weights = [*dict.fromkeys([*plain, *self._parts])]
            of_grad = [False] * len(weights) + [True] * sum(graded)
            weights += [part for part, has in zip(self._parts, graded) if has]
            self._known = graded, [_source(*each) for each in zip(weights, of_grad)], len(plain)
        return self._known[1], self._known[2]

    def _norms(self, like: Tensor, arranged: Joined) -> Places:
        alone: dict[NumberKey, WeightParts] = {}
        pairs: dict[NumberKey, tuple[WeightParts, WeightParts]] = {}
        for site in self.sites:
            over_eps: list[WeightParts] = []
            eps = self._eps_of(site)
            for side, own in self._own[site.name].items():
                if not site.reparametrised:
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
        pairs: dict[NumberKey, tuple[WeightParts, WeightParts]] = {}
        for site in self._squared:
            sources = [own[0] if _is_plain(site) else (site.name, side) for side, own in self._own[site.name].items()]
            if sources[0] in arranged.sources:
                query, key = ([arranged.at(source, site)] for source in sources)
                pairs[site.name, "qk_spectral_norm"] = (query, 1.0), (key, 1.0)
        return Places({}, pairs, like)

    def _has_products(self, site: AttentionSite) -> bool:
        return not site.reparametrised and all(map(self._multiplies, site.terms))

    def _multiplies(self, term: QKProduct) -> bool:
        """True if the weights of a product are matrices with a row for each feature, multiplied one after the other."""
        parts = {s: self._parameters[s.parameter] for s in (*term.query, *term.key)}
        if term.query[-1].index.shape[1] != term.key[-1].index.shape[1]:
            return False
        if any(p.ndim > 2 and s.axis == 0 and s.index.shape[1] == 1 for s, p in parts.items()):
            return False  # the row is itself a matrix
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


_ENTRIES = 1 << 27  # the number of elements of the small matrices whose spectra are computed at once: 1 GiB


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
        weights = [part.parameter for site in sites for part in (*site.query, *site.key)]
        gains = [norm.parameter for site in sites for norm in (*site.query_gains, *site.key_gains)]
        self._names = list(dict.fromkeys([*weights, *(name for name in gains if name is not None)]))
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self) -> None:
        """Called before the step."""
        self._kept = {name: self._parameters[name].detach().clone() for name in self._names}

    @torch.no_grad()
    def after(self) -> dict[NumberKey, Tensor | PartialValue]:
        """Must be called after the step; returns what the step added, or nothing if `before` was not called."""
        kept, self._kept = self._kept, {}
        found: dict[NumberKey, Tensor | PartialValue] = {}
        products: dict[tuple[int, ...], list[tuple[str, str, Tensor]]] = {}  # by shape, for many sites at once
        for site in self._sites if kept else ():
            factors: list[Tensor] = []
            for side, chains in _sides(site):
                now = matrix(chains, lambda part: _rows(part, self._parameters[part.parameter]))
                old = matrix(chains, lambda part: _rows(part, kept[part.parameter]))
                norms = site.query_gains if side == "query" else site.key_gains
                own_heads = site.n_heads if side == "query" else site.n_kv_heads
                if len(site.terms) == 1 and norms:
                    old, now = (_gained(x, norms, own_heads, of) for x, of in ((old, kept), (now, self._parameters)))
                factors += [site.per_query_head(x) for x in (old, now - old)]
                own = own_rows(chains)
                news, olds = ([_rows(part, of[part.parameter]) for part in own] for of in (self._parameters, kept))
                moved = _length([new - was for new, was in zip(news, olds)], site)
                found[site.name, f"{side}_update_ratio"] = moved / _length(olds, site)
            for name, product in zip(("delta2", "delta3"), step_products(*factors)):
                products.setdefault(tuple(product.shape[1:]), []).append((site.name, name, product))
        for alike in products.values():
            most = max(1, _ENTRIES // max(1, alike[0][2].numel()))
            for some in (alike[i : i + most] for i in range(0, len(alike), most)):
                spectra = spectrum(torch.cat([product for _, _, product in some]))
                counts = [len(product) for _, _, product in some]
                for of, values in spectra._asdict().items():
                    for (site_name, name, _), x in zip(some, values.split(counts)):
                        found[site_name, f"{name}_{of}"] = x
        return found


def _gained(x: Tensor, norms: tuple[NormGain, ...], heads: int, of: Mapping[str, Tensor]) -> Tensor:
    """Multiplies the rows of weights [n r m] by the gains of the norm behind them, as diagonal matrices.

    If the gains of the norm do not correspond to these rows, the rows are unchanged.
    """
    gains = torch.ones(heads, x.shape[1], dtype=x.dtype, device=x.device)
    for norm in norms:
        if norm.parameter is None or norm.index is None or norm.index.shape[1] not in (1, x.shape[1]):
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
    norms = [site.per_query_head(torch.linalg.vector_norm(x, dim=(1, 2))) for x in parts]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _sides(site: AttentionSite) -> tuple[tuple[str, list[Chain]], tuple[str, list[Chain]]]:
    return ("query", [t.query for t in site.terms]), ("key", [t.key for t in site.terms])


def _is_plain(site: AttentionSite) -> bool:
    """True if q and k are each the product of one weight with the input."""
    return len(site.terms) == 1 and len(site.terms[0].query) == len(site.terms[0].key) == 1


def _lines(part: HeadSlice, x: Tensor) -> int:
    """The number of rows or columns of a weight."""
    return x.shape[0] if part.axis == 0 else x.shape[1:].numel()


def _eps_by_parameter(optimizer: torch.optim.Optimizer | None) -> Mapping[int, float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): group["eps"] for group in groups if isinstance(group.get("eps"), float) for p in group["params"]}
