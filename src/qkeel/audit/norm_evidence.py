"""Which norm and which rotation turn the outputs of a projection into the queries or keys that attention received.

A rotation keeps the length of a head's vector, so a norm shows in lengths alone: without one, ‖q‖ is proportional to
‖p‖ at every token, and with an RMS norm before the rotation, ‖q‖ = ‖g ∘ p/rms(p)‖, which has no free number. Where the
norm is known, the rotation is the angle between what it outputs and q.

Shapes: n heads, t tokens, d dimensions of a head.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.audit.one_pass import NormModule
from qkeel.audit.recipes import NormRecipe, Rotation

EITHER_ORDER = "before or after RoPE (equivalent without a gain per dim)"
_EPS = (0.0, 1e-8, 1e-6, 1e-5, 1e-3)  # tried where no module says its eps


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GainCandidate:
    """Parameters near a site that may be the gain (and bias) of its norm, as [n d], [n 1], [1 d] or [1 1].

    `is_called` says whether their module was called on this projection, and `sees_rotated` whether it was called after
    the rotation; None where no module shows it.
    """

    names: tuple[str, ...]
    shape: str
    gain: Tensor
    bias: Tensor | None = None
    eps: float | None = None
    is_called: bool = False
    sees_rotated: bool | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormFit:
    """A norm that explains q, with the vectors [n t d] before and after the rotation; `error` is relative."""

    recipe: NormRecipe
    error: float
    before: Tensor
    after: Tensor


def gain_candidates(
    parameters: Mapping[str, Tensor], norms: Sequence[NormModule], projected: Tensor
) -> list[GainCandidate]:
    """Returns the parameters near a site that may be the gain of a norm of the projection [b n t d], each as g and as
    1 + g."""
    _, heads, _, size = projected.shape
    families: dict[str, list[str]] = {}
    for name, p in parameters.items():
        if (
            not name.endswith("bias")
            and not p.is_meta
            and p.numel() in (1, heads, size, heads * size)
        ):
            # A ModuleList with one norm for each head is one gain.
            is_of_head = p.numel() == size and heads > 1
            families.setdefault(
                re.sub(r"\.\d+\.", ".#.", name) if is_of_head else name, []
            ).append(name)
    modules = {norm.name: norm for norm in norms}
    candidates = []
    for names in families.values():
        groups = [names] if len(names) == heads else [[name] for name in names]
        for group in groups:
            gain = torch.stack(
                [parameters[name].detach().double().cpu().flatten() for name in group]
            )
            shape = {
                1: "scalar",
                size: "per dim",
                heads: "per head",
                heads * size: "per head and dim",
            }[gain.numel()]
            view = {
                "scalar": (1, 1),
                "per dim": (1, size),
                "per head": (heads, 1),
                "per head and dim": (heads, size),
            }
            gain = gain.view(view[shape])
            biases = [
                name.removesuffix("weight") + "bias"
                for name in group
                if name.endswith("weight")
            ]
            bias = None
            if biases and all(name in parameters for name in biases):
                bias = torch.cat(
                    [
                        parameters[name].detach().double().cpu().flatten()
                        for name in biases
                    ]
                )
                bias = bias.view(gain.shape)
            owner = modules.get(group[0].rpartition(".")[0])
            is_called, sees_rotated = (
                (False, None) if owner is None else owner.called_on(projected)
            )
            for offset, suffix in ((0.0, ""), (1.0, ", 1 + w")):
                value = f" {float(gain) + offset:.4g}" if shape == "scalar" else ""
                candidate = GainCandidate(
                    names=(*group, *(biases if bias is not None else ())),
                    shape=f"{shape}{value}{suffix}",
                    gain=gain + offset,
                    bias=bias,
                    eps=None if owner is None else owner.eps,
                    is_called=is_called,
                    sees_rotated=sees_rotated,
                )
                candidates.append(candidate)
    return candidates


def standardized(projected: Tensor, kind: str, over: str, eps: float) -> Tensor:
    """Returns x / √(mean x² + ε) of each head, or of all heads together; a layer norm first subtracts the mean."""
    dims = (0, 2) if over == "layer" else (2,)
    x = projected - projected.mean(dims, keepdim=True) if kind == "layer" else projected
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


def fit_norm(
    projected: Tensor,
    arrived: Tensor,
    candidates: Sequence[GainCandidate],
    tolerance: float,
    rounding: float,
) -> NormFit:
    """Returns the norm between p and q, `projected` and `arrived` [n t d]; its kind is "unknown" if none explains q.

    Gains whose module was called on the projection are tried first, then no gain, then all other parameters nearby.
    `tolerance` is the relative error at which vectors count as equal, and `rounding` the eps of their dtype.
    """
    linear = _fit(projected, arrived, NormRecipe())
    without_gain = list(_norms(projected, arrived, None))
    best = min(without_gain, key=lambda fit: fit.error)
    if linear.error <= tolerance and best.error <= tolerance:
        return unknown_norm(
            arrived,
            "all vectors of this batch have the same length; use tokens that differ",
        )
    if linear.error <= tolerance:
        factor = linear.recipe.factor
        return dataclasses.replace(
            linear, recipe=NormRecipe(factor=1.0 if abs(factor - 1) < 1e-3 else factor)
        )
    called = [
        fit
        for gain in candidates
        if gain.is_called
        for fit in _norms(projected, arrived, gain)
    ]
    nearby = [
        fit
        for gain in candidates
        if not gain.is_called
        for fit in _norms(projected, arrived, gain)
    ]
    for fits in (called, without_gain, nearby):
        fitting = [fit for fit in fits if fit.error <= tolerance]
        # Under an even gain, an RMS and a layer norm give equal lengths: the right one leaves no more than a rotation.
        for fit in fitting:
            rotation = rotation_of(fit, tolerance, rounding)
            if rotation is None or rotation.pairing:
                return fit
        if fitting:
            return _of_length_alone(fitting[0], tolerance)
    return unknown_norm(
        arrived,
        "its length follows neither its projection nor a norm of a head or layer",
    )


def _of_length_alone(fit: NormFit, tolerance: float) -> NormFit:
    """Returns the answer where lengths fit, and what is left is no rotation or the batch is too short to show it.

    Lengths under a gain that varies before the rotation agree by no accident. Otherwise an RMS norm and a layer norm
    give vectors of the same length, but only those of a layer norm have a mean of 0.
    """
    recipe = fit.recipe
    is_conclusive = recipe.order == "before RoPE" and "dim" in recipe.gain
    if is_conclusive or fit.after.shape[1] < 3:
        return fit
    if float(fit.after.mean(-1).abs().max()) <= 10 * tolerance * float(
        fit.after.abs().max()
    ):
        return dataclasses.replace(
            fit, recipe=dataclasses.replace(recipe, kind="layer")
        )
    return unknown_norm(
        fit.after,
        "its length is that of a norm, but its direction follows no rotation of its projection",
    )


def unknown_norm(arrived: Tensor, reason: str) -> NormFit:
    """Returns the answer for q that nothing explains."""
    # A mistake that runs without an error: a norm over the wrong axis, where the mean square of q is then 1.
    for axis, dim in (("heads", 0), ("tokens", 1)):
        if arrived.shape[dim] > 1 and bool(
            ((arrived.square().mean(dim) - 1).abs() <= 1e-2).all()
        ):
            recipe = NormRecipe(kind="RMS", over=axis, gain="unknown")
            return NormFit(recipe=recipe, error=math.inf, before=arrived, after=arrived)
    recipe = NormRecipe(kind="unknown", why=reason)
    return NormFit(recipe=recipe, error=math.inf, before=arrived, after=arrived)


def _fit(before: Tensor, after: Tensor, recipe: NormRecipe) -> NormFit:
    """Compares lengths up to one factor, which YaRN or a scale folded into q may add."""
    lengths, expected = after.norm(dim=-1), before.norm(dim=-1)
    factor = float(
        (lengths * expected).sum() / expected.square().sum().clamp_min(1e-30)
    )
    error = float(
        (lengths - factor * expected).abs().max() / lengths.max().clamp_min(1e-30)
    )
    error = math.inf if math.isnan(error) or factor <= 0 else error
    recipe = dataclasses.replace(recipe, factor=factor)
    return NormFit(recipe=recipe, error=error, before=factor * before, after=after)


def _norms(
    projected: Tensor, arrived: Tensor, candidate: GainCandidate | None
) -> Iterable[NormFit]:
    """Yields the best eps of each kind of norm with this gain."""
    alone = len(projected) == 1
    for over in ("head",) if alone else ("head", "layer"):
        for kind in ("RMS", "layer"):
            fits = []
            for eps in (
                _EPS if candidate is None or candidate.eps is None else (candidate.eps,)
            ):
                vectors = standardized(projected, kind, over, eps)
                fits += [
                    (eps, fit)
                    for fit in _orders(vectors, arrived, kind, over, candidate)
                ]
            eps, best = min(fits, key=lambda pair: pair[1].error)
            if candidate is None or candidate.eps is None:
                # Vectors much larger than eps do not show it.
                unseen = (
                    min(fit.error for eps, fit in fits if eps == 0) < 4 * best.error
                )
                eps = None if unseen else eps
            yield dataclasses.replace(
                best, recipe=dataclasses.replace(best.recipe, eps=eps)
            )


def _orders(
    vectors: Tensor,
    arrived: Tensor,
    kind: str,
    over: str,
    candidate: GainCandidate | None,
) -> Iterable[NormFit]:
    """Yields the norm before and after the rotation."""
    if candidate is None:
        fit = _fit(vectors, arrived, NormRecipe(kind=kind, over=over))
        factor, root = fit.recipe.factor, vectors.shape[-1] ** -0.5
        order = EITHER_ORDER if kind == "RMS" else "order with RoPE unknown"
        is_l2 = kind == "RMS" and over == "head" and abs(factor / root - 1) < 1e-3
        gain = "none" if is_l2 or abs(factor - 1) < 1e-3 else f"scalar {factor:.4g}"
        recipe = NormRecipe(
            kind="L2" if is_l2 else kind, over=over, gain=gain, order=order
        )
        yield dataclasses.replace(fit, recipe=recipe)
        return
    named = NormRecipe(
        kind=kind,
        over=over,
        gain=candidate.shape,
        bias=candidate.bias is not None,
        parameters=candidate.names,
    )
    gain, bias = (
        candidate.gain[:, None],
        0.0 if candidate.bias is None else candidate.bias[:, None],
    )
    divided = (arrived - bias) / torch.where(gain == 0, torch.inf, gain)
    for order, before, after in (
        ("before RoPE", vectors * gain + bias, arrived),
        ("after RoPE", vectors, divided),
    ):
        rotated = order == "after RoPE"
        if candidate.sees_rotated in (None, rotated):
            fit = _fit(before, after, dataclasses.replace(named, order=order))
            # A gain is taken as it is: only a factor of both sides of the rotation, as YaRN's, may be left.
            factor = 1.0 if abs(fit.recipe.factor - 1) < 1e-3 else fit.recipe.factor
            yield dataclasses.replace(
                fit, recipe=dataclasses.replace(fit.recipe, factor=factor)
            )


def rotation_of(fit: NormFit, tolerance: float, rounding: float) -> Rotation | None:
    """Returns how a head's vectors are rotated at each position; None if they are not.

    Args:
        fit: the norm that explains the vectors.
        tolerance: the relative error at which two vectors count as equal.
        rounding: the eps of the dtype of the vectors.
    """
    before, after = fit.before, fit.after
    size = after.shape[-1]
    if after.shape[1] < 3:
        return Rotation(dims=0, of=size, why="the batch has fewer than three tokens")
    if math.isinf(fit.error):
        return None
    scale = float(after.abs().max())
    change = (after - before).abs().amax((0, 1))
    moving = (
        (change > max(min(tolerance / 100, 1e-2), 8 * rounding) * scale)
        .nonzero()
        .flatten()
    )
    count = len(moving)
    if count == 0:
        return None
    if count % 2:
        return Rotation(
            dims=count,
            of=size,
            why=f"the {count} dimensions that change do not form pairs",
        )
    x, y = before[..., moving], after[..., moving]
    half = slice(None, count // 2), slice(count // 2, None)
    interleaved = slice(None, None, 2), slice(1, None, 2)
    # DeepSeek's weights hold interleaved pairs, which its code puts into halves.
    pairings = (
        ("half", half, half),
        ("interleaved", interleaved, interleaved),
        ("half", interleaved, half),
    )
    angles, fitting = None, []
    for name, (first, second), (third, fourth) in pairings:
        pair, turned = (x[..., first], x[..., second]), (y[..., third], y[..., fourth])
        angle = _angles(pair, turned)
        error = max(
            float((a - b).abs().max()) for a, b in zip(_turned(pair, angle), turned)
        )
        if error <= 10 * tolerance * scale:
            fitting.append(name)
            angles = angle if angles is None else angles
    if angles is None:
        return Rotation(dims=count, of=size, why="it is no rotation of pairs")
    base, reason = _base(angles)
    pairing = "one pair" if count == 2 else fitting[0]
    return Rotation(dims=count, of=size, pairing=pairing, base=base, why=reason)  # type: ignore[arg-type]


Pair = tuple[Tensor, Tensor]


def _angles(pair: Pair, turned: Pair) -> Tensor:
    """Returns the angle [t pairs] by which all heads turn together at each token."""
    (a, b), (c, d) = pair, turned
    return torch.atan2((a * d - b * c).sum(0), (a * c + b * d).sum(0))


def _turned(pair: Pair, angle: Tensor) -> Pair:
    (a, b), cos, sin = pair, angle.cos(), angle.sin()
    return a * cos - b * sin, a * sin + b * cos


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def _base(angles: Tensor) -> tuple[float | None, str]:
    """Estimates the base of frequencies base^(-2i/dims) from angles [t pairs], or returns None and the reason.

    Positions of packed documents start again, so the longest stretch of tokens in which the first pair turns evenly is
    read.
    """
    pairs = angles.shape[1]
    if pairs == 1:
        return None, "one pair turns"
    steps = _wrapped(angles[1:] - angles[:-1])
    even = (steps[1:, 0] - steps[:-1, 0]).abs() < 0.02
    first = longest = 0
    start = 0
    for end, is_even in enumerate([*even.tolist(), False]):
        if not is_even:
            if end - start > longest:
                first, longest = start, end - start
            start = end + 1
    last = first + longest + 1
    distance = last - first
    near = steps[first:last].median(0).values.abs()
    far = _wrapped(angles[last] - angles[first]).abs() / distance
    speed = torch.where(near * distance < 2, far, near)
    good = (speed * distance > 1e-4).nonzero().flatten()
    if len(good) < 2 or int(good[0]) != 0:
        return None, "positions are not 0, 1, 2, …" if len(
            good
        ) else "too slow for so few tokens"
    logs = speed[good].log()
    slope = float((logs[-1] - logs[0]) / good[-1])
    if (
        bool(((logs - logs[0] - slope * good).abs() > 0.02).any())
        or abs(float(logs[0])) > 0.02
    ):
        return None, "the frequencies do not fit a single base"
    return float(f"{math.exp(-slope * pairs):.3g}"), ""
