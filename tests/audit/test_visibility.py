"""`check` says which keys are seen that should not be, from the weights that attention computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention import Attention, Joint, scores
from tests.drawing import randint, randn
from torch import Tensor, nn
from torch.testing import assert_close

import qkeel
from qkeel.audit.visibility import (
    PackedTokens,
    document_numbers,
    padded_keys,
    seen_keys,
)
from qkeel.metrics import Status
from qkeel.sites.softmax_weights import blocks_of_weights, captured_calls

from .test_sees import (
    POSITIONS,
    VOCABULARY,
    Masked,
    Model,
    SelfAttention,
    causal,
    everything,
    inverted,
    packed,
)


def answer(model, batch):
    health = qkeel.check(model, batch)
    return health.status, str(health)


def tokens(length=9):
    return randint(VOCABULARY, (2, length), seed=0)


def backwards(t):
    return torch.ones(1, t, t, dtype=torch.bool).triu()


def test_a_layer_that_sees_later_keys_where_the_others_do_not_is_named():
    blocks = [SelfAttention(mask, fused=True) for mask in (causal, causal, everything)]
    status, sentence = answer(Model(blocks).eval(), tokens())
    assert status is Status.NOT_HEALTHY
    assert "blocks.2 sees later keys" in sentence


@pytest.mark.parametrize("mask", [backwards, inverted])
@pytest.mark.parametrize("fused", [False, True])
def test_an_inverted_mask_is_named(mask, fused):
    status, sentence = answer(
        Model([SelfAttention(mask, fused=fused)]).eval(), tokens()
    )
    assert status is Status.NOT_HEALTHY
    assert "inverted" in sentence


@pytest.mark.parametrize("mask", [causal, everything])
def test_models_that_see_one_way_or_both_ways_throughout_are_healthy(
    mask,
):
    blocks = [SelfAttention(mask, fused=fused) for fused in (False, True)]
    assert answer(Model(blocks).eval(), tokens())[0] is Status.HEALTHY


def test_an_encoder_beside_a_decoder_is_not_blamed_for_seeing_later_keys():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 7, 16)
    batch = {
        "src": x,
        "tgt": x,
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
    }
    assert answer(model, batch)[0] is Status.HEALTHY


def test_packed_documents_that_see_each_other_are_said_to():
    batch = {"tokens": tokens(), "position_ids": POSITIONS}
    assert answer(packed(isolated=True), batch)[0] is Status.HEALTHY
    status, sentence = answer(packed(isolated=False), batch)
    assert status is Status.NOT_HEALTHY
    assert "documents" in sentence


@pytest.mark.parametrize(
    ("kwargs", "numbers"),
    [
        ({"position_ids": POSITIONS[:1]}, [[0, 0, 0, 1, 1, 1, 1, 2, 2]]),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, [[0, 0, 0, 1, 1]]),
        ({"segment_ids": torch.tensor([[1, 1, 2]])}, [[1, 1, 2]]),
        (
            {"position_ids": torch.tensor([[0, 0, 0, 1, 2]])},
            None,
        ),  # padding on the left
        ({"position_ids": torch.arange(5)[None]}, None),
        ({"cu_seqlens": torch.tensor([0, 5])}, None),
        ({"position_ids": torch.zeros(3, 2, 5, dtype=torch.int64)}, None),
    ],
)
def test_documents_are_read_from_the_arguments(kwargs, numbers):
    ids = document_numbers(kwargs)
    assert (None if ids is None else ids.tolist()) == numbers


def padded(*, hides):
    """Attention that hides padding, or not."""

    def mask(attention_mask):
        is_token = attention_mask.bool() if hides else attention_mask >= 0
        return causal(attention_mask.shape[1])[None] & is_token[:, None, None]

    return Masked(mask)


def test_weight_on_padding_is_said():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    batch = {"tokens": tokens(), "attention_mask": mask}
    assert answer(padded(hides=True), batch)[0] is Status.HEALTHY
    status, sentence = answer(padded(hides=False), batch)
    assert status is Status.NOT_HEALTHY
    assert "padding" in sentence
    batch["attention_mask"] = torch.ones_like(mask)
    assert answer(padded(hides=False), batch)[0] is Status.HEALTHY


@pytest.mark.parametrize(
    ("kwargs", "padding"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, [[False, False, True]]),
        ({"attention_mask": torch.tensor([[1, 1, 1]])}, None),
        ({"attention_mask": torch.tensor([[0.0, -1e4]])}, None),  # added to logits
        ({"key_padding_mask": torch.tensor([[False, True]])}, [[False, True]]),
        ({"key_padding_mask": torch.tensor([[False, False]])}, None),
    ],
)
def test_padding_is_read_from_the_arguments(kwargs, padding):
    keys = padded_keys(kwargs)
    assert (None if keys is None else keys.tolist()) == padding


def low_masked(number):
    """Attention with logits of about -20,000, and a mask that may be above them."""

    def attend(q, k, v):
        z = torch.where(causal(q.shape[2])[None], scores(q, k) - 2e4, number)
        return z.softmax(-1) @ v

    return Joint(attend, 16)


def test_weight_on_hidden_pairs_is_said():
    x = torch.randn(2, 6, 16)
    status, sentence = answer(low_masked(-1e4), x)
    assert status is Status.NOT_HEALTHY
    assert "hidden pairs have weight" in sentence
    assert "hidden" not in answer(low_masked(-torch.inf), x)[1]


def with_an_empty_row(q, k, v):
    """A query of sample 1 sees no key: a softmax of -inf is NaN."""
    mask = causal(q.shape[2]).repeat(len(q), 1, 1)
    mask[1, 2] = False
    return scores(q, k).masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v


@dataclasses.dataclass
class Output:
    hidden: Tensor


class InADataclass(Joint):
    def forward(self, x):
        return Output(super().forward(x))


@pytest.mark.parametrize("kind", [Joint, InADataclass])
def test_a_row_that_sees_no_key_is_named_where_the_output_is_not_finite(
    kind,
):
    status, sentence = answer(kind(with_an_empty_row, 16), torch.randn(2, 6, 16))
    assert status is Status.NOT_HEALTHY
    assert "sample 1, query 2 sees no key" in sentence


@pytest.mark.parametrize("most", [1 << 6, 1 << 9, 1 << 20])
def test_some_rows_of_a_long_sequence_speak_for_all(most):
    torch.manual_seed(0)
    model = Model([SelfAttention(everything, fused=True)]).eval()
    ((name, calls),) = captured_calls(model, tokens(40)).items()
    rows = [rows for rows, _ in blocks_of_weights(calls, most)]
    n_rows = sum(block.stop - block.start for block in rows)
    assert rows[-1].stop == 40
    # A row of 2 samples, 2 heads and 40 keys has 160 weights.
    assert {1 << 6: 8, 1 << 9: 8, 1 << 20: 40}[most] == n_rows
    assert seen_keys(name, calls, PackedTokens(), most).weight("later") > 0.5


class WithMask(Attention):
    """Attention of two heads of 8 on the fused kernel, or written out, with a mask that is added."""

    def __init__(self, mask, *, is_fused):
        super().__init__(None, 16)
        self.mask, self.is_fused = mask, is_fused
        self.double()

    def weights(self, x):
        q, k, _ = self.heads(x)
        return (scores(q, k) + self.mask).softmax(-1).detach()

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.is_fused:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=self.mask
            )
        return (scores(q, k) + self.mask).softmax(-1) @ v


X = randn(2, 8, 16, dtype=torch.float64, seed=1)


@pytest.mark.parametrize("fill", [-100.0, -1e4])
def test_a_number_in_a_fused_mask_that_logits_overtake_is_told_and_mapped(fill):
    torch.manual_seed(0)
    mask = torch.full((8, 8), fill, dtype=torch.float64).triu(1)
    model = WithMask(mask, is_fused=True)
    assert "hidden pairs" not in str(qkeel.check(model, X))
    with torch.no_grad():
        model.q.weight *= 3 * abs(fill)
    assert "hidden pairs have weight" in str(qkeel.check(model, X))
    assert_close(qkeel.attention_maps(model, X)[""], model.weights(X))


@pytest.mark.parametrize("is_fused", [False, True])
def test_numbers_without_a_key_above_them_are_no_broken_logits(is_fused):
    torch.manual_seed(0)
    of_head = torch.tensor([0.0, -500.0], dtype=torch.float64)[:, None, None]
    model = WithMask(of_head, is_fused=is_fused)
    assert qkeel.check(model, X).status == "healthy"
    assert_close(qkeel.attention_maps(model, X)[""], model.weights(X))
    # One number for all pairs changes no weight; this one leaves nothing of q·k.
    for number, status in ((-1e4, "healthy"), (-1e30, "not known")):
        model.mask = torch.full((1, 1, 1, 8), number, dtype=torch.float64)
        assert qkeel.check(model, X).status == status
