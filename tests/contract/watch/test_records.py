"""What a watched training records: numbers of heads and of weights, alarms with their forecast, and files that last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkeel import load, watch
from qkeel.errors import AlarmWarning
from qkeel.monitor import Approach, Ceiling

from .small import batch, small

HEADS = (
    "max_logit",
    "min_logit",
    "mean_logit",
    "entropy",
    "query_norm",
    "key_norm",
    "cos_max",
    "qk_frobenius",
)


def trained(steps: int = 6, growth: float = 1.0, **options: Any) -> Any:
    """The monitor of a training in which the query weights of the first layer grow by this factor a step."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer, **options) as monitor:
        for step in range(steps):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.blocks[0].q.weight.mul_(growth)  # type: ignore[union-attr]
    return monitor


def test_every_number_of_a_head_is_recorded_at_every_step_and_read_back_from_the_files(
    tmp_path: Path,
) -> None:
    monitor = trained(sinks=tmp_path / "run")
    run = load(tmp_path / "run")
    assert run.status == "done"
    assert run.history.steps.tolist() == monitor.history.steps.tolist() == [*range(6)]
    for name in HEADS:
        assert run.history.heads[name].shape == (6, 2, 2)
        np.testing.assert_allclose(
            run.history.heads[name], monitor.history.heads[name], rtol=1e-6
        )


def test_the_norm_of_the_product_of_a_heads_weights_is_that_of_the_matrices() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer) as monitor:
        model(batch(0)).square().mean().backward()
        optimizer.step()
    for layer, block in enumerate(model.blocks):
        q, k = (m.weight.detach().double().view(2, 4, 8) for m in (block.q, block.k))  # type: ignore[union-attr]
        recorded = monitor.history.heads["qk_spectral_norm"][-1, layer]
        np.testing.assert_allclose(
            recorded, torch.linalg.matrix_norm(q.mT @ k, 2), rtol=1e-4
        )


def test_a_line_that_was_torn_by_a_kill_is_dropped_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    trained(sinks=tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "run" / "DONE").unlink()
    assert load(tmp_path / "run").steps["step"].tolist() == [*range(5)]


def test_a_head_that_grows_is_forecast_before_it_passes_the_threshold() -> None:
    rules = [
        Approach(source="", threshold=1000.0),
        Ceiling(source="", threshold=1000.0),
    ]
    with pytest.warns(AlarmWarning):
        monitor = trained(steps=40, growth=1.3, rules=rules)
    forecast, ceiling = (
        next(a for a in monitor.alarms if a.rule.startswith(name))
        for name in ("forecast", "ceiling")
    )
    assert forecast.step < ceiling.step
    assert forecast.value < 1000 < ceiling.value
    assert {forecast.layer, ceiling.layer} == {"blocks.0"}
    assert ceiling.head in (0, 1)
