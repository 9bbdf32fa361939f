"""Jobs of a Slurm cluster, through submitit."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, final

from qkeel.errors import needed
from qkeel.lab.execution.executors.executor import Unit, died, seen_here, unreached, work_elsewhere
from qkeel.lab.execution.workers import Outcome
from qkeel.options import Bound, Count, Positive, settle

_EACH, _EACH_HERE = 5.0, 0.5  # seconds between two looks at the jobs of a cluster, and of this machine


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
        self._reached()
        return 16

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        place = self._executor(workers, folder)
        waiting, running = list(units), {}
        try:
            if self.cluster != "local":  # an array, in which Slurm keeps to `workers` at once
                running, waiting = dict(zip(place.map_array(work_elsewhere, units), units)), []
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    running[place.submit(work_elsewhere, unit)] = unit
                ended = [job for job in running if job.done()]
                for job in ended:
                    unit, error = running.pop(job), job.exception()
                    yield seen_here(job.result() if error is None else died(unit, error))
                if not ended:
                    time.sleep(_EACH if self.cluster != "local" else _EACH_HERE)
        finally:
            for job in running:
                job.cancel()

    def _reached(self) -> None:
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise unreached("Slurm", "this machine has no sbatch; start the study where jobs are submitted")

    def _executor(self, workers: int, folder: Path) -> Any:
        with needed("the executor slurm", "submitit"):
            import submitit  # pyright: ignore[reportMissingImports]
        self._reached()
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
