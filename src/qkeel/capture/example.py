"""A user's example batch as arguments of the model's forward, the beginning of a few of its rows, and the state of a
model that a pass on it may change, put back afterwards."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.capture.modules import mapped, tensors
from qkeel.errors import InvalidTypeError
from qkeel.patching.graph_nodes import version_of
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import attributes_of, buffers_of, drop_hooks_after, hooks_after

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(batch: object, what: str = "example") -> Arguments:
    """Arguments and keyword arguments from a tensor, a tuple or list of arguments, or a mapping of keyword arguments.

    Raises: InvalidTypeError if it is none of them; `what` names it.
    """
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, (Tensor, tuple, list)):
        return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}
    raise InvalidTypeError(
        f"expected the {what} as a tensor, a tuple of the forward's arguments or a dict of its keyword arguments, "
        f"got {type(batch).__name__}"
    )


ROWS, TOKENS = (1, 2), 32
# Arguments with a number for each token that cutting the sequence leaves right.
OF_TOKENS = frozenset(
    {"input_ids", "attention_mask", "labels", "position_ids", "token_type_ids", "idx", "tokens", "targets", "x", "y"}
)
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortExample:
    """Arguments with so many `rows`; `cut` says that their sequences are shorter too."""

    args: Args
    kwargs: Kwargs
    rows: int
    cut: bool


def shorter(args: Args, kwargs: Kwargs) -> Iterator[ShortExample]:
    """Shorter examples, the shortest first: one row where that may do, else two, which show heads and batch apart. None
    where it is not clear what a batch is.

    Dimension 0 of every tensor is the batch, of one size or 1. The next dimension of the first tensor that has one is
    the sequence, unless the tensor has that size twice. An index beyond the end is an exception on the CPU, elsewhere
    the end of the process: there whole numbers are of one shape [b t], as those of tokens are, and a sequence is cut
    where they are tokens, targets, masks or positions by name (OF_TOKENS), or the first one or two arguments.
    """
    given = [x for x in tensors((args, dict(kwargs))) if x.ndim]
    if not given or not _is_plain((args, dict(kwargs))) or any(x.is_nested for x in given):
        return
    on_cpu = all(x.is_cpu for x in given)
    whole = {x.shape for x in given if not x.is_floating_point()}
    if not on_cpu and (len(whole) > 1 or any(len(shape) != 2 for shape in whole)):
        return
    batch, rows = _rows(given)
    size = next((x.shape[1] for x in given if x.ndim > 1 and x.shape[1:].count(x.shape[1]) == 1), 0)
    if (on_cpu or _of_tokens(args, kwargs)) and size > 2 * TOKENS:
        yield from (_example(args, kwargs, n, size) for n in rows)
    yield from (_example(args, kwargs, n, None) for n in rows if n < batch)


def first_row(args: Args, kwargs: Kwargs) -> ShortExample:
    """The first sequence of a batch, whole; all of them where it is not clear what a batch is."""
    return _example(args, kwargs, _rows([x for x in tensors((args, dict(kwargs))) if x.ndim])[1][0], None)


def _rows(given: Sequence[Tensor]) -> tuple[int, list[int]]:
    """The size of the batch, and how many of its rows may do."""
    batch = max(map(len, given))
    return batch, [n for n in ROWS if n <= batch and {*map(len, given)} <= {1, batch}] or [batch]


def _example(args: Args, kwargs: Kwargs, rows: int, size: int | None) -> ShortExample:
    def short(x: object) -> object:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        for dim in range(1, x.ndim):
            x = x.narrow(dim, 0, TOKENS) if x.shape[dim] == size else x
        return x[:rows]

    own, named = mapped((tuple(args), dict(kwargs)), short)
    return ShortExample(args=own, kwargs=named, rows=rows, cut=size is not None)


def _of_tokens(args: Args, kwargs: Kwargs) -> bool:
    """True if no whole number given is an index of a token, which a cut would leave beyond the end."""
    whole = {name for name, x in kwargs.items() if isinstance(x, Tensor) and not x.is_floating_point()}
    placed = [x for x in tensors(tuple(args)) if not x.is_floating_point()]
    return whole <= OF_TOKENS and len(placed) <= 2


def _is_plain(value: object) -> bool:
    """True of tensors, numbers and names in tuples, lists and dicts: nothing that may hold the batch in its own way."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return all(map(_is_plain, value.values())) if type(value) is dict else isinstance(value, _PLAIN)


# --- The state of a model that a forward pass may change, put back after it; its arguments, kept to make it again


def copied(value: Any) -> Any:
    """Arguments that a forward pass may change (caches) copied, tensors as they are."""
    return mapped(value, _copy)


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value  # a graph can't be built on such a one
    return value if value is None or isinstance(value, (bool, int, float, str)) else copy.deepcopy(value)


@contextmanager
def same_random_streams(devices: Sequence[int] = ()) -> Iterator[None]:
    """The random streams of Python, NumPy and torch, on the CPU and these GPUs, are put back."""
    with ExitStack() as undo, torch.random.fork_rng(devices=devices):
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        yield


Undo = Callable[[], None]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Undo]:
    """Whatever a forward pass changes is put back: random streams, buffers, attributes, who needs a gradient.

    Between two passes the function that is given puts back what the first one changed.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as undo:
        streams = undo.enter_context(ExitStack())
        streams.enter_context(same_random_streams(devices))
        kept = [restore for module in model.modules() for restore in (_keep(module), _keep_contents(module))]

        def again() -> None:
            streams.close()
            streams.enter_context(same_random_streams(devices))
            for restore in reversed(kept):
                restore()

        undo.callback(lambda: [restore() for restore in reversed(kept)])
        for p in model.parameters():
            if not p.requires_grad and (p.is_floating_point() or p.is_complex()):
                # The walk from q to its weights needs a graph, in frozen models too.
                p.requires_grad_(True)
                undo.callback(p.requires_grad_, False)
        yield again


def _keep(module: nn.Module) -> Callable[[], None]:
    """A function that puts a module's own tensors and attributes back."""
    if isinstance(module, torch.jit.ScriptModule):
        return _keep_values(list(module.buffers(recurse=False)))
    attributes, buffers = attributes_of(module), dict(buffers_of(module))
    held = [v for v in (*attributes.values(), *buffers.values()) if isinstance(v, torch.Tensor)]
    values = _keep_values(held)
    hooks = set(hooks_after(module))

    def restore() -> None:
        state = vars(module)
        # A model may register hooks in its first pass, and note that in an attribute (transformers does, to record
        # hidden states): both go, else the next pass would register them a second time.
        drop_hooks_after(module, kept=hooks)
        for name in attributes_of(module).keys() - attributes.keys():
            del state[name]
        state.update(attributes)
        buffers_of(module).clear()
        buffers_of(module).update(buffers)
        values()

    return restore


def _keep_contents(module: nn.Module) -> Callable[[], None]:
    """A function that puts back what a module's lists, dicts, sets and generators held."""
    torchs_own = vars(nn.Module())  # its hooks, its parameters: sharded models exchange those in a pass
    held = [v for name, v in vars(module).items() if isinstance(v, (list, dict, set)) and name not in torchs_own]
    kept = [(x, x.copy()) for x in held if type(x) in _CONTAINERS]
    streams = [(g, g.get_state()) for g in vars(module).values() if isinstance(g, torch.Generator)]

    def restore() -> None:
        for x, before in kept:
            if [*map(id, x)] != [*map(id, before)] or (isinstance(x, dict) and _values(x) != _values(before)):
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)
        for generator, state in streams:
            generator.set_state(state)

    return restore


def _values(x: Any) -> list[int]:
    return [*map(id, x.values())]


_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter)


def _keep_values(tensors: list[Tensor]) -> Callable[[], None]:
    """A function that puts values back. Tensors on the meta device have none, and inference tensors can't change."""
    plain, others = [], []
    for x in tensors:
        if not (x.is_inference() or x.is_meta):
            comparable = x.layout is torch.strided and not x.is_nested and type(x) in (Tensor, nn.Parameter)
            (plain if comparable else others).append((x, x.detach().clone(), version_of(x)))

    @torch.no_grad()
    def restore() -> None:
        for x, value, _ in plain:
            # Compared, not by version: batch norm's kernels write their averages without raising it.
            if not torch.equal(x, value):
                x.copy_(value)
        for x, value, version in others:
            # Sparse, nested and other kinds of tensors can't be compared: what wrote to them raised their version.
            if version_of(x) != version:
                x.copy_(value)

    return restore


@final
class LastPass:
    """The arguments of a pass, without the graph that made them, and whether it ran under autocast.

    They are kept, not copied: until the next training pass begins, or the tap is removed, the tensors of one batch stay
    alive. A loop that keeps its batch until it has the next one needs no more memory for that.
    """

    def __init__(self, model: nn.Module, args: Args, kwargs: Mapping[str, object]) -> None:
        self.args, self.kwargs = mapped((args, dict(kwargs)), _detached)
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._device = device if torch.amp.is_autocast_available(device) else "cpu"  # the meta device has none
        self._cast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    @contextmanager
    def setting(self, model: nn.Module) -> Iterator[None]:
        """While it lasts the model is in training mode, under the autocast of the pass."""
        modes = [(module, module.training) for module in model.modules()]
        enabled, dtype = self._cast
        if not model.training:
            model.train()
        try:
            with torch.autocast(self._device, dtype=dtype, enabled=enabled):
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
