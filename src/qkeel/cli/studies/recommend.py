"""`qkeel recommend`: the logits to expect of a configuration, and the remedy for it, from what was measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.cli.flags import configure, starting, view
from qkeel.lab.advice.read_configuration import read_configuration
from qkeel.lab.advice.recommendation import recommend as advise

RunFlags = view()


def recommend(
    source: Path | None = None,
    *,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
    flags: Annotated[RunFlags, Parameter(name="*")] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008 - frozen
) -> int:
    """Print the logits to expect of a configuration, and which remedy gains how much, from what was measured.

    Every number has an interval and the measurements behind it. Outside of what was measured the answer is "not known",
    and which setting is outside.

    Args:
        source: A recipe, a config.json of transformers or its folder, or the directory of a run; flags go over it.
        json_: Print everything as JSON.
    """
    base, unknown = read_configuration(source) if source else (starting(flags), ())
    found = advise(configure(flags, None, base)[0])
    found = dataclasses.replace(found, outside=(*unknown, *found.outside), outside_gain=(*unknown, *found.outside_gain))
    print(json.dumps({**dataclasses.asdict(found), "remedy": found.remedy}) if json_ else found)
    return OK
