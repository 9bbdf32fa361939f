"""Gates on the output of attention, as one pass shows them: what a sigmoid made and the output is multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkeel.patching.modes import (
    Guarded,
    function_name,
    in_function_transform,
    unguarded,
)

# A head with a smaller mean gate is shut.
SHUT = 0.05
_PRODUCTS = frozenset({"scaled_dot_product_attention", "matmul", "bmm", "einsum"})
_TIMES = frozenset({"mul", "rmul", "multiply"})
# These may copy, so that the storage no longer shows where numbers come from.
_COPIES = frozenset(
    {"to", "float", "type_as", "clone", "contiguous", "dropout", "reshape", "flatten"}
)


@final
class GateMode(TorchFunctionMode):
    """Tells when the output of attention is multiplied by what a sigmoid made; `gates` has the mean gate [h] by site.

    It has to be below the mode that finds attention calls, which reports each to `captured`.

    guard: the function through which what a call has computed is read.
    """

    def __init__(self, guard: Guarded = unguarded) -> None:
        super().__init__()
        self.gates: dict[str, Tensor] = {}
        self._guard = guard
        # The latest product, which is the output of the attention that is reported next.
        self._product: Tensor | None = None
        self._site, self._shape = "", torch.Size()
        # By storage, the output of the attention that was reported last, times a constant, and what sigmoids made; the
        # tensors are kept, so that no other gets their memory.
        self._outputs: dict[int, tuple[Tensor, float]] = {}
        self._sigmoids: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # What is being compiled or transformed has no values.
        has_values = not (torch.compiler.is_compiling() or in_function_transform())
        if isinstance(output, Tensor) and has_values:
            self._guard(self._follow, function_name(func), args, output)
        return output

    def captured(self, site: str) -> None:
        """Begins to look for the gate of a site."""
        x, self._product = self._product, None
        self._outputs.clear()
        # Of a tensor that is split between processes, one holds some heads alone.
        if type(x) is Tensor and x.ndim == 4 and not x.is_meta:
            self._site, self._shape = site, x.shape
            self._outputs[_storage(x)] = x, 1.0

    def _follow(self, name: str, args: tuple[Any, ...], output: Tensor) -> None:
        if name in _PRODUCTS:
            self._product = output
        if type(output) is not Tensor or output.is_meta:
            return
        if name == "sigmoid":
            self._sigmoids[_storage(output)] = output
        pairs: tuple[tuple[object, object], ...] = ()
        if name in _COPIES and args:
            pairs = ((args[0], 1.0),)
        elif name in _TIMES and len(args) == 2:
            pairs = (args, args[::-1])
        for x, factor in pairs:
            tag, is_gate = self._outputs.get(_storage(x)), _storage(x) in self._sigmoids
            if isinstance(factor, (int, float)):
                if tag is not None:
                    self._outputs[_storage(output)] = output, tag[1] * factor
                if is_gate:
                    self._sigmoids[_storage(output)] = output
            elif tag is not None and _storage(factor) in self._sigmoids:
                self._average(x, factor, tag[1])

    def _average(self, x: Tensor, gate: Tensor, factor: float) -> None:
        """Averages a gate that multiplies the output of the site, in one of the layouts that it goes through."""
        b, h, t, d = self._shape
        gate = gate.detach().expand(x.shape)
        if x.shape == (b, t, h * d):
            gate = gate.unflatten(-1, (h, d))
        elif x.shape == (b, h, t, d) and t != h:
            gate = gate.transpose(1, 2)
        if gate.shape == (b, t, h, d):
            means = factor * gate.mean((0, 1, 3), dtype=torch.float32)
            self.gates.setdefault(self._site, means)


def _storage(x: object) -> int:
    """The address of a tensor's memory, which its views share."""
    if type(x) is Tensor and not x.is_meta:
        return x.untyped_storage().data_ptr()
    return -1


def gate_text(means: Tensor | None) -> str:
    """Says how far the gates of a layer's heads are open.

    >>> gate_text(torch.tensor([0.5, 0.001]))
    'output times a sigmoid, in the mean 0.5, 0.001 by head: 1 of 2 heads is shut (under 0.05)'
    """
    if means is None:
        return ""
    n = int((means < SHUT).sum())
    numbers = ", ".join(f"{x:.3g}" for x in means.tolist())
    shut = f"{n} of {len(means)} heads {'is' if n == 1 else 'are'} shut (under {SHUT})"
    return f"output times a sigmoid, in the mean {numbers} by head" + (
        f": {shut}" if n else ""
    )


def shut_gates(gates: Mapping[str, Tensor]) -> list[str]:
    """Says which layers have most of their heads shut; a single one is common.

    gates: the mean gates of each layer's heads, by the label of the layer.

    >>> shut_gates({"h.0": torch.tensor([0.5, 0.001]), "h.1": torch.tensor([0.002, 0.001])})
    ['the output gates of h.1 are shut: 2 of 2 heads let through 0.0015 of their output in the mean, under 0.05; \
print(qkeel.explain(model, batch)) shows every head']
    """
    sentences = []
    for layer, means in gates.items():
        shut = means[means < SHUT]
        if len(shut) > len(means) / 2:
            sentences.append(
                f"the output gates of {layer} are shut: {len(shut)} of {len(means)} heads let through "
                f"{float(shut.mean()):.2g} of their output in the mean, under {SHUT}; "
                "print(qkeel.explain(model, batch)) shows every head"
            )
    return sentences
