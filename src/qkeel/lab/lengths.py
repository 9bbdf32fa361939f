"""Tests trained runs on longer texts than in training, with attention as trained and with post-hoc changes.

Shapes: n texts, t tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import RefusedError
from qkeel.lab.angles import Range, attentions, cosine_ranges, outside
from qkeel.lab.build_run import autocast, layers, resolve, threads
from qkeel.lab.checkpoint import RunState, load
from qkeel.lab.config import RunConfig, with_values
from qkeel.lab.plan import LongContexts, Method
from qkeel.lab.run_claims import claimed
from qkeel.lab.run_record import measuring
from qkeel.lab.text import batch, long_texts
from qkeel.lab.text import load as load_corpus
from qkeel.lab.train import train_step
from qkeel.options import Json, lookup, parse
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, RunStatus, append_line
from qkeel.records.disk import cut, sync
from qkeel.records.file_formats import whole_bytes
from qkeel.spec import PRESETS, AttentionSpec

# Tokens per forward pass.
_TOKENS = 8192
FILE = "extrapolation.jsonl"
# Number of texts for the angles, with about two million pairs per head at 512 tokens.
_ANGLED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Predicted:
    """Whether the next token was predicted correctly, and its loss in nats, per token of held-out text [n t]."""

    hit: Tensor
    loss: Tensor


def check_methods(config: RunConfig, contexts: LongContexts) -> None:
    """Checks the post-hoc methods and lengths; a form may still not support a method.

    Raises:
        UnknownNameError: a method or form is unknown.
        InvalidValueError: an option is wrong or a length does not fit.
        DataError: no held-out document is longer than the longest context.
    """
    length = config.data.context
    contexts.check(length)
    # For its errors alone: a corpus without a document of this length is refused before anything is trained.
    long_texts(load_corpus(config.data), max(contexts.test_lengths), 1)
    for method in map(Method.parse, contexts.posthoc):
        if method.form:
            lookup("attention form", PRESETS, parse(method.form)[0].name)
        for spec in dict.fromkeys(layers(config.model, length)):
            # A refusal is a result of the study; a wrong option is an error before it begins.
            with contextlib.suppress(RefusedError):
                stretched(spec, method, length, max(contexts.test_lengths))


def stretched(
    spec: AttentionSpec, method: Method, train_length: int, test_length: int
) -> AttentionSpec:
    """Returns the spec changed by a method; with continued training, the factor follows from the method's length."""
    factor = (method.trained_at or test_length) / train_length
    for term in method.terms:
        spec = spec.extrapolate(
            term.name, factor=factor, train_length=train_length, **term.options
        )
    return spec


def missing(directory: RunDirectory, contexts: LongContexts) -> list[tuple[str, int]]:
    """Returns the pairs of method and length that have not been measured for a run."""
    lines = directory.long_contexts()
    done = {(line["posthoc"], line["test_length"]) for line in lines}
    return [pair for pair in contexts.pairs if pair not in done]


def measure(
    config: RunConfig,
    directory: RunDirectory,
    contexts: LongContexts,
    wait: float = 0.0,
) -> None:
    """Appends the missing results to the run's extrapolation.jsonl; an interrupted measurement continues."""
    config = resolve(config)
    # Often nothing is missing, and loading a run takes seconds.
    if not missing(directory, contexts):
        return
    path = directory.path / FILE
    with claimed(directory, wait), threads(config.threads):
        run = RunState(config)
        step = load(directory, run).step if directory.checkpoint.exists() else 0
        # Nothing is appended to a torn line.
        if path.exists():
            cut(path, whole_bytes(path))
        baselines: dict[int, _AsTrained] = {}
        for text, length in missing(directory, contexts):
            try:
                if step < config.steps:
                    raise RefusedError(
                        f"training ended at step {step} of {config.steps}"
                    )
                if length not in baselines:
                    baselines[length] = _AsTrained(run, length, contexts.sequences)
                measured = _at(
                    run, baselines[length], Method.parse(text), contexts.continue_steps
                )
            except RefusedError as refusal:
                measured = {"refused": str(refusal)}
            append_line(path, {"posthoc": text, "test_length": length, **measured})
        sync([path])


class _AsTrained:
    """The baseline with which all methods are compared at one length.

    windows: held-out texts [n, length + 1]. short: the predictions on pieces of these texts with the training length.
    ranges: the ranges of angles on the training texts of eight steps.
    """

    def __init__(self, run: RunState, length: int, sequences: int) -> None:
        config, corpus = run.config, run.task.corpus
        self.windows = torch.from_numpy(long_texts(corpus, length, sequences)).to(
            run.device
        )
        trained_on = (
            batch(corpus, config.data, config.seed, step) for step in range(8)
        )
        with measuring(run.model), autocast(config):
            self.short = predict(run.model, *_pieces(self.windows, config.data.context))
            self.ranges = cosine_ranges(
                run.model,
                (
                    torch.from_numpy(tokens).to(run.device)[:, :-1]
                    for tokens in trained_on
                ),
            )


def _at(run: RunState, baseline: _AsTrained, method: Method, steps: int) -> Json:
    """Returns the results of a method at the length of the baseline; `steps` is the length of continued training."""
    short, windows = run.config.data.context, baseline.windows
    if method.trained_at:
        model, change = trained_on(run, method, steps), contextlib.nullcontext()
    else:
        model, change = (
            run.model,
            changed(run.model, method, short, windows.shape[1] - 1),
        )
    with measuring(model), autocast(run.config), change:
        measured = _measured(model, windows, short, baseline.ranges)
    trained = _share(baseline.short.hit)
    return {
        "accuracy_train": trained,
        "kept_nonrepeat": measured["accuracy_nonrepeat"] / trained if trained else None,
        "loss_train": float(baseline.short.loss.cpu().double().mean()),
        **measured,
    }


def _measured(
    model: nn.Module, windows: Tensor, short: int, ranges: Sequence[Range]
) -> Json:
    """Returns the results of a model on windows [n, length + 1] after training at length `short`."""
    tokens, length = windows[:, :-1], windows.shape[1] - 1
    # Repeated text has no new content: a model that only copies predicts it as well as at the training length.
    repeated = windows[:, :short].repeat(1, length // short + 1)[:, : length + 1]
    long = predict(model, tokens, windows[:, 1:])
    repeat = predict(model, repeated[:, :-1], repeated[:, 1:])
    pieces = predict(model, *_pieces(windows, short))
    angles = outside(model, tokens[:_ANGLED].split(4), ranges)
    return {
        "accuracy_nonrepeat": _share(long.hit),
        "accuracy_repeat": _share(repeat.hit),
        "loss_nonrepeat": float(long.loss.cpu().double().mean()),
        "accuracy_train_posthoc": _share(pieces.hit),
        "segments": long.hit.unflatten(1, (-1, short))
        .cpu()
        .double()
        .mean((0, 2))
        .tolist(),
        "sequences": len(windows),
        "cos_outside": angles.share,
        "cos_outside_by_head": (angles.outside / angles.pairs).tolist(),
    }


def _pieces(windows: Tensor, short: int) -> tuple[Tensor, Tensor]:
    """Cuts the tokens and targets of windows [n, length + 1] into pieces of length `short`."""
    return windows[:, :-1].reshape(-1, short), windows[:, 1:].reshape(-1, short)


def trained_on(run: RunState, method: Method, steps: int) -> nn.Module:
    """Returns a copy of the model after more training at the method's length with the changed attention.

    The training uses a tenth of the learning rate, at most as many tokens per step as before (but at least one
    sequence), a new optimizer and the run's own schedule.
    """
    config = run.config
    # As many tokens a step as before, so that only the length changes.
    several = max(1, config.data.batch * config.data.context // method.trained_at)
    data = {"context": method.trained_at, "batch": several}
    optim = {"lr": config.optim.lr / 10}
    longer = RunState(with_values(config, data=data, optim=optim, steps=steps))
    longer.model.load_state_dict(run.model.state_dict())
    for module, before in zip(
        attentions(longer.model), attentions(run.model), strict=True
    ):
        module.spec = stretched(
            before.spec, method, config.data.context, method.trained_at
        )
    for step in range(steps):
        train_step(longer, step)
    return longer.model


def _share(hit: Tensor) -> float:
    return float(hit.cpu().double().mean())


@contextlib.contextmanager
def changed(
    model: nn.Module, method: Method, train_length: int, test_length: int
) -> Iterator[None]:
    """Applies a post-hoc method to every attention layer of the model and restores the model afterwards.

    Raises:
        RefusedError: the attention cannot be changed this way.
    """
    modules = attentions(model)
    before = [m.spec for m in modules]
    # All specs are made before the first is set, so that a refusal changes nothing.
    after = [stretched(spec, method, train_length, test_length) for spec in before]
    try:
        for module, spec in zip(modules, after):
            module.spec = spec
        yield
    finally:
        for module, spec in zip(modules, before):
            module.spec = spec


def predict(model: nn.Module, tokens: Tensor, targets: Tensor) -> Predicted:
    """Returns next-token hits and losses for tokens [n t], computed in passes of about `_TOKENS` tokens."""
    count = max(1, _TOKENS // tokens.shape[1])
    hits, losses = [], []
    for chunk, chunk_targets in zip(tokens.split(count), targets.split(count)):
        logits = model(chunk).float()
        hits.append(logits.argmax(-1) == chunk_targets)
        losses.append(
            F.cross_entropy(logits.transpose(1, 2), chunk_targets, reduction="none")
        )
    return Predicted(torch.cat(hits), torch.cat(losses))


def long_rows(out: Path, study: Json) -> list[Json]:
    """Returns one row per run, method and length, with the columns records.EXTRAPOLATION_COLUMNS.

    Values that were not measured are None.
    """
    table = []
    for entry in study["runs"]:
        directory = RunDirectory(out / "runs" / entry["run_id"])
        done = directory.status is RunStatus.DONE
        lines = (
            {
                (line["posthoc"], line["test_length"]): line
                for line in directory.long_contexts()
            }
            if done
            else {}
        )
        named = {
            "block": entry["role"],
            "form": entry["remedy"],
            "seed": entry["seed"],
            "run_id": entry["run_id"],
        }
        named["train_length"] = study["base"][entry["role"]]["data"]["context"]
        named["max_logit"] = directory.summary()["max_logit"] if done else None
        contexts = LongContexts(**study["contexts"]).of(entry["remedy"])
        for posthoc, length in contexts.pairs:
            row = {
                **lines.get((posthoc, length), {}),
                **named,
                "posthoc": posthoc,
                "test_length": length,
            }
            table.append({name: row.get(name) for name in EXTRAPOLATION_COLUMNS})
    return table
