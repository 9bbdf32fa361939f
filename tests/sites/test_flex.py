"""flex_attention is seen under any name, compiled or not, with the statistics of what its score_mod and masks make."""

import functools
from collections.abc import Callable

import pytest
import torch
from tests.attention import Joint, scores
from tests.drawing import randn
from tests.quick import one_in
from torch import Tensor, nn
from torch.nn.attention import flex_attention as home
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)

from qkeel import find_sites
from qkeel.kernels import statistics as kernel

from .oracle import check, the_call

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)

B, H, G, T, D = 2, 4, 2, 5, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = randn(B, 1, T, T, seed=3)
DOCUMENT = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])
Mod = Callable[..., Tensor]


def alibi(s, b, h, i, j):
    return s - SLOPES[h] * (i - j)


def capped(s, b, h, i, j):
    return 2 * torch.tanh(s / 2)


def hiding(s, b, h, i, j):
    return torch.where(i >= j, s, -float("inf"))


def additive(s, b, h, i, j):
    # One index after the other, as transformers does it.
    return s + BIAS[b][0][i][j] + torch.where(i >= j, 0.0, -1e4)


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i - j).abs() <= 1 + h


def documents(b, h, i, j):
    return (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j)


def not_the_first(b, h, i, j):
    return i > j  # row 0 sees nothing


def masked(mod, b=None, h=None):
    return create_block_mask(mod, b, h, T, T, device="cpu")


# score_mod, block mask, what they do to scores z, and who sees whom: [b h t s] at b, h, i, j.
CASES = {
    "nothing": (None, None),
    "causal": (None, masked(causal)),
    "a window of its own per head": (None, masked(window, h=H)),
    "documents": (None, masked(documents, b=B)),
    "a row that sees nothing": (None, masked(not_the_first)),
    "alibi": (alibi, masked(causal)),
    "a cap": (capped, None),
    "causal by infinity": (hiding, None),
    "a bias and an additive mask": (additive, None),
}


def parts(case):
    generator = torch.Generator().manual_seed(len(case))
    return tuple(3 * torch.randn(B, n, T, D, generator=generator) for n in (H, G, G))


def over_pairs(mod, *scores):
    """What a function of the score of a pair and its b, h, i, j makes of all pairs, one by one."""
    for place in (3, 2, 1, 0):
        dims = [0 if i == place else None for i in range(4)]
        mod = torch.vmap(mod, (*[0] * len(scores), *dims))
    return mod(*scores, *map(torch.arange, (B, H, T, T)))


def logits(case, q, k):
    """The logits of a case in float64, -inf where a pair is hidden."""
    score_mod, mask = CASES[case]
    z = scores(q.double(), k.double())
    if score_mod is not None:
        z = over_pairs(score_mod, z)
    is_seen = z > -9e3
    if mask is not None:
        is_seen = is_seen & over_pairs(mask.mask_mod)
    return z.masked_fill(~is_seen, -torch.inf)


@pytest.mark.parametrize("rows", one_in([1 << 20, 2], 3))
@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_oracle_in_blocks_of_any_size(
    case, rows, monkeypatch
):
    monkeypatch.setattr(kernel, "BLOCK", rows)
    monkeypatch.setattr(kernel, "ROWS", min(rows, 64))
    score_mod, block_mask = CASES[case]
    q, k, v = parts(case)
    attend = functools.partial(
        flex_attention, score_mod=score_mod, block_mask=block_mask, enable_gqa=True
    )
    stats = the_call(lambda: attend(q, k, v))
    check(stats, logits(case, q, k))
    assert len(stats.key_norm) == G


def test_a_mask_of_blocks_alone_hides_the_blocks_it_lacks():
    # Two blocks of two keys; the rows of the first block see the second one only.
    count, index = (
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=2)
    q = torch.eye(4)[None, None]
    stats = the_call(lambda: flex_attention(q, q, q, block_mask=mask))
    assert stats.n_pairs.tolist() == [8]
    assert stats.max_logit.tolist() == [0]  # q_i · k_i = 1 is hidden


def block(attend):
    """Projections around flex_attention, kept under whatever name."""
    return Joint(functools.partial(attend, enable_gqa=True), H * D, H, groups=G)


def aliases():
    kept = [flex_attention]
    return {
        "imported by name": flex_attention,
        "through its module": lambda *a, **k: home.flex_attention(*a, **k),
        "partial": functools.partial(flex_attention, scale=0.3),
        "in a closure": lambda *a, **k: kept[0](*a, **k),
        "compiled": torch.compile(flex_attention, backend="eager"),
    }


@pytest.mark.parametrize("name", one_in(aliases(), 2))
def test_it_is_seen_and_its_rows_are_found_under_every_alias(name):
    model = nn.Sequential(block(aliases()[name]))
    x = torch.randn(B, T, H * D)
    (site,) = find_sites(model, x)
    assert (site.name, site.n_heads, site.n_kv_heads, site.head_dim) == ("0", H, G, D)
    (term,) = site.terms
    assert torch.equal(term.query[0].index, torch.arange(H * D).view(H, D))
    assert term.key[0].parameter == "0.qkv.weight"
    assert torch.equal(term.key[0].index, H * D + torch.arange(G * D).view(G, D))
    with torch.no_grad():
        the_call(lambda: model(x), model)
