"""Models that know nothing of qkeel: of transformers, of torch, and hand-written ones, tiny."""

import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError

VOCAB, D, H, T = 40, 32, 4, 7
SMALL = {
    "hidden_size": D,
    "num_attention_heads": H,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}


def hf(name, impl, **more):
    """A model of transformers with random weights large enough for attention to matter."""
    import transformers as t

    t.logging.set_verbosity_error()
    torch.manual_seed(0)
    gpt2 = {"n_embd": D, "n_head": H, "n_layer": 2, "vocab_size": VOCAB}
    latent = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4}
    latent |= {"qk_nope_head_dim": 6, "v_head_dim": 6, "first_k_dense_replace": 2}
    grouped = {**SMALL, "num_key_value_heads": 2}
    kind, options = {
        "llama": ("Llama", grouped),
        "qwen2": ("Qwen2", grouped),
        "qwen3": ("Qwen3", {**grouped, "head_dim": 8}),
        "gpt2": ("GPT2", gpt2),
        "neox": ("GPTNeoX", SMALL),
        "bert": ("Bert", SMALL),
        "deepseek": ("DeepseekV3", {**SMALL, **latent, "num_key_value_heads": H}),
    }[name]
    config = getattr(t, f"{kind}Config")(**{**options, **more})
    auto = t.AutoModel if name == "bert" else t.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=impl).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.ndim == 2 and ("attn" in n or "attention" in n.lower()):
                p.mul_(4)
            elif p.ndim == 1 and n.endswith("bias"):
                p.normal_(std=0.2)
    return model


def example(name, batch=2, tokens=T):
    """Input of a model."""
    generator = torch.Generator().manual_seed(3)
    if name == "encoder":
        return torch.randn(batch, tokens, D, generator=generator)
    return torch.randint(0, VOCAB, (batch, tokens), generator=generator)


def out(model, x, **options):
    """The model's first output."""
    y = model(x, **options)
    return y if isinstance(y, Tensor) else y[0]


def encoder():
    """torch's own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(2)
    return model


class Conv1D(nn.Module):
    """y = x W + b, features in columns."""

    def __init__(self, n, m):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(n, m) * n**-0.5),
            nn.Parameter(torch.randn(m) * 0.1),
        )

    def forward(self, x):
        return (x.reshape(-1, x.shape[-1]) @ self.weight + self.bias).view(
            *x.shape[:-1], -1
        )


LAYOUTS = ("linear", "fused", "interleaved", "conv", "groups", "dims first")
# How the features of a fused projection are divided, and which axes come first: q, k, v [b h t d].
SPLITS = {
    "fused": ((3, 4, 4), (2, 0, 3, 1, 4)),
    "conv": ((3, 4, 4), (2, 0, 3, 1, 4)),
    "interleaved": ((4, 3, 4), (3, 0, 2, 1, 4)),
    "dims first": ((3, 4, 4), (2, 0, 4, 1, 3)),
}


class Hand(nn.Module):
    """A small GPT's attention, its q, k, v laid out in one way or another; `how`: eager or sdpa. Rows of d = 4."""

    def __init__(self, layout, how="eager", causal=True):
        super().__init__()
        torch.manual_seed(1)
        self.layout, self.how, self.causal, self.d = layout, how, causal, 4
        self.h, self.g = 4, 2 if layout in ("linear", "groups") else 4
        n = (self.h + 2 * self.g) * self.d
        if layout == "linear":
            self.q, self.k, self.v = (
                nn.Linear(16, m * self.d) for m in (self.h, self.g, self.g)
            )
        else:
            self.qkv = Conv1D(16, n) if layout == "conv" else nn.Linear(16, n)
        self.o = nn.Linear(16, 16)

    def heads(self, x):
        """q, k, v [b h t d] as they come."""
        if self.layout == "linear":
            return tuple(to_heads(f(x), -1, self.d) for f in (self.q, self.k, self.v))
        if self.layout == "groups":
            y = self.qkv(x).unflatten(-1, (self.g, -1, self.d))
            q, k, v = y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]
            return tuple(part.transpose(1, 2) for part in (q, k, v))
        sizes, order = SPLITS[self.layout]
        return self.qkv(x).unflatten(-1, sizes).permute(order).unbind(0)

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        k, v = (y.repeat_interleave(self.h // y.shape[1], dim=1) for y in (k, v))
        t = x.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        seen = causal if mask is None else causal & mask if self.causal else mask
        if self.how == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen if mask is not None else None,
                                               is_causal=mask is None)  # fmt: skip
        else:
            z = (q @ k.transpose(-2, -1)) * self.d**-0.5
            o = F.softmax(z.masked_fill(~seen, float("-inf")), dim=-1) @ v
        return self.o(from_heads(o))


def everything(model):
    """All that `remove()` must put back, names, order and identity."""
    return {
        name: {
            key: [(k, id(v)) for k, v in value.items()]
            if isinstance(value, dict)
            else id(value)
            for key, value in module.__dict__.items()
        }
        for name, module in model.named_modules()
    }


def assert_refused(model, remedy, x, optimizer=None):
    """The refusal of a remedy leaves a model, and what it computes, as they were."""
    before, y = everything(model), out(model, x)
    with pytest.raises(RefusedError):
        qkeel.apply(model, remedy, optimizer, batch=x)
    assert everything(model) == before
    assert torch.equal(out(model, x), y)


def jolted(
    model,
    names=("q_norm.weight", "k_norm.weight", "q_norm", "k_norm"),
    by=0.3,
):
    """Gains off their start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(names):
                p.add_(
                    by
                    * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(
                        p
                    )
                )
