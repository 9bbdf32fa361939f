"""The file heads.f32 (and eval_heads.f32): an append-only float32 file, one fixed-size record per logged step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from qkeel.errors import RunDirectoryError, ShapeError
from qkeel.records.files import read_json, write_json
from qkeel.records.names_and_units import head_field

_FOLDS = {"max": np.fmax.reduce, "min": np.fmin.reduce}


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Per-head numbers of a run. `values[name]` has shape [n_steps, n_layers, n_heads]; `layers` names, if known."""

    steps: np.ndarray
    values: dict[str, np.ndarray]
    layers: tuple[str, ...] = ()


class HeadRecorder:
    """Appends records of `1 + n_fields·n_layers·n_heads` float32: the step, then the fields in order."""

    def __init__(
        self,
        directory: Path,
        fields: tuple[str, ...],
        n_layers: int,
        n_heads: int,
        *,
        layers: tuple[str, ...] = (),
        name: str = "heads",
    ) -> None:
        self.path = directory / f"{name}.f32"
        self.shape = (len(fields), n_layers, n_heads)
        about = {"fields": list(fields), "n_layers": n_layers, "n_heads": n_heads, "dtype": "<f4", "leading": "step"}
        write_json(directory / f"{name}.json", {**about, "layers": list(layers)} if layers else about)

    def append(self, step: int, values: np.ndarray) -> None:
        """Append one record; values [n_fields, n_layers, n_heads]."""
        if values.shape != self.shape:
            raise ShapeError(f"expected values of shape {self.shape}, got {values.shape}")
        record = np.concatenate([[step], values.reshape(-1)]).astype("<f4")
        try:
            with open(self.path, "ab") as file:
                file.write(record.tobytes())
        except OSError as error:
            raise RunDirectoryError(f"cannot append to {self.path}: {error.strerror or error}") from error


def read_heads(directory: Path, name: str = "heads") -> Heads:
    """Read heads.json and heads.f32; a torn last record is dropped.

    >>> HeadRecorder(Path("."), ("entropy",), 1, 2).append(5, np.ones((1, 1, 2)))
    >>> read_heads(Path(".")).steps
    array([5])

    Raises: RunDirectoryError if heads.json is damaged or describes another file.
    """
    about, path = read_json(directory / f"{name}.json"), directory / f"{name}.f32"
    try:
        fields, layers, heads = about["fields"], about["n_layers"], about["n_heads"]
        width = 1 + len(fields) * layers * heads
        flat = np.fromfile(path, dtype="<f4") if path.exists() else np.zeros(0, "<f4")
        rows = flat[: flat.size // width * width].reshape(-1, width)
        body = rows[:, 1:].reshape(-1, len(fields), layers, heads)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory / name}.json does not describe {name}.f32 ({error!r}); expected fields, n_layers and n_heads. "
            "Restore the file, leave this directory out, or delete it to run again."
        ) from error
    values = {f: body[:, i] for i, f in enumerate(fields)}
    return Heads(steps=rows[:, 0].astype(np.int64), values=values, layers=tuple(about.get("layers") or ()))


def cut_heads(directory: Path, last_step: int) -> None:
    """Drop the records after `last_step` (and a torn tail) so that a resumed run appends where it stood."""
    path = directory / "heads.f32"
    if not path.exists() or not (directory / "heads.json").exists():
        return
    about = read_json(directory / "heads.json")
    width = 1 + len(about["fields"]) * about["n_layers"] * about["n_heads"]
    keep = int(np.searchsorted(read_heads(directory).steps, last_step, side="right"))
    with open(path, "r+b") as file:
        file.truncate(keep * width * 4)


def fold_heads(name: str, values: np.ndarray) -> np.ndarray:
    """[... heads] -> [...]: the largest, smallest or mean head by records.HEAD_FIELDS; NaN is not measured.

    >>> float(fold_heads("max_logit", np.array([1.0, np.nan, 3.0])))
    3.0
    """
    field = head_field(name)
    if field is not None and field.fold != "mean":
        return _FOLDS[field.fold](values, axis=-1, initial=np.nan)
    measured = ~np.isnan(values)
    counts = measured.sum(-1)
    return np.where(counts, np.where(measured, values, 0).sum(-1) / np.maximum(counts, 1), np.nan)
