"""COMPARE: small training runs on real text that can be resumed at any point, and studies that consist of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig, RunConfig
    from qkeel.lab.execute import Execution, MergedStudy, StudyResult, make_plan, merge_studies, run_plan, study
    from qkeel.lab.executors import Shard
    from qkeel.lab.plan import Grid, LongContexts, Plan
    from qkeel.lab.recommendation import Recommendation, RemedyAdvice, recommend
    from qkeel.lab.train_runs import Watcher, run

__all__ = [
    "DataConfig",
    "Execution",
    "Grid",
    "ImagesConfig",
    "LongContexts",
    "MergedStudy",
    "ModelConfig",
    "OptimConfig",
    "Plan",
    "Recommendation",
    "RemedyAdvice",
    "RunConfig",
    "Shard",
    "StudyResult",
    "Watcher",
    "make_plan",
    "merge_studies",
    "recommend",
    "run",
    "run_plan",
    "study",
]

# Loaded on first access, so that `qkeel --help` does not wait for torch.
_HOMES = {
    **dict.fromkeys(("DataConfig", "ImagesConfig", "ModelConfig", "OptimConfig", "RunConfig"), "config"),
    **dict.fromkeys(("Execution", "StudyResult", "make_plan", "run_plan", "study"), "execute"),
    **dict.fromkeys(("MergedStudy", "merge_studies"), "execute"),
    **dict.fromkeys(("Grid", "LongContexts", "Plan"), "plan"),
    **dict.fromkeys(("Recommendation", "RemedyAdvice", "recommend"), "recommendation"),
    **dict.fromkeys(("Watcher", "run"), "train_runs"),
    "Shard": "executors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkeel.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qkeel.lab.{_HOMES[name]}"), name)
