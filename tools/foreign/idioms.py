"""Attention in the idioms of the literature: ways of scoring × of normalising × of combining × orders of dimensions,
attentions of a shape of their own, and what looks alike and is none.

python -m tools.foreign.idioms [--cases 500] [--first 0]

Nobody lists here what qkeel can follow: an idiom is right if its numbers are, reported if qkeel says so, and wrong if
it vanishes without a word. Every scoring and every normaliser has a second, plain definition, which is the reference.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from tools.foreign.checks import QUESTIONS, judged, overall
from tools.foreign.reference import Call, Example
from tools.foreign.work import MODEL, Finding, Subject, Verdict

HEADS, SIZE, WIDTH = 4, 4, 16
OFTEN = (
    "sites",
    "heads",
    "statistics",
    "rows",
)  # what is asked of all; the rest, of which remedies, of every tenth
INF = float("inf")
ORDERS = ("bhts", "bths", "bhst", "hbts", "tsbh", "btsh", "stbh", "bsth", "tbhs")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed(Call):
    """A call whose weights are not the softmax of its logits: the weights w [b h t s] as they were. With a `sink` the
    share that they lack of one is its weight."""

    weights: Tensor
    sink: bool = False

    def entropy(self) -> Tensor:
        """Mean over rows that see a key of -Σ w ln w, by head, of weights over their sum (docs/metrics.md)."""
        w = self.weights.clamp_min(0.0)
        w = torch.cat([w, 1 - w.sum(-1, keepdim=True)], -1) if self.sink else w
        w = w / w.sum(-1, keepdim=True).clamp_min(1e-12)
        rows, seen = (
            -torch.special.xlogy(w, w).sum(-1),
            self.visible.any(-1).expand(self.z.shape[:3]),
        )
        return (rows * seen).sum((0, 2)) / seen.sum((0, 2)).clamp_min(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a scoring starts from: x [b t c], q and k [b h t d], the idiom's own parameters, the order of the scores."""

    x: Tensor
    q: Tensor
    k: Tensor
    own: Mapping[str, Tensor]
    order: str

    def turned(self, z: Tensor) -> Tensor:
        """Scores [b h t s] in the order asked for."""
        return z.permute(["bhts".index(letter) for letter in self.order])

    def pairs(self) -> tuple[Tensor, Tensor]:
        """q and k with a dimension for each letter of the order, and d: what broadcasts to one number a pair."""
        return _spread(self.q, "bhtd", self.order), _spread(self.k, "bhsd", self.order)

    def per_head(self, p: Tensor) -> Tensor:
        """A parameter [h d] that broadcasts against `pairs`."""
        return _spread(p, "hd", self.order)


def _spread(x: Tensor, have: str, order: str) -> Tensor:
    x = x.permute([have.index(letter) for letter in order + "d" if letter in have])
    for place, letter in enumerate(order):
        x = x if letter in have else x.unsqueeze(place)
    return x


# --- ways of scoring: how the idiom does it, and what it is, [b h t s]


def _cosine(i: Inputs) -> Tensor:
    q, k = i.pairs()
    return 4 * F.cosine_similarity(q, k, dim=-1)


def _inner(i: Inputs) -> Tensor:
    return (
        i.turned(
            torch.stack(
                [
                    torch.stack([torch.inner(a, b) for a, b in zip(*two)])
                    for two in zip(i.q, i.k)
                ]
            )
        )
        / 2
    )


def _complex(i: Inputs) -> Tensor:
    q, k = (
        torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) for y in (i.q, i.k)
    )
    return i.turned(torch.einsum("bhtd,bhsd->bhts", q, k.conj()).real) / 2


def _split(i: Inputs) -> Tensor:
    """GAT: one number of the query, one of the key, added."""
    a, c = (
        torch.einsum("bhtd,hd->bht", y, i.own[name])
        for y, name in ((i.q, "a"), (i.k, "c"))
    )
    return i.turned(F.leaky_relu(a[..., None] + c[:, :, None], 0.2))


def _synthesized(i: Inputs) -> Tensor:
    """The dense synthesizer: a row of scores from its own token alone."""
    t = i.x.shape[1]
    hidden = torch.einsum("btc,hcd->bhtd", i.x, i.own["first"]).relu()
    return i.turned(hidden @ i.own["second"][..., :t])


def _shifted(i: Inputs) -> Tensor:
    """q·k + q·r of the distance, by the shift of Transformer-XL."""
    b, h, t, _ = i.q.shape
    far = torch.einsum("bhtd,rd->bhtr", i.q, i.own["distances"][: 2 * t - 1])
    far = (
        F.pad(far, (1, 0))
        .view(b, h, 2 * t, t)[:, :, 1:]
        .reshape(b, h, t, 2 * t - 1)[..., :t]
    )
    return i.turned((i.q @ i.k.mT + far) / 2)


def _shift_exact(i: Inputs) -> Tensor:
    t = i.q.shape[2]
    place = t - 1 - torch.arange(t)[:, None] + torch.arange(t)
    return (
        i.q @ i.k.mT + torch.einsum("bhtd,tsd->bhts", i.q, i.own["distances"][place])
    ) / 2


def _looped(i: Inputs) -> Tensor:
    """One score at a time, for all queries: a column for each key."""
    return i.turned(
        torch.stack(
            [(i.q * i.k[:, :, s : s + 1]).sum(-1) / 2 for s in range(i.k.shape[2])], -1
        )
    )


def _named(i: Inputs) -> Tensor:
    return torch.einsum(f"bhtd,bhsd->{i.order}", i.q, i.k) / 2


def _summed(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Inputs], Tensor]:
    def score(i: Inputs) -> Tensor:
        return change(*i.pairs()).sum(-1)

    return score


def _turned(of: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda i: i.turned(of(i))


def _apart(i: Inputs) -> Tensor:
    return i.q[:, :, :, None] - i.k[:, :, None]


Scoring = tuple[
    Callable[[Inputs], Tensor],
    Callable[[Inputs], Tensor],
    Mapping[str, tuple[int, ...]],
]
_DOT = lambda i: torch.einsum("bhtd,bhsd->bhts", i.q, i.k) / 2  # noqa: E731
_PAIR = {"a": (HEADS, SIZE), "c": (HEADS, SIZE)}

SCORING: Mapping[str, Scoring] = {
    "matmul": (_turned(lambda i: i.q @ i.k.mT / 2), _DOT, {}),
    "einsum": (_named, _DOT, {}),
    "turned": (_turned(lambda i: (i.k @ i.q.mT / 2).mT), _DOT, {}),
    "product and sum": (_summed(lambda q, k: q * k / 2), _DOT, {}),
    "inner": (_inner, _DOT, {}),
    "columns": (_looped, _DOT, {}),
    "complex": (_complex, _DOT, {}),
    "cosine": (
        _cosine,
        lambda i: 4 * F.normalize(i.q, dim=-1) @ F.normalize(i.k, dim=-1).mT,
        {},
    ),
    "distance": (
        _turned(lambda i: -torch.cdist(i.q, i.k)),
        lambda i: -_apart(i).pow(2).sum(-1).sqrt(),
        {},
    ),
    "squared distance": (
        _summed(lambda q, k: -(q - k).square() / 4),
        lambda i: -_apart(i).pow(2).sum(-1) / 4,
        {},
    ),
    "additive": (
        lambda i: (torch.tanh(sum(i.pairs())) * i.per_head(i.own["a"])).sum(-1),  # type: ignore[call-overload]
        lambda i: torch.einsum(
            "bhtsd,hd->bhts", (i.q[:, :, :, None] + i.k[:, :, None]).tanh(), i.own["a"]
        ),
        {"a": (HEADS, SIZE)},
    ),
    "graph": (
        _split,
        lambda i: F.leaky_relu(
            (i.q * i.own["a"][:, None]).sum(-1)[..., None]
            + (i.k * i.own["c"][:, None]).sum(-1)[:, :, None],
            0.2,
        ),
        _PAIR,
    ),
    "bilinear": (
        lambda i: torch.einsum(f"btc,hce,bse->{i.order}", i.x, i.own["form"], i.x) / 4,
        lambda i: (i.x[:, None] @ i.own["form"]) @ i.x[:, None].mT / 4,
        {"form": (HEADS, WIDTH, WIDTH)},
    ),
    "a parameter asks": (
        _turned(lambda i: i.own["asks"] @ i.k.mT),
        lambda i: torch.einsum("htd,bhsd->bhts", i.own["asks"][:, : i.q.shape[2]], i.k),
        {"asks": (HEADS, 7, SIZE)},
    ),
    "synthesized": (
        _synthesized,
        lambda i: ((i.x[:, None] @ i.own["first"]).clamp_min(0) @ i.own["second"])[
            ..., : i.x.shape[1]
        ],
        {"first": (HEADS, WIDTH, SIZE), "second": (HEADS, SIZE, 7)},
    ),
    "key alone": (
        _turned(
            lambda i: torch.einsum("bhsd,hd->bhs", i.k, i.own["a"])[:, :, None].expand(
                -1, -1, i.q.shape[2], -1
            )
        ),
        lambda i: (i.k @ i.own["a"][..., None]).mT.expand(-1, -1, i.q.shape[2], -1),
        {"a": (HEADS, SIZE)},
    ),
    "pointer": (
        _turned(lambda i: 3 * torch.tanh(i.q @ i.k.mT / 2)),
        lambda i: 3 * _DOT(i).tanh(),
        {},
    ),
    "distances of position": (_shifted, _shift_exact, {"distances": (13, SIZE)}),
}


# --- ways of normalising: from scores and the visible pairs, over the keys' dimension, and what it is for [b h t s]

Normal = tuple[
    Callable[[Tensor, Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]
]


def _hidden(z: Tensor, visible: Tensor) -> Tensor:
    return z.masked_fill(~visible, -INF)


def _share(x: Tensor, dim: int) -> Tensor:
    return x / (x.sum(dim, keepdim=True) + 1e-9)


def _softmax(z: Tensor, visible: Tensor) -> Tensor:
    e = visible * (z - _hidden(z, visible).amax(-1, keepdim=True)).clamp_max(0).exp()
    return e / e.sum(-1, keepdim=True)


def _exponentials(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = _hidden(z, visible)
    e = (z - z.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _times_mask(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    e = (z - z.amax(dim, keepdim=True)).exp() * visible.to(z.dtype)
    return e / e.sum(dim, keepdim=True)


def _exp2(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = _hidden(z * 1.4426950408889634, visible)
    e = torch.exp2(z - z.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def _logsumexp(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = _hidden(z, visible)
    return (z - z.logsumexp(dim, keepdim=True)).exp()


def _plus_one(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = _hidden(z, visible)
    m = z.amax(dim, keepdim=True).clamp_min(0)
    e = (z - m).exp()
    return e / ((-m).exp() + e.sum(dim, keepdim=True))


def _null_key(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = _hidden(z, visible)
    w = torch.cat([torch.zeros_like(z.narrow(dim, 0, 1)), z], dim).softmax(dim)
    return w.narrow(dim, 1, z.shape[dim])


def _sparsemax(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    z = z.masked_fill(~visible, -1e4).movedim(dim, -1)
    order = z.sort(-1, descending=True).values
    n = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    support = (1 + n * order > order.cumsum(-1)).sum(-1, keepdim=True)
    tau = (order.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (z - tau).clamp_min(0).movedim(-1, dim)


def _sinkhorn(z: Tensor, visible: Tensor, keys: int, queries: int) -> Tensor:
    e = z.exp() * visible
    for _ in range(3):
        e = e / (e.sum(queries, keepdim=True) + 1e-9)
        e = e / (e.sum(keys, keepdim=True) + 1e-9)
    return e


def _edges(z: Tensor, visible: Tensor, dim: int) -> Tensor:
    """An edge list, as in graphs: exponentials are added up at their query by an index."""
    z, seen = z.movedim(dim, -1), visible.movedim(dim, -1).expand_as(z.movedim(dim, -1))
    rows, keys = seen.flatten(0, -2).nonzero().T
    e = z.flatten(0, -2)[rows, keys].exp()
    total = torch.zeros(z.shape[:-1].numel(), dtype=z.dtype).index_add(0, rows, e)
    w = torch.zeros_like(z.flatten(0, -2)).index_put((rows, keys), e / total[rows])
    return w.view_as(z).movedim(-1, dim)


def _simple(shape: Callable[[Tensor], Tensor]) -> Normal:
    return (lambda z, seen, dim: _share(shape(z) * seen, dim)), (
        lambda z, seen: _share(shape(z) * seen, -1)
    )


def _alone(shape: Callable[[Tensor], Tensor]) -> Normal:
    return (lambda z, seen, dim: shape(z) * seen), (lambda z, seen: shape(z) * seen)


NORMAL: Mapping[str, Normal] = {
    "softmax": (lambda z, seen, dim: torch.softmax(_hidden(z, seen), dim), _softmax),
    "method": (lambda z, seen, dim: _hidden(z, seen).softmax(dim), _softmax),
    "module": (lambda z, seen, dim: nn.Softmax(dim)(_hidden(z, seen)), _softmax),
    "float32": (
        lambda z, seen, dim: F.softmax(_hidden(z, seen), dim, dtype=torch.float32).to(
            z.dtype
        ),
        _softmax,
    ),
    "log softmax": (
        lambda z, seen, dim: _hidden(z, seen).log_softmax(dim).exp(),
        _softmax,
    ),
    "logsumexp": (_logsumexp, _softmax),
    "exponentials": (_exponentials, _softmax),
    "exponentials times mask": (_times_mask, _softmax),
    "exp2": (_exp2, _softmax),
    "edge list": (_edges, _softmax),
    "softmax plus one": (
        _plus_one,
        lambda z, seen: (seen * z.exp()) / (1 + (seen * z.exp()).sum(-1, keepdim=True)),
    ),
    "null key": (
        _null_key,
        lambda z, seen: (seen * z.exp()) / (1 + (seen * z.exp()).sum(-1, keepdim=True)),
    ),
    "sparsemax": (_sparsemax, lambda z, seen: _sparsemax(z, seen, -1)),
    "sigmoid": _alone(lambda z: torch.sigmoid(z - 1.6)),
    "sigmoid over sum": _simple(torch.sigmoid),
    "relu over sum": _simple(torch.relu),
    "relu over length": _alone(lambda z: torch.relu(z) / z.shape[-1]),
    "squared relu": _alone(lambda z: torch.relu(z).square() / z.shape[-1]),
}
SINKS = {
    "null key",
    "softmax plus one",
}  # what weights lack of one is the weight of a logit without a value
TWO_SIDED = {"sinkhorn": 2, "dual softmax": 1}  # normalised over queries too


def _two_sided(kind: str, z: Tensor, seen: Tensor, keys: int, queries: int) -> Tensor:
    if kind == "sinkhorn":
        return _sinkhorn(z, seen, keys, queries)
    return _hidden(z, seen).softmax(keys) * _hidden(z, seen).softmax(queries)


# --- ways of combining: from weights in their order, and v [b h s d], to [b h t d]


def _straight(w: Tensor, order: str) -> Tensor:
    return w.permute([order.index(letter) for letter in "bhts"])


def _sum(w: Tensor, v: Tensor, order: str) -> Tensor:
    y = (w[..., None] * _spread(v, "bhsd", order)).sum(order.index("s"))
    rest = order.replace("s", "") + "d"
    return y.permute([rest.index(letter) for letter in "bhtd"])


def _merged(w: Tensor, v: Tensor, order: str) -> Tensor:
    w = _straight(w, order)
    return torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).view(v.shape)


def _by_query(w: Tensor, v: Tensor, order: str) -> Tensor:
    w = _straight(w, order)
    return torch.stack([(w[:, :, t, :, None] * v).sum(2) for t in range(w.shape[2])], 2)


def _linear(w: Tensor, v: Tensor, order: str) -> Tensor:
    w = _straight(w, order)
    return torch.stack(
        [torch.stack([F.linear(a, b.mT) for a, b in zip(*two)]) for two in zip(w, v)]
    )


def _at_edges(w: Tensor, v: Tensor, order: str) -> Tensor:
    w = _straight(w, order)
    t = w.shape[-1]
    i, j = torch.ones(t, t, dtype=torch.bool).nonzero().T
    return torch.zeros_like(v).index_add(2, i, w[:, :, i, j, None] * v[:, :, j])


def _gathered(w: Tensor, v: Tensor, order: str) -> Tensor:
    w = _straight(w, order)
    some, places = w.topk(w.shape[-1] - 1, -1)
    rows = (
        v[:, :, None]
        .expand(*w.shape, SIZE)
        .gather(3, places[..., None].expand(*places.shape, SIZE))
    )
    return (some[..., None] * rows).sum(3)


Combining = Callable[[Tensor, Tensor, str], Tensor]
COMBINING: Mapping[str, Combining] = {
    "matmul": lambda w, v, order: _straight(w, order) @ v,
    "einsum": lambda w, v, order: torch.einsum(f"{order},bhsd->bhtd", w, v),
    "product and sum": _sum,
    "merged": _merged,
    "by query": _by_query,
    "linear": _linear,
    "at edges": _at_edges,
    "gathered": _gathered,
    "dropped": lambda w, v, order: (
        F.dropout(_straight(w, order), 0.3, training=False) @ v
    ),
    "two hops": lambda w, v, order: _straight(w, order) @ (_straight(w, order) @ v),
    "renormalized": lambda w, v, order: _share(_straight(w, order), -1) @ v,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One idiom: the keys of the tables, the order of the scores' dimensions, the mask, and whether heads are one."""

    scoring: str = "matmul"
    normal: str = "softmax"
    combining: str = "matmul"
    order: str = "bhts"
    causal: bool = False
    heads: int = HEADS
    batch: int = 2
    tokens: int = 5

    @classmethod
    def drawn(cls, seed: int) -> Plan:
        """The plan of a seed: mostly one or two parts that are not plain."""
        draw = random.Random(f"idiom {seed}")
        parts = {
            "scoring": SCORING,
            "normal": {**NORMAL, **TWO_SIDED},
            "combining": COMBINING,
        }
        odd = draw.sample([*parts], draw.choice([1, 1, 2, 2, 3]))
        chosen: dict[str, Any] = {
            name: draw.choice([*table]) for name, table in parts.items() if name in odd
        }
        order = draw.choice([ORDERS[0], ORDERS[0], *ORDERS])
        sizes = {"batch": draw.choice([2, 3]), "tokens": draw.choice([5, 6, 7])}
        return cls(
            **chosen,
            **sizes,
            order=order,
            causal=draw.random() < 0.5,
            heads=draw.choice([HEADS, HEADS, 1]),
        )


class Idiom(nn.Module):
    """Attention as planned. `truth` is what the last pass computed, by the plain definitions."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.bend: float | None = None
        self.q, self.k, self.v = (nn.Linear(WIDTH, plan.heads * SIZE) for _ in range(3))
        self.out = nn.Linear(plan.heads * SIZE, WIDTH)
        sizes = SCORING[plan.scoring][2]
        cut = {
            n: (plan.heads, *size[1:]) if n in _BY_HEAD else size
            for n, size in sizes.items()
        }
        self.own = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(size) * 0.5) for name, size in cut.items()}
        )
        self.truth: list[Call] = []
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        plan = self.plan
        q, k, v = (
            m(x).unflatten(-1, (plan.heads, SIZE)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        own = {n: p[:, : x.shape[1]] if n == "asks" else p for n, p in self.own.items()}
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)[None, None]
        visible = visible.tril() if plan.causal else visible
        if self.asked:  # qkeel is not to see it: it is attention too
            self.truth = self.exact(x, q, k, own, visible)
        given = Inputs(x=x, q=q, k=k, own=own, order=plan.order)
        z = SCORING[plan.scoring][0](given)
        z = z if self.bend is None else self.bend * torch.tanh(z / self.bend)
        seen, keys, queries = (
            given.turned(visible),
            plan.order.index("s"),
            plan.order.index("t"),
        )
        if plan.normal in TWO_SIDED:
            w = _two_sided(plan.normal, z, seen, keys, queries)
        else:
            w = NORMAL[plan.normal][0](z, seen, keys)
        y = COMBINING[plan.combining](w, v, plan.order)
        return self.out(y.transpose(1, 2).flatten(2))

    def exact(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        own: Mapping[str, Tensor],
        visible: Tensor,
    ) -> list[Call]:
        """Logits and weights by the plain definitions, in float64 and from numbers that nothing is noted about."""
        with torch.no_grad():
            x, q, k = (_copy(y) for y in (x, q, k))
            z = SCORING[self.plan.scoring][1](
                Inputs(
                    x=x,
                    q=q,
                    k=k,
                    own={n: _copy(p) for n, p in own.items()},
                    order="bhts",
                )
            )
            seen = visible.expand_as(z)
            before = 3 * torch.atanh(z / 3) if self.plan.scoring == "pointer" else z
            if self.plan.normal == "dual softmax":  # two attentions over one table
                both = (z, before, seen), tuple(x.mT for x in (z, before, seen))
                return [
                    Call(module="odd", z=b, capped=c, visible=v) for c, b, v in both
                ]
            if self.plan.normal in TWO_SIDED:
                w = _two_sided(self.plan.normal, z, seen, 3, 2)
            else:
                w = NORMAL[self.plan.normal][1](z, seen)
        return [
            Weighed(
                module="odd",
                z=before,
                capped=z,
                visible=seen,
                weights=w,
                sink=self.plan.normal in SINKS,
            )
        ]


_BY_HEAD = ("a", "c", "form", "asks", "first", "second")


def _copy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().double().numpy().copy())


class Plain(nn.Module):
    """Attention that is understood, beside the odd one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.bend: float | None = None
        self.truth: list[Call] = []
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        if self.asked:
            exact = _copy(q) @ _copy(k).mT / 2
            seen = torch.ones_like(exact, dtype=torch.bool)
            self.truth = [Call(module="plain", z=exact, capped=exact, visible=seen)]
        z = q @ k.mT / 2
        z = z if self.bend is None else self.bend * torch.tanh(z / self.bend)
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """x + odd(x), then the same with an attention that is understood."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd, self.plain = odd, Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.odd(x)
        return x + self.plain(x)


# --- attentions of a shape of their own: x [b t c] and parameters; each has to be a site or reported

Own = Mapping[str, Tensor]
Special = tuple[Callable[[Tensor, Own], Tensor], Mapping[str, tuple[int, ...]]]
_QKV = {"q": (WIDTH, 16), "k": (WIDTH, 16), "v": (WIDTH, 16)}


def _qkv(x: Tensor, p: Own, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = ((x @ p[n]).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    return q, k, v


def _joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def _windows(x: Tensor, p: Own) -> Tensor:
    q, k, v = _qkv(x, p)
    k, v = (F.pad(y, (0, 0, 1, 1)).unfold(2, 3, 1) for y in (k, v))  # [b h t d 3]
    w = torch.einsum("bhtd,bhtdw->bhtw", q, k).softmax(-1)
    return _joined(torch.einsum("bhtw,bhtdw->bhtd", w, v))


def _local(x: Tensor, p: Own) -> Tensor:
    q, k, v = _qkv(x, p)
    w = torch.stack([(q * k.roll(n, 2)).sum(-1) / 2 for n in range(3)], -1).softmax(-1)
    return _joined(sum(w[..., n : n + 1] * v.roll(n, 2) for n in range(3)))  # type: ignore[arg-type]


def _graph(x: Tensor, p: Own) -> Tensor:
    """GAT on an edge list, nodes of the whole batch in one row."""
    y = (x.flatten(0, 1) @ p["v"]).unflatten(-1, (HEADS, -1))
    n = len(y)
    i = torch.arange(n).repeat_interleave(3)
    j = (i + torch.tensor([0, 1, 4]).repeat(n)) % n
    score = F.leaky_relu((y * p["a"]).sum(-1)[i] + (y * p["c"]).sum(-1)[j], 0.2)
    top = torch.full((n, HEADS), -INF, dtype=x.dtype).index_reduce(
        0, i, score.detach(), "amax"
    )
    e = (score - top[i]).exp()
    w = e / torch.zeros(n, HEADS, dtype=x.dtype).index_add(0, i, e)[i]
    return (
        torch.zeros_like(y).index_add(0, i, w[..., None] * y[j]).flatten(1).view_as(x)
    )


def _pooled(x: Tensor, p: Own) -> Tensor:
    w = (torch.tanh(x @ p["q"]) @ p["u"]).softmax(1)  # [b t 1]
    return (w * (x @ p["v"])).sum(1, keepdim=True).expand_as(x)


def _gated_pool(x: Tensor, p: Own) -> Tensor:
    """Multiple instances: gated scores of each, softmax over the bag."""
    a = (torch.tanh(x @ p["q"]) * torch.sigmoid(x @ p["k"])) @ p["u"]
    return (F.softmax(a.mT, -1) @ (x @ p["v"])).expand_as(x)


def _context(x: Tensor, p: Own) -> Tensor:
    """Global context: one softmax over positions for all."""
    return x + (torch.softmax(x @ p["u"], 1).mT @ x) @ p["v"]


def _online(x: Tensor, p: Own) -> Tensor:
    """Key blocks under a running maximum."""
    q, k, v = _qkv(x, p)
    top = torch.full_like(q[..., :1], -INF)
    total, y = torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    for kb, vb in zip(k.split(2, 2), v.split(2, 2)):
        z = q @ kb.mT / 2
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        e, keep = (z - new).exp(), (top - new).exp()
        total, y, top = total * keep + e.sum(-1, keepdim=True), y * keep + e @ vb, new
    return _joined(y / total)


def _slots(x: Tensor, p: Own) -> Tensor:
    """Slot attention: softmax over slots, then each slot's share over inputs."""
    slots = p["slots"].expand(x.shape[0], -1, -1)
    w = (
        torch.einsum("btc,bnc->btn", x @ p["k"], slots @ p["q"]).div(4).softmax(-1)
        + 1e-8
    )
    slots = (w / w.sum(1, keepdim=True)).mT @ (x @ p["v"])
    return x + slots.mean(1, keepdim=True)


def _covariance(x: Tensor, p: Own) -> Tensor:
    """XCiT: channels attend to channels."""
    q, k, v = (y.mT for y in _qkv(x, p))
    w = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 3).softmax(-1)
    return _joined((w @ v).mT)


def _latents(x: Tensor, p: Own) -> Tensor:
    """Induced points: latents attend to tokens, tokens attend to those."""
    k, v = x @ p["k"], x @ p["v"]
    h = (p["slots"] @ k.mT / 4).softmax(-1) @ v
    return ((x @ p["q"]) @ h.mT / 4).softmax(-1) @ h


def _decoder(x: Tensor, p: Own) -> Tensor:
    """Bahdanau: at each step the state asks all inputs."""
    h, out = x.new_zeros(len(x), WIDTH), []
    for t in range(x.shape[1]):
        e = torch.tanh((h @ p["q"])[:, None] + x @ p["k"]) @ p["u"]  # [b t 1]
        context = (e.softmax(1) * x).sum(1)
        h = torch.tanh(context @ p["v"] + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def _mixed_scores(x: Tensor, p: Own) -> Tensor:
    """Scores through a network of two layers over heads before the softmax, and heads mixed after."""
    q, k, v = _qkv(x, p)
    z = torch.einsum(
        "bhts,hg->bgts",
        F.gelu(torch.einsum("bhts,hg->bgts", q @ k.mT / 2, p["mix"])),
        p["mix"],
    )
    return _joined(torch.einsum("bhts,hg->bgts", z.softmax(-1), p["mix"]) @ v)


def _differential(x: Tensor, p: Own) -> Tensor:
    q, k, v = _qkv(x, p)
    one, two = (
        torch.softmax(a @ b.mT, -1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1))
    )
    return _joined((one - 0.3 * two) @ v)


_U: Mapping[str, tuple[int, ...]] = {"u": (WIDTH, 1)}


def _hstu(x: Tensor, p: Own) -> Tensor:
    """HSTU: SiLU of scores over the length, and gates."""
    q, k, v = _qkv(x, p)
    w = (
        F.silu(q @ k.mT / 2)
        * torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        / x.shape[1]
    )
    return _joined(w @ v) * F.silu(x @ p["q"])


def _nearest_first(x: Tensor, p: Own) -> Tensor:
    """Stick-breaking from the query backwards, by products of what is left."""
    q, k, v = _qkv(x, p)
    taken = (
        torch.sigmoid(q @ k.mT / 2)
        * torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    )
    left = (1 - taken + 1e-9).log().flip(-1).cumsum(-1).flip(-1)
    return _joined((taken * F.pad(left[..., 1:], (0, 1)).exp()) @ v)


def _chosen(x: Tensor, p: Own) -> Tensor:
    """The weights of the two best keys, divided by their sum."""
    q, k, v = _qkv(x, p)
    w, places = (-torch.cdist(q, k)).softmax(-1).topk(2, -1)
    w = w / w.sum(-1, keepdim=True)
    rows = (
        v[:, :, None]
        .expand(-1, -1, x.shape[1], -1, -1)
        .gather(3, places[..., None].expand(*places.shape, 4))
    )
    return _joined((w[..., None] * rows).sum(3))


SPECIAL: Mapping[str, Special] = {
    "hstu": (_hstu, _QKV),
    "nearest first": (_nearest_first, _QKV),
    "chosen": (_chosen, _QKV),
    "windows": (_windows, _QKV),
    "local": (_local, _QKV),
    "graph": (_graph, {"v": (WIDTH, 16), "a": (HEADS, 4), "c": (HEADS, 4)}),
    "pooled": (_pooled, {**_QKV, **_U}),
    "gated pool": (_gated_pool, {**_QKV, **_U}),
    "context": (_context, {"v": (WIDTH, 16), **_U}),
    "online": (_online, _QKV),
    "slots": (_slots, {**_QKV, "slots": (3, WIDTH)}),
    "covariance": (_covariance, _QKV),
    "latents": (_latents, {**_QKV, "slots": (3, WIDTH)}),
    "decoder": (_decoder, {**_QKV, **_U}),
    "mixed scores": (_mixed_scores, {**_QKV, "mix": (HEADS, HEADS)}),
    "differential": (_differential, _QKV),
}


# --- what looks alike and is no attention: no site and no entry of missed


def _router(x: Tensor, p: Own) -> Tensor:
    w = (x @ p["six"]).softmax(-1)
    experts = torch.einsum("btc,ecd->betd", x, p["experts"]).relu()
    return torch.einsum("bte,betd->btd", w, experts)


def _top_experts(x: Tensor, p: Own) -> Tensor:
    """Tokens are collected by expert, and what it says is added at their place."""
    flat = x.flatten(0, 1)
    w, chosen = (flat @ p["six"]).softmax(-1).topk(2, -1)
    w = w / w.sum(-1, keepdim=True)
    y = torch.zeros_like(flat)
    for e in range(6):
        token, rank = (chosen == e).nonzero(as_tuple=True)
        y = y.index_add(
            0, token, (flat[token] @ p["experts"][e]).relu() * w[token, rank, None]
        )
    return y.view_as(x)


def _classifier(x: Tensor, p: Own) -> Tensor:
    return torch.softmax(x.mean(1) @ p["six"], -1)[:, None, :1].expand_as(x)


def _loss(x: Tensor, p: Own) -> Tensor:
    target = torch.arange(x.shape[1]).expand(x.shape[:2]) % 6
    return x + F.cross_entropy((x @ p["six"]).flatten(0, 1), target.flatten())


def _over_time(x: Tensor, p: Own) -> Tensor:
    """A loss of audio: a softmax over time against where the sound is."""
    w = (x @ p["u"]).softmax(1)
    target = torch.zeros_like(w).index_fill(1, torch.tensor([1]), 1.0)
    return x + (w - target).square().mean()


def _contrastive(x: Tensor, p: Own) -> Tensor:
    a, b = (F.normalize((x @ p[n]).mean(1), dim=-1) for n in "qk")
    z = a @ b.T * 10
    logs = z.log_softmax(-1) + z.log_softmax(0)
    return x - logs.diagonal().mean()


def _entropy_bonus(x: Tensor, p: Own) -> Tensor:
    w = (x @ p["six"]).softmax(-1)
    return x + (w * w.log()).sum(-1, keepdim=True)


def _gate(x: Tensor, p: Own) -> Tensor:
    return torch.sigmoid(x @ p["q"]) * (x @ p["v"])


def _squeeze(x: Tensor, p: Own) -> Tensor:
    """Squeeze and excite: channels are scaled by a function of their mean over positions."""
    return x * torch.sigmoid((x.mean(1, keepdim=True) @ p["q"]).relu() @ p["k"])


def _recurrent(x: Tensor, p: Own) -> Tensor:
    h, out = x.new_zeros(len(x), WIDTH), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(x[:, t] @ p["q"] + h @ p["k"])
        h = (1 - z) * h + z * torch.tanh(x[:, t] @ p["v"])
        out.append(h)
    return torch.stack(out, 1)


def _written(x: Tensor, p: Own) -> Tensor:
    """Linear attention: what each token writes has a gate of its own for each head."""
    q, k, v = _qkv(x, p)
    gate = torch.sigmoid(x @ p["u"])[:, None]
    return _joined(q @ ((gate * k).mT @ v))


def _linear_attention(x: Tensor, p: Own) -> Tensor:
    """Linear attention with as many features as the example has tokens, over the sum of its weights."""
    v = (x @ p["v"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    q, k = (
        F.elu((x @ p[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2)) + 1
        for n in ("five", "fifth")
    )
    return _joined(q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT))


def _scalar_gates(x: Tensor, p: Own) -> Tensor:
    """A recurrent memory with one gate for what is kept, and one for what is written."""
    gates, h, out = torch.sigmoid(x @ p["q"][:, :2]), x.new_zeros(len(x), WIDTH), []
    for t in range(x.shape[1]):
        h = gates[:, t, :1] * h + gates[:, t, 1:] * (x[:, t] @ p["v"])
        out.append(h)
    return torch.stack(out, 1)


def _gated_convolution(x: Tensor, p: Own) -> Tensor:
    """A gate of each place, by its neighbours, before a convolution."""
    gated = (
        x
        * torch.sigmoid(F.conv1d(x.mean(-1)[:, None], p["kernel"][:, :1], padding=1)).mT
    )
    return F.conv1d(gated.mT, p["taps"], padding=1).mT


def _gated_units(x: Tensor, p: Own) -> Tensor:
    return (F.silu(x @ p["q"]) * (x @ p["k"])) @ p["v"].mT + F.gelu(
        x @ p["q"]
    ).square() @ p["v"]


def _state_space(x: Tensor, p: Own) -> Tensor:
    """A selective state space: decays exp(-softplus(Δ)·A) of the token."""
    dt = F.softplus(x @ p["q"])
    decay, h, out = (-dt).exp(), x.new_zeros(len(x), WIDTH), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + dt[:, t] * x[:, t]
        out.append(h * torch.sigmoid(x[:, t] @ p["k"]))
    return torch.stack(out, 1)


def _mixture(x: Tensor, p: Own) -> Tensor:
    """A density of six Gaussians for each token: weights, means and widths of the same token."""
    w, mean, width = (
        (x @ p["six"]).softmax(-1),
        x @ p["other"],
        (x @ p["six"] * 0.3).exp(),
    )
    near = (-(mean - x[..., :1]).square() / width).exp()
    return x + (w * near).sum(-1, keepdim=True).log()


def _streams(x: Tensor, p: Own) -> Tensor:
    """Hyper-connections: residual streams of a token mixed by a table that is normalised both ways."""
    streams = x.unflatten(-1, (4, 4))  # [b t n c]
    e = (x @ p["q"]).unflatten(-1, (4, 4)).exp()
    for _ in range(2):
        e = e / e.sum(-1, keepdim=True)
        e = e / e.sum(-2, keepdim=True)
    return (e @ streams).flatten(2)


_SIX: Mapping[str, tuple[int, ...]] = {
    "six": (WIDTH, 6),
    "experts": (6, WIDTH, WIDTH),
    "other": (WIDTH, 6),
}
LOOKS_ALIKE: Mapping[str, Special] = {
    "router": (_router, _SIX),
    "top experts": (_top_experts, _SIX),
    "classifier": (_classifier, _SIX),
    "cross entropy": (_loss, _SIX),
    "softmax over time in a loss": (_over_time, _U),
    "contrastive": (_contrastive, _QKV),
    "entropy bonus": (_entropy_bonus, _SIX),
    "gate": (_gate, _QKV),
    "squeeze and excite": (_squeeze, _QKV),
    "recurrent": (_recurrent, _QKV),
    "written": (_written, {**_QKV, **_U}),
    "linear attention": (
        _linear_attention,
        {**_QKV, "five": (WIDTH, 5 * HEADS), "fifth": (WIDTH, 5 * HEADS)},
    ),
    "scalar gates": (_scalar_gates, _QKV),
    "gated convolution": (
        _gated_convolution,
        {"kernel": (1, 2, 3), "taps": (WIDTH, WIDTH, 3)},
    ),
    "gated units": (_gated_units, _QKV),
    "state space": (_state_space, _QKV),
    "mixture": (_mixture, _SIX),
    "streams": (_streams, _QKV),
}


class Whole(nn.Module):
    """A special attention, or what looks alike."""

    def __init__(self, special: Special) -> None:
        super().__init__()
        self.run, sizes = special
        self.own = nn.ParameterDict(
            {
                n: nn.Parameter(torch.randn(size) / size[0] ** 0.5)
                for n, size in sizes.items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, dict(self.own.items()))


# --- the verdicts


def _truth(model: nn.Module, example: Example) -> list[Call]:
    parts = [m for m in model.children() if isinstance(m, (Idiom, Plain))]
    for part in parts:
        part.asked = True
    with torch.no_grad():
        model(*example[0])
    for part in parts:
        part.asked = False
    return [call for part in parts for call in part.truth]


def _capped(
    model: nn.Module, example: Example, cap: float, places: set[int]
) -> list[Tensor]:
    parts = [
        m
        for m in (model.get_submodule(name) for name in ("odd", "plain"))
        if isinstance(m, (Idiom, Plain))
    ]
    first = 0
    for part in parts:  # a dual softmax is two calls
        calls = range(first, first := first + max(1, len(part.truth)))
        part.bend = cap if not places.isdisjoint(calls) else None
    try:
        with torch.no_grad():
            return [model(*example[0])]
    finally:
        for part in parts:
            part.bend = None


def subject(odd: nn.Module, batch: int = 2, tokens: int = 5) -> Subject:
    """The odd one beside a plain one, and two inputs."""
    with torch.no_grad():
        for p in odd.parameters():
            p.mul_(1.5)
    x, y = (torch.randn(batch, tokens, WIDTH) for _ in range(2))
    return Subject(
        model=Model(odd),
        example=((x,), {}),
        other=((y,), {}),
        truth=_truth,
        capped=_capped,
    )


def idiom(plan: Plan, seed: int = 0) -> Subject:
    """The attention of a plan."""
    torch.manual_seed(seed)
    return subject(Idiom(plan), plan.batch, plan.tokens)


def silent(odd: nn.Module) -> str:
    """What is wrong about a special attention beside a plain one: neither a site nor reported; "" if nothing is."""
    s = subject(odd)
    sites = qkeel.find_sites(s.model, s.example[0])
    seen = [site.name for site in sites] + [missed.module for missed in sites.missed]
    if not any(name.startswith("odd") for name in seen):
        return "neither a site nor missed"
    return (
        ""
        if any(name == "plain" for name in seen)
        else "the plain attention beside it is lost"
    )


def called_attention(odd: nn.Module) -> str:
    """What looks alike and is taken for attention: by which name; "" if it is not."""
    s = subject(odd)
    sites = qkeel.find_sites(s.model, s.example[0])
    odd_ones = [str(site) for site in sites if site.name.startswith("odd")]
    return "; ".join([*odd_ones, *(str(m) for m in sites.missed)])


def judge(
    plan: Plan, seed: int = 0, questions: Iterable[str] = QUESTIONS
) -> list[Finding]:
    """The findings on an idiom. A call that is no site's has to be reported under its own module, and what is wrong
    about a site whose module is reported is said."""
    s = idiom(plan, seed)
    found = judged(s, questions).found
    sites = qkeel.find_sites(s.model, s.example[0])
    reported = [str(m) for m in sites.missed if m.module.startswith("odd")]
    if not reported and not any(site.name.startswith("odd") for site in sites):
        return [
            *found,
            Finding(
                question="sites",
                verdict="wrong",
                said="neither a site nor missed",
                site=MODEL,
            ),
        ]
    if reported:
        odd = [
            f
            for f in found
            if f.verdict == "wrong" and (f.site or "odd").startswith("odd")
        ]
        said = [
            dataclasses.replace(f, verdict="reported", said=reported[0]) for f in odd
        ]
        found = [*(f for f in found if f not in odd), *said]
    return found


def main() -> None:
    """Judge many cases and print how many are right, reported and wrong, and which are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    sys.exit(1 if "wrong" in run(range(given.first, given.first + given.cases)) else 0)


def run(seeds: Iterable[int]) -> list[Verdict]:
    """The verdicts on the idioms of these seeds, on every special attention, and on everything that looks alike."""
    torch.set_num_threads(1)
    verdicts: list[Verdict] = []
    idioms = set()
    for seed in seeds:
        plan = Plan.drawn(seed)
        idioms.add((plan.scoring, plan.normal, plan.combining))
        found = judge(plan, seed, QUESTIONS if seed % 10 == 0 else OFTEN)
        verdicts.append(overall(found))
        for f in found:
            if f.verdict == "wrong":
                print(
                    f"{seed}: {f.site} {f.question}: {f.said}\n    {plan}", flush=True
                )
    print(
        f"{len(verdicts)} attentions in {len(idioms)} idioms:",
        dict(collections.Counter(verdicts)),
        flush=True,
    )
    for title, table, ask in (
        ("specials", SPECIAL, silent),
        ("look-alikes", LOOKS_ALIKE, called_attention),
    ):
        torch.manual_seed(0)
        wrong = {
            name: said
            for name, special in table.items()
            if (said := ask(Whole(special)))
        }
        print(
            f"{len(table)} {title}: {len(wrong)} wrong",
            *(f"{n}: {said}" for n, said in wrong.items()),
            sep="\n    ",
        )
        verdicts += ["wrong"] * len(wrong) + ["right"] * (len(table) - len(wrong))
    return verdicts


if __name__ == "__main__":
    main()
