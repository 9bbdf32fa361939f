"""`qkeel.autopilot`: the checked way to an Autopilot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot.autopilot import Autopilot
from qkeel.autopilot.known_policies import policy as known_policy
from qkeel.autopilot.policy import Policy
from qkeel.capture.example import arguments
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.monitor import Cadence, PlannedRates, Sink
from qkeel.monitor.measure.query_mask import Given
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch
from qkeel.patching.forward_passes import unwrapped
from qkeel.remedies.steps.mixed_precision import innermost
from qkeel.sites.find import find_sites

EVERY = 10  # steps


def autopilot(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
    planned: PlannedRates | None = None,
    sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
    every: int | Cadence = EVERY,
    query_mask: Given | None = None,
    example: object = None,
) -> Autopilot:
    """Watch a training run, and hold the logits of the heads that need it by the cheapest remedy that does.

    Until its first action the training is bit for bit what it is without it. Every process of a run calls it.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> with autopilot(model, torch.optim.AdamW(model.parameters())) as pilot:
    ...     pilot.decisions
    []

    Args:
        model: as for `qkeel.watch`.
        optimizer: what steps it; of several the first counts the steps.
        policy: what is done when: "ladder" with its options ("ladder:threshold=50,allow_new_parameters=true"), or a
            Policy of your own.
        planned: the learning rates of the run, if known: with them it acts earlier.
        sinks: where records and events go; see `qkeel.watch`.
        every: at which steps the run is measured before anything is wrong.
        query_mask: which query rows count; see `qkeel.watch`.
        example: a batch as the model takes it: for a calibrated norm, and to resume with remedies in force.

    Returns: the Autopilot: `events`, `decisions`, `state_dict()`, `load_state_dict()`, `close()`; a context manager,
    and `remove()` undoes all.

    Raises:
        InvalidTypeError: there is no optimizer, or something else in its place.
        UnknownNameError: no such policy or option. Besides the errors of `qkeel.watch` and of `find_sites`.
    """
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    sites = None
    if example is not None:
        args, kwargs = arguments(example)
        sites = find_sites(unwrapped(model), *args, **kwargs) if isinstance(model, nn.Module) else None
    monitor = watch(model, optimizers[0], every=every, sinks=sinks, query_mask=query_mask, planned=planned, sites=sites)
    return attach(monitor, optimizers, policy=policy if isinstance(policy, str) else chosen, example=example)


def attach(
    monitor: Monitor,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy = "ladder",
    example: object = None,
) -> Autopilot:
    """An autopilot on a model that is watched already, before its first step; it closes the monitor.

    >>> import torch
    >>> from qkeel.nn import Attention
    >>> model = Attention(d_model=8, n_heads=2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attach(watch(model, optimizer), optimizer).remove()

    Args:
        monitor: made with this optimizer, the first of several.
        optimizer: what steps the model.
        policy: see `autopilot`.
        example: see `autopilot`.

    Raises: see `autopilot`; InvalidValueError if the monitor has seen training already.
    """
    optimizers = _several(optimizer)
    chosen = known_policy(policy)
    if not isinstance(monitor, Monitor):
        raise InvalidTypeError(f"expected the Monitor that qkeel.watch returns, got {type(monitor).__name__}")
    if monitor.history.phase == "train" and len(monitor.history):
        raise InvalidValueError(
            "expected a monitor that has recorded nothing yet; attach the autopilot before training"
        )
    return Autopilot(monitor, optimizers, chosen, policy if isinstance(policy, str) else repr(chosen), example)


def _several(given: object) -> list[Optimizer]:
    several = list(given) if isinstance(given, Sequence) else [given]
    found = [innermost(one) for one in several if isinstance(one, Optimizer)]
    for one in several:
        if not isinstance(one, Optimizer):
            raise InvalidTypeError(
                f"expected the optimizer that steps the model, got {type(one).__name__}; the remedies of an autopilot "
                "act on its steps: qkeel.autopilot(model, optimizer)"
            )
    if not several:
        raise InvalidTypeError("expected at least one optimizer, got an empty list")
    return found
