"""The one checkpoint of a run: a safetensors file with its SHA-256, replaced whole. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.handle import under
from qkeel.lab.training.run_state import RunState
from qkeel.records import RunDirectory, write_bytes
from qkeel.records.disk import make_directory
from qkeel.records.file_fields import check_parts
from qkeel.records.regular_files import read_regular
from qkeel.records.rundir import Sizes
from qkeel.records.safetensors_header import parse_header
from qkeel.records.strict_json import json_value

_DIGEST = "sha256"  # of the file with its own digits set to 0, in the header's metadata
_BLANK = "0" * 64
# What an optimizer keeps of a parameter: AdamW, SGD, Muon.
_STATES = (frozenset(["step", "exp_avg", "exp_avg_sq"]), frozenset(["momentum_buffer"]), frozenset(["momentum"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: optimizer steps done, CPU seconds spent, bytes of each file of records then (None in the
    checkpoints of earlier versions)."""

    step: int = 0
    cpu_seconds: float = 0.0
    sizes: Sizes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it is on disk."""

    progress: Progress
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, object]


def save(directory: RunDirectory, run: RunState, progress: Progress) -> None:
    """Replaces the checkpoint by one rename."""
    tensors: dict[str, Tensor] = {f"model.{name}": t for name, t in _model_tensors(run.model).items()}
    numbers: dict[str, object] = {}
    for index, state in run.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    tensors.update({f"remedy.{key}": value for key, value in run.handle.state().items()})
    if run.loss_scale is not None:
        tensors.update({f"loss_scale.{key}": value for key, value in run.loss_scale.state().items()})
    tensors.update(_random_state())
    about = {**dataclasses.asdict(progress), "optimizer": numbers}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    make_directory(directory.checkpoint.parent, parents=False)
    data = bytearray(safetensors.torch.save(plain, {"qkeel": json.dumps(about), _DIGEST: _BLANK}))
    at = _digits(data, _BLANK)
    data[at : at + len(_BLANK)] = hashlib.sha256(data).hexdigest().encode()
    write_bytes(directory.checkpoint, data)


def load(directory: RunDirectory, run: RunState) -> Progress:
    """Puts the checkpoint's state into the run; returns how far that is.

    Raises: DamagedFileError if the file is not as it was written, RunDirectoryError if it belongs to another model.
    """
    found = read_checkpoint(directory)
    restore(directory, run, found)
    return found.progress


def read_checkpoint(directory: RunDirectory) -> Checkpoint:
    """The checkpoint of a run, its digest and the types of its fields checked.

    Raises: DamagedFileError if the file is not as it was written.
    """
    path = directory.checkpoint
    data = read_regular(path, most=None)
    length = int.from_bytes(data[:8], "little")
    metadata = parse_header(data[8 : 8 + length], path, len(data), DamagedFileError).metadata
    try:
        _check_digest(data, metadata.get(_DIGEST), directory.sealed)
        about = check_parts(json_value(metadata["qkeel"]), "state.safetensors", str(path))
        progress = Progress(about["step"], float(about["cpu_seconds"]), about.get("sizes"))
        return Checkpoint(progress, safetensors.torch.load(data), about["optimizer"])
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise DamagedFileError(f"{path} is not as it was written ({error}): it was damaged.") from error


def restore(directory: RunDirectory, run: RunState, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's state into the run.

    Raises: RunDirectoryError if it belongs to another model; nothing on disk is changed.
    """
    tensors = checkpoint.tensors
    try:
        _load_model(run.model, under("model.", tensors))
        _load_optimizer(run.optimizer, under("optimizer.", tensors), checkpoint.numbers)
        run.handle.load(under("remedy.", tensors))
        if run.loss_scale is not None:
            run.loss_scale.load(under("loss_scale.", tensors))
        _set_random_state(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunDirectoryError(
            f"{directory.checkpoint} is not a whole checkpoint of this run ({error}). It was not written by this "
            f"version of qkeel; delete {directory.path} to run again, or restore the file."
        ) from error


def _check_digest(data: bytes, digest: str | None, needed: bool) -> None:
    if digest is None and not needed:  # an earlier version wrote none
        return
    at = _digits(data, digest or "")
    known = hashlib.sha256(data[:at])
    known.update(_BLANK.encode())
    known.update(memoryview(data)[at + len(_BLANK) :])
    if known.hexdigest() != digest:
        raise ValueError("it does not fit its digest")


def _digits(data: bytes | bytearray, digest: str) -> int:
    """The byte at which the digits of the digest begin, as safetensors writes them.

    Raises: ValueError if they are not there.
    """
    field = f'"{_DIGEST}":"'.encode()
    return data.index(field + digest.encode() + b'"') + len(field)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once where two names share one tensor."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


@torch.no_grad()
def _load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = _model_tensors(model)
    if own.keys() != tensors.keys():
        raise ValueError(f"other tensors: {', '.join(sorted(own.keys() ^ tensors.keys()))}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
        if own[name].dtype != tensor.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {own[name].dtype}")
        own[name].copy_(tensor)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: Mapping[str, object]
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, object]] = {}
    for name, value in [*tensors.items(), *numbers.items()]:
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"state {name} of no parameter; there are {len(parameters)}")
        if not isinstance(value, (Tensor, int, float)):
            raise ValueError(f"state {name} is {value!r}, expected a number")
        state.setdefault(int(index), {})[key] = value
    for index, entries in state.items():
        _check_state(index, entries, parameters[index])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_state(index: int, entries: Mapping[str, object], parameter: Tensor) -> None:
    """Raises unless these are an optimizer's numbers of one parameter."""
    if frozenset(entries) not in _STATES:
        raise ValueError(f"parameter {index} has the state {', '.join(sorted(entries))}, which no optimizer here keeps")
    for key, value in entries.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if shape != (() if key == "step" else tuple(parameter.shape)):
            raise ValueError(f"state {index}.{key} has shape {shape}, its parameter {tuple(parameter.shape)}")
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise ValueError(f"state {index}.{key} is {value.dtype}, expected floating-point numbers")


def _random_state() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
