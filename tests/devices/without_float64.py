"""Watches, changes and trains models on a device that has no float64, and prints what went through."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.contract.conformance.kinds import refusal_of
from tests.contract.conformance.test_remedies import SMALLEST, Model, adamw
from tests.devices.accelerator import DEVICE, NAME, Accelerator
from tests.lab.conftest import TINY
from tests.remedies.foreign import hf, out
from torch import Tensor, nn

import qkeel
from qkeel.functional import norms
from qkeel.lab import Execution, Grid, LongContexts, RunConfig, make_plan, run, run_plan
from qkeel.lab import build_run as build_model
from qkeel.lab.studies import STUDIES
from qkeel.nn import Decoder, DecoderConfig
from qkeel.remedies import REMEDIES
from qkeel.report import write
from qkeel.sites import trace

faults: list[str] = []  # what was warned of


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, count: int = 2
) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        logits = out(model, x).flatten(0, 1)
        nn.functional.cross_entropy(
            logits, torch.arange(len(logits), device=DEVICE) % 5
        ).backward()
        optimizer.step()


def watched() -> Iterator[str]:
    """Own and foreign attention, with gains, classes, a query mask and a probe."""
    tokens = torch.randint(20, (2, 9)).to(DEVICE)
    own = Decoder(
        DecoderConfig(
            vocab_size=40, d_model=32, n_layers=2, spec=qkeel.preset("cosa_logn")
        )
    )
    for name, model in (
        ("own", own),
        *((kind, hf(kind, "sdpa")) for kind in ("llama", "qwen3", "gpt2")),
    ):
        model = model.to(DEVICE).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for how in ({}, {"stats": "entropy", "every": 2}):
            with qkeel.watch(
                model, optimizer, probe_batch=tokens if not how else None, **how
            ) as monitor:
                steps(model, optimizer, tokens, 3)
                found = monitor.read()
                assert found, name
                assert all(
                    torch.isfinite(stats.entropy).all() for stats in found.values()
                ), name
                assert monitor.table(), name
        with qkeel.watch(
            model, classes={"low": range(10), "high": range(10, 20)}
        ) as monitor:
            steps(model, optimizer, tokens, 1)
            assert all(
                stats.classes is not None for stats in monitor.read().values()
            ), name
        yield f"watch {name}"


def changed() -> Iterator[str]:
    """Every remedy, on a small model of qkeel's own and, where it takes it, on Llama."""
    x = torch.randn(2, 7, 16).to(DEVICE)
    for name in REMEDIES:
        if not refusal_of(name, SMALLEST.removesuffix(" bias")):
            model = Model(SMALLEST).to(DEVICE)
            optimizer = adamw(model)
            steps(model, optimizer, x)
            shown = x if name in ("z_loss", "final_softcap") else None
            with qkeel.apply(model, name, optimizer, train_length=16, batch=shown):
                steps(model, optimizer, x)
                assert all(torch.isfinite(p).all() for p in model.parameters()), name
            yield f"apply {name}"


def trained() -> Iterator[str]:
    """Runs with evaluation and probe, as a study's and the demo's are, on what "auto" takes."""
    build_model._device = lambda name: NAME
    RunConfig.__post_init__ = lambda self: None  # type: ignore[method-assign]  # it knows the names of real devices
    for remedy in ("none", "lalr:tau=0.3", "qk_clip:threshold=1"):
        with tempfile.TemporaryDirectory() as folder:
            done = run(
                dataclasses.replace(TINY, remedy=remedy, device="auto"),
                Path(folder) / "r",
            )
            assert done.summary()["status"] == "done", remedy
        yield f"train {remedy}"


def studied() -> Iterator[str]:
    """Every study of the lab, the demo among them, cut to its first remedies, rate and seed; with its page."""
    for name in STUDIES:
        study = STUDIES[name]
        grid = {
            axis: values[:1] for axis, values in dataclasses.asdict(study.grid).items()
        }
        remedies = study.grid.remedies[: 1 if study.contexts else 2]
        base = dataclasses.replace(
            study.base or TINY,
            model=TINY.model,
            steps=3,
            log_every=1,
            checkpoint_every=3,
        )
        sizes = {"context": 80 if base.data.task == "multimodal" else 8, "batch": 2}
        data = dataclasses.replace(base.data, **sizes, source="topics", pairs=8)
        base = dataclasses.replace(
            base, data=data, eval_sequences=2, probe_sequences=2, device="auto"
        )
        contexts = LongContexts(
            posthoc=("none", "rerope"), test_lengths=(16,), sequences=2
        )
        with tempfile.TemporaryDirectory() as folder:
            plan = make_plan(
                name,
                base,
                Grid(**{**grid, "remedies": remedies}),
                study.contexts and contexts,
            )
            done = run_plan(plan, folder, Execution())
            assert not done.failures, (name, done.failures[0].error)
            assert len(done.table) == len(plan.runs) > 0, name
            write(Path(folder), Path(folder) / "report.html")
        yield f"study {name}"


if __name__ == "__main__":
    warnings.showwarning = lambda message, *_, **__: faults.append(str(message))
    trace.verified = lambda model, seen, *recorded: (
        seen
    )  # its experiment works on storages, which stand-ins have none of
    norms.WITHOUT_FLOAT64 = frozenset({"mps", NAME})  # type: ignore[misc]
    with Accelerator(float64=False):
        try:
            torch.zeros(2, device=DEVICE).double()
        except TypeError:
            pass
        else:
            raise AssertionError("the device made float64")
        for group in (watched, changed, trained, studied):
            for told in group():
                assert not any("switched itself off" in fault for fault in faults), (
                    faults
                )
                print(told, flush=True)
