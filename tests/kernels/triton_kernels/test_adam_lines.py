"""Triton's step of Adam with a rate per line is the formula in float64, and what remedies take it for."""

from __future__ import annotations

import dataclasses
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from remedies.families import FAMILIES, batch
from remedies.models import attention, gradients, mla, step_by
from remedies.test_adam_pass import OPTIMIZERS, both, fused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qkeel
from qkeel.kernels.triton import available
from qkeel.remedies.fused_adam import refusal

from ..native.test_adamw import VARIANTS, any_tensors, copied, made, near, options, truth


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU tensors stand for CUDA's; QKEEL_NATIVE=0 stands for QKEEL_TRITON=0. What was launched, by kind."""
    from qkeel.kernels.triton import adamw

    found: Counter[str] = Counter()
    run = adamw._launch
    monkeypatch.setattr(available, "usable", lambda device: os.environ["QKEEL_NATIVE"] == "1" and available.loaded())
    monkeypatch.setattr(available, "takes_heads", lambda views, write=False: False)
    monkeypatch.setenv("QKEEL_NATIVE", "1")
    assert available.trusted("step of AdamW", torch.device("cpu"))  # tried before launches count

    def counted(rows: Any, axes: Any, given: Any, how: dict[str, Any]) -> None:
        found["step" if how["STEP"] else "sum"] += 1
        run(rows, axes, given, how)

    monkeypatch.setattr(adamw, "_launch", counted)
    return found


def kernels_of_cpu() -> Any:
    assert available.loaded()
    from qkeel.kernels.triton import adamw

    return adamw


def check_seeds(seeds: range) -> None:
    kernels = kernels_of_cpu()
    for seed in seeds:
        torch.manual_seed(seed)
        t, o = any_tensors(random.Random(seed))
        told = f"seed {seed}: {[tuple(w.shape) for w in t.weights]}, {o}"
        expected = truth(t, o)
        kernels.adam_lines(t, o)
        try:
            near(t, expected, 2e-6)
        except AssertionError as error:
            raise AssertionError(told) from error
        left = [x.clone() for x in t.squares]
        for x in t.squares:
            x.fill_(torch.nan)
        kernels.sum_lines(t.weights, t.squares, t.axes)
        assert all(map(torch.equal, left, t.squares)), told


@pytest.mark.usefixtures("_poisoned")
def test_weights_and_options_give_the_formula_in_float64_and_the_squares() -> None:
    check_seeds(range(2))


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
def test_any_weights_and_options_give_the_formula_in_float64_and_the_squares() -> None:
    check_seeds(range(2, 80))


@pytest.mark.slow
@pytest.mark.slow
def test_at_rate_1_it_is_torchs_fused_step_to_a_few_roundings() -> None:
    for kind, more in VARIANTS:
        t = made((5, 64), (16, 8), (24,), top=more.get("amsgrad", False))
        t = dataclasses.replace(t, rates=[torch.ones_like(r) for r in t.rates])
        theirs = [nn.Parameter(w.clone()) for w in t.weights]
        torchs: Any = kind(theirs, lr=0.01, fused=True, **more)
        group = torchs.param_groups[0]
        o = options(
            beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], decay=group["weight_decay"],
            decoupled=kind is torch.optim.AdamW, maximize=group["maximize"],
        )  # fmt: skip
        for i in range(5):
            for p, g in zip(theirs, t.gradients):
                g.copy_(torch.randn(g.shape) * 10.0 ** (i % 5 - 4))
                p.grad = g.clone()
            torchs.step()
            kernels_of_cpu().adam_lines(t, o)
        for i, p in enumerate(theirs):
            state = torchs.state[p]
            torch.testing.assert_close(t.weights[i], p.detach(), rtol=1e-6, atol=1e-6, msg=str((kind, more)))
            torch.testing.assert_close(t.means[i], state["exp_avg"], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(t.variances[i], state["exp_avg_sq"], rtol=2e-6, atol=1e-9)
            assert torch.equal(t.steps[i], state["step"])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, where the interpreter divides
def test_lines_at_rate_0_stay_and_nan_and_infinity_stay_in_their_places_as_in_torch() -> None:
    for axis in (0, 1):
        t = made((6, 16) if axis == 0 else (16, 6), axis=axis, step=1.0)
        t = dataclasses.replace(t, rates=[torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])])
        rows = [x[0] if axis == 0 else x[0].T for x in (t.weights, t.gradients, t.means, t.variances)]
        rows[1][0, 3], rows[1][1, 5], rows[3][2, 7] = torch.nan, torch.inf, torch.nan
        before, theirs = rows[0][4].clone(), copied(t)
        kernels_of_cpu().adam_lines(t, options())
        assert torch.equal(rows[0][4], before)
        theirs.steps[0].add_(1)
        torch._fused_adamw_(
            *(list(x) for x in (theirs.weights, theirs.gradients, theirs.means, theirs.variances, [], theirs.steps)),
            lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        for mine, other in zip((t.weights, t.means, t.variances), (theirs.weights, theirs.means, theirs.variances)):
            assert torch.equal(mine[0].isnan(), other[0].isnan())
            assert torch.equal(mine[0].isinf(), other[0].isinf())
        assert t.squares[0].isfinite().tolist() == [False, False, False, True, True, True]


def check_models(names: Iterable[str], launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names:
        model, example = (mla(), None) if name == "latent" else (FAMILIES[name].model(torch.float32), batch())
        launches.clear()
        assert both(model, OPTIMIZERS["adamw"], "lalr:tau=0.3", monkeypatch, example=example, steps=3) <= 2e-6, name
        assert launches == {"step": 3}, name  # the norms came with the steps


def check_options(names: Iterable[str], launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names:
        for remedy in ("lalr:tau=0.3", "lalr:tau=0.3,decay=plain", "lalr:norm=spectral", "qk_lr:factor=0.2"):
            if name == "adam" and "plain" in remedy:
                continue  # its decay is part of the gradient, which lalr refuses
            launches.clear()
            assert both(attention(torch.float32), OPTIMIZERS[name], remedy, monkeypatch, steps=3) <= 2e-6, (
                name,
                remedy,
            )
            assert launches == {"step": 3 * (1 + (name == "groups"))}, (name, remedy)


def test_heads_in_rows_columns_and_latents_give_the_rescaled_steps(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_models(("gpt2", "latent"), launches, monkeypatch)
    check_options(("groups",), launches, monkeypatch)


@pytest.mark.slow
def test_every_layout_and_option_gives_the_rescaled_steps(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_models(FAMILIES, launches, monkeypatch)
    check_options(OPTIMIZERS, launches, monkeypatch)


class Operators(TorchDispatchMode):
    """Counts what torch itself launches, and the bytes that it reads and makes apart from the fused step."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not (func.is_view or name.startswith(("empty", "_record", "split", "detach"))):
            self.launches += 1
            if name != "_fused_adamw_":
                self.bytes += sum(x.nbytes for x in tree_leaves((args, out)) if isinstance(x, Tensor))
        return out


@pytest.mark.slow
@pytest.mark.slow
def test_lalr_moves_the_bytes_of_adamw_and_few_for_each_line(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LALR at most 1.03 of fused AdamW by what is read and written; internals/gpu.md has the times at 1B and 8B."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved: Counter[str] = Counter()

    def counting(name: str, mask: int) -> Any:
        inner = getattr(InterpreterBuilder, name)

        def run(self: Any, to: Any, *rest: Any) -> Any:
            size = to.get_element_ty().primitive_bitwidth // 8
            moved["weights" if to.data.ndim == 2 else "lines"] += size * int(rest[mask].data.sum())
            return inner(self, to, *rest)

        return run

    for name, mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        monkeypatch.setattr(InterpreterBuilder, name, counting(name, mask))
    extra = []
    for layers in (1, 2):
        model = nn.Sequential(*(qkeel.nn.Attention(64, 4, 2) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        with Operators() as plain:
            optimizer.step()
        with qkeel.apply("lalr", model, optimizer):
            for _ in range(2):
                moved.clear()
                optimizer.step()
            lines = layers * (64 + 32)
            assert moved["weights"] == 28 * 64 * lines  # as of fused AdamW, and nothing more
            with monkeypatch.context() as without:
                without.setattr(kernels_of_cpu(), "_launch", lambda *_: None)
                with Operators() as own:
                    optimizer.step()
        # A line of a Llama of 1 billion weights is 57,344 bytes.
        assert own.bytes - plain.bytes + moved["lines"] <= 250 * lines
        extra.append(own.launches - plain.launches)
    assert launches == {"step": 4, "sum": 2}  # summed once: the steps before were torch's own
    assert extra[0] == extra[1] <= 23  # and the kernel


def test_a_gradscaler_unscales_and_skips_as_torchs_step_does(launches: Counter[str]) -> None:
    models = attention(torch.float32), attention(torch.float32)
    optimizers: list[Any] = [fused(model) for model in models]
    qkeel.apply("qk_lr:factor=1", models[0], optimizers[0])
    infinite = (1.0, 0.0, 1.0, 0.0, 0.0)
    for i, grads in enumerate(gradients(models[0], 5)):
        for model, optimizer in zip(models, optimizers):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(infinite[i])
            for name, p in model.named_parameters():
                p.grad = 8 * grads[name]
            if model is models[0]:
                p = model.q_proj.weight
                p.grad = p.grad.T.contiguous().T  # which the pass copies first
            optimizer.step()
            if infinite[i]:
                continue
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, grads[name])
    assert launches == {"step": 5}
    for a, b in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        for name, x in optimizers[0].state[a].items():
            torch.testing.assert_close(x, optimizers[1].state[b][name], rtol=2e-6, atol=1e-7)


def test_the_norms_of_a_first_step_that_is_skipped_are_those_of_the_weights(launches: Counter[str]) -> None:
    found = []
    for skipped in (True, False):
        model = attention(torch.float32)
        optimizer: Any = fused(model)
        qkeel.apply("lalr", model, optimizer)
        grads = list(gradients(model, 3))
        if skipped:
            optimizer.found_inf = torch.ones(())
            step_by(model, optimizer, grads[2])
            optimizer.found_inf = torch.zeros(())
        for g in grads[:2]:
            step_by(model, optimizer, g)
        found.append([p.detach() for p in model.parameters()])
    assert launches == {"step": 5}
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_what_others_write_is_seen_and_what_the_kernels_write_is_told(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("lalr", model, optimizer)
    grads = list(gradients(model, 4))
    step_by(model, optimizer, grads[0])
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *_, **__: pytest.fail("measured by torch"))
    version = model.q_proj.weight._version
    step_by(model, optimizer, grads[1])
    assert model.q_proj.weight._version > version
    assert launches == {"step": 2}
    monkeypatch.setattr(available, "takes_heads", lambda views, write=False: True)
    table = available.head_table([model.k_proj.weight.detach().view(2, 4, 16)])
    table.scale(torch.tensor([0.5, 2.0]))  # another remedy's kernel
    step_by(model, optimizer, grads[2])
    assert launches == {"step": 3, "sum": 1}
    step_by(model, optimizer, grads[3])
    assert launches == {"step": 4, "sum": 1}


@pytest.mark.slow
@pytest.mark.slow
def test_checkpoints_go_on_in_the_pass_or_without_it(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    grads = list(gradients(attention(torch.float32), 8))
    found: list[list[Tensor]] = []
    for ways in ("11", "10", "01", "00"):
        kept: Any = None
        for way, own in zip(ways, (grads[:4], grads[4:])):
            monkeypatch.setenv("QKEEL_NATIVE", way)
            model = attention(torch.float32)
            optimizer = fused(model)
            handle = qkeel.apply("lalr", model, optimizer)
            if kept is not None:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                handle.load(kept[2])
            for g in own:
                step_by(model, optimizer, g)
            kept = model.state_dict(), optimizer.state_dict(), handle.state()
        found.append([p.detach() for p in model.parameters()])
    assert launches == {"step": 16, "sum": 2}  # one launch after loading, where the pass goes on
    for other in found[1:]:
        for a, b in zip(found[0], other):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_what_cannot_be_taken_over_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    weights = [nn.Parameter(torch.randn(4, 4))]
    optimizers = {
        "not torch's own": torch.optim.SGD(weights, lr=0.1),
        "not fused=True": torch.optim.AdamW(weights, foreach=True),
        "capturable": torch.optim.AdamW(weights, fused=True, capturable=True),
    }
    for reason, optimizer in optimizers.items():
        assert reason in refusal(optimizer, weights)
    plain = torch.optim.AdamW(weights, fused=True)
    assert refusal(plain, weights) == ""
    assert "not all float32" in refusal(plain, [weights[0].double()])
    plain.param_groups[0]["lr"] = torch.empty((), device="meta")
    assert "tensor on a device" in refusal(plain, weights)
    caplog.set_level("DEBUG", "qkeel")
    model = attention(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    qkeel.apply("lalr", model, optimizer)
    for g in gradients(model, 2):
        step_by(model, optimizer, g)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("steps of lalr are")]
    (line,) = told
    assert "copied and rescaled: a parameter group is not fused=True" in line


@pytest.mark.parametrize("fault", ["fails", "drops a line", "forgets the squares"])
def test_a_step_that_is_not_torchs_on_a_device_is_not_used_there(
    fault: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from qkeel.kernels.triton import adamw

    run = adamw._launch

    def faulty(rows: Any, axes: Any, given: Any, how: dict[str, Any]) -> None:
        if fault == "fails":
            raise RuntimeError("no such instruction")
        kept = [row[0][-1].clone() for row in rows]
        run(rows, axes, given, how)
        for row, line in zip(rows, kept):
            if fault == "drops a line":
                row[0][-1].copy_(line)
            else:
                row[7].zero_()

    monkeypatch.setattr(adamw, "_launch", faulty)
    available._agrees.cache_clear()
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("qk_lr", model, optimizer)
    try:
        with caplog.at_level("DEBUG", "qkeel"), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for grads in gradients(model, 2):
                step_by(model, optimizer, grads)
    finally:
        available._agrees.cache_clear()
    said = "fail: RuntimeError: no such instruction" if fault == "fails" else "differ from torch's result by"
    assert [said in str(w.message) for w in told] == [True]
    assert "copied and rescaled: there is no compiled step for cpu" in caplog.text


def test_kernels_that_write_weights_are_used_only_where_that_is_asked_for(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QKEEL_TRITON", "1")
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("qk_lr", model, optimizer)
    with caplog.at_level("DEBUG", "qkeel"):
        for grads in gradients(model, 2):
            step_by(model, optimizer, grads)
    assert not launches
    assert "there is no compiled step for cpu" in caplog.text
    monkeypatch.undo()
    assert not available.takes_heads([torch.ones(1, 2, 3)], write=True)
