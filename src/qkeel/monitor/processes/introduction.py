"""The introduction of a process to the others that measure with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from torch import nn

from qkeel.dist.layout import Layout, head_axes
from qkeel.errors import RefusedError
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.monitor.processes.members import Member
from qkeel.monitor.processes.transfer import Form
from qkeel.monitor.record.description import site_facts


@final
class Introduction:
    """Makes a process's Member from its model: the place is read from the weights, unless it was given.

    `stages` gets, by the name of each of several models, "" of one, of which stage of a pipeline the first pass shows
    the model to be.
    """

    def __init__(self, model: nn.Module, sites: Callable[[], Sequence[AttentionSite]], layout: Layout | None) -> None:
        """`sites` gives them once they are known."""
        self.stages: dict[str, int | None] = {}
        self._model, self._sites, self._layout = model, sites, layout

    def __call__(self, form: Form) -> Member:
        """Raises: RefusedError if the weights are split in a way that is not known, or only some of several models are
        stages of a pipeline."""
        sites = self._sites()
        known = {site.name: site for site in sites}
        names = [site for site, name, _, _ in form if name == "max_logit"]
        modules = {name: _with_weights(self._model, name) for name in names}
        layout = self._layout or Layout.of_model(self._model, modules.values(), self.stages.get(""))
        if self._layout is not None:
            by_hand = layout.head_parts > 1
            split = dict.fromkeys(names, (by_hand, by_hand))
        else:
            split = {name: self._split(module, known.get(name)) for name, module in modules.items()}
        stages = {} if self._layout is not None else self._known_stages()
        sizes = {name: sum(p.numel() for p in self._model.get_submodule(name).parameters()) for name in stages or ("",)}
        about = {"sites": site_facts(sites), "parameters": sizes}
        return Member(layout=layout, form=form, split=split, about=about, stages=stages)

    def _known_stages(self) -> dict[str, int]:
        """The stages that several models are; {} where they are none, and of one model."""
        models = [name for name, _ in self._model.named_children()] if "" not in self.stages else []
        known = {name: stage for name in models if (stage := self.stages.get(name)) is not None}
        if known and len(known) < len(models):
            raise RefusedError(
                f"expected models that are all stages of a pipeline, or none of them, got stages {known} among "
                f"{', '.join(models)}: watch the others by themselves"
            )
        return known

    def _split(self, module: nn.Module, site: AttentionSite | None) -> tuple[bool, bool]:
        """Returns whether the query heads of a site, and its key heads, are split over processes."""
        if not head_axes(self._model, module.parameters()):
            return False, False
        if site is None or not site.terms:
            return True, True
        ways = ([term.query for term in site.terms], [term.key for term in site.terms])
        heads, keys = (self._any_split(way) for way in ways)
        return heads, keys

    def _any_split(self, chains: Iterable[Sequence[HeadSlice]]) -> bool:
        weights = [self._model.get_parameter(chain[-1].parameter) for chain in chains if chain[-1].n > 1]
        return bool(head_axes(self._model, weights))


def _with_weights(model: nn.Module, site: str) -> nn.Module:
    """The module of a site, or the nearest around it that has weights."""
    path = site.partition("#")[0].split(".") if site else []
    while path:
        module = model.get_submodule(".".join(path))
        if next(module.parameters(), None) is not None:
            return module
        path.pop()
    return model
