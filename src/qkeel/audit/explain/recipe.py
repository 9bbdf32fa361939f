"""The result of explain_model: one SiteRecipe per attention, and the text of them all."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import final

from qkeel.audit.explain.responses import Rotation
from qkeel.frames.markup import join, plain_table, tag


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormRecipe:
    """The norm that acts on q or k."""

    kind: str = "none"  #: none, RMS, layer, L2 or unknown
    over: str = ""  #: head, layer, or the wrong axes
    eps: float | None = None  #: None where it is unknown
    gain: str = "none"  #: none, scalar …, per dim, per head, per head and dim, unknown
    bias: bool = False  #: whether something is added after the gain
    parameters: tuple[str, ...] = ()  #: names of those that hold gain and bias
    factor: float = 1.0  #: what q is multiplied with where nothing norms it
    order: str = ""  #: before RoPE, after RoPE, either (they commute)
    why: str = ""  #: what is unknown or unusual, in words

    @property
    def acts(self) -> bool:
        """Returns whether a norm was seen to act."""
        return self.kind in ("RMS", "layer", "L2")

    def text(self) -> str:
        """Returns `RMS norm over each head, eps 1e-06, gain per dim (q_norm.weight), before RoPE`."""
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
    """One attention as it was seen to work. scale: the factor of q·k, per head; NaN where unknown."""

    name: str  #: of its module in the model
    n_heads: int  #: query heads
    n_kv_heads: int  #: key heads
    head_dim: int  #: d, numbers of one head's query
    query: NormRecipe  #: what acts on q
    key: NormRecipe  #: what acts on k
    rotation: Rotation | None = None  #: by the position; None where nothing turns
    latent: str = ""  #: latents that q and k are made of (MLA), in words; "" without
    key_heads: tuple[int, ...] | None = None  #: key head of each query head; None: consecutive blocks
    scale: tuple[float, ...] = ()
    scale_parameter: str = ""  #: name of the parameter that learns the scale; "" without
    softcap: float | None = None  #: cap c of c·tanh(z/c), in nats; None without
    sinks: str = ""  #: columns of the softmax beyond the keys, in words; "" without
    visible: str = ""  #: the keys that a query sees, in words; "" if unknown
    window: int | None = None  #: tokens of a sliding window, the query's own included; None without
    bias: bool = False  #: whether something is added to scale · q·k
    idle: tuple[str, ...] = ()  #: norms in the module that change nothing, in words
    unknown: tuple[str, ...] = ()  #: what could not be read off, in words

    @property
    def total_scale(self) -> float:
        """The scale of the first head, with what q and k are multiplied with where nothing norms them."""
        return (self.scale[0] if self.scale else math.nan) * self.query.factor * self.key.factor

    def lines(self) -> list[str]:
        """Returns the recipe in words, one part per line."""
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
            z += f" (in all {scale_text((self.total_scale,), self.head_dim)}, with what multiplies q and k)"
        cap = "" if self.softcap is None else f", capped: {self.softcap:g} tanh(z / {self.softcap:g})"
        return f"{z}{cap}{f', {self.sinks}' if self.sinks else ''}"


def _key_parameters(key: NormRecipe) -> str:
    return f", for k {compress(key.parameters)}" if key.parameters else ""


def scale_text(scale: Sequence[float], head_dim: int) -> str:
    """Returns `1/√64`, `1/64`, `1`, or the numbers."""
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
    """The recipes of every attention of a model, and where the model's config says something else."""

    model: str  #: name of the model's class
    sites: tuple[SiteRecipe, ...]  #: one recipe for each attention
    differences: tuple[str, ...] = ()  #: sentences, one for each setting of the config that the model contradicts

    def __str__(self) -> str:
        parts = [f"{self.model}: {len(self.sites)} attentions"]
        for names, recipe in self.grouped():
            parts.append(f"{names}\n" + "\n".join(f"  {line}" for line in recipe.lines()))
        parts += [f"differs from config: {text}" for text in self.differences]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = [(tag("code", {}, names), join(recipe.lines(), "<br>")) for names, recipe in self.grouped()]
        items = [tag("li", {}, text) for text in self.differences]
        more = [tag("p", {}, "differs from config:"), tag("ul", {}, *items)] if items else []
        return join([tag("p", {}, self.model), plain_table((), rows), *more])

    def grouped(self) -> list[tuple[str, SiteRecipe]]:
        """Returns each distinct recipe once, with the names of the layers that have it."""
        groups: dict[str, list[SiteRecipe]] = {}
        for site in self.sites:
            groups.setdefault("\n".join(site.lines()), []).append(site)
        return [(compress([s.name for s in same]), same[0]) for same in groups.values()]


def compress(names: Sequence[str]) -> str:
    """Returns `a.0.b, a.1.b, a.3.b` as `a.{0-1,3}.b`: names that differ in one number; others one after the other."""
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
