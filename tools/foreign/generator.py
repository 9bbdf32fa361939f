"""Attention at random: layouts × groups × products × biases × mixes × caps × masks × softmaxes, from a seed.

python -m tools.foreign.generator [--cases 2000] [--first 0]

Every module computes, besides its output, what its logits are, plainly and in one canonical shape; nothing of qkeel
takes part in that.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import re
import sys
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.foreign.checks import QUESTIONS, judged, overall
from tools.foreign.reference import Call, Example
from tools.foreign.work import MODEL, Finding, Subject, Verdict

HEADS, SIZE, WIDTH = 4, 4, 16
FUSED = ("sdpa",)
INF = float("inf")

# What may be chosen for each part, the plain choice first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "layout": ("linear", "fused", "interleaved", "columns", "functional", "einsum"),
    "groups": ("4", "2", "1", "2 tiled"),
    "norm": ("", "rms", "l2", "flat rms"),
    "rotary": ("", "yes"),
    "product": (
        "matmul",
        "sdpa",
        "bmm",
        "baddbmm",
        "bhtd",
        "bthd",
        "bsht",
        "turned",
        "outer",
    ),
    "scale": ("scores", "query", "both"),
    "second": ("", "product", "in place", "shaw", "keys alone"),
    "bias": ("", "table", "alibi"),
    "mix": ("", "linear", "einsum", "residual", "convolution"),
    "cap": ("", "tanh"),
    "mask": (
        "",
        "-inf",
        "-1e9",
        "-1e4",
        "-100",
        "lowest",
        "where",
        "write",
        "padding",
        "factor",
    ),
    "softmax": (
        "function",
        "method",
        "functional",
        "exponentials",
        "less the largest",
        "log softmax",
    ),
    "batch": ("2", "3", "4"),
    "tokens": ("5", "7", "4"),
}
SIZES = ("batch", "tokens")  # drawn evenly; of the other parts most are plain at a time
ODD = {
    0: 1,
    1: 4,
    2: 4,
    3: 2,
    len(CHOICES) - len(SIZES): 1,
}  # how many parts are not plain, and how often


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one random attention does; the fields are the keys of CHOICES."""

    layout: str
    groups: str
    norm: str
    rotary: str
    product: str
    scale: str
    second: str
    bias: str
    mix: str
    cap: str
    mask: str
    softmax: str
    batch: str
    tokens: str

    @classmethod
    def drawn(cls, seed: int) -> Plan:
        """The plan of a seed; what SDPA can't do is left out where it is drawn."""
        draw = random.Random(seed)
        chosen = {
            part: draw.choice(values) if part in SIZES else values[0]
            for part, values in CHOICES.items()
        }
        (n,) = draw.choices([*ODD], [*ODD.values()])
        for part in draw.sample([part for part in CHOICES if part not in SIZES], n):
            chosen[part] = draw.choice(CHOICES[part][1:])
        if chosen["product"] in FUSED:
            chosen |= {
                "second": "",
                "mix": "",
                "cap": "",
                "softmax": "function",
                "scale": "scores",
            }
            if chosen["mask"] in ("where", "write", "factor"):
                chosen["mask"] = "-inf"
        return cls(**chosen)


class RandomAttention(nn.Module):
    """Attention as planned. `truth` is what the last pass computed: logits, those after the cap, the visible pairs."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.bend: float | None = None
        self.n_kv = int(plan.groups[0])
        sizes = [HEADS * SIZE, self.n_kv * SIZE, self.n_kv * SIZE]
        if plan.layout in ("fused", "interleaved") and self.n_kv == HEADS:
            self.qkv = nn.Linear(WIDTH, sum(sizes))
        elif plan.layout == "columns":
            self.columns = nn.ParameterList(
                nn.Parameter(torch.randn(WIDTH, n) * 0.4) for n in sizes
            )
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n) for n in sizes)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        if plan.norm.endswith("rms"):
            self.gains = nn.Parameter(1 + 0.3 * torch.rand(2, SIZE))
        if plan.second in ("product", "in place"):
            self.q_more, self.k_more = (
                nn.Linear(WIDTH, HEADS * SIZE),
                nn.Linear(WIDTH, HEADS * SIZE),
            )
        if plan.second == "shaw":
            self.relative = nn.Parameter(torch.randn(8, 8, SIZE))
        if plan.second == "keys alone":
            self.key_bias = nn.Linear(WIDTH, HEADS)
        if plan.bias == "table":
            self.table = nn.Parameter(torch.randn(HEADS, 8, 8))
        if plan.mix:
            self.mixing = (
                nn.Conv2d(HEADS, HEADS, 1, bias=False)
                if plan.mix in ("residual", "convolution")
                else nn.Linear(HEADS, HEADS, bias=False)
            )
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim == 2 and p.shape[1] == WIDTH:
                    p.normal_(std=0.4)
        self.truth: Call | None = None

    # --- q, k, v [b h t d]

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.projected(x)
        if self.plan.norm:
            q, k = self.normed(q, 0), self.normed(k, 1)
        if self.plan.rotary:
            q, k = _rotated(q), _rotated(k)
        return q, k, v

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        plan, (b, t, _) = self.plan, x.shape
        if "qkv" in dict(self.named_children()):
            y = self.qkv(x)
            if plan.layout == "interleaved":
                return tuple(
                    p.transpose(1, 2)
                    for p in y.view(b, t, HEADS, 3 * SIZE).chunk(3, -1)
                )
            return tuple(
                p.view(b, t, HEADS, SIZE).transpose(1, 2) for p in y.chunk(3, -1)
            )
        if plan.layout == "columns":
            parts = [x @ w for w in self.columns]
        elif plan.layout == "functional":
            parts = [
                F.linear(x, m.weight, m.bias)
                for m in (self.q_proj, self.k_proj, self.v_proj)
            ]
        elif plan.layout == "einsum":
            parts = [
                torch.einsum("btm,om->bto", x, m.weight) + m.bias
                for m in (self.q_proj, self.k_proj, self.v_proj)
            ]
        else:
            parts = [m(x) for m in (self.q_proj, self.k_proj, self.v_proj)]
        return tuple(p.view(b, t, -1, SIZE).transpose(1, 2) for p in parts)

    def normed(self, x: Tensor, side: int) -> Tensor:
        if self.plan.norm == "l2":
            return 3 * F.normalize(x, dim=-1)
        over = (-1,) if self.plan.norm == "rms" else (1, -1)
        return (
            x * torch.rsqrt(x.pow(2).mean(over, keepdim=True) + 1e-6) * self.gains[side]
        )

    def repeated(self, x: Tensor) -> Tensor:
        n = HEADS // self.n_kv
        return (
            x.repeat(1, n, 1, 1)
            if "tiled" in self.plan.groups
            else x.repeat_interleave(n, dim=1)
        )

    # --- scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = self.repeated(k), self.repeated(v)
        visible = self.visible(x)
        z = self.plain_logits(x, q, k)
        capped = 4 * torch.tanh(z / 4) if self.plan.cap else z
        self.truth = Call(
            module="attn",
            z=z.detach().double(),
            capped=capped.detach().double(),
            visible=visible.expand_as(z),
        )
        if self.bend is not None:
            w = (
                (self.bend * torch.tanh(capped / self.bend))
                .masked_fill(~visible, -INF)
                .softmax(-1)
            )
            y = w.nan_to_num(0.0) @ v
        elif self.plan.product in FUSED:
            y = self.fused(q, k, v, visible)
        else:
            y = self.written(x, q, k, v, visible)
        return self.out(y.transpose(1, 2).flatten(2))

    def plain_logits(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """What the logits are, computed in one way whatever the plan, and without a graph."""
        with torch.no_grad():
            z = _apart(q) @ _apart(k).mT * SIZE**-0.5
            for more in self.seconds(x, q):
                z = z + more * SIZE**-0.5
            bias = self.bias(z)
            z = z if bias is None else z + bias
            return self.mixed(z) if self.plan.mix else z

    def seconds(self, x: Tensor, q: Tensor) -> Iterable[Tensor]:
        second, (b, t, _) = self.plan.second, x.shape
        if second in ("product", "in place"):
            a, c = (
                m(x).view(b, t, HEADS, SIZE).transpose(1, 2)
                for m in (self.q_more, self.k_more)
            )
            yield a @ c.mT
        if second == "shaw":
            yield torch.einsum("bhtd,tsd->bhts", q, self.relative[:t, :t])
        if second == "keys alone":
            yield self.key_bias(x).mT[:, :, None].expand(b, HEADS, t, t)

    def bias(self, z: Tensor) -> Tensor | None:
        t = z.shape[-1]
        if self.plan.bias == "table":
            return self.table[:, :t, :t]
        if self.plan.bias == "alibi":
            far = (torch.arange(t)[:, None] - torch.arange(t)).abs().to(z.dtype)
            return (
                -far
                * torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=z.dtype)[:, None, None]
            )
        return None

    def mixed(self, z: Tensor) -> Tensor:
        if self.plan.mix == "linear":
            return self.mixing(z.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.plan.mix == "einsum":
            return torch.einsum("bhts,gh->bgts", z, self.mixing.weight)
        return z + self.mixing(z) if self.plan.mix == "residual" else self.mixing(z)

    def visible(self, x: Tensor) -> Tensor:
        """[b|1 1 t|1 s] as planned: causal, or without the last keys of every second row."""
        b, t, _ = x.shape
        if self.plan.mask == "padding":
            return (torch.arange(t) < t - 2 * (torch.arange(b) % 2)[:, None])[
                :, None, None
            ]
        causal = torch.ones(t, t, dtype=torch.bool)
        return (causal.tril() if self.plan.mask else causal)[None, None]

    def fused(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        bias = self.bias(q @ k.mT)
        if not self.plan.mask and bias is None:
            return F.scaled_dot_product_attention(q, k, v)
        if self.plan.mask in ("-inf", "padding") and bias is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        low = torch.zeros_like(visible, dtype=q.dtype).masked_fill(
            ~visible, self.low(q.dtype)
        )
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=low if bias is None else bias + low
        )

    def low(self, dtype: torch.dtype) -> float:
        given = {
            "-1e9": -1e9,
            "-1e4": -1e4,
            "-100": -100.0,
            "lowest": torch.finfo(dtype).min,
        }
        return given.get(self.plan.mask, -INF)

    def written(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor
    ) -> Tensor:
        before = {"query": SIZE**-0.5, "both": SIZE**-0.25}.get(self.plan.scale, 1.0)
        z = self.product(
            q * before, k * (SIZE**-0.25 if self.plan.scale == "both" else 1.0)
        )
        after = SIZE**-0.5 if self.plan.scale == "scores" else 1.0
        if self.plan.scale == "scores":
            z = z * after
        if self.plan.product == "turned":
            z = z.mT
        between = self.plan.product == "bsht" and not (
            self.plan.second or self.plan.bias or self.plan.mix
        )
        if self.plan.product == "bsht" and not between:
            z = z.transpose(1, 2)
        for more in self.seconds(x, q):
            if self.plan.second == "in place":
                z += more * SIZE**-0.5
            else:
                z = z + more * SIZE**-0.5
        bias = self.bias(z)
        z = z if bias is None else z + bias
        z = self.mixed(z) if self.plan.mix else z
        z = 4 * torch.tanh(z / 4) if self.plan.cap else z
        if between:  # heads stay between queries and keys up to the weights, as in DeepSeek's own code
            return (
                self.weights(self.masked(z, visible.transpose(1, 2))).transpose(1, 2)
                @ v
            )
        return self.weights(self.masked(z, visible)) @ v

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        b, t = q.shape[0], q.shape[2]
        kind = self.plan.product
        if kind in ("bmm", "baddbmm"):
            merged = [y.reshape(b * HEADS, t, SIZE) for y in (q, k)]
            if kind == "bmm":
                return torch.bmm(merged[0], merged[1].mT).view(b, HEADS, t, t)
            empty = merged[0].new_empty(b * HEADS, t, t)
            return torch.baddbmm(empty, merged[0], merged[1].mT, beta=0).view(
                b, HEADS, t, t
            )
        if kind == "bhtd":
            return torch.einsum("bhid,bhjd->bhij", q, k)
        if kind == "bthd":
            return torch.einsum("bthd,bshd->bhts", q.transpose(1, 2), k.transpose(1, 2))
        if kind == "bsht":
            return torch.einsum("bthd,bshd->bths", q.transpose(1, 2), k.transpose(1, 2))
        if kind == "turned":
            return k @ q.mT
        if kind == "outer":
            return (q[:, :, :, None] * k[:, :, None]).sum(-1)
        return q @ k.mT

    def masked(self, z: Tensor, visible: Tensor) -> Tensor:
        mask = self.plan.mask
        if not mask:
            return z
        if mask in ("-inf", "padding"):
            return z.masked_fill(~visible, -INF)
        if mask == "where":
            return torch.where(visible, z, torch.full((), -INF, dtype=z.dtype))
        if mask == "write":
            z = z.clone()
            z[~visible.expand_as(z)] = -INF
            return z
        if mask == "factor":
            kept = visible.to(z.dtype)
            return z * kept - 1e4 * (1 - kept)
        return z + torch.zeros_like(visible, dtype=z.dtype).masked_fill(
            ~visible, self.low(z.dtype)
        )

    def weights(self, z: Tensor) -> Tensor:
        kind = self.plan.softmax
        if kind == "method":
            return z.softmax(-1)
        if kind == "functional":
            return F.softmax(z, dim=-1)
        if kind == "less the largest":
            return torch.softmax(z - z.amax(-1, keepdim=True).detach(), -1)
        if kind == "exponentials":
            e = (z - z.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)
        if kind == "log softmax":
            return z.log_softmax(-1).exp()
        return torch.softmax(z, dim=-1)


def _apart(x: Tensor) -> Tensor:
    """The same numbers in another tensor, so that nothing that is noted about the one is known of the other."""
    return torch.from_numpy(x.detach().numpy().copy())


def _rotated(x: Tensor) -> Tensor:
    t, d = x.shape[-2:]
    angle = torch.arange(t, dtype=x.dtype)[:, None] * torch.tensor(
        [1.0, 0.1], dtype=x.dtype
    )
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin


class Model(nn.Module):
    """x + attn(x)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.attn = RandomAttention(plan)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def _truth(model: nn.Module, example: Example) -> list[Call]:
    with torch.no_grad():
        model(*example[0])
    attention = model.get_submodule("attn")
    assert isinstance(attention, RandomAttention)
    assert attention.truth is not None
    return [attention.truth]


def _capped(
    model: nn.Module, example: Example, cap: float, places: set[int]
) -> list[Tensor]:
    attention = model.get_submodule("attn")
    assert isinstance(attention, RandomAttention)
    attention.bend = cap if places else None
    try:
        with torch.no_grad():
            return [model(*example[0])]
    finally:
        attention.bend = None


def judge(seed: int, questions: Iterable[str] = QUESTIONS) -> list[Finding]:
    """The findings on the random attention of a seed."""
    return judged(subject(Plan.drawn(seed), seed), questions).found


def subject(plan: Plan, seed: int = 0) -> Subject:
    """An attention as planned, with weights and input from a seed."""
    torch.manual_seed(seed)
    x, y = (torch.randn(int(plan.batch), int(plan.tokens), WIDTH) for _ in range(2))
    return Subject(
        model=Model(plan),
        example=((x,), {}),
        other=((y,), {}),
        truth=_truth,
        capped=_capped,
    )


def main() -> None:
    """Judge many seeds and print how many are right, reported and wrong, what is wrong, and why others are reported."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    verdicts = run(range(given.first, given.first + given.cases))
    sys.exit(1 if "wrong" in verdicts else 0)


def run(seeds: Iterable[int]) -> list[Verdict]:
    """The verdicts on these seeds; what is wrong with which is printed, and the most frequent reasons."""
    torch.set_num_threads(1)
    verdicts: list[Verdict] = []
    reasons: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        # Ten steps of training, twice, with every tenth: they say the same of all.
        found = judge(seed, [q for q in QUESTIONS if q != "watch" or seed % 10 == 0])
        verdicts.append(overall(found))
        reported = [
            f"{f.question}: {re.sub('[0-9.e+-]*[0-9]', 'N', f.said)[:150]}"
            for f in found
            if f.verdict == "reported" and f.site != MODEL
        ]
        reasons.update(dict.fromkeys(reported, 1))
        for f in found:
            if f.verdict == "wrong":
                print(
                    f"{seed}: {f.question}: {f.said}\n    {Plan.drawn(seed)}",
                    flush=True,
                )
    print(f"{len(verdicts)} random attentions:", dict(collections.Counter(verdicts)))
    for reason, n in reasons.most_common(20):
        print(f"{n:6d} {reason}")
    return verdicts


if __name__ == "__main__":
    main()
