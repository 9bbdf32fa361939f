"""Triton's step of Adam with a rate per line is the formula in float64, and what remedies take it for."""

from __future__ import annotations

import os
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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU tensors stand for CUDA's; QKEEL_NATIVE=0 stands for QKEEL_TRITON=0. What was launched, by kind."""
    from qkeel.kernels.triton import adamw

    found: Counter[str] = Counter()
    run = adamw._launch
    monkeypatch.setattr(available, "usable", lambda device: os.environ["QKEEL_NATIVE"] == "1" and available.loaded())
    monkeypatch.setattr(available, "takes_heads", lambda views: False)
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
def test_lalr_moves_the_bytes_of_adamw_and_few_for_each_line(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LALR at most 1.03 of fused AdamW by what is read and written; docs/internals/gpu.md has the times."""
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
    monkeypatch.setattr(available, "takes_heads", lambda views: True)
    table = available.head_table([model.k_proj.weight.detach().view(2, 4, 16)])
    table.scale(torch.tensor([0.5, 2.0]))  # another remedy's kernel
    step_by(model, optimizer, grads[2])
    assert launches == {"step": 3, "sum": 1}
    step_by(model, optimizer, grads[3])
    assert launches == {"step": 4, "sum": 1}


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


def test_kernels_that_disagree_with_torch_at_their_first_use_write_no_weight(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(available, "trusted", lambda family, device: False)
    model = attention(torch.float32)
    optimizer = fused(model)
    qkeel.apply("qk_lr", model, optimizer)
    with caplog.at_level("DEBUG", "qkeel"):
        for grads in gradients(model, 2):
            step_by(model, optimizer, grads)
    assert not launches
    assert "there is no compiled step for cpu" in caplog.text
