"""Every recorded name in one table: unit, shape, meaning."""

from __future__ import annotations

import dataclasses
from typing import Literal

from qkeel.options import lookup


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A recorded number. Attention logits and entropies are in nats (natural logarithm)."""

    unit: str  #: such as nats; "" for a plain number
    meaning: str  #: description in words


@dataclasses.dataclass(frozen=True, slots=True)
class HeadField(Field):
    """A per-head number; the monitor, the trackers and the report take everything they need from its row.

    fold: how several heads are summarised, by the most critical head or by the mean. count: the field of LogitStats
    that is above 0 if the number was measured. column: heading in the monitor's table; "" leaves it out. per_layer:
    trackers get one series per layer, not only one for the model. There are no series per head: 80 layers of 64 heads
    would make 30,720 charts, and trackers become slow from 10,000 on.
    """

    fold: Literal["max", "min", "mean"]
    count: str = "n_queries"
    column: str = ""
    per_layer: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LayerField(Field):
    """A per-layer number that is computed from one per-head number, so nothing more is measured or stored.

    of: the per-head number, in HEAD_FIELDS. fold: the formula in records.file_formats. column, per_layer: as in
    HeadField.
    """

    of: str
    fold: Literal["share_of_sinks", "max", "min", "gap_of_sinks", "max_ratio", "min_ratio", "max_over_mean", "std"]
    column: str = ""
    per_layer: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockField(Field):
    """A number for each block of a watched model, measured on the residual stream that its branches add to.

    place: where it is read. formula: which of functional.norms.STREAM_FORMULAS it is. over: how the numbers of several
    passes and processes are combined. fold: how several blocks are summarised. column, per_layer: see HeadField.
    """

    place: Literal["input", "output", "attention", "mlp"]
    formula: Literal["rms", "largest", "channel_ratio", "massive_share", "share", "change"]
    over: Literal["root_mean", "max", "mean"]
    fold: Literal["max", "mean"] = "max"
    column: str = ""
    per_layer: bool = False


# One line of metrics.jsonl, written every `log_every` steps. "Probe" is the fixed held-out batch.
STEP_FIELDS: dict[str, Field] = {
    "step": Field("optimizer steps", "steps completed when the line was written; 0 is before training"),
    "tokens": Field("tokens", "training tokens seen"),
    "lr": Field("1", "base learning rate of the last completed step"),
    "train_loss": Field("nats/token", "loss of the last training batch; null at step 0"),
    "val_loss": Field("nats/token", "loss on held-out text; null where it was not evaluated"),
    "grad_norm": Field("1", "global gradient norm before clipping; null at step 0"),
    "max_logit": Field(
        "nats", "largest signed attention logit over layers, heads and the probe batch, scaled, before cap"
    ),
    "min_logit": Field("nats", "smallest signed attention logit, scaled, before cap"),
    "max_abs_logit": Field("nats", "largest magnitude of an attention logit, scaled, before cap"),
    "capped_max_logit": Field("nats", "largest attention logit after the cap; equals max_logit without one"),
    "entropy": Field("nats", "attention entropy: mean over query rows, heads and layers"),
    "logit_change": Field(
        "nats", "root mean square change of the logits in the last step, over layers, heads and the probe batch"
    ),
    "cpu_seconds": Field("s", "process CPU time spent on the run so far"),
    "tokens_per_second": Field(
        "1/s", "training tokens per second since the last record, excluding the time for measuring and saving"
    ),
    "mfu": Field("share", "model FLOP/s divided by the device's peak in bf16; null if the peak is unknown"),
}

NON_FINITE = "non_finite"  # if it is 1, the other numbers of the head are meaningless, so code asks for it by name

# One value per layer and head in heads.f32. The number of a key head is repeated for every query head of its group.
HEAD_FIELDS: dict[str, HeadField] = {
    "max_logit": HeadField(
        "nats", "largest signed attention logit, scaled, before cap", "max", column="max logit", per_layer=True
    ),
    "min_logit": HeadField("nats", "smallest signed attention logit, scaled, before cap", "min", count="n_pairs"),
    "mean_logit": HeadField(
        "nats", "mean attention logit over visible pairs, scaled, before cap", "mean", count="n_pairs"
    ),
    "logit_gap": HeadField(
        "nats",
        "largest minus mean logit of a query row, before the cap: mean over rows with two or more keys",
        "mean",
        count="n_free",
    ),
    "capped_max_logit": HeadField(
        "nats", "largest attention logit after the cap; equals max_logit if there is no cap", "max"
    ),
    "max_abs_logit": HeadField(
        "nats", "largest magnitude of an attention logit, scaled, before cap", "max", count="n_pairs"
    ),
    "entropy": HeadField(
        "nats", "mean attention entropy over query rows with a visible key", "mean", column="entropy", per_layer=True
    ),
    "entropy_error": HeadField(
        "nats", "half the width of the 95 % interval of an entropy that was estimated from a sample of rows", "max"
    ),
    "entropy_min": HeadField("nats", "smallest attention entropy of a query row", "min"),
    "normalized_entropy": HeadField(
        "1", "mean of entropy / ln(visible keys) over rows with two or more keys", "mean", count="n_free"
    ),
    "query_norm": HeadField(
        "1",
        "mean L2 norm of queries as they enter the dot product",
        "mean",
        count="n_products",
        column="|q|",
        per_layer=True,
    ),
    "query_norm_max": HeadField(
        "1", "largest L2 norm of a query as it enters the dot product", "max", count="n_products"
    ),
    "key_norm": HeadField(
        "1",
        "mean L2 norm of keys as they enter the dot product (of the head's group)",
        "mean",
        count="n_keys",
        column="|k|",
        per_layer=True,
    ),
    "key_norm_max": HeadField("1", "largest L2 norm of a key as it enters the dot product", "max", count="n_keys"),
    "share_above": HeadField(
        "share", "share of visible logits (signed, before cap) above the threshold", "max", count="n_pairs"
    ),
    "sink_share": HeadField(
        "share",
        "mean attention weight on the first visible key, over rows with two or more keys",
        "mean",
        count="n_free",
    ),
    "qk_frobenius": HeadField(
        "1", "Frobenius norm of Q Kᵀ over visible pairs, without the scale", "max", count="n_products"
    ),
    "cos_max": HeadField(
        "1", "largest cosine between a query and a visible key", "max", count="n_products", column="cos max"
    ),
    "cos_mean": HeadField("1", "mean cosine between queries and visible keys", "mean", count="n_products"),
    "logit_change_rms": HeadField(
        "nats",
        "root mean square change of the logits by one step, same input",
        "max",
        column="logit change",
        per_layer=True,
    ),
    "logit_change_mean_abs": HeadField(
        "nats", "mean absolute change of the logits caused by one step, on the same input", "max"
    ),
    "query_weight_norm": HeadField("1", "Frobenius norm of the head's query weight", "max"),
    "key_weight_norm": HeadField("1", "Frobenius norm of the head's key weight", "max"),
    "qk_spectral_norm": HeadField("1", "largest singular value of the product of query and key weight", "max"),
    "gain_bound": HeadField("nats", "largest logit that the gains of the q/k norm allow", "max", per_layer=True),
    "query_grad_rms": HeadField("1", "root mean square gradient of the head's query weight", "max"),
    "key_grad_rms": HeadField("1", "root mean square gradient of the head's key weight", "max"),
    NON_FINITE: HeadField("0 or 1", "whether a logit or the entropy was NaN or infinite", "max"),
    "grad_over_eps": HeadField("1", "smaller RMS gradient of q and k, divided by the optimizer's eps", "min"),
    "lse_mean": HeadField(
        "nats", "mean logsumexp of a query row's logits over its keys, after the cap", "mean", column="lse"
    ),
    "lse_std": HeadField("nats", "standard deviation over query rows of the row's logsumexp", "mean"),
    "sink_logit": HeadField("nats", "logit of the head's learned sink", "max"),
    "gate_mean": HeadField(
        "share",
        "weight left to the keys by a sink, sigmoid(logsumexp - sink logit): mean over rows",
        "mean",
        column="gate",
    ),
    "gate_std": HeadField("share", "standard deviation of the gate over query rows", "mean"),
    "index_max_logit": HeadField(
        "1", "largest score by which an indexer chooses keys of the layer", "max", column="index max"
    ),
    "index_mean_logit": HeadField("1", "mean score of an indexer over the keys that it may choose", "mean"),
    "index_entropy": HeadField("nats", "mean entropy of a softmax over an indexer's scores", "mean"),
    "index_margin": HeadField("1", "mean score of the keys that an indexer chose minus that of the others", "min"),
    "index_top_mass": HeadField(
        "share", "sum of the positive scores of the keys that an indexer chose, divided by that of all keys", "min"
    ),
    "index_kl": HeadField("nats", "mean divergence of a softmax over an indexer's scores from dense attention", "max"),
    "index_query_norm": HeadField("1", "mean L2 norm of an indexer's queries, over its heads", "mean"),
    "index_query_norm_max": HeadField("1", "largest L2 norm of an indexer's query", "max"),
    "index_key_norm": HeadField("1", "mean L2 norm of the keys that an indexer scores", "mean"),
    "index_key_norm_max": HeadField("1", "largest L2 norm of a key that an indexer scores", "max"),
    "index_weight_mean": HeadField("1", "mean weight of an indexer's heads in its scores", "mean"),
    "index_weight_max": HeadField("1", "largest magnitude of an indexer's head weight", "max"),
    "index_weight_negative": HeadField("share", "share of an indexer's head weights that are negative", "max"),
    "select_share": HeadField(
        "share",
        "keys that a query of a sparse layer reaches, divided by those it may choose from",
        "mean",
        column="chosen",
    ),
    "select_distance": HeadField(
        "1", "mean distance of the chosen keys in tokens, divided by the number of keys to choose from", "mean"
    ),
    "select_distance_max": HeadField(
        "1", "largest distance of a chosen key in tokens, divided by the number of keys to choose from", "max"
    ),
    "select_local_share": HeadField(
        "share", "share of the c chosen keys that are among the c nearest; 1 is a sliding window", "max"
    ),
    "select_overlap": HeadField(
        "share",
        "keys chosen by both this layer and the preceding sparse layer, divided by those chosen by either",
        "mean",
    ),
    "select_coverage": HeadField("share", "share of the keys that at least one sampled query has chosen", "min"),
    "dense_recall": HeadField(
        "share", "weight that dense attention would give to the chosen keys: mean over rows", "min", column="recall"
    ),
    "dense_kl": HeadField(
        "nats", "mean divergence of sparse from dense attention: -ln of the recall, averaged over rows", "max"
    ),
    "dense_kl_max": HeadField("nats", "largest divergence of sparse from dense attention over query rows", "max"),
    "dense_top_share": HeadField("share", "share of rows whose largest dense logit belongs to a chosen key", "min"),
    "dense_entropy": HeadField("nats", "mean entropy of dense attention over the keys to choose from", "mean"),
    "delta2_spectral_norm": HeadField(
        "1", "largest singular value of what a step adds to W_QᵀW_K to first order", "max", column="Δ₂ norm"
    ),
    "delta2_stable_rank": HeadField(
        "1",
        "squared Frobenius norm of what a step adds to W_QᵀW_K to first order, divided by the squared spectral norm",
        "min",
    ),
    "delta2_singular_entropy": HeadField(
        "nats",
        "entropy of the shares of the squared singular values of what a step adds to W_QᵀW_K to first order",
        "min",
    ),
    "delta3_spectral_norm": HeadField(
        "1", "largest singular value of the query weight's update times the key weight's", "max"
    ),
    "delta3_stable_rank": HeadField(
        "1",
        "squared Frobenius norm of the query weight's update times the key weight's, divided by the squared "
        "spectral norm",
        "min",
    ),
    "delta3_singular_entropy": HeadField(
        "nats",
        "entropy of the shares of the squared singular values of the query weight's update times the key weight's",
        "min",
    ),
    "query_update_ratio": HeadField(
        "1",
        "root mean square of one update of the head's query weight, divided by that of the weight",
        "max",
        column="ΔW_q/W_q",
    ),
    "key_update_ratio": HeadField(
        "1",
        "root mean square of one update of the head's key weight, divided by that of the weight",
        "max",
        column="ΔW_k/W_k",
    ),
}

# A sink head gives its first key more than this share of its weight and acts as a gate.
# Source: Sun et al. 2026, arXiv 2603.05498.
SINK_HEAD = 0.3

# Numbers of a layer, computed from those of its heads; for the whole model, from all heads at once.
LAYER_FIELDS: dict[str, LayerField] = {
    "sink_head_ratio": LayerField(
        "share",
        "share of heads with sink_share above 0.3",
        of="sink_share",
        fold="share_of_sinks",
        column="sink heads",
        per_layer=True,
    ),
    "sink_head_max": LayerField("share", "largest sink_share of a head", of="sink_share", fold="max"),
    "sink_head_gap": LayerField(
        "share",
        "mean sink_share of the heads above 0.3 minus the mean of the others; NaN if one group is empty",
        of="sink_share",
        fold="gap_of_sinks",
    ),
    "entropy_head_std": LayerField(
        "nats", "standard deviation of the heads' entropies in a layer", of="entropy", fold="std"
    ),
    "entropy_head_min": LayerField("nats", "smallest entropy of a head in a layer", of="entropy", fold="min"),
    "entropy_head_max": LayerField("nats", "largest entropy of a head in a layer", of="entropy", fold="max"),
    "gate_max_ratio": LayerField(
        "1", "largest gate_mean of a head, divided by that of the median head", of="gate_mean", fold="max_ratio"
    ),
    "gate_min_ratio": LayerField(
        "1",
        "smallest gate_mean of a head, divided by that of the median head; shows a single closed gate",
        of="gate_mean",
        fold="min_ratio",
    ),
    "gate_std_ratio": LayerField(
        "1",
        "largest gate_std of a head, divided by the mean over heads; shows a head that opens for a few queries",
        of="gate_std",
        fold="max_over_mean",
    ),
    "lse_std_ratio": LayerField(
        "1", "largest lse_std of a head, divided by the mean over heads", of="lse_std", fold="max_over_mean"
    ),
}

# Numbers by token class, for models that are watched with classes: "NAME/text" for one class, "NAME/image->text" for
# queries of one class and keys of another. The first two rows describe a head as a whole.
CLASS_FIELDS: dict[str, HeadField] = {
    "query_competition": HeadField(
        "1",
        "mean query norm of the token class with the longest queries, divided by that of the class with the shortest",
        "mean",
        column="|q| by class",
    ),
    "key_competition": HeadField(
        "1",
        "mean key norm of the token class with the longest keys, divided by that of the class with the shortest",
        "mean",
        column="|k| by class",
    ),
    "class_max_logit": HeadField("nats", "largest signed logit of queries of one class and keys of another", "max"),
    "class_mass": HeadField("share", "mean weight that queries of one class give to all keys of another", "mean"),
    "class_uniform_mass": HeadField("share", "class_mass if a query gave each visible key the same weight", "mean"),
    "class_query_norm": HeadField("1", "mean L2 norm of the queries of a class", "mean"),
    "class_key_norm": HeadField("1", "mean L2 norm of the keys of a class (of the head's group)", "mean"),
}

# More numbers of a watched model; "block_output_norm/LAYER" is the number of one layer.
VALUE_FIELDS: dict[str, Field] = {
    "final_hidden_norm": Field("1", "mean L2 norm of the hidden states that enter the output layer"),
    "block_output_norm": Field("1", "mean L2 norm of the hidden states that leave a block"),
}

# The residual stream, on request: "NAME/LAYER", where LAYER is attention in the block, or the block itself where it has
# none. Channels are the last dimension; a channel's peak is its largest magnitude over the tokens of a pass.
BLOCK_FIELDS: dict[str, BlockField] = {
    "block_input_rms": BlockField(
        "1", "root mean square of the hidden states that enter a block", place="input", formula="rms", over="root_mean"
    ),
    "block_input_max": BlockField(
        "1", "largest magnitude in the hidden states that enter a block", place="input", formula="largest", over="max"
    ),
    "block_input_channel_ratio": BlockField(
        "1",
        "largest channel peak divided by the median peak, in the hidden states that enter a block",
        place="input",
        formula="channel_ratio",
        over="max",
    ),
    "block_output_rms": BlockField(
        "1",
        "root mean square of the hidden states that leave a block",
        place="output",
        formula="rms",
        over="root_mean",
        column="stream",
        per_layer=True,
    ),
    "block_output_max": BlockField(
        "1", "largest magnitude in the hidden states that leave a block", place="output", formula="largest", over="max"
    ),
    "block_output_channel_ratio": BlockField(
        "1",
        "largest channel peak divided by the median peak, in the hidden states that leave a block",
        place="output",
        formula="channel_ratio",
        over="max",
        column="channel ratio",
        per_layer=True,
    ),
    "block_output_massive_share": BlockField(
        "share",
        "share of a block's output channels whose peak is over 100 times the median peak",
        place="output",
        formula="massive_share",
        over="mean",
    ),
    "block_update_ratio": BlockField(
        "1",
        "RMS of a block's output minus its input, divided by the RMS of the input",
        place="output",
        formula="change",
        over="mean",
    ),
    "attention_share": BlockField(
        "1",
        "RMS of what attention adds to the residual stream, divided by the RMS of the block's input",
        place="attention",
        formula="share",
        over="mean",
        column="attention adds",
        per_layer=True,
    ),
    "mlp_share": BlockField(
        "1",
        "RMS of what the rest of the block adds to the residual stream, divided by the RMS of the block's input",
        place="mlp",
        formula="share",
        over="mean",
        column="MLP adds",
        per_layer=True,
    ),
}

# Self-monitoring in each measured step, so that a monitor that sees nothing is noticed. Trackers get these numbers as
# monitor/NAME, metrics.jsonl and steps.csv as monitor_NAME.
MONITOR_FIELDS: dict[str, Field] = {
    "sites": Field("attention layers", "sites found in the model, or described by hand"),
    "calls": Field("calls", "attention calls that were measured in the step"),
    "missed": Field("attention layers", "attention layers that were found by the search for sites but not recognised"),
    "silent": Field("attention layers", "sites without a call in the step"),
    "errors": Field(
        "errors", "errors caught so far: sinks that failed and were dropped, searches for sites that failed"
    ),
    "milliseconds": Field("ms", "host time that this process spent in the monitor since the last measured step"),
}

# The same of all processes that measure as one, the smallest and the largest: one process that sees nothing is noticed.
MONITOR_EXTREMES: dict[str, Field] = {
    f"{name}_{end}": Field(field.unit, f"{word} over processes: {field.meaning}")
    for name, field in MONITOR_FIELDS.items()
    for end, word in (("min", "smallest"), ("max", "largest"))
}

# Numbers that only some tasks have; "NAME/text" is for tokens or targets of one class, "NAME/image>text" for queries
# of one class and keys of the other. They follow STEP_FIELDS in metrics.jsonl, and TABLE_COLUMNS in table.csv.
TASK_FIELDS: dict[str, Field] = {
    "val_loss": Field("nats/token", "loss on held-out targets of one kind; null where it was not evaluated"),
    "val_accuracy": Field("share", "share of held-out images whose class has the largest logit"),
    "query_norm": Field(
        "1", "mean L2 norm of the class's queries as they enter the dot product, over heads and layers"
    ),
    "key_norm": Field("1", "mean L2 norm of the class's keys as they enter the dot product, over heads and layers"),
    "max_logit": Field(
        "nats", "largest signed attention logit between a query class and a key class, scaled, before cap"
    ),
    "attention_mass": Field(
        "share", "weight that queries of one class give to keys of the other, mean over heads and layers"
    ),
    "uniform_mass": Field("share", "attention_mass if each query gave all visible keys the same weight"),
    "last_block_norm": Field("1", "mean L2 norm of the class's hidden states that leave the last block"),
    "mix": Field("name", "the mix of data in a multimodal study"),
    "part": Field("name", "the values of a study's axes"),
    "loss_scale": Field("1", "loss scale of fp16 training after the step"),
    "skipped_steps": Field("optimizer steps", "steps skipped because a gradient overflowed fp16, over training"),
}

# The type of a layer, by what was seen of it. Numbers are comparable within a type: their keys are of one kind.
LAYER_TYPES: dict[str, str] = {
    "full": "queries reach all keys, or all up to their own; in packed sequences, those of their own sequence",
    "window": "queries reach a span of keys that moves with them, and perhaps keys that all of them reach",
    "sparse": "queries reach keys with hidden ones between them, or keys that were gathered for each query",
    "compressed": "some keys stand for several tokens each",
    "latent": "queries reach all keys, which are made from one narrower vector of each token (MLA)",
    "cross": "keys come from a different source than queries",
    "linear": "positions are mixed without logits, as by linear attention and state-space layers; nothing is measured",
}
LINEAR = "linear"  # the one type whose layers have no logits, so no numbers and no thresholds

# One row per run in a study's table.csv.
TABLE_COLUMNS: dict[str, Field] = {
    "remedy": Field("name", "spec string of the remedy"),
    "lr": Field("1", "peak base learning rate"),
    "seed": Field("1", "seed for weights and data order"),
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
    "block": Field("name", "mha | mla | gau"),
    "optimizer": Field("name", "adamw | sgd | muon"),
    "status": Field("name", "done | failed | started | missing"),
}

# One row per run × post-hoc method × test length in the table.csv of an extrapolation study.
EXTRAPOLATION_COLUMNS: dict[str, Field] = {
    "block": Field("name", "gau | mha1 | mha4: gated attention units, or attention with that many heads and an MLP"),
    "form": Field("name", "what attention computes: a preset"),
    "posthoc": Field("name", "what was changed after training, see qkeel.spec.METHODS"),
    "seed": Field("1", "seed for weights and data order"),
    "train_length": Field("tokens", "context in training"),
    "test_length": Field("tokens", "context in the test"),
    "accuracy_train": Field(
        "share", "share of next tokens predicted, as trained, on the test text cut into pieces of the training length"
    ),
    "accuracy_nonrepeat": Field("share", "share of next tokens predicted on held-out text of the test length"),
    "accuracy_repeat": Field(
        "share", "share of next tokens predicted on one training length of text repeated up to the test length"
    ),
    "accuracy_last": Field("share", "share of next tokens predicted in the last training length of the text"),
    "kept_nonrepeat": Field("1", "accuracy_nonrepeat / accuracy_train"),
    "loss_train": Field("nats/token", "loss as trained, on the test text cut into pieces of the training length"),
    "loss_nonrepeat": Field("nats/token", "loss on held-out text of the test length"),
    "max_logit": Field("nats", "largest max_logit over training"),
    "run_id": Field("name", "hash of the canonical configuration"),
    "accuracy_train_posthoc": Field("share", "accuracy_train under the post-hoc method"),
    "accuracy_last_short": Field(
        "share", "accuracy on the tokens of accuracy_last, predicted from only one training length of text"
    ),
    "cos_outside": Field(
        "share", "share of visible pairs whose cos(q, k) lies outside the range that their head saw in training"
    ),
    "dilution": Field("share", "largest weight that one of test_length keys can get, in the head where it is smallest"),
    "needle": Field("share", "share of needle values predicted when asked for; empty without needles in training"),
    "needle_weight": Field("share", "mean weight of a question on its needle, in the head that gives it most"),
    "needle_bound": Field("share", "largest weight that one of test_length keys can get in the head of needle_weight"),
}


def head_field(name: str) -> HeadField | None:
    """Returns the field of a per-head number, with or without token classes; None if the name is unknown.

    >>> head_field("class_max_logit/image->text").fold
    'max'
    """
    return HEAD_FIELDS.get(name) or CLASS_FIELDS.get(name.partition("/")[0])


def field_unit(name: str) -> str:
    """Returns the unit of a per-head or per-layer number.

    >>> field_unit("entropy")
    'nats'
    """
    field = LAYER_FIELDS.get(name) or BLOCK_FIELDS.get(name) or VALUE_FIELDS.get(name) or head_field(name)
    return lookup("head field", HEAD_FIELDS, name).unit if field is None else field.unit


def layer_fields() -> tuple[str, ...]:
    """Returns the numbers that trackers record per layer.

    >>> "max_logit" in layer_fields()
    True
    """
    return tuple(name for name, field in {**HEAD_FIELDS, **LAYER_FIELDS, **BLOCK_FIELDS}.items() if field.per_layer)


def measured_field(name: str) -> str:
    """Returns the per-head number from which a per-layer number is computed; other names are returned unchanged.

    >>> measured_field("sink_head_ratio"), measured_field("entropy")
    ('sink_share', 'entropy')
    """
    return LAYER_FIELDS[name].of if name in LAYER_FIELDS else name


def of_layers(name: str) -> bool:
    """Returns whether a number of the whole model is recorded for each layer as well, as NAME/LAYER.

    >>> of_layers("block_output_rms"), of_layers("train_loss")
    (True, False)
    """
    return name in BLOCK_FIELDS or name == "block_output_norm"


def explain_field(name: str) -> str:
    """Returns the meaning and unit of a recorded name.

    >>> explain_field("end_entropy")
    'entropy after the last step [nats]'
    """
    monitor = {f"monitor_{own}": field for own, field in {**MONITOR_FIELDS, **MONITOR_EXTREMES}.items()}
    table: dict[str, Field] = {
        **monitor,
        **EXTRAPOLATION_COLUMNS,
        **HEAD_FIELDS,
        **LAYER_FIELDS,
        **CLASS_FIELDS,
        **VALUE_FIELDS,
        **BLOCK_FIELDS,
        **TASK_FIELDS,
        **STEP_FIELDS,
        **TABLE_COLUMNS,
    }
    field = lookup("recorded field", table, name.partition("/")[0])
    return f"{field.meaning} [{field.unit}]"
