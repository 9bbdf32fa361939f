"""Norms on the output of the modules that make the heads, before the rotation and before keys go into a cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.kernels.contract import Refusal
from qkeel.patching.graph_nodes import mark_as_norm
from qkeel.patching.instance_forward import InstanceForward
from qkeel.remedies.attention.refusals import refuse_heads
from qkeel.remedies.base import Args, Kwargs, unconfirmed
from qkeel.spec.norm import Norm, Part
from qkeel.spec.scale import Scale
from qkeel.spec.slot import Geometry, Params

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # transposed ones have their channels along another dimension


@final
class HeadNorm(nn.Module):
    """The norm x̃ = norm(x) · gain · factor (· learned scale) of x [... h d]; `weight` is the gain.

    While it is blended in, `share` s makes it (1 - s) x + s x̃: exactly x at 0, exactly x̃ at 1.

    Source: as the norm slot of a spec; the factor carries a change of the logit's scale, on the query side only.
    """

    def __init__(
        self, norm: Norm, part: Part, geometry: Geometry, like: Tensor, *, factor: float, learned: Scale | None
    ) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor
        self.part: Part = part
        self.heads = geometry.n_heads if part == "q" else geometry.n_kv_heads
        gain = norm.init_params(geometry).get(f"{part}_norm")
        scale = None if learned is None else learned.init_params(geometry)["logit_scale"].squeeze(-1)
        self.weight = None if gain is None else nn.Parameter(gain.to(like))
        self.logit_scale = None if scale is None else nn.Parameter(scale.to(like))
        self.share: Tensor | None = None
        self.replaces = False  # an nn.Identity of the model, which the model still calls

    def blend(self, share: float) -> None:
        """Make the share another one; it is a tensor, so compiled code need not be compiled again."""
        if self.share is None:
            self.share = torch.ones((), device=next(self.parameters()).device)
        self.share.fill_(share)

    def forward(self, x: Tensor, *, from_projection: bool = False) -> Tensor:
        """Returns x [... h d] normed, in its dtype; x itself where the model calls it in the place of its Identity."""
        if self.replaces and not from_projection:
            return x
        params: Params = {} if self.weight is None else {f"{self.part}_norm": self.weight}
        y = self.norm.apply(self.part, x.reshape(-1, *x.shape[-2:])[:, :, None], params).reshape(x.shape)
        if self.norm.kind == "other":
            mark_as_norm(y)
        if self.logit_scale is not None:
            y = y * (self.factor * self.logit_scale).to(y.dtype)
        elif self.factor != 1.0:
            y = y * self.factor
        return y if self.share is None else torch.lerp(x, y, self.share.to(x.dtype))

    def extra_repr(self) -> str:
        """The norm, in print(model)."""
        return repr(self.norm)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """The source of q, k or v: features `index` [n d] of the output of a module, `size` of them in all, a bias among
    what makes them or not."""

    module: nn.Module
    name: str
    index: Tensor
    size: int
    biased: bool


def heads_of(model: nn.Module, site: AttentionSite, part: Part, ways: Iterable[HeadSlice]) -> list[Heads] | Refusal:
    """The modules whose outputs hold whole heads of q, k or v, or why there are none. There are several where heads of
    some tokens are made by one module and those of others by another, or where a logit is a sum of products.

    Args:
        ways: for each term the last weight before the score, those of tables of positions left out.
    """
    side = {"q": "queries", "k": "keys", "v": "values"}[part]
    if part != "v" and site.unverified:
        return unconfirmed(site)
    slices: list[HeadSlice] = []
    for s in ways:
        if not any(s.parameter == other.parameter and s.same(other) for other in slices):
            slices.append(s)
    if not slices:
        return refuse_heads(f"it is not known which weights make the {side} ({site.why})")
    if not all(_made_last(model, s, several=len(site.terms) > 1) for s in slices):
        shaped = ", ".join(s.parameter for s in slices)
        return refuse_heads(f"the {side} are not the last dimension of a module's output: {shaped} makes them")
    apart: dict[str, list[HeadSlice]] = {}
    for s in slices:
        apart.setdefault(_branch(s.parameter, site), []).append(s)
    found, heads = [], site.n_heads if part == "q" else site.n_kv_heads
    for own in apart.values():
        name, index = _common_module(own)
        module, made = model.get_submodule(name), ", ".join(sorted({s.parameter for s in slices}))
        whole = index is not None and index.shape[0] == heads
        if site.module in module.modules() or (len(apart) > 1 and not whole):
            return refuse_heads(f"the {side} are no one module's output: they are made by {made}")
        if index is None or not whole:
            return refuse_heads(f"no module makes whole heads of the {side}, {heads} of {site.head_dim}: {made} do")
        weights = [s.heads(model.get_parameter(s.parameter)) for s in own]
        if len(apart) > 1 and not all(bool(w.any()) for w in weights):
            # A part of a sum that is zero at first, as in a low-rank adapter: it would be normed to full size.
            return refuse_heads(f"the {side} are no one module's output, and a part of what makes them is zero: {made}")
        size, biased = model.get_parameter(own[0].parameter).shape[own[0].axis], any(s.bias is not None for s in own)
        found.append(Heads(module=module, name=name, index=index, size=size, biased=biased))
    return found


def _branch(parameter: str, site: AttentionSite) -> str:
    """The outermost module that holds a parameter and not the site's module; that module itself, or one around it,
    where there is none."""
    owner, home = _owner(parameter).split("."), site.name.partition("#")[0].split(".")
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(owner, home)))
    return ".".join(owner[: shared + 1])


def _made_last(model: nn.Module, s: HeadSlice, *, several: bool) -> bool:
    """True if heads are features of the last dimension of a module's output, or channels of a convolution's; these only
    where the logit is one product."""
    if isinstance(model.get_submodule(_owner(s.parameter)), _CONVOLUTIONS):
        return s.axis == 0 and not several
    return model.get_parameter(s.parameter).ndim <= 2


def _common_module(slices: list[HeadSlice]) -> tuple[str, Tensor | None]:
    """The innermost module that holds all these weights, and the features of each head in its output, if it has them.
    They are those of one weight, concatenated, or the same of several (an adapter's are added to its base's)."""
    paths = [_owner(s.parameter).split(".") for s in slices]
    name = ".".join(p[0] for p in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*paths)))
    if len({s.index.shape[0] for s in slices}) > 1:
        return name, None
    if len({s.parameter for s in slices}) > 1:
        return name, slices[0].index if all(s.same(slices[0]) for s in slices) else None
    index = torch.cat([s.index for s in slices], dim=1).sort(dim=1).values
    return name, index


def _owner(parameter: str) -> str:
    """The module that computes with a parameter."""
    owner, made, _ = parameter.partition(".parametrizations.")
    return owner if made else parameter.rpartition(".")[0]


@final
class NormedProjection(InstanceForward):
    """A projection whose output's heads are normed: q alone, or q, k (and v) of a fused one.

    Where a module gives the projection's weight to F.linear in place of calling it (BEiT, Swin), `inside` is that
    module: its forward is exchanged, and the output of F.linear with this weight is normed.
    """

    def __init__(self, heads: list[Heads], norms: list[HeadNorm], inside: nn.Module | None = None) -> None:
        super().__init__(heads[0].module if inside is None else inside)
        self.projection = None if inside is None else heads[0].module
        self.biased = heads[0].biased
        self.norms = norms
        self.size = heads[0].size
        self.seen: list[int] | None = None
        made = heads[0].module
        # The dimension of the features.
        self.channels = -made.weight.ndim + 1 if isinstance(made, _CONVOLUTIONS) else -1
        self.cuts = _cuts([h.index for h in heads], self.size)
        if self.cuts is None:
            home = next(self.module.parameters()).device
            for norm, one in zip(norms, heads):
                norm.register_buffer("features", one.index.to(home), persistent=False)

    def run(self, args: Args, kwargs: Kwargs) -> Tensor:
        """The projection's output, normed; of the module around it its own."""
        if self.projection is None:
            return self.normed(self.replaced(args, kwargs))
        with _LinearCalls(self, self.projection.get_parameter("weight")):
            return self.replaced(args, kwargs)

    def normed(self, out: Tensor) -> Tensor:
        """Returns what the projection made, with its heads normed."""
        if self.seen is not None:
            self.seen.append(out.shape[self.channels] if isinstance(out, Tensor) else 0)
        if self.channels == -1:
            return self._features(out)
        return self._features(out.movedim(self.channels, -1)).movedim(-1, self.channels)

    def _features(self, out: Tensor) -> Tensor:
        if self.cuts is None:
            for norm in self.norms:
                index = norm.get_buffer("features")
                out = out.index_copy(-1, index.flatten(), norm(out[..., index], from_projection=True).flatten(-2))
            return out
        if self.cuts.groups == 1:
            parts = out.split(self.cuts.sizes, dim=-1)
            return _joined([self._block(p, i) for p, i in zip(parts, self.cuts.owners)])
        parts = out.unflatten(-1, (self.cuts.groups, -1)).split(self.cuts.sizes, dim=-1)
        return _joined([self._head(p, i) for p, i in zip(parts, self.cuts.owners)]).flatten(-2)

    def _block(self, x: Tensor, i: int) -> Tensor:
        """Heads one after the other, [... h d] in one dimension."""
        return x if i < 0 else self._head(x.unflatten(-1, (self.norms[i].heads, -1)), i).flatten(-2)

    def _head(self, x: Tensor, i: int) -> Tensor:
        return x if i < 0 else self.norms[i](x, from_projection=True)


class _LinearCalls(TorchFunctionMode):
    """Norms the output of F.linear with one weight."""

    def __init__(self, normed: NormedProjection, weight: Tensor) -> None:
        super().__init__()
        self.normed, self.weight = normed, weight

    def __torch_function__(
        self, func: Callable[..., object], types_: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        mine = func is F.linear and (args[1] if len(args) > 1 else kwargs["weight"]) is self.weight
        if mine and self.normed.seen is not None and self.normed.biased and _bias(args, kwargs) is None:
            self.normed.seen.append(0)  # what is added later would come after the norm
        return self.normed.normed(out) if mine and isinstance(out, Tensor) else out


def _bias(args: Args, kwargs: Kwargs) -> Tensor | None:
    """The bias that F.linear was given."""
    return args[2] if len(args) > 2 else kwargs.get("bias")


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """Features in `groups` of the same kind, each cut into `sizes`; `owners` are the norms of the cuts, -1 for none."""

    groups: int
    sizes: list[int]
    owners: list[int]


def _cuts(index: list[Tensor], size: int) -> _Cuts | None:
    """The cuts that give each norm its features [... h d] as a view; None if heads lie otherwise."""
    runs = []
    for i, one in enumerate(index):
        (n, r), first = one.shape, int(one[0, 0])
        step = int(one[1, 0]) - first if n > 1 else r
        if not torch.equal(one.cpu(), first + step * torch.arange(n)[:, None] + torch.arange(r)):
            return None
        runs.append((first, n, r, step, i))
    blocks = all(step == r for _, _, r, step, _ in runs)
    n, step = runs[0][1], runs[0][3]
    if not blocks and not all((m, s, m * s) == (n, step, size) for _, m, _, s, _ in runs):
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
    return _Cuts(groups=1 if blocks else n, sizes=[s for s, _ in kept], owners=[o for _, o in kept])
