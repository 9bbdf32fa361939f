"""What trackers have stored, by step: read from their files by their own readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tensorboard_scalars(folder: Path, tag: str) -> dict[int, float]:
    """A scalar of the event files somewhere under a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for place in sorted(
        {file.parent for file in folder.rglob("events.out.tfevents.*")}
    ):
        events = EventAccumulator(str(place))
        events.Reload()
        if tag in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(tag)}
    return found


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The history rows of the offline run under a folder."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    rows = []
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, each record in one or more pieces with headers."""
    place, whole = 7, b""  # after the file's own header
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = (
            int.from_bytes(data[place + 4 : place + 6], "little"),
            data[place + 6],
        )
        if kind == 0:
            place += left
            continue
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a record of one piece, or the last of several
            yield whole
            whole = b""
