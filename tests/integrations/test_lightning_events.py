"""Lightning's callback where Lightning is not installed: a stand-in of its Trainer calls the events in its order."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.contract.watch.small import batch, small
from torch import nn

import qkeel.integrations
from qkeel.errors import InvalidValueError
from qkeel.integrations.watched_training import WatchedTraining
from qkeel.records import RunDirectory, RunStatus

NAME = "qkeel.integrations.lightning"
LAST = 31


class Misconfigured(Exception):
    """What Lightning raises where it cannot say how long it trains."""


class Module(nn.Module):
    """As many watched children as named; only the last has an optimizer."""

    def __init__(self, *names):
        super().__init__()
        for seed, name in enumerate(names):
            self.add_module(name, small(seed))
        self.logged = []

    def log_dict(self, numbers, **options):
        assert options == {"logger": False, "rank_zero_only": True}
        self.logged.append(numbers["attn/max_logit"])


class Trainer:
    """Trains 12 batches from step 20 on."""

    def __init__(self, estimated=LAST + 1):
        self.fit_loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(_batches_that_stepped=20)
        )
        self._estimated, self.optimizers, self.logged = estimated, [], {}
        self.loggers = [self]

    @property
    def estimated_stepping_batches(self):
        if self._estimated is None:
            raise Misconfigured
        return self._estimated

    def log_metrics(self, numbers, step):
        self.logged[step] = numbers["attn/max_logit"]

    def start(self, module, callback):
        """The first optimizer trains something else, twice a batch."""
        trained = [child for child in module.children() if [*child.parameters()]][-1]
        if not self.optimizers:
            for weights in ([nn.Parameter(torch.zeros(1))], trained.parameters()):
                self.optimizers.append(torch.optim.SGD(weights, lr=0.1))
        callback.on_train_start(self, module)
        return trained

    def fit(self, module, callback, *, fault=None):
        """A fault in a batch ends the training."""
        trained = self.start(module, callback)
        for i in range(12):
            callback.on_train_batch_start(self, module, None, i)
            trained(batch(i)).square().mean().backward()
            for optimizer in (self.optimizers[0], *self.optimizers):
                optimizer.step()
                optimizer.zero_grad()
            self.fit_loop.epoch_loop._batches_that_stepped += 1
            callback.on_train_batch_end(self, module, None, None, i)
            if i == fault:
                callback.on_exception(self, module, ValueError())
                return trained
        callback.on_train_end(self, module)
        callback.on_fit_end(self, module)
        return trained


@pytest.fixture
def made(monkeypatch):
    """The class of the callback, on the stand-in."""
    pytorch, faults = ModuleType("pytorch"), ModuleType("exceptions")
    pytorch.Callback, pytorch.LightningModule = type("Callback", (), {}), Module
    pytorch.Trainer, faults.MisconfigurationException = Trainer, Misconfigured
    for name, module in {
        "": ModuleType("lightning"),
        ".pytorch": pytorch,
        ".pytorch.utilities": ModuleType("utilities"),
        ".pytorch.utilities.exceptions": faults,
    }.items():
        monkeypatch.setitem(sys.modules, f"lightning{name}", module)
    earlier = sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME).LightningCallback
    sys.modules.pop(NAME)
    vars(qkeel.integrations).pop("lightning", None)
    if earlier is not None:
        sys.modules[NAME] = earlier


@pytest.mark.parametrize(
    ("estimated", "steps"), [(32, [20, 25, 30, 31]), (None, [20, 25, 30])]
)
def test_loggers_get_each_number_at_its_step_and_the_last_step_is_measured(
    estimated, steps, made, tmp_path
):
    trainer, module = Trainer(estimated), Module("net")
    trained = trainer.fit(module, made(every=5, sinks=tmp_path / "run"))
    run = RunDirectory(tmp_path / "run")
    assert run.status is RunStatus.DONE
    measured = {record["step"]: record["max_logit"] for record in run.metrics()}
    assert list(measured) == steps
    assert trainer.logged == pytest.approx(measured, rel=1e-6)
    # The last one arrives when no batch follows in which the module could log it.
    assert module.logged == pytest.approx([*measured.values()][: len(module.logged)])
    assert len(module.logged) >= 2
    assert not trained._forward_pre_hooks


def test_a_training_that_fails_is_not_complete_and_a_second_one_is_another_run(
    made, tmp_path
):
    callback, trainer, module = (
        made(every=1, sinks=tmp_path / "r"),
        Trainer(),
        Module("net"),
    )
    trainer.fit(module, callback, fault=2)
    first = callback.monitor
    assert RunDirectory(tmp_path / "r").status is RunStatus.STARTED
    callback.on_train_start(trainer, module)
    assert (first.active, callback.monitor.active) == (False, True)
    assert callback.monitor.steps == 23
    callback.on_train_start(trainer, module)  # one that never ended
    callback.on_fit_end(trainer, module)
    assert not callback.monitor.active


def test_the_watched_module_is_the_only_child_or_the_one_that_is_named(made):
    with pytest.raises(
        InvalidValueError, match="no module 'nett'; its children: one, net"
    ):
        Trainer().fit(Module("one", "net"), made(module="nett"))
    for names, asked, watched in (
        (("net",), None, "net"),
        (("one", "net"), None, ""),
        (("one", "net"), "net", "net"),
    ):
        module, callback = Module(*names), made(module=asked)
        module.idle = nn.Identity()
        Trainer().start(module, callback)
        assert callback.monitor.model is module.get_submodule(watched)
        callback.close(complete=True)


def test_a_remedy_stays_with_its_optimizers_and_is_applied_to_new_ones(made):
    moved = {}
    for remedy in (None, "qk_lr:factor=0"):
        callback, trainer, module = made(remedy=remedy), Trainer(), Module("net")
        before = small().blocks[0].q.weight.detach()
        trained = trainer.fit(module, callback)
        moved[remedy] = (trained.blocks[0].q.weight - before).abs().max().item()
    assert moved[None] > 1e-4
    assert moved["qk_lr:factor=0"] == 0
    handle = callback.handle
    trainer.fit(module, callback)
    assert (callback.handle is handle, handle.active) == (True, True)
    trainer.optimizers = []
    trainer.fit(module, callback)
    assert (callback.handle is handle, handle.active) == (False, False)
    assert callback.handle.active


def test_a_sink_that_the_trainer_has_itself_is_left_out(tmp_path, caplog):
    kept = [tmp_path / "tensorboard", "csv:path=x"]
    sinks = ["tensorboard:directory=y", *kept, qkeel.integrations.sink("wandb")]
    training = WatchedTraining(1, sinks, None, None, False, None)
    training._leave_out({"tensorboard", "wandb", "mlflow"})
    assert training._sinks == kept
    assert caplog.text.count("is left out") == 2
