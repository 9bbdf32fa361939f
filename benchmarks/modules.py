"""Attention modules end to end: forward and forward+backward, QK-norm on and off, statistics, activation memory.

`python -m benchmarks.modules`: qkeel's by torch and by compiled kernels, without and with the largest logit and the
entropy of every head of every call, against projections and SDPA alone and against their peers.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from benchmarks.measure import Bench, Case, Cases, between, by_native
from qkeel.kernels.attention import compiled as native

FULL = {"dim": 512, "heads": 8, "batch": 4, "length": 512}
TOY = {"dim": 64, "heads": 1, "batch": 1, "length": 16}
BASE = "GEMM + SDPA (no norm, no rope)"
NORMED, WATCHED = "qkeel rope + norm, C++", "qkeel rope + norm, largest logit, C++"


class Bare(nn.Module):
    """Projections and SDPA, nothing else: the base of all ratios."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend: Callable[..., Tensor] = functools.partial(
            F.scaled_dot_product_attention, is_causal=True
        )
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def ours(dim: int, heads: int, norm: bool, impl: str = "auto") -> nn.Module:
    """qkeel's module with RoPE, with and without QK-norm (Qwen3's recipe)."""
    module = qkeel.nn.Attention(
        dim, heads, spec=qkeel.preset("qwen3" if norm else "baseline")
    )
    module.impl = impl
    return module


class Transformers(nn.Module):
    """The attention of a transformers model with SDPA; without the norm its modules are replaced by identities."""

    def __init__(
        self, family: str, dim: int, heads: int, norm: bool, length: int
    ) -> None:
        super().__init__()
        lower = f"transformers.models.{family.lower()}"
        config_of = getattr(
            importlib.import_module(f"{lower}.configuration_{family.lower()}"),
            f"{family}Config",
        )
        modeling = importlib.import_module(f"{lower}.modeling_{family.lower()}")
        sizes = {
            "hidden_size": dim,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }
        config = config_of(**sizes, head_dim=dim // heads, attn_implementation="sdpa")
        self.inner = getattr(modeling, f"{family}Attention")(config, layer_idx=0)
        if not norm:
            self.inner.q_norm, self.inner.k_norm = nn.Identity(), nn.Identity()
        rotary = getattr(modeling, f"{family}RotaryEmbedding")(config)
        cos, sin = rotary(torch.zeros(1, length, dim), torch.arange(length)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(
            x, position_embeddings=(self.cos, self.sin), attention_mask=None
        )[0]


class XTransformers(nn.Module):
    """x-transformers' attention, flash, rotary."""

    def __init__(self, dim: int, heads: int, norm: bool, length: int) -> None:
        super().__init__()
        from x_transformers.x_transformers import Attention, RotaryEmbedding

        options = {"qk_norm": True, "qk_norm_dim_scale": True} if norm else {}
        self.inner = Attention(
            dim, dim_head=dim // heads, heads=heads, causal=True, flash=True, **options
        )
        self.register_buffer(
            "freqs", RotaryEmbedding(dim // heads)(torch.arange(length))[0]
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, rotary_pos_emb=(self.freqs, 1.0))
        return out[0] if isinstance(out, tuple) else out


class TorchMHA(nn.Module):
    """torch.nn.MultiheadAttention: no rope, no norm."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(
            x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False
        )[0]


class Watched(nn.Module):
    """qkeel's attention module with its statistics read in every call."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.inner = ours(dim, heads, norm=True)
        self.seen: object = None

    def forward(self, x: Tensor) -> Tensor:
        m = self.inner
        q, k, v = (
            p(x).unflatten(-1, (m.n_heads, m.head_dim)).transpose(1, 2)
            for p in (m.q_proj, m.k_proj, m.v_proj)
        )
        out, self.seen = qkeel.attention(
            q, k, v, spec=m.spec, params=m.spec_params(), impl="native", stats="max"
        )
        return m.o_proj(out.transpose(1, 2).flatten(2))


def modules(dim: int, heads: int, length: int, compiled: bool) -> dict[str, nn.Module]:
    """Returns every module of the table; what inductor compiles is of another process than the environment's."""
    made: dict[str, Callable[[], nn.Module]] = {
        BASE: lambda: Bare(dim, heads),
        "qkeel rope, torch": lambda: ours(dim, heads, False),
        "qkeel rope + norm, torch": lambda: ours(dim, heads, True),
        "transformers Qwen3 rope": lambda: Transformers(
            "Qwen3", dim, heads, False, length
        ),
        "transformers Qwen3 rope + norm": lambda: Transformers(
            "Qwen3", dim, heads, True, length
        ),
        "transformers OLMo 2 rope": lambda: Transformers(
            "Olmo2", dim, heads, False, length
        ),
        "transformers OLMo 2 rope + norm": lambda: Transformers(
            "Olmo2", dim, heads, True, length
        ),
        "x-transformers rope": lambda: XTransformers(dim, heads, False, length),
        "x-transformers rope + norm": lambda: XTransformers(dim, heads, True, length),
        "nn.MultiheadAttention (no rope)": lambda: TorchMHA(dim, heads, length),
    }
    for name in ("transformers Qwen3", "transformers OLMo 2") if compiled else ():
        make = made[f"{name} rope + norm"]
        made[f"{name} rope + norm, compiled"] = lambda make=make: torch.compile(make())  # type: ignore[return-value]
    if native.ready():
        made["qkeel rope, C++"] = lambda: ours(dim, heads, False, impl="native")
        made[NORMED] = lambda: ours(dim, heads, True, impl="native")
        made[WATCHED] = lambda: Watched(dim, heads)
    return available(made)


def available(made: dict[str, Callable[[], nn.Module]]) -> dict[str, nn.Module]:
    """Returns the modules that can be made; one whose library is not installed is left out, and a line says so."""
    found = {}
    for name, make in made.items():
        try:
            torch.manual_seed(0)
            found[name] = make()
        except ImportError as error:
            print(f"  left out: {name} ({error})")
    return found


def call(module: nn.Module, x: Tensor, above: Tensor | None) -> Case:
    """Returns a forward pass without gradients, or with `above`, the gradient of the output, forward and backward."""
    leaf = x.clone().requires_grad_(above is not None)

    def run() -> None:
        with torch.set_grad_enabled(above is not None):
            out = module(leaf)
        if above is not None:
            out.backward(above)

    return run


def both_directions(
    made: dict[str, nn.Module], batch: int, length: int, dim: int
) -> dict[str, Cases]:
    """Returns the cases of every module: forward, and forward with backward; those of C++ with compiled kernels."""
    x, above = torch.randn(batch, length, dim), torch.randn(batch, length, dim)

    def cases(above: Tensor | None) -> Cases:
        return {
            name: by_native("1" if "C++" in name else "0", call(m, x, above))
            for name, m in made.items()
        }

    return {"forward": cases(None), "forward + backward": cases(above)}


def tables(bench: Bench, dim: int, heads: int, batch: int, length: int) -> None:
    """Prints the times of every module, their tokens a second, and the memory each keeps for the backward pass."""
    sizes = {"dim": dim, "heads": heads, "batch": batch, "length": length}
    made = modules(dim, heads, length, bench.compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, cases in both_directions(made, batch, length, dim).items():
            rows = bench.table(f"attention modules, {kind}, {sizes}", cases)
            for row in rows if WATCHED in made else ():
                rate, ratio = (
                    batch * length / statistics.median(row.times) * 1e3,
                    between(rows, row.name, WATCHED),
                )
                print(
                    f"  {rate:9.0f} tokens/s   {WATCHED!r} is {ratio:.3f} times as fast as {row.name!r}"
                )
        bench.numbers(
            "activation memory, units of batch·length·dim float32",
            activation_memory(**sizes),
        )


def activation_memory(
    dim: int, heads: int, batch: int, length: int
) -> dict[str, float]:
    """Returns the bytes kept for backward by one module, in units of batch·length·dim float32 numbers."""
    units = {}
    for name, module in modules(dim, heads, length, compiled=False).items():
        seen: dict[int, int] = {}

        def pack(t: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = t.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return t

        x = torch.randn(batch, length, dim, requires_grad=True)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        weights |= {b.untyped_storage().data_ptr() for b in module.buffers()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(x)
        kept = sum(n for pointer, n in seen.items() if pointer not in weights)
        units[name] = kept / (4 * batch * length * dim)
        del out
    return units


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    bench = Bench(
        "modules", __doc__, arguments, needs=[native.ready], peer="the compiled peers"
    )
    tables(bench, **(TOY if bench.toy else FULL))


if __name__ == "__main__":
    main()
