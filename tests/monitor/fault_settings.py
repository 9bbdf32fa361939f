"""The settings under which faults are planted: models with every kind of attention, and every way to watch them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tests.contract.watch.layers import Layers
from tests.contract.watch.small import Block, Small, batch, small
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from qkeel import watch
from qkeel.monitor import DEFAULT, Adaptive, Alarm, History, LoggingSink, PlannedRates, Rule
from qkeel.monitor.alarms import IdleNorm, Resolution
from qkeel.monitor.monitor import Monitor
from qkeel.nn import GAU, MLA, Attention, LatentSizes
from qkeel.sites import Reading, describe, find_sites
from qkeel.spec import AttentionSpec, RMSNorm

Watcher = Callable[[nn.Module, torch.optim.Optimizer, Path], Monitor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, its input, and how it is watched."""

    make: Callable[[], nn.Module]
    watch: Watcher
    batch: Callable[[int], Tensor] = batch


def by_default(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Monitor:
    return watch(model, optimizer, sinks=path)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Monitor:
    """With every option that has functions of its own, and a cadence that does not measure every step."""
    return watch(
        model,
        optimizer,
        sinks=[path, LoggingSink("qkeel.tests")],
        every=Adaptive(least=1, most=2),
        probe_batch=batch(9),
        query_mask=lambda x, mask=None: torch.ones(x.shape[:2]),
        classes=lambda x, mask=None: (torch.arange(x.shape[1]) % 2).expand(x.shape[0], -1),
        planned=PlannedRates.of([0.01] * 9),
    )


def with_known_sites(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Monitor:
    """Without an optimizer, and with sites that were found before; the sinks by their names."""
    return watch(model, sinks=f"directory:path={path}", sites=find_sites(model, batch(0)))


class Often(Rule):
    """A rule that always raises an alarm."""

    @property
    def name(self) -> str:
        return "often"

    def check(self, history: History) -> Alarm | None:
        return self.alarm(history, "a meaning", 1.0)


class Faulty(Rule):
    """A rule that always fails."""

    @property
    def name(self) -> str:
        return "faulty"

    def check(self, history: History) -> Alarm | None:
        raise ValueError("boom")


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.size(-2), k.size(-2)).tril() == 0


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(_hidden(q, k), -torch.inf)
    return scores.softmax(-1) @ v


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 5 * torch.tanh(torch.einsum("bhtd,bhsd->bhts", q, k) / 5)
    scores = scores + torch.zeros_like(_hidden(q, k), dtype=q.dtype).masked_fill(_hidden(q, k), -torch.inf)
    sinks = torch.zeros(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT + 0.5 * q @ k.mT
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True) @ v


def _one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(q.shape[1])]
    return torch.stack(heads, 1)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.detach(), k.detach(), v.detach()  # on a CPU it has no gradients
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))  # type: ignore[return-value]


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flash = sys.modules["flash_attn"].flash_attn_func  # type: ignore[attr-defined]
    return flash(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flash = sys.modules["flash_attn"].flash_attn_varlen_func  # type: ignore[attr-defined]
    b, _, t, _ = q.shape
    ends = torch.arange(b + 1, dtype=torch.int32) * t
    out = flash(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), ends, ends, t, t, causal=True)
    return out.unflatten(0, (b, t)).transpose(1, 2)


def _by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).sort(-1).values.softmax(-1) @ v


def _of_a_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(_masked, in_dims=1, out_dims=1)(q, k, v)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~_hidden(q, k), dropout_p=0.5)


def own_modules() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(8, 2), Attention(8, 2))


def with_flash() -> nn.Module:
    return Layers(_flash, _packed, _flex)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(x.size(0), x.size(1), 2, 4).transpose(1, 2)
        k = self.k(x).view(x.size(0), x.size(1), 2, 4).transpose(1, 2)
        return x + (torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ k).transpose(1, 2).flatten(2)


def scripted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), torch.jit.script(Scripted()))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Monitor:
    site = describe(model, "0", query=Reading(module="q"), key=Reading(module="k"), heads=2)
    return watch(model, optimizer, sinks=path).include(site)


def with_rules(*rules: Rule) -> Watcher:
    return lambda model, optimizer, path: watch(model, optimizer, sinks=[path, LoggingSink("qkeel.tests")], rules=rules)


def latents_and_gates() -> nn.Module:
    torch.manual_seed(0)
    norms = AttentionSpec(norm=RMSNorm(on="qk", over="head", gain="dim"))
    return nn.Sequential(
        MLA(8, 2, sizes=LatentSizes(kv_latent=4, q_latent=4, nope_dim=4, rope_dim=2)),
        GAU(8, size=4),
        Attention(8, 2, spec=norms),
    )


class FailsFirst(Small):
    """Its first pass ends in an exception, which its training catches."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.notes = {"a": 1}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        self.passes += 1
        if self.passes == 1:
            raise LookupError("the model's own")
        return x


def failing() -> nn.Module:
    torch.manual_seed(0)
    return FailsFirst()


SETTINGS = {
    "as by default": Setting(make=small, watch=by_default),
    "with every option": Setting(make=small, watch=everything),
    "without an optimizer": Setting(make=small, watch=with_known_sites),
    "own modules": Setting(make=own_modules, watch=lambda m, o, path: watch(m, o, stats="entropy", sinks=path)),
    "alarms": Setting(make=small, watch=with_rules(Often(source=""))),
    "a pass that fails": Setting(make=failing, watch=by_default),
    "a rule that fails": Setting(make=small, watch=with_rules(Faulty(source=""))),
    "latents and gates": Setting(
        make=latents_and_gates,
        watch=with_rules(
            *DEFAULT,
            IdleNorm(kind="rms", head_dim=4, source=""),
            Resolution(dtype="bf16", kernel="eager", head_dim=4, source=""),
        ),
    ),
    "described": Setting(make=scripted, watch=by_hand),
    "torch's encoder": Setting(make=encoder, watch=everything),
    "a larger batch": Setting(make=small, watch=by_default, batch=lambda seed: batch(seed, b=3, t=70)),
    "a map, dropout, what is missed": Setting(make=lambda: Layers(_of_a_map, _fused, _by_rows), watch=by_default),
    "scores by hand": Setting(make=lambda: Layers(_masked, _capped, _written_out, _one_by_one), watch=everything),
    "fused": Setting(make=with_flash, watch=by_default),
}
