"""The ways to run one model on several processes, and what was found: the table of docs/internals/processes.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tests.contract.processes.remedies import (
    BY_HEADS,
    GATHERED,
    MIXED,
    STAGES,
    TOKENS,
    WHOLE,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run a model on several processes.

    Args:
        title: what the table of docs/internals/processes.md calls it.
        processes: how many the tests start.
        quick: whether the quick suite runs it.
        statistics: "equal" to one process on the global batch, or what is not, and what is said instead.
        collectives: that a monitor adds to the training's groups in a measured step: where the model is compiled, those
            of a pass of its own.
        collectives_of_search: whether the first step has more of them, in the passes that find the sites.
        remedies: by the name of a remedy, "equal" or "refused: why"; filled by remedies.py.
    """

    title: str
    processes: int
    quick: bool = False
    statistics: str = "equal"
    collectives: int = 0
    collectives_of_search: bool = False
    remedies: Mapping[str, str] = dataclasses.field(default_factory=dict)


# By name; wrapped.py builds each.
SETUPS: dict[str, Setup] = {
    "ddp": Setup(
        title="DistributedDataParallel", processes=2, quick=True, remedies=WHOLE
    ),
    "ddp_no_sync": Setup(
        title="DistributedDataParallel, two micro-batches with no_sync",
        processes=2,
        remedies=WHOLE,
    ),
    "ddp_closure": Setup(
        title="DistributedDataParallel, optimizer.step(closure)",
        processes=2,
        remedies=WHOLE,
    ),
    "ddp_checkpointing": Setup(
        title="DistributedDataParallel, gradient checkpointing",
        processes=2,
        remedies=WHOLE,
    ),
    "ddp_compile": Setup(
        title="DistributedDataParallel around torch.compile",
        processes=2,
        remedies=WHOLE,
    ),
    "ddp_uneven": Setup(
        title="DistributedDataParallel, 5 and 3 sequences", processes=2, remedies=WHOLE
    ),
    "ddp_padding": Setup(
        title="DistributedDataParallel, padding on one process",
        processes=2,
        remedies=WHOLE,
    ),
    "fsdp2": Setup(title="fully_shard", processes=2, quick=True, remedies=GATHERED),
    "fsdp2_found": Setup(
        title="fully_shard, sites found on the sharded model",
        processes=2,
        remedies=GATHERED,
    ),
    "fsdp2_mixed": Setup(
        title="fully_shard, MixedPrecisionPolicy(param_dtype=float32) of float64",
        processes=2,
        remedies=MIXED,
    ),
    "fsdp2_kept": Setup(
        title="fully_shard, reshard_after_forward=False", processes=2, remedies=GATHERED
    ),
    "fsdp2_compile": Setup(
        title="torch.compile around fully_shard",
        processes=2,
        collectives=3,
        remedies=GATHERED,
    ),
    "hsdp": Setup(
        title="fully_shard on a mesh of 2 × 2 (HSDP)", processes=4, remedies=GATHERED
    ),
    "hsdp_compile": Setup(
        title="torch.compile around HSDP", processes=4, collectives=3, remedies=GATHERED
    ),
    "tp": Setup(title="tensor parallel", processes=2, quick=True, remedies=BY_HEADS),
    "tp_compile": Setup(
        title="torch.compile around tensor parallel",
        processes=2,
        collectives=4,
        remedies=BY_HEADS,
    ),
    "tp_sequence": Setup(
        title="tensor parallel with sequence parallel", processes=2, remedies=BY_HEADS
    ),
    "tp_fsdp2": Setup(
        title="tensor parallel × fully_shard",
        processes=4,
        statistics="equal, but qk_spectral_norm is skipped, and reported, where no process holds a whole head",
        remedies=BY_HEADS,
    ),
    "tp_fsdp2_compile": Setup(
        title="torch.compile around tensor parallel × fully_shard",
        processes=4,
        collectives=7,
        statistics="equal, but qk_spectral_norm is skipped, and reported, where no process holds a whole head",
        remedies=BY_HEADS,
    ),
    "pipeline": Setup(
        title="pipeline, GPipe", processes=2, quick=True, remedies=STAGES
    ),
    "pipeline_1f1b": Setup(title="pipeline, 1F1B", processes=2, remedies=STAGES),
    "pipeline_interleaved": Setup(
        title="pipeline, interleaved 1F1B, two stages a process, watched as one",
        processes=2,
        remedies=STAGES,
    ),
    "context": Setup(
        title="context parallel, keys gathered, layout given",
        processes=2,
        collectives_of_search=True,
        remedies=TOKENS,
    ),
    "context_compile": Setup(
        title="context parallel, keys gathered, layout given, around torch.compile",
        processes=2,
        collectives=2,
        collectives_of_search=True,
        remedies=TOKENS,
    ),
}
