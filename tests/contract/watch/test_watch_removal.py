"""After remove() the model and its optimizer are what they were; copies of a watched model are unwatched."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.watch.families import Mixed, decoder, ids
from tests.contract.watch.small import Small, batch, hooks, small, train
from torch import Tensor, nn

from qkeel import load, watch


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What every module holds, hooks apart."""
    return {
        name: {k: v for k, v in vars(m).items() if "hooks" not in k}
        for name, m in model.named_modules()
    }


def inputs(model: nn.Module) -> Tensor:
    return {Small: batch(0), Mixed: torch.randn(2, 6, 32)}.get(type(model), ids(0))


@pytest.mark.parametrize("build", [small, Mixed, decoder])
def test_remove_restores_the_model_exactly(build: Any) -> None:
    model = build().eval()
    x = inputs(model)
    before, held = model(x).detach(), {n: dict(a) for n, a in attributes(model).items()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as monitor:
        model(x)
        assert list(model.state_dict()) == list(state)
        assert monitor.read()
    assert hooks(model) == []
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert attributes(model).keys() == held.keys()
    for name, values in attributes(model).items():
        assert values.keys() == held[name].keys(), name
        assert all(
            v is held[name][k] or k in ("_buffers", "last") for k, v in values.items()
        ), name
    if not isinstance(model, Mixed):  # that one counts its passes
        assert all(
            torch.equal(t, state[name]) for name, t in model.state_dict().items()
        )
    assert torch.equal(model(x), before)
    monitor.remove()


def copies(model: nn.Module) -> list[nn.Module]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    return [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        saved,
        copy.copy(model),
    ]


def test_copies_of_a_watched_model_work_and_are_unwatched() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as monitor:
        model(batch(0))
        first = monitor.read()
        average = torch.optim.swa_utils.AveragedModel(model)
        for twin in [*copies(model), average]:
            assert torch.equal(twin(batch(1)), model(batch(1)))
            assert [s.n_queries.tolist() for s in monitor.read().values()] == [
                [10, 10]
            ] * 2
            watch(twin.eval()).remove()
        average.update_parameters(model)
        assert len(first) == 2
        assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 1e-3
        copy.deepcopy(optimizer).step()
        assert monitor.steps == 0
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(copies(model)[0].state_dict())


def test_copies_of_a_fresh_monitor_before_any_pass() -> None:
    model = small()
    with watch(model):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(batch(0)), model(batch(0)))


@pytest.mark.parametrize("fails", [False, True])
def test_removal_in_the_middle_of_a_pass(fails: bool) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    def stop(*_: object) -> None:
        monitor.remove()
        if fails:
            raise ValueError("mine")

    hook = model.blocks[0].register_forward_hook(stop)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            model(batch(0))
    else:
        model(batch(0))
    hook.remove()
    assert torch.overrides._get_current_function_mode_stack() == []
    model(batch(0)).sum().backward()
    optimizer.step()
    assert hooks(model) == []
    assert monitor.steps == 0
    assert not optimizer._optimizer_step_post_hooks


def test_removal_inside_the_closure_of_a_step() -> None:
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor = watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        monitor.remove()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.step(closure)  # type: ignore[arg-type]
    assert not monitor.active
    assert hooks(model) == []


def test_what_was_measured_can_be_read_after_removal() -> None:
    model = small()
    with watch(model) as monitor:
        model(batch(0))
    assert len(monitor.read()) == 2
    assert monitor.read() == {}
    assert monitor.sample is not None
    assert "blocks.1" in monitor.table()


def status(path: Path, error: type[BaseException] | None) -> str:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with watch(model, optimizer, sinks=path):
            for step in range(3):
                model(batch(step)).sum().backward()
                optimizer.step()
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert hooks(model) == []
    assert len(load(path).steps) == 3
    return load(path).status


def test_a_run_that_an_exception_ends_is_not_done(tmp_path: Path) -> None:
    assert status(tmp_path / "a", None) == "done"
    assert status(tmp_path / "b", ValueError) == "started"
    assert status(tmp_path / "c", KeyboardInterrupt) == "started"


def test_closing_without_arguments_completes_the_run(tmp_path: Path) -> None:
    model, _, monitor = train(lambda m, o: watch(m, o, sinks=tmp_path / "run"))
    monitor.close()
    assert not monitor.active
    assert (tmp_path / "run" / "DONE").exists()
    assert hooks(model) == []
