"""A bare Tap where all heads share their keys: right by the module's number of heads, or it says that it guesses."""

import pytest
import torch
from tests.training import warned
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.sites import Tap

BATCH, TOKENS, HEADS, WIDTH = 2, 12, 4, 8


class Absorbed(nn.Module):
    """Scores [b t h s] of queries of each head and keys of all heads, as DeepSeek-V3 computes absorbed MLA."""

    def __init__(self, told):
        super().__init__()
        self.wq, self.wkv, self.logits = (
            nn.Linear(32, HEADS * WIDTH),
            nn.Linear(32, WIDTH),
            torch.empty(0),
        )
        if told:
            self.n_heads = HEADS

    def forward(self, x):
        q, kv = self.wq(x).unflatten(-1, (HEADS, WIDTH)), self.wkv(x)
        self.logits = torch.einsum("bshc,btc->bsht", q, kv) * WIDTH**-0.5
        return torch.einsum("bsht,btc->bshc", self.logits.softmax(-1), kv).flatten(2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_heads_that_share_keys_are_not_taken_for_queries(told, training):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(Absorbed(told)).train(training),
        3 * torch.randn(BATCH, TOKENS, 32),
    )
    with warned() as caught, torch.no_grad(), Tap(model) as tap:
        model(x)
    (stats,) = tap.read().values()
    guesses = [text for text in caught if "do not show which" in text]
    if told:
        assert_close(stats.max_logit.float(), model[0].logits.amax((0, 1, 3)))
        assert not caught
    else:
        assert guesses
    with torch.no_grad(), qkeel.watch(model) as monitor:
        model(x)
    assert_close(monitor.read()["0"].max_logit.float(), model[0].logits.amax((0, 1, 3)))
