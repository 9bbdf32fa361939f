"""`qkeel scan`: a checkpoint read head by head, with a progress bar."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from qkeel.audit import Geometry, as_json, table
from qkeel.audit.scan.scan import scan as read
from qkeel.cli.exits import FAILED, OK
from qkeel.errors import DataError

_SWITCH = Parameter(negative=(), show_default=False)


def scan(
    checkpoint: Path,
    /,
    *,
    n_heads: Annotated[int | None, Parameter(show_default=False)] = None,
    n_kv_heads: Annotated[int | None, Parameter(show_default=False)] = None,
    layout: Annotated[Literal["blocks", "groups"] | None, Parameter(show_default=False)] = None,
    every_head: Annotated[bool, _SWITCH] = False,
    tensors: Annotated[bool, _SWITCH] = False,
    tensors_only: Annotated[bool, _SWITCH] = False,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
) -> int:
    """Read a checkpoint without running it: per layer and head, norms of the q and k weights and the logits they allow.

    Exit code 1 if a weight is NaN or infinite.

    Args:
        checkpoint: A .safetensors file, a folder of shards, or a Hugging Face folder.
        n_heads: Query heads per layer, where config.json does not say.
        n_kv_heads: Key heads per layer, where config.json does not say.
        layout: Order in a fused qkv weight: blocks is [q | k | v], groups is queries, key, value per key head.
        every_head: One line per head instead of the largest of each layer.
        tensors: Also a table of all tensors.
        tensors_only: Only the table of all tensors; attention need not be known.
        json_: Print everything as JSON.
    """
    flags = Geometry(n_heads=n_heads, n_kv_heads=n_kv_heads, layout=layout)
    refuse_hub_name(checkpoint)
    with progress_bar() as on_progress:
        found = read(checkpoint, flags=flags, on_progress=on_progress, heads=not tensors_only)
    if json_:
        print(json.dumps(as_json(found)))
    else:
        print(table(found, every_head=every_head, tensors=tensors or tensors_only))
    return FAILED if any(t.non_finite for t in found.tensors) else OK


def refuse_hub_name(path: Path) -> None:
    """Raise for the name of a model on the Hugging Face hub in place of a path.

    Raises: DataError: there is no such file or folder, and it looks like a name of the hub.
    """
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and path.suffix != ".safetensors":
        raise DataError(f"{path} does not exist. It looks like a hub name: download it with hf download {path}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading")
        yield lambda done, total: progress.update(task, completed=done, total=total)
