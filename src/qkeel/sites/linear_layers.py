"""Finds the layers next to attention that mix positions without logits: linear attention, delta nets and SSMs.

A hybrid model has such layers in the same list of blocks as its attention layers. They have a state instead of scores,
so there is nothing to measure; they are listed so that a table of the model's layers is complete.

A module is recognized as such a layer by its behaviour and not by its class:

- It is in a block of a list in which other modules contain attention, but contains none itself, and none of its
  submodules meets the two conditions below by itself.
- It multiplies activations by each other or processes the positions one after the other. Convolutions alone, which
  reach only a few neighbouring positions, do neither.
- Its output at the last position depends on its input at the first position, and its output at the first position
  depends on no later input. Both are determined from derivatives of the recorded operators, which run once more for
  this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qkeel.capture.example import ModuleCall, tensors
from qkeel.heads.walk import Operation, Record, Repetition, memory, place
from qkeel.patching.modes import function_name

_CONTRACTIONS = frozenset({"mm", "bmm", "baddbmm"})
_SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp"})
_STEPS = frozenset({"select", "slice"})
_LEAST = 8  # positions that an example must have; with fewer, a short convolution reaches as far as a state
_LATER = 1e-6  # a derivative below this fraction of the largest is rounding
_FAR = 1e-12  # the corresponding fraction for a state, which may leave very little as it decays with the distance


def linear_layers(
    record: Record, dynamic: set[int], frames: Sequence[ModuleCall], attending: Iterable[str]
) -> tuple[str, ...]:
    """Returns the names of the modules that mix positions without logits, in the order of their calls.

    Args:
        record: the operators of a pass.
        dynamic: the memory whose contents depend on the model's input.
        frames: every module call in the pass.
        attending: the names of the modules with attention, whether it was understood or not.
    """
    homes = {name.partition("#")[0] for name in attending}
    lists = {way[1] for name in homes if (way := re.fullmatch(r"((?:.*\.)?)\d+(?:\..*)?", name))}
    if not lists:
        return ()
    blocks = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(lists)))})\d+(?:\.|$)")
    verdicts: dict[tuple[type[nn.Module], int], bool] = {}
    found: list[ModuleCall] = []
    around = {outer for home in homes for outer in _line(home)}  # modules with attention, and all that contain them
    for frame in sorted(frames, key=lambda f: -len(f.line())):
        if not blocks.match(frame.name) or frame.name in around:
            continue
        if not homes.isdisjoint(_line(frame.name)) or any(frame.name in _line(f.name) for f in found):
            continue
        until = len(record.operations) if frame.until is None else frame.until
        kind = type(frame.module), until - frame.since
        if kind not in verdicts:
            verdicts[kind] = _mixes_positions(record, dynamic, frame, until)
        if verdicts[kind]:
            found.append(frame)
    return tuple(dict.fromkeys(f.name for f in sorted(found, key=lambda f: f.since)))


def _line(name: str) -> list[str]:
    """The names of a module and of all modules that contain it.

    >>> _line("layers.0.attn")
    ['layers.0.attn', 'layers.0', 'layers']
    """
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _mixes_positions(record: Record, dynamic: set[int], frame: ModuleCall, until: int) -> bool:
    """True if the last position of a module's output depends on the first position of its input, and the first position
    of its output depends on no other position."""
    own = record.operations[frame.since : until]
    if not _may_mix(own, dynamic) or any(isinstance(module, nn.RNNBase) for module in frame.module.modules()):
        return False
    given = next((x for x in frame.inputs if x.is_floating_point() and x.ndim == 3 and memory(x) in dynamic), None)
    if given is None or given.shape[1] < _LEAST:
        return False
    out = next((x for o in reversed(own) for x in tensors(o.out) if _is_like(x, given) and memory(x) in dynamic), None)
    if out is None:
        return False
    again = Repetition(record.behind({memory(out)}, until, since=frame.since), {memory(given)})
    leaf = given.detach().clone().requires_grad_()
    try:
        now = again.with_graph({place(given): leaf}, {})(out)
        noise = torch.rand(now.shape, generator=torch.Generator().manual_seed(0)).to(now)
        last, first = (_reached(now, noise, leaf, position) for position in (-1, 0))
    except Exception:  # nothing is known if the operators can't run again, or not with gradients
        return False
    if last is None or first is None:
        return False
    causal = bool((first[1:] <= _LATER * first.max()).all())
    return causal and bool(last[0] > _FAR * last.max())


def _reached(out: Tensor, noise: Tensor, leaf: Tensor, position: int) -> Tensor | None:
    """The largest derivative [t] of one output position with respect to each input position, or None if there is
    none."""
    weighed = (out * noise)[:, position].sum()
    if not weighed.requires_grad:
        return None
    (found,) = torch.autograd.grad(weighed, leaf, retain_graph=True, allow_unused=True)
    return None if found is None or not bool(found.isfinite().all()) else found.abs().amax((0, 2))


def _is_like(x: Tensor, given: Tensor) -> bool:
    return x.is_floating_point() and x.ndim == 3 and x.shape[:2] == given.shape[:2]


def _may_mix(operations: Sequence[Operation], dynamic: set[int]) -> bool:
    """True if the operators may carry information from one position to all later positions."""
    steps = 0
    for operation in operations:
        name = function_name(operation.function)
        if name in _SCANS and not dynamic.isdisjoint(operation.reads):
            return True
        if name in _CONTRACTIONS and sum(memory(x) in dynamic for x in tensors(operation.args)) > 1:
            return True
        steps += name in _STEPS and not dynamic.isdisjoint(operation.reads)
    return steps >= 2 * _LEAST
