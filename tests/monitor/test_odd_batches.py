"""Batches without sequences or tokens are skipped and counted; of one token a sequence, attention has no choice."""

import contextlib
import itertools

import pytest
import torch
from tests.attention import from_heads, to_heads, written
from tests.contract.watch.small import Block, batch, small
from tests.quick import quick
from tests.training import sgd, step, warned
from torch import nn

import qkeel
from qkeel.errors import RefusedError


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Written(Block):
    def forward(self, x):
        q, k, v = (to_heads(f(x), 2, 4) for f in (self.q, self.k, self.v))
        return self.o(from_heads(written(q, k, v)))


MODELS = {
    "sdpa": small,
    "torch's": TorchAttention,
    "written": Written,
    "own": lambda: nn.Sequential(qkeel.nn.Attention(8, 2)),
}
EMPTY = {"no sequences": (0, 5), "no tokens": (2, 0)}


def trained(make, shapes, watch, **how):
    torch.manual_seed(0)
    model = make()
    optimizer = sgd(model, 0.001)
    with warned() as caught:
        monitor = qkeel.watch(model, optimizer, **how) if watch else None
        for i, (b, t) in enumerate(shapes):
            step(model, optimizer, batch(i, b, t))
    return model, monitor, caught


# In the middle of training and, of no sequences, before anything is seen; at the end where all is known one will do.
@pytest.mark.parametrize(
    ("name", "empty", "where"),
    quick(
        itertools.product(MODELS, EMPTY, (2, 0, 4)),
        lambda case: (
            case[2] == 2
            or case[1:] == ("no sequences", 0)
            or case == ("sdpa", "no tokens", 4)
        ),
    ),
)
def test_an_empty_batch_is_left_out_and_the_steps_around_it_are_measured(
    name, empty, where
):
    make, shape = MODELS[name], EMPTY[empty]
    shapes = [(2, 4)] * 5
    shapes[where] = shape
    model, monitor, said = trained(make, shapes, True)
    plain, *_ = trained(make, shapes, False)
    assert said == []
    assert monitor.active
    assert monitor.history.steps.tolist() == [i for i in range(5) if i != where]
    monitor.remove()
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


class Experts(nn.Module):
    """Attention of each sequence by one of three experts."""

    def __init__(self, make):
        super().__init__()
        self.experts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x, expert):
        y = torch.zeros_like(x)
        for i, module in enumerate(self.experts):
            y = y.index_add(
                0, (chosen := (expert == i).nonzero().flatten()), module(x[chosen])
            )
        return x + y


@pytest.mark.parametrize("make", [Block, Written])
@pytest.mark.parametrize("first", [[0, 0, 1, 1], [2, 2, 2, 2]])
def test_an_expert_without_tokens_keeps_no_other_from_being_known(make, first):
    torch.manual_seed(0)
    model, x = Experts(make), batch(0, 4, 5)
    optimizer = sgd(model, 0.001)
    sites = qkeel.find_sites(model, (x, torch.tensor(first)))
    known = {site.name for site in sites if site.verified}
    assert known == {f"experts.{i}" for i in first}
    assert all("no tokens" in site.why for site in sites if site.name not in known)
    example = x, torch.tensor(first)
    for remedy in ("qk_norm", "qk_clip"):
        with pytest.raises(RefusedError, match="no tokens"):
            qkeel.apply(model, remedy, optimizer, batch=example)
    with (
        contextlib.suppress(RefusedError),
        qkeel.apply(model, "softcap", optimizer, batch=example),
    ):
        model(x, torch.tensor([0, 1, 2, 2]))
    with warned() as told, qkeel.watch(model, optimizer) as monitor:
        for expert in (first, [0, 1, 2, 2]):
            model(x, torch.tensor(expert)).square().sum().backward()
            optimizer.step()
    assert {site.name for site in monitor.sites if site.verified} == known
    assert {*monitor.history.frame()["layer"]} == known
    assert any("first seen at step 1" in line for line in told)
    assert not any("do not run alone" in line for line in told)


class HeadsByLength(Written):
    """Two heads, and one for more than 48 tokens."""

    def forward(self, x):
        heads = 1 if x.shape[1] > 48 else 2
        q, k, v = (to_heads(f(x), heads, -1) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(from_heads(y))


@pytest.mark.parametrize("lengths", [(70, 70), (40, 70), (40, 40)])
def test_heads_that_depend_on_the_length_are_told(lengths):
    _, monitor, told = trained(HeadsByLength, [(3, t) for t in lengths], watch=True)
    assert any("depend on the input" in line for line in told) == (70 in lengths)
    if lengths[0] == 70:
        assert [(site.n_heads, site.verified) for site in monitor.sites] == [(1, False)]


def test_an_example_with_other_heads_than_its_first_tokens_is_refused():
    model = HeadsByLength()
    with pytest.raises(RefusedError, match="heads instead of 2"):
        qkeel.apply(model, "qk_clip", sgd(model, 0.0), batch=batch(0, 3, 70))


@pytest.mark.parametrize(("shown", "runs"), [(40, 70), (40, 40)])
def test_a_clip_leaves_heads_alone_that_are_not_those_of_its_example(shown, runs):
    torch.manual_seed(0)
    model = HeadsByLength()
    optimizer = sgd(model, 0.0)
    before = model.q.weight.detach().clone()
    with (
        warned() as told,
        qkeel.apply(
            model, "qk_clip:threshold=0.01", optimizer, batch=batch(0, 3, shown)
        ),
    ):
        step(model, optimizer, batch(1, 3, runs))
    assert torch.equal(before, model.q.weight) == (shown != runs)
    assert any("in the example with which it was applied" in line for line in told) == (
        shown != runs
    )
