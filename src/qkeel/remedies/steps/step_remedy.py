"""Remedies that act on optimizer steps: sites at which steps say nothing of the logit, weights that left the model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

from torch import nn

from qkeel.errors import RefusedError
from qkeel.kernels.contract import Refusal
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.base import Remedy
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite


class StepRemedy(Remedy):
    """Acts through hooks of the optimizer; a copy of the model is without it. It needs to know which rows of which
    weights make the heads of a site."""

    on_steps: ClassVar[bool] = True
    # Why not where q or k is normed, and where a weight is computed from another; "" where nothing speaks against it.
    if_normed: ClassVar[tuple[str, str]] = ("", "")  # the reason and the way out
    if_computed: ClassVar[str] = ""

    __slots__ = ()

    def holds(self, site: AttentionSite) -> Refusal | None:
        if self.if_normed[0] and is_normed(site):
            return Refusal(*self.if_normed)
        return refuse_computed_weight(site, self.if_computed) if self.if_computed else None

    def supports(self, site: AttentionSite) -> Refusal | None:
        return self.holds(site) or refuse_unknown_weights(site)


def refuse_unknown_weights(site: AttentionSite) -> Refusal | None:
    """The refusal where the weights that make the heads are not known."""
    if site.terms:
        return None
    return Refusal(
        f"it is not known which rows of which weights make its heads: {site.why or 'no reason was reported'}",
        "apply the remedy to a part of the model without this attention",
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


Table = dict[str, Any]


@final
class ReplacementCheck:
    """Notices, at almost no cost per step, that a weight was replaced; one that only got another name is followed."""

    def __init__(self, model: nn.Module, remedy: str, names: Iterable[str]) -> None:
        self._model, self._remedy = model, remedy
        self._weights = {name: model.get_parameter(name) for name in dict.fromkeys(names)}
        self._links = _links(model, self._weights)

    def check(self) -> None:
        """Raise RefusedError if one of the weights is no longer in the model."""
        tables, keys, objects = self._links
        if all(map(operator.is_, map(dict.get, tables, keys), objects)):  # no loop in Python: some hundred per step
            return
        names = {id(p): name for name, p in self._model.named_parameters(remove_duplicate=False)}
        gone = [name for name, p in self._weights.items() if id(p) not in names]
        if gone:
            more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
            raise RefusedError(
                f"{self._remedy} was applied to {gone[0]}{more}, which "
                "has been replaced since: the step was not taken. remove() the remedy's handle and apply it again "
                "to the model as it is now"
            )
        self._weights = {names[id(p)]: p for p in self._weights.values()}
        self._links = _links(self._model, self._weights)


def _links(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> tuple[list[Table], list[str], list[object]]:
    """Every entry of a module's tables between the model and the weights, once: tables, keys, the objects there."""
    found: dict[tuple[int, str], tuple[Table, str, object]] = {}
    for name, parameter in weights.items():
        *path, leaf = name.split(".")
        module = model
        for key in path:
            table, module = submodules_of(module), module.get_submodule(key)
            found[id(table), key] = (table, key, module)
        found[id(parameters_of(module)), leaf] = (parameters_of(module), leaf, parameter)
    entries = found.values()
    return [table for table, _, _ in entries], [key for _, key, _ in entries], [held for _, _, held in entries]
