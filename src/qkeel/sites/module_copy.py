"""Runs one module of a model alone: a copy of it, with a part of what it was called with."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.example import GivenArguments, ModuleCall, tensors, undisturbed
from qkeel.capture.readers import unobserved
from qkeel.capture.user_hooks import is_of_library
from qkeel.patching.autograd import is_wrapper
from qkeel.patching.forward import extra_pass
from qkeel.patching.held_objects import CONSTANTS, reachable
from qkeel.patching.modes import CollectiveMode, without_modes
from qkeel.patching.module_tables import TABLES, modules_of, parameters_in
from qkeel.sites.search_passes import eagerly, saving_unseen

# An attribute of copies. They hold weights of the model's until a garbage collection, and whoever looks through all live
# modules must not take them for the model.
COPY_MARK = "_qkeel_copy"
# Two samples tell heads from the batch.
SAMPLES, TOKENS = 2, 32
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@final
class PartOfModel(nn.Module):
    """Stands for a model of which only one module runs, under the name that it has there."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        # Beside the tree, in which it would have a second name.
        self._inner = [inner]
        vars(self)[COPY_MARK] = True
        holder: nn.Module = self
        *path, last = name.split(".")
        for key in path:
            child = nn.Module()
            holder.add_module(key, child)
            holder = child
        holder.add_module(last, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (inner,) = self._inner
        return inner(*args, **kwargs)


def copy_of(module: nn.Module, shared: Iterable[nn.Parameter]) -> nn.Module:
    """A copy of a module that may be running. Its plain parameters share the memory of the module's, whose versions its
    writes don't raise; others, such as quantised ones, are the module's, and so are the `shared` ones of other modules."""
    memo: dict[int, Any] = {id(p): p for p in shared}
    tree = [*modules_of(module).values()]
    for p in parameters_in(tree):
        if is_plain(p):
            memo[id(p)] = nn.Parameter(p.detach())
        elif vars(p) and not is_wrapper(p):
            # A layer of bitsandbytes moves what is quantised from the attributes of its weight in its first pass.
            twin = torch.Tensor._make_subclass(type(p), p.data, False)
            vars(twin).update(vars(p))
            memo[id(p)] = twin
    for inner in tree:
        attributes: list[Any] = []
        for value in vars(inner).values():
            # deepcopy is slow for tables, of which a module has many, nearly all of them empty.
            if type(value) in (dict, collections.OrderedDict) and not value:
                memo[id(value)] = type(value)()
            elif type(value) not in CONSTANTS:
                attributes.append(value)
        for x in reachable(attributes, _holds_state):
            # Teachers and averages of weights may stand in lists, beside the tree of modules.
            for beside in x if isinstance(x, (list, tuple)) else ():
                if isinstance(beside, nn.Module):
                    memo |= {id(p): p for p in beside.parameters() if id(p) not in memo}
            # deepcopy fails for generators, and for tensors that are not leaves or not strided, so these get stand-ins.
            if isinstance(x, Generator):
                memo[id(x)] = None
            elif isinstance(getattr(type(x), "model_type", None), str):
                # The configuration of a whole model of transformers: of its hundreds of values, a forward may set one.
                memo[id(x)] = copy.copy(x)
            elif isinstance(x, Tensor) and id(x) not in memo:
                if x.layout is not torch.strided or x.is_quantized or x.is_nested:
                    memo[id(x)] = x
                elif not x.is_leaf:
                    memo[id(x)] = x.detach().clone()
    twins: list[tuple[nn.Module, dict[str, Any]]] = []
    for inner in tree:
        if _is_sharded(inner):
            twin, state = _unsharded(inner), _without_sharding(inner)
        elif _is_copied_by_attributes(type(inner)):
            # Without the compiled call, which would run the module itself.
            twin, state = object.__new__(type(inner)), inner.__getstate__()
        else:
            continue
        memo[id(inner)] = twin
        twins.append((twin, state))

    def copy_of_value(value: Any) -> Any:
        if type(value) in CONSTANTS:
            return value
        # To ask here spares deepcopy, as most values are known.
        return memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo)

    for twin, state in twins:
        copies = vars(twin)
        for name, value in state.items():
            copies[name] = (
                type(value)({key: copy_of_value(x) for key, x in value.items()})
                if name in TABLES
                else copy_of_value(value)
            )
    copied = copy.deepcopy(module, memo)
    vars(copied)[COPY_MARK] = True
    return copied


def is_plain(p: nn.Parameter) -> bool:
    """True for a weight of real numbers that no subclass of tensors stores in another way."""
    return type(p) is nn.Parameter and p.is_floating_point()


# What deepcopy asks a class for.
_RULES_OF_COPIES = (
    "__deepcopy__",
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
)


@functools.lru_cache(maxsize=1024)
def _is_copied_by_attributes(kind: type[nn.Module]) -> bool:
    """True for a class of modules without rules of its own for copies, which are then the copies of the attributes."""
    return all(
        getattr(kind, rule, None) is getattr(nn.Module, rule, None)
        for rule in _RULES_OF_COPIES
    )


def _is_sharded(module: nn.Module) -> bool:
    """True for a module whose class fully_shard has replaced by one that can't be copied."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _unsharded(module: nn.Module) -> nn.Module:
    """An empty module of the class that a module had before fully_shard."""
    _, _, kind, *_ = type(module).__mro__
    return object.__new__(kind)


def _without_sharding(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without what fully_shard has added: the weights of a running module are whole."""
    attributes = {
        name: value for name, value in vars(module).items() if "composable" not in name
    }
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        attributes[name] = collections.OrderedDict(
            (key, hook)
            for key, hook in attributes[name].items()
            if "fsdp" not in (getattr(hook, "__module__", None) or "")
        )
    return attributes


def _holds_state(x: object) -> bool:
    """True for objects of the program's, and for those by which torch's composable checkpoint knows a running module."""
    home = type(x).__module__
    return home.startswith("torch.distributed._composable") or not is_of_library(
        type(x)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartOfArguments:
    """A part of what a module was called with.

    Attributes:
        samples: the number of samples, of a batch that has more; 0 for all.
        tokens: the size of the dimensions of tokens, of which the first 32 are taken; 0 takes all.
        doubles: whether a single sample is taken twice.
    """

    samples: int = 0
    tokens: int = 0
    doubles: bool = False

    def given(self, frame: ModuleCall) -> GivenArguments:
        """The part of the arguments of a call, copied. Hidden states have a node in autograd's graph, by which what is
        computed from them is told from constants, such as rotations."""
        is_hidden_state = hidden_states(frame)

        def change(x: Tensor) -> Tensor:
            values = self._of(x.detach(), frame.batch)
            if is_hidden_state(x) and not values.is_inference():
                values = values.detach().requires_grad_()
            # The clone of a leaf has a node in the graph; the leaf has none.
            return values.clone()

        assert frame.given is not None
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = frame.given.copied(change)
        return GivenArguments(args, kwargs, [*tensors((args, kwargs))])

    def _of(self, x: Tensor, batch: int) -> Tensor:
        if x.ndim < 2:
            return x
        for dim in range(1, x.ndim) if self.tokens else ():
            x = x.narrow(dim, 0, TOKENS) if x.shape[dim] == self.tokens else x
        if len(x) != batch:
            return x
        if self.doubles:
            return x.repeat(2, *[1] * (x.ndim - 1))
        return x[: self.samples] if self.samples else x


def hidden_states(frame: ModuleCall) -> Callable[[Tensor], bool]:
    """Returns a function that says which of a call's tensors are hidden states; the others are constants, such as
    rotations and masks."""
    has_graph = any(x.grad_fn is not None for x in frame.inputs)
    widths = set() if has_graph else _input_widths(frame)

    def is_hidden_state(x: Tensor) -> bool:
        if has_graph or not x.is_floating_point():
            return x.requires_grad
        # Without gradients, only the width says what is multiplied by a weight.
        return x.ndim > 1 and x.shape[-1] in widths

    return is_hidden_state


def _input_widths(frame: ModuleCall) -> set[int]:
    """The sizes of what the weights of a module are multiplied by, as far as they can be told from gains of heads."""
    first = next((x for x in frame.inputs if x.is_floating_point()), None)
    width = 0 if first is None or not first.ndim else first.shape[-1]
    widths = {width}
    for module in frame.module.modules():
        if isinstance(module, nn.Linear):
            widths.add(module.in_features)
        else:
            # Gains of heads are matrices too, but small ones.
            weights = [p for p in module.parameters(recurse=False) if p.ndim == 2]
            widths |= {n for p in weights if p.numel() > 8 * width for n in p.shape}
    return widths


def parts_of_arguments(frame: ModuleCall) -> Iterator[PartOfArguments]:
    """Yields parts of a call's arguments, the smallest first, and all of them.

    Dimension 0 of a module's first tensor is the batch, and the next one the tokens, unless another dimension of that
    tensor has the same size. An index beyond the end raises an exception on the CPU but ends the process on other
    devices, so whole numbers, which may be such indices, keep the tokens whole there, and vectors of them the batch.
    """
    first = next((x for x in frame.inputs if x.ndim > 1), None)
    samples = SAMPLES if frame.batch > SAMPLES else 0
    size = 0 if first is None else first.shape[1]
    is_unique = first is not None and first.shape[1:].count(size) == 1
    indices = [x for x in frame.inputs if not x.is_cpu and x.dtype in _WHOLE_NUMBERS]
    if is_unique and not indices and size > 2 * TOKENS:
        yield PartOfArguments(samples=samples, tokens=size)
    if samples and all(x.ndim > 1 for x in indices):
        yield PartOfArguments(samples=samples)
    yield PartOfArguments()


class CannotRerunError(Exception):
    """A module does not compute alone what it computed in the model's pass; the message says why."""


class EnoughError(BaseException):
    """Ends a run after the calls that were wanted."""


@final
class LoneCall:
    """The call of a module, repeated by a copy of the module while nothing else of the model runs.

    Args:
        name: the name of the module in the model.
        copied: its copy.
        given: what it is called with.

    Attributes:
        part: stands for the model: in it, modules and weights have the names that they have in the model.
        inputs: the tensors with which it was called in the latest run with a graph.
    """

    def __init__(self, name: str, copied: nn.Module, given: GivenArguments) -> None:
        self.part = PartOfModel(name, copied) if name else copied
        self.copied, self.given = copied, given
        self.inputs: list[Tensor] = []

    @contextmanager
    def opened(self, *, waits: bool = False, runs_once: bool = False) -> Iterator[None]:
        """A context in which the copy can run, and of which a running pass of the model notices nothing.

        waits: whether this process may wait for others in it.
        runs_once: whether what the run leaves in the copy may stay there."""
        with (
            unnoticed(waits=waits),
            extra_pass(self.part),
            torch.inference_mode(False),
            undisturbed(
                self.part, weights=not runs_once, modules=not runs_once
            ) as self._before,
        ):
            self._has_run = False
            yield

    def run(
        self,
        watcher: AbstractContextManager[object],
        weights: Mapping[str, Tensor] | None = None,
        inputs: Mapping[int, Tensor] | None = None,
        *,
        graph: bool = False,
    ) -> None:
        """Runs the opened copy under a watcher, to its end or to an EnoughError.

        weights: values that parameters have in this run, by name.
        inputs: tensors that take the place of those of the call, by their number.
        """
        if self._has_run:
            self._before()
        self._has_run = True
        called_with: list[Tensor] = []

        def copied(x: Tensor) -> Tensor:
            called_with.append((inputs or {}).get(len(called_with), x).clone())
            return called_with[-1]

        with (
            eagerly(graph=graph, together=False),
            self.given.as_given(),
            self._with_weights(weights or {}),
            suppress(EnoughError),
            watcher,
        ):
            args, kwargs = self.given.changed(copied)
            if graph:
                self.inputs = called_with
            self.part(*args, **kwargs)

    @contextmanager
    def _with_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which parameters hold other values, without a new version."""
        parameters = {name: self.part.get_parameter(name) for name in weights}
        before = {name: p.data for name, p in parameters.items()}
        try:
            for name, value in weights.items():
                parameters[name].data = value
            yield
        finally:
            for name, value in before.items():
                parameters[name].data = value


def refuse_collective(_ranks: tuple[int, ...], operator: str) -> None:
    raise CannotRerunError(
        f"{operator} combines values from several processes, and only one of them would repeat it"
    )


@contextmanager
def unnoticed(*, waits: bool) -> Iterator[None]:
    """A context of which the running pass notices nothing: qkeel's modes, hooks for saved tensors, and the casts of
    weights that autocast keeps for the pass. waits: whether this process may wait for others in it."""
    keeps_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with unobserved(), without_modes(), saving_unseen(), ExitStack() as around:
            if dist.world() > 1 and not waits:
                around.enter_context(CollectiveMode(refuse_collective))
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
