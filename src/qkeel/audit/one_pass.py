"""One forward pass of a model: what the projections of q and k output, which norms were called, every attention call,
and which parameters the output depends on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from qkeel.audit.output_gates import GateMode
from qkeel.capture.example import copied
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.patching.autograd import base_of, inputs_of, variable_of
from qkeel.patching.forward import extra_pass
from qkeel.patching.held_objects import tensors_within
from qkeel.patching.modes import function_name
from qkeel.sites import AttentionSite, HeadSlice
from qkeel.sites.search_passes import forward, spread
from qkeel.sites.trace import grouped

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "rmatmul", "mm", "einsum"})
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


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
        for name in _EPS_NAMES:
            value = getattr(self.module, name, None)
            if isinstance(value, float):
                return value
        return None

    def note(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Records a call; used as a forward pre-hook."""
        if args and isinstance(args[0], Tensor):
            self.received.append(_sums(args[0]))

    def called_on(self, projected: Tensor) -> tuple[bool, bool | None]:
        """Returns whether it was called on a projection [b n t d], or on its first head, and whether after a rotation,
        which keeps the sum of squares but not the sum."""
        # A ModuleList with one norm for each head sees one head at a time.
        for x in (projected, projected[:, 0]):
            total, energy = _sums(x)
            for received_total, received_energy in self.received:
                if abs(received_energy - energy) <= 1e-5 * energy:
                    spread = (energy * x.numel()) ** 0.5
                    return True, abs(received_total - total) > 1e-5 * spread
        return False, None


def _sums(x: Tensor) -> tuple[float, float]:
    wide = x.detach().double()
    return float(wide.sum()), float(wide.square().sum())


class _ProductMode(TorchFunctionMode):
    """Keeps the weights and outputs of products with the named weights, by name."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.products: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if function_name(func) in _PRODUCTS:
            for x in (*args, *kwargs.values()):
                base = base_of(x) if isinstance(x, Tensor) else None
                name = self.names.get(id(x if base is None else base))
                if name is not None:
                    self.products.setdefault(name, []).append((x, output.detach()))
        return output


@final
class OnePass:
    """What one forward pass shows of all sites.

    Attributes:
        calls: the first call of each site, or one call for each head if the heads are computed one by one.
        scopes: the name and the module around each site.
        norms: the modules of norms in there, by their names in it.
        gates: by site, the mean of what a sigmoid made and the output of each head is multiplied by.
        unused: by site, the names of parameters in there to which no path of autograd's graph leads from any output.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[AttentionSite],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        self.model, self.sites = model, sites
        self.scopes = {site.name: _scope(model, site) for site in sites if site.terms}
        self.norms = {
            site: {
                name: NormModule(name=name, module=child)
                for name, child in module.named_modules()
                if name and _is_norm(name, child)
            }
            for site, (_, module) in self.scopes.items()
        }
        calls: dict[str, CapturedCall] = {}
        gates = GateMode()

        def keep(captured: CapturedCall) -> None:
            if captured.name not in calls:
                calls[captured.name] = captured
                gates.captured(captured.name)

        watcher = CaptureMode(model, keep, known=KnownSites.of(sites))
        names = {id(p): name for name, p in model.named_parameters() if p.ndim > 1}
        # A pass with a graph that one process makes alone would gather weights.
        has_graph = not spread(model)
        with ExitStack() as undo:
            # A weight that a parametrization computes is computed once, here, so that it can be told by its identity.
            undo.enter_context(parametrize.cached())
            computed = []
            for name, module in model.named_modules():
                for tensor in getattr(module, "parametrizations", {}):
                    computed.append(getattr(module, tensor))
                    stored = joined(name, f"parametrizations.{tensor}.original")
                    names[id(computed[-1])] = stored
            for of_site in self.norms.values():
                for norm in of_site.values():
                    hook = norm.module.register_forward_pre_hook(norm.note)
                    undo.callback(hook.remove)
            undo.enter_context(gates)
            mode = undo.enter_context(_ProductMode(names))
            undo.enter_context(extra_pass(self))
            args, kwargs = copied(args), copied(dict(kwargs))
            output = forward(model, watcher, args, kwargs, graph=has_graph)
        self.products, self.gates = mode.products, gates.gates
        self.calls = {heads[0].name: heads for heads in grouped([*calls.values()])}
        self.unused = self._unused(output) if has_graph else {}

    def _unused(self, output: object) -> dict[str, list[str]]:
        """A module none of whose parameters is reached says nothing: it may be frozen, or run in an autograd function of
        the model's own."""
        queue = [x.grad_fn for x in tensors_within(output) if x.grad_fn is not None]
        visited, leaves = {*queue}, set[int]()
        while queue:
            node = queue.pop()
            variable = variable_of(node)
            if variable is not None:
                leaves.add(id(variable))
            for above in inputs_of(node):
                if above not in visited:
                    visited.add(above)
                    queue.append(above)
        unused: dict[str, list[str]] = {}
        for site, (scope, module) in self.scopes.items():
            trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
            names = [name for name, p in trained.items() if id(p) not in leaves]
            if len(names) < len(trained):
                unused[site] = [joined(scope, name) for name in names]
        return unused

    def outputs(self, weight_slice: HeadSlice, batch: int, tokens: int) -> list[Tensor]:
        """Returns what a projection output for each head of the whole batch, [b n t r], in float64: once for outputs in
        the order batch, token, and once for token, batch."""
        for weight, output in self.products.get(weight_slice.parameter, ()):
            base = base_of(weight)
            stored = weight if base is None else base
            # A product with some rows of a fused weight begins where its view does.
            axis = weight_slice.axis if stored.ndim > 1 else 0
            offset = int(weight.storage_offset()) - int(stored.storage_offset())
            rows = weight_slice.index.cpu() - offset // max(stored.stride(axis), 1)
            features = output.shape[-1]
            is_within = int(rows.min()) >= 0 and int(rows.max()) < features
            if is_within and output.numel() == batch * tokens * features:
                output = output.double().cpu()
                orders = [output.reshape(batch, tokens, features)]
                if batch > 1:
                    by_token = output.reshape(tokens, batch, features)
                    orders.append(by_token.transpose(0, 1))
                # Some models put tokens before the batch; which order is right shows in the lengths.
                return [x[..., rows].transpose(1, 2) for x in orders]
        return []


def joined(scope: str, name: str) -> str:
    """Returns the name in the model of what is called `name` in a scope."""
    return f"{scope}.{name}" if scope else name


def _is_norm(name: str, module: nn.Module) -> bool:
    """Whether a module near a site holds only vectors, or is called a norm."""
    if "parametrizations" in name or any(True for _ in module.children()):
        return False
    has_vectors = {p.ndim for p in module.parameters()} == {1}
    return has_vectors or "norm" in type(module).__name__.lower()


def _scope(model: nn.Module, site: AttentionSite) -> tuple[str, nn.Module]:
    """Returns the innermost module around the site's own module and the projections of q and k, with its name."""
    paths = [site.name.split("#")[0].split(".")]
    for term in site.terms:
        for weight_slice in (term.query[-1], term.key[-1]):
            name = weight_slice.parameter.split(".parametrizations.")[0]
            owner = name.split(".")[:-1]
            module = model.get_submodule(".".join(owner))
            names = {name for name, _ in module.named_parameters()}
            # Else the module of raw parameters.
            is_linear = names <= {"weight", "bias"}
            paths.append(owner[:-1] if is_linear else owner)
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*paths))
    name = ".".join(words[0] for words in shared)
    return name, model.get_submodule(name)
