"""Remedies that act on optimizer steps, and the sites that they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qkeel.errors import InvalidValueError, check_known
from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.patching.module_tables import submodules_of
from qkeel.remedies.base import Heads, Remedy, where
from qkeel.sites.find import is_normed


class StepRemedy(Remedy):
    """Acts through hooks of the optimizer; a copy of the model is without it. It needs to know which rows of which
    weights make the heads of a site."""

    on_steps: ClassVar[bool] = True
    # Why not where q or k is normed, and where a weight is computed from another; "" where nothing speaks against it.
    if_normed: ClassVar[tuple[str, str]] = ("", "")  # the reason and the way out
    if_computed: ClassVar[str] = ""

    stacks = True

    __slots__ = ()

    def holds(self, site: AttentionSite) -> Refusal | None:
        if self.if_normed[0] and is_normed(site):
            return Refusal(*self.if_normed)
        return refuse_computed_weight(site, self.if_computed) if self.if_computed else None

    def supports(self, site: AttentionSite) -> Refusal | None:
        return self.holds(site) or refuse_unknown_weights(site)


def sites_of(heads: Heads | None, sites: Sequence[AttentionSite], remedy: str) -> list[AttentionSite]:
    """The sites that `heads` names; all where it is None.

    Raises: UnknownNameError for a site that the model lacks, InvalidValueError for a head that a site lacks.
    """
    if heads is None:
        return list(sites)
    known = {site.name: site for site in sites}
    for name, own in heads:
        check_known(f"site of {remedy}", name, known)
        if own and max(own) >= known[name].n_heads:
            raise InvalidValueError(
                f"expected heads 0 to {known[name].n_heads - 1} of {where(known[name])} for {remedy}, got {max(own)}"
            )
    return [site for site in sites if site.name in dict(heads)]


def refuse_unknown_weights(site: AttentionSite) -> Refusal | None:
    """The refusal where the weights that make the heads are not known."""
    if site.terms:
        return None
    return Refusal(
        f"it is not known which rows of which weights make its heads: {site.why or 'no reason was reported'}",
        "apply the remedy to a part of the model without this attention; where fully_shard or tensor parallel split "
        "the model, find the sites before that and give them: apply(..., sites=qkeel.find_sites(model, batch))",
    )


def refuse_computed_weight(site: AttentionSite, consequence: str) -> Refusal | None:
    """The refusal where the weight that makes the logit is computed from the one that is stored.

    Parametrizations show in the weight's name. DoRA divides by a norm of its weights that no gradient passes, so only
    the magnitudes that it learns instead show it.
    """
    dora = any(
        submodules_of(module).get("lora_magnitude_vector")
        and any(f".{name}." in s.parameter for s in (*site.query, *site.key))
        for name, module in site.module.named_modules()
    )
    if not (dora or site.reparametrised):
        return None
    return Refusal(f"the weight that makes the logit is computed from another, so {consequence}", "use one of the two")
