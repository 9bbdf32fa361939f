"""`watch` makes no pass of its own: it reads the program's first one, and runs copies of attention modules alone."""

import threading

import pytest
import torch
from tests.attention import Attention as Foreign
from tests.attention import Joint, fused, written
from tests.training import sgd, warned
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.sites.module_copy import copy_of

CALLS = []


def noted(module):
    CALLS.append(module)


class Attention(Foreign):
    def __init__(self, attend):
        super().__init__(attend)
        self.o = nn.Linear(8, 8)

    def forward(self, x):
        return self.o(F.dropout(super().forward(x), 0.1))


class Model(nn.Module):
    """Blocks around attention that note every call of theirs."""

    def __init__(self, attend=fused, checkpointed=False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(Attention(attend) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, tokens):
        noted(self)
        x = self.norm(self.embed(tokens).mT).mT
        for layer in self.layers:
            if self.checkpointed:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointed == "again")
            else:
                x = x + layer(x)
        # The same weight twice, of which autocast keeps one cast.
        return self.layers[0].o(self.layers[0].o(x))


def trained(
    watch, *, autocast=False, frozen=False, first_without_gradients=False, **kind
):
    """The losses of three steps, the sites that were found, and how often the model ran."""
    torch.manual_seed(0)
    model = Model(**kind)
    if frozen:
        model.layers.requires_grad_(False)
    optimizer = sgd(model)
    monitor = qkeel.watch(model, optimizer) if watch else None
    CALLS.clear()
    losses = []
    for step in range(3):
        tokens = torch.randint(16, (3, 6))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if first_without_gradients and not step:
                with torch.no_grad():
                    model(tokens)
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, monitor, len(CALLS)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"attend": written},
        {"autocast": True},
        {"frozen": True},
        {"checkpointed": "once"},
        {"checkpointed": "again", "attend": written},
        {"first_without_gradients": True},
    ],
    ids=lambda setting: "+".join(setting),
)
def test_the_first_pass_of_the_program_shows_the_weights_of_each_head(setting):
    losses, monitor, calls = trained(True, **setting)
    plain, _, calls_unwatched = trained(False, **setting)
    assert losses == plain
    assert calls == calls_unwatched
    assert [site.name for site in monitor.sites] == ["layers.0", "layers.1"]
    for site in monitor.sites:
        assert site.verified
        assert site.query[0].parameter == f"{site.name}.q.weight"
        assert site.key[0].index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Unusual(Joint):
    """Attention whose module can't be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_watched_without_its_weights():
    torch.manual_seed(0)
    model, x = nn.Sequential(Unusual()), torch.randn(2, 5, 8)
    with warned() as caught, qkeel.watch(model) as monitor:
        model(x).sum().backward()
        (stats,) = monitor.read().values()
    assert_close(stats.max_logit.double(), model[0].largest(x))
    (said,) = [text for text in caught if "weights behind" in text]
    assert "lock" in said


def test_the_weights_of_a_teacher_in_a_list_are_not_copied():
    torch.manual_seed(0)
    model, x = Joint(), torch.randn(2, 5, 8)
    teacher = nn.Linear(8, 8)
    model.teacher = [teacher]
    copied = copy_of(model, model.parameters())
    assert copied.teacher[0] is not teacher
    assert copied.teacher[0].weight is teacher.weight
    assert copied.qkv.weight is not model.qkv.weight
    assert copied.qkv.weight.data_ptr() == model.qkv.weight.data_ptr()
    with qkeel.watch(model) as monitor:
        model(x).sum().backward()
    assert [site.verified for site in monitor.sites] == [True]
