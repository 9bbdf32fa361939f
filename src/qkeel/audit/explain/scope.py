"""The modules and parameters around a site that may take part in its recipe, and the norms there that are idle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel.audit.explain.controlled_model import ControlledModel, Observation, Observations, ends, random_vector, scaled
from qkeel.sites import AttentionSite

_MOST = 24  # parameters tried per site
_SMALL = 1 << 16  # numbers up to which a parameter may be a gain


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """The module that holds a site's projections and its attention: `name` and the module itself."""

    name: str
    module: nn.Module
    site: AttentionSite

    def short(self, name: str) -> str:
        """A parameter's or module's name inside the scope."""
        return name.removeprefix(f"{self.name}.")

    def full(self, name: str) -> str:
        """The name in the model of what has `name` in the scope."""
        return f"{self.name}.{name}" if self.name else name

    def candidates(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that may be gains, biases of norms, scales or sinks: small ones that are no projection's."""
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
    """The innermost module that holds the site's own module and the projections of q and k."""
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
    """A leaf module of a scope, and what it was given in one pass."""

    name: str
    module: nn.Module
    inputs: list[float] = dataclasses.field(default_factory=list)

    def note(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """A hook before its forward."""
        x = args[0] if args else None
        self.inputs.append(float(x.detach().double()[:1].norm()) if isinstance(x, Tensor) else 0.0)


def idle_norms(controlled: ControlledModel, scopes: Sequence[Scope], base: Observations) -> dict[str, tuple[str, ...]]:
    """Per site, norms that are there and do nothing: never called, or called on q or k with the result thrown away."""
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
                undo.callback(leaf.module.register_forward_hook(_other).remove)
            after = controlled.run(scaled(1.0))
        for name, (leaf, side) in tried.items():
            if name in after and torch.equal(after[name].q, base[name].q) and torch.equal(after[name].k, base[name].k):
                kind = type(leaf.module).__name__
                found[name].append(f"{leaf.name} ({kind}) is called on {side}, and its result is thrown away")
    return {name: tuple(texts) for name, texts in found.items()}


def _leaves(scope: Scope) -> list[_Leaf]:
    known = {s.parameter.rpartition(".")[0] for s in (*scope.site.query, *scope.site.key)}
    return [
        _Leaf(name=name, module=module)
        for name, module in scope.module.named_modules()
        if name and not any(True for _ in module.children()) and scope.full(name) not in known and _is_norm(module)
    ]


def _is_norm(module: nn.Module) -> bool:
    """A module whose only parameters are vectors, or one that calls itself a norm."""
    shapes = [p.ndim for p in module.parameters()]
    return (bool(shapes) and max(shapes) == 1 and min(shapes) == 1) or "norm" in type(module).__name__.lower()


def _given(leaf: _Leaf, site: AttentionSite, reading: Observation) -> str:
    """Returns whether the leaf was given what the projection of q or of k made: numbers of the same length."""
    for side, x, part in (("q", reading.q, site.terms[0].query[-1]), ("k", reading.k, site.terms[0].key[-1])):
        rows = part.index.cpu().flatten()
        vector = random_vector(part.parameter, int(rows.max()) + 1)
        length = float(vector[rows].norm()) * x.shape[1] ** 0.5
        if any(abs(given / length - 1) < 1e-5 for given in leaf.inputs):
            return side
    return ""


def _other(module: nn.Module, args: object, output: object) -> object:
    """A hook that makes a module give something else."""
    return -2 * output if isinstance(output, Tensor) else output
