"""COMPARE: small training runs on real text, resumable at any instant, and studies made of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkeel.lab.advice.recommendation import Recommendation, RemedyAdvice, recommend
    from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig, RunConfig
    from qkeel.lab.execution.execute import Execution, StudyResult, make_plan, run_plan, study
    from qkeel.lab.execution.merge_studies import MergedStudy, merge_studies
    from qkeel.lab.execution.workers import Shard
    from qkeel.lab.plan import Grid, LongContexts, Plan
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

# Loaded when first asked for, so that `qkeel --help` does not wait for torch.
_HOMES = {
    **dict.fromkeys(("DataConfig", "ImagesConfig", "ModelConfig", "OptimConfig", "RunConfig"), "config"),
    **dict.fromkeys(("Execution", "StudyResult", "make_plan", "run_plan", "study"), "execution.execute"),
    **dict.fromkeys(("MergedStudy", "merge_studies"), "execution.merge_studies"),
    **dict.fromkeys(("Grid", "LongContexts", "Plan"), "plan"),
    **dict.fromkeys(("Recommendation", "RemedyAdvice", "recommend"), "advice.recommendation"),
    **dict.fromkeys(("Watcher", "run"), "train_runs"),
    "Shard": "execution.workers",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkeel.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qkeel.lab.{_HOMES[name]}"), name)
