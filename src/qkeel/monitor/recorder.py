"""The records of a run: takes the numbers of its steps as they arrive, in order, for history, rules and sinks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.distributed.reduce import StepTable
from qkeel.errors import AlarmWarning, caution
from qkeel.handle import State, under
from qkeel.monitor.alarms import AlarmLog
from qkeel.monitor.forecast import PlannedRates
from qkeel.monitor.history import History, Recording
from qkeel.monitor.kept_logits import KeptLogits
from qkeel.monitor.numbers import StatsBySite
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.rules import Alarm, Rule, Severity
from qkeel.monitor.sample import Sample
from qkeel.monitor.sinks import Sink
from qkeel.monitor.step_vector import RecordArrays, StepVector, class_fields
from qkeel.patching.roles import Phase
from qkeel.records import HEAD_FIELDS, OVER, TYPES_EVENT, layer_types

# Steps whose statistics wait to be merged, if anybody reads them.
_UNREAD = 16
_SPLIT = (
    "qk_spectral_norm is not measured for heads that are split across processes: qkeel does not gather weights to "
    "compute one number. Heads are split across processes in {}"
)
_LATE = (
    "the attention of {} was first seen at step {:,}. The layers of a record are those of the first measured step, so "
    "this attention is not recorded and no alarm checks it. Close this monitor and watch again from here on, or begin "
    "with a batch that uses all attention"
)


class PendingStep(NamedTuple):
    """A step whose numbers have not arrived yet.

    Args:
        step, phase: the step, and the role of its passes.
        vector: the numbers on their way.
        counts: what this process's monitor counts of its own work, keyed by records.MONITOR_FIELDS.
        unread: the part of the step's statistics that was not read before its end, or None for everything.
        types: the types of this process's layers, which may change when longer sequences are seen.
        limits: the active clips and caps.
    """

    step: int
    phase: Phase
    vector: StepVector
    counts: Mapping[str, float]
    unread: StatsBySite | None
    types: Mapping[str, str]
    limits: Mapping[str, str]


@final
class Recorder:
    """Records the numbers of each step when they have arrived, in the order of the steps: keeps the history of a run,
    raises alarms and feeds the sinks; a sink that fails is dropped with one warning. The statistics are also kept until
    they are read.

    `rules` and `about` are called once, when the first numbers arrive, because some of what they return is known only
    after the model has run. `kept` holds logits from which alarms say what their line would do.
    """

    def __init__(
        self,
        group: ProcessGroup,
        sinks: Sequence[Sink],
        planned: PlannedRates | None,
        rules: Callable[[], Sequence[Rule]],
        about: Callable[[], Mapping[str, object]],
        kept: KeptLogits,
    ) -> None:
        self._kept = kept
        self._group, self._rules, self._about = group, rules, about
        self._not_written = bool(sinks) and dist.rank() > 0
        self.sinks = list(sinks) if dist.rank() == 0 else []
        self.log = AlarmLog(())
        self._is_open = False
        self.sample: Sample | None = None
        self.latest: dict[Phase, Sample] = {}
        # The last two training samples.
        self._trained: list[Sample] = []
        # That of evaluation is used if the model is never seen in training mode.
        self._recordings: dict[Phase, Recording] = {
            "train": Recording(planned=planned),
            "eval": Recording(),
        }
        self.sites: tuple[str, ...] = ()
        # Of this process's layers, and of all layers according to the description of the run.
        self._types: dict[str, str] = {}
        self._described: Mapping[str, str] = {}
        # Number of heads of the layer with the most heads, once the sites are known.
        self._width = 0
        self._arrays: dict[StepTable, RecordArrays] = {}
        # Sites for which a warning that they came too late was raised.
        self._late: set[str] = set()
        self._is_split_told = False
        # Loaded from a checkpoint, until the first numbers arrive.
        self._loaded: State = {}
        self._pending: list[PendingStep] = []
        # Steps whose statistics nobody has read, and statistics of steps that were read in part.
        self._unread: dict[Phase, list[StepVector]] = {"train": [], "eval": []}
        self._rests: dict[Phase, list[StatsBySite]] = {"train": [], "eval": []}

    def expect(self, pending: PendingStep) -> None:
        """Takes a step, which is recorded when its numbers have arrived."""
        self._pending.append(pending)

    def settle(self, *, wait: bool, before: int = 0) -> None:
        """Records what has arrived; waits for the steps before `before` or, with `wait`, for everything.

        Raises: InvalidValueError if another process has stopped measuring.
        """
        # In the order of the steps, because rules compare a record with those before it.
        while self._pending and (
            wait or self._pending[0].step < before or self._pending[0].vector.arrived
        ):
            pending = self._pending.pop(0)
            if pending.vector.wait():
                phase, unread = pending.phase, self._unread[pending.phase]
                if pending.unread is None:
                    unread.append(pending.vector)
                elif pending.unread:
                    self._rests[phase].append(pending.unread)
                if len(unread) > _UNREAD:
                    self._unread[phase] = _merged(unread)
                self._record(pending)

    def has(self, phase: Phase) -> bool:
        """Returns whether there are statistics of recorded steps that nobody has read."""
        return bool(self._unread[phase] or self._rests[phase])

    def take(self, phase: Phase) -> StatsBySite:
        """Returns the statistics of recorded steps that nobody has read, and forgets them."""
        vectors, self._unread[phase] = _merged(self._unread[phase]), []
        rests, self._rests[phase] = self._rests[phase], []
        return SiteStatistics([*rests, *[vector.stats() for vector in vectors]])

    def _record(self, pending: PendingStep) -> None:
        """Adds the numbers of one step to the history, and passes them to rules and sinks."""
        step, phase, vector = pending.step, pending.phase, pending.vector
        if vector.table not in self._arrays:
            self._add_table(step, vector.table)
        arrays = self._arrays[vector.table]
        if not self._is_open:
            self._open(arrays.classes, pending.types)
        self._tell_types(step, pending.types)
        heads, values = arrays.read(vector.vector)
        sample = self.sample = self.latest[phase] = Sample(
            step=step,
            values={"step": float(step), **values},
            layers=self.sites,
            heads=heads,
            phase=phase,
            monitor={**pending.counts, "processes": vector.n_processes},
            types=self.types,
        )
        self._each(lambda sink: sink.write(sample))
        self._tell_split_heads(sample)
        recording = self._recordings[phase]
        # Without an optimizer's steps, passes of evaluation may be counted again.
        if phase == "train" or (
            not len(self._recordings["train"]) and step > recording.last
        ):
            recording.append(sample.numbers, sample.heads)
        if phase == "train":
            self._trained = [*self._trained[-1:], sample]
            history = dataclasses.replace(
                recording.history, types=sample.types, limits=pending.limits
            )
            for alarm in self.log.update(history, self._kept.effect):
                self._tell_alarm(alarm)
            if self.log.rules:
                self._kept.choose(history)
            for alarm in self.log.over(history):
                text = f"over at step {step:,}: {alarm.heading}: {alarm.meaning}"
                event = {"step": step, "event": OVER, "rule": alarm.rule}
                self.event({**event, "text": text})

    def _add_table(self, step: int, table: StepTable) -> None:
        """Takes the layers from the first record, and warns once of each site that comes later and is not recorded."""
        tops = [column for column in table.form if column.name == "max_logit"]
        sites = tuple([site for column in tops for site in column.sites])
        if not self.sites:
            self.sites = sites
            self._width = max([column.shape[0] for column in tops])
            planned = self._recordings["train"].planned
            self._recordings["train"] = Recording(sites, planned=planned)
            self._recordings["eval"] = Recording(sites)
        self._arrays[table] = RecordArrays(table, self.sites, self._width)
        late = [x for x in sites if x not in self.sites and x not in self._late]
        self._late.update(late)
        if late and self._group.leads:
            caution(_LATE.format(", ".join(late), step))

    def _open(self, classes: Sequence[str], types: Mapping[str, str]) -> None:
        """Opens the sinks, and begins with the rules and what a checkpoint held."""
        about = dict(self._about())
        if classes:
            about["classes"] = list(classes)
            about["fields"] = [*HEAD_FIELDS, *class_fields(classes)]
        self.log, self._is_open = AlarmLog(self._rules()), True
        state, self._loaded = self._loaded, {}
        if state:
            records = under("records/", state)
            self._recordings["train"].load(
                {name: np.asarray(x) for name, x in records.items()}
            )
            rows = json.loads(bytes(state["alarms"].cpu().numpy()))
            self.log.alarms = [
                Alarm(**row | {"severity": Severity(row["severity"])}) for row in rows
            ]
        if self._not_written and self._group.leads:
            caution(
                "the records of this process's model are not written: only process 0 of a run writes files"
            )
        self._each(lambda sink: sink.open(about))
        self._types, self._described = dict(types), layer_types(about)

    def add_alarm(self, alarm: Alarm) -> None:
        """Raises an alarm that no rule has raised."""
        self.log.alarms.append(alarm)
        self._tell_alarm(alarm)

    def _tell_alarm(self, alarm: Alarm) -> None:
        if self._group.leads:
            earlier = [x.remedy for x in self.log.alarms if x.step < alarm.step]
            # A line of code that an earlier alarm has recommended is not said again.
            text = alarm.line if alarm.remedy in earlier else str(alarm)
            caution(text, AlarmWarning)
        self._each(lambda sink: sink.alarm(alarm))

    def _tell_types(self, step: int, types: Mapping[str, str]) -> None:
        """Reports to the sinks which layers have a type that differs from their description."""
        changed = {
            site: kind
            for site, kind in types.items()
            if self._types.get(site, kind) != kind
        }
        self._types |= types
        if changed:
            words = ", ".join(f"{site} is {kind}" for site, kind in changed.items())
            event = {"step": step, "event": TYPES_EVENT, "types": changed}
            self.event({**event, "text": f"a longer batch shows: {words}"})

    def _tell_split_heads(self, sample: Sample) -> None:
        """Warns once about sites whose heads are split across processes, for which a number is not measured."""
        names = ("query_weight_norm", "qk_spectral_norm")
        norms, products = [sample.heads.get(name) for name in names]
        if self._is_split_told or norms is None or products is None:
            return
        # Norms of rows add up over processes; a singular value does not.
        is_split = np.any(np.isnan(products) & np.isfinite(norms), axis=1).tolist()
        split = [site for site, missing in zip(sample.layers, is_split) if missing]
        if split and self._group.several:
            self._is_split_told = True
            caution(_SPLIT.format(", ".join(split)))

    @property
    def types(self) -> dict[str, str]:
        """The type of each recorded layer, where it is known."""
        types = {**self._described, **self._types}
        return {name: types[name] for name in self.sites if name in types}

    @property
    def history(self) -> History:
        """The history of training or, if the model was only seen in evaluation mode, the history of its evaluation
        passes."""
        is_trained = len(self._recordings["train"]) or not len(self._recordings["eval"])
        phase: Phase = "train" if is_trained else "eval"
        history = self._recordings[phase].history
        return dataclasses.replace(history, types=self.types, phase=phase)

    def state(self) -> State:
        """The records and the alarms so far, as tensors by name."""
        # A checkpoint that is written before the first record must hold what was loaded.
        if self._loaded:
            return self._loaded
        rows = [dataclasses.asdict(alarm) for alarm in self.log.alarms]
        # States hold tensors by name, so text travels as bytes.
        alarms = bytearray(json.dumps(rows).encode())
        records = {
            # A copy, because the recording goes on writing into its columns.
            f"records/{name}": torch.from_numpy(x.copy())
            for name, x in self._recordings["train"].state().items()
        }
        return {**records, "alarms": torch.frombuffer(alarms, dtype=torch.uint8)}

    def load(self, state: State) -> None:
        """Continues from these records and alarms; call it before the first numbers are added."""
        self._loaded = state

    def before(self, step: int) -> Sample | None:
        """The most recent training sample before this step; only the last two samples are kept."""
        return next((x for x in reversed(self._trained) if x.step < step), None)

    def event(self, event: Mapping[str, object]) -> None:
        """Passes another event to the sinks, after the first sample."""
        self._each(lambda sink: sink.event(event))

    def close(self, complete: bool) -> None:
        """Ends the records; `complete` says whether training ended as planned and was watched to its end."""
        if self._is_open:
            self._each(lambda sink: sink.close(complete))
        self.sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            # A tracker that is offline, or a disk that is full, must not end the training.
            try:
                act(sink)
            except Exception as error:
                self.sinks.remove(sink)
                caution(
                    f"{type(sink).__name__} failed and is switched off: {type(error).__name__}: {str(error).rstrip('.')}. "
                    "Statistics and training continue"
                )


def _merged(vectors: Sequence[StepVector]) -> list[StepVector]:
    """Returns the vectors with those of one table merged."""
    by_table: dict[StepTable, list[np.ndarray]] = {}
    for vector in vectors:
        by_table.setdefault(vector.table, []).append(vector.vector)
    return [
        StepVector(table, torch.from_numpy(table.merge(of_table)))
        for table, of_table in by_table.items()
    ]
