"""The table that `qkeel bench --use` measured on this machine: one JSON file, whole or absent, never trusted unseen."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qkeel.errors import caution
from qkeel.kernels.choice.question import HEAD_DIMS, TOKENS, Form, Statistics

Row = tuple[str, torch.dtype, int, Form, bool, Statistics]  # a Question of a kind of device
Orders = dict[Row, dict[int, tuple[str, ...]]]  # and query tokens -> names, the fastest first
VARIABLE = "QKEEL_CHOICE"
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a file that is no table may raise
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def table_path() -> Path:
    """QKEEL_CHOICE, or qkeel/choice-PROCESSOR.json in the user's cache, which machines of several kinds may share."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "qkeel" / f"choice-{hashlib.sha256(processor().encode()).hexdigest()[:8]}.json"


def versions() -> dict[str, str]:
    """What a table holds for."""
    try:
        own = version("qkeel")
    except PackageNotFoundError:  # run from a source tree that was never installed
        own = "unknown"
    return {"qkeel": own, "torch": torch.__version__, "processor": processor()}


def processor() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu part"))]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def switched_off() -> bool:
    """Whether QKEEL_CHOICE=0 asks for the order of the table of kernels alone."""
    return os.environ.get(VARIABLE) == "0"


def in_force() -> str:
    """Which tables "auto" chooses by here: for the notes of a run."""
    return "none" if switched_off() else "measured here" if adopted() else "default"


@functools.cache
def adopted() -> Orders:
    """The stored table, read once per process; empty if there is none, or none for this machine and these versions."""
    path = table_path()
    try:
        return read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            caution(f"qkeel chooses kernels by its default table: {path}, which {VARIABLE} names, does not exist.")
    except UNUSABLE as error:
        reason = " ".join(str(error).split())
        told = f"qkeel chooses kernels by its default table: {path} is of no use ({reason})"
        caution(f"{told}. `qkeel bench --use` renews it.")
    return {}


def read(text: str) -> Orders:
    """A table as `written` wrote it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: torn, or not such a table, or for another machine or version.
    """
    content = json.loads(text)
    for name, here in versions().items():
        if content["versions"][name] != here:
            raise ValueError(f"measured with {name} {content['versions'][name]}, this is {here}")
    orders: Orders = {}
    for row in content["orders"]:
        if row["head_dim"] not in HEAD_DIMS or row["tokens"] not in TOKENS:
            raise ValueError("sizes that this version does not tell apart")
        asked = (row["device"], _DTYPES[row["dtype"]], row["head_dim"], row["form"], row["gradient"], row["statistics"])
        orders.setdefault(asked, {})[row["tokens"]] = tuple(row["kernels"])
    return orders


def written(orders: Orders) -> dict[str, Any]:
    """The content of the file for a table."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    rows: list[Mapping[str, Any]] = []
    for (device, dtype, head_dim, form, gradient, statistics), by_tokens in orders.items():
        asked = {"device": device, "dtype": names[dtype], "head_dim": head_dim, "form": form}
        asked |= {"gradient": gradient, "statistics": statistics}
        rows += [{**asked, "tokens": tokens, "kernels": [*kernels]} for tokens, kernels in by_tokens.items()]
    return {"versions": versions(), "orders": rows}
