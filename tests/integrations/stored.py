"""What trackers have stored, by step: read from their files by their own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tensorboard_scalars(folder: Path, tag: str) -> dict[int, float]:
    """A scalar of the event files somewhere under a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(place))
        events.Reload()
        if tag in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(tag)}
    return found


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The history rows of the offline run under a folder."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.rglob("*.wandb")
    store, rows = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
