"""The attention sites of a watched model, which are found in the first measured pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import final

from torch import nn

from qkeel import distributed as dist
from qkeel.capture.calls import Seen
from qkeel.capture.visible_sets import (
    KeyOrigin,
    LayerType,
    VisibleSets,
    layer_type,
    told_apart,
    visible_sets,
)
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.heads.site import Sites, share
from qkeel.monitor.processes import ProcessGroup
from qkeel.sites.find import found_sites


@final
class WatchedSites:
    """The sites of a model: those described by hand or given from the start, and all others once they are found.

    Attributes:
        all: the sites; `all.missed` has the attention layers that were found but not recognized.
        types: the types of the layers whose calls were seen; replaced by a new object when one changes.
        errors: how many searches have failed.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        described: Sites,
        group: ProcessGroup,
        given: Sites | None,
    ) -> None:
        """name: the name of the model, "" if there is only one. described: the sites described by hand, which are
        extended in place. given: the sites that were found earlier, or None."""
        self._name, self.model, self.all = name, model, described
        self._group, self._is_given = group, given is not None
        self.types: Mapping[str, LayerType] = {}
        self.errors = 0
        if given is not None:
            self._add(given)
        # By site, of the call with the most queries so far, and whether `types` lacks some of them.
        self._sets: dict[str, VisibleSets] = {}
        self._is_stale = False
        # Of the search, told after the pass.
        self._error: QkeelError | None = None
        self._has_attention = self._told_silent = False

    def _add(self, sites: Sites) -> None:
        described = {site.name for site in self.all}
        self.all += [site for site in sites if site.name not in described]
        self.all.missed, self.all.indexers = sites.missed, sites.indexers

    def find(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Finds the sites from the arguments of a pass that is about to begin, in one more forward pass.

        Raises: InvalidValueError if this requires a pass in all processes, and not all of them watch the model.
        """
        is_split = dist.world() > 1 and any(map(dist.is_split, self.model.parameters()))
        # The search gathers weights, so all processes have to make it together.
        self._group.begin(self._name, gathers=is_split)
        if self._is_given:
            return
        if is_split and not self._group.several:
            raise InvalidValueError(
                "expected every process of this run to watch the model: its weights are split, and the search for its "
                "attention runs a forward pass in all processes"
            )
        sites = Sites()
        try:
            sites, _ = found_sites(self.model, args, kwargs)
        except QkeelError as error:
            # Told after the pass, because the pass itself may fail with the user's own error.
            self._error = error
        if sites.missed:
            not_understood = "; ".join(map(str, sites.missed))
            caution(
                f"{sites.share} of {type(self.model).__name__} are watched. Not understood: {not_understood}"
            )
        has_weights = any(site.terms for site in sites)
        if sites and not has_weights and dist.splits_heads(self.model):
            caution(
                "the weights behind the heads are unknown in a model whose heads are split across processes, so they "
                "are not watched; the logits are. Give the sites that find_sites(model, batch) found before the "
                "split: qkeel.watch(..., sites=sites)"
            )
        self._add(sites)

    def see(self, name: str, call: Seen) -> None:
        """Records a call of a site. Its visible sets are examined if it has more queries than any previous call,
        because a window that is longer than the sequence does not hide any keys."""
        earlier = self._sets.get(name)
        if earlier is None or call.query_shape[1] > earlier.queries:
            origins: dict[str, KeyOrigin] = {x.name: x.origin for x in self.all}
            self._sets[name] = visible_sets(call, origins.get(name, "tokens"))
            self._is_stale = True

    def is_sparse(self, name: str) -> bool:
        """True if the queries of a site are known to see only some of the keys, with hidden keys between them."""
        return any([x.name == name and x.visible == "sparse" for x in self.all])

    def pass_over(self) -> None:
        """Updates the type of sites whose visible sets have changed."""
        if not self._is_stale:
            return
        self._is_stale, visible = False, told_apart(self._sets)
        types: dict[str, LayerType] = {}
        for name, kind in visible.items():
            types[name] = layer_type(kind, "tokens")
        for i, site in enumerate(self.all):
            if visible.get(site.name, site.visible) != site.visible:
                self.all[i] = dataclasses.replace(site, visible=visible[site.name])
            types[site.name] = self.all[i].layer_type
        self.types = types

    def pass_failed(self) -> bool:
        """Returns whether the search failed too; in that case the pass itself was the cause, and the search must be
        repeated in the next pass."""
        failed, self._error = self._error is not None, None
        return failed

    def report(self, seen: bool) -> None:
        """Must be called after a pass. Warns once about sites whose weights are unknown, and once if the pass saw no
        attention.

        Raises: QkeelError if there is only one model, no attention was seen in this pass or an earlier pass, and no
            site was found.
        """
        error, self._error = self._error, None
        self._has_attention = self._has_attention or seen
        if not seen and (self._has_attention or self.all) and not self._told_silent:
            self._told_silent = True
            caution(
                f"a pass that should have been measured made no attention call, although {share(len(self.all), 0)} of "
                f"{type(self.model).__name__} are known; such passes are not recorded"
            )
        if not self._has_attention and (error is not None or not self.all):
            error = error or RefusedError("no attention was seen in this forward pass")
            if self._group.records_jointly:
                # Other processes may have some.
                self._group.unseen, error = error, None
            elif not self._name:
                raise error
            else:
                # Another of the models may have some.
                error = (
                    None
                    if self._told_silent
                    else RefusedError(f"{self._name}: {error}")
                )
                self._told_silent = True
        if error is not None:
            self.errors += 1
            caution(
                f"the weights behind the heads are unknown, so they are not watched: {error}"
            )
