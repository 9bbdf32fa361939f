"""The specification of attention, which consists of five slots that each hold an object."""

from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.logits import (
    Fixed,
    FloorLogTemperature,
    GradientMax,
    InverseSqrt,
    Learned,
    LogN,
    NoCap,
    Sigmoid,
    Sink,
    Softcap,
    Softmax,
    Softpick,
    Sqrt,
    SquaredReLU,
)
from qkeel.spec.norm import L2Norm, LayerNorm, NoNorm, RMSNorm
from qkeel.spec.position import METHODS, ALiBi, Kerple, LeakyReRope, ReRope
from qkeel.spec.presets import POSITIONS, PRESETS, layer_specs, positions, preset, presets
from qkeel.spec.rope import NTK, PI, DynamicNTK, Llama3, NoPosition, NoStretch, Rope, SlidingWindow, XPos, YaRN

__all__ = [
    "ALiBi",
    "AttentionCall",
    "AttentionSpec",
    "DynamicNTK",
    "Fixed",
    "FloorLogTemperature",
    "GradientMax",
    "InverseSqrt",
    "Kerple",
    "L2Norm",
    "LayerNorm",
    "LeakyReRope",
    "Learned",
    "Llama3",
    "LogN",
    "METHODS",
    "NTK",
    "NoCap",
    "NoNorm",
    "NoPosition",
    "NoStretch",
    "PI",
    "POSITIONS",
    "PRESETS",
    "RMSNorm",
    "ReRope",
    "Rope",
    "Sigmoid",
    "Sink",
    "SlidingWindow",
    "Softcap",
    "Softmax",
    "Softpick",
    "Sqrt",
    "SquaredReLU",
    "XPos",
    "YaRN",
    "layer_specs",
    "positions",
    "preset",
    "presets",
]
