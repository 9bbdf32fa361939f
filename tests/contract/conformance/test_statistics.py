"""`stats=True` gives what a straightforward T×T recomputation gives, for every spec, mask and geometry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.quick import one_in, quick
from torch import Tensor

from qkeel import attention, preset
from qkeel.functional.statistics import TENSORS, LogitStats, merge
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.reference import Attended
from qkeel.spec import (
    ALiBi,
    AttentionSpec,
    Fixed,
    Kerple,
    NoPosition,
    Rope,
    Sink,
    Softcap,
)

from .cases import GEOMETRIES, MASKS, SOME, SPECS, Call, calls, pairs, truth_of, widened

ALL = pairs(GEOMETRIES, MASKS)
FIELDS = list(TENSORS)


def stats_of(call: Call) -> LogitStats:
    """What the library returns."""
    return call.attention(stats=True)[1]


def recomputed(
    call: Call, threshold: float = ALARM_THRESHOLD, counted: Tensor | None = None
) -> dict[str, Tensor]:
    """Every field from the oracle's T×T matrices, head by head; of the counted rows [b t] or of all."""
    truth, (q, k) = call.attended(), call.encoded()
    if counted is not None:
        hidden = ~counted[:, None, :, None]
        truth = dataclasses.replace(
            truth, logits=truth.logits.masked_fill(hidden, -torch.inf)
        )
    entering = _entering(call).masked_fill(truth.logits == -torch.inf, -torch.inf)
    groups = k.shape[1]
    per_group = q.shape[1] // groups
    found: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
    for h in range(q.shape[1]):
        sink = isinstance(call.spec.normalizer, Sink)
        fields = {
            **_head(call, truth, q, h),
            **_relative(truth, h, threshold, sink),
            **_angles(truth, q, k, h),
            "logit_spread": _spread(entering[:, h]),
        }
        for name, value in fields.items():
            found[name].append(value)
    seen = (truth.logits > -torch.inf).any(2)  # [b h s]
    for g in range(groups):
        visible = seen[:, g * per_group : (g + 1) * per_group].any(1)
        norms = k[:, g].norm(dim=-1)[visible]
        found["key_norm"].append(_mean(norms))
        found["key_norm_max"].append(
            norms.max() if norms.numel() else norms.new_zeros(())
        )
        found["n_keys"].append(visible.sum())
    return {name: torch.stack(values) for name, values in found.items()}


def _head(call: Call, truth: Attended, q: Tensor, h: int) -> dict[str, Tensor]:
    logits, weights = truth.logits[:, h], truth.weights[:, h]
    pairs, rows = logits > -torch.inf, (logits > -torch.inf).any(-1)
    z, inf = logits[pairs], torch.tensor(torch.inf, dtype=logits.dtype)
    p, taken = _distribution(weights, isinstance(call.spec.normalizer, Sink))
    p = torch.cat([p, taken[..., None]], -1)
    entropy = -torch.where(p > 0, p * p.log(), torch.zeros_like(p)).sum(-1)[rows]
    norms = q[:, h].norm(dim=-1)[rows]
    top = z.max() if z.numel() else -inf
    return {
        "max_logit": top,
        "min_logit": z.min() if z.numel() else inf,
        "mean_logit": _mean(z),
        "capped_max_logit": call.spec.cap.apply(top) if z.numel() else -inf,
        "entropy": _mean(entropy),
        "entropy_min": entropy.min() if entropy.numel() else inf,
        "query_norm": _mean(norms),
        "query_norm_max": norms.max() if norms.numel() else norms.new_zeros(()),
        "n_queries": rows.sum(),
        "n_pairs": pairs.sum(),
    }


def _distribution(weights: Tensor, sink: bool) -> tuple[Tensor, Tensor]:
    """Weights [r s] that sum to one with what a sink takes [r]; without one they are divided by their sum."""
    total = weights.sum(-1, keepdim=True)
    if sink:
        return weights, (1 - total[..., 0]).clamp_min(0)
    return weights / total.clamp_min(torch.finfo(weights.dtype).tiny), torch.zeros_like(
        total[..., 0]
    )


def _relative(
    truth: Attended, h: int, threshold: float, sink: bool
) -> dict[str, Tensor]:
    """Normalised entropy, sink share and share above, row by row."""
    logits, weights = (
        truth.logits[:, h].flatten(0, 1),
        truth.weights[:, h].flatten(0, 1),
    )
    seen = logits > -torch.inf
    count, first = seen.sum(-1), seen.int().argmax(-1, keepdim=True)
    p = weights.masked_fill(~seen, 0.0)
    # Over the keys alone.
    of_keys, _ = _distribution(p, False)
    passed = (of_keys * (1 - of_keys)).sum(-1)
    p, taken = _distribution(p, sink)
    free = count >= 2
    relative = (torch.special.entr(p).sum(-1) + torch.special.entr(taken))[free]
    relative = relative / (count[free] + int(sink)).to(weights.dtype).log()
    z = logits[seen]
    return {
        "normalized_entropy": _mean(relative),
        "softmax_gradient": _mean((passed / (1 - 1 / count.to(p.dtype)))[free]),
        "sink_share": _mean(p.gather(-1, first)[free]),
        "logit_gap": _mean(
            (logits.amax(-1) - logits.masked_fill(~seen, 0.0).sum(-1) / count)[free]
        ),
        "share_above": _mean((z > threshold).to(z.dtype)),
        "n_free": free.sum(),
    }


def _entering(call: Call) -> Tensor:
    """The logits after the cap, of a call in which nothing is added to q·k; some pairs may be hidden."""
    position, mask = call.spec.position, call.mask
    if isinstance(position.unwindowed, (ALiBi, Kerple)):
        position = NoPosition()
    spec = dataclasses.replace(call.spec, position=position)
    if mask is not None and mask.dtype != torch.bool:
        mask = None
    params = {x: p for x, p in call.params.items() if not x.startswith("kerple")}
    bare = dataclasses.replace(call, spec=spec, mask=mask, params=params)
    logits = bare.attended().logits
    hidden = logits == -torch.inf
    return call.spec.cap.apply(logits.masked_fill(hidden, 0.0)).masked_fill(
        hidden, -torch.inf
    )


def _spread(logits: Tensor) -> Tensor:
    """The largest of all rows' maxima minus their means, [b t s]; -inf without a row that sees a key."""
    seen = logits > -torch.inf
    gaps = [
        row[keys].max() - row[keys].mean()
        for row, keys in zip(logits.flatten(0, 1), seen.flatten(0, 1), strict=True)
        if keys.any()
    ]
    return torch.stack(gaps).max() if gaps else logits.new_tensor(-torch.inf)


def _angles(truth: Attended, q: Tensor, k: Tensor, h: int) -> dict[str, Tensor]:
    pairs = truth.logits[:, h] > -torch.inf
    q, k = q[:, h], k[:, h // (q.shape[1] // k.shape[1])]
    products = (q @ k.mT)[pairs]
    cosines = torch.cosine_similarity(q[:, :, None], k[:, None], dim=-1)[pairs]
    return {
        "qk_frobenius": products.square().sum().sqrt(),
        "cos_max": cosines.max() if cosines.numel() else cosines.new_tensor(-torch.inf),
        "cos_mean": _mean(cosines),
        "n_products": pairs.sum(),
    }


def _mean(x: Tensor) -> Tensor:
    return x.mean() if x.numel() else x.new_zeros(())


def assert_same(
    ours: LogitStats, theirs: dict[str, Tensor], tolerance: float, case: str
) -> None:
    for name, truth in theirs.items():
        value = getattr(ours, name)
        assert value.shape == truth.shape, f"{name}, {case}"
        assert not value.is_floating_point() or not value.isnan().any(), (
            f"{name}, {case}"
        )
        if not truth.is_floating_point():
            assert torch.equal(value, truth), f"{name}, {case}: {value} for {truth}"
            continue
        same = value.double() == truth.double()  # infinities
        near = (value.double() - truth.double()).abs() <= tolerance * (
            1 + truth.double().abs()
        )
        assert (same | near).all(), f"{name}, {case}: {value} for {truth}"


@pytest.mark.parametrize("name", one_in(SPECS, 2))
def test_statistics_are_those_of_the_whole_matrix_in_float64(name: str) -> None:
    for case, call in calls(SPECS[name], torch.float64, SOME, seed=5):
        assert_same(stats_of(call), recomputed(call), 1e-11, case)


@pytest.mark.parametrize(
    "dtype", one_in([torch.bfloat16, torch.float32, torch.float16], 3), ids=str
)
def test_statistics_of_low_precision_tensors_are_computed_in_float32(
    dtype: torch.dtype,
) -> None:
    for name in (
        "baseline",
        "qwen3",
        "olmo2",
        "gemma2",
        "cosa_logn",
        "capped_sink",
        "softpick",
    ):
        for case, call in calls(SPECS[name], dtype, SOME[:10], seed=6):
            stats = stats_of(call)
            assert stats.max_logit.dtype == torch.float32
            assert_same(stats, recomputed(widened(call)), 2e-5, f"{name}, {case}")


@pytest.mark.parametrize("name", one_in(["baseline", "qwen3", "gemma2", "sink"], 3))
def test_merging_batch_halves_gives_the_statistics_of_the_whole_batch(
    name: str,
) -> None:
    def half(call: Call, i: int) -> Call:
        def part(x: Tensor) -> Tensor:
            return x[i : i + 1] if x.shape[0] == 2 else x

        names = ("q", "k", "v", "mask", "pos_q", "pos_k")
        changed = {n: part(x) for n in names if (x := getattr(call, n)) is not None}
        return dataclasses.replace(call, **changed)

    for case, call in calls(SPECS[name], torch.float64, ALL, seed=8):
        merged = merge(stats_of(half(call, 0)), stats_of(half(call, 1)))
        whole = stats_of(call)
        assert_same(merged, {n: getattr(whole, n) for n in FIELDS}, 1e-12, case)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, -1e4])
@pytest.mark.parametrize("native", ["0", "1"])
def test_entropy_is_accurate_at_any_size_of_the_logits(
    size: float, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", native)
    for dtype in (torch.float32, torch.bfloat16):
        check_entropy(size, dtype)


def check_entropy(size: float, dtype: torch.dtype) -> None:
    # Logits are small integers plus `size` on every key: exact in float32, so only the entropy formula can err.
    spec = AttentionSpec(scale=Fixed(1.0))
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8)
    q[..., 0], q[0, 0, :, 1] = (
        size / 4 if abs(size) > 1 else 0,
        torch.tensor([0.0, 1.0, 3.0]),
    )
    k[..., 0], k[0, 0, :, 1] = 4.0, torch.tensor([0.0, 1.0, 1.0, 2.0, -2.0])
    q, k = q.to(dtype), k.to(dtype)
    stats = attention(q, k, k, spec=spec, causal=False, stats=True)[1]
    shift = 4 * float(q[0, 0, 0, 0])
    z = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)[:, None] * torch.tensor(
        [0.0, 1.0, 1.0, 2.0, -2.0]
    )
    p = z.softmax(-1)
    truth = -(p * p.log()).sum(-1)
    assert stats.max_logit.item() == shift + 6
    assert stats.min_logit.item() == shift - 6
    assert stats.entropy.item() == pytest.approx(truth.mean().item(), rel=1e-6)
    assert stats.entropy_min.item() == pytest.approx(truth.min().item(), rel=1e-6)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_statistics_of_huge_logits_are_finite_and_entropy_is_never_negative(
    size: float,
) -> None:
    for name, spec in SPECS.items():
        for case, call in calls(spec, torch.float32, SOME[:3], seed=9):
            stats = stats_of(dataclasses.replace(call, q=call.q * size))
            for field in FIELDS:
                assert not getattr(stats, field).isnan().any(), (
                    f"{field}, {name}, {case}"
                )
            assert (stats.entropy >= 0).all(), f"{name}, {case}"
            assert (stats.entropy_min >= 0).all(), f"{name}, {case}"


@pytest.mark.parametrize("n_keys", [5, 0])
def test_a_call_whose_rows_all_see_nothing_gives_the_neutral_element(
    n_keys: int,
) -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, n_keys, 8)
    mask = torch.zeros(3, n_keys, dtype=torch.bool)
    for name, spec in SPECS.items():
        if name == "ngpt":
            continue
        params = spec.init_params(4, 2, 8)
        out, stats = attention(q, k, k, spec=spec, params=params, mask=mask, stats=True)
        assert (out == 0).all(), name
        empty = LogitStats.empty(4, 2, like=q)
        for field in FIELDS:
            assert torch.equal(getattr(stats, field), getattr(empty, field)), (
                f"{field}, {name}"
            )


def test_statistics_are_the_same_whatever_kernel_and_dropout() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    found = [
        attention(q, k, v, spec=preset("baseline"), impl=impl, dropout=p, stats=True)[1]
        for impl in ("auto", "sdpa", "chunked")
        for p in (0.0, 0.5)
    ]
    for stats in found[1:]:
        for field in FIELDS:
            assert torch.equal(getattr(stats, field), getattr(found[0], field)), field


def test_statistics_are_detached_and_leave_output_and_gradients_alone() -> None:
    spec = AttentionSpec(cap=Softcap(5.0))
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    plain = attention(q, k, v, spec=spec)
    out, stats = attention(q, k, v, spec=spec, stats=True)
    assert torch.equal(out, plain)
    assert not any(getattr(stats, field).requires_grad for field in FIELDS)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)),
        torch.autograd.grad(plain.sum(), (q, k, v)),
    ):
        assert torch.equal(ours, theirs)


def test_the_capped_maximum_is_the_cap_of_the_maximum_and_never_exceeds_the_cap() -> (
    None
):
    for case, call in calls(SPECS["gemma2"], torch.float64, SOME, seed=10):
        huge = dataclasses.replace(call, q=call.q * 1e3)
        stats = stats_of(huge)
        logits = truth_of(huge).logits
        seen = stats.n_pairs > 0
        assert (stats.capped_max_logit[seen] <= 50).all(), case
        capped = huge.spec.cap.apply(logits.amax((0, 2, 3)))
        assert torch.allclose(stats.capped_max_logit[seen], capped[seen]), case


LONG = [(t, pad) for t in (1, 129, 512) for pad in ("none", "left", "right", "window")]


@pytest.mark.parametrize(
    ("t", "pad"),
    quick([*LONG, (4096, "none"), (4096, "left")], lambda case: case[0] < 512),
)
def test_statistics_at_every_length_are_those_of_the_whole_matrix(
    t: int, pad: str
) -> None:
    q, k = (
        torch.randn(1, 2, t, 4, dtype=torch.float64),
        torch.randn(1, 1, t, 4, dtype=torch.float64),
    )
    keys = torch.arange(t)
    mask = {
        "none": None,
        "left": (keys >= t // 3)[None, None, None],
        "right": (keys < t - t // 3)[None, None, None],
        "window": (keys[:, None] - keys < 64)[None, None],
    }[pad]
    call = Call(
        spec=AttentionSpec(position=Rope()), q=q, k=k, v=k, params={}, mask=mask
    )
    stats, (q, k) = stats_of(call), call.encoded()
    visible = (
        keys[:, None] >= keys if mask is None else (keys[:, None] >= keys) & mask[0, 0]
    )
    dots = (q[0] @ k[0].mT).masked_fill(~visible, 0.0)
    z = (dots / 2).masked_fill(~visible, -torch.inf)
    n, p = visible.sum(-1), torch.nan_to_num(z.softmax(-1))
    rows, free = n > 0, n > 1
    entropy, first = (
        torch.special.entr(p).sum(-1),
        p.gather(-1, visible.int().argmax(-1).expand(2, t)[..., None])[..., 0],
    )
    cosines = dots / q[0].norm(dim=-1)[..., None] / k[0].norm(dim=-1)[:, None]
    relative = entropy[:, free] / n[free].double().log()
    truth = {
        "max_logit": z.amax((1, 2)),
        "entropy": entropy[:, rows].mean(1),
        "normalized_entropy": relative.mean(1)
        if free.any()
        else torch.zeros(2, dtype=z.dtype),
        "softmax_gradient": ((p * (1 - p)).sum(-1) / (1 - 1 / n.double()))[
            :, free
        ].mean(1)
        if free.any()
        else torch.zeros(2, dtype=z.dtype),
        "sink_share": first[:, free].mean(1)
        if free.any()
        else torch.zeros(2, dtype=z.dtype),
        "logit_gap": (z.amax(-1) - z.masked_fill(~visible, 0.0).sum(-1) / n)[:, free]
        .mean(1)
        .nan_to_num(0.0),
        "logit_spread": (z.amax(-1) - z.masked_fill(~visible, 0.0).sum(-1) / n)[
            :, rows
        ].amax(1)
        if rows.any()
        else torch.full((2,), -torch.inf, dtype=z.dtype),
        "qk_frobenius": dots.norm(dim=(1, 2)),
        "cos_max": cosines.masked_fill(~visible, -1.0).amax((1, 2)),
        "cos_mean": cosines.sum((1, 2)) / visible.sum(),
    }
    assert_same(stats, truth, 1e-11, f"{t} {pad}")
