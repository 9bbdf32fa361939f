"""gain_bound: no logit passes what the gains of the q/k norm allow, and one that is built for it reaches it."""

import pytest
import torch
import transformers
from tests.attention import to_heads
from tests.drawing import randint, randn
from tests.quick import one_in
from torch import nn
from torch.nn import functional as F

from qkeel import find_sites
from qkeel.monitor.gain_bounds import GainBounds
from qkeel.sites import Tap

GROUPED = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 64,
}
WIDE = {**GROUPED, "head_dim": 16}
MODELS = {
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WIDE, query_pre_attn_scalar=20),
    "stablelm": lambda: transformers.StableLmConfig(**GROUPED, qk_layernorm=True),
    "cohere": lambda: transformers.CohereConfig(**GROUPED, use_qk_norm=True),
    "qwen3 yarn": lambda: transformers.Qwen3Config(
        **WIDE,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 16,
        },
    ),
}
TOKENS = randint(0, 11, (2, 9), seed=0)


def built(name, attention="sdpa"):
    config = MODELS[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def stir(model):
    """Gains, biases and projections far from where they start."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias") or "scale" in name:
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.5)
        elif "q_proj" in name or "k_proj" in name:
            p.mul_(50)


def bound(model, *example):
    (value,) = GainBounds(model, find_sites(model, example)).read().values()
    return value


def reached(model, *example):
    with Tap(model) as tap:
        model(*example)
        (stats,) = tap.read().values()
    return stats.max_abs_logit


@torch.no_grad()
def aim(
    query,
    key,
    heads,
    places,
):
    """Query head h and its key head of every token lie along one dimension, with one sign: places[h] = (q, k)."""
    direction = 100 * randn(query.in_features, seed=2)
    query.weight.zero_()
    key.weight.zero_()
    for h, (at_q, at_k) in enumerate(places):
        query.weight.unflatten(0, (heads[0], -1))[h, at_q] = direction
        key.weight.unflatten(0, (heads[1], -1))[h * heads[1] // heads[0], at_k] = (
            direction
        )


@pytest.mark.parametrize("attention", one_in(["sdpa", "eager"], 3))
@pytest.mark.parametrize("name", MODELS)
def test_no_logit_passes_the_bound(name, attention):
    model = built(name, attention)
    at_start = bound(model, TOKENS)
    stir(model)
    now = bound(model, TOKENS)
    assert now.shape == (4,)
    assert not torch.equal(now, at_start)
    top = reached(model, TOKENS)
    assert (top <= now * (1 + 1e-5)).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "stretch"), [("qwen3", 1.0), ("gemma3", 1.0), ("qwen3 yarn", None)]
)
def test_a_query_and_key_along_the_largest_gain_reach_the_bound(name, stretch):
    model = built(name)
    attention = next(m for n, m in model.named_modules() if n.endswith("self_attn"))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.copy_(torch.linspace(-0.5, 0.5, 16))
        norm.weight[3] = 3.0
    # Before: the walk needs heads that depend on all their numbers.
    sites = find_sites(model, TOKENS)
    aim(attention.q_proj, attention.k_proj, (4, 2), [(3, 3)] * 4)
    gains = GainBounds(model, sites)
    (now,) = gains.read().values()
    gain = 4.0 if name == "gemma3" else 3.0
    scale = 20**-0.5 if name == "gemma3" else 16**-0.5
    expected = (
        scale
        * 16
        * gain**2
        * (stretch or (0.1 * torch.tensor(4.0).log().item() + 1) ** 2)
    )
    assert now.tolist() == pytest.approx([expected] * 4, rel=1e-5)
    assert reached(model, TOKENS).tolist() == pytest.approx([expected] * 4, rel=1e-3)


class Written(nn.Module):
    """Attention by hand, q and k through `norm`."""

    def __init__(self, norm):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.gain, self.bias = (
            nn.Parameter(torch.rand(2, 1, 8)),
            nn.Parameter(torch.rand(2, 1, 8)),
        )
        self.norm = norm

    def normed(self, x):
        x = to_heads(x, 2, 8)
        if self.norm == "l2":
            return F.normalize(x, dim=-1) * self.gain
        if self.norm == "l2 by hand, times √d":
            return x / x.norm(dim=-1, keepdim=True) * 8**0.5 * self.gain
        if self.norm == "layer with bias":
            return F.layer_norm(x, (8,)) * self.gain + self.bias
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        q, k, v = (
            self.normed(self.q(x)),
            self.normed(self.k(x)),
            to_heads(self.v(x), 2, 8),
        )
        return (0.5 * (q @ k.mT)).softmax(-1) @ v


@pytest.mark.parametrize(
    "norm", ["l2", "l2 by hand, times √d", "layer with bias", "no gain"]
)
@torch.no_grad()
def test_norms_written_by_hand_are_told(norm):
    torch.manual_seed(0)
    model, x = Written(norm), torch.randn(2, 9, 16)
    gain, bias = model.gain.squeeze(1), model.bias.squeeze(1)
    longest = {
        "l2": gain.amax(1),
        "l2 by hand, times √d": 8**0.5 * gain.amax(1),
        "layer with bias": 8**0.5 * gain.amax(1) + bias.norm(dim=1),
        "no gain": torch.full((2,), 8**0.5),
    }[norm]
    now = bound(model, x)
    assert torch.allclose(now, 0.5 * longest.square(), rtol=1e-5)
    assert (reached(model, x) <= now * (1 + 1e-5)).all()
