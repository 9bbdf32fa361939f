"""Collects the statistics of every attention site from a model's own forward passes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import ScoresCall, Seen, SiteStatistics, statistics
from qkeel.capture.example import LastPass, copied, tensors, undisturbed
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import KnownSites
from qkeel.capture.named_attention import CompiledBounds
from qkeel.capture.random_streams import RandomStreams, seed_generators
from qkeel.errors import caution
from qkeel.functional.statistics import LogitStats
from qkeel.handle import Handle
from qkeel.kernels.statistics import is_over, plain_rows
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import ForwardPasses, extra_pass
from qkeel.patching.guards import FaultGuard
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import ModuleTree
from qkeel.patching.roles import PassRole, Phase, inside_checkpoint
from qkeel.patching.torch_state import in_function_transform, is_fake
from qkeel.sites.observed_pass import (
    MeasureCall,
    MeasurePlain,
    MeasureRows,
    ObservedPass,
    PassSearch,
)
from qkeel.sites.outside_calls import OutsideCalls
from qkeel.sites.site import Sites

_TRANSFORMED = (
    "a pass inside a transform of torch.func (grad, vmap, jvp) is not measured, because its tensors have no values "
    "outside it; passes outside are measured"
)
# Passes whose role is open.
MOST_HELD = 1024
_OFF = "qkeel's tap failed and switched itself off: {}. The model continues unwatched"


class Visitor:
    """A second observer of the passes that a tap measures. Its methods do nothing; subclasses override those they
    need."""

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Called when a pass with these arguments is about to begin; returns whether the pass should be measured."""
        return True

    def looking(self, may_train: bool) -> Handle | None:
        """Called when the measured pass begins (in compiled models, the additional pass). The returned handle is
        removed after the pass. may_train: whether the pass may turn out to be trained."""

    def search(self) -> Callable[..., object] | None:
        """Returns what looks for the sites of the pass that begins, when a module is about to make an attention call."""
        return None

    def search_over(self, watcher: CaptureMode) -> None:
        """Called with what has observed a pass that was searched."""

    def reads_plain(self, name: str) -> bool:
        """Whether a call of a site without a mask may be measured without `call` being called."""
        return True

    def call(self, name: str, call: Seen, may_train: bool) -> None:
        """Called with a measured attention call of a site."""

    def index(self, layer: str, call: ScoresCall, may_train: bool) -> None:
        """Called with the scores by which an indexer chooses keys for this layer."""

    def after(self, output: object, seen: bool) -> object:
        """Called after the model's own pass; `seen` is True if attention was observed in the pass. What it returns is
        handed to `settled` once the role of the pass is known."""

    def settled(self, phase: Phase, collected: object, measured: bool) -> None:
        """Called when the role of a pass is known. collected: what `after` returned; measured: whether its statistics
        count."""

    def failed(self) -> None:
        """Called if the model's own pass ended in an exception, so that nothing in it is counted."""


class Tap(Handle):
    """Watches the attention calls of a model's forward passes; `read()` returns the statistics since the last read.

    The tap computes statistics without gradients, from tensors that the forward pass computes anyway, and changes
    nothing. qkeel's own modules report their calls. A function mode finds other attention in eager code; see
    `CaptureMode`.

    Compiled models, and torch modules with a fast path for evaluation, are measured in an additional pass before their
    own pass. The additional pass runs eagerly and without gradients, and random number generators and buffers are
    restored after it. It is needed because compiled code must not run inside a mode, and because torch modules would
    not take their fast path inside a mode, so that results would differ in the last bits.

    The statistics of a pass are held back until its role is known (see `PassRole`): those of trained passes, and those
    of passes that are not trained, such as references, rollouts and evaluation in either mode, are kept apart. `settle`
    decides about passes whose role is still open, at the latest when the optimizer steps. Without an optimizer, a pass
    in training mode counts as trained when it ends, if a gradient can reach its output.

    Activations that gradient checkpointing recomputes are counted once. Passes that end in an exception are not
    counted, nor are passes over a batch without sequences or tokens.

    Args:
        model: the model to watch.
        when_training: whether to ignore passes that cannot be trained, because gradients are off.
        due: a function that is called as due(may_train, training) and returns whether to measure a pass, and whether
            this counts if the pass is trained. may_train: whether gradients are on; training: the model's mode.
        by_step: whether an optimizer's step settles the roles.
        measure: the function that computes the statistics of a call.
        measure_rows: the function that computes the statistics from what a kernel returned for each row.
        measure_plain: the function that computes the statistics from q, k, the scale and whether the call is causal,
            for calls of torch's function without a mask at a known site; it returns None if it cannot.
        threshold: above which logits are wanted. Heads whose logits stay under it by the logsumexps that their kernel
            hands out anyway are not measured further: their statistics hold the largest logsumexp instead of the logit.
        keeps: whether to keep the batch of the latest training pass, as `latest`.
        guard: the guard that reports the first failure in the tap with a warning and switches the tap off.

    Attributes:
        visitor: a second observer of the measured passes.
        own_alone: True if the model is known to have no attention except in qkeel's own modules, so that no other
            attention is searched for.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        when_training: bool = False,
        due: Callable[[bool, bool], tuple[bool, bool]] | None = None,
        by_step: bool = False,
        measure: MeasureCall = statistics,
        measure_rows: MeasureRows | None = None,
        measure_plain: MeasurePlain | None = None,
        threshold: float | None = None,
        keeps: bool = False,
        guard: FaultGuard | None = None,
    ) -> None:
        self.measure, self.measure_rows = measure, measure_rows
        self.measure_plain = (
            plain_rows
            if measure is statistics and measure_plain is None
            else measure_plain
        )
        self.threshold = threshold
        self._bounds = None if threshold is None else CompiledBounds()
        self.visitor = Visitor()
        # The known sites, with the information needed to observe them.
        self.sites = Sites()
        self._facts: KnownSites | None = None
        # The latest trained pass.
        self._latest: LastPass | None = None
        self._keeps, self._by_step = keeps, by_step
        # Passes whose role is open.
        self._held: list[_HeldPass] = []
        # The pass that is running.
        self._beginning: _HeldPass | None = None
        self.own_alone = False
        # By the mode of the model.
        self._searches = {
            True: PassSearch(self),
            False: PassSearch(self),
        }
        # Attention calls that were measured.
        self.calls_seen: dict[Phase, int] = {
            "train": 0,
            "eval": 0,
        }
        self._due = due or (lambda may_train, _: (may_train or not when_training, True))
        self.guard = FaultGuard(_OFF) if guard is None else guard
        self._guessed: set[str] = set()
        self._said_transform = False
        self._stats: dict[Phase, SiteStatistics] = {
            "train": SiteStatistics(),
            "eval": SiteStatistics(),
        }
        self._running: ObservedPass | None = None
        self._outside: OutsideCalls | None = None
        self._forwards = ForwardPasses(
            model, self._before, self._after, guard=self.guard, owner=self
        )
        self._forwards.repeated = self._repeated
        self.model = self._forwards.inner
        self.tree = (
            self._forwards.tree if model is self.model else ModuleTree(self.model)
        )
        super().__init__(self._detach)
        self.guard.off += [self.remove, self._forwards.remove]

    @property
    def latest(self) -> LastPass | None:
        """The latest trained pass, or, before the first, the latest that may turn out to be trained; with an optimizer,
        of those that were measured."""
        if self._latest is None:
            for held in reversed(self._held):
                if held.latest is not None:
                    return held.latest
        return self._latest

    @property
    def search(self) -> PassSearch:
        """Where passes in the model's mode are searched for attention outside qkeel's modules."""
        return self._searches[self.model.training]

    def has(self, phase: Phase) -> bool:
        """True if there are statistics of passes with this role to read."""
        return bool(self._stats[phase])

    def settle(self, *, decide: bool = True) -> None:
        """Sorts the passes that were held back by their roles.

        decide: whether a pass whose role is open counts as not trained, as it does when the optimizer has stepped.
        """
        waiting, self._held = self._held, []
        for held in waiting:
            trained = held.role.trained
            if trained is None and not decide:
                self._held.append(held)
            else:
                self._sort(held, "train" if trained else "eval")

    def _sort(self, held: _HeldPass, phase: Phase) -> None:
        """Keeps the numbers of a pass whose role is known."""
        measured = held.stats is not None and (phase == "eval" or held.counts)
        if phase == "train" and held.latest is not None:
            self._latest = held.latest
        if held.stats is not None and measured:
            self._stats[phase].update(held.stats)
            self.calls_seen[phase] += held.calls
        self.visitor.settled(phase, held.collected, measured)

    def read(self, phase: Phase | None = None) -> dict[str, LogitStats]:
        """Returns the statistics since the last read, keyed by site name; sites without a call are absent.

        Statistics of trained passes ("train") and of others ("eval") are separate. Without a phase, the statistics are
        those of trained passes or, if there were none, of the others. If a module computes its heads one by one, they
        are combined into one site.
        """
        self.settle(decide=not self._by_step)
        return dict(self.take(phase or ("train" if self.has("train") else "eval")))

    def take(self, phase: Phase) -> Mapping[str, LogitStats]:
        """Like `read`, but without looking for passes whose role has become known."""
        sites, self._stats[phase] = self._stats[phase], SiteStatistics()
        return sites.joined()

    def so_far(self) -> Mapping[str, LogitStats]:
        """Returns the statistics of trained passes since the last read, and keeps them."""
        self.settle(decide=False)
        return self._stats["train"].joined()

    def peek(self, phase: Phase | None = None) -> Mapping[str, LogitStats]:
        """Returns the statistics of passes whose role is open, taken for trained if the model was in training mode."""
        sites = SiteStatistics()
        for held in self._held:
            if held.stats is not None and phase in (
                None,
                "train" if held.training else "eval",
            ):
                sites.update(held.stats)
        return sites.joined()

    def _detach(self) -> None:
        self._forwards.remove()
        if self._outside is not None:
            self._outside.remove()
        if self._bounds is not None:
            self._bounds.remove()
        self._latest = None

    def calls(
        self, args: Args, kwargs: Kwargs, *, is_seeded: bool = True
    ) -> dict[str, Seen]:
        """Returns the first call of each site in an additional pass with these arguments. The pass runs eagerly and
        without gradients, and with the same random numbers each time, or those that come next if not `is_seeded`; it is
        not counted and changes nothing."""
        calls: dict[str, Seen] = {}
        watcher = CaptureMode(
            self.model,
            lambda captured: calls.setdefault(captured.name, captured.call),
            guard=self.guard,
            known=self.facts,
            own=self.tree.of_kind(SpecModule),
        )
        error = self._extra_pass(watcher.look, args, kwargs, is_seeded=is_seeded)
        if error is not None:
            raise error
        return calls

    @property
    def facts(self) -> KnownSites:
        """The facts known about the sites, which are collected again whenever `sites` has changed."""
        sites = [*self.sites]
        if self._facts is None or self._facts.sites != sites:
            self._facts = KnownSites.of(self.sites)
        return self._facts

    def _before(self, args: Args, kwargs: Kwargs, compiled: Callable[[], bool]) -> None:
        self.settle(decide=False)
        if self._outside is not None:
            self._outside.count_pass()
        if in_function_transform():
            if not self._said_transform:
                self._said_transform = True
                caution(_TRANSFORMED)
            return
        if has_no_values(args, kwargs):
            return
        training = self.model.training
        # A reentrant checkpoint makes its first pass without gradients, although the pass will be trained.
        is_repeated = not torch.is_grad_enabled() and inside_checkpoint()
        may_train = torch.is_grad_enabled() or is_repeated
        measured, counts = self._due(may_train, training)
        if self._by_step and not measured and not is_repeated:
            # Nobody asks for its role: steps are counted by the optimizer.
            return
        self._beginning = held = _HeldPass(
            training=training, counts=counts, may_train=may_train
        )
        held.inputs = (args, kwargs)
        if is_repeated:
            held.role = PassRole.to_be_repeated()
        if is_empty(args, kwargs):
            return
        if self._keeps and may_train:
            first = self.tree.first_parameter()
            held.latest = LastPass(
                "cpu" if first is None else first.device.type, args, kwargs, training
            )
        if not measured or not self.visitor.before(args, kwargs):
            return
        is_compiled = compiled()
        # One process alone may find a logit over the threshold, and would make collectives of its own in a second pass.
        is_bounded = is_compiled and self._bounds is not None and dist.world() == 1
        if is_bounded and self._bounds is not None and self._bounds.begin():
            # If a logit may be over the threshold, the pass is made again with the same random numbers and inputs.
            first = self.tree.first_parameter()
            held.random = RandomStreams([] if first is None else [first])
            held.versions = _versions(args, kwargs)
            return
        self._running = running = ObservedPass(self, may_train=may_train)
        if is_compiled or _takes_fast_path(self.tree):
            begin = functools.partial(running.begin, None)
            running.error = self._extra_pass(begin, args, kwargs)
        else:
            call = (args, kwargs) if self._forwards.model is self.model else None
            running.begin(call, self._forwards.around)

    def _extra_pass(
        self,
        look: Callable[[ExitStack], None],
        args: Args,
        kwargs: Kwargs,
        is_seeded: bool = False,
        random: RandomStreams | None = None,
    ) -> Exception | None:
        """Makes a pass of the model eagerly, which is observed from `look` on, and returns the error with which it ends.
        `is_seeded` seeds the random generators; `random` puts them back to an earlier state."""
        with (
            extra_pass(self),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            undisturbed(self.model),
        ):
            if is_seeded:
                seed_generators(self.model.parameters())
            if random is not None:
                random.restore()
            try:
                with ExitStack() as around:
                    look(around)
                    self.model(*copied(args), **copied(dict(kwargs)))
            except Exception as error:
                # It is not an error of the tap if the model's own pass fails too.
                return error
        return None

    def _bounded_pass(
        self, held: _HeldPass, bound: float | None
    ) -> ObservedPass | None:
        """Takes the bound of a compiled pass for its logits, or makes the pass again where a logit may be over the
        threshold."""
        assert self.threshold is not None
        if bound is not None and not is_over(bound, self.threshold):
            held.stats = SiteStatistics()
            for site in self.sites:
                top = torch.full((site.n_heads,), bound)
                held.stats.add(site.name, top, None)
            held.calls = (self._bounds and self._bounds.calls) or 0
            return None
        look = ObservedPass(self, may_train=held.may_train)
        assert held.inputs is not None
        args, kwargs = held.inputs
        if _versions(args, kwargs) != held.versions:
            # The pass has written into its own inputs, so a second one would see others. It comes first from now on.
            assert self._bounds is not None
            self._bounds.remove()
            caution(
                "the model writes into its inputs, so the logits of one compiled pass that may be over the threshold "
                "are read from what it left; from the next pass on an additional pass is made first"
            )
        begin = functools.partial(look.begin, None)
        look.error = self._extra_pass(begin, args, kwargs, random=held.random)
        return look

    def _after(self, output: object, failed: bool) -> None:
        look, self._running = self._running, None
        held, self._beginning = self._beginning, None
        if self._outside is None and self.sites and self.active and not failed:
            self._outside = OutsideCalls(self._forwards, self.sites, self.guard, self)
        if self._bounds is not None and self._bounds.running:
            bound = self._bounds.end()
            if held is not None and self.active and not failed:
                look = self._bounded_pass(held, bound)
        if failed and look is not None:
            self.visitor.failed()
        if held is None or not self.active:
            return
        inputs, held.inputs = held.inputs, None
        if failed:
            held.latest = None
        elif not held.role.awaited and held.may_train:
            held.role = PassRole.of_output(self.model, inputs, output)
        if look is not None and not failed:
            if look.error is not None:
                raise look.error
            look.over()
            if self._bounds is not None:
                self._bounds.calls = look.calls
            held.stats, held.calls = look.sites, look.calls
            seen = bool(held.stats) or any(
                [self.has("train"), self.has("eval"), *(x.stats for x in self._held)]
            )
            held.collected = self.visitor.after(output, seen)
        self._hold(held)

    def _hold(self, held: _HeldPass) -> None:
        """Keeps a pass until its role is known, which it may be already."""
        trained = held.role.trained
        if trained is None and not self._by_step and held.training:
            trained = True
        if trained is None:
            self._held.append(held)
            # Graphs that the program keeps, or checkpoints that nothing repeats.
            if len(self._held) > MOST_HELD:
                self._sort(self._held.pop(0), "eval")
        else:
            self._sort(held, "train" if trained else "eval")

    def _repeated(self) -> None:
        """Called when the backward pass repeats the model's pass, the latest first."""
        for held in reversed(self._held):
            if held.role.awaited and held.role.trained is None:
                held.role.arrive()
                return

    def warn_of_guess(self, captured: CapturedCall) -> None:
        """Warns once for each site whose head layout was guessed."""
        layout = captured.layout
        if layout is None or not layout.guess or captured.name in self._guessed:
            return
        self._guessed.add(captured.name)
        caution(
            f"the heads of {captured.name or 'the model itself'} are a guess: {layout.guess}, so the layout "
            f"was taken to be [{layout}]. find_sites(model, batch) determines it if it can trace the weights, and "
            "qkeel.watch does so by itself"
        )

    def __enter__(self) -> Self:
        return self


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _HeldPass:
    """What is known of a pass until its role is: its mode, its statistics, and what the visitor collected in it.

    `counts` says whether its statistics count if it was trained.
    """

    training: bool
    counts: bool
    may_train: bool = True
    role: PassRole = dataclasses.field(default_factory=PassRole)
    inputs: tuple[Args, Kwargs] | None = None
    random: RandomStreams | None = None
    versions: list[int] = dataclasses.field(default_factory=list)
    latest: LastPass | None = None
    stats: SiteStatistics | None = None
    calls: int = 0
    collected: object = None


def _versions(args: Args, kwargs: Kwargs) -> list[int]:
    """How often each tensor among a model's arguments was written into; tensors of inference mode do not count that."""
    inputs = tensors((args, dict(kwargs)))
    return [0 if x.is_inference() else x._version for x in inputs]


def is_empty(args: Args, kwargs: Kwargs) -> bool:
    """True if the tensors among a model's arguments form an empty batch, that is, if all of them have no elements.

    >>> is_empty((torch.zeros(0, 5),), {"mask": None}), is_empty((torch.zeros(2, 5), torch.zeros(0)), {})
    (True, False)
    """
    # In most cases the first one decides, without another Python call.
    for x in (
        *args,
        *kwargs.values(),
    ):
        if isinstance(x, Tensor) and x.ndim and x.numel():
            return False
    sizes = [x.numel() for x in tensors((args, dict(kwargs))) if x.ndim]
    return bool(sizes) and not any(sizes)


def has_no_values(args: Args, kwargs: Kwargs) -> bool:
    """True if a tensor among a model's arguments has a shape but no values, as on the meta device and in a FakeTensor.

    >>> has_no_values((torch.zeros(2, 5, device="meta"),), {}), has_no_values((torch.zeros(2, 5),), {})
    (True, False)
    """
    return any([x.is_meta or is_fake(x) for x in tensors((args, dict(kwargs)))])


def _takes_fast_path(tree: ModuleTree) -> bool:
    """True if torch may run parts of the model through the single operator that computes a complete layer in
    evaluation."""
    layers = tree.of_kind(nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return (
        bool(layers)
        and torch.backends.mha.get_fastpath_enabled()
        and any(not m.training for _, m in layers)
    )
