"""The bound between measurements: the same bits for the model, and a jump is caught."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import qkeel
from qkeel.kernels.attention import logsumexp
from qkeel.monitor import Adaptive, Every, LogSpaced
from qkeel.monitor.cadence import cadence
from qkeel.patching.modes import flash_on_cpu
from qkeel.sites import tap
from qkeel.sites.tap import BracketMode


@pytest.mark.parametrize("masked", ["no", "causal", "added", "boolean"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_and_gradients_are_the_same_bits_and_the_bound_holds(
    masked: str, heads: int, groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 20, heads, 12, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, groups, 20, 12, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = {"added": torch.randn(20, 20, dtype=dtype), "boolean": torch.rand(2, 1, 20, 20) > 0.3}.get(masked)
    if masked == "boolean":
        assert mask is not None
        mask[..., 0] = True

    def run() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=masked == "causal", enable_gqa=heads != groups
        )
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    plain = run()
    with BracketMode() as mode:
        seen = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen))
    z = q.detach().double() @ k.detach().double().repeat_interleave(heads // groups, 1).mT / math.sqrt(12)
    if masked == "causal":
        z = z.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
    elif mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.double()
    assert mode.bound is not None
    slack = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert float(mode.bound) >= float(z.max()) - slack
    if masked != "boolean":  # else the product of the norms, which is not tight
        assert float(mode.bound) <= float(z.max()) + math.log(20) + slack


@pytest.mark.parametrize("cast", [False, True])
def test_on_a_gpu_the_bound_is_the_logsumexp_of_the_operator_that_sdpa_chooses(
    cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU in the part of a GPU: one of its fused operators is torch's own here, which has the same bits.
    monkeypatch.setattr(tap, "_GPU", "cpu")
    monkeypatch.setattr(logsumexp, "kernel_choice", lambda *_, **how: SDPBackend.FLASH_ATTENTION.value)
    monkeypatch.setattr(logsumexp, "_FUSED", {SDPBackend.FLASH_ATTENTION: (flash_on_cpu, (0.0,))})
    q, k, v = (torch.randn(2, heads, 20, 16, requires_grad=True) for heads in (4, 2, 2))

    def run() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out, *torch.autograd.grad(out.float().cos().sum(), (q, k, v))

    plain = run()
    with BracketMode() as mode:
        seen = run()
        between = [run() for _ in range(2)]
    assert all(torch.equal(a, b) for found in (seen, *between) for a, b in zip(plain, found))
    z = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
    assert mode.bound is not None
    torch.testing.assert_close(mode.bound, z.logsumexp(-1).amax(), rtol=0.02 if cast else 1e-5, atol=0.0)


def test_on_a_gpu_what_no_fused_operator_takes_is_bounded_by_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_GPU", "cpu")
    monkeypatch.setattr(logsumexp, "kernel_choice", lambda *_, **how: SDPBackend.MATH.value)
    q = torch.randn(1, 2, 5, 8)
    with BracketMode() as mode:
        F.scaled_dot_product_attention(q, q, q)
    assert mode.bound is not None
    torch.testing.assert_close(mode.bound, q.norm(dim=-1).amax().square() / 8**0.5)


def test_with_dropout_the_bound_is_the_product_of_the_norms() -> None:
    q = torch.randn(1, 2, 5, 4)
    with BracketMode() as mode:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert mode.bound is not None
    torch.testing.assert_close(mode.bound, q.norm(dim=-1).amax().square() / 2)


def test_of_hand_written_attention_the_bound_is_the_maximum() -> None:
    z = torch.randn(2, 3, 4)
    with BracketMode() as mode:
        z.softmax(-1)
    assert mode.bound is not None
    assert float(mode.bound) == float(z.max())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def measured(jump: int | None, steps: int, every: Adaptive) -> list[int]:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2, 8, 16)
    found = []
    with qkeel.watch(model, optimizer, every=every) as monitor:
        for step in range(steps):
            if step == jump:
                with torch.no_grad():
                    model.qkv.weight[:32] *= 5
            model(x).sum().backward()
            optimizer.step()
            assert monitor.sample is not None
            found.append(monitor.sample.step)
    return sorted(set(found))


def test_a_flat_run_is_measured_only_every_most_steps() -> None:
    assert measured(None, 45, Adaptive(least=3, most=20)) == [0, 20, 40]


def test_a_jump_is_measured_at_the_step_after_it_shows() -> None:
    assert measured(9, 20, Adaptive(least=3, most=20)) == [0, 10]


def test_a_jump_right_after_a_measurement_waits_for_the_least_distance() -> None:
    # The bound of step 1 is what later ones are compared with, so a jump at 2 shows.
    assert measured(2, 12, Adaptive(least=6, most=20)) == [0, 6]


def test_a_cadence_is_a_number_or_an_object_and_says_so_otherwise() -> None:
    assert cadence(7) == Every(7)
    assert cadence(LogSpaced(per_decade=3)) == LogSpaced(per_decade=3)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="at least 1 step"):
            cadence(bad)
    for kind in (True, 2.0, "10"):
        with pytest.raises(TypeError, match="whole number"):
            cadence(kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="least <= most"):
        Adaptive(least=9, most=3)
    with pytest.raises(ValueError, match="above 0"):
        Adaptive(change=0.0)
    with pytest.raises(ValueError, match="per decade"):
        LogSpaced(per_decade=0)
