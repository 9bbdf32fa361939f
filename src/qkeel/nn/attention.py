"""Multi-head, grouped-query and multi-query attention under any AttentionSpec."""

from __future__ import annotations

from typing import Literal, final, overload

from jaxtyping import Float
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError, check
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.kernels.stats.per_head import logit_stats
from qkeel.nn.cache import KVCache
from qkeel.nn.spec_module import SpecModule, check_input
from qkeel.spec import AttentionSpec
from qkeel.spec.call import Visibility
from qkeel.spec.presets import attention_spec
from qkeel.spec.shapes import GivenMask, Hidden, PosK, Tokens


@final
class Attention(SpecModule):
    """The q, k, v projections, attention under `spec`, output projection.

    Args:
        d_model: width of the input. n_heads: query heads. n_kv_heads: key and value heads (default n_heads;
        1 is multi-query). head_dim: default d_model / n_heads. spec: what attention computes: a spec, or the name of a
        preset with its options ("qwen3", "gemma2:cap=30"), default "baseline". bias: biases on the q, k, v projections.
        dropout: on the weights, in training. impl: a kernel's name or "auto".

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
        self.o_proj = nn.Linear(n_heads * size, d_model, bias=False)

    @overload
    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = ...,
        context: Float[Tensor, "b s m"] | None = ...,
        causal: bool | None = ...,
        mask: GivenMask | None = ...,
        pos: Tokens | None = ...,
        pos_context: PosK | None = ...,
        stats: Literal[False] = ...,
    ) -> Hidden: ...
    @overload
    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = ...,
        context: Float[Tensor, "b s m"] | None = ...,
        causal: bool | None = ...,
        mask: GivenMask | None = ...,
        pos: Tokens | None = ...,
        pos_context: PosK | None = ...,
        stats: Literal[True],
    ) -> tuple[Hidden, LogitStats]: ...
    def forward(
        self,
        x: Hidden,
        *,
        cache: KVCache | None = None,
        context: Float[Tensor, "b s m"] | None = None,
        causal: bool | None = None,
        mask: GivenMask | None = None,
        pos: Tokens | None = None,
        pos_context: PosK | None = None,
        stats: bool = False,
    ) -> Hidden | tuple[Hidden, LogitStats]:
        """Maps x [b t m] to [b t m]; with `stats` also returns the statistics of the logits, per head.

        cache: earlier keys and values; x are the tokens after them. context [b s m]: attend to it instead of x
        (cross-attention; not causal unless asked). pos [b t]: positions of x. mask: see `qkeel.attention`.
        """
        if stats:
            found: list[LogitStats] = []
            note = lambda call: found.append(logit_stats(call))  # noqa: E731
            self.observers.append(note)
            try:
                out = self.forward(
                    x, cache=cache, context=context, causal=causal, mask=mask, pos=pos, pos_context=pos_context
                )
            finally:
                self.observers.remove(note)
            return out, found[-1]
        check_input(x, self.d_model, self.q_proj)
        if context is not None:
            if cache is not None:
                raise InvalidValueError("cache and context exclude each other: project the context once instead")
            check_input(context, self.d_model, self.k_proj, "context")
            if len(context) != len(x):
                expected = f"[{x.shape[0]} keys {self.d_model}]"
                raise ShapeError(f"expected context of shape {expected}, got {tuple(context.shape)}")
        source = x if context is None else context
        q = self._heads(self.q_proj(x), self.n_heads)
        k = self._heads(self.k_proj(source), self.n_kv_heads)
        v = self._heads(self.v_proj(source), self.n_kv_heads)
        causal = context is None if causal is None else causal
        if context is None:
            return self.o_proj(self.attend_self(cache, (q, k, v), causal=causal, mask=mask, pos=pos))
        seen = Visibility(causal=causal, mask=mask, pos_q=pos, pos_k=pos_context)
        return self.o_proj(self.attend(q, k, v, spec=self.spec, params=self.spec_params(), seen=seen))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


def as_spec(given: AttentionSpec | str | None) -> AttentionSpec:
    """Returns the spec that is given as itself or by the name of a preset; the baseline for None.

    Raises: UnknownNameError for a name that is none, InvalidTypeError for anything else.
    """
    if isinstance(given, AttentionSpec):
        return given
    if given is not None and not isinstance(given, str):
        expected = 'an AttentionSpec or the name of a preset, such as "qwen3"'
        raise InvalidTypeError(f"expected {expected}, got {type(given).__name__}")
    return attention_spec(given or "baseline")


def check_heads(d_model: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Returns n_kv_heads and head_dim with defaults filled in, or the error that says what does not divide."""
    groups = n_heads if n_kv_heads is None else n_kv_heads
    positive = d_model >= 1 and (head_dim is None or head_dim >= 1)
    check(positive, "sizes of at least 1", f"d_model={d_model}, head_dim={head_dim}")
    check(n_heads >= 1 and groups >= 1, "at least one head", f"n_heads={n_heads}, n_kv_heads={n_kv_heads}")
    if n_heads % groups:
        raise InvalidValueError(
            f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {groups}; "
            f"for n_heads={n_heads} choose one of {[g for g in range(1, n_heads + 1) if n_heads % g == 0]}"
        )
    if head_dim is None and d_model % n_heads:
        raise InvalidValueError(f"d_model {d_model} does not split into {n_heads} heads; give head_dim")
    return groups, head_dim or d_model // n_heads
