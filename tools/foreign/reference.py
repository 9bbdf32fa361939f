"""What attention really computed: the input of every softmax of a forward pass, T×T and in float64.

Nothing of qkeel is imported here. SDPA is sent through torch's unfused path, so that its scores reach a softmax
operator too; operators are seen below torch's Python functions, where no alias, script or module hides them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
FAR = -5000.0  # what a model adds to hide a pair is lower than this, unless the target says otherwise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One attention call: the module that was running, its logits z [b h t s] in float64, and the visible pairs.

    Under a cap `z` is before it and `capped` after it; without one they are the same tensor.
    """

    module: str
    z: Tensor
    capped: Tensor
    visible: Tensor

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.z.shape[1]

    def max_logit(self) -> Tensor:
        """The largest visible logit of each head."""
        return self.z.masked_fill(~self.visible, -torch.inf).amax((0, 2, 3))

    def entropy(self) -> Tensor:
        """Mean over rows that see a key of -Σ w ln w, by head."""
        w = torch.softmax(
            self.capped.masked_fill(~self.visible, -torch.inf), -1
        ).nan_to_num(0.0)
        rows, seen = (
            -torch.special.xlogy(w, w).sum(-1),
            self.visible.any(-1).expand(self.z.shape[:3]),
        )
        return (rows * seen).sum((0, 2)) / seen.sum((0, 2)).clamp_min(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a target's scores are to be read.

    Args:
        heads: query heads of each attention call, in order; one number where all have as many.
        order: which of the scores' dimensions are which, in the letters b (batch and whatever is like it), h, t, s:
            "bhts"; "" for [b h t s], or [(b h) t s] where there are three; M for (b h) elsewhere.
        low: a score at or under this is hidden.
        cap: the scores are cap·tanh(z/cap).
        skip: parts of names of modules whose softmax is no attention.
    """

    heads: int | tuple[int, ...]
    order: str | tuple[str, ...] = ""
    low: float = FAR
    cap: float | None = None
    skip: tuple[str, ...] = ()

    def call(self, module: str, x: Tensor, number: int) -> Call:
        """The call whose softmax over the last dimension took x, the `number`-th of the pass."""
        h = (
            self.heads
            if isinstance(self.heads, int)
            else self.heads[min(number, len(self.heads) - 1)]
        )
        order = (
            self.order
            if isinstance(self.order, str)
            else self.order[min(number, len(self.order) - 1)]
        )
        z = _canonical(x.detach().double(), order, h)
        visible = z > self.low
        before = (
            z
            if self.cap is None
            else self.cap * torch.atanh((z / self.cap).clamp(-1 + 1e-15, 1 - 1e-15))
        )
        return Call(module=module, z=before, capped=z, visible=visible)


def _canonical(x: Tensor, order: str, h: int) -> Tensor:
    """[b h t s] of scores."""
    if not order and x.ndim == 3:
        return x.unflatten(0, (-1, h)) if h > 1 or x.shape[0] != 1 else x[None]
    if not order and x.ndim == 2:
        return x[None, None]
    order = order or "bhts"
    if "M" in order:
        x, order = x.unflatten(order.index("M"), (-1, h)), order.replace("M", "bh")
    if len(order) != x.ndim:
        raise ValueError(f"expected scores {order}, got {tuple(x.shape)}")
    places = {
        letter: [i for i, l in enumerate(order) if l == letter] for letter in "bhts"
    }
    x = x.permute(*places["b"], *places["h"], *places["t"], *places["s"])
    n, m = len(places["b"]), len(places["h"])
    lead = x.shape[:n].numel(), x.shape[n : n + m].numel()
    x = x.reshape(*lead, *x.shape[-2:])
    if x.shape[1] != h:
        raise ValueError(f"expected {h} heads, got scores of {tuple(x.shape)}")
    return x


class Recorder(TorchDispatchMode):
    """Notes the input of every softmax, with the module that was running; `change` may give it another input, from its
    number and what it was. Modules with a part of `skip` in their name are left out."""

    def __init__(
        self,
        model: nn.Module,
        skip: tuple[str, ...] = (),
        change: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []
        self._tops: dict[
            int, Tensor
        ] = {}  # the largest score of each row, and scores less that, by their storage
        self._less: dict[int, tuple[Tensor, Tensor]] = {}
        self._change, self._skip = change, skip
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            undo.callback(torch.backends.mha.set_fastpath_enabled, fast)
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            for module in [
                m for m in self._names if not isinstance(m, torch.jit.ScriptModule)
            ]:
                undo.callback(module.register_forward_pre_hook(self._push).remove)
                undo.callback(
                    module.register_forward_hook(self._pop, always_call=True).remove
                )
            super().__enter__()
            undo.callback(super().__exit__, None, None, None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def _push(self, module: nn.Module, args: object) -> None:
        self._running.append(self._names[module])

    def _pop(self, module: nn.Module, args: object, output: object) -> None:
        self._running.pop()

    def _flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float | None,
    ) -> Any:
        """The fused kernel of a CPU, where a model insists on it: its scores, and what it returns, written out."""
        z = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            z = z.masked_fill(~torch.ones_like(z, dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            z = (
                z.masked_fill(~mask, -torch.inf)
                if mask.dtype == torch.bool
                else z + mask
            )
        z = self._noted(z, -1)
        return torch.softmax(z, -1) @ v, z.logsumexp(-1)

    def _noted(self, z: Tensor, dim: int) -> Tensor:
        """Notes the input of a softmax over `dim`, and returns what is to be its input."""
        module = self._running[-1] if self._running else ""
        if any(part in module for part in self._skip):
            return z
        self.seen.append((module, z.detach().clone().transpose(dim, -1)))
        return z if self._change is None else self._change(len(self.seen) - 1, z)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func.overloadpacket
            is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ):
            given = {
                **dict(zip(("q", "k", "v", "dropout", "causal"), args)),
                **(kwargs or {}),
            }
            mask, scale = given.get("attn_mask"), given.get("scale")
            return self._flash(
                given["q"],
                given["k"],
                given["v"],
                bool(given.get("causal")),
                mask,
                scale,
            )
        if func.overloadpacket in _SOFTMAX and args[0].ndim > 1:
            x, dim = args[0], args[1] % args[0].ndim
            z = self._less.get(x.data_ptr(), (x, x))[0]
            z = self._noted(z, dim)
            args = (x if self._change is None else z, *args[1:])
        out = func(*args, **(kwargs or {}))
        # Scores less the largest of their row make the same weights: the logits are what they were before.
        if func.overloadpacket is torch.ops.aten.amax:
            self._tops[out.data_ptr()] = out
        subtracted = args[1] if func.overloadpacket is torch.ops.aten.sub else None
        if isinstance(subtracted, Tensor) and subtracted.data_ptr() in self._tops:
            self._less[out.data_ptr()] = (args[0], out)
        return out


Example = tuple[tuple[Any, ...], dict[str, Any]]


def calls(model: nn.Module, example: Example, shape: Shape) -> list[Call]:
    """Every attention call of a forward pass, in order."""
    torch.manual_seed(11)  # some models start from noise
    with torch.no_grad(), Recorder(model, shape.skip) as recorder:
        model(*example[0], **example[1])
    return [shape.call(name, x, i) for i, (name, x) in enumerate(recorder.seen)]


def capped_output(
    model: nn.Module, example: Example, shape: Shape, cap: float, places: set[int]
) -> list[Tensor]:
    """What the model returns if every visible score of these calls is bent with cap·tanh(z/cap) before its softmax."""

    def bent(number: int, x: Tensor) -> Tensor:
        return (
            torch.where(x > shape.low, cap * torch.tanh(x / cap), -torch.inf)
            if number in places
            else x
        )

    torch.manual_seed(11)
    with torch.no_grad(), Recorder(model, shape.skip, bent):
        return tensors(model(*example[0], **example[1]))


def tensors(value: object) -> list[Tensor]:
    """The floating-point tensors in what a model returned."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    return (
        [x for part in value for x in tensors(part)]
        if isinstance(value, (tuple, list))
        else []
    )
