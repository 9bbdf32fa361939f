"""One new token with a cache: norm and rotation of q and k, attention to the cache, and a whole module's step.

`python -m benchmarks.decode` prints the tables; --toy: small shapes; --only token, attention, latents or module.
Ratios: of norm and rotation to an operator that does nothing (torch.neg of one number); of attention to moving as many
bytes as one read of keys and values, of latents to a copy of them, which moves twice as many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkeel
from benchmarks.measure import Bench, Case, Cases, by_native
from qkeel.kernels.decoding import compiled as decode
from qkeel.kernels.norm_rope.encode import encoded
from qkeel.nn import MLA, Attention, KVCache, LatentCache, LatentSizes
from qkeel.nn.mla import attend_latents
from qkeel.spec import AttentionSpec, NoNorm, RMSNorm, Rope
from qkeel.spec.call import make_call

EMPTY = "torch.neg of one number"
COPY = "copy of k: the bytes of k and v"
Shape = tuple[
    int, int, int, int, int
]  # batch, query heads, key heads, tokens in the cache, head size
SHAPES: list[Shape] = [
    (1, 32, 8, 4096, 64),
    (1, 32, 8, 4096, 128),
    (4, 8, 2, 4096, 64),
    (1, 8, 8, 4096, 64),
    (1, 8, 2, 128, 64),
]
TOY: Shape = (1, 4, 2, 40, 16)
LATENTS = [
    (b, h, s) for s in (512, 4096) for b in (1, 4) for h in (16, 32)
]  # batch, heads, tokens in the cache
SIZES = LatentSizes(
    q_latent=1536, kv_latent=512, rope_dim=64, nope_dim=128, value_dim=128
)
COPY_LATENTS, BARE = "copy of the latents", "no norm, compiled C++"
NORMED = AttentionSpec(norm=RMSNorm(gain="dim"))


def token_cases() -> Cases:
    """Returns the ways from q [1 8 1 64] and k [1 2 1 64] of one token under qwen3's norm and RoPE."""
    number, pos = torch.ones(1), torch.tensor([[100]])
    spec = qkeel.preset("qwen3")
    q, k, params = (
        torch.randn(1, 8, 1, 64),
        torch.randn(1, 2, 1, 64),
        spec.init_params(8, 2, 64),
    )
    gain, cos, sin = torch.ones(64), torch.rand(1, 1, 1, 32), torch.rand(1, 1, 1, 32)
    op = torch.ops.qkeel_native.norm_rope_two.default
    return {
        EMPTY: lambda: torch.neg(number),
        "q and k, one operator": lambda: op(q, k, gain, gain, cos, sin, 1, 1, 1e-6),
        "spec to q and k, compiled C++": by_native(
            "1", lambda: encoded(spec, q, k, pos, pos, params)
        ),
        "spec to q and k, torch": by_native(
            "0", lambda: spec.encode(q, k, pos, pos, params)
        ),
    }


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


def latent_cases(
    shape: tuple[int, int, int], sizes: LatentSizes, dtype: torch.dtype
) -> Cases:
    """Returns one query per head over a cache of latents, with and without a factor per head and key."""
    b, h, s = shape
    width, head_dim = sizes.kv_latent + sizes.rope_dim, sizes.nope_dim + sizes.rope_dim
    q, held, inverse = (
        torch.randn(b, h, 1, width).to(dtype),
        torch.randn(b, 1, s, width).to(dtype),
        torch.rand(b, h, s),
    )
    call = make_call(
        AttentionSpec().core({})[0], q, held, held[..., : sizes.kv_latent], causal=False
    )
    room = torch.empty_like(held)
    cases: Cases = {COPY_LATENTS: lambda: room.copy_(held)}
    for native_is, how in (("1", "compiled C++"), ("0", "torch")):
        cases[f"no norm, {how}"] = by_native(
            native_is, lambda: attend_latents(call, None, head_dim)
        )
        cases[f"QK-norm, {how}"] = by_native(
            native_is, lambda: attend_latents(call, inverse, head_dim)
        )
    return cases


def another_token(module: nn.Module, cache: KVCache | LatentCache, x: Tensor) -> Case:
    """Returns a case: a token through the module, which its cache forgets again."""
    before = cache.length

    @torch.no_grad()
    def run() -> Tensor:
        out = module(x, cache=cache)
        cache.length = before
        return out

    return run


def latent_module_cases(
    shape: tuple[int, int, int], dim: int, sizes: LatentSizes
) -> Cases:
    """Returns a token through nn.MLA after s others, as ratios to the compiled one without a norm."""
    b, h, s = shape
    x = torch.randn(b, 1, dim)

    def step(spec: AttentionSpec) -> Case:
        module = MLA(dim, h, sizes=sizes, spec=spec, latent_norm=True).eval()
        cache, inverse = (
            module.new_cache(s + 8),
            None if isinstance(spec.norm, NoNorm) else torch.rand(b, h, s),
        )
        cache.append(
            torch.randn(b, 1, s, sizes.kv_latent),
            torch.randn(b, 1, s, sizes.rope_dim),
            inverse,
        )
        return another_token(module, cache, x)

    plain, normed = step(AttentionSpec()), step(NORMED)
    return {
        BARE: by_native("1", plain),
        "QK-norm, compiled C++": by_native("1", normed),
        "no norm, torch": by_native("0", plain),
        "QK-norm, torch": by_native("0", normed),
    }


class Materialised(nn.Module):
    """The same cache, keys and values of every head made again for each token, as transformers does."""

    def __init__(self, inner: MLA) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, cache: object) -> Tensor:
        m = self.inner
        params = m.spec_params()
        q_latent, latent = m.q_latent_norm(m.q_down(x)), m.kv_latent_norm(m.kv_down(x))
        q = torch.cat(
            [m._heads(m.q_rope(q_latent)), m._heads(m.q_up(q_latent))], dim=-1
        )
        q, held, inverse, _ = m._remember(cache, q, latent, m.k_rope(x)[:, None], None)
        k, v = m._materialised(held, inverse)
        scale = m.spec.factor(torch.zeros(1, 1), m.head_dim, params, q.dtype)
        return m.o_proj(sdpa(q, k, v, scale=scale).transpose(1, 2).flatten(2))


def cache_cases(
    batch: int, length: int, dim: int, heads: int, sizes: LatentSizes
) -> tuple[Cases, dict[str, int]]:
    """Returns one decoding step after `length` tokens by every way to cache, and bytes per token of each (float32)."""
    torch.manual_seed(0)
    head_dim, x = sizes.rope_dim + sizes.nope_dim, torch.randn(batch, 1, dim)
    full = Attention(
        dim,
        heads,
        head_dim=head_dim,
        spec=AttentionSpec(position=Rope(rotary=sizes.rope_dim / head_dim)),
    )
    plain, normed = (
        MLA(dim, heads, sizes=sizes, spec=spec, latent_norm=True).eval()
        for spec in (AttentionSpec(), NORMED)
    )
    ways: dict[str, tuple[nn.Module, MLA | Attention]] = {
        "absorbed, no norm": (plain, plain),
        "absorbed, QK-norm": (normed, normed),
        "keys and values made each step": (Materialised(plain), plain),
        "keys and values made each step, QK-norm": (Materialised(normed), normed),
        "keys and values cached (MHA)": (full.eval(), full),
    }
    caches = {name: inner.new_cache(length + 1) for name, (_, inner) in ways.items()}
    for name, (_, inner) in ways.items():
        with torch.no_grad():
            for start in range(0, length, 256):
                inner(
                    torch.randn(batch, min(256, length - start), dim),
                    cache=caches[name],
                )
    cases: Cases = {
        name: another_token(module, caches[name], x)
        for name, (module, _) in ways.items()
    }
    return cases, {name: cache.bytes_per_token for name, cache in caches.items()}


def module_cases(shape: Shape) -> Cases:
    """Returns a token through an attention module with qwen3's norm and rotation, and its cache."""
    b, h, g, s, d = shape
    x, past = torch.randn(b, 1, h * d), torch.randn(b, s, h * d)

    def step(name: str) -> Case:
        module = Attention(h * d, h, g, spec=qkeel.preset(name)).eval()
        cache = module.new_cache(s + 8)
        module(past, cache=cache)
        return another_token(module, cache, x)

    normed, plain = step("qwen3"), step("baseline")
    return {
        "no norm, no rotation, torch": by_native("0", plain),
        "no norm, no rotation, compiled C++": by_native("1", plain),
        "norm and rotation, torch": by_native("0", normed),
        "norm and rotation, compiled C++": by_native("1", normed),
    }


def tables(toy: bool) -> Iterator[tuple[str, str, Callable[[], Cases], int]]:
    """Yields every table: its kind, its title, what makes its cases, and calls in a row."""
    yield (
        "token",
        "norm + rope of q and k of one token",
        token_cases,
        10 if toy else 300,
    )
    dtypes, sizes = (torch.float32, torch.bfloat16), LatentSizes() if toy else SIZES
    for shape, dtype in itertools.product([TOY] if toy else SHAPES, dtypes):
        title = "attention of one token, B{} H{} G{} S{} d{} {}".format(*shape, dtype)
        calls = 1 if shape[0] * shape[2] * shape[3] * shape[4] > 1 << 18 else 30
        yield (
            "attention",
            title,
            functools.partial(attention_cases, shape, dtype),
            calls,
        )
    for latents, dtype in itertools.product([(1, 4, 40)] if toy else LATENTS, dtypes):
        title = "latents of {} sequences, {} heads, {} tokens, {}".format(
            *latents, dtype
        )
        calls = 1 if latents[0] * latents[2] > 1024 else 4
        yield (
            "latents",
            title,
            functools.partial(latent_cases, latents, sizes, dtype),
            calls,
        )
    for latents, dim in (
        [((1, 4, 40), 64)] if toy else [((1, 16, 4096), 2048), ((4, 16, 4096), 2048)]
    ):
        title = "a token through MLA, {} sequences, {} heads, {} tokens".format(
            *latents
        )
        yield (
            "latents",
            title,
            functools.partial(latent_module_cases, latents, dim, sizes),
            1,
        )
    for shape in [TOY] if toy else [(1, 8, 2, 128, 64), (1, 32, 8, 4096, 64)]:
        title = "a token through a module, B{} H{} G{} S{} d{}".format(*shape)
        yield "module", title, functools.partial(module_cases, shape), 5


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    flags = {"--only": {"choices": ["token", "attention", "latents", "module"]}}
    bench = Bench(
        "decode", __doc__, arguments, rounds=25, needs=[decode.ready], flags=flags
    )
    for kind, title, make, calls in tables(bench.toy):
        if bench.options.only in (None, kind):
            bench.table(title, make(), calls=calls)


if __name__ == "__main__":
    main()
