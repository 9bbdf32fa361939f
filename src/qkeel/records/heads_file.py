"""The file heads.f32 (and eval_heads.f32): an append-only float32 file, one fixed-size record per logged step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from qkeel.errors import RunDirectoryError, ShapeError
from qkeel.records.file_fields import check_fields
from qkeel.records.files import JSONObject, read_json, write_json
from qkeel.records.names_and_units import head_field
from qkeel.records.regular_files import read_regular, refuse_irregular

_MOST_NUMBERS = 1 << 24  # of one step
_MOST_BYTES = 1 << 35
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
        refuse_irregular(self.path)
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
    about, path = _description(directory, name), directory / f"{name}.f32"
    fields, layers, heads = about["fields"], about["n_layers"], about["n_heads"]
    width = 1 + len(fields) * layers * heads
    flat = np.frombuffer(_stored(path, 4 * width), dtype="<f4")
    rows = flat[: flat.size // width * width].reshape(-1, width)
    steps = rows[:, 0]
    if not (np.isfinite(steps) & (steps >= 0)).all():
        raise RunDirectoryError(
            f"{path} has a step that is no whole number: {name}.json does not describe it, or it was damaged. Restore "
            "the files, or delete the directory and run again."
        )
    body = rows[:, 1:].reshape(len(rows), len(fields), layers, heads)
    values = {f: body[:, i] for i, f in enumerate(fields)}
    return Heads(steps=steps.astype(np.int64), values=values, layers=tuple(about.get("layers") or ()))


def _stored(path: Path, least: int) -> bytes:
    """The whole numbers of the file; none where it is missing or has less than one record."""
    size = refuse_irregular(path) or 0
    raw = read_regular(path, most=_MOST_BYTES) if size >= least else b""
    return raw[: len(raw) // 4 * 4]


def _description(directory: Path, name: str) -> JSONObject:
    """The fields, layers and heads of a file, as its .json says."""
    place = directory / f"{name}.json"
    about = check_fields(read_json(place), "heads.json", str(place))
    names, layers = about["fields"], about.get("layers") or ()
    if len(names) * about["n_layers"] * about["n_heads"] > _MOST_NUMBERS or len(set(names)) < len(names):
        raise RunDirectoryError(
            f"{place} does not describe {name}.f32: it names a field twice, or more than {_MOST_NUMBERS:,} numbers "
            "of a step. Restore the file, or delete the directory and run again."
        )
    if layers and len(layers) != about["n_layers"]:
        raise RunDirectoryError(
            f"{place} has {len(layers)} names of layers; expected {about['n_layers']}, as its n_layers. Restore the "
            "file, or delete the directory and run again."
        )
    return about


def cut_heads(directory: Path, last_step: int) -> None:
    """Drop the records after `last_step` (and a torn tail) so that a resumed run appends where it stood."""
    path = directory / "heads.f32"
    if refuse_irregular(path) is None or not (directory / "heads.json").exists():
        return
    about = _description(directory, "heads")
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
