"""Tasks of a Ray cluster, or of one that is started on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import needed
from qkeel.lab.execution.executors.executor import (
    Unit,
    check_reached,
    died,
    seen_here,
    unreached,
    work_elsewhere,
)
from qkeel.lab.execution.workers import Outcome
from qkeel.options import NotNegative, Positive, settle


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """Tasks of a Ray cluster. A task whose machine is lost is begun once more, and goes on from its checkpoint.

    address: of the cluster, "auto" for that of this machine; empty: RAY_ADDRESS, or Ray starts one here.
    cpus, gpus: what a task reserves.
    """

    address: str = ""
    cpus: Positive = 1
    gpus: NotNegative = 0

    def __post_init__(self) -> None:
        settle(self, "ray")

    def capacity(self) -> int:
        """As many as the cluster has CPUs (GPUs, where tasks reserve some) for."""
        has = self._connected().cluster_resources()
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, min(int(has.get(name, 0) / amount) for name, amount in wanted.items() if amount))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        ray = self._connected()
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=1)(work_elsewhere)
        waiting, running = list(units), {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    running[task.remote(unit)] = unit
                for done in ray.wait(list(running))[0]:
                    unit = running.pop(done)
                    try:
                        outcomes = ray.get(done)
                    except Exception as error:  # `work` raises none, so it is Ray's
                        outcomes = died(unit, error)
                    yield seen_here(outcomes)
        finally:
            for left in running:
                ray.cancel(left, force=True)

    def _connected(self) -> Any:
        with needed("the executor ray", "ray"):
            import ray  # pyright: ignore[reportMissingImports]
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS", "")
            check_reached("Ray's cluster", address)
            try:
                ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
            except ConnectionError as error:
                raise unreached("Ray's cluster", f"{address}: {error}") from error
        return ray
