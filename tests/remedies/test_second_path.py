"""A changed module that later takes another kind of attention call than the example showed is refused in words."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError


class TwoPaths(nn.Module):
    """Attention that is fused, or written out while `weights` is set, as for logging them."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.weights, self.merged = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            False,
            merged,
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if self.merged:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        y = (
            (q @ k.mT * 8**-0.5).softmax(-1) @ v
            if self.weights
            else F.scaled_dot_product_attention(q, k, v)
        )
        return self.out(y.reshape(b, 2, t, 8).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "remedy", ["softcap:cap=1.0", "sigmoid", "log_n:train_length=6"]
)
@pytest.mark.parametrize("merged", [False, True])
def test_a_written_softmax_after_a_fused_example_is_refused_in_words(
    remedy: str, merged: bool
) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(16, 16), TwoPaths(merged)),
        5 * torch.randn(2, 6, 16),
    )
    plain = model(x)
    handle = qkeel.apply(
        model, remedy.split(":train")[0], None, batch=x, train_length=6
    )
    changed = model(x)
    assert not torch.equal(changed, plain)
    model[1].weights = True
    with pytest.raises(RefusedError, match=r"explicit softmax, but the remedy"):
        model(x)
    model[1].weights = False
    assert torch.equal(model(x), changed)
    handle.remove()
    assert torch.equal(model(x), plain)


def test_a_fused_call_after_a_written_example_is_capped_as_that_was() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), TwoPaths()), 5 * torch.randn(2, 6, 16)
    model[1].weights = True
    handle = qkeel.apply(model, "softcap:cap=1.0", None, batch=x)
    written = model(x)
    model[1].weights = False
    torch.testing.assert_close(model(x), written)
    handle.remove()


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A function of flash-attn's name, [b t h d], in torch's functions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


class Flash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        return self.out(sys.modules["flash_attn"].flash_attn_func(q, k, v).flatten(2))


def test_a_flash_function_in_torch_s_functions_is_capped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Flash()), 5 * torch.randn(2, 6, 16)
    fused = nn.Sequential(nn.Linear(16, 16), TwoPaths())
    fused.load_state_dict(model.state_dict())
    for each in (model, fused):
        qkeel.apply(each, "softcap:cap=1.0", None, batch=x)
    torch.testing.assert_close(model(x), fused(x))
