"""AttentionSpec: what attention computes, as data.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d head size.
"""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.functional.norms import wide
from qkeel.options import lookup
from qkeel.spec.logits import (
    Cap,
    Factor,
    InverseSqrt,
    NoCap,
    Normalizer,
    Scale,
    Softmax,
)
from qkeel.spec.norm import NoNorm, Norm
from qkeel.spec.position import position_for, scale_for
from qkeel.spec.rope import NoPosition, Position
from qkeel.spec.slot import (
    Keys,
    Logits,
    Parameter,
    ParameterSizes,
    Params,
    PosK,
    PosQ,
    Queries,
    Shape,
    Slot,
    Values,
)

SLOTS: dict[str, type] = {
    "norm": Norm,
    "position": Position,
    "scale": Scale,
    "cap": Cap,
    "normalizer": Normalizer,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What attention computes, as data: out = normalizer(cap(scale · position(norm(q), norm(k)))) · v.

    Each of the five slots holds one object. Specs are immutable and comparable; `replace` creates variants.

    >>> AttentionSpec().explain().splitlines()[2]
    '  z = 1/√d · q̃·k̃'
    """

    norm: Norm = dataclasses.field(default_factory=NoNorm)
    position: Position = dataclasses.field(default_factory=NoPosition)
    scale: Scale = dataclasses.field(default_factory=InverseSqrt)
    cap: Cap = dataclasses.field(default_factory=NoCap)
    normalizer: Normalizer = dataclasses.field(default_factory=Softmax)

    def __post_init__(self) -> None:
        slots = (self.norm, self.position, self.scale, self.cap, self.normalizer)
        for (name, kind), value in zip(SLOTS.items(), slots):
            if not isinstance(value, kind):
                raise InvalidTypeError(
                    f"slot {name!r} takes a {kind.__name__} object, got {value!r}; see qkeel.spec for the choices"
                )

    def replace(self, **slots: Norm | Position | Scale | Cap | Normalizer) -> Self:
        """Returns a copy with the named slots replaced."""
        for name in slots:
            lookup("slot", SLOTS, name)
        return dataclasses.replace(self, **slots)  # type: ignore[arg-type]

    def extrapolate(
        self,
        method: str,
        *,
        factor: float = 1.0,
        train_length: int | None = None,
        **options: float | int | str,
    ) -> Self:
        """Adapts a trained spec to longer contexts by changing the position or the scale; the weights stay the same.

        A sliding window no wider than the training length keeps its rotation, because training covered its distances.

        Args:
            method: a name from `qkeel.spec.METHODS`: pi, ntk, ntk_fixed, ntk_mixed, dynamic_ntk, abf, yarn, rerope,
                leaky_rerope, self_extend, rope, window, log_n, none.
            factor: the test length divided by the training length, at least 1.
            train_length: the training length in tokens, for methods that need it.
            options: the options of the method, which are window= (for rerope, leaky_rerope and self_extend, by default
                half of train_length; for window, by default train_length), leak= (how many times more slowly distances
                grow beyond the window, by default 2·factor), power= (ntk_mixed), base= (abf), and ramp=, fast= and
                slow= (yarn).

        Raises:
            UnknownNameError: the method or an option is unknown.
            InvalidValueError: an option has a value that is known not to work.
            RefusedError: the position is not an ordinary RoPE.

        Example:

        >>> from qkeel.spec import Rope
        >>> AttentionSpec(position=Rope()).extrapolate("pi", factor=8).position.formula()
        'RoPE(base 10000, PI ×8)'
        """
        position = position_for(
            self.position, self.norm, method, factor, train_length, options
        )
        return dataclasses.replace(
            self, position=position, scale=scale_for(self.scale, method, train_length)
        )

    def init_params(
        self, n_heads: int, n_kv_heads: int | None = None, head_dim: int = 64
    ) -> Params:
        """Returns the spec's learnable tensors by name, with their initial values. Most specs have none."""
        needed = self.parameters(n_heads, n_kv_heads, head_dim)
        return {name: parameter.tensor() for name, parameter in needed.items()}

    def parameter_shapes(
        self, n_heads: int, n_kv_heads: int | None = None, head_dim: int = 64
    ) -> dict[str, Shape]:
        """Returns the shapes of the spec's learnable tensors by name, without creating tensors.

        >>> from qkeel.spec import RMSNorm
        >>> AttentionSpec(norm=RMSNorm(gain="head_dim")).parameter_shapes(8, 2, 16)
        {'q_norm': (8, 16), 'k_norm': (2, 16)}
        """
        # Dynamo cannot trace a cached function's table.
        shapes = _shapes if torch.compiler.is_compiling() else _shapes_once
        # Copied, as all calls share what the cache holds.
        return {**shapes(self, n_heads, n_kv_heads, head_dim)}

    def parameters(
        self, n_heads: int, n_kv_heads: int | None, head_dim: int
    ) -> dict[str, Parameter]:
        """Returns the shapes and initial values of the spec's learnable tensors by name."""
        geometry = ParameterSizes(
            n_heads=n_heads, n_kv_heads=n_kv_heads or n_heads, head_dim=head_dim
        )
        slots: tuple[Slot, ...] = (
            self.norm,
            self.position,
            self.scale,
            self.cap,
            self.normalizer,
        )
        return {
            name: parameter
            for slot in slots
            for name, parameter in slot.parameters(geometry).items()
        }

    def core(self, params: Params) -> tuple[Self, Params]:
        """Returns the spec to use with encoded q, k and v, and the parameters that it still needs.

        A cache holds encoded keys, so that the norm and the rotation run only once per token.

        Raises:
            RefusedError: the position depends on pairs or on the length, so keys must stay raw.
        """
        if not self.position.keeps:
            raise RefusedError(
                f"{self.position.formula()} needs raw keys; keep raw keys in the cache and attend with the full spec"
            )
        spec = dataclasses.replace(
            self, norm=NoNorm(), position=self.position.encoded()
        )
        # The gains of norms are in the encoded keys already.
        return spec, {name: p for name, p in params.items() if "_norm" not in name}

    def encode(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> tuple[Queries, Keys]:
        """Returns q [b h t d] and k [b g s d] after the norm and the rotation, in float32 or wider."""
        # Rounding of cos and sin in bfloat16 would grow with the position.
        kind = wide(q.dtype)
        q, k = q.to(kind), k.to(kind)
        if self.position.order == "rotate_then_norm":
            q, k = self.position.encode(q, k, pos_q, pos_k)
            return self.norm.apply("q", q, params), self.norm.apply("k", k, params)
        q, k = self.norm.apply("q", q, params), self.norm.apply("k", k, params)
        return self.position.encode(q, k, pos_q, pos_k)

    def values(self, v: Values, params: Params) -> Values:
        """Returns v after its norm, or v itself if the norm does not cover v."""
        return self.norm.apply("v", v, params)

    def factor(
        self, pos_q: PosQ, head_dim: int, params: Params, dtype: torch.dtype
    ) -> float | Factor:
        """Returns the scale, which is a float, or a tensor that broadcasts to [b h t 1], in `dtype` or at least
        float32."""
        reach = self.position.reach
        # A position-dependent scale depends on how many keys the query sees, and a window bounds that number.
        at = pos_q if reach is None else pos_q.clamp_max(reach - 1)
        value = self.scale.factor(at, head_dim, params)
        return value.to(wide(dtype)) if isinstance(value, Tensor) else value

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        """Returns the logits [b h t s] of *encoded* q and k, or of blocks of them, scaled but before the cap."""
        scale = self.factor(pos_q, q.shape[-1], params, q.dtype)
        # Scaling q takes t·d multiplications, while scaling the scores takes t·s.
        return self.position.scores(q * scale, k, pos_q, pos_k, params)

    def logits(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        """*The* definition of an attention logit: returns the logits [b h t s] of raw q and k, scaled but before the
        cap."""
        return self.scores(
            *self.encode(q, k, pos_q, pos_k, params),
            pos_q,
            pos_k,
            params,
        )

    def explain(self) -> str:
        """Returns the formula of this spec, with one line per step."""
        position = self.position.formula()
        lines = ["attention of this spec, per head (logits in nats):"]
        lines.append(f"  {self.norm.formula()}; {position}")
        lines.append(f"  z = {self.scale.formula()} · q̃·k̃")
        if self.cap.kind != "none":
            lines.append(f"  z ← {self.cap.formula()}")
        lines.append(f"  weights = {self.normalizer.formula()} over visible keys")
        # A letter and its combining tilde become one character where there is one.
        text = unicodedata.normalize("NFC", "\n".join(lines))
        return text + f"\n  out = weights · {'ṽ' if 'ṽ' in text else 'v'}"


def _shapes(
    spec: AttentionSpec, n_heads: int, n_kv_heads: int | None, head_dim: int
) -> Mapping[str, Shape]:
    needed = spec.parameters(n_heads, n_kv_heads, head_dim)
    return {name: parameter.shape for name, parameter in needed.items()}


# Every call asks for the shapes.
_shapes_once = functools.lru_cache(maxsize=256)(_shapes)
