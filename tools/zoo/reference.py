"""The entropies of the attention weights that a model gives away itself, by no means of qkeel's.

Three sources: what the model returns with `output_attentions=True`, what its attention modules hand to the layer
around them (vision towers and encoders often do no more), and the weights per head of
`F.multi_head_attention_forward`. The same weights met twice count once.
Where none of them has the weights, there are still the results of torch's softmax kernels (`Given.kernels`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from qkeel.functional.logits import entropy
from tools.zoo.examples import parts
from tools.zoo.overrides import CUT, POINTS

SAMPLED = (
    "multiscale",
)  # weights of points that are sampled, no products of queries and keys
SAME = 1e-6  # the same weights, copied on their way out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Mean entropy per head [2 h], or over all heads [2 1] where the head's place is unknown, of each attention.

    Two readings of each: see `_mean`.

    `kernels`: the same, over all heads, of everything that a softmax kernel has made.
    """

    weights: list[Tensor]
    kernels: list[Tensor]


def given_away(model: nn.Module, batch: dict[str, Any], name: str) -> Given:
    """Run the model and take what it gives away. `name`: that of its class."""
    handed: list[Tensor] = []
    means: list[Tensor] = []
    kernels = _Softmaxes()

    def take(module: nn.Module, args: object, output: object) -> None:
        kind = type(module).__name__.lower()
        if (
            "att" in kind
            and not any(w in kind for w in SAMPLED)
            and isinstance(output, (tuple, list))
        ):
            handed.extend(_tensors(output[1:]))

    for config in parts(model.config):  # type: ignore[arg-type]
        config.output_attentions = True
    with ExitStack() as undo, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in model.modules():
            undo.callback(m.register_forward_hook(take).remove)
        undo.enter_context(
            mock.patch.object(
                F, "multi_head_attention_forward", _per_head(handed, means)
            )
        )
        undo.enter_context(
            sdpa_kernel(SDPBackend.MATH)
        )  # fused ones have no weights to show
        undo.enter_context(kernels)
        out = model(**batch, output_attentions=True)
    blurred = {w.untyped_storage().data_ptr() for w in means}

    def sharp(found: Iterable[Tensor]) -> list[Tensor]:
        return [
            w
            for w in found
            if _is_weights(w) and w.untyped_storage().data_ptr() not in blurred
        ]

    own = (
        []
        if name in CUT
        else [
            _mean(w)
            for w in sharp(
                _attentions(out, skip="cross_attentions" if name in POINTS else "")
            )
        ]
    )
    made = [_mean(w).mean(1, keepdim=True) for w in kernels.made if _is_weights(w)]
    return Given(weights=_once(own, sharp(handed)), kernels=made)


class _Softmaxes(TorchDispatchMode):
    """Keeps what softmax kernels make of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten._softmax,
            torch.ops.aten._safe_softmax,
        ):
            # Over rows where a model multiplies keys by queries.
            self.made.append(
                out
                if args[1] % out.ndim == out.ndim - 1
                else out.transpose(args[1], -1)
            )
        return out


def _per_head(handed: list[Tensor], means: list[Tensor]) -> Callable[..., Any]:
    """F.multi_head_attention_forward that also hands on its weights, which it returns as a mean over heads."""
    original = F.multi_head_attention_forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        weights = original(
            *args, **{**kwargs, "need_weights": True, "average_attn_weights": False}
        )[1]
        handed.append(weights if weights.ndim == 4 else weights[None])
        out = original(*args, **kwargs)
        means.extend(w for w in out[1:] if w is not None)
        return out

    return watched


def _once(own: list[Tensor], handed: list[Tensor]) -> list[Tensor]:
    """Those of the model, and of those handed on what is not among them."""
    found, left = list(own), list(own)
    for weights in {id(w): w for w in handed}.values():
        mean = _mean(weights)
        twin = next(
            (
                i
                for i, f in enumerate(left)
                if f.shape == mean.shape and (f - mean).abs().max() < SAME
            ),
            None,
        )
        if twin is None:
            found.append(mean)
        else:
            del left[twin]
    return found


def _attentions(out: Any, skip: str) -> Iterator[Tensor]:
    """Tensors under names that end in attentions, in an output and the outputs within it."""
    items = (
        out.items()
        if isinstance(out, dict)
        else enumerate(out)
        if isinstance(out, (tuple, list))
        else ()
    )
    for name, value in items:
        if isinstance(name, str) and name.endswith("attentions"):
            yield from _tensors(value) if name != skip else ()
        elif isinstance(value, (dict, tuple, list)):
            yield from _attentions(value, skip)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _is_weights(x: Tensor) -> bool:
    """Whether it is a distribution over keys (less what sinks take), not the state of a linear attention."""
    if (
        x.ndim < 3
        or not x.is_floating_point()
        or not x.numel()
        or not bool((x >= 0).all())
    ):
        return False
    rows = x.sum(-1)
    return bool((rows < 1 + 1e-3).all()) and bool((rows > 0).any())


def _mean(weights: Tensor) -> Tensor:
    """Mean entropy [2 h] per head of [b h t s], or [2 1] over all rows: of rows that weigh anything, and of those
    whose weights are not all exactly alike.

    Weights alone cannot tell a row that sees no key (a softmax of equally low scores) from one whose keys are all
    the same (padding of a window); either reading may be the right one.
    """
    w = weights.float()
    some = w.sum(-1) > 0
    uneven = some & ((w.amax(-1) > w.amin(-1)) | (w.shape[-1] == 1))
    over = (0, 2) if w.ndim == 4 else tuple(range(w.ndim - 1))
    rest = (1 - w.sum(-1)).masked_fill(~some, 0.0)
    sink = bool(
        (rest > 1e-3).any()
    )  # rows of a plain softmax sum to one but for rounding
    rows = entropy(torch.cat([w, rest.clamp_min(0)[..., None]], -1) if sink else w)
    return torch.stack(
        [
            (rows.masked_fill(~m, 0.0).sum(over) / m.sum(over).clamp_min(1)).reshape(-1)
            for m in (some, uneven)
        ]
    )
