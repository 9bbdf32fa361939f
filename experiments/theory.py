"""The figures of experiments/notes/theory.md: python -m experiments.theory.

Tiny models: orderings, not effect sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.measure import Bench
from torch import Tensor, nn

import qkeel
from qkeel.functional.bounds import softmax_jacobian_norm
from qkeel.functional.logits import entropy
from qkeel.lab import DataConfig
from qkeel.lab.text import Corpus, batch, heldout, load
from qkeel.nn import Decoder, DecoderConfig
from qkeel.spec import AttentionSpec, Fixed, RMSNorm, Rope, preset, presets

CONTEXT, HEADS = 32, 4


def initial_spread(d_model: int = 256, heads: int = 4, tokens: int = 256) -> dict[str, float]:
    """Standard deviation of each preset's logits at initialisation: unit inputs, weights of variance 1/d_model."""
    found, d = {}, d_model // heads
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, d_model, generator=rng)
    q, k = (
        (x @ torch.randn(d_model, d_model, generator=rng) / d_model**0.5).unflatten(-1, (heads, d)).transpose(1, 2)
        for _ in range(2)
    )
    for name in presets():
        spec = preset(name)
        place = torch.arange(tokens)[None]
        params = spec.init_params(heads, heads, d)
        z = spec.logits(q, k, place, place, params)
        found[name] = float(z[torch.ones_like(z, dtype=torch.bool).tril()].std())
    return found


def saturation(head_dim: int, scale: float, keys: int = 128) -> tuple[float, float, float]:
    """Mean largest weight, mean entropy, mean Jacobian norm of rows over independent q and k of unit entries."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, head_dim, generator=rng, dtype=torch.float64) for n in (1000, keys))
    p = (scale * q @ k.T).softmax(-1)
    return float(p.amax(-1).mean()), float(entropy(p).mean()), float(softmax_jacobian_norm(p).mean())


def train(spec: AttentionSpec, corpus: Corpus, steps: int, seed: int, lr: float, **layout: Any) -> dict[str, float]:
    """Held-out loss after some steps of AdamW, the largest logit on the way, mean norms of the last MLP and block."""
    config = DataConfig(context=CONTEXT)
    sizes: dict[str, Any] = {"vocab_size": corpus.vocab_size, "d_model": 64, "n_layers": 2, "n_heads": HEADS}
    model = Decoder(DecoderConfig(**sizes, spec=spec, **layout))
    model.init_weights(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    with qkeel.watch(model, optimizer, every=10, rules=()) as monitor:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / (0.1 * steps))
            loss = _loss(model, torch.from_numpy(batch(corpus, config, seed, step)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        top = monitor.history.top("max_logit")
        largest = float("nan") if top is None else float(top.max())
        blocks = [float(v[-1]) for name, v in monitor.history.values.items() if name.startswith("block_output_norm/")]
    tokens = torch.from_numpy(heldout(corpus, CONTEXT, 64))
    norms: list[float] = []
    last = [m for m in model.modules() if isinstance(m, qkeel.nn.Block)][-1]
    last.mlp.register_forward_hook(lambda *given: norms.append(float(given[2].norm(dim=-1).mean())))
    with torch.no_grad():
        loss = float(_loss(model, tokens))
    return {"loss": loss, "max_logit": largest, "mlp": norms[-1], "block": blocks[-1]}


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _means(runs: Sequence[dict[str, float]]) -> str:
    return "  ".join(
        f"{name} {statistics.fmean(r[name] for r in runs):.4g} ({min(r[name] for r in runs):.4g} to "
        f"{max(r[name] for r in runs):.4g})"
        for name in runs[0]
    )


def main(arguments: list[str] | None = None) -> None:
    """Print every table."""
    flags = {"--steps": {"type": int, "default": 150}, "--seeds": {"type": int, "nargs": "+", "default": [0, 1, 2]}}
    bench = Bench("theory", __doc__, arguments, rounds=None, flags=flags)
    steps, seeds = (2, [0]) if bench.toy else (bench.options.steps, bench.options.seeds)
    print("standard deviation of logits at initialisation, head size 64")
    for name, spread in initial_spread().items():
        print(f"  {name:<16} {spread:6.3f}")
    print("rows over 128 keys: mean largest weight, entropy in nats, Jacobian norm")
    for d in (16, 64, 256):
        for name, scale in (("1", 1.0), ("1/√d", d**-0.5), ("1/d", 1 / d)):
            print(f"  d {d:3}  scale {name:<5}" + "".join(f" {x:8.4f}" for x in saturation(d, scale)))
    corpus = load(DataConfig(context=CONTEXT))
    d = 64 // HEADS
    for lr in (0.01, 0.1):
        for name, scale in (("1", 1.0), ("1/√d", d**-0.5), ("1/d", 1 / d)):
            spec = AttentionSpec(position=Rope(), scale=Fixed(scale))
            runs = [train(spec, corpus, steps, seed, lr) for seed in seeds]
            print(f"  training, d {d}, lr {lr:g}, scale {name:<5} {_means(runs)}", flush=True)
    for order in ("pre", "post", "swin", "peri"):
        for name, spec in (
            ("none", AttentionSpec(position=Rope())),
            ("qk_norm", AttentionSpec(position=Rope(), norm=RMSNorm(gain="dim"))),
        ):
            runs = [train(spec, corpus, steps, seed, 0.03, norm_order=order) for seed in seeds]
            print(f"  norm order {order:<5} {name:<8} lr 0.03  {_means(runs)}", flush=True)


if __name__ == "__main__":
    main()
