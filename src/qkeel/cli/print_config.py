"""`qkeel config`: the configuration that a recipe and flags make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.cli.flags import as_toml, configure, starting, view

RunFlags: Any = view("RunFlags")


def print_config(
    *,
    recipe: Path | None = None,
    flags: Annotated[RunFlags, Parameter(name="*")] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008 - frozen
) -> int:
    """Print the configuration that a recipe and flags make, as a TOML recipe.

    Args:
        recipe: TOML file of settings; flags go over it.
    """
    print(as_toml(configure(flags, recipe, starting(flags))[0]))
    return OK
