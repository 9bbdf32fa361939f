"""The specification of attention: five slots, each holding an object."""

from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.layers import POSITIONS, layer_specs, positions
from qkeel.spec.norm import L2Norm, LayerNorm, NoNorm, RMSNorm
from qkeel.spec.normalizer import Sigmoid, Sink, Softmax, Softpick, SquaredReLU
from qkeel.spec.position.bias import ALiBi, Kerple
from qkeel.spec.position.rerope import LeakyReRope, ReRope
from qkeel.spec.position.rope_scaling import NTK, PI, DynamicNTK, Llama3, NoStretch, YaRN
from qkeel.spec.position.rotary import NoPosition, Rope, SlidingWindow, XPos
from qkeel.spec.post_hoc import METHODS
from qkeel.spec.presets import PRESETS, preset, presets
from qkeel.spec.scale import Fixed, FloorLogTemperature, GradientMax, InverseSqrt, Learned, LogN, Sqrt

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
