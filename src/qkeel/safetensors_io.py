"""Reads safetensors files through a memory map, tensor by tensor; pickles are refused and never loaded."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkeel.errors import DataError, RefusedError, reported
from qkeel.records.disk import refuse_path

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_AHEAD = 1 << 26  # bytes that the system is asked to read ahead

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
    """The location of a tensor: its file, its dtype as named in the file, its shape, and its first and last byte
    (exclusive)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

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

    @property
    def size(self) -> int:
        """The total size of all tensors in bytes."""
        return sum(t.end - t.begin for t in self.tensors.values())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the headers of a safetensors file, of a folder with shards, or of a Hugging Face folder.

    Raises: RefusedError for pickles; DataError for files that are missing, truncated or damaged.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a .safetensors file or a folder that contains one")
    files = _files(path) if path.is_dir() else [path]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise DataError(f"tensor {tensor.name} is in both {other} and {file.name}; scan one file at a time")
            tensors[tensor.name] = tensor
    if not tensors:
        raise DataError(f"{path} does not contain any tensors; expected the weights of a model")
    lost = [name for name in _weight_map(path) if name not in tensors] if (path / INDEX).exists() else []
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise DataError(f"{INDEX} lists {', '.join(lost[:3])}{more}, but no file in {path} has it; download it again")
    return Checkpoint(path=path, tensors=tensors, config=_config(path))


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(_weight_map(folder).values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names; download what is missing")
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise _refusal(pickles[0])
    raise DataError(f"{folder} does not contain a .safetensors file; expected one, or shards with {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    """The mapping from tensor names to file names in the index of a sharded checkpoint."""
    weights = _json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise DataError(f"{folder / INDEX} has no weight_map from names to files, so it is damaged; download it again")
    for name in set(weights.values()):
        refuse_path(name, f"weight_map of {folder / INDEX}", DataError)
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
        length = int.from_bytes(start[:8], "little")
        # The length of a valid header may begin like a pickle (640 is 80 02), but it is followed by a brace.
        if start.startswith(_PICKLE_STARTS) and start[8:] != b"{":
            raise _refusal(file)
        try:
            with safe_open(file, framework="numpy"):  # checks the header and that the tensors fill the file
                opened.seek(8)
                table = json.loads(opened.read(length))
        except (SafetensorError, ValueError) as failure:
            raise DataError(
                f"{file} is truncated or not a safetensors file: {failure}; download or save it again"
            ) from failure
    tensors = [
        StoredTensor(
            name=name,
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            begin=8 + length + entry["data_offsets"][0],
            end=8 + length + entry["data_offsets"][1],
        )
        for name, entry in table.items()
        if name != "__metadata__"
    ]
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end))


def _json(file: Path) -> dict[str, Any]:
    with reported(f"cannot read {file}", error=DataError):
        text = file.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise DataError(f"{file} is not complete JSON ({failure}); restore it") from failure
    if not isinstance(value, dict):
        raise DataError(f"{file} is not a JSON object; restore it or scan the weight file by itself")
    return value


def _config(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    # A qkeel run stores its weights in last/ and its configuration next to last/.
    places = [folder / "config.json", *([folder.parent / "config.json"] if folder.name == "last" else [])]
    file = next((file for file in places if file.exists()), None)
    return {} if file is None else _json(file)


@final
class MappedFile:
    """A memory-mapped file of which only the pages in use are kept in memory; `release` frees pages."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as stream:
            # Copy on write, because torch refuses read-only memory; nothing is written here.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._map.madvise(mmap.MADV_SEQUENTIAL)
        self._asked = 0

    def view(self, tensor: StoredTensor) -> Tensor:
        """Returns the tensor as a view of the file, which is valid even if its pages were released before."""
        dtype = DTYPES[tensor.dtype]
        count = math.prod(tensor.shape)
        if count == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        if tensor.begin % dtype.itemsize:  # an old file without padding: copy
            return torch.frombuffer(bytearray(self._map[tensor.begin : tensor.end]), dtype=dtype).view(tensor.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=tensor.begin).view(tensor.shape)

    def expect(self, begin: int, end: int) -> None:
        """Asks the system to start reading the bytes [begin, end), at most `_AHEAD` of them, and `_AHEAD` bytes after
        them."""
        first = max(begin - begin % mmap.PAGESIZE, self._asked)
        last = min(min(end, begin + _AHEAD) + _AHEAD, len(self._map))
        if last > first:
            self._map.madvise(mmap.MADV_WILLNEED, first, last - first)
            self._asked = last - last % mmap.PAGESIZE

    def release(self, begin: int, end: int) -> None:
        """Frees the pages of the bytes [begin, end); they are read from the file if needed again."""
        first = begin - begin % mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
