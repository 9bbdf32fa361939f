"""A search keeps much of a pass, so it looks at the beginning of one sequence first, then at all of them."""

import collections
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Attention, from_heads, to_heads
from tests.drawing import randint
from torch import nn

from qkeel import find_sites
from qkeel.capture.example import ModuleCall
from qkeel.sites.module_copy import SAMPLES, TOKENS, parts_of_arguments

H, D, B, T = 2, 4, 6, 100
# By model: the shape of the input, and whether there was a graph. A search puts back what a forward reaches itself.
PASSES = collections.defaultdict(list)
NUMBERS = itertools.count()


class Heads(Attention):
    """Self-attention of tokens [b t], and what its passes were."""

    def __init__(self, change=lambda m, x: x):
        torch.manual_seed(0)
        super().__init__(m=H * D, heads=H)
        self.change, self.number = change, next(NUMBERS)
        self.embed, self.batch_norm = nn.Embedding(20, H * D), nn.BatchNorm1d(H * D)

    def note(self, *facts):
        PASSES[self.number].append(facts)

    def passes(self):
        return PASSES[self.number]

    def attended(self, x, mask=None):
        q, k, _ = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        return from_heads(y)

    def forward(self, tokens, mask=None):
        self.note(tuple(tokens.shape), torch.is_grad_enabled())
        x = F.dropout(self.batch_norm(self.embed(tokens).mT).mT, 0.1)
        seen = mask if mask is None else mask[:, None, None].bool()
        return self.attended(self.change(self, x), seen)


def tokens():
    return randint(0, 20, (B, T), seed=1)


def kept(model, *more):
    """The shapes of the passes of a search of which something is kept; all sites it finds are confirmed."""
    assert all(site.verified for site in find_sites(model, (tokens(), *more)))
    return [shape for shape, graph in model.passes() if graph]


def longer_than_positions(m, x):
    return x + torch.zeros(T, 1)


def twice(m, x):
    return m.attended(x) if x.shape[1] > 50 else x


def test_the_beginning_of_two_sequences_is_enough():
    model = Heads()
    state, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert {*kept(model)} == {(SAMPLES, TOKENS)}
    assert model.passes()[0] == ((B, T), False)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_what_a_shorter_sequence_does_not_show_is_taken_from_longer_ones():
    assert [*dict.fromkeys(kept(Heads(longer_than_positions)))] == [(2, TOKENS), (2, T)]


class Split(Heads):
    """Attention with more heads where there are many tokens."""

    def attended(self, x, mask=None):
        h = H * (2 if x.shape[1] > TOKENS else 1)
        q, k = (to_heads(p(x), h, H * D // h) for p in (self.q, self.k))
        return from_heads(F.scaled_dot_product_attention(q, k, k))


class Written(Heads):
    """Attention by hand, whose queries a site without weights does not know."""

    def attended(self, x, mask=None):
        q, k, _ = self.heads(x)
        return from_heads((q @ k.mT).softmax(-1) @ k)


@pytest.mark.parametrize(("kind", "size"), [(Heads, D), (Written, 0)])
def test_what_only_all_tokens_show_is_a_site_without_weights(kind, size):
    first, second = find_sites(kind(twice), tokens())
    assert (first.verified, second.verified) == (True, False)
    assert (second.n_heads, second.n_kv_heads, second.head_dim) == (H, H, size)
    assert "not seen when its module ran alone" in second.why


def test_heads_that_only_all_tokens_show_are_not_verified():
    (site,) = find_sites(Split(), tokens())
    assert site.unverified == f"the pass showed {2 * H} heads instead of {H}"


def test_where_padding_comes_first_the_rows_are_whole():
    mask = torch.ones(B, T)
    mask[:, : T // 2] = 0
    assert kept(Heads(), mask)[-1] == (2, T)


def test_a_model_that_depends_on_its_batch_gets_all_of_it():
    def rows(m, x):
        return x[torch.arange(B).flip(0)]

    assert kept(Heads(rows))[-1] == (B, T)


def parts(*inputs, batch=B):
    """The samples and tokens that are taken of a call with these inputs, 0 for all."""
    call = ModuleCall(
        name="", module=nn.Identity(), parent=None, batch=batch, inputs=inputs
    )
    return [(part.samples, part.tokens) for part in parts_of_arguments(call)]


def test_a_sequence_of_twice_the_tokens_that_are_looked_at_is_not_cut():
    for length, cut in (
        (2 * TOKENS, []),
        (2 * TOKENS + 1, [(SAMPLES, 2 * TOKENS + 1)]),
    ):
        assert parts(torch.ones(B, length, 8)) == [*cut, (SAMPLES, 0), (0, 0)]


def test_off_the_cpu_nothing_is_cut_where_a_number_may_be_the_place_of_a_token():
    ids, states = tokens().to("meta"), torch.randn(B, T, 8, device="meta")
    mask = torch.ones(B, 1, T, T, dtype=torch.bool, device="meta")
    assert parts(states, mask) == [(SAMPLES, T), (SAMPLES, 0), (0, 0)]
    assert parts(states, ids) == [(SAMPLES, 0), (0, 0)]
    assert parts(states, ids[:, 0]) == [(0, 0)]
