"""Attention in the ways people write it: exact statistics of all that is read, and none of what cannot be seen."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, scores
from tests.drawing import randn
from torch import Tensor, nn
from torch.nn.attention import bias
from torch.utils.checkpoint import checkpoint

from qkeel import find_sites
from qkeel.errors import RefusedError

from .oracle import check, observed, tapped, the_call

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop because we have not yet implemented"
    ),
]

B, H, T, D = 2, 4, 6, 8
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
SEEN = torch.ones(T, T, dtype=torch.bool)
SEEN[2:, :3] = False  # the last four queries see the last three keys only
LAST = torch.zeros(4, T).masked_fill(~SEEN[2:], -torch.inf)


def nanogpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(~CAUSAL[None, None], float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.5) @ v


def baddbmm(beta):
    """As Megatron and Bloom make scores: `beta` times what was there, plus q·k."""

    def attend(q, k, v):
        q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
        mask = torch.zeros(B * H, T, T).masked_fill(~SEEN, -1e9)
        z = torch.baddbmm(mask, q, k.mT, beta=beta, alpha=1 / math.sqrt(D))
        return torch.bmm(z.softmax(-1), v).view(B, H, T, D)

    return attend


def head_by_head(q, k, v):
    def one(h):
        z = q[:, h] @ k[:, h].mT / math.sqrt(D)
        return z.masked_fill_(~CAUSAL, -torch.inf).softmax(-1) @ v[:, h]

    return torch.stack([one(h) for h in range(H)], dim=1)


def with_sink(q, k, v):
    z = scores(q, k).masked_fill(~CAUSAL, -torch.inf)
    z = torch.cat([z, torch.full((B, H, T, 1), 3.0)], dim=-1)
    return z.softmax(-1)[..., :-1] @ v


def without_softmax(q, k, v):
    z = scores(q, k).masked_fill(~CAUSAL, -1e9)
    return torch.exp(z - torch.logsumexp(z, dim=-1, keepdim=True)) @ v


def checkpointed(q, k, v):
    return checkpoint(nanogpt, q, k, v, use_reentrant=True)


def values_before_the_sum(q, k, v):
    z = q @ k.mT
    z -= z.max(dim=-1, keepdim=True).values.detach()
    e = (z / math.sqrt(D)).masked_fill(~CAUSAL, -torch.inf).exp_()
    return e @ v / e.sum(-1)[..., None]


def softmax_of_the_rest(q, k, v):
    z = scores(q, k)
    z = z - z.max()
    z = (z - z.amax(-1, keepdim=True)).transpose(1, 2).transpose(1, 2)
    return z.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v


def operator(q, k, v):
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    return sdpa(q, k, v, None, 0.0, True)


# How to attend, and which pairs are seen.
WAYS = [
    *((baddbmm(beta), seen) for beta, seen in ((1.0, SEEN), (0.0, SEEN | True))),
    *(
        (way, CAUSAL)
        for way in (
            nanogpt,
            head_by_head,
            with_sink,
            without_softmax,
            checkpointed,
            values_before_the_sum,
            softmax_of_the_rest,
            operator,
        )
    ),
]


@pytest.mark.parametrize(("way", "seen"), WAYS)
def test_every_way_to_write_attention_gives_the_numbers_of_its_logits(way, seen):
    torch.manual_seed(0)
    model, x = Joint(way, H * D, H), torch.randn(B, T, H * D)
    q, k, _ = (y.double() for y in model.heads(x))
    z = scores(q, k).masked_fill(~seen, -torch.inf)
    check(tapped(model, x), z, sink=3.0 if way is with_sink else -torch.inf)


# torch.jit.script takes an argument without a type for a tensor.
def masked_softmax(z: Tensor, scale: float):
    hidden = torch.ones(z.size(-2), z.size(-1)).tril() == 0
    return torch.softmax((z * scale).masked_fill(hidden, -float("inf")), dim=-1)


def attention(q, k, v):
    return torch.matmul(masked_softmax(torch.matmul(q, k.transpose(-2, -1)), 0.5), v)


def softmax_in_a_script():
    softmax = torch.jit.script(masked_softmax)
    return lambda q, k, v: softmax(q @ k.mT, 0.5) @ v


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(attention),
        softmax_in_a_script,
        lambda: torch.func.vmap(attention, in_dims=1, out_dims=1),
    ],
)
def test_what_a_function_mode_does_not_see_runs_as_before(make):
    model, x = Joint(make(), H * D, H), torch.randn(B, T, H * D)
    with torch.no_grad():
        calls, output = observed(lambda: model(x), model)
        assert (calls, bool((output == model(x)).all())) == ([], True)


@pytest.mark.parametrize("name", ["causal_lower_right", "causal_upper_left"])
@pytest.mark.parametrize("keys", [T, T + 3])
def test_a_mask_object_hides_what_it_says(name, keys):
    """torch.nn.attention.bias, which PyTorch advises for caches: a tensor whose own storage holds nothing."""
    q, k = randn(B, H, T, D, seed=0).double(), randn(B, H, keys, D, seed=1).double()
    mask = getattr(bias, name)(T, keys)
    stats = the_call(lambda: F.scaled_dot_product_attention(q, k, k, attn_mask=mask))
    seen = torch.ones(T, keys, dtype=torch.bool)
    seen = seen.tril(keys - T if name == "causal_lower_right" else 0)
    check(stats, scores(q, k).masked_fill(~seen, -torch.inf))


# Changes of scores z of q in a part of their tensor.


def added(q, z):
    """As swin-transformer-pytorch masks its shifted windows: a view, added to in place, and written back."""
    z[:, :, 2:] += LAST
    return z


def through_a_view(q, z):
    z[:, :, 2:].masked_fill_(~SEEN[2:], -1e9)
    return z


def by_a_mask(q, z):
    z[~SEEN.expand_as(z)] = -torch.inf
    return z


def summed(q, z):
    """As MViT v2 adds relative positions to all tokens but that of the class."""
    table = torch.ones(T - 1, T, D)
    z[..., 1:, :] = z[..., 1:, :] + torch.einsum("bhtd,tsd->bhts", q[..., 1:, :], table)
    return z


def bent(q, z):
    z[..., 1:, :].relu_()
    return z


@pytest.mark.parametrize("change", [added, through_a_view, by_a_mask, summed, bent])
def test_scores_that_are_changed_in_a_part_are_missed(change):
    def attend(q, k, v):
        return change(q, scores(q, k)).softmax(-1) @ v

    with pytest.raises(RefusedError, match="a write into a part of a tensor"):
        find_sites(Joint(attend, H * D, H), torch.randn(2, T, H * D))


def test_a_product_with_a_view_of_a_weight_makes_no_scores():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(H, D, D))

        def forward(self, x):
            # Tagged, q @ k would be no product of two activations.
            q = torch.bmm(x, self.w.mT)
            return torch.softmax(q @ x.mT, dim=-1) @ x

    (site,) = find_sites(Experts(), torch.randn(H, T, D))
    assert site.head_dim == D
