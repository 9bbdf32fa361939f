"""Remedies that replace the object in one slot of the attention spec: a cap, a scale or a normalizer.

To add such a remedy, write a class like these and add a row to `REMEDIES` in `table.py`. The fields are the
options, `slot` names the slot, and `value` returns the new object. `OneSlot` checks that the slot is free. `ChangeSpec`
adds parameters, replaces the call in models from other libraries, and undoes the change.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, final

from qkeel.functional.logits import sigmoid_bias
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.options import settle
from qkeel.remedies.base import Target
from qkeel.remedies.foreign_attention import refuse_added_scores
from qkeel.remedies.spec_remedy import ChangeSpec, SlotName, known_length, refuse_taken
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, LogN, Sigmoid, Sink, Softcap, Softpick
from qkeel.spec.logits import Cap, FloorLogTemperature, Normalizer, Scale


class OneSlot(ChangeSpec):
    """Base class for remedies that replace the object in one slot, if the slot still holds the model's own object."""

    slot: ClassVar[SlotName]

    __slots__ = ()

    @abc.abstractmethod
    def value(
        self, old: AttentionSpec, train_length: int | None
    ) -> Cap | Normalizer | Scale:
        """Returns the new object for the slot of the old spec."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_taken(site, self.slot) or ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(**{self.slot: self.value(spec, train_length)})

    def change_others(
        self, target: Target, sites: list[AttentionSite]
    ) -> Iterator[Handle]:
        # The factor must scale q·k but no added bias.
        if self.slot == "scale":
            refuse_added_scores(self.name, sites)
        yield from ChangeSpec.change_others(self, target, sites)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoftcapRemedy(OneSlot):
    """Squashes logits so that none of them exceeds `cap`. The logits before the cap may keep growing."""

    cap: float = 50.0

    name, slot = "softcap", "cap"
    line = (
        "squashes logits with cap·tanh(z/cap); the logits before the cap may still grow"
    )
    source = "Gemma 2, arXiv 2408.00118"

    @property
    def limit(self) -> float:
        return self.cap

    def value(self, old: AttentionSpec, train_length: int | None) -> Softcap:
        return Softcap(self.cap)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNRemedy(OneSlot):
    """Logits z ← z · ln(n)/ln(L) for n visible keys, where L = `length`, by default the training length.

    clip=true uses max(1, ln n/ln L) as the factor, which never reduces a logit. It is meant for models that were
    trained without log n. In qkeel's own modules, n = position + 1. With learned=head or layer, z ← z · s · ln(n) with
    a learned s that starts at 1/ln(L) (scalable softmax).
    """

    length: int | None = None
    clip: bool = False
    learned: Literal["none", "layer", "head"] = "none"

    name, slot = "log_n", "scale"
    line = "scales logits by ln n/ln L, so that attention stays as sharp over more keys"
    source = "Su 2021, kexue.fm 8823 and 9859; scalable softmax: Nakanishi 2025, arXiv 2501.19399"

    def __post_init__(self) -> None:
        OneSlot.__post_init__(self)
        # LogN validates the options.
        LogN(
            train_length=2 if self.length is None else self.length,
            clip=self.clip,
            learned=self.learned,
        )

    def value(self, old: AttentionSpec, train_length: int | None) -> Scale:
        length = known_length(self.length, train_length, "log_n divides by ln L")
        return LogN(
            inner=old.scale, train_length=length, clip=self.clip, learned=self.learned
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature(OneSlot):
    """Logits z ← z · (1 + alpha·ln(1 + ⌊n/floor⌋)) for n visible keys. alpha=0 changes nothing."""

    alpha: float = 0.1  #: weight of the logarithm
    floor: int = 8192  #: number of keys, an integer

    name, slot, may_be_zero = "attention_temperature", "scale", ("alpha",)
    line = (
        "scales logits by 1 + α ln(1 + ⌊n/floor⌋), a temperature for long contexts only"
    )
    source = "Llama 4 as shipped in transformers 5.23 (attn_scale, floor_scale)"

    def value(self, old: AttentionSpec, train_length: int | None) -> Scale:
        return FloorLogTemperature(inner=old.scale, alpha=self.alpha, floor=self.floor)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRemedy(OneSlot):
    """Weights = σ(z + b) with b = -ln L, where L = `length`, by default the training length.

    With learned=true, b is learned per head and starts at this value.
    """

    length: int | None = None
    learned: bool = False

    name, slot = "sigmoid", "normalizer"
    line = "replaces softmax by a sigmoid with a bias, so that keys do not compete"
    source = "Ramapuram et al. 2024, arXiv 2409.04431, equation 3"

    def value(self, old: AttentionSpec, train_length: int | None) -> Sigmoid:
        length = known_length(
            self.length, train_length, "sigmoid starts its bias at -ln L"
        )
        return Sigmoid(bias=sigmoid_bias(length), learned=self.learned)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoftpickRemedy(OneSlot):
    """Weights = relu(e^z - 1) / (Σ|e^z - 1| + ε). Rows sum to at most 1, so that a query may attend to no key."""

    name, slot = "softpick", "normalizer"
    line = "replaces softmax by a rectified one whose rows sum to at most 1"
    source = "Zuhri et al. 2025, arXiv 2504.20966, equation 5"

    def value(self, old: AttentionSpec, train_length: int | None) -> Softpick:
        return Softpick()


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SinkRemedy(OneSlot):
    """Weights = e^z / (e^s + Σ e^z), where s is learned per head, starting at `init`, or is `init` if learned=false."""

    learned: bool = True
    init: float = 0.0

    name, slot = "sink", "normalizer"
    line = "adds a sink to the softmax, so that a query may attend to no key"
    source = (
        "gpt-oss as shipped in transformers 5.23; Miller 2023, Attention is off by one"
    )

    def __post_init__(self) -> None:
        settle(self, self.name)
        # Validates the number.
        Sink(init=float(self.init))

    def value(self, old: AttentionSpec, train_length: int | None) -> Sink:
        return Sink(learned=self.learned, init=float(self.init))
