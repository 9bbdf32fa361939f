"""What attention computes: five slots, each holding an object."""

from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.norm import L2Norm, LayerNorm, NoNorm, RMSNorm
from qkeel.spec.normalizer import Sigmoid, Sink, Softmax, Softpick, SquaredReLU
from qkeel.spec.position import NoPosition, Rope
from qkeel.spec.presets import PRESETS, preset, presets
from qkeel.spec.scale import Fixed, FloorLogTemperature, InverseSqrt, Learned, LogN, Sqrt

__all__ = [
    "PRESETS",
    "AttentionCall",
    "AttentionSpec",
    "Fixed",
    "FloorLogTemperature",
    "InverseSqrt",
    "L2Norm",
    "LayerNorm",
    "Learned",
    "LogN",
    "NoCap",
    "NoNorm",
    "NoPosition",
    "RMSNorm",
    "Rope",
    "Sigmoid",
    "Sink",
    "Softcap",
    "Softmax",
    "Softpick",
    "SquaredReLU",
    "Sqrt",
    "preset",
    "presets",
]
