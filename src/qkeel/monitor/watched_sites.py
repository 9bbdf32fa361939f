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
from qkeel.heads.site import AttentionSite, Sites, share
from qkeel.monitor.processes import ProcessGroup
from qkeel.sites.find import found_sites


@final
class WatchedSites:
    """Finds the sites of a model in one more forward pass, or reports why it cannot.

    `all` contains the sites that were described by hand or given from the start, and all other sites once they are
    found. `weighed` contains the sites whose weights can be read. `all.missed` contains attention layers that were
    found but not recognized.
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
        self.weighed: list[AttentionSite] = []
        self._silent = (
            False  # a warning was raised that a measured pass showed no attention
        )
        self._group = group
        self._given = given is not None
        if given is not None:
            self.all += given
            self.all.missed, self.all.indexers, self.all.linear = (
                given.missed,
                given.indexers,
                given.linear,
            )
            self.weighed = self.all
        self.types: Mapping[
            str, LayerType
        ] = {}  # of the observed sites; replaced by a new object when one changes
        self._sets: dict[
            str, VisibleSets
        ] = {}  # by site, for the call with the most queries so far
        self._fresh = False  # whether there are sets that `types` does not include yet
        self._error: QkeelError | None = (
            None  # reported after the pass if the pass succeeds
        )
        self._seen = False
        self.errors = 0  # searches that failed

    def find(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Finds the sites from the arguments of a pass that is about to begin. Returns whether that pass can be
        measured.

        Raises: InvalidValueError if this requires a pass in all processes, and not all of them watch the model.
        """
        split = dist.world() > 1 and any(map(dist.is_split, self.model.parameters()))
        self._group.begin(self._name, gathers=split)
        if split and not self._given and not self._group.several:
            raise InvalidValueError(
                "expected every process of this run to watch the model: its weights are split, and the search for its "
                "attention runs a forward pass in all processes"
            )
        if self._given:
            return True
        found = Sites()
        try:
            found, _ = found_sites(self.model, args, kwargs)
        except QkeelError as error:
            self._error = error
        self.all.missed, self.all.indexers, self.all.linear = (
            found.missed,
            found.indexers,
            found.linear,
        )
        if found.missed:
            others = "; ".join(map(str, found.missed))
            caution(
                f"{found.share} of {type(self.model).__name__} are watched. Not understood: {others}"
            )
        if (
            dist.splits_heads(self.model)
            and found
            and not any(site.terms for site in found)
        ):
            caution(
                "the weights behind the heads are unknown in a model whose heads are split across processes, so they "
                "are not watched; the logits are. Give the sites that find_sites(model, batch) found before the "
                "split: qkeel.watch(..., sites=sites)"
            )
        described = {site.name for site in self.all}
        self.all += [site for site in found if site.name not in described]
        self.weighed = self.all
        return True

    def see(self, name: str, call: Seen) -> None:
        """Records a call of a site. Its visible sets are examined if it has more queries than any previous call,
        because a window that is longer than the sequence does not hide any keys."""
        known = self._sets.get(name)
        if known is None or call.query_shape[1] > known.queries:
            origins: dict[str, KeyOrigin] = {
                site.name: site.origin for site in self.all
            }
            self._sets[name], self._fresh = (
                visible_sets(call, origins.get(name, "tokens")),
                True,
            )

    def is_sparse(self, name: str) -> bool:
        """True if the queries of a site are known to see only some of the keys, with hidden keys between them."""
        return any(
            [site.name == name and site.visible == "sparse" for site in self.all]
        )

    def pass_over(self) -> None:
        """Updates the type of sites whose visible sets have changed."""
        if not self._fresh:
            return
        self._fresh, seen = False, told_apart(self._sets)
        for i, site in enumerate(self.all):
            if seen.get(site.name, site.visible) != site.visible:
                self.all[i] = dataclasses.replace(site, visible=seen[site.name])
        unknown: dict[str, LayerType] = {
            name: layer_type(visible, "tokens") for name, visible in seen.items()
        }
        known: dict[str, LayerType] = {site.name: site.layer_type for site in self.all}
        self.types = unknown | known

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
        if not seen and (self._seen or self.all) and not self._silent:
            self._silent = True
            caution(
                f"a pass that should have been measured made no attention call, although {share(len(self.all), 0)} of "
                f"{type(self.model).__name__} are known; such passes are not recorded"
            )
        self._seen = self._seen or seen
        error, self._error = self._error, None
        if not self._seen and (error is not None or not self.all):
            error = error or RefusedError("no attention was seen in this forward pass")
            if not self._group.records_jointly and not self._name:
                raise error
            if self._group.records_jointly:
                self._group.unseen, error = error, None  # other processes may have some
            else:
                error, self._silent = (
                    None if self._silent else RefusedError(f"{self._name}: {error}"),
                    True,
                )
        if error is not None:
            self.errors += 1
            caution(
                f"the weights behind the heads are unknown, so they are not watched: {error}"
            )
