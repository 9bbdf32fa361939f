"""One new token with a cache: norm and rotation of q and k, attention to the cache, and a whole module's step.

`python -m benchmarks.decode` prints the tables; --toy: small shapes; --only token, attention, latents or module.
Ratios: of norm and rotation to an operator that does nothing (torch.neg of one number); of attention to moving as many
bytes as one read of keys and values, of latents to a copy of them, which moves twice as many.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkeel
from benchmarks.measure import Bench, Case, Cases, by_native
from qkeel.kernels import compiled_decode as decode
from qkeel.kernels.encode import encoded
from qkeel.kernels.native import norm_rope
from qkeel.nn import MLA, LatentSizes
from qkeel.nn.mla_absorbed import attend_latents
from qkeel.spec import AttentionSpec, NoNorm, RMSNorm
from qkeel.spec.call import make_call

EMPTY = "torch.neg of one number"
COPY = "copy of k: the bytes of k and v"
Shape = tuple[int, int, int, int, int]  # batch, query heads, key heads, tokens in the cache, head size
SHAPES: list[Shape] = [
    (1, 32, 8, 4096, 64),
    (1, 32, 8, 4096, 128),
    (4, 8, 2, 4096, 64),
    (1, 8, 8, 4096, 64),
    (1, 8, 2, 128, 64),
]
TOY: Shape = (1, 4, 2, 40, 16)
LATENTS = [(b, h, s) for s in (512, 4096) for b in (1, 4) for h in (16, 32)]  # batch, heads, tokens in the cache
SIZES = LatentSizes(q_latent=1536, kv_latent=512, rope_dim=64, nope_dim=128, value_dim=128)
COPY_LATENTS, BARE = "copy of the latents", "no norm, compiled C++"


def token_cases() -> Cases:
    """Returns the ways from q [1 8 1 64] and k [1 2 1 64] of one token under qwen3's norm and RoPE."""
    number, pos = torch.ones(1), torch.tensor([[100]])
    spec = qkeel.preset("qwen3")
    q, k, params = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 1, 64), spec.init_params(8, 2, 64)
    gain, cos, sin = torch.ones(64), torch.rand(1, 1, 1, 32), torch.rand(1, 1, 1, 32)
    op, found = torch.ops.qkeel_native.norm_rope_two, norm_rope.functions()
    cases: Cases = {EMPTY: lambda: torch.neg(number)}
    if found is not None:
        encode = found.encode
        cases |= {
            "q and k, no dispatcher": lambda: encode(q, k, gain, gain, cos, sin, 1, 1, 1e-6),
        }
    cases |= {
        "q and k, one operator": lambda: op(q, k, gain, gain, cos, sin, 1, 1, 1e-6),
        "spec to q and k, compiled C++": by_native("1", lambda: encoded(spec, q, k, pos, pos, params)),
        "spec to q and k, torch": by_native("0", lambda: spec.encode(q, k, pos, pos, params)),
    }
    return cases


def attention_cases(shape: Shape, dtype: torch.dtype) -> Cases:
    """Returns one query per head over the whole cache. Copying k reads and writes as many bytes as reading k and v."""
    b, h, g, s, d = shape
    q = torch.randn(b, h, 1, d).to(dtype)
    k, v = (torch.randn(b, g, s, d).to(dtype) for _ in range(2))
    room = torch.empty_like(k)
    op = torch.ops.qkeel_native.decode
    return {
        COPY: lambda: room.copy_(k),
        "compiled C++": lambda: op(q, k, v, None, None, d**-0.5, 0.0, True, 0),
        "SDPA": lambda: sdpa(q, k, v, enable_gqa=h != g),
    }


def latent_cases(shape: tuple[int, int, int], sizes: LatentSizes, dtype: torch.dtype) -> Cases:
    """Returns one query per head over a cache of latents, with and without a factor per head and key."""
    b, h, s = shape
    width, head_dim = sizes.kv_latent + sizes.rope_dim, sizes.nope_dim + sizes.rope_dim
    q, held, inverse = torch.randn(b, h, 1, width).to(dtype), torch.randn(b, 1, s, width).to(dtype), torch.rand(b, h, s)
    call = make_call(AttentionSpec().core({})[0], q, held, held[..., : sizes.kv_latent], causal=False)
    room = torch.empty_like(held)
    cases: Cases = {COPY_LATENTS: lambda: room.copy_(held)}
    for native_is, how in (("1", "compiled C++"), ("0", "torch")):
        cases[f"no norm, {how}"] = by_native(native_is, lambda: attend_latents(call, None, head_dim))
        cases[f"QK-norm, {how}"] = by_native(native_is, lambda: attend_latents(call, inverse, head_dim))
    return cases


def latent_module_cases(shape: tuple[int, int, int], dim: int, sizes: LatentSizes) -> Cases:
    """Returns a token through nn.MLA after s others, as ratios to the compiled one without a norm."""
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
    return {
        BARE: by_native("1", plain),
        "QK-norm, compiled C++": by_native("1", normed),
        "no norm, torch": by_native("0", plain),
        "QK-norm, torch": by_native("0", normed),
    }


def module_cases(shape: Shape) -> Cases:
    """Returns a token through an attention module with qwen3's norm and rotation, and its cache."""
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
    return {
        "no norm, no rotation, torch": by_native("0", plain),
        "no norm, no rotation, compiled C++": by_native("1", plain),
        "norm and rotation, torch": by_native("0", normed),
        "norm and rotation, compiled C++": by_native("1", normed),
    }


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    kinds = {"token": _token, "attention": _attention, "latents": _latents, "module": _module}
    flags = {"--only": {"choices": [*kinds]}}
    bench = Bench("decode", __doc__, arguments, rounds=25, needs=[norm_rope.ready, decode.ready], flags=flags)
    for kind, tables in kinds.items():
        if bench.options.only in (None, kind):
            tables(bench)


def _token(bench: Bench) -> None:
    bench.table("norm + rope of q and k of one token", token_cases(), calls=10 if bench.toy else 300)


def _attention(bench: Bench) -> None:
    for shape in [TOY] if bench.toy else SHAPES:
        b, _, g, s, d = shape
        for dtype in (torch.float32, torch.bfloat16):
            title = "attention of one token, B{} H{} G{} S{} d{} {}".format(*shape, dtype)
            bench.table(title, attention_cases(shape, dtype), calls=1 if b * g * s * d > 1 << 18 else 30)


def _latents(bench: Bench) -> None:
    sizes = LatentSizes() if bench.toy else SIZES
    for shape in [(1, 4, 40)] if bench.toy else LATENTS:
        for dtype in (torch.float32, torch.bfloat16):
            title = "latents of {} sequences, {} heads, {} tokens, {}".format(*shape, dtype)
            bench.table(title, latent_cases(shape, sizes, dtype), calls=1 if shape[0] * shape[2] > 1024 else 4)
    for shape, dim in [((1, 4, 40), 64)] if bench.toy else [((1, 16, 4096), 2048), ((4, 16, 4096), 2048)]:
        title = "a token through MLA, {} sequences, {} heads, {} tokens".format(*shape)
        bench.table(title, latent_module_cases(shape, dim, sizes))


def _module(bench: Bench) -> None:
    for shape in [TOY] if bench.toy else [(1, 8, 2, 128, 64), (1, 32, 8, 4096, 64)]:
        bench.table("a token through a module, B{} H{} G{} S{} d{}".format(*shape), module_cases(shape), calls=5)


if __name__ == "__main__":
    main()
