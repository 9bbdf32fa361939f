"""The hidden states that enter and leave the blocks and attention of a watched model: their sizes, whether finite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import ModuleCall, tensors
from qkeel.errors import caution
from qkeel.functional.norms import stream_statistics
from qkeel.handle import Handle
from qkeel.monitor.numbers import Number, PassNumbers
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.guards import Guarded, beside_function_modes
from qkeel.patching.module_tables import Hook, ModuleTree, put_hooks, remove_hooks

NO_BLOCKS = (
    "the residual stream is not measured: expected blocks in an nn.ModuleList, nn.Sequential or numbered "
    "nn.ModuleDict that contain the attention; no such block was seen"
)


# A hook before or after the forward of a module.
_Look = Callable[..., None]
# Others, such as float8, have no sums. Those of finite numbers in half precision may overflow in it.
SUMMED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@final
class HiddenStates:
    """Measures hidden states [... m] in each pass, while the handle from `attach()` is active.

    non_finite_data, non_finite_input, non_finite_output [1]: whether the data, and what enters and leaves the module of
        each site, has a NaN or infinity, 1 or 0, and -1 for a module that was not called. Of the data, -infinity
        doesn't count, as masks are made of it.
    with `inputs_too`, the statistics in records.BLOCK_FIELDS, also of blocks without attention, such as the state-space
        blocks of a hybrid model, under their own names.

    The hidden states are the first floating-point tensor with at least two dimensions among the arguments of a module
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
        self._model, self._numbers, self._guard = model, numbers, guard
        self._tree, self._inputs_too = tree, inputs_too
        self._is_told = not inputs_too
        # A module may be a site and a block.
        self._looks: list[tuple[str, nn.Module, _Look, _Look]] = []
        # While modules are looked at.
        self._hooks: list[Hook] | None = None
        self._thread = 0
        self._name(sites)
        # Of the pass: the sums of what entered and left the modules of sites, by their names, and the largest numbers
        # of the data.
        self._sums: dict[str, list[tuple[str, Tensor]]] = {}
        self._data: list[Tensor] = []
        # What entered or left blocks, by side and block, with the number of tokens.
        self._streams: list[tuple[str, str, Mapping[str, Tensor], int]] = []

    def _name(self, sites: Sequence[str]) -> None:
        """Takes the names of the sites, by which blocks are named."""
        self._all = tuple(sites)
        # By module, because several sites may share one.
        self._modules: dict[str, list[str]] = {}
        for site in sites:
            self._modules.setdefault(site.partition("#")[0], []).append(site)
        self._sites: dict[str, list[str]] = {}
        for site, block in blocks_of(self._model, sites).items():
            self._sites.setdefault(block, []).append(site)
        self._lists = {block.rpartition(".")[0] for block in self._sites}
        # The modules outside all blocks can't be told from the names of a new tree.
        self._named: list[tuple[str, nn.Module]] | None = None

    def extend(self, sites: Sequence[str], running: Sequence[ModuleCall]) -> None:
        """Takes the names of sites of which some were found in the pass that runs, inside these calls of modules."""
        looked_at = {(role, module) for role, module, *_ in self._looks}
        was_root = "" in self._modules
        self._name(sites)
        if self._hooks is None:
            return
        self._attach()
        arguments = {
            call.module: (call.given.args, call.given.kwargs)
            for call in running
            if call.given is not None
        }
        # What has entered these modules before they had hooks is looked at now.
        if "" in self._modules and not was_root and self._model in arguments:
            self._add_sum("input", "", self._model, *arguments[self._model])
        for role, module, before, _ in self._looks:
            if module in arguments and (role, module) not in looked_at:
                before(module, *arguments[module])

    @torch.no_grad()
    def begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begins a pass with these arguments; what a pass that has failed left is dropped."""
        # Other threads may call the same modules.
        self._thread = threading.get_ident()
        self._sums, self._streams = {"input": [], "output": []}, []
        held = map(dense, tensors((args, dict(kwargs))))
        self._data = [x.amax() for x in held if x.numel()]
        if "" in self._modules:
            self._add_sum("input", "", self._model, args, kwargs)

    def attach(self) -> Handle:
        """Looks at the modules until the handle is removed."""
        self._attach()
        return Handle(self._detach)

    def _attach(self) -> None:
        self._detach()
        if self._named is not (named := self._tree.named()):
            self._named = named
            self._list_modules(named)
        self._hooks = put_hooks([looks[1:] for looks in self._looks])

    def _detach(self) -> None:
        remove_hooks(self._hooks or ())
        self._hooks = None

    @torch.no_grad()
    def end(self, output: object) -> None:
        """Ends a pass that returned this, and adds its numbers."""
        if not self._is_told:
            self._is_told = True
            if not self._sites:
                caution(NO_BLOCKS)
        if "" in self._modules:
            self._add_sum("output", "", self._model, (), output)
        numbers = self._numbers
        self._add_streams()
        # A sum is finite if its terms are, and is the cheapest of all reductions.
        for side, sums in self._sums.items():
            of_sites = [
                (site, total) for name, total in sums for site in self._modules[name]
            ]
            numbers.add_flags(self._all, f"non_finite_{side}", of_sites)
        if self._data:
            device = self._data[0].device
            peaks = torch.stack([x.float().to(device) for x in self._data])
            # Not peaks == inf, which NaN would pass.
            flag = (~(peaks < torch.inf)).any().float()
            flags = flag.expand(len(self._all), 1)
            numbers.add((self._all, "non_finite_data"), Number(flags))
        self._sums, self._data = {}, []

    def _list_modules(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        # A layer has three of these hooks, so the guard is all that lies between torch and the code.
        guarded = partial(partial, self._guard)
        self._looks = []
        for name, module in named:
            # Not the model itself, over whose hooks torch iterates when its pass fails; and scripted modules
            # accept no hooks.
            if not name or isinstance(module, torch.jit.ScriptModule):
                continue
            if name in self._modules:
                enter = guarded(self._add_sum, "input", name)
                leave = guarded(self._add_sum, "output", name)
                self._looks.append(("site", module, enter, leave))
            is_sibling = name.rpartition(".")[0] in self._lists and any(
                True for _ in module.children()
            )
            if self._inputs_too and (name in self._sites or is_sibling):
                enter = guarded(self._measure, "input", name)
                leave = guarded(self._measure, "output", name)
                self._looks.append(("block", module, enter, leave))

    # Hooks before a module get its arguments and keyword arguments, those behind it the arguments and the output.

    def _states(self, side: str, args: object, last: object) -> Tensor | None:
        """What enters or leaves a module; None in other threads, which may call the same modules."""
        if threading.get_ident() != self._thread:
            return None
        states = hidden_states((args, last) if side == "input" else last)
        return states if states is not None and states.numel() else None

    def _add_sum(
        self, side: str, name: str, module: nn.Module, args: object, last: object
    ) -> None:
        with beside_function_modes():
            states = self._states(side, args, last)
            if states is not None and states.dtype in SUMMED:
                total = states.sum(dtype=SUMMED[states.dtype])
                self._sums[side].append((name, total))

    def _measure(
        self, side: str, block: str, module: nn.Module, args: object, last: object
    ) -> None:
        with beside_function_modes():
            states = self._states(side, args, last)
            if states is not None:
                n_tokens = states.numel() // states.shape[-1]
                self._streams.append((side, block, stream_statistics(states), n_tokens))

    def _add_streams(self) -> None:
        """Adds the statistics of the blocks, under the names of their sites, some of which the pass may have shown."""
        for side, block, statistics, n_tokens in self._streams:
            for statistic, value in statistics.items():
                field = f"block_{side}_{statistic}"
                how = "root_mean" if statistic == "rms" else "max"
                number = Number(value, n_tokens, how)
                for layer in self._sites.get(block, (block,)):
                    self._numbers.add((layer, field), number)


def dense(x: Tensor) -> Tensor:
    """The part of a tensor that is here, or no numbers if it cannot be reduced."""
    x = dist.local(x)
    # Wrappers, such as torchao's quantised weights, refuse operators as they like.
    if x.dtype not in SUMMED or x.layout != torch.strided or is_wrapper(x):
        return torch.empty(0, device=x.device)
    return x


def hidden_states(values: object) -> Tensor | None:
    """The first floating-point tensor with at least two dimensions among nested values, without its graph, or None."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            states = value if type(value) is Tensor else dist.local(value)
            if states.is_floating_point() and states.ndim > 1:
                return states.detach()
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, (tuple, list)):
            waiting += reversed(value)
    return None


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
