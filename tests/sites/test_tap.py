"""The tap sees what passes, changes nothing, and lets go."""

import pytest
import torch
import torch.nn.functional as F
from tests.drawing import randint
from torch import nn

from qkeel import preset
from qkeel.nn import Decoder, DecoderConfig
from qkeel.sites import Tap


def decoder(**choices):
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(
            vocab_size=11, d_model=16, n_kv_heads=2, spec=preset("qwen3"), **choices
        )
    )
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def tokens(seed=0):
    return randint(11, (2, 6), seed=seed)


@pytest.mark.parametrize("training", [True, False])
def test_when_training_only_passes_that_can_be_trained_count(training):
    model = decoder().train(training)
    with Tap(model, when_training=True) as tap:
        with torch.no_grad():
            model(tokens())
        assert tap.read() == {}
        model(tokens()).sum().backward()
        assert len(tap.read("train")) == 2


class _SelfAttention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class _Late(nn.Module):
    """Attention, and more of it where it is asked for."""

    def __init__(self):
        super().__init__()
        self.near, self.far = _SelfAttention(), _SelfAttention()

    def forward(self, x, far=False):
        return self.far(self.near(x)) if far else self.near(x)


def test_attention_that_first_appears_late_is_seen_after_twice_as_many_passes_at_the_latest():
    model, x = _Late(), torch.randn(2, 5, 8)
    with Tap(model) as tap:
        for _ in range(5):
            model(x)
        assert set(tap.read()) == {"near"}
        for _ in range(4):
            model(x, far=True)
        assert set(tap.read()) == {"near", "far"}


def test_a_module_that_is_replaced_is_searched_at_once():
    model, x = _Late(), torch.randn(2, 5, 8)
    with Tap(model) as tap:
        for _ in range(6):
            model(x)
        model.near = nn.Sequential(_SelfAttention())
        tap.read()
        model(x)
        assert set(tap.read()) == {"near.0"}
