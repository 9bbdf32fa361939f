"""Compares each family of Triton kernels with torch on its first use on a device.

These kernels have not been run on every kind of GPU. Before a family is used on a device, it therefore computes a small
test case there that torch computes as well. If the numbers differ by more than rounding, or if Triton fails, one
warning reports it and torch is used from then on.

Shapes: b batch, h query heads, g key heads, t queries, s keys, d head_dim; n heads of r rows and m columns of a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from qkeel.functional.norms import rms_norm
from qkeel.functional.rope import Pairing, rotate
from qkeel.functional.statistics import ROW_FIELDS, KernelRows
from qkeel.kernels.native.operators import AdamOptions, AdamTensors
from qkeel.kernels.triton import adamw as adam_lines
from qkeel.kernels.triton import heads, norm_rope, row_fields, statistics

Pairs = Iterator[tuple[Tensor, Tensor]]  # a kernel's result and torch's
_RMS = 1  # number of the norm's kind, as in `kernels.encode`
_EPS = 1e-6
_SCALE, _CAP = 0.3, 5.0


def difference(family: str, device: torch.device) -> float:
    """Returns how much a family's kernels differ from torch on a device, in units of the expected rounding error; at
    most 1 is acceptable.

    The largest difference is divided by the largest number that torch computed and by the expected relative rounding.
    The result is NaN or infinite if only one of the results is not finite. The function waits for the device.

    A separate thread computes the case, so that the caller's autocast, gradient mode, inference mode, default device
    and modes do not affect it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_difference, family, device).result()


def _difference(family: str, device: torch.device) -> float:
    case, worst = CASES[family], torch.zeros((), dtype=torch.float64)
    # In tests, CPU tensors run through Triton's interpreter, which computes products of bfloat16 incorrectly.
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        for own, theirs in case(_Drawn(device, dtype)):
            size = theirs.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-30)
            off = torch.where(own == theirs, 0.0, (own.detach().double() - theirs.detach().double()).abs())
            # torch.maximum propagates NaN.
            worst = torch.maximum(worst, (off.max() / size / _ROUNDING[own.dtype]).cpu())
    return float(worst)


# Expected relative rounding of another summation order: ten times what the interpreter shows in float32, and two steps
# of 2^-8 in bfloat16.
_ROUNDING = MappingProxyType({torch.float32: 2e-5, torch.float64: 2e-5, torch.bfloat16: 2**-7})


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """Draws the tensors of a case, the same on every device."""

    device: torch.device
    dtype: torch.dtype
    drawn: torch.Generator = dataclasses.field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.drawn, dtype=torch.float32, device="cpu")
        return x.to(self.device, dtype or self.dtype)


def _norm_and_rope(draw: _Drawn) -> Pairs:
    """Norm and rotation of one tensor and of two, with half and interleaved pairs, forward and backward."""
    angles = draw(1, 1, 5, 16, dtype=torch.float32)
    table = angles.cos(), angles.sin()
    ways: tuple[tuple[int, Pairing], ...] = ((1, "half"), (2, "interleaved"))
    for step, pairing in ways:
        q, k, gain = (x.requires_grad_() for x in (draw(2, 3, 5, 40), draw(2, 1, 5, 40), draw(40)))
        above = draw(2, 3, 5, 40), draw(2, 1, 5, 40)
        expected = [rotate((rms_norm(x.float(), _EPS) * gain.float()), *table, pairing) for x in (q, k)]
        alone = [norm_rope.norm_rope(x, gain, table, _RMS, _EPS, True, step) for x in (q, k)]
        both = norm_rope.norm_rope_two(q, k, (gain, gain), table, (_RMS, _RMS), _EPS, (True, True), step)
        slopes = torch.autograd.grad(expected, [q, k, gain], [x.float() for x in above])
        for own in (alone, both):
            found = [*own, *torch.autograd.grad(own, [q, k, gain], above)]
            yield from zip(found, [x.to(own[0].dtype) for x in (*expected, *slopes)])


def _logits(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns causal logits [b h t s] in float64, -inf where hidden, and the visible pairs [t s]; queries come last."""
    (h, t), (g, s) = q.shape[1:3], k.shape[1:3]
    z = _SCALE * q.double() @ k.double().repeat_interleave(h // g, 1).mT
    visible = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    return z.masked_fill(~visible, -torch.inf), visible


def _rows(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Returns each row's largest and smallest logit, and the lse and entropy of its capped logits, in float32."""
    z, visible = _logits(q, k)
    capped = (_CAP * torch.tanh(z / _CAP)).masked_fill(~visible, -torch.inf)
    lse = capped.logsumexp(-1)
    entropy = lse - (capped.softmax(-1) * capped.masked_fill(~visible, 0.0)).sum(-1)
    smallest = z.masked_fill(~visible, torch.inf).amin(-1)
    return tuple(x.float() for x in (z.amax(-1), smallest, lse, entropy))


def _statistics(draw: _Drawn) -> Pairs:
    """Statistics of all rows, and statistics of heads computed from them."""
    q, k = draw(2, 4, 70, 24), draw(2, 2, 90, 24)
    expected = _rows(q, k)
    found = statistics.row_statistics(q, k, _SCALE, causal=True, cap=_CAP)
    yield from zip(found, expected)
    largest, _, lse, entropy = expected
    of_heads = statistics.head_numbers(KernelRows(largest, lse, entropy), None)
    yield of_heads.largest, largest.amax((0, 2))
    yield of_heads.entropy, entropy.mean((0, 2))
    yield of_heads.least_entropy, entropy.amin((0, 2))
    yield of_heads.n.double(), torch.full_like(of_heads.n, 2 * 70).double()


def _all_statistics(draw: _Drawn) -> Pairs:
    """All statistics of rows, also with keys that a mask hides and with a scale that differs by row."""
    for masked in (False, True):
        q, k = draw(2, 4, 70, 24), draw(2, 2, 90, 24)
        keys, factors = draw(2, 90) > 0, draw(2, 1, 70, 1, dtype=torch.float32)
        z, visible = _logits(q, k)
        products = z / _SCALE
        cap, scale, mask = (_CAP, factors, keys) if masked else (None, _SCALE, None)
        if masked:
            z, visible = products * factors.double(), visible & keys[:, None, None]
        seen = visible.expand(z.shape)
        z, products = z.masked_fill(~seen, 0.0), products.masked_fill(~seen, 0.0)
        capped = (_CAP * torch.tanh(z / _CAP) if masked else z).masked_fill(~seen, -torch.inf)
        weights = capped.softmax(-1).nan_to_num(0.0)
        n, first = seen.sum(-1), seen.to(torch.uint8).argmax(-1, keepdim=True)
        norms = k.double().norm(dim=-1)
        q_norm = q.double().norm(dim=-1)
        angles = products / q_norm[..., None] / norms.repeat_interleave(2, 1)[:, :, None]
        some = n > 0
        expected = {
            "max_logit": z.masked_fill(~seen, -torch.inf).amax(-1),
            "min_logit": z.masked_fill(~seen, torch.inf).amin(-1),
            "capped_max": capped.amax(-1),
            "total": z.sum(-1),
            "above": ((z > 1.0) & seen).sum(-1).double(),
            "entropy": -torch.special.xlogy(weights, weights).sum(-1),
            "first_weight": weights.gather(-1, first)[..., 0],
            "product_norm": products.square().sum(-1).sqrt(),
            "cos_max": angles.masked_fill(~seen, -torch.inf).amax(-1),
            "cos_total": angles.sum(-1),
            "query_norm": q_norm,
        }
        fields, counts, own = row_fields.row_fields(q, k, scale, 1.0, causal=True, cap=cap, keys=mask)
        for name, found in zip(ROW_FIELDS, fields, strict=True):
            if name != "above":  # a logit next to the threshold may be rounded to either side
                yield found.masked_fill(~some, 0.0), expected[name].masked_fill(~some, 0.0).float()
        yield counts.double(), n.expand(counts.shape).double()
        yield own, norms.float()


def _sampled(draw: _Drawn) -> Pairs:
    """Extremes, bounds from logsumexps, and statistics of heads from a sample of rows."""
    q, k, strata = draw(2, 4, 72, 24), draw(2, 2, 90, 24), 6
    largest, smallest, lse, entropy = _rows(q, k)
    tops, lows = statistics.extremes(q, k, _SCALE, causal=True)
    yield tops.amax((0, 2)), largest.amax((0, 2))
    yield lows.amin((0, 2)), smallest.amin((0, 2))
    visible = torch.arange(90 - 72 + 1, 91, device=q.device).float()
    expected = torch.stack([(lse - visible.log()).amax((0, 2)), lse.amax((0, 2))])
    yield statistics.bracket_of(lse, 90, causal=True), expected
    rows, picked = statistics.rows_of(q, k, _SCALE, causal=True, cap=_CAP, sample=(strata, 1))
    places = picked.long()[:, None].expand(-1, 4, -1)
    yield rows.entropy, entropy.gather(2, places)
    of_heads = statistics.sampled_head_numbers((tops, lows), (rows.lse, rows.entropy, picked), 72, 4.5, None)
    yield of_heads.largest, largest.amax((0, 2))
    yield of_heads.entropy, entropy.gather(2, places).mean((0, 2))  # all strata have the same size


def _heads(draw: _Drawn) -> Pairs:
    """Norms, Gram matrices, a copy, an interpolation and a scaling of the heads of two weights."""
    for shapes in (((3, 16, 80), (2, 16, 96)), ((3, 5, 7), (2, 5, 9))):
        views = [draw(*shape) for shape in shapes]
        table, old = heads.HeadTable(views), [view.double() for view in views]
        copy, norms = table.copy_and_norms()
        yield norms, torch.cat([view.flatten(1).norm(dim=1) for view in old]).float()
        grams = torch.cat([view @ view.mT for view in old]).float()
        yield table.grams(0, 5, shapes[0][1]), grams
        new = [draw(*shape) for shape in shapes]
        for view, other in zip(views, new):
            view.copy_(other)
        factors = torch.tensor([0.25, 1.0, 0.75, 0.0, 1.5], device=draw.device)
        table.move(copy, factors, None)
        table.scale(factors)
        for view, a, b, f in zip(views, old, new, factors.double().split([3, 2])):
            f = f[:, None, None]
            yield view, (f * (a + f * (b.double() - a))).to(view.dtype)


@torch.no_grad()
def _adamw(draw: _Drawn) -> Pairs:
    """Three steps of torch's fused AdamW with rates of 1 (0 in every third line), and the resulting sums of squares.

    Lines are the rows of the first weight and the columns of the second; both end inside a tile.
    """
    if draw.dtype is not torch.float32:
        return
    shapes, axes = ((7, 600), (40, 70)), (0, 1)
    weights, *gradients = ([draw(*shape) for shape in shapes] for _ in range(4))
    rates = [(torch.arange(s[a], device=draw.device) % 3 > 0).float() for s, a in zip(shapes, axes)]
    means, variances, their_means, their_variances = ([torch.zeros_like(w) for w in weights] for _ in range(4))
    steps, their_steps = ([w.new_zeros(()) for w in weights] for _ in range(2))
    squares = [torch.zeros(len(rate), dtype=torch.float64, device=draw.device) for rate in rates]
    own, theirs = ([w.clone() for w in weights] for _ in range(2))
    t = AdamTensors(
        weights=own, gradients=own, means=means, variances=variances, maxima=[], steps=steps, rates=rates,
        squares=squares, axes=axes,
    )  # fmt: skip
    o = AdamOptions(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, decoupled=True, maximize=False)
    for given in gradients:
        adam_lines.adam_lines(dataclasses.replace(t, gradients=given), o)
        adamw(
            theirs, given, their_means, their_variances, [], their_steps, fused=True, amsgrad=False, maximize=False,
            lr=o.lr, beta1=o.beta1, beta2=o.beta2, weight_decay=o.decay, eps=o.eps,
        )  # fmt: skip
    for new, torchs, before, rate, sums, axis in zip(own, theirs, weights, rates, squares, axes):
        stepped = rate.unsqueeze(1 - axis) > 0
        yield new, torch.where(stepped, torchs, before)
        yield sums, new.double().square().sum(1 - axis)


CASES: Mapping[str, Callable[[_Drawn], Pairs]] = MappingProxyType(
    {
        "norm and rotation": _norm_and_rope,
        "statistics": _statistics,
        "all statistics": _all_statistics,
        "sampled statistics": _sampled,
        "heads of weights": _heads,
        "step of AdamW": _adamw,
    }
)
