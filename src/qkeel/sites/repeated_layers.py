"""Tells modules that compute what another one computes, whose site is known.

Nearly all layers of a model are alike. Once one of them has been read from the graph of its pass, the sites of another
are the same but for the names of weights. A copy of the other in which the weights of the first stand runs once, on what
the first was called with: it must make the same calls, with the same queries and keys. Otherwise the module is read
itself.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import ModuleCall, mapped, undisturbed
from qkeel.capture.intercept import CapturedCall
from qkeel.capture.random_streams import seed_generators
from qkeel.patching.forward import extra_pass
from qkeel.patching.module_tables import MODULE_ATTRIBUTES, modules_of
from qkeel.sites.module_copy import COPY_MARK, PartOfArguments, copy_of, hidden_states
from qkeel.sites.search_passes import forward
from qkeel.sites.site import AttentionSite, Sites, renamed, within
from qkeel.sites.trace import PartTrace
from qkeel.sites.verify import EnoughError, LogitReader, RepeatedCalls
from qkeel.spec import AttentionCall

# What says nothing of what a module computes.
_NO_SETTINGS = MODULE_ATTRIBUTES - {"_parameters", "_buffers", "training"}
_NO_SETTINGS |= {COPY_MARK}
_SETTINGS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@final
class KnownModule:
    """A module with one site, which was read and verified.

    Attributes:
        kind: its class.
        part: the part of the arguments with which its copy ran.
        copied: its copy, as it was before the call.

    Args:
        frame: the call of the module.
        name: its name in the model.
        part, copied: see above.
        trace: the trace of the copy.
    """

    def __init__(
        self,
        frame: ModuleCall,
        name: str,
        part: PartOfArguments,
        copied: nn.Module,
        trace: PartTrace,
    ) -> None:
        self.kind, self.part, self.copied = type(frame.module), part, copied
        self._name, self._trace = name, trace
        self._structure, self._constants = _arguments_of(frame)
        self._given = part.given(frame)
        (self._site,) = trace.sites
        self._weights = _drawn_weights(frame.module, name, self._site)
        self._calls = [_ReferenceCall(call) for call in self._calls_of(copied)]

    def is_like(self, frame: ModuleCall, name: str) -> bool:
        """True if the module of a call has the same classes, settings and buffers, the same shapes of weights, and
        arguments of the same structure, with the same tensors where these are no hidden states."""
        if not _are_alike(self.copied, frame.module, self._name, name):
            return False
        structure, constants = _arguments_of(frame)
        return structure == self._structure and all(
            a is b or torch.equal(a, b) for a, b in zip(self._constants, constants)
        )

    def trace_of(self, module: nn.Module, name: str) -> PartTrace | None:
        """The trace of a module like this one, without a graph, or None if it does not compute the same with the same
        weights. `name` is its name in the model."""
        if not all(x.untyped_storage().size() for x in self._weights.values()):
            # fully_shard has freed them at the end of the module's call.
            return None
        calls = self._calls_of(module)
        if len(calls) != len(self._calls) or not all(
            reference.is_like(call) for reference, call in zip(self._calls, calls)
        ):
            return None
        site = renamed(self._site, lambda path: name + path.removeprefix(self._name))
        return dataclasses.replace(
            self._trace,
            sites=Sites([site]),
            calls={site.name: self._trace.calls[self._site.name]},
            values={},
        )

    def _calls_of(self, module: nn.Module) -> list[CapturedCall]:
        """The attention calls of a copy of a module in which the weights of this one stand."""
        recorded = self._trace.calls[self._site.name]
        (frame,) = [x for x in recorded[0].frame.line() if x.module is self.copied]
        copied = copy_of(module, (), self._weights)
        repeated = RepeatedCalls(copied, self._site, frame, recorded)
        with (
            extra_pass(copied),
            torch.inference_mode(False),
            # Weights, buffers and attributes are the copy's.
            undisturbed(copied, weights=False, modules=False),
            self._given.as_given(),
            suppress(EnoughError),
        ):
            seed_generators(copied.parameters())
            # Objects among them, such as a cache of all layers, are copies already, with their former contents.
            args, kwargs = self._given.changed(torch.clone)
            watcher = repeated.watcher
            forward(copied, watcher, args, kwargs, graph=False, together=False)
        return repeated.calls


def _drawn_weights(
    module: nn.Module, name: str, site: AttentionSite
) -> dict[str, Tensor]:
    """Copies of the weights of a module by their names in it, of which those of q and k are drawn at random: rows that are
    equal or zero would not show which of them makes what."""
    generator = torch.Generator().manual_seed(0)
    drawn = {s.parameter for s in (*site.query, *site.key)}
    weights: dict[str, Tensor] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        if within(name, path) in drawn:
            noise = torch.randn(p.shape, generator=generator)
            weights[path] = (noise * p[0].numel() ** -0.5).to(p)
        else:
            # Others than plain ones, such as quantised weights, can't be copied and stay the module's.
            weights[path] = p.detach().clone() if type(p) is nn.Parameter else p
    return weights


def _are_alike(module: nn.Module, other: nn.Module, name: str, other_name: str) -> bool:
    """True if two modules have the same classes, settings and buffers, and parameters of the same shapes. Each may hold
    the numbers in its name, such as that of its layer."""
    numbers = {int(x) for x in name.split(".") if x.isdigit()}
    other_numbers = {int(x) for x in other_name.split(".") if x.isdigit()}

    def is_same(a: object, b: object) -> bool:
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter):
            return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.device == b.device and torch.equal(a, b)
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(is_same, a, b))
        # Of objects, and of modules beside the tree, such as the one that holds this one, the class alone is compared.
        if not isinstance(a, _SETTINGS):
            return True
        return a == b or (type(a) is int and a in numbers and b in other_numbers)

    modules, others = modules_of(module), modules_of(other)
    return modules.keys() == others.keys() and all(
        type(inner) is type(others[path])
        and is_same(_contents_of(inner), _contents_of(others[path]))
        for path, inner in modules.items()
    )


def _contents_of(module: nn.Module) -> dict[str, object]:
    """What a module holds besides its submodules, and what torch keeps in every module."""
    return {key: x for key, x in vars(module).items() if key not in _NO_SETTINGS}


def _arguments_of(frame: ModuleCall) -> tuple[object, list[Tensor]]:
    """The structure of what a module was called with, and the tensors in it that are no hidden states.

    A tensor is described by its number, which shows where it is passed twice, and its shape; another object, such as a
    cache, by its class.
    """
    assert frame.given is not None
    is_hidden_state = hidden_states(frame)
    numbers: dict[int, int] = {}
    constants: list[Tensor] = []

    def described(x: Any) -> object:
        if not isinstance(x, Tensor):
            return x if isinstance(x, _SETTINGS) else type(x)
        is_hidden = is_hidden_state(x)
        if not is_hidden:
            constants.append(x)
        return numbers.setdefault(id(x), len(numbers)), x.shape, x.dtype, is_hidden

    return mapped((frame.given.args, frame.given.kwargs), described), constants


@final
class _ReferenceCall:
    """A call of a known module, which those of modules like it are compared with."""

    def __init__(self, captured: CapturedCall) -> None:
        self._captured, self._read = captured, LogitReader(captured.call)
        self._query = _Reference(captured.call.q)
        self._key = _Reference(captured.call.k)
        self._logits = _Reference(self._read.recorded)

    def is_like(self, captured: CapturedCall) -> bool:
        """True if a call computes the same logits, by the same formula and from the same queries and keys."""
        before, after = self._captured.call, captured.call
        if type(before) is not type(after) or before.spec != after.spec:
            return False
        if (
            isinstance(before, ScoresCall)
            and isinstance(after, ScoresCall)
            and (before.sink is None) != (after.sink is None)
        ):
            return False
        if captured.how != self._captured.how:
            return False
        is_close = (
            before.query_shape == after.query_shape
            and self._query.is_close(after.q)
            and self._key.is_close(after.k)
        )
        # Without masks, positions and parameters of a call's own, its formula says what queries and keys make.
        return is_close and (
            _is_formula(before, after) or self._logits.is_close(self._read(after))
        )


def _is_formula(before: Seen, after: Seen) -> bool:
    """True if the logits of two calls with the same spec depend on queries and keys alone, in the same way."""
    return (
        isinstance(before, AttentionCall)
        and isinstance(after, AttentionCall)
        and before.causal == after.causal
        and all(x.whole and x.plain and not x.params for x in (before, after))
    )


@final
class _Reference:
    """A tensor that others should equal up to rounding; NaN stands for hidden pairs."""

    def __init__(self, values: Tensor | None) -> None:
        self._values, self._limit = values, 0.0
        if values is not None:
            largest = float(values.abs().nan_to_num(0.0).amax())
            self._limit = 16 * torch.finfo(values.dtype).eps * largest

    def is_close(self, values: Tensor | None) -> bool:
        """True if there is something to compare, and the values are close."""
        reference = self._values
        if reference is None or values is None or reference.shape != values.shape:
            return False
        if not 0 < self._limit < float("inf"):
            return False
        # The same kernels on the same numbers give the same bits, and `equal` is several times as fast.
        return torch.equal(reference, values) or torch.allclose(
            reference, values, rtol=0.0, atol=self._limit, equal_nan=True
        )
