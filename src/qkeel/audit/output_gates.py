"""Gates on the output of attention, as one pass shows them: what a sigmoid made and the output is multiplied by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkeel.patching.modes import function_name

# A head with a smaller mean gate is shut.
SHUT = 0.05
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
class _Output:
    """The output of a site on its way, times a constant; `heads` has the head of each number."""

    x: Tensor
    site: str
    heads: Tensor
    factor: float = 1.0


@final
class GateMode(TorchFunctionMode):
    """Follows the outputs of attention to what they are multiplied by; `gates` has the mean gate [h] by site.

    captured: returns the names of the sites whose attention was seen so far, in order.
    """

    def __init__(self, captured: Callable[[], Sequence[str]]) -> None:
        super().__init__()
        self.gates: dict[str, Tensor] = {}
        self._captured = captured
        self._product: tuple[Tensor, int] | None = None
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
        name = function_name(func)
        if self._product is not None and len(self._captured()) > self._product[1]:
            self._begin(self._product[0], self._captured()[-1])
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            return output
        if name in _PRODUCTS:
            self._product = output, len(self._captured())
        elif name == "sigmoid":
            self._sigmoids[id(output)] = output
        elif name in _MOVES and args:
            self._move(func, args, kwargs, output)
        elif name in ("mul", "rmul", "multiply") and len(args) == 2:
            self._multiply(args[0], args[1], output)
        return output

    def _begin(self, x: Tensor, site: str) -> None:
        self._product = None
        if x.ndim == 4:
            # With the strides of x, so that it goes where x goes.
            heads = torch.empty_like(x, dtype=torch.int64, requires_grad=False)
            heads.copy_(torch.arange(x.shape[1], device=x.device)[None, :, None, None])
            self._outputs[id(x)] = _Output(x, site, heads)

    def _move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        tag = self._outputs.get(id(args[0]))
        if tag is not None:
            heads = tag.heads
            if function_name(func) not in _KEEPS:
                try:
                    heads = func(tag.heads, *args[1:], **kwargs)
                except RuntimeError:
                    # A view that the strides of this tensor do not allow: the way ends here.
                    return
            self._outputs[id(output)] = dataclasses.replace(tag, x=output, heads=heads)
        if id(args[0]) in self._sigmoids:
            self._sigmoids[id(output)] = output

    def _multiply(self, first: object, second: object, output: Tensor) -> None:
        for x, y in ((first, second), (second, first)):
            tag, gate = self._outputs.get(id(x)), self._sigmoids.get(id(y))
            if tag is not None and gate is not None:
                values = (gate.detach().double() * tag.factor).expand(output.shape)
                heads = tag.heads.expand(output.shape)
                means = [values[heads == h].mean() for h in heads.unique()]
                self.gates.setdefault(tag.site, torch.stack(means))
            elif isinstance(y, (int, float)):
                if tag is not None:
                    factor = tag.factor * y
                    self._outputs[id(output)] = dataclasses.replace(
                        tag, x=output, factor=factor
                    )
                if id(x) in self._sigmoids:
                    self._sigmoids[id(output)] = output


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
