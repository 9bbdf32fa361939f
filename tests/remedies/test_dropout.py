"""dropout: what it drops, when, and that its rate at 0 or evaluation changes nothing."""

from __future__ import annotations

import pytest
import torch

import qkeel
from qkeel.nn import Decoder, DecoderConfig


def model(order: str = "pre") -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=7, d_model=16, n_heads=2, norm_order=order))  # type: ignore[arg-type]


TOKENS = torch.arange(6).reshape(1, 6)


@pytest.mark.parametrize("order", ["pre", "post", "swin", "peri", "none"])
def test_both_branches_are_dropped_in_training_only(order: str) -> None:
    plain = model(order)
    before = plain(TOKENS)
    seen: list[torch.Tensor] = []
    handle = qkeel.apply(plain, "dropout:rate=0.5")
    for block in plain.blocks:
        for name in ("attention", "mlp"):
            block.get_submodule(name).register_forward_hook(
                lambda _, __, out: seen.append(out)
            )
    plain(TOKENS)
    shares = [float((out == 0).double().mean()) for out in seen]
    assert len(shares) == 4
    assert all(0.3 < share < 0.7 for share in shares)
    assert torch.equal(plain.eval()(TOKENS), before)
    handle.remove()
    assert torch.equal(plain.train()(TOKENS), before)


def test_what_is_kept_is_scaled_up() -> None:
    plain = model()
    kept: list[torch.Tensor] = []
    whole = plain.blocks[0].get_submodule("attention")(torch.ones(1, 6, 16))
    qkeel.apply(plain, "dropout:rate=0.5")
    kept.append(plain.blocks[0].get_submodule("attention")(torch.ones(1, 6, 16)))
    there = kept[0] != 0
    assert torch.allclose(kept[0][there], 2 * whole[there])
