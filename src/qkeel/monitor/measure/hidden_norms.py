"""Norms of the hidden states that leave each block, and of those that enter the output layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.monitor.processes.share import Key
from qkeel.patching.guard import Guarded, in_this_thread, unguarded
from qkeel.sites.see.running_modules import tensors


@final
class HiddenNorms:
    """Mean L2 norm of hidden states [b t m] over tokens and passes, taken while `attach()`'s handle is in force.

    A block is the innermost element of an nn.ModuleList or nn.Sequential that holds a site. The final hidden state is
    what the first module after the last block gives in the same shape (a final norm), else the last block's output.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[str],
        add: Callable[[Key, Tensor, int], None],
        guard: Guarded = unguarded,
    ) -> None:
        """Takes add, which gets every mean norm and over how many tokens it is, and guard, which calls what the hooks
        do."""
        self.model, self._take_norm, self._guard = model, add, guard
        self.blocks = _blocks(model, sites)
        self._last: Tensor | None = None
        self._final = False

    def attach(self) -> Handle:
        """Look at the outputs of the next pass."""
        self._last, self._final = None, False
        inside = tuple(f"{name}." for name in self.blocks.values())
        with ExitStack() as hooks:
            hooks.callback(self._over)
            for name, module in self.model.named_modules() if self.blocks else ():
                scripted = isinstance(module, torch.jit.ScriptModule)  # takes no hooks
                # Not on the model itself: when its pass fails, torch is going through its hooks.
                if name and not scripted and (name in self.blocks.values() or not name.startswith(inside)):
                    take = in_this_thread(functools.partial(self._guard, self._take, self._sites_of(name)))
                    hooks.callback(module.register_forward_hook(take).remove)
            return Handle(hooks.pop_all().close)

    def _over(self) -> None:
        last, self._last = self._last, None
        if last is not None and not self._final:
            self._add(("", "final_hidden_norm"), last)

    def _sites_of(self, name: str) -> list[str]:
        return [site for site, block in self.blocks.items() if block == name]

    def _take(self, sites: Sequence[str], module: nn.Module, args: object, output: object) -> None:
        state = next(tensors(output), None)
        state = state if state is None else dist.local(state)
        if state is None or state.ndim != 3 or not state.is_floating_point():
            return
        if sites:
            for site in sites:
                self._add((site, "block_output_norm"), state)
            self._last, self._final = state.detach(), False
        elif self._last is not None and not self._final and state.shape == self._last.shape:
            self._final = True
            self._add(("", "final_hidden_norm"), state)

    @torch.no_grad()
    def _add(self, key: Key, state: Tensor) -> None:
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=wide(state.dtype))
        self._take_norm(key, norms.mean(), norms.numel())


def _blocks(model: nn.Module, sites: Sequence[str]) -> Mapping[str, str]:
    """For each site the name of its block; sites in none are left out."""
    found = {}
    for site in sites:
        parts = site.partition("#")[0].split(".")
        for i in (*range(len(parts) - 1, 0, -1), len(parts)):  # last of all, the site itself
            holder = model.get_submodule(".".join(parts[: i - 1]))
            if isinstance(holder, (nn.ModuleList, nn.Sequential)):
                found[site] = ".".join(parts[:i])
                break
    return found
