"""Workers of a Dask cluster, or of one that is started on this machine."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import needed
from qkeel.lab.execution.executors.executor import (
    REACH_WAIT,
    Unit,
    check_reached,
    died,
    seen_here,
    unreached,
    work_elsewhere,
)
from qkeel.lab.execution.workers import Outcome


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dask:
    """Workers of a Dask cluster. Each process of theirs does one unit at a time, however many threads it has.

    address: of its scheduler, "tcp://host:8786"; empty: the client in use or DASK_SCHEDULER_ADDRESS, or Dask starts a
    cluster here.
    """

    address: str = ""

    def capacity(self) -> int:
        """As many as the cluster has worker processes."""
        return max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        client = self._client
        from distributed import as_completed  # pyright: ignore[reportMissingImports]

        waiting, running = list(units), {}
        ended = as_completed()
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    future = client.submit(work_elsewhere, unit, pure=False)
                    running[future] = unit
                    ended.add(future)
                done = next(ended)
                unit = running.pop(done)
                error = done.exception()
                yield seen_here(done.result() if error is None else died(unit, error))
        finally:
            client.cancel(list(running), force=True)

    @functools.cached_property
    def _client(self) -> Any:
        with needed("the executor dask", "distributed"):
            from distributed import Client, get_client  # pyright: ignore[reportMissingImports]
        if address := self.address or os.environ.get("DASK_SCHEDULER_ADDRESS", ""):
            check_reached("Dask's scheduler", address)
            try:
                return Client(address, timeout=REACH_WAIT)
            except (OSError, TimeoutError) as error:
                raise unreached("Dask's scheduler", f"{address}: {error}") from error
        try:
            return get_client()
        except ValueError:  # none in use
            return Client(threads_per_worker=1, dashboard_address=None)
