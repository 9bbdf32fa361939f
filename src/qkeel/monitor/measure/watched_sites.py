"""The attention sites of a watched model, found in the first pass that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import nn

from qkeel import dist
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution
from qkeel.heads.site import AttentionSite, Sites, share
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.sites.find import find_sites


@final
class WatchedSites:
    """Finds the sites of a model by one more forward pass, and says why where it can't.

    `all` holds sites that were described by hand or given from the start, the others once they are found. `weighed` are
    those whose weights can be read. `all.missed` were seen but not understood.
    """

    def __init__(self, name: str, model: nn.Module, described: Sites, group: ProcessGroup, given: Sites | None) -> None:
        """Takes the name of the model, "" where there is only one, `described`, which is extended in place, and the
        sites that were found earlier, if they were."""
        self._name, self.model, self.all = name, model, described
        self.weighed: list[AttentionSite] = []
        self._silent = False  # it was said that a measured pass showed no attention
        self._group = group
        self._given = given is not None
        if given is not None:
            self.all += given
            self.all.missed = given.missed
            self.weighed = self.all
        self._error: QkeelError | None = None  # reported after the pass, if that goes through
        self._seen = False

    def find(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Finds them from the arguments of a pass that is about to begin. Returns whether that pass can be measured.

        Raises: InvalidValueError if that takes a pass of all processes, and not all of them watch.
        """
        split = dist.world() > 1 and any(map(dist.is_split, self.model.parameters()))
        if not self._group.begin(self._name, gathers=split):
            return False
        if split and not self._given and not self._group.several:
            raise InvalidValueError(
                "expected every process of this run to watch the model: its weights are split, and the search for its "
                "attention is a forward pass of all processes"
            )
        if self._given:
            return True
        found = Sites()
        try:
            found = find_sites(self.model, *args, **kwargs)
        except QkeelError as error:
            self._error = error
        self.all.missed = found.missed
        if found.missed:
            others = "; ".join(map(str, found.missed))
            caution(f"{found.share} of {type(self.model).__name__} are watched. Not understood: {others}")
        if dist.splits_heads(self.model) and found and not any(site.terms for site in found):
            caution(
                "the weights behind the heads are unknown in a model whose heads are split over processes, so they are "
                "not watched; the logits are. Give the sites that find_sites(model, example) found before the split: "
                "qkeel.watch(..., sites=sites)"
            )
        described = {site.name for site in self.all}
        self.all += [site for site in found if site.name not in described]
        self.weighed = self.all
        return True

    def pass_failed(self) -> bool:
        """Returns whether the search failed too: the fault was the pass's, and the next one is to be searched again."""
        failed, self._error = self._error is not None, None
        return failed

    def report(self, seen: bool) -> None:
        """After a pass that saw attention or not: warns once of sites whose weights are unknown, once if it saw none.

        Raises: QkeelError if no attention was seen, in this pass or an earlier one, and no site was found, in the only
        model.
        """
        if not seen and (self._seen or self.all) and not self._silent:
            self._silent = True
            caution(
                f"a pass that was to be measured showed no attention call, though {share(len(self.all), 0)} of "
                f"{type(self.model).__name__} are known; nothing is recorded of such passes"
            )
        self._seen = self._seen or seen
        error, self._error = self._error, None
        if not self._seen and (error is not None or not self.all):
            error = error or RefusedError("no attention was seen in this forward pass")
            if not self._group.records_jointly and not self._name:
                raise error
            if self._group.records_jointly:
                self._group.unseen, error = error, None  # others may have some
            else:
                error, self._silent = None if self._silent else RefusedError(f"{self._name}: {error}"), True
        if error is not None:
            caution(f"the weights behind the heads are unknown, so they are not watched: {error}")
