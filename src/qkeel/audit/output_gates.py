"""Gates on the output of attention, as one pass shows them: what a sigmoid made and the output is multiplied by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from qkeel.patching.guards import Guarded, unguarded
from qkeel.patching.modes import ReadingMode, function_name

# A head with a smaller mean gate is shut.
SHUT = 0.05
# Numbers of a gate that are averaged, in float64.
_AVERAGED = 1 << 22
# These move nothing.
_KEEPS = ("to", "float", "type_as", "clone", "dropout", "contiguous")
_MOVES = frozenset(
    {
        *("transpose", "swapaxes", "permute", "movedim", "reshape", "view", "flatten"),
        *("unflatten", "unsqueeze", "squeeze", "expand", "getitem"),
        *_KEEPS,
    }
)
_PRODUCTS = frozenset({"scaled_dot_product_attention", "matmul", "bmm", "einsum"})


@final
@dataclasses.dataclass(slots=True, eq=False)
class _Attention:
    """One attention call: its output [b h t d], its site once that is known, and the mean gate [h] of its output."""

    output: Tensor
    site: str | None = None
    gate: Tensor | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """The output of attention on its way, times a constant, and the calls that moved it."""

    x: Tensor
    attention: _Attention
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    factor: float = 1.0

    def heads(self) -> Tensor:
        """The head of each number."""
        x = self.attention.output
        dtype = torch.uint8 if x.shape[1] < 256 else torch.int16
        # With the strides of x, so that it goes where x went.
        heads = torch.empty_like(x, dtype=dtype, requires_grad=False)
        numbers = torch.arange(x.shape[1], dtype=dtype, device=x.device)
        heads.copy_(numbers[None, :, None, None])
        for move in self.moves:
            heads = move(heads)
        return heads


@final
class GateMode(ReadingMode):
    """Follows the outputs of attention to what they are multiplied by; `gates` has the mean gate [h] by site.

    It has to be below the mode that finds attention calls, which reports each to `captured`: one that is written by hand
    when its module has ended, and its output may have met its gate by then.

    guard: the function through which what a call has computed is read.
    """

    def __init__(self, guard: Guarded = unguarded) -> None:
        super().__init__()
        self.gates: dict[str, Tensor] = {}
        self._guard = guard
        # What may be the attention that is reported next: the latest fused call, or first product after a softmax.
        self._latest: _Attention | None = None
        self._after_softmax = False
        # By id; the tensors are kept, so that no other gets their id.
        self._outputs: dict[int, _Output] = {}
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
        # What is being compiled has no values.
        if isinstance(output, Tensor) and not torch.compiler.is_compiling():
            self._guard(self._follow, func, args, kwargs, output)
        return output

    def captured(self, site: str) -> None:
        """Says whose output the latest one is."""
        latest, self._latest = self._latest, None
        self._outputs = {
            key: tag for key, tag in self._outputs.items() if tag.attention is latest
        }
        if latest is not None:
            latest.site = site
            if latest.gate is not None:
                self.gates.setdefault(site, latest.gate)

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        name = function_name(func)
        if name in _PRODUCTS:
            self._begin(output, is_fused=name == "scaled_dot_product_attention")
        elif name == "softmax":
            self._after_softmax = True
        elif name == "sigmoid":
            self._sigmoids[id(output)] = output
        elif name in _MOVES and args:
            self._move(func, args, kwargs, output)
        elif name in ("mul", "rmul", "multiply") and len(args) == 2:
            self._multiply(args[0], args[1], output)

    def _begin(self, x: Tensor, *, is_fused: bool) -> None:
        """Begins to follow what may be the output of attention."""
        if not is_fused and not self._after_softmax:
            return
        self._after_softmax = False
        # Of a tensor that is split between processes, one holds some heads alone.
        if type(x) is Tensor and x.ndim == 4 and not x.is_meta:
            self._latest = attention = _Attention(x)
            self._outputs[id(x)] = _Output(x, attention)

    def _move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        tag = self._outputs.get(id(args[0]))
        if tag is not None:
            moves = tag.moves
            if function_name(func) not in _KEEPS:
                moves = *moves, lambda heads: func(heads, *args[1:], **kwargs)
            self._outputs[id(output)] = dataclasses.replace(tag, x=output, moves=moves)
        if id(args[0]) in self._sigmoids:
            self._sigmoids[id(output)] = output

    def _multiply(self, first: object, second: object, output: Tensor) -> None:
        for x, y in ((first, second), (second, first)):
            tag, gate = self._outputs.get(id(x)), self._sigmoids.get(id(y))
            if tag is not None and gate is not None:
                self._meet(tag, gate.detach(), output.shape)
            elif isinstance(y, (int, float)):
                if tag is not None:
                    factor = tag.factor * y
                    self._outputs[id(output)] = dataclasses.replace(
                        tag, x=output, factor=factor
                    )
                if id(x) in self._sigmoids:
                    self._sigmoids[id(output)] = output

    def _meet(self, tag: _Output, gate: Tensor, shape: torch.Size) -> None:
        attention = tag.attention
        try:
            heads = tag.heads()
        except RuntimeError:
            # A view that the strides of this tensor do not allow.
            return
        n_heads = attention.output.shape[1]
        attention.gate = _means(gate, heads, n_heads, shape) * tag.factor
        if attention.site is not None:
            self.gates.setdefault(attention.site, attention.gate)


def _means(gate: Tensor, heads: Tensor, n_heads: int, shape: torch.Size) -> Tensor:
    """The mean gate of each head; of many numbers, evenly spaced rows of the first dimension speak for all."""
    gate, heads = gate.expand(shape), heads.expand(shape)
    # Eight rows or more remain, and all if they may be the heads.
    if len(gate) != n_heads:
        step = min(gate.numel() // _AVERAGED + 1, max(1, len(gate) // 8))
        gate, heads = gate[::step], heads[::step]
    numbers, index = gate.double().flatten(), heads.flatten().long()
    # Unlike bincount, this does not wait for the device.
    sums, counts = (
        numbers.new_zeros(n_heads).index_add(0, index, values)
        for values in (numbers, torch.ones_like(numbers))
    )
    return sums / counts


def gate_text(means: Tensor | None) -> str:
    """Says how far the gates of a layer's heads are open; "" where there are none.

    >>> gate_text(torch.tensor([0.5, 0.001]))
    'output times a sigmoid, in the mean 0.5, 0.001 by head (under 0.05: shut)'
    """
    if means is None:
        return ""
    numbers = ", ".join(f"{x:.3g}" for x in means.tolist())
    shut = f" (under {SHUT}: shut)" if bool((means < SHUT).any()) else ""
    return f"output times a sigmoid, in the mean {numbers} by head{shut}"


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
