"""A model under control: its projections give what an experiment chooses, and q, k and logits are observed.

A torch function mode below the interceptor replaces the output of every product with a projection's weight. Then q
and k are functions of that replacement and of the position alone, whatever the layers before did.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel.capture.calls import ScoresCall
from qkeel.capture.engine import Interceptor, Sighting
from qkeel.capture.example import copied
from qkeel.capture.trace import forward, grouped
from qkeel.patching.graph_nodes import base_of
from qkeel.sites import AttentionSite, HeadSlice
from qkeel.spec import AttentionCall
from qkeel.spec.band_call import of_key

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "rmatmul", "mm", "einsum"})
_SOFTMAX = frozenset({"softmax", "safe_softmax"})

Stimulus = Callable[[Tensor, Tensor], Tensor]  # x [features], like [tokens features] -> what the projection gives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """One site in one pass, first item of the batch, float64: q [h t d], k [g s d], logits [h t s] (None for a fused
    kernel), the scale a fused kernel was given, visible [h t s], the additive bias of a fused kernel, columns beyond
    the keys in the softmax [h t n]."""

    q: Tensor
    k: Tensor
    logits: Tensor | None
    cap: float | None
    scale: float
    visible: Tensor
    bias: Tensor | None
    beyond: Tensor | None
    rounding: float


Observations = Mapping[str, Observation]


def random_vector(name: str, size: int, salt: int = 0) -> Tensor:
    """[size] numbers of magnitude 0.5 to 1.5 and random sign, the same for the same name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{salt}".encode()))
    size_of = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    return size_of * (2 * torch.randint(0, 2, (size,), generator=generator) - 1)


def scaled(factor: float, salt: int = 0) -> Stimulus:
    """The same vector times `factor` at every token."""
    return lambda x, like: (factor * _other(x, salt)).expand(like.shape)


def shifted(by: float) -> Stimulus:
    """The same vector plus a constant at every token."""
    return lambda x, like: (x + by).expand(like.shape)


def one_number(features: frozenset[int], factor: float = 64.0) -> Stimulus:
    """The same vector at every token, but some of its numbers larger at the first token."""

    def stimulus(x: Tensor, like: Tensor) -> Tensor:
        out = x.expand(like.shape).clone()
        out[0, [f for f in features if f < len(x)]] *= factor
        return out

    return stimulus


def tokens(salt: int) -> Stimulus:
    """Another vector at every token."""

    def stimulus(x: Tensor, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(salt * 1000 + len(x))
        return x + torch.randn(like.shape, generator=generator, dtype=torch.float64)

    return stimulus


def _other(x: Tensor, salt: int) -> Tensor:
    if not salt:
        return x
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(salt))
    return x[order] * (1 + 0.5 * torch.sin(torch.arange(len(x), dtype=torch.float64) * (salt + 1)))


class _Replace(TorchFunctionMode):
    """Replaces products with target weights; records their inputs and the width of each softmax."""

    def __init__(self, targets: Mapping[int, str], stimulus: Mapping[str, Stimulus]) -> None:
        super().__init__()
        self.targets, self.stimulus = targets, stimulus
        self.inputs: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.softmax_input: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if name in _SOFTMAX:
            self.softmax_input = args[0] if args else kwargs.get("input")
        if name not in _PRODUCTS:
            return out
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        weight = next((n for a in given if (n := self._name(a)) is not None), None)
        if weight is None:
            return out
        self.order.append(weight)
        self.inputs[weight] = next(a for a in given if self._name(a) is None and a.ndim > 1).detach()
        if weight not in self.stimulus:
            return out
        x = random_vector(weight, out.shape[-1])
        made = self.stimulus[weight](x, out.detach().reshape(-1, out.shape[-1]))
        return made.to(out).view(out.shape)

    def _name(self, x: Tensor) -> str | None:
        base = base_of(x)
        return self.targets.get(id(x)) or (None if base is None else self.targets.get(id(base)))


class ControlledModel:
    """Runs experiments on `sites` of `model`; its caller restores the model afterwards."""

    def __init__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], sites: Sequence[AttentionSite]
    ):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.targets = {s.parameter for site in sites for s in ends(site)}
        self.names = {id(p): name for name, p in model.named_parameters() if p.ndim > 1}
        # Keys that are repeated in another order than blocks stay as they are, one for each query head.
        self.groups = {s.name: s.n_kv_heads if s.key_heads is None else s.n_heads for s in sites}
        self.layouts = {site.name: site.layout for site in sites if site.layout is not None}
        self.inputs: dict[str, Tensor] = {}
        self.order: list[str] = []

    def run(self, stimulus: Stimulus | Mapping[str, Stimulus], also: frozenset[str] = frozenset()) -> Observations:
        """One pass in which the targets (and the weights `also`) give the stimulus; one for all, or one per weight."""
        each = stimulus if isinstance(stimulus, Mapping) else dict.fromkeys(self.targets | also, stimulus)
        seen: dict[str, Sighting] = {}
        beyond: dict[str, Tensor | None] = {}
        replace = _Replace(self.names, each)

        def report(sighting: Sighting) -> None:
            seen.setdefault(sighting.name, sighting)
            beyond.setdefault(sighting.name, _beyond(sighting, replace.softmax_input))

        with replace:
            watcher = Interceptor(self.model, report, layouts=self.layouts)
            forward(self.model, watcher, copied(self.args), copied(dict(self.kwargs)))
        self.inputs, self.order = replace.inputs, replace.order
        firsts = {calls[0].name: calls for calls in grouped([*seen.values()])}
        found = {n: _observation(calls, beyond[n], self.groups[n]) for n, calls in firsts.items() if n in self.groups}
        return {name: reading for name, reading in found.items() if reading is not None}


def ends(site: AttentionSite) -> list[HeadSlice]:
    """Returns the last projection of every path to q and to k."""
    return [path[-1] for term in site.terms for path in (term.query, term.key)]


@contextmanager
def changed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in which the parameters hold other numbers, different from each other and none of them near 0."""
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for i, p in enumerate(parameters):
                other = random_vector(str(i), p.numel()).abs().view(p.shape)
                p.copy_((p.double() + p.double().sign() * 0.3 + 0.1) * other)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept):
                p.copy_(value)


def _beyond(sighting: Sighting, softmax_input: Tensor | None) -> Tensor | None:
    """[n t extra] columns of a softmax beyond those of the keys."""
    call = sighting.call
    if not isinstance(call, ScoresCall) or softmax_input is None:
        return None
    extra = softmax_input.shape[-1] - call.capped.shape[-1]
    if extra <= 0 or softmax_input.ndim != 4:
        return None
    return softmax_input.detach()[0, :, :, -extra:].double().cpu()


def _heads(parts: Sequence[Tensor | None]) -> Tensor:
    """The heads of the first item of a batch, from calls of all heads or of one each, in float64."""
    return torch.cat([x.detach()[0] for x in parts if x is not None]).double().cpu()


def _observation(calls: list[Sighting], beyond: Tensor | None, groups: int) -> Observation | None:
    first = calls[0].call
    packed = isinstance(first, AttentionCall) and of_key(first) is not None
    if packed or any(c.call.q is None or c.call.k is None for c in calls):
        return None
    q, k = _heads([c.call.q for c in calls]), _heads([c.call.k for c in calls])
    k = k[:: max(1, len(k) // groups)]  # keys of 0 are not seen to be repeated
    h, t, s = len(q), q.shape[1], k.shape[1]
    logits = bias = None
    if isinstance(first, ScoresCall):
        parts = [c.call for c in calls if isinstance(c.call, ScoresCall)]
        logits = torch.cat([p.logits.detach()[0] for p in parts]).double().cpu()
        seen = None if first.hidden is None else ~first.hidden
    else:
        seen, extra = first.visible(slice(0, t), slice(0, s)), first.bias(slice(0, t), slice(0, s))
        bias = None if extra is None else extra.detach()[0].double().cpu().expand(h, t, s)
    visible = torch.ones(h, t, s, dtype=torch.bool)
    if seen is not None:
        visible = seen[0].cpu().expand(h, t, s)
    spec = first.spec
    return Observation(
        q=q,
        k=k,
        logits=logits,
        cap=spec.cap.limit,
        scale=float(spec.scale.factor(torch.zeros(1), q.shape[-1], {})),
        visible=visible,
        bias=bias,
        beyond=beyond,
        rounding=float(torch.finfo((calls[0].call.q).dtype).eps),  # type: ignore[union-attr]
    )
