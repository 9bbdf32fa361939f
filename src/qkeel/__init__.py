"""qkeel keeps attention logits on an even keel: watch them, fix them, build attention from data, compare remedies.

>>> import qkeel
>>> print(qkeel.preset("qwen3").explain())
attention of this spec, per head (logits in nats):
  q̃ = RMS(q) · w, k̃ = RMS(k) · w; RoPE(base 1e+06)
  z = 1/√d · q̃·k̃
  weights = softmax(z) over visible keys
  out = weights · v
"""

import importlib
from typing import TYPE_CHECKING, Any

from qkeel.deprecation import earlier_name
from qkeel.version import VERSION

if TYPE_CHECKING:
    from qkeel import (
        audit,
        errors,
        functional,
        integrations,
        lab,
        metrics,
        monitor,
        nn,
        reference,
        remedies,
        report,
        sites,
        spec,
    )
    from qkeel.audit import Documents, Window, attention_maps, check, explain
    from qkeel.autopilot import autopilot
    from qkeel.monitor.sinks import load
    from qkeel.monitor.watch import watch
    from qkeel.ops import attention
    from qkeel.remedies import apply
    from qkeel.remedies.retrofit import export, fold, retrofit
    from qkeel.sites import find_sites
    from qkeel.spec import AttentionSpec, preset, presets

__version__ = VERSION

# Names and packages are loaded on first access, so that importing qkeel is cheap and the report works without torch.
_HOMES = {
    "AttentionSpec": "qkeel.spec",
    "Documents": "qkeel.audit",
    "Window": "qkeel.audit",
    "apply": "qkeel.remedies",
    "attention": "qkeel.ops",
    "attention_maps": "qkeel.audit",
    "check": "qkeel.audit",
    "explain": "qkeel.audit",
    "export": "qkeel.remedies.retrofit",
    "find_sites": "qkeel.sites",
    "fold": "qkeel.remedies.retrofit",
    "load": "qkeel.monitor.sinks",
    "preset": "qkeel.spec",
    "presets": "qkeel.spec",
    "retrofit": "qkeel.remedies.retrofit",
    "watch": "qkeel.monitor.watch",
}

__all__ = [
    "AttentionSpec",
    "Documents",
    "Window",
    "apply",
    "attention",
    "attention_maps",
    "audit",
    "autopilot",
    "check",
    "errors",
    "explain",
    "export",
    "find_sites",
    "fold",
    "functional",
    "integrations",
    "lab",
    "load",
    "metrics",
    "monitor",
    "nn",
    "preset",
    "presets",
    "reference",
    "remedies",
    "report",
    "retrofit",
    "sites",
    "spec",
    "watch",
]


def __getattr__(name: str) -> Any:
    name = earlier_name(__name__, name, {"explain_model": "explain"})
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    # a package.
    if name in __all__:
        return importlib.import_module(f"qkeel.{name}")
    raise AttributeError(
        f"module 'qkeel' has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
