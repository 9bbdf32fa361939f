"""A health check of a model, a run or a checkpoint, which answers in one sentence with a number and a threshold; the
sentence is that of `metrics.verdict`, checkpoints are read by `scan`, and the exit code is given by `cli.audit`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn

from qkeel.audit.allowed_inputs import Contract
from qkeel.audit.checkpoint_config import Geometry
from qkeel.audit.config_differences import call_differences
from qkeel.audit.output_gates import GateMode, shut_gates
from qkeel.audit.saturation import least_gradient, saturation_line
from qkeel.audit.scan import Scan, ScanProgress, outlier_heads, scan
from qkeel.audit.sees import check_sees
from qkeel.audit.visibility import PackedTokens, SeenKeys, findings, seen_keys
from qkeel.capture.calls import Seen
from qkeel.capture.example import arguments, copied, undisturbed
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import InvalidTypeError, InvalidValueError, NoAttentionError
from qkeel.frames.run_verdict import judge_run, standing_alarms
from qkeel.functional.statistics import LogitStats
from qkeel.handle import Handle
from qkeel.metrics import HARMFUL_LOGIT, Health, Status, judged
from qkeel.metrics.verdict import judged_as, judged_logits
from qkeel.patching.forward import unwrapped
from qkeel.patching.guards import FaultGuard
from qkeel.patching.held_objects import tensors_within
from qkeel.patching.modes import push_mode, take_off
from qkeel.records import RunDirectory
from qkeel.sites.find import found_sites, site_label
from qkeel.sites.logit_sample import LogitSample
from qkeel.sites.site import Sites
from qkeel.sites.softmax_weights import captured_calls
from qkeel.sites.tap import Tap, Visitor


@accepts_earlier_calls()
def check(
    model_or_path: nn.Module | str | Path,
    batch: object = None,
    *,
    sees: Contract | None = None,
    threshold: float = HARMFUL_LOGIT,
) -> Health:
    """Checks whether attention is healthy; `print` shows the result in one sentence, and `table()` returns each layer's
    numbers.

    Attention is not healthy if a logit is NaN or infinite, or more than `threshold` over the mean of its row as it
    enters the softmax (after a cap and without biases, so that no constant matters), if a layer's mean attention
    entropy is below 0.05 nats, if most heads of a layer are saturated or their output gates shut, or if queries give
    weight to what they should not see: later keys in a causal model, other documents of a packed batch, padding,
    pairs that a mask hides. A model is judged by two forward passes on the batch, after those of `find_sites`; it is
    left unchanged. A run is judged by all its records, and by its largest logit if these have no `logit_spread`. A
    checkpoint is judged by its weights alone, which give only an upper bound on the logits; a bound above the
    threshold is therefore "not known", not "not healthy".

    A head is saturated if its softmax passes back less than a fiftieth of what uniform attention on the same keys would
    (`softmax_gradient`), or less than a quarter where the scale is four times 1/√head_dim or more. Heads that attend to
    a fixed place, such as the first key or the key before, are not.

    Args:
        model_or_path: a model; the directory of a run that qkeel watched or trained; or a .safetensors file, a folder
            of shards or a Hugging Face folder.
        batch: input of the model: a tensor, a tuple of the forward's arguments or a dict of its keyword arguments.
        sees: what an output may depend on: "causal", `qkeel.Documents(ids)` or `qkeel.Window(size)`. Then this is
            checked, and nothing else: tokens that must not matter are changed, and the outputs at the other positions
            must not move. Where they do, the layer and head that let the change through are named, or the module
            where no attention is to blame.
        threshold: how far a logit may lie over the mean of its row, in nats.

    Raises:
        InvalidTypeError: `model_or_path` has the wrong type, or a model is given without a batch.
        NoAttentionError: no attention is observed in the forward pass.
        InvalidValueError: the threshold is not above 0.
        RunDirectoryError, DataError: the files cannot be read.

    Example:
        >>> from qkeel.nn import Attention
        >>> print(check(Attention(16, 2), torch.zeros(1, 4, 16)))
        healthy: largest logit 0 (Attention head 0), under 100, where logits begin to count as large
        >>> print(check(Attention(16, 2), torch.randn(1, 4, 16), sees="causal"))
        healthy: sees what it should (causal): output did not move in 3 trials
    """
    # In this form NaN is refused as well.
    if not threshold > 0:
        raise InvalidValueError(f"expected a threshold above 0 nats, got {threshold}")
    if isinstance(model_or_path, nn.Module):
        if batch is None:
            raise InvalidTypeError(
                "expected a batch that the model accepts: qkeel.check(model, batch)"
            )
        if sees is not None:
            return check_sees(model_or_path, batch, sees)
        return _of_model(model_or_path, batch, threshold)
    if not isinstance(model_or_path, (str, Path)):
        raise InvalidTypeError(
            f"expected a model, or the path of a run or checkpoint, got {type(model_or_path).__name__}"
        )
    if sees is not None:
        raise InvalidTypeError(
            "expected a model with sees=, which changes tokens, got the path of files"
        )
    path = Path(model_or_path)
    return _of_run(path, threshold) if is_run(path) else of_scan(scan(path), threshold)


def is_run(path: Path) -> bool:
    """True if a directory contains the records of a run."""
    return any((path / name).is_file() for name in ("metrics.jsonl", "DONE"))


def check_checkpoint(
    path: Path, flags: Geometry, threshold: float, on_progress: ScanProgress
) -> Health:
    """Checks a checkpoint whose head counts may come from `flags`; see `check`."""
    return of_scan(scan(path, flags=flags, on_progress=on_progress), threshold)


def _of_model(model: nn.Module, batch: object, threshold: float) -> Health:
    args, kwargs = arguments(batch, "batch")
    inner = unwrapped(model)
    sites = found_sites(inner, args, kwargs)
    guard = FaultGuard("looking at attention failed: {}")
    # The mode of the model is not changed: what is judged is what is run, dropout included.
    gates = _GateVisitor()
    with Tap(inner, guard=guard) as tap, torch.no_grad(), undisturbed(inner):
        tap.sites, tap.visitor = sites, gates
        output = inner(*copied(args), **copied(kwargs))
        is_finite = all(
            bool(x.isfinite().all())
            for x in tensors_within(output)
            if x.is_floating_point()
        )
        statistics = tap.read()
    if guard.error is not None:
        raise guard.error
    if not statistics:
        raise NoAttentionError(
            f"no attention was seen in a forward pass of this {type(inner).__name__}"
        )
    rows, broken = [], []
    largest = entropy = math.nan
    head_name = layer_name = ""
    for name, stats in statistics.items():
        label = site_label(name, type(inner).__name__)
        raw, capped, spreads = [
            x.double().numpy(force=True)
            for x in (stats.max_logit, stats.capped_max_logit, stats.logit_spread)
        ]
        logits = judged_logits(raw, capped, spreads)
        # A head whose rows see no key.
        logits[logits == -np.inf] = math.nan
        head = int(np.where(np.isnan(logits), -np.inf, logits).argmax())
        top = float(logits[head])
        # Nor is there an entropy of such a head.
        entropies = stats.entropy.double().masked_fill(stats.n_queries == 0, math.nan)
        mean = float(entropies.nanmean())
        if bool((stats.non_finite > 0).any()):
            broken.append(label)
        # A head without a number must not win by being compared.
        # Comparisons with NaN are false, so the first number replaces it.
        if not top <= largest and not math.isnan(top):
            largest = top
            head_name = f"{label} head {head}{judged_as(top, raw[head], capped[head])}"
        if not mean >= entropy and not math.isnan(mean):
            entropy, layer_name = mean, label
        rows.append(
            (
                label,
                _text(top),
                str(head),
                _text(float(np.fmax.reduce(raw))),
                _text(mean),
            )
        )
    status, sentence = judged(
        largest,
        head_name,
        entropy=entropy,
        lowest=layer_name,
        broken=broken,
        threshold=threshold,
    )
    calls = captured_calls(inner, batch, sites)
    tokens = PackedTokens.of(inner, args, kwargs)
    layers = {
        name: seen_keys(site_label(name, type(inner).__name__), of_site, tokens)
        for name, of_site in calls.items()
    }
    unexpected = findings(inner, tokens, layers.values(), finite=is_finite)
    unexpected += call_differences(inner, layers, sites)
    unexpected += shut_gates(
        {site_label(name, type(inner).__name__): x for name, x in gates.gates.items()}
    )
    unexpected += _saturation(statistics, layers, calls, sites)
    # What is seen and should not be outweighs any number: a leak is wrong at every size of logits.
    if unexpected:
        status = Status.NOT_HEALTHY
        sentence = (
            f"not healthy: {'; '.join(unexpected)}; {sentence.partition(': ')[2]}"
        )
    if sites.missed:
        total = len(statistics) + len(sites.missed)
        sentence += (
            f"; {len(sites.missed)} of {total} attention layers are not understood"
        )
    columns = ("layer", "logit spread", "head", "max logit", "entropy")
    return Health(
        status=status,
        sentence=sentence,
        largest=largest,
        threshold=threshold,
        columns=columns,
        rows=tuple(rows),
    )


@final
class _GateVisitor(Visitor):
    """Follows the outputs of attention to their gates in the pass that a tap measures."""

    def __init__(self) -> None:
        self._mode = GateMode()
        self.gates = self._mode.gates

    def looking(self, may_train: bool) -> Handle | None:
        push_mode(self._mode)
        return Handle(lambda: take_off(self._mode))

    def reads_plain(self, name: str) -> bool:
        return False

    def call(self, name: str, call: Seen, may_train: bool) -> None:
        self._mode.captured(name)


def _saturation(
    statistics: Mapping[str, LogitStats],
    layers: Mapping[str, SeenKeys],
    calls: Mapping[str, Sequence[Seen]],
    sites: Sites,
) -> list[str]:
    """Says which layers have most of their heads saturated, with the line to act; a single head is common, and
    healthy."""
    saturated = {}
    for name, layer in layers.items():
        stats = statistics.get(name)
        if stats is None or layer.positional is None or not layer.competes:
            continue
        # A head whose rows see one key or none has nothing to pass back.
        gradients = stats.softmax_gradient.masked_fill(stats.n_free == 0, math.nan)
        is_low = (gradients.cpu() < least_gradient(layer.scale)) & ~layer.positional
        n_heads = int(is_low.sum())
        if n_heads > max(1, len(gradients) / 2):
            saturated[name] = n_heads
    if not saturated:
        return []
    name, n_heads = next(iter(saturated.items()))
    stats, layer, n_more = statistics[name], layers[name], len(saturated) - 1
    site = next((site for site in sites if site.name == name), None)
    gradients = stats.softmax_gradient
    line, factor = saturation_line(site, layer.scale, float(stats.logit_spread.max()))
    effect, sample = "", LogitSample.of(calls[name][0])
    if sample is not None and math.isfinite(factor):
        head = int(stats.logit_spread.argmax())
        effect = sample.effect(head, factor=factor)
        effect = effect and f" {factor:.3g} times q·k would, in head {head}, {effect}."
    return [
        f"{layer.layer}{f' and {n_more} more' if n_more else ''} is saturated: {n_heads} of {len(gradients)} heads pass "
        f"back under {least_gradient(layer.scale):g} of the gradient that uniform attention would (median "
        f"{float(gradients.median()):.2g}).{effect} To act: {line}"
    ]


def _of_run(path: Path, threshold: float) -> Health:
    run = RunDirectory(path)
    run.check_complete()
    events = run.events()
    # A run that was killed at once has none.
    heads = run.heads()
    if len(heads.steps) and "max_logit" in heads.values:
        return judge_run(heads, events, threshold)
    status, sentence = judged(
        math.nan, threshold=threshold, alarms=standing_alarms(events)
    )
    return Health(
        status=status, sentence=sentence, largest=math.nan, threshold=threshold
    )


def of_scan(scanned: Scan, threshold: float = HARMFUL_LOGIT) -> Health:
    """Judges a checkpoint by its weights, which imply an upper bound on the logits if there are norms."""
    rows, unread, assumptions = [], [], []
    largest, layer = math.nan, ""
    for site in scanned.sites:
        bounds = site.bounds()
        # One head without a bound leaves the layer without one.
        bound = max(bounds) if all(map(math.isfinite, bounds)) else math.nan
        if math.isnan(bound):
            unread.append(site.name)
        # The first bound replaces NaN, with which every comparison is false.
        elif not bound <= largest:
            largest, layer = bound, site.name
        for assumed in site.assumed:
            assumptions.append(f"{site.name} is read by conventions ({assumed})")
        kind = "q, k norm" if any(map(math.isfinite, site.gain_bound)) else "-"
        rows.append((site.name, _text(bound), kind, str(sum(site.outlier))))
    non_finite = [tensor.name for tensor in scanned.tensors if tensor.non_finite]
    unread += [unknown.name for unknown in scanned.unknown]
    status = Status.NOT_KNOWN
    if non_finite:
        status = Status.NOT_HEALTHY
        sentence = f"not healthy: NaN or infinite weights in {_few(non_finite)}"
    elif unread or not scanned.sites:
        name = _few(unread, 1, " layers") if unread else "this model"
        sentence = (
            f"not known: weights are finite but imply no bound on the logits of {name}"
        )
    elif largest > threshold:
        sentence = f"not known: weights allow logits up to {largest:,.4g} ({layer}), and the threshold is {threshold:,g}"
    elif assumptions:
        sentence = f"not known: weights would allow logits up to {largest:,.4g} ({layer}), but {assumptions[0]}"
    else:
        status = Status.HEALTHY
        sentence = f"healthy: no input can produce a logit over {largest:,.4g} ({layer}); the threshold is {threshold:,g}"
    if status is Status.NOT_KNOWN:
        sentence += "; to decide, check a pass on data: qkeel.check(model, batch)"
    if outliers := outlier_heads(scanned):
        sentence += (
            f". Outlier heads (|Wq'Wk|_2 far above the median): {_few(outliers)}"
        )
    columns = ("layer", "logit bound", "normed", "outlier heads")
    return Health(
        status=status,
        sentence=sentence,
        largest=largest,
        threshold=threshold,
        columns=columns,
        rows=tuple(rows),
    )


def _few(names: Sequence[str], count: int = 3, noun: str = "") -> str:
    n_more = len(names) - count
    return ", ".join(names[:count]) + (
        f" and {n_more} more{noun}" if n_more > 0 else ""
    )


def _text(value: float) -> str:
    return "-" if not math.isfinite(value) and not value > 0 else f"{value:,.4g}"
