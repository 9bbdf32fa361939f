"""What experiments/notes/alarms.md counts: a gap that lasts, and coarser logs."""

from __future__ import annotations

from experiments.alarms import every, lasting_gap

from qkeel.monitor import History


def _run(losses: list[float]) -> History:
    return History.of([{"step": 2 * i, "lr": 0.1, "val_loss": loss} for i, loss in enumerate(losses)])


def test_a_gap_counts_from_where_it_is_there_for_good() -> None:
    reference = _run([3.0] * 20)
    assert lasting_gap(_run([3.0] * 20), reference) is None
    assert lasting_gap(_run([3.0] * 10 + [3.5] * 10), reference) == 20
    assert lasting_gap(_run([3.5] * 10 + [3.0] * 10), reference) is None
    assert lasting_gap(_run([3.0] * 5 + [3.5] * 5 + [3.0] * 5 + [3.5] * 5), reference) == 30
    assert lasting_gap(_run([3.0] * 10 + [9.0] + [3.0] * 9), reference) is None  # one odd evaluation


def test_a_coarser_log_keeps_every_nth_record() -> None:
    assert every(_run([1.0] * 11), 5).steps.tolist() == [0, 10, 20]
