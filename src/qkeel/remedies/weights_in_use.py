"""Weights that a hook or a parametrization computes: whether a change of the stored weight changes the one in use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from qkeel import distributed as dist
from qkeel.errors import RefusedError
from qkeel.patching.modes import hooks_before, parameters_of
from qkeel.remedies.base import Target, evaluating
from qkeel.remedies.sigma_reparam import stored
from qkeel.remedies.step_remedy import WEIGHT_IN_USE, StepRemedy, WeightInUse
from qkeel.sites.site import HeadSlice

# Hooks of torch's; each stores its weight's name in a string.
_WEIGHT_HOOKS = (SpectralNorm, WeightNorm, prune.BasePruningMethod)


def check_weights_in_use(target: Target, remedy: StepRemedy) -> None:
    """Raises RefusedError unless all query and key weights in use follow the stored ones as closely as a remedy needs.

    Spectral norm, weight norm and pruning compute the weight in use from another one, in a parametrization or in a hook
    that runs before the module's forward. A change of the stored weight then does not have the intended effect, or none
    at all. How the two are related is tried on the module itself, which stays as it is.
    """
    for s in {(s.parameter, s.axis): s for s in target.logit_slices()}.values():
        computed = _computed(target.model, s.parameter)
        if computed is None:
            continue
        layer, attribute, hook = computed
        if remedy.takes_sigma_reparam and attribute in stored(layer):
            continue
        relation = _relation(layer, attribute, hook, target.model, s)
        if WEIGHT_IN_USE.index(relation) > WEIGHT_IN_USE.index(remedy.weight_in_use):
            raise RefusedError(
                f"{remedy.name} acts on stored weights, but a hook or a parametrization computes the {attribute} of "
                f"{type(layer).__name__} from {s.parameter} (spectral or weight norm, pruning), and the weight in use "
                f"{relation} the stored one. Remove it first, for example with torch.nn.utils.remove_spectral_norm, "
                "remove_weight_norm, prune.remove or parametrize.remove_parametrizations, or use softcap, which needs "
                "no weights"
            )


Hook = Callable[[nn.Module, tuple[()]], object]


def _computed(
    model: nn.Module, parameter: str
) -> tuple[nn.Module, str, Hook | None] | None:
    """Returns the module that uses a weight computed from a parameter, the attribute that holds the weight in use, and
    the hook that computes it, if it is one of torch's; None if the parameter itself is in use."""
    owner, is_parametrized, original = parameter.partition(".parametrizations.")
    if is_parametrized:
        return model.get_submodule(owner), original.partition(".")[0], None
    name, _, local_name = parameter.rpartition(".")
    layer = model.get_submodule(name)
    for hook in hooks_before(layer).values():
        if isinstance(hook, _WEIGHT_HOOKS):
            attribute = str(vars(hook).get("name") or vars(hook).get("_tensor_name"))
            if local_name.rpartition("_")[0] == attribute:
                return layer, attribute, hook
    # A hook of somebody else leaves its result in a plain attribute. It may do more, so it is not tried.
    shape = model.get_parameter(parameter).shape
    for attribute, value in vars(layer).items() if hooks_before(layer) else ():
        if isinstance(value, Tensor) and value.shape == shape:
            return layer, attribute, None
    return None


@torch.no_grad()
def _relation(
    layer: nn.Module, attribute: str, hook: Hook | None, model: nn.Module, s: HeadSlice
) -> WeightInUse:
    """Returns how a layer's weight in use follows the stored one, by scaling its heads by different factors."""
    owner, _, local_name = s.parameter.rpartition(".")
    parameters = parameters_of(model.get_submodule(owner))
    stored_weight = model.get_parameter(s.parameter)
    is_parametrized = ".parametrizations." in s.parameter
    if dist.is_split(stored_weight) or (hook is None and not is_parametrized):
        return "is not scaled with"

    def in_use() -> Tensor:
        if hook is not None:
            hook(layer, ())
        weight: Tensor = getattr(layer, attribute)
        return weight.detach().clone()

    factors = torch.linspace(0.5, 1.5, s.n + 1)[1:].to(stored_weight)
    # Power iterations stand still in evaluation mode, and would hide the factors.
    with evaluating(layer):
        before = in_use()
        # Another parameter takes its place, because a pending backward pass may need the values of this one.
        parameters[local_name] = nn.Parameter(
            stored_weight * s.expand(factors, stored_weight)
        )
        try:
            after = in_use()
        finally:
            parameters[local_name] = stored_weight

    def near(a: Tensor, b: Tensor) -> bool:
        tolerance = 1e-4 * float(before.abs().max())
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=tolerance)

    if not near(after, before * s.expand(factors, before)):
        return "is not scaled with"
    if torch.equal(before, stored_weight):
        return "is"
    multiple = (before * stored_weight).sum() / stored_weight.square().sum()
    is_multiple = near(before, multiple * stored_weight)
    return "is a multiple of" if is_multiple else "is scaled with"
