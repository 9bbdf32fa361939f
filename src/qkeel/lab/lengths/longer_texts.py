"""A trained run at other lengths: accuracy on held-out text, the attention as trained and changed post hoc."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import DamagedFileError, RefusedError, caution
from qkeel.lab.config import RunConfig, with_values
from qkeel.lab.data.corpus import batch, long_texts
from qkeel.lab.data.corpus import load as load_corpus
from qkeel.lab.lengths.angles import Range, attentions, cosine_ranges, outside
from qkeel.lab.lengths.retrieval import retrieved
from qkeel.lab.model.build_model import autocast, layers, resolve, threads
from qkeel.lab.plan import LongContexts, Method
from qkeel.lab.training.arithmetic import Arithmetic
from qkeel.lab.training.checkpoint import load
from qkeel.lab.training.evaluate import measuring
from qkeel.lab.training.run_state import RunState
from qkeel.lab.training.step import train_step
from qkeel.options import Json
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, RunStatus, append_line
from qkeel.records.disk import cut, remove, sync
from qkeel.records.files import JSONObject, whole_bytes
from qkeel.registry import lookup, parse
from qkeel.spec import PRESETS, AttentionSpec

FILE = "extrapolation.jsonl"
_TOKENS = 8192  # of one forward pass
_ANGLED = 16  # texts whose angles are measured: about two million pairs a head at 512


@dataclasses.dataclass(frozen=True, slots=True)
class Predicted:
    """Per token of held-out text [n t]: whether the next one was predicted, and its loss in nats."""

    hit: Tensor
    loss: Tensor


def check_methods(config: RunConfig, contexts: LongContexts) -> None:
    """Raises if a method is unknown, has a wrong option, or a length does not fit; what a form refuses may stay.

    Raises: UnknownNameError, InvalidValueError; DataError if no held-out document is longer than the longest context.
    """
    length = config.data.context
    contexts.check(length)
    long_texts(load_corpus(config.data), max(contexts.test_lengths), 1)
    for method in map(Method.parse, contexts.posthoc):
        if method.form:
            lookup("attention form", PRESETS, parse(method.form)[0].name)
        for spec in dict.fromkeys(layers(config.model, length)):
            with contextlib.suppress(RefusedError):
                stretched(spec, method, length, max(contexts.test_lengths))


def stretched(spec: AttentionSpec, method: Method, train_length: int, test_length: int) -> AttentionSpec:
    """The spec under a method; one that is trained on has the factor of that length."""
    factor = (method.trained_at or test_length) / train_length
    for term in method.terms:
        spec = spec.extrapolate(term.name, factor=factor, train_length=train_length, **term.options)
    return spec


def missing(place: RunDirectory, contexts: LongContexts) -> list[tuple[str, int]]:
    """The pairs of method and length that a run has not been measured at."""
    done = {(line["posthoc"], line["test_length"]) for line in _known(place)}
    return [pair for pair in contexts.pairs if pair not in done]


def measure(config: RunConfig, place: RunDirectory, contexts: LongContexts, wait: float = 0.0) -> None:
    """Appends to the run's extrapolation.jsonl what is missing there; a killed one goes on."""
    config = resolve(config)
    if not missing(place, contexts):
        return
    with place.lock(wait), threads(config.threads):
        run = RunState(config)
        done = _load(place, run)
        _clear(place)
        known: dict[int, _AsTrained] = {}
        for text, length in missing(place, contexts):
            try:
                if done < config.steps:
                    raise RefusedError(f"training ended at step {done} of {config.steps}")
                known[length] = known.get(length) or _AsTrained(run, length, contexts.sequences)
                found = _at(run, known[length], Method.parse(text), contexts.continue_steps)
            except RefusedError as refusal:
                found = {"refused": str(refusal)}
            append_line(place.path / FILE, {"posthoc": text, "test_length": length, **found})
        sync([place.path / FILE])


def _known(place: RunDirectory) -> list[JSONObject]:
    """The lines of a run's results; none where one is damaged, so that all is measured again."""
    try:
        return place.long_contexts()
    except DamagedFileError as damage:
        caution(f"{str(damage).rstrip('.')}. All of that file is measured again.")
        return []


def _clear(place: RunDirectory) -> None:
    """Leaves sound lines only: nothing is appended to one that a kill left torn, nor to a damaged file."""
    path = place.path / FILE
    if not _known(place):
        remove([path])
    else:
        cut(path, whole_bytes(path, lambda line: True, place.sealed))


def _load(place: RunDirectory, run: RunState) -> int:
    """The steps that the run's checkpoint is of, after putting it into the run; 0 where there is none."""
    try:
        return load(place, run).step if place.checkpoint.exists() else 0
    except DamagedFileError:
        remove([place.path / "DONE"])  # the same command trains it again
        raise


class _AsTrained:
    """The values that every method at a length is compared with: held-out texts [n, length + 1], predictions of their
    pieces of the training length, and the angles met in training."""

    def __init__(self, run: RunState, length: int, sequences: int) -> None:
        self.windows = torch.from_numpy(long_texts(run.task.corpus, length, sequences)).to(run.device)
        with measuring(run.model), autocast(run.config):
            self.short = predict(run.model, *_pieces(self.windows, run.config.data.context))
            self.ranges = cosine_ranges(run.model, _seen(run))


def _at(run: RunState, known: _AsTrained, method: Method, steps: int) -> Json:
    config, short, windows = run.config, run.config.data.context, known.windows
    if method.trained_at:
        model, changing = trained_on(run, method, steps), contextlib.nullcontext()
    else:
        model = run.model
        changing = changed(model, method, short, windows.shape[1] - 1)
    with measuring(model), autocast(config), changing:
        found = _measured(model, windows, short, known.ranges)
        if run.task.corpus.needles:
            found |= retrieved(model, windows, run.task.corpus.needles)
    trained = _share(known.short.hit)
    return {
        "accuracy_train": trained,
        "kept_nonrepeat": found["accuracy_nonrepeat"] / trained if trained else None,
        "loss_train": float(known.short.loss.cpu().double().mean()),
        **found,
    }


def _measured(model: nn.Module, windows: Tensor, short: int, ranges: Sequence[Range]) -> Json:
    """Results of a model on windows [n, length + 1] after training at `short`."""
    tokens, targets, length = windows[:, :-1], windows[:, 1:], windows.shape[1] - 1
    again = windows[:, :short].repeat(1, length // short + 1)[:, : length + 1]
    whole, repeat = predict(model, tokens, targets), predict(model, again[:, :-1], again[:, 1:])
    cut = predict(model, *_pieces(windows, short))
    last = {context: _last(model, windows, context, short) for context in _growing(short, length)}
    angles = outside(model, tokens[:_ANGLED].split(4), ranges)
    return {
        "accuracy_nonrepeat": _share(whole.hit),
        "accuracy_repeat": _share(repeat.hit),
        "accuracy_last": last[length],
        "accuracy_last_short": last[short],
        "loss_nonrepeat": float(whole.loss.cpu().double().mean()),
        "accuracy_train_posthoc": _share(cut.hit),
        "segments": whole.hit.unflatten(1, (-1, short)).cpu().double().mean((0, 2)).tolist(),
        "last": {str(context): share for context, share in last.items()},
        "sequences": len(windows),
        "cos_outside": angles.share,
        "cos_outside_by_head": (angles.outside / angles.pairs).tolist(),
        "dilution": float(angles.dilution(length).min()),
        "dilution_by_head": angles.dilution(length).tolist(),
    }


def _pieces(windows: Tensor, short: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of windows [n, length + 1], cut into pieces of `short`."""
    return windows[:, :-1].reshape(-1, short), windows[:, 1:].reshape(-1, short)


def _growing(short: int, length: int) -> list[int]:
    """The training length, doubled up to the whole: 64, 128, 256, 512."""
    lengths = [short]
    while 2 * lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    return [*lengths, length] if length > short else lengths


def _last(model: nn.Module, windows: Tensor, context: int, short: int) -> float:
    """Accuracy on the last `short` tokens of each text with so much context: the same tokens whatever it is."""
    seen = windows[:, -context - 1 :]
    return _share(predict(model, seen[:, :-1], seen[:, 1:]).hit[:, -short:])


def _seen(run: RunState) -> Iterator[Tensor]:
    """Texts of training: eight steps' worth."""
    config = run.config
    for step in range(8):
        yield torch.from_numpy(batch(run.task.corpus, config.data, config.seed, step)).to(run.device)[:, :-1]


def trained_on(run: RunState, method: Method, steps: int) -> nn.Module:
    """A copy of the weights after more steps at the method's length, the attention changed so, at a tenth of the
    rate. As many tokens a step as before, a fresh optimizer, the run's own schedule.
    """
    config = run.config
    several = max(1, config.data.batch * config.data.context // method.trained_at)
    data = {"context": method.trained_at, "batch": several}
    longer = RunState(with_values(config, data=data, optim={"lr": config.optim.lr / 10}, steps=steps))
    longer.model.load_state_dict(run.model.state_dict())
    for module, before in zip(attentions(longer.model), attentions(run.model), strict=True):
        module.spec = stretched(before.spec, method, config.data.context, method.trained_at)
    arithmetic = Arithmetic([longer], "its attention was changed after it was made")
    for step in range(steps):
        train_step(arithmetic, [step])
    return longer.model


def _share(hit: Tensor) -> float:
    return float(hit.cpu().double().mean())


@contextlib.contextmanager
def changed(model: nn.Module, method: Method, train_length: int, test_length: int) -> Iterator[None]:
    """Every attention of the model under a post-hoc method, afterwards as it was.

    Raises: RefusedError if the attention cannot be changed so.
    """
    modules = attentions(model)
    before = [m.spec for m in modules]
    after = [stretched(spec, method, train_length, test_length) for spec in before]
    try:
        for module, spec in zip(modules, after):
            module.spec = spec
        yield
    finally:
        for module, spec in zip(modules, before):
            module.spec = spec


def predict(model: nn.Module, tokens: Tensor, targets: Tensor) -> Predicted:
    """Next-token hits and losses of tokens [n t], about as many tokens at a time as fit a forward."""
    count = max(1, _TOKENS // tokens.shape[1])
    hits, losses = [], []
    for part, wanted in zip(tokens.split(count), targets.split(count)):
        logits = model(part).float()
        hits.append(logits.argmax(-1) == wanted)
        losses.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
    return Predicted(torch.cat(hits), torch.cat(losses))


def long_rows(out: Path, about: Json) -> list[Json]:
    """One dict per run, method and length by records.EXTRAPOLATION_COLUMNS; empty where not known yet or refused."""
    table = []
    for entry in about["runs"]:
        place = RunDirectory(out / "runs" / entry["run_id"])
        done = place.status is RunStatus.DONE
        lines = {(line["posthoc"], line["test_length"]): line for line in place.long_contexts()} if done else {}
        named = {"block": entry["role"], "form": entry["remedy"], "seed": entry["seed"], "run_id": entry["run_id"]}
        named["train_length"] = about["base"][entry["role"]]["data"]["context"]
        named["max_logit"] = place.summary()["max_logit"] if done else None
        contexts = LongContexts(**about["contexts"]).of(entry["remedy"])
        table += [_row(named, lines.get(pair, {}), pair) for pair in contexts.pairs]
    return table


def _row(named: Json, line: Json, pair: tuple[str, int]) -> Json:
    known = {**line, **named, "posthoc": pair[0], "test_length": pair[1]}
    return {name: known.get(name) for name in EXTRAPOLATION_COLUMNS}
