"""COMPARE: small training runs on real text that can be resumed at any point, and studies that consist of them.

The files from a plan to the tables:

    config               a run's configuration; studies: what each study varies, and its command's options
    plan, study_file     the runs of a study, and study.json
    execute              runs a plan, the runs that are left and those that failed; executors: joblib, Ray, Dask, Slurm;
                         run_claims: which process trains a run
    train                one run's loop; build_run: its model, optimizer and remedies; muon: one of its optimizers
    tasks                what is learned: text, second_language, images
    run_record           what a run records, and where; checkpoint: its state, from which it resumes
    lengths, angles      trained runs on longer texts
    demo, quick_demo     `qkeel demo`
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkeel.lab.build_run import learning_rate
    from qkeel.lab.checkpoint import computed_with
    from qkeel.lab.config import (
        DataConfig,
        ImagesConfig,
        ModelConfig,
        OptimConfig,
        RunConfig,
    )
    from qkeel.lab.execute import Execution, StudyResult, make_plan, run_plan, study
    from qkeel.lab.plan import Grid, LongContexts, Plan, PlannedRun, Study, product
    from qkeel.lab.run_record import Watcher
    from qkeel.lab.studies import find_study
    from qkeel.lab.train import run
    from qkeel.records import RunDirectory, RunStatus

__all__ = [
    "DataConfig",
    "Execution",
    "Grid",
    "ImagesConfig",
    "LongContexts",
    "ModelConfig",
    "OptimConfig",
    "Plan",
    "PlannedRun",
    "RunConfig",
    "RunDirectory",
    "RunStatus",
    "Study",
    "StudyResult",
    "Watcher",
    "computed_with",
    "find_study",
    "learning_rate",
    "make_plan",
    "product",
    "run",
    "run_plan",
    "study",
]

# Loaded on first access, so that `qkeel --help` does not wait for torch.
_HOMES = {
    **dict.fromkeys(
        ("DataConfig", "ImagesConfig", "ModelConfig", "OptimConfig", "RunConfig"),
        "config",
    ),
    **dict.fromkeys(
        ("Execution", "StudyResult", "make_plan", "run_plan", "study"), "execute"
    ),
    **dict.fromkeys(
        ("Grid", "LongContexts", "Plan", "PlannedRun", "Study", "product"), "plan"
    ),
    "Watcher": "run_record",
    "computed_with": "checkpoint",
    "find_study": "studies",
    "learning_rate": "build_run",
    "run": "train",
}


def __getattr__(name: str) -> object:
    if name in ("RunDirectory", "RunStatus"):
        return getattr(importlib.import_module("qkeel.records"), name)
    if name not in _HOMES:
        raise AttributeError(f"module 'qkeel.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qkeel.lab.{_HOMES[name]}"), name)
