"""Remedies and statistics follow the key head that each query head uses, also where it is not the one of its block."""

from __future__ import annotations

import pytest
import torch
from tests.sites.test_layouts import GROUPS, Heads, truth
from torch import Tensor, nn

import qkeel
from qkeel.monitor.weight_norms import WeightNorms

USED = [0, 1, 0, 1]
TILED = ("tiled", "tiled, fused", "repeats first")


def model_of(name: str) -> tuple[nn.Module, Heads]:
    """The model, and the attention in it, its second and third head loud."""
    torch.manual_seed(0)
    heads = Heads(*GROUPS[name][:2])
    with torch.no_grad():
        for p, factor in zip(heads.q.weight.chunk(4), (1.0, 40.0, 15.0, 2.0)):
            p.mul_(factor)
    return nn.Sequential(heads), heads


def batch() -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def maxima(model: nn.Module, heads: Heads) -> Tensor:
    with torch.no_grad():
        model(batch())
    return truth(heads, USED)[0]


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("groups", ["query", "group"])
def test_qk_clip_clips_the_heads_that_are_over_and_by_groups_those_that_share_a_key(
    name: str, groups: str
) -> None:
    model, heads = model_of(name)
    before = maxima(model, heads)
    threshold = (
        float(before[2] + before[3]) / 2
    )  # heads 1 and 2 are over it, each in a group of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.apply(
        model, "qk_clip", optimizer, batch=batch(), threshold=threshold, groups=groups
    ):
        model(batch()).sum().backward()
        optimizer.step()
    after = maxima(model, heads)
    expected = before.clone()
    for own in ([0, 2], [1, 3]):
        gamma = (threshold / before[own]).clamp(max=1.0)
        expected[own] *= gamma.min() if groups == "group" else gamma
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TILED)
def test_lalr_slows_the_query_heads_that_use_a_key_head_and_that_key_head_by_its_worst_query_head(
    name: str,
) -> None:
    model, heads = model_of(name)
    model.double()  # steps of a loud head are lost in float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    start = heads.q.weight.detach().clone()
    with qkeel.apply(model, "lalr:tau=1", optimizer, batch=batch().double()):
        with torch.no_grad():
            heads.k.weight[8:].mul_(4)  # key head 1
            heads.q.weight[16:24].mul_(3)  # query head 2
        before = {n: p.detach().clone() for n, p in heads.named_parameters()}
        (model(batch().double()) ** 2).sum().backward()
        optimizer.step()

    def rates(name: str, n: int) -> Tensor:
        p = heads.get_parameter(name)
        assert p.grad is not None
        step, grad = (
            x.unflatten(0, (n, 8)).flatten(1)
            for x in (before[name] - p.detach(), p.grad)
        )
        return (step * grad).sum(1) / (grad * grad).sum(1) / 1e-5

    torch.testing.assert_close(
        rates("q.weight", 4),
        torch.tensor([1, 1 / 4, 1, 1 / 4]).double(),
        rtol=0.02,
        atol=0.0,
    )
    norms, now = (
        w.unflatten(0, (4, 8)).flatten(1).norm(dim=1)
        for w in (start, before["q.weight"])
    )
    worst = [norms[own].max() / now[own].max() for own in ([0, 2], [1, 3])]
    torch.testing.assert_close(
        rates("k.weight", 2), torch.stack(worst), rtol=0.02, atol=0.0
    )


@pytest.mark.parametrize("name", TILED)
def test_weight_norms_pair_a_query_head_with_its_key_head(name: str) -> None:
    model, heads = model_of(name)
    (site,) = qkeel.find_sites(model, batch())
    found = WeightNorms(model, [site], None).read()
    q, k = (
        heads.q.weight.detach().unflatten(0, (4, 8)),
        heads.k.weight.detach().unflatten(0, (2, 8))[USED],
    )
    torch.testing.assert_close(found["0", "key_weight_norm"], k.flatten(1).norm(dim=1))
    torch.testing.assert_close(
        found["0", "qk_spectral_norm"],
        torch.linalg.matrix_norm(q.mT @ k, 2),
        rtol=1e-4,
        atol=1e-4,
    )
