"""`qkeel study lr`: remedies by learning rates by seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from qkeel.cli.flags import configure, starting
from qkeel.cli.study.run_study import run_study
from qkeel.cli.study.study_flags import FLAT, AxisFlags, BaseFlags, HowFlags


def study_lr(
    *,
    axes: Annotated[AxisFlags, FLAT] = AxisFlags(),  # noqa: B008 - frozen
    out: Path = Path("runs/lr"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, FLAT] = HowFlags(),  # noqa: B008
    flags: Annotated[BaseFlags, FLAT] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Remedies × learning rates × seeds: which remedies widen the range of rates that train well.

    By default none, qk_norm and lalr:tau=0.1 at 0.01, 0.03, 0.1 and 0.3. Finished runs are kept, killed ones go on, and
    the directory takes more remedies, rates and seeds later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    config, study = configure(flags, recipe, starting(flags))
    return run_study("lr", config, axes.grid(study), out, how)
