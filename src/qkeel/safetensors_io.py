"""Reads safetensors files through a memory map, tensor by tensor; pickles are refused and never loaded."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkeel.errors import DataError, RefusedError, reported
from qkeel.records.disk import refuse_path

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# A zip file, as torch.save writes it, and pickles of the protocols 2 to 5.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# Bytes that are read through one memory map.
REMAP = 1 << 25

# Dtype names of the format -> dtypes of torch. Tensors of other dtypes are listed without their values.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a file, with its dtype as named there."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def floating(self) -> bool:
        """Returns whether the tensor contains floating-point numbers that torch can read."""
        return self.dtype in DTYPES and DTYPES[self.dtype].is_floating_point


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint in the order in which they are stored on disk, and its config.json (empty if there is
    none)."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    size: int  #: size of all files in bytes


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the headers of a safetensors file, of a folder with shards, or of a Hugging Face folder.

    Raises: RefusedError for pickles; DataError for files that are missing, truncated or damaged.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path} does not exist; expected a .safetensors file or a folder that contains one"
        )
    # The index of a sharded checkpoint: transformers' or diffusers'.
    indices = [path / INDEX, *sorted(path.glob("*.safetensors.index.json"))]
    index = next((file for file in indices if file.exists()), None)
    weight_map = {} if index is None else _weight_map(index)
    files = [path / name for name in sorted({*weight_map.values()})] or _files(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if index is not None and not file.exists():
            raise DataError(
                f"{path} lacks {file.name}, which {index.name} names; download what is missing"
            )
        for tensor in _header(file):
            if tensor.name in tensors:
                first_file = tensors[tensor.name].file.name
                raise DataError(
                    f"tensor {tensor.name} is in both {first_file} and {file.name}; scan one file at a time"
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise DataError(
            f"{path} does not contain any tensors; expected the weights of a model"
        )
    if index is not None and (lost := [x for x in weight_map if x not in tensors]):
        ellipsis = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise DataError(
            f"{index.name} lists {', '.join(lost[:3])}{ellipsis}, but no file in {path} has it; download it again"
        )
    size = sum(file.stat().st_size for file in files)
    return Checkpoint(path=path, tensors=tensors, config=_config(path), size=size)


def _files(path: Path) -> list[Path]:
    """The files of a checkpoint without an index."""
    if not path.is_dir():
        return [path]
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    if files := sorted(path.glob("*.safetensors")):
        return files
    for file in sorted(path.iterdir()):
        if file.suffix in PICKLES:
            raise _refusal(file)
    if parts := sorted({str(file.parent) for file in path.glob("*/*.safetensors")}):
        raise DataError(
            f"{path} has its weights in parts, as a pipeline of diffusers; give one: {', '.join(parts)}"
        )
    raise DataError(
        f"{path} does not contain a .safetensors file; expected one, or shards with {INDEX}"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """The mapping from tensor names to file names in the index of a sharded checkpoint."""
    weights = _json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(
        isinstance(v, str) for v in weights.values()
    ):
        raise DataError(
            f"{index} has no weight_map from names to files, so it is damaged; download it again"
        )
    for name in set(weights.values()):
        refuse_path(name, f"weight_map of {index}", DataError)
    return weights


def _refusal(file: Path) -> RefusedError:
    return RefusedError(
        f"{file} is a pickle, and loading a pickle can run any code, so qkeel refuses pickles. If you trust the file, "
        "convert it: "
        f'from safetensors.torch import save_file; save_file(torch.load("{file.name}", weights_only=True), '
        '"model.safetensors"), or load the model and call save_pretrained'
    )


def _header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order in which they are stored."""
    if file.suffix in PICKLES and file.suffix != ".ckpt":
        raise _refusal(file)
    with reported(f"cannot read {file}", error=DataError), open(file, "rb") as opened:
        start = opened.read(9)
    # The length of a valid header may begin like a pickle (640 is 80 02), but it is followed by a brace.
    if start.startswith(_PICKLE_STARTS) and start[8:] != b"{":
        raise _refusal(file)
    try:
        # This checks the header and that the tensors fill the file.
        with safe_open(file, framework="pt") as stored:
            names = stored.offset_keys()
        # `get_slice` copies the list of all tensors for each one.
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return [
            StoredTensor(
                name=name,
                file=file,
                dtype=header[name]["dtype"],
                shape=tuple(header[name]["shape"]),
            )
            for name in names
        ]
    except (SafetensorError, ValueError, OSError) as failure:
        raise DataError(
            f"{file} is truncated or not a safetensors file: {failure}; download or save it again"
        ) from failure


def _json(file: Path) -> dict[str, Any]:
    with reported(f"cannot read {file}", error=DataError):
        text = file.read_bytes()
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
    # Brackets without end make the parser run out of stack instead.
    except (ValueError, RecursionError) as failure:
        raise DataError(
            f"{file} is not a complete JSON object ({failure}); restore it, or scan the weight file by itself"
        ) from failure
    return value


def _config(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    # A qkeel run stores its weights in last/ and its configuration next to last/.
    folders = [folder, folder.parent] if folder.name == "last" else [folder]
    for parent in folders:
        if (parent / "config.json").exists():
            return _json(parent / "config.json")
    return {}


@final
class TensorReader:
    """Reads tensors of safetensors files through a memory map, which is renewed after `REMAP` bytes so that the pages
    that were read do not stay in memory."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._stored: Any = None
        self._bytes = 0

    def _open(self, tensor: StoredTensor, count: int) -> Any:
        if self._file != tensor.file or self._bytes > REMAP:
            self._stored = safe_open(tensor.file, framework="pt")
            self._file, self._bytes = tensor.file, 0
        # Pages that were read stay in memory as long as their map does, so it is renewed from time to time.
        self._bytes += count * DTYPES[tensor.dtype].itemsize
        return self._stored

    def read(self, tensor: StoredTensor) -> Tensor:
        """Returns the tensor, a view of the file."""
        return self._open(tensor, math.prod(tensor.shape)).get_tensor(tensor.name)

    def parts(self, tensor: StoredTensor) -> Iterator[Tensor]:
        """Yields the tensor's numbers in parts of at most about `REMAP` bytes."""
        size = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        # Most tensors of a file with many are small, and a slice takes time in proportion to their number.
        if size <= REMAP:
            yield self.read(tensor).flatten()
            return
        row = math.prod(tensor.shape[1:])
        rows = max(1, REMAP // (row * DTYPES[tensor.dtype].itemsize))
        for start in range(0, tensor.shape[0], rows):
            stored = self._open(tensor, rows * row)
            yield stored.get_slice(tensor.name)[start : start + rows].flatten()
