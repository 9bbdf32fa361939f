"""Trial steps on a small matrix: whether a remedy may change an optimizer's steps, or the weights between them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.capture.random_streams import RandomStreams
from qkeel.errors import RefusedError, caution
from qkeel.patching.optimizers import runs_step_hooks
from qkeel.remedies.saved_state import GROUP_KEY

ParamGroup = dict[str, Any]

# Entries of a parameter group that belong to its parameters, its scheduler or a remedy, not to the update rule.
_NOT_OPTIONS = ("params", "param_names", "initial_lr", GROUP_KEY)
# Steps after which a slow copy of the weights has overwritten them.
_SLOW_COPY_STEPS = 12
# The step of the trial, since schedules inside an optimizer act late (Adafactor's 1/√t).
_LATE_STEP = 1_000_000


def optimizers_inside(optimizer: object) -> list[Optimizer]:
    """Returns the optimizers that an object holds in its attributes, alone or in lists, tuples and dicts."""
    inner: list[Optimizer] = []
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value
        entries = held if isinstance(value, (list, tuple, dict)) else [value]
        inner.extend(entry for entry in entries if isinstance(entry, Optimizer))
    return inner


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that takes the steps, inside any wrappers that run no hooks, such as accelerate's.

    A wrapper that runs hooks and calls another optimizer inside its own step is itself returned, since it may do
    more than that."""
    while not runs_step_hooks(optimizer):
        inner = optimizers_inside(optimizer)
        if len(inner) != 1:
            break
        optimizer = inner[0]
    return optimizer


def check_one_optimizer(optimizer: Optimizer, remedy: str) -> None:
    """Raises RefusedError for an object that steps several optimizers, whose own steps change no weights."""
    inner = optimizers_inside(optimizer)
    if len(inner) > 1:
        kinds = ", ".join(type(member).__name__ for member in inner)
        raise RefusedError(
            f"{remedy} acts on the steps of optimizers, and this {type(optimizer).__name__} only calls several of them "
            f"({kinds}). Pass these, as in apply(model, {remedy!r}, [first, second])"
        )


def check_steps(
    optimizer: Optimizer,
    remedy: str,
    tensors: Iterable[Tensor | None],
    *,
    is_scaled: bool = True,
) -> None:
    """Raises RefusedError unless a remedy may change an optimizer's steps of these tensors.

    Every remedy that acts in steps changes the weights between two of them, and an optimizer that keeps a copy of its
    own would undo that (schedule-free, lookahead). LBFGS takes each change for its own step when it estimates the
    curvature. With `is_scaled`, the remedy scales steps, which is exact only for a step that is linear in the learning
    rate. All of this is tried on a small matrix, never on the user's weights.

    Args:
        optimizer: the optimizer, which stays as it is.
        remedy: the remedy's name, for the messages.
        tensors: the tensors that the remedy changes; only their groups are tried.
        is_scaled: whether the remedy scales steps. An optimizer that cannot be tried is then refused; otherwise it is
            accepted with a warning.
    """
    kind = type(optimizer).__name__
    if not is_scaled and isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError(
            f"{remedy} changes weights after the step, and LBFGS mistakes every change of the weights for its own "
            "step when it estimates the curvature; use a first-order optimizer, such as AdamW"
        )
    changed = {id(tensor) for tensor in tensors if tensor is not None}
    for group in optimizer.param_groups:
        device = next((p.device for p in group["params"] if id(p) in changed), None)
        if device is None:
            continue
        streams = RandomStreams(group["params"])
        try:
            with torch.enable_grad():
                trial = functools.partial(_Trial, optimizer, group, device)
                if is_scaled:
                    _check_linear(trial, remedy, kind)
                _check_keeps_changes(trial, remedy, kind, "weight_decay" in group)
        finally:
            streams.restore()


@final
class _Trial:
    """A small matrix, which a new optimizer of the same class steps without any hooks."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: ParamGroup,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        **options: float,
    ) -> None:
        self.weight = nn.Parameter((torch.eye(4, dtype=dtype) + 0.1).to(device))
        gradient = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4).sin()
        self._gradient = gradient.to(device)
        self.optimizer = optimizer_like(
            optimizer, self.weight, {**_plain(group), **options}
        )
        step = type(self.optimizer).step
        # The class's step without the hooks that are registered for all optimizers.
        self._step: Callable[[Optimizer], object] = (
            vars(step)["__wrapped__"] if vars(step).get("hooked") else step
        )

    def run(self, steps: int) -> Tensor:
        """Takes steps and returns the weight after them."""
        for _ in range(steps):
            self.weight.grad = self._gradient.clone()
            self._step(self.optimizer)
        return self.weight.detach().clone()


def _check_linear(trial: Callable[..., _Trial], remedy: str, kind: str) -> None:
    """Raises RefusedError unless a step at half the rate, from the same state late in training, is half as long."""

    def step_at(share: float, dtype: torch.dtype) -> Tensor:
        stepped = trial(dtype=dtype)
        # Two steps, so that averages and momentum have begun.
        before = stepped.run(2)
        for state in stepped.optimizer.state.values():
            if "step" in state:
                # The number in its own type, an int or a tensor.
                state["step"] = state["step"] * 0 + _LATE_STEP
        for options in stepped.optimizer.param_groups:
            options["lr"] = options["lr"] * share
        return stepped.run(1) - before

    failure: Exception | None = None
    # Some optimizers and some devices support only float32, in which half a step is less exact.
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.float32, 5e-2)):
        try:
            full, half = step_at(1.0, dtype), step_at(0.5, dtype)
        except Exception as error:
            failure = error
            continue
        # A step of length 0 would be proportional to anything.
        longest = float(full.abs().max())
        if longest > 0 and torch.allclose(
            full * 0.5, half, rtol=tolerance, atol=tolerance * longest * 1e-3
        ):
            return
        raise RefusedError(
            f"{remedy} needs an optimizer whose step is proportional to the learning rate; a probe step of {kind} at "
            "half the rate was not half as long. Use AdamW, SGD, Muon, …"
        )
    raise RefusedError(
        f"{remedy} needs an optimizer whose step is proportional to the learning rate, and a probe step of {kind} "
        f"failed: {failure}. Use AdamW, SGD, Muon, …; if it wraps another optimizer, pass that one"
    ) from failure


def _check_keeps_changes(
    trial: Callable[..., _Trial], remedy: str, kind: str, decays: bool
) -> None:
    """Raises RefusedError if a matrix that is halved between two steps, at a rate of almost 0, does not stay halved."""
    try:
        # At such a rate whatever moves the matrix is a copy, and decay would be taken for one.
        stepped = trial(lr=1e-7, **({"weight_decay": 0.0} if decays else {}))
        halved = stepped.run(2) / 2
        stepped.weight.data.copy_(halved)
        keeps = torch.allclose(
            stepped.run(_SLOW_COPY_STEPS), halved, rtol=1e-2, atol=1e-2
        )
    except Exception as error:
        caution(
            f"{remedy} changes weights after the step. It is unknown whether {kind} keeps the change: a trial on a "
            f"small matrix failed ({type(error).__name__}: {error}). Check after some steps that the remedy's effect "
            "lasts"
        )
        return
    if not keeps:
        raise RefusedError(
            f"{remedy} changes weights after the step, and {kind} would overwrite them from its own copy of the "
            "weights (schedule-free, lookahead, …); use an optimizer that updates the weights directly"
        )


def optimizer_like(
    optimizer: Optimizer, weight: nn.Parameter, group: ParamGroup
) -> Optimizer:
    """Returns a new optimizer for one parameter, of the same class and with the options of the group.

    It is created by the constructor of the class, since some classes, such as Adagrad, set up their state there. It
    shares nothing with the original. A class whose constructor takes different arguments is replaced by the base class
    that defines its step.
    """
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    failure: Exception | None = None
    for cls in type(optimizer).__mro__:
        if issubclass(cls, Optimizer) and inspect.unwrap(cls.step) is inspect.unwrap(
            type(optimizer).step
        ):
            accepted = inspect.signature(cls).parameters
            keywords = {
                name: value for name, value in options.items() if name in accepted
            }
            try:
                return cls([{"params": [weight], **options}], **keywords)  # type: ignore[call-arg]
            except Exception as error:
                failure = failure or error
    assert failure is not None
    raise failure


def _plain(group: ParamGroup) -> ParamGroup:
    """Returns a group's options without the choice of implementation, at the highest known rate of the group."""
    flags = {
        flag: False
        for flag in ("fused", "foreach", "capturable", "differentiable")
        if flag in group
    }
    rates = [
        float(group[name])
        for name in ("lr", "initial_lr", "max_lr")
        if group.get(name) is not None
    ]
    # A warm-up may begin at rate 0. At a rate of 1, half a step clearly differs from a full step.
    rate = max(rates, default=0.0) or 1.0
    return {
        **group,
        **flags,
        "lr": torch.tensor(rate) if isinstance(group.get("lr"), Tensor) else rate,
    }
