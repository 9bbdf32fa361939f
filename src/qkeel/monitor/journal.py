"""The journal of a run: records in order, alarms, sinks, and results that arrive later."""

from __future__ import annotations

import dataclasses
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from qkeel import dist
from qkeel.capture.calls import SiteStats
from qkeel.errors import AlarmWarning, caution
from qkeel.functional import statistics
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import LogitStats
from qkeel.handle import State
from qkeel.monitor.alarms import AlarmLog
from qkeel.monitor.gather import Arrived, BlockPlaces, Packing, Stats, Transfer, merged, merged_arrivals
from qkeel.monitor.history import History, PlannedRates
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import Sample, pad_layers, repeat_groups
from qkeel.monitor.recording import Recording
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sinks import Sink
from qkeel.patching.roles import Phase
from qkeel.records import HEAD_FIELDS, LINEAR, NON_FINITE, TYPES_EVENT, fold_heads, layer_types

# How measurements are recorded: as samples, split by token class if there are classes, for the rules and the sinks.

_WHOLE = ("max_logit", "min_logit", "max_abs_logit", "capped_max_logit", "entropy")  # names in STEP_FIELDS


@final
class Recorder:
    """Keeps the history of a run, raises alarms and feeds the sinks; a sink that fails is dropped with one warning.

    `rules` and `about` are called once, when the first numbers arrive, because some of what they return is known only
    after the model has run.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        rules: Callable[[], Sequence[Rule]],
        planned: PlannedRates | None,
        about: Callable[[], Mapping[str, object]],
        types: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """types: returns the types of this process's layers, which may change when longer sequences are seen."""
        self.sinks = list(sinks) if dist.rank() == 0 else []
        self.log = AlarmLog(())
        self._rules = rules
        self.sample: Sample | None = None
        self._trained: list[Sample] = []  # the last two training samples
        self.recording = Recording(planned=planned)
        self._evaluated = Recording()  # used if the model is never seen in training mode
        self._last_evaluated = -1
        self._about: Callable[[], Mapping[str, object]] | None = about
        self.sites: tuple[str, ...] = ()
        self._types, self._local = types, dict[str, str]()
        self._described: Mapping[str, str] = {}  # types of all layers according to the description of the run
        self._width = 0  # number of heads of the layer with the most heads, once the sites are known
        self._tables: weakref.WeakKeyDictionary[Packing, RecordTable] = weakref.WeakKeyDictionary()
        self._late: set[str] = set()  # sites for which a warning that they came too late was raised
        self.dropped = 0  # sinks that failed
        self.complete = False  # whether training ended as planned
        self._carried: State = {}  # loaded from a checkpoint, until the first numbers arrive

    def add(self, step: int, phase: Phase, arrived: Arrived) -> None:
        """Adds the numbers of one step."""
        if not self.sites:
            self.sites = arrived.packing.sites
            self._width = max(max(block.layout[1]) for block in arrived.packing.blocks)
            self.recording = Recording(self.sites, planned=self.recording.planned)
            self._evaluated = Recording(self.sites)
        self._tell_late(step, arrived)
        if self._about is not None:
            about, self._about = {**self._about(), **class_facts(arrived.stats)}, None
            self.log = AlarmLog(self._rules())
            self._take_up()
            self._each(lambda sink: sink.open(about))
            self._local, self._described = dict(self._types()), layer_types(about)
        self._tell_types(step)
        sample = self.sample = self._sample(step, phase, arrived)
        self._each(lambda sink: sink.write(sample))
        if phase == "eval" and not len(self.recording) and sample.step > self._last_evaluated:
            self._last_evaluated = sample.step
            self._evaluated.append(sample.numbers, sample.heads)
        if phase == "train":
            self._trained = [*self._trained[-1:], sample]
            self.recording.append(sample.numbers, sample.heads)
            for alarm in self.log.update(dataclasses.replace(self.recording.history, types=sample.types)):
                if dist.rank() == 0:
                    known = any(other.remedy == alarm.remedy for other in self.log.alarms if other.step < alarm.step)
                    caution(alarm.line if known else str(alarm), AlarmWarning)
                self._each(lambda sink, alarm=alarm: sink.alarm(alarm))

    def _tell_types(self, step: int) -> None:
        """Reports to the sinks which layers have a type that differs from their description."""
        types = self._types()
        changed = {site: of for site, of in types.items() if self._local.get(site, of) != of}
        self._local |= types
        if changed:
            words = ", ".join(f"{site} is {of}" for site, of in changed.items())
            self.event({"step": step, "event": TYPES_EVENT, "types": changed, "text": f"a longer batch shows: {words}"})

    @property
    def types(self) -> dict[str, str]:
        """The type of each recorded layer, where it is known, and of the layers without logits."""
        known = {**self._described, **self._local}
        linear = {name: of for name, of in known.items() if of == LINEAR}
        return {site: known[site] for site in self.sites if site in known} | linear

    def _tell_late(self, step: int, arrived: Arrived) -> None:
        """Warns once for each site that is not recorded because it was missing in the first measured step."""
        if arrived.packing in self._tables:
            return
        late = [site for site in arrived.packing.sites if site not in self.sites and site not in self._late]
        self._late.update(late)
        if late and dist.rank() == 0:
            caution(
                f"the attention of {', '.join(late)} was first seen at step {step:,}. The layers of a record are "
                "those of the first measured step, so this attention is not recorded and no alarm checks it. Close "
                "this monitor and watch again from here on, or begin with a batch that uses all attention"
            )

    @property
    def history(self) -> History:
        """The history of training or, if the model was only seen in evaluation mode, the history of its evaluation
        passes."""
        one = self.recording if len(self.recording) or not len(self._evaluated) else self._evaluated
        history = dataclasses.replace(one.history, types=self.types)
        return history if one is self.recording else dataclasses.replace(history, phase="eval")

    def state(self) -> State:
        """The records and the alarms so far, as tensors by name."""
        if self._carried:
            return self._carried
        alarms = json.dumps([dataclasses.asdict(alarm) for alarm in self.log.alarms]).encode()
        records = {f"records/{name}": torch.from_numpy(x.copy()) for name, x in self.recording.state().items()}
        return {**records, "alarms": torch.frombuffer(bytearray(alarms), dtype=torch.uint8)}

    def load(self, state: State) -> None:
        """Continues from these records and alarms; call it before the first numbers are added."""
        self._carried = state

    def _take_up(self) -> None:
        state, self._carried = self._carried, {}
        if state:
            records = {name.removeprefix("records/"): np.asarray(x) for name, x in state.items() if name != "alarms"}
            self.recording.load(records)
            rows = json.loads(bytes(state["alarms"].cpu().numpy()))
            self.log.alarms = [Alarm(**row | {"severity": Severity(row["severity"])}) for row in rows]

    def before(self, step: int) -> Sample | None:
        """The most recent training sample before this step; only the last two samples are kept."""
        return next((sample for sample in reversed(self._trained) if sample.step < step), None)

    def event(self, event: Mapping[str, object]) -> None:
        """Passes another event to the sinks, after the first sample."""
        self._each(lambda sink: sink.event(event))

    def close(self, sound: bool) -> None:
        """Ends the records; the run counts as complete if training was completed and watching was `sound`."""
        if self._about is None:
            self._each(lambda sink: sink.close(self.complete and sound))
        self.sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                act(sink)
            except Exception as error:
                self.sinks.remove(sink)
                self.dropped += 1
                caution(
                    f"{type(sink).__name__} failed and is switched off: {type(error).__name__}: {error}. "
                    "Statistics and training continue"
                )

    def _sample(self, step: int, phase: Phase, arrived: Arrived) -> Sample:
        table = self._tables.get(arrived.packing)
        if table is None:
            table = self._tables[arrived.packing] = RecordTable(arrived.packing, self.sites, self._width)
        heads, known, values = table.read(arrived.vector)
        if any(block.classes for block in arrived.packing.blocks):
            split = class_rows([arrived.stats.get(site) for site in self.sites])
            rows = {n: pad_layers(of, self._width) for n, of in split.items() if any(row is not None for row in of)}
            heads |= rows
        folded = {name: float(fold_heads(name, heads[name].reshape(1, -1))[0]) for name in _WHOLE if name in known}
        return Sample(
            step=step,
            values={"step": float(step), **folded, **values},
            layers=self.sites,
            heads=heads,
            phase=phase,
            monitor=arrived.monitor,
            types=self.types,
        )


@final
class RecordTable:
    """Reads records from the vectors in which the numbers of steps arrive; it stores where each number lies.

    A record consists of a table [layers heads] for each name, with NaN where a layer has fewer heads or was not
    measured, and of numbers without heads.
    """

    def __init__(self, packing: Packing, sites: Sequence[str], width: int) -> None:
        """Takes the layers of the record, and the number of heads of the layer with the most heads."""
        self._shape = len(sites), width
        self._place = {site: i for i, site in enumerate(sites)}
        self._derived = [name for name in HEAD_FIELDS if isinstance(getattr(LogitStats, name, None), property)]
        # Each block, and for each of its query heads the index of its key head.
        self._blocks = [(block, _key_heads(*block.layout[1:])) for block in packing.blocks]
        size = packing.size + len(self._derived) * sum(sum(block.layout[1]) for block in packing.blocks)
        self._nan, self._zero, self._one = size, size + 1, size + 2  # see `read`
        # For each name, the index of each number, and the index of the count of the data behind it.
        index: dict[str, np.ndarray] = {}
        counts: dict[str, np.ndarray] = {}
        first = packing.size
        for block, of_key in self._blocks:
            self._add_block(block, of_key, first, index, counts)
            first += len(self._derived) * sum(block.layout[1])
        self._measured = tuple(index)  # names measured from the logits of calls
        scalars: dict[str, int] = {}
        for (site, name), place in packing.single.items():
            if not place.shape:
                scalars[f"{name}/{site}" if site else name] = place.first
            elif name in HEAD_FIELDS:
                self._put(name, (site,), place.shape[:1], place.indices, index, counts)
        self._names = [name for name in HEAD_FIELDS if name in index]
        nothing = [np.zeros((0, len(sites) * width), dtype=np.intp)]
        self._index = np.concatenate([*nothing, *[index[name][None] for name in self._names]])
        self._counts = np.concatenate([*nothing, *[counts[name][None] for name in self._names]])
        self._rows = {name: i for i, name in enumerate(self._names)}
        self._scalars, self._of_scalars = [*scalars], np.array([*scalars.values()], dtype=np.intp)

    def read(self, vector: np.ndarray) -> tuple[dict[str, np.ndarray], set[str], dict[str, float]]:
        """Returns the tables by name, in the order of HEAD_FIELDS; the names that were measured from logits for
        at least one head; and the numbers without heads."""
        derived = []
        for block, of_key in self._blocks:
            joint = block.read(vector).joint
            for x in [getattr(joint, name).numpy() for name in self._derived]:
                derived.append(x if len(x) == len(of_key) else x[of_key])
        vector = np.concatenate([vector, *derived, (np.nan, 0.0, 1.0)])
        table = vector[self._index]
        known = vector[self._counts] > 0
        row, there = self._rows, np.asarray(self._counts != self._zero)
        if self._measured:
            for name in _OF_MAXIMA:  # known even where only the maxima were measured
                top = table[row["capped_max_logit" if name == "capped_max_logit" else "max_logit"]]
                known[row[name]] |= np.logical_and(there[row[name]], top != -np.inf)
        table[~known] = np.nan
        some = np.logical_or.reduce(known, axis=1)
        heads = dict(zip(self._names, table.reshape(-1, *self._shape)))
        measured = {name for name in self._measured if some[row[name]]}
        return heads, measured, dict(zip(self._scalars, vector[self._of_scalars].tolist()))

    def _add_block(
        self,
        block: BlockPlaces,
        of_key: np.ndarray,
        first: int,
        index: dict[str, np.ndarray],
        counts: dict[str, np.ndarray],
    ) -> None:
        """Adds the statistics of a block; its derived ones begin at index `first`."""
        sites, n_heads, _ = block.layout
        if self._place.keys().isdisjoint(sites):
            return
        places = {name: place.indices for name, place in block.fields.items() if len(place.shape) == 1}
        places |= {name: x[of_key] for name, x in places.items() if statistics.of_key_heads(name)}
        n = sum(n_heads)
        places |= {name: np.arange(first + i * n, first + (i + 1) * n) for i, name in enumerate(self._derived)}
        for name, field in HEAD_FIELDS.items():
            if name in places and name in statistics.RECORDED:
                self._put(name, sites, n_heads, places[name], index, counts, places[field.count])

    def _put(
        self,
        name: str,
        sites: tuple[str, ...],
        n_heads: tuple[int, ...],
        places: np.ndarray,
        index: dict[str, np.ndarray],
        counts: dict[str, np.ndarray],
        of: np.ndarray | None = None,
    ) -> None:
        """Stores the indices of the heads of some sites, in order, and the indices of their counts."""
        layers = np.repeat([self._place.get(site, -1) for site in sites], n_heads)
        columns = np.concatenate([np.arange(n) for n in n_heads])
        own = (layers >= 0) & (columns < self._shape[1])
        if not own.any():
            return
        if name not in index:
            n = self._shape[0] * self._shape[1]
            index[name], counts[name] = np.full(n, self._nan), np.full(n, self._zero)
        to = (layers * self._shape[1] + columns)[own]
        index[name][to] = places[own]
        counts[name][to] = self._one if of is None else of[own]


_OF_MAXIMA = ("max_logit", "capped_max_logit", NON_FINITE)


def _key_heads(heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> np.ndarray:
    """The index of each query head's key head among the key heads of all sites."""
    firsts = itertools.accumulate(kv_heads, initial=0)
    return np.concatenate([repeat_groups(np.arange(i, i + g), n) for i, n, g in zip(firsts, heads, kv_heads)])


_COMPETITION = ("query_competition", "key_competition")
_PAIRS = {"class_max_logit": "n_pairs", "class_mass": "n_queries", "class_uniform_mass": "n_queries"}
_SINGLE = {"class_query_norm": "n_normed", "class_key_norm": "n_keys"}


def class_facts(stats: Mapping[str, LogitStats]) -> dict[str, object]:
    """The names of the classes and of all statistics recorded per head, for the sinks; empty if there are no
    classes."""
    names = next((s.classes.names for s in stats.values() if s.classes is not None), None)
    return {} if names is None else {"classes": list(names), "fields": [*HEAD_FIELDS, *class_fields(names)]}


def class_fields(names: Sequence[str]) -> tuple[str, ...]:
    """The names that are recorded for these classes, according to records.CLASS_FIELDS.

    >>> class_fields(["text", "image"])[1:6]
    ('key_competition', 'class_max_logit/text->text', 'class_max_logit/text->image', 'class_max_logit/image->text', \
'class_max_logit/image->image')
    """
    pairs = [f"{a}->{b}" for a in names for b in names]
    return (*_COMPETITION, *(f"{f}/{p}" for f in _PAIRS for p in pairs), *(f"{f}/{n}" for f in _SINGLE for n in names))


def class_rows(stats: Sequence[LogitStats | None]) -> dict[str, list[np.ndarray | None]]:
    """Returns, by recorded name, one row [heads] per layer, NaN where nothing was measured; None for a layer without
    classes."""
    names = next((s.classes.names for s in stats if s is not None and s.classes is not None), None)
    if names is None:
        return {}
    layers = [{} if s is None or s.classes is None else _written_rows(s.classes, len(s.max_logit)) for s in stats]
    return {field: [layer.get(field) for layer in layers] for field in class_fields(names)}


def _written_rows(stats: ClassStats, n_heads: int) -> dict[str, np.ndarray]:
    values = stats.tensors()
    competition = stats.query_competition, stats.key_competition
    found = {name: _row(value, n_heads) for name, value in zip(_COMPETITION, competition)}
    for field, count in (_PAIRS | _SINGLE).items():
        value, counts = values[field.removeprefix("class_")], values[count]
        if field in _PAIRS and counts.ndim == 2:
            counts = counts[..., None].expand_as(value)
        value = value.double().masked_fill(counts == 0, np.nan)
        for a, query in enumerate(stats.names):
            if field in _SINGLE:
                found[f"{field}/{query}"] = _row(value[:, a], n_heads)
                continue
            for b, key in enumerate(stats.names):
                found[f"{field}/{query}->{key}"] = _row(value[:, a, b], n_heads)
    return found


def _row(value: Tensor, n_heads: int) -> np.ndarray:
    return repeat_groups(value.double().numpy(), n_heads)


# The numbers of steps that have not yet arrived from the device and the other processes.

_UNREAD = 16  # steps whose statistics wait to be merged, if anybody reads them


@final
class PendingResults:
    """Records the numbers of each step when they have arrived, in the order of the steps. The statistics are also
    merged and kept until they are read."""

    def __init__(self, group: ProcessGroup, journal: Recorder) -> None:
        self._group, self._journal = group, journal
        self._coming: list[_Coming] = []
        self._unread: dict[Phase, list[Arrived | Stats]] = {"train": [], "eval": []}
        self._said = False

    def add(
        self, step: int, phase: Phase, transfer: Transfer, *, unread: Stats | None, monitor: Mapping[str, float]
    ) -> None:
        """Adds a step. unread: the part of its statistics that has not been read yet, or None for everything that
        arrives; monitor: the statistics on this process's monitor."""
        self._coming.append(_Coming(step=step, phase=phase, transfer=transfer, unread=unread, monitor=monitor))

    @property
    def flagged(self) -> bool:
        """Returns whether another process has reported, in an exchange that is in progress, that it has switched itself
        off."""
        return any(one.transfer.stopped for one in self._coming)

    def settle(self, *, wait: bool, before: int = 0) -> None:
        """Records what has arrived; waits for the steps before `before` or, with `wait`, for everything.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        while self._coming and (wait or self._coming[0].step < before or self._coming[0].transfer.arrived):
            one = self._coming.pop(0)
            if one.transfer.stopped:
                self._group.over = True
            arrived = one.transfer.result()
            self._say_unknown(arrived)
            waiting = self._unread[one.phase]
            if one.unread if one.unread is not None else arrived.packing.sites:
                waiting.append(arrived if one.unread is None else one.unread)
            if len(waiting) > _UNREAD:
                waiting[:] = [_merged(waiting)]
            if arrived.packing.sites:
                arrived.monitor = {**one.monitor, **arrived.monitor}
                self._journal.add(one.step, one.phase, arrived)

    def _say_unknown(self, arrived: Arrived) -> None:
        """Warns once about sites whose heads are split across processes, for which a number is not measured."""
        if not self._group.several or self._said:
            return
        norms, largest = arrived.number("query_weight_norm"), arrived.number("qk_spectral_norm")
        unknown = [
            site
            for site, norm in norms.items()
            if site in largest and bool((largest[site].isnan() & norm.isfinite()).any())
        ]
        if unknown:
            self._said = True
            caution(
                "qk_spectral_norm is not measured for heads that are split across processes: qkeel does not gather "
                f"weights to compute one number. Heads are split across processes in {', '.join(unknown)}"
            )

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of recorded steps that nobody has read."""
        return bool(self._unread[phase])

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of recorded steps that nobody has read, and forgets them."""
        found, self._unread[phase] = self._unread[phase], []
        return _merged(found)


def _merged(waiting: Sequence[Arrived | Stats]) -> SiteStats:
    steps = [one for one in waiting if isinstance(one, Arrived)]
    others = [one for one in waiting if not isinstance(one, Arrived)]
    return merged([*others, merged_arrivals(steps)] if steps else others)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A step whose numbers have not arrived yet."""

    step: int
    phase: Phase
    transfer: Transfer
    unread: Stats | None
    monitor: Mapping[str, float]
