"""Query and key weights of heads as an optimizer stores them: shards, mixed precision and replaced weights."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.errors import InvalidValueError, NonFiniteError, RefusedError, check_known
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.modes import submodules_of
from qkeel.patching.optimizers import runs_step_hooks
from qkeel.remedies.base import HeadsBySite, Remedy, Target, unconfirmed, where
from qkeel.remedies.head_rows import WeightNorm, frobenius_norm
from qkeel.remedies.optimizer_trials import optimizers_inside
from qkeel.sites.find import is_normed

# Weights that are split across processes or quantised: their norms per head over all processes, and what is refused.


def slice_name(s: HeadSlice) -> str:
    """Returns the name of a slice in a saved state, whichever other slices there are: the parameter, the first row, and
    the number of heads with the rows of each, with a checksum of the rows if they do not follow one another.

    >>> slice_name(HeadSlice(parameter="qkv", axis=0, index=torch.arange(8, 16).view(4, 2)))
    'qkv:8/4x2'
    >>> slice_name(HeadSlice(parameter="qkv", axis=0, index=torch.arange(8, 16).view(2, 4).mT))
    'qkv:8/4x2-7965d220'
    """
    (heads, rows), first = s.index.shape, int(s.index.min())
    places = s.index.flatten().tolist()
    layout = (
        ""
        if places == [*range(first, first + heads * rows)]
        else f"-{zlib.crc32(repr(places).encode()):08x}"
    )
    return f"{s.parameter}:{first}/{heads}x{rows}{layout}"


def has_plain_rows(weight: Tensor) -> bool:
    """True if the rows of a weight, or of this process's part of it, can be read and scaled directly."""
    return weight.is_floating_point() and not is_wrapper(dist.local(weight))


def check_plain_rows(name: str, weight: Tensor, remedy: str) -> None:
    """Raises RefusedError for a quantised weight, and for a weight that is split across processes in an unrecognised
    way.

    FSDP2 and tensor parallelism store a weight as a DTensor, of which each process has a block. The flat copies of ZeRO
    and FSDP1 are not recognised as copies.
    """
    if not has_plain_rows(weight):
        raise RefusedError(
            f"{name} is quantised ({type(weight).__name__} of {weight.dtype}), so the rows of its heads cannot be read "
            f"or scaled; apply {remedy} to plain floating-point weights"
        )
    dist.local_block(name, weight)


def check_whole(name: str, weight: Tensor, remedy: str) -> None:
    """Raises RefusedError for a weight that is split across processes, if a remedy needs complete heads."""
    if dist.is_split(weight):
        raise RefusedError(
            f"{name} is split across processes, and {remedy} needs all rows and columns of a head at once; use lalr or "
            "qk_clip, which work with parts, or DistributedDataParallel, which keeps weights whole"
        )


@final
class SplitNorms:
    """Computes the Frobenius norms per head of all weights that are split across processes, in one collective.

    ‖W^h‖² is the sum of the squares of the entries on all processes.
    """

    def __init__(
        self,
        slices: Sequence[HeadSlice],
        tensors: Sequence[Tensor],
        measure: WeightNorm | None,
    ) -> None:
        blocks = list(
            dist.local_blocks([(s.parameter, t) for s, t in zip(slices, tensors)])
        )
        self._slices, self._tensors = slices, tensors
        self._sums = dist.PartialSums(blocks)
        # The head of each row that this process holds; rows of no head get the index after the last head.
        self._heads = {
            i: s.lines(torch.arange(s.n), t.shape[s.axis], nobody=s.n)[
                slice(*block.spans[s.axis])
            ]
            for i, (s, t, block) in enumerate(zip(slices, tensors, blocks))
            if block is not None
        }
        if self._heads and measure not in (None, frobenius_norm):
            raise RefusedError(
                f"{slices[next(iter(self._heads))].parameter} is split across processes, and a spectral norm cannot be "
                "computed from the parts; use norm=frobenius"
            )
        self._split = torch.cat(
            [torch.full((s.n,), i in self._heads) for i, s in enumerate(slices)]
        )
        self._counted = torch.cat(
            [torch.full((s.n,), float(c)) for s, c in zip(slices, self._sums.counted)]
        )

    def __contains__(self, i: int) -> bool:
        return i in self._heads

    def squares(self, i: int) -> Tensor:
        """Returns the sum of squares per head [n] over this process's part of a weight."""
        rows = self._slices[i].rows_of(dist.local(self._tensors[i]).detach())
        squares_of_rows = rows.to(wide(rows.dtype)).square().sum(1)
        heads = self._heads[i] = self._heads[i].to(squares_of_rows.device)
        return squares_of_rows.new_zeros(self._slices[i].n + 1).index_add_(
            0, heads, squares_of_rows
        )[:-1]

    def norms(self, row: Tensor) -> Tensor:
        """Replaces the sums of squares of split weights in a row of norms with the norms over all processes."""
        if not self._heads:
            return row
        self._split, self._counted = self._split.to(row.device), self._counted.to(row)
        summed = self._sums.add_up(row * self._counted)
        return torch.where(self._split, summed.sqrt(), row)


# Mixed precision: float32 copies that an optimizer updates in place of a weight, and steps that a GradScaler skips.

LOW_PRECISION = (torch.bfloat16, torch.float16)


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that takes the steps, inside any wrappers that run no hooks, such as accelerate's.

    A wrapper that runs hooks and calls another optimizer inside its own step is itself returned, since it may do
    more than that."""
    while not runs_step_hooks(optimizer):
        inner = optimizers_inside(optimizer)
        if len(inner) != 1:
            break
        optimizer = inner[0]
    return optimizer


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Returns the tensor that a GradScaler passes to a fused optimizer, which is nonzero if the step will be skipped.

    The hooks of a skipped step run all the same."""
    return vars(optimizer).get("found_inf")


def stepped(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """Returns the tensor in the optimizer's groups that becomes the weight: the weight itself or its only float32 copy.

    For training in low precision, apex and Megatron give the optimizer float32 copies, which are copied back after each
    step. Such a copy is recognised by its shape, its device, and by values that round to the weight's bits.
    """
    tensors: list[Tensor] = [
        p for group in optimizer.param_groups for p in group["params"]
    ]
    if any(p is weight for p in tensors):
        return weight
    copies = [p for p in tensors if _rounds_to(p, weight)]
    return copies[0] if len(copies) == 1 else None


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


def _logit_weights(target: Target) -> dict[str, None]:
    return dict.fromkeys(s.parameter for s in target.logit_slices())


# The query and key weights of a model by head, without repetition.


def check_weights(target: Target, remedy: str, *, per_head: bool) -> None:
    """Raises an error unless the query and key weights have values and these are finite.

    If the weights are changed `per_head`, it must also be confirmed that the logits of these heads are computed from
    them."""
    for name in _logit_weights(target):
        p = target.parameter(name)
        if p.is_meta:
            raise RefusedError(
                f"{name} is on the meta device; give it values before {remedy} is applied, after fully_shard if that "
                "splits the model"
            )
        if has_plain_rows(p) and not bool(torch.isfinite(dist.local(p)).all()):
            raise NonFiniteError(
                f"{name} holds NaN or infinity before {remedy} is applied; load finite weights"
            )
    for site in target.sites if per_head else ():
        if site.unverified:
            raise RefusedError(f"{remedy} at {where(site)}: {unconfirmed(site)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """The query and key weights of a target, without repetition.

    `slices[i]` says which part of `parameters[i]` belongs to each head. One parameter may appear in several entries (as
    in a fused projection), and one entry in several sites (as in tied layers). `place` finds the entry of a site's
    slice.
    """

    slices: list[HeadSlice]
    parameters: list[nn.Parameter]
    _entry: dict[int, int]

    @classmethod
    def of(cls, target: Target) -> HeadWeights:
        """Returns all weights from which the logits of the target's sites are computed."""
        slices: list[HeadSlice] = []
        parameters: list[nn.Parameter] = []
        entry: dict[int, int] = {}
        for s in target.logit_slices():
            parameter = target.parameter(s.parameter)
            if any(
                p is parameter and known_slice.axis != s.axis
                for p, known_slice in zip(parameters, slices)
            ):
                raise RefusedError(
                    f"{s.parameter} has heads in its rows and in its columns; no factor fits both"
                )
            equal_entries = (
                i
                for i, p in enumerate(parameters)
                if p is parameter and slices[i].same(s)
            )
            i = next(equal_entries, len(slices))
            if i == len(slices):
                slices.append(s)
                parameters.append(parameter)
            entry[id(s)] = i
        return cls(slices=slices, parameters=parameters, _entry=entry)

    @property
    def names(self) -> list[str]:
        """The name of each entry's parameter."""
        return [s.parameter for s in self.slices]

    def followed_by(self, target: Target, others: Sequence[HeadSlice]) -> HeadWeights:
        """Returns these entries followed by entries for other slices, such as biases."""
        slices, parameters = (
            [*self.slices, *others],
            [target.parameter(s.parameter) for s in others],
        )
        return HeadWeights(
            slices=slices,
            parameters=[*self.parameters, *parameters],
            _entry=self._entry,
        )

    @property
    def counts(self) -> list[int]:
        """The number of heads of each entry."""
        return [s.n for s in self.slices]

    def place(self, s: HeadSlice) -> int:
        """Returns the index of the entry for a slice of one of the target's sites."""
        return self._entry[id(s)]

    def of_optimizer(self, optimizer: Optimizer, remedy: str) -> list[Tensor | None]:
        """Returns the tensor that the optimizer updates for each entry: the weight or its float32 copy; None if frozen.

        Raises:
            RefusedError: the optimizer does not update every weight that is trained, or does not update any weight.
        """
        for s, p in zip(self.slices, self.parameters):
            check_plain_rows(s.parameter, p, remedy)
        tensors = [stepped(optimizer, p) for p in self.parameters]
        for s, p, tensor in zip(self.slices, self.parameters, tensors):
            if tensor is None and (
                p.requires_grad or not any(t is not None for t in tensors)
            ):
                raise RefusedError(
                    f"{remedy} acts on steps of {s.parameter}, which this {type(optimizer).__name__} does not hold; "
                    f"pass the optimizer that does{self._unknown_copies(optimizer)}"
                )
        return tensors

    def in_full_precision(
        self, optimizer: Optimizer, remedy: str, does: str
    ) -> list[Tensor | None]:
        """Returns `of_optimizer`, but refuses weights whose precision would round away what the remedy `does`."""
        tensors = self.of_optimizer(optimizer, remedy)
        for s, p in zip(self.slices, tensors):
            if p is not None and p.dtype in LOW_PRECISION:
                raise RefusedError(
                    f"{remedy} {does}, which {p.dtype} weights round away ({s.parameter}); keep float32 weights and "
                    "use autocast"
                )
        return tensors

    def _unknown_copies(self, optimizer: Optimizer) -> str:
        """Returns a hint if the optimizer updates tensors that may be float32 copies in some other form."""
        shapes = {p.shape for p in self.parameters}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.dtype in LOW_PRECISION for p in self.parameters) or all(
            p.shape in shapes for p in held
        ):
            return ""
        return (
            ". Float32 copies are recognised by their shape and values, but flattened, sharded or stale copies are "
            "not: copy the weights over first, or use float32 weights under autocast"
        )


# Remedies that change optimizer steps, and the sites that they refuse.


UNDOES_MATCHED_STEPS = Refusal(
    "lalr raises the rates as a clip shrinks the weights, which undoes matched steps",
    "use one of the two, or steps=full",
)


# How the weight in use follows the stored one, if a hook or a parametrization computes it, from close to not at all: it
# is the same; it is a multiple; its rows are scaled along with the stored rows, as under a pruning mask; anything else.
WeightInUse = Literal["is", "is a multiple of", "is scaled with", "is not scaled with"]
WEIGHT_IN_USE: tuple[WeightInUse, ...] = get_args(WeightInUse)


class StepRemedy(Remedy):
    """A remedy that works through hooks on the optimizer, so that a copy of the model does not have it.

    It needs to know which rows of which weights belong to the heads of a site."""

    on_steps: ClassVar[bool] = True
    weight_in_use: ClassVar[WeightInUse] = (
        "is scaled with"  # what the remedy needs, so that it does not act in vain
    )
    takes_sigma_reparam: ClassVar[bool] = (
        False  # whether it is meant for the stored weight of sigma_reparam
    )
    # Why the remedy is refused if q or k is normed or if a weight is computed from another; "" if it is not refused.
    if_normed: ClassVar[tuple[str, str]] = ("", "")  # the reason and what to do instead
    if_computed: ClassVar[str] = ""

    __slots__ = ()

    def holds(self, site: AttentionSite) -> Refusal | None:
        if self.if_normed[0] and is_normed(site):
            return Refusal(*self.if_normed)
        if self.if_normed[0] and site.unscaled:
            return Refusal(
                site.unscaled, "use qk_lr, or softcap, which need no such product"
            )
        return (
            refuse_computed_weight(site, self.if_computed) if self.if_computed else None
        )

    def supports(self, site: AttentionSite) -> Refusal | None:
        return self.holds(site) or refuse_unknown_weights(site)


def sites_of(
    heads: HeadsBySite | None, sites: Sequence[AttentionSite], remedy: str
) -> list[AttentionSite]:
    """Returns the sites that `heads` names, or all sites if it is None.

    Raises:
        UnknownNameError: the model has no such site.
        InvalidValueError: a site has no such head.
    """
    if heads is None:
        return list(sites)
    sites_by_name = {site.name: site for site in sites}
    for name, head_numbers in heads:
        check_known(f"site of {remedy}", name, sites_by_name)
        if head_numbers and max(head_numbers) >= sites_by_name[name].n_heads:
            raise InvalidValueError(
                f"expected heads 0 to {sites_by_name[name].n_heads - 1} of {where(sites_by_name[name])} for {remedy}, "
                f"got {max(head_numbers)}"
            )
    return [site for site in sites if site.name in dict(heads)]


def refuse_unknown_weights(site: AttentionSite) -> Refusal | None:
    """Returns the refusal for a site whose weights are unknown, or None if they are known."""
    if site.terms:
        return None
    return Refusal(
        f"it is not known which rows of which weights belong to its heads: {site.why or 'no reason was reported'}",
        "apply the remedy to a part of the model without this attention; if fully_shard or tensor parallelism splits "
        "the model, find the sites before the split and pass them: apply(..., sites=qkeel.find_sites(model, batch))",
    )


def refuse_computed_weight(site: AttentionSite, consequence: str) -> Refusal | None:
    """Returns the refusal for a site whose logits use a weight that is computed from the stored weight.

    Parametrizations are recognised by the weight's name. DoRA divides by a norm of its weights through which no
    gradient flows, so it can be recognised only by its learned magnitudes.
    """
    dora = any(
        submodules_of(module).get("lora_magnitude_vector")
        and any(f".{name}." in s.parameter for s in (*site.query, *site.key))
        for name, module in site.module.named_modules()
    )
    parametrized = any(
        "parametrizations." in s.parameter for s in (*site.query, *site.key)
    )
    if not (
        dora or parametrized
    ):  # what older hooks compute is tried: see `check_weights_in_use`
        return None
    return Refusal(
        f"the weight on the logit path is computed from another weight, so {consequence}",
        "use one of the two",
    )
