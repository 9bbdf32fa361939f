"""Forward passes are seen from outside: eager, compiled in every way people compile, copied, pickled, checkpointed."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.utils import counters

from qkeel.patching.forward import ForwardPasses
from qkeel.patching.guards import FaultGuard


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Half(), Half()

    def forward(self, x):
        return self.second(self.first(x).relu())


class Log:
    """What was seen: for each pass whether it was compiled, and how many ended."""

    def __init__(self, model):
        self.compiled = []
        self.ended = 0
        self.failed = []
        self.guard = FaultGuard("{}")
        self.handle = ForwardPasses(model, self._before, self._after, guard=self.guard)

    def _before(self, args, kwargs, compiled):
        self.compiled.append(compiled())

    def _after(self, output, failed):
        self.ended += 1
        self.failed.append(failed)


def X():
    return torch.ones(2, 4)


def compiled(model, **options):
    return torch.compile(model, backend="eager", **options)


def watch_then_wrap(model):
    log = Log(model)
    return compiled(model), log


def run_then_watch_original(model):
    wrapper = compiled(model)
    wrapper(X())
    return wrapper, Log(model)


def watch_wrapper(model):
    wrapper = compiled(model)
    return wrapper, Log(wrapper)


def run_then_watch_wrapper(model):
    wrapper = compiled(model)
    wrapper(X())
    return wrapper, Log(wrapper)


def in_place_then_watch(model):
    model.compile(backend="eager")
    return model, Log(model)


def watch_then_in_place(model):
    log = Log(model)
    model.compile(backend="eager", fullgraph=True)
    return model, log


def full_graph(model):
    log = Log(model)
    return compiled(model, fullgraph=True), log


def block_by_block(model):
    model.first.compile(backend="eager")
    model.second.compile(backend="eager")
    return model, Log(model)


WAYS = [
    watch_then_wrap,
    run_then_watch_original,
    watch_wrapper,
    run_then_watch_wrapper,
    in_place_then_watch,
    watch_then_in_place,
    full_graph,
    block_by_block,
]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # dynamo's own look at the tensor between two graphs
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_pass_is_seen_and_adds_no_graph_and_no_break(
    way,
):
    torch._dynamo.reset()
    counters.clear()
    model, log = way(Net())
    for _ in range(3):
        model(X())
    assert log.compiled == [True] * 3
    assert log.ended == 3
    graphs = 2 if way is block_by_block else 1
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    log.handle.remove()
    model(X())
    assert len(log.compiled) == 3


def test_a_pass_inside_the_handling_of_an_error_does_not_fail():
    model = Net()
    log = Log(model)
    try:
        raise ValueError
    except ValueError:
        model(X())
    assert log.failed == [False]


def test_a_model_that_calls_itself_is_one_pass():
    class Twice(Net):
        def forward(self, x, again=True):
            return (
                self(super().forward(x), again=False) if again else super().forward(x)
            )

    model = Twice()
    log = Log(model)
    model(X())
    assert len(log.compiled) == log.ended == 1
