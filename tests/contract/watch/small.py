"""A small model with attention by torch's function, and a short training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Small(nn.Module):
    """[b t 8] -> [b t 8]; a loss with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def batch(seed: int, b: int = 2, t: int = 5) -> Tensor:
    return torch.randn(b, t, 8, generator=torch.Generator().manual_seed(seed))


def train(
    watcher: Callable[[nn.Module, torch.optim.Optimizer], Any] | None,
    *,
    steps: int = 4,
    during: Callable[[int, Any], None] = lambda step, monitor: None,
    make: Callable[[], Any] = small,
) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The trained model, its optimizer and the monitor."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: None)
    monitor = watcher(model, optimizer) if watcher is not None else None
    # Hooks of others that come after the monitor's: removing its own must not disturb them.
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        during(step, monitor)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(step + 100))
        model.train()
    return model, optimizer, monitor


def hooks(model: nn.Module) -> list[Any]:
    """Every hook in a model, and every torch function mode that is on."""
    found: list[Any] = list(torch.overrides._get_current_function_mode_stack())
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found += [
            *module._forward_hooks_always_called,
            *module._forward_hooks_with_kwargs,
        ]
        found += [*module._forward_pre_hooks_with_kwargs]
    return found
