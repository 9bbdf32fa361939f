"""One table of small attention modules: how queries and keys are made, and how they attend.

Each row says which rows of which weights make each head, so that every law of the search
can be tried on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from tests.drawing import randn
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

B, T, H, D, M = 3, 5, 4, 8, 32
SCALE = D**-0.5
# The name of a weight (a convolution's rows count as rows), its axis, and the indices of
# each head; one list of all indices if the heads share it.
Rows = tuple[str, int, Tensor]


def block(n=H, start=0, size=D):
    """The indices of heads that are stored one after the other."""
    return start + torch.arange(n * size).view(n, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A module, its input, and the weights of its queries and keys, path by path."""

    build: Callable[[], nn.Module]
    query: list[list[Rows]] = dataclasses.field(default_factory=lambda: Q)
    key: list[list[Rows]] = dataclasses.field(default_factory=lambda: K)
    shape: tuple[int, ...] = (B, T, M)
    heads: tuple[int, int] = (H, H)
    key_heads: tuple[int, ...] | None = None
    normed: bool = False
    scales: bool = True  # whether logits are proportional to the rows
    biases: tuple[object, object] = (None, None)
    dtype: torch.dtype = torch.float32

    def model(self):
        torch.manual_seed(0)
        return self.build().to(self.dtype)

    def x(self):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.shape, generator=generator).to(self.dtype)


def causal(z, queries=-2, keys=-1):
    """Hides later keys in scores with these dimensions of queries and keys."""
    hidden = torch.full((z.shape[queries], z.shape[keys]), -torch.inf).triu(1)
    shape = [1] * z.ndim
    shape[queries], shape[keys] = z.shape[queries], z.shape[keys]
    first = queries % z.ndim < keys % z.ndim
    return z + (hidden if first else hidden.mT).reshape(shape)


def plain(q, k, v):
    """Attention of q, k and v [b t h d]; keys are repeated in blocks."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return (causal(q @ k.mT * SCALE).softmax(-1) @ v).transpose(-3, -2)


def fused(q, k, v):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(-3, -2)


class Heads(nn.Module):
    """Projections of H query and `groups` key heads around a way to attend."""

    def __init__(self, attend=plain, groups=H, **options):
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (
            nn.Linear(M, n * D, **options) for n in (H, groups, groups)
        )
        self.gain = nn.Parameter(torch.rand(D) + 0.5)

    def operands(self, x):
        return tuple(p(x).unflatten(-1, (-1, D)) for p in (self.q, self.k, self.v))

    def forward(self, x):
        return self.attend(*self.operands(x)).flatten(-2)


# --- Layouts of the scores


def bsht(q, k, v):
    """DeepSeek-V3's own layout."""
    z = causal(torch.einsum("bshd,bthd->bsht", q, k) * SCALE, -3)
    return torch.einsum("bsht,bthd->bshd", z.softmax(-1), v)


def hbts(q, k, v):
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return (causal(q @ k.mT * SCALE).softmax(-1) @ v).permute(1, 2, 0, 3)


def ijbn(q, k, v):
    """Transformer-XL's layout, softmax over dimension 1."""
    z = causal(torch.einsum("bind,bjnd->ijbn", q, k) * SCALE, 0, 1)
    return torch.einsum("ijbn,bjnd->bind", z.softmax(dim=1), v)


def merged(order, back):
    def attend(q, k, v):
        shape = [q.shape[i] for i in order]
        q, k, v = (x.permute(order).flatten(0, 1) for x in (q, k, v))
        z = causal(torch.bmm(q, k.mT) * SCALE)
        return torch.bmm(z.softmax(-1), v).view(shape).permute(back)

    return attend


def turned(q, k, v):
    """The scores of keys by queries, softmax over the rows."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = causal(k @ q.mT * SCALE, -1, -2)
    return (z.softmax(-2).mT @ v).transpose(1, 2)


def windows(q, k, v):
    """torchvision's MaxViT: [b window t h d], as many windows as heads."""
    z = causal(torch.einsum("bwthd,bwshd->bwhts", q, k) * SCALE)
    return torch.einsum("bwhts,bwshd->bwthd", z.softmax(-1), v)


def one_window(q, k, v):
    """The scores of the first window for all of them: neither q nor k varies along the windows."""
    z = causal(torch.einsum("bwthd,bwshd->bwhts", q[:, :1], k[:, :1]) * SCALE)
    weights = z.expand(-1, v.shape[1], -1, -1, -1).softmax(-1)
    return torch.einsum("bwhts,bwshd->bwthd", weights, v)


def tiled(attend):
    """x-transformers: query head i uses key head i mod g."""
    return lambda q, k, v: attend(q, *(x.repeat(1, 1, H // 2, 1) for x in (k, v)))


def repeats_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q.unflatten(1, (-1, k.shape[1]))
    z = causal(torch.einsum("brgtd,bgsd->brgts", q, k) * SCALE).softmax(-1)
    return torch.einsum("brgts,bgsd->brgtd", z, v).flatten(1, 2).transpose(1, 2)


def one_key(q, k, v):
    """Multi-query attention with the heads after the queries, as GPT-BigCode has it."""
    z = causal(torch.einsum("bthd,bsd->bths", q, k[:, :, 0]) * SCALE, -3)
    return torch.einsum("bths,bsd->bthd", z.softmax(-1), v[:, :, 0])


# --- What is done to queries and keys


def changed(change):
    """Heads whose queries and keys [b t h d] are changed."""

    class Changed(Heads):
        def operands(self, x):
            q, k, v = super().operands(x)
            return change(self, q), change(self, k), v

    return Changed


def rotated(_, x):
    """The rotation of lingua and xFormers: each pair times a 2 × 2 matrix, summed."""
    angle = torch.outer(torch.arange(T).float(), 1e2 ** (-torch.arange(0, D, 2) / D))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    turn = turn.view(1, T, 1, D // 2, 2, 2)
    return (x.reshape(*x.shape[:-1], -1, 1, 2) * turn).sum(5).flatten(3)


def divided(_, x):
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


def normed(heads, x):
    return F.rms_norm(x, (D,)) * heads.gain


def flat_norm(_, x):
    return F.layer_norm(x.flatten(2), (H * D,)).unflatten(-1, (H, D))


def written_flat_norm(_, x):
    y = x.flatten(2)
    return (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).view_as(x)


# --- How queries and keys are made


class Fused(nn.Module):
    """One projection of q, k and v, stored as `layout` says."""

    def __init__(self, layout, bias=""):
        super().__init__()
        self.layout, self.kind = layout, bias
        self.qkv = nn.Linear(M, 3 * H * D, bias=not bias)
        if bias:
            self.bias = nn.Parameter(torch.randn(H * D if bias == "joined" else 120))
            self.columns = nn.Parameter(torch.randn(M, 3 * H * D))

    def forward(self, x):
        if self.kind == "joined":  # BEiT: q_bias, 0, 0
            bias = torch.cat((self.bias, torch.zeros(2 * H * D)))
            y = F.linear(x, self.qkv.weight, bias)
        elif self.kind == "slice":
            y = F.linear(x, self.qkv.weight, self.bias[2:][-110:-14])
        elif self.kind == "columns":  # GPT-2's Conv1D
            y = x @ self.columns
        else:
            y = self.qkv(x)
        if self.layout == "nhd":
            q, k, v = y.unflatten(-1, (3, H, D)).unbind(-3)
        elif self.layout == "hnd":
            q, k, v = y.unflatten(-1, (H, 3, D)).unbind(-2)
        else:
            q, k, v = y.unflatten(-1, (3, D, H)).mT.unbind(-3)
        return fused(q, k, v).flatten(-2)


class Einsums(nn.Module):
    """Weights [m h d], as ports from JAX have them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Parameter(randn(M, H, D, seed=i)) for i in range(3)
        )

    def forward(self, x):
        return plain(
            *(torch.einsum("btm,mhd->bthd", x, w) for w in self.parameters())
        ).flatten(2)


class Adapted(nn.Module):
    """W x + B A x; B = 0 at the start, or A and B orthogonal, as peft initialises them."""

    def __init__(self, orthogonal):
        super().__init__()
        self.base = nn.Linear(M, H * D)
        self.a, self.b = nn.Linear(M, 3, bias=False), nn.Linear(3, H * D, bias=False)
        nn.init.zeros_(self.b.weight)
        if orthogonal:
            with torch.no_grad():
                u = torch.linalg.svd(self.a.weight)[0]
                self.a.weight.copy_(u[:, :1] @ u[:, :1].mT @ self.a.weight)
                self.b.weight.copy_(torch.randn(H * D, 2) @ u[:, 1:].mT)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapted(*, orthogonal):
    model = Heads()
    model.q = Adapted(orthogonal)
    return model


def reparametrized():
    model = Heads()
    weight_norm(model.q)
    return model


def zeroed():
    model = Heads()
    nn.init.zeros_(model.q.weight)
    nn.init.zeros_(model.q.bias)
    return model


class Latent(nn.Module):
    """Multi-head latent attention: keys from a narrow vector, and a rotated part that all heads share."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(M, 6, bias=False), nn.Linear(6, H * D)
        self.q, self.rope = nn.Linear(M, H * (D + 2)), nn.Linear(M, 2)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (H, D + 2))
        k = self.up(self.down(x)).unflatten(-1, (H, D))
        shared = self.rope(x)[:, :, None].expand(-1, -1, H, -1)
        return fused(q, torch.cat([k, shared], -1), k).flatten(2)


class Sum(Heads):
    """Scores that are a sum of two products."""

    def __init__(self):
        super().__init__()
        self.q2, self.k2 = nn.Linear(M, H * D), nn.Linear(M, H * D)

    def forward(self, x):
        layers = (self.q, self.k, self.q2, self.k2, self.v)
        q, k, q2, k2, v = (to_heads(p(x), H, D) for p in layers)
        return from_heads((q @ k.mT + q2 @ k2.mT).softmax(-1) @ v)


class Itself(Heads):
    """Queries that are the keys."""

    def forward(self, x):
        q, _, v = self.operands(x)
        return self.attend(q, q, v).flatten(2)


class Images(nn.Module):
    """Attention between the places of an image [b c y x]; queries by CvT's separable convolution."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(
            nn.Conv2d(M, M, 3, padding=1, groups=M),
            nn.BatchNorm2d(M),
            nn.Conv2d(M, H * D, 1),
        )
        self.key = nn.Conv2d(M, H * D, 3, padding=1)

    def forward(self, x):
        q, k = (
            layer(x).unflatten(1, (H, D)).flatten(3).mT
            for layer in (self.query, self.key)
        )
        return (q @ k.mT * SCALE).softmax(-1) @ k


class Cross(nn.Module):
    """nn.MultiheadAttention whose keys have another size: three weights, one bias."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(M, H, kdim=12, vdim=12, batch_first=True)
        nn.init.normal_(self.attn.in_proj_bias)

    def forward(self, x):
        return self.attn(x, x[..., :12], x[..., :12])[0]


def layer():
    return nn.TransformerEncoderLayer(M, H, batch_first=True, dropout=0.1)


Q = [[("q.weight", 0, block())]]
K = [[("k.weight", 0, block())]]
FUSED_Q, FUSED_K = (("qkv.weight", 0, block(H, start)) for start in (0, H * D))
IN_PROJ = "self_attn.in_proj_weight"
PER_HEAD = torch.arange(3 * H * D).view(H, 3, D)
INNERMOST = torch.arange(3 * H * D).view(3, D, H).mT
A = ("q.a.weight", 0, torch.arange(3)[None])
OF_ADAPTER = [
    [("q.base.weight", 0, block())],
    [A, ("q.b.weight", 0, block())],
]


def of_attend(attend, **options):
    groups = options.pop("groups", H)
    keys = [[("k.weight", 0, block(groups))]]
    build = lambda: Heads(attend, groups)  # noqa: E731
    return Case(build=build, key=keys, heads=(H, groups), **options)


CASES = {
    # layouts of the scores
    "written": of_attend(plain),
    "fused function": of_attend(fused),
    "b s h t": of_attend(bsht),
    "h b t s": of_attend(hbts),
    "i j b n": of_attend(ijbn),
    "batch and heads merged": of_attend(merged((0, 2, 1, 3), (0, 2, 1, 3))),
    "heads and batch merged": of_attend(merged((2, 0, 1, 3), (1, 2, 0, 3))),
    "keys by queries": of_attend(turned),
    "windows": of_attend(windows, shape=(2, H, T, M)),
    "scores of one window": of_attend(one_window, shape=(2, H, T, M)),
    "fused windows": of_attend(fused, shape=(2, H, T, M)),
    "grouped keys": of_attend(plain, groups=2),
    "fused grouped keys": of_attend(fused, groups=2),
    "tiled keys": of_attend(tiled(plain), groups=2, key_heads=(0, 1, 0, 1)),
    "tiled keys, fused": of_attend(tiled(fused), groups=2, key_heads=(0, 1, 0, 1)),
    "repeats first": of_attend(repeats_first, groups=2, key_heads=(0, 1, 0, 1)),
    "one key head": of_attend(one_key, groups=1),
    # what is done to queries and keys
    "norm of heads": Case(build=changed(normed), normed=True),
    "norm over all heads": Case(build=changed(flat_norm), normed=True),
    "written norm over all heads": Case(build=changed(written_flat_norm), normed=True),
    "rotation by matrices": Case(build=changed(rotated)),
    "rotation and a written norm": Case(
        build=changed(lambda m, x: divided(m, rotated(m, x))),
        normed=True,
    ),
    # how they are made
    "thirds": Case(build=lambda: Fused("nhd"), query=[[FUSED_Q]], key=[[FUSED_K]]),
    "interleaved per head": Case(
        build=lambda: Fused("hnd"),
        query=[[("qkv.weight", 0, PER_HEAD[:, 0])]],
        key=[[("qkv.weight", 0, PER_HEAD[:, 1])]],
    ),
    "heads innermost": Case(
        build=lambda: Fused("dnh"),
        query=[[("qkv.weight", 0, INNERMOST[0])]],
        key=[[("qkv.weight", 0, INNERMOST[1])]],
    ),
    "columns": Case(
        build=lambda: Fused("nhd", "columns"),
        query=[[("columns", 1, block())]],
        key=[[("columns", 1, block(H, H * D))]],
    ),
    "joined biases": Case(
        build=lambda: Fused("nhd", "joined"),
        query=[[FUSED_Q]],
        key=[[FUSED_K]],
        biases=(("bias", 0), None),
    ),
    "a bias that is a slice": Case(
        build=lambda: Fused("nhd", "slice"),
        query=[[FUSED_Q]],
        key=[[FUSED_K]],
        biases=(("bias", 10), ("bias", 10 + H * D)),
    ),
    "einsums": Case(
        build=Einsums,
        query=[[("q", 1, block())]],
        key=[[("k", 1, block())]],
    ),
    "an adapter of zeros": Case(
        build=lambda: adapted(orthogonal=False), query=OF_ADAPTER
    ),
    "an orthogonal adapter": Case(
        build=lambda: adapted(orthogonal=True), query=OF_ADAPTER
    ),
    "weight norm": Case(
        build=reparametrized,
        query=[[("q.parametrizations.weight.original1", 0, block())]],
        scales=False,
    ),
    "weights of zeros": Case(build=zeroed),
    "latent": Case(
        build=Latent,
        query=[
            [("q.weight", 0, torch.arange(H * (D + 2)).view(H, D + 2)[:, :D])],
            [("q.weight", 0, torch.arange(H * (D + 2)).view(H, D + 2)[:, D:])],
        ],
        key=[
            [("down.weight", 0, torch.arange(6)[None]), ("up.weight", 0, block())],
            [("rope.weight", 0, torch.arange(2)[None])],
        ],
    ),
    "a sum of products": Case(
        build=Sum,
        query=[*Q, [("q2.weight", 0, block())]],
        key=[*K, [("k2.weight", 0, block())]],
    ),
    "queries that are keys": Case(build=Itself, key=Q),
    "convolutions": Case(
        build=Images,
        query=[[("query.2.weight", 0, block())]],
        key=[[("key.weight", 0, block())]],
        shape=(B, M, 3, 5),
    ),
    "nn.MultiheadAttention": Case(
        build=layer,
        query=[[(IN_PROJ, 0, block())]],
        key=[[(IN_PROJ, 0, block(H, H * D))]],
    ),
    "cross attention": Case(
        build=Cross,
        query=[[("attn.q_proj_weight", 0, block())]],
        key=[[("attn.k_proj_weight", 0, block())]],
        biases=(("attn.in_proj_bias", 0), ("attn.in_proj_bias", H * D)),
    ),
    "half precision": Case(
        build=layer,
        query=[[(IN_PROJ, 0, block())]],
        key=[[(IN_PROJ, 0, block(H, H * D))]],
        dtype=torch.bfloat16,
    ),
}
