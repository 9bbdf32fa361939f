"""One forward pass of a model: what the projections of q and k output, which norms were called, and every attention
call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel.capture.example import copied
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.patching.autograd import base_of
from qkeel.sites import AttentionSite, HeadSlice
from qkeel.sites.trace import forward, grouped, names_by_caller

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "rmatmul", "mm", "einsum"})


def energy(x: Tensor) -> float:
    """Returns the sum of squares."""
    return float(x.detach().double().square().sum())


def total(x: Tensor) -> float:
    """Returns the sum."""
    return float(x.detach().double().sum())


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectionOutput:
    """The output of a product with a weight, or with some of its rows."""

    weight: Tensor
    output: Tensor


@final
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class NormModule:
    """A norm-like module near a site, with the sum and the sum of squares of the input of each of its calls."""

    name: str
    module: nn.Module
    received: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def eps(self) -> float | None:
        """The module's eps, by the names that norms have for it."""
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(self.module, name, None)
            if isinstance(value, float):
                return value
        return None

    def note(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Records a call; used as a forward pre-hook."""
        x = args[0] if args else None
        if isinstance(x, Tensor):
            self.received.append((total(x), energy(x)))

    def called_on(self, projected: Tensor) -> tuple[bool, bool | None]:
        """Returns whether it was called on a projection [b n t d], or on its first head, and whether after a rotation,
        which keeps the sum of squares but not the sum."""
        for x in (projected, projected[:, 0]):
            for received_total, received_energy in self.received:
                if abs(received_energy - energy(x)) <= 1e-5 * energy(x):
                    spread = (received_energy * x.numel()) ** 0.5
                    return True, abs(received_total - total(x)) > 1e-5 * spread
        return False, None


class _ProductMode(TorchFunctionMode):
    """Keeps the inputs and outputs of products with the named weights."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = dict(names)
        self.products: dict[str, list[ProjectionOutput]] = {}
        self._computed: list[Tensor] = []  # kept, so that their ids stay theirs

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if getattr(func, "__name__", "").strip("_") not in _PRODUCTS:
            self._follow(operands, output)
            return output
        weights = [x for x in operands if self._name(x)]
        inputs = [
            x for x in operands if not self._name(x) and x.ndim > 1
        ]  # a spectral norm multiplies with a vector
        if weights and inputs and isinstance(output, Tensor):
            product = ProjectionOutput(weight=weights[0], output=output.detach())
            self.products.setdefault(self._name(weights[0]) or "", []).append(product)
        return output

    def _follow(self, operands: Sequence[Tensor], output: object) -> None:
        """Gives a weight that a parametrization computes the name of the stored weight of the same shape."""
        for x in operands:
            name = self._name(x)
            if (
                name
                and ".parametrizations." in f".{name}"
                and isinstance(output, Tensor)
                and output.shape == x.shape
            ):
                self.names[id(output)] = name
                self._computed.append(output)

    def _name(self, x: Tensor) -> str | None:
        base = base_of(x)
        return self.names.get(id(x)) or (
            None if base is None else self.names.get(id(base))
        )


@final
class OnePass:
    """What one forward pass shows of all sites."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self.model, self.sites = model, sites
        self.calls: dict[str, list[CapturedCall]] = {}
        self.scopes = {site.name: _scope(model, site) for site in sites if site.terms}
        self.norms = {site.name: self._norms(site) for site in sites if site.terms}
        self.mode = _ProductMode(
            {id(p): name for name, p in model.named_parameters() if p.ndim > 1}
        )

    def run(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Runs the pass."""
        layouts = {
            site.name: site.layout for site in self.sites if site.layout is not None
        }
        calls: dict[str, CapturedCall] = {}

        def keep(captured: CapturedCall) -> None:
            calls.setdefault(captured.name, captured)

        watcher = CaptureMode(self.model, keep, layouts=layouts)
        watcher.stack.by_caller = names_by_caller(self.sites)
        with ExitStack() as undo:
            for norm in itertools.chain(*self.norms.values()):
                undo.callback(norm.module.register_forward_pre_hook(norm.note).remove)
            undo.enter_context(self.mode)
            forward(
                self.model, watcher, copied(args), copied(dict(kwargs)), graph=False
            )
        self.calls = {heads[0].name: heads for heads in grouped([*calls.values()])}

    def _norms(self, site: AttentionSite) -> list[NormModule]:
        """Returns modules near a site that hold only vectors, or are called a norm, and are no projections."""
        scope, module = self.scopes[site.name]
        projections = {
            weight_slice.parameter.rpartition(".")[0]
            for weight_slice in (*site.query, *site.key)
        }
        norms = []
        for name, child in module.named_modules():
            has_children = any(True for _ in child.children())
            shapes = {p.ndim for p in child.parameters()}
            is_norm = shapes == {1} or "norm" in type(child).__name__.lower()
            if (
                name
                and not has_children
                and is_norm
                and joined(scope, name) not in projections
            ):
                norms.append(NormModule(name=name, module=child))
        return norms

    def outputs(self, weight_slice: HeadSlice, batch: int, tokens: int) -> list[Tensor]:
        """Returns what a projection output for each head of the whole batch, [b n t r], in float64: once for outputs in
        the order batch, token, and once for token, batch."""
        for product in self.mode.products.get(weight_slice.parameter, ()):
            base = base_of(product.weight)
            stored = product.weight if base is None else base
            axis = weight_slice.axis if stored.ndim > 1 else 0
            offset = int(product.weight.storage_offset()) - int(stored.storage_offset())
            first = offset // max(stored.stride(axis), 1)
            rows = weight_slice.index.cpu() - first
            features = product.output.shape[-1]
            if int(rows.min()) < 0 or int(rows.max()) >= features:
                continue  # another part of a fused weight
            if product.output.numel() != batch * tokens * features:
                continue
            output = product.output.double().cpu()
            by_batch = output.reshape(batch, tokens, features)
            by_token = output.reshape(tokens, batch, features).transpose(0, 1)
            return [
                x[..., rows].transpose(1, 2)
                for x in ((by_batch, by_token) if batch > 1 else (by_batch,))
            ]
        return []


def joined(scope: str, name: str) -> str:
    """Returns the name in the model of what is called `name` in a scope."""
    return f"{scope}.{name}" if scope else name


def _scope(model: nn.Module, site: AttentionSite) -> tuple[str, nn.Module]:
    """Returns the innermost module around the site's own module and the projections of q and k, with its name."""
    paths = [site.name.split("#")[0].split(".")]
    for weight_slice in ends(site):
        owner = weight_slice.parameter.split(".parametrizations.")[0].split(".")[:-1]
        module = model.get_submodule(".".join(owner))
        is_linear = {name for name, _ in module.named_parameters(recurse=False)} <= {
            "weight",
            "bias",
        }
        is_leaf = not any(True for _ in module.children())
        paths.append(owner[:-1] if is_linear and is_leaf else owner)
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*paths))
    name = ".".join(words[0] for words in shared)
    return name, model.get_submodule(name)


def ends(site: AttentionSite) -> list[HeadSlice]:
    """Returns the last projection of every path to q and to k."""
    return [path[-1] for term in site.terms for path in (term.query, term.key)]
