"""The model of all runs of a stack, made of their models.

The forward code of blocks and attention stays the only one: it gets the sequences of all runs, one run after the other
in the batch, and each leaf treats its run's part of the batch by its run's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from qkeel.errors import RefusedError
from qkeel.lab.stack.stacked_attention import StackedAttention
from qkeel.lab.stack.stacked_modules import CompiledMLP, StackedEmbedding, StackedLinear, StackedNorm
from qkeel.nn.block import MLP
from qkeel.nn.spec_module import SpecModule


def stack_models(models: Sequence[nn.Module], *, compiled: bool = False) -> nn.Module:
    """Returns the model of all these; their parameters become parts of its own and keep their values.

    `compiled`: leaves are of compiled operators, which are there, in place of torch's: the same but for rounding.

    Raises: RefusedError where a part of the model cannot be stacked.
    """
    whole = copy.deepcopy(models[0])
    tables = [dict(model.named_modules()) for model in models]
    joined: dict[int, nn.Parameter] = {}
    for place, module in list(whole.named_modules()):
        own = [table[place] for table in tables]
        parameters = _stacked_parameters(own, joined)
        leaf = _stacked_leaf(module, parameters, compiled)
        if leaf is None:
            _stack_rest(module, place, parameters, own, compiled)
        else:
            home, _, name = place.rpartition(".")
            whole.get_submodule(home).add_module(name, leaf)
    return whole


def _stacked_parameters(own: Sequence[nn.Module], joined: dict[int, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters [runs ...] of a module by name; `joined` holds those made before, by the first run's."""
    tables = [dict(module.named_parameters(recurse=False)) for module in own]
    for name, first in tables[0].items():
        if id(first) not in joined:  # a head may share its weight with the embedding
            joined[id(first)] = _join([table[name] for table in tables])
    return {name: joined[id(first)] for name, first in tables[0].items()}


@torch.no_grad()
def _join(each: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter [runs ...] that these are the parts of from now on."""
    whole = nn.Parameter(torch.stack([p.detach() for p in each]), requires_grad=each[0].requires_grad)
    for p, part in zip(each, whole.detach()):
        p.data = part
    return whole


def _stacked_leaf(module: nn.Module, parameters: dict[str, nn.Parameter], compiled: bool) -> nn.Module | None:
    """The stacked module for a leaf; None for a module that is no leaf."""
    if type(module) is nn.Linear:
        weight, bias = parameters["weight"], parameters.get("bias")
        fits = compiled and bias is None and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
        return StackedLinear(weight, bias, compiled=fits)
    if type(module) is nn.Embedding:
        return StackedEmbedding(parameters["weight"])
    if type(module) is nn.RMSNorm:
        gain, size = parameters.get("weight"), module.normalized_shape
        fits = compiled and gain is not None and len(size) == 1 and size[0] % 8 == 0
        return StackedNorm(gain, size[-1], module.eps, compiled=fits)
    return CompiledMLP(module) if compiled and type(module) is MLP and _fits(module) else None


def _fits(mlp: MLP) -> bool:
    linear = mlp.gate is None and type(mlp.up) is type(mlp.down) is nn.Linear
    return linear and mlp.up.in_features % 8 == mlp.up.out_features % 8 == 0


def _stack_rest(
    module: nn.Module, place: str, parameters: dict[str, nn.Parameter], own: Sequence[nn.Module], compiled: bool
) -> None:
    """Stacks what a module holds besides its children."""
    attention = isinstance(module, SpecModule)
    if any(True for _ in module.buffers(recurse=False)) or (module.dropout if attention else parameters):
        raise RefusedError(f"{place or 'the model'} ({type(module).__name__}) cannot train as one with other runs'")
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    if isinstance(module, SpecModule):
        modules = [each for each in own if isinstance(each, SpecModule)]
        module.attend = StackedAttention(module, modules, compiled)
