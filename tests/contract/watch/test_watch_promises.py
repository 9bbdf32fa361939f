"""Watching changes no bit: losses, gradients, weights, buffers and random streams are those of the unwatched run."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.quick import one_in, quick
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.contract.watch.families import (
    FAMILIES,
    Family,
    Mixed,
    Run,
    decoder,
    gpt2,
    hf_loss,
    ids,
    llama,
    qwen3,
    same_tensors,
    token_loss,
    torch_encoder,
    torch_loss,
    train,
)
from tests.contract.watch.layers import Layers
from tests.contract.watch.small import Block, batch, small

from qkeel import preset, watch
from qkeel.monitor import Adaptive, Cadence, LogSpaced


def measured(run: Run) -> int:
    """How many steps were measured; the monitor must have gone by itself at none of them."""
    assert run.monitor is not None
    assert (
        run.monitor.steps == 16
    )  # the optimizer counts from the beginning of training
    return len(run.monitor.history)


@pytest.mark.parametrize(
    "name",
    quick(
        FAMILIES, {"decoder", "llama", "gpt2", "mixed", "torch_encoder"}.__contains__
    ),
)
def test_watched_steps_are_the_unwatched_ones(name: str) -> None:
    family = FAMILIES[name]
    micro = 2 if name in ("llama", "gpt2", "mixed") else 1
    plain, seen = (
        train(family, every=every, steps=20, come=4, go=16, micro=micro)
        for every in (None, 3)
    )
    assert seen.same(plain)
    assert measured(seen) == 4
    assert seen.monitor is not None
    assert len(seen.monitor.read("train")) == family.sites == len(seen.monitor.sites)


@contextlib.contextmanager
def bf16() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


CADENCES: tuple[Cadence | int, ...] = (
    2,
    LogSpaced(per_decade=5),
    Adaptive(least=3, most=9),
)


@pytest.mark.parametrize(
    "build", quick([llama, qwen3, gpt2], lambda build: build is llama)
)
def test_under_autocast(build: Callable[[], nn.Module]) -> None:
    family = Family(build=build, loss=hf_loss)
    plain, *watched = (
        train(family, every=every, steps=12, come=2, go=10, micro=1, around=bf16)
        for every in (None, *CADENCES)
    )
    for run in watched:
        assert run.same(plain)
        assert run.monitor is not None
        assert run.monitor.steps == 10


def qk_normed() -> nn.Module:
    """Whose queries and keys are wider than its values under autocast."""
    return decoder(spec=preset("olmo2"), dropout=0.0)


@pytest.mark.parametrize("around", one_in([torch.enable_grad, bf16], 3))
@pytest.mark.parametrize("build", [qk_normed, decoder, llama])
def test_the_bound_of_an_adaptive_cadence_changes_nothing(
    build: Callable[[], nn.Module], around: Any
) -> None:
    family = Family(build=build, loss=hf_loss if build is llama else token_loss)
    runs = [
        train(family, every=every, steps=12, come=2, go=10, micro=1, around=around)
        for every in (None, Adaptive(least=2, most=9))
    ]
    assert runs[1].same(runs[0])


def test_a_frozen_encoder_keeps_its_fast_path() -> None:
    family = Family(build=Mixed, loss=torch_loss)
    plain, *watched = (
        train(family, every=every, steps=8, come=0, go=8, micro=1)
        for every in (None, 1, Adaptive(least=2, most=5))
    )
    assert all(run.same(plain) for run in watched)


@torch.no_grad()
def test_evaluation_of_torchs_own_encoder_keeps_its_fast_path() -> None:
    model, x = torch_encoder().eval(), torch.randn(2, 6, 32)
    plain = model(x)
    with watch(model) as monitor:
        assert torch.equal(model(x), plain)
        assert [s.n_queries.tolist() for s in monitor.read().values()] == [[12] * 4] * 2


def test_an_extra_pass_leaves_lists_random_streams_and_caches_alone() -> None:
    import random

    import numpy as np

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = qk_normed()
            self.seen: list[int] = []
            self.stream = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1)
            scale = (
                1
                + random.random()
                + np.random.rand()
                + torch.rand((), generator=self.stream)
            )
            return self.model(x) * scale

    def outputs(watched: bool) -> tuple[Tensor, int]:
        random.seed(1)
        np.random.seed(1)
        model = Odd()
        if watched:
            watch(model)
        return torch.stack([model(ids(i)) for i in range(3)]), len(model.seen)

    (plain, n), (seen, m) = outputs(False), outputs(True)
    assert torch.equal(plain, seen)
    assert n == m == 3


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_gradient_scaler_and_steps_that_it_skips(fused: bool) -> None:
    def run(every: int | None) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        model = decoder(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        monitor = watch(model, optimizer, every=every) if every else None
        for step in range(8):
            loss = token_loss(model, step)
            scaler.scale(loss * (torch.inf if step in (2, 5) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return dict(model.state_dict()), monitor

    (plain, _), (seen, monitor) = run(None), run(1)
    assert same_tensors(plain, seen)
    assert monitor.steps == 6
    assert monitor.history.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert [s.n_queries.tolist() for s in monitor.read().values()] == [
        [8 * 2 * 8] * 4
    ] * 2


def test_gradients_are_recorded_without_the_scale_of_a_gradient_scaler() -> None:
    rms = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = decoder(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with watch(model, optimizer) as monitor:
            scaler.scale(token_loss(model, 0)).backward()
            scaler.step(optimizer)
            assert monitor.sample is not None
            rms.append(torch.tensor(monitor.sample.heads["query_grad_rms"]))
    torch.testing.assert_close(rms[0], rms[1], rtol=1e-6, atol=0)


class CopiesItself(nn.Module):
    """It copies a part of itself in every pass, as a model with a frozen target does."""

    def __init__(self, copied: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.copied = copied
        self.blocks, self.head = small(), nn.Sequential(Block(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.head(x) - self.copied(self.head)(x).detach()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_model_that_copies_a_part_of_itself_in_every_pass(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = CopiesItself(copied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with (
            watch(model, optimizer, classes=classes)
            if watched
            else contextlib.nullcontext() as monitor
        ):
            for step in range(3):
                model(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert monitor is None or (monitor.active and len(monitor.history) == 3)
        assert not any(
            type(key) is object
            for part in model.modules()
            for key in part._forward_hooks
        )
        return [*model.parameters()]

    def classes(x: Tensor) -> Tensor:
        return (torch.arange(x.shape[1]) % 2).expand(x.shape[0], -1)

    for ours, plain in zip(run(True), run(False)):
        assert torch.equal(ours, plain)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


IN_ONE_PIECE = torch.compile(written_out, backend="aot_eager", fullgraph=True)


def trained_layers(ways: tuple[Callable[..., Any], ...], watched: bool) -> list[Tensor]:
    """The weights after three steps."""
    torch._dynamo.reset()
    model = Layers(*ways)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(model, optimizer) if watched else contextlib.nullcontext() as monitor:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert monitor is None or (monitor.active and len(monitor.sites) == 2)
    return [*model.parameters()]


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::DeprecationWarning:torch",
    "ignore:The .grad attribute",
)
def test_a_function_that_torch_compiles_in_one_piece_stays_so() -> None:
    ways = (written_out, IN_ONE_PIECE)
    assert all(
        map(torch.equal, trained_layers(ways, True), trained_layers(ways, False))
    )
