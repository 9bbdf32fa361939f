"""A fault in any function of the rooms that watch leaves training as it is, to the last bit, and warns once."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from tests.monitor.fault_settings import SETTINGS
from tests.monitor.faults import Fault, Seen, can_wait, planted, written
from tests.monitor.small import batch, hooks
from torch import Tensor, nn

from qkeel.errors import AlarmWarning, QkeelWarning
from qkeel.monitor.monitor import Monitor

KINDS = (ValueError, MemoryError, RecursionError, torch.OutOfMemoryError)
# Where a fault costs the sink, and nothing else.
OF_A_SINK = (
    "monitor.record.sample:Sample.overall",
    "monitor.record.sample_table:",
    "monitor.record.sinks:",
    "records.files:",
    "records.regular_files:",
    "records.heads_file:HeadRecorder",
    "records.rundir:",
)


def train(setting: str, path: Path | None, begun: Callable[[], None] = lambda: None) -> tuple[nn.Module, Any, Any]:
    """The model after three steps, its optimizer, and the monitor, closed; `begun` is called when it is watched."""
    how = SETTINGS[setting]
    model = how.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: None)
    monitor = None if path is None else how.watch(model, optimizer, path)
    # Hooks of others that come after the monitor's: removing its own must not disturb them.
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    begun()
    torch.manual_seed(5)
    for step in range(3):
        with suppress(LookupError):  # one of the models fails by itself
            model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(step + 100))
        model.train()
    active = monitor is not None and monitor.active
    if monitor is not None:
        monitor.close()
    return model, optimizer, (monitor, active)


class Calls:
    """Which function runs in which setting, the cheapest first, and what training without a monitor gives."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, tuple[CodeType, str, int]] = {}
        self.plain: dict[str, Mapping[str, Tensor]] = {}
        self._numbers = itertools.count()
        self._folder = folder
        for setting in SETTINGS:
            self.plain[setting] = train(setting, None)[0].state_dict()
            seen = Seen()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    train(setting, self.place(), lambda seen=seen: sys.setprofile(seen))
            finally:
                sys.setprofile(None)
            for name, code in seen.codes.items():
                self.found.setdefault(name, (code, setting, seen.calls[name]))

    def place(self) -> Path:
        """A directory of its own for a run."""
        return self._folder / str(next(self._numbers))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    before = sys.modules.get("flash_attn")
    yield Calls(tmp_path_factory.mktemp("runs"))
    sys.modules.pop("flash_attn", None)
    if before is not None:
        sys.modules["flash_attn"] = before


# What a fault may cost, besides the monitor: words of its one warning -> whether the records are whole without it.
COSTS = {
    "RunDirectorySink failed": False,
    "LoggingSink failed": True,
    "weights behind the heads are unknown": True,
    "is not looked for": True,
}


def wrong(name: str, calls: Calls, fault: Fault) -> str:
    """What is not as it should be when this function fails; "" if nothing."""
    code, setting, _ = calls.found[name]
    path = calls.place()
    with ExitStack() as undo, warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            begun = lambda: undo.enter_context(planted(code, fault))  # noqa: E731
            model, optimizer, (monitor, active) = train(setting, path, begun)
        except Exception as error:
            return f"training was stopped by {error!r}"
    told = [str(w.message) for w in record if isinstance(w.message, QkeelWarning) and "boom" in str(w.message)]
    doubts = [site.unverified for site in monitor.sites if "boom" in site.unverified]
    told = told or doubts[:1]
    left = hooks(model)
    for _ in torch.overrides._get_current_function_mode_stack():  # so that only this fault is blamed for it
        torch.overrides._pop_mode()
    others = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    same = all(torch.equal(x, calls.plain[setting][name]) for name, x in model.state_dict().items())
    whole = [whole for words, whole in COSTS.items() if any(words in text for text in told)]
    whole += [True] * (told == doubts[:1])
    facts = {
        "other weights": same,
        f"{len(told)} warnings: {told}": len(told) == 1,
        "it did not happen": fault.fired,
        "the monitor is on": not active or bool(whole),
        "the records pass for whole": (path / "DONE").exists() == any(whole),
        f"hooks in the model, {left}": not left,
        f"hooks on the optimizer, {others}": others == (2, 1),
    }
    return ", ".join(fact for fact, holds in facts.items() if not holds)
