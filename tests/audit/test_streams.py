"""Drawn checkpoints of attention over two streams of tokens: no logit of random tokens is over a printed bound."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkeel.audit import Geometry, scan


@dataclasses.dataclass
class Stream:
    """Queries and keys of one stream: weights [h d, c], biases, gains by side."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gains: dict[str, Tensor]

    def heads(self, side, tokens, heads):
        """[h t d] in float64."""
        x = tokens @ self.weights[side].double().mT + self.biases[side].double()
        x = x.unflatten(-1, (heads, -1))
        if self.gains:
            unit = x * x.square().mean(-1, keepdim=True).rsqrt()
            x = unit * self.gains[side].double()
        return x.transpose(0, 1)

    def fused(self, at):
        weight, bias = self.weights["q"], self.biases["q"]
        parts = weight, self.weights["k"], torch.ones_like(weight)
        biases = bias, self.biases["k"], torch.ones_like(bias)
        return {f"{at}.weight": torch.cat(parts), f"{at}.bias": torch.cat(biases)}

    def apart(self, at, *names):
        stored = {}
        for side, name in zip("qk", names):
            stored[f"{at}.{name}.weight"] = self.weights[side]
            stored[f"{at}.{name}.bias"] = self.biases[side]
        return stored

    def normed(self, *names):
        return dict(zip(names, self.gains.values()))


def drawn(source, heads, size, normed):
    generator = torch.Generator().manual_seed(source.randrange(10**6))
    width = heads * size
    weights, biases, gains = {}, {}, {}
    for side in "qk":
        weights[side] = torch.randn(width, width, generator=generator)
        biases[side] = torch.randn(width, generator=generator)
        if normed:
            gains[side] = torch.rand(size, generator=generator)
            gains[side] *= source.choice([1, 5, 50])
    return Stream(weights, biases, gains)


def checkpoint(kind, first, second):
    """The tensors of one layer, by the names that its authors gave them."""
    if kind == "diffusers":
        at = "transformer_blocks.0.attn"
        return (
            first.apart(at, "to_q", "to_k")
            | second.apart(at, "add_q_proj", "add_k_proj")
            | first.normed(f"{at}.norm_q.weight", f"{at}.norm_k.weight")
            | second.normed(f"{at}.norm_added_q.weight", f"{at}.norm_added_k.weight")
        )
    weight, norms, names = {
        "flux": (
            "double_blocks.0.{}.qkv",
            (
                "double_blocks.0.{}.norm.query_norm.scale",
                "double_blocks.0.{}.norm.key_norm.scale",
            ),
            ("img_attn", "txt_attn"),
        ),
        "sd3": (
            "joint_blocks.0.{}.attn.qkv",
            (
                "joint_blocks.0.{}.attn.ln_q.weight",
                "joint_blocks.0.{}.attn.ln_k.weight",
            ),
            ("x_block", "context_block"),
        ),
        "mochi": (
            "blocks.0.attn.qkv_{}",
            ("blocks.0.attn.q_norm_{}.weight", "blocks.0.attn.k_norm_{}.weight"),
            ("x", "y"),
        ),
    }[kind]
    stored = {}
    for name, stream in zip(names, (first, second)):
        stored |= stream.fused(weight.format(name))
        stored |= stream.normed(*(norm.format(name) for norm in norms))
    return stored


@pytest.mark.parametrize("kind", ["diffusers", "flux", "sd3", "mochi"])
@pytest.mark.parametrize("seed", range(4))
def test_no_logit_is_over_a_printed_bound(kind, seed, tmp_path):
    source = random.Random(f"{kind}{seed}")
    heads, size, normed = source.choice([1, 2, 4]), source.choice([8, 16]), seed > 0
    streams = [drawn(source, heads, size, normed) for _ in range(2)]
    save_file(checkpoint(kind, *streams), tmp_path / "model.safetensors")
    (site,) = scan(tmp_path / "model.safetensors", flags=Geometry(n_heads=heads)).sites
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(64, heads * size, dtype=torch.float64, generator=generator)
    q, k = (
        torch.cat([stream.heads(side, tokens, heads) for stream in streams], 1)
        for side in "qk"
    )
    reached = (q @ k.mT).abs().amax((1, 2)) / math.sqrt(size)
    bounds = torch.tensor(site.bounds(), dtype=torch.float64)
    assert normed == bool(bounds.isfinite().all())
    assert not (reached > bounds * (1 + 1e-9)).any()
    assert not normed or bool(
        (bounds < 8 * reached).all()
    )  # a bound that says something


def test_a_stream_that_does_not_fit_leaves_its_layer_unread(tmp_path):
    first, second = (drawn(random.Random(0), heads, 8, True) for heads in (2, 4))
    save_file(checkpoint("flux", first, second), tmp_path / "model.safetensors")
    (unknown,) = scan(tmp_path / "model.safetensors", flags=Geometry(n_heads=2)).unknown
    assert unknown.name == "double_blocks.0.img_attn"
