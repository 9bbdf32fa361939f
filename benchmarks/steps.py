"""What lalr and qk_clip add to an optimizer step: ratios to torch's fused AdamW on the same weights.

`python -m benchmarks.steps` prints both tables at the shapes of the goals, or at others: --layers, --heads, --dim.
--toy only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.steps")  # before torch: the allocator reads its settings when the process starts

import torch
from torch import Tensor, nn

from benchmarks.measure import Row, interleave, show
from qkeel.functional.stats import LogitStats
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
        block.up, block.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        blocks.append(block)
    return nn.ModuleList(blocks)


def adamw_step(
    layers: int, heads: int, dim: int, remedy: str, device: str = "cpu", **options: bool
) -> Callable[[], object]:
    """The step of AdamW with a remedy, on fixed gradients."""
    model = _model(layers, heads, dim).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
    apply(remedy, model, optimizer)
    return optimizer.step


def by_lists(layers: int, heads: int, dim: int, remedy: str, device: str) -> Callable[[], object]:
    """The fused step with a remedy by torch's operators on lists, where Triton's kernels could have taken it."""
    before = os.environ.get("QKEEL_TRITON")
    os.environ["QKEEL_TRITON"] = "0"
    try:
        step = adamw_step(layers, heads, dim, remedy, device, fused=True)
        step()  # what moves heads is chosen at the first
        return step
    finally:
        os.environ.pop("QKEEL_TRITON")
        os.environ.update({"QKEEL_TRITON": before} if before is not None else {})


def _by(native: str, step: Callable[[], object]) -> Callable[[], object]:
    """The step with compiled kernels ("1") or without ("0")."""

    def run() -> None:
        os.environ["QKEEL_NATIVE"] = native
        step()

    return run


def bench(layers: int, heads: int, dim: int, rounds: int, more: bool = False) -> list[Row]:
    """One optimizer step each: the same weights, the same fixed gradients. `more`: of rarer options too."""
    sizes = (layers, heads, dim)
    lowered = adamw_step(*sizes, "qk_lr", fused=True)
    cases = {
        BASE: adamw_step(*sizes, "none", fused=True),
        "AdamW, fused + lalr, compiled C++": _by("1", adamw_step(*sizes, "lalr", fused=True)),
        "AdamW, fused + lalr, torch": _by("0", adamw_step(*sizes, "lalr", fused=True)),
        "AdamW, fused + qk_lr, compiled C++": _by("1", lowered),
        "AdamW, fused + qk_lr, torch": _by("0", lowered),
    }
    if more:
        cases |= {
            "AdamW, fused + lalr (plain decay), compiled C++": _by(
                "1", adamw_step(*sizes, "lalr:decay=plain", fused=True)
            ),
            "AdamW, fused + lalr (spectral), compiled C++": _by(
                "1", adamw_step(*sizes, "lalr:norm=spectral", fused=True)
            ),
            "AdamW, fused + qk_weight_decay": adamw_step(*sizes, "qk_weight_decay", fused=True),
            "AdamW, foreach": adamw_step(*sizes, "none", foreach=True),
        }
    return _as_found(lambda: interleave(cases, BASE, rounds))


def _as_found(run: Callable[[], list[Row]]) -> list[Row]:
    """Leave the environment's QKEEL_NATIVE as it was."""
    before = os.environ.get("QKEEL_NATIVE")
    try:
        return run()
    finally:
        os.environ.pop("QKEEL_NATIVE", None)
        os.environ.update({"QKEEL_NATIVE": before} if before is not None else {})


def optimizer_cases(layers: int, heads: int, dim: int, device: str) -> dict[str, Callable[[], object]]:
    """The fused step, and what per-head rates make of it, on a device."""
    sizes = (layers, heads, dim)
    return {
        BASE: adamw_step(*sizes, "none", device, fused=True),
        "AdamW, fused + lalr": adamw_step(*sizes, "lalr", device, fused=True),
        "AdamW, fused + lalr, torch's lists": by_lists(*sizes, "lalr", device),
        "AdamW, fused + lalr (plain decay)": adamw_step(*sizes, "lalr:decay=plain", device, fused=True),
    }


def bench_clip(layers: int, heads: int, dim: int, rounds: int) -> list[Row]:
    """What qk_clip does after a step, its statistic aside: maxima put where the tap would have put them.

    The clip is timed alone beside the step, since its part of a step is below what steps differ by.
    """
    cases = clip_cases(layers, heads, dim, "cpu")
    over = cases.pop(OVER)
    cases |= {f"{OVER}, compiled C++": _by("1", over), f"{OVER}, torch": _by("0", over)}
    return _as_found(lambda: interleave(cases, BASE, rounds))


def clip_cases(layers: int, heads: int, dim: int, device: str) -> dict[str, Callable[[], object]]:
    """The fused step, and a clip alone, on a device."""
    model = _model(layers, heads, dim).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    clipped = torch.optim.SGD(model.parameters(), lr=0.0)  # only carries the hooks
    apply(f"qk_clip:threshold={THRESHOLD}", model, clipped)
    (before, after) = (
        list(h.values()) for h in (clipped._optimizer_step_pre_hooks, clipped._optimizer_step_post_hooks)
    )
    tap = next(hook.__self__.tap for hook in after)

    def clip(share: float) -> Callable[[], object]:
        top = torch.full((layers, heads), THRESHOLD / 2, device=device)
        top.view(-1)[:: round(1 / share) if share else top.numel() + 1] = THRESHOLD * (1 + 1e-6 if share else 0.5)
        stats = {site: _only(row) for site, row in zip(_names(layers), top)}

        def run() -> None:
            tap._stats["train"].stats.update(stats)
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
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    for name, default in (("layers", 14), ("heads", 32), ("dim", 1024), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--more", action="store_true", help="rarer options too: twice the memory, 22 GB at these sizes")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two rounds: only to see that it runs")
    args = vars(parser.parse_args(arguments))
    more = args.pop("more")
    if args.pop("toy"):
        args = {"layers": 2, "heads": 4, "dim": 64, "rounds": 2}
    torch.set_num_threads(1)
    show(f"optimizer step, {args}", bench(**args, more=more), BASE)
    rows = bench_clip(**args)
    show(f"qk_clip beside the step, {args}", rows, BASE)
    for row in rows[1:]:
        part = sorted(row.ratios)[len(row.ratios) // 2]
        print(f"  {row.name}: {100 * part:.3f} % of a step")


if __name__ == "__main__":
    main()
