"""The example input with which a model is traced: its arguments, the state that is preserved, and sites described by
hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.capture.contents import (
    ObjectContents,
    is_same,
    keep_parameters,
    keep_values,
)
from qkeel.capture.random_streams import RandomStreams
from qkeel.capture.user_hooks import OutsideStores, hold_hooks_back, is_of_library
from qkeel.errors import InvalidTypeError
from qkeel.patching.guards import Guarded, in_this_thread, unguarded
from qkeel.patching.held_objects import reachable
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import (
    MODULE_ATTRIBUTES,
    TABLES,
    Around,
    attributes_of,
    buffers_of,
    drop_hooks_after,
    hooks_after,
    modules_of,
    parameters_in,
    put_hooks,
    remove_hooks,
)

# The module that is currently running, tracked by forward hooks during a probe or a sampled forward pass.


# The name of a module, of the module that called it, and the number of that call.
Caller = tuple[str, str, int]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """A running call of a module. `inputs` holds its tensor arguments, which are kept only on request.

    `batch` is the first size of its first tensor argument, `calls` the number of attention calls it has made so far and
    `indexes` the number of times it has chosen keys. `given` is what it was called with, if inputs are kept. `caller`
    says from where the module was called, if callers are told apart, and `children` counts the calls that it has made, by
    the name of the module. `pads` says whether it has filled up a dimension of a tensor with zeros.
    """

    name: str
    module: nn.Module
    parent: ModuleCall | None
    batch: int = 0
    inputs: tuple[Tensor, ...] = ()
    calls: int = 0
    given: GivenArguments | None = None
    caller: Caller | None = None
    children: dict[str, int] = dataclasses.field(default_factory=dict)
    indexes: int = 0
    pads: bool = False

    @property
    def is_outermost(self) -> bool:
        """True for the call of the model itself."""
        return self.parent is None or self.parent.parent is None

    def line(self) -> list[ModuleCall]:
        """This frame and all frames that enclose it, innermost first."""
        frames: list[ModuleCall] = [self]
        while (parent := frames[-1].parent) is not None:
            frames.append(parent)
        return frames

    def shared_with(self, other: ModuleCall) -> ModuleCall:
        """The innermost frame that encloses both, for example the frame of an attention module whose softmax is a
        separate module."""
        mine = {id(f) for f in self.line()}
        return next((f for f in other.line() if id(f) in mine), self)


def _autocast_now(device: str) -> Callable[[], torch.autocast]:
    """Returns a function that makes a context of autocast as it is set now."""
    device = _autocast_device(device)
    return functools.partial(
        torch.autocast,
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
    )


@functools.lru_cache(maxsize=8)
def _autocast_device(device: str) -> str:
    # The meta device has no autocast.
    return device if torch.amp.is_autocast_available(device) else "cpu"


class GivenArguments:
    """What a module was called with, so that it can be called again: the arguments, the contents of the objects among
    them, and the setting of autocast."""

    def __init__(
        self,
        args: Args,
        kwargs: Kwargs,
        inputs: Sequence[Tensor],
        around: GivenArguments | None = None,
    ) -> None:
        """Keeps the arguments of a call.

        inputs: their tensors.
        around: what the module was called with that makes the call.
        """
        self.args, self.kwargs = args, kwargs
        self._contents = None
        self._objects = [x for x in (*args, *kwargs.values()) if not _is_fixed(x)]
        if self._objects:
            # The containers as they are now: the call may fill them, as it does a dict of keys and values.
            self.args, self.kwargs = mapped((tuple(args), dict(kwargs)), lambda x: x)
            self._contents = self._known_contents(around)
        self._autocast = _autocast_now(inputs[0].device.type if inputs else "cpu")

    def _known_contents(self, around: GivenArguments | None) -> ObjectContents:
        """The contents of the objects; they are those that an outer call was given, if nothing has changed there since: a
        layer hands the keys of all layers on to its attention."""
        if around is not None and around._contents is not None:
            are_same = {*map(id, around._objects)} == {*map(id, self._objects)}
            if are_same and around._contents.is_unchanged():
                return around._contents
        return ObjectContents(self._objects)

    def changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Args, Kwargs]:
        """The arguments with other tensors; a tensor that is passed twice is changed once."""
        others: dict[int, Tensor] = {}

        def other(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in others:
                others[id(x)] = change(x)
            return others[id(x)]

        return mapped((tuple(self.args), dict(self.kwargs)), other)

    def copied(self, change: Callable[[Tensor], Tensor]) -> tuple[Args, Kwargs]:
        """Copies of the arguments with other tensors. Objects among them are copied with the contents that they had when
        the module was called, and keep those that they have."""
        given = self.changed(change)
        if self._contents is None:
            return given
        now = None if self._contents.is_unchanged() else ObjectContents(given)
        self._contents.restore()
        try:
            # deepcopy refuses tensors with a graph, such as hidden states in a cache, so they get copies beforehand.
            memo = {
                id(x): x.detach().clone()
                for x in reachable(given)
                if isinstance(x, Tensor) and not x.is_leaf
            }
            return mapped(
                given, lambda x: x if _is_fixed(x) else copy.deepcopy(x, memo)
            )
        finally:
            if now is not None:
                now.restore()

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """A context in which objects among the arguments have their former contents, under the same autocast."""
        if self._contents is not None:
            self._contents.restore()
        with self._autocast():
            yield


class ModuleStack:
    """Tracks the innermost running module of a model while its hooks are attached.

    Module calls are observed by hooks on each module, so that nothing outside the model is changed. Scripted modules
    accept no hooks, and a module that runs inside compiled or scripted code is not observed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Mapping[str, nn.Module] | None = None,
        keep_inputs: bool = False,
        guard: Guarded = unguarded,
    ) -> None:
        """Prepares the hooks, which `guard` calls.

        modules: those that are tracked, by name; every module of the model by default.
        """
        self._named = dict(modules_of(model) if modules is None else modules)
        self._names = {id(module): name for name, module in self._named.items()}
        # Other names of modules, by caller; None if callers are not told apart.
        self.by_caller: Mapping[Caller, str] | None = {} if keep_inputs else None
        self._keep = keep_inputs
        self._guard = guard
        self.root = self.top = ModuleCall(name="", module=model, parent=None)
        # Called with a module's call that ends, if anything is to be called.
        self.ended: Callable[[ModuleCall], None] | None = None

    def attach(self, undo: ExitStack) -> None:
        """Installs hooks on the modules until `undo` is closed."""
        push, pop = (
            act if self._guard is unguarded else functools.partial(self._guard, act)
            for act in (self.push, self.pop)
        )
        push, pop = in_this_thread(push), in_this_thread(pop)
        hooks: list[Around] = []
        for module in self._named.values():
            if _has_no_attention(module):
                continue
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.append((module, push, pop))
        undo.callback(remove_hooks, put_hooks(hooks))

    def begun(self, args: Args, kwargs: Kwargs) -> None:
        """Call this before `attach` if the model's own call has already begun; the end of that call is then ignored."""
        model = self.root.module
        del self._named[self._names[id(model)]]
        self.push(model, args, kwargs)

    def push(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Records that a call of this module begins."""
        inputs = tuple(tensors((args, kwargs))) if self._keep else ()
        first = args[0] if args else next(iter(kwargs.values()), None)
        # Nearly always the first argument is the hidden states.
        # The first size of a vector says nothing about a batch.
        if not (isinstance(first, Tensor) and first.ndim > 1):
            first = next((x for x in tensors((args, kwargs)) if x.ndim > 1), None)
        batch = 0 if first is None else first.shape[0]
        name, caller = self._names[id(module)], None
        if self.by_caller is not None:
            n_before = self.top.children.get(name, 0)
            caller = (name, self.top.name, n_before)
            self.top.children[name] = n_before + 1
            name = self.by_caller.get(caller, name)
        self.top = ModuleCall(
            name=name,
            caller=caller,
            module=module,
            parent=self.top,
            batch=batch,
            inputs=inputs,
            given=GivenArguments(args, kwargs, inputs, self.top.given)
            if self._keep
            else None,
        )

    def pop(self, module: nn.Module, args: object, output: object) -> None:
        """Records that a call of this module ends."""
        # A frame above this one remains if an exception ended a module without hooks.
        frame = self.top
        while frame.parent is not None:
            if frame.module is module:
                if self.ended is not None:
                    self.ended(frame)
                self.top = frame.parent
                return
            frame = frame.parent


# Most modules of a model are linear layers and norms, and a frame for each call of them costs time.
_WITHOUT_ATTENTION = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout)


def _has_no_attention(module: nn.Module) -> bool:
    """True for a layer of torch's own in which no attention can be called."""
    return type(module) in _WITHOUT_ATTENTION and "forward" not in vars(module)


def tensors(value: object) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    # A list, because each tensor that a generator yields costs a call of Python.
    leaves: list[Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            leaves.append(item)
        elif isinstance(item, dict):
            left.extend(reversed(item.values()))
        elif isinstance(item, (tuple, list)):
            left.extend(reversed(item))
    return leaves


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the same nested tuples, lists and dicts with every other value in them replaced by `change(value)`."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(x, change) for x in value])
    return (
        {name: mapped(x, change) for name, x in value.items()}
        if kind is dict
        else change(value)
    )


# A user's example batch as arguments of the model's forward, and the state of the model that a pass may change, which
# is restored afterwards.

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardArguments:
    """The positional and keyword arguments of a forward pass, where a batch is expected."""

    args: Args
    kwargs: Mapping[str, object]


def arguments(batch: object, what: str = "batch") -> Arguments:
    """Converts a tensor, a tuple or list of arguments, or a mapping of keyword arguments to arguments and keyword
    arguments.

    Raises: InvalidTypeError if the batch is none of these; `what` names it in the message.
    """
    if isinstance(batch, ForwardArguments):
        return batch.args, dict(batch.kwargs)
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, (Tensor, tuple, list)):
        return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}
    raise InvalidTypeError(
        f"expected the {what} as a tensor, a tuple of the forward's arguments or a dict of its keyword arguments, "
        f"got {type(batch).__name__}"
    )


_PLAIN = (Tensor, bool, int, float, str, type(None))


# --- The state of a model that a forward pass may change, restored afterwards; and its arguments, kept to repeat it


def copied(value: Any) -> Any:
    """Returns the arguments with copies of everything that a forward pass may change (caches), and with the same
    tensors."""

    def copy_of(x: object) -> object:
        if isinstance(x, Tensor):
            # No graph can be built on an inference tensor.
            return x.clone() if x.is_inference() else x
        return x if isinstance(x, _PLAIN) else copy.deepcopy(x)

    return mapped(value, copy_of)


def _is_fixed(value: object) -> bool:
    """True for tensors, numbers and strings, also in tuples: no pass can change what such an object holds."""
    return isinstance(value, _PLAIN) or (
        type(value) is tuple and all(map(_is_fixed, value))
    )


Undo = Callable[[], None]


@contextmanager
def undisturbed(
    model: nn.Module,
    *,
    weights: bool = True,
    modules: bool = True,
    runs_gradient_hooks: bool = False,
) -> Iterator[Undo]:
    """A context that restores what a forward pass changes (see `restored`), and in which the user's hooks that return
    nothing don't run, nor those on gradients (see `hold_hooks_back`).

    The context yields a function that restores this state, for use between two passes.
    """
    tree = [*modules_of(model).values()]
    with ExitStack() as undo:
        functions = hold_hooks_back(tree, undo, runs_gradient_hooks=runs_gradient_hooks)
        yield undo.enter_context(
            restored(tree, functions, weights=weights, modules=modules)
        )


@contextmanager
def restored(
    tree: Sequence[nn.Module],
    functions: Sequence[Callable[..., Any]] = (),
    *,
    weights: bool = True,
    modules: bool = True,
) -> Iterator[Undo]:
    """A context that restores random generators, and the parameters, buffers, attributes and requires_grad flags of
    modules, and what their attributes hold. It yields a function that does so between two passes.

    functions: others whose stores are restored: lists, dicts, sets, attributes and counters that they reach through
        closures, globals and objects.
    weights: False leaves the parameters as they are at the end, for weights that are fitted in the context.
    modules: False leaves the buffers and attributes, for a copy that is not used again."""
    parameters = parameters_in(tree)
    streams = RandomStreams(parameters)
    with ExitStack() as undo:
        kept = [streams.restore]
        for module in tree if modules else ():
            kept += _state_of(module)
        attributes = [
            value
            for module in tree
            for name, value in vars(module).items()
            if name not in MODULE_ATTRIBUTES
        ]
        kinds = {type(module) for module in tree if not is_of_library(type(module))}
        # Not those of objects of libraries: a trainer that a model refers to has threads of its own.
        callbacks = [
            x
            for x in attributes
            if isinstance(x, types.FunctionType) and not is_of_library(x)
        ]
        kept.append(OutsideStores([*functions, *callbacks], attributes).restore)
        kept += map(_keep_class_attributes, kinds)
        if weights:
            kept.append(keep_parameters(parameters))

        def again() -> None:
            for restore in reversed(kept):
                restore()

        # Each separately, so that a failure does not keep the remaining ones from
        # restoring.
        for restore in kept:
            undo.callback(restore)
        for p in parameters:
            if not p.requires_grad and (p.is_floating_point() or p.is_complex()):
                # Tracing q back to its weights needs a graph, in frozen models too.
                p.requires_grad_(True)
                undo.callback(p.requires_grad_, False)
        yield again


def _keep_class_attributes(kind: type) -> Callable[[], None]:
    """Returns a function that restores the attributes of a class, such as a counter of its calls."""
    before = dict(vars(kind))

    def restore() -> None:
        for name, value in vars(kind).copy().items():
            if name not in before:
                delattr(kind, name)
            elif value is not before[name]:
                setattr(kind, name, before[name])

    return restore


def _state_of(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields functions that restore a module's tensors, and its attributes and hooks."""
    # Attributes of scripted modules lie in C++, where vars() does not reach.
    if isinstance(module, torch.jit.ScriptModule):
        yield keep_values(module.buffers(recurse=False))
        return
    before, buffers = dict(vars(module)), dict(buffers_of(module))
    own = [value for name, value in before.items() if name not in MODULE_ATTRIBUTES]
    held = [x for x in (*own, *buffers.values()) if isinstance(x, Tensor)]
    if held:
        yield keep_values(held)
    hooks = dict(hooks_after(module))

    def restore() -> None:
        state = vars(module)
        if (
            is_same(state, before)
            and is_same(buffers_of(module), buffers)
            and is_same(hooks_after(module), hooks)
        ):
            return
        # A model may register hooks in its first pass and note that in an attribute (transformers does so to record
        # hidden states). Both are removed, because otherwise the next pass would register the hooks a second time.
        drop_hooks_after(module, kept=set(hooks))
        for name in attributes_of(module).keys() - before.keys():
            del state[name]
        state.update(
            {name: value for name, value in before.items() if name not in TABLES}
        )
        buffers_of(module).clear()
        buffers_of(module).update(buffers)

    yield restore


@final
class LastPass:
    """The arguments of a pass, without the graph that produced them, and whether the pass ran under autocast.

    The tensors are kept rather than copied, so the tensors of one batch stay alive until the next pass has been trained
    or the tap is removed.
    """

    def __init__(
        self,
        device: str,
        args: Args,
        kwargs: Mapping[str, object],
        training: bool = True,
    ) -> None:
        """Takes the arguments of the call, the type of the device that the model is on, and the model's mode."""
        self._training, self._autocast = training, _autocast_now(device)

        def detached(x: object) -> object:
            return x.detach() if isinstance(x, Tensor) else x

        self.args, self.kwargs = mapped((tuple(args), dict(kwargs)), detached)

    @contextmanager
    def setting(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model is in the mode of the pass, under the same autocast setting."""
        modes = [(module, module.training) for module in model.modules()]
        if model.training != self._training:
            model.train(self._training)
        try:
            with self._autocast():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
