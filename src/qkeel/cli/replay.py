"""`qkeel replay`: what a policy of the autopilot would have done on a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.autopilot import replay as replayed
from qkeel.cli.exits import OK
from qkeel.errors import QkeelError
from qkeel.lab.config import RunConfig
from qkeel.lab.model.optimizers import learning_rate
from qkeel.monitor import PlannedRates
from qkeel.records import RunDirectory


def replay(
    run: Path,
    /,
    *,
    policy: Annotated[str, Parameter(name=("--policy", "-p"))] = "ladder",
) -> int:
    """Print what a policy of the autopilot would have done on a recorded run, when and why.

    The records stay what they are: what comes after its first action is what happened without it.

    Args:
        run: The directory of a watched or trained run.
        policy: Name of the policy with its options, like ladder:threshold=50.
    """
    found = replayed(run, policy, planned=_planned(RunDirectory(run)))
    for one in found:
        print(one)
    print(f"{len(found)} decisions and effects of {policy} on {run}" if found else f"{policy} would not have acted")
    return OK


def _planned(run: RunDirectory) -> PlannedRates | None:
    """The schedule of a run of the lab; that of a watched one is in its events, where it was known."""
    try:
        config = RunConfig.from_dict(run.config())
    except (KeyError, TypeError, ValueError, QkeelError):
        return None
    return PlannedRates.of([learning_rate(config.optim, step, config.steps) for step in range(config.steps)])
