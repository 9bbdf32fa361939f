"""Modes, module tables and private operators of torch, compiler and process state, and guards against faults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, distributed, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.algorithms.join import Joinable
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _pop_torch_function_stack,
    _push_mode,
    _push_on_torch_function_stack,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from qkeel.errors import QkeelError, caution

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


# Guards around everything that qkeel calls during training, so that its errors do not disturb the training.

T = TypeVar("T")
# Called as guard(function, *arguments).
Guarded = Callable[..., Any]


@final
class FaultGuard:
    """Calls functions so that none of their exceptions reaches the caller.

    The first exception is kept in `error` and reported in one warning. Then each function in `off` is called, to switch
    off what failed. Later exceptions are dropped. Interrupts (KeyboardInterrupt, SystemExit) pass through.

    Example:
        >>> guard = FaultGuard("the watcher is off: {}")
        >>> guard(int, "7")
        7
    """

    def __init__(self, words: str, *off: Callable[[], None]) -> None:
        """Takes the text of the warning, with {} for the error, and the functions that switch off what failed."""
        self.words, self.off = words, list(off)
        self.error: Exception | None = None
        # Threads in which a guarded function runs.
        self._inside: set[int] = set()
        self._spent: dict[
            int, float
        ] = {}  # by thread, so that no two threads write to the same entry

    @property
    def seconds(self) -> float:
        """The host time spent in guarded functions in all threads. Nested calls are counted once."""
        return sum([*self._spent.values()])

    def __call__(self, act: Callable[..., T], *args: object) -> T | None:
        thread = threading.get_ident()
        begun = None if thread in self._inside else time.perf_counter()
        self._inside.add(thread)
        try:
            # What it computes, a selective checkpoint must not store.
            if _len_torch_dispatch_stack():
                with outside_checkpoints():
                    return act(*args)
            return act(*args)
        except Exception as error:
            if self.error is None:
                self._report(error)
            return None
        finally:
            if begun is not None:
                self._inside.discard(thread)
                self._spent[thread] = (
                    self._spent.get(thread, 0.0) + time.perf_counter() - begun
                )

    def _report(self, error: Exception) -> None:
        try:
            text = (
                str(error)
                if isinstance(error, QkeelError)
                else f"{type(error).__name__}: {error}"
            )
            caution(self.words.format(text))
        except Exception:  # the stack or the memory is still exhausted; the next fault will be reported
            return
        self.error = error
        # Guarded as well: what switches off may fail for the same reason, which has been reported by now.
        for act in self.off:
            self(act)


@final
class DeferredError:
    """A guard that keeps the first exception until `settle`, so that the caller can continue.

    It is used where other processes wait for the caller."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, act: Callable[..., T], *args: object) -> T | None:
        try:
            return act(*args)
        except Exception as error:
            self.error = self.error or error
            return None

    def settle(self) -> None:
        """Raises the kept exception, if any."""
        if self.error is not None:
            raise self.error


# A hook that does nothing, and that Python itself has, so that copies and pickles of a model load without qkeel.
idle: Callable[..., None] = nullcontext().__exit__


class Uncopied:
    """A hook that is `idle` in copies and pickles of its module, which the model's forward may make."""

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return idle

    def __reduce__(self) -> Any:
        return idle.__reduce__()


class _Uncopied(Uncopied, functools.partial[T]):
    pass


def in_this_thread(act: Callable[..., T]) -> Callable[..., T | None]:
    """Restricts a function to the current thread, for hooks on modules that other threads may call at the same time.

    In other threads, and in copies of the module that holds it, the function does nothing."""
    own = threading.get_ident()
    return _Uncopied(
        lambda *args, **kwargs: (
            act(*args, **kwargs) if threading.get_ident() == own else None
        )
    )


# Returns the function with gradients turned off.
without_gradients = torch.no_grad()

# A context in which no function mode sees an operator: in one that observes, each costs a call of Python.
beside_function_modes = torch._C.DisableTorchFunction


def unguarded(act: Callable[..., T], *args: object) -> T:
    """Calls a function without a guard, so that exceptions reach the caller."""
    return act(*args)


# The tables in which nn.Module keeps parameters, submodules, buffers and hooks.
#
# nn.Module's public methods list the entries or set one entry at a time. They neither preserve the order of restored
# entries nor identify hooks.

# Attribute names of the wrapped module in activation checkpointing, torch.compile and FSDP1.
WRAPPED_AS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
TABLES = ("_parameters", "_modules", "_buffers")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own table of parameters. Writing to it changes the module."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's own table of submodules. Writing to it changes the module."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own table of buffers. Writing to it changes the module."""
    return module._buffers


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every module once, keyed by name."""
    return dict(model.named_modules())


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of these modules without those of their submodules, each once."""
    held = [
        p for module in modules for p in module._parameters.values() if p is not None
    ]
    return [*{id(p): p for p in held}.values()]


def is_made(module: nn.Module) -> bool:
    """True if nn.Module.__init__ has run, so that the tables exist."""
    return TABLES[1] in vars(module)


def names_in_use(module: nn.Module) -> set[str]:
    """Returns the names of all attributes, parameters, submodules and buffers of the module."""
    return {*vars(module), *module._parameters, *module._modules, *module._buffers}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a copy of the module's attributes, except the three tables."""
    return {name: value for name, value in vars(module).items() if name not in TABLES}


def hooks_before(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the module's forward pre-hooks in order."""
    return module._forward_pre_hooks


def hooks_after(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the module's forward hooks in order."""
    return module._forward_hooks


_BEFORE = operator.attrgetter("_forward_pre_hooks")
_AFTER = operator.attrgetter("_forward_hooks")


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Callable[..., Any]]]:
    """Returns the tables of these modules' forward hooks that hold some, without a Python call per module."""
    modules = [*modules]
    return [*filter(None, (*map(_BEFORE, modules), *map(_AFTER, modules)))]


def global_hooks() -> tuple[
    dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]
]:
    """Returns the hooks before and after the forward of every module of the process, in order."""
    calls = nn.modules.module
    return calls._global_forward_pre_hooks, calls._global_forward_hooks


def gradient_hooks(modules: Iterable[nn.Module]) -> list[dict[int, Callable[..., Any]]]:
    """Returns the tables of hooks that are called with gradients: those of every module of the process, of these
    modules and of their parameters."""
    calls = nn.modules.module
    tables = [calls._global_backward_pre_hooks, calls._global_backward_hooks]
    for module in modules:
        tables += [module._backward_pre_hooks, module._backward_hooks]
        held = [p._backward_hooks for p in module._parameters.values() if p is not None]
        tables += [table for table in held if table]
    return tables


# a table of hooks, and the key of a hook in it.
Hook = tuple[dict[Any, Any], object]


# A module, and what is called before and after its forward.
Around = tuple[nn.Module, Callable[..., None] | None, Callable[..., None]]


def put_hooks(around: Iterable[Around]) -> list[Hook]:
    """Installs hooks before and after the forward of modules, and returns them for `remove_hooks`.

    This is meant for many modules in every step, where torch's own registration takes ten times as long.
    before(module, args, kwargs) runs before all other hooks. If it is given, after(module, args, output) also runs
    after an exception.
    """
    hooks: list[Hook] = []
    for module, before, after in around:
        # torch's keys are numbers, none of which may be used twice.
        key = object()
        hooks.append((module._forward_hooks, key))
        module._forward_hooks[key] = _Uncopied(after)  # type: ignore[index]
        if before is not None:
            first, named, always = (
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_always_called,
            )
            first[key] = _Uncopied(before)  # type: ignore[index]
            first.move_to_end(key, last=False)  # type: ignore[attr-defined]
            named[key] = always[key] = True  # type: ignore[index]
            hooks += [(first, key), (named, key), (always, key)]
    return hooks


def remove_hooks(hooks: Iterable[Hook]) -> None:
    """Removes the hooks that `put_hooks` has installed."""
    for table, key in hooks:
        table.pop(key, None)


def drop_hooks_after(module: nn.Module, kept: set[int]) -> None:
    """Removes the module's forward hooks, except those whose numbers are in `kept`."""
    for number in [number for number in module._forward_hooks if number not in kept]:
        for table in (
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        ):
            table.pop(number, None)


# What a module's own compile() has made of it, or None.
_COMPILED_CALL = operator.attrgetter("_compiled_call_impl")


class ModuleTree:
    """The modules of a model, keyed by name and listed again only if the tree has changed.

    Comparing the tree needs no Python call per module, whereas listing it needs ten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # While nothing can change the tree, it is compared once.
        self._is_settled = self._is_compared = False
        self._named: list[tuple[str, nn.Module]] = []
        self._modules: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []
        self._children: tuple[list[Any], ...] = ()
        self._of_kind: dict[object, list[tuple[str, nn.Module]]] = {}

    def settle(self) -> None:
        """Says that nothing changes the tree until `unsettle`."""
        self._is_settled, self._is_compared = True, False

    def unsettle(self) -> None:
        """Says that the tree may change again."""
        self._is_settled = False

    def named(self) -> list[tuple[str, nn.Module]]:
        """Returns every module once with its name, like `named_modules()`."""
        if self._is_settled and self._is_compared:
            return self._named
        if not self._tables or self._listed() != self._children:
            self._named = [*self._model.named_modules()]
            self._modules = [module for _, module in self._named]
            self._of_kind.clear()
            tables = [module._modules for module in self._modules]
            # Scripted modules have other tables, which cannot be compared.
            is_plain = all(isinstance(table, dict) for table in tables)
            self._tables = tables if is_plain else []
            self._children = self._listed()
        self._is_compared = True
        return self._named

    def parameters(self) -> list[nn.Parameter | None]:
        """Returns what the modules hold as parameters, without a Python call per module."""
        held = self._model.parameters()
        if self.named() and self._tables:
            tables = [module._parameters.values() for module in self._modules]
            held = itertools.chain.from_iterable(tables)
        return [*held]

    def _listed(self) -> tuple[list[Any], ...]:
        """How many submodules each module has, their names, and they themselves: lists of which none holds objects that
        Python's garbage collector would have to count."""
        values = map(dict.values, self._tables)
        return (
            [*map(len, self._tables)],
            [*itertools.chain.from_iterable(self._tables)],
            [*itertools.chain.from_iterable(values)],
        )

    def of_kind(self, *kinds: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Returns the modules that are instances of these classes."""
        named = self.named()
        if kinds not in self._of_kind:
            self._of_kind[kinds] = [
                pair for pair in named if isinstance(pair[1], kinds)
            ]
        return self._of_kind[kinds]

    def first_parameter(self) -> nn.Parameter | None:
        """Returns the first parameter of the modules as of the last query, or None if they have none."""
        for _, module in self._named or self.named():
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter
        return None

    def any_compiled(self) -> bool:
        """True if calling any of the modules runs compiled code."""
        # Every pass asks, so no Python function is called for each module.
        if not compiler_loaded():
            return False
        wrappers = self.of_kind(torch._dynamo.OptimizedModule)
        implementations = [*map(_COMPILED_CALL, self._modules)]
        return bool(wrappers) or implementations.count(None) < len(implementations)


def put_first(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Makes a parameter the first one of the module, in a new table that no copy of the module shares."""
    module._parameters = {name: parameter, **module._parameters}


def state_without(module: nn.Module, submodule: str) -> dict[str, Any]:
    """Returns a copy of the module's `__dict__` without one submodule."""
    kept = {name: part for name, part in module._modules.items() if name != submodule}
    return {**vars(module), TABLES[1]: kept}


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Changes the class of a module, for instance back to the class it had before torch parametrized it."""
    module.__class__ = cls


def pickle_by(
    module: nn.Module, reduced: Callable[[Any, object], tuple[object, ...]]
) -> None:
    """Makes a parametrized module use `reduced(module, protocol)` when it is copied or pickled.

    torch gives each such module a class of its own and forbids pickling it."""
    type(module).__reduce_ex__ = reduced  # type: ignore[assignment,method-assign]


# Torch operators without a public function: attention kernels, and operators over lists.

# They return (output, row logsumexps, ...); F.scaled_dot_product_attention returns only the output.
flash_on_cpu: Callable[..., Any] = torch._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)

# Operators over a list of tensors, which work in place.
multiply_all = torch._foreach_mul_
copy_to_all = torch._foreach_copy_
lerp_all_in_place = torch._foreach_lerp_


# Whether torch is currently compiling, transforming, tracing, or recomputing a checkpointed pass.

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# A context in which operators run without autograd, which has been seen to: a call through it costs ten times as much.
below_autograd = torch._C._AutoDispatchBelowAutograd

# If torch lacks the name, recomputed passes are counted too; tests/patching covers this.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def constant_when_compiled(function: AnyFunction) -> AnyFunction:
    """Marks a function so that torch.compile treats its result at compile time as a constant.

    torch.compiler.assume_constant_result does the same, but would import the compiler together with qkeel."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def running_frames() -> Iterator[FrameType]:
    """Yields this thread's Python frames, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def recomputing() -> bool:
    """True in a backward pass, where gradient checkpointing recomputes forward passes."""
    return _graph_task() != -1


def in_function_transform() -> bool:
    """True inside a torch.func transform, whose tensors are invalid outside it."""
    return get_interpreter_stack() is not None


def in_vmap() -> bool:
    """True inside torch.func.vmap, whose tensors lack the mapped dimension."""
    levels = get_interpreter_stack()
    return levels is not None and any(
        level.key() == TransformType.Vmap for level in levels
    )


@constant_when_compiled
def with_tangents() -> bool:
    """True if tensors may have tangents, which operators without forward derivatives would drop.

    This is the case inside torch.autograd.forward_ad.dual_level, torch.func.jvp, jacfwd, hessian and linearize."""
    levels = get_interpreter_stack()
    inside = levels is not None and any(
        level.key() == TransformType.Jvp for level in levels
    )
    return inside or forward_ad._current_level >= 0


def transformed_now() -> bool:
    """True inside a torch.func transform or forward-mode differentiation."""
    return get_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed() -> bool:
    """True inside a torch.func transform, forward-mode differentiation, an export or a trace."""
    # Exported and traced programs run elsewhere, without qkeel's operators.
    differentiated = transformed_now()
    return differentiated or torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_fake(x: Tensor) -> bool:
    """True for a FakeTensor, with which torch infers shapes without computing values."""
    home = sys.modules.get("torch._subclasses.fake_tensor")
    return home is not None and isinstance(x, home.FakeTensor)


def run_uncompiled(*codes: CodeType) -> None:
    """Makes torch.compile skip frames that run this code, but not the functions they call."""
    for code in codes:
        torch._dynamo.eval_frame.skip_code(code)


def compiler_loaded() -> bool:
    """True if torch.compile has been imported, so that something may have been compiled."""
    return "torch._dynamo" in sys.modules


def compile_again() -> None:
    """Discards all compiled code, after a change that the guards of the code do not detect."""
    if compiler_loaded():
        torch._dynamo.reset()


def is_wrapper_of_compiled(module: nn.Module) -> bool:
    """True for torch.compile's wrapper around a module."""
    return compiler_loaded() and isinstance(module, torch._dynamo.OptimizedModule)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module inside torch.compile's wrapper, and any other module unchanged."""
    return module._orig_mod if is_wrapper_of_compiled(module) else module  # type: ignore[return-value]


def is_compiled(module: nn.Module) -> bool:
    """True if calling this module runs code compiled by torch.compile or by the module's own compile()."""
    return module._compiled_call_impl is not None or is_wrapper_of_compiled(module)


# The state of distributed training: the store, pipelines, sharded weights and Join.


def process_store() -> distributed.Store:
    """Returns the key-value store of the default process group, which cannot be blocked by a silent process."""
    return distributed.distributed_c10d._get_default_store()


_STAGES = "torch.distributed.pipelining.stage"


def joined(model: nn.Module) -> bool:
    """True inside torch's Join context, where processes may end at different steps.

    `model` must be the wrapper that was passed to the context, such as DistributedDataParallel."""
    return isinstance(model, Joinable) and model._join_config.enable


def running_stage() -> int | None:
    """Returns the index of the pipeline stage whose pass is running, or None if no such pass is running."""
    for frame in _stage_frames():
        stage = (
            vars(frame.f_locals["self"]).get("stage_index")
            if "self" in frame.f_locals
            else None
        )
        if isinstance(stage, int):
            return stage
    return None


# The latter in torch 2.11.
_SHAPES_INFERRED = ("_compute_outputs", "_shape_inference")


def inferring_shapes() -> bool:
    """True in the pass in which a pipeline stage infers the shapes of its outputs, from tensors without data."""
    # a fast exit, since every pass calls this function.
    if _STAGES not in sys.modules:
        return False
    return any(frame.f_code.co_name in _SHAPES_INFERRED for frame in _stage_frames())


def _stage_frames() -> Iterator[FrameType]:
    """Yields the running frames of torch's pipeline stage module, innermost first."""
    module = sys.modules.get(_STAGES)
    if module is not None:
        yield from (
            frame
            for frame in running_frames()
            if frame.f_code.co_filename == module.__file__
        )


def collective_of(operator: object, args: Sequence[object]) -> tuple[int, ...] | None:
    """Returns the ranks that an operator waits for, or None if it is not a collective."""
    if (
        not isinstance(operator, torch._ops.OpOverload)
        or operator.namespace not in _COLLECTIVES
    ):
        return None
    group = None
    if args and isinstance(args[-1], str):
        group = distributed.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[arg-type]
    elif operator.namespace == "c10d" and not _BETWEEN_TWO.search(str(operator)):
        boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        group = None if boxed is None else distributed.ProcessGroup.unbox(boxed)
    return None if group is None else tuple(distributed.get_process_group_ranks(group))


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_BETWEEN_TWO = re.compile("send|recv")


def fsdp1_kinds() -> tuple[type[nn.Module], ...]:
    """Returns the class FullyShardedDataParallel, or nothing if it was not imported, which takes as long as half of torch."""
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return () if home is None else (home.FullyShardedDataParallel,)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A context in which weights that fully_shard has split are complete and have their usual names.

    All processes must enter it together. Passes inside the context need no other process to gather weights, so a pass
    that fails on one process does not block the others."""
    with ExitStack() as undo:
        modules = _sharded_modules(model)
        for module in modules:
            state = module._get_fsdp_state()
            # The first pass would do it and set the outermost module to stay whole
            # afterwards.
            state._lazy_init()
            groups = _parameter_groups(module)
            kept = [
                (state, "_auto_reshard_after_forward"),
                *((group, "post_forward_mesh_info") for group in groups),
            ]
            after = ("reshard_after_backward", "reduce_grads", "all_reduce_grads")
            kept += [(group, name) for group in groups for name in after]
            # A failing pass would leave these marked as running.
            kept += [
                (state._state_ctx, "iter_forward_root"),
                *((x, "_training_state") for x in (state, *groups)),
            ]
            # This is undone last: a group that a failed pass has left marked as running forward would not be
            # resharded.
            undo.callback(module.reshard)
            for owner, name in kept:
                undo.callback(setattr, owner, name, vars(owner)[name])
            module.set_reshard_after_forward(False, recurse=False)
            # A gradient through a part with separately sharded weights, such as a norm of q, would free these weights,
            # and would reduce the gradients that earlier passes have left unreduced.
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
        for module in modules:
            module.unshard()
        yield


def shard_alike(model: nn.Module, part: nn.Module, near: Tensor) -> None:
    """Applies fully_shard to a new part of a model, with the settings of the group that holds the parameter `near`.

    A part that is added after fully_shard is not in any of the model's groups, so its gradients would not be reduced.
    It gets a separate group on the same mesh, with the same precision, offloading and division of gradients. All
    processes must call this together. Nothing happens if `near` is not under fully_shard, or if fully_shard does not
    support the part: it cannot split scalars, and it accepts no new part on a mesh that it shares with tensor
    parallelism.
    """
    # Nearly always, and of every part that is added to a model; a walk over its modules takes longer than the part.
    if not is_traceable_wrapper_subclass(near):
        return
    modules = _sharded_modules(model)
    groups = [group for module in modules for group in _parameter_groups(module)]
    home = next(
        (g for g in groups if any(near is x.sharded_param for x in g.fsdp_params)), None
    )
    sizes = [p.ndim for p in part.parameters()]
    if (
        home is None
        or getattr(home.mesh_info, "is_spmd_mesh", False)
        or not sizes
        or 0 in sizes
    ):
        return
    new = sys.modules[
        "torch.distributed.fsdp"
    ].fully_shard(  # imported by the code that sharded the model
        part,
        mesh=home.mesh_info.mesh,
        # The part lies inside the group, and only the inputs and outputs of the whole group are cast.
        mp_policy=dataclasses.replace(
            home.mp_policy, cast_forward_inputs=False, output_dtype=None
        ),
        offload_policy=home.offload_policy,
        reshard_after_forward=home.post_forward_mesh_info is not None,
    )
    for group in _parameter_groups(new):
        for name in _OF_A_GROUP:
            setattr(group, name, getattr(home, name))


# The settings of a group that users can change: the factor that divides its gradients, and whether and how they are
# reduced.
_OF_A_GROUP = (
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_grads",
    "all_reduce_grads",
)
_OF_A_GROUP += ("reshard_after_backward",)


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns the groups in which fully_shard holds a module's own parameters. In torch 2.11 there is at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules: list[FSDPModule] = []
    for module in model.modules() if fsdp is not None else ():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            modules.append(module)  # type: ignore[arg-type]
    return modules


# Modes: objects that intercept every torch function or operator call in a thread while they are active.

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

# Attributes and methods that compute nothing. They make up two thirds of all calls, and the mode passes them through.
_GETTERS = (
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_nested",
    "is_quantized",
)
_GETTERS += ("is_sparse", "layout", "ndim", "requires_grad", "shape")
_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "numel",
    "size",
)
_METHODS += ("storage_offset", "stride")
ASKED = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    getattr(Tensor, name) for name in _METHODS
}


_CHECKPOINTS = "torch.utils.checkpoint"


_NOTHING = nullcontext()


def outside_checkpoints() -> AbstractContextManager[None]:
    """A context for computations that gradient checkpointing would not repeat, since they do not belong to the pass.

    A non-reentrant checkpoint counts the tensors that are saved for backward, and a selective one numbers the operators
    that run; both compare this with the recomputation. Other hooks and modes stay, such as those that save tensors on
    the CPU.
    """
    # Nearly always, and every pass asks.
    if _top_hooks(True) is None and not _len_torch_dispatch_stack():
        return _NOTHING
    return _without_checkpoints()


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    hooks, modes = [], _get_current_dispatch_mode_stack()
    selective = [type(mode).__module__ == _CHECKPOINTS for mode in modes]
    while (top := _top_hooks(True)) is not None and top[0].__module__ == _CHECKPOINTS:
        hooks.append(top)
        _pop_hooks()
    try:
        if True in selective:
            inner = modes[selective.index(True) :]
            with ExitStack() as undo:
                for mode in reversed(inner):
                    _pop_dispatch_mode()
                    undo.callback(_push_dispatch_mode, mode)
                # What is left of the inner modes is entered here and left before the whole stack is restored.
                for mode in [
                    mode for mode in inner if type(mode).__module__ != _CHECKPOINTS
                ]:
                    _push_dispatch_mode(mode)
                    undo.callback(_pop_dispatch_mode)
                yield
        else:
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)


class CollectiveMode(TorchDispatchMode):
    """A mode that calls `before` with the ranks and the name of every collective that is about to start."""

    def __init__(self, before: Callable[[tuple[int, ...], str], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(
        self,
        func: Function,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # By its name, because importing DTensor takes half as long as importing torch.
        if any(kind.__name__ == "DTensor" for kind in types):
            # a DTensor's operators on its local parts are dispatched to this mode
            # again.
            return NotImplemented
        if (ranks := collective_of(func, args)) is not None:
            self._before(ranks, str(func))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1024)
def function_name(function: Function) -> str:
    """Returns the name of a torch function or operator without its outer underscores and overload."""
    return getattr(function, "__name__", "").partition(".")[0].strip("_")


@contextmanager
def without_modes(kind: type[TorchFunctionMode] | None = None) -> Iterator[None]:
    """Disables all modes of this class, or else all of qkeel's, inside the context, wherever they are in the stack."""
    before = _get_current_function_mode_stack()
    others = [mode for mode in before if not isinstance(mode, kind or ())]
    if kind is None:
        others = [x for x in before if not type(x).__module__.startswith("qkeel.")]
    _enter_only(others)
    try:
        yield
    finally:
        _enter_only(before)


def _enter_only(modes: list[TorchFunctionMode]) -> None:
    while _get_current_function_mode() is not None:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


class ReadingMode(TorchFunctionMode):
    """A mode of qkeel's that makes each call as it came and reads it. Modes of others may make another call."""


def only_reading_modes() -> bool:
    """True if all modes that are active in this thread only read calls."""
    modes = _get_current_function_mode_stack()
    return all([isinstance(mode, ReadingMode) for mode in modes])


# Returns how many function modes are active in this thread.
number_of_modes: Callable[[], int] = torch._C._len_torch_function_stack


def push_mode(mode: TorchFunctionMode) -> None:
    """Enters a mode without calling its `__enter__`; `take_off` leaves it."""
    _push_on_torch_function_stack(mode)


def take_off(mode: TorchFunctionMode) -> None:
    """Removes a mode from the stack, even from below modes that other code has not left."""
    top = (
        _pop_torch_function_stack()
        if _get_current_function_mode() is not None
        else None
    )
    if top is mode or top is None:
        return
    take_off(mode)
    _push_mode(top)
