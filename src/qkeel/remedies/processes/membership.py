"""The handle of a change that all processes of a run have made."""

from __future__ import annotations

from torch.optim import Optimizer

from qkeel import dist
from qkeel.handle import Handle
from qkeel.patching.optimizer_hooks import go_first
from qkeel.remedies.steps.mixed_precision import innermost


def on_all_processes(handle: Handle, name: str, optimizer: Optimizer | None) -> Handle:
    """The handle of a change that all processes have made. Where one of them alone removes it, each raises an error
    before the next step of the optimizer, which is not taken."""
    if dist.world() == 1 or optimizer is None:
        return handle
    member = dist.Membership(name)
    left: list[bool] = []

    def before(*_: object) -> None:
        if not left and not member.step():
            left.append(True)
            if list(hook.hooks_dict_ref() or ())[-1:] == [hook.id]:  # else torch goes on through them: it stays, idle
                hook.remove()

    hook = innermost(optimizer).register_step_pre_hook(before)
    go_first(hook)  # before any other hook waits for the other processes

    def undo() -> None:
        handle.remove()
        member.leave()

    return Handle(undo, state=handle.state, load=handle.load)
