"""What `qkeel.explain` returns: one recipe for each attention layer, and its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal, final

from qkeel.metrics import text_table
from qkeel.records import LAYER_TYPES


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The dimensions of a head that rotate with the position, with pairing and base if known.

    >>> Rotation(dims=64, of=64, pairing="half", base=10_000.0).text()
    'RoPE (half), base 10,000'
    """

    dims: int  #: number of dimensions that rotate; 0 if unknown
    of: int  #: d, all dimensions of a head
    #: which two dimensions form a pair; "" if unknown
    pairing: Literal["half", "interleaved", "one pair", ""] = ""
    base: float | None = None  #: base of the frequencies base^(-2i/dims)
    why: str = ""  #: what is unknown; "" if nothing is

    @property
    def whole_base(self) -> float | None:
        """The base if the exponent -2i/n counts all dimensions of the head as n, not only those that rotate."""
        return None if self.base is None else self.base ** (self.of / self.dims)

    def text(self) -> str:
        """Returns text such as `RoPE (half), base 10,000`."""
        if not self.pairing:
            return f"changes with the position in an unknown way: {self.why}"
        is_partial = self.dims < self.of
        dims = f" on {self.dims} of {self.of} dimensions" if is_partial else ""
        if self.base is None:
            return f"RoPE{dims} ({self.pairing}), base unknown ({self.why})"
        return f"RoPE{dims} ({self.pairing}), base {self.base:,.6g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormRecipe:
    """The norm that is applied to q or k.

    >>> NormRecipe(kind="RMS", over="head", gain="per dim").text()
    'RMS norm over each head, eps unknown, gain per dim'
    """

    kind: str = "none"  #: none, RMS, layer, L2 or unknown
    over: str = ""  #: head or layer
    eps: float | None = None  #: None if unknown
    gain: str = "none"  #: none, scalar …, per dim, per head, per head and dim, unknown
    bias: bool = False  #: whether a bias follows the gain
    parameters: tuple[str, ...] = ()  #: names of the gain and bias parameters
    factor: float = 1.0  #: factor on q or k if it is not normed
    order: str = ""  #: before RoPE, after RoPE, either (they commute)
    why: str = ""  #: why it is unknown

    @property
    def acts(self) -> bool:
        """True if a norm was observed."""
        return self.kind in ("RMS", "layer", "L2")

    def text(self) -> str:
        """Returns text such as `RMS norm over each head, eps 1e-06, gain per dim (q_norm.weight), before RoPE`."""
        if self.kind == "unknown":
            return f"unknown: {self.why}"
        if not self.acts:
            return "no norm" + (
                f", times {self.factor:.4g}" if self.factor != 1 else ""
            )
        over = _AXES[self.over]
        eps = "eps unknown" if self.eps is None else f"eps {self.eps:.2g}"
        gain = "no gain" if self.gain == "none" else f"gain {self.gain}"
        gain += " and bias" if self.bias else ""
        gain += f" ({compress(self.parameters)})" if self.parameters else ""
        order = f", {self.order}" if self.order else ""
        return f"{_NORMS[self.kind]} over {over}, {eps}, {gain}{order}"


_NORMS = {"RMS": "RMS norm", "layer": "LayerNorm", "L2": "L2 norm"}
_AXES = {"head": "each head", "layer": "all heads of the layer"}


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
    #: key head of each query head; None: consecutive blocks
    key_heads: tuple[int, ...] | None = None
    scale: tuple[float, ...] = ()
    #: cap c of c·tanh(z/c), in nats; None if there is no cap
    softcap: float | None = None
    sinks: str = ""  #: softmax columns beyond the keys; "" if there are none
    #: what a sigmoid multiplies the output by; "" if there is no such gate
    gate: str = ""
    visible: str = ""  #: the keys that a query sees; "" if unknown
    #: tokens in the sliding window, including the query's own; None if there is none
    window: int | None = None
    #: number of keys of the batch, if queries see all of them or all earlier ones
    keys: int | None = None
    bias: bool = False  #: whether something is added to scale · q·k
    layer_type: str = "full"  #: see records.LAYER_TYPES
    idle: tuple[
        str, ...
    ] = ()  #: norms and parameters in the module that have no effect
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
        heads = f"{self.n_heads} heads of {self.head_dim}"
        if self.n_kv_heads != self.n_heads:
            use = "query heads in blocks"
            if self.key_heads is not None:
                use = f"used by the query heads as {self.key_heads}"
            heads += f", {self.n_kv_heads} of keys, {use}"
        rows = [("heads", heads)]
        query, key = (
            dataclasses.replace(side, parameters=()) for side in (self.query, self.key)
        )
        if query == key:
            names = compress(self.key.parameters)
            rows.append(
                ("q, k", self.query.text() + (f", for k {names}" if names else ""))
            )
        else:
            rows += [("q", self.query.text()), ("k", self.key.text())]
        turned = "no rotation of q and k"
        if any(text.startswith("the rotation") for text in self.unknown):
            turned = "unknown"
        rows += [
            ("position", turned if self.rotation is None else self.rotation.text()),
            ("logit", self._logit()),
            ("visible", self.visible or "unknown"),
        ]
        if self.layer_type != "full":
            rows.append(("type", f"{self.layer_type}: {LAYER_TYPES[self.layer_type]}"))
        rows += [("gate", self.gate)] if self.gate else []
        rows += [("idle", text) for text in self.idle]
        rows += [("unknown", text) for text in self.unknown]
        return [f"{title:<10}{text}" for title, text in rows]

    def _logit(self) -> str:
        logit = f"z = {scale_text(self.scale, self.head_dim)}"
        logit += f" · q·k{' + a bias' if self.bias else ''}"
        usual = self.total_scale * math.sqrt(self.head_dim)
        is_normed = self.query.kind != "none" or self.key.kind != "none"
        if abs(usual - 1) > 2e-3 and not is_normed:
            logit += f", {usual:.4g} times the usual 1/√{self.head_dim}"
        if self.softcap is not None:
            logit += f", capped: {self.softcap:g} tanh(z / {self.softcap:g})"
        return logit + (f", {self.sinks}" if self.sinks else "")


def scale_text(scale: Sequence[float], head_dim: int) -> str:
    """Returns text such as `1/√64`, `1/64` or `1`, or the numbers."""
    if not scale or math.isnan(scale[0]):
        return "(unknown)"
    low, high = min(scale), max(scale)
    if high - low > 1e-3 * abs(high):
        return f"{low:.4g} to {high:.4g} by head"
    for text, power in ((f"1/√{head_dim}", -0.5), (f"1/{head_dim}", -1), ("1", 0)):
        if abs(low / head_dim**power - 1) < 2e-3:
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
    #: each setting that was compared: its name, what the config says, what the model does, and in which layers
    compared: tuple[tuple[str, str, str, str], ...] = ()

    def table(self) -> str:
        """Formats the settings of the config that were compared with what attention does.

        >>> print(Explanation(model="Decoder", sites=(), compared=(("head_dim", "64", "64", "h.{0-3}"),)).table())
        setting   config says  model does   layers
        head_dim           64          64  h.{0-3}
        >>> print(Explanation(model="Decoder", sites=()).table())
        no setting of a config was compared: Decoder has none that says what its attention does
        """
        if not self.compared:
            return (
                f"no setting of a config was compared: {self.model} has none that says what its "
                "attention does"
            )
        heading = ("setting", "config says", "model does", "layers")
        return text_table([heading, *self.compared])

    def __str__(self) -> str:
        plural = "s" * (len(self.sites) != 1)
        parts = [f"{self.model}: {len(self.sites)} attention layer{plural}"]
        groups: dict[str, list[str]] = {}
        for site in self.sites:
            groups.setdefault("\n  ".join(site.lines()), []).append(site.name)
        parts += [f"{compress(names)}\n  {text}" for text, names in groups.items()]
        parts += [f"differs from config: {text}" for text in self.differences]
        return "\n".join(parts)


def compress(names: Sequence[str]) -> str:
    """Joins names that differ in one number: `a.0.b, a.1.b, a.3.b` becomes `a.{0-1,3}.b`."""
    families: dict[tuple[str, str], list[int]] = {}
    for name in names:
        start, number, end = re.fullmatch(r"(\D*)(\d*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        families.setdefault((start, end), []).extend(map(int, number.split()))
    texts = []
    for (start, end), numbers in families.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
        text = f"{{{text}}}" if len(numbers) > 1 else text
        texts.append(f"{start}{text}{end}" or "(the model)")
    return ", ".join(texts)
