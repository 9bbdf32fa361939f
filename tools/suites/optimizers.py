"""torch's optimizers with all the arguments of its own optim_db, under `lalr` and `qk_clip`: right, refused or wrong.

Right: a clip at a threshold that no logit passes leaves the weights, to the bit, those of the optimizer alone; one at
half the largest logit, at rate 0, leaves that half; and with `lalr` weights stay finite where the plain run's do.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import qkeel
from qkeel.errors import QkeelError

STEPS = 4
HIGH = 1e9  # a threshold that no logit passes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one optimizer, one set of its arguments and one remedy."""

    optimizer: str
    arguments: str
    remedy: str
    verdict: str  # "right", "refused", "wrong", or "not run": the optimizer alone fails or is no optimizer of matrices
    said: str = ""


class Attention(nn.Module):
    """A layer of attention over two heads, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def verdicts() -> Iterator[Verdict]:
    """Of all that can step dense weights on a CPU."""
    for info in optim_db:
        name = info.optim_cls.__name__
        for given in info.optim_inputs_func(device="cpu"):
            options = {k: v for k, v in given.kwargs.items() if k not in ("capturable", "differentiable")}
            for remedy in ("lalr:tau=0.5", f"qk_clip:threshold={HIGH}", "qk_clip"):
                yield _verdict(info.optim_cls, name, given.desc, options, remedy)


def _verdict(make: Callable[..., Any], name: str, description: str, options: dict[str, Any], remedy: str) -> Verdict:
    known = {"optimizer": name, "arguments": description, "remedy": remedy}
    try:
        plain, _ = _trained(make, options, None)
    except Exception as error:
        return Verdict(**known, verdict="not run", said=f"alone: {type(error).__name__}: {error}"[:120])
    if not all(bool(p.isfinite().all()) for p in plain):
        return Verdict(**known, verdict="not run", said="alone it ends with weights that are not finite")
    try:
        found, said = _trained(make, options, remedy)
    except QkeelError as error:
        return Verdict(**known, verdict="refused", said=str(error)[:160])
    except Exception as error:
        return Verdict(**known, verdict="wrong", said=f"{type(error).__name__}: {error}"[:160])
    if not all(bool(p.isfinite().all()) for p in found):
        said = "weights are not finite, and alone they are"
    elif remedy.startswith(f"qk_clip:threshold={HIGH}"):
        said = "" if all(map(torch.equal, plain, found)) else "an idle clip changed weights"
    return Verdict(**known, verdict="wrong" if said else "right", said=said)


def _trained(make: Callable[..., Any], options: dict[str, Any], remedy: str | None) -> tuple[list[Tensor], str]:
    """The weights after some steps, and what the remedy did not do."""
    torch.manual_seed(0)
    model, x = Attention(), 3 * torch.randn(2, 6, 8)
    weights = [p for p in model.parameters() if p.ndim == 2] if make.__name__ == "Muon" else [*model.parameters()]
    clips, threshold = remedy == "qk_clip", _largest(model, x) / 2
    rate = options.get("lr", 0.01)
    options = {**options, "lr": 0 * rate if clips else rate}  # a tensor stays one
    optimizer = make(weights, **options)
    work = f"qk_clip:threshold={threshold}" if clips else remedy
    handle = None if work is None else qkeel.apply(model, work, optimizer, batch=x)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(1 if clips else STEPS):
        closure()
        optimizer.step(closure) if make.__name__ == "LBFGS" else optimizer.step()
    if handle is not None:
        handle.remove()
    largest = _largest(model, x)
    off = clips and abs(largest - threshold) > 1e-3 * threshold
    said = f"a clip at {threshold:.4g} left a largest logit of {largest:.4g}" if off else ""
    return [p.detach().clone() for p in model.parameters()], said


def _largest(model: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (model.q, model.k))
        z = (q @ k.mT / 2).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
        return float(z.max())
