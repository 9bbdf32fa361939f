"""Parameters of attention modules on which no output depends, such as sinks that the path that runs leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qkeel.capture.example import copied
from qkeel.patching.autograd import inputs_of, variable_of
from qkeel.patching.forward import extra_pass
from qkeel.patching.roles import tensors_within
from qkeel.sites.run import spread


def unused_parameters(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    scopes: Mapping[str, tuple[str, nn.Module]],
) -> dict[str, list[str]]:
    """Returns the names of parameters, by site, to which no path of autograd's graph leads from any output.

    A module none of whose parameters is reached says nothing: it may be frozen, or run in an autograd function of the
    model's own.

    scopes: the name and the module around each site.
    """
    if spread(model):
        # A pass with a graph that one process makes alone would gather weights.
        return {}
    # A caller's `inference_mode` would leave no graph to follow.
    with (
        extra_pass(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        output = model(*copied(args), **copied(dict(kwargs)))
    reached = _leaves([*tensors_within(output)])
    unused: dict[str, list[str]] = {}
    for site, (scope, module) in scopes.items():
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names = [name for name, p in trained.items() if id(p) not in reached]
        if len(names) < len(trained):
            unused[site] = [f"{scope}.{n}" if scope else n for n in names]
    return unused


def _leaves(outputs: list[Tensor]) -> set[int]:
    """The ids of the tensors whose gradient an output's graph accumulates."""
    queue = [x.grad_fn for x in outputs if x.grad_fn is not None]
    visited, leaves = {*queue}, set[int]()
    while queue:
        node = queue.pop()
        variable = variable_of(node)
        if variable is not None:
            leaves.add(id(variable))
        for above in inputs_of(node):
            if above not in visited:
                visited.add(above)
                queue.append(above)
    return leaves
