"""Jobs of a Slurm cluster, through submitit."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, final

from qkeel.errors import needed
from qkeel.lab.execution.executors.executor import Unit, died, seen_here, work_elsewhere
from qkeel.lab.execution.workers import Outcome
from qkeel.options import Bound, Count, Positive, settle

_EACH = 5.0  # seconds between two looks at the jobs


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """One job array of a Slurm cluster; this process waits for it and cancels it when it is interrupted.

    partition, account, qos: as sbatch takes them, the cluster's own where empty. time: minutes of a job. memory: GB.
    cpus, gpus: of a job. cluster: "slurm", or "local" to do the jobs as processes of this machine.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: Count = 60
    memory: Positive = 4
    cpus: Count = 1
    gpus: Annotated[int, Bound(included=True)] = 0
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        settle(self, "slurm")

    def capacity(self) -> int:
        """Sixteen: what the cluster has is not known here."""
        return 16

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        jobs = self._executor(workers, folder).map_array(work_elsewhere, units)
        from submitit.helpers import as_completed  # pyright: ignore[reportMissingImports]

        running = dict(zip(jobs, units))
        try:
            for job in as_completed(jobs, poll_frequency=_EACH):
                unit = running.pop(job)
                error = job.exception()
                yield seen_here(job.result() if error is None else died(unit, error))
        finally:
            for job in running:
                job.cancel()

    def _executor(self, workers: int, folder: Path) -> Any:
        with needed("the executor slurm", "submitit"):
            import submitit  # pyright: ignore[reportMissingImports]
        made = submitit.AutoExecutor(folder=folder / "slurm", cluster=self.cluster)
        named = {"slurm_partition": self.partition, "slurm_account": self.account, "slurm_qos": self.qos}
        made.update_parameters(
            name="qkeel",
            timeout_min=self.time,
            mem_gb=self.memory,
            cpus_per_task=self.cpus,
            gpus_per_node=self.gpus,
            slurm_array_parallelism=workers,
            **{name: value for name, value in named.items() if value},
        )
        return made
