"""The role of a forward pass: whether it was trained, which its output shows and its module's mode does not.

A reference model's pass runs in training mode and is not trained; a model that comes from a checkpoint in evaluation
mode is. So a pass counts as trained once a gradient has reached what it returned. Until then its role is open, and once
the graph behind its output is gone, no gradient can come.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.patching.held_objects import tensors_within
from qkeel.patching.module_tables import MODULE_ATTRIBUTES, modules_of
from qkeel.patching.torch_state import running_frames, transformed_now

# Of passes that are trained, and of passes that are not.
Phase = Literal["train", "eval"]


@final
class PassRole:
    """Whether a gradient has reached the output of one forward pass.

    `trained` is True once it has, False once none can come any more, and None in between. Gradients are observed by
    hooks on the nodes of autograd's graph, which change no value, wait for no device, and end with the graph.
    """

    def __init__(self, reached: Callable[[], None] | None = None) -> None:
        """Begins as the role of a pass that no gradient can reach. reached: called once if one arrives."""
        self.is_reached = False
        self._when_reached = reached
        self._hook: weakref.ref[Callable[[object], None]] | None = None
        self._open = self._repeats = False

    @classmethod
    def of_output(
        cls,
        model: nn.Module,
        inputs: object,
        output: object,
        reached: Callable[[], None] | None = None,
    ) -> PassRole:
        """Returns the role of a pass that has just ended.

        model: the module that was called. inputs, output: its arguments and what it returned, whose tensors may lie in
        containers, dataclasses and objects.
        """
        role = cls(reached)
        if not torch.is_grad_enabled():
            return role
        # torch.func differentiates tensors that do not leave it, so nothing can be
        # hooked.
        if transformed_now():
            role.arrive()
            return role
        nodes = _graph_nodes(output, without=_graph_nodes(inputs))
        # a model may also keep its loss for itself: self.loss = ..., self.losses.append(...)
        if not nodes:
            kept = [
                x
                for module in modules_of(model).values()
                if not isinstance(module, torch.jit.ScriptModule)
                for name, x in vars(module).items()
                if name not in MODULE_ATTRIBUTES
                and isinstance(x, (Tensor, list, tuple, dict))
            ]
            nodes = _graph_nodes(kept, without=_graph_nodes(inputs))
        role.wait_for(nodes)
        return role

    @classmethod
    def to_be_repeated(cls) -> PassRole:
        """Returns the role of a pass without gradients inside a checkpoint, which the backward pass will repeat."""
        role = cls()
        role._open = role._repeats = True
        return role

    def wait_for(self, nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Waits for a gradient at any of these nodes."""

        # Only the graph refers to it, so it lives as long as the graph does.
        def hook(gradients: object) -> None:
            self.arrive()

        for node in nodes:
            node.register_prehook(hook)
            self._open = True
            self._hook = weakref.ref(hook)

    def arrive(self) -> None:
        """Records that a gradient has arrived."""
        if not self.is_reached:
            self.is_reached, self._open = True, False
            if self._when_reached is not None:
                self._when_reached()

    @property
    def awaited(self) -> bool:
        """True if the backward pass was to repeat the pass, as `to_be_repeated` says."""
        return self._repeats

    @property
    def trained(self) -> bool | None:
        """True if the pass was trained, False if it never will be, and None if that is open."""
        # Nothing refers to the graph any more.
        if self._open and self._hook is not None and self._hook() is None:
            self._open = False
        return None if self._open else self.is_reached


def _graph_nodes(
    value: object, without: Iterable[torch.autograd.graph.Node] = ()
) -> list[torch.autograd.graph.Node]:
    """Returns the nodes that computed the tensors in a value, each once, except those in `without`."""
    before = set(map(id, without))
    nodes: dict[int, torch.autograd.graph.Node] = {}
    for tensor in tensors_within(value):
        node = tensor.grad_fn if tensor.requires_grad else None
        if node is not None and id(node) not in before:
            nodes[id(node)] = node
    return list(nodes.values())


def inside_checkpoint() -> bool:
    """True in the first run of a reentrant checkpoint, which has no gradients although it will be trained."""
    checkpoints = sys.modules.get("torch.utils.checkpoint")
    if checkpoints is None:
        return False
    first_run = checkpoints.CheckpointFunction.forward.__code__
    return any(frame.f_code is first_run for frame in running_frames())
