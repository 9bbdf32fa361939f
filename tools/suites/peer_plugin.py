"""A pytest plugin for transformers' own tests: qkeel's attention in the place of "sdpa", or every model watched.

The variable QKEEL_SUITE says which: "plain", "qkeel" or "watched". At the end QKEEL_SUITE_OUT gets a JSON object: the
outcome of each test, and how many calls of attention, or of models, qkeel took part in; tests whose outcomes are there
already are not run again. QKEEL_SUITE_MOST: of more tests than that only so many are run, at even distances in the
order of the file.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_MODE, _OUT = os.environ.get("QKEEL_SUITE", "plain"), os.environ.get("QKEEL_SUITE_OUT", "")
_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}
_seen: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Puts qkeel where the suite asks for torch's attention, or around each model's outermost call."""
    warnings.filterwarnings("ignore", module="qkeel")
    if _OUT and Path(_OUT).exists():
        earlier = json.loads(Path(_OUT).read_text())
        _outcomes.update(earlier["outcomes"])
        _reasons.update(earlier["reasons"])
        _seen.update(earlier["seen"])
    {"plain": lambda: None, "qkeel": _attend, "watched": _watch}[_MODE]()


def _attend() -> None:
    from transformers.modeling_utils import PreTrainedModel

    from qkeel.integrations import huggingface, register_attention

    name = register_attention()
    inner = huggingface.functional_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        _seen["calls of qkeel's attention"] += 1
        return inner(*args, **kwargs)

    huggingface.functional_attention = counted  # type: ignore[assignment]
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def chosen(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        found = original(self, requested, *args, **kwargs)
        return name if found == "sdpa" else found

    PreTrainedModel.get_correct_attn_implementation = chosen  # type: ignore[method-assign]


def _watch() -> None:
    from transformers.modeling_utils import PreTrainedModel

    import qkeel

    inside = [False]
    original = PreTrainedModel.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return original(self, *args, **kwargs)
        inside[0] = True
        try:
            with qkeel.watch(self) as monitor:
                out = original(self, *args, **kwargs)
                _seen["watched calls of models" if monitor.active else "monitors that switched themselves off"] += 1
                return out
        finally:
            inside[0] = False

    PreTrainedModel.__call__ = watched  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the sample that was asked for, without the tests that an earlier call ran."""
    most = int(os.environ.get("QKEEL_SUITE_MOST") or len(items))
    if most < len(items):
        items[:] = [items[i * len(items) // most] for i in range(most)]
    items[:] = [item for item in items if item.nodeid not in _outcomes]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the worst outcome of a test's phases."""
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
        if report.outcome == "failed":
            _reasons[report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:200]
    if _OUT and report.when == "teardown":  # at each test: the time may be over before the last
        Path(f"{_OUT}.new").write_text(json.dumps({"outcomes": _outcomes, "reasons": _reasons, "seen": _seen}))
        Path(f"{_OUT}.new").replace(_OUT)
