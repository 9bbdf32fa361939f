"""`qkeel check`: is the attention of a run or a checkpoint healthy? One sentence, and an exit code for CI."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qkeel.audit import Geometry
from qkeel.audit.check import check as judge
from qkeel.audit.check import check_checkpoint, is_run
from qkeel.cli.exits import FAILED, OK
from qkeel.cli.scan import progress_bar, refuse_hub_name
from qkeel.errors import InvalidValueError
from qkeel.metrics import HARMFUL_LOGIT, Status

_SWITCH = Parameter(negative=(), show_default=False)
_OPTIONAL = Parameter(show_default=False)


def check(
    path: Path,
    /,
    *,
    threshold: float = HARMFUL_LOGIT,
    table: Annotated[bool, _SWITCH] = False,
    strict: Annotated[bool, _SWITCH] = False,
    n_heads: Annotated[int | None, _OPTIONAL] = None,
    n_kv_heads: Annotated[int | None, _OPTIONAL] = None,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
) -> int:
    """Say in one sentence whether the attention of a run or a checkpoint is healthy.

    Exit code 0 if it is, 1 if not, 2 for wrong usage. The weights of a checkpoint give an upper bound on its logits; a
    bound over the threshold is "not known", which is 0, or 1 with --strict. In Python: qkeel.check(model, batch).

    Args:
        path: Directory of a run, or a .safetensors file, a folder of shards, or a Hugging Face folder.
        threshold: Largest attention logit that is let pass, in nats.
        table: Also the numbers of each layer.
        strict: Exit code 1 also where the weights alone do not decide.
        n_heads: Query heads per layer of a checkpoint, where config.json does not say.
        n_kv_heads: Key heads per layer of a checkpoint, where config.json does not say.
        json_: Print status, sentence, largest logit and threshold as JSON.
    """
    if not threshold > 0:
        raise InvalidValueError(f"expected a threshold above 0 nats, got {threshold:g}")
    if is_run(path):
        found = judge(path, threshold=threshold)
    else:
        refuse_hub_name(path)
        with progress_bar() as on_progress:
            found = check_checkpoint(path, Geometry(n_heads=n_heads, n_kv_heads=n_kv_heads), threshold, on_progress)
    if json_:
        largest = found.largest if math.isfinite(found.largest) else None
        said = {"status": str(found.status), "sentence": found.sentence, "largest": largest, "threshold": threshold}
        print(json.dumps(said))
    else:
        print(found)
        if table and found.rows:
            print(found.table())
    return FAILED if found.status is Status.NOT_HEALTHY or (strict and not found.healthy) else OK
