"""`qkeel study mla`: latent and multi-head attention under two optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from qkeel.cli.flags import Settings, configure, view
from qkeel.cli.study.run_study import run_study
from qkeel.cli.study.study_flags import AXES, FLAT, SEVERAL, AxisFlags, HowFlags
from qkeel.lab.studies.latent_attention import DEFAULT

PartlessFlags: Any = view("PartlessFlags", without=AXES | {("model", "block"), ("optim", "name")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartFlags:
    """Of which models and optimizers a study has a part each."""

    blocks: Annotated[list[Literal["mla", "mha"]] | None, SEVERAL] = None
    """Attention: latent and multi-head [default: mla mha]."""
    optimizers: Annotated[list[Literal["adamw", "sgd", "muon"]] | None, SEVERAL] = None
    """Optimizers [default: adamw muon]."""

    def over(self, recipe: Settings) -> Settings:
        """Returns a recipe's [study] table with these flags over it."""
        return {**recipe, **{name: value for name, value in dataclasses.asdict(self).items() if value}}


def study_mla(
    *,
    axes: Annotated[AxisFlags, FLAT] = AxisFlags(),  # noqa: B008 - frozen
    parts: Annotated[PartFlags, FLAT] = PartFlags(),
    out: Path = Path("runs/mla"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, FLAT] = HowFlags(),  # noqa: B008
    flags: Annotated[PartlessFlags, FLAT] = PartlessFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Latent and multi-head attention × AdamW and Muon × remedies × learning rates × seeds.

    By default none, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and qk_lr:factor=0.1 at 0.01, 0.1 and 0.3.
    Finished runs are kept, killed ones go on, and the directory takes more of everything later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    config, study = configure(flags, recipe)
    return run_study("mla", config, axes.grid(parts.over(study), DEFAULT), out, how)
