"""The residual stream of a watched model: the size and the largest channel of what enters and leaves each block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import tensors
from qkeel.errors import caution
from qkeel.functional.norms import stream_statistics
from qkeel.handle import Handle
from qkeel.monitor.gather import NumberKey, Reduction
from qkeel.monitor.token_classes import blocks_of
from qkeel.patching.modes import (
    Guarded,
    Hook,
    ModuleTree,
    in_this_thread,
    put_hooks,
    remove_hooks,
    unguarded,
)
from qkeel.records import BLOCK_FIELDS


@final
class ResidualStream:
    """Computes the statistics in records.BLOCK_FIELDS for each measured pass, while the handle from `attach()` is
    active.

    The blocks are the elements of the lists (nn.ModuleList, nn.Sequential, or nn.ModuleDict with numbers as keys) in
    which attention was found: those that contain attention, and the others that have modules of their own, such as the
    state-space blocks of a hybrid model. The stream is the first floating-point tensor with at least two dimensions
    among the arguments of a block and in its output.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[str],
        add: Callable[[NumberKey, Tensor, int, Reduction], None],
        guard: Guarded = unguarded,
        tree: ModuleTree | None = None,
    ) -> None:
        """add: receives the layer and the field, the value, the number of tokens it covers, and how several values are
        combined. guard: runs the hooks' code."""
        self._add, self._guard = add, guard
        self._tree = ModuleTree(model) if tree is None else tree
        block_of_site = blocks_of(model, sites)
        self._layers: dict[
            str, tuple[str, ...]
        ] = {}  # the layers under which the statistics of a block are recorded
        for site, block in block_of_site.items():
            self._layers[block] = (*self._layers.get(block, ()), site)
        self._lists = {block.rpartition(".")[0] for block in self._layers}
        if not self._layers:
            caution(
                "the residual stream is not measured: expected blocks in an nn.ModuleList, nn.Sequential or numbered "
                "nn.ModuleDict that contain the attention; no such block was seen"
            )

    def attach(self) -> Handle:
        """Starts measuring the blocks in the next pass; remove the handle when the pass is over."""
        hooks: list[Hook] = []
        for name, module in self._tree.named():
            if isinstance(module, torch.jit.ScriptModule):  # accepts no hooks
                continue
            in_list = (
                bool(name)
                and name.rpartition(".")[0] in self._lists
                and any(True for _ in module.children())
            )
            if in_list or name in self._layers:
                layers = self._layers.get(name, (name,))
                before = functools.partial(self._guard, self._enter, layers)
                after = functools.partial(self._guard, self._leave, layers)
                hooks += put_hooks(
                    module, in_this_thread(before), in_this_thread(after)
                )
        return Handle(functools.partial(remove_hooks, hooks))

    def _enter(
        self, layers: tuple[str, ...], module: nn.Module, args: object, kwargs: object
    ) -> None:
        self._measure(layers, "input", (args, kwargs))

    def _leave(
        self, layers: tuple[str, ...], module: nn.Module, args: object, output: object
    ) -> None:
        self._measure(layers, "output", output)

    @torch.no_grad()
    def _measure(self, layers: tuple[str, ...], side: str, values: object) -> None:
        for value in tensors(values):
            stream = dist.local(value)
            if not stream.is_floating_point() or stream.ndim < 2:
                continue
            if stream.numel():
                n_tokens = stream.numel() // stream.shape[-1]
                for statistic, x in stream_statistics(stream.detach()).items():
                    field = f"block_{side}_{statistic}"
                    for layer in layers:
                        self._add((layer, field), x, n_tokens, BLOCK_FIELDS[field].over)
            return
