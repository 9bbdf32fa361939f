"""Whether QK-Clip may read SDPA's own logsumexp on a GPU: bits, bounds and cost of each fused operator.

`python -m benchmarks.on_gpu.logsumexp` calls F.scaled_dot_product_attention with one backend allowed and the operator
behind it, whose logsumexp is handed out: are output and gradients the same bits (1), is every largest logit at most the
logsumexp (1), and what do both take, forward and backward, side by side. On a CPU (--device cpu --toy) it is the
operator that `qk_clip` uses there by default; on a GPU the clip reads q and k until this table has been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Bench, Case
from benchmarks.on_gpu.machine import DEVICE, Clock, write

ATEN = torch.ops.aten
# What torch calls a call that wants gradients, with the logsumexp that backward needs.
OPERATORS: dict[str, dict[SDPBackend, Callable[[Tensor, Tensor, Tensor], Any]]] = {
    "cpu": {
        SDPBackend.FLASH_ATTENTION: lambda q, k, v: (
            ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ),
    },
    "cuda": {
        SDPBackend.FLASH_ATTENTION: lambda q, k, v: (
            ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        ),
        SDPBackend.EFFICIENT_ATTENTION: lambda q, k, v: (
            ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        ),
        SDPBackend.CUDNN_ATTENTION: lambda q, k, v: (
            ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        ),
    },
}
ROUNDED = 1 + 1e-4  # a row of one key: its logsumexp is its logit, rounded


def passes(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    above: Tensor,
) -> tuple[Tensor, ...]:
    """The output of one attention and the gradients of q, k and v."""
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, above))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, measures and writes after each operator."""
    bench = Bench("on_gpu.logsumexp", __doc__, arguments, rounds=10, writes=True, flags=DEVICE)  # fmt: skip
    device, clock = bench.options.device, Clock(bench.options.device)
    b, h, t, d = (1, 2, 16, 8) if bench.toy else (4, 16, 4096, 128)
    dtype = torch.float32 if bench.toy else torch.bfloat16
    q, k, v, above = (
        torch.randn(b, h, t, d, device=device, dtype=dtype, requires_grad=n < 3)
        for n in range(4)
    )
    for backend, operator in OPERATORS[device].items():

        def public(*inputs: Tensor) -> Tensor:
            with sdpa_kernel(backend):  # noqa: B023
                return F.scaled_dot_product_attention(*inputs, is_causal=True)

        def with_bound(*inputs: Tensor) -> Tensor:
            out, lse, *_ = operator(*inputs)  # noqa: B023
            lse.view(b, h, -1).amax((0, 2))
            return out

        expected = passes(public, (q, k, v), above)
        again = passes(
            public, (q, k, v), above
        )  # some backward passes add in any order
        measured = passes(with_bound, (q, k, v), above)
        lse = operator(q, k, v)[1].detach().view(b, h, -1)[..., :t]
        largest = largest_logits(q.detach(), k.detach())
        over = (largest - lse.double()) / largest.abs().clamp_min(1.0)
        bench.numbers(
            f"{backend.name}: the operator behind SDPA",
            {
                "the same bits, of 4": sum(map(torch.equal, expected, measured)),
                "the public function twice": sum(map(torch.equal, expected, again)),
                "largest logits are bounded": float(over.max() <= ROUNDED - 1),
                "at the most over, relative": float(over.max()),
            },
        )
        cases: dict[str, Case] = {
            "SDPA": lambda: passes(public, (q, k, v), above),
            "with the largest logsumexps": lambda: passes(with_bound, (q, k, v), above),
        }
        title = f"{backend.name}, forward and backward; {b}·{h}·{t}·{d}, {dtype}"
        bench.table(title, cases, warmup=3 if clock.cuda else 1, clock=clock)
        write(bench, "logsumexp")


def largest_logits(q: Tensor, k: Tensor) -> Tensor:
    """The largest logit [b h t] of each row of a causal call, in float32 by blocks of rows."""
    t, rows = q.shape[2], 512
    tops = []
    for start in range(0, t, rows):
        logits = (
            q[:, :, start : start + rows].float() @ k.float().mT * q.shape[-1] ** -0.5
        )
        visible = (
            torch.arange(t, device=q.device)
            <= torch.arange(start, min(t, start + rows), device=q.device)[:, None]
        )
        tops.append(logits.masked_fill(~visible, -torch.inf).amax(-1))
    return torch.cat(tops, 2).double()


if __name__ == "__main__":
    main()
