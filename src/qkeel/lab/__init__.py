"""COMPARE: small training runs on real text, resumable at any instant, and studies made of them."""

import importlib
from typing import Any

# Loaded when first asked for, so that `qkeel --help` does not wait for torch.
_HOMES = {
    "DataConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "RunConfig": "config",
    "Execution": "engine",
    "Grid": "plan",
    "Plan": "plan",
    "Shard": "workers",
    "StudyResult": "engine",
    "Watcher": "train",
    "make_plan": "engine",
    "run": "train",
    "run_plan": "engine",
    "study": "engine",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkeel.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qkeel.lab.{_HOMES[name]}"), name)
