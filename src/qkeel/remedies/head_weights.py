"""Query and key weights of heads as an optimizer stores them: shards, mixed precision and replaced weights."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import NonFiniteError, RefusedError
from qkeel.functional.norms import wide
from qkeel.patching.autograd import is_wrapper
from qkeel.remedies.base import Target, unconfirmed, where
from qkeel.remedies.head_rows import TensorViews
from qkeel.remedies.optimizer_trials import check_steps
from qkeel.sites.site import HeadSlice

LOW_PRECISION = (torch.bfloat16, torch.float16)


def slice_name(s: HeadSlice) -> str:
    """Returns the name of a slice in a saved state, whichever other slices there are: the parameter, the first row, and
    the number of heads with the rows of each, with a checksum of the rows if they do not follow one another.

    >>> slice_name(HeadSlice(parameter="qkv", axis=0, index=torch.arange(8, 16).view(4, 2)))
    'qkv:8/4x2'
    >>> slice_name(HeadSlice(parameter="qkv", axis=0, index=torch.arange(8, 16).view(2, 4).mT))
    'qkv:8/4x2-7965d220'
    """
    (heads, rows), first = s.index.shape, int(s.index.min())
    indices = s.index.flatten().tolist()
    is_dense = indices == [*range(first, first + heads * rows)]
    layout = "" if is_dense else f"-{zlib.crc32(repr(indices).encode()):08x}"
    return f"{s.parameter}:{first}/{heads}x{rows}{layout}"


@final
class HeadWeights:
    """The query and key weights of a target, each part once, with the tensors that its optimizers update.

    `slices[i]` says which part of `parameters[i]` belongs to each head. One parameter may appear in several entries (as
    in a fused projection), and one entry in several sites (as in tied layers). `tensors[i]` is what an optimizer
    updates: the weight, or None if none does. `holders[i]` is that optimizer; the first if it is
    frozen.

    Args:
        target: the model, its sites and its optimizers.
        remedy: the remedy's name, for errors.
        extras: further slices, such as biases, which the optimizers need not hold.

    Raises:
        RefusedError: the optimizers do not update every weight that is trained, or do not update any weight.
    """

    def __init__(
        self,
        target: Target,
        remedy: str,
        extras: Iterable[HeadSlice] = (),
    ) -> None:
        self.all_optimizers = optimizers = target.need_optimizers(remedy)
        self.slices: list[HeadSlice] = []
        self.parameters: list[nn.Parameter] = []
        self._entries: dict[int, int] = {}
        for s in target.logit_slices():
            self._enter(target, s)
        n = len(self.slices)
        for s in extras:
            self._enter(target, s)
        #: Each weight, or None if no optimizer holds it.
        self.tensors: list[Tensor | None] = []
        self.holders: list[Optimizer] = []
        for p in self.parameters:
            holder, tensor = held_first(optimizers, p)
            self.tensors.append(tensor)
            self.holders.append(holder)
        for i in range(n):
            is_frozen = not self.parameters[i].requires_grad
            if self.tensors[i] is None and not (
                is_frozen and any(tensor is not None for tensor in self.tensors[:n])
            ):
                kinds = ", ".join(type(x).__name__ for x in optimizers)
                raise RefusedError(
                    f"{remedy} acts on steps of {self.slices[i].parameter}, which no optimizer that was given ({kinds}) "
                    "holds; pass the optimizer that does, or a list of all. An optimizer of copies of the weights does "
                    "not: use float32 weights under autocast"
                )
        self.counts = [s.n for s in self.slices]
        #: The optimizers that hold any of these, each once.
        self.optimizers = [
            o for o in optimizers if any(t is not None for t in self.held_by(o))
        ]

    def held_by(self, optimizer: Optimizer) -> list[Tensor | None]:
        """Returns the tensors that this optimizer updates, and None in place of others."""
        return [
            tensor if holder is optimizer else None
            for tensor, holder in zip(self.tensors, self.holders)
        ]

    def check_steps(self, remedy: str, *, is_scaled: bool = False) -> None:
        """Raises RefusedError unless a remedy may change the steps of these weights; see the function."""
        for optimizer in self.optimizers:
            check_steps(optimizer, remedy, self.held_by(optimizer), is_scaled=is_scaled)

    def _enter(self, target: Target, s: HeadSlice) -> None:
        parameter = target.parameter(s.parameter)
        for i, (p, entered) in enumerate(zip(self.parameters, self.slices)):
            if p is parameter and entered.axis != s.axis:
                raise RefusedError(
                    f"{s.parameter} has heads in its rows and in its columns; no factor fits both"
                )
            if p is parameter and entered.same(s):
                self._entries[id(s)] = i
                return
        self._entries[id(s)] = len(self.slices)
        self.slices.append(s)
        self.parameters.append(parameter)

    def entry(self, s: HeadSlice) -> int:
        """Returns the index of the entry for a slice of one of the target's sites."""
        return self._entries[id(s)]

    def check_precision(self, remedy: str, does: str) -> None:
        """Raises RefusedError if the precision of a weight would round away what a remedy does."""
        for s, tensor in zip(self.slices, self.tensors):
            if tensor is not None and tensor.dtype in LOW_PRECISION:
                raise RefusedError(
                    f"{remedy} {does}, which {tensor.dtype} weights round away ({s.parameter}); keep float32 weights "
                    "and use autocast"
                )

    def row(self, value: float) -> Tensor:
        """Returns one value for every head of every weight [h], where the first weight is."""
        dtype = functools.reduce(
            torch.promote_types, (p.dtype for p in self.parameters), torch.float32
        )
        return torch.full(
            (sum(self.counts),), value, dtype=dtype, device=self.parameters[0].device
        )

    def indices(self) -> list[Tensor]:
        """Returns the indices [n 1] of each weight's heads in such a row."""
        return list(torch.arange(sum(self.counts))[:, None].split(self.counts))


def check_weights(target: Target, remedy: str, *, per_head: bool) -> None:
    """Raises an error unless the query and key weights have values and these are finite.

    If the weights are changed `per_head`, they must also have plain rows, and it must be confirmed that the logits of
    these heads are computed from them."""
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = target.parameter(name)
        if p.is_meta:
            raise RefusedError(
                f"{name} is on the meta device; give it values before {remedy} is applied, after fully_shard if that "
                "splits the model"
            )
        is_plain = p.is_floating_point() and not is_wrapper(dist.local(p))
        if per_head and not is_plain:
            raise RefusedError(
                f"{name} is quantised ({type(p).__name__} of {p.dtype}), so the rows of its heads cannot be read or "
                f"scaled; apply {remedy} to plain floating-point weights"
            )
        if per_head:
            # FSDP2 and tensor parallelism give each process a block of a DTensor. Other ways to split are refused, and
            # the flat copies of ZeRO and FSDP1 are not recognised as copies.
            dist.local_block(name, p)
        if is_plain and not bool(torch.isfinite(dist.local(p)).all()):
            raise NonFiniteError(
                f"{name} holds NaN or infinity before {remedy} is applied; load finite weights"
            )
    for site in target.sites if per_head else ():
        if site.unverified:
            raise RefusedError(f"{remedy} at {where(site)}: {unconfirmed(site)}")


# Mixed precision: float32 copies in the state of an optimizer, and steps that a GradScaler skips.


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Returns the tensor that a GradScaler passes to a fused optimizer, which is nonzero if the step will be skipped.

    The hooks of a skipped step run all the same."""
    infinite = vars(optimizer).get("found_inf")
    return None if infinite is None else torch.as_tensor(infinite)


def held_first(
    optimizers: Sequence[Optimizer], weight: Tensor
) -> tuple[Optimizer, Tensor | None]:
    """Returns the first optimizer that holds a weight, with the weight; the first of all and None if none holds it."""
    for optimizer in optimizers:
        if any(p is weight for g in optimizer.param_groups for p in g["params"]):
            return optimizer, weight
    return optimizers[0], None


def copies_in_state(optimizer: Optimizer, weight: Tensor) -> tuple[str, ...]:
    """Returns the names of the float32 copies of a low-precision weight in the optimizer's state."""
    state: dict[str, object] = optimizer.state.get(weight, {})
    return tuple(
        name
        for name, x in state.items()
        if isinstance(x, Tensor) and _rounds_to(x, weight)
    )


def _rounds_to(copy: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype in LOW_PRECISION
        and copy.dtype == torch.float32
        and copy.shape == weight.shape
        and copy.device == weight.device
        and not (dist.is_split(copy) or dist.is_split(weight))
        and torch.equal(copy.detach().to(weight.dtype), weight.detach())
    )


@final
class HeadNorms:
    """Computes the Frobenius norms of all heads of all weights, in one row [h] ordered by weight.

    ‖W^h‖² of a weight that is split across processes is the sum of the squares on all of them, in one collective.
    """

    def __init__(self, slices: Sequence[HeadSlice], tensors: Sequence[Tensor]) -> None:
        self._slices, self._tensors = slices, tensors
        #: Of each split weight, the head of each row of this process's part; n, the number of heads, if no head owns it.
        self._owners: dict[int, Tensor] = {}
        blocks = [dist.local_block(s.parameter, t) for s, t in zip(slices, tensors)]
        for i, (s, tensor, block) in enumerate(zip(slices, tensors, blocks)):
            if block is not None:
                heads = torch.arange(s.n)
                owners = s.lines(heads, tensor.shape[s.axis], nobody=s.n)
                self._owners[i] = owners[slice(*block.spans[s.axis])]
        self._sums = dist.PartialSums(blocks)
        self._whole = [i for i in range(len(tensors)) if i not in self._owners]
        #: The heads [n r m] of the weights that are whole, or the weights where heads are no view of them.
        self._views = TensorViews(
            [tensors[i] for i in self._whole],
            self._view,
        )

    def _view(self, index: int, tensor: Tensor) -> Tensor:
        s = self._slices[self._whole[index]]
        return tensor if s.grid is None else s.heads(tensor)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        device = self._tensors[0].device
        norms: dict[int, Tensor] = {}
        for i, view in zip(self._whole, self._views()):
            s = self._slices[i]
            heads = view if s.grid is not None else s.heads(view)
            of_heads = torch.linalg.vector_norm(heads, dim=(-2, -1))
            norms[i] = of_heads if of_heads.device == device else of_heads.to(device)
        squares: list[Tensor] = []
        for i, owners in self._owners.items():
            s = self._slices[i]
            rows = s.rows_of(dist.local(self._tensors[i]))
            of_rows = rows.to(wide(rows.dtype)).square().sum(1)
            owners = self._owners[i] = owners.to(of_rows.device)
            # The number behind the last head gets the rows that belong to none, and is dropped.
            of_heads = of_rows.new_zeros(s.n + 1).index_add_(0, owners, of_rows)[:-1]
            # Of processes that hold the same part, one sends it.
            squares.append((of_heads * self._sums.counted[i]).to(device))
        if squares:
            sums = self._sums.add_up(torch.cat(squares)).sqrt()
            norms.update(zip(self._owners, sums.split([len(x) for x in squares])))
        return torch.cat([norms[i] for i in range(len(self._tensors))])
