"""What a q/k norm costs a trained model when it is inserted naively and with fitted gains: `python -m benchmarks.retrofit`.

Each row trains a Llama of two layers (4 heads, 2 key heads) for 100 steps on sequences whose second half repeats the
first, fits the gains on 64 further sequences, and measures KL(old ‖ new) on 80 others, in nats per token.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import Tensor, nn

import qkeel
from qkeel.remedies.retrofit import RetrofitConfig

VOCABULARY, LENGTH = 16, 24
# Width, seed, and gain of the norm.
CASES = (
    (64, 0, "dim"),
    (64, 1, "dim"),
    (64, 2, "dim"),
    (96, 0, "dim"),
    (64, 0, "head_dim"),
    (64, 0, "head"),
)


def sequences(count: int, generator: torch.Generator) -> Tensor:
    """Tokens [count LENGTH], each of which has three successors, until the sequence is repeated."""
    rule = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=rule)
    tokens = torch.zeros(count, LENGTH // 2, dtype=torch.long)
    tokens[:, 0] = torch.randint(VOCABULARY, (count,), generator=generator)
    for i in range(1, LENGTH // 2):
        choice = torch.randint(3, (count,), generator=generator)
        tokens[:, i] = successors[tokens[:, i - 1], choice]
    return tokens.repeat(1, 2)


def trained(width: int, seed: int, generator: torch.Generator, steps: int) -> nn.Module:
    """A Llama after this many steps."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        tokens = sequences(8, generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    """Prints the table of docs/tutorials/retrofit.md."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retrofit", description=__doc__
    )
    parser.add_argument("--toy", action="store_true", help="only to see that it runs")
    toy = parser.parse_args().toy
    print("| width, seed, gain | naive insertion | gains fitted |")
    for width, seed, gain in CASES[: 2 if toy else None]:
        generator = torch.Generator().manual_seed(1)
        model = trained(width, seed, generator, 2 if toy else 100)
        size = 2 if toy else 16
        batches = [sequences(size, generator) for _ in range(4)]
        # The last fifth of the batches, which retrofit leaves out of its fit.
        batches.append(sequences(5 * size, generator))
        report = qkeel.retrofit(
            model,
            f"qk_norm:gain={gain}",
            batches,
            config=RetrofitConfig(iterations=2 if toy else 40),
        ).report
        naive, fitted = report.naive.kl, report.gap.kl
        cells = f"{naive:.3f} | {fitted:.4f} ({naive / fitted:.0f}×)"
        print(f"| {width}, {seed}, `{gain}` | {cells} |")


if __name__ == "__main__":
    main()
