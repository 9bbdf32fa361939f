"""Remedies on several processes: equal to one process or refused on all, without a hang and without half a change."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.contract.processes.setups import SETUPS
from tests.forked import spawn
from tests.training import adamw
from torch import nn

import qkeel
from qkeel.distributed import ApartError
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.remedies.base import Target
from qkeel.remedies.processes import agreed, check_peers
from qkeel.remedies.shared_maxima import SharedMaxima

from .models import attention
from .processes import (
    CUT,
    by_one_process,
    collectives,
    compare,
    heads_that_fully_shard_cuts,
    refused_before_anything,
    some_misuses,
    with_cut_heads,
)


def compared(folder, world, setups, *more):
    """Each process has the weights that one process has, and ends well."""
    by_one_process(setups, folder / "alone")
    acts = [partial(compare, setup, folder / "alone") for setup in setups]
    spawn(world, *acts, *more, seconds=900)


def with_remedies(*, quick, processes=2):
    return [
        n
        for n, s in SETUPS.items()
        if s.remedies and s.quick == quick and s.processes == processes
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_step_as_one_or_all_refuse(tmp_path):
    compared(tmp_path, 2, with_remedies(quick=True), collectives)


@pytest.mark.timeout(900)
def test_cut_heads_are_clipped_as_by_one_process_and_a_misuse_is_an_error_on_every_process(
    tmp_path,
):
    path = tmp_path / "alone"
    cut = {remedy: with_cut_heads(remedy, one=True) for remedy in ("none", *CUT)}
    torch.save(cut, path)
    # One start of two processes for all: what ends them comes last.
    heads = partial(heads_that_fully_shard_cuts, path)
    spawn(2, heads, some_misuses, refused_before_anything)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp", "pipeline", "context"])
def test_two_processes_in_other_setups(kind, tmp_path):
    setups = [name for name in with_remedies(quick=False) if name.startswith(kind)]
    compared(tmp_path, 2, setups)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_on_meshes_of_two_axes(tmp_path):
    compared(tmp_path, 4, with_remedies(quick=False, processes=4))


class Two:
    """Two processes, of which this one is the first: what it sends, and what the second one says."""

    def __init__(self, monkeypatch):
        self.sent = []
        self.other = lambda text: text
        for name, value in {
            "world": lambda: 2,
            "rank": lambda: 0,
            "peer_ranks": lambda model: (0,),
            "fingerprint": lambda model, names: "alike",
            "gather_messages": self.gather,
            "fail_on_all": lambda subject, error: self.sent.append(str(error)),
        }.items():
            monkeypatch.setattr(f"qkeel.distributed.{name}", value)

    def gather(self, subject, text):
        self.sent.append(text)
        # Where a wrapper names no peers, each process knows itself alone.
        second = text.replace('"peers": [0]', '"peers": [1]')
        second = f"1|{second[2:]}" if second.startswith("0|") else second
        return [text, self.other(second)]


def test_what_one_process_refuses_all_refuse(monkeypatch):
    two = Two(monkeypatch)
    assert agreed(lambda: 3) == 3
    assert len(two.sent) == 1

    def refuse():
        raise RefusedError("no")

    with pytest.raises(RefusedError, match="no"):
        agreed(refuse)
    assert two.sent[1:] == ["no"]


def test_processes_of_one_model_must_find_the_same_attention(
    monkeypatch,
):
    two, model = Two(monkeypatch), attention()
    sites = qkeel.find_sites(model)
    two.other = lambda text: text.replace("4 heads", "2 heads")
    check_peers(model, sites)  # each is alone in its model, as stages are
    monkeypatch.setattr("qkeel.distributed.peer_ranks", lambda model: (0, 1))
    with pytest.raises(ApartError, match="different attention"):
        check_peers(model, sites)
    two.other = lambda text: text
    check_peers(model, sites)


@pytest.mark.parametrize("kind", ["replica", "stage"])
def test_maxima_are_shared_by_replicas_and_lie_side_by_side_for_stages(
    kind, monkeypatch, recwarn
):
    two, model = Two(monkeypatch), attention(torch.float32, 4)
    (site,) = qkeel.find_sites(model)
    target = Target(model=model, optimizer=None, sites=[site])
    if kind == "stage":
        two.other = lambda text: text.replace("alike", "other")
    maxima = SharedMaxima(target)
    sent = []

    def reduced(row, by):
        sent.append(row)
        return row.clamp(min=2.0)

    monkeypatch.setattr("qkeel.distributed.reduced", reduced)
    assert maxima.several is (kind == "replica")
    own = torch.tensor([1.0, 3.0, -torch.inf, torch.nan])
    largest = maxima.over_all({site.name: own})
    if kind == "replica":
        assert largest.tolist() == [2.0, 3.0, 2.0, torch.inf]
        assert largest.dtype == torch.float32
        assert sent[0].dtype == torch.float64
        assert maxima.over_all({}).tolist() == [2.0] * 4
        assert not recwarn.list  # a site without a call has no other heads
    else:
        assert not sent
        assert torch.equal(largest[:3], own[:3])
        assert (maxima._before, maxima._behind) == (0, 4)


def test_sites_are_known_again_by_their_names():
    model = attention(torch.float64, 4)
    sites = qkeel.find_sites(model)
    optimizer = adamw(model)
    with pytest.raises(RefusedError, match="was found in a model with other weights"):
        qkeel.apply(torch.nn.Sequential(model), "lalr", optimizer, sites=sites)
    with pytest.raises(
        InvalidTypeError, match=r"expected sites as qkeel.find_sites returned them"
    ):
        qkeel.apply(model, "lalr", optimizer, sites=["attention"])
    with pytest.raises(RefusedError, match="give a batch in place of the sites"):
        qkeel.apply(model, "softcap", optimizer, sites=sites)
    assert not optimizer._optimizer_step_pre_hooks
    with qkeel.apply(model, "lalr", optimizer, sites=sites) as handle:
        assert [*handle.state()] == ["0.q_proj.weight:0/4x4", "0.k_proj.weight:0/4x4"]


class Engine(nn.Module):
    """What qkeel asks of DeepSpeed's engine."""

    def __init__(self, module, stage):
        super().__init__()
        self.module, self.stage = module, stage

    def zero_optimization_stage(self):
        return self.stage


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_deepspeeds_zero_what_cannot_act_is_refused_by_its_name(
    stage, monkeypatch
):
    monkeypatch.setitem(
        sys.modules, "deepspeed.runtime.engine", SimpleNamespace(DeepSpeedEngine=Engine)
    )
    refused = pytest.raises(RefusedError, match=f"ZeRO, stage {stage}")
    for remedy in ("lalr", "qk_clip", "qk_norm", "softcap"):
        model = attention()
        optimizer = adamw(model)
        engine = Engine(model, stage)
        if stage == 0 or (stage < 3 and remedy == "softcap"):
            qkeel.apply(engine, remedy, optimizer).remove()
        elif remedy == "qk_norm" and stage < 3:
            with pytest.raises(
                RefusedError, match="to a model that ZeRO has already spread"
            ):
                qkeel.apply(engine, remedy, optimizer)
        else:
            with refused:
                qkeel.apply(engine, remedy, optimizer)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    model = attention()
    optimizer = adamw(model)
    handle = qkeel.apply(model, "lalr", optimizer)
    engine = Engine(model, stage)  # as deepspeed.initialize makes it afterwards
    engine.module(torch.randn(1, 5, 16, dtype=torch.float64)).sum().backward()
    if stage:
        for p in model.parameters() if stage == 3 else ():
            p.data = p.data[:0]  # which keeps none between passes
        for _ in range(2):
            with refused:
                optimizer.step()
    else:
        optimizer.step()
    handle.remove()
