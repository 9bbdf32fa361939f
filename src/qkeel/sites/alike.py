"""Finds the sites of a module that is made and called like one whose sites are known.

Nearly all layers of a model are alike. Once one of them has been read from the graph of its pass, the sites of another
are the same but for the names of weights. A copy of it runs twice, without a graph: as it is, which must make the same
calls, and with other rows, which must act as those of the first. Otherwise the module is read itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import GivenArguments, ModuleCall, mapped, tensors
from qkeel.capture.intercept import CapturedCall
from qkeel.capture.user_hooks import hooks_held_back
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import Args, Kwargs, modules_of
from qkeel.sites.alone import COPY_MARK, hidden_states
from qkeel.sites.site import Sites, renamed
from qkeel.sites.trace import PartTrace
from qkeel.sites.verify import (
    ChangedWeights,
    Experiment,
    LogitReader,
    RecordedCall,
    Rerun,
)

# What torch keeps in every module, such as hooks, and the mark of copies.
_NO_SETTINGS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "training"}
_NO_SETTINGS |= {COPY_MARK}
_SETTINGS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@final
class KnownModule:
    """A module with one site, which was read and verified.

    Attributes:
        kind: its class.

    Args:
        frame: the call of the module.
        name: its name in the model.
        copied: its copy, as it was before the call.
        trace: the trace of the copy.
        is_proportional: whether its logits are proportional to the rows of q and of k.
    """

    def __init__(
        self,
        frame: ModuleCall,
        name: str,
        copied: nn.Module,
        trace: PartTrace,
        *,
        is_proportional: bool,
    ) -> None:
        self.kind = type(frame.module)
        self._name, self._copied, self._trace = name, copied, trace
        self._is_proportional = is_proportional
        self._structure, self._constants = _arguments_of(frame)
        # The number of other modules that have been compared with it.
        self._n_alike = 0

    def is_like(self, frame: ModuleCall, name: str) -> bool:
        """True if the module of a call has the same classes, settings and buffers, the same shapes of weights, and
        arguments of the same structure, with the same tensors where these are no hidden states."""
        if not _are_alike(self._copied, frame.module, self._name, name):
            return False
        structure, constants = _arguments_of(frame)
        return structure == self._structure and all(
            a is b or torch.equal(a, b) for a, b in zip(self._constants, constants)
        )

    def trace_of(
        self,
        name: str,
        copied: nn.Module,
        alone: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> PartTrace | None:
        """The trace of the copy of a module like this one, without a graph, or None if runs of it do not confirm that
        its rows act as those of this one.

        Args:
            name: the name of the module in the model.
            copied: its copy.
            alone: what stands for the model around the copy.
            args, kwargs: what the copy is called with.
        """
        (known,) = self._trace.sites
        site = dataclasses.replace(
            renamed(known, lambda path: name + path.removeprefix(self._name)),
            module=self._counterpart(known.module, copied),
        )
        frame = ModuleCall(
            name=name,
            module=copied,
            parent=None,
            given=GivenArguments(args, kwargs, [*tensors((args, kwargs))]),
        )
        known_calls = self._trace.calls[known.name]
        calls = [self._moved(call, frame) for call in known_calls]
        readers = [LogitReader(call.captured.call) for call in known_calls]
        weights = ChangedWeights(alone, site)
        self._n_alike += 1
        with extra_pass(alone), torch.inference_mode(False), hooks_held_back(alone):
            rerun = Rerun(site, frame, calls, readers, weights.parameters)
            with rerun.opened():
                rerun.base = rerun.logits(weights.filled())
                captured = rerun.calls
                experiment = Experiment(site, weights, rerun)
                is_confirmed = all(map(_is_same_call, known_calls, captured)) and (
                    experiment.is_proportional()
                    and experiment.multiplies_queries(captured)
                    if self._is_proportional
                    else experiment.moves_thirds(self._n_alike)
                )
        if not is_confirmed:
            return None
        return PartTrace(
            part=alone,
            sites=Sites([site]),
            calls={
                site.name: [
                    dataclasses.replace(
                        call,
                        captured=dataclasses.replace(call.captured, call=after.call),
                    )
                    for call, after in zip(calls, captured)
                ]
            },
            values={},
            has_graph=False,
        )

    def _moved(self, call: RecordedCall, frame: ModuleCall) -> RecordedCall:
        """The same call of the copy of another module, whose own call is `frame`."""
        captured = call.captured
        (own_frame,) = [x for x in captured.frame.line() if x.module is self._copied]
        module = self._counterpart(captured.frame.module, frame.module)
        path = captured.frame.name.removeprefix(self._name)
        inner = frame
        if module is not frame.module:
            inner = ModuleCall(name=frame.name + path, module=module, parent=frame)
        return RecordedCall(
            captured=dataclasses.replace(captured, frame=inner),
            positions={id(frame): call.positions[id(own_frame)]},
        )

    def _counterpart(self, module: nn.Module, copied: nn.Module) -> nn.Module:
        """The submodule of another copy that stands where this one has a module."""
        for path, inner in self._copied.named_modules():
            if inner is module:
                return copied.get_submodule(path)
        raise LookupError(f"{type(module).__name__} is no part of {self._name}")


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


def _is_same_call(known: RecordedCall, captured: CapturedCall) -> bool:
    """True if a call computes its logits by the same formula as a known one."""
    before, after = known.captured.call, captured.call
    if type(before) is not type(after) or before.spec != after.spec:
        return False
    if (
        isinstance(before, ScoresCall)
        and isinstance(after, ScoresCall)
        and (before.lost, before.sink is None) != (after.lost, after.sink is None)
    ):
        return False
    return (
        captured.how == known.captured.how and before.query_shape == after.query_shape
    )
