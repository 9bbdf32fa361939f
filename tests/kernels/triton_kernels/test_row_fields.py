"""All statistics of rows from the GPU's pass are those that torch's operators find block by block in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.test_non_finite import BROKEN, broken_call
from tests.kernels.triton_kernels.test_extremes import CASES, call_of
from tests.quick import one_in

from qkeel import preset
from qkeel.functional.statistics import TENSORS
from qkeel.kernels.logits import gpu as gpu_statistics
from qkeel.kernels.native import triton as available
from qkeel.kernels.statistics import logit_stats
from qkeel.spec import (
    AttentionCall,
    AttentionSpec,
    Learned,
    Sink,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import make_call, with_query_mask


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the way of CUDA tensors: no compiled pass, Triton's kernels."""
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())


def wide(call: AttentionCall) -> AttentionCall:
    """The same numbers in float64, which no kernel of ours supports."""

    def move(x: object) -> object:
        return (
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        )

    return call.__class__(
        **{
            name: move(getattr(call, name))
            for name in call.__dataclass_fields__
            if name != "params"
        },
        params={name: move(x) for name, x in call.params.items()},
    )


def check(call: AttentionCall, name: str) -> None:
    assert gpu_statistics.row_fields(call, 0.5) is not None, name
    ours, truth = logit_stats(call, 0.5), logit_stats(wide(call), 0.5)
    largest = truth.max_abs_logit.max()
    for field in TENSORS:
        a, b = getattr(ours, field).double(), getattr(truth, field).double()
        # Sums of logits are rounded as the largest of them; a weight's relative error is its logit's absolute one.
        room = 2e-7 * largest
        assert ((a == b) | ((a - b).abs() <= 2e-5 * (1 + b.abs()) + room)).all(), (
            f"{name}: {field}: {a} {b}"
        )


@pytest.mark.parametrize("name", one_in(CASES, 4))
def test_every_statistic_is_that_of_float64(name: str, on_gpu: None) -> None:
    spec, t, s, how = CASES[name]
    call = call_of(spec, t, s, torch.float32, **how)
    check(call, name)
    check(with_query_mask(call, torch.rand(2, t) < 0.6), f"{name}, queries left out")


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_statistics_of_large_logits_do_not_cancel(size: float, on_gpu: None) -> None:
    check(call_of(AttentionSpec(), 33, 33, torch.float32, size), f"{size}")


def test_half_precision_is_read_as_it_is(on_gpu: None) -> None:
    check(call_of(AttentionSpec(), 20, 70, torch.float16), "float16")


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # numpy's, which multiplies for the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_not_finite_shows_in_its_head_alone(kind: str, on_gpu: None) -> None:
    found = logit_stats(broken_call(kind, AttentionSpec()))
    assert found.non_finite.bool().tolist() == [
        head in BROKEN[kind] for head in range(4)
    ]


def test_what_hidden_keys_hold_does_not_matter(on_gpu: None) -> None:
    hidden = torch.arange(40) >= torch.tensor([[0], [9]])
    call = call_of(AttentionSpec(), 40, 40, torch.float32, mask=hidden)
    before = logit_stats(call)
    call.k[1, :, :9] = torch.nan
    after = logit_stats(call)
    for field in TENSORS:
        assert torch.equal(getattr(before, field), getattr(after, field)), field


@pytest.mark.parametrize(
    "shape", [(70, 90), (2, 1, 70, 90), (1, 4, 70, 90), (2, 4, 70, 90)], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_pairs_of_any_shape(
    shape: tuple[int, ...], causal: bool, on_gpu: None
) -> None:
    shown = torch.rand(shape) < 0.4
    shown[..., 7, :] = False
    check(
        call_of(AttentionSpec(), 70, 90, torch.float32, mask=shown, causal=causal),
        f"{shape}",
    )
    turned = shown.mT.contiguous().mT  # its keys lie apart
    check(
        call_of(
            AttentionSpec(cap=Softcap(5.0)),
            70,
            90,
            torch.float32,
            mask=turned,
            causal=causal,
        ),
        f"{shape}",
    )


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.slow)], ids=str
)
def test_drawn_calls(seeds: range, on_gpu: None) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        b, g, share, d = (
            rng.choice([1, 3]),
            rng.choice([1, 2]),
            rng.choice([1, 3]),
            rng.choice([8, 24, 40, 128]),
        )
        s = rng.choice([1, 5, 64, 65, 130])
        causal = rng.random() < 0.6
        t = s if causal and rng.random() < 0.5 else rng.choice([1, 3, 64, 67])
        cap = Softcap(rng.choice([1.0, 30.0])) if rng.random() < 0.4 else None
        window = (
            SlidingWindow(window=rng.choice([1, 4, 70])) if rng.random() < 0.3 else None
        )
        scale = Learned(init=3.0, per="head", log=True) if rng.random() < 0.3 else None
        how = {"cap": cap, "position": window, "scale": scale}
        spec = AttentionSpec(
            **{name: value for name, value in how.items() if value is not None}
        )
        masks = [
            None,
            (b, 1, 1, s),
            (1, 1, 1, s),
            (1, 1, t, s),
            (b, 1, t, s),
            (1, g * share, t, s),
        ]
        mask = (
            None
            if window is not None or (shape := rng.choice(masks)) is None
            else torch.rand(shape) < 0.7
        )
        size = rng.choice([0.1, 1.0, 40.0])
        shapes = [(b, g * share, t, d), (b, g, s, d), (b, g, s, d)]
        q, k, v = map(torch.randn, shapes)
        params = spec.init_params(g * share, g, d)
        call = make_call(spec, size * q, k, v, params=params, mask=mask, causal=causal)
        if rng.random() < 0.3:
            call = with_query_mask(call, torch.rand(b, t) < 0.6)
        check(call, f"seed {seed}")


@pytest.mark.parametrize("how", ["sink", "an added mask"])
def test_what_the_pass_does_not_know_is_left_to_torch(how: str, on_gpu: None) -> None:
    more: dict[str, Any] = {"mask": torch.randn(5, 5)} if how != "sink" else {}
    spec = AttentionSpec(normalizer=Sink()) if how == "sink" else preset("baseline")
    call = call_of(spec, 5, 5, torch.float32, **more)
    assert gpu_statistics.row_fields(call, 0.5) is None
    assert torch.isfinite(logit_stats(call).entropy).all()
