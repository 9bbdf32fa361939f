"""Replaces a model's attention calls, including their masks, with qkeel's attention under a different spec.

Shapes: b batch, t queries, s keys, h heads, d dimensions per head.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
)

from qkeel.capture.calls import HIDES, HeadLayout
from qkeel.capture.readers import SDPA, hiding, mha_mask, sdpa_arguments, unpacked
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.nn import functional_attention
from qkeel.ops import run, run_with_weights
from qkeel.patching.module_forward import InstanceForward, put_in_place, take_out
from qkeel.patching.module_tables import hooks_before
from qkeel.patching.torch_state import compile_again
from qkeel.remedies.base import Args, Kwargs
from qkeel.spec import AttentionSpec
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.logits import Normalizer
from qkeel.spec.slot import ParameterSizes, Params

# Replaces attention calls inside a module's forward with qkeel's own attention under a different spec.
#
# While the forward runs, a torch function mode replaces `F.scaled_dot_product_attention`,
# `F.multi_head_attention_forward` and the softmax of written-out attention. torch.compile can trace all of it.

QKV = tuple[Tensor, Tensor, Tensor]


_FUSED: tuple[Callable[..., Tensor], ...] = (SDPA, functional_attention)
_SOFTMAX: tuple[Callable[..., Tensor], ...] = (F.softmax, torch.softmax, Tensor.softmax)


@final
class ChangedCalls(InstanceForward):
    """Runs a module's forward with its attention calls under a changed spec.

    `base` is the module's original spec, called with the factor `scale`, `changes` are the active changes, `spec` the
    resulting spec, `names` the names of its parameters on the module, and `layout` the layout of its scores. A
    written-out logit at or below `low` counts as masked. `writes` becomes True once the example has shown a written-out
    softmax, so that its scores have been checked. While `seen` is a list, it collects the calls of each forward: the
    largest logit that a mask hides in a written-out call, None for a fused one.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: ParameterSizes,
        base: AttentionSpec,
        scale: float,
        layout: HeadLayout,
    ) -> None:
        super().__init__(module)
        self.geometry, self.layout = geometry, layout
        self.base = self.spec = base
        self.scale = scale
        self.changes: list[PlacedChange] = []
        self.names: tuple[str, ...] = ()
        self.low = HIDES
        self.writes = False
        self.seen: list[list[float | None]] | None = None

    def change(self, changes: list[PlacedChange]) -> None:
        """Activates these changes, applying them in order. If the list is empty, restores the original forward."""
        g = self.geometry
        self.spec = changed(self.base, changes)
        self.names = tuple(
            self.spec.parameter_shapes(g.n_heads, g.n_kv_heads, g.head_dim)
        )
        if changes and not self.changes:
            put_in_place(self)
            if isinstance(self.module, nn.MultiheadAttention):
                self.module.register_forward_pre_hook(_not_the_fast_path)
                # Code compiled for the fast path does not detect new hooks.
                compile_again()
        self.changes = changes
        if not changes:
            take_out(self)
            hooks = hooks_before(self.module)
            for key in [k for k, hook in hooks.items() if hook is _not_the_fast_path]:
                del hooks[key]
                # Code compiled with the hook does not detect its removal.
                compile_again()

    def run(self, args: Args, kwargs: Kwargs) -> object:
        """Runs the module's forward with its attention calls replaced."""
        if any(isinstance(x, torch.fx.Proxy) for x in (*args, *kwargs.values())):
            raise RefusedError(
                "torch.fx.symbolic_trace runs no tensors and would write a graph without the change of the attention "
                "call; trace with torch.export.export, which keeps it, or remove() the remedy before tracing"
            )
        if self.seen is not None:
            self.seen.append([])
        # Entered in each forward, so that other modules' softmaxes keep their function.
        with _Exchange(self):
            if torch.compiler.is_compiling():
                return self.replaced(args, kwargs)
            # What the forward itself compiles would keep its calls, or those of the layer that compiled it first.
            with torch.compiler.set_stance("force_eager"):
                return self.replaced(args, kwargs)

    def note(self, hidden: float | None = None) -> None:
        """Records a call, with the largest logit that is hidden if it is written out."""
        if self.seen is not None:
            self.seen[-1].append(hidden)

    def params(self) -> Params:
        """Returns the module's parameters that the spec needs."""
        return {name: getattr(self.module, name) for name in self.names}

    # --- F.scaled_dot_product_attention

    def fused(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Computes one call of F.scaled_dot_product_attention."""
        self.note()
        arguments = sdpa_arguments(args, kwargs)
        q, k, v, mask = (
            arguments[name] for name in ("query", "key", "value", "attn_mask")
        )
        causal, scale = arguments["is_causal"], arguments["scale"]
        if q.is_nested:
            raise RefusedError(
                "expected attention with q [b h t d], got nested tensors, whose heads are not known"
            )
        apart = unpacked(arguments, self.geometry.n_heads)
        if q.ndim != 4 and not apart:
            raise RefusedError(
                f"expected attention with q [b h t d], got {list(q.shape)}, in which heads are not told apart; use "
                "qk_clip or lalr, which leave the call as it is"
            )
        self._check_scale(1 / math.sqrt(q.shape[-1]) if scale is None else float(scale))
        shape = q.shape[:-1]
        if apart:
            q, mask = apart["query"], apart["attn_mask"]
        call = self._call(
            (q, k, v), mask, causal=causal, dropout=arguments["dropout_p"]
        )
        out = run(call)
        return out.reshape(*shape, out.shape[-1]) if apart else out

    def _check_scale(self, scale: float) -> None:
        # 1/√d is rounded in two ways.
        if abs(self.scale - scale) > 1e-6 * abs(scale):
            raise RefusedError(
                f"attention was called with the scale {scale:g}, but with {self.scale:g} on the example; apply "
                "the remedy with an example that shows how the model will be used"
            )

    def _call(
        self, qkv: QKV, mask: Tensor | None, *, causal: bool, dropout: float
    ) -> AttentionCall:
        q, k, v = qkv
        t, s = q.shape[2], k.shape[2]
        mask = hiding(mask)
        pos_q, pos_k = None, None
        if causal and t != s:
            # torch aligns the causal flag to the first key, qkeel to the last
            pos_q = torch.arange(t, device=q.device)
            pos_k = torch.arange(s, device=q.device)
        elif not causal and self.spec.scale.follows_position:
            pos_q = _last_seen(mask, t, s, q.device, check=self.seen is not None)
        return make_call(
            self.spec,
            q,
            k,
            v,
            params=self.params(),
            causal=causal,
            mask=mask,
            pos_q=pos_q,
            pos_k=pos_k,
            dropout=dropout,
        )

    # --- softmax(scale · q kᵀ + mask), written out

    def written(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Computes the softmax of written-out logits."""
        if not self.writes and self.seen is None:
            raise RefusedError(
                f"{type(self.module).__name__} computed an explicit softmax, but the remedy's example "
                "showed only fused attention; apply the remedy with an example that shows how the model will be used"
            )
        x: Tensor = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dtype = kwargs.get(
            "dtype", next((a for a in args[2:] if isinstance(a, torch.dtype)), None)
        )
        layout = self._layout(x.shape, -1 if dim is None else dim)
        z = layout.apply(x).to(wide(dtype or x.dtype))
        # In half precision a mask holds the lowest number of its dtype, or the sum of two masks.
        low = max(self.low, torch.finfo(x.dtype).min / 2)
        visible = z > low
        if self.seen is not None:
            self.writes = True
            if _is_shifted(z, visible):
                raise RefusedError(
                    "the largest score of each row is subtracted before the softmax, so a cap or a scale would act on "
                    "something other than the logits; leave that subtraction out (torch's softmax does it), or use "
                    "qk_clip or lalr"
                )
            hidden = z.detach().masked_fill(visible, -math.inf)
            # An expert may have received no tokens.
            self.note(float(hidden.max()) if hidden.numel() else -math.inf)
        # 0 in place of -inf, which would be NaN times a factor of 0 or in a gradient.
        z = torch.where(visible, z, 0.0)
        if self.spec.scale != self.base.scale:
            # The new factor on q·k divided by the factor that the logits already contain.
            pos_q = _same_for_all_heads(visible, self.seen is not None).sum(-1) - 1
            factor = self.spec.scale.factor(
                pos_q, self.geometry.head_dim, self.params()
            )
            z = z * (factor / self.scale)
        weights = softmax(
            self.spec.cap.apply(z), -1, visible, self.spec.normalizer, self.params()
        )
        return layout.undo(weights.to(dtype or x.dtype), x.shape)

    def _layout(self, shape: torch.Size, keys: int) -> HeadLayout:
        """Returns the layout of scores of this shape, where the softmax is over dimension `keys`."""
        layout = self.layout.fitted(shape)
        if layout is None or layout.keys != keys % len(shape):
            raise RefusedError(
                f"expected scores [{self.layout}], h heads, t queries, s keys, got a softmax over dimension {keys} of "
                f"{tuple(shape)}; its heads are not known"
            )
        return layout

    # --- F.multi_head_attention_forward

    def multi_head(self, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
        """Computes one call of F.multi_head_attention_forward, which is the attention of nn.MultiheadAttention."""
        self.note()
        # nn.MultiheadAttention gives the arguments up to the output projection's bias by position.
        if len(args) != 13:
            raise RefusedError(
                "multi_head_attention_forward was called in a way that nn.MultiheadAttention never uses"
            )
        query, key, value, _, heads, weight, bias = args[:7]
        bias_k, bias_v, zero, dropout, out_weight, out_bias = args[7:]
        added = (bias_k, bias_v, kwargs.get("static_k"), zero or None)
        if any(x is not None for x in added):
            raise RefusedError(
                "nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys can't be changed"
            )
        if query.ndim != 3:
            raise RefusedError(
                f"expected nn.MultiheadAttention with samples, tokens and features, got {list(query.shape)}; give a batch "
                "of one, x[None]"
            )
        inputs = [query, key, value]
        q, k, v = (_heads(x, heads) for x in _projected(inputs, weight, bias, kwargs))
        (b, h, t, d), s = q.shape, k.shape[2]
        mask = mha_mask(kwargs, (b, h, t, s))
        # torch's function drops only in training, whatever the module's rate.
        p = dropout if kwargs.get("training", True) else 0.0
        self._check_scale(1 / math.sqrt(d))
        # torch demands attn_mask beside is_causal, so the mask says everything.
        call = self._call((q, k, v), mask, causal=False, dropout=p)
        out, weights = (
            run_with_weights(call)
            if kwargs.get("need_weights", True)
            else (run(call), None)
        )
        out = F.linear(
            out.permute(2, 0, 1, 3).reshape(t, b, h * d), out_weight, out_bias
        )
        if weights is not None and kwargs.get("average_attn_weights", True):
            weights = weights.mean(dim=1)
        return out, weights


class _Exchange(TorchFunctionMode):
    """Redirects calls of attention functions to a module's ChangedCalls."""

    def __init__(self, calls: ChangedCalls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., object],
        types_: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _FUSED:
            return self.calls.fused(args, kwargs)
        if func in _SOFTMAX:
            return self.calls.written(args, kwargs)
        if func is F.multi_head_attention_forward:
            return self.calls.multi_head(args, kwargs)
        if (
            isinstance(func, types.FunctionType)
            and getattr(Tensor, func.__name__, None) is func
        ):
            # Called as a method, since Dynamo does not follow super() inside a method called as a function.
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)


def _not_the_fast_path(module: nn.Module, args: object) -> None:
    """A hook that does nothing. Its presence keeps nn.TransformerEncoderLayer off its fast path."""


class SpecChange(Protocol):
    """A remedy that changes the attention spec."""

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """Returns the spec changed by this remedy."""
        ...


# a remedy, and the training length in tokens if the remedy needs it.
PlacedChange = tuple[SpecChange, int | None]


def changed(base: AttentionSpec, changes: Iterable[PlacedChange]) -> AttentionSpec:
    """Returns the spec that results from applying the changes in order."""
    for remedy, train_length in changes:
        base = remedy.changed(base, train_length)
    return base


def softmax(
    x: Tensor, dim: int, visible: Tensor, normalizer: Normalizer, params: Params
) -> Tensor:
    """Returns the weights of logits. A Monitor sees this function as a softmax, because of its name."""
    if has_torch_function_unary(x):
        return handle_torch_function(softmax, (x,), x, dim, visible, normalizer, params)
    return normalizer.weights(x, visible, params)


def _is_shifted(z: Tensor, visible: Tensor) -> bool:
    """True if the largest logit of a row is exactly 0 and others are not, as where it was subtracted, so that the
    softmax does not reveal the logits."""
    z = z.detach().masked_fill(~visible, -math.inf)
    others = (z != 0) & visible
    return bool(((z.amax(-1) == 0) & others.any(-1)).any())


def _same_for_all_heads(visible: Tensor, check: bool) -> Tensor:
    """Returns the visible keys [b t s] from [b h t s]. With `check`, masks that differ between heads are refused."""
    if check and not bool((visible == visible[:, :1]).all()):
        raise RefusedError(
            "the mask hides different keys from different heads, so a query has no single number of visible keys"
        )
    return visible[:, 0]


def _last_seen(
    mask: Tensor | None, t: int, s: int, device: torch.device, *, check: bool
) -> Tensor:
    """Returns the number of visible keys of each query minus one, [b|1 t]. With a causal mask this is its position."""
    if mask is None:
        return torch.full((t,), s - 1, device=device)
    visible = mask if mask.dtype == torch.bool else mask > HIDES
    return _same_for_all_heads(visible, check).expand(-1, t, s).sum(-1) - 1


def _projected(
    x: list[Tensor], weight: Tensor, bias: Tensor | None, kwargs: Kwargs
) -> list[Tensor]:
    """Returns the outputs of the q, k and v projections of nn.MultiheadAttention."""
    if kwargs.get("use_separate_proj_weight", False):
        weights = [kwargs[f"{side}_proj_weight"] for side in "qkv"]
    else:
        weights = list(weight.chunk(3))
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [F.linear(a, w, c) for a, w, c in zip(x, weights, biases)]


def _heads(x: Tensor, n: int) -> Tensor:
    """Reshapes [t b (h d)] to [b h t d]."""
    return x.unflatten(-1, (n, -1)).permute(1, 2, 0, 3)
