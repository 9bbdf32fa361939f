"""A trained run at other lengths: accuracy on held-out text, the attention as trained and changed post hoc."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import RefusedError
from qkeel.lab.checkpoint import load
from qkeel.lab.config import RunConfig
from qkeel.lab.data import heldout
from qkeel.lab.data import load as load_corpus
from qkeel.lab.evaluate import measuring
from qkeel.lab.model import autocast, layers, resolve, threads
from qkeel.lab.plan import LongContexts
from qkeel.lab.trainer import Trainer
from qkeel.nn.core import SpecModule
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, RunStatus, append_line, write_text
from qkeel.records.files import json_line
from qkeel.registry import parse
from qkeel.spec import AttentionSpec

FILE = "extrapolation.jsonl"
_TOKENS = 8192  # looked at in one forward


@dataclasses.dataclass(frozen=True, slots=True)
class Foretold:
    """Per token of held-out text [n t]: whether the next one was foretold, and its loss in nats."""

    hit: Tensor
    loss: Tensor


def check_methods(config: RunConfig, contexts: LongContexts) -> None:
    """Raise if a method is unknown, has a wrong option, or a length does not fit; what a form refuses may stay.

    Raises: UnknownNameError, InvalidValueError; DataError if the corpus is too short for the longest context.
    """
    length = config.data.context
    contexts.check(length)
    load_corpus(dataclasses.replace(config.data, context=max(contexts.test_lengths)))
    for method in contexts.posthoc:
        for spec in dict.fromkeys(layers(config.model, length)):
            with contextlib.suppress(RefusedError):
                stretched(spec, method, length, max(contexts.test_lengths))


def stretched(spec: AttentionSpec, method: str, train_length: int, test_length: int) -> AttentionSpec:
    """The spec under a method named with its options, like 'rerope:window=16'."""
    term = parse(method)[0]
    return spec.extrapolate(term.name, factor=test_length / train_length, train_length=train_length, **term.options)


def missing(place: RunDirectory, contexts: LongContexts) -> list[tuple[str, int]]:
    """The pairs of method and length that a run has not been measured at."""
    done = {(line["posthoc"], line["test_length"]) for line in place.long_contexts()}
    return [(m, n) for n in contexts.test_lengths for m in contexts.posthoc if (m, n) not in done]


def measure(config: RunConfig, place: RunDirectory, contexts: LongContexts, wait: float = 0.0) -> None:
    """Append to the run's extrapolation.jsonl what is missing there; a killed one goes on."""
    config = resolve(config)
    if not missing(place, contexts):
        return
    with place.lock(wait), threads(config.threads):
        trainer = Trainer(config)
        done = load(place, trainer.trained).step if place.checkpoint.exists() else 0
        # Whole lines only: nothing is appended to one that a kill left torn.
        write_text(place.path / FILE, "".join(map(json_line, place.long_contexts())))
        for method, length in missing(place, contexts):
            about = {"posthoc": method, "test_length": length}
            try:
                if done < config.steps:
                    raise RefusedError(f"training ended at step {done} of {config.steps}")
                with measuring(trainer.trained.model), autocast(config):
                    found = _measured(trainer, method, length, contexts.sequences)
            except RefusedError as refusal:
                found = {"refused": str(refusal)}
            append_line(place.path / FILE, {**about, **found})


def _measured(trainer: Trainer, method: str, length: int, sequences: int) -> dict[str, Any]:
    short, model = trainer.config.data.context, trainer.trained.model
    windows = torch.from_numpy(heldout(trainer.corpus, length, sequences)).to(trainer.device)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    pieces = tokens.reshape(-1, short), targets.reshape(-1, short)
    again = windows[:, :short].repeat(1, length // short + 1)[:, : length + 1]
    as_trained = foretell(model, *pieces)
    with changed(model, method, short, length):
        cut, whole = foretell(model, *pieces), foretell(model, tokens, targets)
        repeat = foretell(model, again[:, :-1], again[:, 1:])
    segments = _share(whole.hit.unflatten(1, (-1, short)).transpose(0, 1).flatten(1))
    accuracy, trained = _share(whole.hit.flatten()), _share(as_trained.hit.flatten())
    return {
        "accuracy_train": trained,
        "accuracy_nonrepeat": accuracy,
        "accuracy_repeat": _share(repeat.hit.flatten()),
        "accuracy_last": segments[-1],
        "kept_nonrepeat": accuracy / trained if trained else None,
        "loss_train": float(as_trained.loss.double().mean()),
        "loss_nonrepeat": float(whole.loss.double().mean()),
        "accuracy_train_posthoc": _share(cut.hit.flatten()),
        "segments": segments,
        "sequences": len(windows),
    }


def _share(hit: Tensor) -> Any:
    return hit.double().mean(-1).tolist()


@contextlib.contextmanager
def changed(model: nn.Module, method: str, train_length: int, test_length: int) -> Iterator[None]:
    """Every attention of the model under a post-hoc method, afterwards as it was.

    Raises: RefusedError if the attention cannot be changed so.
    """
    modules = [m for m in model.modules() if isinstance(m, SpecModule)]
    before = [m.spec for m in modules]
    after = [stretched(spec, method, train_length, test_length) for spec in before]
    try:
        for module, spec in zip(modules, after):
            module.spec = spec
        yield
    finally:
        for module, spec in zip(modules, before):
            module.spec = spec


def foretell(model: nn.Module, tokens: Tensor, targets: Tensor) -> Foretold:
    """Next-token hits and losses of tokens [n t], about as many tokens at a time as fit a forward."""
    count = max(1, _TOKENS // tokens.shape[1])
    hits, losses = [], []
    for part, wanted in zip(tokens.split(count), targets.split(count)):
        logits = model(part).float()
        hits.append(logits.argmax(-1) == wanted)
        losses.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
    return Foretold(torch.cat(hits), torch.cat(losses))


def long_rows(out: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per run, method and length by records.EXTRAPOLATION_COLUMNS; empty where not known yet or refused."""
    table = []
    for entry in about["runs"]:
        place = RunDirectory(out / "runs" / entry["run_id"])
        done = place.status is RunStatus.DONE
        lines = {(line["posthoc"], line["test_length"]): line for line in place.long_contexts()} if done else {}
        named = {"block": entry["role"], "form": entry["remedy"], "seed": entry["seed"], "run_id": entry["run_id"]}
        named["train_length"] = about["base"][entry["role"]]["data"]["context"]
        named["max_logit"] = place.summary()["max_logit"] if done else None
        table += [_row(named, lines.get(pair, {}), pair) for pair in _pairs(about["contexts"])]
    return table


def _row(named: Mapping[str, Any], line: Mapping[str, Any], pair: Sequence[Any]) -> dict[str, Any]:
    known = {**line, **named, "posthoc": pair[0], "test_length": pair[1]}
    return {name: known.get(name) for name in EXTRAPOLATION_COLUMNS}


def _pairs(contexts: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(method, length) for method in contexts["posthoc"] for length in contexts["test_lengths"]]
