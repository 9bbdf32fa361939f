"""What is measured on held-out text: the loss, and the attention statistics of the probe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.functional.stats import LogitStats
from qkeel.sites import Tap

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
    compiled = model._compiled_call_impl is not None  # what nn.Module.compile() sets
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train(was_training)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per token: logits [b t vocab], targets [b t]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def heldout_loss(model: nn.Module, windows: Tensor, sequences: int) -> float:
    """Mean cross entropy over held-out windows [n, context + 1], `sequences` at a time."""
    with measuring(model):
        parts = [token_loss(model(part[:, :-1]), part[:, 1:]).double() * len(part) for part in windows.split(sequences)]
    return float(torch.stack(parts).sum() / len(windows))


def probe(model: nn.Module, windows: Tensor) -> Probe:
    """Attention statistics of one forward over the probe windows [n, context + 1]."""
    with measuring(model), Tap(model) as tap:
        model(windows[:, :-1])
        stats = list(tap.read().values())
    heads = torch.stack([_per_head(name, stats) for name in PROBE_FIELDS]).float().cpu().numpy()
    top = {name: torch.stack([getattr(s, name).amax() for s in stats]).amax() for name in _LARGEST}
    low = torch.stack([s.min_logit.amin() for s in stats]).amin()
    entropy = torch.stack([s.entropy.mean() for s in stats]).mean()
    record = {name: float(value) for name, value in top.items()}
    return Probe({**record, "min_logit": float(low), "entropy": float(entropy)}, heads)


_LARGEST = ("max_logit", "max_abs_logit", "capped_max_logit")


def _per_head(name: str, stats: Sequence[LogitStats]) -> Tensor:
    """[layer, head]; a key head's value stands at each query head of its group."""
    n_heads = len(stats[0].max_logit)
    values = [getattr(s, name) for s in stats]
    return torch.stack([v.repeat_interleave(n_heads // len(v)) for v in values])
