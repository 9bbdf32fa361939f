"""Output gate: multiplies the output of attention by a sigmoid of the layer's input, before the output projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel.capture.example import ModuleCall, undisturbed
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import extra_pass
from qkeel.patching.module_forward import InstanceForward, put_in_place
from qkeel.remedies.added_parameters import add_submodules
from qkeel.remedies.base import Args, Kwargs, Remedy, Target, compose_all, where
from qkeel.sites.search_passes import forward
from qkeel.sites.site import AttentionSite, HeadSlice
from qkeel.sites.site_search import traced


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate(Remedy):
    """Gates the output of attention, o ← o · σ(W_g x), where x is the module's input.

    There is one gate for each feature or, with `per=head`, for each head. With init=keep, o ← o · 2σ(W_g x) and W_g = 0
    at the start, so that every gate starts at exactly 1; this is equivalent to the published gate with a doubled output
    projection. With init=random, o ← o · σ(W_g x) and W_g is initialised like torch's linear layers.

    Source: Qiu et al. 2025, arXiv 2505.06708, where the elementwise gate after attention works best. init=keep is
    qkeel's addition.
    """

    per: Literal["feature", "head"] = "feature"
    init: Literal["keep", "random"] = "keep"

    name = "output_gate"
    reads_graph = True
    line = "gates the output of attention by a sigmoid of the layer's input, so that a head may contribute nothing"
    source = "Qiu et al. 2025, arXiv 2505.06708"
    rule = (
        "o ← c · sigmoid(W_g x) · o, x the layer's input, one gate per {per}; with init={init}, where keep begins at "
        "W_g = 0 with c = 2 and random has c = 1"
    )

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, nn.MultiheadAttention):
            return Refusal(
                "nn.MultiheadAttention applies its output projection inside a torch function",
                "use an attention module that calls its output projection as a module",
            )
        if site.description is not None:
            return Refusal(
                "its attention was described by hand", "build it with qkeel.nn"
            )
        return None

    def apply(self, target: Target) -> Handle:
        return compose_all(self._handles(target))

    def _handles(self, target: Target) -> Iterator[Handle]:
        # Every process begins with the same gates, whatever its own generator has drawn.
        rng = torch.Generator().manual_seed(0)
        done: set[int] = set()
        for site in target.sites:
            if id(site.module) in done:
                raise RefusedError(
                    f"output_gate at {site.name}: its module computes attention more than once"
                )
            done.add(id(site.module))
            yield self._gate(target, site, rng)

    def _gate(
        self, target: Target, site: AttentionSite, rng: torch.Generator
    ) -> Handle:
        module = site.module
        out = (
            _own(module)
            if isinstance(module, SpecModule)
            else output_of(target, site, per_head=self.per == "head")
        )
        near = (
            target.parameter(site.query[0].parameter)
            if site.terms
            else next(out.module.parameters())
        )
        rows = site.n_heads if self.per == "head" else out.features
        weight = torch.zeros(rows, out.width)
        if self.init == "random":
            weight.uniform_(-(out.width**-0.5), out.width**-0.5, generator=rng)
        gate = Gate(
            nn.Parameter(weight.to(near)), factor=2.0 if self.init == "keep" else 1.0
        )
        added = add_submodules(target, site, {"output_gate": gate}, near, matrices=True)
        source = GateInput(module)
        return compose(
            [
                added,
                put_in_place(source),
                put_in_place(GatedProjection(out.module, source, gate)),
            ]
        )


def _own(module: SpecModule) -> Output:
    projection = module.get_submodule("o_proj")
    assert isinstance(projection, nn.Linear)
    return Output(
        module=projection,
        features=projection.in_features,
        width=projection.out_features,
    )


@final
class Gate(nn.Module):
    """The gate factor · σ(W x) of an input x [... m], one value per row of W."""

    def __init__(self, weight: nn.Parameter, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = weight, factor

    def forward(self, x: Tensor) -> Tensor:
        """Returns the gates [... rows] of x [... m]."""
        gates = nn.functional.linear(x, self.weight).sigmoid()
        return gates if self.factor == 1.0 else self.factor * gates

    def extra_repr(self) -> str:
        """Shows the sizes in print(model)."""
        return f"{self.weight.shape[1]} to {self.weight.shape[0]} gates"


@final
class GateInput(InstanceForward):
    """Stores the attention module's input while the module's forward runs."""

    x: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy that a monitor makes of a running module doesn't run, and tensors with a graph can't be copied."""
        return {**vars(self), "x": None}

    def run(self, args: Args, kwargs: Kwargs) -> object:
        """Runs the module's forward and stores its input."""
        self.x = first_tensor(args, kwargs)
        out = self.replaced(args, kwargs)
        # Not kept after the pass: it would hold the pass's graph.
        self.x = None
        return out


@final
class GatedProjection(InstanceForward):
    """An output projection whose input is gated."""

    def __init__(self, module: nn.Module, source: GateInput, gate: Gate) -> None:
        super().__init__(module)
        self.source, self.gate = source, gate

    def run(self, args: Args, kwargs: Kwargs) -> object:
        """Projects the gated input."""
        x = self.source.x
        if x is None:
            raise RefusedError(
                "output_gate: the output projection was called outside of its attention module"
            )
        out, gates = args[0], self.gate(x)
        heads = out.unflatten(-1, (gates.shape[-1], -1))
        return self.replaced(
            ((heads * gates.to(out.dtype)[..., None]).flatten(-2), *args[1:]), kwargs
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """The output projection of an attention layer: the module, the number of its input features, and the width of the
    layer's input."""

    module: nn.Module
    features: int
    width: int


def first_tensor(args: Args, kwargs: Mapping[str, object]) -> Tensor | None:
    """Returns the first floating-point tensor among a call's arguments, which is assumed to be the hidden states."""
    tensors = (
        x
        for x in (*args, *kwargs.values())
        if isinstance(x, Tensor) and x.is_floating_point()
    )
    return next(tensors, None)


def output_of(target: Target, site: AttentionSite, *, per_head: bool) -> Output:
    """Finds the first module after the attention call that multiplies the output of attention by a weight.

    This is tested by negating one head's query weights on the example. That head's features in the module's input must
    change. With `per_head`, no other head's features may change, and the features of the head must be adjacent.

    Raises:
        RefusedError: there is no such module.
    """
    site_name = where(site)
    if not site.terms:
        raise RefusedError(
            f"output_gate at {site_name}: it is not known which weights produce its heads ({site.why})"
        )
    query, head = site.terms[0].query[-1], site.n_heads - 1
    trace = target.trace or traced(target.model, *target.batch, expected=True)
    frame, x = trace.module_call(site), None
    if trace.called.get(id(site.module)) == 1:
        x = next((x for x in frame.inputs if x.is_floating_point()), None)
    weight = frame.line()[-1].module.get_parameter(query.parameter).detach()
    before, after = (
        _inputs_of_matrices(frame, site, query.parameter, values)
        for values in (weight, _turned(weight, query, head))
    )
    module = a = b = None
    # Modules in the order of their calls, so the first that differs is the projection.
    for path, received in before.items():
        if path in after and not torch.equal(received, after[path]):
            module, a, b = site.module.get_submodule(path), received, after[path]
            break
    if (
        module is None
        or a is None
        or b is None
        or x is None
        or a.shape[:-1] != x.shape[:-1]
    ):
        raise RefusedError(
            f"output_gate at {site_name}: no module inside it multiplies the output of attention by a weight, token by "
            "token; the gate belongs before such an output projection"
        )
    # Features of the head whose queries were negated.
    changed = (a != b).flatten(0, -2).any(0)
    size = a.shape[-1] // site.n_heads
    if per_head and (not changed[head * size :].any() or changed[: head * size].any()):
        raise RefusedError(
            f"output_gate at {site_name}: the features of a head are not adjacent before the output projection, "
            "so there is no gate per head; use per=feature"
        )
    return Output(module=module, features=a.shape[-1], width=x.shape[-1])


@torch.no_grad()
def _turned(weight: Tensor, query: HeadSlice, head: int) -> Tensor:
    """Returns the query weights with those of one head negated, which no norm of the queries can undo."""
    signs = torch.ones(query.n, device=weight.device, dtype=weight.dtype)
    signs[head % query.n] = -1
    return weight * query.expand(signs, weight)


def _inputs_of_matrices(
    frame: ModuleCall, site: AttentionSite, parameter: str, values: Tensor
) -> dict[str, Tensor]:
    """Calls a copy of the attention module again, as it was called, with other values of a parameter.

    frame: the call of the copy that makes the attention call.

    Returns: the first inputs of the modules inside the attention module that have a matrix, by path, in the order of
        their calls.
    """
    copied = frame.line()[-1].module
    weight = copied.get_parameter(parameter)
    runner, arguments = next(
        (x.module, x.given)
        for x in frame.line()
        if x.given is not None and any(p is weight for p in x.module.parameters())
    )
    inputs: dict[str, Tensor] = {}

    def keep(path: str, _: nn.Module, args: Args) -> None:
        if args and isinstance(args[0], Tensor):
            inputs.setdefault(path, args[0].detach().clone())

    with ExitStack() as undo:
        undo.enter_context(extra_pass(runner))
        # Gives the weight its values back, too.
        undo.enter_context(undisturbed(runner))
        undo.enter_context(arguments.as_given())
        for path, module in copied.get_submodule(
            site.name.partition("#")[0]
        ).named_modules():
            if _has_matrix(module):
                hook = functools.partial(keep, path)
                undo.callback(module.register_forward_pre_hook(hook).remove)
        weight.data = values
        args, kwargs = arguments.copied(torch.clone)
        forward(runner, nullcontext(), args, kwargs, graph=False, together=False)
    return inputs


def _has_matrix(module: nn.Module) -> bool:
    """True for a leaf module with a two-dimensional weight."""
    return not any(module.children()) and any(p.ndim == 2 for p in module.parameters())
