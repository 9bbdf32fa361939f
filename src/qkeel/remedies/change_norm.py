"""Inserts norms into any model: after projections of q, k and v, in the attention call, and in residual branches.

Shapes: b batch, t tokens, h heads, d dimensions per head.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel import distributed as dist
from qkeel.capture.example import tensors
from qkeel.errors import RefusedError, check_known
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.nn.decoder import Block, NormOrder
from qkeel.patching.autograd import mark_as_norm
from qkeel.patching.forward import InstanceForward, put_in_place
from qkeel.patching.modes import parameters_of, submodules_of
from qkeel.remedies.base import (
    Args,
    Kwargs,
    Target,
    evaluating,
    module_name,
    unconfirmed,
    where,
)
from qkeel.remedies.change_spec import (
    ChangeSpec,
    add_submodules,
    base_spec,
    exchange_calls,
    number,
    refuse_heads,
    refuse_norm,
    refuse_scale,
    refuse_unseen,
)
from qkeel.remedies.processes import agreed
from qkeel.sites.find import is_normed
from qkeel.sites.trace import ModelTrace, OperandNorms, seen
from qkeel.spec import AttentionSpec, Fixed, L2Norm, LayerNorm, RMSNorm
from qkeel.spec.logits import Scale
from qkeel.spec.norm import GainKind, GainNorm, Norm, NormedPart, On, Over
from qkeel.spec.slot import ParameterSizes, Params

# The pre-norm blocks of a model, recognised by their activations, and norms at the end of their branches.

ModuleOutput = Tensor | tuple[Tensor, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A branch x + F(N(x)) of a block, with the names of the children F and N and of the norm to add after F."""

    block: nn.Module
    name: str  # the block's name in the model
    function: str
    norm: str
    post: str
    width: int

    def post_norm(self, norm: nn.Module) -> Handle:
        """Changes the branch to x + norm(F(...)). The norm becomes the block's child `post`."""
        if isinstance(self.block, Block):
            return swap(self.block, self.post, norm)
        hook = self.block.get_submodule(self.function).register_forward_hook(
            functools.partial(_normed, norm)
        )
        self.block.register_module(self.post, norm)
        return compose(
            [
                Handle(
                    functools.partial(submodules_of(self.block).__delitem__, self.post)
                ),
                Handle(hook.remove),
            ]
        )


def swap(block: nn.Module, name: str, module: nn.Module) -> Handle:
    """Replaces a child of a block and returns a handle that restores it."""
    old = submodules_of(block)[name]
    submodules_of(block)[name] = module
    return Handle(lambda: submodules_of(block).update({name: old}))


def pre_norm_branches(target: Target, remedy: str) -> list[Branch]:
    """Returns the branches of the block around each site, if the block computes x + A(N₁(x)), then x + M(N₂(x)).

    qkeel's own blocks are recognised by type. Other blocks are compared with the formula in one evaluation pass on the
    example.

    Raises:
        RefusedError: a site's block has a different form. The message names the site and the expected form.
    """
    named_blocks = [
        (name, m) for name, m in target.model.named_modules() if isinstance(m, Block)
    ]
    blocks = {
        id(branch): (name, m)
        for name, m in named_blocks
        for branch in (m.attention, m.cross_attention)
        if branch
    }
    foreign = [site for site in target.sites if id(site.module) not in blocks]
    observed = _observed(target, foreign) if foreign and any(target.batch) else {}
    branches: dict[tuple[str, str], Branch] = {}
    for site in target.sites:
        around = blocks.get(id(site.module))
        site_branches = (
            _own(*around, site, remedy)
            if around is not None
            else _fitting(site, observed)
        )
        if site_branches is None:
            raise RefusedError(
                f"{remedy} at {where(site)}: expected a block that computes x + A(N₁(x)), then x + M(N₂(x)), "
                "with A, M and both norms as direct children, but found none around this attention (post-norm, "
                "parallel and fused blocks differ; for blocks from other libraries, pass a batch: "
                "apply(..., batch=batch)); build the model with the norm order you want"
            )
        branches.update({(b.name, b.function): b for b in site_branches})
    return list(branches.values())


def _own(
    name: str, block: Block, site: AttentionSite, remedy: str
) -> tuple[Branch, ...]:
    if block.norm_order != "pre":
        raise RefusedError(
            f"{remedy} at {site.name}: it re-orders pre-norm blocks, but {name or 'this block'} is "
            f"{block.norm_order}-norm; keep that order, or build the model with pre-norm blocks"
        )
    width = next(block.mlp_norm.parameters()).shape[-1]

    def branch(function: str) -> Branch:
        norm, post = f"{function}_norm", f"{function}_post_norm"
        return Branch(
            block=block, name=name, function=function, norm=norm, post=post, width=width
        )

    cross = () if block.cross_attention is None else (branch("cross_attention"),)
    return branch("attention"), *cross, branch("mlp")


@dataclasses.dataclass(slots=True, eq=False)
class _Calls:
    """The inputs and outputs of a block (under the empty name) and of its children, with the first tensor of each."""

    block: nn.Module
    seen: dict[str, list[tuple[Tensor, Tensor]]] = dataclasses.field(
        default_factory=dict
    )

    def note(
        self, name: str, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Records a call. This is used as a forward hook on the block and its children."""
        x, y = _first((args, kwargs)), _first(output)
        if x is not None and y is not None:
            self.seen.setdefault(name, []).append((x, y))


def _observed(target: Target, sites: list[AttentionSite]) -> dict[str, _Calls]:
    """Runs the example and returns the calls of every module around a site, keyed by name."""
    names = {name for site in sites for name in _ancestors(module_name(site))}
    calls_by_name = {
        name: _Calls(target.model.get_submodule(name)) for name in sorted(names)
    }
    with ExitStack() as hooks, evaluating(target.model):
        for calls in calls_by_name.values():
            for name, module in (*calls.block.named_children(), ("", calls.block)):
                note = functools.partial(calls.note, name)
                hooks.callback(
                    module.register_forward_hook(note, with_kwargs=True).remove
                )
        target.returned()
    return calls_by_name


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _fitting(
    site: AttentionSite, observed: dict[str, _Calls]
) -> tuple[Branch, Branch] | None:
    """Returns the branches of the innermost block around a site that computes the formula, or None."""
    name = module_name(site)
    for parent in (p for p in _ancestors(name) if p in observed):
        child = name.removeprefix(f"{parent}.").partition(".")[0]
        branches = _matched(parent, observed[parent], child)
        if branches is not None:
            return branches
    return None


def _matched(name: str, calls: _Calls, attention: str) -> tuple[Branch, Branch] | None:
    once = {
        child: pairs[0]
        for child, pairs in calls.seen.items()
        if child and len(pairs) == 1
    }
    if "" not in calls.seen or attention not in once:
        return None
    (whole_in, whole_out), (a_in, a_out) = calls.seen[""][-1], once[attention]
    first = [
        c
        for c, (x, y) in once.items()
        if y is a_in and c != attention and _same(x, whole_in)
    ]
    if len(first) != 1 or a_out.shape != whole_in.shape:
        return None
    middle = whole_in + a_out
    for norm, (x, y) in once.items():
        for mlp, (m_in, m_out) in once.items():
            distinct = (
                len({norm, mlp, first[0], attention}) == 4
                and m_out.shape == middle.shape
            )
            if (
                distinct
                and m_in is y
                and _same(x, middle)
                and _same(middle + m_out, whole_out)
            ):
                pairs = (
                    (attention, first[0], "attention_post_norm"),
                    (mlp, norm, "mlp_post_norm"),
                )
                attention_branch, mlp_branch = (
                    Branch(
                        block=calls.block,
                        name=name,
                        function=f,
                        norm=n,
                        post=p,
                        width=whole_in.shape[-1],
                    )
                    for f, n, p in pairs
                )
                return attention_branch, mlp_branch
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-5, atol=1e-6))
    )


def _first(value: object) -> Tensor | None:
    return next((x for x in tensors(value) if x.is_floating_point()), None)


def _normed(
    norm: nn.Module, module: nn.Module, inputs: object, output: ModuleOutput
) -> ModuleOutput:
    """A forward hook that norms a branch's first output. The norm is a child of the block, so copies include it."""
    return of_first(output, norm)


def of_first(output: ModuleOutput, change: Callable[[Tensor], Tensor]) -> ModuleOutput:
    """Returns a module's output with its first tensor changed."""
    return (
        (change(output[0]), *output[1:])
        if isinstance(output, tuple)
        else change(output)
    )


def ordered(block: nn.Module, order: NormOrder) -> Handle:
    """Sets `norm_order` on one of qkeel's own blocks. A second call, for the block's other branch, changes nothing."""
    if not isinstance(block, Block) or block.norm_order != "pre":
        return Handle(lambda: None)
    block.norm_order = order
    return Handle(lambda: setattr(block, "norm_order", "pre"))


# Norms after the projections that produce the heads: before the rotation, and before keys enter a cache.


@final
class HeadNorm(nn.Module):
    """The norm x̃ = norm(x) · gain · factor (· learned scale) of x [... h d], where `weight` is the gain.

    `factor` implements a change of the logit scale and differs from 1 on only one side, q or k.
    """

    def __init__(
        self,
        norm: Norm,
        part: NormedPart,
        geometry: ParameterSizes,
        like: Tensor,
        *,
        factor: float,
        learned: Scale | None,
    ) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor
        self.part: NormedPart = part
        self.heads = geometry.n_heads if part == "q" else geometry.n_kv_heads
        gain = norm.init_params(geometry).get(f"{part}_norm")
        scale = (
            None
            if learned is None
            else learned.init_params(geometry)["logit_scale"].squeeze(-1)
        )
        self.weight = None if gain is None else nn.Parameter(gain.to(like))
        self.logit_scale = None if scale is None else nn.Parameter(scale.to(like))
        self.replaces = (
            False  # True if it has replaced an nn.Identity, which the model still calls
        )

    def forward(self, x: Tensor, *, from_projection: bool = False) -> Tensor:
        """Returns x [... h d] normed, in its dtype, or x itself if the model calls the Identity that this replaces."""
        if self.replaces and not from_projection:
            return x
        params: Params = (
            {} if self.weight is None else {f"{self.part}_norm": self.weight}
        )
        y = self.norm.apply(
            self.part, x.reshape(-1, *x.shape[-2:])[:, :, None], params
        ).reshape(x.shape)
        if self.norm.kind == "other":
            mark_as_norm(y)
        if self.logit_scale is not None:
            y = y * (self.factor * self.logit_scale).to(y.dtype)
        elif self.factor != 1.0:
            y = y * self.factor
        return y.clone() if self.by_itself else y

    @property
    def by_itself(self) -> bool:
        """True if fully_shard gathers this module's gain separately, in which case it changes the module's class.

        fully_shard's hooks on an output are lost if the output is a view and is changed in place."""
        return type(self) is not HeadNorm

    def extra_repr(self) -> str:
        """Shows the norm in print(model)."""
        return repr(self.norm)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSource:
    """The module output that contains q, k or v: the features `index` [n d] out of `size`, with or without a bias."""

    module: nn.Module
    name: str
    index: Tensor
    size: int
    biased: bool


def heads_of(
    model: nn.Module, site: AttentionSite, part: NormedPart, ways: Iterable[HeadSlice]
) -> list[HeadSource] | Refusal:
    """Returns the modules whose outputs contain complete heads of q, k or v, or the reason why there are none.

    There are several modules if different tokens have different projections, or if the logit is a sum of products.

    Args:
        model: the model that contains the weights.
        site: the attention.
        part: the side to look for: q, k or v.
        ways: the last weight before the score for each term of the logit, without position tables.
    """
    side = {"q": "queries", "k": "keys", "v": "values"}[part]
    if part != "v" and site.unverified:
        return unconfirmed(site)
    slices: list[HeadSlice] = []
    for s in ways:
        if not any(
            s.parameter == known_slice.parameter and s.same(known_slice)
            for known_slice in slices
        ):
            slices.append(s)
    if not slices:
        return refuse_heads(
            f"it is not known which weights produce the {side} ({site.why})"
        )
    if any(
        model.get_parameter(s.parameter).ndim > 2 for s in slices
    ):  # channels of a convolution
        shaped = ", ".join(s.parameter for s in slices)
        return refuse_heads(
            f"the {side} are not the last dimension of a module's output: {shaped} produces them"
        )
    apart: dict[str, list[HeadSlice]] = {}
    for s in slices:
        apart.setdefault(_branch(s.parameter, site), []).append(s)
    sources, heads = [], site.n_heads if part == "q" else site.n_kv_heads
    for branch_slices in apart.values():
        name, index = _common_module(branch_slices)
        module, names = (
            model.get_submodule(name),
            ", ".join(sorted({s.parameter for s in slices})),
        )
        is_complete = index is not None and index.shape[0] == heads
        if site.module in module.modules() or (len(apart) > 1 and not is_complete):
            return refuse_heads(
                f"the {side} are not the output of a single module: they are computed by {names}"
            )
        if index is None or not is_complete:
            return refuse_heads(
                f"no module outputs complete heads of the {side} ({heads} heads of {site.head_dim}): they are "
                f"computed by {names}"
            )
        if len(apart) > 1 and not all(
            bool(s.heads(dist.whole(model.get_parameter(s.parameter))).any())
            for s in branch_slices
        ):
            # A term of a sum that is zero, such as a new low-rank adapter, would be normed to full size.
            return refuse_heads(
                f"the {side} are not the output of a single module, and one of the weights that produce them is zero: "
                f"{names}"
            )
        size, biased = (
            model.get_parameter(branch_slices[0].parameter).shape[
                branch_slices[0].axis
            ],
            any(s.bias is not None for s in branch_slices),
        )
        sources.append(
            HeadSource(module=module, name=name, index=index, size=size, biased=biased)
        )
    return sources


def _branch(parameter: str, site: AttentionSite) -> str:
    """Returns the outermost module that contains a parameter but not the site's module.

    If there is none, returns the module that owns the parameter, which is then the site's module or a module around
    it."""
    owner, home = _owner(parameter).split("."), site.name.partition("#")[0].split(".")
    shared = sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(owner, home))
    )
    return ".".join(owner[: shared + 1])


def _common_module(slices: list[HeadSlice]) -> tuple[str, Tensor | None]:
    """Returns the innermost module around all these weights, and each head's features in its output (None if unknown).

    If there is one weight, its features are concatenated. If there are several, their features must be equal, since an
    adapter adds its output to that of its base."""
    paths = [_owner(s.parameter).split(".") for s in slices]
    name = ".".join(
        p[0] for p in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*paths))
    )
    if len({s.index.shape[0] for s in slices}) > 1:
        return name, None
    if len({s.parameter for s in slices}) > 1:
        return name, slices[0].index if all(s.same(slices[0]) for s in slices) else None
    index = torch.cat([s.index for s in slices], dim=1).sort(dim=1).values
    return name, index


def _owner(parameter: str) -> str:
    """Returns the name of the module that computes with a parameter."""
    owner, separator, _ = parameter.partition(".parametrizations.")
    return owner if separator else parameter.rpartition(".")[0]


@final
class NormedProjection(InstanceForward):
    """A projection with normed heads: only q, or q, k (and v) of a fused projection.

    Some modules pass the projection's weight to F.linear instead of calling the projection (BEiT, Swin). `inside` is
    then that module, whose forward is replaced so that the output of F.linear with this weight is normed.
    """

    def __init__(
        self,
        heads: list[HeadSource],
        norms: list[HeadNorm],
        inside: nn.Module | None = None,
    ) -> None:
        super().__init__(heads[0].module if inside is None else inside)
        self.projection = None if inside is None else heads[0].module
        self.biased = heads[0].biased
        self.norms = norms
        self.size = heads[0].size
        self.seen: list[int] | None = None
        self.cuts = _cuts([h.index for h in heads], self.size)
        if self.cuts is None:
            home = next(self.module.parameters()).device
            for norm, one in zip(norms, heads):
                norm.register_buffer("features", one.index.to(home), persistent=False)

    def run(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Returns the normed output of the projection, or the output of the module around it."""
        if self.projection is None:
            return self.normed(self.replaced(args, kwargs))
        with _LinearCalls(self, self.projection.get_parameter("weight")):
            return self.replaced(args, kwargs)

    def normed(self, out: Tensor) -> Tensor:
        """Returns a projection's output with its heads normed."""
        if self.seen is not None:
            self.seen.append(out.shape[-1] if isinstance(out, Tensor) else 0)
        if self.cuts is None:
            for norm in self.norms:
                index = norm.get_buffer("features")
                out = out.index_copy(
                    -1,
                    index.flatten(),
                    norm(out[..., index], from_projection=True).flatten(-2),
                )
            return out
        if self.cuts.groups == 1:
            parts = out.split(self.cuts.sizes, dim=-1)
            return self._joined(
                [self._block(p, i) for p, i in zip(parts, self.cuts.owners)]
            )
        parts = out.unflatten(-1, (self.cuts.groups, -1)).split(self.cuts.sizes, dim=-1)
        return self._joined(
            [self._head(p, i) for p, i in zip(parts, self.cuts.owners)]
        ).flatten(-2)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Returns the parts in one tensor, which the model may change in place (see `HeadNorm.by_itself`)."""
        if len(parts) > 1:
            return torch.cat(parts, dim=-1)
        return (
            parts[0].clone() if any(norm.by_itself for norm in self.norms) else parts[0]
        )

    def _block(self, x: Tensor, i: int) -> Tensor:
        """Norms adjacent heads [... h d], which are flattened into one dimension."""
        return (
            x
            if i < 0
            else self._head(x.unflatten(-1, (self.norms[i].heads, -1)), i).flatten(-2)
        )

    def _head(self, x: Tensor, i: int) -> Tensor:
        return x if i < 0 else self.norms[i](x, from_projection=True)


class _LinearCalls(TorchFunctionMode):
    """Norms the output of calls of F.linear with one weight."""

    def __init__(self, normed: NormedProjection, weight: Tensor) -> None:
        super().__init__()
        self.normed, self.weight = normed, weight

    def __torch_function__(
        self,
        func: Callable[..., object],
        types_: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        mine = (
            func is F.linear
            and (args[1] if len(args) > 1 else kwargs["weight"]) is self.weight
        )
        if (
            mine
            and self.normed.seen is not None
            and self.normed.biased
            and _bias(args, kwargs) is None
        ):
            self.normed.seen.append(
                0
            )  # a bias added later would follow the norm; 0 makes _check_ran refuse
        return self.normed.normed(out) if mine and isinstance(out, Tensor) else out


def _bias(args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns the bias argument of an F.linear call."""
    return args[2] if len(args) > 2 else kwargs.get("bias")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """Divides features into `groups` of equal layout, each cut into `sizes`. `owners` are the norms of the cuts.

    An owner of -1 means that the cut is not normed."""

    groups: int
    sizes: list[int]
    owners: list[int]


def _cuts(index: list[Tensor], size: int) -> _Cuts | None:
    """Returns the cuts by which each norm's features are viewed as [... h d], or None if heads are unevenly spaced."""
    runs = []
    for i, features in enumerate(index):
        (n, r), first = features.shape, int(features[0, 0])
        step = int(features[1, 0]) - first if n > 1 else r
        if not torch.equal(
            features.cpu(), first + step * torch.arange(n)[:, None] + torch.arange(r)
        ):
            return None
        runs.append((first, n, r, step, i))
    blocks = all(step == r for _, _, r, step, _ in runs)
    n, step = runs[0][1], runs[0][3]
    if not blocks and not all(
        (m, s, m * s) == (n, step, size) for _, m, _, s, _ in runs
    ):
        return None
    sizes, owners, at = [], [], 0
    for first, m, r, _, i in sorted(runs):
        length = m * r if blocks else r
        if first < at:
            return None
        sizes += [first - at, length]
        owners += [-1, i]
        at = first + length
    sizes.append((size if blocks else step) - at)
    owners.append(-1)
    kept = [(s, o) for s, o in zip(sizes, owners) if s]
    return _Cuts(
        groups=1 if blocks else n,
        sizes=[s for s, _ in kept],
        owners=[o for _, o in kept],
    )


# Remedies that norm queries and keys: after the projections if these produce complete heads, or else in the attention
# call.

SourcesBySide = dict[NormedPart, list[HeadSource]]  # the modules that produce each side
Operands = Callable[[], dict[str, list[tuple[OperandNorms, OperandNorms]]]]
_SHORTER = 0.05  # the relative length by which eps, under the root, may shorten a vector of usual size
KINDS: dict[str, type[GainNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "l2": L2Norm}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ModuleNorm:
    """The norm of the heads of one module, and its name as a child of the site's module."""

    name: str
    heads: HeadSource
    module: HeadNorm


class ChangeNorm(ChangeSpec):
    """Base class for remedies that norm the `sides` of attention, which are some of q, k and v.

    In modules from other libraries the norm is placed directly after the projection, which is before the rotation,
    where a gain per dimension belongs, and before a cache, which then holds normed keys. If no module outputs complete
    heads (nn.MultiheadAttention multiplies by its own weight, and latent attention concatenates keys from two parts),
    the attention call is replaced, which is possible for norms that commute with the rotation.

    Heads are the heads of a token, even if a logit sums over tokens (tied rows, attention over channels). A table of
    relative positions that multiplies queries stays unchanged, like a bias.
    """

    sides: ClassVar[tuple[NormedPart, ...]] = ("q", "k")

    __slots__ = ()

    @abc.abstractmethod
    def norm(self) -> GainNorm:
        """Returns the norm for the spec's norm slot."""

    def unit_scale(self, train_length: int | None) -> Scale:
        """Returns the scale that replaces 1/√d for unit vectors."""
        return Fixed(1.0)

    @property
    def works_in_call(self) -> bool:
        """True if the norm may follow the rotation and the repetition of key heads."""
        norm = self.norm()
        return (
            norm.commutes_with_rotation
            and norm.over == "head"
            and norm.gain in ("none", "scalar")
        )

    def supports(self, site: AttentionSite) -> Refusal | None:
        norm = self.norm()
        refusal = refuse_norm(site, norm)
        if refusal is None and site.unscaled:
            refusal = Refusal(
                site.unscaled, "use softcap, which bounds the input of the softmax"
            )
        return refusal or (
            refuse_scale(self.name, base_spec(site).scale)
            if norm.kind == "l2"
            else None
        )

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        norm = self.norm()
        scale = (
            spec.scale.with_base(self.unit_scale(train_length))
            if norm.kind == "l2"
            else spec.scale
        )
        return spec.replace(norm=norm, scale=scale)

    def change_others(
        self, target: Target, sites: list[AttentionSite]
    ) -> Iterator[Handle]:
        values = target.values
        operands = functools.cache(lambda: target.seen().operands())

        def planned() -> dict[str, SourcesBySide | Refusal]:
            plans = {
                site.name: self._plan(target, site, values.get(site.name, ""), operands)
                for site in sites
            }
            for site in sites:
                if isinstance(plans[site.name], Refusal):
                    unseen = refuse_unseen(site)
                    inside = self.works_in_call or isinstance(
                        site.module, nn.MultiheadAttention
                    )
                    if unseen is not None or not inside:
                        raise RefusedError(
                            f"{self.name} at {where(site)}: {unseen or plans[site.name]}"
                        )
            return plans

        plans = agreed(planned)
        projected = {
            name: plan for name, plan in plans.items() if not isinstance(plan, Refusal)
        }
        yield from _norm_projections(
            self, target, [s for s in sites if s.name in projected], projected
        )
        called = [s for s in sites if s.name not in projected]
        yield from exchange_calls((self, target.train_length), target, called)

    def _plan(
        self,
        target: Target,
        site: AttentionSite,
        values: tuple[HeadSlice, ...] | str,
        operands: Operands,
    ) -> SourcesBySide | Refusal:
        """Returns the modules that produce the heads to norm, or the reason why there are none."""
        shared = self._refuse_shared(target, site)
        if shared is not None:
            return shared
        plan = self._modules(target, site, values, frozenset())
        if not isinstance(plan, Refusal) and all(
            len(sources) == 1 for sources in plan.values()
        ):
            return plan
        pairs = operands().get(site.name, [])
        tables = frozenset(
            name for pair in pairs for operand in pair for name in operand.tables
        )
        plan = self._modules(target, site, values, tables)
        if isinstance(plan, Refusal):
            return plan
        widths = {
            operand.width for pair in pairs for operand in pair if not operand.tables
        }
        for part, sources in plan.items():
            if (
                len(sources) > 1
                and {heads.index.shape[1] for heads in sources} != widths
            ):
                names, side_name = (
                    ", ".join(sorted(heads.name for heads in sources)),
                    "queries" if part == "q" else "keys",
                )
                return refuse_heads(
                    f"the {side_name} are not the output of a single module: they are computed by {names}"
                )
        return plan

    def _refuse_shared(self, target: Target, site: AttentionSite) -> Refusal | None:
        """Refuses a norm after a projection that also makes what must not be normed, or what is normed separately."""
        slices_of_sides: dict[str, Sequence[HeadSlice]] = {
            "queries": [term.query[-1] for term in site.terms],
            "keys": [term.key[-1] for term in site.terms],
            "values": [
                s
                for other in target.all_sites or [site]
                for s in target.value_weights(other)
            ],
        }
        for side in self.sides:
            normed = {"q": "queries", "k": "keys", "v": "values"}[side]
            for other_side, slices in slices_of_sides.items():
                for s in slices_of_sides[normed] if other_side != normed else ():
                    if any(target.overlap(s, other_slice) for other_slice in slices):
                        return refuse_heads(
                            f"{s.parameter} makes the {normed} and the {other_side} at once"
                        )
        return None

    def _modules(
        self,
        target: Target,
        site: AttentionSite,
        values: tuple[HeadSlice, ...] | str,
        tables: frozenset[str],
    ) -> SourcesBySide | Refusal:
        """Returns the modules that produce each side, ignoring `tables` of positions."""
        plan: SourcesBySide = {}
        for side in self.sides:
            ways = [
                (term.query if side == "q" else term.key)[-1] for term in site.terms
            ]
            if side == "v":
                if isinstance(values, str):
                    return Refusal(
                        f"it is not known which weights produce the values ({values})",
                        "use qk_norm",
                    )
                ways = list(values)
            sources = heads_of(
                target.model, site, side, [s for s in ways if s.parameter not in tables]
            )
            if isinstance(sources, Refusal):
                return sources
            plan[side] = sources
        return plan


def _norm_projections(
    remedy: ChangeNorm,
    target: Target,
    sites: list[AttentionSite],
    plans: dict[str, SourcesBySide],
) -> Iterator[Handle]:
    """Inserts norms after the projections of the sites, then checks in one pass that all of them ran."""
    placed: list[NormedProjection] = []
    done: dict[int, str] = {}
    several = {
        name
        for name, plan in plans.items()
        if any(len(sources) > 1 for sources in plan.values())
    }
    _join_calls(remedy, sites, plans)
    called = target.seen().called if sites else frozenset()
    for site in sites:
        plan, name = plans[site.name], module_name(site)
        for side, sources in plan.items():
            theirs = [
                done[id(heads.module)]
                for heads in sources
                if done.get(id(heads.module), name) != name
            ]
            # If an earlier site owns only some modules of a sum, its norms already cover those modules.
            if theirs and len(theirs) == len(sources):
                raise RefusedError(
                    f"{remedy.name} at {name}: its projections also produce heads of {theirs[0]}"
                )
            plan[side] = [heads for heads in sources if id(heads.module) not in done]
        if not any(plan.values()):  # a second attention call of the same module
            continue
        norms = _norms(remedy, target, site, plan)
        done.update((id(norm.heads.module), name) for norm in norms)
        for norm in norms:  # timm uses an Identity for a disabled norm
            norm.module.replaces = (
                type(submodules_of(site.module).get(norm.name)) is nn.Identity
            )
        held = {norm.name: norm.module for norm in norms}
        yield add_submodules(
            target,
            site,
            held,
            target.parameter(site.query[0].parameter),
            over_identities=True,
        )
        for module in {
            id(norm.heads.module): norm.heads.module for norm in norms
        }.values():
            norms_of_module = [norm for norm in norms if norm.heads.module is module]
            new = NormedProjection(
                [norm.heads for norm in norms_of_module],
                [norm.module for norm in norms_of_module],
                inside=None
                if id(module) in called or "weight" not in parameters_of(module)
                else site.module,
            )
            yield put_in_place(new)
            placed.append(new)
    if placed:
        after = _check_ran(remedy, target, sites, placed)
        _check_lengths(remedy, sites, after, several)


def _join_calls(
    remedy: ChangeNorm, sites: list[AttentionSite], plans: dict[str, SourcesBySide]
) -> None:
    """Assigns all heads that a module's projections produce to the first of its attention calls that uses them.

    Calls may use different heads of one projection, as in differential attention or with local heads."""
    first: dict[tuple[str, NormedPart, int], list[HeadSource]] = {}
    for site in sites:
        for side, sources in plans[site.name].items():
            for heads in list(sources):
                where_first = first.setdefault(
                    (module_name(site), side, id(heads.module)), sources
                )
                if where_first is sources:
                    continue
                sources.remove(heads)
                at = next(
                    i
                    for i, source in enumerate(where_first)
                    if source.module is heads.module
                )
                known_rows = {tuple(row) for row in where_first[at].index.tolist()}
                new = [
                    row for row in heads.index.tolist() if tuple(row) not in known_rows
                ]
                taken = {feature for row in known_rows for feature in row}
                if any(feature in taken for row in new for feature in row) or (
                    new and heads.index.shape[1] != where_first[at].index.shape[1]
                ):
                    raise RefusedError(
                        f"{remedy.name} at {where(site)}: two attention calls of the module use different parts of the "
                        f"same heads of {heads.name}, and one norm cannot serve both; use qk_clip or lalr"
                    )
                index = torch.tensor(sorted([*map(list, known_rows), *new]))
                where_first[at] = dataclasses.replace(where_first[at], index=index)


def _norms(
    remedy: ChangeNorm, target: Target, site: AttentionSite, plan: SourcesBySide
) -> list[_ModuleNorm]:
    """Builds a site's norm modules. A change of scale is built into the norms of q, or of k if q is not normed."""
    base = base_spec(site)
    spec = remedy.changed(AttentionSpec(scale=base.scale), target.train_length)
    first = next(iter(plan))
    norms: list[_ModuleNorm] = []
    for side, sources in plan.items():
        factor, learned = 1.0, None
        if side == first and spec.scale != base.scale:
            old = number(base.scale, site.head_dim)
            learned = spec.scale if spec.scale.kind == "learned" else None
            factor = (
                1.0 if learned is not None else number(spec.scale, site.head_dim)
            ) / old
        for i, heads in enumerate(sources):
            width = heads.index.shape[1]
            n_heads = heads.index.shape[0]  # heads of all calls of the module
            geometry = ParameterSizes(
                n_heads=n_heads, n_kv_heads=n_heads, head_dim=width
            )
            parameter = next(heads.module.parameters())
            module = HeadNorm(
                spec.norm, side, geometry, parameter, factor=factor, learned=learned
            )
            norms.append(
                _ModuleNorm(
                    name=f"{side}_norm{f'_{i + 1}' if i else ''}",
                    heads=heads,
                    module=module,
                )
            )
    return norms


def _check_ran(
    remedy: ChangeNorm,
    target: Target,
    sites: list[AttentionSite],
    placed: list[NormedProjection],
) -> ModelTrace:
    """Returns the trace of one pass, in which every norm must run before the scores are computed.

    Raises:
        RefusedError: a norm did not run, or its output does not affect the scores of its site.
    """
    for new in placed:
        new.seen = []
    try:
        trace = seen(target.model, *target.short())
    finally:
        sizes = [new.seen for new in placed]
        for new in placed:
            new.seen = None
    after = {site.name: site for site in trace.sites}
    names = [
        site.name
        for site in sites
        if site.name not in after or not is_normed(after[site.name])
    ]
    if names or any(
        widths is None or set(widths) != {new.size}
        for new, widths in zip(placed, sizes)
    ):
        raise RefusedError(
            f"{remedy.name}: a norm on the output of the projections of {names or [site.name for site in sites]} does "
            "not affect the attention scores, because something other than the module that holds the weights uses them"
        )
    return trace


def _check_lengths(
    remedy: ChangeNorm, sites: list[AttentionSite], after: ModelTrace, names: set[str]
) -> None:
    """Checks that the vectors that are multiplied in the scores all have the same length.

    Raises:
        RefusedError: the outputs of several modules are added, so that the sum is not normed, or an operation between
            the norm and the scores changes the length.
    """
    norm = remedy.norm()
    operands = after.operands() if names or norm.kind in KINDS else {}
    for site in sites:
        # eps shortens small vectors. No tolerance is allowed for this if several outputs are summed.
        tolerance = None if site.name in names else _SHORTER
        for q, k in operands.get(site.name, []):
            for side, operand in (("q", q), ("k", k)):
                if side not in remedy.sides or operand.normed(norm.over, tolerance):
                    continue
                if site.name in names:
                    raise RefusedError(
                        f"{remedy.name} at {site.name}: the outputs of several modules are summed to give {side}, so a "
                        "norm on each does not normalise the sum; use qk_clip or lalr, which need no norm"
                    )
                least, most = operand.extremes()
                raise RefusedError(
                    f"{remedy.name} at {where(site)}: after the norm of the projection, vectors of {side} reach the "
                    f"scores with a mean square of {least:.3g} to {most:.3g}. An operation on {side} in between (an "
                    "activation, a gate, pooling) changes their length, so the norm does not bound the logits; use "
                    "softcap"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions(ChangeNorm):
    """Options of a norm with a gain. kind=l2 produces unit vectors, which need a scale other than 1/√d."""

    kind: Literal["rms", "layer", "l2"] = (
        "rms"  #: the kind of norm: RMS norm, layer norm or L2 norm
    )
    over: Over = "head"  #: what is normed together: the d dimensions of a head, or all heads of a token ("layer")
    gain: GainKind = "dim"  #: the gain and its shape; see `qkeel.spec.RMSNorm`

    def __post_init__(self) -> None:
        check_known(f"kind of {self.name}", self.kind, KINDS)
        self.norm()  # validates the options

    def norm(self) -> GainNorm:
        return KINDS[self.kind](
            on=cast("On", "".join(self.sides)), over=self.over, gain=self.gain
        )
