"""Tells modules that compute what another one computes, whose site is known.

Nearly all layers of a model are alike. Once one of them has been read from the graph of its pass, the sites of another
are the same but for the names of weights. A copy of the other in which the weights of the first stand runs once, on what
the first was called with: it must make the same calls, with the same queries and keys. Otherwise the module is read
itself. What buffers change shows in that run. Settings are compared, since what is made of the values does not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import ModuleCall, mapped
from qkeel.capture.intercept import CapturedCall
from qkeel.capture.random_streams import seed_generators
from qkeel.patching.module_tables import MODULE_ATTRIBUTES, modules_of
from qkeel.sites.module_copy import (
    CannotRerunError,
    LoneCall,
    copy_of,
    hidden_states,
    is_plain,
)
from qkeel.sites.site import AttentionSite, Sites, renamed, within
from qkeel.sites.trace import ModuleTrace
from qkeel.sites.verify import LogitReader, RepeatedCalls
from qkeel.spec import AttentionCall

_SETTINGS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@final
class KnownModule:
    """A module with one site, which was read and verified.

    Args:
        frame: the call of the module.
        name: its name in the model.
        trace: the trace of its copy.
    """

    def __init__(self, frame: ModuleCall, name: str, trace: ModuleTrace) -> None:
        self._name, self._trace = name, trace
        self._kind, self._shapes = type(frame.module), _shapes_of(frame.module)
        self._settings = _settings_of(frame.module)
        self._structure, self._constants = _arguments_of(frame)
        (self._site,) = trace.sites
        self._weights = _drawn_weights(frame.module, name, self._site)
        calls = trace.calls[self._site.name]
        places = [trace.places[call.name] for call in calls]
        self._repeated = RepeatedCalls(self._site, places)
        references = self._calls_of(frame.module)
        self._facts = [_facts_of(call) for call in references]
        self._numbers = [x for call in references for x in _numbers_of(call)]
        if not all(bool(x.nan_to_num(0.0).any()) for x in self._numbers):
            raise CannotRerunError("zeros show nothing")

    def trace_of(self, frame: ModuleCall, name: str) -> ModuleTrace | None:
        """The trace of a module like this one, without a graph. None if it has other weights, if it was called with
        arguments of another structure or other tensors where these are no hidden states, or if it does not compute the
        same with the same weights.

        frame, name: its call, and its name in the model.
        """
        module = frame.module
        if type(module) is not self._kind or _shapes_of(module) != self._shapes:
            return None
        if not self._has_settings(module, name):
            return None
        structure, constants = _arguments_of(frame)
        is_called_alike = structure == self._structure and all(
            a is b or torch.equal(a, b) for a, b in zip(self._constants, constants)
        )
        if not is_called_alike:
            return None
        calls = self._calls_of(module)
        if [_facts_of(call) for call in calls] != self._facts:
            return None
        numbers = [x for call in calls for x in _numbers_of(call)]
        if not all(map(_is_close, self._numbers, numbers)):
            return None
        site = renamed(self._site, lambda path: name + path.removeprefix(self._name))
        return dataclasses.replace(
            self._trace,
            module=module,
            sites=Sites([site]),
            calls={site.name: self._trace.calls[self._site.name]},
            values={},
        )

    def _has_settings(self, module: nn.Module, name: str) -> bool:
        """True if a module has the same settings. Each may hold the numbers in its name, such as that of its layer."""
        settings = _settings_of(module)
        own_numbers, its_numbers = (
            {int(x) for x in path.split(".") if x.isdigit()}
            for path in (self._name, name)
        )
        return settings.keys() == self._settings.keys() and all(
            a == b or (type(a) is int and a in own_numbers and b in its_numbers)
            for a, b in zip(self._settings.values(), settings.values())
        )

    def _calls_of(self, module: nn.Module) -> list[CapturedCall]:
        """The attention calls of a copy of a module in which the weights of this one stand.

        Raises: CannotRerunError if it makes others.
        """
        copied = copy_of(module, ())
        lone = LoneCall(self._name, copied, self._trace.lone.given)
        with lone.opened(runs_once=True):
            seed_generators(copied.parameters())
            return self._repeated.read(lone, self._weights)


def _shapes_of(module: nn.Module) -> list[object]:
    """The names, shapes, dtypes and devices of the weights of a module."""
    named = module.named_parameters(remove_duplicate=False)
    return [(name, p.shape, p.dtype, p.device) for name, p in named]


def _settings_of(module: nn.Module) -> dict[str, object]:
    """The numbers, flags and names that a module and those inside it hold, by where they are."""
    return {
        f"{path}.{key}": value
        for path, inner in modules_of(module).items()
        for key, value in vars(inner).items()
        if key not in MODULE_ATTRIBUTES and isinstance(value, _SETTINGS)
    }


def _drawn_weights(
    module: nn.Module, name: str, site: AttentionSite
) -> dict[str, Tensor]:
    """Copies of the plain weights of a module by their names in the model, of which those of q and k are drawn at random:
    rows that are equal or zero would not show which of them makes what. Vectors are moved, since gains of one and biases of
    zero would not show that they are used."""
    generator = torch.Generator().manual_seed(0)
    drawn = {s.parameter for s in (*site.query, *site.key)}
    weights: dict[str, Tensor] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        parameter = within(name, path)
        if parameter in drawn:
            noise = torch.randn(p.shape, generator=generator)
            weights[parameter] = (noise * p[0].numel() ** -0.5).to(p)
        elif is_plain(p) and p.ndim < 2:
            noise = torch.rand(p.shape, generator=generator)
            weights[parameter] = p.detach() + (noise / 8).to(p)
        elif is_plain(p):
            weights[parameter] = p.detach().clone()
    return weights


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


def _facts_of(captured: CapturedCall) -> list[object]:
    """What is computed from the queries and keys of a call, without numbers."""
    call = captured.call
    facts = [captured.how, type(call), call.spec, call.query_shape]
    if isinstance(call, ScoresCall):
        return [*facts, call.sink is None]
    return [*facts, call.causal, call.whole and call.plain and not call.params]


def _numbers_of(captured: CapturedCall) -> list[Tensor]:
    """The queries and keys of a call, and its logits with NaN for hidden pairs, unless its formula says what queries and
    keys make: without masks, positions and parameters of its own.

    Raises: CannotRerunError if they are unknown.
    """
    call = captured.call
    numbers = [x for x in (call.q, call.k) if x is not None]
    if len(numbers) < 2:
        raise CannotRerunError("the queries or keys of a call are unknown")
    is_formula = isinstance(call, AttentionCall) and call.whole and call.plain
    if not is_formula or call.params:
        numbers.append(LogitReader(call).recorded)
    return numbers


def _is_close(reference: Tensor, values: Tensor) -> bool:
    """True if there is something to compare, and the values are equal up to rounding."""
    if reference.shape != values.shape:
        return False
    # The same kernels on the same numbers give the same bits, and `equal` is several times as fast.
    if torch.equal(reference, values):
        return True
    largest = float(reference.abs().nan_to_num(0.0).amax())
    limit = 16 * torch.finfo(values.dtype).eps * largest
    return torch.allclose(reference, values, rtol=0.0, atol=limit, equal_nan=True)
