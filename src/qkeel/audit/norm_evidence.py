"""Which norm and which rotation turn the outputs of a projection into the queries or keys that attention received.

A rotation keeps the length of a head's vector, so a norm shows in lengths alone: without one, ‖q‖ is proportional to
‖p‖ at every token, and with an RMS norm before the rotation, ‖q‖ = ‖g ∘ p/rms(p)‖, which has no free number. Where the
norm is known, the rotation is the angle between what it outputs and q.

Shapes: n heads, t tokens, d dimensions of a head.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.audit.one_pass import NormModule
from qkeel.audit.recipes import NormRecipe, Rotation

EITHER_ORDER = "before or after RoPE (equivalent without a gain per dim)"
# Tried where no module says its eps.
_EPS = (0.0, 1e-8, 1e-6, 1e-5, 1e-3)


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
    1 + g, those whose module was called on the projection first."""
    _, heads, _, size = projected.shape
    # As many heads as dimensions leave open which of them a gain belongs to: both are tried.
    shapes: dict[int, dict[tuple[int, int], str]] = {}
    for shape, rows, columns in (
        ("scalar", 1, 1),
        ("per dim", 1, size),
        ("per head", heads, 1),
        ("per head and dim", heads, size),
    ):
        shapes.setdefault(rows * columns, {}).setdefault((rows, columns), shape)
    families: dict[str, list[str]] = {}
    for name, p in parameters.items():
        if p.numel() in shapes and not (name.endswith("bias") or p.is_meta):
            # A ModuleList with one norm for each head is one gain.
            is_of_head = p.numel() == size and heads > 1
            family = re.sub(r"\.\d+\.", ".#.", name) if is_of_head else name
            families.setdefault(family, []).append(name)
    modules = {norm.name: norm for norm in norms}
    candidates = []
    for names in families.values():
        for group in [names] if len(names) == heads else [[name] for name in names]:
            gain = torch.cat([parameters[name].detach().flatten() for name in group])
            bias = None
            biases = [name.removesuffix("weight") + "bias" for name in group]
            if all(name in parameters for name in biases):
                bias = torch.cat([parameters[name].detach() for name in biases])
                bias = bias.double().cpu()
                group = [*group, *biases]
            module = modules.get(group[0].rpartition(".")[0])
            is_called, sees_rotated = (
                (False, None) if module is None else module.called_on(projected)
            )
            for (view, shape), (offset, suffix) in itertools.product(
                shapes[gain.numel()].items(), ((0.0, ""), (1.0, ", 1 + w"))
            ):
                value = f" {float(gain) + offset:.4g}" if shape == "scalar" else ""
                candidates.append(
                    GainCandidate(
                        names=tuple(group),
                        shape=f"{shape}{value}{suffix}",
                        gain=gain.double().cpu().view(view) + offset,
                        bias=None if bias is None else bias.view(view),
                        eps=None if module is None else module.eps,
                        is_called=is_called,
                        sees_rotated=sees_rotated,
                    )
                )
    return sorted(candidates, key=lambda candidate: not candidate.is_called)


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

    Gains whose module was called on the projection are tried first, then no gain, then all other parameters nearby:
    numbers alone would take any parameter of ones for a gain. `tolerance` is the relative error at which vectors count
    as equal, and `rounding` the eps of their dtype.
    """
    # The simplest answer first: whoever scales only fits any norm too, if all tokens have one length.
    linear = _compared(projected, arrived, NormRecipe())
    without_gain = list(_norms(projected, arrived, None))
    if linear.error <= tolerance:
        if any(fit.error <= tolerance for fit in without_gain):
            reason = (
                "all vectors of this batch have the same length; use tokens that differ"
            )
            return unknown_norm(arrived, reason)
        factor = linear.recipe.factor
        return dataclasses.replace(
            linear, recipe=NormRecipe(factor=1.0 if abs(factor - 1) < 1e-3 else factor)
        )
    n_called = sum(candidate.is_called for candidate in candidates)
    gains = [*candidates[:n_called], None, *candidates[n_called:]]
    reason = "its length follows neither its projection nor a norm of a head or layer"
    for gain in gains:
        for fit in without_gain if gain is None else _norms(projected, arrived, gain):
            if fit.error > tolerance:
                continue
            # Under an even gain, an RMS and a layer norm give equal lengths: the right one leaves no more than a
            # rotation. Lengths under a gain that varies before the rotation agree by no accident.
            rotation = rotation_of(fit, tolerance, rounding)
            is_conclusive = (
                fit.recipe.order == "before RoPE" and "dim" in fit.recipe.gain
            )
            is_short = arrived.shape[1] < 3
            if rotation is None or rotation.pairing or is_conclusive or is_short:
                return fit
            reason = "its length is that of a norm, but no rotation of its projection leads to it"
    return unknown_norm(arrived, reason)


def unknown_norm(arrived: Tensor, reason: str) -> NormFit:
    """Returns the answer for q that nothing explains."""
    recipe = NormRecipe(kind="unknown", why=reason)
    # A mistake that runs without an error: a norm over the wrong axis, where the mean square of q is then 1.
    for axis, dim in (("heads", 0), ("tokens", 1)):
        squares = arrived.square().mean(dim)
        if arrived.shape[dim] > 1 and bool(((squares - 1).abs() <= 1e-2).all()):
            recipe = NormRecipe(kind="RMS", over=axis, gain="unknown")
            break
    return NormFit(recipe=recipe, error=math.inf, before=arrived, after=arrived)


def _compared(before: Tensor, after: Tensor, recipe: NormRecipe) -> NormFit:
    """Compares lengths up to one factor, which YaRN or a scale folded into q may add."""
    lengths, expected = after.norm(dim=-1), before.norm(dim=-1)
    # The factor of least squares.
    factor = float((lengths * expected).sum() / expected.square().sum())
    error = float((lengths - factor * expected).abs().max() / lengths.max())
    error = error if factor > 0 and not math.isnan(error) else math.inf
    recipe = dataclasses.replace(recipe, factor=factor)
    return NormFit(recipe=recipe, error=error, before=factor * before, after=after)


def _norms(
    projected: Tensor, arrived: Tensor, candidate: GainCandidate | None
) -> Iterator[NormFit]:
    """Yields each kind of norm with this gain, at the eps and in the order with the rotation that fit best."""
    stated = None if candidate is None else candidate.eps
    for over in ("head", "layer") if len(projected) > 1 else ("head",):
        for kind in ("RMS", "layer"):
            fits: dict[float, NormFit] = {}
            for eps in _EPS if stated is None else (stated,):
                vectors = standardized(projected, kind, over, eps)
                recipe = NormRecipe(kind=kind, over=over, eps=eps)
                orders = (
                    [_without_gain(vectors, arrived, recipe)]
                    if candidate is None
                    else _with_gain(vectors, arrived, recipe, candidate)
                )
                fits[eps] = min(orders, key=lambda fit: fit.error)
            best = min(fits.values(), key=lambda fit: fit.error)
            if stated is None and fits[0.0].error < 4 * best.error:
                # Vectors much larger than eps do not show it.
                best = dataclasses.replace(
                    best, recipe=dataclasses.replace(best.recipe, eps=None)
                )
            yield best


def _without_gain(vectors: Tensor, arrived: Tensor, recipe: NormRecipe) -> NormFit:
    fit = _compared(vectors, arrived, recipe)
    # An L2 norm is an RMS norm times 1/√d: a factor of that size tells it.
    factor, unit = fit.recipe.factor, vectors.shape[-1] ** -0.5
    is_rms = recipe.kind == "RMS"
    is_l2 = is_rms and recipe.over == "head" and abs(factor / unit - 1) < 1e-3
    recipe = dataclasses.replace(
        recipe,
        kind="L2" if is_l2 else recipe.kind,
        gain="none" if is_l2 or abs(factor - 1) < 1e-3 else f"scalar {factor:.4g}",
        order=EITHER_ORDER if is_rms else "order with RoPE unknown",
    )
    return dataclasses.replace(fit, recipe=recipe)


def _with_gain(
    vectors: Tensor, arrived: Tensor, recipe: NormRecipe, candidate: GainCandidate
) -> Iterator[NormFit]:
    """Yields the norm before and after the rotation, as far as its module may have been called there."""
    recipe = dataclasses.replace(
        recipe,
        gain=candidate.shape,
        bias=candidate.bias is not None,
        parameters=candidate.names,
    )
    gain, bias = candidate.gain[:, None], 0.0
    if candidate.bias is not None:
        bias = candidate.bias[:, None]
    # A gain per dimension does not commute with a rotation, so the two orders differ in lengths.
    for is_rotated, order in enumerate(("before RoPE", "after RoPE")):
        if candidate.sees_rotated not in (None, bool(is_rotated)):
            continue
        recipe = dataclasses.replace(recipe, order=order)
        fit = (
            _compared(vectors, (arrived - bias) / gain, recipe)
            if is_rotated
            else _compared(vectors * gain + bias, arrived, recipe)
        )
        # A gain is taken as it is: only a factor of both sides of the rotation, as YaRN's, may be left.
        factor = 1.0 if abs(fit.recipe.factor - 1) < 1e-3 else fit.recipe.factor
        recipe = dataclasses.replace(recipe, factor=factor)
        yield dataclasses.replace(fit, recipe=recipe)


def rotation_of(fit: NormFit, tolerance: float, rounding: float) -> Rotation | None:
    """Returns how a head's vectors are rotated at each position; None if they are not.

    Args:
        fit: the norm that explains the vectors.
        tolerance: the relative error at which two vectors count as equal.
        rounding: the eps of the dtype of the vectors.
    """
    before, after = fit.before, fit.after
    size, scale = after.shape[-1], float(after.abs().max())
    if after.shape[1] < 3:
        return Rotation(dims=0, of=size, why="the batch has fewer than three tokens")
    # Some rotate a part of the head only, so the dimensions that never change are left out.
    change = (after - before).abs().amax((0, 1))
    # The slowest pairs turn by little within a short batch: a hundredth of the tolerance still shows them.
    least = max(min(tolerance / 100, 1e-2), 8 * rounding) * scale
    moving = (change > least).nonzero().flatten()
    count = len(moving)
    if math.isinf(fit.error) or not count:
        return None
    if count % 2:
        reason = f"the {count} dimensions that change do not form pairs"
        return Rotation(dims=count, of=size, why=reason)
    x, y = before[..., moving], after[..., moving]
    x_halves, y_halves = x.chunk(2, -1), y.chunk(2, -1)
    x_neighbours, y_neighbours = (z.unflatten(-1, (-1, 2)).unbind(-1) for z in (x, y))
    for pairing, (a, b), (c, d) in (
        ("half", x_halves, y_halves),
        ("interleaved", x_neighbours, y_neighbours),
        # DeepSeek's weights hold interleaved pairs, which its code puts into halves.
        ("half", x_neighbours, y_halves),
    ):
        # The angle [t pairs] by which all heads turn together at each token.
        angle = torch.atan2((a * d - b * c).sum(0), (a * c + b * d).sum(0))
        cos, sin = angle.cos(), angle.sin()
        error = torch.cat([a * cos - b * sin - c, a * sin + b * cos - d]).abs().max()
        if float(error) <= 10 * tolerance * scale:
            base, reason = _base(angle)
            shown = "one pair" if count == 2 else pairing
            return Rotation(dims=count, of=size, pairing=shown, base=base, why=reason)  # type: ignore[arg-type]
    return Rotation(dims=count, of=size, why="it is no rotation of pairs")


def _base(angles: Tensor) -> tuple[float | None, str]:
    """Estimates the base of frequencies base^(-2i/dims) from angles [t pairs], or returns None and the reason."""
    pairs = angles.shape[1]
    if pairs == 1:
        return None, "one pair turns"
    # Angles are known up to whole turns, so their differences are brought back to half a turn on either side.
    steps = torch.remainder(angles.diff(dim=0) + math.pi, 2 * math.pi) - math.pi
    # Positions of packed documents start again: only tokens at which the first pair turns as it mostly does count.
    even = (steps[:, 0] - steps[:, 0].median()).abs() < 0.02
    speed = steps[even].mean(0).abs()
    visible = (speed * int(even.sum()) > 1e-4).nonzero().flatten()
    if len(visible) < 2 or int(visible[0]) != 0:
        return None, "positions are not 0, 1, 2, …, or too few to see the rotation"
    logs = speed[visible].log()
    # log speed = -i · 2 ln(base) / dims: a line through the first and last visible pair.
    slope = float((logs[-1] - logs[0]) / visible[-1])
    deviation = (logs - logs[0] - slope * visible).abs().max()
    # The first pair turns by 1 per position, whatever the base.
    if float(deviation) > 0.02 or abs(float(logs[0])) > 0.02:
        return None, "the frequencies do not fit a single base"
    return float(f"{math.exp(-slope * pairs):.3g}"), ""
