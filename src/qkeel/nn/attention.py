"""Attention modules with projections and a cache, defined by a spec: MHA, GQA, MQA, GAU, and their base class.

Shapes: b batch, t new tokens, s all tokens, h query heads, g key heads, d dimensions per head, m width of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    ShapeError,
    check,
    check_known,
)
from qkeel.functional.statistics import KernelRows, LogitStats
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.choose import KERNELS, choose
from qkeel.kernels.norm_rope.encode import encoded
from qkeel.kernels.statistics import logit_stats
from qkeel.options import lookup
from qkeel.patching.module_tables import hooks_before
from qkeel.spec import AttentionCall, AttentionSpec, preset
from qkeel.spec.call import make_call
from qkeel.spec.presets import attention_spec
from qkeel.spec.slot import (
    AttentionMask,
    HeadTensor,
    Hidden,
    Keys,
    Params,
    PosK,
    PosQ,
    Queries,
    QueryPositions,
    Tokens,
    Values,
)

# Caches: what attention needs to know of earlier tokens, one cache per attention module.

Latent = Float[Tensor, "b one t l"]
Inverse = Float[Tensor, "b #h t"]


class Cache:
    """Tensors of all tokens so far, with tokens in dimension 2. A cache reserves memory for `max_length` tokens at
    once, or doubles its capacity when it is full.

    If the position encoding depends on the pair (ReRope, a bias) or on the length (DynamicNTK), the cache holds keys
    and values before they are encoded.

    `pos` [b|1 length] holds the keys' positions if the caller gave some (for left padding), or is None for 0, 1, 2 …
    Caches are for inference only: appending writes in place, so no gradient flows through earlier tokens.
    """

    def __init__(self, max_length: int | None = None) -> None:
        check(
            max_length is None or max_length >= 1,
            "max_length of at least 1 or None",
            max_length,
        )
        self.max_length = max_length
        self.length = 0
        self._held: list[Tensor] = []
        self.pos: Tensor | None = None

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes that each token of one sequence takes; 0 before the first token."""
        # Of one token, because the memory that is reserved may be longer than the text.
        return sum(x[0, :, :1].numel() * x.element_size() for x in self._held)

    def next_positions(
        self, keys: HeadTensor, pos: QueryPositions | None = None
    ) -> PosQ:
        """Returns the positions [b|1 t] of the next tokens, whose keys are [b h t d]: `pos`, after validation, or
        the positions that follow those of the cached tokens."""
        b, t = keys.shape[0], keys.shape[2]
        if pos is None:
            if self.pos is None:
                return torch.arange(self.length, self.length + t, device=keys.device)[
                    None
                ]
            # Padding shifts each sequence differently, so each goes on from its own last position.
            return torch.arange(1, t + 1, device=keys.device) + self.pos[:, -1:]
        rows = pos[None] if pos.ndim == 1 else pos
        if rows.ndim != 2 or rows.shape[0] not in (1, b) or rows.shape[1] != t:
            raise ShapeError(
                f"expected pos of shape [{b} {t}] or [{t}], got {tuple(pos.shape)}"
            )
        return rows

    def check_positions(
        self, pos: QueryPositions | None, mask: AttentionMask | None
    ) -> None:
        """Raises InvalidValueError if positions are given without the mask that they need."""
        if mask is None and (pos is not None or self.pos is not None):
            raise InvalidValueError(
                "explicit positions with a cache need a mask that hides the padding, of shape [b 1 1 keys]"
            )

    def reset(self) -> None:
        """Discards all tokens but keeps the memory."""
        self.length, self.pos = 0, None

    def _append(self, new: Sequence[Tensor], pos: Tensor | None) -> list[Tensor]:
        """Appends the tensors [b g t …] and returns all tokens so far of each of them."""
        length = self.length + new[0].shape[2]
        if self.max_length is not None and length > self.max_length:
            raise InvalidValueError(
                f"the cache holds {self.max_length} tokens, but {length} are needed; create a longer "
                f"{type(self).__name__}"
            )
        if self._held and len(self._held) != len(new):
            raise ShapeError(
                f"this cache holds {len(self._held)} tensors, but the module needs {len(new)}, because its norm has "
                "changed since the cache was created; start a new cache"
            )
        self._held = [
            self._grown(old, x, length)
            for old, x in zip(self._held or [None] * len(new), new)
        ]
        for held, x in zip(self._held, new):
            # In place: a concatenation would copy the whole cache at every token.
            held[:, :, self.length : length] = x.detach()
        if pos is not None or self.pos is not None:
            self._place(self.next_positions(new[0], pos), new[0])
        self.length = length
        return [held[:, :, :length] for held in self._held]

    def _place(self, new: Tensor, keys: Tensor) -> None:
        # The cached tokens may have had no explicit positions.
        old = (
            torch.arange(self.length, device=keys.device)[None]
            if self.pos is None
            else self.pos
        )
        # One row for all sequences may be followed by one for each.
        b = max(old.shape[0], new.shape[0])
        self.pos = torch.cat([old.expand(b, -1), new.expand(b, -1)], dim=1)

    def _grown(self, old: Tensor | None, keys: Tensor, needed: int) -> Tensor:
        if old is not None and (old.shape[:2], old.shape[3:]) != (
            keys.shape[:2],
            keys.shape[3:],
        ):
            raise ShapeError(
                f"this cache holds a tensor of shape {tuple(old.shape)} and cannot append one of {tuple(keys.shape)}; "
                f"use one {type(self).__name__} per layer and batch"
            )
        if old is not None and old.shape[2] >= needed:
            return old
        # Doubled, so that on average each token is copied once.
        room = self.max_length or max(
            needed, 2 * (old.shape[2] if old is not None else 0)
        )
        grown = torch.empty(
            *keys.shape[:2],
            room,
            *keys.shape[3:],
            dtype=keys.dtype,
            device=keys.device,
        )
        if old is not None:
            grown[:, :, : self.length] = old[:, :, : self.length]
        return grown


@final
class KVCache(Cache):
    """A cache of keys as they enter the dot product (normed, rotated) and of values, g · (d + e) numbers per token.

    For `max_length` see `Cache`.

    >>> layer, cache = Attention(16, 2), KVCache()
    >>> for token in torch.zeros(3, 1, 1, 16):
    ...     _ = layer(token, cache=cache)
    >>> cache.length
    3
    """

    def append(
        self, k: Keys, v: Values, *, pos: PosK | None = None
    ) -> tuple[Keys, Values]:
        """Appends k [b g t d] and v [b g t e] at positions pos [b|1 t]; returns all keys and values so far."""
        k, v = self._append([k, v], pos)
        return k, v


@final
class LatentCache(Cache):
    """The cache of multi-head latent attention: one kv latent and one rotated key for all heads, plus key norms.

    Each token requires l + r numbers (latent, rotated key) in the module's dtype. If keys are normed, it also requires
    one inverse magnitude per head in float32 or wider, which is all that is needed to divide key k_h by its magnitude.
    For `max_length` see `Cache`.

    >>> from qkeel.nn import MLA
    >>> layer = MLA(32, 4)
    >>> cache = layer.new_cache()
    >>> _ = layer(torch.zeros(1, 5, 32), cache=cache)
    >>> cache.length
    5
    """

    def append(
        self,
        latent: Latent,
        rotated: Latent,
        inverse: Inverse | None = None,
        *,
        pos: PosK | None = None,
    ) -> tuple[Latent, Inverse | None]:
        """Appends latent [b 1 t l], rotated [b 1 t r], inverse [b h|1 t]; returns those of all tokens so far, [b 1 s
        l+r] and [b h|1 s]."""
        token = torch.cat([latent, rotated], dim=-1)
        held = self._append([token] if inverse is None else [token, inverse], pos)
        return held[0], held[1] if inverse is not None else None


# The base of every attention module: a spec, its parameters, and observers of its calls.

Observer = Callable[[AttentionCall], None]
QKV = tuple[Queries, Keys, Values]


@dataclasses.dataclass(frozen=True, slots=True)
class RowObserver:
    """An observer that also accepts row statistics from the kernel, where the kernel computes them in its pass."""

    see: Observer
    """Receives each attention call before it is computed, if the kernel returns no row statistics."""
    read: Callable[[AttentionCall, KernelRows], None]
    """Receives each computed attention call and its row statistics."""

    def __call__(self, call: AttentionCall) -> None:
        self.see(call)


def check_dropout(dropout: float) -> None:
    """Raises InvalidValueError unless dropout is in [0, 1)."""
    check(0 <= dropout < 1, "dropout in [0, 1)", dropout)


class SpecModule(nn.Module):
    """A module that computes attention as `spec` defines it. The spec's parameters are parameters of the module
    (`q_norm`, `logit_scale`, …).

    `observers` are called with every AttentionCall before it is computed and must not change it. A RowObserver also
    gets the largest logit and entropy of each row if the kernel computes them in its pass.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __init__(
        self,
        spec: AttentionSpec,
        geometry: tuple[int, int, int],
        dropout: float,
        impl: str,
    ) -> None:
        super().__init__()
        check_dropout(dropout)
        # A misspelt name is an error here, not in the first forward pass.
        if impl != "auto":
            lookup("kernel", KERNELS, impl)
        self.n_heads, self.n_kv_heads, self.head_dim = geometry
        self.dropout = dropout
        self.impl = impl
        self.observers: list[Observer] = []
        self.spec = spec
        for name, value in spec.init_params(*geometry).items():
            self.register_parameter(name, nn.Parameter(value))

    def spec_params(self) -> Params:
        """Returns the spec's parameters on this module, by name."""
        # A parameter that was tied under two names is needed under both.
        return dict(self.named_parameters(recurse=False, remove_duplicate=False))

    def attend(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        *,
        spec: AttentionSpec,
        params: Params,
        **visible: Any,
    ) -> Hidden:
        """Builds the call, passes it to the observers and computes it: [b h t d] -> [b t h·e]. `visible` are causal, mask,
        pos_q and pos_k; see `qkeel.attention`."""
        dropout = self.dropout if self.training else 0.0
        call = make_call(spec, q, k, v, params=params, dropout=dropout, **visible)
        kernel = choose(call, self.impl)
        read = None
        # The kernel can note these rows in its own pass; without it an observer computes all logits again.
        if isinstance(kernel, Native) and any(
            isinstance(observer, RowObserver) for observer in self.observers
        ):
            read = kernel.with_rows(call)
        for observer in self.observers:
            if read is not None and isinstance(observer, RowObserver):
                observer.read(call, read[1])
            else:
                observer(call)
        return (kernel(call) if read is None else read[0]).transpose(1, 2).flatten(2)

    def new_cache(self, max_length: int | None = None) -> Cache:
        """Returns an empty cache for one batch; it reserves memory for `max_length` tokens at once, or doubles its
        capacity when it is full."""
        return KVCache(max_length)

    def attend_self(
        self,
        cache: KVCache | None,
        qkv: QKV,
        *,
        causal: bool,
        mask: AttentionMask | None,
        pos: QueryPositions | None,
    ) -> Hidden:
        """Attends to the keys and values [b g t d] of the same tokens and, with a cache, of all tokens before them;
        returns [b t h·e]."""
        q, k, v = qkv
        if cache is None:
            visible = {"causal": causal, "mask": mask, "pos_q": pos, "pos_k": pos}
            params = self.spec_params()
            return self.attend(q, k, v, spec=self.spec, params=params, **visible)
        if not isinstance(cache, KVCache):
            raise InvalidTypeError(
                f"expected a qkeel.nn.KVCache, got {type(cache).__name__}; new_cache() creates one"
            )
        cache.check_positions(pos, mask)
        # Before the cache grows, since it counts from the tokens that are there.
        at = cache.next_positions(k, pos)
        spec, params = self.spec, self.spec_params()
        # Encode each token once; otherwise the full spec runs on raw keys in every
        # step.
        if spec.position.keeps:
            q, k = encoded(spec, q, k, at, at, params)
            v = spec.values(v, params)
            spec, params = spec.core(params)
        k, v = cache.append(
            k,
            v,
            pos=None if pos is None else at,
        )
        # None where they are 0, 1, 2 …, because more kernels take such calls.
        positions = None if cache.pos is None else at
        visible = {"causal": causal, "mask": mask, "pos_q": positions}
        return self.attend(
            q, k, v, spec=spec, params=params, pos_k=cache.pos, **visible
        )

    def extra_repr(self) -> str:
        """Shows heads, norm and position in print(model)."""
        heads = f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, {self.spec.norm.formula()}; {self.spec.position.formula()}"


def check_input(
    x: Tensor, d_model: int, layer: nn.Module | None = None, name: str = "x"
) -> None:
    """Raises an error unless x is a floating-point tensor [b t m] with the dtype and device of the `layer` that reads
    it."""
    if not isinstance(x, Tensor):
        raise InvalidTypeError(
            f"expected {name} to be a tensor, got {type(x).__name__}"
        )
    # torch has no arithmetic for floats of 8 bits.
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise InvalidTypeError(
            f"expected {name} of floating-point numbers of 16 bits or more, got {x.dtype}; embed or convert it first"
        )
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ShapeError(
            f"expected {name} of shape [batch tokens {d_model}], got {tuple(x.shape)}"
        )
    weight = layer.weight if type(layer) is nn.Linear else None
    if weight is None or (x.device == weight.device and x.dtype == weight.dtype):
        return
    # Hooks on a layer may convert its input or fetch its weights first.
    if layer is None or hooks_before(layer) or "forward" in layer.__dict__:
        return
    if x.device != weight.device:
        raise InvalidValueError(
            f"expected {name} on {weight.device} like the weights, but it is on {x.device}; move it there"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidTypeError(
            f"expected {name} in {weight.dtype} like the weights, got {x.dtype}; convert one of them, or use "
            "torch.autocast"
        )


# Multi-head, grouped-query and multi-query attention under any AttentionSpec.


@final
class Attention(SpecModule):
    """Projections of q, k and v, attention under `spec`, and an output projection.

    Args:
        d_model: width of the input.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads (default: n_heads; 1 gives multi-query attention).
        head_dim: width of a head (default: d_model / n_heads).
        spec: a spec, or the name of a preset with its options ("qwen3", "gemma2:cap=30"); "baseline" by default.
        bias: whether the q, k and v projections have biases.
        dropout: dropout probability of the attention weights, in training.
        impl: the name of a kernel, or "auto" to choose one per call.

    Example:
        >>> import torch
        >>> out, stats = Attention(64, 4, spec="qwen3")(torch.randn(1, 10, 64), stats=True)
        >>> stats.max_logit.shape
        torch.Size([4])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        spec: AttentionSpec | str | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        groups, size = check_heads(d_model, n_heads, n_kv_heads, head_dim)
        spec = as_spec(spec)
        spec.position.check(size)
        super().__init__(spec, (n_heads, groups, size), dropout, impl)
        self.d_model = d_model
        self.q_proj = nn.Linear(d_model, n_heads * size, bias=bias)
        self.k_proj = nn.Linear(d_model, groups * size, bias=bias)
        self.v_proj = nn.Linear(d_model, groups * size, bias=bias)
        # Also where q, k and v have biases, as in Qwen2.
        self.o_proj = nn.Linear(n_heads * size, d_model, bias=False)

    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        context: Float[Tensor, "b s m"] | None = None,
        causal: bool | None = None,
        mask: AttentionMask | None = None,
        pos: Tokens | None = None,
        pos_context: PosK | None = None,
        stats: bool = False,
    ) -> Hidden | tuple[Hidden, LogitStats]:
        """Maps x [b t m] to [b t m]; with `stats`, also returns the statistics of the logits, per head.

        Args:
            x: hidden states.
            cache: keys and values of the tokens before x.
            context: hidden states [b s m] to which x attends instead of to itself (cross-attention).
            causal: whether a query sees only keys up to its own position; True by default, or False with a context.
            mask: see `qkeel.attention`.
            pos: positions [b t] of x.
            pos_context: positions of the context.
            stats: whether to return LogitStats as well.
        """
        if stats:
            stats_of_calls: list[LogitStats] = []
            # An observer gets the call that the kernel gets, with and without a cache.
            note = lambda call: stats_of_calls.append(logit_stats(call))  # noqa: E731
            self.observers.append(note)
            try:
                out = self.forward(
                    x,
                    cache=cache,
                    context=context,
                    causal=causal,
                    mask=mask,
                    pos=pos,
                    pos_context=pos_context,
                )
            finally:
                self.observers.remove(note)
            assert isinstance(out, Tensor)
            return out, stats_of_calls[-1]
        check_input(x, self.d_model, self.q_proj)
        if context is not None:
            if cache is not None:
                raise InvalidValueError(
                    "cache and context are mutually exclusive: project the context once instead"
                )
            check_input(context, self.d_model, self.k_proj, "context")
            if len(context) != len(x):
                expected = f"[{x.shape[0]} keys {self.d_model}]"
                raise ShapeError(
                    f"expected context of shape {expected}, got {tuple(context.shape)}"
                )
        source = x if context is None else context
        q = self._heads(self.q_proj(x), self.n_heads)
        k = self._heads(self.k_proj(source), self.n_kv_heads)
        v = self._heads(self.v_proj(source), self.n_kv_heads)
        causal = context is None if causal is None else causal
        if context is None:
            return self.o_proj(
                self.attend_self(
                    cache,
                    (q, k, v),
                    causal=causal,
                    mask=mask,
                    pos=pos,
                )
            )
        visible = {"mask": mask, "pos_q": pos, "pos_k": pos_context}
        params = self.spec_params()
        out = self.attend(
            q, k, v, spec=self.spec, params=params, causal=causal, **visible
        )
        return self.o_proj(out)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


def as_spec(spec: AttentionSpec | str | None) -> AttentionSpec:
    """Returns the given spec, the spec of the named preset, or the baseline for None.

    Raises:
        UnknownNameError: no preset has this name.
        InvalidTypeError: `given` has the wrong type.
    """
    if isinstance(spec, AttentionSpec):
        return spec
    if spec is not None and not isinstance(spec, str):
        expected = 'an AttentionSpec or the name of a preset, such as "qwen3"'
        raise InvalidTypeError(f"expected {expected}, got {type(spec).__name__}")
    return attention_spec(spec or "baseline")


def check_heads(
    d_model: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Returns n_kv_heads and head_dim with defaults filled in; raises InvalidValueError if the sizes do not divide
    evenly."""
    groups = n_heads if n_kv_heads is None else n_kv_heads
    positive = d_model >= 1 and (head_dim is None or head_dim >= 1)
    check(positive, "sizes of at least 1", f"d_model={d_model}, head_dim={head_dim}")
    check(
        n_heads >= 1 and groups >= 1,
        "at least one head",
        f"n_heads={n_heads}, n_kv_heads={n_kv_heads}",
    )
    if n_heads % groups:
        raise InvalidValueError(
            f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {groups}; "
            f"for n_heads={n_heads} choose one of {[g for g in range(1, n_heads + 1) if n_heads % g == 0]}"
        )
    if head_dim is None and d_model % n_heads:
        raise InvalidValueError(
            f"d_model {d_model} does not split evenly into {n_heads} heads; give head_dim"
        )
    return groups, head_dim or d_model // n_heads


# The gated attention unit: one wide attention head and a gated MLP in one layer, under any AttentionSpec.


@final
class GAU(SpecModule):
    """The layer out = (u ∘ A v) W_o with [u v] = silu(x W_uv), z = silu(x W_z), q = γ_q ∘ z + β_q, k = γ_k ∘ z + β_k.

    A is the attention-weight matrix of one head of width `size` under `spec`; u and v have width `hidden`. Two such
    layers replace one attention layer and one MLP. With SquaredReLU as normalizer, A = relu(z)²/n for n visible keys,
    as in bert4keras; the paper's own code divides by n before squaring. Unlike in the paper, there is no T5 bias and no
    linear attention between chunks.

    Args:
        d_model: width of the input.
        hidden: width of u and v; 2·d_model by default.
        size: width of q and k.
        spec: the attention spec; preset("baseline") by default.
        bias: whether q and k have offsets β.
        dropout: dropout probability of the attention weights, in training.
        impl: the name of a kernel, or "auto" to choose one per call.

    Source: Hua et al. 2022, arXiv 2202.10447, section 3.2; the initial values γ = 1 and β = 0 and the lack of biases
    are those of GAU-α (bert4keras).

    >>> GAU(16, size=8)(torch.zeros(1, 3, 16)).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        d_model: int,
        *,
        hidden: int | None = None,
        size: int = 128,
        spec: AttentionSpec | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        width = 2 * d_model if hidden is None else hidden
        sizes = f"d_model={d_model}, hidden={width}, size={size}"
        check(min(d_model, width, size) >= 1, "sizes of at least 1", sizes)
        spec = preset("baseline") if spec is None else spec
        spec.position.check(size)
        super().__init__(spec, (1, 1, size), dropout, impl)
        self.d_model, self.hidden = d_model, width
        self.uv_proj = nn.Linear(d_model, 2 * width, bias=False)
        self.qk_proj = OffsetScale(d_model, size, bias)
        self.o_proj = nn.Linear(width, d_model, bias=False)

    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        causal: bool = True,
        mask: AttentionMask | None = None,
        pos: Tokens | None = None,
    ) -> Hidden:
        """Maps x [b t m] at positions pos [b t] to [b t m]. `cache` holds keys and values of the tokens before x."""
        check_input(x, self.d_model, self.uv_proj)
        if any(
            # Gains are made for heads of width head_dim, but v is as wide as `hidden`.
            name.startswith("v_norm") and p.numel() > 1
            for name, p in self.spec_params().items()
        ):
            raise RefusedError(
                f"the values of this GAU have {self.hidden} numbers, and the gain on v has {self.head_dim}; "
                "use gain none or scalar on v, or do not norm v"
            )
        u, v = F.silu(self.uv_proj(x)).chunk(2, dim=-1)
        q, k = self.qk_proj(x)
        heads = (q[:, None], k[:, None], v[:, None])
        return self.o_proj(
            u * self.attend_self(cache, heads, causal=causal, mask=mask, pos=pos)
        )


@final
class OffsetScale(nn.Module):
    """Maps x [b t m] to q and k [b t s] from z = silu(x W_z), each with its own gain (and offset) per dimension."""

    def __init__(self, d_model: int, size: int, bias: bool) -> None:
        super().__init__()
        self.z_proj = nn.Linear(d_model, size, bias=False)
        self.q_gain, self.k_gain = (
            nn.Parameter(torch.ones(size)),
            nn.Parameter(torch.ones(size)),
        )
        self.q_bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.k_bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Hidden) -> tuple[Hidden, Hidden]:
        """Maps x [b t m] to q and k [b t s]."""
        z = F.silu(self.z_proj(x))
        q, k = z * self.q_gain, z * self.k_gain
        if self.q_bias is not None and self.k_bias is not None:
            return q + self.q_bias, k + self.k_bias
        return q, k


@final
class GAUBlock(nn.Module):
    """A GAU on the residual stream: x + F(N(x)) ("pre"), or N(αx + F(x)) ("post").

    F is `gau`, and N is an RMS norm, placed according to `norm_order`, with a gain if it precedes the branch. `alpha`
    is α > 0, which is used only with "post".

    Source: pre-norm: arXiv 2202.10447, with LayerNorm or ScaleNorm; post-norm: GAU-α; α: DeepNorm,
    `functional.logits.deepnorm`.

    >>> GAUBlock(GAU(16, size=8))(torch.zeros(1, 3, 16)).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self, gau: GAU, *, norm_order: str = "pre", alpha: float = 1.0
    ) -> None:
        super().__init__()
        check_known("norm order of a GAU", norm_order, ("pre", "post"))
        check(alpha > 0, "alpha above 0", alpha)
        if alpha != 1 and norm_order == "pre":
            raise InvalidValueError(
                f"alpha is for norm_order='post', got {alpha} with 'pre'"
            )
        self.norm_order, self.alpha = norm_order, alpha
        self.attention = gau
        # After the sum, a gain would also scale what earlier layers wrote to the stream.
        self.norm = nn.RMSNorm(
            gau.d_model, eps=1e-6, elementwise_affine=norm_order == "pre"
        )

    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        mask: AttentionMask | None = None,
        pos: QueryPositions | None = None,
        causal: bool = True,
    ) -> Hidden:
        """Maps x [b t m] to [b t m]."""
        pre = self.norm_order == "pre"
        branch = self.attention(
            self.norm(x) if pre else x,
            cache=cache,
            causal=causal,
            mask=mask,
            pos=pos,
        )
        return x + branch if pre else self.norm(self.alpha * x + branch)
