"""One observed forward pass: where it is searched for attention, and what is measured of its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen, SiteStatistics
from qkeel.capture.example import ModuleCall
from qkeel.capture.intercept import (
    CapturedCall,
    CaptureMode,
    Places,
    PlainCall,
    Watch,
)
from qkeel.capture.known_sites import KnownSites
from qkeel.capture.readers import READERS
from qkeel.functional.statistics import KernelRows, LogitStats
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import CallRows, bounded_maxima
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import extra_of_another
from qkeel.patching.modes import Args, Kwargs
from qkeel.spec import AttentionCall

if TYPE_CHECKING:
    from qkeel.sites.tap import Tap

MeasurePlain = Callable[[Tensor, Tensor, float, bool], LogitStats | CallRows | None]
MeasureCall = Callable[[Seen], LogitStats | CallRows | None]
MeasureRows = Callable[[AttentionCall, KernelRows], LogitStats | None]

# For each function by whose name a call was observed, what to watch in the calling module.
_WATCHES = {
    **dict.fromkeys(READERS, Watch.FUSED),
    "softmax": Watch.ALL,
}


class PassSearch:
    """Where passes in one mode of a model, training or evaluation, are searched for attention.

    Searching everywhere costs one callback for each torch function call. Once the modules with attention are known, a
    pass is searched in these alone, except passes 1, 2, 4, 8, …, in which attention may appear that was not seen
    before, and passes after a change of the modules.

    Attributes:
        inside: the modules at the latest places, and those inside them.
    """

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.inside: list[nn.Module] = []
        self._passes = 0
        self._places: Places | None = None
        # Those that existed in the last pass that was searched everywhere.
        self._modules: object = None
        # Whether no callback at all is needed in modules whose calls all came by the name of torch's function.
        self._least = Watch.NAME

    def places(self) -> Places | None:
        """Returns the modules in which the pass that begins is searched, or None for everywhere."""
        number, self._passes = self._passes, self._passes + 1
        is_changed = self._modules is not self._tap.tree.named()
        everywhere = number & (number - 1) == 0 or is_changed
        return None if everywhere else self._places

    def lost(self) -> None:
        """Notes that attention at one of the places is now computed elsewhere, or called in another way than by the name
        of torch's function, which is not relied on any more."""
        self._least = Watch.FUSED
        self.note(None)

    def note(self, places: Places | None) -> None:
        """Notes where a pass that was searched everywhere had attention; None if that does not say where to search."""
        tree = self._tap.tree
        if not places and not tree.of_kind(SpecModule):
            # No attention was found, so it may appear anywhere.
            places = None
        if places is not None:
            is_same_model = self._modules is tree.named()
            former = self._places if is_same_model and self._places else {}
            for name, (module, watch) in {**former, **places}.items():
                _, earlier = former.get(name, (module, watch))
                places[name] = module, max(watch, earlier, self._least)
        self._places, self._modules = places, tree.named()
        self.inside = [
            x for module, _ in (places or {}).values() for x in module.modules()
        ]


class ObservedPass:
    """One observed forward pass, whose calls a `CaptureMode` reports and the tap measures."""

    def __init__(self, tap: Tap, *, may_train: bool = True) -> None:
        self.tap = tap
        # Whether it may be trained.
        self.may_train = may_train
        # Attention calls that were measured.
        self.calls = 0
        self.sites = SiteStatistics()
        self.error: Exception | None = None
        self.watcher: CaptureMode | None = None
        self.places: Places = {}
        # Whether the places are where attention may be.
        self.is_local = True

    def begin(self, call: tuple[Args, Kwargs] | None, around: ExitStack) -> None:
        """Observes until `around` is closed; `call` holds the arguments of the model's own call if that has already
        begun."""
        tap, facts = self.tap, self.tap.facts
        visit = tap.visitor.looking(self.may_train)
        if visit is not None:
            around.callback(visit.remove)
        search = tap.visitor.search()
        only_in: Places | None = None
        if facts.by_caller is None:
            only_in = {} if tap.own_alone else tap.search.places()
        if search is not None and only_in != {}:
            only_in = None
        self.watcher = watcher = CaptureMode(
            tap.model,
            self._take,
            guard=tap.guard,
            rows=tap.measure_rows is not None,
            known=facts,
            own=tap.tree.of_kind(SpecModule),
            only_in=only_in,
            search=None if search is None else functools.partial(self._find, search),
        )
        watcher.index = self._index
        if only_in is not None:
            watcher.measure = self._measure
            watcher.wants_logsumexp = tap.threshold is not None
            watcher.look(around, tap.search.inside)
            return
        if call is not None:
            watcher.stack.begun(call[0], dict(call[1]))
        watcher.look(around, [module for _, module in tap.tree.named()])

    def _find(
        self, search: Callable[..., object], frame: ModuleCall, /, *, chooses: bool
    ) -> KnownSites | None:
        """Looks for sites before an attention call of this module is read."""
        if not self.tap.active or extra_of_another(self.tap):
            return None
        search(frame, chooses=chooses)
        return self.tap.facts

    def over(self) -> None:
        """Called after the pass to determine the modules in which the next pass is searched."""
        watcher = self.watcher
        if watcher is None:
            return
        watcher.end()
        if watcher.searches:
            self.tap.visitor.search_over(watcher)
        if not watcher.whole:
            if 0 in [frame.calls + frame.indexes for frame in watcher.called_in]:
                self.tap.search.lost()
            return
        # Where attention may be hidden, the next pass is searched everywhere.
        is_local = self.is_local and not watcher.hidden
        self.tap.search.note(self.places if is_local else None)

    def _note_place(self, captured: CapturedCall) -> None:
        """Records the module in which attention was observed, and the function by which it was found."""
        layout, name = captured.layout, captured.frame.name
        is_known = layout is None or (
            layout == self.tap.facts.layouts.get(captured.name) and not layout.guess
        )
        module = captured.frame.module
        # Attention of qkeel's modules inside must not be attributed to this module.
        holds_others = any(
            [m is not module and isinstance(m, SpecModule) for m in module.modules()]
        )
        is_unclear = captured.headless or not name or not is_known or holds_others
        if is_unclear or captured.how not in _WATCHES:
            self.is_local = False
        else:
            watch = _WATCHES[captured.how]
            if captured.by_name and captured.ordinal == 0:
                watch = Watch.NAME
            _, before = self.places.get(name, (module, watch))
            self.places[name] = module, max(before, watch)

    def _measure(self, name: str, plain: PlainCall | None, lse: Tensor | None) -> bool:
        """Measures a call of torch's own function from the logsumexps of its rows, which stand for the largest logits of
        heads that they keep under the threshold, or else from q and k; returns whether that was possible."""
        tap, stats = self.tap, None
        # After the tap was removed, nobody reads what this pass has collected.
        if not tap.active or extra_of_another(tap):
            return False
        if lse is not None and tap.threshold is not None:
            stats = bounded_maxima(lse, tap.threshold, plain)
        is_ready = tap.measure_plain is not None and logit_pass.ready()
        if stats is None and plain is not None and is_ready:
            may_read = tap.visitor.reads_plain(name)
            stats = tap.measure_plain(*plain) if may_read else None  # type: ignore[misc]
        if stats is None:
            return False
        self.sites.add(name, stats, None)
        self.calls += 1
        return True

    def _index(self, layer: str, call: ScoresCall) -> None:
        if self.tap.active and not extra_of_another(self.tap):
            self.is_local = False
            self.tap.visitor.index(layer, call, self.may_train)

    def _take(self, captured: CapturedCall) -> None:
        """Measures one call."""
        tap, name, call = self.tap, captured.name, captured.call
        if not tap.active or extra_of_another(tap):
            return
        if captured.how != "module":
            if self.watcher is None or self.watcher.whole:
                self._note_place(captured)
            tap.warn_of_guess(captured)
        if 0 in call.scores_shape:
            # As in an expert that received no tokens.
            return
        rows, measure_rows = captured.rows, tap.measure_rows
        if rows is None or measure_rows is None or not isinstance(call, AttentionCall):
            stats = tap.measure(call)
        else:
            stats = measure_rows(call, rows)
        # If a module computes its heads one by one, their site has its name.
        part_of = captured.frame.name if captured.headless else None
        if part_of is None:
            tap.visitor.call(name, call, self.may_train)
        if stats is not None:
            self.sites.add(name, stats, part_of)
            self.calls += 1
