"""A checkpoint read head by head in one pass over the file, without running the model."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from qkeel.audit.scan.geometry import Geometry, read_geometry
from qkeel.audit.scan.head_bounds import SiteReport, grams, measure, outliers
from qkeel.audit.scan.weight_layouts import FUSED, SEPARATE, SitePlan, Slice, Unknown, recognise
from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.stored import Checkpoint, MappedFile, StoredTensor, open_checkpoint

_CHUNK = 1 << 19  # numbers read at once: small enough for a core's cache
_SOLVERS = max(1, min(4, (os.cpu_count() or 1) // 2))  # threads that find eigenvalues
_PENDING = 2 * _SOLVERS  # attentions whose eigenvalues may wait to be found; bounds memory
_KEEP = 1 << 26  # bytes after which pages of a large tensor are given back

Progress = Callable[[int, int], None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor: dtype as the file names it, Frobenius norm of its finite values (None if not floating), NaN + inf."""

    name: str  #: as in the checkpoint
    dtype: str  #: as in the checkpoint
    shape: tuple[int, ...]  #: as in the checkpoint
    frobenius: float | None  #: ‖·‖_F of the finite values
    non_finite: int  #: how many values are NaN or infinite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result of `scan`: attention sites, what could not be read and why, every tensor."""

    path: str  #: of the checkpoint, as given
    n_bytes: int  #: size of the checkpoint in bytes
    sites: tuple[SiteReport, ...]  #: every attention that was read
    unknown: tuple[Unknown, ...]  #: what looks like attention and was not read
    tensors: tuple[TensorReport, ...]  #: every tensor


def _silent(done: int, total: int) -> None:
    return


def scan(
    path: str | Path, *, flags: Geometry | None = None, on_progress: Progress = _silent, heads: bool = True
) -> Scan:
    """Returns the norms of every tensor and, per layer and head, of W_Q, W_K and W_Qᵀ W_K, and the logits they allow.

    Args:
        path: a .safetensors file, a folder of shards with model.safetensors.index.json, or a Hugging Face folder.
        flags: head counts where config.json has none, or in place of those of config.json.
        on_progress: called with bytes done and bytes in all.
        heads: False for the table of tensors alone; then a checkpoint without known attention is no error.

    Memory is that of one head and of the Gram matrices of a few layers; pages of the file are given back as it goes.

    Raises: RefusedError for pickles; DataError for missing, truncated or damaged files; UnknownNameError if nothing
        in it is known as attention; InvalidValueError for head counts that cannot be.

    >>> import tempfile, torch, safetensors.torch
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.torch.save_file({f"attn.{name}_proj.weight": torch.eye(8) for name in "qk"}, file)
    >>> scan(file, flags=Geometry(n_heads=2)).sites[0].query_spectral
    (1.0, 1.0)
    """
    given = flags or Geometry()
    for name, value in (("n_heads", given.n_heads), ("n_kv_heads", given.n_kv_heads), ("head_dim", given.head_dim)):
        if value is not None and value < 1:
            raise InvalidValueError(f"expected {name} to be at least 1, got {value}; give the number of the model")
    checkpoint = open_checkpoint(path)
    found = recognise(checkpoint.tensors, lambda name: read_geometry(checkpoint.config, name, given)) if heads else []
    if heads and not found:
        raise _nothing_known(checkpoint)
    plans = [f for f in found if isinstance(f, SitePlan)]
    tensors, measured = _Pass(checkpoint, plans, given, on_progress).run()
    sites = [measured[plan.name] for plan in plans]
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
    """One pass over the tensors in the order they lie on disk.

    Reading and Gram matrices in this thread, their eigenvalues in others: LAPACK solves one small matrix after the
    other on one core, while this thread has the next layer to read.
    """

    def __init__(self, checkpoint: Checkpoint, plans: Iterable[SitePlan], flags: Geometry, progress: Progress) -> None:
        self.checkpoint, self.flags, self.progress = checkpoint, flags, progress
        self.sites: dict[str, Future[SiteReport]] = {}
        self.waiting: dict[str, list[SitePlan]] = {}
        self.grams: dict[Slice, Tensor] = {}
        self.small: dict[Path, MappedFile] = {}
        self.lock = threading.Lock()
        for plan in plans:
            for tensor in {s.tensor for s in plan.slices()}:
                self.waiting.setdefault(tensor, []).append(plan)

    def run(self) -> tuple[list[TensorReport], dict[str, SiteReport]]:
        """Reads every tensor once; a site is measured when its last weight is read."""
        done, total = 0, self.checkpoint.size
        reports = []
        file: MappedFile | None = None
        with ThreadPoolExecutor(_SOLVERS, "qkeel-scan") as solvers:
            for tensor in self.checkpoint.tensors.values():
                if file is None or file.file != tensor.file:
                    file = MappedFile(tensor.file)
                reports.append(self._report(file, tensor, solvers))
                file.release(tensor.begin, tensor.end)
                done += tensor.end - tensor.begin
                self.progress(done, total)
            return reports, {name: site.result() for name, site in self.sites.items()}

    def _report(self, file: MappedFile, tensor: StoredTensor, solvers: ThreadPoolExecutor) -> TensorReport:
        file.expect(tensor.begin, tensor.end)
        plans = self.waiting.pop(tensor.name, [])
        weight = file.view(tensor) if plans else None
        for part in {s for plan in plans for s in plan.slices() if s.tensor == tensor.name}:
            assert weight is not None
            self.grams[part] = grams(weight, part)
        norm, bad = self._norm(file, tensor) if tensor.floating else (None, 0)
        for plan in plans:
            if all(part in self.grams for part in plan.slices()):
                own = {part: self.grams.pop(part) for part in plan.slices()}
                self._hand_over(plan, own, solvers)
        return TensorReport(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, frobenius=norm, non_finite=bad)

    def _hand_over(self, plan: SitePlan, own: dict[Slice, Tensor], solvers: ThreadPoolExecutor) -> None:
        geometry = read_geometry(self.checkpoint.config, plan.query.tensor, self.flags)
        self.sites[plan.name] = solvers.submit(measure, plan, own, self._load, geometry)
        if len(self.sites) > _PENDING:
            list(self.sites.values())[-1 - _PENDING].result()

    def _norm(self, file: MappedFile, tensor: StoredTensor) -> tuple[float, int]:
        """Frobenius norm of the finite values, and how many are not finite; from Gram matrices where they have all."""
        known = [(part, gram) for part, gram in self.grams.items() if part.tensor == tensor.name]
        if len(known) == 1 and len(known[0][0].starts) * known[0][0].rows == tensor.shape[known[0][0].axis]:
            square = float(known[0][1].diagonal(dim1=-2, dim2=-1).double().sum())
            if math.isfinite(square):
                return math.sqrt(square), 0
        return _norm(file, tensor)

    def _load(self, name: str) -> Tensor | None:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            return None
        with self.lock:  # asked for by several threads
            if tensor.file not in self.small:
                self.small = {tensor.file: MappedFile(tensor.file)}
            return self.small[tensor.file].view(tensor).clone()


def _norm(file: MappedFile, tensor: StoredTensor) -> tuple[float, int]:
    """Frobenius norm of the finite values, and how many are not finite."""
    flat = file.view(tensor).reshape(-1)
    size = flat.element_size()
    # One piece of memory for all chunks: converting costs less than asking for new memory.
    wide = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32 if size < 4 else flat.dtype)
    total, bad = 0.0, 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        values = part if size >= 4 else wide[: len(part)].copy_(part)
        square = float(values.dot(values))
        if not math.isfinite(square):  # NaN, infinity, or a square beyond float32
            exact = part.double()
            fine = exact.isfinite()
            bad += int((~fine).sum())
            square = float(torch.linalg.vector_norm(torch.where(fine, exact, 0.0))) ** 2
        total += square
        if start * size % _KEEP == 0 and start:
            file.release(tensor.begin, tensor.begin + start * size)
            file.expect(tensor.begin + start * size, tensor.end)
    return math.sqrt(total), bad
