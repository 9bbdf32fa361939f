"""What fails in a rule, a sink or a mask of the user's, or in the model, stops no training and changes no number."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor, nn

from qkeel import watch
from qkeel.errors import QkeelWarning
from qkeel.monitor import Alarm, Cadence, History, LoggingSink, Rule, Sample, Sink

from .small import Small, batch, hooks, small, train


@pytest.fixture
def plain() -> Mapping[str, Tensor]:
    return train(None)[0].state_dict()


def caught(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returned, and qkeel's warnings."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        result = run()
    return result, [
        str(w.message) for w in record if isinstance(w.message, QkeelWarning)
    ]


def same(model: nn.Module, other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in model.state_dict().items())


def fail(*_: object) -> None:
    raise ValueError("boom")


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
    (model, _, monitor), warned = caught(
        lambda: train(lambda m, o: watch(m, o, **options))
    )
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
    where: str,
    plain: Mapping[str, Tensor],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
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
    assert (
        len(
            [
                r
                for r in caplog.records
                if "max_logit" in r.message or "step" in r.message
            ]
        )
        >= 4
    )
    assert (tmp_path / "run" / "DONE").exists()


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
def test_numbers_that_are_none_are_recorded_and_stop_nobody(
    spoil: Callable[[Small], None], tmp_path: Path
) -> None:
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


def test_a_pass_that_the_model_itself_fails_counts_nothing_and_is_no_fault() -> None:
    failing = small()
    optimizer = torch.optim.SGD(failing.parameters(), lr=0.1)
    with watch(failing, optimizer) as monitor:
        with pytest.raises(RuntimeError):
            failing(torch.randn(2, 5, 9))
        assert monitor.active
        failing(batch(0)).sum().backward()
        hook = failing.blocks[1].register_forward_hook(fail)  # type: ignore[union-attr]
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
