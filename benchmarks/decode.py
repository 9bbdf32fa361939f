"""One new token with a cache: norm and rotation of q and k, attention to the cache, and a whole module's step.

`python -m benchmarks.decode` prints the tables; --toy: small shapes; --only token, attention, latents or module.
Ratios: of norm and rotation to an operator that does nothing (torch.neg of one number); of attention to moving as many
bytes as one read of keys and values, of latents to a copy of them, which moves twice as many.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.decode")

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkeel
from benchmarks.measure import Row, interleave, show
from qkeel.kernels import native
from qkeel.kernels.native import decode
from qkeel.kernels.native.norm_rope import functions
from qkeel.nn import MLA, LatentSizes
from qkeel.nn.absorbed import attend_latents
from qkeel.spec import AttentionSpec, NoNorm, RMSNorm
from qkeel.spec.call import make_call

EMPTY = "torch.neg of one number"
COPY = "copy of k: the bytes of k and v"
# batch, query heads, key heads, tokens in the cache, head size
SHAPES = [(1, 32, 8, 4096, 64), (1, 32, 8, 4096, 128), (4, 8, 2, 4096, 64), (1, 8, 8, 4096, 64), (1, 8, 2, 128, 64)]
LATENTS = [(b, h, s) for s in (512, 4096) for b in (1, 4) for h in (16, 32)]  # batch, heads, tokens in the cache
SIZES = LatentSizes(q_latent=1536, kv_latent=512, rope_dim=64, nope_dim=128, value_dim=128)
COPY_LATENTS, BARE = "copy of the latents", "no norm, compiled C++"
Case = Callable[[], object]


def by(native_is: str, case: Case) -> Case:
    """The case with compiled kernels ("1") or without ("0")."""

    def run() -> object:
        os.environ["QKEEL_NATIVE"] = native_is
        return case()

    return run


def bench_token(rounds: int) -> list[Row]:
    """q [1 8 1 64] and k [1 2 1 64] of one token under qwen3's norm and RoPE."""
    number, pos = torch.ones(1), torch.tensor([[100]])
    spec = qkeel.preset("qwen3")
    q, k, params = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64), spec.init_params(8, 2, 64)
    gain, cos, sin = torch.ones(64), torch.rand(1, 1, 1, 32), torch.rand(1, 1, 1, 32)
    op, found = torch.ops.qkeel_native.norm_rope_two, functions()
    cases: dict[str, Case] = {EMPTY: lambda: torch.neg(number)}
    if found is not None:
        encode = found.encode
        cases |= {
            "q and k, no dispatcher": lambda: encode(q, k, gain, gain, cos, sin, 1, 1, 1e-6, False),
            "q and k, no dispatcher, in place": lambda: encode(q, k, gain, gain, cos, sin, 1, 1, 1e-6, True),
        }
    cases |= {
        "q and k, one operator": lambda: op(q, k, gain, gain, cos, sin, 1, 1, 1e-6),
        "spec to q and k, compiled C++": by("1", lambda: native.encoded(spec, q, k, pos, pos, params)),
        "spec to q and k, torch": by("0", lambda: spec.encode(q, k, pos, pos, params)),
    }
    return interleave(cases, EMPTY, rounds, calls=300)


def bench_attention(shape: tuple[int, int, int, int, int], dtype: torch.dtype, rounds: int) -> list[Row]:
    """One query per head over the whole cache. Copying k reads and writes as many bytes as reading k and v."""
    b, h, g, s, d = shape
    q = torch.randn(b, h, 1, d).to(dtype)
    k, v = (torch.randn(b, g, s, d).to(dtype) for _ in range(2))
    room = torch.empty_like(k)
    op = torch.ops.qkeel_native.decode
    cases: dict[str, Case] = {
        COPY: lambda: room.copy_(k),
        "compiled C++": lambda: op(q, k, v, None, None, d**-0.5, 0.0, True, 0),
        "SDPA": lambda: sdpa(q, k, v, enable_gqa=h != g),
    }
    return interleave(cases, COPY, rounds, calls=1 if b * g * s * d > 1 << 18 else 30)


def bench_latents(shape: tuple[int, int, int], sizes: LatentSizes, dtype: torch.dtype, rounds: int) -> list[Row]:
    """One query per head over a cache of latents, with and without a factor per head and key."""
    b, h, s = shape
    width, head_dim = sizes.kv_latent + sizes.rope_dim, sizes.nope_dim + sizes.rope_dim
    q, held, inverse = torch.randn(b, h, 1, width).to(dtype), torch.randn(b, 1, s, width).to(dtype), torch.rand(b, h, s)
    call = make_call(AttentionSpec().core({})[0], q, held, held[..., : sizes.kv_latent], causal=False)
    room = torch.empty_like(held)
    cases: dict[str, Case] = {COPY_LATENTS: lambda: room.copy_(held)}
    for native_is, how in (("1", "compiled C++"), ("0", "torch")):
        cases[f"no norm, {how}"] = by(native_is, lambda: attend_latents(call, None, head_dim))
        cases[f"QK-norm, {how}"] = by(native_is, lambda: attend_latents(call, inverse, head_dim))
    return interleave(cases, COPY_LATENTS, rounds, calls=1 if b * s > 1024 else 4)


def bench_latent_module(shape: tuple[int, int, int], dim: int, sizes: LatentSizes, rounds: int) -> list[Row]:
    """A token through nn.MLA after s others, as ratios to the compiled one without a norm."""
    b, h, s = shape
    x = torch.randn(b, 1, dim)

    def step(spec: AttentionSpec) -> Case:
        module = MLA(dim, h, sizes=sizes, spec=spec, latent_norm=True).eval()
        cache, inverse = module.new_cache(s + 8), None if isinstance(spec.norm, NoNorm) else torch.rand(b, h, s)
        cache.append(torch.randn(b, 1, s, sizes.kv_latent), torch.randn(b, 1, s, sizes.rope_dim), inverse)

        def run() -> Tensor:
            out = module(x, cache=cache)
            cache.length = s
            return out

        return run

    plain, normed = step(AttentionSpec()), step(AttentionSpec(norm=RMSNorm(gain="dim")))
    cases = {
        BARE: by("1", plain),
        "QK-norm, compiled C++": by("1", normed),
        "no norm, torch": by("0", plain),
        "QK-norm, torch": by("0", normed),
    }
    return interleave(cases, BARE, rounds)


def bench_module(shape: tuple[int, int, int, int, int], rounds: int) -> list[Row]:
    """A token through an attention module with qwen3's norm and rotation, and its cache."""
    b, h, g, s, d = shape
    x, past = torch.randn(b, 1, h * d), torch.randn(b, s, h * d)

    def step(name: str) -> Case:
        module = qkeel.nn.Attention(h * d, h, g, spec=qkeel.preset(name)).eval()
        cache = module.new_cache(s + 8)
        module(past, cache=cache)

        def run() -> Tensor:
            out = module(x, cache=cache)
            cache.length -= 1
            return out

        return run

    normed, plain = step("qwen3"), step("baseline")
    base = "no norm, no rotation, torch"
    cases = {
        base: by("0", plain),
        "no norm, no rotation, compiled C++": by("1", plain),
        "norm and rotation, torch": by("0", normed),
        "norm and rotation, compiled C++": by("1", normed),
    }
    return interleave(cases, base, rounds, calls=5)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", choices=["token", "attention", "latents", "module"])
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["QKEEL_NATIVE"] = "1"
    if not (native.ready() and decode.ready()):
        raise SystemExit("nothing is compiled here: see docs/native.md")
    rounds, shapes = (2, [(1, 4, 2, 40, 16)]) if args.toy else (args.rounds, SHAPES)
    if args.only in (None, "token"):
        show("norm + rope of q and k of one token", bench_token(rounds), EMPTY)
    if args.only in (None, "attention"):
        for b, h, g, s, d in shapes:
            for dtype in (torch.float32, torch.bfloat16):
                title = f"attention of one token, B{b} H{h} G{g} S{s} d{d} {dtype}"
                show(title, bench_attention((b, h, g, s, d), dtype, rounds), COPY)
    if args.only in (None, "latents"):
        _latents(args.toy, rounds)
    if args.only in (None, "module"):
        for shape in shapes[:1] if args.toy else [(1, 8, 2, 128, 64), (1, 32, 8, 4096, 64)]:
            show("a token through a module, B{} H{} G{} S{} d{}".format(*shape), *_module(shape, rounds))


def _latents(toy: bool, rounds: int) -> None:
    shapes, sizes = ([(1, 4, 40)], LatentSizes()) if toy else (LATENTS, SIZES)
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            title = "latents of {} sequences, {} heads, {} tokens, {}".format(*shape, dtype)
            show(title, bench_latents(shape, sizes, dtype, rounds), COPY_LATENTS)
    for shape, dim in [((1, 4, 40), 64)] if toy else [((1, 16, 4096), 2048), ((4, 16, 4096), 2048)]:
        title = "a token through MLA, {} sequences, {} heads, {} tokens".format(*shape)
        show(title, bench_latent_module(shape, dim, sizes, rounds), BARE)


def _module(shape: tuple[int, int, int, int, int], rounds: int) -> tuple[list[Row], str]:
    rows = bench_module(shape, rounds)
    return rows, rows[0].name


if __name__ == "__main__":
    main()
