"""Remedies that change optimizer steps, the sites that they refuse, and the heads that an option names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qkeel.errors import InvalidValueError, check_known
from qkeel.kernels.contract import Refusal
from qkeel.patching.module_tables import submodules_of
from qkeel.remedies.base import HeadsBySite, Remedy, quantised, where
from qkeel.sites.site import AttentionSite, is_normed

UNDOES_MATCHED_STEPS = Refusal(
    "lalr raises the rates as a clip shrinks the weights, which undoes matched steps",
    "use one of the two, or steps=full",
)


class StepRemedy(Remedy):
    """A remedy that works through hooks on the optimizer, so that a copy of the model does not have it.

    It needs to know which rows of which weights belong to the heads of a site."""

    on_steps: ClassVar[bool] = True
    #: Whether it may act under a pruning mask, where the weight in use is the stored one but for some zeros.
    takes_masks: ClassVar[bool] = True
    #: Whether it is meant for the stored weight of sigma_reparam.
    takes_sigma_reparam: ClassVar[bool] = False
    #: Why the remedy is refused if q or k is normed, and what to do instead; "" if it is not.
    if_normed: ClassVar[tuple[str, str]] = ("", "")
    #: The same if a weight is computed from another.
    if_computed: ClassVar[str] = ""

    __slots__ = ()

    @property
    def saves_state(self) -> bool:
        """Whether the optimizer's checkpoints contain a state of the remedy; see `SavedState`."""
        return False

    def holds(self, site: AttentionSite) -> Refusal | None:
        if self.if_normed[0] and is_normed(site):
            return Refusal(*self.if_normed)
        if self.if_normed[0] and site.unscaled:
            return Refusal(
                site.unscaled, "use qk_lr, or softcap, which need no such product"
            )
        # What hooks compute is looked for by `check_weights_in_use`.
        if self.if_computed and _is_computed(site, self.takes_sigma_reparam):
            return Refusal(
                "the weight on the logit path is computed from another weight, so "
                f"{self.if_computed}",
                "use one of the two",
            )
        return None

    def supports(self, site: AttentionSite) -> Refusal | None:
        refusal = self.holds(site)
        if refusal is not None or site.terms:
            return refusal
        if (refusal := quantised(site)) is not None:
            return refusal
        return Refusal(
            f"it is not known which rows of which weights belong to its heads: {site.why or 'no reason was reported'}",
            "apply the remedy to a part of the model without this attention; if fully_shard or tensor parallelism "
            "splits the model, or its layers are converted, as to 8-bit floats, find the sites before and pass them: "
            "apply(..., sites=qkeel.find_sites(model, batch))",
        )


def _is_computed(site: AttentionSite, takes_sigma_reparam: bool) -> bool:
    """True if the logits use a weight that is computed from the stored one, in another way than sigma_reparam's where
    that is fine.

    Parametrizations are recognised by the weight's name. DoRA divides by a norm of its weights through which no
    gradient flows, so it can be recognised only by its learned magnitudes."""
    names = [s.parameter for s in (*site.query, *site.key)]
    dora = [
        f".{name}."
        for name, module in site.module.named_modules()
        if submodules_of(module).get("lora_magnitude_vector")
    ]
    return any(
        mark in parameter
        for parameter in names
        for mark in (*dora, *(() if takes_sigma_reparam else ("parametrizations.",)))
    )


def sites_of(
    heads: HeadsBySite | None, sites: Sequence[AttentionSite], remedy: str
) -> list[AttentionSite]:
    """Returns the sites that `heads` names, or all sites if it is None.

    Raises:
        UnknownNameError: the model has no such site.
        InvalidValueError: a site has no such head.
    """
    if heads is None:
        return list(sites)
    sites_by_name = {site.name: site for site in sites}
    for name, head_numbers in heads:
        check_known(f"site of {remedy}", name, sites_by_name)
        n = sites_by_name[name].n_heads
        if head_numbers and max(head_numbers) >= n:
            raise InvalidValueError(
                f"expected heads 0 to {n - 1} of {where(sites_by_name[name])} for {remedy}, got {max(head_numbers)}"
            )
    return [site for site in sites if site.name in dict(heads)]
