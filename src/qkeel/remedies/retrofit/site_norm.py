"""The norm that a retrofit put on q and k of one site: its gains, and the share of it that is in force."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.attention.projection_norms import HeadNorm
from qkeel.remedies.base import where
from qkeel.sites.site import AttentionSite
from qkeel.spec import NoNorm
from qkeel.spec.norm import Norm, Part
from qkeel.spec.slot import Geometry, Parameter, Params


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlendedNorm(Norm):
    """The norm slot of an own module while its norm is blended in: (1 - s) x + s norm(x), s the share."""

    inner: Norm
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
class SiteNorm(Handle):
    """The norm of a site that has just been normed; `remove()` leaves the whole of it in force.

    `gains` are those of q and of k as they are stored, `one` is what is added to them before they multiply.

    Args:
        eps: that of the norm from now on; None leaves it as it is.

    Raises:
        RefusedError: the norm has no gain of q and of k.
    """

    def __init__(self, site: AttentionSite, eps: float | None) -> None:
        module = site.module
        self._own = module if isinstance(module, SpecModule) else None
        found = [submodules_of(module).get(f"{side}_norm") for side in "qk"]
        self._heads = [norm for norm in found if isinstance(norm, HeadNorm)]
        stored = [norm.weight for norm in self._heads]
        norm = self._heads[0].norm if self._heads else NoNorm()
        if self._own is not None:
            norm, stored = self._own.spec.norm, [parameters_of(module).get(f"{side}_norm") for side in "qk"]
        gains = tuple(gain for gain in stored if gain is not None)
        if len(gains) != 2:
            raise RefusedError(
                f"{where(site)}: this norm has no gain of q and of k that could be fitted; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        self.gains = gains
        self.norm = norm if eps is None else norm.with_eps(eps)
        self.one, self.per_head = float(norm.gain == "one_plus_dim"), norm.gain in ("head", "head_dim")
        for head in self._heads:
            head.norm = self.norm
        self.set(1.0)
        super().__init__(self._end)

    def set(self, share: float) -> None:
        """From now on this share of the norm."""
        if self._own is not None:
            norm = self.norm if share == 1 else BlendedNorm(inner=self.norm, share=share)
            self._own.spec = self._own.spec.replace(norm=norm)
        for head in self._heads:
            head.blend(share)

    def _end(self) -> None:
        self.set(1.0)
        for head in self._heads:
            head.share = None

    @torch.no_grad()
    def put(self, factors: Tensor) -> None:
        """Constant gains whose product is `factors` [h] (all equal unless per_head)."""
        query, key = self.gains
        if not self.per_head:
            root = float(factors[0].sqrt() - self.one)
            query.fill_(root)
            key.fill_(root)
            return
        groups = key.shape[0]
        of_key = factors.unflatten(0, (groups, -1)).log().mean(1).mul(0.5).exp()
        key.copy_(of_key[:, None].expand_as(key))
        query.copy_((factors / of_key.repeat_interleave(len(factors) // groups))[:, None].expand_as(query))
