"""The file heads.f32 (and eval_heads.f32): an append-only float32 file, one fixed-size record per logged step; in
heads.crc32 the CRC-32 of each record as a little-endian uint32."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import numpy as np

from qkeel.errors import DamagedFileError, ShapeError
from qkeel.records import disk
from qkeel.records.file_fields import check_fields
from qkeel.records.files import JSONObject, read_json, write_json
from qkeel.records.names_and_units import head_field
from qkeel.records.regular_files import read_regular, refuse_irregular

_MOST_NUMBERS = 1 << 24  # of one step
_MOST_BYTES = 1 << 35
_SUMS = "checksums"  # the field of heads.json that names the file of them
_MEND = "Restore the files, or delete the directory and run again."
_FOLDS = {"max": np.fmax.reduce, "min": np.fmin.reduce}


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Per-head numbers of a run. `values[name]` has shape [n_steps, n_layers, n_heads]; `layers` names, if known."""

    steps: np.ndarray  #: [n_steps], optimizer steps done
    values: dict[str, np.ndarray]
    layers: tuple[str, ...] = ()


class HeadRecorder:
    """Appends records of `1 + n_fields·n_layers·n_heads` float32 to `directory`/`name`.f32: the step, then the fields
    in order; `layers` are the names of the layers, () if unknown.
    """

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
        place = directory / f"{name}.json"
        about = {"fields": list(fields), "n_layers": n_layers, "n_heads": n_heads, "dtype": "<f4", "leading": "step"}
        about |= {"layers": list(layers)} if layers else {}
        there = refuse_irregular(place) is not None
        old = _description(directory, name) if there else {**about, _SUMS: f"{name}.crc32"}
        if {key: value for key, value in old.items() if key != _SUMS} != about:
            raise DamagedFileError(f"{place} describes other records. {_MEND}")
        if not there:
            write_json(place, old)
        self._sums = directory / f"{name}.crc32" if _SUMS in old else None  # an earlier version wrote none

    def append(self, step: int, values: np.ndarray) -> None:
        """Append one record; values [n_fields, n_layers, n_heads]."""
        if values.shape != self.shape:
            raise ShapeError(f"expected values of shape {self.shape}, got {values.shape}")
        record = np.concatenate([[step], values.reshape(-1)]).astype("<f4").tobytes()
        disk.append(self.path, record)
        if self._sums is not None:
            disk.append(self._sums, zlib.crc32(record).to_bytes(4, "little"))


def read_heads(directory: Path, name: str = "heads", sealed: bool = False, sure: int = 0) -> Heads:
    """Read heads.json, heads.f32 and heads.crc32; a torn last record, or one without a checksum yet, is dropped.

    >>> HeadRecorder(Path("."), ("entropy",), 1, 2).append(5, np.ones((1, 1, 2)))
    >>> read_heads(Path(".")).steps
    array([5])

    Args:
        directory, name: where, and "heads" or "eval_heads".
        sealed: whether heads.json must have a checksum.
        sure: bytes of heads.f32 that are known to have been written.

    Raises: DamagedFileError if a record does not fit its checksum, or heads.json describes another file.
    """
    about, path = _description(directory, name, sealed), directory / f"{name}.f32"
    rows = _records(about, path, sure)
    steps = rows[:, 0]
    if not (np.isfinite(steps) & (steps >= 0)).all():
        raise DamagedFileError(
            f"{path} has a step that is no whole number: {name}.json does not describe it, or it was damaged. " + _MEND
        )
    fields = about["fields"]
    body = rows[:, 1:].reshape(len(rows), len(fields), about["n_layers"], about["n_heads"])
    values = {f: body[:, i] for i, f in enumerate(fields)}
    return Heads(steps=steps.astype(np.int64), values=values, layers=tuple(about.get("layers") or ()))


def _records(about: JSONObject, path: Path, sure: int) -> np.ndarray:
    """The sound records [n, 1 + numbers]."""
    width = _width(about)
    flat = np.frombuffer(_stored(path, 4 * width), dtype="<f4")
    rows = flat[: flat.size // width * width].reshape(-1, width)
    if _SUMS not in about:
        return rows
    place = path.with_suffix(".crc32")
    sums = np.frombuffer(_stored(place, 4), dtype="<u4")
    written = sure // (4 * width)
    if len(sums) < max(written, 1 if len(rows) > 1 else 0):
        raise DamagedFileError(f"{place} has {len(sums)} checksums of {len(rows)} records: it was damaged. {_MEND}")
    wrong = [i for i, row in enumerate(rows[: len(sums)]) if zlib.crc32(row.tobytes()) != sums[i]]
    if wrong and wrong[0] < max(written, min(len(rows), len(sums)) - 1):
        raise DamagedFileError(
            f"{path}, record {wrong[0] + 1} does not fit its checksum in {place.name}: it was damaged. {_MEND}"
        )
    return rows[: wrong[0] if wrong else len(sums)]


def _width(about: JSONObject) -> int:
    """The numbers of a record."""
    return 1 + len(about["fields"]) * about["n_layers"] * about["n_heads"]


def _stored(path: Path, least: int) -> bytes:
    """The whole numbers of the file; none where it is missing or has less than one record."""
    size = refuse_irregular(path) or 0
    raw = read_regular(path, most=_MOST_BYTES) if size >= least else b""
    return raw[: len(raw) // 4 * 4]


def _description(directory: Path, name: str, sealed: bool = False) -> JSONObject:
    """The fields, layers and heads of a file, as its .json says."""
    place = directory / f"{name}.json"
    about = check_fields(read_json(place, sealed), "heads.json", str(place))
    names, layers = about["fields"], about.get("layers") or ()
    if len(names) * about["n_layers"] * about["n_heads"] > _MOST_NUMBERS or len(set(names)) < len(names):
        fault = f"it names a field twice, or more than {_MOST_NUMBERS:,} numbers of a step"
        raise DamagedFileError(f"{place} does not describe {name}.f32: {fault}. {_MEND}")
    if layers and len(layers) != about["n_layers"]:
        fault = f"{len(layers)} names of layers; expected {about['n_layers']}, as its n_layers"
        raise DamagedFileError(f"{place} has {fault}. {_MEND}")
    return about


def cut_heads(directory: Path, last_step: int) -> None:
    """Drop the records after `last_step` (and a torn tail) so that a resumed run appends where it stood."""
    path = directory / "heads.f32"
    if refuse_irregular(path) is None or refuse_irregular(directory / "heads.json") is None:
        return
    about = _description(directory, "heads")
    keep = int(np.searchsorted(read_heads(directory).steps, last_step, side="right"))
    disk.cut(path, keep * _width(about) * 4)
    if _SUMS in about:
        disk.cut(path.with_suffix(".crc32"), keep * 4)


def fold_heads(name: str, values: np.ndarray) -> np.ndarray:
    """The largest, smallest or mean head of [... heads], by records.HEAD_FIELDS, as [...]; NaN is not measured.

    >>> float(fold_heads("max_logit", np.array([1.0, np.nan, 3.0])))
    3.0
    """
    field = head_field(name)
    if field is not None and field.fold != "mean":
        return _FOLDS[field.fold](values, axis=-1, initial=np.nan)
    measured = ~np.isnan(values)
    counts = measured.sum(-1)
    return np.where(counts, np.where(measured, values, 0).sum(-1) / np.maximum(counts, 1), np.nan)
