"""The attention kernels side by side: `python -m benchmarks.kernels` (--full takes about ten minutes).

The grid has one call of each kind for which kernels may differ. The first kernel that supports a call is the base of
its ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from benchmarks.measure import Bench, Cases
from benchmarks.timing import processor_ms
from qkeel.kernels.choose import KERNELS
from qkeel.ops import attention
from qkeel.spec import AttentionSpec, ReRope, Rope, Softcap
from qkeel.spec.call import make_call

# What is applied between q·k and the weights. "folded": only the scale and causality; "masked": a mask; "capped": a
# cap; "distance": a position encoding that cannot be folded into q and k.
Form = Literal["folded", "masked", "capped", "distance"]
SPECS: dict[Form, AttentionSpec] = {
    "folded": AttentionSpec(position=Rope()),
    "masked": AttentionSpec(position=Rope()),
    "capped": AttentionSpec(position=Rope(), cap=Softcap(50.0)),
    "distance": AttentionSpec(position=ReRope(window=256)),
}
TOKENS = (1, 128, 512, 2048)  # query tokens
CACHED = 1024  # keys that one query attends to in decoding
AT_ONCE = 1024  # tokens of a batch of short sequences


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work to measure."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    head_dims: tuple[int, ...] = (64, 128)
    forms: tuple[Form, ...] = tuple(SPECS)
    heads: int = 8
    shrink: int = (
        1  # token counts are divided by it, to check only that everything runs
    )


FULL = Size()
QUICK = Size(dtypes=(torch.float32,), head_dims=(64,), forms=("folded", "masked"))
TOY = Size(dtypes=(torch.float32,), head_dims=(64,), heads=1, shrink=64)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call of the grid."""

    device: str
    dtype: torch.dtype
    head_dim: int
    form: Form
    gradient: bool
    statistics: bool
    tokens: int

    def __str__(self) -> str:
        parts = [
            self.form,
            str(self.dtype).removeprefix("torch."),
            f"heads of {self.head_dim}",
        ]
        parts += ["backward" if self.gradient else "forward", f"T = {self.tokens}"]
        return ", ".join([*parts, *["with statistics"] * self.statistics])


def grid(size: Size, device: str) -> Iterator[Cell]:
    """Yields every call to measure. A call with one query token is decoding, which has no gradient."""
    for dtype, head_dim, form, counted in itertools.product(
        size.dtypes, size.head_dims, size.forms, (False, True)
    ):
        for gradient, tokens in itertools.product((False, True), TOKENS):
            if not (gradient and tokens == 1):
                yield Cell(
                    device=device,
                    dtype=dtype,
                    head_dim=head_dim,
                    form=form,
                    gradient=gradient,
                    statistics=counted,
                    tokens=max(1, tokens // size.shrink),
                )


def cases(cell: Cell, size: Size) -> Cases:
    """Returns the call with each kernel that supports it, as a user would make it."""
    tensors = _tensors(cell, size)
    mask = None
    if cell.form == "masked":
        mask = torch.ones(
            tensors[0].shape[0],
            tensors[1].shape[2],
            dtype=torch.bool,
            device=cell.device,
        )
        mask[:, 0] = False  # a padded batch
    call = make_call(SPECS[cell.form], *tensors, mask=mask)
    above = torch.randn_like(tensors[0])

    def case(name: str) -> Callable[[], object]:
        def forward() -> Tensor:
            output = attention(
                *tensors,
                spec=SPECS[cell.form],
                mask=mask,
                impl=name,
                stats=cell.statistics,
            )
            return output[0] if cell.statistics else output

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), tensors, above)

        return both if cell.gradient else forward

    return {
        name: case(name)
        for name, kernel in KERNELS.items()
        if kernel.supports(call) is None
    }


def _tensors(cell: Cell, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with the memory layout that projections produce: the heads of a token are adjacent."""
    tokens = cell.tokens
    keys = CACHED // size.shrink if tokens == 1 else tokens
    batch = 1 if tokens == 1 else max(1, AT_ONCE // size.shrink // tokens)
    rng = torch.Generator().manual_seed(0)

    def projected(t: int) -> Tensor:
        x = torch.randn(batch, t, size.heads, cell.head_dim, generator=rng).to(
            cell.device, cell.dtype
        )
        return x.transpose(1, 2).requires_grad_(cell.gradient)

    return projected(tokens), projected(keys), projected(keys)


def gpu_ms(case: Callable[[], object], calls: int) -> float:
    """Returns the milliseconds per call on the current CUDA stream."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        case()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def main(arguments: list[str] | None = None) -> None:
    """Measures every call of the grid that at least two kernels support."""
    flags = {
        "--full": {
            "action": "store_true",
            "help": "every form, size of heads and dtype",
        }
    }
    flags |= {"--device": {"default": "cuda" if torch.cuda.is_available() else "cpu"}}
    bench = Bench("kernels", __doc__, arguments, rounds=5, flags=flags)
    size = TOY if bench.toy else FULL if bench.options.full else QUICK
    for cell in grid(size, bench.options.device):
        ways = cases(cell, size)
        if len(ways) > 1:
            calls = max(1, 16 // cell.tokens) if size.shrink == 1 else 1
            bench.table(
                str(cell),
                ways,
                calls,
                1,
                clock=processor_ms if cell.device == "cpu" else gpu_ms,
            )


if __name__ == "__main__":
    main()
