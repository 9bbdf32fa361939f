"""The measurements on held-out text: the loss, and the attention statistics of the probe."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.capture.statistics import Seen, statistics
from qkeel.errors import RefusedError
from qkeel.functional.norms import widest
from qkeel.functional.statistics.class_stats import ClassStats, TokenClasses
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.lab.tasks.task import Examples, Task
from qkeel.monitor.measure.logit_changes import change_between, frozen
from qkeel.patching.compiler_state import is_compiled
from qkeel.sites import Tap
from qkeel.sites.tap import Measure

# What the lab records of each head, by records.HEAD_FIELDS.
PROBE_FIELDS = ("max_logit", "min_logit", "entropy", "query_norm", "key_norm")


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Statistics over the probe: names of records.STEP_FIELDS, and [field, layer, head] by PROBE_FIELDS."""

    record: dict[str, float]
    heads: np.ndarray


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no compiled graph; afterwards the model is as it was."""
    was_training = model.training
    compiled = is_compiled(model)
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train(was_training)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per target: logits [... vocab], targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def heldout_numbers(model: nn.Module, examples: Examples, count: int, task: Task) -> dict[str, float]:
    """The val_loss over held-out examples, `count` at a time; by kind of target and the share of right answers where
    the task has them. By names of records.TASK_FIELDS."""
    losses, hits, kinds = [], [], []
    with measuring(model):
        for part in examples.split(count):
            logits = model(part.inputs)
            kind = widest(logits.device)
            losses.append(token_loss(logits, part.targets).to(kind) * len(part.inputs))
            hits.append((logits.argmax(-1) == part.targets).to(kind).mean() * len(part.inputs))
            if part.kinds is not None:
                each = F.cross_entropy(logits.flatten(0, -2).float(), part.targets.flatten(), reduction="none")
                kinds.append(torch.stack([part.kinds.flatten().to(kind), each.to(kind)]))
    loss, accuracy = (float(torch.stack(values).sum() / len(examples.inputs)) for values in (losses, hits))
    by_kind = _by_kind(torch.cat(kinds, 1).cpu(), task) if kinds else {"val_loss": loss}
    return {**by_kind, **({"val_accuracy": accuracy} if task.classifies else {})}


def _by_kind(each: Tensor, task: Task) -> dict[str, float]:
    """The val_loss/KIND of each kind present, of kinds and losses [2 n]; val_loss is that of the kinds in training."""
    kinds = each[0].long()
    sums, counts = torch.bincount(kinds, weights=each[1]).tolist(), torch.bincount(kinds).tolist()
    there = {name: (loss, n) for name, loss, n in zip(task.kinds, sums, counts) if n}
    total, count = (sum(there[name][i] for name in task.trained if name in there) for i in (0, 1))
    means = {f"val_loss/{name}": loss / n for name, (loss, n) in there.items()}
    return {"val_loss": total / count if count else math.nan, **means}


def remembered(model: nn.Module, inputs: Tensor) -> list[Seen]:
    """The attention calls of one forward over the probe's inputs, for `logit_change` after a step."""
    kept: list[Seen] = []
    with measuring(model), _tapped(model, lambda call: kept.append(frozen(call))):
        model(inputs)
    return kept


def logit_change(before: Sequence[Seen], after: Sequence[Seen]) -> dict[str, float]:
    """The root mean square change of the logits over all heads and layers, by its name; {} where it is not known."""
    try:
        changes = [change_between(*pair) for pair in zip(before, after)]
    except RefusedError:  # a position that does not fold into q and k
        return {}
    return mean_change([change.rms for change in changes if change is not None])


def mean_change(by_layer: Sequence[Tensor]) -> dict[str, float]:
    """The root mean square over layers and heads [h] of root mean square changes; {} of none."""
    if not by_layer:
        return {}
    changes = torch.cat(list(by_layer))
    return {"logit_change": float(changes.to(widest(changes.device)).square().mean().sqrt())}


def probe(model: nn.Module, inputs: Tensor, classes: TokenClasses | None = None, before: Sequence[Seen] = ()) -> Probe:
    """Attention statistics of one forward over the probe's inputs; split by token classes where there are any.

    Args:
        model, inputs: as trained, and the same for every step. classes: of the inputs. before: what was `remembered`
            before the last step, whose change of the logits is then recorded.
    """
    norms: list[Tensor] = []
    calls: list[Seen] = []

    def measure(call: Seen) -> LogitStats | None:
        calls.extend([call] if before else ())
        return statistics(call if classes is None else dataclasses.replace(call, classes=classes))

    with measuring(model), _tapped(model, measure) as tap, _leaving(model, norms):
        model(inputs)
        stats = list(tap.read().values())
    found = summed_up(stats)
    split = {} if classes is None else by_class([s.classes for s in stats if s.classes], classes, norms[-1])
    return Probe({**found.record, **split, **logit_change(before, calls)}, found.heads)


def summed_up(stats: Sequence[LogitStats]) -> Probe:
    """The recorded fields of the statistics of all layers."""
    heads = torch.stack([_per_head(name, stats) for name in PROBE_FIELDS]).float().cpu().numpy()
    top = {name: torch.stack([_named(s, name).amax() for s in stats]).amax() for name in _LARGEST}
    low = torch.stack([s.min_logit.amin() for s in stats]).amin()
    entropy = torch.stack([s.entropy.mean() for s in stats]).mean()
    record = {name: float(value) for name, value in top.items()}
    return Probe({**record, "min_logit": float(low), "entropy": float(entropy)}, heads)


def _tapped(model: nn.Module, measure: Measure) -> Tap:
    """A tap on one of the lab's models, which have qkeel's own modules alone."""
    tap = Tap(model, measure=measure)
    tap.own_alone = True
    return tap


@contextlib.contextmanager
def _leaving(model: nn.Module, norms: list[Tensor]) -> Iterator[None]:
    """L2 norms [b t] of the hidden states that leave the last block are appended to `norms`."""
    last = model.get_submodule("blocks")[-1]  # type: ignore[index]
    hook = last.register_forward_hook(lambda _, __, x: norms.append(x.float().norm(dim=-1)))
    try:
        yield
    finally:
        hook.remove()


def by_class(stats: Sequence[ClassStats], classes: TokenClasses, norms: Tensor) -> dict[str, float]:
    """Numbers of records.TASK_FIELDS by class and by pair of classes: mean over layers and heads, or the largest.

    norms: of the hidden states that leave the last block [b t]. A class that the probe lacks has none.
    """
    found: dict[str, float] = {}
    for i, name in enumerate(classes.names):
        mine = classes.query == i
        if bool(mine.any()):
            for field in ("query_norm", "key_norm"):
                found[f"{field}/{name}"] = float(torch.stack([_named(s, field)[:, i].mean() for s in stats]).mean())
            found[f"last_block_norm/{name}"] = float(norms[mine].mean())
    pairs = itertools.product(enumerate(classes.names), repeat=2)
    for (i, query), (j, key) in pairs:
        if all(bool(s.n_pairs[:, i, j].any()) for s in stats):
            at = f"{query}>{key}"
            found[f"max_logit/{at}"] = float(torch.stack([s.max_logit[:, i, j].amax() for s in stats]).amax())
            for field, own in (("attention_mass", "mass"), ("uniform_mass", "uniform_mass")):
                found[f"{field}/{at}"] = float(torch.stack([_named(s, own)[:, i, j].mean() for s in stats]).mean())
    return found


_LARGEST = ("max_logit", "max_abs_logit", "capped_max_logit")


def _per_head(name: str, stats: Sequence[LogitStats]) -> Tensor:
    """[layer, head]; a key head's value stands at each query head of its group."""
    n_heads = len(stats[0].max_logit)
    values = [_named(s, name) for s in stats]
    return torch.stack([v.repeat_interleave(n_heads // len(v)) for v in values])


def _named(stats: LogitStats | ClassStats, name: str) -> Tensor:
    """The statistic of a name that records give it."""
    value = getattr(stats, name)
    assert isinstance(value, Tensor)
    return value
