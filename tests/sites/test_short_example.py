"""A search keeps much of a pass, so it looks at the beginning of one sequence first, then at all of them."""

import collections
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qkeel import find_sites
from qkeel.capture.example import ROWS, TOKENS, shorter
from qkeel.errors import InvalidValueError, QkeelWarning

H, D, B, T = 2, 4, 6, 100
# By model: the shape of the input, and whether there was a graph. A search puts back what a forward reaches itself.
PASSES = collections.defaultdict(list)
NUMBERS = itertools.count()


class Heads(nn.Module):
    """Self-attention of tokens [b t], and what its passes were."""

    def __init__(
        self,
        change=lambda m, x: x,
        *,
        norm=False,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.change, self.norm, self.number = change, norm, next(NUMBERS)
        self.embed, self.q, self.k = (
            nn.Embedding(20, H * D),
            nn.Linear(H * D, H * D),
            nn.Linear(H * D, H * D),
        )
        self.batch_norm = nn.BatchNorm1d(H * D)
        self.gain = nn.Parameter(torch.rand(D))

    def note(self, *facts):
        PASSES[self.number].append(facts)

    def passes(self):
        return PASSES[self.number]

    def attend(self, x, mask=None):
        q, k = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q, self.k))
        if self.norm:
            q, k = (F.rms_norm(y, (D,), self.gain) for y in (q, k))
        return (
            F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
            .transpose(1, 2)
            .flatten(2)
        )

    def forward(self, tokens, mask=None):
        self.note(tuple(tokens.shape), torch.is_grad_enabled())
        x = F.dropout(self.batch_norm(self.embed(tokens).mT).mT, 0.1)
        return self.attend(
            self.change(self, x), mask if mask is None else mask[:, None, None].bool()
        )


def tokens():
    return torch.randint(0, 20, (B, T), generator=torch.Generator().manual_seed(1))


def kept(model, *more):
    """The shapes of the passes of a search of which something is kept; all sites it finds are confirmed."""
    assert all(site.verified for site in find_sites(model, (tokens(), *more)))
    return [shape for shape, graph in model.passes() if graph]


def longer_than_positions(m, x):
    return x + torch.zeros(T, 1)


def twice(m, x):
    return m.attend(x) if x.shape[1] > 50 else x


def test_the_beginning_of_two_sequences_is_enough():
    model = Heads()
    state, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert {*kept(model)} == {(ROWS, TOKENS)}
    assert model.passes()[-1] == ((B, T), False)  # the whole, to compare with
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "last"),
    [
        (lambda: Heads(longer_than_positions), [(2, TOKENS), (2, T)]),
        (lambda: Heads(twice), [(2, TOKENS), (2, T)]),
        (
            lambda: Heads(norm=True),
            [(2, TOKENS), (1, T)],
        ),  # what follows a norm may grow with the position
    ],
)
def test_what_a_shorter_sequence_does_not_show_is_taken_from_longer_ones(model, last):
    made = model()
    assert [*dict.fromkeys(kept(made))] == last
    whole = find_sites(made, tokens()[:1])  # nothing to shorten in it but the sequence
    assert [(s.name, s.n_heads) for s in find_sites(made, tokens())] == [
        (s.name, s.n_heads) for s in whole
    ]


def test_where_padding_comes_first_the_rows_are_whole():
    mask = torch.ones(B, T)
    mask[:, : T // 2] = 0
    assert kept(Heads(), mask)[-1] == (2, T)


def test_heads_that_are_merged_with_the_batch_are_told_from_it_by_two_rows():
    class Merged(Heads):
        def attend(self, x, mask=None):
            q, k = (
                p(x).unflatten(-1, (H, D)).permute(2, 0, 1, 3).flatten(0, 1)
                for p in (self.q, self.k)
            )
            return (
                ((q @ k.mT).softmax(-1) @ k)
                .unflatten(0, (H, -1))
                .permute(1, 2, 0, 3)
                .flatten(2)
            )

    model = Merged()
    assert kept(model)[-1] == (2, TOKENS)
    (site,) = find_sites(model, tokens())
    assert (site.n_heads, str(site.layout)) == (H, "(h b) t s")


def test_a_model_that_depends_on_its_batch_gets_all_of_it():
    def rows(m, x):
        return x[torch.arange(B).flip(0)]

    assert kept(Heads(rows))[-1] == (B, T)


def test_arguments_whose_batch_is_not_clear_are_not_shortened():
    class Batch(dict):  # type: ignore[type-arg]
        """One that may hold more than its items."""

    ids = tokens()
    assert list(shorter((ids, torch.ones(4)), {})) == []  # 4 is no batch of 6
    assert list(shorter((Batch(ids=ids),), {})) == []
    few = torch.ones(1, TOKENS, dtype=torch.long)
    assert list(shorter((few,), {"scale": 2.0})) == []
    (short,) = shorter((torch.randn(B, T, T),), {"names": ["a"]})
    # Which of both dimensions is the sequence?
    assert short.args[0].shape == (ROWS, T, T)
    assert short.kwargs == {"names": ["a"]}
    mask = {"mask": torch.ones(1, 1, T, T), "extra": (None, torch.ones(()))}
    examples = shorter((ids,), mask)
    assert [(x.args[0].shape, x.kwargs["mask"].shape, x.cut) for x in examples] == [
        ((ROWS, t), (1, 1, t, t), t == TOKENS) for t in (TOKENS, T)
    ]


def test_off_the_cpu_a_sequence_is_cut_where_no_number_may_be_the_place_of_a_token():
    ids = tokens().to("meta")
    cuts = [True, False]
    named = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    assert [x.cut for x in shorter((), named)] == cuts
    assert [x.cut for x in shorter((ids, ids), {})] == cuts
    assert [x.cut for x in shorter((ids,), {"answer_at": ids})] == [False]
    assert [x.cut for x in shorter((ids, ids, ids), {})] == [False]
    assert list(shorter((ids, ids[:, 0]), {})) == []


def test_where_whole_sequences_take_too_much_memory_short_ones_show_all_but_the_bounds_by_norms():
    model, whole = Heads(norm=True), find_sites(Heads(norm=True), tokens())

    def full(m, x):
        if torch.is_grad_enabled() and x.shape[1] > TOKENS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    model.change = full
    with pytest.warns(
        QkeelWarning, match="not enough memory to read them from one whole sequence"
    ):
        sites = find_sites(model, tokens())
    assert all(site.verified and site.normed and not site.query_gains for site in sites)
    assert [(s.name, s.n_heads) for s in sites] == [(s.name, s.n_heads) for s in whole]
    model.change = lambda m, x: full(m, twice(m, x))
    with pytest.raises(InvalidValueError, match="OutOfMemoryError"):
        find_sites(model, tokens())
