"""Drawn checkpoints of attention over two streams of tokens: no logit of random tokens is over a printed bound."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkeel.audit import Geometry, scan


@dataclasses.dataclass
class Stream:
    """Queries and keys of one stream: weights [h d, c], biases, gains."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gains: dict[str, Tensor]

    def heads(self, side: str, tokens: Tensor, heads: int) -> Tensor:
        """[h t d] in float64."""
        x = (
            tokens @ self.weights[side].double().mT + self.biases[side].double()
        ).unflatten(-1, (heads, -1))
        if self.gains:
            x = (
                x
                * x.square().mean(-1, keepdim=True).rsqrt()
                * self.gains[side].double()
            )
        return x.transpose(0, 1)


def drawn(source: random.Random, heads: int, size: int, normed: bool) -> Stream:
    generator = torch.Generator().manual_seed(source.randrange(10**6))
    width = heads * size
    weights = {side: torch.randn(width, width, generator=generator) for side in "qk"}
    biases = {side: torch.randn(width, generator=generator) for side in "qk"}
    gains = (
        {
            side: source.choice([1, 5, 50]) * torch.rand(size, generator=generator)
            for side in "qk"
        }
        if normed
        else {}
    )
    return Stream(weights, biases, gains)


def fused(at: str, stream: Stream) -> dict[str, Tensor]:
    value = torch.ones_like(stream.weights["q"])
    bias = torch.cat([stream.biases["q"], stream.biases["k"], value[0]])
    return {
        f"{at}.weight": torch.cat([stream.weights["q"], stream.weights["k"], value]),
        f"{at}.bias": bias,
    }


def apart(at: str, names: tuple[str, str], stream: Stream) -> dict[str, Tensor]:
    stored = {}
    for side, name in zip("qk", names):
        stored |= {
            f"{at}.{name}.weight": stream.weights[side],
            f"{at}.{name}.bias": stream.biases[side],
        }
    return stored


def gains(names: tuple[str, str], stream: Stream) -> dict[str, Tensor]:
    return {name: stream.gains[side] for side, name in zip("qk", names) if stream.gains}


def checkpoint(kind: str, first: Stream, second: Stream) -> dict[str, Tensor]:
    """The tensors of one layer, by the names that its authors gave them."""
    if kind == "diffusers":
        at = "transformer_blocks.0.attn"
        stored = apart(at, ("to_q", "to_k"), first) | apart(
            at, ("add_q_proj", "add_k_proj"), second
        )
        stored |= gains((f"{at}.norm_q.weight", f"{at}.norm_k.weight"), first)
        return stored | gains(
            (f"{at}.norm_added_q.weight", f"{at}.norm_added_k.weight"), second
        )
    if kind == "flux":
        stored = {}
        for name, stream in (("img_attn", first), ("txt_attn", second)):
            at = f"double_blocks.0.{name}"
            norms = f"{at}.norm.query_norm.scale", f"{at}.norm.key_norm.scale"
            stored |= fused(f"{at}.qkv", stream) | gains(norms, stream)
        return stored
    if kind == "sd3":
        stored = {}
        for name, stream in (("x_block", first), ("context_block", second)):
            at = f"joint_blocks.0.{name}.attn"
            stored |= fused(f"{at}.qkv", stream) | gains(
                (f"{at}.ln_q.weight", f"{at}.ln_k.weight"), stream
            )
        return stored
    stored = fused("blocks.0.attn.qkv_x", first) | fused("blocks.0.attn.qkv_y", second)
    for name, stream in (("x", first), ("y", second)):
        stored |= gains(
            (
                f"blocks.0.attn.q_norm_{name}.weight",
                f"blocks.0.attn.k_norm_{name}.weight",
            ),
            stream,
        )
    return stored


@pytest.mark.parametrize("kind", ["diffusers", "flux", "sd3", "mochi"])
@pytest.mark.parametrize("seed", range(4))
def test_no_logit_is_over_a_printed_bound(kind: str, seed: int, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("other", ["to_q_ip", "pos_key_proj", "q_bias", "k_lora"])
def test_weights_that_are_named_like_queries_or_keys_leave_no_bound(
    other: str, tmp_path: Path
) -> None:
    stored = {f"attn.to_{side}.weight": torch.eye(32) for side in "qk"}
    stored |= {f"attn.norm_{side}.weight": torch.ones(8) for side in "qk"}
    flags = Geometry(n_heads=4)
    save_file(stored, tmp_path / "plain.safetensors")
    assert math.isfinite(
        scan(tmp_path / "plain.safetensors", flags=flags).sites[0].bounds()[0]
    )
    end = "" if other == "q_bias" else ".weight"
    save_file(
        stored | {f"attn.{other}{end}": torch.ones(32, 32)},
        tmp_path / "other.safetensors",
    )
    (site,) = scan(tmp_path / "other.safetensors", flags=flags).sites
    assert math.isnan(site.bounds()[0])
    assert other in site.notes[-1]


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("attn.q_proj.qweight", torch.int32, "quantised"),
        ("attn.q_proj.weight_packed", torch.int32, "quantised"),
        ("attn.q_proj.lora_A.weight", torch.float32, "low-rank adapter"),
    ],
)
def test_what_is_no_plain_weight_is_called_what_it_is(
    name: str, kind: torch.dtype, why: str, tmp_path: Path
) -> None:
    save_file({name: torch.ones(4, 4, dtype=kind)}, tmp_path / "x.safetensors")
    (unknown,) = scan(tmp_path / "x.safetensors", flags=Geometry(n_heads=2)).unknown
    assert why in unknown.reason


def test_heads_may_differ_by_stage(tmp_path: Path) -> None:
    stored = {
        f"down.{i}.attn.to_{side}.weight": torch.eye(8 * 2**i)
        for i in range(3)
        for side in "qk"
    }
    save_file(stored, tmp_path / "x.safetensors")
    stages = (("down.0", 2), ("down.1", 8))
    sites = scan(
        tmp_path / "x.safetensors", flags=Geometry(n_heads=1, stages=stages)
    ).sites
    assert [(site.n_heads, site.head_dim) for site in sites] == [
        (2, 4),
        (8, 2),
        (1, 32),
    ]


def test_the_layers_that_a_config_announces_are_missed(tmp_path: Path) -> None:
    stored = {
        f"h.{i}.attn.{side}_proj.weight": torch.eye(8) for i in (0, 2) for side in "qk"
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 2, "num_hidden_layers": 4}'
    )
    assert [unknown.name for unknown in scan(tmp_path).unknown] == ["h.1", "h.3"]
