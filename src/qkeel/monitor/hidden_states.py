"""The hidden states that enter and leave the blocks of a watched model: their norms, sizes and largest channels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import tensors
from qkeel.errors import caution
from qkeel.functional.norms import stream_statistics, wide
from qkeel.handle import Handle
from qkeel.monitor.pass_numbers import Number, PassNumbers
from qkeel.patching.modes import (
    Guarded,
    Hook,
    ModuleTree,
    beside_function_modes,
    in_this_thread,
    put_hooks,
    remove_hooks,
)
from qkeel.records import BLOCK_FIELDS

NO_BLOCKS = (
    "the residual stream is not measured: expected blocks in an nn.ModuleList, nn.Sequential or numbered "
    "nn.ModuleDict that contain the attention; no such block was seen"
)


@final
class HiddenStates:
    """Measures hidden states [... m] in each pass, while the handle from `attach()` is active.

    block_output_norm: the mean L2 norm, over tokens, of what leaves the block of each site.
    final_hidden_norm: that of the output of the first module after the last block that returns the same shape (a final
        norm), or else of the last block's output.
    with `inputs_too`, the statistics in records.BLOCK_FIELDS, also of blocks without attention, such as the state-space
        blocks of a hybrid model, under their own names.

    The hidden states are the first floating-point tensor with at least two dimensions among the arguments of a block
    and in its output.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[str],
        numbers: PassNumbers,
        guard: Guarded,
        tree: ModuleTree,
        *,
        inputs_too: bool,
    ) -> None:
        """numbers: receives each number. guard: runs the hooks' code."""
        self._numbers, self._guard, self._tree = numbers, guard, tree
        self._inputs_too = inputs_too
        self._sites: dict[str, list[str]] = {}
        for site, block in blocks_of(model, sites).items():
            self._sites.setdefault(block, []).append(site)
        self._lists = {block.rpartition(".")[0] for block in self._sites}
        # The modules outside all blocks can't be told from the names of a new tree.
        self._named: list[tuple[str, nn.Module]] | None = None
        self._outside: list[nn.Module] = []
        self._blocks: list[tuple[str, nn.Module]] = []
        # The shape of the last block's output.
        self._awaited: torch.Size | None = None
        self._final: tuple[Tensor, int] | None = None
        # Of the pass: the mean norms of what left the blocks of sites, and the numbers of tokens.
        self._outputs: list[tuple[str, Tensor, int]] = []
        if inputs_too and not self._sites:
            caution(NO_BLOCKS)

    def attach(self) -> Handle:
        """Starts measuring in the next pass; remove the handle when the pass is over."""
        self._final = self._awaited = None
        self._outputs = []
        if self._named is not (named := self._tree.named()):
            self._named = named
            self._list_modules(named)
        hooks: list[Hook] = []
        for name, module in self._blocks:
            sites = self._sites.get(name, ())
            before = functools.partial(self._guard, self._enter, sites or (name,))
            after = functools.partial(self._guard, self._leave, sites, name)
            hooks += put_hooks(
                module,
                in_this_thread(before) if self._inputs_too else None,
                in_this_thread(after),
            )
        final = in_this_thread(functools.partial(self._guard, self._pass_on))
        for module in self._outside:
            hooks += put_hooks(module, None, final)

        def detach() -> None:
            remove_hooks(hooks)
            if self._final is not None:
                self._numbers.add(("", "final_hidden_norm"), Number(*self._final))
            in_blocks = tuple(
                [site for sites in self._sites.values() for site in sites]
            )
            self._numbers.add_calls(in_blocks, "block_output_norm", self._outputs)

        return Handle(detach)

    def _list_modules(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        inside = tuple(f"{block}." for block in self._sites)
        # A list of blocks that is called returns what its last block returns.
        self._blocks, self._outside = [], []
        for name, module in named:
            # Not the model itself, over whose hooks torch iterates when its pass fails; and scripted modules
            # accept no hooks.
            if not name or isinstance(module, torch.jit.ScriptModule):
                continue
            is_sibling = name.rpartition(".")[0] in self._lists and any(
                True for _ in module.children()
            )
            if name in self._sites or (self._inputs_too and is_sibling):
                self._blocks.append((name, module))
            elif (
                self._sites and not name.startswith(inside) and name not in self._lists
            ):
                self._outside.append(module)

    def _enter(
        self,
        layers: Sequence[str],
        module: nn.Module,
        args: object,
        kwargs: object,
    ) -> None:
        with beside_function_modes():
            self._measure(layers, "input", hidden_states((args, kwargs)))

    def _leave(
        self,
        sites: Sequence[str],
        name: str,
        module: nn.Module,
        args: object,
        output: object,
    ) -> None:
        with beside_function_modes():
            states = hidden_states(output)
            if self._inputs_too:
                self._measure(sites or (name,), "output", states)
            if states is not None and sites:
                self._final, self._awaited = _mean_norm(states), states.shape
                self._outputs += [(site, *self._final) for site in sites]

    def _pass_on(self, module: nn.Module, args: object, output: object) -> None:
        if self._awaited is None:
            return
        with beside_function_modes():
            states = hidden_states(output)
            if states is not None and states.shape == self._awaited:
                self._final, self._awaited = _mean_norm(states), None

    def _measure(self, layers: Sequence[str], side: str, states: Tensor | None) -> None:
        if states is None or not states.numel():
            return
        n_tokens = states.numel() // states.shape[-1]
        for statistic, value in stream_statistics(states).items():
            field = f"block_{side}_{statistic}"
            number = Number(value, n_tokens, BLOCK_FIELDS[field].over)
            for layer in layers:
                self._numbers.add((layer, field), number)


def hidden_states(values: object) -> Tensor | None:
    """The first floating-point tensor with at least two dimensions among nested values, without its graph, or None."""
    for value in tensors(values):
        states = dist.local(value)
        if states.is_floating_point() and states.ndim > 1:
            return states.detach()
    return None


def _mean_norm(states: Tensor) -> tuple[Tensor, int]:
    """The mean norm of the tokens, in float32 or wider, and their number."""
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=wide(states.dtype))
    return norms.mean(), norms.numel()


def blocks_of(model: nn.Module, sites: Sequence[str]) -> Mapping[str, str]:
    """Returns the name of each site's block, the innermost element of an nn.ModuleList, nn.Sequential or numbered
    nn.ModuleDict that contains it; sites without a block are left out."""
    blocks = {}
    for site in sites:
        parts = site.partition("#")[0].split(".")
        # The site itself comes last, because a block usually has more than attention.
        for n in (*range(len(parts) - 1, 0, -1), len(parts)):
            holder = model.get_submodule(".".join(parts[: n - 1]))
            if isinstance(holder, (nn.ModuleList, nn.Sequential)) or (
                isinstance(holder, nn.ModuleDict) and all(map(str.isdigit, holder))
            ):
                blocks[site] = ".".join(parts[:n])
                break
    return blocks
