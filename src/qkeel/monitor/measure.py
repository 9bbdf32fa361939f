"""The measurements of a step across the watched models and sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.audit.output_gates import GateMode
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import ModuleCall, tensors
from qkeel.capture.intercept import CaptureMode
from qkeel.distributed.reduce import WHOLE_MODEL
from qkeel.errors import caution
from qkeel.handle import Handle, compose
from qkeel.monitor.call_statistics import Extra, add_gates
from qkeel.monitor.finite_stages import first_empty_row
from qkeel.monitor.first_look import FirstLook
from qkeel.monitor.hidden_states import HiddenStates
from qkeel.monitor.kept_logits import KeptCall, KeptLogits
from qkeel.monitor.logit_changes import LogitChanges
from qkeel.monitor.numbers import Number, NumberKey, Numbers, PassNumbers
from qkeel.monitor.sparse_attention import SparseAttention
from qkeel.monitor.token_classes import PassTokens
from qkeel.monitor.watched_sites import WatchedSites
from qkeel.monitor.weight_norms import StepSpectra, WeightNorms
from qkeel.patching.guards import Guarded
from qkeel.patching.losses import ReturnedScalar
from qkeel.patching.modes import push_mode, take_off
from qkeel.patching.roles import Phase
from qkeel.sites.find import within
from qkeel.sites.logit_sample import LogitSample
from qkeel.sites.site import AttentionSite
from qkeel.sites.tap import Tap, Visitor

MOVED = (
    "the weights of {} are not where they were when the layer was found, as after it was wrapped, pruned, given adapters "
    "or removed, and are not read from here on: call qkeel.watch again after the change"
)
NOT_COMPARED = (
    "the change that a step causes is not measured for {}: the q and k weights are unknown, computed from other "
    "weights, split across processes, or not matrices that are multiplied together"
)

# The numbers of a pass, the scalar that it returned, if it was one, and the call whose logits are kept.
_Collected = tuple[dict[NumberKey, Number], ReturnedScalar | None, KeptCall | None]
UNUSED = (
    "{} got no gradient in this step, although other weights of the same attention did: the path that runs leaves it "
    "out, as a fused kernel does with sinks that it does not know; print(qkeel.explain(model, batch)) shows what runs"
)


@final
class StepNumbers(Visitor):
    """Collects the numbers of a step by (site, name) other than the statistics of its attention calls: means over its
    passes, such as the loss, and values read before and after its update.

    As a visitor of a tap (see `Visitor`), it is called in the order before, looking, search, call for each attention
    call, after, and, once the role of the pass is known, settled; or failed. Around the optimizer's step, before_step and
    after_step are called, and take hands over what was collected. Before each pass, it is determined which of its tokens
    count, and before the first pass, which sites there are.
    """

    def __init__(
        self,
        name: str,
        tap: Tap,
        sites: WatchedSites,
        tokens: PassTokens,
        logit_changes: LogitChanges | None,
        role_known: Callable[[Phase, bool], None],
        kept: KeptLogits,
        *,
        guard: Guarded,
        extras: frozenset[Extra] = frozenset(),
    ) -> None:
        """name: the name of the model, "" if there is only one. role_known: called with the role of each pass, and
        whether it was measured. kept: takes the logits of one head."""
        self._kept = kept
        self.name, self.tap = name, tap
        self.sites, self._tokens = sites, tokens
        self._logit_changes = logit_changes
        self._guard = guard
        self._extras = extras
        self._role_known = role_known
        self._numbers, self._is_loss_summed = PassNumbers(), False
        # Of the current step: a scalar that the model returned and that is not the loss.
        self._unused_scalar: Tensor | None = None
        compares = "chosen" in extras
        self._sparse = SparseAttention(tokens, self._numbers, compares=compares)
        self._first_look = FirstLook(sites.model)
        # Of the pass that runs, and the call of a module that was looked at last.
        self._gates: GateMode | None = None
        self._kept_call: KeptCall | None = None
        self._frame: ModuleCall | None = None
        # None until the first pass, in which the sites become known.
        self._hidden: HiddenStates | None = None
        self._weights: WeightNorms | None = None
        self._spectra: StepSpectra | None = None
        self._step_values: Numbers = {}

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        # What a pass that failed has left is not of this one.
        self._numbers.begin()
        self._sparse.begin()
        self._kept_call = None
        # Such a loss is a sum over the pass's tokens, divided by those of all passes of the step.
        self._is_loss_summed = kwargs.get("num_items_in_batch") is not None
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self.sites.find()
            self._hidden = HiddenStates(
                self.sites.model,
                [site.name for site in self.sites.all],
                self._numbers,
                self._guard,
                self.tap.tree,
                inputs_too="residual" in self._extras,
            )
        self._hidden.begin(args, kwargs)
        self._first_look.begin(args, kwargs)
        return True

    def looking(self, may_train: bool) -> Handle | None:
        if self._hidden is None or not may_train:
            return None
        hidden = self._hidden.attach()
        if self._first_look.over and "gates" not in self._extras:
            return hidden
        self._gates = gates = GateMode(self._first_look.guard)
        push_mode(gates)
        return compose([hidden, Handle(lambda: take_off(gates))])

    def search(self) -> Callable[..., object] | None:
        return self._look if self.sites.searches else None

    def _look(self, frame: ModuleCall, /, *, chooses: bool) -> None:
        self._frame = frame
        if self.sites.look(frame, chooses=chooses):
            self._extend()

    def _extend(self) -> None:
        """Looks at the hidden states of a site that was found in the pass that runs."""
        if self._hidden is not None and self._frame is not None:
            names = [site.name for site in self.sites.all]
            self._hidden.extend(names, self._frame.line())

    def search_over(self, watcher: CaptureMode) -> None:
        self.sites.search_over(watcher)
        self._frame = None

    def reads_plain(self, name: str) -> bool:
        kept = self._kept.site
        # Also where several models have a site of this name.
        is_kept = kept is not None and kept.endswith(name)
        return name not in self.sites.hiding and not is_kept

    def call(self, name: str, call: Seen, may_train: bool) -> None:
        if self.sites.see(name, call):
            self._extend()
        if may_train:
            # First, as all that is computed from the call passes by it.
            if self._gates is not None:
                self._gates.captured(name)
            self._first_look.call(name, call)
            site = within(self.name, name)
            if site == self._kept.site:
                self._kept_call = site, LogitSample.of(self._tokens.on(call))
        if may_train and "gates" in self._extras:
            add_gates(self._numbers, name, self._tokens.on(call))
        if may_train and self.sites.is_sparse(name):
            self._sparse.compare(name, call)
        if may_train and isinstance(call, ScoresCall):
            row = first_empty_row(call)
            if row is not None:
                self._numbers.add((name, "first_empty_row"), Number(row))

    def index(self, layer: str, call: ScoresCall, may_train: bool) -> None:
        if may_train:
            self._sparse.index(layer, call)

    def after(self, output: object, seen: bool) -> _Collected:
        self._tokens.end()
        self.sites.pass_over()
        self.sites.report(seen)
        # Of several scalars nobody knows which one is the loss.
        losses = [
            x
            for x in tensors(output)
            if x.ndim == 0 and x.is_floating_point() and not dist.is_split(x)
        ]
        if self._hidden is not None:
            self._hidden.end(output)
        gates = {} if self._gates is None else self._gates.gates
        self._gates = None
        self._first_look.end(self.sites.all, gates)
        if "gates" in self._extras:
            for site, means in gates.items():
                number = Number(means, torch.ones_like(means), own=True)
                self._numbers.add((site, "output_gate"), number)
        numbers = self._numbers.end()
        if len(losses) != 1:
            return numbers, None, self._kept_call
        how = "total" if self._is_loss_summed else "mean"
        numbers["", "train_loss"] = Number(losses[0].detach(), 1, how)
        return numbers, ReturnedScalar(losses[0]), self._kept_call

    def settled(self, phase: Phase, collected: Any, measured: bool) -> None:
        if measured and phase == "train" and collected is not None:
            numbers, scalar, kept_call = collected
            if kept_call is not None:
                self._kept.keep(kept_call)
            if scalar is not None and not scalar.is_loss:
                self._unused_scalar = numbers.pop(("", "train_loss")).value
            self._numbers.keep(numbers)
        self._role_known(phase, measured)

    def failed(self) -> None:
        self._numbers.begin()
        # A model that fails in the user's own pass fails in the search too, which is then made again.
        if self.sites.pass_failed():
            self._hidden = None

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before the step; gradients are divided by the loss scale if they are still
        scaled."""
        # All of this is read before the step: a record describes the model that its passes ran.
        if self._logit_changes is not None:
            self._logit_changes.before()
        self._read_weights()
        if "updates" in self._extras and self._weights is not None:
            if self._spectra is None:
                self._spectra = self._compared(self._weights.multiplied)
            self._spectra.before()
        if gradient_scale is not None:
            unscaled = dict(self._step_values)
            for key, x in self._step_values.items():
                if "grad" in key[1]:
                    number = x if isinstance(x, Number) else Number(x)
                    value = number.value / gradient_scale
                    unscaled[key] = number._replace(value=value)
            self._step_values = unscaled

    def _compared(self, sites: list[AttentionSite]) -> StepSpectra:
        """The object that compares the weights of these sites; warns if those of other sites cannot be compared."""
        compared = {site.name for site in sites}
        left_out = [site.name for site in self.sites.all if site.name not in compared]
        if left_out:
            names = ", ".join(name or "the model itself" for name in left_out)
            caution(NOT_COMPARED.format(names))
        return StepSpectra(self.sites.model, sites)

    def _read_weights(self) -> None:
        if self._hidden is None or not self.sites.has_weights:
            return
        model, sites = self.sites.model, self.sites.all
        if self._weights is not None and self._weights.is_outdated():
            self._weights = self._spectra = None
        if self._weights is None:
            names = {name for name, _ in model.named_parameters()}
            moved = [x.name for x in sites if not x.parameters <= names]
            if moved:
                caution(MOVED.format(", ".join(moved)))
            sites = [site for site in sites if site.name not in moved]
            unused = [name for site in sites for name in _without_gradient(model, site)]
            if unused:
                caution(UNUSED.format(", ".join(unused)))
            self._weights = WeightNorms(model, sites)
        self._step_values = {**self._step_values, **self._weights.read()}

    def after_step(self) -> None:
        """Reads how much the step has changed the weights and the logits of the probe batch."""
        if self._spectra is not None:
            self._step_values = {**self._step_values, **self._spectra.after()}
        if self._logit_changes is not None:
            changes = {
                key: Number(x, 1, own=True)
                for key, x in self._logit_changes.after().items()
            }
            self._step_values = {**self._step_values, **changes}

    def take(self) -> Numbers:
        """Returns all numbers of the step, and forgets them. The names of sites begin with that of the model."""
        values, self._step_values = self._step_values, {}
        numbers = {**values, **self._numbers.read()}
        unused, self._unused_scalar = self._unused_scalar, None
        # The processes of a run agree once on the numbers that each step has.
        if unused is not None and dist.world() > 1:
            numbers.setdefault(("", "train_loss"), Number(torch.zeros_like(unused), 0))
        if not self.name:
            return numbers
        named: dict[NumberKey, Tensor | Number] = {}
        for (site, name), x in numbers.items():
            if isinstance(site, tuple):
                named[tuple([within(self.name, path) for path in site]), name] = x
            else:
                of_all = name in WHOLE_MODEL and site == ""
                named["" if of_all else within(self.name, site), name] = x
        return named


def _without_gradient(model: nn.Module, site: AttentionSite) -> list[str]:
    """The vectors (sinks, gains, scales) of an attention module that lack a gradient that other weights of it have."""
    module = model if site.name == "" else site.module
    name = site.name.partition("#")[0]
    small = [module]
    small += [m for m in module.modules() if {p.ndim for p in m.parameters()} == {1}]
    unused = [
        (inner, parameter)
        for inner in (small if name else small[:1])
        for parameter, p in inner.named_parameters(recurse=False)
        # Vectors of any shape: [h], [1, h, 1, 1], or a single number.
        if p.requires_grad and p.grad is None and p.numel() <= max(p.shape, default=1)
    ]
    # Attention that took no part in this step lacks every gradient, which says nothing about its path.
    if all([p.grad is None for p in module.parameters()]):
        return []
    names = {id(m): path for path, m in model.named_modules()}
    return [f"{names[id(m)]}.{p}".strip(".") for m, p in unused if id(m) in names]
