"""The measurements of a step across the watched models and sites."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.capture.calls import (
    HIDES,
    ScoresCall,
    Seen,
    call_logsumexp,
    dense_rows,
    find,
    find_maxima,
    scores_change,
    statistics,
)
from qkeel.capture.example import Arguments, tensors
from qkeel.capture.visible_sets import KeyOrigin, LayerType, VisibleSets, layer_type, told_apart, visible_sets
from qkeel.errors import InvalidValueError, QkeelError, RefusedError, caution, unknown
from qkeel.functional.bounds import LogitChange
from qkeel.functional.chosen_keys import dense_divergence, index_divergence
from qkeel.functional.norms import widest
from qkeel.functional.statistics import KernelRows, LogitStats, merge, row_moments, sink_gate
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite, Kind, NormGain, Sites, share
from qkeel.kernels.statistics import (
    Found,
    FoundExtremes,
    find_plain_extremes,
    find_plain_rows,
    logit_change,
)
from qkeel.monitor.alarms import Setting
from qkeel.monitor.gather import WHOLE_MODEL, NumberKey, PartialValue, Reduction, SiteNumbers, Stats, merged
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.residual_stream import ResidualStream
from qkeel.monitor.token_classes import HiddenNorms, PassTokens
from qkeel.monitor.weight_norms import GainBounds, StepSpectra, WeightNorms
from qkeel.patching.autograd import version_of
from qkeel.patching.modes import Guarded, ModuleTree
from qkeel.patching.roles import Phase
from qkeel.sites.find import all_sites, found_sites, within
from qkeel.sites.tap import Tap, Visitor
from qkeel.spec import AttentionCall, Sink

# The statistics of the attention calls in a Monitor, and their common setting: number format, kernel, size, scale.

# True for every statistic; "max" for the largest logit only.
Wanted = Literal[True, "max"]


# What is measured in addition if it is requested by name.
Extra = Literal["gates", "updates", "residual", "chosen"]


def wanted(stats: bool | str) -> tuple[Wanted, frozenset[Extra]]:
    """Returns the statistics that a string requests, and the additional ones joined to it by `+`, as in "all+gates" or
    "max+gates".

    Raises: UnknownNameError for a name that does not exist.

    >>> wanted("all+gates")
    (True, frozenset({'gates'}))
    """
    first, *others = ["all"] if stats is True else str(stats).split("+")
    known = get_args(Wanted)[1:]
    if first != "all" and first not in known:
        raise unknown("statistics", first, ("all", *known))
    for name in others:
        if name not in get_args(Extra):
            raise unknown("further statistics", name, get_args(Extra))
    return (True if first == "all" else first), frozenset(others)  # type: ignore[return-value]


K = TypeVar("K")
V = TypeVar("V")


class PassValues(abc.ABC, Generic[K, V]):
    """Values collected in each pass, and over the trained passes of a step."""

    def __init__(self) -> None:
        self._of_pass: dict[K, V] = {}
        self._of_step: dict[K, V] = {}

    def begin(self) -> None:
        """Begins a pass; the values of a pass that has not ended are dropped."""
        self._of_pass = {}

    def end(self) -> dict[K, V]:
        """Ends a pass and returns its values."""
        values, self._of_pass = self._of_pass, {}
        return values

    def keep(self, values: Mapping[K, V]) -> None:
        """Adds the values of a pass that was trained to those of the step."""
        for key, value in values.items():
            self._of_step[key] = self.joined(key, self._of_step[key], value) if key in self._of_step else value

    def count(self, key: K, value: V) -> None:
        """Adds a value to those of the running pass."""
        self._of_pass[key] = self.joined(key, self._of_pass[key], value) if key in self._of_pass else value

    @abc.abstractmethod
    def joined(self, key: K, old: V, new: V) -> V:
        """Combines two values with the same key."""

    @abc.abstractmethod
    def read(self) -> SiteNumbers:
        """Returns the numbers of the step so far, and forgets them."""

    def taken(self) -> dict[K, V]:
        """Returns the values of the step so far, and forgets them."""
        values, self._of_step = self._of_step, {}
        return values


@final
class RowSums(PassValues[tuple[str, str], Tensor]):
    """Collects, by site, the `row_moments` of the logsumexps of a step's query rows and of the gates that learned sinks
    compute from them: lse_mean, lse_std, sink_logit, gate_mean, gate_std [h]."""

    def __init__(self) -> None:
        super().__init__()
        self._sinks: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, site: str, call: Seen) -> None:
        """Adds the rows of one more call."""
        lse = call_logsumexp(call)
        over = lse != -torch.inf  # NaN must remain visible
        if call.query_mask is not None:
            over = over & call.query_mask[:, None]
        self._count((site, "lse"), lse, over)
        sink = self._sink(call)
        if sink is not None:
            self._sinks[site] = sink.mean((0, 2)).expand(lse.shape[1])
            self._count((site, "gate"), sink_gate(lse, sink), over)

    def _sink(self, call: Seen) -> Tensor | None:
        """The logit of each head's learned sink, which broadcasts to [b h t]; None if there is no learned sink."""
        if isinstance(call, ScoresCall):
            return None if call.sink is None else call.sink.to(widest(call.sink.device))
        normalizer = call.spec.normalizer
        if not isinstance(normalizer, Sink) or not normalizer.learned:
            return None
        return call.params["sink"].detach().flatten().to(widest(call.q.device))[None, :, None]

    def _count(self, of: tuple[str, str], x: Tensor, over: Tensor) -> None:
        self.count(of, row_moments(x, over))

    def joined(self, key: tuple[str, str], old: Tensor, new: Tensor) -> Tensor:
        return old + new

    def read(self) -> SiteNumbers:
        """The numbers since the last read, once."""
        found = dict[NumberKey, Tensor | PartialValue]()
        for (site, of), (n, total, squares) in self.taken().items():
            for name, x in (("mean", total), ("square", squares)):
                found[site, f"{of}_{name}"] = PartialValue(value=x / n.clamp_min(1), weight=n, own=True)
        for site, sink in self._sinks.items():
            found[site, "sink_logit"] = PartialValue(value=sink, weight=torch.ones_like(sink), own=True)
        self._sinks = {}
        return found


@final
class IndexSums(PassValues[str, LogitStats]):
    """Collects, by layer, statistics of an indexer's scores in a step, computed as if the scores went into a softmax:
    index_max_logit, index_mean_logit, index_entropy [h]."""

    def __init__(self, tokens: PassTokens) -> None:
        super().__init__()
        self._tokens = tokens

    @torch.no_grad()
    def add(self, layer: str, call: ScoresCall) -> None:
        """Adds the scores of one more call."""
        self.count(layer, statistics(self._tokens.on(call)))

    def joined(self, key: str, old: LogitStats, new: LogitStats) -> LogitStats:
        return merge(old, new) if old.max_logit.shape == new.max_logit.shape else new

    def read(self) -> SiteNumbers:
        """The numbers since the last read, once."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for layer, x in self.taken().items():
            n = x.n_queries.to(x.entropy.dtype)
            numbers[layer, "index_max_logit"] = PartialValue(value=x.max_logit, weight=n, how="max")
            numbers[layer, "index_mean_logit"] = PartialValue(value=x.mean_logit, weight=x.n_pairs.to(n.dtype))
            numbers[layer, "index_entropy"] = PartialValue(value=x.entropy, weight=n)
        return numbers


@final
class ChosenKeys(PassValues[tuple[str, str], tuple[Tensor, Tensor]]):
    """Collects, by site, how much of dense attention the chosen keys of sparse attention retain in a step:
    dense_recall, dense_kl [h] and index_kl, from up to 32 query rows of each call that have a choice."""

    ROWS = 32

    def __init__(self, tokens: PassTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self._index: dict[str, ScoresCall] = {}  # the latest scores of each layer's indexer

    def begin(self) -> None:
        """Begins a pass."""
        super().begin()
        self._index.clear()

    def scored(self, layer: str, call: ScoresCall) -> None:
        """Records the scores by which a layer's indexer chooses keys."""
        self._index[layer] = call

    @torch.no_grad()
    def add(self, site: str, call: Seen) -> None:
        """Adds the rows of one more call of a sparse site. A call is left out if keys were gathered, or if its queries
        and keys are unknown or differ in number."""
        call = self._tokens.on(call)
        (_, t), index = call.query_shape, self._index.pop(site, None)
        step = -(-t // self.ROWS)
        rows = slice((t - 1) % step, t, step)
        measured = dense_rows(call, rows)
        if measured is None:
            return
        z, chosen, counted = measured
        later = torch.arange(t, device=z.device) > torch.arange(t, device=z.device)[rows, None]
        causal = ~(chosen & later).any()
        allowed = ~(later & causal).expand(chosen.shape)
        if call.query_mask is not None:  # a token that does not count cannot be chosen as a key either
            allowed = allowed & call.query_mask[:, None, None]
        allowed = allowed | chosen
        n_chosen = chosen.sum(-1)
        over = counted & (n_chosen > 0) & (n_chosen < allowed.sum(-1))
        divergence = dense_divergence(z, chosen, allowed)
        self._count((site, "dense_kl"), divergence, over)
        self._count((site, "dense_recall"), (-divergence).exp(), over)
        if index is not None and index.logits.shape[2:] == (t, t):
            scores = index.logits[:, :, rows].to(z.dtype)
            seen = allowed.any(1, keepdim=True) & (scores > HIDES)
            self._count((site, "index_kl"), index_divergence(scores, z, seen), over.any(1, keepdim=True))

    def _count(self, of: tuple[str, str], x: Tensor, over: Tensor) -> None:
        total = x.to(widest(x.device)).masked_fill(~over, 0.0).sum((0, 2))
        n = over.expand(x.shape).sum((0, 2))
        self.count(of, (total, n))

    def joined(
        self, key: tuple[str, str], old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return old[0] + new[0], old[1] + new[1]

    def read(self) -> SiteNumbers:
        """The numbers since the last read, once."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {}
        for (site, name), (total, n) in self.taken().items():
            weight = n.to(total.dtype)
            own = not name.startswith("index_")
            numbers[site, name] = PartialValue(value=total / weight.clamp_min(1), weight=weight, own=own)
        return numbers


@final
class CallStatistics:
    """Statistics of calls over the tokens that count; what the calls have in common is recorded in `setting`."""

    def __init__(self, tokens: PassTokens, setting: SettingSeen, wanted: Wanted = True) -> None:
        self.tokens, self.setting, self._wanted = tokens, setting, wanted

    def call(self, call: Seen) -> Found:
        """Measures a call in a separate pass over its logits."""
        self.setting.see(call)
        counted = self.tokens.on(call)
        return find_maxima(counted) if self._wanted == "max" else find(counted)

    def plain(self, q: Tensor, k: Tensor, scale: float, causal: bool) -> Found | None:
        """Like `call`, but for a call of torch's own attention function without a mask; None if that is not
        supported."""
        if not self.tokens.all_count:
            return None
        self.setting.see_plain(q, scale)
        return (find_plain_extremes if self._wanted == "max" else find_plain_rows)(q, k, scale, causal)

    def maxima(self, call: AttentionCall, rows: KernelRows) -> Found:
        """The largest logits, from the attention pass itself, whose kernel returns them for each row."""
        self.setting.see(call)
        mask = self.tokens.on(call).query_mask
        tops = rows.largest if mask is None else rows.largest.masked_fill(~mask[:, None], -torch.inf)
        return FoundExtremes(tops[None])


_NAMES: dict[torch.dtype, Literal["bf16", "fp16", "fp32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@final
class SettingSeen:
    """Collects what the calls have in common. If the calls differ in a fact, the rules that need this fact stay off."""

    def __init__(self) -> None:
        self._formats: set[tuple[torch.dtype, Literal["fused", "eager"]]] = set()
        self._dims: set[int] = set()
        self._scales: set[float | None] = set()

    def see(self, call: Seen) -> None:
        """Records the setting of one attention call."""
        written = isinstance(call, ScoresCall)  # its scores are in memory
        dtype = call.logits.dtype if isinstance(call, ScoresCall) and call.q is None else None
        if call.q is not None:
            dtype = call.q.dtype
            self._dims.add(call.q.shape[-1])
            self._scales.add(call.spec.scale.constant(call.q.shape[-1]))
        if dtype is not None:
            self._formats.add((dtype, "eager" if written else "fused"))

    def see_plain(self, q: Tensor, scale: float) -> None:
        """Records the setting of one call of torch's own attention function."""
        self._dims.add(q.shape[-1])
        self._scales.add(scale)
        self._formats.add((q.dtype, "fused"))

    def of(self, sites: Sequence[AttentionSite]) -> Setting:
        """The facts that apply to all sites, and the q/k norm of the sites that have one, which is needed for the bound
        from its gains."""
        head_dim = next(iter(self._dims)) if len(self._dims) == 1 else None
        dtype, kernel = next(iter(self._formats)) if len(self._formats) == 1 else (None, None)
        scale = next(iter(self._scales)) if len(self._scales) == 1 else None
        known = kernel == "eager" or scale is not None
        kinds: set[Kind] = {gain.kind for site in sites for gain in _both(site)}
        return Setting(
            dtype=_NAMES.get(dtype) if dtype is not None and known else None,
            kernel=kernel,
            head_dim=head_dim,
            scale=scale,
            norm=next(iter(kinds)) if len(kinds) == 1 else None,
        )


def _both(site: AttentionSite) -> tuple[NormGain, ...]:
    """The norms of q and k, if both have one."""
    return (*site.query_gains, *site.key_gains) if site.query_gains and site.key_gains else ()


# How much an optimizer step changes the logits of a fixed probe batch.


@final
class LogitChanges:
    """Compares the logits of a probe batch before and after a step, in one extra pass each, without gradients.

    Both passes draw the same random numbers, so that dropout does not hide the change; the state of the model and of
    its generators is restored. logit_change_rms, logit_change_mean_abs [h]: the root mean square and the mean magnitude
    of the change over all visible pairs. If nothing but the step has changed the weights, the pass after one step is
    the pass before the next.
    """

    def __init__(self, tap: Tap, probe: Arguments) -> None:
        self._tap, self._probe = tap, probe
        self._calls: dict[str, Seen] = {}
        self._of: tuple[int, ...] = ()

    def before(self) -> None:
        """Called before the step."""
        if self._of != self._versions():
            self._calls = {name: frozen(call) for name, call in self._tap.calls(*self._probe).items()}

    def after(self) -> dict[tuple[str, str], Tensor]:
        """Called after the step; returns how much the logits have changed, per site and head."""
        old, new = self._calls, self._tap.calls(*self._probe)
        self._calls, self._of = {name: frozen(call) for name, call in new.items()}, self._versions()
        found = {}
        for site in (name for name in old if name in new):  # in the same order in every process
            change = change_between(old[site], new[site])
            if change is not None:
                found[site, "logit_change_rms"], found[site, "logit_change_mean_abs"] = change.rms, change.mean_abs
        return found

    def _versions(self) -> tuple[int, ...]:
        """The versions of all weights, which increase with every change that torch tracks."""
        return tuple(version_of(p) for p in self._tap.model.parameters())


def frozen(call: Seen) -> Seen:
    """The call with copies of its parameters, because a step changes gains and learned scales in place."""
    if not isinstance(call, AttentionCall):
        return call
    return dataclasses.replace(call, params={name: p.detach().clone() for name, p in call.params.items()})


def change_between(before: Seen, after: Seen) -> LogitChange | None:
    """The change of the logits between two calls of one site with the same batch; None if they do not match."""
    if isinstance(before, ScoresCall) and isinstance(after, ScoresCall):
        return scores_change(before, after)
    if isinstance(before, AttentionCall) and isinstance(after, AttentionCall):
        with torch.autocast(after.q.device.type, enabled=False):  # products of differences need full precision
            return logit_change(before, after)
    return None


# The attention sites of a watched model, which are found in the first measured pass.


@final
class WatchedSites:
    """Finds the sites of a model in one more forward pass, or reports why it cannot.

    `all` contains the sites that were described by hand or given from the start, and all other sites once they are
    found. `weighed` contains the sites whose weights can be read. `all.missed` contains attention layers that were
    found but not recognized.
    """

    def __init__(self, name: str, model: nn.Module, described: Sites, group: ProcessGroup, given: Sites | None) -> None:
        """name: the name of the model, "" if there is only one. described: the sites described by hand, which are
        extended in place. given: the sites that were found earlier, or None."""
        self._name, self.model, self.all = name, model, described
        self.weighed: list[AttentionSite] = []
        self._silent = False  # a warning was raised that a measured pass showed no attention
        self._group = group
        self._given = given is not None
        if given is not None:
            self.all += given
            self.all.missed, self.all.indexers, self.all.linear = given.missed, given.indexers, given.linear
            self.weighed = self.all
        self.types: Mapping[str, LayerType] = {}  # of the observed sites; replaced by a new object when one changes
        self._sets: dict[str, VisibleSets] = {}  # by site, for the call with the most queries so far
        self._fresh = False  # whether there are sets that `types` does not include yet
        self._error: QkeelError | None = None  # reported after the pass if the pass succeeds
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
        self.all.missed, self.all.indexers, self.all.linear = found.missed, found.indexers, found.linear
        if found.missed:
            others = "; ".join(map(str, found.missed))
            caution(f"{found.share} of {type(self.model).__name__} are watched. Not understood: {others}")
        if dist.splits_heads(self.model) and found and not any(site.terms for site in found):
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
            origins: dict[str, KeyOrigin] = {site.name: site.origin for site in self.all}
            self._sets[name], self._fresh = visible_sets(call, origins.get(name, "tokens")), True

    def is_sparse(self, name: str) -> bool:
        """True if the queries of a site are known to see only some of the keys, with hidden keys between them."""
        return any([site.name == name and site.visible == "sparse" for site in self.all])  # noqa: C419

    def pass_over(self) -> None:
        """Updates the type of sites whose visible sets have changed."""
        if not self._fresh:
            return
        self._fresh, seen = False, told_apart(self._sets)
        for i, site in enumerate(self.all):
            if seen.get(site.name, site.visible) != site.visible:
                self.all[i] = dataclasses.replace(site, visible=seen[site.name])
        unknown: dict[str, LayerType] = {name: layer_type(visible, "tokens") for name, visible in seen.items()}
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
                error, self._silent = None if self._silent else RefusedError(f"{self._name}: {error}"), True
        if error is not None:
            self.errors += 1
            caution(f"the weights behind the heads are unknown, so they are not watched: {error}")


# The numbers of a step other than the statistics of its attention calls: hidden states, losses, weights, gradients.


@final
class StepNumbers(Visitor):
    """Collects the numbers of a step by (site, name): means over its passes, and values read before and after its
    update.

    Each training pass adds the norms of hidden states and the loss. Before each pass, it is determined which of its
    tokens count, and before the first pass, which sites there are.
    """

    def __init__(
        self,
        sites: WatchedSites,
        tokens: PassTokens,
        changes: LogitChanges | None,
        optimizer: Optimizer | None,
        *,
        guard: Guarded,
        tree: ModuleTree,
        extras: frozenset[Extra] = frozenset(),
    ) -> None:
        self._sites, self._tokens, self._changes = sites, tokens, changes
        self._rows = RowSums() if "gates" in extras else None
        self._indexes = IndexSums(tokens)
        self._chosen = ChosenKeys(tokens) if "chosen" in extras else None
        self._spectra: StepSpectra | None = None  # created when the sites are known
        self._updates, self._residual = "updates" in extras, "residual" in extras
        self._stream: ResidualStream | None = None  # created when the sites are known
        self._optimizer, self._guard = optimizer, guard
        self.pass_over: Callable[[Phase], None] | None = None  # called when the role of a measured pass is known
        self.counted: Callable[[Phase], None] = lambda phase: None  # called when the role of any pass is known
        self._means, self._tree = Means(), tree
        several: list[PassValues[Any, Any] | None] = [self._means, self._indexes, self._rows, self._chosen]
        self._collected = [values for values in several if values is not None]
        self._hidden: HiddenNorms | None = None  # from the first measured pass on
        self._readers: tuple[WeightNorms, GainBounds] | None = None  # created when the sites are known
        self._read: SiteNumbers = {}

    def before(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        for values in self._collected:
            values.begin()
        self._tokens.begin(args, kwargs)
        if self._hidden is None:
            self._hidden = self._norms(())
            if not self._sites.find(args, kwargs):
                self._hidden = None
                return False
            self._hidden = self._norms([site.name for site in self._sites.weighed])
        if self._residual and self._stream is None:
            names = [site.name for site in self._sites.all]
            self._stream = ResidualStream(self._sites.model, names, self._means.add, self._guard, self._tree)
        return True

    def _norms(self, sites: list[str] | tuple[()]) -> HiddenNorms:
        return HiddenNorms(self._sites.model, sites, self._means.add, self._guard, self._tree)

    def looking(self, candidate: bool) -> Handle | None:
        if self._hidden is None or not candidate:
            return None
        norms = self._hidden.attach()
        if self._stream is None:
            return norms
        stream = self._stream.attach()

        def detach() -> None:
            norms.remove()
            stream.remove()

        return Handle(detach)

    def call(self, name: str, call: Seen, candidate: bool) -> None:
        self._sites.see(name, call)
        if self._rows is not None and candidate:
            self._rows.add(name, self._tokens.on(call))
        if self._chosen is not None and candidate and self._sites.is_sparse(name):
            self._chosen.add(name, call)

    def index(self, layer: str, call: ScoresCall, candidate: bool) -> None:
        if candidate:
            self._indexes.add(layer, call)
            if self._chosen is not None:
                self._chosen.scored(layer, call)

    def after(self, output: object, seen: bool) -> list[dict[Any, Any]]:
        self._tokens.end()
        self._sites.pass_over()
        self._sites.report(seen)
        losses = [x for x in tensors(output) if x.ndim == 0 and x.is_floating_point() and not dist.is_split(x)]
        if len(losses) == 1:
            self._means.add(("", "train_loss"), losses[0].detach(), 1)
        return [values.end() for values in self._collected]

    def settled(self, phase: Phase, collected: Any, measured: bool) -> None:
        self.counted(phase)
        if measured and phase == "train" and collected is not None:
            for values, of_pass in zip(self._collected, collected):
                values.keep(of_pass)
        if measured and self.pass_over is not None:
            self.pass_over(phase)

    @property
    def types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers."""
        return self._sites.types

    def failed(self) -> None:
        for values in self._collected:
            values.begin()
        if self._sites.pass_failed():
            self._hidden = None

    @property
    def errors(self) -> int:
        """The number of failed searches for sites."""
        return self._sites.errors

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before the step; gradients are divided by the loss scale if they are still
        scaled."""
        if self._changes is not None:
            self._changes.before()
        self.read_weights()
        if self._updates and self._spectra is None and self._readers is not None:
            self._spectra = self._compared(self._readers[0].multiplied)
        if self._spectra is not None:
            self._spectra.before()
        if gradient_scale is not None:
            self._read = {key: _unscaled(x, gradient_scale) if "grad" in key[1] else x for key, x in self._read.items()}

    def _compared(self, sites: list[AttentionSite]) -> StepSpectra:
        """The object that compares the weights of these sites; warns if those of other sites cannot be compared."""
        others = [site.name or "the model itself" for site in self._sites.all if site not in sites]
        if others:
            caution(
                f"the change that a step causes is not measured for {', '.join(others)}: the q and k weights are "
                "unknown, computed from other weights, split across processes, or not matrices that are multiplied "
                "together"
            )
        return StepSpectra(self._sites.model, sites)

    def read_weights(self, *, gradients: bool = True) -> None:
        """Reads the norms of the weights, and those of the gradients unless the gradients belong to another pass."""
        if self._readers is None and self._sites.weighed:
            model, sites = self._sites.model, self._sites.weighed
            self._readers = WeightNorms(model, sites, self._optimizer), GainBounds(model, sites)
        if self._readers is not None:
            read = {**self._readers[0].read(), **self._readers[1].read()}
            self._read = {key: x for key, x in read.items() if gradients or "grad" not in key[1]}

    def after_step(self) -> None:
        """Reads how much the step has changed the weights and the logits of the probe batch."""
        if self._spectra is not None:
            self._read = {**self._read, **self._spectra.after()}
        if self._changes is not None:
            changes = self._changes.after().items()
            partial = {key: PartialValue(value=x, weight=torch.ones_like(x), own=True) for key, x in changes}
            self._read = {**self._read, **partial}

    def take(self) -> SiteNumbers:
        """Returns all numbers of the step, and forgets them."""
        read, self._read = self._read, {}
        for values in self._collected:
            read = {**read, **values.read()}
        return read


def _unscaled(x: Tensor | PartialValue, scale: Tensor) -> Tensor | PartialValue:
    return dataclasses.replace(x, value=x.value / scale) if isinstance(x, PartialValue) else x / scale


def joined(how: Reduction, known: Tensor, new: Tensor, share: float) -> Tensor:
    """Combines two values, where `share` is the share of the data that the new value covers.

    >>> joined("root_mean", torch.tensor(1.0), torch.tensor(7.0), 0.5)
    tensor(5.)
    """
    if how == "max":
        return torch.maximum(known, new)
    if how == "root_mean":
        return torch.lerp(known.square(), new.square(), share).sqrt()
    return torch.lerp(known, new, share)


@final
class Means(PassValues[NumberKey, tuple[Tensor, int]]):
    """Collects means on their device, each over a number of values, and combines them."""

    def __init__(self) -> None:
        super().__init__()
        self._reductions: dict[NumberKey, Reduction] = {}

    def add(self, of: NumberKey, mean: Tensor, n: int, how: Reduction = "mean") -> None:
        """Adds a mean over n values. how: how several means are combined."""
        self._reductions[of] = how
        self.count(of, (mean, n))

    def joined(self, key: NumberKey, old: tuple[Tensor, int], new: tuple[Tensor, int]) -> tuple[Tensor, int]:
        (mean, n), (added, more) = old, new
        return joined(self._reductions[key], mean, added, more / max(n + more, 1)), n + more

    def read(self) -> SiteNumbers:
        """The means since the last read, once."""
        return {
            of: PartialValue(value=x, weight=torch.full_like(x, n), how=self._reductions[of])
            for of, (x, n) in self.taken().items()
            if n
        }


# The models that a monitor watches together; usually there is only one.


@final
class WatchedModels:
    """Combines the measurements of several models, under names that begin with the name of the model.

    If several models have a value for the whole model, such as the loss, the value of the last model is used.
    """

    def __init__(self, whole: nn.Module, stages: Mapping[str, int | None]) -> None:
        """whole: the model, or a module that contains all models. stages: the pipeline stages that the models turn out
        to be, which determine the order of the models."""
        self.whole = whole
        self._stages = stages
        self._taps: dict[str, Tap] = {}
        self._numbers: dict[str, StepNumbers] = {}
        self._passed: dict[Phase, set[str]] = {"train": set(), "eval": set()}

    def add(
        self,
        name: str,
        tap: Tap,
        numbers: StepNumbers,
        counted: Callable[[Phase], None],
        round_over: Callable[[Phase], None] | None,
    ) -> None:
        """Adds a model. counted: called when the role of one of its passes is known. round_over: ends a step, which
        without an optimizer is one pass of each model."""
        self._taps[name], self._numbers[name], tap.visitor = tap, numbers, numbers
        numbers.counted = counted
        if round_over is not None:
            numbers.pass_over = functools.partial(self._pass_over, name, round_over)

    def _pass_over(self, name: str, round_over: Callable[[Phase], None], phase: Phase) -> None:
        self._passed[phase].add(name)
        if len(self._passed[phase]) == len(self._taps) and self.has(phase):
            self._passed[phase].clear()
            round_over(phase)

    @property
    def taps(self) -> list[Tap]:
        """The tap of each model."""
        return [*self._taps.values()]

    @property
    def sites(self) -> Sites:
        """The sites of all models."""
        return all_sites({name: self._taps[name].sites for name in self._order()})

    def include(self, sites: Sequence[AttentionSite]) -> None:
        """Adds sites that were described by hand, each to the model that contains it."""
        for site in sites:
            holders = (tap for tap in self.taps if any(m is site.module for m in tap.model.modules()))
            next(holders, self.taps[0]).sites.append(site)

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics to read."""
        return any([tap.has(phase) for tap in self._taps.values()])  # noqa: C419

    def read(self, phase: Phase) -> Stats:
        """The statistics of all sites since the last read."""
        if len(self._taps) == 1:
            ((name, tap),) = self._taps.items()
            return tap.take(phase) if not name else tap.take(phase).renamed(functools.partial(within, name))
        found = [self._taps[name].take(phase).renamed(functools.partial(within, name)) for name in self._order()]
        return merged(found)

    def settle(self, *, decide: bool) -> None:
        """Sorts the passes whose role is known, or, to `decide`, all passes; see `Tap.settle`."""
        for tap in self._taps.values():
            tap.settle(decide=decide)

    def peek(self, phase: Phase | None) -> Stats:
        """The statistics of passes whose role is open, taken for trained if the model was in training mode."""
        open_passes = [(name, self._taps[name].peek(phase)) for name in self._order()]
        return merged(
            [stats.renamed(functools.partial(within, name)) if name else stats for name, stats in open_passes]
        )

    @property
    def types(self) -> Mapping[str, LayerType]:
        """The types of the observed layers of all models."""
        if len(self._numbers) == 1 and "" in self._numbers:
            return self._numbers[""].types
        return {within(name, site): of for name, one in self._numbers.items() for site, of in one.types.items()}

    def coverage(self, phase: Phase, stats: Stats) -> dict[str, float]:
        """How much of the models these statistics cover, keyed by the names in records.MONITOR_FIELDS; calls are
        counted from the start."""
        known = [
            site.name if not name else within(name, site.name) for name, tap in self._taps.items() for site in tap.sites
        ]
        return {
            "sites": len(known),
            "calls": sum([tap.calls_seen[phase] for tap in self.taps]),
            "missed": sum([len(tap.sites.missed) for tap in self.taps]),
            "silent": len(set(known).difference(stats)),
            "errors": sum([numbers.errors for numbers in self._numbers.values()]),
        }

    def before_step(self, gradient_scale: Tensor | None) -> None:
        """Reads weights and gradients before a step; gradients are divided by the loss scale if they are still
        scaled."""
        for numbers in self._numbers.values():
            numbers.before_step(gradient_scale)

    def look_again(self) -> bool:
        """Measures all models in their current state, each on the batch of its last training pass; returns False if a
        model has no such batch. Passes that belong to a step that was never taken have been measured already."""
        if any(tap.latest is None for tap in self.taps):
            return False
        try:
            seen = all(tap.has("train") or tap.look_again() for tap in self.taps)
        except Exception:
            self.read("train")  # discards the measurements of all models
            raise
        for numbers in self._numbers.values():
            numbers.read_weights(gradients=False)
        return seen and self.has("train")

    def after_step(self) -> None:
        """Reads what a step has changed."""
        for numbers in self._numbers.values():
            numbers.after_step()

    def take(self, rate: Tensor | None) -> SiteNumbers:
        """Returns all numbers of the step and forgets them. rate: the learning rate of the step, or None if there is no
        optimizer."""
        numbers: dict[NumberKey, Tensor | PartialValue] = {} if rate is None else {("", "lr"): rate}
        for name in self._order():
            for (site, number), x in self._numbers[name].take().items():
                if name:
                    site = "" if number in WHOLE_MODEL else within(name, site)
                numbers[site, number] = x
        return numbers

    def _order(self) -> list[str]:
        return sorted(self._taps, key=lambda name: self._stages.get(name) or 0)
