"""The product that conformance tests walk: presets, geometries, masks, dtypes; and the measure of error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkeel import attention, preset, reference
from qkeel.errors import InvalidValueError
from qkeel.spec import (
    NTK,
    PI,
    PRESETS,
    ALiBi,
    AttentionSpec,
    DynamicNTK,
    GradientMax,
    Kerple,
    LeakyReRope,
    Learned,
    Llama3,
    LogN,
    ReRope,
    RMSNorm,
    Rope,
    Sigmoid,
    Sink,
    SlidingWindow,
    Softcap,
    Softpick,
    SquaredReLU,
    XPos,
    YaRN,
)

# Slots that no preset uses yet, and combinations that no preset has.
EXTRA: dict[str, AttentionSpec] = {
    "sink": AttentionSpec(position=Rope(), normalizer=Sink()),
    "off_by_one": AttentionSpec(normalizer=Sink(learned=False)),
    "sigmoid": AttentionSpec(position=Rope(), normalizer=Sigmoid(bias=-2.0)),
    "sigmoid_learned": AttentionSpec(normalizer=Sigmoid(bias=-2.0, learned=True)),
    "squared_relu": AttentionSpec(normalizer=SquaredReLU()),
    "softpick": AttentionSpec(normalizer=Softpick()),
    "capped_sink": AttentionSpec(
        norm=RMSNorm(gain="head"), cap=Softcap(3.0), normalizer=Sink()
    ),
    "capped_log_n": AttentionSpec(
        cap=Softcap(5.0),
        scale=LogN(inner=Learned(init=0.4, per="head"), train_length=4, clip=True),
    ),
    "learned_log_n": AttentionSpec(
        scale=LogN(train_length=4, learned="head"), normalizer=Sink()
    ),
    "gradient_max": AttentionSpec(norm=RMSNorm(), scale=GradientMax(keys=8)),
    "pi": AttentionSpec(position=Rope(stretch=PI(factor=8))),
    "ntk_mixed": AttentionSpec(position=Rope(stretch=NTK(factor=8, kind="mixed"))),
    "dynamic_ntk": AttentionSpec(position=Rope(stretch=DynamicNTK(train_length=4))),
    "yarn": AttentionSpec(
        norm=RMSNorm(), position=Rope(stretch=YaRN(factor=8, train_length=512))
    ),
    "llama3": AttentionSpec(position=Rope(stretch=Llama3(factor=8, train_length=512))),
    "rerope": AttentionSpec(norm=RMSNorm(), position=ReRope(window=3)),
    "leaky_rerope": AttentionSpec(position=LeakyReRope(window=3, factor=4)),
    "self_extend": AttentionSpec(
        position=LeakyReRope(window=3, factor=2, rounded=True)
    ),
    "alibi": AttentionSpec(position=ALiBi()),
    "kerple_log": AttentionSpec(position=Kerple()),
    "kerple_power": AttentionSpec(norm=RMSNorm(), position=Kerple(kind="power")),
    "xpos": AttentionSpec(position=XPos()),
    "window": AttentionSpec(position=SlidingWindow(window=3)),
    "window_log_n": AttentionSpec(
        norm=RMSNorm(), position=SlidingWindow(window=2), scale=LogN(train_length=4)
    ),
    "window_alibi_sink": AttentionSpec(
        position=SlidingWindow(window=3, inner=ALiBi()), normalizer=Sink()
    ),
}
SPECS: dict[str, AttentionSpec] = {**{name: preset(name) for name in PRESETS}, **EXTRA}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Batch, query heads, key heads, query length, key length, head size."""

    b: int
    h: int
    g: int
    t: int
    s: int
    d: int

    def __str__(self) -> str:
        return f"b{self.b} h{self.h} g{self.g} t{self.t} s{self.s} d{self.d}"


# Heads: MHA, GQA, MQA. Lengths: t = s, t < s, t = 1, t > s (causal with positions of one's own only).
HEADS = [(2, 2), (4, 2), (3, 1)]
LENGTHS = [(6, 6), (3, 7), (1, 5), (6, 4)]
SIZES = [8, 16, 24]
GEOMETRIES = [
    Geometry(2, h, g, t, s, SIZES[(i + j) % 3])
    for i, (h, g) in enumerate(HEADS)
    for j, (t, s) in enumerate(LENGTHS)
]

MASKS = [
    "full",
    "causal",
    "padding_left",
    "padding_right",
    "additive",
    "additive_causal_per_head",
    "bool_per_head",
]
MASKS += ["empty_rows", "own_positions", "packed"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of `qkeel.attention`; masks and positions as its caller passes them."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    params: dict[str, Tensor]
    causal: bool = True
    mask: Tensor | None = None
    pos_q: Tensor | None = None
    pos_k: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `qkeel.attention` and `reference.attend` take besides q, k, v and the spec."""
        return {
            name: getattr(self, name)
            for name in ("params", "causal", "mask", "pos_q", "pos_k")
        }

    def attention(self, impl: str = "auto", **options: Any) -> Any:
        """What the library returns."""
        return attention(
            self.q,
            self.k,
            self.v,
            spec=self.spec,
            impl=impl,
            **self.arguments,
            **options,
        )

    def attended(self) -> reference.Attended:
        """What the reference returns."""
        return reference.attend(self.spec, self.q, self.k, self.v, **self.arguments)

    def encoded(self) -> tuple[Tensor, Tensor]:
        """q and k as they enter the dot product."""
        return self.spec.encode(self.q, self.k, *positions(self), self.params)


def positions(call: Any) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys; by default those of the keys are 0 .. s-1, and queries end where keys end."""
    t, s = call.q.shape[2], call.k.shape[2]
    pos_q = torch.arange(s - t, s)[None] if call.pos_q is None else call.pos_q
    return pos_q, torch.arange(s)[None] if call.pos_k is None else call.pos_k


def masking(
    kind: str, x: Geometry, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Any]:
    """causal, mask, pos_q, pos_k of one kind of masking."""
    pad = torch.tensor([0, x.s // 2])[:, None]
    keys = torch.arange(x.s)[None]
    if kind == "full":
        return {"causal": False}
    if kind == "causal":
        return {"causal": True}
    if kind == "padding_left":
        return {"causal": True, "mask": (keys >= pad)[:, None, None, :]}
    if kind == "padding_right":
        return {"causal": False, "mask": (keys < x.s - pad)[:, None, None, :]}
    if kind == "additive":
        bias = torch.randn(1, 1, x.t, x.s, generator=rng).masked_fill(
            torch.rand(1, 1, x.t, x.s, generator=rng) < 0.2, -torch.inf
        )
        return {"causal": False, "mask": bias.to(dtype)}
    if kind == "additive_causal_per_head":
        return {
            "causal": True,
            "mask": torch.randn(1, x.h, 1, x.s, generator=rng).to(dtype),
        }
    if kind == "bool_per_head":
        return {
            "causal": False,
            "mask": torch.rand(x.b, x.h, x.t, x.s, generator=rng) < 0.6,
        }
    if kind == "empty_rows":
        seen = torch.rand(x.b, 1, x.t, x.s, generator=rng) < 0.7
        seen[0, :, -1] = False
        return {"causal": False, "mask": seen}
    if kind == "own_positions":
        pos = (keys - pad).clamp_min(0)
        queries = (
            pos[:, -x.t :] if x.t <= x.s else torch.arange(x.t)[None].expand(x.b, -1)
        )
        return {
            "causal": True,
            "mask": (keys >= pad)[:, None, None, :],
            "pos_q": queries,
            "pos_k": pos,
        }
    assert kind == "packed"
    cut = x.s // 2
    document, pos = (
        (torch.arange(x.s) >= cut).long(),
        torch.arange(x.s) - cut * (torch.arange(x.s) >= cut),
    )
    take = torch.arange(x.t) % x.s if x.t > x.s else torch.arange(x.s - x.t, x.s)
    same = document[take][:, None] == document[None]
    return {"causal": True, "mask": same, "pos_q": pos[take][None], "pos_k": pos[None]}


def tensors(
    x: Geometry, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v; logits of a few nats."""
    q = 1.5 * torch.randn(x.b, x.h, x.t, x.d, generator=rng)
    k, v = (torch.randn(x.b, x.g, x.s, x.d, generator=rng) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def random_params(
    spec: AttentionSpec, x: Geometry, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Tensor]:
    """The spec's parameters, moved off their initial values so that leaving one out shows."""
    made = spec.init_params(x.h, x.g, x.d)
    return {
        n: (p + 0.3 * p.abs().clamp_min(0.3) * torch.randn(p.shape, generator=rng)).to(
            dtype
        )
        for n, p in made.items()
    }


def fits(spec: AttentionSpec, x: Geometry) -> bool:
    """Whether the spec exists for that geometry (a gain shared by q and k needs as many keys as queries)."""
    try:
        spec.init_params(x.h, x.g, x.d)
    except InvalidValueError:
        return False
    return True


def pairs(geometries: list[Geometry], masks: list[str]) -> list[tuple[Geometry, str]]:
    """Half of the product, in which every kind of heads and every kind of lengths still meets every mask."""
    found = []
    for x in geometries:
        heads, lengths = HEADS.index((x.h, x.g)), LENGTHS.index((x.t, x.s))
        found += [
            (x, kind)
            for kind in masks
            if (heads + lengths + MASKS.index(kind)) % 2 == 0
        ]
    return found


def calls(
    spec: AttentionSpec,
    dtype: torch.dtype,
    where: list[tuple[Geometry, str]],
    seed: int = 0,
) -> Iterator[tuple[str, Call]]:
    """The calls of a spec, each with its name for the message of a failed assertion."""
    rng = torch.Generator().manual_seed(seed)
    for x, kind in where:
        if fits(spec, x):
            q, k, v = tensors(x, dtype, rng)
            params = random_params(spec, x, dtype, rng)
            visibility = masking(kind, x, dtype, rng)
            # `qkeel.attention` refuses more causal queries than keys without positions.
            if x.t > x.s and "pos_q" not in visibility:
                visibility["causal"] = False
            yield (
                f"{x} {kind}",
                Call(spec=spec, q=q, k=k, v=v, params=params, **visibility),
            )


CallT = TypeVar(
    "CallT", bound=Any
)  # a Call, or whatever dataclass a test of the kernels has in its place


def widened(call: CallT) -> CallT:
    """The same call in float64; what an additive mask hides with the lowest number of its dtype stays hidden."""
    mask = call.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.double().masked_fill(
            mask <= torch.finfo(mask.dtype).min, -torch.inf
        )
    params = {name: p.double() for name, p in call.params.items()}
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    return dataclasses.replace(call, q=q, k=k, v=v, params=params, mask=mask)


def truth_of(call: Call) -> reference.Attended:
    """The oracle's answer in float64."""
    return widened(call).attended()


# Sampled where the product would take minutes: every kind of heads and of lengths once.
SOME = pairs([GEOMETRIES[i] for i in (0, 5, 10, 7)], MASKS)


def share(name: str, parts: int, shift: int = 0) -> list[tuple[Geometry, str]]:
    """One part of SOME, another for the next spec: together the specs walk all of it several times."""
    return SOME[(list(SPECS).index(name) + shift) % parts :: parts]
