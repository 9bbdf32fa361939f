"""The experiments of explain_model: passes over all sites at once, and what changed in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.audit.explain import responses
from qkeel.audit.explain.controlled_model import (
    ControlledModel,
    Observation,
    Observations,
    changed,
    ends,
    one_number,
    scaled,
    shifted,
    tokens,
)
from qkeel.audit.explain.responses import EPS_FACTORS
from qkeel.audit.explain.scope import Scope, idle_norms, scope_of
from qkeel.sites import AttentionSite


def products(reading: Observation, over: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q·k and the logits [h t s], each row less its mean over the keys of `over` [h t s], 0 elsewhere.

    What is the same for all keys of a row (a bias of k, a maximum taken off) does not change a softmax.
    """
    assert reading.logits is not None
    z = reading.q @ reading.k.repeat_interleave(len(reading.q) // len(reading.k), 0).mT
    count = over.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(over, v, 0.0) for v in (z, reading.logits))
    x, y = (torch.where(over, v - v.sum(-1, keepdim=True) / count, 0.0) for v in (x, y))
    return x, y


def scale_of(one: Observation, two: Observation) -> tuple[float, ...] | None:
    """Returns s per head in z = s q·k + b, from two passes with other q and k and the same b; None if there is none."""
    if one.logits is None or two.logits is None:
        return (one.scale,) * len(one.q)
    both = one.visible & two.visible
    (x1, y1), (x2, y2) = products(one, both), products(two, both)
    x, y = (x1 - x2).flatten(1), (y1 - y2).flatten(1)
    energy = x.square().sum(1)
    if not bool((energy > 0).all()):
        return None  # no row sees two keys
    s = (x * y).sum(1) / energy
    rest = (y - s[:, None] * x).abs().amax(1)
    if not bool((rest <= max(1e-3, 30 * one.rounding) * y.abs().amax(1).clamp_min(1e-30)).all()):
        return None
    return tuple(s.tolist())


def seen(visible: Tensor) -> tuple[str, int | None]:
    """Returns which keys are visible [h t s] in words, and how many keys back where that is limited in this example."""
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
        return f"the last {reach} keys, its own included", reach
    if torch.equal(v, distance.abs() < reach):
        return f"keys less than {reach} away on both sides", reach
    own = v.any(0)
    if torch.equal(v, own[None, :].expand_as(v)):
        return "every key that is no padding", None
    if torch.equal(v, own[None, :] & (distance >= 0)):
        return "keys up to its own that are no padding", None
    return "another pattern of keys", None


def sinks_of(reading: Observation, parameters: Sequence[str]) -> str:
    """Returns the columns of the softmax beyond the keys, in words."""
    if reading.beyond is None:
        return ""
    n = reading.beyond.shape[-1]
    named = f" ({', '.join(parameters)})" if parameters else ""
    return f"{n} sink logit{'s' if n > 1 else ''} per head in the softmax{named}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effect:
    """The effect of changing one parameter: observations at x and at -x, and which of q, k, scale, sinks changed."""

    name: str
    before: Tensor
    after: Tensor
    plus: Observation
    minus: Observation
    changes: frozenset[str]


@final
class Experiment:
    """All experiments on all sites, done when it is made: each pass is one for every site at once."""

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

    def _effects(self) -> dict[str, list[Effect]]:
        """Per site, what each parameter near it does when it is changed."""
        candidates = {name: scope.candidates() for name, scope in self.scopes.items()}
        found: dict[str, list[Effect]] = {name: [] for name in candidates}
        for i in range(max(map(len, candidates.values()), default=0)):
            now = {name: some[i] for name, some in candidates.items() if i < len(some)}
            for name, effect in self._effects_of(now):
                found[name].append(effect)
        return found

    def _effects_of(self, now: Mapping[str, tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Effect]]:
        """The same for one parameter per site, all changed at once."""
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
                effect = Effect(name=short, before=old, after=new, plus=plus[name], minus=minus[name], changes=changes)
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
        """Per site, for weights behind another matrix in the same scope: whether a norm lies between."""
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
                first = inputs[0].get(read)  # what the scope's first product reads
                if one is None or three is None or other is None or first is None:
                    continue
                if one.numel() == first.numel() and torch.equal(one.flatten(), first.flatten()):
                    continue
                if responses.close(other, one, 1e-3):
                    continue
                normed = responses.close(three, one, 1e-3)
                found.setdefault(name, {})[part] = "normed latent" if normed else "latent without norm"
        return found

    def _above(self, scope: Scope) -> list[str]:
        """Matrices of the scope that run before its last projection and might feed one."""
        own = {scope.full(n) for n, p in scope.module.named_parameters() if p.ndim == 2}
        ran = [n for n in dict.fromkeys(self.order) if n in own]
        last = max((ran.index(s.parameter) for s in ends(scope.site) if s.parameter in ran), default=-1)
        widths = {self.model.get_parameter(s.parameter).shape[1 - s.axis] for s in ends(scope.site)}
        whole = {self.model.get_parameter(n).shape[0] for n in ran[:last]} & widths
        return [n for n in ran[:last] if n not in self.controlled.targets] if whole else []
