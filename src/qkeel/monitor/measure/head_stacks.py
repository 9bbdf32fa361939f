"""The heads of many weights in few operations: those of one shape are one tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite
from qkeel.kernels.triton import available
from qkeel.monitor.processes.share import Key, Row

STACKED = 128 * 2**20  # bytes of a stack, which is made when backward has freed the activations
_K = TypeVar("_K", bound=Hashable)
UNSTACKED = frozenset({"cpu"})  # types of devices where an operation costs less than a copy


Found = list[tuple[list[int], Tensor]]  # numbers of weights, and what was found of all of their heads


def norms_and_grams(heads: Sequence[Tensor], squared: int) -> tuple[Found, Found]:
    """The norms [Σn] of the heads [n r m] of all weights, and W Wᵀ [Σn r r] of those of the first `squared` weights,
    in float32 or wider.

    Triton reads heads where they lie: two launches and the copy of their addresses to the device for the norms of all
    weights of a dtype, one launch for the products of all of one r. Other heads are read in `stacks`.
    """
    norms, grams, rest = Found(), Found(), list[int]()
    if all([x.device.type in UNSTACKED for x in heads]):  # noqa: C419
        kinds: dict[torch.dtype, torch.dtype] = {}
        for i, x in enumerate(heads):  # no call of Python's for each: there are some hundred in a step
            kind = kinds.get(x.dtype) or kinds.setdefault(x.dtype, wide(x.dtype))
            norms.append(([i], torch.linalg.vector_norm(x, dim=(1, 2), dtype=kind)))
            if i < squared:
                rows = x if x.dtype == kind else x.to(kind)
                grams.append(([i], rows @ rows.mT))
        return norms, grams
    for _, own in _grouped(range(len(heads)), lambda i: (heads[i].dtype, heads[i].device)):
        own.sort(key=lambda i: (i >= squared, heads[i].shape[1]))  # heads of one r follow each other
        views = [heads[i] for i in own]
        if not available.takes_heads(views):
            rest += own
            continue
        table, first = available.head_table(views), 0
        norms.append((own, table.norms()))
        for r, alike in _grouped([i for i in own if i < squared], lambda i: heads[i].shape[1]):
            n = sum(len(heads[i]) for i in alike)
            grams.append((alike, table.grams(first, n, r)))
            first += n
    for places, stack in stacks([heads[i] for i in rest]):
        own = [rest[place] for place in places]
        norms.append((own, torch.linalg.vector_norm(stack, dim=(1, 2), dtype=wide(stack.dtype))))
        if some := [i for i in own if i < squared]:  # they come first
            rows = stack[: sum(len(heads[i]) for i in some)].to(wide(stack.dtype))
            grams.append((some, rows @ rows.mT))
    return norms, grams


def stacks(heads: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """The heads [n r m] of weights one after the other, [Σn r m], and the numbers of the weights that are in it.

    A stack has one shape, dtype and device. It is a copy of no more than STACKED bytes in float32; a weight that is
    alone in one is taken as it is, as all are on UNSTACKED.
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
    """Tensors [n …] one after the other, and what each of their sources has among the numbers of all."""

    def __init__(self) -> None:
        self.sources: dict[Hashable, range] = {}
        self._parts: list[Tensor] = []
        self._length = 0

    def add(self, x: Tensor, lengths: Iterable[tuple[Hashable, int]]) -> None:
        """One more tensor, that holds so many numbers of each of these sources, in this order."""
        self._parts.append(x)
        for source, n in lengths:
            self.sources[source] = range(self._length, self._length + n)
            self._length += n

    def at(self, source: Hashable, site: AttentionSite) -> Tensor:
        """The places [h] of what each query head of the site uses of a source."""
        mine = self.sources[source]
        return mine.start + site.used(len(mine))

    def whole(self) -> Tensor:
        """All of it on the device of the first, in the widest of their dtypes."""
        return joined(self._parts)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other, on the device of the first, in the widest of their dtypes."""
    first = parts[0]
    if all([x.dtype == first.dtype and x.device == first.device for x in parts]):  # noqa: C419
        return _one(parts)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in parts])
    return _one([x.to(first.device, dtype) for x in parts])


Place = tuple[Sequence[Tensor], float | Tensor]  # the places [h] of each part that counts, and a factor, one or [h]


@final
class Places:
    """The places of each query head's numbers in a tensor [n …], by name; no step makes the host wait for them.

    A number with several places is the root of the sum of their squares, times the factor.
    """

    def __init__(self, alone: Mapping[Key, Place], pairs: Mapping[Key, tuple[Place, Place]], like: Tensor) -> None:
        """Takes names that have numbers of their own, those whose numbers two make, and the tensor or one like it."""
        self._alone, single = _by_name({key: len(place[0][0]) for key, place in alone.items()})
        self._pairs, double = _by_name({key: len(place[0][0][0]) for key, place in pairs.items()})
        self._n_alone = sum(row.total for row in self._alone)
        wanted = [alone[key] for key in single] + [pairs[key][i] for i in (0, 1) for key in double]
        rows = [
            torch.cat([parts[i] if i < len(parts) else torch.full_like(parts[0], len(like)) for parts, _ in wanted])
            for i in range(max(len(parts) for parts, _ in wanted))
        ]
        self._index = torch.stack(rows).to(like.device)
        factors = torch.cat([torch.as_tensor(f, dtype=like.dtype).expand(len(parts[0])) for parts, f in wanted])
        self._factors = None if bool((factors == 1).all()) else factors.to(like.device)

    def taken(self, x: Tensor, made: Callable[[Tensor, Tensor], Tensor]) -> list[Row]:
        """The numbers, from the tensor as it is now; `made` of both of a pair, all pairs at once."""
        if len(self._index) == 1:
            found = x[self._index[0]]
        else:
            found = torch.linalg.vector_norm(torch.nn.functional.pad(x, (0, 1))[self._index], dim=0)
        found = found if self._factors is None else found * self._factors
        alone, pairs = found.tensor_split([self._n_alone])
        rows = [row.of(part) for row, part in zip(self._alone, alone.split([row.total for row in self._alone]))]
        if self._pairs:
            parts = made(*pairs.chunk(2)).split([row.total for row in self._pairs])
            rows += [row.of(part) for row, part in zip(self._pairs, parts)]
        return rows


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A row without its values."""

    name: str
    sites: tuple[str, ...]
    counts: tuple[int, ...]
    total: int

    def of(self, values: Tensor) -> Row:
        return Row(name=self.name, sites=self.sites, counts=self.counts, values=values)


def _by_name(counts: Mapping[Key, int]) -> tuple[list[_Row], list[Key]]:
    """The numbers of one name as a row each, and all keys in the order of the rows."""
    found: dict[str, dict[str, int]] = {}
    for (site, name), n in counts.items():
        found.setdefault(name, {})[site] = n
    rows = [_Row(name, tuple(of), tuple(of.values()), sum(of.values())) for name, of in found.items()]
    return rows, [(site, row.name) for row in rows for site in row.sites]


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
