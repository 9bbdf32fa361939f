"""What lalr and qk_clip add to an optimizer step: ratios to torch's fused AdamW on the same weights.

`python -m benchmarks.steps` prints both tables at the shapes of the goals, or at others: --layers, --heads, --dim.
--toy only shows that it runs.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from benchmarks.measure import Bench, Case, Cases
from qkeel.functional.statistics import LogitStats
from qkeel.nn import Attention
from qkeel.remedies import apply

BASE = "AdamW, fused"
THRESHOLD = 100.0
OVER = "qk_clip, 17 % of heads over"


def _model(layers: int, heads: int, dim: int) -> nn.Module:
    """Attention and an MLP of 4·dim a layer, as large as a transformer's matrices are; never run forward."""
    blocks = []
    for _ in range(layers):
        block = nn.Module()
        block.attention = Attention(dim, heads)
        block.up, block.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )
        blocks.append(block)
    return nn.ModuleList(blocks)


def adamw_step(
    layers: int, heads: int, dim: int, remedy: str, device: str = "cpu", **options: bool
) -> Case:
    """The step of AdamW with a remedy, on fixed gradients."""
    model = _model(layers, heads, dim).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
    apply(model, remedy, optimizer)
    return optimizer.step


def step_cases(layers: int, heads: int, dim: int, more: bool = False) -> Cases:
    """Returns one optimizer step each: the same weights, the same fixed gradients. `more`: of rarer options too."""

    def fused(remedy: str) -> Case:
        return adamw_step(layers, heads, dim, remedy, fused=True)

    cases = {
        BASE: fused("none"),
        "AdamW, fused + lalr": fused("lalr"),
        "AdamW, fused + qk_lr": fused("qk_lr"),
    }
    if more:
        cases |= {
            "AdamW, fused + qk_weight_decay": fused("qk_weight_decay"),
            "AdamW, foreach": adamw_step(layers, heads, dim, "none", foreach=True),
        }
    return cases


def optimizer_cases(layers: int, heads: int, dim: int, device: str) -> Cases:
    """The fused step, and what per-head rates make of it, on a device."""
    sizes = (layers, heads, dim)
    return {
        BASE: adamw_step(*sizes, "none", device, fused=True),
        "AdamW, fused + lalr": adamw_step(*sizes, "lalr", device, fused=True),
    }


def clip_cases(layers: int, heads: int, dim: int, device: str) -> Cases:
    """The fused step, and a clip alone, on a device."""
    model = _model(layers, heads, dim).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    clipped = torch.optim.SGD(model.parameters(), lr=0.0)  # only carries the hooks
    apply(model, f"qk_clip:threshold={THRESHOLD}", clipped)
    (before, after) = (
        list(h.values())
        for h in (clipped._optimizer_step_pre_hooks, clipped._optimizer_step_post_hooks)
    )
    methods = [inspect.unwrap(hook, stop=inspect.ismethod) for hook in after]
    (tap,) = [method.__self__.tap for method in methods if inspect.ismethod(method)]

    def clip(share: float) -> Case:
        top = torch.full((layers, heads), THRESHOLD / 2, device=device)
        top.view(-1)[:: round(1 / share) if share else top.numel() + 1] = THRESHOLD * (
            1 + 1e-6 if share else 0.5
        )
        stats = {site: _only(row) for site, row in zip(_names(layers), top)}

        def run() -> None:
            for site, one in stats.items():
                tap._stats["train"].add(site, one, None)
            for hook in (*before, *after):
                hook(clipped, (), {})

        return run

    return {BASE: optimizer.step, "qk_clip, nothing over": clip(0), OVER: clip(1 / 6)}


def _names(layers: int) -> list[str]:
    return [f"{i}.attention" for i in range(layers)]


def _only(top: Tensor) -> LogitStats:
    stats = LogitStats.empty(len(top), len(top), top)
    object.__setattr__(stats, "max_logit", top)
    return stats


def main(arguments: list[str] | None = None) -> None:
    """Prints both tables."""
    flags = {
        f"--{name}": {"type": int, "default": n}
        for name, n in (("layers", 14), ("heads", 32), ("dim", 1024))
    }
    rarer = {
        "action": "store_true",
        "help": "rarer options too: twice the memory, 22 GB at these sizes",
    }
    bench = Bench("steps", __doc__, arguments, flags={**flags, "--more": rarer})
    given = bench.options
    sizes = {"layers": given.layers, "heads": given.heads, "dim": given.dim}
    if bench.toy:
        sizes = {"layers": 2, "heads": 4, "dim": 64}
    bench.table(f"optimizer step, {sizes}", step_cases(**sizes, more=given.more))
    for row in bench.table(
        f"qk_clip next to the step, {sizes}", clip_cases(**sizes, device="cpu")
    )[1:]:
        print(f"  {row.name}: {100 * row.ratio:.3f} % of a step")


if __name__ == "__main__":
    main()
