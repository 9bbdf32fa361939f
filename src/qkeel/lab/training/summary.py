"""The row of table.csv of a finished run, computed from what it recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qkeel import metrics
from qkeel.lab.config import RunConfig
from qkeel.lab.config_fields import Json
from qkeel.records import STEP_FIELDS


def summarize(config: RunConfig, records: Sequence[Json], cpu_seconds: float) -> Json:
    """One value per records.TABLE_COLUMNS, from the lines of metrics.jsonl (the first: step 0, the last: the end).
    What the task records besides records.STEP_FIELDS follows, as it was at the end.
    """
    first, last = records[0], records[-1]
    losses = [record["train_loss"] for record in records if record["train_loss"] is not None]
    return {
        "remedy": config.remedy,
        "lr": config.optim.lr,
        "seed": config.seed,
        "steps": last["step"],
        "val_loss": last["val_loss"],
        "max_logit": largest(record["max_logit"] for record in records),
        "end_max_logit": last["max_logit"],
        "end_entropy": last["entropy"],
        "alarm_step": metrics.alarm_step(records),
        "collapsed": metrics.collapsed(last["entropy"], last["val_loss"], first["val_loss"]),
        "cpu_seconds": round(cpu_seconds, 3),
        "run_id": config.run_id,
        "capped_max_logit": largest(record["capped_max_logit"] for record in records),
        "max_abs_logit": largest(record["max_abs_logit"] for record in records),
        "init_loss": first["val_loss"],
        "spike_score": metrics.spike_score(losses),
        "block": config.model.block,
        "optimizer": config.optim.name,
        "status": "done",
        **{name: value for name, value in last.items() if name not in STEP_FIELDS},
    }


def largest(values: Iterable[float]) -> float:
    """The largest value that is a number; NaN if none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
