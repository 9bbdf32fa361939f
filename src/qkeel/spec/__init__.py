"""The specification of attention, which consists of five slots that each hold an object.

The files:

    attention            AttentionSpec, the five slots
    norm, position, rope, logits
                         what stands in them; slot: their base class
    presets              published recipes, and the specs of a model's layers
    call                 one call of attention: q, k, v, the spec and what is visible
"""

from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.logits import (
    AttentionSink,
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
from qkeel.spec.presets import (
    POSITIONS,
    PRESETS,
    layer_specs,
    positions,
    preset,
    presets,
)
from qkeel.spec.rope import (
    NTK,
    PI,
    DynamicNTK,
    Llama3,
    NoPosition,
    NoStretch,
    Rope,
    SlidingWindow,
    XPos,
    YaRN,
)

__all__ = [
    "ALiBi",
    "AttentionCall",
    "AttentionSink",
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
