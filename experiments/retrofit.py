"""What naive insertion of a q/k norm costs a tiny trained Llama, and what is left after a retrofit.

python -m experiments.retrofit [--toy]
"""

from __future__ import annotations

import time

import torch
import transformers
from benchmarks.measure import Bench
from torch import Tensor, nn

import qkeel
from qkeel.remedies.retrofit import RetrofitConfig
from qkeel.remedies.retrofit.replay import Reference

VOCABULARY, LENGTH = 16, 24


def text(n: int, rng: torch.Generator) -> Tensor:
    """Each token has three successors; the second half of a sequence repeats the first."""
    after = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(0))
    x = torch.zeros(n, LENGTH, dtype=torch.long)
    x[:, 0] = torch.randint(0, VOCABULARY, (n,), generator=rng)
    for i in range(1, LENGTH // 2):
        x[:, i] = after[x[:, i - 1], torch.randint(0, 3, (n,), generator=rng)]
    x[:, LENGTH // 2 :] = x[:, : LENGTH // 2]
    return x


def trained(width: int, seed: int, rng: torch.Generator, steps: int = 100) -> nn.Module:
    """Two layers of four heads on two key heads."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        x = text(8, rng)
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    return model.eval()


CASES = ((64, 0, "dim"), (64, 1, "dim"), (96, 0, "dim"), (64, 0, "head_dim"), (64, 0, "head"))


def main(arguments: list[str] | None = None) -> None:
    """The table of docs/tutorials/retrofit.md."""
    toy = Bench("retrofit", __doc__, arguments, rounds=None).toy
    print("| width, seed, gain | naive | gains | and balanced | and 40 steps on q, k | and 100 |\n" + "|---" * 6 + "|")
    for width, seed, gain in ((16, 0, "dim"),) if toy else CASES:
        rng = torch.Generator().manual_seed(1)
        model = trained(width, seed, rng, 5 if toy else 100)
        batches = [text(16, rng) for _ in range(4)]
        reference = Reference(model, [((text(64, rng),), {})])
        with qkeel.apply(model, "qk_norm", batch=batches[0]):
            naive = reference.gap().kl
        cells = [f"{naive:.3f}"]
        for steps, balance in ((0, False), (0, True), *(((2, True),) if toy else ((40, True), (100, True)))):
            start = time.perf_counter()
            how = RetrofitConfig(distil=steps, balance=balance, lr=3e-3)
            with qkeel.retrofit(model, f"qk_norm:gain={gain}", batches, config=how):
                kl = reference.gap().kl
            cells.append(f"{kl:.4f} ({naive / kl:.0f}x, {time.perf_counter() - start:.0f} s)")
        print(f"| {width}, {seed}, {gain} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
