"""Reads a recipe (norm, gain, rotation, scale) from the responses of q and k to the experiments, and formats it.

Shapes: n heads, t tokens, d dimensions per head.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.frames.tables import join, plain_table, tag
from qkeel.records import LAYER_TYPES, LINEAR

# Interpreting responses: which norm over which axes, which gain, which rotation.

EPS_FACTORS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-7, 1e-13, 1e-14)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """The q or k [n t d] of one site for projection outputs x, 2x, -x, 0, another x, x plus a constant, and x with one
    number larger.

    `small` holds the responses to c · x for c in EPS_FACTORS. `x` and `other` [n r] are each head's own projection
    outputs if one weight provides r = d of them, otherwise None. `tolerance` is a relative tolerance that depends on
    the dtype's rounding.
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
    """The dimensions of a head that rotate with the position, with pairing and base if known."""

    dims: int  #: number of dimensions that rotate; 0 if unknown
    of: int  #: d, all dimensions of a head
    pairing: Literal["half", "interleaved", "one pair", ""] = ""  #: which two dimensions form a pair; "" if unknown
    base: float | None = None  #: base of the frequencies base^(-2i/dims)
    why: str = ""  #: what is unknown; "" if nothing is

    @property
    def whole_base(self) -> float | None:
        """The base if the exponent -2i/n counts all dimensions of the head as n, not only those that rotate."""
        return None if self.base is None else self.base ** (self.of / self.dims)

    def text(self) -> str:
        """Returns text such as `RoPE (half), base 10,000`."""
        if self.why and not self.pairing:
            return f"changes with the position in an unknown way: {self.why}"
        where = "" if self.dims == self.of else f" on {self.dims} of {self.of} dimensions"
        base = f"base {self.base:,.6g}" if self.base is not None else f"base unknown ({self.why})"
        if self.base is not None and self.dims < self.of:
            base += f" counted over these, {self.whole_base:,.3g} over all"
        return f"RoPE{where} ({self.pairing}), {base}"


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """True if two tensors differ by at most the relative tolerance."""
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-30))


def response(a: Answers) -> Literal["normed", "linear", "partly normed", "other"]:
    """Classifies how q responds when the projection is doubled."""
    if close(a.double, a.base, a.tolerance):
        return "normed"
    if close(a.double - a.zero, 2 * (a.base - a.zero), a.tolerance):
        return "linear"
    scale = a.base.abs().max()
    still = ((a.double - a.base).abs() <= a.tolerance * scale).all(0).all(0)
    grown = ((a.double - 2 * a.base).abs() <= a.tolerance * scale).all(0).all(0)
    return "partly normed" if bool((still | grown).all()) else "other"


def reach(a: Answers) -> str:
    """Returns the extent of the norm, that is, the axes along which enlarging one element changes others.

    A norm over tokens affects all of them; a convolution or pooled keys affect only "some tokens".
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
    """True if adding a constant to every element leaves q unchanged."""
    return close(a.lifted, a.base, 10 * a.tolerance)


def gains(a: Answers, kind: str, over: str) -> Tensor | None:
    """Returns the gain [n d] on the normed projection at the first position; None if a gain does not explain q."""
    if a.x is None or a.other is None or a.x.shape[-1] != a.base.shape[-1]:
        return None
    first = odd_part(a)[:, 0] / _unit(a.x, kind, over)
    y = a.elsewhere[:, 0] - even(a)[:, 0]
    second = y / _unit(a.other, kind, over)
    return first if close(first, second, 20 * a.tolerance) else None


def odd_part(a: Answers) -> Tensor:
    """Returns the part of q that changes sign with the projection."""
    return (a.base - a.minus) / 2


def even(a: Answers) -> Tensor:
    """Returns the part of q that is independent of the projection's sign: a bias after the norm."""
    return (a.base + a.minus) / 2


def _unit(x: Tensor, kind: str, over: str) -> Tensor:
    """Returns x after RMSNorm or LayerNorm without gain and eps."""
    flat = x.reshape(1, -1) if over == "layer" else x
    if kind == "layer":
        flat = flat - flat.mean(-1, keepdim=True)
    return (flat / flat.square().mean(-1, keepdim=True).sqrt()).view(x.shape)


def shape_of(gain: Tensor, tolerance: float) -> str:
    """Describes how a gain [n d] varies: `none`, `scalar 1.2`, `per dim`, `per head` or `per head and dim`."""
    loose = 30 * tolerance
    if close(gain, gain[:1, :1].expand_as(gain), loose):
        value = float(gain.median())
        return "none" if abs(value - 1) <= loose else f"scalar {value:.4g}"
    if close(gain, gain[:1].expand_as(gain), loose):
        return "per dim"
    return "per head" if close(gain, gain[:, :1].expand_as(gain), loose) else "per head and dim"


def eps_of(a: Answers, kind: str, over: str) -> tuple[float | None, bool]:
    """Estimates the eps of a norm from how q shrinks with its projection.

    Returns eps (None if unknown) and whether it is a floor, as in max(‖x‖, eps), rather than a term added under the
    square root.
    """
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
    """Rounds to the nearest of 1, 2, 5 · 10ⁿ if within 10 %, else to two digits."""
    step = 10.0 ** math.floor(math.log10(value))
    near = min((step * m for m in (1, 2, 5, 10)), key=lambda v: abs(math.log(v / value)))
    return float(f"{near:.1g}") if abs(near / value - 1) < 0.1 else float(f"{value:.2g}")


def moving(y: Tensor, tolerance: float) -> Tensor:
    """Returns the dimensions of y [n t d] that change with the position."""
    least = min(tolerance / 100, 1e-2) * y.abs().max()
    return ((y - y[:, :1]).abs() > least).any(0).any(0).nonzero().flatten()


def rotation(y: Tensor, tolerance: float, among: Tensor | None = None) -> Rotation | None:
    """Returns how y [n t d] is rotated at each position when every token has the same input; None if nothing changes.

    Args:
        y: queries or keys.
        tolerance: a relative tolerance that depends on the dtype's rounding.
        among: the dimensions that rotate, if they are already known.
    """
    d = y.shape[-1]
    among = moving(y, tolerance) if among is None else among
    r = len(among)
    if r == 0:
        return None
    if r % 2:
        return Rotation(dims=r, of=d, why=f"the {r} dimensions that change do not form pairs")
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
    """Estimates the base of frequencies base^(-2i/r) from the angles between positions; if that fails, returns None and
    the reason."""
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
        return None, "the frequencies do not fit a single base"
    return float(f"{math.exp(-slope * r / 2):.3g}"), ""


# The result of qkeel.explain: one SiteRecipe per attention layer, and the text of all recipes.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormRecipe:
    """The norm that is applied to q or k."""

    kind: str = "none"  #: none, RMS, layer, L2 or unknown
    over: str = ""  #: head, layer, or the unusual axes
    eps: float | None = None  #: None if unknown
    gain: str = "none"  #: none, scalar …, per dim, per head, per head and dim, unknown
    bias: bool = False  #: whether a bias follows the gain
    parameters: tuple[str, ...] = ()  #: names of the gain and bias parameters
    factor: float = 1.0  #: factor on q or k if it is not normed
    order: str = ""  #: before RoPE, after RoPE, either (they commute)
    why: str = ""  #: what is unknown or unusual

    @property
    def acts(self) -> bool:
        """True if a norm was observed."""
        return self.kind in ("RMS", "layer", "L2")

    def text(self) -> str:
        """Returns text such as `RMS norm over each head, eps 1e-06, gain per dim (q_norm.weight), before RoPE`."""
        if self.kind == "unknown":
            return f"unknown: {self.why}"
        if not self.acts:
            times = "" if abs(self.factor - 1) < 1e-3 else f"times {self.factor:.4g}"
            return ", ".join(part for part in ("no norm", times, self.why) if part)
        name = {"RMS": "RMS norm", "layer": "LayerNorm", "L2": "L2 norm"}[self.kind]
        over = {"head": "each head", "layer": "all heads of the layer"}.get(self.over, f"{self.over} (an unusual axis)")
        eps = "eps unknown" if self.eps is None else f"eps {self.eps:.2g}"
        named = f" ({compress(self.parameters)})" if self.parameters else ""
        gain = f"{'no gain' if self.gain == 'none' else f'gain {self.gain}'}{' and bias' if self.bias else ''}{named}"
        return ", ".join(part for part in (f"{name} over {over}", eps, gain, self.order, self.why) if part)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecipe:
    """The observed behaviour of one attention layer. `scale` is the factor on q·k per head; empty if unknown."""

    name: str  #: name of its module in the model
    n_heads: int  #: query heads
    n_kv_heads: int  #: key heads
    head_dim: int  #: d, the width of one head's query
    query: NormRecipe  #: the norm of q
    key: NormRecipe  #: the norm of k
    rotation: Rotation | None = None  #: rotation by position; None if there is none
    latent: str = ""  #: latents behind q and k (MLA); "" if there are none
    key_heads: tuple[int, ...] | None = None  #: key head of each query head; None: consecutive blocks
    scale: tuple[float, ...] = ()
    scale_parameter: str = ""  #: name of the learned scale's parameter; "" if there is none
    softcap: float | None = None  #: cap c of c·tanh(z/c), in nats; None if there is no cap
    sinks: str = ""  #: softmax columns beyond the keys; "" if there are none
    visible: str = ""  #: the keys that a query sees; "" if unknown
    window: int | None = None  #: tokens in the sliding window, including the query's own; None if there is none
    bias: bool = False  #: whether something is added to scale · q·k
    layer_type: str = "full"  #: see records.LAYER_TYPES
    idle: tuple[str, ...] = ()  #: norms in the module that have no effect
    unknown: tuple[str, ...] = ()  #: what could not be determined

    @property
    def total_scale(self) -> float:
        """The first head's scale times the factors on unnormed q and k."""
        return (self.scale[0] if self.scale else math.nan) * self.query.factor * self.key.factor

    def lines(self) -> list[str]:
        """Returns the recipe as text, one part per line."""
        same = dataclasses.replace(self.query, parameters=()) == dataclasses.replace(self.key, parameters=())
        heads = f"{self.n_heads} heads of {self.head_dim}"
        use = "query heads in blocks" if self.key_heads is None else f"used by the query heads as {self.key_heads}"
        groups = "" if self.n_kv_heads == self.n_heads else f", {self.n_kv_heads} of keys, {use}"
        rows = [
            f"heads     {heads}{groups}{f'; {self.latent}' if self.latent else ''}",
            *([f"q, k      {self.query.text()}{_key_parameters(self.key)}"] if same else []),
            *([] if same else [f"q         {self.query.text()}", f"k         {self.key.text()}"]),
            f"position  {'no rotation of q and k' if self.rotation is None else self.rotation.text()}",
            f"logit     {self._logit()}",
            f"visible   {self.visible or 'unknown'}",
            *([] if self.layer_type == "full" else [f"type      {self.layer_type}: {LAYER_TYPES[self.layer_type]}"]),
        ]
        rows += [f"idle      {text}" for text in self.idle]
        return rows + [f"unknown   {text}" for text in self.unknown]

    def _logit(self) -> str:
        s = scale_text(self.scale, self.head_dim)
        if self.scale_parameter:
            s += f" (learned: {self.scale_parameter})"
        folded = self.query.factor * self.key.factor
        z = f"z = {s} · q·k{' + a bias' if self.bias else ''}"
        if abs(folded - 1) > 1e-3 and self.scale:
            z += f" ({scale_text((self.total_scale,), self.head_dim)} in total, with the factors on q and k)"
        cap = "" if self.softcap is None else f", capped: {self.softcap:g} tanh(z / {self.softcap:g})"
        return f"{z}{cap}{f', {self.sinks}' if self.sinks else ''}"


def _key_parameters(key: NormRecipe) -> str:
    return f", for k {compress(key.parameters)}" if key.parameters else ""


def scale_text(scale: Sequence[float], head_dim: int) -> str:
    """Returns text such as `1/√64`, `1/64` or `1`, or the numbers."""
    if not scale or math.isnan(scale[0]):
        return "(unknown)"
    low, high = min(scale), max(scale)
    if high - low > 1e-3 * abs(high):
        return f"{low:.4g} to {high:.4g} by head"
    known = {f"1/√{head_dim}": head_dim**-0.5, f"1/{head_dim}": 1 / head_dim, "1": 1.0, f"√{head_dim}": head_dim**0.5}
    return next((text for text, value in known.items() if abs(low / value - 1) < 2e-3), f"{low:.4g}")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The recipes of all attention layers of a model, and contradictions with the model's config."""

    model: str  #: name of the model's class
    sites: tuple[SiteRecipe, ...]  #: one recipe for each attention layer
    differences: tuple[str, ...] = ()  #: one sentence per config setting that the model contradicts
    linear: tuple[str, ...] = ()  #: names of the layers without logits, see records.LAYER_TYPES

    def __str__(self) -> str:
        parts = [f"{self.model}: {len(self.sites)} attention layers"]
        for names, recipe in self.grouped():
            parts.append(f"{names}\n" + "\n".join(f"  {line}" for line in recipe.lines()))
        parts += [f"{compress(self.linear)}\n  type      {LINEAR}: {LAYER_TYPES[LINEAR]}"] if self.linear else []
        parts += [f"differs from config: {text}" for text in self.differences]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = [(tag("code", {}, names), join(recipe.lines(), "<br>")) for names, recipe in self.grouped()]
        rows += [(tag("code", {}, compress(self.linear)), f"{LINEAR}: {LAYER_TYPES[LINEAR]}")] if self.linear else []
        items = [tag("li", {}, text) for text in self.differences]
        more = [tag("p", {}, "differs from config:"), tag("ul", {}, *items)] if items else []
        return join([tag("p", {}, self.model), plain_table((), rows), *more])

    def grouped(self) -> list[tuple[str, SiteRecipe]]:
        """Returns each distinct recipe once, with the names of its layers."""
        groups: dict[str, list[SiteRecipe]] = {}
        for site in self.sites:
            groups.setdefault("\n".join(site.lines()), []).append(site)
        return [(compress([s.name for s in same]), same[0]) for same in groups.values()]


def compress(names: Sequence[str]) -> str:
    """Joins names that differ in one number: `a.0.b, a.1.b, a.3.b` becomes `a.{0-1,3}.b`."""
    families: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"\d+", name)
        key = name if match is None else f"{name[: match.start()]}\0{name[match.end() :]}"
        families.setdefault(key, []).append(-1 if match is None else int(match[0]))
    return ", ".join(key.replace("\0", _numbers(found)) or "(the model)" for key, found in families.items())


def _numbers(found: list[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(found):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(found) == 1 else f"{{{text}}}"
