"""The one table of recorded names: unit, shape, meaning."""

from __future__ import annotations

import dataclasses

from qkeel.registry import lookup


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One recorded number. Attention logits and entropies are in nats (natural logarithm)."""

    unit: str
    meaning: str


# One line of metrics.jsonl, written every `log_every` steps. "Over the probe": the fixed held-out batch.
STEP_FIELDS: dict[str, Field] = {
    "step": Field("optimizer steps", "steps done when the line was written; 0 is before training"),
    "tokens": Field("tokens", "training tokens seen"),
    "lr": Field("1", "base learning rate of the step just done"),
    "train_loss": Field("nats/token", "loss of the last training batch; null at step 0"),
    "val_loss": Field("nats/token", "loss on held-out text; null where it was not evaluated"),
    "grad_norm": Field("1", "global gradient norm before clipping; null at step 0"),
    "max_logit": Field("nats", "largest signed attention logit, scaled, before cap: layers, heads, probe"),
    "min_logit": Field("nats", "smallest signed attention logit, scaled, before cap"),
    "max_abs_logit": Field("nats", "largest magnitude of an attention logit, scaled, before cap"),
    "capped_max_logit": Field("nats", "largest attention logit after the cap; equals max_logit without one"),
    "entropy": Field("nats", "attention entropy: mean over query rows, heads, layers"),
    "cpu_seconds": Field("s", "process CPU time spent on the run so far"),
}

# One value per layer and head in heads.f32.
HEAD_FIELDS: dict[str, Field] = {
    "max_logit": Field("nats", "largest signed attention logit, scaled, before cap"),
    "min_logit": Field("nats", "smallest signed attention logit, scaled, before cap"),
    "entropy": Field("nats", "mean attention entropy over query rows that see a key"),
    "query_norm": Field("1", "mean L2 norm of queries as they enter the dot product"),
    "key_norm": Field("1", "mean L2 norm of keys as they enter the dot product (of the head's group)"),
}

# One row per run in a study's table.csv.
TABLE_COLUMNS: dict[str, Field] = {
    "remedy": Field("name", "spec string of the remedy"),
    "lr": Field("1", "peak base learning rate"),
    "seed": Field("1", "seed of weights and data order"),
    "steps": Field("optimizer steps", "steps trained"),
    "val_loss": Field("nats/token", "held-out loss after the last step"),
    "max_logit": Field("nats", "largest max_logit over training"),
    "end_max_logit": Field("nats", "max_logit after the last step"),
    "end_entropy": Field("nats", "entropy after the last step"),
    "alarm_step": Field("optimizer steps", "first logged step with max_logit > 100; empty if none"),
    "collapsed": Field("bool", "see metrics.collapsed"),
    "cpu_seconds": Field("s", "process CPU time of the run"),
    "run_id": Field("name", "hash of the canonical configuration"),
    "capped_max_logit": Field("nats", "largest capped_max_logit over training"),
    "max_abs_logit": Field("nats", "largest max_abs_logit over training"),
    "init_loss": Field("nats/token", "held-out loss before training"),
    "spike_score": Field("share", "see metrics.spike_score"),
    "status": Field("name", "done | failed | started | missing"),
}


def explain_field(name: str) -> str:
    """The meaning and unit of a recorded name.

    >>> explain_field("end_entropy")
    'entropy after the last step [nats]'
    """
    field = lookup("recorded field", {**TABLE_COLUMNS, **HEAD_FIELDS, **STEP_FIELDS, **TABLE_COLUMNS}, name)
    return f"{field.meaning} [{field.unit}]"
