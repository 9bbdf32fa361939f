"""The setups in which one model runs on several processes, and what holds in each: the table of docs/processes.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run a model on several processes.

    Args:
        title: what the table of docs/processes.md calls it.
        processes: how many the tests start.
        quick: whether the quick suite runs it.
        statistics: "equal" to one process on the global batch, or what is not, and what is said instead.
        collectives: that a monitor adds to a measured step.
        remedies: by the name of a remedy, "equal" or "refused: why"; filled by tests/processes/remedies.
    """

    title: str
    processes: int
    quick: bool = False
    statistics: str = "equal"
    collectives: int = 1
    remedies: Mapping[str, str] = dataclasses.field(default_factory=dict)


_STEPS = ("lalr", "qk_lr", "qk_weight_decay", "qk_clip", "qk_clip by group", "three at once")
_WHOLE = dict.fromkeys((*_STEPS, "spectral_cap", "softcap", "z_loss", "qk_norm before"), "equal")
_AFTER = {"qk_norm after": "refused", "sigma_reparam before": "equal"}
_SPLIT = {**_WHOLE, "spectral_cap": "refused: needs all rows and columns of a head at once"}
_HEADS = dict.fromkeys(("qk_norm before", "sigma_reparam before"), "refused: tensor parallelism has split")
# Remedies by how the weights are kept: whole on each process, in parts that are gathered for a pass, split by heads.
WHOLE: dict[str, str] = _WHOLE | _AFTER
GATHERED: dict[str, str] = _SPLIT | _AFTER
BY_HEADS: dict[str, str] = _SPLIT | _AFTER | _HEADS
# A stage has some of the layers, all of their weights, and no output head, which z_loss needs.
STAGES: dict[str, str] = dict.fromkeys((*_STEPS, "spectral_cap", "softcap"), "equal") | {"z_loss": "refused: "}

# By name; tests/processes/wrapped.py builds each.
SETUPS: dict[str, Setup] = {
    "ddp": Setup(title="DistributedDataParallel", processes=2, quick=True, remedies=WHOLE),
    "fsdp2": Setup(title="fully_shard", processes=2, quick=True, remedies=GATHERED),
    "fsdp2_kept": Setup(title="fully_shard, reshard_after_forward=False", processes=2, remedies=GATHERED),
    "hsdp": Setup(title="fully_shard on a mesh of 2 × 2 (HSDP)", processes=4, remedies=GATHERED),
    "tp": Setup(title="tensor parallel", processes=2, quick=True, remedies=BY_HEADS),
    "tp_sequence": Setup(title="tensor parallel with sequence parallel", processes=2, remedies=BY_HEADS),
    "tp_fsdp2": Setup(title="tensor parallel × fully_shard", processes=4, remedies=BY_HEADS),
    "pipeline": Setup(title="pipeline, GPipe", processes=2, quick=True, remedies=STAGES),
    "pipeline_1f1b": Setup(title="pipeline, 1F1B", processes=2, remedies=STAGES),
    "pipeline_interleaved": Setup(title="pipeline, two stages a process (interleaved 1F1B)", processes=2),
    "context": Setup(title="context parallel, keys gathered", processes=2),
}
