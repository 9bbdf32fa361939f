"""Tables of every recorded name with its unit, shape and meaning."""

from __future__ import annotations

import dataclasses
from typing import Literal

from qkeel.options import lookup


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A recorded value. Attention logits and entropies are in nats (natural logarithm).

    >>> STEP_FIELDS["max_logit"].unit
    'nats'
    """

    unit: str  #: the unit, such as nats; "1" for a number without a unit
    meaning: str  #: the meaning, in words


@dataclasses.dataclass(frozen=True, slots=True)
class HeadField(Field):
    """A per-head value; the monitor, the trackers and the report read everything they need from its row.

    fold: how several heads are summarised, by the most critical head or by the mean. count: the field of LogitStats
    that is above 0 if the value was measured. column: the heading in the monitor's table; "" omits the value.
    per_layer: whether trackers get one series per layer in addition to one for the model. There are no series per head,
    because 80 layers of 64 heads would make 30,720 charts, and trackers become slow above 10,000 charts.

    >>> HEAD_FIELDS["max_logit"].fold
    'max'
    """

    fold: Literal["max", "min", "mean"]
    count: str = "n_queries"
    column: str = ""
    per_layer: bool = False


# The fields of a line of metrics.jsonl, written every `log_every` steps. The "probe" is a fixed held-out batch.
STEP_FIELDS: dict[str, Field] = {
    "step": Field(
        "optimizer steps",
        "steps completed when the line was written; 0 is before training",
    ),
    "tokens": Field("tokens", "number of training tokens processed"),
    "lr": Field(
        "1",
        "base learning rate of the last completed step; of several optimizers, that of the first",
    ),
    "train_loss": Field(
        "nats/token",
        "in a run of the lab, loss of the last training batch, null at step 0; in a watched run, the loss of the step: "
        "what the Trainer computes, or the scalar that the model returned, if backward() was called on it or on a "
        "multiple of it",
    ),
    "val_loss": Field(
        "nats/token", "loss on held-out text; null if it was not evaluated"
    ),
    "grad_norm": Field("1", "global gradient norm before clipping; null at step 0"),
    "max_logit": Field(
        "nats",
        "largest signed attention logit over layers, heads and the probe batch, after the scale and before the cap",
    ),
    "min_logit": Field(
        "nats", "smallest signed attention logit, after the scale and before the cap"
    ),
    "max_abs_logit": Field(
        "nats",
        "largest magnitude of an attention logit, after the scale and before the cap",
    ),
    "capped_max_logit": Field(
        "nats",
        "largest attention logit after the cap; equals max_logit if there is no cap",
    ),
    "entropy": Field(
        "nats", "attention entropy, averaged over query rows, heads and layers"
    ),
    "logit_change": Field(
        "nats",
        "root mean square change of the logits in the last step, over layers, heads and the probe batch",
    ),
    "cpu_seconds": Field("s", "process CPU time spent on the run so far"),
    "tokens_per_second": Field(
        "1/s",
        "training tokens per second since the last record, excluding the time for measuring and saving",
    ),
}

# If it is 1, all other values of the head are meaningless, so code checks it by name.
NON_FINITE = "non_finite"

# What finite_stages counts, in the order in which a NaN or infinity would spread.
STAGES = (
    "weights",
    "data",
    "input",
    "queries and keys",
    "logits",
    "output",
)

# A sink head gives its first key more than this share of its weight and acts as a gate.
# Source: Sun et al. 2026, arXiv 2603.05498.
SINK_HEAD = 0.3

# Whose norm would be another one.
_STORED = ", absent if weights are computed from stored ones (sigma_reparam)"

# One value per layer and head in heads.f32. The value of a key head is repeated for every query head of its group.
HEAD_FIELDS: dict[str, HeadField] = {
    "max_logit": HeadField(
        "nats",
        "largest signed attention logit, after the scale and before the cap",
        "max",
        column="max logit",
        per_layer=True,
    ),
    "min_logit": HeadField(
        "nats",
        "smallest signed attention logit, after the scale and before the cap",
        "min",
        count="n_pairs",
    ),
    "mean_logit": HeadField(
        "nats",
        "mean attention logit over visible pairs, after the scale and before the cap",
        "mean",
        count="n_pairs",
    ),
    "logit_gap": HeadField(
        "nats",
        "largest minus mean logit of a query row before the cap, averaged over rows with two or more keys",
        "mean",
        count="n_free",
    ),
    "logit_spread": HeadField(
        "nats",
        "largest minus mean logit of a query row as they enter the softmax, of the row where it is largest, after the "
        "cap and without biases; what alarms, check, the page and the autopilot judge, as no constant changes it",
        "max",
    ),
    "capped_max_logit": HeadField(
        "nats",
        "largest attention logit after the cap; equals max_logit if there is no cap",
        "max",
    ),
    "max_abs_logit": HeadField(
        "nats",
        "largest magnitude of an attention logit, after the scale and before the cap",
        "max",
        count="n_pairs",
    ),
    "entropy": HeadField(
        "nats",
        "mean attention entropy over query rows with a visible key",
        "mean",
        column="entropy",
        per_layer=True,
    ),
    "entropy_min": HeadField(
        "nats",
        "smallest attention entropy of a query row; 0 in a causal head, whose first row sees one key",
        "min",
    ),
    "normalized_entropy": HeadField(
        "1",
        "mean of entropy / ln(visible keys) over rows with two or more keys",
        "mean",
        count="n_free",
    ),
    "query_norm": HeadField(
        "1",
        "mean L2 norm of queries as they enter the dot product",
        "mean",
        count="n_products",
        column="mean |q|",
        per_layer=True,
    ),
    "query_norm_max": HeadField(
        "1",
        "largest L2 norm of a query as it enters the dot product",
        "max",
        count="n_products",
    ),
    "key_norm": HeadField(
        "1",
        "mean L2 norm of the keys of the head's group as they enter the dot product",
        "mean",
        count="n_keys",
        column="mean |k|",
        per_layer=True,
    ),
    "key_norm_max": HeadField(
        "1",
        "largest L2 norm of a key as it enters the dot product",
        "max",
        count="n_keys",
    ),
    "share_above": HeadField(
        "share",
        "share of visible logits (signed, before the cap) above the threshold",
        "max",
        count="n_pairs",
    ),
    "sink_share": HeadField(
        "share",
        "mean attention weight on the first visible key, over rows with two or more keys",
        "mean",
        count="n_free",
    ),
    "sink_head_ratio": HeadField(
        "share",
        "share of heads with sink_share above 0.3, 0 or 1 for a single head",
        "mean",
        count="n_free",
        column="sink heads",
        per_layer=True,
    ),
    "qk_frobenius": HeadField(
        "1",
        "Frobenius norm of Q Kᵀ over visible pairs, without the scale",
        "max",
        count="n_products",
    ),
    "cos_max": HeadField(
        "1",
        "largest cosine between a query and a visible key",
        "max",
        count="n_products",
        column="cos max",
    ),
    "cos_mean": HeadField(
        "1", "mean cosine between queries and visible keys", "mean", count="n_products"
    ),
    "softmax_gradient": HeadField(
        "share",
        "what the softmax passes back, Σ p (1 - p), as a share of uniform attention on the same keys, averaged over rows "
        "with two or more keys: near 0, the head is saturated",
        "mean",
        count="n_free",
        column="softmax grad",
    ),
    "logit_change_rms": HeadField(
        "nats",
        "root mean square change of the logits caused by one step, on the same input",
        "max",
        column="logit change",
        per_layer=True,
    ),
    "query_weight_norm": HeadField(
        "1", f"Frobenius norm of the head's query weight{_STORED}", "max"
    ),
    "key_weight_norm": HeadField(
        "1", f"Frobenius norm of the head's key weight{_STORED}", "max"
    ),
    "qk_spectral_norm": HeadField(
        "1",
        f"largest singular value of the product of the query and key weights{_STORED}",
        "max",
    ),
    "query_grad_rms": HeadField(
        "1", "root mean square gradient of the head's query weight", "max"
    ),
    "key_grad_rms": HeadField(
        "1", "root mean square gradient of the head's key weight", "max"
    ),
    NON_FINITE: HeadField(
        "0 or 1", "whether a logit or the entropy was NaN or infinite", "max"
    ),
    "finite_stages": HeadField(
        "stages",
        "stages of the layer before the first that has NaN or infinity: weights of q and k, data that the model is "
        "called with, input, queries and keys, logits, output; 6 if all are finite",
        "min",
        count="n_pairs",
    ),
    "empty_sample": HeadField(
        "index",
        "first sample of a batch with a query that sees no key, whose softmax is NaN; not measured if there is none",
        "min",
    ),
    "empty_query": HeadField("index", "first such query in that sample", "min"),
    "lse_mean": HeadField(
        "nats",
        "mean logsumexp of a query row's logits over its keys, after the cap",
        "mean",
        column="lse",
    ),
    "lse_min": HeadField(
        "nats", "smallest logsumexp of a query row that sees a key", "min"
    ),
    "sink_logit": HeadField("nats", "logit of the head's learned sink", "max"),
    "gate_mean": HeadField(
        "share",
        "weight that a sink leaves for the keys, sigmoid(logsumexp - sink logit), averaged over rows",
        "mean",
        column="gate",
    ),
    "output_gate": HeadField(
        "1",
        "mean factor, made by a sigmoid, that the output of the head is multiplied by",
        "mean",
        column="out gate",
    ),
    "index_max_logit": HeadField(
        "1",
        "largest score with which an indexer chooses keys for the layer",
        "max",
        column="index max",
    ),
    "index_mean_logit": HeadField(
        "1", "mean score of an indexer over the keys that it may choose", "mean"
    ),
    "index_entropy": HeadField(
        "nats", "mean entropy of a softmax over an indexer's scores", "mean"
    ),
    "index_kl": HeadField(
        "nats",
        "mean divergence of a softmax over an indexer's scores from dense attention",
        "max",
    ),
    "dense_recall": HeadField(
        "share",
        "weight that dense attention would give to the chosen keys, averaged over rows",
        "min",
        column="recall",
    ),
    "dense_kl": HeadField(
        "nats",
        "mean divergence of sparse from dense attention, which is -ln of the recall averaged over rows",
        "max",
    ),
    "delta2_spectral_norm": HeadField(
        "1",
        f"largest singular value of the first-order change of W_QᵀW_K in a step{_STORED}",
        "max",
        column="Δ₂ norm",
    ),
    "delta2_stable_rank": HeadField(
        "1",
        "squared Frobenius norm of the first-order change of W_QᵀW_K in a step, divided by its squared spectral norm",
        "min",
    ),
    "delta2_singular_entropy": HeadField(
        "nats",
        "entropy of the shares of the squared singular values of the first-order change of W_QᵀW_K in a step",
        "min",
    ),
    "delta3_spectral_norm": HeadField(
        "1",
        f"largest singular value of the product of the query and key weights' updates{_STORED}",
        "max",
    ),
    "delta3_stable_rank": HeadField(
        "1",
        "squared Frobenius norm of the product of the query and key weights' updates, divided by its squared "
        "spectral norm",
        "min",
    ),
    "delta3_singular_entropy": HeadField(
        "nats",
        "entropy of the shares of the squared singular values of the product of the query and key weights' updates",
        "min",
    ),
    "query_update_ratio": HeadField(
        "1",
        "root mean square of one update of the head's query weight, divided by the root mean square of the weight"
        f"{_STORED}",
        "max",
        column="ΔW_q/W_q",
    ),
    "key_update_ratio": HeadField(
        "1",
        "root mean square of one update of the head's key weight, divided by the root mean square of the weight"
        f"{_STORED}",
        "max",
        column="ΔW_k/W_k",
    ),
}

# Values by token class, for models that are watched with classes: "NAME/text" for one class, "NAME/image->text" for
# queries of one class and keys of another. The first two rows describe a head over all classes.
CLASS_FIELDS: dict[str, HeadField] = {
    "query_competition": HeadField(
        "1",
        "mean query norm of the token class with the largest norm, divided by that of the class with the smallest norm",
        "mean",
        column="|q| by class",
    ),
    "key_competition": HeadField(
        "1",
        "mean key norm of the token class with the largest norm, divided by that of the class with the smallest norm",
        "mean",
        column="|k| by class",
    ),
    "class_max_logit": HeadField(
        "nats",
        "largest signed logit between queries of one class and keys of another",
        "max",
    ),
    "class_mass": HeadField(
        "share",
        "mean weight that queries of one class give to all keys of another",
        "mean",
    ),
    "class_uniform_mass": HeadField(
        "share", "class_mass if a query gave each visible key the same weight", "mean"
    ),
    "class_query_norm": HeadField(
        "1", "mean L2 norm of the queries of a class", "mean"
    ),
    "class_key_norm": HeadField(
        "1", "mean L2 norm of the keys of a class, for the head's group", "mean"
    ),
}

# The residual stream, on request, by the names of functional.norms.stream_statistics: "NAME/LAYER", where LAYER is the
# attention layer of the block, or the block itself if it has no attention. Channels are the last dimension; a channel's
# peak is its largest magnitude over the tokens of a pass.
BLOCK_FIELDS: dict[str, HeadField] = {
    "block_input_rms": HeadField(
        "1",
        "root mean square of the hidden states that enter a block",
        "max",
    ),
    "block_input_max": HeadField(
        "1", "largest magnitude in the hidden states that enter a block", "max"
    ),
    "block_input_channel_ratio": HeadField(
        "1",
        "largest channel peak divided by the median peak, in the hidden states that enter a block",
        "max",
    ),
    "block_output_rms": HeadField(
        "1",
        "root mean square of the hidden states that leave a block",
        "max",
        column="stream",
        per_layer=True,
    ),
    "block_output_max": HeadField(
        "1", "largest magnitude in the hidden states that leave a block", "max"
    ),
    "block_output_channel_ratio": HeadField(
        "1",
        "largest channel peak divided by the median peak, in the hidden states that leave a block",
        "max",
        column="channel ratio",
        per_layer=True,
    ),
}

# Values about the monitor itself in each measured step, so that a monitor that sees nothing is noticed. They are called
# monitor/NAME in trackers, and monitor_NAME in metrics.jsonl and steps.csv.
MONITOR_FIELDS: dict[str, Field] = {
    "calls": Field("calls", "attention calls that were measured in the step"),
    "silent": Field("attention layers", "sites without a call in the step"),
    "milliseconds": Field(
        "ms",
        "host time that this process spent in the monitor since the last record; the record of a trained step has that of "
        "untrained passes beside it",
    ),
    "processes": Field(
        "processes",
        "processes that have numbers of the step; fewer than before if attention did not run on one of them",
    ),
}

# Values that only some tasks have; "NAME/text" is for tokens or targets of one class, "NAME/image>text" for queries of
# one class and keys of the other. They follow STEP_FIELDS in metrics.jsonl and TABLE_COLUMNS in table.csv.
TASK_FIELDS: dict[str, Field] = {
    "val_loss": Field(
        "nats/token",
        "loss on held-out targets of one kind; null if it was not evaluated",
    ),
    "val_accuracy": Field(
        "share", "share of held-out images whose class has the largest logit"
    ),
    "val_bleu": Field(
        "BLEU", "sacrebleu's BLEU of greedy decoding on held-out texts, after training"
    ),
    "query_norm": Field(
        "1",
        "mean L2 norm of the class's queries as they enter the dot product, over heads and layers",
    ),
    "key_norm": Field(
        "1",
        "mean L2 norm of the class's keys as they enter the dot product, over heads and layers",
    ),
    "max_logit": Field(
        "nats",
        "largest signed attention logit between a query class and a key class, after the scale and before the cap",
    ),
    "attention_mass": Field(
        "share",
        "weight that queries of one class give to keys of the other, averaged over heads and layers",
    ),
    "uniform_mass": Field(
        "share", "attention_mass if each query gave all visible keys the same weight"
    ),
    "last_block_norm": Field(
        "1", "mean L2 norm of the class's hidden states that leave the last block"
    ),
    "mix": Field("name", "the mix of data in a multimodal study"),
    "part": Field("name", "the part of a study, named by the values of its axes"),
    "loss_scale": Field("1", "loss scale of fp16 training after the step"),
    "skipped_steps": Field(
        "optimizer steps",
        "number of steps skipped so far because a gradient overflowed fp16",
    ),
}

# The type of a layer, according to its observed calls. Values are comparable within a type, whose keys are of one kind.
LAYER_TYPES: dict[str, str] = {
    "full": "queries reach all keys, or all up to their own position; in packed sequences, those of their own sequence",
    "window": "queries reach a span of keys that moves with them, and possibly some keys that all queries reach",
    "sparse": "queries reach keys with hidden keys between them, or keys that were gathered for each query",
    "compressed": "some keys each represent several tokens",
    "latent": "queries reach all keys, which are computed from one narrower vector per token (MLA)",
    "cross": "keys come from a different source than queries",
}

# One row per run in a study's table.csv.
TABLE_COLUMNS: dict[str, Field] = {
    "remedy": Field("name", "spec string of the remedy"),
    "lr": Field("1", "peak base learning rate"),
    "seed": Field("1", "seed for weights and data order"),
    "steps": Field("optimizer steps", "number of completed steps"),
    "val_loss": Field("nats/token", "held-out loss after the last step"),
    "max_logit": Field("nats", "largest max_logit over training"),
    "end_max_logit": Field("nats", "max_logit after the last step"),
    "end_entropy": Field("nats", "entropy after the last step"),
    "alarm_step": Field(
        "optimizer steps",
        "first logged step with max_logit > 100; empty if there is none",
    ),
    "collapsed": Field("bool", "see metrics.collapsed"),
    "cpu_seconds": Field("s", "process CPU time of the run"),
    "run_id": Field("name", "hash of the canonical configuration"),
    "capped_max_logit": Field("nats", "largest capped_max_logit over training"),
    "max_abs_logit": Field("nats", "largest max_abs_logit over training"),
    "init_loss": Field("nats/token", "held-out loss before training"),
    "block": Field("name", "mha | mla | gau"),
    "optimizer": Field("name", "adamw | sgd | muon"),
    "status": Field("name", "done | failed | started | missing"),
}

# One row per run × post-hoc method × test length in the table.csv of an extrapolation study.
EXTRAPOLATION_COLUMNS: dict[str, Field] = {
    "block": Field(
        "name",
        "gau | mha1 | mha4: gated attention units, or attention with that many heads and an MLP",
    ),
    "form": Field("name", "the form of attention, which is a preset"),
    "posthoc": Field("name", "the change made after training; see qkeel.spec.METHODS"),
    "seed": Field("1", "seed for weights and data order"),
    "train_length": Field("tokens", "context length in training"),
    "test_length": Field("tokens", "context length in the test"),
    "accuracy_train": Field(
        "share",
        "share of next tokens predicted by the model as trained, on the test text cut into pieces of the training "
        "length",
    ),
    "accuracy_nonrepeat": Field(
        "share", "share of next tokens predicted on held-out text of the test length"
    ),
    "accuracy_repeat": Field(
        "share",
        "share of next tokens predicted on text of the training length repeated up to the test length",
    ),
    "kept_nonrepeat": Field("1", "accuracy_nonrepeat / accuracy_train"),
    "loss_train": Field(
        "nats/token",
        "loss of the model as trained, on the test text cut into pieces of the training length",
    ),
    "loss_nonrepeat": Field("nats/token", "loss on held-out text of the test length"),
    "max_logit": Field("nats", "largest max_logit over training"),
    "run_id": Field("name", "hash of the canonical configuration"),
    "accuracy_train_posthoc": Field("share", "accuracy_train with the post-hoc method"),
    "cos_outside": Field(
        "share",
        "share of visible pairs whose cos(q, k) lies outside the range observed for their head in training",
    ),
}


def head_field(name: str) -> HeadField | None:
    """Returns the field of a value per head (with or without token classes) or block; None if the name is unknown.

    >>> head_field("class_max_logit/image->text").fold
    'max'
    """
    of_class = CLASS_FIELDS.get(name.partition("/")[0])
    return HEAD_FIELDS.get(name) or BLOCK_FIELDS.get(name) or of_class


def layer_fields() -> tuple[str, ...]:
    """Returns the names of the values that trackers record per layer.

    >>> "max_logit" in layer_fields()
    True
    """
    return tuple(
        name
        for name, field in {**HEAD_FIELDS, **BLOCK_FIELDS}.items()
        if field.per_layer
    )


def of_layers(name: str) -> bool:
    """Returns whether a value of the entire model is also recorded for each layer, as NAME/LAYER.

    >>> of_layers("block_output_rms"), of_layers("train_loss")
    (True, False)
    """
    return name in BLOCK_FIELDS


def explain_field(name: str) -> str:
    """Returns the meaning and unit of a recorded name.

    >>> explain_field("end_entropy")
    'entropy after the last step [nats]'
    """
    monitor = {f"monitor_{own}": field for own, field in MONITOR_FIELDS.items()}
    table: dict[str, Field] = {
        **monitor,
        **EXTRAPOLATION_COLUMNS,
        # Some are the classes' means of what a head has under the same name, which is what a name means by itself.
        **TASK_FIELDS,
        **HEAD_FIELDS,
        **CLASS_FIELDS,
        **BLOCK_FIELDS,
        **STEP_FIELDS,
        **TABLE_COLUMNS,
    }
    field = lookup("recorded field", table, name.partition("/")[0])
    return f"{field.meaning} [{field.unit}]"
