"""Runs forward passes for the search: eagerly, on all processes together, with whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from qkeel import distributed as dist
from qkeel.capture.example import tensors
from qkeel.errors import InvalidValueError
from qkeel.patching.autograd import without_checkpoints
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.sharded_models import gathered, running_stage

SEARCH = "the search for attention in a model that is split across processes"


def spread(model: nn.Module) -> bool:
    """Returns whether all processes take part in a pass of this model, rather than taking turns as the stages of a
    pipeline do."""
    return (
        dist.world() > 1
        and any(map(dist.is_split, model.parameters()))
        and running_stage() is None
    )


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each process holds all weights that fully_shard has split, so that a pass in it shows what is
    computed from which weights. All processes enter it together, and if one process fails in it, the others do not wait
    for it."""
    with ExitStack() as undo:
        if spread(model):
            with dist.agreed_collectives(SEARCH):
                undo.enter_context(gathered(model))
            # The weights are split by heads and remain so.
            if spread(model):
                undo.enter_context(dist.agreed_collectives(SEARCH))
        elif (
            dist.world() == 1
        ):  # on a single process, too, fully_shard stores other weights than those used in a pass
            undo.enter_context(gathered(model))
        yield


def forward(
    model: nn.Module,
    watcher: AbstractContextManager[object],
    args: Args,
    kwargs: Kwargs,
    *,
    graph: bool = True,
    together: bool | None = None,
) -> object:
    """Returns the output of one eager forward pass under the watcher, with gradients unless `graph` is False.

    Args:
        model, args, kwargs: the model and the arguments of the call.
        watcher: the context that is entered around the call.
        graph: whether gradients are enabled.
        together: whether all processes run the pass; by default, whether the model is split across them.

    Raises: ApartError if the pass involves all processes and fails on only some of them.
    """
    together = spread(model) if together is None else together
    try:
        with eagerly(graph=graph, together=together), watcher:
            return model(*args, **kwargs)
    except Exception as error:
        if together and not isinstance(error, dist.ApartError):
            dist.fail_on_all(SEARCH, error)
        raise


@contextmanager
def eagerly(*, graph: bool, together: bool) -> Iterator[None]:
    """A context in which passes run eagerly, with gradients if `graph` is True, and in all processes if `together` is."""
    # An optimised script runs as a single node of the graph, through which no gradient path can be traced. (A script
    # that was already optimised remains so.)
    unoptimised = torch.jit.optimized_execution(False)
    # A stance is set when it is created, so that an error before the context is entered would leave it set for the
    # process.
    with (
        saving_unseen(),
        dist.agreed_collectives(SEARCH) if together else nullcontext(),
        torch.compiler.set_stance("force_eager"),
        unoptimised,
        torch.inference_mode(False),
        torch.enable_grad() if graph else torch.no_grad(),
        without_checkpoints(),
    ):
        yield


def saving_unseen() -> AbstractContextManager[object]:
    """A context whose tensors no hooks for saved tensors see. Those of checkpoints, or of the user for offloading, are
    for tensors of the program's own passes."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    # Only the innermost pair is called.
    return saved_tensors_hooks(lambda x: x, lambda x: x) if top else nullcontext()


def check_devices(model: nn.Module, *example: object) -> None:
    """Refuses an example that is not on the device of the model, before running it.

    Raises:
        InvalidValueError: the example is on another device; the message names both devices.
    """
    homes = {x.device for x in (*model.parameters(), *model.buffers())}
    for x in tensors(example):
        # A scalar on the CPU can be combined with tensors on any device.
        if homes and x.device not in homes and (x.ndim or x.device.type != "cpu"):
            devices = sorted(map(str, homes))
            raise InvalidValueError(
                f"expected the example on the model's device, {', '.join(devices)}; got a tensor of shape "
                f"{tuple(x.shape)} on {x.device}. Move one of them: inputs.to({devices[0]!r})"
            )
