"""What processes do that search a split model for attention; see spawn."""

import itertools
import sys
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from tests.contract.processes import wrapped
from tests.contract.processes.watching import loss_of
from tests.training import sgd
from torch import distributed

import qkeel
from qkeel import distributed as dist
from qkeel.errors import QkeelError, QkeelWarning


def searched(model, example=None):
    tokens = wrapped.batch(0)[:2] if example is None else example
    return qkeel.find_sites(model, {"input_ids": tokens, "use_cache": False})


def remedied(model):
    example = {"input_ids": wrapped.batch(0)[:2]}
    qkeel.apply(model, "qk_lr", sgd(model, lr=1e-3), batch=example)


@contextmanager
def planted(model, at, *, lasting):
    """Process 1 fails in the call of this number of a module, and in all later ones; yields a counter of calls.

    The hook returns a value, because a search holds back hooks that return nothing, and an iterator counts, because a
    search puts lists and numbers back.
    """
    calls = itertools.count()

    def fail(_, args):
        number = next(calls)
        if dist.rank() == 1 and (number >= at >= 0 if lasting else number == at):
            raise ValueError("boom")
        return args

    hooks = [module.register_forward_pre_hook(fail) for module in model.modules()]
    yield calls
    for hook in hooks:
        hook.remove()


def failed(model, known):
    """Returns whether the search fails, and says why, or finds the sites of these names."""
    try:
        found = searched(model)
    except QkeelError as error:
        if "boom" in str(error) or "are not verified" in str(error):
            return True
        raise
    assert [site.name for site in found] == known
    return False


def step(model, setup):
    """The weights after a step with plain gradients."""
    loss_of(model, wrapped.part(setup, 0)).backward()
    with torch.no_grad():
        for p in model.parameters():
            dist.local(p).sub_(dist.local(p.grad), alpha=0.1)
            p.grad = None
    return [dist.local(p).clone() for p in model.parameters()]


def faults(setup, *, every):
    """A fault at any instant of the search is an error on every process or does no harm; training goes on as it was."""
    made = wrapped.llama(layers=1)
    model, plain = (
        wrapped.wrapped(made, setup),
        wrapped.wrapped(wrapped.llama(layers=1), setup),
    )
    with planted(model, -1, lasting=False) as calls:
        known = searched(model)
    outcomes = set()
    for at in range(0, next(calls), every):
        for lasting in (True, False):
            begun = time.monotonic()
            with planted(model, at, lasting=lasting), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", QkeelWarning
                )  # that attention inside of scripts is not looked for
                outcome = int(failed(model, [site.name for site in known]))
            assert time.monotonic() - begun < 10
            assert not lasting or outcome, at
            alike([outcome], f"{setup} {at} {lasting}")
            outcomes.add(outcome)
        for a, b in zip(step(model, setup), step(plain, setup), strict=True):
            assert torch.equal(a, b)
    assert 1 in outcomes


def alike(numbers, what):
    """All processes say the same."""
    own = torch.tensor(numbers)
    everyones = [torch.empty_like(own) for _ in range(dist.world())]
    distributed.all_gather(everyones, own)
    assert all(torch.equal(x, own) for x in everyones), (what, everyones)


def some_faults():
    faults("fsdp2", every=23)


def faults_with_fully_shard():
    for setup in ("fsdp2", "fsdp2_kept"):
        faults(setup, every=1)


def faults_with_split_heads():
    for setup in ("tp", "tp_sequence"):
        faults(setup, every=1)


def late_processes():
    """Who comes late is waited for, and who is waited for is named; who comes too late to a fault is told of it."""
    model = wrapped.wrapped(wrapped.llama(layers=1), "fsdp2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["qkeel.distributed.agree"], "PATIENCE", 0.3)
        if dist.rank() == 1:
            time.sleep(1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert all(site.verified for site in searched(model))
        waited = [str(w.message) for w in said if "waits for" in str(w.message)]
        assert waited or dist.rank() == 1
        assert all("at most 30 seconds" in text for text in waited), waited
        if dist.rank() == 0:
            time.sleep(2)
        with pytest.raises(QkeelError, match="floats"):
            searched(
                model,
                torch.zeros(2, 4, dtype=torch.long) if dist.rank() == 0 else Floats(),
            )
        distributed.barrier()
        with pytest.raises(QkeelError, match="make different calls"):
            searched(model) if dist.rank() == 0 else remedied(model)
    distributed.barrier()
    assert all(site.verified for site in searched(model))


def a_fault_after_the_search():
    """An audit looks at a pass of its own: a process that fails in it alone says so to the other."""
    model = wrapped.wrapped(wrapped.llama(layers=1), "tp")
    with planted(model, -1, lasting=False) as calls:
        searched(model)
    fault = planted(model, next(calls), lasting=True)
    with fault, pytest.raises(QkeelError, match="boom"):
        qkeel.explain(model, {"input_ids": wrapped.batch(0)[:2]})


class Floats:
    """No tokens."""

    def __getattr__(self, name):
        raise ValueError("floats")
