"""Remedies that put a factor of the query's position on the logit."""

from __future__ import annotations

from collections.abc import Iterator

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import Target
from qkeel.remedies.change_spec import ChangeSpec
from qkeel.remedies.seam import Seam
from qkeel.remedies.stand_in import standing_in
from qkeel.sites.probe import biased
from qkeel.sites.site import AttentionSite
from qkeel.spec import LogN, NoCap
from qkeel.spec.scale import FloorLogTemperature


class ChangeScale(ChangeSpec):
    """Puts a factor on q·k, not on what is added to it.

    Where attention is written out, only the sum reaches the softmax: with a bias in it, or a cap, this is refused.
    """

    __slots__ = ()

    def change_others(self, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
        written = biased(target.model, target.example[0], target.example[1]) if sites else set()
        for site in sites:
            seams = any(isinstance(s, Seam) for s in standing_in(site.module))
            # A cap of the model's own bends what it is scaled by here; one that qkeel put there comes after the scale.
            if (site.name in written and not seams) or not (seams or isinstance(site.spec.cap, NoCap)):
                raise RefusedError(
                    f"{self.name} at {site.name or 'the model itself'}: a bias or a cap is in the scores before the "
                    "softmax, where they can't be told from q·k any more; use the model's fused attention "
                    "(attn_implementation='sdpa')"
                )
        yield from ChangeSpec.change_others(self, target, sites)


def refuse_scaled(site: AttentionSite) -> Refusal | None:
    """Why a site takes no other factor of positions, if so."""
    if isinstance(site.spec.scale, (LogN, FloorLogTemperature)):
        return Refusal(f"logits are scaled by position already ({site.spec.scale.formula()})", "remove that first")
    return None
