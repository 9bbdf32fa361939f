"""The z-loss, coefficient · (ln Z)² per token, added to the loss by its gradient alone."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.handle import Handle, compose
from qkeel.remedies.base import Remedy, Target
from qkeel.remedies.blocks.output_head import logits_module
from qkeel.remedies.processes.shared_models import refuse_late_stage

Weight = Literal["loss", "mean"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZLoss(Remedy):
    """Trains on loss + coefficient · Σ_i c_i (ln Z_i)², ln Z_i = logsumexp of token i's final logits.

    The forward pass, and the loss that is logged, stay bit for bit what they were: on its way back the gradient of the
    final logits z gets 2 · coefficient · c_i · ln Z_i · softmax(z_i) more. c_i is what the cross-entropy of token i
    counts in the loss: weight="loss" reads it off the gradient itself, c_i = Σ_{j≠y} g_ij / Σ_{j≠y} p_ij (there
    g_i = c_i (p_i - e_y), y = argmin g_i), so masked tokens, sums or means, accumulation, token weights and GradScaler
    all count as they do in the loss. It needs a cross-entropy with one right answer per token; the first backward pass
    checks that it is one. weight="mean" takes c_i = 1/(number of tokens) whatever the loss is, and knows no scales.

    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322
    (coefficient 1e-4). The function is `functional.losses.z_loss`.
    """

    coefficient: float = 1e-4  #: at least 0
    weight: Weight = "loss"
    module: str = ""  #: name of the module that makes the final logits; "" looks for it

    name, may_be_zero = "z_loss", ("coefficient",)
    line = "adds coefficient·(ln Z)² of the logits over the vocabulary to the loss, by its gradient"
    source = "Chowdhery et al. 2022, arXiv 2204.02311, section 5; Wortsman et al. 2023, arXiv 2309.14322"
    rule = "loss + {coefficient:g} · Σ_i c_i · (ln Z_i)², ln Z_i the logsumexp of token i's logits over the vocabulary"
    on_attention = False

    def apply(self, target: Target) -> Handle:
        head = logits_module(target, self.name, self.module)
        hook = head.register_forward_hook(_Hook(self.coefficient, self.weight))
        return compose([Handle(hook.remove), refuse_late_stage(target.model, self.name)])


@final
class _Hook:
    """The forward hook. `checked`: a backward pass has shown that the loss is a cross-entropy."""

    def __init__(self, coefficient: float, weight: Weight) -> None:
        self.coefficient, self.weight = coefficient, weight
        self.checked = weight == "mean"

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output
        return _AddGradient.apply(output, self)

    def gradient(self, z: Tensor, g: Tensor) -> Tensor:
        """The gradient of the z-loss, given the logits and the loss's own gradient on them; both [... vocabulary]."""
        wider = z.to(wide(z.dtype))
        lse = torch.logsumexp(wider, -1, keepdim=True)
        p = torch.exp(wider - lse)
        if self.weight == "mean":
            counts: float | Tensor = z.shape[-1] / max(1, z.numel())
        else:
            counts = self._counts(p, g.to(p.dtype))
        return (2 * self.coefficient * counts * lse * p).to(g.dtype)

    def _counts(self, p: Tensor, g: Tensor) -> Tensor:
        """The counts c_i [... 1]; 0 where the token does not count."""
        right = g.argmin(-1, keepdim=True)
        others = p.scatter(-1, right, 0.0).sum(-1, keepdim=True)
        pushed = g.scatter(-1, right, 0.0).sum(-1, keepdim=True)
        counts = torch.where(others > 0, pushed / others.clamp_min(torch.finfo(p.dtype).tiny), 0.0)
        if not self.checked and bool(torch.isfinite(g).all()) and bool((g != 0).any()):
            self._check(p, g, right, counts)
            self.checked = True
        return counts

    def _check(self, p: Tensor, g: Tensor, right: Tensor, counts: Tensor) -> None:
        target = torch.zeros_like(p).scatter(-1, right, 1.0)
        off = (g - counts * (p - target)).abs().amax()
        if not bool(off <= 0.05 * g.abs().amax()):  # low-precision gradients are off by a few parts in a thousand
            raise RefusedError(
                "z_loss weighs each token as the cross-entropy of one right answer does, and the gradient that came "
                "back to the final logits is not that of one (label smoothing, distillation, a cap behind it, another "
                "loss); use weight=mean, which counts every token equally and knows nothing of loss scaling"
            )


class _AddGradient(torch.autograd.Function):
    """The identity, whose backward adds the gradient of the z-loss."""

    @staticmethod
    def forward(z: Tensor, hook: _Hook) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.hook = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # torch's once_differentiable would let autograd.grad leave this out without a word
            raise RefusedError("a loss with z_loss can be differentiated once; remove the remedy for create_graph=True")
        (z,), g = ctx.saved_tensors, grad_outputs[0]
        with torch.no_grad():
            return g + ctx.hook.gradient(z, g), None
