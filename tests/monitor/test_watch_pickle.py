"""A model that is stored whole while it is watched: the file is the one that it would be without qkeel."""

import copy
import pickle
import pickletools

import torch
from tests.training import adamw
from torch import nn

import qkeel


def model():
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, batch_first=True),
        1,
        enable_nested_tensor=False,
    )


def step(net, optimizer):
    net(torch.randn(2, 5, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(stored):
    return {
        arg
        for _, arg, _ in pickletools.genops(stored)
        if isinstance(arg, str) and "qkeel" in arg
    }


def test_a_watched_model_is_stored_without_a_name_of_qkeel():
    net = model()
    optimizer = adamw(net)
    with qkeel.watch(net, optimizer):
        step(net, optimizer)
        during, copied = pickle.dumps(net), copy.deepcopy(net)
        optimizer_during = pickle.dumps(optimizer)
    assert not names(during)
    assert not names(pickle.dumps(copied))
    assert pickle.dumps(optimizer) == optimizer_during
    x = torch.randn(2, 5, 16)
    for stored in (copied, pickle.loads(during)):
        assert torch.equal(stored.eval()(x), net.eval()(x))


class Own(nn.Linear):
    def __getstate__(self):
        return {**vars(self), "added": 1}


def test_a_state_that_a_class_makes_itself_is_kept_but_for_the_hooks():
    net = Own(2, 2)
    with qkeel.watch(net):
        state = net.__getstate__()
    assert isinstance(state, dict)
    assert state["added"] == 1
    assert state["_forward_hooks"] == {}
    assert "__getstate__" not in state
