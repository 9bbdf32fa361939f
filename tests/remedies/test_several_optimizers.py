"""The weights of one model lie in several optimizers, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import qkeel
from qkeel.nn import Decoder, DecoderConfig

Split = Callable[[Decoder], list[Optimizer]]


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=2))


def by_kind(model: nn.Module) -> list[Optimizer]:
    """Matrices in one optimizer, gains and biases in the other."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01),
    ]


def by_layer(model: Decoder) -> list[Optimizer]:
    """The first block in one optimizer, everything else in the other."""
    first = list(model.blocks[0].parameters())
    others = [p for p in model.parameters() if all(p is not q for q in first)]
    return [SGD(first, lr=0.5), SGD(others, lr=0.5)]


def train(
    model: nn.Module, optimizers: list[Optimizer], steps: int = 3
) -> dict[str, Tensor]:
    for step in range(steps):
        tokens = torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(step))
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alone(model: Decoder) -> list[Optimizer]:
    """What by_layer does, with one optimizer."""
    return [SGD(model.parameters(), lr=0.5)]


@pytest.mark.parametrize(("split", "same"), [(by_kind, by_kind), (by_layer, alone)])
@pytest.mark.parametrize(
    "remedy",
    ["qk_clip:threshold=0.05", "lalr:tau=0.5", "qk_lr:factor=0.1", "frozen_qk"],
)
def test_a_remedy_for_steps_acts_as_with_the_one_optimizer_that_holds_all_heads(
    remedy: str, split: Split, same: Split
) -> None:
    several, single, without = model(), model(), model()
    optimizers, others = split(several), same(single)
    with (
        qkeel.apply(several, remedy, optimizers) as handle,
        qkeel.apply(single, remedy, others[0]),
    ):
        trained, expected, plain = (
            train(several, optimizers),
            train(single, others),
            train(without, split(without)),
        )
        handle.load(handle.state())
    assert all(torch.equal(trained[name], expected[name]) for name in trained)
    assert not all(torch.equal(trained[name], plain[name]) for name in trained)


def test_new_gains_go_to_the_optimizer_that_holds_gains() -> None:
    m = model()
    muon, adamw = by_kind(m)
    held = [
        sum(len(group["params"]) for group in o.param_groups) for o in (muon, adamw)
    ]
    with qkeel.apply(m, "qk_norm", [muon, adamw]):
        now = [
            sum(len(group["params"]) for group in o.param_groups) for o in (muon, adamw)
        ]
        assert now[0] == held[0]
        assert now[1] == held[1] + 4  # the gains of q and k in two layers
    assert [
        sum(len(group["params"]) for group in o.param_groups) for o in (muon, adamw)
    ] == held


def warned(record: pytest.WarningsRecorder) -> list[str]:
    return [str(w.message) for w in record if "do not train" in str(w.message)]


def test_gains_that_no_optimizer_holds_are_told_of_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A pretrained model with its optimizer, and a norm that is added without it."""
    decoder = model()
    optimizers = by_kind(decoder)
    with qkeel.apply(decoder, "qk_norm"):
        train(decoder, optimizers, 4)
    (message,) = warned(recwarn)
    assert "norm" in message
    assert "3 more" in message  # two gains in two layers


@pytest.mark.parametrize("split", [by_kind, alone])
def test_nothing_is_said_where_some_optimizer_holds_the_gains(
    split: Split, recwarn: pytest.WarningsRecorder
) -> None:
    decoder = model()
    with qkeel.apply(decoder, "qk_norm"):
        train(decoder, split(decoder), 4)
    decoder = model()
    optimizers = split(decoder)
    with qkeel.apply(decoder, "qk_norm", optimizers):
        train(decoder, optimizers, 4)
    other, optimizer = model(), alone(model())
    with qkeel.apply(other, "qk_norm"):
        train(model(), optimizer, 4)  # that of another model
    assert not warned(recwarn)
