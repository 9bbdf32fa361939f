"""Output gate: multiplies the output of attention by a sigmoid of the layer's input, before the output projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel.capture.example import copied, undisturbed
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import SpecModule
from qkeel.patching.module_forward import InstanceForward, put_in_place
from qkeel.remedies.added_parameters import add_submodules
from qkeel.remedies.base import Args, Kwargs, Remedy, Target, compose_all, where
from qkeel.sites.site import AttentionSite
from qkeel.sites.site_search import run_once

# The output projection of an attention layer, the number of its input features, and the width of the layer's input.
OutputProjection = tuple[nn.Module, int, int]
_NO_PROJECTION = (
    "no module inside it multiplies the output of attention by a weight, token by token; the gate belongs before such an "
    "output projection"
)


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
        modules = [id(site.module) for site in target.sites]
        for site in target.sites:
            if modules.count(id(site.module)) > 1:
                raise RefusedError(
                    f"output_gate at {site.name}: its module computes attention more than once"
                )
        foreign = [s for s in target.sites if not isinstance(s.module, SpecModule)]
        projections = output_projections(target, foreign, per_head=self.per == "head")
        # Every process begins with the same gates, whatever its own generator has drawn.
        rng = torch.Generator().manual_seed(0)
        for site in target.sites:
            if isinstance(site.module, SpecModule):
                own = site.module.get_submodule("o_proj")
                assert isinstance(own, nn.Linear)
                sizes = own, own.in_features, own.out_features
            else:
                sizes = projections[site.name]
            yield self._gate(target, site, sizes, rng)

    def _gate(
        self,
        target: Target,
        site: AttentionSite,
        sizes: OutputProjection,
        rng: torch.Generator,
    ) -> Handle:
        projection, features, width = sizes
        near = (
            target.parameter(site.query[0].parameter)
            if site.terms
            else next(projection.parameters())
        )
        weight = torch.zeros(site.n_heads if self.per == "head" else features, width)
        if self.init == "random":
            weight.uniform_(-(width**-0.5), width**-0.5, generator=rng)
        gate = Gate(
            nn.Parameter(weight.to(near)), factor=2.0 if self.init == "keep" else 1.0
        )
        added = add_submodules(target, site, {"output_gate": gate}, near, matrices=True)
        source = GateInput(site.module)
        return compose(
            [
                added,
                put_in_place(source),
                put_in_place(GatedProjection(projection, source, gate)),
            ]
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


def first_tensor(args: Args, kwargs: Mapping[str, object]) -> Tensor | None:
    """Returns the first floating-point tensor among a call's arguments, which is assumed to be the hidden states."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    return None


def output_projections(
    target: Target, sites: Sequence[AttentionSite], *, per_head: bool
) -> dict[str, OutputProjection]:
    """Finds in each site's module the first module after the attention call that multiplies the output of attention by a
    weight, from a pass on the example.

    Raises:
        RefusedError: there is no such module at a site.
    """
    projections: dict[str, OutputProjection | str] = {}
    is_trying = False

    def try_site(
        site: AttentionSite, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> None:
        nonlocal is_trying
        if is_trying:
            return
        if site.name in projections:
            projections[site.name] = "its module runs more than once in a pass"
            return
        is_trying = True
        try:
            projections[site.name] = _projection_of(
                target, site, args, kwargs, per_head=per_head
            )
        finally:
            is_trying = False

    with ExitStack() as undo:
        for site in sites:
            if not site.terms:
                raise RefusedError(
                    f"output_gate at {where(site)}: it is not known which weights produce its heads ({site.why})"
                )
            hook = site.module.register_forward_pre_hook(
                functools.partial(try_site, site), with_kwargs=True
            )
            undo.callback(hook.remove)
        if sites:
            run_once(target.model, *target.batch)
    of_sites: dict[str, OutputProjection] = {}
    for site in sites:
        projection = projections.get(site.name, _NO_PROJECTION)
        if isinstance(projection, str):
            raise RefusedError(f"output_gate at {where(site)}: {projection}")
        of_sites[site.name] = projection
    return of_sites


def _projection_of(
    target: Target, site: AttentionSite, args: Args, kwargs: Kwargs, *, per_head: bool
) -> OutputProjection | str:
    """Calls a site's module twice as it was called, the second time with the query weights of its last head negated, which
    no norm of the queries can undo. Returns the first module inside of which the input differs, or why there is none.

    With `per_head`, no other head's features may differ, and those of the head must be adjacent."""
    query, head = site.terms[0].query[-1], site.n_heads - 1
    weight = target.parameter(query.parameter)
    signs = torch.ones(query.n, device=weight.device, dtype=weight.dtype)
    signs[head % query.n] = -1
    before = _inputs_of_matrices(site.module, args, kwargs, lambda: None)
    after = _inputs_of_matrices(
        site.module, args, kwargs, lambda: weight.mul_(query.expand(signs, weight))
    )
    x = first_tensor(args, kwargs)
    # Modules in the order of their calls, so the first that differs is the projection.
    for module, a in before.items():
        b = after.get(module)
        if b is None or torch.equal(a, b):
            continue
        if x is None or a.shape[:-1] != x.shape[:-1]:
            return _NO_PROJECTION
        # Features of the head whose queries were negated.
        changed = (a != b).flatten(0, -2).any(0)
        first = head * (a.shape[-1] // site.n_heads)
        if per_head and (not changed[first:].any() or changed[:first].any()):
            return (
                "the features of a head are not adjacent before the output projection, so there is no gate per head; "
                "use per=feature"
            )
        return module, a.shape[-1], x.shape[-1]
    return _NO_PROJECTION


def _inputs_of_matrices(
    attention: nn.Module, args: Args, kwargs: Kwargs, change: Callable[[], object]
) -> dict[nn.Module, Tensor]:
    """Calls a module after a change of its weights, which is taken back, and returns the first inputs of the modules in it
    that have a matrix, in the order of their calls."""
    inputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, given: Args) -> None:
        if given and isinstance(given[0], Tensor):
            inputs.setdefault(module, given[0].detach().clone())

    with ExitStack() as undo:
        # Gives the weights their values back, too.
        undo.enter_context(undisturbed(attention))
        for module in attention.modules():
            is_leaf = not any(module.children())
            if is_leaf and any(p.ndim == 2 for p in module.parameters()):
                undo.callback(module.register_forward_pre_hook(keep).remove)
        change()
        attention(*copied(args), **copied(kwargs))
    return inputs
