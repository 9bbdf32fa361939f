"""Runs that train as one model have the numbers, directories and ends that they have alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lab.killing import kill_until_done
from tests.lab.recorded import numbers, timeless
from tests.quick import one_in
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, RefusedError, RunDirectoryError
from qkeel.lab import Execution, Grid, ModelConfig, OptimConfig, RunConfig, Watcher, make_plan, run, run_plan
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.stack_models import plan_stacks, stack_models
from qkeel.lab.train_runs import train_runs
from qkeel.lab.training import (
    CompiledArithmetic,
    StackedArithmetic,
    TrainingBackend,
    choose_arithmetic,
    split,
    train_step,
    why_not_compiled,
)
from qkeel.records import RunDirectory, RunStatus, read_json
from qkeel.remedies import REMEDIES

Make = Callable[..., RunConfig]
# Besides each remedy by itself: other gains and extents, and what is learned.
STACKED = sorted(name for name, cls in REMEDIES.items() if cls.stacks)
MORE = (
    "qk_norm:kind=l2,gain=scalar",
    "qk_norm:kind=layer,over=layer,gain=head_dim",
    "log_n:learned=head",
    "lalr:tau=0.3+qk_clip:threshold=1",
    "qk_clip:threshold=1,steps=matched",
    "qk_lr:factor=0.1+qk_weight_decay",
)
MODELS = (
    {"norm_order": "post", "tied": True},
    {"norm_order": "peri", "mlp": "swiglu", "n_kv_heads": 1, "attention": "gemma2"},
    {"attention": "baseline", "position": "kerple_log"},
    {"attention": "olmo2"},
)


def same_products() -> bool:
    """Whether this machine's batched product gives the bits of the plain one, so that a stack is alone bit for bit."""
    x, w = torch.randn(3, 16, 16), torch.randn(3, 64, 16)
    return torch.equal(torch.bmm(x, w.mT), torch.stack([F.linear(a, b) for a, b in zip(x, w)]))


def several(make: Make, **fields: Any) -> list[RunConfig]:
    fields = {"steps": 6, **fields}
    return [resolve(make(seed=s, optim_lr=lr, **fields)) for s, lr in ((0, 0.01), (0, 0.03), (1, 0.01))]


def check_row(mine: Mapping[str, Any], other: Mapping[str, Any], losses: tuple[str, ...]) -> None:
    """Losses are the same, to the bit where products are; statistics are means over all heads, to rounding."""
    assert list(mine) == list(other)
    for name, value in mine.items():
        if name in losses and value is not None and not same_products():
            assert value == pytest.approx(other[name], abs=1e-4)
        elif isinstance(value, float) and name not in losses:
            assert value == pytest.approx(other[name], rel=1e-4, abs=1e-5, nan_ok=True)
        else:
            assert json.dumps(value) == json.dumps(other[name])


def check_alike(stack: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    for mine, other in zip(stack["lines"], alone["lines"], strict=True):
        check_row(mine, other, ("train_loss", "val_loss", "grad_norm", "lr"))
    check_row(stack["summary"], alone["summary"], ("val_loss", "init_loss", "lr"))
    np.testing.assert_allclose(*(np.frombuffer(x["heads"], "<f4") for x in (stack, alone)), rtol=1e-4, atol=1e-4)


def stacked(configs: list[RunConfig], out: Path, **how: Any) -> list[Exception | None]:
    return train_runs(configs, [out / str(i) for i in range(len(configs))], **how)


def alone(configs: list[RunConfig], out: Path) -> list[dict[str, Any]]:
    return [numbers(run(config, out / f"alone{i}").path) for i, config in enumerate(configs)]


def check_steps(
    configs: list[RunConfig],
    of: Callable[[list[RunState]], TrainingBackend] = choose_arithmetic,
    bits: bool | None = None,
) -> None:
    """Losses, norms, the probe and held-out numbers of a few steps, in a stack and alone, computed by `of`."""
    bits = same_products() if bits is None else bits
    stack, singles = choose_arithmetic([RunState(c) for c in configs]), [of([RunState(c)]) for c in configs]
    assert isinstance(stack, StackedArithmetic)
    for step in range(configs[0].steps):
        losses, norms = train_step(stack, [step] * len(configs))
        for single, loss, norm in zip(singles, losses.tolist(), norms.tolist()):
            own = [float(x) for x in train_step(single, [step])]
            assert loss == pytest.approx(own[0], abs=1e-4)
            assert norm == pytest.approx(own[1], rel=1e-3)
            assert not bits or [loss, norm] == own
    for single, seen, held in zip(singles, stack.probe(), stack.evaluate()):
        (probe,), (score,) = single.probe(), single.evaluate()
        torch.testing.assert_close(torch.from_numpy(seen.heads), torch.from_numpy(probe.heads), rtol=1e-3, atol=1e-4)
        assert seen.record == pytest.approx(probe.record, rel=1e-3, abs=1e-4)
        assert held["val_loss"] == pytest.approx(score["val_loss"], abs=1e-4)


@pytest.mark.parametrize("remedy", one_in([*STACKED, *MORE], 2))
def test_each_remedy_in_a_stack_has_the_numbers_it_has_alone(tiny: Make, remedy: str) -> None:
    check_steps(several(tiny, steps=3, remedy=remedy)[1:])


def micro(remedy: str, **fields: Any) -> list[RunConfig]:
    """Two runs, one of them at a rate at which a bit would grow."""
    base = RunConfig(remedy=remedy, device="cpu", steps=3, probe_sequences=2, eval_sequences=2, **fields)
    pairs = [(s, dataclasses.replace(base.optim, lr=lr)) for s, lr in ((0, 1.0), (1, 0.01))]
    return [resolve(dataclasses.replace(base, seed=s, optim=optim)) for s, optim in pairs]


FUSED = ("none", "qk_norm", "qk_norm:kind=l2,gain=scalar", "softcap", "peri_norm", "lalr:tau=0.3+qk_clip:threshold=1")


@pytest.mark.parametrize("remedy", one_in(FUSED, 2))
@pytest.mark.usefixtures("_compiler")
def test_by_compiled_operators_a_run_alone_is_a_stack_of_one_bit_for_bit(remedy: str) -> None:
    configs = micro(remedy)
    assert not why_not_compiled(configs[0])
    check_steps(configs, CompiledArithmetic, bits=True)
    check_steps(configs[1:], TrainingBackend, bits=False)  # against torch's own, to rounding


@pytest.mark.usefixtures("_compiler")
def test_by_compiled_operators_runs_alone_and_stacked_hold_the_same(tmp_path: Path) -> None:
    configs = micro("lalr:tau=0.3+qk_clip:threshold=1", log_every=1)
    expected = alone(configs, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(configs[0], tmp_path / "0", watcher=Watcher(should_stop=Stop(1)))
    assert stacked(configs, tmp_path) == [None, None]
    for i in range(2):
        found = numbers(tmp_path / str(i))
        for mine, other in zip(found["lines"], expected[i]["lines"], strict=True):
            assert [mine[name] for name in EXACT] == [other[name] for name in EXACT]


EXACT = ("step", "train_loss", "val_loss", "grad_norm", "lr", "max_logit")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_each_kind_of_model_in_a_stack_has_the_numbers_it_has_alone(tiny: Make, model: dict[str, Any]) -> None:
    base = tiny().model
    check_steps(several(tiny, steps=3, model=dataclasses.replace(base, **model))[1:])


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_each_optimizer_steps_a_stack_as_it_steps_a_run(tiny: Make, optimizer: str) -> None:
    check_steps([resolve(tiny(steps=3, seed=s, optim_lr=0.01, optim_name=optimizer)) for s in (0, 1)])


@pytest.mark.usefixtures("_compiler")
def test_runs_of_a_stack_have_schedules_steps_and_weight_decay_of_their_own(tmp_path: Path) -> None:
    model = ModelConfig(d_model=32, base_width=16, base_head_dim=4, parametrisation="mup")
    base = RunConfig(model=model, device="cpu", log_every=1, probe_sequences=2, eval_sequences=2)
    ways = (
        (3, OptimConfig(lr=1.0, schedule="wsd", weight_decay=0.1, decay="independent")),
        (4, OptimConfig(lr=0.01, weight_decay=0.1, decay="independent", warmup=0.5)),
        (2, OptimConfig(lr=0.01, weight_decay=0.3)),
    )
    configs = [dataclasses.replace(base, steps=steps, optim=optim) for steps, optim in ways]
    assert plan_stacks([(config, 0) for config in configs], "auto", 1) == [[0, 0, 0]]
    expected = alone(configs, tmp_path)
    assert stacked(configs, tmp_path) == [None] * 3
    for i, one in enumerate(expected):
        found = numbers(tmp_path / str(i))["lines"]
        assert [[line[name] for name in EXACT] for line in found] == [[line[n] for n in EXACT] for line in one["lines"]]


@pytest.mark.slow
@pytest.mark.parametrize("remedy", [*STACKED, *MORE])
def test_150_steps_of_the_micro_model_in_a_stack_are_those_alone(remedy: str, tmp_path: Path) -> None:
    base = RunConfig(remedy=remedy, device="cpu")
    configs = [
        dataclasses.replace(base, seed=s, optim=dataclasses.replace(base.optim, lr=lr))
        for s, lr in ((0, 0.01), (1, 0.03))
    ]
    assert stacked(configs, tmp_path) == [None, None]
    for i, expected in enumerate(alone(configs, tmp_path)):
        check_alike(numbers(tmp_path / str(i)), expected)


def test_weights_at_the_start_are_those_of_the_run_alone_bit_for_bit(tiny: Make) -> None:
    configs = several(tiny)
    runs = [RunState(c) for c in configs]
    whole = stack_models([run.model for run in runs])
    for r, config in enumerate(configs):
        expected = dict(RunState(config).model.named_parameters())
        for name, p in whole.named_parameters():
            assert torch.equal(p[r], expected[name])
            assert runs[r].model.get_parameter(name).data_ptr() == p[r].data_ptr()


def test_run_directories_hold_what_they_hold_alone(tiny: Make, tmp_path: Path) -> None:
    configs = several(tiny, eval_every=4)
    assert stacked(configs, tmp_path, command="qkeel study lr") == [None] * 3
    for i, expected in enumerate(alone(configs, tmp_path)):
        check_alike(numbers(tmp_path / str(i)), expected)
        here, there = tmp_path / str(i), tmp_path / f"alone{i}"
        assert {p.name for p in here.rglob("*")} == {p.name for p in there.rglob("*")}
        assert read_json(here / "config.json") == read_json(there / "config.json")
        env = read_json(here / "env.json")
        assert env.pop("stacked") == 3
        assert {**env, "command": ""} == read_json(there / "env.json")
    seen: list[Any] = []
    assert stacked(configs, tmp_path, watcher=Watcher(on_record=seen.append)) == [None] * 3
    assert not seen, "finished runs are not run again"


def test_a_runs_seconds_are_its_share_of_the_stacks(tiny: Make, tmp_path: Path) -> None:
    import time

    before = time.process_time()
    stacked(several(tiny), tmp_path)
    spent = time.process_time() - before
    assert 0 < sum(RunDirectory(tmp_path / str(i)).summary()["cpu_seconds"] for i in range(3)) <= spent + 0.01


class Stop:
    """Asks to stop after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_runs_begun_alone_or_stacked_are_finished_stacked_or_alone(tiny: Make, tmp_path: Path) -> None:
    configs = several(tiny, remedy="lalr:tau=0.3+qk_clip:threshold=1")
    expected = alone(configs, tmp_path)
    for i, steps in ((0, 2), (1, 4)):  # alone, to different steps, and the last not at all
        with pytest.raises(KeyboardInterrupt):
            run(configs[i], tmp_path / str(i), watcher=Watcher(should_stop=Stop(steps)))
    with pytest.raises(KeyboardInterrupt):
        stacked(configs, tmp_path, watcher=Watcher(should_stop=Stop(0)))
    assert [RunDirectory(tmp_path / str(i)).status for i in range(3)] == [RunStatus.STARTED] * 3
    run(configs[2], tmp_path / "2")
    assert stacked(configs, tmp_path) == [None] * 3
    for i in range(3):
        check_alike(numbers(tmp_path / str(i)), expected[i])


def test_a_run_that_diverges_stops_as_alone_and_leaves_the_others_alone(tiny: Make, tmp_path: Path) -> None:
    configs = [
        resolve(tiny(steps=6, seed=s, optim_lr=lr, optim_grad_clip=0.0)) for s, lr in ((0, 0.01), (0, 1e30), (1, 0.01))
    ]
    expected = alone(configs, tmp_path)
    assert stacked(configs, tmp_path) == [None] * 3
    assert expected[1]["summary"]["steps"] < configs[1].steps
    for i in (0, 2):
        check_alike(numbers(tmp_path / str(i)), expected[i])
    steps = [[line["step"] for line in x["lines"]] for x in (numbers(tmp_path / "1"), expected[1])]
    assert steps[0] == steps[1]
    check_alike(numbers(tmp_path / "1"), expected[1])
    assert "not finite" in (tmp_path / "1" / "events.jsonl").read_text()


def test_a_run_that_fails_is_reported_and_the_others_are_done(tiny: Make, tmp_path: Path) -> None:
    configs = several(tiny)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stranger").write_text("")

    def broken(record: Mapping[str, Any]) -> None:
        if record["step"] == 4 and not (tmp_path / "broken").exists():
            (tmp_path / "broken").write_text("")
            raise ArithmeticError("cannot be shown")

    errors = stacked(configs, tmp_path, watcher=Watcher(on_record=broken))
    assert isinstance(errors[0], ArithmeticError)
    assert "cannot be shown" in (tmp_path / "0" / "FAILED").read_text()
    assert isinstance(errors[1], RunDirectoryError)
    assert errors[2] is None
    expected = alone(configs, tmp_path)
    assert stacked(configs, tmp_path)[0] is None, "it goes on from its checkpoint"
    for i in (0, 2):
        check_alike(numbers(tmp_path / str(i)), expected[i])


def test_where_a_stack_fails_each_run_goes_on_alone(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configs = several(tiny)

    def step(arithmetic: TrainingBackend, steps: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if len(steps) > 1 and steps[0] == 4:
            raise MemoryError("no memory left")
        return train_step(arithmetic, steps)

    monkeypatch.setattr("qkeel.lab.train_runs.train_step", step)
    assert stacked(configs, tmp_path) == [None] * 3
    assert "3 runs train one by one, because their stack failed with MemoryError: no memory left" in caplog.text
    for i, expected in enumerate(alone(configs, tmp_path)):
        check_alike(numbers(tmp_path / str(i)), expected)
        assert '"resumed"' in (tmp_path / str(i) / "events.jsonl").read_text()


def test_what_cannot_be_stacked_is_refused_and_then_computed_run_by_run(tiny: Make, tmp_path: Path) -> None:
    configs = several(tiny, remedy="sigma_reparam", steps=2)
    runs = [RunState(c) for c in configs]
    with pytest.raises(RefusedError, match="cannot be trained as one"):
        StackedArithmetic(runs)
    assert "sigma_reparam changes the forward pass of a single run" in choose_arithmetic(runs).reason
    assert stacked(configs, tmp_path) == [None] * 3
    for i, expected in enumerate(alone(configs, tmp_path)):
        check_alike(numbers(tmp_path / str(i)), expected)


def test_runs_alike_but_for_rate_and_seed_are_stacked_and_every_worker_has_work(tiny: Make) -> None:
    def groups(configs: list[RunConfig], how: Any, workers: int = 1) -> list[list[int]]:
        return plan_stacks([(c, i) for i, c in enumerate(configs)], how, workers)

    mixed = [tiny(remedy=remedy, seed=s) for s in (1, 0) for remedy in ("none", "qk_norm", "sigma_reparam")]
    assert groups(mixed, "auto") == [[3, 0], [4, 1], [2], [5]]
    assert groups(mixed, "off") == [[0], [1], [2], [3], [4], [5]]
    nine = [tiny(seed=s) for s in range(9)]
    assert [len(g) for g in groups(nine, "auto")] == [9]
    three = [tiny(seed=s, remedy=remedy) for remedy in ("none", "qk_norm", "softcap") for s in range(5)]
    assert [len(g) for g in groups(three, "auto", workers=2)] == [2, 3, 5, 5], "both have as much to do"
    assert [len(g) for g in groups(nine, "auto", workers=4)] == [3, 3, 3]
    assert [len(g) for g in groups(nine, 2)] == [1, 2, 2, 2, 2]
    assert groups([tiny(steps=4), tiny(steps=5, seed=1)], 8) == [[0, 1]]
    wide = dataclasses.replace(tiny().model, d_model=256)
    big = [tiny(model=wide, seed=s) for s in (0, 1)]
    assert groups(big, "auto") == [[0], [1]]
    assert groups(big, 2) == [[0, 1]]
    for other in ({"compile": True}, {"dtype": "bf16"}, {"accumulate": 2}, {"optim_z_loss": 1e-4}):
        assert len(groups([tiny(seed=s, **other) for s in (0, 1)], 2)) == 2
    for wrong in ("some", 0, True):
        with pytest.raises(InvalidValueError, match="auto, off or a number"):
            groups(nine, wrong)


def test_statistics_of_heads_in_a_row_are_split_evenly(tiny: Make) -> None:
    from qkeel.functional.statistics import LogitStats

    stats = LogitStats.empty(6, 3, torch.zeros(()))
    assert [len(part.max_logit) for part in split(stats, 3)] == [2, 2, 2]
    with pytest.raises(ValueError, match="heads of 2 runs"):
        split(stats, 2)


GRID = Grid(remedies=["none", "sigma_reparam"], lrs=[0.03, 0.01], seeds=[0, 1])


def table(out: Path) -> list[dict[str, Any]]:
    config = RunConfig.from_dict(read_json(next(out.glob("runs/*/config.json"))))
    rows = run_plan(make_plan("lr", config, GRID), out, Execution()).table
    return list(map(timeless, rows))


def test_a_stacked_study_has_the_table_of_one_that_is_not(tiny: Make, tmp_path: Path) -> None:
    for how in ("auto", "off"):
        seen: list[Any] = []
        plan = make_plan("lr", tiny(steps=2), GRID)
        run_plan(plan, tmp_path / how, Execution(stack=how, on_outcome=seen.append))
        assert len(seen) == 8
        assert not any(outcome.error for outcome in seen)
    for mine, other in zip(table(tmp_path / "auto"), table(tmp_path / "off"), strict=True):
        check_row(mine, other, ("val_loss", "init_loss", "lr"))


def stacked_study(config: RunConfig, out: str) -> None:
    run_plan(make_plan("lr", config, GRID), out, Execution(stack=3))


@pytest.mark.slow
def test_a_stacked_study_killed_at_random_instants_ends_with_the_same_table(tiny: Make, tmp_path: Path) -> None:
    config = tiny(steps=40, checkpoint_every=3)
    stacked_study(config, str(tmp_path / "whole"))
    kill_until_done(stacked_study, (config, str(tmp_path / "cut")), longest=1.5, seed=5)
    for mine, other in zip(table(tmp_path / "cut"), table(tmp_path / "whole"), strict=True):
        check_row(mine, other, ("val_loss", "init_loss", "lr"))
