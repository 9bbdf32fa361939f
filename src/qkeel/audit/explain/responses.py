"""The responses of q or k to experiments, read: which norm, over which axes, which gain, which rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, final

import torch
from torch import Tensor

EPS_FACTORS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-7, 1e-13, 1e-14)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """Results q or k [n t d] of one site at x, 2x, -x, 0, at another x, at x + a constant, at x with one number larger.

    `small`: at c · x for c in EPS_FACTORS. `x` [n r], `other` [n r] are the projection's own numbers of each head
    where it has r = d of them in one weight, else None. `tolerance` is relative, from the dtype's rounding.
    """

    base: Tensor
    double: Tensor
    minus: Tensor
    zero: Tensor
    elsewhere: Tensor
    lifted: Tensor
    poked: Tensor
    small: tuple[Tensor, ...]
    x: Tensor | None
    other: Tensor | None
    tolerance: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The dimensions of d that turn with the position; pairs and base where they are known."""

    dims: int  #: how many dimensions turn; 0 if unknown
    of: int  #: d, all dimensions of a head
    pairing: Literal["half", "interleaved", "one pair", ""] = ""  #: which two turn together; "" if unknown
    base: float | None = None  #: of the frequencies base^(-2i/dims)
    why: str = ""  #: what is unknown, in words; "" if nothing is

    @property
    def whole_base(self) -> float | None:
        """The base if the exponent -2i/n counts all of the head's dimensions as n, not only those that turn."""
        return None if self.base is None else self.base ** (self.of / self.dims)

    def text(self) -> str:
        """`RoPE (half), base 10,000`."""
        if self.why and not self.pairing:
            return f"changes with the position in an unknown way: {self.why}"
        where = "" if self.dims == self.of else f" on {self.dims} of {self.of} dimensions"
        base = f"base {self.base:,.6g}" if self.base is not None else f"base unknown ({self.why})"
        if self.base is not None and self.dims < self.of:
            base += f" counted over these, {self.whole_base:,.3g} over all"
        return f"RoPE{where} ({self.pairing}), {base}"


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Returns whether two tensors differ by no more than rounding."""
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-30))


def response(a: Answers) -> Literal["normed", "linear", "partly normed", "other"]:
    """The kind of response of q to a projection twice as large."""
    if close(a.double, a.base, a.tolerance):
        return "normed"
    if close(a.double - a.zero, 2 * (a.base - a.zero), a.tolerance):
        return "linear"
    scale = a.base.abs().max()
    still = ((a.double - a.base).abs() <= a.tolerance * scale).all(0).all(0)
    grown = ((a.double - 2 * a.base).abs() <= a.tolerance * scale).all(0).all(0)
    return "partly normed" if bool((still | grown).all()) else "other"


def reach(a: Answers) -> str:
    """Over what the norm is taken: along which axes one larger number changes others. A norm over tokens reaches
    all of them; "some tokens" is what a convolution or pooled keys do.
    """
    delta = (a.poked - a.base).abs() > 10 * a.tolerance * a.base.abs().max()
    if not bool(delta.any()):
        return ""
    heads, at = delta.any(2).any(1), delta.any(2).any(0)
    token = int((a.poked - a.base).abs().amax((0, 2)).argmax())
    if 1 < int(at.sum()) < len(at):
        return "some tokens"
    axes = [
        "tokens" if int(at.sum()) > 1 else "",
        "heads" if int(heads.sum()) > 1 else "",
        "dimensions" if int(delta[:, token].sum(-1).max()) > 2 else "",
    ]
    found = " and ".join(axis for axis in axes if axis)
    return {"dimensions": "head", "heads and dimensions": "layer"}.get(found, found)


def subtracts_mean(a: Answers) -> bool:
    """Returns whether a constant added to every number leaves q where it was."""
    return close(a.lifted, a.base, 10 * a.tolerance)


def gains(a: Answers, kind: str, over: str) -> Tensor | None:
    """[n d] what each number of the normed projection is multiplied with at the first position, if it is."""
    if a.x is None or a.other is None or a.x.shape[-1] != a.base.shape[-1]:
        return None
    first = odd(a)[:, 0] / _unit(a.x, kind, over)
    y = a.elsewhere[:, 0] - even(a)[:, 0]
    second = y / _unit(a.other, kind, over)
    return first if close(first, second, 20 * a.tolerance) else None


def odd(a: Answers) -> Tensor:
    """The part of q that changes sign with the projection."""
    return (a.base - a.minus) / 2


def even(a: Answers) -> Tensor:
    """The part of q that the projection's sign does not change: a bias after the norm."""
    return (a.base + a.minus) / 2


def _unit(x: Tensor, kind: str, over: str) -> Tensor:
    """Returns x normed as RMSNorm or LayerNorm without gain or eps would."""
    flat = x.reshape(1, -1) if over == "layer" else x
    if kind == "layer":
        flat = flat - flat.mean(-1, keepdim=True)
    return (flat / flat.square().mean(-1, keepdim=True).sqrt()).view(x.shape)


def shape_of(gain: Tensor, tolerance: float) -> str:
    """`none`, `scalar 1.2`, `per dim`, `per head` or `per head and dim`: how a gain [n d] varies."""
    loose = 30 * tolerance
    if close(gain, gain[:1, :1].expand_as(gain), loose):
        value = float(gain.median())
        return "none" if abs(value - 1) <= loose else f"scalar {value:.4g}"
    if close(gain, gain[:1].expand_as(gain), loose):
        return "per dim"
    return "per head" if close(gain, gain[:, :1].expand_as(gain), loose) else "per head and dim"


def eps_of(a: Answers, kind: str, over: str) -> tuple[float | None, bool]:
    """The eps of a norm from how q fades as its projection does, and whether it is a floor (max(‖x‖, eps))."""
    if a.x is None:
        return None, False
    shift = even(a)[0, 0]
    full = (a.base[0, 0] - shift).norm()
    group = a.x if over == "layer" else a.x[:1]
    group = group - group.mean() if kind == "layer" else group
    size, length = float(group.square().mean()), float(group.norm())
    added, floors = [], []
    for c, small in zip(EPS_FACTORS, a.small):
        faded = float((small[0, 0] - shift).norm() / full)
        if 1e-3 < faded < 0.97:
            added.append(c * c * size * (faded**-2 - 1))
            floors.append(c * length / faded)
    if not added:
        return None, False
    if len(added) > 1 and max(floors) < 1.05 * min(floors):
        return _round(floors[0]), True
    return _round(added[0]), False


def _round(value: float) -> float:
    """To the nearest of 1, 2, 5 · 10ⁿ within 10 %, else as it is to two digits."""
    step = 10.0 ** math.floor(math.log10(value))
    near = min((step * m for m in (1, 2, 5, 10)), key=lambda v: abs(math.log(v / value)))
    return float(f"{near:.1g}") if abs(near / value - 1) < 0.1 else float(f"{value:.2g}")


def moving(y: Tensor, tolerance: float) -> Tensor:
    """The dimensions of y [n t d] that change with the position."""
    least = min(tolerance / 100, 1e-2) * y.abs().max()
    return ((y - y[:, :1]).abs() > least).any(0).any(0).nonzero().flatten()


def rotation(y: Tensor, tolerance: float, among: Tensor | None = None) -> Rotation | None:
    """The rotation of y [n t d] by position, with the same numbers at every token; None if there is none.

    `among`: the dimensions that turn, where they are known from elsewhere.
    """
    d = y.shape[-1]
    among = moving(y, tolerance) if among is None else among
    r = len(among)
    if r == 0:
        return None
    if r % 2:
        return Rotation(dims=r, of=d, why=f"{r} dimensions change, which are not pairs")
    z = y[..., among]
    pairs = {"half": (z[..., : r // 2], z[..., r // 2 :]), "interleaved": (z[..., ::2], z[..., 1::2])}
    fits = [name for name, (u, v) in pairs.items() if _turns(u, v, tolerance)]
    if not fits:
        return Rotation(dims=r, of=d, why="the lengths of pairs change too")
    base, why = _base(*pairs[fits[0]], r)
    pairing = "one pair" if len(fits) > 1 else fits[0]
    return Rotation(dims=r, of=d, pairing=pairing, base=base, why=why)  # type: ignore[arg-type]


def _turns(u: Tensor, v: Tensor, tolerance: float) -> bool:
    length = (u * u + v * v).sqrt()
    return bool(((length - length[:, :1]).abs() <= 10 * tolerance * length.max()).all())


def _base(u: Tensor, v: Tensor, r: int) -> tuple[float | None, str]:
    """The base of frequencies base^(-2i/r) from the angles between positions."""
    if r == 2:
        return None, "one pair turns"

    def angle(t: int) -> Tensor:
        a, b, c, e = u[:, 0], v[:, 0], u[:, t], v[:, t]
        return torch.atan2((a * e - b * c).sum(0), (a * c + b * e).sum(0)).abs()

    last = u.shape[1] - 1
    near, far = angle(1), angle(last) / last
    speed = torch.where(near * last < 2, far, near)
    good = (speed * last > 1e-4).nonzero().flatten()
    if len(good) < 2 or int(good[0]) != 0:
        return None, "positions are not 0, 1, 2, …" if len(good) else "too slow for so few tokens"
    logs = speed[good].log()
    slope = float((logs[-1] - logs[0]) / good[-1])
    if bool(((logs - logs[0] - slope * good).abs() > 0.02).any()) or abs(float(logs[0])) > 0.02:
        return None, "the frequencies are not those of one base"
    return float(f"{math.exp(-slope * r / 2):.3g}"), ""
