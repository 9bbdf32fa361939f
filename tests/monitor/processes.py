"""What two processes do that train together; see spawn."""

import functools
import warnings

import pytest
import torch
from tests.contract.watch.small import batch, hooks, small
from tests.training import adamw
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qkeel import watch
from qkeel.distributed.reduce import SharedTable
from qkeel.errors import QkeelWarning
from qkeel.monitor import Layout, processes
from qkeel.monitor.weight_norms import WeightNorms

STEPS = 5


def boom(*args, **kwargs):
    raise ValueError("boom")


def part(seed):
    return batch(seed, b=4).chunk(2)[dist.get_rank()]


def train(
    watcher,
    *,
    wrap=DistributedDataParallel,
    model=None,
    during=lambda step, monitor: None,
    skip=lambda step: False,
):
    """Five steps of two micro-batches; the model, the monitor and qkeel's warnings."""
    runner = wrap(small() if model is None else model)
    optimizer = adamw(runner, 0.01)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        monitor = watcher(runner, optimizer)
        for step in range(STEPS):
            during(step, monitor)
            for micro in (0, 1):
                if not skip(step):
                    (runner(part(2 * step + micro)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (
        runner,
        monitor,
        [str(w.message) for w in record if isinstance(w.message, QkeelWarning)],
    )


def state(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@functools.cache  # the same training, whatever a case does to the monitor
def unwatched():
    return state(train(lambda m, o: None)[0])


def unlike_sites_switch_all_off():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()

        def forward(self, x):
            return self.body(x)

    model = small if dist.get_rank() == 0 else Named
    off(train(lambda m, o: watch(m, o), model=model()), "do not see the same attention")


def off(result, words, steps=0):
    """The monitor has gone with one warning, and training has not noticed."""
    model, monitor, warned = result
    assert not monitor.active
    assert len(warned) == 1, warned
    assert words in warned[0] or "another process" in warned[0], warned
    assert same(state(model), unwatched())
    assert len(monitor.history) == steps
    assert hooks(model) == []


def a_fault_on_one_process(at, home, name):
    def during(step, monitor):
        if step == at and dist.get_rank() == 1:
            setattr(home if home is not None else monitor._taps[0], name, boom)

    original = None if home is None else getattr(home, name)
    try:
        off(train(lambda m, o: watch(m, o), during=during), "boom", at)
    finally:
        if home is not None:
            setattr(home, name, original)


def faults_on_one_process_switch_all_off():
    a_fault_on_one_process(2, None, "measure")
    a_fault_on_one_process(0, None, "measure")
    a_fault_on_one_process(2, WeightNorms, "read")
    a_fault_on_one_process(2, SharedTable, "split")


def a_process_that_is_not_watched_makes_nobody_wait():
    patience, processes.PATIENCE = processes.PATIENCE, 1.0
    try:
        model, monitor, warned = train(
            lambda m, o: watch(m, o) if dist.get_rank() == 0 else None
        )
    finally:
        processes.PATIENCE = patience
    assert same(state(model), unwatched())
    if dist.get_rank() == 0:
        assert monitor.active
        assert len(warned) == 1
        assert "not every process" in warned[0]
        assert [s.n_queries.tolist() for s in monitor.read().values()] == [
            [STEPS * 2 * 10] * 2
        ] * 2
        monitor.remove()


def a_process_with_nothing_to_add_takes_part():
    class Plain(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    layout = Layout(data=dist.get_rank())  # no wrapper shows that they train one model
    _, monitor, warned = train(
        lambda m, o: watch(m, o, layout=layout),
        wrap=Plain,
        skip=lambda step: step in (1, 2) and dist.get_rank() == 1,
    )
    assert warned == [], warned
    assert monitor.history.steps.tolist() == [*range(STEPS)]
    full, half = 2 * 2 * 10, 2 * 10
    assert [s.n_queries.tolist() for s in monitor.read().values()] == [
        [3 * full + 2 * half] * 2
    ] * 2
    monitor.remove()


def one_process_closes():
    """The others learn it at the next measured step; nobody waits."""

    def during(step, monitor):
        if step == 2 and dist.get_rank() == 1:
            monitor.close()

    _model, monitor, warned = train(lambda m, o: watch(m, o), during=during)
    assert not monitor.active
    assert len(monitor.history) == 2
    assert len(warned) == (dist.get_rank() == 0), warned
    assert all("was closed there" in one for one in warned)


def models_that_are_trained_apart_are_recorded_apart():
    """Each process has the same weights at first, another batch, and no wrapper."""
    _, monitor, warned = train(lambda m, o: watch(m, o, rules=[]), wrap=lambda m: m)
    assert ["pass their places" in text for text in warned] == [True]
    alone = small()
    optimizer = adamw(alone, 0.01)
    for step in range(STEPS - 1):
        for micro in (0, 1):
            (alone(part(2 * step + micro)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with watch(alone) as single:
        for micro in (0, 1):
            alone(part(2 * STEPS - 2 + micro))
        expected = max(float(s.max_logit.max()) for s in single.read("train").values())
    assert monitor.sample.overall("max_logit") == pytest.approx(expected, rel=1e-5)
    monitor.close()


class Blind(nn.Module):
    """A part of a model without attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


def a_process_without_attention_takes_part():
    model = small() if dist.get_rank() == 0 else Blind()
    _, monitor, warned = train(lambda m, o: watch(m, o), wrap=lambda m: m, model=model)
    assert warned == [], warned
    assert monitor.active
    assert monitor.sample.layers == ("blocks.0", "blocks.1")
    assert monitor.history.steps.tolist() == [*range(STEPS)]
    monitor.close()
    off = train(lambda m, o: watch(m, o), wrap=lambda m: m, model=Blind())
    assert not off[1].active
    assert len(off[2]) == 1
    assert "no attention" in off[2][0]


class Returning(nn.Module):
    """Returns a scalar besides its output."""

    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        out = self.body(x)
        return out.square().mean(), out


def a_scalar_may_be_the_loss_of_some_steps_only():
    model = DistributedDataParallel(Returning())
    optimizer = adamw(model)
    monitor, scalars = watch(model, optimizer), []
    for step in range(4):
        scalar, out = model(part(step))
        (scalar / 2 if step % 2 else out.sum()).backward()
        optimizer.step()
        scalars.append(scalar.detach())
    everywhere = torch.stack(scalars)
    dist.all_reduce(everywhere)
    losses = monitor.history.values["train_loss"].tolist()
    expected = [
        x / 2 if step % 2 else float("nan")
        for step, x in enumerate(everywhere.tolist())
    ]
    assert losses == pytest.approx(expected, nan_ok=True, rel=1e-5)
    monitor.close()


FAST = (
    a_scalar_may_be_the_loss_of_some_steps_only,
    faults_on_one_process_switch_all_off,
    a_process_with_nothing_to_add_takes_part,
    one_process_closes,
    a_process_without_attention_takes_part,
    models_that_are_trained_apart_are_recorded_apart,
    a_process_that_is_not_watched_makes_nobody_wait,  # last: from here on their monitors are numbered differently
)
SLOW = (unlike_sites_switch_all_off,)
