"""Is an optimizer's step proportional to its learning rate? Found out on a small matrix, never on the user's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.remedies.base import HeadWeights

# Entries of a parameter group that belong to its parameters or its scheduler, not to the update rule.
_NOT_OPTIONS = ("params", "param_names", "initial_lr")
_LATE = 1_000_000  # schedules inside an optimizer show late (Adafactor's 1/√t)


def check_linear(optimizer: Optimizer, remedy: str, weights: HeadWeights) -> None:
    """Raise unless the optimizer holds the weights, in full precision, and its step is linear in the rate."""
    weights.check_held(optimizer, remedy)
    for s, p in zip(weights.slices, weights.parameters):
        if p.dtype in (torch.bfloat16, torch.float16):
            raise RefusedError(
                f"{remedy} scales small steps, which {p.dtype} weights round away ({s.parameter}); keep float32 "
                "weights and use autocast"
            )
    wanted = {id(p) for p in weights.parameters}
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if id(p) in wanted]
        if held and not _tried(optimizer, remedy, group, held[0].device):
            raise RefusedError(
                f"{remedy} needs an optimizer whose step is proportional to the learning rate; a probe step of "
                f"{type(optimizer).__name__} at half the rate was not half as long. Use AdamW, SGD, Muon, …"
            )


def _tried(optimizer: Optimizer, remedy: str, group: dict[str, Any], device: torch.device) -> bool:
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        try:
            return _is_linear(optimizer, group, device, torch.float64)
        except Exception:  # some optimizers, and some devices, know float32 only
            try:
                return _is_linear(optimizer, group, device, torch.float32)
            except Exception as error:
                raise RefusedError(
                    f"{remedy} needs an optimizer whose step is proportional to the learning rate, and a probe step "
                    f"of {type(optimizer).__name__} failed: {error}. Use AdamW, SGD, Muon, …; if it wraps another "
                    "optimizer, give that one"
                ) from error


def _is_linear(optimizer: Optimizer, group: dict[str, Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Step a small matrix at two rates from the same state, far into training, and compare the lengths."""
    deltas = []
    for factor in (1.0, 0.5):
        weight = nn.Parameter((torch.eye(4, dtype=dtype) + 0.1).to(device))
        gradient = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4).sin().to(device)
        probe = twin(optimizer, weight, _plain(group))
        step = _bare_step(probe)
        for _ in range(2):
            weight.grad = gradient.clone()
            step(probe)
        for state in probe.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0 + _LATE
        before = weight.detach().clone()
        for g in probe.param_groups:
            g["lr"] = g["lr"] * factor
        weight.grad = gradient.clone()
        step(probe)
        deltas.append(weight.detach() - before)
    longest = float(deltas[0].abs().max())
    tight = 1e-4 if dtype == torch.float64 else 5e-2
    return longest > 0 and torch.allclose(deltas[0] * 0.5, deltas[1], rtol=tight, atol=tight * longest * 1e-3)


def twin(optimizer: Optimizer, weight: nn.Parameter, group: dict[str, Any]) -> Optimizer:
    """A new optimizer of the same class and options as the group's, holding one parameter.

    Made by the class itself, since some (Adagrad) set state up there; nothing of the original is shared. A class
    whose constructor takes something else is replaced by the base class that its step comes from.
    """
    options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
    first: Exception | None = None
    for cls in type(optimizer).__mro__:
        if issubclass(cls, Optimizer) and inspect.unwrap(cls.step) is inspect.unwrap(type(optimizer).step):
            known = inspect.signature(cls).parameters
            try:
                return cls([{"params": [weight], **options}], **{k: v for k, v in options.items() if k in known})  # type: ignore[call-arg]
            except Exception as error:
                first = first or error
    assert first is not None
    raise first


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The options without the choice of implementation, at the highest rate the group is known to reach."""
    flags = {flag: False for flag in ("fused", "foreach", "capturable", "differentiable") if flag in group}
    rates = [float(group[k]) for k in ("lr", "initial_lr", "max_lr") if k in group]
    # A warm-up may stand at rate 0; a rate of 1 leaves the arithmetic in a range where a half shows.
    rate = max(rates, default=0.0) or 1.0
    return {**group, **flags, "lr": torch.tensor(rate) if isinstance(group.get("lr"), Tensor) else rate}


def _bare_step(probe: Optimizer) -> Any:
    """The class's step without the hooks that are registered for all optimizers."""
    step = type(probe).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
