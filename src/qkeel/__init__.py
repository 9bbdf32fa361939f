"""qkeel keeps attention logits on an even keel: see them, fix them, build attention from data, compare remedies.

>>> import qkeel
>>> print(qkeel.preset("qwen3").explain())
attention of this spec, per head (logits in nats):
  q̃ = RMS(q) · w, k̃ = RMS(k) · w; RoPE(base 1e+06)
  z = 1/√d · q̃·k̃
  weights = softmax(z) over visible keys
  out = weights · v
"""

import importlib
from types import ModuleType

from qkeel import errors, nn, reference
from qkeel.ops import attention
from qkeel.remedies import apply, remedies
from qkeel.sites import find_sites
from qkeel.spec import AttentionSpec, preset, presets

__version__ = "0.1.0"

# `qkeel.remedies` is the function; the room of that name is reached by `from qkeel.remedies import …`.
__all__ = [
    "AttentionSpec",
    "apply",
    "attention",
    "errors",
    "find_sites",
    "lab",
    "nn",
    "preset",
    "presets",
    "reference",
    "remedies",
    "report",
]


def __getattr__(name: str) -> ModuleType:
    # The lab and the report are loaded when they are first asked for.
    if name in ("lab", "report"):
        return importlib.import_module(f"qkeel.{name}")
    raise AttributeError(f"module 'qkeel' has no attribute {name!r}")
