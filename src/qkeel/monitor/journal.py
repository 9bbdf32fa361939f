"""The journal of a run: records in order, alarms, sinks, and results that arrive later."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from qkeel import dist
from qkeel.capture.calls import ScoreBlock, SiteStats
from qkeel.errors import AlarmWarning, caution
from qkeel.functional import statistics
from qkeel.functional.class_statistics import ClassStats
from qkeel.functional.statistics import LogitStats
from qkeel.handle import State
from qkeel.monitor.alarms import AlarmLog
from qkeel.monitor.gather import Measurement, SiteNumbers, Stats, Transfer, merged
from qkeel.monitor.history import History, PlannedRates
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import Sample, pad_layers, repeat_groups
from qkeel.monitor.recording import Recording
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sinks import Sink
from qkeel.records import HEAD_FIELDS, LINEAR, NON_FINITE, TYPES_EVENT, fold_heads, layer_types
from qkeel.sites.tap import Phase

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
        self._table = HeadRows((), 0)  # replaced when the sites are known
        self._names: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # keys of the numbers in rows without heads
        self._late: set[str] = set()  # sites for which a warning that they came too late was raised
        self.dropped = 0  # sinks that failed
        self.complete = False  # whether training ended as planned
        self._carried: State = {}  # loaded from a checkpoint, until the first numbers arrive

    def add(self, step: int, phase: Phase, measured: Measurement) -> None:
        """Adds the numbers of one step."""
        if not self.sites:
            self.sites = tuple(measured.stats)
            self._table = HeadRows(self.sites, max(len(s.max_logit) for s in measured.stats.values()))
            self.recording = Recording(self.sites, planned=self.recording.planned)
            self._evaluated = Recording(self.sites)
        self._tell_late(step, measured)
        if self._about is not None:
            about, self._about = {**self._about(), **class_facts(measured.stats)}, None
            self.log = AlarmLog(self._rules())
            self._take_up()
            self._each(lambda sink: sink.open(about))
            self._local, self._described = dict(self._types()), layer_types(about)
        self._tell_types(step)
        sample = self.sample = self._sample(step, phase, measured)
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

    def _tell_late(self, step: int, measured: Measurement) -> None:
        """Warns once for each site that is not recorded because it was missing in the first measured step."""
        late = [site for site in measured.stats if site not in self.sites and site not in self._late]
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

    def _sample(self, step: int, phase: Phase, measured: Measurement) -> Sample:
        stats = SiteStats.of(measured.stats)
        numbers = measured.numbers if type(measured.numbers) is SiteNumbers else SiteNumbers((), measured.numbers)
        table = self._table
        table.begin()
        for block, own in itertools.zip_longest(stats.blocks, measured.arrays):
            table.add_statistics(block, own)
        seen = set(table.heads)
        values = {"step": float(step)}
        for row in numbers.rows:
            if row.counts and row.name in HEAD_FIELDS:
                table.put(row.name, row.sites, row.counts, row.values.numpy())
            elif not row.counts:
                names = self._names.get((row.name, row.sites))
                if names is None:
                    names = self._names[row.name, row.sites] = [f"{row.name}/{site}" for site in row.sites]
                values |= zip(names, row.values.tolist())
        for (site, name), value in numbers.single.items():
            assert isinstance(value, Tensor)  # partial values were combined when they arrived
            if value.ndim == 0:
                values[f"{name}/{site}" if site else name] = float(value)
            elif name in HEAD_FIELDS and site in table.place:
                table.put(name, (site,), (len(value),), value.double().numpy())
        heads = {name: table.heads[name] for name in HEAD_FIELDS if name in table.heads}
        split = class_rows([stats.get(site) for site in self.sites]) if table.classes else {}
        heads |= {n: pad_layers(of, table.width) for n, of in split.items() if any(row is not None for row in of)}
        folded = {
            name: float(fold_heads(name, heads[name].reshape(1, -1))[0])
            for name in _WHOLE
            if name in seen and table.measured(name)
        }
        return Sample(
            step=step,
            values={"step": values.pop("step"), **folded, **values},
            layers=self.sites,
            heads=heads,
            phase=phase,
            monitor=measured.monitor,
            types=self.types,
        )


class HeadRows:
    """The values of one record by name, [layers heads] each, NaN where a layer has fewer heads or was not measured."""

    def __init__(self, sites: Sequence[str], width: int) -> None:
        self.place = {site: i for i, site in enumerate(sites)}
        self.width = width
        self._nothing = np.full((len(sites), width), np.nan)
        # Recorded statistic of the logits of a call -> the count of the logits it was computed from.
        self._made_of = {name: field.count for name, field in HEAD_FIELDS.items() if name in statistics.RECORDED}
        self._places: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self._groups: dict[object, np.ndarray] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a record."""
        self.heads: dict[str, np.ndarray] = {}
        self.classes = False  # whether some statistics are split by class
        self._known: set[str] = set()

    def put(self, name: str, sites: tuple[str, ...], counts: tuple[int, ...], values: np.ndarray) -> None:
        """Stores the values for the heads of some sites, concatenated."""
        to, of = self._at(sites, counts)
        if len(to):
            table = self.heads.get(name)
            if table is None:
                table = self.heads[name] = self._nothing.copy()
            table.reshape(-1)[to] = values[of]

    def add_statistics(self, block: ScoreBlock, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Stores the statistics of a block of sites; `arrays` are the statistics with one value per head, if they are
        already available as arrays."""
        stats, (names, heads, kv_heads) = block.joint, block.layout
        if self.place.keys().isdisjoint(names):
            return
        self.classes = self.classes or stats.classes is not None
        if arrays is None:
            own = {name: x.numpy() for name, x in stats.tensors().items() if x.ndim == 1}
        else:
            own = {**arrays}
        with_maxima = own["max_logit"] != -np.inf
        own[NON_FINITE] = statistics.is_not_finite(*(own[name] for name in _FINITE))
        given = {name: own[name] if name in own else stats.value(name) for name in self._made_of}
        values = {n: x if isinstance(x, np.ndarray) else x.double().numpy() for n, x in given.items() if x is not None}
        counts = {count: own[count] > 0 for count in self._made_of.values()}
        if heads != kv_heads:
            group = self._group(heads, kv_heads)
            for rows in (values, counts):
                for name in rows:
                    if len(rows[name]) == sum(kv_heads):  # a statistic of key heads
                        rows[name] = rows[name][group]
        # All names are handled as one table, because there are some twenty in every measured step.
        table = np.array([*values.values()], dtype=np.float64)
        known = np.array([counts[self._made_of[name]] for name in values])
        for i, name in enumerate(values):
            if name in _OF_MAXIMA:  # if only maxima were measured
                known[i] |= with_maxima if name != "capped_max_logit" else table[i] != -np.inf
        table[~known] = np.nan
        some = np.logical_or.reduce(known, axis=1).tolist()
        self._known.update([name for name, any_head in zip(values, some) if any_head])
        to, of = self._at(names, heads)
        if not len(to):
            return
        new = [name for name in values if name not in self.heads]
        blank = np.empty((len(new), *self._nothing.shape))
        blank.fill(np.nan)
        self.heads |= zip(new, blank)
        table = table if len(of) == table.shape[1] else table[:, of]
        if len(new) == len(values):
            blank.reshape(len(new), -1)[:, to] = table
        else:
            for name, row in zip(values, table):
                self.heads[name].reshape(-1)[to] = row

    def _group(self, heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> np.ndarray:
        """The index of each query head's key head among the key heads of all sites."""
        group = self._groups.get((heads, kv_heads))
        if group is None:
            parts = [repeat_groups(i, n) for i, n in _numbered(heads, kv_heads)]
            group = self._groups[heads, kv_heads] = np.concatenate(parts)
        return group

    def measured(self, name: str) -> bool:
        """Returns whether the number was measured for any head."""
        return name in self._known

    def _at(self, sites: tuple[str, ...], counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The indices of these heads' values in a flat table, and the indices of these values among those given."""
        known = self._places.get((sites, counts))
        if known is None:
            place = [self.place.get(site, -1) for site in sites]
            rows = np.repeat(np.array(place), counts)
            columns = np.concatenate([np.arange(n) for n in counts])
            own = np.flatnonzero((rows >= 0) & (columns < self.width))
            known = self._places[sites, counts] = (rows * self.width + columns)[own], own
        return known


_OF_MAXIMA = ("max_logit", "capped_max_logit", NON_FINITE)
_FINITE = ("max_logit", "min_logit", "entropy", "n_pairs")


def _numbered(heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> Iterator[tuple[np.ndarray, int]]:
    """Yields for each site the indices of its key heads among all key heads, and its number of query heads."""
    first = 0
    for n, groups in zip(heads, kv_heads):
        yield np.arange(first, first + groups), n
        first += groups


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

_UNREAD = 16  # the number of steps whose unread statistics are kept before they are merged


@final
class PendingResults:
    """Records the numbers of each step when they have arrived, in the order of the steps. The statistics are also
    merged and kept until they are read."""

    def __init__(self, group: ProcessGroup, journal: Recorder) -> None:
        self._group, self._journal = group, journal
        self._coming: list[_Coming] = []
        self._unread: dict[Phase, list[Stats]] = {"train": [], "eval": []}
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
            measured = one.transfer.result()
            self._say_unknown(measured)
            unread = measured.stats if one.unread is None else one.unread
            waiting = self._unread[one.phase]
            if unread:
                waiting.append(unread)
            if len(waiting) > _UNREAD:
                waiting[:] = [merged(waiting)]
            if measured.stats:
                monitor = {**one.monitor, **measured.monitor}
                self._journal.add(one.step, one.phase, dataclasses.replace(measured, monitor=monitor))

    def _say_unknown(self, measured: Measurement) -> None:
        """Warns once about sites for which a number is not measured because their heads are split over processes."""
        if not self._group.several or self._said:
            return
        numbers = measured.numbers
        norms = {
            site: x for (site, name), x in numbers.items() if name == "query_weight_norm" and isinstance(x, Tensor)
        }
        unknown = []
        for site, norm in norms.items():
            largest = numbers.get((site, "qk_spectral_norm"))
            if isinstance(largest, Tensor) and bool((largest.isnan() & norm.isfinite()).any()):
                unknown.append(site)
        if unknown:
            self._said = True
            caution(
                "qk_spectral_norm is not measured for heads that are split over processes: qkeel does not gather "
                f"weights to compute one number. Heads are split over processes in {', '.join(unknown)}"
            )

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of recorded steps that nobody has read."""
        return bool(self._unread[phase])

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of recorded steps that nobody has read, and forgets them."""
        found, self._unread[phase] = self._unread[phase], []
        return merged(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A step whose numbers have not arrived yet."""

    step: int
    phase: Phase
    transfer: Transfer
    unread: Stats | None
    monitor: Mapping[str, float]
