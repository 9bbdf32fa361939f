"""A norm that is blended in: (1 - s) x + s norm(x), the share s of each site between 0 (not there) and 1 (whole)."""

from __future__ import annotations

import dataclasses
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.handle import Handle
from qkeel.nn.spec_module import SpecModule
from qkeel.sites.site import AttentionSite
from qkeel.spec.norm import GainNorm, Norm, Part
from qkeel.spec.slot import Geometry, Parameter, Params


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlendedNorm(Norm):
    """The norm slot of an own module while its norm is blended in."""

    inner: GainNorm
    share: float

    @property
    def sides(self) -> str:
        """Those of the norm that is blended in."""
        return self.inner.sides

    def apply(self, part: Part, x: Tensor, params: Params) -> Tensor:
        return torch.lerp(x, self.inner.apply(part, x, params), self.share)

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    def formula(self) -> str:
        return f"{1 - self.share:g} of q, k and {self.share:g} of {self.inner.formula()}"


@final
class Share:
    """A forward hook on a foreign site's norms; the share is a tensor, so compiled code need not be compiled again."""

    def __init__(self) -> None:
        self.value = torch.ones(())

    def __call__(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        x = inputs[0]
        self.value = self.value.to(x.device)
        return torch.lerp(x, output, self.value.to(x.dtype))  # exactly x at 0, exactly the norm at 1


@final
class Blend(Handle):
    """Sets the share of the norm of one site; `remove()` leaves the whole norm."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.share = 1.0
        self._hook = Share()
        self._hooks: list[Any] = []
        if not isinstance(site.module, SpecModule):
            norms = [site.module.get_submodule(f"{s}_norm") for s in "qk"]
            self._hooks = [norm.register_forward_hook(self._hook) for norm in norms]
        super().__init__(self._end)

    def set(self, share: float) -> None:
        """From now on this share of the norm."""
        self.share = share
        module = self.site.module
        if not isinstance(module, SpecModule):
            self._hook.value.fill_(share)
            return
        norm = module.spec.norm
        inner = norm.inner if isinstance(norm, BlendedNorm) else norm
        if isinstance(inner, GainNorm):
            module.spec = module.spec.replace(norm=inner if share == 1 else BlendedNorm(inner=inner, share=share))

    def _end(self) -> None:
        self.set(1.0)
        for hook in self._hooks:
            hook.remove()
