"""A gate on the output of attention: a sigmoid of the layer's input, before the output projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.instance_forward import InstanceForward, put_in_place, take_out
from qkeel.remedies.attention.site_parameters import add_submodules
from qkeel.remedies.base import Args, Kwargs, Remedy, Target, check_choice, compose_all
from qkeel.remedies.blocks.output_projection import Output, first_tensor, output_of
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate(Remedy):
    """Output o ← o · σ(W_g x), x the input of the attention module: one gate per feature of o, or `per=head`.

    init=keep: o · 2σ(W_g x) with W_g = 0 at the start, where every gate is exactly 1. It is the published gate of a
    model whose output projection was doubled. init=random: o · σ(W_g x), W_g drawn as torch draws a linear layer's.

    Source: Qiu et al. 2025, arXiv 2505.06708 (elementwise after attention is its best form); `keep` is qkeel's.
    """

    per: Literal["feature", "head"] = "feature"
    init: Literal["keep", "random"] = "keep"

    name = "output_gate"
    line = "gates what attention returns by a sigmoid of the layer's input, so that a head may say nothing"
    source = "Qiu et al. 2025, arXiv 2505.06708"

    def __post_init__(self) -> None:
        check_choice(self.name, "per", self.per, ("feature", "head"))
        check_choice(self.name, "init", self.init, ("keep", "random"))

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, nn.MultiheadAttention):
            return Refusal(
                "nn.MultiheadAttention multiplies by its output projection inside one function of torch's",
                "use an attention whose output projection is a module that is called",
            )
        if site.description is not None or site.below:
            return Refusal("its attention was described by hand or runs out of sight", "build it with qkeel.nn")
        return None

    def apply(self, target: Target) -> Handle:
        return compose_all(self._handles(target))

    def _handles(self, target: Target) -> Iterator[Handle]:
        rng = torch.Generator().manual_seed(0)
        done: set[int] = set()
        for site in target.sites:
            if id(site.module) in done:
                raise RefusedError(f"output_gate at {site.name}: its module computes several attentions")
            done.add(id(site.module))
            yield self._gate(target, site, rng)

    def _gate(self, target: Target, site: AttentionSite, rng: torch.Generator) -> Handle:
        module = site.module
        out = _own(module) if isinstance(module, SpecModule) else output_of(target, site, per_head=self.per == "head")
        like = target.parameter(site.query[0].parameter) if site.terms else next(out.module.parameters())
        rows = site.n_heads if self.per == "head" else out.features
        weight = torch.zeros(rows, out.width)
        if self.init == "random":
            weight.uniform_(-(out.width**-0.5), out.width**-0.5, generator=rng)
        gate = Gate(nn.Parameter(weight.to(like)), factor=2.0 if self.init == "keep" else 1.0)
        added = add_submodules(target, site, {"output_gate": gate}, like, matrices=True)
        source = GateInput(module)
        gated = GatedProjection(out.module, source, gate)
        put_in_place(source)
        put_in_place(gated)

        def undo() -> None:
            take_out(gated)
            take_out(source)
            added.remove()

        return Handle(undo)


def _own(module: SpecModule) -> Output:
    projection = module.get_submodule("o_proj")
    assert isinstance(projection, nn.Linear)
    return Output(module=projection, features=projection.in_features, width=projection.out_features)


@final
class Gate(nn.Module):
    """The gate factor · σ(W x) of an input x [... m], one value per row of W."""

    def __init__(self, weight: nn.Parameter, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = weight, factor

    def forward(self, x: Tensor) -> Tensor:
        """[... m] -> [... rows]."""
        gates = nn.functional.linear(x, self.weight).sigmoid()
        return gates if self.factor == 1.0 else self.factor * gates

    def extra_repr(self) -> str:
        """Its sizes, in print(model)."""
        return f"{self.weight.shape[1]} to {self.weight.shape[0]} gates"


@final
class GateInput(InstanceForward):
    """Holds the input of the attention module while its forward runs."""

    x: Tensor | None = None

    def run(self, args: Args, kwargs: Kwargs) -> object:
        """The module's forward."""
        self.x = first_tensor(args, kwargs)
        out = self.replaced(args, kwargs)
        self.x = None
        return out


@final
class GatedProjection(InstanceForward):
    """The output projection of gated heads."""

    def __init__(self, module: nn.Module, source: GateInput, gate: Gate) -> None:
        super().__init__(module)
        self.source, self.gate = source, gate

    def run(self, args: Args, kwargs: Kwargs) -> object:
        """The projection of the gated input."""
        x = self.source.x
        if x is None:
            raise RefusedError("output_gate: the output projection was called outside of its attention module")
        out, gates = args[0], self.gate(x)
        heads = out.unflatten(-1, (gates.shape[-1], -1))
        return self.replaced(((heads * gates.to(out.dtype)[..., None]).flatten(-2), *args[1:]), kwargs)
