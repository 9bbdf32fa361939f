"""RoPE's frequencies, slowed down for contexts longer than in training; a part of the position slot."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import check, check_known
from qkeel.functional import rope_frequencies as f
from qkeel.spec.shapes import PosK

Frequencies = Float[Tensor, "half"]


class Stretch(abc.ABC):
    """Frequencies in place of θ_i = base^(-2i/d), at training or at test time.

    `changes`: they are others than RoPE's own. `follows_length`: they depend on how many tokens there are, so rotated
    keys can't be kept while more come. `magnitude`: a factor on cos and sin.
    """

    __slots__ = ()
    changes: bool = True
    follows_length: bool = False
    magnitude: float = 1.0

    @abc.abstractmethod
    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        """[half] from RoPE's own [half] and the positions of all keys [b|1 s], which are not read back."""

    @abc.abstractmethod
    def formula(self) -> str:
        """In words of the formula."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class NoStretch(Stretch):
    """RoPE as it was trained."""

    changes = False

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return theta

    def formula(self) -> str:
        return ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PI(Stretch):
    """Position interpolation: θ / factor. Source: Chen et al. 2023, arXiv 2306.15595."""

    factor: float  #: test length / training length, at least 1

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.interpolate(theta, self.factor)

    def formula(self) -> str:
        return f"PI ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NTK(Stretch):
    """NTK-aware frequencies: kind old (base · factor), exact, fixed, or mixed with `power`.

    Formulas: functional.rope_frequencies. Source: kexue.fm 9706. "exact" is the base that transformers uses.
    """

    factor: float  #: test length / training length, at least 1
    kind: Literal["old", "exact", "fixed", "mixed"] = "old"  #: which of the published formulas
    power: float = 0.625

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)
        check_known("kind of NTK", self.kind, ("old", "exact", "fixed", "mixed"))
        check(self.power >= 0, "a power of at least 0 for NTK-mixed", self.power)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        if self.kind in ("old", "exact"):
            return f.ntk(theta, self.factor, exact=self.kind == "exact")
        return f.ntk_mixed(theta, self.factor, 1.0 if self.kind == "fixed" else self.power)

    def formula(self) -> str:
        power = f", power {self.power:g}" if self.kind == "mixed" else ""
        return f"NTK {self.kind} ×{self.factor:g}{power}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK(Stretch):
    """NTK exact with the factor that the length asks for: s = max(n, L)/L, base · (factor·s - factor + 1)^(d/(d-2)).

    Equal to RoPE up to the training length L. With factor 1 the base grows just with s. Every length has frequencies of
    its own, so keys must be kept unrotated. Source: emozilla 2023, as in transformers ("dynamic").
    """

    train_length: int  #: L, in tokens, at least 2
    factor: float = 1.0  #: at least 1
    follows_length = True

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        length = pos_k.amax() + 1 if pos_k.numel() else torch.ones((), device=pos_k.device)
        share = length.to(theta.dtype).clamp_min(self.train_length) / self.train_length
        return f.ntk(theta.to(length.device), self.factor * share - (self.factor - 1), exact=True)

    def formula(self) -> str:
        return f"dynamic NTK from {self.train_length} tokens on, ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YaRN(Stretch):
    """Slow pairs interpolated, fast ones left; cos and sin times 0.1 ln factor + 1, or `attention_factor`.

    ramp="code" as released (and in transformers), "paper" as printed: see functional.rope_frequencies.yarn.
    Source: Peng et al. 2023, arXiv 2309.00071.
    """

    factor: float  #: test length / training length, at least 1
    train_length: int  #: tokens, at least 2
    fast: float = 32.0  #: turns in training above which a pair stays
    slow: float = 1.0  #: turns below which it is interpolated
    ramp: f.Ramp = "code"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check_known("ramp of YaRN", self.ramp, get_args(f.Ramp))
        check(0 < self.slow < self.fast, "0 < slow < fast turns", f"slow={self.slow}, fast={self.fast}")
        given = self.attention_factor
        check(given is None or given > 0, "an attention_factor above 0", given)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.yarn(theta, self.factor, self.train_length, base=base, fast=self.fast, slow=self.slow, ramp=self.ramp)

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        """See Stretch."""
        return f.yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    def formula(self) -> str:
        more = f"{self.ramp} ramp, cos and sin ×{self.magnitude:.4g}"
        return f"YaRN ×{self.factor:g} from {self.train_length} tokens, {more}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Stretch):
    """Llama 3.1's frequencies, see functional.rope_frequencies.llama3."""

    factor: float  #: test length / training length, at least 1
    train_length: int  #: tokens, at least 2
    low: float = 1.0  #: turns in training below which a pair is slowed by the whole factor
    high: float = 4.0  #: turns above which it stays

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check(0 < self.low < self.high, "0 < low < high turns", f"low={self.low}, high={self.high}")

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.llama3(theta, self.factor, self.train_length, self.low, self.high)

    def formula(self) -> str:
        return f"Llama 3 ×{self.factor:g} from {self.train_length} tokens"


def _check(stretch: Stretch, *, factor: float, train_length: int = 2) -> None:
    name = type(stretch).__name__
    check(
        math.isfinite(factor) and factor >= 1, f"a factor of at least 1 (test length / train length) for {name}", factor
    )
    check(train_length >= 2, f"a train_length of at least 2 tokens for {name}", train_length)
