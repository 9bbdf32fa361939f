"""A checkpoint read head by head in one pass over the file, without running the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from qkeel.audit.geometry import Geometry, read_geometry
from qkeel.audit.heads import SiteReport, grams, measure
from qkeel.audit.layouts import FUSED, SEPARATE, SitePlan, Slice, Unknown, recognise
from qkeel.audit.outliers import outliers
from qkeel.audit.tensors import Checkpoint, MappedFile, StoredTensor, open_checkpoint
from qkeel.errors import InvalidValueError, UnknownNameError

_CHUNK = 1 << 22  # bytes looked at at once: small enough for a core's cache
_KEEP = 1 << 26  # bytes after which pages of a large tensor are given back

Progress = Callable[[int, int], None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor: dtype as the file names it, Frobenius norm of its finite values (None if not floating), NaN + inf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frobenius: float | None
    non_finite: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What `scan` found: attention sites, what could not be told and why, every tensor."""

    path: str
    n_bytes: int
    sites: tuple[SiteReport, ...]
    unknown: tuple[Unknown, ...]
    tensors: tuple[TensorReport, ...]


def _silent(done: int, total: int) -> None:
    return


def scan(
    path: str | Path, *, flags: Geometry | None = None, on_progress: Progress = _silent, heads: bool = True
) -> Scan:
    """Norms of every tensor and, per layer and head, of W_Q, W_K and W_Qᵀ W_K, and the logits they allow.

    Args:
        path: a .safetensors file, a folder of shards with model.safetensors.index.json, or a Hugging Face folder.
        flags: head counts where config.json does not say, or to say it over config.json.
        on_progress: called with bytes done and bytes in all.
        heads: False for the table of tensors alone; then a checkpoint without known attention is no error.

    Memory is that of one head and of the Gram matrices of one layer; pages of the file are given back as it goes.

    Raises: RefusedError for pickles; DataError for missing, truncated or damaged files; UnknownNameError if nothing
        in it is known as attention; InvalidValueError for head counts that cannot be.
    """
    given = flags or Geometry()
    for name in ("n_heads", "n_kv_heads", "head_dim"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InvalidValueError(f"expected {name} to be at least 1, got {value}")
    checkpoint = open_checkpoint(path)
    found = recognise(checkpoint.tensors, lambda name: read_geometry(checkpoint.config, name, given)) if heads else []
    if heads and not found:
        raise _nothing_known(checkpoint)
    plans = [f for f in found if isinstance(f, SitePlan)]
    pass_ = _Pass(checkpoint, plans, given, on_progress)
    tensors = pass_.run()
    sites = [pass_.sites[plan.name] for plan in plans]
    marked = [dataclasses.replace(site, outlier=marks) for site, marks in zip(sites, outliers(sites))]
    return Scan(
        path=str(path),
        n_bytes=checkpoint.size,
        sites=tuple(marked),
        unknown=tuple(f for f in found if isinstance(f, Unknown)),
        tensors=tuple(tensors),
    )


def _nothing_known(checkpoint: Checkpoint) -> UnknownNameError:
    matrices = [name for name, t in checkpoint.tensors.items() if len(t.shape) > 1][:6]
    known = ", ".join([f"{q}/{k}" for q, k in SEPARATE] + sorted(FUSED))
    return UnknownNameError(
        f"{checkpoint.path} holds no attention weights under a known name; expected one of {known}; "
        f"found {', '.join(matrices) or 'no matrices'}, … Rename them, or list the tensors alone with --tensors-only"
    )


@final
class _Pass:
    """One walk over the tensors in the order they lie on disk."""

    def __init__(self, checkpoint: Checkpoint, plans: Iterable[SitePlan], flags: Geometry, progress: Progress) -> None:
        self.checkpoint, self.flags, self.progress = checkpoint, flags, progress
        self.sites: dict[str, SiteReport] = {}
        self.waiting: dict[str, list[SitePlan]] = {}
        self.grams: dict[Slice, Tensor] = {}
        self.small: dict[Path, MappedFile] = {}
        for plan in plans:
            for tensor in {s.tensor for s in plan.slices()}:
                self.waiting.setdefault(tensor, []).append(plan)

    def run(self) -> list[TensorReport]:
        """Look at every tensor once; `sites` fills as the last weight of each is seen."""
        done, total = 0, self.checkpoint.size
        reports = []
        file: MappedFile | None = None
        for tensor in self.checkpoint.tensors.values():
            if file is None or file.file != tensor.file:
                file = MappedFile(tensor.file)
            reports.append(self._look(file, tensor))
            file.release(tensor.begin, tensor.end)
            done += tensor.end - tensor.begin
            self.progress(done, total)
        return reports

    def _look(self, file: MappedFile, tensor: StoredTensor) -> TensorReport:
        norm, bad = _norm(file, tensor) if tensor.floating else (None, 0)
        for plan in self.waiting.pop(tensor.name, []):
            weight = file.view(tensor)
            for part in plan.slices():
                if part.tensor == tensor.name:
                    self.grams[part] = grams(weight, part)
            if all(part in self.grams for part in plan.slices()):
                geometry = read_geometry(self.checkpoint.config, plan.query.tensor, self.flags)
                self.sites[plan.name] = measure(plan, self.grams, self._load, geometry)
                for part in plan.slices():
                    self.grams.pop(part, None)
        return TensorReport(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, frobenius=norm, non_finite=bad)

    def _load(self, name: str) -> Tensor | None:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            return None
        if tensor.file not in self.small:
            self.small = {tensor.file: MappedFile(tensor.file)}
        return self.small[tensor.file].view(tensor).clone()


def _norm(file: MappedFile, tensor: StoredTensor) -> tuple[float, int]:
    """Frobenius norm of the finite values, and how many are not finite."""
    flat = file.view(tensor).reshape(-1)
    size = flat.element_size()
    total, bad = 0.0, 0
    for start in range(0, flat.numel(), _CHUNK // size):
        part = flat[start : start + _CHUNK // size]
        square = float(torch.linalg.vector_norm(part.float() if size < 4 else part)) ** 2
        if not math.isfinite(square):  # NaN, infinity, or a square beyond float32
            exact = part.double()
            fine = exact.isfinite()
            bad += int((~fine).sum())
            square = float(torch.linalg.vector_norm(torch.where(fine, exact, 0.0))) ** 2
        total += square
        if start * size % _KEEP == 0 and start:
            file.release(tensor.begin, tensor.begin + start * size)
    return math.sqrt(total), bad
