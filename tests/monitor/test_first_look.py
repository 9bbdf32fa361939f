"""The first measured pass of a watched model says once what its queries see and should not, and costs no pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, from_heads
from tests.training import sgd, warned
from torch import Tensor, nn

from qkeel import watch
from qkeel.errors import QkeelWarning

WIDTH, HEADS = 16, 2


@dataclasses.dataclass
class Config:
    is_decoder: bool = True
    is_encoder_decoder: bool = False
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None


class Layer(Joint):
    def __init__(self):
        super().__init__(m=WIDTH, heads=HEADS)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, fused, scale, cap, weights):
        q, k, v = self.heads(x)
        if fused and not cap:
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        else:
            z = q @ k.mT * scale
            z = cap * torch.tanh(z / cap) if cap else z
            y = weights(z, mask) @ v
        return x + self.o(from_heads(y))


class Program(nn.Module):
    """A language model whose mask is what `sees` makes of its arguments."""

    def __init__(self, sees, config):
        super().__init__()
        self.embed, self.config, self.sees = nn.Embedding(9, WIDTH), config, sees
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.fused, self.scale, self.cap, self.passes = True, WIDTH**-0.5, 0.0, 0
        self.weights = lambda z, mask: z.masked_fill(~mask, -torch.inf).softmax(-1)

    def forward(
        self,
        tokens,
        position_ids=None,
        attention_mask=None,
    ):
        self.passes += 1
        b, t = tokens.shape
        mask = self.sees(t, position_ids, attention_mask)
        mask = mask.expand(b, 1, t, t)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, self.fused, self.scale, self.cap, self.weights)
        return x


def causal(t, *_):
    return torch.ones(1, 1, t, t, dtype=torch.bool).tril()


def everything(t, *_):
    return torch.ones(1, 1, t, t, dtype=torch.bool)


def inverted(t, *_):
    return torch.ones(1, 1, t, t, dtype=torch.bool).triu()


def window(t, *_):
    return causal(t) & ~causal(t).tril(-3)


def isolated(t, position_ids, *_):
    documents = (position_ids == 0).cumsum(1)
    return causal(t) & (documents[:, :, None] == documents[:, None, :])[:, None]


def unpadded(t, _, attention_mask):
    return causal(t) & (attention_mask.bool()[:, None, None, :] | torch.eye(t).bool())


T = 8
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).repeat(2, 1)
PADDING = torch.ones(2, T, dtype=torch.int64)
PADDING[0, :3] = 0

# What the mask is, its healthy twin, the configuration, the further arguments, and what is said.
Kind = tuple[
    Callable[..., Tensor], Callable[..., Tensor], Config, dict[str, Tensor], str
]
CAP, SCALE = Config(attn_logit_softcapping=20.0), Config(query_pre_attn_scalar=4.0)
PACKED, PADDED = {"position_ids": POSITIONS}, {"attention_mask": PADDING}
KINDS = {
    "later keys": (everything, causal, Config(), {}, "sees later keys"),
    "an inverted mask": (inverted, causal, Config(), {}, "its mask is inverted"),
    "documents": (causal, isolated, Config(), PACKED, "documents of the packed"),
    "padding": (causal, unpadded, Config(), PADDED, "weight to padding"),
    "a lost window": (
        *(causal, window, Config(sliding_window=3), {}),
        "config.sliding_window is 3, but queries see all earlier keys",
    ),
    "another window": (
        *(window, window, Config(sliding_window=6), {}),
        "config.sliding_window is 6, but queries see only 3 keys",
    ),
    "a lost cap": (causal, causal, CAP, {}, "20.0, but the observed cap is none"),
    "another scale": (
        causal,
        causal,
        SCALE,
        {},
        "query_pre_attn_scalar is 4, which means",
    ),
}


def said(program, kwargs, steps=2):
    optimizer = sgd(program, 0.001)
    draw = torch.Generator().manual_seed(0)
    with warned() as messages, watch(program, optimizer):
        for _ in range(steps):
            tokens = torch.randint(9, (2, T), generator=draw)
            program(tokens, **kwargs).square().mean().backward()
            optimizer.step()
    return [text for text in messages if "first measured pass" in text]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen_that_should_not_be_is_said_once(kind, fused):
    wrong, _, config, kwargs, sentence = KINDS[kind]
    torch.manual_seed(random.Random(kind).randrange(100))
    program = Program(wrong, config)
    program.fused = fused
    (message,) = said(program, kwargs)
    assert sentence in message


@pytest.mark.parametrize(("kind", "fused"), [*zip(KINDS, [True, False] * 4)])
def test_the_same_program_that_sees_what_it_should_says_nothing(kind, fused):
    _, right, config, kwargs, _ = KINDS[kind]
    if kind == "another window":
        config = Config(sliding_window=3)
    program = Program(right, config)
    program.fused = fused
    program.scale = (config.query_pre_attn_scalar or WIDTH) ** -0.5
    program.cap = config.attn_logit_softcapping or 0.0
    assert said(program, kwargs) == []


def test_the_padding_of_an_encoder_is_none_of_a_decoder_of_the_same_length():
    assert said(Program(causal, Config(is_encoder_decoder=True)), PADDED) == []
    both_ways = Program(everything, Config(is_encoder_decoder=True))
    (message,) = said(both_ways, PADDED)
    assert "weight to padding" in message


def test_padded_queries_that_a_large_number_hides_everything_from_are_no_leak():
    """As transformers does without a kernel: the rows are spread over all keys, later ones too."""

    def weights(z, mask):
        return z.masked_fill(~mask, torch.finfo(z.dtype).min).softmax(-1)

    def padded(t, _, attention_mask):
        return causal(t) & attention_mask.bool()[:, None, None, :]

    program = Program(padded, Config(attn_logit_softcapping=20.0))
    program.fused, program.cap, program.weights = False, 20.0, weights
    assert said(program, PADDED) == []


def test_a_fault_in_the_look_leaves_the_watch_on(
    monkeypatch,
):
    def fail(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr("qkeel.monitor.first_look.seen_keys", fail)
    program = Program(causal, Config())
    optimizer = sgd(program, 0.001)
    monitor = watch(program, optimizer)
    with pytest.warns(QkeelWarning, match="is left out"):
        loss = program(torch.randint(9, (2, T))).square().mean()
    loss.backward()
    optimizer.step()
    assert monitor.active
    assert monitor.sample is not None
    monitor.remove()
