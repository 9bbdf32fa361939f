"""What `qkeel.explain` returns: one recipe for each attention layer, and its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal, final

from qkeel.records import LAYER_TYPES, LINEAR


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The dimensions of a head that rotate with the position, with pairing and base if known."""

    dims: int  #: number of dimensions that rotate; 0 if unknown
    of: int  #: d, all dimensions of a head
    pairing: Literal["half", "interleaved", "one pair", ""] = (
        ""  #: which two dimensions form a pair; "" if unknown
    )
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
        dims = (
            "" if self.dims == self.of else f" on {self.dims} of {self.of} dimensions"
        )
        base = (
            f"base {self.base:,.6g}"
            if self.base is not None
            else f"base unknown ({self.why})"
        )
        if self.base is not None and self.dims < self.of:
            base += f" counted over these, {self.whole_base:,.3g} over all"
        return f"RoPE{dims} ({self.pairing}), {base}"


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
        over = {"head": "each head", "layer": "all heads of the layer"}.get(
            self.over, f"{self.over} (an unusual axis)"
        )
        eps = "eps unknown" if self.eps is None else f"eps {self.eps:.2g}"
        named = f" ({compress(self.parameters)})" if self.parameters else ""
        gain = f"{'no gain' if self.gain == 'none' else f'gain {self.gain}'}{' and bias' if self.bias else ''}{named}"
        return ", ".join(
            part
            for part in (f"{name} over {over}", eps, gain, self.order, self.why)
            if part
        )


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
    key_heads: tuple[int, ...] | None = (
        None  #: key head of each query head; None: consecutive blocks
    )
    scale: tuple[float, ...] = ()
    scale_parameter: str = (
        ""  #: name of the learned scale's parameter; "" if there is none
    )
    softcap: float | None = (
        None  #: cap c of c·tanh(z/c), in nats; None if there is no cap
    )
    sinks: str = ""  #: softmax columns beyond the keys; "" if there are none
    visible: str = ""  #: the keys that a query sees; "" if unknown
    window: int | None = (
        None  #: tokens in the sliding window, including the query's own; None if there is none
    )
    keys: int | None = (
        None  #: number of keys of the batch, if queries see all of them or all earlier ones
    )
    bias: bool = False  #: whether something is added to scale · q·k
    layer_type: str = "full"  #: see records.LAYER_TYPES
    idle: tuple[str, ...] = ()  #: norms in the module that have no effect
    unknown: tuple[str, ...] = ()  #: what could not be determined

    @property
    def total_scale(self) -> float:
        """The first head's scale times the factors on unnormed q and k."""
        return (
            (self.scale[0] if self.scale else math.nan)
            * self.query.factor
            * self.key.factor
        )

    def lines(self) -> list[str]:
        """Returns the recipe as text, one part per line."""
        same = dataclasses.replace(self.query, parameters=()) == dataclasses.replace(
            self.key, parameters=()
        )
        heads = f"{self.n_heads} heads of {self.head_dim}"
        use = (
            "query heads in blocks"
            if self.key_heads is None
            else f"used by the query heads as {self.key_heads}"
        )
        groups = (
            ""
            if self.n_kv_heads == self.n_heads
            else f", {self.n_kv_heads} of keys, {use}"
        )
        rows = [
            f"heads     {heads}{groups}{f'; {self.latent}' if self.latent else ''}",
            *(
                [f"q, k      {self.query.text()}{_key_parameters(self.key)}"]
                if same
                else []
            ),
            *(
                []
                if same
                else [f"q         {self.query.text()}", f"k         {self.key.text()}"]
            ),
            f"position  {'no rotation of q and k' if self.rotation is None else self.rotation.text()}",
            f"logit     {self._logit()}",
            f"visible   {self.visible or 'unknown'}",
            *(
                []
                if self.layer_type == "full"
                else [f"type      {self.layer_type}: {LAYER_TYPES[self.layer_type]}"]
            ),
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
        cap = (
            ""
            if self.softcap is None
            else f", capped: {self.softcap:g} tanh(z / {self.softcap:g})"
        )
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
    usual = {
        f"1/√{head_dim}": head_dim**-0.5,
        f"1/{head_dim}": 1 / head_dim,
        "1": 1.0,
        f"√{head_dim}": head_dim**0.5,
    }
    for text, value in usual.items():
        if abs(low / value - 1) < 2e-3:
            return text
    return f"{low:.4g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The recipes of all attention layers of a model, and contradictions with the model's config."""

    model: str  #: name of the model's class
    sites: tuple[SiteRecipe, ...]  #: one recipe for each attention layer
    differences: tuple[
        str, ...
    ] = ()  #: one sentence per config setting that the model contradicts
    linear: tuple[
        str, ...
    ] = ()  #: names of the layers without logits, see records.LAYER_TYPES

    def __str__(self) -> str:
        parts = [f"{self.model}: {len(self.sites)} attention layers"]
        for names, recipe in self.grouped():
            parts.append(
                f"{names}\n" + "\n".join(f"  {line}" for line in recipe.lines())
            )
        parts += (
            [f"{compress(self.linear)}\n  type      {LINEAR}: {LAYER_TYPES[LINEAR]}"]
            if self.linear
            else []
        )
        parts += [f"differs from config: {text}" for text in self.differences]
        return "\n".join(parts)

    def grouped(self) -> list[tuple[str, SiteRecipe]]:
        """Returns each distinct recipe once, with the names of its layers."""
        groups: dict[str, list[SiteRecipe]] = {}
        for site in self.sites:
            groups.setdefault("\n".join(site.lines()), []).append(site)
        return [
            (compress([site.name for site in sites]), sites[0])
            for sites in groups.values()
        ]


def compress(names: Sequence[str]) -> str:
    """Joins names that differ in one number: `a.0.b, a.1.b, a.3.b` becomes `a.{0-1,3}.b`."""
    families: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"\d+", name)
        key = (
            name if match is None else f"{name[: match.start()]}\0{name[match.end() :]}"
        )
        families.setdefault(key, []).append(-1 if match is None else int(match[0]))
    return ", ".join(
        key.replace("\0", _numbers(numbers)) or "(the model)"
        for key, numbers in families.items()
    )


def _numbers(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
