"""Rows of heads in weights of every layout, whole or split over two processes: their factors, norms and refusals."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from tests.drawing import randn
from tests.training import sgd
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import qkeel
from qkeel.errors import RefusedError
from qkeel.remedies.base import Target
from qkeel.remedies.head_weights import HeadNorms, HeadWeights, check_weights
from qkeel.remedies.logit_factors import logit_factors
from qkeel.remedies.shared_maxima import SharedMaxima
from qkeel.sites import HeadSlice, find_sites

from .models import attention


def test_a_weight_that_makes_heads_of_its_rows_and_of_its_columns_is_refused():
    model = attention()
    optimizer = sgd(model, lr=1e-3)
    (site,) = find_sites(model)
    (query,) = site.query
    columns = HeadSlice(parameter=query.parameter, axis=1, index=query.index)
    terms = tuple(dataclasses.replace(term, key=(columns,)) for term in site.terms)
    target = Target(model=model, optimizer=optimizer, sites=[site])
    assert len(HeadWeights(target, "lalr").parameters) == 2
    odd = dataclasses.replace(target, sites=[dataclasses.replace(site, terms=terms)])
    with pytest.raises(RefusedError, match="in its rows and in its columns"):
        HeadWeights(odd, "lalr")


def test_groups_of_several_sizes_have_no_exact_factors():
    (site,) = find_sites(attention())
    query, *keys = [
        HeadSlice(parameter=f"of {n}", axis=0, index=torch.arange(n)[:, None])
        for n in (8, 4, 2)
    ]
    terms = [dataclasses.replace(site.terms[0], query=(query,), key=(k,)) for k in keys]
    for several, is_exact in ((terms[:1], True), (terms, False)):
        grouped = dataclasses.replace(site, terms=several, n_heads=8, n_kv_heads=4)
        assert (logit_factors(grouped, by_group=True) is not None) is is_exact


# Weights of which each of two processes holds a part.

WHOLE = randn(9, 6, seed=0, dtype=torch.float64)
ROWS = HeadSlice(parameter="rows", axis=0, index=torch.tensor([[0, 1], [4, 5], [7, 6]]))
COLUMNS = HeadSlice(parameter="columns", axis=1, index=torch.tensor([[1, 2], [3, 5]]))
PLAIN = HeadSlice(parameter="plain", axis=0, index=torch.arange(4).view(2, 2))


@contextmanager
def process(rank):
    """As process `rank` of two, whose collectives do nothing."""
    distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def part(rank, dim):
    """The part of the whole weight that a process holds, as a DTensor."""
    own = WHOLE.chunk(2, dim)[rank].contiguous()
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(
        own,
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=WHOLE.shape,
        stride=WHOLE.stride(),
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_squares_of_the_parts_add_up_to_those_of_the_heads(dim, monkeypatch):
    plain = torch.randn(4, 5, dtype=torch.float64)
    sent = []
    monkeypatch.setattr(
        "qkeel.distributed.sharding.reduced",
        lambda x, *_: (sent.append(x.clone()), 4 * x)[1],
    )
    for rank in range(2):
        with process(rank):
            split = part(rank, dim)
            norms = HeadNorms([ROWS, COLUMNS, PLAIN], [split, split, plain])()
            assert_close(norms[:5], (4 * sent[rank][:5]).sqrt())
            whole = torch.linalg.matrix_norm(plain.view(2, 2, 5))
            assert_close(norms[5:], whole)
    assert len(sent) == 2
    squares = torch.cat([s.heads(WHOLE).square().sum((1, 2)) for s in (ROWS, COLUMNS)])
    assert_close(sent[0] + sent[1], squares)


def test_what_cannot_be_done_with_a_part_or_a_quantised_weight_is_refused():
    with process(0):
        model = attention()
        target = Target(model=model, optimizer=None, sites=find_sites(model))
        terms = DTensor.from_local(
            model.q_proj.weight.detach(),
            init_device_mesh("cpu", (2,)),
            [Partial()],
            run_check=False,
        )
        model.q_proj.weight = torch.nn.Parameter(terms)
        with pytest.raises(RefusedError, match="no process holds a block of it"):
            check_weights(target, "lalr", per_head=True)
    model = attention()
    sites = find_sites(model)
    optimizer = sgd(model)
    model.q_proj.weight = torch.nn.Parameter(
        torch.ones(16, 16, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(RefusedError, match=r"q_proj.weight is quantised"):
        qkeel.apply(model, "lalr", optimizer, sites=sites)


def test_a_process_knows_its_first_head_and_a_head_that_is_cut_is_refused():
    model = attention(n_kv_heads=4)
    (site,) = find_sites(model)
    whole = model.q_proj.weight.detach()
    with process(1):
        mesh = init_device_mesh("cpu", (2,))
        own = whole.chunk(2)[1].contiguous()
        split = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        model.q_proj.weight = torch.nn.Parameter(split)
        # Two heads of four rows a process, or one and a half.
        for n_heads, rows, first in ((4, 4, 2), (2, 6, None)):
            index = torch.arange(n_heads * rows).view(n_heads, rows)
            s = HeadSlice(parameter="q_proj.weight", axis=0, index=index)
            terms = (dataclasses.replace(site.terms[0], query=(s,)),)
            part_site = dataclasses.replace(site, terms=terms, n_heads=n_heads)
            target = Target(model=model, optimizer=None, sites=[part_site])
            maxima = SharedMaxima.__new__(SharedMaxima)
            maxima._first = {}
            if first is None:
                with pytest.raises(RefusedError, match="in the middle of a head"):
                    maxima._find_first_heads(target)
            else:
                maxima._find_first_heads(target)
                assert maxima._first == {"": first}
