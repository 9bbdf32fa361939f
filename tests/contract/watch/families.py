"""Tiny models of many families, and one training loop with everything that real ones do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from qkeel import preset, watch
from qkeel.monitor import Cadence
from qkeel.nn import Decoder, DecoderConfig

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def ids(seed: int, rows: int = 2, t: int = 8) -> Tensor:
    return torch.randint(
        3, 64, (rows, t), generator=torch.Generator().manual_seed(seed)
    )


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a model is built, fed and judged; `sites` is how many attentions one pass makes."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    sites: int = 2


def hf_loss(model: nn.Module, seed: int) -> Tensor:
    return model(input_ids=ids(seed), labels=ids(seed)).loss


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **options})
    )


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    )


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    assert config.attn_pdrop > 0
    return transformers.GPT2LMHeadModel(config)


def gpt_neox(**options: Any) -> nn.Module:
    config = transformers.GPTNeoXConfig(**SIZES, **options)
    return transformers.GPTNeoXForCausalLM(config)


def deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        kv_lora_rank=12,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def vit() -> nn.Module:
    sizes = {
        k: v
        for k, v in SIZES.items()
        if not k.endswith("token_id") and k != "vocab_size"
    }
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)
    )


def vit_loss(model: nn.Module, seed: int) -> Tensor:
    return model(pixel_values=noise(seed, 2, 3, 8, 8), labels=ids(seed)[:, 0] % 5).loss


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def torch_loss(model: nn.Module, seed: int) -> Tensor:
    return model(noise(seed, 2, 6, 32)).square().mean()


def decoder(**options: Any) -> nn.Module:
    spec = {
        "d_model": 32,
        "n_kv_heads": 2,
        "dropout": 0.1,
        "spec": preset("qwen3"),
        **options,
    }
    model = Decoder(DecoderConfig(vocab_size=64, **spec))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def token_loss(model: nn.Module, seed: int) -> Tensor:
    return nn.functional.cross_entropy(
        model(ids(seed)).flatten(0, 1), ids(seed + 1).flatten()
    )


class Mixed(nn.Module):
    """A convolution with batch norm, an own attention, one of torch's, one by hand, one frozen, and memory."""

    def __init__(self) -> None:
        super().__init__()
        from qkeel.nn import Attention

        self.stem, self.norm = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.own = Attention(32, 4, spec=preset("baseline"), dropout=0.1)
        self.torch = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.frozen = (
            nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
            .eval()
            .requires_grad_(False)
        )
        self.last = torch.zeros(())
        self.register_buffer("passes", torch.zeros(()))

    def train(self, mode: bool = True) -> Mixed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        with torch.no_grad():
            x = x + self.frozen(x)
        x = self.norm(self.stem(x.mT)).mT
        x = x + self.own(x)
        x = x + self.torch(x, x, x, need_weights=False)[0]
        z = (self.q(x) @ self.k(x).mT) * 32**-0.5
        x = x + torch.dropout(z.softmax(-1), 0.1, self.training) @ self.v(x)
        self.last = x.detach().mean()
        return x


FAMILIES = {
    "llama": Family(build=llama, loss=hf_loss),
    "qwen3": Family(build=qwen3, loss=hf_loss),
    "gemma2": Family(build=gemma2, loss=hf_loss),
    "gpt2": Family(build=gpt2, loss=hf_loss),
    "gpt_neox": Family(build=gpt_neox, loss=hf_loss),
    "deepseek_v3": Family(build=deepseek, loss=hf_loss),
    "vit": Family(build=vit, loss=vit_loss),
    "bert": Family(build=bert, loss=hf_loss),
    "t5": Family(build=t5, loss=hf_loss, sites=6),
    "torch_encoder": Family(build=torch_encoder, loss=torch_loss),
    "decoder": Family(build=decoder, loss=token_loss),
    "mixed": Family(build=Mixed, loss=torch_loss, sites=4),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training run left: everything that watching could have changed."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    random: Tensor
    evals: list[float]
    monitor: Any

    def same(self, other: Run) -> bool:
        """Whether no bit is different."""
        assert self.losses[-1] != self.losses[0]
        return (
            self.losses == other.losses
            and self.evals == other.evals
            and torch.equal(self.random, other.random)
            and same_tensors(self.state, other.state)
            and same_tensors(self.gradients, other.gradients)
        )


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) for name, x in a.items()
    )


def train(
    family: Family,
    *,
    every: int | Cadence | None,
    steps: int = 50,
    come: int = 10,
    go: int = 40,
    micro: int = 2,
    compiled: str = "",
    prepare: Callable[[nn.Module], None] = lambda model: None,
    around: Callable[[], Any] = torch.enable_grad,
) -> Run:
    """Micro-batches, clipping, a schedule, an evaluation every 7 steps; watched from step `come` to step `go`."""
    torch.manual_seed(0)
    model: nn.Module = family.build().train()
    prepare(model)
    runner: Any = torch.compile(model, backend=compiled) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    monitor, losses, evals = None, [], []
    for step in range(steps):
        if step == come and every is not None:
            # A compiled module of torch's own is seen at its wrapper only.
            monitor = watch(
                runner if isinstance(model, nn.TransformerEncoder) else model,
                optimizer,
                every=every,
            )
        if step == go and monitor is not None:
            monitor.remove()
        for part in range(micro):
            with around():
                loss = family.loss(runner, step * micro + part) / micro
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step < steps - 1:
            optimizer.zero_grad()
        if step % 7 == 0:
            model.eval()
            with torch.no_grad():
                evals.append(family.loss(runner, step).item())
            model.train()
    return Run(
        losses=losses,
        state={name: x.detach().clone() for name, x in model.state_dict().items()},
        gradients={
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        },
        random=torch.get_rng_state(),
        evals=evals,
        monitor=monitor,
    )
