"""`qkeel check` and `scan`; `convert`, which does to a checkpoint what `qkeel.export` does to a model; `export`, which writes
a run's tables."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import nn

from qkeel.audit import Documents, Geometry, Window, as_json, table
from qkeel.audit.allowed_inputs import Contract
from qkeel.audit.check import check as judge
from qkeel.audit.check import check_checkpoint, is_run
from qkeel.audit.scan import scan as read
from qkeel.cli.commands import FAILED, OK, UNDECIDED
from qkeel.cli.output import printable
from qkeel.cli.parameters import SEVERAL, JsonSwitch, Switch, Unset, is_function
from qkeel.errors import (
    DataError,
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    RunDirectoryError,
    unknown,
)
from qkeel.frames import Frame
from qkeel.frames.tables import arrow
from qkeel.lab.build_run import build_decoder, rules
from qkeel.lab.config import ModelConfig
from qkeel.metrics import HARMFUL_LOGIT, Status
from qkeel.monitor.sinks import load
from qkeel.options import parse
from qkeel.records import disk, write_text
from qkeel.remedies import ALIASES, REMEDIES, apply, canonical, note
from qkeel.remedies import parse as remedies_of
from qkeel.remedies.retrofit import convert as write_converted
from qkeel.sites import find_sites
from qkeel.spec import PRESETS
from qkeel.spec.presets import attention_spec

# The formula and the source of a preset or a remedy, as `qkeel explain` prints them.

# Tokens; for the remedies whose starting scale depends on the training length
_LENGTH = 512


def explain(text: str) -> str:
    """Returns the summary, the source and the formula of a preset, or of remedies applied to the baseline.

    A remedy that acts on steps, the loss or a block is described by its own formula; the formula of attention is
    included if a remedy changes it.
    """
    terms = parse(text)
    names = [term.name for term in terms]
    if len(names) == 1 and names[0] in PRESETS:
        row = PRESETS[names[0]]
        options = text.partition(":")[2]
        line = (
            f"{names[0]} with {options}; as published: {row.line}"
            if options
            else row.line
        )
        return (
            f"{text}: {line}\nsource: {row.source}\n\n{attention_spec(text).explain()}"
        )
    for name in names:
        if name not in REMEDIES and name not in ALIASES:
            raise unknown("preset or remedy", name, {*PRESETS, *REMEDIES, *ALIASES})
    about, formulas = note(text), rules(text)
    if len(formulas) < len(remedies_of(text)):
        formulas.append(_formula(text))
    elif formulas:
        formulas.append("the attention computation stays the model's own")
    return "\n".join(
        [f"{canonical(text)}: {about.line}", f"source: {about.source}", "", *formulas]
    )


def _formula(text: str) -> str:
    decoder = build_decoder(ModelConfig(d_model=8, n_layers=1, n_heads=2), vocab_size=2)
    apply(decoder, text, torch.optim.AdamW(decoder.parameters()), train_length=_LENGTH)
    return find_sites(decoder)[0].spec.explain()


# `qkeel scan`: a checkpoint read head by head, with a progress bar.


def scan(
    checkpoint: Path,
    /,
    *,
    n_heads: Unset[int] = None,
    n_kv_heads: Unset[int] = None,
    head_dim: Unset[int] = None,
    heads: Annotated[list[str], SEVERAL] = [],  # noqa: B006 - read only
    layout: Unset[Literal["blocks", "groups"]] = None,
    every_head: Switch = False,
    json_: JsonSwitch = False,
) -> int:
    """Read a checkpoint without running it, and print the norms of each head's weights and the logits they allow.

    The exit code is 1 if a weight is NaN or infinite.

    Args:
        checkpoint: A .safetensors file, a folder of shards, or a Hugging Face folder.
        n_heads: Number of query heads per layer, if config.json does not state it.
        n_kv_heads: Number of key heads per layer, if config.json does not state it.
        head_dim: Width of one head; gives the number of heads where it differs from layer to layer.
        heads: Query heads of the layers in a stage, like down_blocks.0=5; several may follow.
        layout: Layout of a fused qkv weight: blocks for [q | k | v], groups for the queries, key and value of one key
            head after another.
        every_head: Print one line per head, not only one for the largest head of each layer.
        json_: Print everything as JSON.
    """
    flags = Geometry(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        stages=_stages(heads),
        layout=layout,
    )
    refuse_hub_name(checkpoint)
    with progress_bar() as on_progress:
        scanned = read(checkpoint, flags=flags, on_progress=on_progress)
    if json_:
        print(json.dumps(as_json(scanned)))
    else:
        print(printable(table(scanned, every_head=every_head)))
    return FAILED if any(t.non_finite for t in scanned.tensors) else OK


def _stages(heads: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Returns the stages and heads of `--heads STAGE=N`."""
    stages = []
    for text in heads:
        stage, _, number = text.partition("=")
        if not stage or not number.isdecimal() or int(number) < 1:
            raise InvalidValueError(
                f"expected --heads STAGE=N, like down_blocks.0=5, got {text!r}"
            )
        stages.append((stage, int(number)))
    return tuple(stages)


def refuse_hub_name(path: Path) -> None:
    """Raise an error if the path is the name of a model on the Hugging Face hub.

    Raises: DataError: there is no such file or folder, and the path looks like the name of a model on the hub.
    """
    if (
        not path.exists()
        and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path))
        and path.suffix != ".safetensors"
    ):
        raise DataError(
            f"{path} does not exist. It looks like the name of a model on the Hugging Face hub; to download it: "
            f"hf download {path}"
        )


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of the bytes read, shown on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading")
        yield lambda done, total: progress.update(task, completed=done, total=total)


# `qkeel check`: is the attention of a run or a checkpoint healthy? The answer is one sentence and an exit code for CI.


def check(
    path: Path,
    /,
    *,
    threshold: float = HARMFUL_LOGIT,
    table: Switch = False,
    n_heads: Unset[int] = None,
    n_kv_heads: Unset[int] = None,
    sees: Unset[str] = None,
    json_: JsonSwitch = False,
) -> int:
    """Report in one sentence whether the attention of a run, a checkpoint or a model is healthy.

    The exit code is 0 if it is healthy, 1 if not, 2 if the command is used incorrectly, and 4 if it is not known. The
    weights of a checkpoint provide only an upper bound on its logits: if that exceeds the threshold, the answer is "not
    known". In Python: qkeel.check(model, batch).

    Args:
        path: Directory of a run; a .safetensors file, a folder of shards or a Hugging Face folder; or module:function,
            where the function returns a model and a batch for it.
        threshold: Largest acceptable attention logit, in nats.
        table: Also print the values of each layer.
        n_heads: Number of query heads per layer of a checkpoint, if config.json does not state it.
        n_kv_heads: Number of key heads per layer of a checkpoint, if config.json does not state it.
        sees: With module:function, check what an output depends on instead: causal, window=SIZE, or documents, which
            begin where the batch's position_ids start again.
        json_: Print the status, sentence, largest logit and threshold as JSON.
    """
    if not threshold > 0:
        raise InvalidValueError(f"expected a threshold above 0 nats, got {threshold:g}")
    if is_function(path):
        health = of_model(
            str(path),
            lambda model, batch: judge(
                model,
                batch,
                sees=None if sees is None else _contract(sees, batch),
                threshold=threshold,
            ),
        )
    elif sees is not None:
        raise InvalidValueError(
            f"expected module:function with --sees, got {path}: a model has to run for it"
        )
    elif is_run(path):
        health = judge(path, threshold=threshold)
    else:
        refuse_hub_name(path)
        with progress_bar() as on_progress:
            health = check_checkpoint(
                path,
                Geometry(n_heads=n_heads, n_kv_heads=n_kv_heads),
                threshold,
                on_progress,
            )
    if json_:
        largest = health.largest if math.isfinite(health.largest) else None
        fields = {
            "status": str(health.status),
            "sentence": health.sentence,
            "largest": largest,
            "threshold": threshold,
        }
        print(json.dumps(fields))
    else:
        print(printable(str(health)))
        if table and health.rows:
            print(printable(health.table()))
    return {
        Status.HEALTHY: OK,
        Status.NOT_HEALTHY: FAILED,
        Status.NOT_KNOWN: UNDECIDED,
    }[health.status]


Answer = TypeVar("Answer")


def of_model(name: str, ask: Callable[[nn.Module, object], Answer]) -> Answer:
    """Asks something of the model and the batch that module:function gives."""
    try:
        return ask(*_model_and_batch(name))
    except QkeelError:
        raise
    except Exception as error:
        # A crash must not exit as an unhealthy model does, so that a CI can tell the two apart.
        traceback.print_exc()
        raise DataError(
            f"expected {name} to give a model that runs on its batch, but it raised {type(error).__name__}: {error}"
        ) from error


def _model_and_batch(name: str) -> tuple[nn.Module, object]:
    """Calls module:function, looked for in the current folder first, and returns the model and batch that it gives."""
    module_name, _, function_name = name.partition(":")
    # As python -m does, so that a file beside is found though `qkeel` is installed elsewhere.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            # The module is there, and a library that it imports is missing.
            raise
        raise DataError(
            f"expected a module {module_name} on Python's path or in {Path.cwd()}, found none"
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidValueError(
            f"expected a function {function_name} in {module_name}, found none"
        )
    returned = function()
    if not (
        isinstance(returned, tuple)
        and len(returned) == 2
        and isinstance(returned[0], nn.Module)
    ):
        raise InvalidTypeError(
            f"expected {name} to return a model and a batch, got {type(returned).__name__}"
        )
    return returned


def _contract(text: str, batch: object) -> Contract:
    """Reads what --sees names."""
    if text == "causal":
        return text
    if text == "documents":
        positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
        if not isinstance(positions, torch.Tensor):
            raise InvalidValueError(
                "expected a batch with position_ids for --sees documents; other documents: in Python"
            )
        return Documents.from_positions(positions)
    word, _, size = text.partition("=")
    if word == "window" and size.isdecimal():
        return Window(int(size))
    raise InvalidValueError(
        f"expected --sees causal, window=SIZE or documents, got {text!r}"
    )


# `qkeel export`: the records of a run as tables.


def export(
    run: Path, /, *, to: Literal["csv", "parquet"], out: Unset[Path] = None
) -> int:
    """Write the records of a run as CSV or Parquet tables.

    The files are steps (one row per record), heads (one row per record, layer and head), and eval_steps and eval_heads
    (the same for passes in evaluation mode). The run is not changed.

    Args:
        run: Directory of a run or of a watched model.
        to: The format: csv, or parquet, which needs pyarrow.
        out: The folder to write; it must be new or empty [default: NAME-tables].
    """
    loaded = load(run)
    frames: dict[str, Frame] = {
        "steps": loaded.steps,
        "heads": loaded.heads,
        "eval_steps": loaded.eval_steps,
        "eval_heads": loaded.eval_heads,
    }
    folder = out or Path(f"{run.resolve().name}-tables")
    if to == "parquet":
        # a missing library is told of before anything is written.
        arrow()
    if not disk.make_directory(folder) and any(folder.iterdir()):
        raise RunDirectoryError(
            f"expected a new or empty folder to write tables to, but {folder} is not empty"
        )
    for name, frame in frames.items():
        path = folder / f"{name}.{to}"
        if len(frame) and to == "parquet":
            frame.to_parquet(path)
        elif len(frame):
            write_text(path, frame.to_csv())
        if len(frame):
            print(path)
    return OK


# `qkeel convert`: writes a checkpoint with q/k norms in an architecture that other libraries can load.


def convert(
    checkpoint: Path,
    /,
    *,
    to: Literal["qwen3"],
    out: Path,
    norm_eps: Unset[float] = None,
) -> int:
    """Convert a checkpoint with q/k norms to a Qwen3 checkpoint with the same outputs.

    Add the norms with qkeel.retrofit(model, "qk_norm", batch) and save the model with save_pretrained first. The
    model is not run, and nothing is unpickled. If the architecture cannot compute the same outputs, the command fails
    with an error that gives the reason.

    Args:
        checkpoint: A Hugging Face folder: config.json and safetensors, in one file or in shards.
        to: The architecture to write.
        out: The folder to write; it must be new or empty.
        norm_eps: The eps of the q/k norms. By default rms_norm_eps in config.json is taken, with a warning.
    """
    print(write_converted(checkpoint, to, out, norm_eps=norm_eps))
    return OK
