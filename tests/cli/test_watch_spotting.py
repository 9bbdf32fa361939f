"""Which models `qkeel watch` finds, from the optimizers that appear."""

import copy
import gc
import os
import weakref

import pytest
import torch
from tests.contract.cli.scripts import MODEL
from tests.training import SharpnessAware
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import qkeel
from qkeel.cli.model_finder import ModelFinder, chains

HOME = {}
exec(MODEL, HOME)
Net, train, loss, batch = HOME["Net"], HOME["train"], HOME["loss"], HOME["batch"]


class Found:
    """The models that were watched, in order, and their monitors."""

    def __init__(self):
        self.models = []
        self.monitors = []
        self.finder = ModelFinder(self.start)

    def start(self, model, optimizer):
        monitor = qkeel.watch(model, optimizer)
        self.models.append(weakref.ref(model))
        self.monitors.append(weakref.ref(monitor))
        return monitor

    def steps(self):
        """Per monitor the last step on record."""
        alive = [ref() for ref in self.monitors]
        return [None if m is None or m.sample is None else m.sample.step for m in alive]

    def are(self, *models):
        """Whether just these were watched."""
        return [ref() for ref in self.models] == list(models)


@pytest.fixture
def found():
    gc.collect()
    plain = Optimizer.__init__
    found = Found()
    yield found
    found.finder.remove()
    assert Optimizer.__init__ is plain
    for ref in found.monitors:
        monitor = ref()
        if monitor is not None:
            monitor.remove()


def test_a_model_is_found_when_its_optimizer_is_made_and_seen_from_step_0(
    found,
):
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    assert found.are(net)
    train(net, optimizer, 1)
    assert found.steps() == [0]


def test_an_averaged_copy_is_not_taken_for_the_model(found):
    net = Net()
    copies = copy.deepcopy(net), torch.optim.swa_utils.AveragedModel(net)
    train(net, Adam(net.parameters()), 2)
    assert found.are(net)
    assert found.steps() == [1]
    assert len(copies) == 2


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch's own, when it loads its compiler
@pytest.mark.parametrize(
    "wrap",
    [torch.compile, nn.DataParallel, lambda net: torch.compile(nn.DataParallel(net))],
)
def test_a_wrapper_is_looked_into(wrap, found):
    net = Net()
    wrapper = wrap(net)
    SGD(wrapper.parameters(), lr=0.1)
    assert found.are(net)


def test_several_optimizers_of_one_model_make_one_monitor_and_the_first_counts(
    found,
):
    net = Net()
    inner, outer = (
        SGD(net.layers.parameters(), lr=0.1),
        Adam([*net.embed.parameters(), *net.head.parameters()]),
    )
    for step in range(3):
        loss(net, batch(step)).backward()
        inner.step()
        outer.step()
    assert found.are(net)
    assert found.steps() == [2]


def test_each_of_several_models_has_a_monitor(found):
    one, two = Net(), Net(2)
    both = Adam([*one.parameters(), *two.parameters()])
    (loss(one, batch(0)) + loss(two, batch(0))).backward()
    both.step()
    assert found.are(two, one)
    assert found.steps() == [0, 0]


def test_a_part_with_few_of_the_parameters_is_not_watched(found):
    net, temperature = Net(2), nn.ParameterList([torch.zeros(())])
    Adam([*net.parameters(), *temperature.parameters()])
    assert found.are(net)


class Pair(nn.Module):
    """A container whose forward nobody calls."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Net(), Net(2)

    def forward(self):
        raise NotImplementedError


def test_a_container_that_is_never_called_gives_way_to_its_parts(found, recwarn):
    pair = Pair()
    first, second = (
        SGD(pair.one.parameters(), lr=0.1),
        SGD(pair.two.parameters(), lr=0.1),
    )
    for _ in range(5):
        train(pair.two, second, 1)
        train(pair.one, first, 1)
    assert {ref() for ref in found.models} == {pair, pair.one, pair.two}
    assert sorted(step for step in found.steps() if step is not None) == [
        4,
        4,
    ]  # numbered by the optimizer's steps
    assert not recwarn.list


def test_one_that_can_not_be_called_is_passed_over(found):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

    holder = Holder()
    SGD(holder.parameters(), lr=0.1)
    assert found.are(holder.net)


def test_a_model_made_after_its_optimizer_is_found_after_the_first_step(
    found,
):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    net = Net()
    optimizer.add_param_group({"params": list(net.parameters())})
    assert found.are()
    train(net, optimizer, 3)
    assert found.are(net)
    assert found.steps() == [2]


def test_an_optimizer_made_after_steps_begins_a_new_phase(found):
    net = Net()
    train(net, SGD(net.parameters(), lr=0.1), 3)
    train(net, Adam(net.parameters()), 2)
    assert found.are(net, net)
    assert found.steps() == [2, 1]
    assert [ref().active for ref in found.monitors] == [False, True]


def test_an_optimizer_inside_another_one_takes_the_steps(found):
    net = Net()
    optimizer = SharpnessAware(net.parameters(), SGD, lr=0.1)
    for step in range(3):
        loss(net, batch(step)).backward()
        optimizer.first_step()
        loss(net, batch(step)).backward()
        optimizer.second_step()
    assert found.steps() == [None, 2]


def test_models_and_optimizers_are_held_weakly(found):
    def phase():
        net = Net()
        optimizer = SGD(net.parameters(), lr=0.1)
        train(net, optimizer, 2)
        return [weakref.ref(net), weakref.ref(optimizer)]

    refs = phase()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert found.monitors[0]() is None
    phase()
    assert len(found.monitors) == 2


def test_a_model_that_the_script_watches_is_left_alone(found):
    net = Net()
    with qkeel.watch(net):
        SGD(net.parameters(), lr=0.1)
    assert found.are()


def test_in_a_forked_process_nothing_is_looked_for(found):
    child = os.fork()
    if child == 0:
        SGD(Net().parameters(), lr=0.1)
        os._exit(len(found.models))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fault_is_said_once_and_the_script_goes_on(
    caplog,
):
    def fails(model, optimizer):
        raise RuntimeError("no room")

    plain = Optimizer.__init__
    net = Net()
    with ModelFinder(fails):
        optimizer = SGD(
            net.parameters(), lr=0.1
        )  # warnings are errors here, so it goes to the log
        assert Optimizer.__init__ is plain
        train(net, optimizer, 2)
    assert [record.message for record in caplog.records] == [
        "qkeel stopped looking for models to watch: RuntimeError: no room. The script continues"
    ]


def test_a_module_under_construction_does_not_disturb_the_search():
    blank = nn.Linear.__new__(nn.Linear)
    net = Net()
    assert chains(SGD(net.parameters(), lr=0.1))[0][0] is net
    assert not vars(blank)


def test_the_fit_of_a_retrofit_is_no_training(found):
    net = Net()
    qkeel.retrofit(net, "qk_norm", [batch(0), batch(1)])
    assert found.are()
    train(net, SGD(net.parameters(), lr=0.1), 1)
    assert found.are(net)
