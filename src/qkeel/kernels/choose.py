"""The kernel that "auto" chooses for a call of attention, from a table of measured preferences.

Statistics on a GPU choose in `kernels.logits.gpu`, norms and rotations in `kernels.norm_rope.encode`; whether Triton can be
used is said by `kernels.triton_access`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import final

import torch

from qkeel.errors import RefusedError
from qkeel.kernels.attention.chunked import Chunked
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.attention.flex import Flex
from qkeel.kernels.attention.sdpa import Sdpa
from qkeel.kernels.attention.windowed import Windowed
from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.decoding.compiled import Decode
from qkeel.options import lookup
from qkeel.patching.torch_state import constant_when_compiled
from qkeel.spec.call import AttentionCall

KERNELS: dict[str, Kernel] = {
    "decode": Decode(),
    "native": Native(),
    "sdpa": Sdpa(),
    "windowed": Windowed(),
    # By its name only: it has not been timed on a GPU.
    "flex": Flex(),
    "chunked": Chunked(),
}
# Fastest first, unless a preference below says otherwise. The last kernel computes every call.
_AUTO = ("decode", "native", "sdpa", "windowed", "chunked")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The order in which "auto" tries the kernels for one kind of call, and the reason for it."""

    calls: str
    holds: Callable[[AttentionCall], bool]
    order: tuple[str, ...]
    reason: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel that "auto" chooses for a call, the preference that applied, and the refusals of earlier kernels."""

    kernel: str
    preference: Preference
    refusals: dict[str, Refusal]

    def __str__(self) -> str:
        order = ", ".join(self.preference.order)
        head = [
            f"kernel {self.kernel}",
            f"order for {self.preference.calls}: {order}. {self.preference.reason}",
        ]
        return "\n  ".join(
            [
                *head,
                *(
                    f"{name} refuses: {refusal.reason}"
                    for name, refusal in self.refusals.items()
                ),
            ]
        )


def _half_precision_training_on_avx2(call: AttentionCall) -> bool:
    q, k, v = call.q, call.k, call.v
    half = q.dtype in (torch.bfloat16, torch.float16) and q.device.type == "cpu"
    gradient = (
        q.requires_grad or k.requires_grad or v.requires_grad
    ) and torch.is_grad_enabled()
    return half and gradient and _cpu_capability() == "AVX2"


# The reasons quote times measured by `python -m benchmarks.kernels --full`; the table is in
# experiments/notes/internals/choice.md.
# The first preference that applies counts.
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        calls="a call with dropout, or under torch.export",
        holds=lambda call: bool(call.dropout) or torch.compiler.is_exporting(),
        order=_AUTO,
        reason="Dropout must drop the same weights when a forward pass is recomputed with a gradient, and an exported "
        "program serves every length and machine, so the order is the same for all such calls.",
    ),
    Preference(
        calls="one query on a CPU",
        holds=lambda call: call.q.shape[2] <= 1 and call.q.device.type == "cpu",
        order=("decode", "sdpa", "chunked", "windowed", "native"),
        reason="'native' takes 1.8 to 2.3 times as long as 'sdpa' and 1.3 times as long as 'chunked'.",
    ),
    Preference(
        calls="half precision with a gradient on a CPU that has AVX2 but no later extension",
        holds=_half_precision_training_on_avx2,
        order=("decode", "native", "chunked", "sdpa", "windowed"),
        reason="In the forward and backward pass, torch's flash kernel takes 4.0 to 7.1 times as long as 'chunked', "
        "and 'windowed', which is built on it, 2.3 to 3.5 times as long, because the processor has no units for "
        "these types.",
    ),
    Preference(
        calls="a call with as many queries as keys",
        holds=lambda call: call.q.shape[2] >= call.k.shape[2],
        order=("native", "sdpa", "windowed", "chunked", "decode"),
        reason="'decode' is for fewer queries than keys, so it is tried last.",
    ),
    Preference(
        calls="any other call",
        holds=lambda call: True,
        order=_AUTO,
        reason="The fastest first.",
    ),
)


def choose(call: AttentionCall, impl: str = "auto") -> Kernel:
    """Returns the named kernel, or for "auto" the first in the preferred order that supports the call.

    Raises:
        UnknownNameError: there is no such kernel.
        RefusedError: the named kernel cannot compute the call exactly.
    """
    if impl == "auto":
        preference = preferred(call)
        kernels = (KERNELS[name] for name in preference.order)
        return next(kernel for kernel in kernels if kernel.supports(call) is None)
    kernel = lookup("kernel", {**KERNELS}, impl)
    refusal = kernel.supports(call)
    if refusal is not None:
        raise RefusedError(f"kernel {impl!r} cannot do this: {refusal}")
    return kernel


def preferred(call: AttentionCall) -> Preference:
    """Returns the first preference of the table that applies to the call."""
    return next(preference for preference in PREFERENCES if preference.holds(call))


def explain_choice(call: AttentionCall) -> Choice:
    """Returns the kernel that "auto" chooses for the call, and why.

    Example:
        >>> from qkeel.spec import AttentionSpec, Softcap
        >>> from qkeel.spec.call import make_call
        >>> q = torch.zeros(1, 2, 5, 8, device="meta")
        >>> choice = explain_choice(make_call(AttentionSpec(cap=Softcap(5.0)), q, q, q))
        >>> choice.kernel, choice.preference.calls, choice.refusals["sdpa"].reason
        ('chunked', 'a call with as many queries as keys', 'SDPA cannot cap logits')
    """
    preference, refusals = preferred(call), {}
    for name in preference.order:
        refusal = KERNELS[name].supports(call)
        if refusal is None:
            return Choice(kernel=name, preference=preference, refusals=refusals)
        refusals[name] = refusal
    raise AssertionError("the kernel 'chunked' computes every call")


@constant_when_compiled
@functools.cache
def _cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()
