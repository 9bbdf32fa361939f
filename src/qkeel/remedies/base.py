"""What a remedy is, what it is applied to, and the mechanism behind per-head steps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import RefusedError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.sites.site import AttentionSite, HeadSlice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """What a remedy is applied to. `train_length`: tokens per training sequence, where a formula needs it."""

    model: nn.Module
    optimizer: Optimizer | None
    sites: list[AttentionSite]
    train_length: int | None = None

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter of the model by qualified name."""
        return self.model.get_parameter(name)

    def need_optimizer(self, remedy: str) -> Optimizer:
        """The optimizer, or the error that asks for it."""
        if self.optimizer is None:
            raise RefusedError(f"{remedy} acts on optimizer steps: call qkeel.apply({remedy!r}, model, optimizer)")
        return self.optimizer


class Remedy(abc.ABC):
    """A named, sourced change. Subclasses are frozen dataclasses; their fields are the remedy's options."""

    name: ClassVar[str]
    line: ClassVar[str]
    source: ClassVar[str]

    __slots__ = ()

    def supports(self, site: AttentionSite) -> Refusal | None:
        """None if the remedy makes sense at this site, else the reason."""
        return None

    @abc.abstractmethod
    def apply(self, target: Target) -> Handle:
        """Make the change; the handle undoes it."""


def check_linear(optimizer: Optimizer, remedy: str, names: list[str], params: list[nn.Parameter]) -> None:
    """Raise unless the optimizer holds the weights, in full precision, and its step is linear in the LR."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in zip(names, params):
        if id(p) not in held:
            raise RefusedError(
                f"{remedy} scales steps of {name}, which this optimizer does not hold; give the one that does"
            )
        if p.dtype in (torch.bfloat16, torch.float16):
            raise RefusedError(
                f"{remedy} scales small steps, which {p.dtype} weights round away ({name}); keep float32 weights "
                "and use autocast"
            )
    wanted = {id(p) for p in params}
    groups = [g for g in optimizer.param_groups if any(id(p) in wanted for p in g["params"])]
    if not all(_is_linear(optimizer, group) for group in groups):
        raise RefusedError(
            f"{remedy} needs an optimizer whose step is proportional to the learning rate; a probe step of "
            f"{type(optimizer).__name__} at half the rate was not half as long. Use AdamW, SGD, Muon, …"
        )


def _is_linear(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Step a small matrix at two rates from the same state, far into training, and compare the lengths."""
    deltas = []
    for factor in (1.0, 0.5):
        weight = nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        probe = _twin(optimizer, weight, group)
        gradient = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).sin()
        for _ in range(2):
            weight.grad = gradient.clone()
            probe.step()
        for state in probe.state.values():  # schedules inside an optimizer show late (Adafactor's 1/√t)
            if "step" in state:
                state["step"] = state["step"] * 0 + 1_000_000
        before = weight.detach().clone()
        for g in probe.param_groups:
            g["lr"] = g["lr"] * factor
        weight.grad = gradient.clone()
        probe.step()
        deltas.append(weight.detach() - before)
    return bool(torch.allclose(deltas[0] * 0.5, deltas[1], rtol=1e-4, atol=1e-12 * float(deltas[0].abs().max())))


def _twin(optimizer: Optimizer, weight: nn.Parameter, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and options that holds one small matrix."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if not k.startswith("_optimizer_step")})
    Optimizer.__init__(twin, [weight], {k: v for k, v in group.items() if k not in ("params", "initial_lr")})
    # Large rates leave the probe's arithmetic in a range where a half shows.
    for g in twin.param_groups:
        g["lr"] = torch.tensor(float(g["lr"])) if isinstance(g["lr"], Tensor) else float(g["lr"]) or 1.0
        for flag in ("fused", "foreach", "capturable"):
            if flag in g:
                g[flag] = False
    return twin


def scale_steps(
    target: Target,
    remedy: str,
    slices: list[HeadSlice],
    factors: Callable[[list[Tensor]], list[Tensor]],
) -> Callable[[], None]:
    """Scale every optimizer step of some weights, per head. Returns what undoes it.

    w ← lerp(w_old, w_new, f): the whole step, decoupled weight decay included, is scaled. `factors` gets the
    weights before the step and gives a tensor per weight that broadcasts against it; factor 1 leaves the new
    weight bit for bit. Exact for every optimizer linear in the learning rate. The one copy of the weights lives
    only inside the step. Nothing is read back to the host.
    """
    optimizer = target.need_optimizer(remedy)
    params = [target.parameter(s.parameter) for s in slices]
    check_linear(optimizer, remedy, [s.parameter for s in slices], params)
    saved: list[Tensor] = []
    scale: list[Tensor] = []

    @torch.no_grad()
    def before(*_: Any) -> None:
        saved[:] = [p.detach().clone() for p in params]
        scale[:] = factors(saved)

    @torch.no_grad()
    def after(*_: Any) -> None:
        for p, old, f in zip(params, saved, scale):
            # In place on `old`, then copied: the parameter keeps its storage.
            p.copy_(torch.lerp(old, p.detach(), f.to(p.dtype)))
        saved.clear()
        scale.clear()

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo
