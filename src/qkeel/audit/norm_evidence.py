"""Which norm and which rotation turn the outputs of a projection into the queries or keys that attention received.

The search for the site has found the gain of a norm in the graph, and lengths confirm it, as a rotation keeps the length
of a head's vector: without a norm, ‖q‖ is proportional to ‖p‖ at every token, and with an RMS norm before the rotation,
‖q‖ = ‖g ∘ p/rms(p)‖, which has no free number. Where the norm is known, the rotation is the angle between what it
outputs and q.

Shapes: n heads, t tokens, d dimensions of a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel.audit.one_pass import NormModule
from qkeel.audit.recipes import NormRecipe, Rotation
from qkeel.sites.site import NormGain

EITHER_ORDER = "before or after RoPE (equivalent without a gain per dim)"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadGains:
    """The gain of each head's norm, with the 1 of 1 + w, and its bias, as [n 1 d], [n 1 1], [1 1 d] or [1 1 1].

    `recipe` describes them. `sees_rotated` says whether their module was called after the rotation, and `eps` is the
    module's; None where no module shows it.
    """

    recipe: NormRecipe
    gain: Tensor
    bias: Tensor | float = 0.0
    eps: float | None = None
    sees_rotated: bool | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormFit:
    """A norm that explains q, with the vectors [n t d] before and after the rotation; `error` is relative."""

    recipe: NormRecipe
    error: float
    before: Tensor
    after: Tensor


def head_gains(
    gains: Sequence[NormGain],
    model: nn.Module,
    scope: str,
    norms: Mapping[str, NormModule],
    projected: Tensor,
) -> HeadGains | None:
    """Returns the gains of a projection [b n t d]; None if its norms have none, or not as many numbers for each head.

    Args:
        gains: the norms that the search has found behind the projection: one, or one for each head.
        model: the model.
        scope: the name of the module around the site, without which the recipe names parameters.
        norms: the modules of norms in there, by name.
        projected: what the projection outputs.
    """
    _, heads, _, size = projected.shape
    rows, biases = list[Tensor](), list[Tensor]()
    names, bias_names = list[str](), list[str]()
    for norm in sorted(gains, key=lambda norm: norm.heads):
        for name, index, entries, used in (
            (norm.parameter, norm.index, rows, names),
            (norm.bias, norm.bias_index, biases, bias_names),
        ):
            if name is not None and index is not None:
                parameter = model.get_parameter(name).detach().double().cpu()
                entries.append(parameter.flatten()[index])
                used.append(name.removeprefix(f"{scope}."))
    shapes = {
        (heads, size): "per head and dim",
        (heads, 1): "per head",
        (1, size): "per dim",
        (1, 1): "scalar",
    }
    if not rows or len({row.shape[1] for row in (*rows, *biases)}) > 1:
        return None
    offset, gain = gains[0].offset, torch.cat(rows)
    shape = shapes.get((gain.shape[0], gain.shape[1]))
    if shape is None:
        return None
    gain = gain[:, None] + offset
    value = f" {float(gain):.4g}" if shape == "scalar" else ""
    module = norms.get(names[0].rpartition(".")[0])
    return HeadGains(
        recipe=NormRecipe(
            gain=f"{shape}{value}{', 1 + w' if offset else ''}",
            bias=bool(biases),
            parameters=(*names, *bias_names),
        ),
        gain=gain,
        bias=torch.cat(biases)[:, None] if biases else 0.0,
        eps=None if module is None else module.eps,
        sees_rotated=None if module is None else module.called_on(projected)[1],
    )


def fit_norm(
    projected: Tensor,
    arrived: Tensor,
    gains: HeadGains | None,
    tolerance: float,
    rounding: float,
) -> NormFit:
    """Returns the norm between p and q, `projected` and `arrived` [n t d]; its kind is "unknown" if none explains q.

    `tolerance` is the relative error at which vectors count as equal, and `rounding` the eps of their dtype.
    """
    fits = [fit for fit in _norms(projected, arrived, gains) if fit.error <= tolerance]
    linear = _compared(projected, arrived, NormRecipe())
    if linear.error <= tolerance:
        # Whoever scales only fits any norm too, if all tokens have one length.
        if fits:
            reason = (
                "all vectors of this batch have the same length; use tokens that differ"
            )
            return unknown_norm(arrived, reason)
        factor = linear.recipe.factor
        recipe = NormRecipe(factor=1.0 if abs(factor - 1) < 1e-3 else factor)
        return dataclasses.replace(linear, recipe=recipe)
    for fit in fits:
        # Under an even gain, an RMS and a layer norm give equal lengths: the right one leaves no more than a
        # rotation. Lengths under a gain that varies before the rotation agree by no accident.
        rotation = rotation_of(fit, tolerance, rounding)
        is_conclusive = fit.recipe.order == "before RoPE" and "dim" in fit.recipe.gain
        is_short = arrived.shape[1] < 3
        if rotation is None or rotation.pairing or is_conclusive or is_short:
            return fit
    reason = "its length follows neither its projection nor a norm of a head or layer"
    if fits:
        reason = "its length is that of a norm, but no rotation of its projection leads to it"
    return unknown_norm(arrived, reason)


def unknown_norm(arrived: Tensor, reason: str) -> NormFit:
    """Returns the answer for q that nothing explains."""
    recipe = NormRecipe(kind="unknown", why=reason)
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
    projected: Tensor, arrived: Tensor, gains: HeadGains | None
) -> Iterator[NormFit]:
    """Yields each kind of norm with these gains, in the order with the rotation that fits best.

    An eps that no module states is unknown; the fit then takes it to be small beside the vectors.
    """
    eps = None if gains is None else gains.eps
    for over in ("head", "layer") if len(projected) > 1 else ("head",):
        for kind in ("RMS", "layer"):
            dims = (0, 2) if over == "layer" else (2,)
            x = projected
            if kind == "layer":
                x = projected - projected.mean(dims, keepdim=True)
            square = x.square().mean(dims, keepdim=True)
            # A token whose vector is zero stays zero, as with any eps.
            normed = x / (square + (eps or 0.0)).clamp_min(1e-300).sqrt()
            recipe = NormRecipe(kind=kind, over=over, eps=eps)
            orders = _orders(normed, arrived, recipe, gains)
            yield min(orders, key=lambda fit: fit.error)


def _orders(
    vectors: Tensor, arrived: Tensor, recipe: NormRecipe, gains: HeadGains | None
) -> Iterator[NormFit]:
    """Yields the norm before and after the rotation, as far as its module may have been called there."""
    if gains is None:
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
        yield dataclasses.replace(fit, recipe=recipe)
        return
    # A gain per dimension does not commute with a rotation, so the two orders differ in lengths.
    for is_rotated, order in enumerate(("before RoPE", "after RoPE")):
        if gains.sees_rotated not in (None, bool(is_rotated)):
            continue
        recipe = dataclasses.replace(
            gains.recipe,
            kind=recipe.kind,
            over=recipe.over,
            eps=recipe.eps,
            order=order,
        )
        fit = (
            _compared(vectors, (arrived - gains.bias) / gains.gain, recipe)
            if is_rotated
            else _compared(vectors * gains.gain + gains.bias, arrived, recipe)
        )
        # A gain is taken as it is: only a factor of both sides of the rotation, as YaRN's, may be left.
        if abs(fit.recipe.factor - 1) < 1e-3:
            recipe = dataclasses.replace(fit.recipe, factor=1.0)
            fit = dataclasses.replace(fit, recipe=recipe)
        yield fit


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
    pairings: tuple[tuple[Literal["half", "interleaved"], Any, Any], ...] = (
        ("half", x_halves, y_halves),
        ("interleaved", x_neighbours, y_neighbours),
        # DeepSeek's weights hold interleaved pairs, which its code puts into halves.
        ("half", x_neighbours, y_halves),
    )
    for pairing, (a, b), (c, d) in pairings:
        # The angles [1 t pairs] are those of all heads.
        cross, inner = a * d - b * c, a * c + b * d
        angle = torch.atan2(cross.sum(0, True), inner.sum(0, True))
        cos, sin = angle.cos(), angle.sin()
        error = torch.cat([a * cos - b * sin - c, a * sin + b * cos - d])
        if float(error.abs().max()) <= 10 * tolerance * scale:
            base, reason = _base(angle[0])
            return Rotation(
                dims=count,
                of=size,
                pairing="one pair" if count == 2 else pairing,
                base=base,
                why=reason,
            )
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
