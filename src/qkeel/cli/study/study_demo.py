"""`qkeel demo`: the study of two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from qkeel.cli.flags import configure
from qkeel.cli.study.run_study import run_study
from qkeel.cli.study.study_flags import FLAT, BaseFlags, HowFlags


def demo(
    *,
    out: Path = Path("demo"),
    how: Annotated[HowFlags, FLAT] = HowFlags(),  # noqa: B008 - frozen
    flags: Annotated[BaseFlags, FLAT] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """See logits explode, and remedies hold them or not, on real text in two minutes.

    Args:
        out: Directory of the study.
    """
    config, _ = configure(flags, None)
    return run_study("demo", config, None, out, how)
