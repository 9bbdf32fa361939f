"""The evidence that advice rests on, and in which settings a configuration lies outside of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from qkeel.lab.config import RunConfig
from qkeel.options import Json
from qkeel.records import read_json

EVIDENCE = Path(__file__).with_name("evidence.json")  # written by `python -m predictions.drift_law`
# Settings that decide nothing of what is learned, or nothing but for settings that were not measured either.
_NO_MATTER = ("seed", "remedy", "device", "compile", "threads", "nudge", "accumulate", "log_every", "eval_every")
_NO_MATTER += ("eval_sequences", "probe_sequences", "checkpoint_every", "model.n_heads", "model.base_width")
_NO_MATTER += ("model.base_head_dim", "data.needle_keys", "data.pairs")
_WORDS = {"model.d_model": "width", "model.n_layers": "blocks", "data.batch": "batch", "optim.name": "optimizer"}
_WORDS |= {"optim.lr": "learning rate", "model.head_dim": "size of a head", "data.source": "text"}


@functools.cache
def evidence() -> Json:
    """Returns the table of what was measured: the law, the gain and cost of each remedy, and the rows behind them."""
    return read_json(EVIDENCE)


def settings(config: RunConfig) -> Json:
    """Returns the settings of a run that decide what it learns, by name; sections stand before a point."""
    model = config.model
    values = config.to_dict()
    del values["images"]
    values["model"]["head_dim"] = model.head_dim or model.d_model // model.n_heads
    values["model"]["n_kv_heads"] = model.n_kv_heads or model.n_heads
    values["model"]["kv_share"] = values["model"].pop("n_kv_heads") / model.n_heads
    values["data"]["vocab_size"] = config.data.vocab_size or 256
    values["dtype"] = config.dtype.replace("auto", "fp32")
    flat = {name: value for name, value in values.items() if not isinstance(value, dict)}
    for section, table in values.items():
        if isinstance(table, dict):
            flat |= {f"{section}.{name}": value for name, value in table.items()}
    return {name: value for name, value in flat.items() if name not in _NO_MATTER}


def outside(config: RunConfig, boxes: Sequence[Json]) -> tuple[str, ...]:
    """Returns a sentence for each setting that lies outside of what was measured: of the box that is left in fewest.

    A box has by name a list: two numbers are lowest and highest, texts are those that were measured. What it does not
    name was measured at the value of the configuration that all studies start from.
    """
    base, own = settings(RunConfig()), settings(config)
    found = []
    for box in boxes:
        spans = {name: box.get(name, [value]) for name, value in base.items()}
        found.append(
            tuple(_sentence(name, own[name], span) for name, span in spans.items() if not _in(own[name], span))
        )
    return min(reversed(found), key=len)


def _in(value: float, span: Sequence[float]) -> bool:
    return span[0] <= value <= span[1] if _is_range(span) else value in span


def _is_range(span: Sequence[object]) -> bool:
    return len(span) == 2 and not isinstance(span[0], str)


def _sentence(name: str, value: object, span: Sequence[object]) -> str:
    said = f"{span[0]:g} to {span[1]:g}" if _is_range(span) else " or ".join(map(str, span))
    return f"{_WORDS.get(name, name.rpartition('.')[2].replace('_', ' '))} is {value}; measured: {said}"
