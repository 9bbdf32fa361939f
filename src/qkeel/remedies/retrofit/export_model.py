"""Models and checkpoints with q/k norms written as an architecture that transformers loads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qkeel.errors import DataError, InvalidTypeError, RefusedError, RunDirectoryError, reported
from qkeel.patching.forward_passes import unwrapped
from qkeel.records.files import write_json
from qkeel.remedies.apply import in_force
from qkeel.remedies.attention.projection_norms import HeadNorm
from qkeel.remedies.retrofit.architectures import SHAPES, Plan, plan
from qkeel.stored import DTYPES, INDEX, PICKLES, Checkpoint, MappedFile, open_checkpoint

SHARD = 5_000_000_000  # bytes
_WEIGHTS = (".safetensors", ".index.json", ".py", ".gguf", ".h5", ".msgpack", *PICKLES)


def convert(checkpoint: str | Path, to: str, out: str | Path, *, norm_eps: float | None = None) -> Path:
    """Write a Hugging Face checkpoint whose q and k are normed as one of the architecture `to`.

    Weights are read through the memory map and written shard by shard; nothing is unpickled or run. `out` appears
    whole, by one rename, or not at all; other small files (tokenizer, generation config) are copied.

    Args:
        checkpoint: a folder with config.json and safetensors. to: "qwen3", "olmo2" or "gemma3".
        norm_eps: that of the q/k norms where it is not the config's rms_norm_eps.

    Returns:
        The folder written.

    >>> convert("missing", "qwen3", "out")
    Traceback (most recent call last):
    qkeel.errors.DataError: ...

    Raises:
        RefusedError: the architecture computes something else; the message says what. DataError: what is missing or
        damaged. RunDirectoryError: `out` holds something already, or is not writable.
    """
    source = Path(checkpoint)
    if source.exists() and not source.is_dir():
        raise DataError(
            f"{source} is a file; expected a folder with config.json and safetensors, as save_pretrained writes"
        )
    found = open_checkpoint(source)
    if not found.config:
        raise DataError(f"{source} has no config.json, which says what the tensors mean; restore it")
    planned = plan(to, found.config, {n: t.shape for n, t in found.tensors.items()}, norm_eps=norm_eps)
    with _whole(Path(out), source) as part:
        _copy_rest(source, part)
        files = dict.fromkeys(t.file for t in found.tensors.values())
        _write(part, planned, ((file.name, _stored(found, file)) for file in files))
    return Path(out)


def export(model: nn.Module, to: str, out: str | Path, *, norm_eps: float | None = None) -> Path:
    """Write a transformers model in memory, whose q and k were normed by `qk_norm`, as one of the architecture `to`.

    Args:
        model: one with its `config`. to, out: as for `convert`. norm_eps: by default that of the norms in it.

    Raises: as for `convert`.

    >>> export(nn.Linear(2, 2), "qwen3", "out")
    Traceback (most recent call last):
    qkeel.errors.RefusedError: expected a model of transformers, with a config, to export as qwen3; this Linear has none
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to export, got {type(model).__name__}")
    plain = unwrapped(model)
    to_dict = getattr(getattr(plain, "config", None), "to_dict", None)
    if to_dict is None:
        raise RefusedError(
            f"expected a model of transformers, with a config, to export as {to}; this {type(plain).__name__} has none"
        )
    config: dict[str, Any] = to_dict()
    strange = in_force(plain) - _HARMLESS
    if strange:
        raise RefusedError(
            f"{', '.join(sorted(strange))} is active on this model, and the files of {to} would not say so; remove() "
            "its handle, or fold() what can be folded, first"
        )
    tied = bool(config.get("tie_word_embeddings"))  # the head is then made by who loads the embedding
    weights = {n: x for n, x in plain.state_dict().items() if not (tied and n == "lm_head.weight")}
    found = _gains(plain, to)
    weights = {n: x for n, x in weights.items() if not n.endswith("self_attn.q_norm.logit_scale")}
    weights |= {name: gain for name, (gain, _) in found.items()}
    if norm_eps is None and found:
        norm_eps = next(iter(found.values()))[1]
    dtypes = {x.dtype for x in weights.values() if x.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    planned = plan(to, config, {n: tuple(x.shape) for n, x in weights.items()}, norm_eps=norm_eps)
    with _whole(Path(out), None) as part:
        shards = list(_shards(weights))
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        _write(part, planned, ((f, {n: weights[n].detach().cpu() for n in own}) for f, own in zip(files, shards)))
    return Path(out)


# What leaves no trace in the forward pass, or shows in the names and shapes of the weights.
_HARMLESS = frozenset(
    ("none", "qk_norm", "swin_norm", "lalr", "qk_lr", "qk_weight_decay", "qk_clip", "spectral_cap", "z_loss")
)


def _gains(model: nn.Module, to: str) -> dict[str, tuple[Tensor, float]]:
    """The gains of norms that qk_norm put in, as plain factors, and their eps."""
    flat = to in SHAPES and SHAPES[to].flat
    found: dict[str, tuple[Tensor, float]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, HeadNorm):
            continue
        norm = module.norm
        if norm.kind != "rms" or (norm.over == "layer") != flat:
            raise RefusedError(f"{name} is {norm}; {to} has an RMS norm over {'all heads' if flat else 'each head'}")
        if module.share is not None and bool(module.share != 1):
            raise RefusedError(f"{name} is still being blended in; export when its share is 1")
        like = next(p for p in model.parameters())
        gain = torch.ones((), dtype=like.dtype) if module.weight is None else module.weight.detach()
        if norm.gain == "one_plus_dim":
            gain = 1 + gain
        if module.logit_scale is not None:
            gain = gain * module.logit_scale.detach()
        found[f"{name}.weight"] = (gain * module.factor, norm.eps)
    if len({eps for _, eps in found.values()}) > 1:
        raise RefusedError(f"the q/k norms of this model have different eps, and {to} has one")
    return found


def _shards(weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, x in weights.items():
        if names and size + x.nbytes > SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += x.nbytes
    yield names


def _stored(checkpoint: Checkpoint, file: Path) -> dict[str, Tensor]:
    mapped = MappedFile(file)
    inside = [t for t in checkpoint.tensors.values() if t.file == file]
    for tensor in inside:
        if tensor.dtype not in DTYPES:
            raise RefusedError(
                f"{tensor.name} is stored as {tensor.dtype}, which torch cannot hold; dequantise it first"
            )
    return {t.name: mapped.view(t) for t in inside}


def _changed(planned: Plan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        move = planned.moves.get(name)
        if move is not None:
            found[move.name] = (x if move.change is None else move.change(x)).contiguous()
    for name, (near, shape) in planned.zeros.items():
        if near in tensors:
            found[name] = torch.zeros(shape, dtype=tensors[near].dtype)
    return found


def _copy_rest(source: Path, part: Path) -> None:
    for file in source.iterdir():
        skipped = file.name == "config.json" or file.name.endswith(_WEIGHTS) or file.name.startswith(".")
        if file.is_file() and not skipped:
            shutil.copyfile(file, part / file.name)


def _write(part: Path, planned: Plan, files: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
    """The changed tensors of each file under its name, "model.safetensors" where there is one; index and config."""
    sizes: dict[str, tuple[str, int]] = {}
    for name, stored in files:
        tensors = _changed(planned, stored)
        save_file(tensors, part / name, metadata={"format": "pt"})
        with open(part / name, "rb") as written:
            os.fsync(written.fileno())
        sizes |= {tensor: (name, x.nbytes) for tensor, x in tensors.items()}
    if len({file for file, _ in sizes.values()}) > 1:
        total = sum(size for _, size in sizes.values())
        names = {name: file for name, (file, _) in sizes.items()}
        write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": names}, sealed=False)
    elif sizes:
        only = next(iter(sizes.values()))[0]
        if only != "model.safetensors":
            os.replace(part / only, part / "model.safetensors")
    write_json(part / "config.json", dict(planned.config), sealed=False)


@contextmanager
def _whole(out: Path, source: Path | None) -> Iterator[Path]:
    """A folder that becomes `out` when all is written, and is gone if anything fails."""
    if source is not None and source.exists() and out.exists() and out.samefile(source):
        raise RunDirectoryError(f"{out} is the checkpoint itself; choose another place to write to")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(f"{out} exists already and nothing there is overwritten; choose another place")
    part: Path | None = None
    advice = ". Expected a writable place with free space; nothing that stood there was changed"
    try:
        with reported(f"cannot write {out}", advice):
            out.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
            yield part
            os.chmod(part, 0o755)
            os.replace(part, out)
    finally:
        if part is not None and part.exists():
            shutil.rmtree(part)
