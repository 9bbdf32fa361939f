"""The weights that a step of torch's Adam or AdamW works on: asked for, or answered otherwise.

Inside `optimizer.step()` torch calls `_init_group` for each parameter group; it fills lists of the weights that have a
gradient, of their gradients and of their state. An answer of our own may take weights out that are stepped elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# A parameter group: its weights and their options, as torch keeps them.
Group = dict[str, Any]
Answer = Callable[..., bool]

_ARGUMENTS = (
    *("self", "group", "params_with_grad", "grads"),
    *("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
)


def is_known(optimizer: Optimizer) -> bool:
    """True if it is torch's own Adam or AdamW, of a torch whose step asks what this module answers."""
    return type(optimizer) in (Adam, AdamW) and tuple(inspect.signature(Adam._init_group).parameters) == _ARGUMENTS


def is_answered(optimizer: Optimizer) -> bool:
    """True if another answer than torch's is in place."""
    return "_init_group" in vars(optimizer)


def put_answer(optimizer: Optimizer, answer: Answer) -> None:
    """Let the optimizer's steps ask `answer`, which takes a group and the lists to fill."""
    vars(optimizer)["_init_group"] = answer


def take_answer_back(optimizer: Optimizer, answer: Answer) -> None:
    """Let the optimizer's steps ask torch again, where this answer is in place."""
    if vars(optimizer).get("_init_group") is answer:
        del vars(optimizer)["_init_group"]


def torchs_answer(optimizer: Optimizer, group: Group, lists: Sequence[list[Tensor]]) -> bool:
    """Fill the lists of a group as torch does; whether a weight is complex."""
    return type(optimizer)._init_group(optimizer, group, *lists)  # type: ignore[attr-defined]


def stepped(optimizer: Optimizer) -> set[int]:
    """The ids of the weights that the optimizer's step would step now, by the answer in place."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        lists: list[list[Tensor]] = [[] for _ in _ARGUMENTS[2:]]
        optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
        found.update(map(id, lists[0]))
    return found


def is_fused(group: Group) -> bool:
    """True if a group's step is the fused one, in its usual form."""
    return group.get("fused") is True and not group.get("capturable") and not group.get("differentiable")


def has_hooks_before(optimizer: Optimizer) -> bool:
    """True if hooks of its own come before the optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks)


def call_hooks_before(optimizer: Optimizer) -> None:
    """Call the optimizer's own hooks before a step, as its step does."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})


def call_hooks_after(optimizer: Optimizer) -> None:
    """Call the optimizer's own hooks after a step, as its step does."""
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (), {})


def every_optimizer_has_hooks() -> bool:
    """True if hooks are registered that torch calls around the step of every optimizer."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
