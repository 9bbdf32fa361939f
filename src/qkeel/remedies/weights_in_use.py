"""Weights that a hook or a parametrization computes, of which a change of the stored weight may have no effect."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import prune

from qkeel.errors import RefusedError
from qkeel.patching.module_tables import hooks_before
from qkeel.remedies.base import Target
from qkeel.remedies.sigma_reparam import stored
from qkeel.remedies.step_remedy import StepRemedy


def check_weights_in_use(target: Target, remedy: StepRemedy) -> None:
    """Raises RefusedError unless all query and key weights in use follow the stored ones as a remedy needs.

    Spectral norm and weight norm compute the weight in use from another one, in a parametrization or in a hook that
    runs before the module's forward. A change of the stored weight then does not have the intended effect, or none at
    all. Only under a pruning mask are the rows in use scaled along with the stored rows.
    """
    for parameter in {s.parameter for s in target.logit_slices()}:
        computed = _computed(target.model, parameter)
        if computed is None:
            continue
        layer, attribute = computed
        if remedy.takes_sigma_reparam and attribute in stored(layer):
            continue
        is_masked = any(
            isinstance(hook, prune.BasePruningMethod)
            and vars(hook).get("_tensor_name") == attribute
            for hook in hooks_before(layer).values()
        )
        if not (is_masked and remedy.takes_masks):
            raise RefusedError(
                f"{remedy.name} acts on stored weights, but a hook or a parametrization computes the {attribute} of "
                f"{type(layer).__name__} from {parameter} (spectral or weight norm, pruning), which need not follow "
                "the stored one. Remove it first, for example with torch.nn.utils.remove_spectral_norm, "
                "remove_weight_norm, prune.remove or parametrize.remove_parametrizations, or use softcap, which needs "
                "no weights"
            )


def _computed(model: nn.Module, parameter: str) -> tuple[nn.Module, str] | None:
    """Returns the module that uses a weight computed from a parameter, and the attribute that holds the weight in use;
    None if the parameter itself is in use."""
    owner, is_parametrized, original = parameter.partition(".parametrizations.")
    if is_parametrized:
        return model.get_submodule(owner), original.partition(".")[0]
    layer = model.get_submodule(parameter.rpartition(".")[0])
    # Older hooks, torch's and anybody's, leave the computed weight in a plain attribute.
    shape = model.get_parameter(parameter).shape
    for attribute, value in vars(layer).items() if hooks_before(layer) else ():
        if isinstance(value, Tensor) and value.shape == shape:
            return layer, attribute
    return None
