"""The journal of a run: records in order, alarms, sinks, and results that arrive later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import torch

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.distributed.reduce import StepTable
from qkeel.errors import AlarmWarning, caution
from qkeel.handle import State
from qkeel.monitor.alarms import AlarmLog
from qkeel.monitor.gather import StepRecord, Transfer
from qkeel.monitor.history import History, LogitLimit, PlannedRates
from qkeel.monitor.numbers import Stats
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import Sample
from qkeel.monitor.record_arrays import RecordArrays, class_fields
from qkeel.monitor.recording import Recording
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sinks import Sink
from qkeel.patching.roles import Phase
from qkeel.records import (
    HEAD_FIELDS,
    LINEAR,
    OVER,
    TYPES_EVENT,
    layer_types,
)

# How measurements are recorded: as samples, split by token class if there are classes, for the rules and the sinks.


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
        leads: Callable[[], bool] = lambda: dist.rank() == 0,
        limits: Callable[[], Mapping[str, LogitLimit]] = dict,
    ) -> None:
        """types: returns the types of this process's layers, which may change when longer sequences are seen. leads:
        returns whether this process warns for all that run its model. limits: returns the active clips and caps."""
        self._leads, self._limits = leads, limits
        self._not_written = bool(sinks) and dist.rank() > 0
        self.sinks = list(sinks) if dist.rank() == 0 else []
        self.log = AlarmLog(())
        self._rules = rules
        self.sample: Sample | None = None
        self.latest: dict[Phase, Sample] = {}
        # The last two training samples.
        self._trained: list[Sample] = []
        self.recording = Recording(planned=planned)
        # Used if the model is never seen in training mode.
        self._evaluated = Recording()
        self._last_evaluated = -1
        self._about: Callable[[], Mapping[str, object]] | None = about
        self.sites: tuple[str, ...] = ()
        self._types, self._local = types, dict[str, str]()
        self._described: Mapping[
            str, str
        ] = {}  # types of all layers according to the description of the run
        # Number of heads of the layer with the most heads, once the sites are known.
        self._width = 0
        self._arrays: dict[StepTable, RecordArrays] = {}
        # Sites for which a warning that they came too late was raised.
        self._late: set[str] = set()
        # Sinks that failed.
        self.dropped = 0
        # Whether training ended as planned.
        self.complete = False
        # Loaded from a checkpoint, until the first numbers arrive.
        self._carried: State = {}

    def add(self, step: int, phase: Phase, record: StepRecord) -> Sample:
        """Adds the numbers of one step, and returns its sample."""
        if not self.sites:
            tops = [x for x in record.table.form if x.name == "max_logit"]
            self.sites = tuple([site for column in tops for site in column.sites])
            self._width = max(column.shape[0] for column in tops)
            self.recording = Recording(self.sites, planned=self.recording.planned)
            self._evaluated = Recording(self.sites)
        self._tell_late(step, record)
        if self._about is not None:
            about, self._about = dict(self._about()), None
            classes = self._arrays_of(record).classes
            if classes:
                about |= {
                    "classes": list(classes),
                    "fields": [*HEAD_FIELDS, *class_fields(classes)],
                }
            self.log = AlarmLog(self._rules())
            self._take_up()
            if self._not_written and self._leads():
                caution(
                    "the records of this process's model are not written: only process 0 of a run writes files"
                )
            self._each(lambda sink: sink.open(about))
            self._local, self._described = dict(self._types()), layer_types(about)
        self._tell_types(step)
        sample = self.sample = self._sample(step, phase, record)
        self.latest[phase] = sample
        self._each(lambda sink: sink.write(sample))
        if (
            phase == "eval"
            and not len(self.recording)
            and sample.step > self._last_evaluated
        ):
            self._last_evaluated = sample.step
            self._evaluated.append(sample.numbers, sample.heads)
        if phase == "train":
            self._trained = [*self._trained[-1:], sample]
            self.recording.append(sample.numbers, sample.heads)
            history = dataclasses.replace(
                self.recording.history, types=sample.types, limits=self._limits()
            )
            for alarm in self.log.update(history):
                self._tell_alarm(alarm)
            for notice in self.log.over(history):
                text = f"the notice of step {notice.step:,} is over: {notice.cause}"
                event = {"step": step, "event": OVER, "rule": notice.rule}
                self.event({**event, "text": text})
        return sample

    def add_alarm(self, alarm: Alarm) -> None:
        """Raises an alarm that no rule has raised."""
        self.log.alarms.append(alarm)
        self._tell_alarm(alarm)

    def _tell_alarm(self, alarm: Alarm) -> None:
        if self._leads():
            earlier = [x.remedy for x in self.log.alarms if x.step < alarm.step]
            text = alarm.line if alarm.remedy in earlier else str(alarm)
            caution(text, AlarmWarning)
        self._each(lambda sink: sink.alarm(alarm))

    def _tell_types(self, step: int) -> None:
        """Reports to the sinks which layers have a type that differs from their description."""
        types, changed = self._types(), {}
        for site, kind in types.items():
            if self._local.get(site, kind) != kind:
                changed[site] = kind
        self._local |= types
        if changed:
            words = ", ".join(f"{site} is {kind}" for site, kind in changed.items())
            text = f"a longer batch shows: {words}"
            event = {"step": step, "event": TYPES_EVENT, "types": changed, "text": text}
            self.event(event)

    @property
    def types(self) -> dict[str, str]:
        """The type of each recorded layer, where it is known, and of the layers without logits."""
        types, sites = {**self._described, **self._local}, {*self.sites}
        return {
            name: kind
            for name, kind in types.items()
            if name in sites or kind == LINEAR
        }

    def _tell_late(self, step: int, record: StepRecord) -> None:
        """Warns once for each site that is not recorded because it was missing in the first measured step."""
        if record.table in self._arrays:
            return
        late = [
            site
            for column in record.table.form
            for site in column.sites
            if column.name == "max_logit"
            if site not in self.sites and site not in self._late
        ]
        self._late.update(late)
        if late and self._leads():
            caution(
                f"the attention of {', '.join(late)} was first seen at step {step:,}. The layers of a record are "
                "those of the first measured step, so this attention is not recorded and no alarm checks it. Close "
                "this monitor and watch again from here on, or begin with a batch that uses all attention"
            )

    @property
    def history(self) -> History:
        """The history of training or, if the model was only seen in evaluation mode, the history of its evaluation
        passes."""
        if len(self.recording) or not len(self._evaluated):
            return dataclasses.replace(self.recording.history, types=self.types)
        evaluated = self._evaluated.history
        return dataclasses.replace(evaluated, types=self.types, phase="eval")

    def state(self) -> State:
        """The records and the alarms so far, as tensors by name."""
        if self._carried:
            return self._carried
        alarms = json.dumps(
            [dataclasses.asdict(alarm) for alarm in self.log.alarms]
        ).encode()
        records = {
            f"records/{name}": torch.from_numpy(x.copy())
            for name, x in self.recording.state().items()
        }
        return {
            **records,
            "alarms": torch.frombuffer(bytearray(alarms), dtype=torch.uint8),
        }

    def load(self, state: State) -> None:
        """Continues from these records and alarms; call it before the first numbers are added."""
        self._carried = state

    def _take_up(self) -> None:
        state, self._carried = self._carried, {}
        if state:
            records = {
                name.removeprefix("records/"): np.asarray(x)
                for name, x in state.items()
                if name != "alarms"
            }
            self.recording.load(records)
            rows = json.loads(bytes(state["alarms"].cpu().numpy()))
            self.log.alarms = [
                Alarm(**row | {"severity": Severity(row["severity"])}) for row in rows
            ]

    def before(self, step: int) -> Sample | None:
        """The most recent training sample before this step; only the last two samples are kept."""
        return next(
            (sample for sample in reversed(self._trained) if sample.step < step), None
        )

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
            # A tracker that is offline, or a disk that is full, must not end the training.
            try:
                act(sink)
            except Exception as error:
                self.sinks.remove(sink)
                self.dropped += 1
                caution(
                    f"{type(sink).__name__} failed and is switched off: {type(error).__name__}: {str(error).rstrip('.')}. "
                    "Statistics and training continue"
                )

    def _sample(self, step: int, phase: Phase, record: StepRecord) -> Sample:
        heads, values = self._arrays_of(record).read(record.vector)
        return Sample(
            step=step,
            values={"step": float(step), **values},
            layers=self.sites,
            heads=heads,
            phase=phase,
            monitor=record.monitor,
            types=self.types,
        )

    def _arrays_of(self, record: StepRecord) -> RecordArrays:
        arrays = self._arrays.get(record.table)
        if arrays is None:
            arrays = self._arrays[record.table] = RecordArrays(
                record.table, self.sites, self._width
            )
        return arrays


# The numbers of steps that have not yet arrived from the device and the other processes.

# Steps whose statistics wait to be merged, if anybody reads them.
_UNREAD = 16


@final
class PendingResults:
    """Records the numbers of each step when they have arrived, in the order of the steps. The statistics are also
    merged and kept until they are read."""

    def __init__(self, group: ProcessGroup, journal: Recorder) -> None:
        self._group, self._journal = group, journal
        self._coming: list[_Coming] = []
        # Records whose statistics nobody has read, and statistics of steps that were read in part.
        self._unread: dict[Phase, list[StepRecord]] = {"train": [], "eval": []}
        self._rests: dict[Phase, list[Stats]] = {"train": [], "eval": []}
        self._warned = False

    def add(
        self,
        step: int,
        phase: Phase,
        transfer: Transfer,
        *,
        unread: Stats | None,
        monitor: Mapping[str, float],
    ) -> None:
        """Adds a step. unread: the part of its statistics that has not been read yet, or None for everything that
        arrives; monitor: the statistics on this process's monitor."""
        self._coming.append(
            _Coming(
                step=step,
                phase=phase,
                transfer=transfer,
                unread=unread,
                monitor=monitor,
            )
        )

    def settle(self, *, wait: bool, before: int = 0) -> None:
        """Records what has arrived; waits for the steps before `before` or, with `wait`, for everything.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        while self._coming and (
            wait or self._coming[0].step < before or self._coming[0].transfer.arrived
        ):
            # In the order of the steps, because rules compare a record with those before it.
            coming = self._coming.pop(0)
            record = coming.transfer.result()
            if record is None:
                continue
            if coming.unread is None:
                self._unread[coming.phase].append(record)
            elif coming.unread:
                self._rests[coming.phase].append(coming.unread)
            if len(self._unread[coming.phase]) > _UNREAD:
                self._merge_unread(coming.phase)
            monitor = {**coming.monitor, **record.monitor}
            record = record._replace(monitor=monitor)
            self._warn_of_split_heads(
                self._journal.add(coming.step, coming.phase, record)
            )

    def _merge_unread(self, phase: Phase) -> None:
        vectors: dict[StepTable, list[np.ndarray]] = {}
        for table, vector, _ in self._unread[phase]:
            vectors.setdefault(table, []).append(vector)
        self._unread[phase] = [
            StepRecord(table, table.merge(of_table))
            for table, of_table in vectors.items()
        ]

    def _warn_of_split_heads(self, sample: Sample) -> None:
        """Warns once about sites whose heads are split across processes, for which a number is not measured."""
        names = ("query_weight_norm", "qk_spectral_norm")
        norms, products = [sample.heads.get(name) for name in names]
        if norms is None or products is None or self._warned or not self._group.several:
            return
        # Norms of rows add up over processes; a singular value does not.
        is_split = (np.isnan(products) & np.isfinite(norms)).any(1)
        split = [site for site, missing in zip(sample.layers, is_split) if missing]
        if split:
            self._warned = True
            caution(
                "qk_spectral_norm is not measured for heads that are split across processes: qkeel does not gather "
                f"weights to compute one number. Heads are split across processes in {', '.join(split)}"
            )

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of recorded steps that nobody has read."""
        return bool(self._unread[phase] or self._rests[phase])

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of recorded steps that nobody has read, and forgets them."""
        self._merge_unread(phase)
        records, self._unread[phase] = self._unread[phase], []
        rests, self._rests[phase] = self._rests[phase], []
        return SiteStatistics([*rests, *[record.stats() for record in records]])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A step whose numbers have not arrived yet."""

    step: int
    phase: Phase
    transfer: Transfer
    unread: Stats | None
    monitor: Mapping[str, float]
