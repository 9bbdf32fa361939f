"""What attention computes: five slots, each holding an object."""

from qkeel.spec.attention import AttentionSpec
from qkeel.spec.bias import ALiBi, Kerple
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.extrapolation import METHODS
from qkeel.spec.layers import POSITIONS, layer_specs, positions
from qkeel.spec.norm import L2Norm, LayerNorm, NoNorm, RMSNorm
from qkeel.spec.normalizer import Sigmoid, Sink, Softmax, Softpick, SquaredReLU
from qkeel.spec.position import NoPosition, Rope
from qkeel.spec.presets import PRESETS, preset, presets
from qkeel.spec.rerope import LeakyReRope, ReRope
from qkeel.spec.scale import Fixed, FloorLogTemperature, GradientMax, InverseSqrt, Learned, LogN, Sqrt
from qkeel.spec.stretch import NTK, PI, DynamicNTK, Llama3, NoStretch, YaRN
from qkeel.spec.window import SlidingWindow
from qkeel.spec.xpos import XPos

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
