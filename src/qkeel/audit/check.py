"""A health check of a model, a run or a checkpoint, which answers in one sentence with a number and a threshold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn

from qkeel.audit.scan import Scan, ScanProgress, largest_bounds, scan
from qkeel.audit.sees import Contract, check_sees
from qkeel.audit.tensor_heads import Geometry
from qkeel.audit.visibility import findings, read_visibility
from qkeel.capture.example import arguments, copied, tensors, undisturbed
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import InvalidTypeError, InvalidValueError, NoAttentionError
from qkeel.functional.statistics import LogitStats
from qkeel.metrics import HARMFUL_LOGIT, Health, Status, judged
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import FaultGuard
from qkeel.records import NON_FINITE, Heads, RunDirectory, fold_heads
from qkeel.sites.find import found_sites, site_label
from qkeel.sites.tap import Tap


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

    Attention is not healthy if a logit is NaN, infinite or above `threshold`, if a layer's mean attention entropy is
    below 0.05 nats, or if queries give weight to what they should not see: later keys in a causal model, other
    documents of a packed batch, padding, pairs that a mask hides. A model is judged by two forward passes on the batch,
    after those of `find_sites`; it is left unchanged. A run is judged by all its records. A checkpoint is judged by its
    weights alone, which give only an upper bound on the logits; a bound above the threshold is therefore "not known",
    not "not healthy".

    Args:
        model_or_path: a model; the directory of a run that qkeel watched or trained; or a .safetensors file, a folder
            of shards or a Hugging Face folder.
        batch: input of the model: a tensor, a tuple of the forward's arguments or a dict of its keyword arguments.
        sees: what an output may depend on: "causal", `qkeel.Documents(ids)` or `qkeel.Window(size)`. Then this is
            checked, and nothing else: tokens that must not matter are changed, and the outputs at the other positions
            must not move. Where they do, the layer and head that let the change through are named, or the module
            where no attention is to blame.
        threshold: the largest accepted logit, in nats.

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
    if not threshold > 0:
        raise InvalidValueError(f"expected a threshold above 0 nats, got {threshold}")
    if isinstance(model_or_path, nn.Module):
        if batch is None:
            raise InvalidTypeError("expected a batch that the model accepts: qkeel.check(model, batch)")
        if sees is not None:
            return check_sees(model_or_path, batch, sees)
        return _of_model(model_or_path, batch, threshold)
    if not isinstance(model_or_path, (str, Path)):
        raise InvalidTypeError(
            f"expected a model, or the path of a run or checkpoint, got {type(model_or_path).__name__}"
        )
    if sees is not None:
        raise InvalidTypeError("expected a model with sees=, which changes tokens, got the path of files")
    path = Path(model_or_path)
    return _of_run(path, threshold) if is_run(path) else of_scan(scan(path), threshold)


def is_run(path: Path) -> bool:
    """True if a directory contains the records of a run."""
    return (path / "metrics.jsonl").is_file()


def check_checkpoint(path: Path, flags: Geometry, threshold: float, on_progress: ScanProgress) -> Health:
    """Checks a checkpoint whose head counts may come from `flags`; see `check`."""
    return of_scan(scan(path, flags=flags, on_progress=on_progress), threshold)


def _of_model(model: nn.Module, batch: object, threshold: float) -> Health:
    args, kwargs = arguments(batch, "batch")
    inner = unwrapped(model)
    sites, _ = found_sites(inner, args, kwargs)
    guard = FaultGuard("looking at attention failed: {}")
    with Tap(inner, guard=guard) as tap, torch.no_grad(), undisturbed(inner):
        tap.sites = sites
        output = inner(*copied(args), **copied(kwargs))
        finite = all(bool(x.isfinite().all()) for x in tensors(output) if x.is_floating_point())
        found = tap.read()
    if guard.error is not None:
        raise guard.error
    if not found:
        raise NoAttentionError(f"no attention was seen in a forward pass of this {type(inner).__name__}")
    rows, largest, where = [], math.nan, ""
    lowest, entropy, broken = "", math.nan, []
    for name, stats in found.items():
        label = site_label(name, type(inner).__name__)
        top, head, mean, bad = _numbers(stats)
        if bad:
            broken.append(label)
        if not top <= largest and not math.isnan(top):
            largest, where = top, f"{label} head {head}"
        if not mean >= entropy and not math.isnan(mean):
            entropy, lowest = mean, label
        rows.append((label, _text(top), str(head), _text(mean)))
    status, sentence = judged(largest, where, entropy=entropy, lowest=lowest, broken=broken, threshold=threshold)
    unexpected = findings(inner, batch, read_visibility(inner, batch, sites), finite=finite)
    if unexpected:
        status = Status.NOT_HEALTHY
        sentence = f"not healthy: {'; '.join(unexpected)}; {sentence.partition(': ')[2]}"
    if sites.missed:
        sentence += f"; {len(sites.missed)} of {len(found) + len(sites.missed)} attention layers are not understood"
    columns = ("layer", "max logit", "head", "entropy")
    return Health(
        status=status, sentence=sentence, largest=largest, threshold=threshold, columns=columns, rows=tuple(rows)
    )


def _numbers(stats: LogitStats) -> tuple[float, int, float, bool]:
    """Returns a site's largest logit, the head of that logit, the mean entropy of the heads, and whether a logit is not
    finite."""
    values = stats.max_logit.double()
    head = int(values.nan_to_num(-math.inf).argmax())
    entropy = stats.value("entropy")
    mean = math.nan if entropy is None else float(entropy.double().nanmean())
    bad = stats.value(NON_FINITE)
    return float(values[head]), head, mean, bad is not None and bool((bad > 0).any())


def _of_run(path: Path, threshold: float) -> Health:
    run = RunDirectory(path)
    records = run.metrics()
    if not records:
        status, sentence = judged(math.nan, threshold=threshold)
        return Health(status=status, sentence=sentence, threshold=threshold)
    heads = run.heads() if (path / "heads.json").exists() else None
    if heads is None or not len(heads.steps) or "max_logit" not in heads.values:
        known = [float(r["max_logit"]) for r in records if isinstance(r.get("max_logit"), (int, float))]
        largest = max((x for x in known if not math.isnan(x)), default=math.nan)
        status, sentence = judged(
            largest, broken=["the run"] if any(map(math.isnan, known)) else [], threshold=threshold
        )
        return Health(status=status, sentence=sentence, largest=largest, threshold=threshold)
    found = _of_heads(heads, threshold)
    alarms = [e for e in run.events() if e.get("event") == "alarm" and e.get("severity") != "notice"]
    if found.status is not Status.HEALTHY or not alarms:
        return found
    raised = f"{len(alarms)} alarm{'s' if len(alarms) > 1 else ''}, {'the first ' if len(alarms) > 1 else ''}"
    return dataclasses.replace(found, sentence=f"{found.sentence}; the run raised {raised}at step {alarms[0]['step']}")


def _of_heads(heads: Heads, threshold: float) -> Health:
    """Judges a run by all records: the largest logit of any record, and the entropy of the last."""
    logits = torch.from_numpy(heads.values["max_logit"].copy()).double()  # [records layers heads]
    bad = heads.values.get(NON_FINITE)
    flat = logits.nan_to_num(-math.inf).flatten()
    at = int(flat.argmax())
    record, layer, head = (int(i) for i in torch.unravel_index(torch.tensor(at), logits.shape))
    named = heads.layers or [f"layer {i}" for i in range(logits.shape[1])]  # runs of the lab do not name them
    names = [name or "the model itself" for name in named]
    largest = float(flat[at]) if math.isfinite(float(flat[at])) or float(flat[at]) > 0 else math.nan
    last = heads.values.get("entropy")
    entropies = [math.nan] * len(names) if last is None else [float(x) for x in fold_heads("entropy", last[-1])]
    low = min(range(len(names)), key=lambda i: math.inf if math.isnan(entropies[i]) else entropies[i])
    broken = [] if bad is None else [names[i] for i in range(len(names)) if (bad[:, i] > 0).any()]
    where = f"{names[layer]} head {head}, step {int(heads.steps[record]):,}"
    status, sentence = judged(
        largest, where, entropy=entropies[low], lowest=names[low], broken=broken, threshold=threshold
    )
    tops = logits.nan_to_num(-math.inf).amax(dim=(0, 2)).tolist()
    now = logits[-1].nan_to_num(-math.inf).amax(dim=1).tolist()
    rows = tuple((names[i], _text(tops[i]), _text(now[i]), _text(entropies[i])) for i in range(len(names)))
    columns = ("layer", "max logit", "last", "entropy, last")
    return Health(status=status, sentence=sentence, largest=largest, threshold=threshold, columns=columns, rows=rows)


def of_scan(found: Scan, threshold: float = HARMFUL_LOGIT) -> Health:
    """Judges a checkpoint by its weights, which imply an upper bound on the logits if there are norms."""
    rows, bounds = [], []
    for site in found.sites:
        both = largest_bounds(site)
        known = [x for x in both if math.isfinite(x)]
        bound = max(known) if len(known) == len(both) else math.nan
        bounds.append((bound, site.name))
        normed = "q, k norm" if any(map(math.isfinite, site.gain_bound)) else "-"
        rows.append((site.name, _text(bound), normed, str(sum(site.outlier))))
    columns = ("layer", "logit bound", "normed", "outlier heads")
    bad = [t.name for t in found.tensors if t.non_finite]
    unbounded = [name for bound, name in bounds if math.isnan(bound)]
    largest, where = max(((b, n) for b, n in bounds if not math.isnan(b)), default=(math.nan, ""))
    assumed = [(site.name, why) for site in found.sites for why in site.assumed]
    apart = [f"{site.name} head {h}" for site in found.sites for h, out in enumerate(site.outlier) if out]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        status, text = Status.NOT_HEALTHY, f"not healthy: NaN or infinite weights in {', '.join(bad[:3])}{more}"
    elif unbounded or found.unknown or not bounds:
        left = [*unbounded, *(one.name for one in found.unknown)]
        status = Status.NOT_KNOWN
        text = f"not known: weights are finite but imply no bound on the logits of {left[0] if left else 'this model'}"
        text += f" and {len(left) - 1} more layers" if len(left) > 1 else ""
    elif largest <= threshold and assumed:
        status = Status.NOT_KNOWN
        name, why = assumed[0]
        text = (
            f"not known: weights would allow logits up to {largest:,.4g} ({where}), but {name} is read by conventions"
        )
        text += f" ({why})"
    elif largest <= threshold:
        status, text = (
            Status.HEALTHY,
            f"healthy: no input can produce a logit over {largest:,.4g} ({where}); the threshold is {threshold:,g}",
        )
    else:
        status = Status.NOT_KNOWN
        text = f"not known: weights allow logits up to {largest:,.4g} ({where}), and the threshold is {threshold:,g}"
    if status is Status.NOT_KNOWN:
        text += "; to decide, check a pass on data: qkeel.check(model, batch)"
    if apart:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        text += f". Outlier heads (|Wq'Wk|_2 far above the median): {', '.join(apart[:3])}{more}"
    return Health(status=status, sentence=text, largest=largest, threshold=threshold, columns=columns, rows=tuple(rows))


def _text(value: float) -> str:
    return "-" if not math.isfinite(value) and not value > 0 else f"{value:,.4g}"
