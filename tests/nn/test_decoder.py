"""The decoder: shapes, ties, initial statistics, bad input."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    ShapeError,
    UnknownNameError,
)
from qkeel.nn import Decoder, DecoderConfig, EncoderDecoder, FusedEmbedding, ViT

VOCAB = 101


def make(**choices):
    model = Decoder(DecoderConfig(vocab_size=VOCAB, **choices))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def test_a_tied_head_is_the_embedding_and_learns_with_it():
    tied, untied = make(tied=True), make()
    assert tied.head.weight is tied.embedding.weight
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == VOCAB * 64
    assert "head.weight" in tied.state_dict()


@pytest.mark.parametrize(("attention", "mlp"), [("mha", "swiglu"), ("mla", "gelu")])
def test_matrices_start_at_one_over_root_fan_in_and_residual_writers_smaller(
    attention, mlp
):
    model = make(d_model=128, n_layers=8, attention=attention, mlp=mlp)
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    tied = make(tied=True, d_model=128).embedding.weight.std().item()
    assert tied == pytest.approx(128**-0.5, rel=0.05)
    writers = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            writes = name.endswith((".attention.o_proj", ".mlp.down"))
            writers += writes
            expected = (module.in_features * (16 if writes else 1)) ** -0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.15), name
            assert abs(module.weight.mean().item()) < 0.2 * expected, name
    assert writers == 2 * 8


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"attention": "mqa"}, UnknownNameError),
        ({"mlp": "relu"}, UnknownNameError),
        ({"norm_order": "sandwich"}, UnknownNameError),
        ({"n_layers": 0}, InvalidValueError),
        ({"d_model": 0}, InvalidValueError),
        ({"n_heads": 3}, InvalidValueError),
        ({"n_kv_heads": 3}, InvalidValueError),
        ({"mlp_ratio": 0.0}, InvalidValueError),
        ({"dropout": -0.1}, InvalidValueError),
    ],
    ids=str,
)
def test_bad_choices_are_refused_when_the_configuration_is_made(choices, error):
    with pytest.raises(error):
        DecoderConfig(vocab_size=VOCAB, **choices)


def test_bad_tokens_are_refused():
    with pytest.raises(ShapeError):
        make()(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidTypeError):
        make()(torch.zeros(2, 3))


def test_a_fused_embedding_maps_pixels_and_leaves_text_to_the_table():
    table, pixels = torch.nn.Embedding(7, 5), torch.randn(3, 2)
    embedding = FusedEmbedding(table, pixels)
    out = embedding(torch.tensor([[0, 3, 4, 6]]))[0]
    assert torch.equal(out[:2], table.weight[[0, 3]])
    assert_close(out[2:], pixels[[0, 2]] @ embedding.patch.weight.T)
    names = [name for name, _ in embedding.named_parameters()]
    assert names == ["weight", "patch.weight"]


def test_a_vision_transformer_sees_the_whole_image_from_weights_of_the_same_rule():
    config = DecoderConfig(vocab_size=3, d_model=128, n_layers=1)
    model = ViT(config, patches=64, width=6)
    model.init_weights(torch.Generator().manual_seed(0))
    assert model.position.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.patch.weight.std().item() == pytest.approx(6**-0.5, rel=0.1)
    x, first = torch.randn(1, 64, 6, requires_grad=True), []
    model.blocks[0].register_forward_hook(lambda _, __, out: first.append(out[0, 0]))
    assert model(x).shape == (1, 3)
    (grad,) = torch.autograd.grad(first[0].sum(), x)
    assert grad[0, -1].any(), "the first patch sees the last"
    for wrong in (x[:, 1:], x[..., 1:], x[0]):
        with pytest.raises(ShapeError, match="64 6"):
            model(wrong)


def test_a_sequence_without_a_target_is_refused():
    model = EncoderDecoder(DecoderConfig(vocab_size=VOCAB), source=4)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    assert model(tokens).shape == (1, 2, VOCAB)
    for wrong in (tokens[:, :4], tokens[0]):
        with pytest.raises(ShapeError, match="more than 4"):
            model(wrong)


def test_the_model_predicts_from_the_whole_source_and_the_target_before():
    config = DecoderConfig(vocab_size=11, d_model=16, n_heads=2)
    model = EncoderDecoder(config, source=4).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.arange(9)[None]
    base = model(tokens)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = 10
        moved = (model(changed) - base).abs().amax(-1)[0] > 1e-6
        assert moved.tolist() == [place < 4 or i >= place - 4 for i in range(5)]
    x = torch.zeros(1, 2, 16)
    with pytest.raises(InvalidValueError):
        EncoderDecoder(dataclasses.replace(config, attention="mla"), source=4)
    with pytest.raises(InvalidValueError, match="context"):
        model.blocks[0](x)
    with pytest.raises(InvalidValueError, match="context"):
        Decoder(config).blocks[0](x, context=x)
