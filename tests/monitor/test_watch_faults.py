"""A fault of the monitor's never stops training: it warns once, steps aside, and not one number is another."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.families import decoder, token_loss
from tests.monitor.small import Small, batch, hooks, small, train
from tests.quick import one_in
from tests.sites.test_bad_input import Plain
from torch import Tensor, nn

from qkeel import watch
from qkeel.errors import QkeelWarning
from qkeel.monitor import Alarm, Cadence, History, LoggingSink, Rule, Sample, Sink
from qkeel.monitor.gather import Transfer
from qkeel.monitor.journal import Recorder
from qkeel.monitor.measure import CallStatistics
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.weight_norms import WeightNorms
from qkeel.nn import Attention
from qkeel.sites.tap import Tap


def boom(*args: object, **kwargs: object) -> Any:
    raise ValueError("boom")


@pytest.fixture
def plain() -> Mapping[str, Tensor]:
    return train(None)[0].state_dict()


def caught(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returned, and qkeel's warnings."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        result = run()
    return result, [str(w.message) for w in record if isinstance(w.message, QkeelWarning)]


def same(model: nn.Module, other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in model.state_dict().items())


def test_a_fault_of_an_extra_pass_switches_the_monitor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tap, "_extra_pass", boom)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        expected = model(batch(0))
        monitor = watch(model)
        out, warned = caught(lambda: model(batch(0)))
    assert torch.equal(out, expected)
    assert not monitor.active
    assert len(warned) == 1


def test_a_fault_later_on_keeps_what_was_recorded(plain: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def during(step: int, monitor: Monitor) -> None:
        if step == 2:
            monkeypatch.setattr(Recorder, "add", boom)

    (model, _, monitor), warned = caught(lambda: train(lambda m, o: watch(m, o), during=during))
    assert same(model, plain)
    assert len(warned) == 1
    assert monitor.history.steps.tolist() == [0, 1]
    assert len(monitor.read()) == 2
    assert monitor.table()


class BadRule(Rule):
    @property
    def name(self) -> str:
        return "bad"

    def check(self, history: History) -> Alarm | None:
        raise ValueError("a rule's fault")


class BadCadence(Cadence):
    def due(self, step: int, last: int | None, moved: float) -> bool:
        raise ValueError("a cadence's fault")


def bad_mask(*args: object, **kwargs: object) -> Tensor:
    raise ValueError("a mask's fault")


@pytest.mark.parametrize(
    "options",
    [
        {"rules": [BadRule(source="")]},
        {"every": BadCadence()},
        {"query_mask": bad_mask},
        {"query_mask": lambda *a, **k: torch.ones(2)},
    ],
)
def test_a_fault_of_what_the_user_gave_switches_the_monitor_off(
    options: dict[str, Any], plain: Mapping[str, Tensor]
) -> None:
    (model, _, monitor), warned = caught(lambda: train(lambda m, o: watch(m, o, **options)))
    assert same(model, plain)
    assert not monitor.active
    assert len(warned) == 1
    assert "fault" in warned[0] or "shape" in warned[0]


class BadSink(Sink):
    def __init__(self, where: str, error: Exception) -> None:
        self.where, self.error, self.calls = where, error, []  # type: ignore[var-annotated]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise self.error

    def open(self, about: Mapping[str, Any]) -> None:
        self._call("open")

    def write(self, sample: Sample) -> None:
        self._call("write")

    def alarm(self, alarm: Alarm) -> None:
        self._call("alarm")

    def close(self, complete: bool) -> None:
        self._call("close")


class EveryTime(Rule):
    @property
    def name(self) -> str:
        return "every time"

    def check(self, history: History) -> Alarm | None:
        return self.alarm(history, "a meaning", 1.0)


@pytest.mark.filterwarnings("ignore::qkeel.errors.AlarmWarning")
@pytest.mark.parametrize("where", one_in(["open", "write", "alarm", "close"], 2))
def test_a_sink_that_fails_is_dropped_and_the_others_go_on(
    where: str, plain: Mapping[str, Tensor], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="qkeel")
    bad = BadSink(where, OSError(errno.ENOSPC, "No space left on device"))
    sinks = (bad, LoggingSink(), tmp_path / "run")
    rules = [EveryTime(source="")]

    def run() -> Any:
        result = train(lambda m, o: watch(m, o, sinks=sinks, rules=rules))
        result[2].remove()
        return result

    (model, _, _), warned = caught(run)
    assert same(model, plain)
    assert len([w for w in warned if "BadSink" in w]) == 1
    assert "No space left" in next(w for w in warned if "BadSink" in w)
    assert bad.calls.count(where) == 1
    assert len([r for r in caplog.records if "max_logit" in r.message or "step" in r.message]) >= 4
    assert (tmp_path / "run" / "DONE").exists()


def test_a_disk_that_fills_up_drops_the_run_directory_and_training_goes_on(
    plain: Mapping[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkeel.monitor import sinks

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def during(step: int, monitor: Monitor) -> None:
        if step == 1:
            monkeypatch.setattr(sinks, "append_line", full)

    (model, _, monitor), warned = caught(lambda: train(lambda m, o: watch(m, o, sinks=tmp_path / "x"), during=during))
    assert same(model, plain)
    assert monitor.active
    assert len(warned) == 1
    assert len(monitor.history) == 4


def spoil_weights(model: Small) -> None:
    with torch.no_grad():
        model.blocks[1].q.weight[0, 0] = torch.nan  # type: ignore[union-attr,index]


def spoil_logits(model: Small) -> None:
    with torch.no_grad():
        model.blocks[1].k.weight.fill_(3e38)  # type: ignore[union-attr]


def spoil_gradients(model: Small) -> None:
    model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    model.blocks[0].q.weight.register_hook(lambda grad: grad * torch.inf)  # type: ignore[union-attr]


@pytest.mark.parametrize("spoil", [spoil_weights, spoil_logits, spoil_gradients])
def test_numbers_that_are_none_are_recorded_and_stop_nobody(spoil: Callable[[Small], None], tmp_path: Path) -> None:
    def losses(watched: bool) -> tuple[list[Tensor], Any]:
        model = small()
        spoil(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = watch(model, optimizer, sinks=tmp_path / "run") if watched else None
        out = []
        for step in range(4):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.detach())
        return out, monitor

    (plain, _), ((seen, monitor), warned) = losses(False), caught(lambda: losses(True))
    assert (
        torch.equal(
            torch.stack(plain),
            torch.stack(seen),
        )
        or torch.stack(plain).isnan().any()
    )
    assert [x.isnan().item() for x in plain] == [x.isnan().item() for x in seen]
    assert monitor.active, warned
    assert len(monitor.history) == 4
    assert monitor.table()


def test_warnings_that_are_errors_stop_nobody(
    plain: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(WeightNorms, "read", boom)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _, monitor = train(lambda m, o: watch(m, o))
    assert same(model, plain)
    assert not monitor.active
    assert [r.name for r in caplog.records if "boom" in r.message] == ["qkeel"]


@pytest.mark.filterwarnings("ignore::qkeel.errors.QkeelWarning")
@pytest.mark.parametrize("name", ["sample", "alarms", "history", "read", "table"])
def test_reading_a_monitor_never_raises_its_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, monitor = train(lambda m, o: watch(m, o), steps=1)
    model(batch(0)).sum().backward()
    monkeypatch.setattr(Recorder, "add", boom)
    monkeypatch.setattr(Transfer, "arrived", property(lambda _: False))
    optimizer.step()
    assert monitor.active
    value = getattr(monitor, name)
    if callable(value):
        value()
    assert not monitor.active


def test_a_fault_in_the_observer_of_an_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    monkeypatch.setattr(CallStatistics, "call", boom)
    monitor = watch(model)
    _, warned = caught(lambda: token_loss(model, 0))
    assert not monitor.active
    assert len(warned) == 1
    assert all(not m.observers for m in model.modules() if isinstance(getattr(m, "observers", None), list))


def test_a_pass_that_the_model_itself_fails_counts_nothing_and_is_no_fault() -> None:
    failing = small()
    optimizer = torch.optim.SGD(failing.parameters(), lr=0.1)
    with watch(failing, optimizer) as monitor:
        with pytest.raises(RuntimeError):
            failing(torch.randn(2, 5, 9))
        assert monitor.active
        failing(batch(0)).sum().backward()
        hook = failing.blocks[1].register_forward_hook(boom)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="boom"):
            failing(batch(1))
        hook.remove()
        optimizer.step()
        assert len(monitor.sites) == 2
        assert [s.n_queries.tolist() for s in monitor.read().values()] == [[10, 10]] * 2
        assert monitor.sample is not None
        assert "qk_spectral_norm" in monitor.sample.heads
    assert hooks(failing) == []


def test_an_interrupt_in_a_pass_leaves_nothing_behind() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    model = small()
    monitor = watch(model)
    model(batch(0))
    hook = model.blocks[1].register_forward_hook(stop)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        model(batch(1))
    hook.remove()
    with torch.device("cpu"):  # a mode on top of the one that the interrupt left
        model(batch(2))
        assert [s.n_queries.tolist() for s in monitor.read().values()] == [[20, 20]] * 2
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    hook = model.blocks[1].register_forward_hook(stop)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        model(batch(1))
    hook.remove()
    monitor.remove()
    assert hooks(model) == []


class Sometimes(nn.Module):
    """A module of qkeel's, and another attention that some batches alone reach."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own, self.other, self.reached = Attention(16, 4), other, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        return self.other(x) if self.reached else x


@pytest.mark.parametrize("build", [Plain, lambda: Attention(16, 2)])
def test_attention_that_comes_after_the_first_record_is_told(build: Callable[[], nn.Module]) -> None:
    model = Sometimes(build())
    own = isinstance(model.other, Attention)  # attention of others is looked for in one pass of 17 by then
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watch(model, optimizer, every=1) as monitor:

        def steps(reached: bool, n: int = 2) -> None:
            model.reached = reached
            for _ in range(n):
                model(torch.randn(2, 3, 16)).square().mean().backward()
                optimizer.step()

        assert caught(lambda: steps(False))[1] == []
        (told,) = caught(lambda: steps(True, 20))[1]
        assert f"the attention of other was first seen at step {2 if own else 17}" in told
        assert monitor.history.layers == ("own",)
    with watch(model, optimizer, every=1) as monitor:
        assert caught(lambda: steps(True))[1] == []
        assert monitor.history.layers == ("own", "other")
