"""Attention functions that are no torch functions, seen by exchanging their code while somebody observes.

flex_attention and flash-attn's functions are plain Python: a torch function mode does not see them called. See
`patching.exchanged_code` for how every alias of such a function is seen.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from qkeel.patching.compiler_state import recomputing
from qkeel.patching.exchanged_code import GUARD, Begun, Given, exchange
from qkeel.patching.modes import FunctionMode

_FLEX = ("torch.nn.attention.flex_attention", "flex_attention")
_VARLEN = ("torch.nn.attention.varlen", "varlen_attn")
# Names under which flash-attn, its Hopper version, the versions on the hub and wrappers around them offer it.
FLASH = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
LOGSUMEXPS = frozenset((*FLASH, "varlen_attn"))  # those that can return their logsumexps
_ASKED = {"return_attn_probs", "return_aux"}  # arguments by which they are asked for them
_ONE_HOME = (
    ("qkeel.ops", "run"),  # attention that a remedy put in the place of a model's own
    ("qkeel.ops", "run_with_weights"),
)
# Where flex_attention's kernel returns no maxima, and the kernels (by their name in kernel_options) that do elsewhere.
_WITHOUT_MAXIMA = ["cpu", "mps"]
_WITH_MAXIMA = ("AUTO", "TRITON")


class CallObserver(FunctionMode, abc.ABC):
    """A function mode that also gets the calls of foreign functions.

    probing: it walks gradients from q and k. logsumexps: all that it wants to see is what flash-attn's functions
    return, and they are to return the logsumexps of rows as well. maxima: flex_attention is to return the largest logit
    of each row as well, where its kernel can.
    """

    probing = False
    logsumexps = False
    maxima = False

    @abc.abstractmethod
    def called(self, name: str, arguments: Mapping[str, Any], out: object) -> None:
        """The function `name` was called with these arguments (all of them, by name) and has returned `out`."""

    @abc.abstractmethod
    def not_observable(self, name: str, error: Exception) -> None:
        """The function `name` can't be observed."""

    @abc.abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """While it lasts the observer's modes see nothing."""


# Per thread. Empty while an observed function runs: what it calls in turn is part of it.
_OBSERVERS: contextvars.ContextVar[tuple[CallObserver, ...]] = contextvars.ContextVar("qkeel_observers", default=())


@contextmanager
def observed_by(observer: CallObserver) -> Iterator[None]:
    """While it lasts `observer` gets this thread's calls. Functions of modules not yet imported are missed."""
    with ExitStack() as undo:
        for function in list(_functions(() if observer.logsumexps else _ONE_HOME)):
            try:
                undo.callback(exchange(function, _begin).release)
            except (SyntaxError, TypeError, ValueError) as error:  # code of an unforeseen form
                observer.not_observable(function.__name__, error)
        _observe((*_OBSERVERS.get(), observer))
        undo.callback(lambda: _observe(tuple(o for o in _OBSERVERS.get() if o is not observer)))
        yield


def _observe(observers: tuple[CallObserver, ...]) -> None:
    """From now on these get this thread's calls; a fault that is nobody's in particular is the innermost one's."""
    _OBSERVERS.set(observers)
    GUARD.set(observers[-1].guard if observers else None)


@functools.lru_cache(maxsize=1)
def _flash_homes(count: int, last: str) -> list[str]:
    """The loaded modules that are named after flash attention, while these are the number and the last of all.

    One is missed only if as many were taken out of sys.modules as came, and the last has the name it had.
    """
    return [home for home in sys.modules if "flash_att" in home]


def _functions(others: Iterable[tuple[str, str]]) -> Iterator[types.FunctionType]:
    """Attention functions of modules that are loaded: flash-attn's and others. One that is not, nobody can call."""
    seen: set[int] = set()
    places = [(sys.modules.get(home), name) for home, name in (_VARLEN, _FLEX, *others)]
    for home in _flash_homes(len(sys.modules), next(reversed(sys.modules))):
        places += [(sys.modules.get(home), name) for name in FLASH]
    for module, name in places:
        function = None if module is None else vars(module).get(name)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function


def _begin(function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Begun | None:
    """A call of an observed function begins."""
    observers = _OBSERVERS.get()
    silent = all(o.logsumexps for o in observers) and not _ASKED & inspect.signature(function).parameters.keys()
    if recomputing() or silent:  # what a function without logsumexps calls in turn may have them
        return None
    given, own = _without_graph(observers, (args, kwargs)), None
    if any(o.maxima if function.__name__ == _FLEX[1] else o.logsumexps for o in observers):
        given, own = _with_rows(function, given)
    return given, _suspended(observers), functools.partial(_report, function, observers, (args, kwargs)), own


def _with_rows(function: types.FunctionType, plain: Given) -> tuple[Given, Callable[[object], object] | None]:
    """The arguments with which the function returns its rows' logsumexps, or flex_attention their largest logits, too,
    where that costs nothing; and what takes them away again. With dropout flash-attn's functions would return all
    weights besides.
    """
    bound = inspect.signature(function).bind(*plain[0], **plain[1])
    bound.apply_defaults()
    given = bound.arguments
    asked = given.get("return_aux")
    if function.__name__ == _FLEX[1]:
        backend = (given["kernel_options"] or {}).get("BACKEND", "AUTO")
        if given["query"].device.type in _WITHOUT_MAXIMA or backend not in _WITH_MAXIMA or given.get("return_lse"):
            return plain, None  # return_lse is the older way to ask, which torch takes alone only
        given["return_aux"] = (asked or AuxRequest())._replace(max_scores=True)
    elif given.get("return_attn_probs") is False and not given.get("dropout_p"):
        given["return_attn_probs"] = True
    elif "return_aux" in given and asked is None:
        given["return_aux"] = function.__globals__["AuxRequest"](lse=True)  # of the version that is there
    else:
        return plain, None
    return (list(bound.args), bound.kwargs), functools.partial(_as_asked, asked)


def _as_asked(asked: AuxRequest | None, out: Any) -> object:
    if asked is None:
        return out[0]
    return out if asked.max_scores else (out[0], out[1]._replace(max_scores=None))


def _suspended(observers: tuple[CallObserver, ...]) -> ExitStack:
    """Until it is closed, nobody observes what an observed function does inside."""
    with ExitStack() as undo:
        _observe(())
        undo.callback(_observe, observers)
        for observer in reversed(observers):
            undo.enter_context(observer.suspended())
        return undo.pop_all()


def _without_graph(observers: tuple[CallObserver, ...], given: Given) -> Given:
    """The arguments; without a graph in a probe: no walk goes through attention, and flex_attention on a CPU refuses
    inputs that need a gradient."""
    if not any(o.probing for o in observers):
        return given
    return [_detached(x) for x in given[0]], {name: _detached(x) for name, x in given[1].items()}


def _report(function: Callable[..., Any], observers: tuple[CallObserver, ...], given: Given, out: object) -> None:
    bound = inspect.signature(function).bind(*given[0], **given[1])
    bound.apply_defaults()
    with _suspended(observers):
        for observer in observers:
            observer.guard(observer.called, function.__name__, bound.arguments, out)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
