"""The experiments behind `qkeel.explain`: forward passes with chosen projection outputs, and the q, k and logits that
they show.

Shapes: h query heads, g key heads, t queries, s keys, d dimensions per head.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel.audit.explain_responses import EPS_FACTORS, close
from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import copied
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.patching.autograd import base_of
from qkeel.sites import AttentionSite, HeadSlice
from qkeel.sites.run import forward
from qkeel.sites.trace import grouped
from qkeel.spec import AttentionCall
from qkeel.spec.call import of_key

# Controlling a model: projections output what an experiment chooses, and q, k and logits are observed.
#
# A torch function mode below CaptureMode replaces the output of every product with a projection's weight. q and k then
# depend on that replacement and on the position alone, whatever the preceding layers computed.

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "rmatmul", "mm", "einsum"})
_SOFTMAX = frozenset({"softmax", "safe_softmax"})

Stimulus = Callable[[Tensor, Tensor], Tensor]  # x [features], like [tokens features] -> the projection's output


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What was observed at one site in one pass, for the first batch entry, in float64.

    It holds q [h t d], k [g s d], the logits [h t s] (None for a fused kernel), the scale and additive bias of a fused
    kernel, the visible pairs [h t s], and `beyond` [h t n], the softmax columns beyond the keys. `rounding` is the eps
    of q's dtype.
    """

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
    """Returns [size] numbers with magnitudes from 0.5 to 1.5 and random signs, determined by the name and the salt."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{salt}".encode()))
    size_of = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    return size_of * (2 * torch.randint(0, 2, (size,), generator=generator) - 1)


def scaled(factor: float, salt: int = 0) -> Stimulus:
    """Returns a stimulus that outputs the same vector, times `factor`, at every token."""
    return lambda x, like: (factor * _other(x, salt)).expand(like.shape)


def shifted(by: float) -> Stimulus:
    """Returns a stimulus that outputs the same vector plus a constant at every token."""
    return lambda x, like: (x + by).expand(like.shape)


def one_number(features: frozenset[int], factor: float = 64.0) -> Stimulus:
    """Returns a stimulus that outputs the same vector at every token, with some elements larger at the first token."""

    def stimulus(x: Tensor, like: Tensor) -> Tensor:
        out = x.expand(like.shape).clone()
        out[0, [f for f in features if f < len(x)]] *= factor
        return out

    return stimulus


def tokens(salt: int) -> Stimulus:
    """Returns a stimulus that outputs a different vector at every token."""

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
    """Replaces the results of products with target weights; records the products' inputs and the last softmax's
    input."""

    def __init__(self, targets: Mapping[int, str], stimulus: Mapping[str, Stimulus]) -> None:
        super().__init__()
        self.targets, self.stimulus = dict(targets), stimulus
        self._computed: list[Tensor] = []  # kept, so that their ids stay theirs
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
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if name not in _PRODUCTS:
            self._follow(given, out)
            return out
        weight = next((n for a in given if (n := self._name(a)) is not None), None)
        x = next((a for a in given if self._name(a) is None and a.ndim > 1), None)
        if weight is None or x is None:  # with a vector, as in a spectral norm
            return out
        self.order.append(weight)
        self.inputs[weight] = x.detach()
        if weight not in self.stimulus:
            return out
        x = random_vector(weight, out.shape[-1])
        made = self.stimulus[weight](x, out.detach().reshape(-1, out.shape[-1]))
        return made.to(out).view(out.shape)

    def _follow(self, given: Sequence[Tensor], out: object) -> None:
        """Gives a weight that is computed from a stored weight of the same shape the name of the stored one."""
        for a in given:
            name = self._name(a)
            if name and ".parametrizations." in f".{name}" and isinstance(out, Tensor) and out.shape == a.shape:
                self.targets[id(out)] = name
                self._computed.append(out)

    def _name(self, x: Tensor) -> str | None:
        base = base_of(x)
        return self.targets.get(id(x)) or (None if base is None else self.targets.get(id(base)))


class ControlledModel:
    """Runs experiments on `sites` of `model`. The caller restores the model afterwards."""

    def __init__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], sites: Sequence[AttentionSite]
    ):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.targets = {s.parameter for site in sites for s in ends(site)}
        self.names = {id(p): name for name, p in model.named_parameters() if p.ndim > 1}
        # Keys repeated in an order other than blocks stay repeated, one per query head.
        self.groups = {s.name: s.n_kv_heads if s.key_heads is None else s.n_heads for s in sites}
        self.layouts = {site.name: site.layout for site in sites if site.layout is not None}
        self.inputs: dict[str, Tensor] = {}
        self.order: list[str] = []

    def run(self, stimulus: Stimulus | Mapping[str, Stimulus], also: frozenset[str] = frozenset()) -> Observations:
        """Runs one pass in which the targets (and the weights in `also`) output the stimulus, which is common to all or
        given per weight."""
        each = stimulus if isinstance(stimulus, Mapping) else dict.fromkeys(self.targets | also, stimulus)
        seen: dict[str, CapturedCall] = {}
        beyond: dict[str, Tensor | None] = {}
        replace = _Replace(self.names, each)

        def report(captured: CapturedCall) -> None:
            seen.setdefault(captured.name, captured)
            beyond.setdefault(captured.name, _beyond(captured, replace.softmax_input))

        with replace:
            watcher = CaptureMode(self.model, report, layouts=self.layouts)
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
    """A context in which the parameters have other values, all different and none near 0."""
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


def _beyond(captured: CapturedCall, softmax_input: Tensor | None) -> Tensor | None:
    """Returns the softmax columns beyond those of the keys, [h t n]; None if there are none."""
    call = captured.call
    if not isinstance(call, ScoresCall) or softmax_input is None:
        return None
    extra = softmax_input.shape[-1] - call.capped.shape[-1]
    if extra <= 0 or softmax_input.ndim != 4:
        return None
    return softmax_input.detach()[0, :, :, -extra:].double().cpu()


def _heads(parts: Sequence[Tensor | None]) -> Tensor:
    """Returns the heads of the first batch entry, from calls of all heads or of one head each, in float64."""
    return torch.cat([x.detach()[0] for x in parts if x is not None]).double().cpu()


def _observation(calls: list[CapturedCall], beyond: Tensor | None, groups: int) -> Observation | None:
    first = calls[0].call
    packed = isinstance(first, AttentionCall) and of_key(first) is not None
    if packed or any(c.call.q is None or c.call.k is None for c in calls):
        return None
    q, k = _heads([c.call.q for c in calls]), _heads([c.call.k for c in calls])
    k = k[:: max(1, len(k) // groups)]  # undoes the repetition even where equality can't show it, as for zero keys
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


# Modules and parameters around a site that may take part in its recipe, and norms there that do nothing.

_MOST = 24  # parameters tried per site
_SMALL = 1 << 16  # a parameter with more numbers is not tried as a gain


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """The module that holds a site's projections and attention, and its name in the model."""

    name: str
    module: nn.Module
    site: AttentionSite

    def short(self, name: str) -> str:
        """Returns the name of a parameter or module relative to the scope."""
        return name.removeprefix(f"{self.name}.")

    def full(self, name: str) -> str:
        """Returns the name in the model of something named `name` in the scope."""
        return f"{self.name}.{name}" if self.name else name

    def candidates(self) -> list[tuple[str, nn.Parameter]]:
        """Returns parameters that may be gains, biases of norms, scales or sinks: small parameters that do not belong
        to a projection."""
        known = {s.parameter for s in (*self.site.query, *self.site.key)}
        known |= {f"{name.removesuffix('weight')}bias" for name in known}
        limit = max(self.site.n_heads * self.site.head_dim, 1)
        found = [
            (name, p)
            for name, p in self.module.named_parameters()
            if self.full(name) not in known and p.is_floating_point() and 0 < p.numel() <= min(limit, _SMALL)
        ]
        return found[:_MOST]


def scope_of(model: nn.Module, site: AttentionSite) -> Scope:
    """Returns the innermost module around the site's own module and the projections of q and k."""
    paths = [site.name.split("#")[0].split(".")]
    for part in ends(site):
        path = part.parameter.split(".parametrizations.")[0].split(".")
        owner = ".".join(path[:-1])
        module = model.get_submodule(owner)
        plain = {n for n, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}
        alone = plain and not any(True for _ in module.children())
        paths.append(owner.split(".")[:-1] if alone else owner.split("."))
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))
    name = ".".join(parts[0] for parts in shared)
    return Scope(name=name, module=model.get_submodule(name), site=site)


@final
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Leaf:
    """A leaf module of a scope, and the norms of its inputs in one pass."""

    name: str
    module: nn.Module
    inputs: list[float] = dataclasses.field(default_factory=list)

    def note(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Records the input; used as a forward pre-hook."""
        x = args[0] if args else None
        self.inputs.append(float(x.detach().double()[:1].norm()) if isinstance(x, Tensor) else 0.0)


def idle_norms(controlled: ControlledModel, scopes: Sequence[Scope], base: Observations) -> dict[str, tuple[str, ...]]:
    """Returns, for each site, the norms without effect: those never called, and those called on q or k whose result is
    not used."""
    leaves = {scope.site.name: _leaves(scope) for scope in scopes}
    with ExitStack() as undo:
        for leaf in (leaf for some in leaves.values() for leaf in some):
            undo.callback(leaf.module.register_forward_pre_hook(leaf.note).remove)
        plain = controlled.run(scaled(1.0))
    found: dict[str, list[str]] = {name: [] for name in leaves}
    suspects: dict[str, list[tuple[_Leaf, str]]] = {name: [] for name in leaves}
    for scope in scopes:
        name = scope.site.name
        for leaf in leaves[name]:
            side = _given(leaf, scope.site, plain[name]) if name in plain else ""
            if not leaf.inputs:
                found[name].append(f"{leaf.name} ({type(leaf.module).__name__}) is never called")
            elif side:
                suspects[name].append((leaf, side))
    for i in range(max(map(len, suspects.values()), default=0)):
        tried = {name: some[i] for name, some in suspects.items() if i < len(some)}
        with ExitStack() as undo:
            for leaf, _ in tried.values():
                undo.callback(leaf.module.register_forward_hook(_other_leaf).remove)
            after = controlled.run(scaled(1.0))
        for name, (leaf, side) in tried.items():
            if name in after and torch.equal(after[name].q, base[name].q) and torch.equal(after[name].k, base[name].k):
                kind = type(leaf.module).__name__
                found[name].append(f"{leaf.name} ({kind}) is called on {side}, and its result is not used")
    return {name: tuple(texts) for name, texts in found.items()}


def _leaves(scope: Scope) -> list[_Leaf]:
    known = {s.parameter.rpartition(".")[0] for s in (*scope.site.query, *scope.site.key)}
    return [
        _Leaf(name=name, module=module)
        for name, module in scope.module.named_modules()
        if name and not any(True for _ in module.children()) and scope.full(name) not in known and _is_norm(module)
    ]


def _is_norm(module: nn.Module) -> bool:
    """True if all parameters are vectors, or if the class name contains "norm"."""
    shapes = [p.ndim for p in module.parameters()]
    return (bool(shapes) and max(shapes) == 1 and min(shapes) == 1) or "norm" in type(module).__name__.lower()


def _given(leaf: _Leaf, site: AttentionSite, reading: Observation) -> str:
    """Returns "q" or "k" if the leaf's input was that projection's output, judged by its length; else ""."""
    for side, x, part in (("q", reading.q, site.terms[0].query[-1]), ("k", reading.k, site.terms[0].key[-1])):
        rows = part.index.cpu().flatten()
        vector = random_vector(part.parameter, int(rows.max()) + 1)
        length = float(vector[rows].norm()) * x.shape[1] ** 0.5
        if any(abs(given / length - 1) < 1e-5 for given in leaf.inputs):
            return side
    return ""


def _other_leaf(module: nn.Module, args: object, output: object) -> object:
    """A forward hook that changes a module's output."""
    return -2 * output if isinstance(output, Tensor) else output


# The experiments of `qkeel.explain`: each pass covers all sites at once.


def products(reading: Observation, over: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q·k and the logits [h t s], where each row's mean over the keys in `over` [h t s] is subtracted, and
    other keys are 0.

    Centring removes everything that is equal for all keys of a row (a bias of k, a subtracted maximum) and leaves the
    softmax unchanged.
    """
    assert reading.logits is not None
    z = reading.q @ reading.k.repeat_interleave(len(reading.q) // len(reading.k), 0).mT
    count = over.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(over, v, 0.0) for v in (z, reading.logits))
    x, y = (torch.where(over, v - v.sum(-1, keepdim=True) / count, 0.0) for v in (x, y))
    return x, y


def scale_of(one: Observation, two: Observation) -> tuple[float, ...] | None:
    """Fits s per head in z = s q·k + b from two passes with different q and k and the same b; None if no s fits."""
    if one.logits is None or two.logits is None:
        return (one.scale,) * len(one.q)
    both = one.visible & two.visible
    (x1, y1), (x2, y2) = products(one, both), products(two, both)
    x, y = (x1 - x2).flatten(1), (y1 - y2).flatten(1)
    energy = x.square().sum(1)
    if not bool((energy > 0).all()):
        return None  # no row sees two keys, so there is nothing to compare
    s = (x * y).sum(1) / energy
    rest = (y - s[:, None] * x).abs().amax(1)
    if not bool((rest <= max(1e-3, 30 * one.rounding) * y.abs().amax(1).clamp_min(1e-30)).all()):
        return None
    return tuple(s.tolist())


def seen(visible: Tensor) -> tuple[str, int | None]:
    """Describes which keys are visible [h t s], and returns the window in tokens if this example shows one."""
    v = visible[0]
    t, s = v.shape
    if not bool((visible == v).all()):
        return "a mask that differs by head", None
    if bool(v.all()):
        return "every key", None
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)[None, :]
    if torch.equal(v, distance >= 0):
        return f"keys up to its own (of {s}; a wider window looks the same)", None
    reach = int(distance[v].max()) + 1 if bool(v.any()) else 0
    if torch.equal(v, (distance >= 0) & (distance < reach)):
        return f"the last {reach} keys, including its own", reach
    if torch.equal(v, distance.abs() < reach):
        return f"keys less than {reach} away on both sides", reach
    own = v.any(0)
    if torch.equal(v, own[None, :].expand_as(v)):
        return "every key that is not padding", None
    if torch.equal(v, own[None, :] & (distance >= 0)):
        return "keys up to its own that are not padding", None
    return "another pattern of keys", None


def sinks_of(reading: Observation, parameters: Sequence[str]) -> str:
    """Describes the softmax columns beyond the keys."""
    if reading.beyond is None:
        return ""
    n = reading.beyond.shape[-1]
    named = f" ({', '.join(parameters)})" if parameters else ""
    return f"{n} sink logit{'s' if n > 1 else ''} per head in the softmax{named}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterEffect:
    """The effect of changing one parameter: observations at x and at -x, and which of q, k, scale, sinks changed."""

    name: str
    before: Tensor
    after: Tensor
    plus: Observation
    minus: Observation
    changes: frozenset[str]


@final
class SiteExperiments:
    """Runs all experiments on all sites when constructed; each pass covers every site."""

    def __init__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], sites: Sequence[AttentionSite]
    ) -> None:
        self.model, self.sites = model, sites
        self.controlled = ControlledModel(model, args, kwargs, sites)
        self.scopes = {s.name: scope_of(model, s) for s in sites if s.terms}
        run = self.controlled.run
        self.base = run(scaled(1.0))
        self.order = self.controlled.order
        self.passes = {
            "double": run(scaled(2.0)),
            "minus": run(scaled(-1.0)),
            "zero": run(scaled(0.0)),
            "elsewhere": run(scaled(1.0, salt=1)),
            "lifted": run(shifted(3.0)),
            "poked": run({name: one_number(self._first_features(name)) for name in self.controlled.targets}),
        }
        self.small = [run(scaled(c)) for c in EPS_FACTORS]
        self.tokens = run(tokens(1)), run(tokens(2))
        self.effects = self._effects()
        self.idle = idle_norms(self.controlled, list(self.scopes.values()), self.base)
        self.latents = self._latents()

    def _first_features(self, parameter: str) -> frozenset[int]:
        slices = (part for site in self.sites for part in ends(site))
        return frozenset(int(part.index[0, 0]) for part in slices if part.parameter == parameter)

    def _effects(self) -> dict[str, list[ParameterEffect]]:
        """Returns, for each site, the effects of changing each nearby parameter."""
        candidates = {name: scope.candidates() for name, scope in self.scopes.items()}
        found: dict[str, list[ParameterEffect]] = {name: [] for name in candidates}
        for i in range(max(map(len, candidates.values()), default=0)):
            now = {name: some[i] for name, some in candidates.items() if i < len(some)}
            for name, effect in self._effects_of(now):
                found[name].append(effect)
        return found

    def _effects_of(self, now: Mapping[str, tuple[str, nn.Parameter]]) -> Iterator[tuple[str, ParameterEffect]]:
        """Yields the effects of one parameter per site, all changed in the same passes."""
        unique = list({id(p): p for _, p in now.values()}.values())
        before = {id(p): p.detach().clone() for p in unique}
        heads = max(site.n_heads for site in self.sites)
        minus, pair = self.passes["minus"], self.tokens
        with changed(unique):
            after = {id(p): p.detach().clone() for p in unique}
            plus = self.controlled.run(scaled(1.0))
            if any(self._changes(name, plus, None) & {"q", "k"} for name in now):
                minus = self.controlled.run(scaled(-1.0))
            if any(p.numel() <= heads for p in unique):  # small enough to be a scale
                pair = self.controlled.run(tokens(1)), self.controlled.run(tokens(2))
        for name, (short, p) in now.items():
            if name in plus and name in self.base:
                changes = self._changes(name, plus, scale_of(*(r[name] for r in pair)))
                old, new = before[id(p)], after[id(p)]
                effect = ParameterEffect(
                    name=short, before=old, after=new, plus=plus[name], minus=minus[name], changes=changes
                )
                if changes:
                    yield name, effect

    def _changes(self, name: str, readings: Observations, scale: tuple[float, ...] | None) -> frozenset[str]:
        if name not in readings or name not in self.base:
            return frozenset()
        plus, base = readings[name], self.base[name]
        old = scale_of(*(r[name] for r in self.tokens))
        both = list(zip(old or (), scale or ()))
        sink = plus.beyond is not None and base.beyond is not None and not torch.equal(plus.beyond, base.beyond)
        named = {
            "q": not torch.equal(plus.q, base.q),
            "k": not torch.equal(plus.k, base.k),
            "scale": any(abs(a - b) > 1e-3 * abs(a) for a, b in both),
            "sinks": sink,
        }
        return frozenset(what for what, so in named.items() if so)

    def _latents(self) -> dict[str, dict[str, str]]:
        """Returns, for each site and each weight that follows another matrix of the scope, whether a norm lies between
        the two."""
        above = {n for n, s in self.scopes.items() for n in self._above(s)}
        if not above:
            return {}
        also = frozenset(above)
        inputs = []
        for stimulus in (scaled(1.0), scaled(3.0), scaled(1.0, salt=1)):
            self.controlled.run(stimulus, also)
            inputs.append({n: x.double() for n, x in self.controlled.inputs.items()})
        found: dict[str, dict[str, str]] = {}
        for name, scope in self.scopes.items():
            for part in {s.parameter for s in ends(scope.site)}:
                one, three, other = (i.get(part) for i in inputs)
                read = next((n for n in self.order if n.startswith(f"{scope.name}.") or not scope.name), "")
                first = inputs[0].get(read)  # input of the scope's first product
                if one is None or three is None or other is None or first is None:
                    continue
                if one.numel() == first.numel() and torch.equal(one.flatten(), first.flatten()):
                    continue
                if close(other, one, 1e-3):
                    continue
                normed = close(three, one, 1e-3)
                found.setdefault(name, {})[part] = "normed latent" if normed else "latent without norm"
        return found

    def _above(self, scope: Scope) -> list[str]:
        """Returns matrices of the scope that run before its last projection and might feed one."""
        own = {scope.full(n) for n, p in scope.module.named_parameters() if p.ndim == 2}
        ran = [n for n in dict.fromkeys(self.order) if n in own]
        last = max((ran.index(s.parameter) for s in ends(scope.site) if s.parameter in ran), default=-1)
        widths = {self.model.get_parameter(s.parameter).shape[1 - s.axis] for s in ends(scope.site)}
        whole = {self.model.get_parameter(n).shape[0] for n in ran[:last]} & widths
        return [n for n in ran[:last] if n not in self.controlled.targets] if whole else []
