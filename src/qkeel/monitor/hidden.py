"""Norms of the hidden states that leave each block, and of those that enter the output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.monitor.means import Key, Means
from qkeel.sites.stack import tensors


@final
class Hidden:
    """Mean L2 norm of hidden states [b t m] over tokens and passes, taken while `attach()`'s handle is in force.

    A block is the innermost element of an nn.ModuleList or nn.Sequential that holds a site. The final hidden state is
    what the first module after the last block gives in the same shape (a final norm), else the last block's output.
    """

    def __init__(self, model: nn.Module, sites: Sequence[str], means: Means) -> None:
        self.model, self.means = model, means
        self.blocks = _blocks(model, sites)
        self._last: Tensor | None = None
        self._final = False

    def attach(self) -> Handle:
        """Look at the outputs of the next pass."""
        inside = tuple(f"{name}." for name in self.blocks.values())
        hooks = []
        if self.blocks:
            for name, module in self.model.named_modules():
                if name in self.blocks.values() or not name.startswith(inside):
                    hooks.append(module.register_forward_hook(self._hook(name)))
        self._last, self._final = None, False

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            if self._last is not None and not self._final:
                self._add(("", "final_hidden_norm"), self._last)
            self._last = None

        return Handle(undo)

    def _hook(self, name: str) -> Any:
        sites = [site for site, block in self.blocks.items() if block == name]

        def take(module: nn.Module, args: object, output: object) -> None:
            state = next(tensors(output), None)
            if state is None or state.ndim != 3 or not state.is_floating_point():
                return
            if sites:
                for site in sites:
                    self._add((site, "block_output_norm"), state)
                self._last, self._final = state.detach(), False
            elif self._last is not None and not self._final and state.shape == self._last.shape:
                self._final = True
                self._add(("", "final_hidden_norm"), state)

        return take

    @torch.no_grad()
    def _add(self, key: Key, state: Tensor) -> None:
        self.means.add(key, state.to(wide(state.dtype)).norm(dim=-1).mean())


def _blocks(model: nn.Module, sites: Sequence[str]) -> Mapping[str, str]:
    """For each site the name of its block; sites in none are left out."""
    found = {}
    for site in sites:
        parts = site.partition("#")[0].split(".")
        for i in range(len(parts) - 1, 0, -1):
            holder = model.get_submodule(".".join(parts[: i - 1]))
            if isinstance(holder, (nn.ModuleList, nn.Sequential)):
                found[site] = ".".join(parts[:i])
                break
    return found
