"""Is an optimizer's step proportional to its learning rate? Found out on a small matrix, never on the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.remedies.steps.head_weights import HeadWeights

ParamGroup = dict[str, Any]

# Entries of a parameter group that belong to its parameters or its scheduler, not to the update rule.
_NOT_OPTIONS = ("params", "param_names", "initial_lr")
_LOOKAHEAD = 12  # steps after which a slow copy of the weights has come back
_LATE = 1_000_000  # schedules inside an optimizer show late (Adafactor's 1/√t)


def check_linear(optimizer: Optimizer, remedy: str, weights: HeadWeights, *, decay: bool = True) -> list[Tensor | None]:
    """The tensors that the optimizer steps; raises unless steps are in full precision and linear in the rate. With
    decay=False its weight decay must be decoupled, so that it can be separated from the rest of the step."""
    tensors = weights.in_full_precision(optimizer, remedy, "scales small steps")
    for group, device in _groups_of(optimizer, tensors):
        with _apart(device):
            if not _tried(optimizer, remedy, group, device):
                raise RefusedError(
                    f"{remedy} needs an optimizer whose step is proportional to the learning rate; a probe step of "
                    f"{type(optimizer).__name__} at half the rate was not half as long. Use AdamW, SGD, Muon, …"
                )
            if not decay and group.get("weight_decay") and not _is_decoupled(optimizer, group, device):
                raise RefusedError(
                    f"{remedy} can leave decoupled weight decay at its full size, but that of "
                    f"{type(optimizer).__name__} is part of the gradient here; use decay=scaled or AdamW"
                )
    return tensors


def check_changes_last(optimizer: Optimizer, remedy: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise where the optimizer would undo a change of the weights between steps, from a copy of its own.

    Tried on a small matrix: halved between steps at rate almost 0, it must stay so. An optimizer that cannot be tried
    passes, but for LBFGS, whose curvature is read from how weights and gradients changed from step to step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError(
            f"{remedy} changes weights after the step, and LBFGS takes every change of the weights for its own step "
            "when it estimates the curvature; use an optimizer of first order, such as AdamW"
        )
    for group, device in _groups_of(optimizer, tensors):
        with _apart(device):
            try:
                keeps = _keeps_changes(optimizer, group, device)
            except Exception:  # nothing is known then
                continue
        if not keeps:
            raise RefusedError(
                f"{remedy} changes weights after the step, and {type(optimizer).__name__} keeps a copy of its own from "
                "which it would bring the old ones back (schedule-free, lookahead, …); use an optimizer that steps the "
                "weights themselves"
            )


def _groups_of(optimizer: Optimizer, tensors: Iterable[Tensor | None]) -> Iterator[tuple[ParamGroup, torch.device]]:
    """The groups that hold any of the tensors, and on which device."""
    wanted = {id(p) for p in tensors if p is not None}
    for group in optimizer.param_groups:
        device = next((p.device for p in group["params"] if id(p) in wanted), None)
        if device is not None:
            yield group, device


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leaves random streams and the gradient mode alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        yield


def _tried(optimizer: Optimizer, remedy: str, group: ParamGroup, device: torch.device) -> bool:
    for dtype in (torch.float64, torch.float32):  # some optimizers, and some devices, know float32 only
        try:
            return _is_linear(optimizer, group, device, dtype)
        except Exception as error:
            failed = error
    raise RefusedError(
        f"{remedy} needs an optimizer whose step is proportional to the learning rate, and a probe step of "
        f"{type(optimizer).__name__} failed: {failed}. Use AdamW, SGD, Muon, …; if it wraps another optimizer, give "
        "that one"
    ) from failed


def _is_linear(optimizer: Optimizer, group: ParamGroup, device: torch.device, dtype: torch.dtype) -> bool:
    """Step a small matrix at two rates from the same state, far into training, and compare the lengths."""
    deltas = []
    for factor in (1.0, 0.5):
        weight, gradient = _matrix(device, dtype)
        probe = _Probe(optimizer, weight, _plain(group))
        for _ in range(2):
            probe.step(gradient)
        for state in probe.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0 + _LATE
        before = weight.detach().clone()
        for g in probe.optimizer.param_groups:
            g["lr"] = g["lr"] * factor
        probe.step(gradient)
        deltas.append(weight.detach() - before)
    longest = float(deltas[0].abs().max())
    tight = 1e-4 if dtype == torch.float64 else 5e-2
    return longest > 0 and torch.allclose(deltas[0] * 0.5, deltas[1], rtol=tight, atol=tight * longest * 1e-3)


def _is_decoupled(optimizer: Optimizer, group: ParamGroup, device: torch.device) -> bool:
    """True if steps without a gradient are w ← (1 - ηλ)·w, the second as well: momentum would remember the first."""
    weight, gradient = _matrix(device, torch.float32)
    options = {**_plain(group), "lr": 0.01, "weight_decay": 0.5}
    probe = _Probe(optimizer, weight, options)
    start = weight.detach().clone()
    for _ in range(2):
        probe.step(torch.zeros_like(gradient))
    return torch.allclose(weight.detach(), start * (1 - 0.01 * 0.5) ** 2, rtol=1e-5)


def _keeps_changes(optimizer: Optimizer, group: ParamGroup, device: torch.device) -> bool:
    weight, gradient = _matrix(device, torch.float32)
    tiny = {"lr": 1e-7, **({"weight_decay": 0.0} if "weight_decay" in group else {})}
    probe = _Probe(optimizer, weight, {**_plain(group), **tiny})
    for _ in range(2):
        probe.step(gradient)
    with torch.no_grad():
        weight.mul_(0.5)
    halved = weight.detach().clone()
    for _ in range(_LOOKAHEAD):
        probe.step(gradient)
    return torch.allclose(weight.detach(), halved, rtol=1e-2, atol=1e-2)


def _matrix(device: torch.device, dtype: torch.dtype) -> tuple[nn.Parameter, Tensor]:
    """A small matrix and a gradient of it."""
    weight = nn.Parameter((torch.eye(4, dtype=dtype) + 0.1).to(device))
    return weight, torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4).sin().to(device)


class _Probe:
    """A new optimizer of the same class with one parameter, stepped without anyone's hooks."""

    def __init__(self, optimizer: Optimizer, weight: nn.Parameter, group: ParamGroup) -> None:
        self.optimizer, self._weight = probe_optimizer(optimizer, weight, group), weight
        step = type(self.optimizer).step
        # The class's step without the hooks that are registered for all optimizers.
        self._step: Callable[[Optimizer], object] = vars(step)["__wrapped__"] if vars(step).get("hooked") else step

    def step(self, gradient: Tensor) -> None:
        self._weight.grad = gradient.clone()
        self._step(self.optimizer)


def probe_optimizer(optimizer: Optimizer, weight: nn.Parameter, group: ParamGroup) -> Optimizer:
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


def _plain(group: ParamGroup) -> ParamGroup:
    """The options without the choice of implementation, at the highest rate the group is known to reach."""
    flags = {flag: False for flag in ("fused", "foreach", "capturable", "differentiable") if flag in group}
    known = [group[k] for k in ("lr", "initial_lr", "max_lr") if group.get(k) is not None]
    rates = [float(rate) for rate in known]
    # A warm-up may stand at rate 0; a rate of 1 leaves the arithmetic in a range where a half shows.
    rate = max(rates, default=0.0) or 1.0
    return {**group, **flags, "lr": torch.tensor(rate) if isinstance(group.get("lr"), Tensor) else rate}
