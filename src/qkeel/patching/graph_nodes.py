"""Private parts of autograd's graph and of tensors: saved operands, the base of a view, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NORM = "qkeel: a norm"


def saved_operand(node: Node, place: int) -> Tensor | None:
    """An operand of a product or quotient, where the graph keeps it: the first (0) or the second (1)."""
    kept: Any = node
    try:
        value = (kept._saved_self, kept._saved_other)[place] if place else kept._saved_self
    except (AttributeError, RuntimeError):  # not saved, or freed
        return None
    return value if isinstance(value, Tensor) else None


def slice_of(node: Node) -> slice:
    """The places that a slice of one dimension took, as they were given: negative ones count from the end."""
    kept: Any = node
    given = (kept._saved_start, kept._saved_end, kept._saved_step)
    # Negative numbers are read back as those of 64 bits without a sign.
    return slice(*(n if n is None or n < 1 << 63 else n - (1 << 64) for n in given))


def output_like(node: Node) -> Tensor:
    """Zeros like the first output of a node."""
    kept: Any = node
    meta = kept._input_metadata[0]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def is_transposed(node: Node) -> bool:
    """True if a convolution is a transposed one, whose weight has the features of its input first."""
    kept: Any = node
    return bool(kept._saved_transposed)


def normalized_shape(node: Node) -> tuple[int, ...]:
    """The last dimensions over which a layer norm, or an RMS norm, of torch's own ran."""
    kept: Any = node
    return tuple(kept._saved_normalized_shape)


def saved_gain(node: Node) -> Tensor | None:
    """The gain by which such a norm multiplied."""
    kept: Any = node
    return kept._saved_weight


def mark_as_norm(x: Tensor) -> None:
    """Note at the node that made a tensor that a norm did, where no operator of the norm shows it."""
    if x.grad_fn is not None and not torch.compiler.is_compiling():
        x.grad_fn.metadata[_NORM] = True  # type: ignore[index]


def is_marked_norm(node: Node) -> bool:
    """True if `mark_as_norm` noted it at the node."""
    return _NORM in node.metadata  # type: ignore[operator]


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return view._base


def version_of(x: Tensor) -> int:
    """The number of times that the tensor was written to in place."""
    return x._version


def writes_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Of each tensor the same number, and where its numbers lie."""
    return [(x._version, x.data_ptr()) for x in tensors]


def is_wrapper(x: Tensor) -> bool:
    """True if the tensor holds others, as DTensor and quantised ones do."""
    return is_traceable_wrapper_subclass(x)
