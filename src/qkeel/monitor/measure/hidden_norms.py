"""Norms of the hidden states that leave each block, and of those that enter the output layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.capture.modules import tensors
from qkeel.functional.norms import wide
from qkeel.handle import Handle
from qkeel.monitor.processes.share import Key
from qkeel.patching.guard import Guarded, in_this_thread, unguarded
from qkeel.patching.module_tables import ModuleTree, put_hooks


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
        add: Callable[[tuple[str | tuple[str, ...], str], Tensor, int], None],
        guard: Guarded = unguarded,
        tree: ModuleTree | None = None,
    ) -> None:
        """Takes add, which gets every mean norm and over how many tokens it is, and guard, which calls what the hooks
        do."""
        self.model, self._take_norm, self._guard = model, add, guard
        self.blocks = _blocks(model, sites)
        self._sites = {
            block: tuple(s for s, of in self.blocks.items() if of == block) for block in self.blocks.values()
        }
        self._tree = ModuleTree(model) if tree is None else tree
        self._looked: tuple[object, list[tuple[nn.Module, tuple[str, ...]]]] = (None, [])
        self._found: list[tuple[tuple[str, ...], Tensor]] = []  # sites, or () for the final one, and norms by token
        self._last: Tensor | None = None
        self._final = False

    def attach(self) -> Handle:
        """Look at the outputs of the next pass."""
        self._last, self._final, self._found = None, False, []
        tables = []
        for module, sites in self._places():
            take = in_this_thread(functools.partial(self._guard, self._take, sites))
            tables += put_hooks(module, self, None, take)

        def detach() -> None:
            for table in tables:
                table.pop(self, None)
            self._over()

        return Handle(detach)

    def _places(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """The modules whose outputs are looked at, and of which sites each is the block: those outside of blocks may
        give the final hidden state."""
        named = self._tree.named()
        if self._looked[0] is not named:
            inside = tuple(f"{name}." for name in self._sites)
            found = [
                (module, self._sites.get(name, ()))
                for name, module in (named if self.blocks else ())
                # Not on the model itself: when its pass fails, torch is going through its hooks. Scripted modules
                # take none.
                if name and not isinstance(module, torch.jit.ScriptModule)
                if name in self._sites or not name.startswith(inside)
            ]
            self._looked = named, found
        return self._looked[1]

    def _take(self, sites: tuple[str, ...], module: nn.Module, args: object, output: object) -> None:
        state = output if isinstance(output, Tensor) else next(tensors(output), None)
        state = state if state is None else dist.local(state)
        if state is None or state.ndim != 3 or not state.is_floating_point():
            return
        if sites:
            self._last, self._final = state.detach(), False
            self._found.append((sites, _norms(self._last)))
        elif self._last is not None and not self._final and state.shape == self._last.shape:
            self._final = True
            self._found.append(((), _norms(state.detach())))

    @torch.no_grad()
    def _over(self) -> None:
        """The pass is over: the means of all blocks at once, where they are alike."""
        found, self._found, last, self._last = self._found, [], self._last, None
        if last is not None and not self._final:
            found.append(((), next(norms for sites, norms in reversed(found) if sites)))
        groups: dict[object, list[tuple[str, Tensor]]] = {}
        for sites, norms in found:
            for site in sites:
                group = groups.setdefault((norms.shape, norms.dtype, norms.device), [])
                if any([site == known for known, _ in group]):  # a block that was called again  # noqa: C419
                    self._add((site, "block_output_norm"), norms)
                else:
                    group.append((site, norms))
            if not sites:
                self._add(("", "final_hidden_norm"), norms)
        for group in groups.values():
            every = torch.stack([norms.flatten() for _, norms in group])
            self._take_norm((tuple([site for site, _ in group]), "block_output_norm"), every.mean(1), every.shape[1])

    def _add(self, key: Key, norms: Tensor) -> None:
        self._take_norm(key, norms.mean(), norms.numel())


def _norms(state: Tensor) -> Tensor:
    """Of each token, in float32 or wider."""
    return torch.linalg.vector_norm(state, dim=-1, dtype=wide(state.dtype))


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
