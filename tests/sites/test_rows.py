"""Which rows of which weights make each head: the same laws for every model of the table."""

import dataclasses

import pytest
import torch
from tests.attention import scores
from tests.drawing import randn
from tests.quick import one_in
from tests.sites.models import CASES, OF_ADAPTER, D, H
from torch import nn
from torch.testing import assert_close

from qkeel import find_sites
from qkeel.sites import QKProduct, site_search
from qkeel.sites import trace as trace_module
from qkeel.sites.verify import LogitReader
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

from .oracle import tapped

IDS = {id(case): name for name, case in CASES.items()}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def paths_of(site, side):
    """The weights on each path to q or k, without repetitions."""
    paths = []
    for term in site.terms:
        slices = getattr(term, side)
        path = [(s.parameter, s.axis, s.index.tolist()) for s in slices]
        if path not in paths:
            paths.append(path)
    return paths


def statistics(model, x, site):
    torch.manual_seed(3)
    return tapped(model, x, [site])


@torch.no_grad()
def check_that_rows_move_their_heads_alone(case, model, x, site):
    before = statistics(model, x, site)
    for s in (*site.query, *site.key):
        weight = model.get_parameter(s.parameter)
        rows = s.rows_of(weight)
        head = s.n - 1
        stored = weight.clone()
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(rows[s.index[head]].shape, generator=generator)
        rows[s.index[head]] += 3 * noise.to(rows)
        after = statistics(model, x, site)
        weight.copy_(stored)
        uses = (site.used(s.n) == head).tolist()
        moved = (after.max_abs_logit != before.max_abs_logit) | (
            after.entropy != before.entropy
        )
        mine, others = torch.tensor(uses), ~torch.tensor(uses)
        # A factor of zero, as of an adapter before its first step, hides the other one.
        if not bool(moved.any()):
            assert case.query == OF_ADAPTER or "zeros" in IDS[id(case)]
            continue
        assert moved[mine].all()
        # A norm over all heads moves others a little.
        distance = (after.entropy - before.entropy).abs()
        assert site.normed or not (distance[others] > distance[mine].min() / 3).any()


@each_case
def test_rows_and_biases_of_each_head_are_found_and_confirmed_and_nothing_is_changed(
    case,
):
    model, x = case.model(), case.x()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    torch.manual_seed(3)
    stream = torch.get_rng_state()
    (site,) = find_sites(model, x)
    assert torch.equal(torch.get_rng_state(), stream)
    assert [p._version for p in model.parameters()] == versions
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (site.why, site.unverified) == ("", "")
    assert (site.unscaled == "") == case.scales
    assert site.verified
    assert (site.n_heads, site.n_kv_heads) == case.heads
    assert site.key_heads == case.key_heads
    assert site.normed == case.normed
    assert site.layout is None or site.layout.guess == ""
    for side in ("query", "key"):
        expected = [
            [(name, axis, index.tolist()) for name, axis, index in path]
            for path in getattr(case, side)
        ]
        assert paths_of(site, side) == expected
    for path, bias in zip((site.query, site.key), case.biases):
        last = path[0]
        if bias is not None:
            assert (last.bias, last.bias_shift + int(last.index[0, 0])) == bias
    check_that_rows_move_their_heads_alone(case, model, x, site)


def swapped(slices):
    """The slices in which the first two heads have each other's rows."""
    last = slices[-1]
    order = [1, 0, *range(2, last.n)]
    index = last.index[order]
    return (*slices[:-1], dataclasses.replace(last, index=index))


@pytest.fixture
def planted(monkeypatch):
    """What a search finds that takes a site with these changes for what it has read."""

    def site_of(case, **changes):
        def read(*args, **kwargs):
            trace = trace_module.read_module(*args, **kwargs)
            (site,) = trace.sites
            trace.set_sites([dataclasses.replace(site, **changes)])
            return trace

        monkeypatch.setattr(site_search, "read_module", read)
        (site,) = find_sites(case.model(), case.x())
        monkeypatch.undo()
        return site

    return site_of


@pytest.mark.parametrize("case", one_in(CASES.values(), 3))
def test_rows_of_the_wrong_head_are_not_confirmed(case, planted):
    (site,) = find_sites(case.model(), case.x())
    for side in ("query", "key"):
        terms = list(site.terms)
        slices = getattr(terms[0], side)
        if slices[-1].n > 1:
            sides = {"query": terms[0].query, "key": terms[0].key}
            terms[0] = QKProduct(**{**sides, side: swapped(slices)})
            doubtful = planted(case, terms=tuple(terms))
            assert not doubtful.verified
            assert "changed the logits of" in doubtful.unverified


def test_planted_faults_are_told(planted):
    case = CASES["written"]
    (site,) = find_sites(case.model(), case.x())
    (term,) = site.terms
    (q,) = term.query

    def of(*terms):
        return planted(case, terms=terms).unverified

    values = dataclasses.replace(q, parameter="v.weight", bias="v.bias")
    of_values = QKProduct(query=(values,), key=term.key)
    assert "changed the logits of no head" in of(of_values)
    assert "rows of v.weight" in of(term, of_values)
    half = dataclasses.replace(q, index=q.index[:, : D // 2])
    assert "from other weights" in of(QKProduct(query=(half,), key=term.key))
    beyond = dataclasses.replace(q, index=q.index + 1000)
    why = of(QKProduct(query=(beyond,), key=term.key))
    assert "cannot run again: IndexError" in why
    assert "heads instead of 2" in planted(case, n_heads=2).unverified
    case = CASES["a sum of products"]
    (site,) = find_sites(case.model(), case.x())
    for term in site.terms:
        assert "from other weights" in of(term)


@pytest.mark.parametrize(("heads", "width"), [(3, 8), (5, 1), (64, 8), (70, 8)])
def test_the_heads_of_a_permuted_projection_are_told_apart(heads, width):
    """Whatever their number; verification takes about log₂ h changes. Of width 1, the weight is a single column."""

    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(width, 3 * heads * 2)
            self.order = torch.randperm(heads)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, heads, 2)).permute(2, 0, 3, 1, 4)
            return (q[:, self.order] @ k.mT).softmax(-1) @ v

    model = Permuted()
    (site,) = find_sites(model, torch.randn(2, 3, width))
    assert site.verified
    rows = torch.arange(heads * 2).view(heads, 2)
    assert site.query[0].index.tolist() == rows[model.order].tolist()
    assert site.key[0].index.tolist() == (rows + heads * 2).tolist()
    assert site.n_heads == heads != H


@pytest.mark.parametrize(
    ("padding", "rows"),
    [(slice(0, 8), slice(8, 40)), (slice(32, 40), slice(0, 32))],
)
def test_of_many_rows_those_at_the_end_with_more_logits_are_read(padding, rows):
    q, k = randn(1, 2, 40, 4, seed=0), randn(1, 2, 40, 4, seed=1)
    q[:, :, padding] = 0
    call = make_call(AttentionSpec(), q, k, k, causal=False)
    assert_close(LogitReader(call).recorded, scores(q, k)[:, :, rows])
