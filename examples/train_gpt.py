"""Trains a small GPT on the bytes of the Python standard library's own sources. Needs torch; nothing is downloaded.

python train_gpt.py
python train_gpt.py --lr 3e-2 --compile
"""

import argparse
import math
import random
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 128
    vocab_size: int = 256  # bytes
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    flash: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(
            config.n_embd, 3 * config.n_embd, bias=False
        )  # queries, keys, values
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.flash = config.flash
        if not self.flash:
            mask = torch.tril(torch.ones(config.block_size, config.block_size))
            self.register_buffer(
                "mask",
                mask.view(1, 1, config.block_size, config.block_size),
                persistent=False,
            )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (
            z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for z in (q, k, v)
        )
        dropout = self.dropout if self.training else 0.0
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = F.dropout(F.softmax(att, dim=-1), p=dropout) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def load_bytes(limit):
    """The standard library's sources in a fixed, shuffled order: most for training, the last tenth for validation."""
    files = sorted(p for p in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    text = b"".join(p.read_bytes() for p in files)[:limit]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def get_batch(data, config, args):
    starts = torch.randint(
        len(data) - config.block_size - 1, (args.batch_size,)
    ).tolist()
    x = torch.stack([data[i : i + config.block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in starts])
    return x.to(args.device), y.to(args.device)


def get_lr(step, args):
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    ratio = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * ratio)))


@torch.no_grad()
def estimate_loss(model, data, config, args):
    model.eval()
    losses = [
        model(*get_batch(data, config, args))[1].item()
        for _ in range(args.eval_batches)
    ]
    model.train()
    return sum(losses) / len(losses)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches per step"
    )
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument(
        "--no-flash",
        action="store_true",
        help="write attention out instead of calling torch's",
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--save", type=Path, help="where to put the weights at the end")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    train_data, val_data = load_bytes(2_000_000)
    config = GPTConfig(
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        dropout=args.dropout,
        flash=not args.no_flash,
    )
    raw_model = GPT(config).to(args.device)
    print(
        f"{sum(p.numel() for p in raw_model.parameters()) / 1e6:.2f}M parameters, {len(train_data):,} bytes"
    )

    matrices = [p for p in raw_model.parameters() if p.dim() >= 2]
    vectors = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    model = (
        torch.compile(raw_model, backend=args.backend) if args.compile else raw_model
    )

    started = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, args)
        for _ in range(args.accumulate):
            x, y = get_batch(train_data, config, args)
            _, loss = model(x, y)
            (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            print(
                f"step {step}: loss {loss.item():.4f}, {time.time() - started:.0f} s",
                flush=True,
            )
        if args.eval_every and (step + 1) % args.eval_every == 0:
            print(
                f"step {step + 1}: val loss {estimate_loss(model, val_data, config, args):.4f}",
                flush=True,
            )
    if args.save:
        torch.save(raw_model.state_dict(), args.save)


if __name__ == "__main__":
    main()
