"""Finds the sites of a model in a pass that the program itself makes.

When a module is about to make its first attention call, a copy of the smallest module around the call that holds the
projections runs, with a few rows of what that module was called with, and is read and verified as a whole model is (see
`trace`). Nothing else of the model runs, and what the copy and its objects store is the copy's.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.contents import reachable
from qkeel.capture.example import ROWS, Caller, ModuleCall
from qkeel.capture.intercept import CapturedCall, name_of
from qkeel.capture.readers import unobserved
from qkeel.capture.user_hooks import is_of_library
from qkeel.patching.modes import (
    Args,
    CollectiveMode,
    Kwargs,
    modules_of,
    without_modes,
)
from qkeel.sites.find import renamed, within
from qkeel.sites.graph import names_of
from qkeel.sites.run import saving_unseen
from qkeel.sites.site import INDEX, AttentionSite, Sites
from qkeel.sites.trace import ModelTrace, common_module, traced_alone
from qkeel.sites.verify import COPY_MARK, Verification, refuse_collective

_LOG = logging.getLogger(__name__)


@final
class OwnPassSearch:
    """Finds the sites of a model while it runs.

    Attributes:
        sites: those that were found so far.
        failure: why a module around an attention call whose weights are unknown does not run alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sites = Sites()
        self.failure: Exception | None = None
        # Of the latest module that did not run.
        self._error: Exception | None = None
        self._names = {id(module): name for name, module in modules_of(model).items()}
        self._parameters = names_of(model)
        self._verification = Verification()
        # Modules whose attention is known wherever they are called, as it depends on their own weights alone.
        self._known: set[int] = set()
        # Calls of other modules that were looked at, and whether they choose keys.
        self._known_calls: set[tuple[Caller | None, bool]] = set()
        # Set when the whole model has been tried.
        self._is_over = False

    def at(self, frame: ModuleCall, *, chooses: bool) -> bool:
        """Finds the sites of a running module that is about to make an attention call, or has made scores of which keys
        are chosen (`chooses`). Returns whether more is known now; the module's call may have another name then."""
        is_known = not chooses and id(frame.module) in self._known
        if self._is_over or is_known or (frame.caller, chooses) in self._known_calls:
            return False
        self._known_calls.add((frame.caller, chooses))
        latest: _PartTrace | None = None
        for around in frame.line():
            has_weights = any(True for _ in around.module.parameters())
            trace = self._trace(around) if around.given and has_weights else None
            if trace is None:
                continue
            latest = trace
            # An indexer may stand beside the attention for which it chooses.
            if any(
                site.terms and (chooses or trace.module_of(site) is frame.module)
                for site in trace.sites
            ):
                break
        if latest is None:
            self.failure = self.failure or self._error
            return False
        self._is_over = latest.call.is_outermost
        self._add(latest, frame)
        return True

    def tell(self) -> None:
        """Says once which sites are known from gradients alone."""
        self._verification.tell()

    def _trace(self, frame: ModuleCall) -> _PartTrace | None:
        """The trace of a copy of a module that runs as it was called, under the name that it has in the model. The
        first rows suffice if they verify all its sites."""
        latest = failure = None
        for rows in (ROWS, None):
            if rows is not None and frame.batch <= rows:
                continue
            try:
                with _unnoticed():
                    copied = _copy_of(frame.module)
                    name = self._names[id(frame.module)]
                    trace = traced_alone(
                        _Part(name, copied) if name else copied,
                        *_example(frame, rows),
                        self._verification,
                    )
            except Exception as error:
                failure = error
                continue
            latest = _PartTrace(call=frame, copied=copied, trace=trace)
            if all(site.verified for site in trace.sites):
                break
        self._error = self._error if latest else failure
        return latest

    def _add(self, trace: _PartTrace, frame: ModuleCall) -> None:
        """Adds the sites that a trace shows; `frame` is the call that is about to be read."""
        by_name = {site.name: site for site in self.sites}
        modules, parameters = self._canonical_names(trace)
        for site in trace.sites:
            module = trace.module_of(site)
            callers = tuple(
                (modules[name], modules.get(caller, caller), number)
                for name, caller, number in site.callers
            )
            called = ModuleCall(
                name=self._names[id(module)], module=module, parent=None
            )
            name = name_of(called, trace.first_call(site).ordinal)
            site = renamed(site, lambda weight: parameters.get(weight, weight))
            weights = _weights_of(site)
            names = {self._parameters[id(p)] for p in module.parameters()}
            if weights <= names:
                self._known.add(id(module))
            elif name in by_name and weights != _weights_of(by_name[name]):
                callers = callers or (frame.caller,) * (module is frame.module)
            else:
                callers = ()
            if callers:
                name = f"{common_module(sorted(weights))}#{called.name}"
            if name in by_name:
                continue
            if frame.caller in callers:
                frame.name = name
            self._known_calls.update((caller, False) for caller in callers)
            by_name[name] = dataclasses.replace(
                site, name=name, module=module, callers=callers
            )
        indexers = [
            dataclasses.replace(
                site,
                name=modules[site.name.removesuffix(INDEX)] + INDEX,
                module=trace.original(site.module),
            )
            for site in trace.sites.indexers
        ]
        indexers = {site.name: site for site in (*self.sites.indexers, *indexers)}
        self.sites = Sites(by_name.values(), (), indexers.values())

    def _canonical_names(
        self, trace: _PartTrace
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The names in the model of the modules and of the weights of a part, by their names in the part. They differ
        where several parts share a module or a weight."""
        name = self._names[id(trace.call.module)]
        modules = {
            within(name, path): self._names[id(module)]
            for path, module in trace.call.module.named_modules(remove_duplicate=False)
        }
        parameters = {
            within(name, path): self._parameters[id(p)]
            for path, p in trace.call.module.named_parameters(remove_duplicate=False)
        }
        return modules, parameters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PartTrace:
    """The trace of a copy of a module of the model, and the module's call in the program's pass."""

    call: ModuleCall
    copied: nn.Module
    trace: ModelTrace

    @property
    def sites(self) -> Sites:
        """The sites by their names in the part."""
        return self.trace.sites

    def first_call(self, site: AttentionSite) -> CapturedCall:
        """The first attention call of a site in the trace."""
        return self.trace.calls[site.name][0].captured

    def module_of(self, site: AttentionSite) -> nn.Module:
        """The module of the model that makes the calls of a site."""
        return self.original(self.first_call(site).frame.module)

    def original(self, module: nn.Module) -> nn.Module:
        """The module of the model of which this module is a copy."""
        for path, inner in self.copied.named_modules():
            if inner is module:
                return self.call.module.get_submodule(path)
        # The part itself, in which nothing else runs.
        return self.call.module


@final
class _Part(nn.Module):
    """Stands for a model of which only one module runs, under the name that it has there."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        # Beside the tree, in which it would have a second name.
        vars(self)["inner"] = inner
        holder: nn.Module = self
        *path, last = name.split(".")
        for key in path:
            child = nn.Module()
            holder.add_module(key, child)
            holder = child
        holder.add_module(last, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _copy_of(module: nn.Module) -> nn.Module:
    """A copy of a module that may be running. Its plain parameters share the memory of the module's, whose versions its
    writes don't raise; others, such as quantised ones, are the module's."""
    memo: dict[int, Any] = {
        id(p): (
            nn.Parameter(p.data)
            if type(p) is nn.Parameter and p.is_floating_point()
            else p
        )
        for p in module.parameters()
    }
    for inner in module.modules():
        # Tensors with a graph can't be copied.
        memo |= _without_graphs(vars(inner))
    copied = copy.deepcopy(module, memo)
    vars(copied)[COPY_MARK] = True
    return copied


def _without_graphs(values: object) -> dict[int, Tensor]:
    """By id: the values of the tensors among some objects that were computed with a graph."""
    return {
        id(x): x.detach().clone()
        for x in reachable(values, lambda x: not is_of_library(type(x)))
        if isinstance(x, Tensor) and not x.is_leaf
    }


def _example(frame: ModuleCall, rows: int | None) -> tuple[Args, Kwargs]:
    """What a module was called with, or the first rows of it, copied. Hidden states have a node in autograd's graph, by
    which what is computed from them is told from constants, such as rotations."""
    matrices = [p for p in frame.module.parameters() if p.ndim > 1]
    widths = {n for p in matrices for n in p.shape}
    has_graph = any(x.requires_grad for x in frame.inputs)

    def is_hidden_state(x: Tensor) -> bool:
        if has_graph or not x.is_floating_point():
            return x.requires_grad
        # Without gradients, only the width says what is multiplied by a weight.
        return x.ndim > 1 and x.shape[-1] in widths

    def change(x: Tensor) -> Tensor:
        values = x.detach()
        if rows is not None and x.ndim > 1 and len(x) == frame.batch:
            values = values[:rows]
        if is_hidden_state(x):
            return values.clone().requires_grad_().clone()
        return values.clone()

    assert frame.given is not None
    with torch.inference_mode(False), torch.enable_grad():
        return frame.given.copied(change)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """A context of which the running pass notices nothing: qkeel's modes, hooks for saved tensors, and the casts of
    weights that autocast keeps for the pass. This process may not wait for others in it."""
    keeps_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with unobserved(), without_modes(), saving_unseen(), ExitStack() as around:
            if dist.world() > 1:
                around.enter_context(CollectiveMode(refuse_collective))
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)


def _weights_of(site: AttentionSite) -> set[str]:
    """The names of the weights from which the logits of a site are computed."""
    return {s.parameter for s in (*site.query, *site.key)}
