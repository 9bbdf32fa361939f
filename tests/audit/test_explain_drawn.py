"""Drawn attention layers whose norm, rotation and scale are known: explain says them, or that it does not know."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qkeel

TOKENS = 11


def rotated(x, dims, pairing, base):
    """[b t h d] with the last `dims` of a head turned by its position."""
    still, turning = x.split([x.shape[-1] - dims, dims], -1)
    speed = base ** (-torch.arange(0, dims, 2) / dims)
    angle = torch.arange(x.shape[1])[:, None, None] * speed
    sizes = (2, -1) if pairing == "half" else (-1, 2)
    axis = -2 if pairing == "half" else -1
    a, b = turning.unflatten(-1, sizes).unbind(axis)
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat([still, torch.stack(turned, axis).flatten(-2)], -1)


class Drawn(nn.Module):
    """One causal layer; `truth` holds what was drawn."""

    def __init__(self, source):
        super().__init__()
        draw = source.choice
        self.size, self.heads = draw([8, 16]), draw([2, 4])
        self.groups = draw([self.heads, self.heads // 2])
        self.kind, self.over = (
            draw(["none", "RMS", "layer"]),
            draw(["head", "head", "layer"]),
        )
        self.order, self.one_plus = (
            draw(["before RoPE", "after RoPE"]),
            draw([False, True]),
        )
        self.dims, self.pairing = (
            draw([0, self.size, self.size // 2]),
            draw(["half", "interleaved"]),
        )
        self.base, self.scale, self.window = (
            draw([1e4, 5e5]),
            draw([None, 0.3, 1.0]),
            draw([None, 4]),
        )
        self.fused, self.written = draw([False, True]), draw([False, True])
        width = self.size * (self.heads + 2 * self.groups)
        self.qkv = nn.Linear(32, width, bias=draw([False, True]))
        gains = [
            self.size * (n if self.over == "layer" else 1)
            for n in (self.heads, self.groups)
        ]
        self.q_gain, self.k_gain = (nn.Parameter(torch.rand(n) + 0.5) for n in gains)

    def normed(self, x, gain):
        if self.kind == "none":
            return x
        flat = x.flatten(2) if self.over == "layer" else x
        flat = flat - flat.mean(-1, keepdim=True) if self.kind == "layer" else flat
        flat = (
            flat
            * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            * (gain + self.one_plus)
        )
        return flat.view_as(x)

    def placed(self, x, gain):
        for step in (
            ("norm", "rope") if self.order == "before RoPE" else ("rope", "norm")
        ):
            if step == "norm":
                x = self.normed(x, gain)
            elif self.dims:
                x = rotated(x, self.dims, self.pairing, self.base)
        return x.transpose(1, 2)

    def forward(self, x):
        sizes = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = (
            y.unflatten(-1, (-1, self.size)) for y in self.qkv(x).split(sizes, -1)
        )
        q, k, v = (
            self.placed(q, self.q_gain),
            self.placed(k, self.k_gain),
            v.transpose(1, 2),
        )
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (k, v))
        row = torch.arange(x.shape[1])
        seen = (row[:, None] >= row) & (row[:, None] - row < (self.window or TOKENS))
        scale = self.size**-0.5 if self.scale is None else self.scale
        if self.written:
            scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.parametrize("seed", range(12))
def test_what_was_drawn_is_explained(seed):
    torch.manual_seed(seed)
    layer = Drawn(random.Random(seed))
    (site,) = qkeel.explain(nn.Sequential(layer), torch.randn(2, TOKENS, 32)).sites
    scale = layer.size**-0.5 if layer.scale is None else layer.scale
    assert site.scale == pytest.approx([scale] * layer.heads, rel=1e-3)
    assert site.window == layer.window
    # A rotation changes the mean that a layer norm took away, and so what precedes it cannot be computed.
    is_lost = layer.kind == "layer" and layer.order == "after RoPE" and layer.dims
    for side, heads in ((site.query, layer.heads), (site.key, layer.groups)):
        # Keys of one head cannot show over what they are normed.
        if side.kind == "unknown":
            assert is_lost or heads == 1
            return
        assert side.kind == layer.kind
        if layer.kind != "none" and heads > 1:
            assert side.over == layer.over
            assert ("1 + w" in side.gain) == layer.one_plus
            assert not layer.dims or side.order == layer.order
    if not is_lost:
        turned = site.rotation and (site.rotation.dims, site.rotation.pairing)
        assert turned == ((layer.dims, layer.pairing) if layer.dims else None)
        assert not layer.dims or site.rotation.base == pytest.approx(
            layer.base, rel=0.02
        )
