"""Remedies for the logits over the vocabulary: z-loss and a soft cap."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import tensors
from qkeel.errors import RefusedError
from qkeel.functional.logits import softcap
from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.nn.decoder import Decoder
from qkeel.remedies.base import Remedy, Target

# Finding the module that computes a model's final logits.


def logits_module(target: Target, remedy: str, named: str) -> nn.Module:
    """Returns the module called `named`, or the module whose output the model returns unchanged for the example.

    qkeel's own Decoder needs neither a name nor an example. For a pipeline stage other than the last, a placeholder is
    returned that never runs.

    Raises:
        RefusedError: there is no such module, there is no example, or the number of modules whose output is returned
            is not 1.
    """
    stage = dist.stage_of(target.model)
    if stage is not None and not stage[1]:
        # a different stage of the pipeline computes the logits.
        return nn.Identity()
    if named:
        try:
            return target.model.get_submodule(named)
        except AttributeError as error:
            raise RefusedError(
                f"{remedy}: this model has no module {named!r}; name the one that returns the logits"
            ) from error
    if isinstance(target.model, Decoder):
        return target.model.head
    if not any(target.batch):
        raise RefusedError(
            f"{remedy} changes the module that computes the final logits. Pass a batch from which the module can be "
            f"detected, apply(model, {remedy!r}, batch=batch), or the module's name, apply(model, {remedy!r}, "
            "module='lm_head')"
        )
    modules = _observed(target)
    if len(modules) != 1:
        raise RefusedError(
            f"{remedy} changes the module whose output is the model's floating-point output [... vocabulary]; this "
            f"{type(target.model).__name__} has {modules or 'none'}. Name the module: apply(model, {remedy!r}, "
            "module='lm_head')"
        )
    return target.model.get_submodule(modules[0])


def _observed(target: Target) -> list[str]:
    """Returns the names of the innermost modules whose output tensor is among the model's outputs."""
    first_outputs: dict[int, tuple[str, Tensor]] = {}

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            # Inner modules end first.
            first_outputs.setdefault(id(output), (name, output))

    with ExitStack() as hooks:
        for name, module in target.model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(
                    module.register_forward_hook(functools.partial(note, name)).remove
                )
        returned = target.returned()
    parts = tuple(returned.values()) if isinstance(returned, Mapping) else returned
    outputs = {id(x) for x in tensors(parts) if x.is_floating_point() and x.ndim > 1}
    return [name for key, (name, _) in first_outputs.items() if key in outputs]


# The softcap cap · tanh(z / cap) on the logits over the vocabulary.


def _capped(cap: float, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """A forward hook that is defined at module level, so that copies and pickles of the model keep it."""
    return softcap(output, cap)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinalSoftcap(Remedy):
    """Squashes the logits over the vocabulary so that none of them exceeds `cap`.

    This applies to training, evaluation and generation. `module` is the name of the module that computes the logits; if
    it is not given, the module is detected by running the example.
    """

    cap: float = 30.0
    module: str = ""

    name = "final_softcap"
    line = "squashes the logits over the vocabulary with cap·tanh(z/cap)"
    source = "Gemma 2, arXiv 2408.00118, section 2"
    rule = "logits over the vocabulary: z ← {cap:g} · tanh(z / {cap:g})"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        head = logits_module(target, self.name, self.module)
        hook = head.register_forward_hook(functools.partial(_capped, self.cap))
        # A z-loss is one of the final logits, whichever remedy was applied first.
        for key, other in [*head._forward_hooks.items()]:
            if isinstance(other, _LossHook):
                head._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]
        return Handle(hook.remove)


# The z-loss, coefficient · (ln Z)² per token, of which only the gradient is added to that of the loss.

LossWeight = Literal["loss", "mean"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZLoss(Remedy):
    """Trains on loss + coefficient · Σ_i c_i (ln Z_i)², where ln Z_i is the logsumexp of token i's final logits.

    The forward pass and the logged loss stay unchanged bit for bit. The backward pass adds 2 · coefficient · c_i · ln
    Z_i · softmax(z_i) to the gradient of the final logits z. c_i is the weight of token i's cross-entropy in the loss.
    weight="loss" computes it from the gradient, c_i = Σ_{j≠y} g_ij / Σ_{j≠y} p_ij (since g_i = c_i (p_i - e_y), y =
    argmin g_i), so that masked tokens, sums or means, accumulation, token weights and GradScaler have the same effect
    as in the loss. This requires a cross-entropy with one target per token, which is checked in the first backward
    pass. weight="mean" uses c_i = 1/(number of tokens) for any loss, and ignores loss scaling.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322
    (coefficient 1e-4). The function is `functional.logits.z_loss`.
    """

    coefficient: float = 1e-4  #: at least 0
    weight: LossWeight = "loss"
    module: str = ""  #: name of the module that computes the final logits; with "", the module is detected

    name, may_be_zero = "z_loss", ("coefficient",)
    line = "adds coefficient·(ln Z)² of the logits over the vocabulary to the loss, by its gradient"
    source = "Chowdhery et al. 2022, arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322"
    rule = "loss + {coefficient:g} · Σ_i c_i · (ln Z_i)², ln Z_i the logsumexp of token i's logits over the vocabulary"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        head = logits_module(target, self.name, self.module)
        hook = head.register_forward_hook(_LossHook(self.coefficient, self.weight))
        return Handle(hook.remove)


@final
class _LossHook:
    """A forward hook that adds the gradient of the z-loss.

    `checked` becomes True once the loss has proved to be a cross-entropy."""

    def __init__(self, coefficient: float, weight: LossWeight) -> None:
        self.coefficient, self.weight = coefficient, weight
        self.checked = weight == "mean"

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output
        return _AddGradient.apply(output, self)

    def gradient(self, z: Tensor, g: Tensor) -> Tensor:
        """Returns the gradient of the z-loss from the logits and the loss's gradient on them, both [... vocabulary]."""
        wider = z.to(wide(z.dtype))
        lse = torch.logsumexp(wider, -1, keepdim=True)
        p = torch.exp(wider - lse)
        if self.weight == "mean":
            counts: float | Tensor = z.shape[-1] / max(1, z.numel())
        else:
            counts = self._counts(p, g.to(p.dtype))
        return (2 * self.coefficient * counts * lse * p).to(g.dtype)

    def _counts(self, p: Tensor, g: Tensor) -> Tensor:
        """Returns the weights c_i [... 1], which are 0 for tokens that the loss ignores."""
        # g = c (p - e_y): the target's entry is the only negative one.
        right = g.argmin(-1, keepdim=True)
        wrong_share = p.scatter(-1, right, 0.0).sum(-1, keepdim=True)
        pushed = g.scatter(-1, right, 0.0).sum(-1, keepdim=True)
        counts = torch.where(
            wrong_share > 0,
            pushed / wrong_share.clamp_min(torch.finfo(p.dtype).tiny),
            0.0,
        )
        if not self.checked and bool(torch.isfinite(g).all()) and bool((g != 0).any()):
            self._check(p, g, right, counts)
            self.checked = True
        return counts

    def _check(self, p: Tensor, g: Tensor, right: Tensor, counts: Tensor) -> None:
        target = torch.zeros_like(p).scatter(-1, right, 1.0)
        off = (g - counts * (p - target)).abs().amax()
        # Low-precision gradients are inexact by a few parts in a thousand.
        if not bool(off <= 0.05 * g.abs().amax()):
            raise RefusedError(
                "z_loss weighs each token as the cross-entropy of a single target does, but the gradient at the final "
                "logits is not that of such a loss (label smoothing, distillation, a cap after it, another loss); use "
                "weight=mean, which counts every token equally and ignores loss scaling"
            )


class _AddGradient(torch.autograd.Function):
    """The identity, whose backward adds the gradient of the z-loss."""

    @staticmethod
    def forward(z: Tensor, hook: _LossHook) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.hook = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        # torch's once_differentiable would let autograd.grad drop this silently.
        if torch.is_grad_enabled():
            raise RefusedError(
                "a loss with z_loss can be differentiated only once; remove the remedy for create_graph=True"
            )
        (z,), g = ctx.saved_tensors, grad_outputs[0]
        with torch.no_grad():
            return g + ctx.hook.gradient(z, g), None
