"""`qkeel study multimodal`: text and images in one sequence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.cli.flags import Settings, configure
from qkeel.cli.study.run_study import run_study
from qkeel.cli.study.study_flags import FLAT, SEVERAL, AxisFlags, BaseFlags, HowFlags
from qkeel.lab.config import RunConfig
from qkeel.lab.plan.plan import Grid
from qkeel.lab.studies.multimodal import BASE, DEFAULT, REGIME_BASE, REGIMES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixFlags:
    """Of which mixes of text and images a study has a part each."""

    mixes: Annotated[list[str] | None, SEVERAL] = None
    """Mixes: text, mix, images, patches, with options as in patches:share=0.25,variance=4,norm=none."""
    grid: Annotated[bool, Parameter(negative=(), show_default=False, group="Grid")] = False
    """The search for a regime: patches of variance 1, 4, 16 in 1/4, 1/2, 3/4 of sequences, with and without norms."""

    def over(self, recipe: Settings) -> Settings:
        """Returns a recipe's [study] table with these flags over it."""
        return {**recipe, **({"mixes": self.mixes} if self.mixes else {})}

    def default(self) -> tuple[RunConfig, Grid]:
        """Returns the configuration and the grid where neither flags nor recipe say otherwise."""
        return (REGIME_BASE, REGIMES) if self.grid else (BASE, DEFAULT)


def study_multimodal(
    *,
    axes: Annotated[AxisFlags, FLAT] = AxisFlags(),  # noqa: B008 - frozen
    mixes: Annotated[MixFlags, FLAT] = MixFlags(),
    out: Path = Path("runs/multimodal"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, FLAT] = HowFlags(),  # noqa: B008
    flags: Annotated[BaseFlags, FLAT] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Text and images in one sequence: mixes × remedies × learning rates × seeds, all measured on one fixed batch.

    By default text alone and text mixed with handwritten digits; none, qk_norm, swin_norm and what held Chameleon 7B
    and 34B; rates 0.01 and 0.1. Finished runs are kept, killed ones go on, and the directory takes more later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    base, grid = mixes.default()
    config, study = configure(flags, recipe, base)
    return run_study("multimodal", config, axes.grid(mixes.over(study), grid), out, how)
