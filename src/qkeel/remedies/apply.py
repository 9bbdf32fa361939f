"""`apply`: remedies on a model and its optimizer, in one line."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from qkeel.capture.example import ForwardArguments
from qkeel.deprecation import Call, accepts_earlier_calls
from qkeel.handle import Handle
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import owners, unwrapped
from qkeel.patching.optimizers import listed
from qkeel.remedies.active import active_remedies, forget
from qkeel.remedies.apply_now import apply_now
from qkeel.remedies.base import Remedy
from qkeel.remedies.next_pass import AtNextPass
from qkeel.remedies.table import (
    ALIASES,
    REMEDIES,
    Note,
    canonical,
    note,
    parse,
    remedies,
)
from qkeel.sites.tap import Tap

__all__ = [
    "ALIASES",
    "REMEDIES",
    "AtNextPass",
    "Note",
    "active_remedies",
    "apply",
    "canonical",
    "forget",
    "note",
    "parse",
    "remedies",
]


def _model_first(*args: Any, **kwargs: Any) -> Call | None:
    """Returns the arguments of `apply` with the model first, or None if the remedy was not the first of them."""
    first = args[0] if args else None
    several = (
        isinstance(first, (list, tuple))
        and bool(first)
        and all(isinstance(x, (str, Remedy)) for x in first)
    )
    if not several and not isinstance(first, (str, Remedy)):
        return None
    if "model" in kwargs:
        return args[1:], {**kwargs, "remedy": first}
    return ((args[1], first, *args[2:]), kwargs) if len(args) > 1 else None


@accepts_earlier_calls(_model_first)
def apply(
    model: nn.Module,
    remedy: str | Remedy | Sequence[str | Remedy],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    batch: object = None,
    sites: object = None,
    train_length: int | None = None,
    partial: bool = False,
    **options: float | int | bool | str,
) -> Handle:
    """Applies remedies to a model (and its optimizer). `handle.remove()` restores both bit for bit.

    What clips and scaled steps have made of weights stays, as what the optimizer has made of them does.

    If several processes train one model, all of them must apply the same remedies at the same point in the program;
    otherwise every process raises an error and no model is changed. They must also remove the remedies after the same
    step. In `apply`, a process waits for the others up to the process group's timeout, and warns after 8 seconds.

    A model that `qkeel.watch` has observed in a forward pass needs no batch, because its attention and its last batch
    are known. Any other model needs no batch either if an optimizer is given. The remedies are then applied at the
    beginning of the model's next forward pass, with the batch of that pass, and an optimizer step before that pass
    raises an error.

    Args:
        model: a model, or a part of a model, that contains attention.
        remedy: "lalr", "lalr:tau=0.1+qk_clip", a Remedy, or a list of these.
        optimizer: the optimizer of the model's weights, or a list of several, such as Muon and AdamW. Remedies that
            change its steps need it; of several, list all that hold query or key weights. Parameters that a remedy
            creates are added to it; of several, to the first that holds gains or biases. A remedy that changes
            steps warns once if something other than this optimizer changes its weights, step after step.
        batch: the input of one pass, which reveals the attention of modules from other libraries. It is a tensor, a
            tuple of the forward's arguments or a dict of its keyword arguments. Not needed if an
            optimizer is given; see above.
        sites: the result of `find_sites` for this model, in place of a batch. Find the sites before fully_shard or
            tensor parallelism splits the weights, because split weights cannot be traced. Sites are matched by name.
        train_length: the number of tokens per training sequence, for formulas that need it (such as that of an L2 norm
            with a learned scale).
        partial: if True, the remedy is applied even if some attention was observed but not understood. That attention
            stays unchanged.
        options: the options of a single remedy named by a string.

    Raises:
        UnknownNameError: a remedy or an option is unknown.
        RefusedError: the remedy cannot be used here. The message says where and why, and the model is unchanged.
        AlreadyAppliedError: the remedy is already active on this model.

    Example:
        >>> from qkeel.nn import Attention
        >>> attention = Attention(16, 4)
        >>> with apply(attention, "softcap:cap=30"):
        ...     attention.spec.cap.formula()
        '30·tanh(z/30)'
    """
    remedies = parse(remedy, **options)
    applying = functools.partial(
        apply_now,
        model,
        remedies,
        optimizer,
        train_length=train_length,
        partial=partial,
    )
    if (
        batch is not None
        or sites is not None
        or not isinstance(model, nn.Module)
        or _knows_itself(model)
    ):
        return applying(batch=batch, sites=sites)
    tap = next((owner for owner in owners(model) if isinstance(owner, Tap)), None)
    # Remedies on steps need the sites alone; all others run the model again, for which its last batch is kept.
    if tap is not None and tap.sites and all(parsed.on_steps for parsed in remedies):
        return applying(sites=tap.sites)
    if tap is not None and tap.latest is not None:
        with tap.latest.setting(unwrapped(model)):
            latest = ForwardArguments(tap.latest.args, tap.latest.kwargs)
            return applying(batch=latest)
    if not listed(optimizer):
        return applying()
    return AtNextPass(
        model, remedies, optimizer, train_length=train_length, partial=partial
    )


def _knows_itself(model: nn.Module) -> bool:
    """True if the model contains qkeel's own attention modules, which can be found without a pass."""
    return any(isinstance(module, SpecModule) for module in unwrapped(model).modules())
