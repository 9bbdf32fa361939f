"""One observed forward pass: where it is searched for attention, and what is measured of its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.capture.calls import ScoresCall, Seen, SiteStatistics
from qkeel.capture.example import ModuleCall
from qkeel.capture.intercept import CapturedCall, CaptureMode, PlainCall, Search
from qkeel.capture.named_attention import BY_NAME
from qkeel.capture.readers import FLASH_AND_FLEX, SDPA
from qkeel.functional.statistics import KernelRows, LogitStats
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import CallRows, bounded_maxima
from qkeel.nn import functional_attention
from qkeel.nn.attention import Observer, RowObserver, SpecModule
from qkeel.patching.forward import extra_of_another
from qkeel.patching.guards import in_this_thread
from qkeel.patching.modes import Args, Function, Kwargs
from qkeel.patching.module_tables import ModuleTree
from qkeel.sites.site import layer_of
from qkeel.spec import AttentionCall

if TYPE_CHECKING:
    from qkeel.sites.tap import Tap

MeasurePlain = Callable[[Tensor, Tensor, float, bool], LogitStats | CallRows | None]
MeasureCall = Callable[[Seen], LogitStats | CallRows | None]
MeasureRows = Callable[[AttentionCall, KernelRows], LogitStats | None]

_FUSED = frozenset({SDPA, F.multi_head_attention_forward, functional_attention})
# For each function by whose name a call was observed, the torch functions to look for in the calling module; None for
# all of them.
_FUNCTIONS: dict[str, frozenset[Function] | None] = {
    "scaled_dot_product_attention": _FUSED,
    "multi_head_attention_forward": _FUSED,
    "softmax": None,
    **{name: frozenset({reader}) for name, reader in FLASH_AND_FLEX.items()},
}
# The modules in which attention was observed, by name, with the torch functions to look for there.
Places = dict[str, tuple[nn.Module, frozenset[Function] | None]]


class PassSearch:
    """Where passes in one mode of a model, training or evaluation, are searched for attention.

    Searching everywhere costs one callback for each torch function call. Once the modules with attention are known, a
    pass is searched in these alone, except passes 1, 2, 4, 8, …, in which attention may appear that was not seen
    before, and passes after a change of the modules.

    Attributes:
        trusts_names: whether no callback at all is needed in modules whose calls all came by the name of torch's
            function. False for good once such a module has made no call by that name.
    """

    def __init__(self) -> None:
        self.trusts_names = True
        #: the modules at the latest places, and those inside them
        self.inside: list[nn.Module] = []
        self._passes = 0
        self._places: Places | None = None
        # Those that existed in the last pass that was searched everywhere
        self._modules: object = None

    def places(self, tree: ModuleTree) -> Places | None:
        """Returns the modules in which the pass that begins is searched, or None for everywhere."""
        number, self._passes = self._passes, self._passes + 1
        everywhere = number & (number - 1) == 0 or self._modules is not tree.named()
        return None if everywhere else self._places

    def note(self, places: Places | None, tree: ModuleTree) -> None:
        """Notes where a pass that was searched everywhere had attention; None if that does not say where to search."""
        if places is not None and self._modules is tree.named():
            for name, (module, functions) in (self._places or {}).items():
                _, latest = places.get(name, (module, functions))
                places[name] = module, _either(functions, latest)
        if places is not None and not self.trusts_names:
            for name, (module, functions) in places.items():
                places[name] = module, _FUSED if functions == BY_NAME else functions
        self._places, self._modules = places, tree.named()
        self.inside = [
            x for module, _ in (places or {}).values() for x in module.modules()
        ]


class ObservedPass:
    """One observed forward pass. qkeel's own modules report their calls, and a `CaptureMode` observes those of other
    code. With `kept`, the first call of each site is stored there, and nothing is measured."""

    def __init__(
        self, tap: Tap, kept: dict[str, Seen] | None = None, *, may_train: bool = True
    ) -> None:
        self.tap, self.kept = tap, kept
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
        visit = self.tap.visitor.looking(self.may_train) if self.kept is None else None
        if visit is not None:
            around.callback(visit.remove)
        spec_modules = self.tap.tree.of_kind(SpecModule)
        for name, module in spec_modules:
            assert isinstance(module, SpecModule)
            observer = self._observer(name)
            module.observers.append(observer)
            around.callback(module.observers.remove, observer)
        search = self.tap.visitor.search() if self.kept is None else None
        facts = self.tap.facts
        by_caller = facts.by_caller
        only_in = None
        if self.kept is None and by_caller is None:
            only_in = self.tap.places()
        if search is not None and only_in != {}:
            only_in = None
        if only_in == {} and (spec_modules or self.tap.own_alone):
            return
        self.watcher = watcher = CaptureMode(
            self.tap.model,
            self._foreign,
            guard=self.tap.guard,
            rows=self.tap.measure_rows is not None and self.kept is None,
            described=facts.described,
            layouts=facts.layouts,
            only_in=only_in,
            search=None if search is None else functools.partial(self._find, search),
        )
        watcher.stack.by_caller = by_caller
        if search is not None:
            watcher.stack.by_caller = by_caller or {}
        watcher.key_heads = facts.key_heads
        self._read_indexers(watcher)
        if call is not None and only_in is None:
            watcher.stack.begun(call[0], dict(call[1]))
        if (
            only_in is not None
            and self.tap.measure_plain is not None
            and logit_pass.ready()
        ):
            watcher.plain = self._plain
        if only_in is not None and self.tap.threshold is not None:
            watcher.bounded = self._bounded
        watcher.look(around, self.tap.observed(only_in))

    def _read_indexers(self, watcher: CaptureMode) -> None:
        layouts = self.tap.facts.indexers
        if layouts and self.kept is None:
            watcher.index = self._index
            watcher.index_layouts = lambda name: layouts.get(self._layer(name))

    def _find(self, search: Search, frame: ModuleCall, /, *, chooses: bool) -> None:
        """Looks for sites before an attention call of this module is read."""
        watcher = self.watcher
        if watcher is None or not self.tap.active or extra_of_another(self.tap):
            return
        search(frame, chooses=chooses)
        facts = self.tap.facts
        watcher.layouts, watcher.key_heads = facts.layouts, facts.key_heads
        watcher.stack.by_caller = facts.by_caller or {}
        self._read_indexers(watcher)

    def over(self) -> None:
        """Called after the pass to determine the modules in which the next pass is searched."""
        watcher = self.watcher
        if watcher is None or self.kept is not None:
            return
        watcher.end()
        if watcher.searches:
            self.tap.visitor.search_over(watcher)
        if not watcher.whole:
            if 0 in [frame.calls + frame.indexes for frame in watcher.called_in]:
                # Attention that was found there is now computed elsewhere, or called in another way.
                self.tap.searched(None, trusts_names=False)
            return
        # Where attention may be hidden, the next pass is searched everywhere.
        is_local = self.is_local and not watcher.hidden
        self.tap.searched(self.places if is_local else None)

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
        if is_unclear or captured.how not in _FUNCTIONS:
            self.is_local = False
        else:
            functions = _FUNCTIONS[captured.how]
            if captured.by_name and captured.ordinal == 0:
                functions = BY_NAME
            _, before = self.places.get(name, (module, functions))
            self.places[name] = module, _either(before, functions)

    def _observer(self, name: str) -> Observer:
        see = in_this_thread(functools.partial(self.tap.guard, self._take, name))
        if self.tap.measure_rows is None or self.kept is not None:
            return see
        read = functools.partial(
            self.tap.guard, self._read, name, self.tap.measure_rows
        )
        return RowObserver(see, in_this_thread(read))

    def _read(
        self, name: str, measure: MeasureRows, call: AttentionCall, rows: KernelRows
    ) -> None:
        self._take(name, call, measure=lambda _: measure(call, rows))

    def _plain(
        self, name: str, q: Tensor, k: Tensor, scale: float, causal: bool
    ) -> bool:
        """Measures a call of torch's own function from q and k, and returns whether that was possible."""
        measure = self.tap.measure_plain
        if measure is None or not self.tap.active or extra_of_another(self.tap):
            return False
        if not self.tap.visitor.reads_plain(name):
            return False
        stats = measure(q, k, scale, causal)
        if stats is None:
            return False
        self.sites.add(name, stats, None)
        self.calls += 1
        return True

    def _bounded(self, name: str, lse: Tensor, plain: PlainCall | None) -> bool:
        """Takes the logsumexps of a call's rows for the largest logits of heads that they keep under the threshold."""
        threshold = self.tap.threshold
        # After the tap was removed, nobody reads what this pass has collected.
        if threshold is None or extra_of_another(self.tap):
            return False
        largest = bounded_maxima(lse, threshold, plain)
        if largest is None:
            return False
        self.sites.add(name, largest, None)
        self.calls += 1
        return True

    def _layer(self, name: str) -> str:
        """The layer whose keys a module may choose, or ""."""
        return layer_of(name, [site.name for site in self.tap.sites]) or ""

    def _index(self, frame: ModuleCall, call: ScoresCall) -> None:
        layer = self._layer(frame.name)
        is_indexer = layer in self.tap.facts.indexers
        if is_indexer and self.tap.active and not extra_of_another(self.tap):
            self.is_local = False
            self.tap.visitor.index(layer, call, self.may_train)

    def _foreign(self, captured: CapturedCall) -> None:
        if not self.tap.active:
            return
        if self.watcher is None or self.watcher.whole:
            self._note_place(captured)
        self.tap.warn_of_guess(captured)
        rows, reads, measure = captured.rows, self.tap.measure_rows, None
        if (
            rows is not None
            and reads is not None
            and isinstance(captured.call, AttentionCall)
        ):
            measure = lambda call: reads(call, rows)  # noqa: E731
        self._take(
            captured.name,
            captured.call,
            captured.frame.name if captured.headless else None,
            measure,
        )

    def _take(
        self,
        name: str,
        call: Seen,
        part_of: str | None = None,
        measure: MeasureCall | None = None,
    ) -> None:
        """Measures one call. If a module computes its heads one by one, `part_of` is the name of its site."""
        if extra_of_another(self.tap):
            return
        if self.kept is not None:
            self.kept.setdefault(name, call)
        elif self.tap.active and not _has_no_rows(call):
            stats = (measure or self.tap.measure)(call)
            if part_of is None:
                self.tap.visitor.call(name, call, self.may_train)
            if stats is not None:
                self.sites.add(name, stats, part_of)
                self.calls += 1


def _has_no_rows(call: Seen) -> bool:
    """True if a call has no queries or no keys, as in an expert that received no tokens."""
    x = call.logits if isinstance(call, ScoresCall) else call.q
    return not x.numel() or (not isinstance(call, ScoresCall) and not call.k.numel())


def _either(
    first: frozenset[Function] | None, second: frozenset[Function] | None
) -> frozenset[Function] | None:
    """The functions of interest if both sets are given, or None, which means all functions."""
    if first is None or second is None:
        return None
    if first != second and first | second >= BY_NAME:
        # Some calls came in another way, so the mode is needed.
        return (first | second | _FUSED) - BY_NAME
    return first | second
