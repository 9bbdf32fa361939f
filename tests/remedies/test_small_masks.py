"""Remedies on the call of hand-written attention: which masks they keep, and which they refuse."""

from __future__ import annotations

import pytest
import torch
from tests.sites.test_hidden_pairs import CAUSAL, WAYS, B, D, H, T, Windows
from torch import Tensor

import qkeel
from qkeel.errors import RefusedError

X = torch.randn(B, T, H * D, generator=torch.Generator().manual_seed(0))


class Spelled(Windows):
    """Causal attention whose mask is written in one of several ways."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        z = q @ k.mT * D**-0.5
        if self.how == "alpha of add":
            z = torch.add(z, ~CAUSAL, alpha=-100)
        elif self.how == "whole numbers":
            z = z - 100 * (~CAUSAL).long()
        elif self.how == "keywords":
            z = z.masked_fill(mask=~CAUSAL, value=-100.0)
        else:
            z = z.masked_fill(~CAUSAL, float(self.how))
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


SMALL = [Windows(how) for how in WAYS if how != "fused"]
SMALL += [Spelled(how) for how in ("alpha of add", "whole numbers", "keywords")]


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.how)
def test_a_mask_of_small_numbers_before_a_hand_written_softmax_is_refused(
    model: Windows,
) -> None:
    y = model(X)
    with pytest.raises(RefusedError, match="hides keys by a number above -9000"):
        qkeel.apply(model, "softcap:cap=3", batch=X)
    assert torch.equal(model(X), y)


def expected(model: Windows, bias: Tensor | float) -> Tensor:
    q, k, v = (
        z.unflatten(-1, (H, D)).transpose(1, 2)
        for z in model.qkv(X.double()).chunk(3, -1)
    )
    z = 3 * torch.tanh((q @ k.mT * D**-0.5 + bias) / 3)
    return (
        (z.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    )


@pytest.mark.parametrize("how", ["fused", "-inf", "-1e4"])
def test_other_masks_stay_masks(how: str) -> None:
    model = (Windows if how == "fused" else Spelled)(how).double()
    with torch.no_grad():
        model.qkv.weight.mul_(5)
    y = model(X.double())
    with qkeel.apply(model, "softcap:cap=3", batch=X.double()):
        torch.testing.assert_close(
            model(X.double()), expected(model, model.bias if how == "fused" else 0.0)
        )
    assert torch.equal(model(X.double()), y)


def test_a_logit_as_low_as_a_mask_is_refused() -> None:
    model = Spelled("-inf")
    with torch.no_grad():
        model.qkv.weight.mul_(400)
    with pytest.raises(RefusedError, match="an unmasked logit is"):
        qkeel.apply(model, "softcap:cap=3", batch=X)


class Stable(Windows):
    """The largest score of each row is subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        z = (q @ k.mT * D**-0.5).masked_fill(~CAUSAL, -torch.inf)
        if self.how == "in place":
            z -= z.amax(-1, keepdim=True)
        else:
            z = z - z.amax(-1, keepdim=True).detach()
        z = z + self.bias if self.how == "biased later" else z
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["", "in place", "biased later"])
def test_scores_from_which_the_largest_of_their_row_is_subtracted_are_refused(
    how: str,
) -> None:
    with pytest.raises(
        RefusedError, match="the largest score of each row is subtracted"
    ):
        qkeel.apply(Stable(how), "softcap:cap=3", batch=X)
