"""The attention sites of a watched model, which are found in the first measured pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import Seen
from qkeel.capture.example import ModuleCall
from qkeel.capture.intercept import CaptureMode
from qkeel.capture.visible_pattern import (
    KeyOrigin,
    LayerType,
    VisiblePattern,
    layer_type,
    told_apart,
    visible_digest,
    visible_pattern,
)
from qkeel.errors import NoAttentionError, QkeelError, RefusedError, caution
from qkeel.monitor.processes import ProcessGroup
from qkeel.sites.find import own_sites
from qkeel.sites.site import Sites, share
from qkeel.sites.site_search import SiteSearch, unknown_site, unseen

_FLAT = (
    "{} holds the model's weights in flat pieces, so what needs weights (their norms, gradients and updates) is left out; "
    "the logits are watched. torch.distributed.fsdp.fully_shard shows both"
)


@final
class _VisibleKeys:
    """What the calls of a site have shown of its visible keys, and when a change of them is examined.

    Of masks that differ in every call (padding, packed documents), the 1st, 2nd, 4th, 8th, 16th and each 32nd are
    examined while the type stays what it was.
    """

    def __init__(self) -> None:
        # Of the call that was examined last; the longest is always examined.
        self.pattern: VisiblePattern | None = None
        # By number of queries, the digests of calls that showed the type; and that of the latest call.
        self._judged: dict[int, Tensor | None] = {}
        self._latest: tuple[int, Tensor | None] | None = None
        # Since the type changed.
        self._n_changes = 0

    def has_changed(self, queries: int, digest: Tensor | None) -> bool:
        """Whether the visible keys of a call are to be examined. On an accelerator the digest of the call before is
        read, which is there by now, so that nothing waits."""
        if self.pattern is None or queries > self.pattern.queries:
            return True
        window = self.pattern.window
        # A shorter call may be too short to show a window.
        if queries < (self.pattern.queries if window is None else window + 1):
            return False
        before, self._latest = self._latest, (queries, digest)
        if digest is not None and digest.device.type != "cpu" and before is not None:
            queries, digest = before
        if queries not in self._judged:
            return True
        judged = self._judged[queries]
        if digest is None or judged is None:
            is_same = digest is judged
        else:
            is_same = digest.shape == judged.shape and torch.equal(digest, judged)
        self._n_changes += not is_same
        n = self._n_changes
        return not is_same and (n % 32 == 0 or n in (1, 2, 4, 8, 16))

    def examined(
        self, queries: int, digest: Tensor | None, pattern: VisiblePattern
    ) -> None:
        """Takes what the examination of a call has shown."""
        if self.pattern is not None and pattern.visible != self.pattern.visible:
            self._judged.clear()
            self._n_changes = 0
        self.pattern, self._judged[queries] = pattern, digest

    @property
    def shows_all(self) -> bool:
        """True unless a call that showed the type hid keys."""
        return all([digest is None for digest in self._judged.values()])


@final
class WatchedSites:
    """The sites of a model: those described by hand or given from the start, and all others once they are found.

    Attributes:
        all: the sites; `all.missed` has the attention layers that were found but not recognized.
        types: the types of the layers whose calls were seen; replaced by a new object when one changes.
        hiding: the names of sites of which a call that showed the type hid keys.
        has_weights: whether the weights of the model can be read between its passes.
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
        self.has_weights = True
        # By name, the place of each site in `all`.
        self._index: dict[str, int] = {}
        if given is not None:
            self._add(given)
        # By site, and whether `types` lacks some of them.
        self._visible: dict[str, _VisibleKeys] = {}
        self.hiding: set[str] = set()
        self._is_stale = False
        self._told_heads: set[str] = set()
        # Of the search, told after the pass.
        self._error: QkeelError | None = None
        self._has_attention = self._told_silent = False
        # In the first measured pass.
        self._own_pass: SiteSearch | None = None

    def _add(self, sites: Sites) -> None:
        # What is described by hand stands, whatever a search finds in the same module.
        known = {site.name for site in self.all}
        self.all += [site for site in sites if site.name not in known]
        self.all.missed, self.all.indexers = sites.missed, sites.indexers
        self._index = {site.name: i for i, site in enumerate(self.all)}

    def find(self) -> None:
        """Begins to look for sites in the pass that is about to begin."""
        self._group.begin(self._name)
        if not self._is_given:
            self._own_pass = SiteSearch(self.model, may_wait=self._group.all_watch)
            self._add(Sites(own_sites(self.model)))
        wrapper = dist.hides_weights(self.model)
        self.has_weights = not wrapper
        if wrapper:
            self.all[:] = [site.without_weights(wrapper) for site in self.all]
        if wrapper and not dist.rank():
            caution(_FLAT.format(wrapper))

    @property
    def searches(self) -> bool:
        """Whether sites are looked for in the pass that runs."""
        return self._own_pass is not None

    def look(self, frame: ModuleCall, *, chooses: bool) -> bool:
        """Looks for sites before an attention call of a module is read, or when it `chooses` keys. Returns whether more
        is known now."""
        if self._own_pass is None or not self._own_pass.at(frame, chooses=chooses):
            return False
        self._add(self._own_pass.sites)
        return True

    def search_over(self, watcher: CaptureMode) -> None:
        """Ends the search in a pass; `watcher` has observed it."""
        search, self._own_pass = self._own_pass, None
        if search is None:
            return
        self.all.missed = tuple(dict.fromkeys(watcher.missed))
        search.tell()
        if search.failure is not None and self.has_weights:
            self._error = RefusedError(
                f"its modules do not run alone: {search.failure}"
            )
        elif not self.all:
            self._error = NoAttentionError(unseen(self.model, watcher))
        self._tell()

    def _tell(self) -> None:
        """Tells what the search has not found."""
        if self.all.missed:
            not_understood = "; ".join(map(str, self.all.missed))
            caution(
                f"{self.all.share} of {type(self.model).__name__} are watched. Not understood: {not_understood}"
            )
        has_weights = any(site.terms for site in self.all)
        if self.all and not has_weights and dist.splits_heads(self.model):
            caution(
                "the weights behind the heads are unknown in a model whose heads are split across processes, so they "
                "are not watched; the logits are. Give the sites that find_sites(model, batch) found before the "
                "split: qkeel.watch(..., sites=sites)"
            )

    def see(self, name: str, call: Seen) -> bool:
        """Records a call of a site, and returns whether it shows a new one: a module that does not run alone is known by
        its calls. Its visible sets are examined if its keys are not those of the call that was examined last."""
        is_new = self._own_pass is not None and name not in self._index
        if self._own_pass is not None and is_new:
            module = self.model.get_submodule(name.partition("#")[0])
            self._index[name] = len(self.all)
            self.all.append(unknown_site(name, module, call, self._own_pass.failure))
        self._compare_heads(name, call)
        visible = self._visible.setdefault(name, _VisibleKeys())
        queries, digest = call.query_shape[1], visible_digest(call)
        if visible.has_changed(queries, digest):
            origins: dict[str, KeyOrigin] = {x.name: x.origin for x in self.all}
            pattern = visible_pattern(call, origins.get(name, "tokens"))
            visible.examined(queries, digest, pattern)
            self._is_stale = True
            if visible.shows_all:
                self.hiding.discard(name)
            else:
                self.hiding.add(name)
        return is_new

    def _compare_heads(self, name: str, call: Seen) -> None:
        """Warns once of a call with other heads than those whose weights are known, as some of the tokens may show."""
        heads = call.scores_shape[1]
        if name not in self._index or name in self._told_heads:
            return
        site = self.all[self._index[name]]
        is_known = heads == site.n_heads or not site.terms
        if is_known or dist.splits_heads(self.model):
            return
        self._told_heads.add(name)
        why = f"a call has {heads} heads, and its weights were found for {site.n_heads}"
        if self.searches:
            self.all[self._index[name]] = dataclasses.replace(
                site, n_heads=heads, n_kv_heads=heads, terms=(), why=why
            )
        caution(
            f"the heads of {name or 'the model itself'} depend on the input: {why}. Numbers of its weights are not "
            "those of these heads; watch batches of one length with sites=qkeel.find_sites(model, batch)"
        )

    def is_sparse(self, name: str) -> bool:
        """True if the queries of a site see only some of the keys, with hidden keys between them."""
        pattern = name in self._visible and self._visible[name].pattern
        return bool(pattern) and pattern.visible == "sparse"

    def pass_over(self) -> None:
        """Updates the type of sites whose visible sets have changed."""
        if not self._is_stale:
            return
        self._is_stale = False
        visible = told_apart(
            {k: x.pattern for k, x in self._visible.items() if x.pattern}
        )
        types: dict[str, LayerType] = {
            name: layer_type(kind, "tokens") for name, kind in visible.items()
        }
        for i, site in enumerate(self.all):
            if visible.get(site.name, site.visible) != site.visible:
                self.all[i] = dataclasses.replace(site, visible=visible[site.name])
            types[site.name] = self.all[i].layer_type
        self.types = types

    def pass_failed(self) -> bool:
        """Returns whether the search failed too; in that case the pass itself was the cause, and the search must be
        repeated in the next pass."""
        failed = self._error is not None or self._own_pass is not None
        self._error = self._own_pass = None
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
            elif self._told_silent:
                error = None
            else:
                # Another of the models may have some.
                self._told_silent = True
                error = RefusedError(f"{self._name}: {error}")
        if error is not None:
            caution(
                f"the weights behind the heads are unknown, so they are not watched: {error}"
            )
